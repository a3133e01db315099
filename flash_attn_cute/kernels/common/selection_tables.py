"""Tables of a selection: which queries select each key block, for kernels that go over key blocks.

A pick is a query and a block that it selects. Its number is ``top`` times the query's row, counted from the launch's
first, plus the block's rank. Columns are the key blocks of all sequences. A set is a selection, of a batch entry and
some heads.

Selected blocks that are no multiple of 64 keys (``config.key_bits``) may share one of the kernels' blocks, or have keys
of two. The first of a row's ranks with keys in a kernel's block is the row's pick there, with a bit for each key of the
block that the row selects and sees. The other ranks have no pick there.

The tables list the picks of each column in ascending order. They are made by a stable counting sort, in three kernels:

1. ``PickChunks``: a warp counts the picks of a chunk by their columns, which it also writes.
2. ``PickItems``: a CTA a set turns counts into places, and cuts columns into items.
3. ``PickChunks`` again: a warp writes the picks of its chunk to their places.

Lanes with picks of one column find their ranks by ``match.sync``, so that nothing depends on the order of atomics. A
table of counts has as many numbers as there are chunks and columns. Chunks grow with the number of columns
(``kernels.selection.chunk_picks``), so that it takes at most a quarter of the bytes of the picks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import bit_mask, sum_up_to_lane
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.lengths import SeqRows, last_of, offset, rows_of
from flash_attn_cute.kernels.common.score import visible_columns
from flash_attn_cute.kernels.common.workspace import carved
from flash_attn_cute.kernels.selection import ITEM_FIELDS, KEY_WORDS, LANES, PICKS_AT_ONCE, table_parts

_WARPS = 4  # of a CTA that counts or places
_COLUMNS = 2048  # whose counters a warp has in shared memory; if there are more, several warps read a chunk
_THREADS = LANES * LANES  # of a CTA that makes items
_CHUNKS_AT_ONCE = 16  # whose counts a thread reads together


class SelectionTables(NamedTuple):
    """Tables of some query rows."""

    mColumns: cute.Tensor  # (set, pick): ``columns`` if it sees no key, one more in a row of padding
    mEntries: cute.Tensor  # (set, pick): numbers of picks by columns; behind those of the last column anything
    mItems: cute.Tensor  # (set, item, 4): first entry and that behind the last, sequence, and first key of the block
    mItemSpans: cute.Tensor  # (set, column, and one behind the last): the first item of each column
    mStarts: cute.Tensor  # (set, column): the first entry of each column
    mCounts: cute.Tensor  # (set, chunk, column): picks of the chunk; and then those of the chunks before
    mKeyBits: cute.Tensor | None = None  # (set, pick, word): keys of its block, of picks of columns


@dataclass(frozen=True)
class SelectedUnit:
    """A unit, the heads of a batch entry that select together and are rows of one tile; and where its selection is."""

    config: Constexpr
    batch: Int32
    number: Int32  # among those of the batch entry
    set: Int32  # of selections

    @staticmethod
    def of(config: Any, a: Any, unit_idx: Int32) -> "SelectedUnit":
        n, units = a.numbers, a.mQ.shape[-2] // config.group
        batch, number = (n.first_unit + unit_idx) // units, (n.first_unit + unit_idx) % units
        return SelectedUnit(config, batch, number, batch % n.sets_batch * n.sets_heads + number * n.sets_heads // units)

    def head_and_entry(self, in_group: Int32) -> tuple[Int32, Int32]:
        """A head of the unit among all heads, and the batch entry in tensors: 0 if packed."""
        entry = Int32(0) if self.config.features.packed else self.batch
        return self.number * self.config.group + in_group, entry


class SelectionTableKernels:
    """The kernels that make the tables."""

    def __init__(self, config: Any):
        self.config = config
        self.kernels = PickChunks(config, places=False), PickItems(config), PickChunks(config, places=True)

    @cute.jit
    def __call__(self, a: Any, stream) -> SelectionTables:
        """Launches the kernels, if the launch is the first for its rows; later ones find the tables of the first."""
        tables = SelectionTables(**carved(a.mTables, table_parts(self.config, a.numbers), Int32))
        if a.numbers.first_unit == 0:
            for kernel in self.kernels:
                kernel(a, tables, stream)
        return tables


class PickChunks:
    """The kernel that counts the picks of each chunk and column, or that ``places`` them where the counts say.

    A warp goes over a chunk, a pick a lane at a time.
    """

    def __init__(self, config: Any, places: bool):
        self.config, self.places = config, places

    @cute.jit
    def __call__(self, a: Any, tables: SelectionTables, stream) -> None:
        """Launches the kernel: a warp a chunk of a set and ``_COLUMNS`` columns."""
        sets, chunks, columns = tables.mCounts.shape
        grid = sets * cute.ceil_div(columns, _COLUMNS) * cute.ceil_div(chunks, _WARPS)
        self.kernel(a, tables).launch(grid=[grid, 1, 1], block=[LANES * _WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: Any, tables: SelectionTables) -> None:
        index, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        counters = smem.allocate_tensor(Int32, cute.make_layout((_COLUMNS, _WARPS)))[None, warp]
        _, chunks, columns = tables.mCounts.shape
        groups, ranges = cute.ceil_div(chunks, _WARPS), cute.ceil_div(columns, _COLUMNS)
        chunk, first = index % groups * _WARPS + warp, index // groups % ranges * _COLUMNS
        which, num = index // (groups * ranges), cutlass.min(columns - first, _COLUMNS)
        if chunk < chunks:
            for i in cutlass.range(lane, num, LANES, unroll=4):
                column, counter = first + i, Int32(0)
                if const_expr(self.places):  # the place of the column's first pick in the chunk
                    counter = tables.mStarts[which, column] + tables.mCounts[which, chunk, column]
                counters[i] = counter
            cute.arch.sync_warp()
            start = chunk * a.numbers.chunk_picks
            stop = cutlass.min(start + a.numbers.chunk_picks, tables.mColumns.shape[1])
            for some in cutlass.range(start, stop, PICKS_AT_ONCE, unroll=1):
                picks = [some + i + lane for i in range(0, PICKS_AT_ONCE, LANES)]
                found = [self._read(a, tables, which, cutlass.min(pick, stop - 1)) for pick in picks]
                for i in cutlass.range_constexpr(len(picks)):
                    column = found[i]
                    if const_expr(not self.places):
                        column = self._column_of(a, tables, which, picks[i], stop, first, found[i])
                    column = cutlass.select_(picks[i] < stop, column, Int32(-1))
                    self._take(tables, which, picks[i], column - first, num, counters)
            if const_expr(not self.places):
                for i in cutlass.range(lane, num, LANES, unroll=4):
                    column = first + i
                    tables.mCounts[which, chunk, column] = counters[i]

    @cute.jit
    def _take(
        self, tables: SelectionTables, which: Int32, pick: Int32, column: Int32, num: Int32, counters: cute.Tensor
    ) -> None:
        """Counts each lane's pick, if its column is one of ``num``. Where picks are placed, a count is a place."""
        is_counted = column >= 0 and column < num
        peers = Int32(cute.arch.match_sync(-1, column))
        rank = cute.arch.popc(peers & ((1 << cute.arch.lane_idx()) - 1))
        place = Int32(0)
        if is_counted:
            place = counters[column] + rank
            if const_expr(self.places):
                tables.mEntries[which, place] = pick
        cute.arch.sync_warp()
        if is_counted and rank == 0:
            counters[column] = place + cute.arch.popc(peers)
        cute.arch.sync_warp()

    def _read(self, a: Any, tables: SelectionTables, which: Int32, pick: Int32) -> Int32:
        """The selected block that a pick's is a part of; where picks are placed, the pick's column."""
        if self.places:
            return tables.mColumns[which, pick]
        n = a.numbers
        row, rank = n.first_row + pick // n.top, pick % n.top
        return a.mSelected[which // n.sets_heads, which % n.sets_heads, row, rank // n.parts]

    @cute.jit
    def _column_of(
        self, a: Any, tables: SelectionTables, which: Int32, pick: Int32, stop: Int32, first: Int32, selected: Int32
    ) -> Int32:
        """Column of a pick, which the warps of the first columns write if the pick is below ``stop``."""
        n, size = a.numbers, self.config.tile_n
        row, rank = n.first_row + cutlass.min(pick, stop - 1) // n.top, pick % n.top
        first_column, start, stop_key, hidden = self._visible(a, row)
        ranks = a.mSelected[which // n.sets_heads, which % n.sets_heads, row, None]
        part, rank = rank % n.parts, rank // n.parts
        before = ranks[rank - 1] if rank > 0 else Int32(-1)  # of the ranks, which ascend and may repeat
        if const_expr(self.config.key_bits):
            block = selected * n.block // size + part
            bits = self._bits(n, ranks, rank, before, block * size, start, stop_key)
            is_seen = bits[0] != 0
            for word in cutlass.range_constexpr(1, KEY_WORDS):
                is_seen = is_seen or bits[word] != 0
            if is_seen and first == 0 and pick < stop:
                cute.autovec_copy(bits, tables.mKeyBits[which, pick, None])
        else:
            block = selected * n.parts + part
            is_seen = start < stop_key and (block + 1) * size > start and block * size < stop_key
            is_seen = is_seen and before != selected
        column = first_column + block if is_seen else hidden
        if first == 0 and pick < stop:
            tables.mColumns[which, pick] = column
        return column

    @cute.jit
    def _bits(
        self, n: Any, ranks: cute.Tensor, rank: Int32, before: Int32, first_key: Int32, start: Int32, stop: Int32
    ) -> cute.Tensor:
        """Bits of the keys of a block that a row selects and sees; none if an earlier rank has keys in the block.

        ``ranks`` are the row's selected blocks, in ascending order; ``before`` is that of the rank before, or -1. The
        kernel's block begins at ``first_key``, and the row sees keys start .. stop.
        """
        bits = cute.make_rmem_tensor(KEY_WORDS, Int32)
        bits.fill(0)
        lower, upper = cutlass.max(start - first_key, 0), cutlass.min(stop - first_key, self.config.tile_n)
        is_first = (before + 1) * n.block <= first_key
        first = ranks[rank] * n.block - first_key  # of the next selected block
        if is_first and first + n.block > 0 and lower < upper:
            while first < upper:
                for word in cutlass.range_constexpr(KEY_WORDS):
                    begin = cutlass.max(cutlass.max(first, lower) - 32 * word, 0)
                    end = cutlass.min(first + n.block, upper) - 32 * word
                    bits[word] = bits[word] | bit_mask(begin, cutlass.max(end - begin, 0))
                rank += 1
                first = ranks[cutlass.min(rank, ranks.shape[0] - 1)] * n.block - first_key
                first = first if rank < ranks.shape[0] else upper
        return bits

    @cute.jit
    def _visible(self, a: Any, row: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """First column of a row's sequence, the keys start .. stop that it sees there, and the column of no key."""
        features, columns, sequence = self.config.features, a.numbers.columns, Int32(0)
        is_real = Boolean(True)
        if const_expr(features.packed):
            offsets, last = a.mCuSeqlensQ, a.mCuSeqlensQ.shape[0] - 2
            # It is -1 ahead of the first sequence, and one too many behind the last.
            sequence = last_of(Int32(-1), offsets.shape[0], lambda i: offset(offsets, i, a.mQ.shape[0]) <= row)
            is_real = sequence >= 0 and sequence <= last
            sequence = cutlass.max(cutlass.min(sequence, last), 0)
        q, k = _rows_of(a, sequence)
        is_real = is_real and row - q.start < q.length
        window, edges = Window.of(features, a, q.length, k.length), Edges(left=features.left, right=True)
        start, stop = visible_columns(row - q.start, Int32(0), k.length, window, edges)
        stop = stop if is_real else Int32(0)
        return _first_column(self.config, k, sequence), cutlass.max(start, 0), stop, columns if is_real else columns + 1


class PickItems:
    """The kernel that turns counts into places, and cuts columns into items of ``item_picks`` at the most."""

    def __init__(self, config: Any):
        self.config = config

    @cute.jit
    def __call__(self, a: Any, tables: SelectionTables, stream) -> None:
        self.kernel(a, tables).launch(grid=[tables.mCounts.shape[0], 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: Any, tables: SelectionTables) -> None:
        which, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sWarps = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(_THREADS // LANES))
        n, columns, picks, items = a.numbers, tables.mStarts.shape[1], Int32(0), Int32(0)
        for first in cutlass.range(0, columns, _THREADS, unroll=1):
            column, total = first + thread, Int32(0)
            if column < columns:
                total = self._sum(tables.mCounts[which, None, column])
            start, all_picks = _scanned(total, sWarps)
            item, all_items = _scanned(cute.ceil_div(total, n.item_picks), sWarps)
            if column < columns:
                tables.mStarts[which, column] = picks + start
                tables.mItemSpans[which, column] = items + item
                self._write(a, tables, which, column, items + item, picks + start, picks + start + total)
            picks, items = picks + all_picks, items + all_items
        if thread == 0:
            tables.mItemSpans[which, columns] = items
        for item in cutlass.range(items + thread, tables.mItems.shape[1], _THREADS, unroll=1):
            for i in cutlass.range_constexpr(ITEM_FIELDS):
                tables.mItems[which, item, i] = Int32(0)

    @cute.jit
    def _sum(self, mCounts: cute.Tensor) -> Int32:
        """Sum of the counts of chunks, each of which is replaced by the sum of those before."""
        total, chunks = Int32(0), mCounts.shape[0]
        counts = cute.make_rmem_tensor(_CHUNKS_AT_ONCE, Int32)
        for first in cutlass.range(0, chunks, _CHUNKS_AT_ONCE, unroll=1):
            for i in cutlass.range_constexpr(_CHUNKS_AT_ONCE):  # all in flight before the first is needed
                counts[i] = mCounts[first + i] if first + i < chunks else Int32(0)
            for i in cutlass.range_constexpr(_CHUNKS_AT_ONCE):
                if first + i < chunks:
                    mCounts[first + i] = total
                total += counts[i]
        return total

    @cute.jit
    def _write(
        self, a: Any, tables: SelectionTables, which: Int32, column: Int32, item: Int32, start: Int32, stop: Int32
    ) -> None:
        """Writes the items of a column with the entries start .. stop."""
        sequence, first_key, size = Int32(0), column * self.config.tile_n, a.numbers.item_picks
        if const_expr(self.config.features.packed):
            sequence = last_of(  # whose first column is not behind this one
                sequence,
                a.mCuSeqlensK.shape[0] - 1,
                lambda i: _first_column(self.config, _rows_of(a, i)[1], i) <= column,
            )
            first_key = (column - _first_column(self.config, _rows_of(a, sequence)[1], sequence)) * self.config.tile_n
        for first in cutlass.range(start, stop, size, unroll=1):
            fields = first, cutlass.min(first + size, stop), sequence, first_key
            for i in cutlass.range_constexpr(ITEM_FIELDS):
                tables.mItems[which, item, i] = fields[i]
            item += 1


def _rows_of(a: Any, sequence: Int32) -> tuple[SeqRows, SeqRows]:
    """Queries and keys of a sequence."""
    return rows_of(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, sequence), rows_of(a.mK, a.mCuSeqlensK, a.mSeqUsedK, sequence)


def _first_column(config: Any, k: SeqRows, sequence: Int32) -> Int32:
    """First column of a sequence: never fewer than it needs lie ahead of the next one's."""
    return k.start // config.tile_n + sequence


@cute.jit
def _scanned(x: Int32, sWarps: cute.Tensor) -> tuple[Int32, Int32]:
    """Sum of the numbers of all threads before this one, and of all threads of the CTA."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    until = sum_up_to_lane(x)
    if lane == LANES - 1:
        sWarps[warp] = until
    cute.arch.sync_threads()
    warps = sWarps[lane]
    until_warps = sum_up_to_lane(warps)
    cute.arch.sync_threads()  # before a next call
    before = cute.arch.shuffle_sync(until_warps - warps, warp) + until - x
    return before, cute.arch.shuffle_sync(until_warps, LANES - 1)
