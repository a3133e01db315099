"""Load balance of packed documents: rows for each rank, so that all compute nearly as many visible pairs.

A pair is a query and a key that it attends to. Sums of pairs have closed forms, so that the cost does not depend on
the number of rows.

Rows in the order of their cost are dealt from both ends. If layers have several windows, ranks have to be in balance
under each of them. Rows are then dealt from both ends of strata, in which the costs under all windows grow together.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, TypeAlias

from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.spec import Window

# The document (-1: padding), the first row and the row behind the last one, both counted over all packed rows.
DocumentRows: TypeAlias = tuple[int, int, int]

# Error of the first ranks' summed area that is accepted to save a cut, as a part of one rank's area.
_TOLERANCE = 0.005
# Error of a row's cost under one window, as a part of the mean cost of all rows, if it were linear in the summed cost.
_NONLINEARITY = 0.01
# Excess of the largest area over the mean that is accepted to save communication.
_ACCEPTED_IMBALANCE = 0.015


class Document(NamedTuple):
    """Rows of a document, the first of them counted over all packed rows."""

    start: int
    queries: int  # real ones
    keys: int
    owned: int  # rows that are no padding; those behind the queries cost nothing


def balanced_rows(
    documents: Sequence[Document], total: int, windows: Sequence[Window], num_ranks: int
) -> list[list[DocumentRows]]:
    """The rows of each rank, unordered; some of them are empty.

    Documents are in the order of their rows, of which there are ``total``, padding included. Ranks are in balance under
    each of the windows, (left, right) with ``causal`` folded in.
    """
    bands = [tuple(Band.of(window, x.queries, x.keys) for window in windows) for x in documents]
    without_queries = list(_rows_without_queries(documents, total, len(windows)))

    def assigned(*, by_slope: bool) -> list[list[DocumentRows]]:
        return _assign([*_row_runs(documents, bands, by_slope=by_slope), *without_queries], num_ranks)

    # Under a window, runs of rows have fewer neighbours than pairs of rows. Only a document's first rows cost less.
    if all(left is not None for left, _ in windows):
        uncut = assigned(by_slope=False)
        if _imbalance(uncut, documents, bands) <= _ACCEPTED_IMBALANCE:
            return uncut
    return assigned(by_slope=True)


@dataclass(frozen=True)
class _RowRun:
    """Consecutive rows of a document, or of padding, in the order in which ranks take them."""

    document: int
    origin: int  # the row of the document's first query
    start: int  # queries of the document
    stop: int
    bands: tuple[Band, ...]  # one a window
    length_k: int
    in_pairs: bool  # from both ends inwards: an early row, a late one, the next early one

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def areas(self, count: int) -> list[int]:
        """The number of visible pairs of the first ``count`` rows taken, under each window."""
        early, late = self._split(count)
        areas = [band.area(self.start, self.start + early, self.length_k) for band in self.bands]
        if not late:
            return areas
        return [
            area + band.area(self.stop - late, self.stop, self.length_k)
            for area, band in zip(areas, self.bands, strict=True)
        ]

    @cached_property
    def whole(self) -> list[int]:
        """The number of visible pairs of all rows, under each window."""
        return self.areas(self.length)

    def costs(self) -> list[float]:
        """The mean number of a row's visible pairs, under each window."""
        return [area / self.length for area in self.whole]

    def rows(self, first: int, last: int) -> Iterable[DocumentRows]:
        """Rows number ``first`` to before ``last`` in the order of taking."""
        (early, late), (early_stop, late_stop) = self._split(first), self._split(last)
        start, stop = self.origin + self.start, self.origin + self.stop
        yield self.document, start + early, start + early_stop
        yield self.document, stop - late_stop, stop - late

    def _split(self, count: int) -> tuple[int, int]:
        return (count - count // 2, count // 2) if self.in_pairs else (count, 0)


def _row_runs(documents: Sequence[Document], bands: Sequence[tuple[Band, ...]], *, by_slope: bool) -> Iterable[_RowRun]:
    """One run a document; by slope, runs whose rows, or whose pairs of an early and a late row, cost the same."""
    for number, (document, of_document) in enumerate(zip(documents, bands, strict=True)):
        length, length_k = document.queries, document.keys
        edges = {0, length}
        if by_slope:
            # Either end of a query's keys moves with the query while it is between the document's ends.
            ends = [(band.lower, None if band.upper is None else band.upper + 1) for band in of_document]
            corners = {1 - end + shift for pair in ends for end in pair if end is not None for shift in (0, length_k)}
            edges |= {corner for corner in corners if 0 < corner < length}
        for start, stop in itertools.pairwise(sorted(edges)):
            slopes = any(
                band.area(start, start + 1, length_k) != band.area(stop - 1, stop, length_k) for band in of_document
            )
            yield _RowRun(number, document.start, start, stop, of_document, length_k, in_pairs=by_slope and slopes)


def _rows_without_queries(documents: Sequence[Document], total: int, num_windows: int) -> Iterable[_RowRun]:
    """Runs of rows of documents that have keys alone, and of rows that no document owns."""
    bands, end = (Band(None, None),) * num_windows, 0
    for number, (start, queries, _, owned) in enumerate(documents):
        if end < start:
            yield _RowRun(-1, 0, end, start, bands, 0, in_pairs=False)
        if queries < owned:
            yield _RowRun(number, start, queries, owned, bands, 0, in_pairs=False)
        end = start + owned
    yield _RowRun(-1, 0, end, total, bands, 0, in_pairs=False)


class _RunsByCost:
    """Runs side by side, in ascending order of their mean cost a row, which is summed over windows."""

    def __init__(self, runs: Iterable[_RowRun]) -> None:
        self.runs = sorted((run for run in runs if run.length), key=lambda run: sum(run.costs()))
        self.offsets = (0, *itertools.accumulate(run.length for run in self.runs))
        self.areas = (0, *itertools.accumulate(sum(run.whole) for run in self.runs))

    def strata(self) -> "list[_RunsByCost]":
        """These runs in parts, in each of which the cost under any window is linear in the summed cost, nearly."""
        rows = max(1, self.offsets[-1])
        by_window = zip(*(run.whole for run in self.runs), strict=True)
        tolerances = [_NONLINEARITY * sum(areas) / rows for areas in by_window]
        parts: list[list[_RowRun]] = []
        cone = _Cone([], tolerances)
        for run in self.runs:
            costs = run.costs()
            if parts and cone.narrow(costs):
                parts[-1].append(run)
            else:
                parts.append([run])
                cone = _Cone(costs, tolerances)
        return [_RunsByCost(part) for part in parts]

    def area(self, first: int, last: int) -> int:
        """The number of visible pairs of rows first .. last in this order."""
        return self._area_before(last) - self._area_before(first)

    def _area_before(self, row: int) -> int:
        i = bisect_right(self.offsets, row) - 1
        return self.areas[i] + (sum(self.runs[i].areas(row - self.offsets[i])) if row > self.offsets[i] else 0)

    def run_ends_around(self, row: int) -> tuple[int, int]:
        """The ends of runs before and after a row."""
        i = bisect_right(self.offsets, row)
        return self.offsets[i - 1], self.offsets[min(i, len(self.runs))]

    def rows(self, first: int, last: int) -> Iterable[DocumentRows]:
        """Rows first .. last in this order, as rows of documents."""
        i = bisect_right(self.offsets, first) - 1
        while first < last:
            stop = min(last, self.offsets[i + 1])
            yield from self.runs[i].rows(first - self.offsets[i], stop - self.offsets[i])
            first, i = stop, i + 1


class _Cone:
    """The lines from one point that come close to all points so far: costs under each window, over their sum."""

    def __init__(self, costs: Sequence[float], tolerances: Sequence[float]) -> None:
        self._apex, self._tolerances = costs, tolerances
        self._slopes = [(-math.inf, math.inf)] * len(costs)

    def narrow(self, costs: Sequence[float]) -> bool:
        """Whether there are lines that come close to another point, too; they are what is left."""
        across = sum(costs) - sum(self._apex)
        slopes = []
        for cost, apex, tolerance, (least, most) in zip(costs, self._apex, self._tolerances, self._slopes, strict=True):
            if across > 0:
                least = max(least, (cost - apex - tolerance) / across)
                most = min(most, (cost - apex + tolerance) / across)
            elif abs(cost - apex) > tolerance:
                return False
            slopes.append((least, most))
        if any(least > most for least, most in slopes):
            return False
        self._slopes = slopes
        return True


def _assign(runs: Iterable[_RowRun], num_ranks: int) -> list[list[DocumentRows]]:
    """Gives each rank its part of every stratum."""
    rows: list[list[DocumentRows]] = [[] for _ in range(num_ranks)]
    extra = 0
    for stratum in _RunsByCost(runs).strata():
        each, left = divmod(stratum.offsets[-1], num_ranks)
        # The rows that are left go to the last ranks, then to those before them.
        counts = [each + ((-1 - rank - extra) % num_ranks < left) for rank in range(num_ranks)]
        extra += left
        for own, dealt in zip(rows, _deal(stratum, counts), strict=True):
            own += dealt
    return rows


def _imbalance(
    rows: Sequence[Sequence[DocumentRows]], documents: Sequence[Document], bands: Sequence[tuple[Band, ...]]
) -> float:
    """The excess of the largest area of a rank, under any window, as a part of the mean."""
    areas = [[0] * len(rows) for _ in bands[0]] if bands else []
    for rank, own in enumerate(rows):
        for number, *ends in own:
            if number >= 0:
                document = documents[number]
                start, stop = (min(row - document.start, document.queries) for row in ends)
                for of_window, band in zip(areas, bands[number], strict=True):
                    of_window[rank] += band.area(start, stop, document.keys)
    return max((max(each) * len(rows) / sum(each) - 1 for each in areas if sum(each)), default=0.0)


def _deal(ordered: _RunsByCost, counts: Sequence[int]) -> Iterable[list[DocumentRows]]:
    """Gives each rank so many rows, some from the low-cost end and some from the high-cost end.

    The remaining rows then have the mean cost of all rows, so that the next rank can be served in the same way.
    """
    low, high = 0, ordered.offsets[-1]
    share, area = ordered.area(low, high) / len(counts), 0
    for rank, num_rows in enumerate(counts):
        count = _low_cost_rows(ordered, low, high, num_rows, share * (rank + 1) - area, _TOLERANCE * share)
        first, last = low + count, high - num_rows + count
        yield [*ordered.rows(low, first), *ordered.rows(last, high)]
        area += ordered.area(low, first) + ordered.area(last, high)
        low, high = first, last


def _low_cost_rows(ordered: _RunsByCost, low: int, high: int, num_rows: int, area: float, tolerance: float) -> int:
    """The number of a rank's rows that come from the low-cost end; the others come from the high-cost end."""
    everything = ordered.area(low, high)

    @cache
    def excess(count: int) -> float:
        return everything - ordered.area(low + count, high - num_rows + count) - area

    least, most = 0, num_rows
    for count in (most, least):
        if abs(excess(count)) <= tolerance:
            return count
    if excess(most) > 0 or excess(least) < 0:  # no mixture fits: the end that comes closest
        return min(most, least, key=lambda count: abs(excess(count)))
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if excess(middle) >= 0 else (least, middle)
    # A cut through one run is better than a cut through two.
    at_run_ends = [row - low for row in ordered.run_ends_around(low + least)]
    at_run_ends += [row - high + num_rows for row in ordered.run_ends_around(high - num_rows + least)]
    close = [count for count in at_run_ends if 0 <= count <= num_rows and abs(excess(count)) <= tolerance]
    return min(close or (least, most), key=lambda count: abs(excess(count)))
