"""Load balance of packed documents: rows for each rank, so that all compute nearly as many visible pairs.

A pair is a query and a key that it attends to. Sums of pairs have closed forms, so that the cost does not depend on
the number of rows.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from flash_attn_cute.calls import validate

# The document (-1: padding), the first row and the row behind the last one, both counted over all packed rows.
DocumentRows: TypeAlias = tuple[int, int, int]

# Error of the first ranks' summed area that is accepted to save a cut, as a part of one rank's area.
_TOLERANCE = 0.005
# Excess of the largest area over the mean that is accepted to save communication.
_ACCEPTED_IMBALANCE = 0.015


class Band(NamedTuple):
    """Visible keys of a document: query i attends to keys i + lower <= j <= i + upper (None: unbounded)."""

    lower: int | None
    upper: int | None

    @classmethod
    def of(cls, window: validate.Window, seqlen_q: int, seqlen_k: int) -> "Band":
        """The bottom-right aligned window of a document, ``causal`` folded in."""
        (left, right), offset = window, seqlen_k - seqlen_q
        return cls(None if left is None else offset - left, None if right is None else offset + right)

    def area(self, start: int, stop: int, seqlen_k: int) -> int:
        """The number of visible pairs of queries start .. stop."""
        hidden = 0 if self.lower is None else _sum_clamped(start + self.lower, stop + self.lower, seqlen_k)
        if self.upper is None:
            return (stop - start) * seqlen_k - hidden
        return _sum_clamped(start + self.upper + 1, stop + self.upper + 1, seqlen_k) - hidden


def balanced_rows(
    offsets: Sequence[int],
    total: int,
    used_q: Sequence[int],
    used_k: Sequence[int],
    window: validate.Window,
    num_ranks: int,
) -> list[list[DocumentRows]]:
    """The rows of each rank, unordered; some of them are empty.

    Args:
        offsets: where each document starts and, last, where all of them end.
        total: the rows, padding behind the last document included.
        used_q: the real rows of each document; the others are padding.
        used_k: the real keys of each document.
        window: (left, right), ``causal`` folded in.
        num_ranks: at least 1.
    """
    padding = list(_padding(offsets, used_q, total))
    uncut, by_slope = (
        _assign([*_row_runs(offsets, used_q, used_k, window, by_slope=by_slope), *padding], num_ranks)
        for by_slope in (False, True)
    )
    # Under a window, runs of rows have fewer neighbours than pairs of rows. Only a document's first rows cost less.
    accepts_uncut = window[0] is not None and uncut.imbalance <= _ACCEPTED_IMBALANCE
    return (uncut if accepts_uncut else by_slope).rows


def _sum_clamped(start: int, stop: int, most: int) -> int:
    """The sum of the ints start .. stop, each clamped to 0 .. most."""
    return _sum_below(stop, most) - _sum_below(start, most)


def _sum_below(stop: int, most: int) -> int:
    """The sum of the ints 0 .. stop, each at most ``most``."""
    if stop <= 0:
        return 0
    ramp = min(stop, most + 1)
    return ramp * (ramp - 1) // 2 + (stop - ramp) * most


@dataclass(frozen=True, slots=True)
class _RowRun:
    """Consecutive rows of a document, or of padding, in the order in which ranks take them."""

    document: int
    origin: int  # the row of the document's first query
    start: int  # queries of the document
    stop: int
    band: Band
    length_k: int
    in_pairs: bool  # from both ends inwards: an early row, a late one, the next early one

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def area(self, count: int) -> int:
        """The number of visible pairs of the first ``count`` rows taken."""
        early, late = self._split(count)
        area = self.band.area(self.start, self.start + early, self.length_k)
        return area + self.band.area(self.stop - late, self.stop, self.length_k) if late else area

    def rows(self, first: int, last: int) -> Iterable[DocumentRows]:
        """Rows number ``first`` to before ``last`` in the order of taking."""
        (early, late), (early_stop, late_stop) = self._split(first), self._split(last)
        start, stop = self.origin + self.start, self.origin + self.stop
        yield self.document, start + early, start + early_stop
        yield self.document, stop - late_stop, stop - late

    def _split(self, count: int) -> tuple[int, int]:
        return (count - count // 2, count // 2) if self.in_pairs else (count, 0)


def _row_runs(
    offsets: Sequence[int], used_q: Sequence[int], used_k: Sequence[int], window: validate.Window, *, by_slope: bool
) -> Iterable[_RowRun]:
    """One run a document; by slope, runs whose rows, or whose pairs of an early and a late row, cost the same."""
    for document, (origin, length, length_k) in enumerate(zip(offsets[:-1], used_q, used_k, strict=True)):
        band = Band.of(window, length, length_k)
        edges = {0, length}
        if by_slope:
            # Either end of a query's keys moves with the query while it is between the document's ends.
            ends = (band.lower, None if band.upper is None else band.upper + 1)
            corners = {1 - end + shift for end in ends if end is not None for shift in (0, length_k)}
            edges |= {corner for corner in corners if 0 < corner < length}
        for start, stop in itertools.pairwise(sorted(edges)):
            slopes = band.area(start, start + 1, length_k) != band.area(stop - 1, stop, length_k)
            yield _RowRun(document, origin, start, stop, band, length_k, in_pairs=by_slope and slopes)


def _padding(offsets: Sequence[int], used_q: Sequence[int], total: int) -> Iterable[_RowRun]:
    """Runs of rows that no document owns."""
    stops = [start + length for start, length in zip(offsets[:-1], used_q, strict=True)]
    for start, stop in zip((0, *stops), (*offsets[:-1], total), strict=True):
        yield _RowRun(-1, 0, start, stop, Band(None, None), 0, in_pairs=False)


class _RunsByCost:
    """Runs side by side, in ascending order of their mean cost a row."""

    def __init__(self, runs: Iterable[_RowRun]) -> None:
        self.runs = sorted((run for run in runs if run.length), key=lambda run: run.area(run.length) / run.length)
        self.offsets = (0, *itertools.accumulate(run.length for run in self.runs))
        self.areas = (0, *itertools.accumulate(run.area(run.length) for run in self.runs))

    def area(self, first: int, last: int) -> int:
        """The number of visible pairs of rows first .. last in this order."""
        return self._area_before(last) - self._area_before(first)

    def _area_before(self, row: int) -> int:
        i = bisect_right(self.offsets, row) - 1
        return self.areas[i] + (self.runs[i].area(row - self.offsets[i]) if row > self.offsets[i] else 0)

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


class _Assignment(NamedTuple):
    """The rows of each rank, and the excess of the largest area as a part of the mean."""

    rows: list[list[DocumentRows]]
    imbalance: float


def _assign(runs: Iterable[_RowRun], num_ranks: int) -> _Assignment:
    """Gives each rank rows from the low-cost end and from the high-cost end.

    The remaining rows then have the mean cost of all rows, so that the next rank can be served in the same way.
    """
    ordered = _RunsByCost(runs)
    low, high = 0, ordered.offsets[-1]
    share = ordered.area(low, high) / num_ranks
    rows: list[list[DocumentRows]] = []
    areas: list[int] = []
    for rank in range(num_ranks):
        num_rows = (high - low) // (num_ranks - rank)
        count = _low_cost_rows(ordered, low, high, num_rows, share * (rank + 1) - sum(areas), _TOLERANCE * share)
        first, last = low + count, high - num_rows + count
        rows.append([*ordered.rows(low, first), *ordered.rows(last, high)])
        areas.append(ordered.area(low, first) + ordered.area(last, high))
        low, high = first, last
    return _Assignment(rows, max(areas) / share - 1 if share else 0.0)


def _low_cost_rows(ordered: _RunsByCost, low: int, high: int, num_rows: int, area: float, tolerance: float) -> int:
    """The number of a rank's rows that come from the low-cost end; the others come from the high-cost end."""

    def excess(count: int) -> float:
        return ordered.area(low, low + count) + ordered.area(high - num_rows + count, high) - area

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
