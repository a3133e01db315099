"""The keys and queries of each rank, and the keys it needs from others: documents, positions and rows, on the host."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flash_attn_cute.distributed.packed_calls import Part, Run
from flash_attn_cute.distributed.sharding import Sharding
from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.spec import Window

# Positions (start, stop) of each document, in order and apart.
Ranges = dict[int, list[tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Layout:
    """Queries and keys of an attention over some ranks."""

    queries: Sharding  # the rows of queries
    keys: Sharding  # the rows of keys and values; may be the same object
    lengths_q: tuple[int, ...]  # the real queries of each document
    lengths_k: tuple[int, ...]  # the real keys of each document
    bands: tuple[Band, ...]  # what is visible of each document

    @classmethod
    def of(
        cls,
        queries: Sharding,
        keys: Sharding,
        lengths_q: tuple[int, ...],
        lengths_k: tuple[int, ...],
        window: Window,
    ) -> "Layout":
        """The layout of documents of these real lengths under a window."""
        bands = tuple(Band.of(window, *lengths) for lengths in zip(lengths_q, lengths_k, strict=True))
        return cls(queries, keys, lengths_q, lengths_k, bands)

    @property
    def num_ranks(self) -> int:
        return self.queries.num_ranks

    @cached_property
    def areas(self) -> list[int]:
        """The number of visible pairs of each document."""
        each = zip(self.bands, self.lengths_q, self.lengths_k, strict=True)
        return [band.area(0, length_q, length_k) for band, length_q, length_k in each]

    @cached_property
    def queries_of(self) -> list[dict[int, list[Run]]]:
        """The real queries of each rank, in its own rows."""
        return _runs(self.queries, self.lengths_q)

    @cached_property
    def keys_of(self) -> list[dict[int, list[Run]]]:
        """The real keys of each rank, in its own rows."""
        is_same = self.keys is self.queries and self.lengths_k == self.lengths_q
        return self.queries_of if is_same else _runs(self.keys, self.lengths_k)

    def padding_of(self, rank: int) -> list[tuple[int, int]]:
        """The rows (start, stop) of a rank that are no queries of any document."""
        runs = [run for document in self.queries_of[rank].values() for run in document]
        starts = [0, *(stop for _, stop in rows_of(runs))]
        stops = [*(run.row for run in runs), self.queries.num_rows(rank)]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    @cached_property
    def needed_by(self) -> list[Ranges]:
        """The keys that the queries of each rank attend to."""
        return [self._needed(queries) for queries in self.queries_of]

    def _needed(self, queries: Mapping[int, Sequence[Run]]) -> Ranges:
        needed: Ranges = {}
        for document, runs in queries.items():
            band, length = self.bands[document], self.lengths_k[document]
            seen = (band.keys(run.start, run.stop, length) for run in runs)
            ranges = union((start, stop) for start, stop in seen if start < stop)
            if ranges:
                needed[document] = ranges
        return needed

    def whole_documents(self, rank: int) -> dict[int, Part]:
        """The documents of which a rank has all queries and all keys, each in its own rows, under the full window."""
        queries, keys = self.queries_of[rank], self.keys_of[rank]
        whole = {}
        for document, q in queries.items():
            k, band = keys.get(document, ()), self.bands[document]
            length_q, length_k = self.lengths_q[document], self.lengths_k[document]
            if k and _num_rows(q) == length_q and _num_rows(k) == length_k:
                offset = length_k - length_q
                left = None if band.lower is None else offset - band.lower
                right = None if band.upper is None else band.upper - offset
                whole[document] = Part(q[0].row, q[0].row + length_q, k[0].row, k[0].row + length_k, left, right)
        return whole

    @cached_property
    def _needing(self) -> dict[int, list[tuple[int, list[tuple[int, int]]]]]:
        """For each document the ranks that need keys of it, and which."""
        found: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}
        for rank, needed in enumerate(self.needed_by):
            for document, ranges in needed.items():
                found.setdefault(document, []).append((rank, ranges))
        return found

    def travelling(self) -> list[dict[int, list[Run]]]:
        """For each rank, its keys that any other rank needs, in its own rows."""
        found = []
        for owner, held in enumerate(self.keys_of):
            others = {
                document: union(x for rank, ranges in self._needing.get(document, ()) if rank != owner for x in ranges)
                for document in held
            }
            found.append(common(others, held))
        return found

    def hops(self) -> list[int]:
        """The number of ranks behind each rank, in a ring, that still need its keys."""
        found, size = [], self.num_ranks
        for owner, held in enumerate(self.keys_of):
            ranks = {rank for document in held for rank, _ in self._needing.get(document, ())}
            farthest_first = sorted(((rank - owner) % size for rank in ranks), reverse=True)
            needed = ((t, self.needed_by[(owner + t) % size]) for t in farthest_first)
            found.append(next((t for t, keys in needed if common(keys, held)), 0))
        return found


def common(needed: Ranges, held: Mapping[int, Sequence[Run]]) -> dict[int, list[Run]]:
    """The positions both needed and held, in order, in the holder's rows."""
    found: dict[int, list[Run]] = {}
    for document in sorted(needed.keys() & held.keys()):
        runs = [
            Run(max(start, run.start), min(stop, run.stop), run.row + max(start - run.start, 0))
            for start, stop in needed[document]
            for run in held[document]
            if max(start, run.start) < min(stop, run.stop)
        ]
        if runs:
            found[document] = runs
    return found


def side_by_side(needed: Mapping[int, Iterable[tuple[int, ...]]]) -> tuple[dict[int, list[Run]], int]:
    """Rows of keys of each document, (start, stop, ...), concatenated in this order, and the number of rows."""
    runs: dict[int, list[Run]] = {}
    row = 0
    for document, ranges in needed.items():
        for start, stop, *_ in ranges:
            runs.setdefault(document, []).append(Run(start, stop, row))
            row += stop - start
    return runs, row


def rows_of(runs: Iterable[Run]) -> list[tuple[int, int]]:
    """The rows (start, stop) of runs."""
    return [(run.row, run.row + run.stop - run.start) for run in runs]


def _num_rows(runs: Iterable[Run]) -> int:
    return sum(run.stop - run.start for run in runs)


def union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (start, stop) in order, those that touch as one."""
    united: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], stop)
        else:
            united.append((start, stop))
    return united


def _runs(sharding: Sharding, lengths: Sequence[int]) -> list[dict[int, list[Run]]]:
    """The real rows of each rank, in its own rows."""
    found = []
    for segments in sharding.segments:
        runs: dict[int, list[Run]] = {}
        row = 0
        for document, first, last in segments:
            if document >= 0:
                origin, length = sharding.cu_seqlens[document], lengths[document]
                start, stop = first - origin, min(last - origin, length)
                if start < stop:
                    runs.setdefault(document, []).append(Run(start, stop, row))
            row += last - first
        found.append(runs)
    return found
