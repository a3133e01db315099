"""Tiles of a mask, as a kernel needs them: a code for each tile, and bits for partial tiles.

Kernels of their own read every element of a mask once, whatever its strides. For the main kernel, a mask that many
batch entries or heads share costs a select where it masks something, and fully masked tiles cost nothing. The bits
include windows and sequence ends, so the main kernel tests no edge.

A block mask brings its own lists, and tiles of bits row by row. Only these are reordered for the main kernel, and not
even these where a thread has the scores of one query.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import BLOCK, BlockArguments, ForwardArguments
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.block_lists import EMPTY, FULL, Sharing, Tables, as_rows, num_blocks
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.score_tensors import keys_of, part_of
from flash_attn_cute.kernels.common.workspace import carved

SEEN, ALL_SEEN = 0b0001, 0b0100  # of the kind of a half of the keys, for the first half of the queries
_WARPS = 8
_AT_ONCE = 4  # rows of a warp, whose elements are read together
_VECTOR = 16  # elements, and bytes, that a thread reads together where it can


class _Tiles:
    """Layout of tiles of bits, which both kernels that make them share. ``config`` has features and mask_tile."""

    def __init__(self, config: Any):
        self.config, self.tile = config, config.mask_tile
        self.words_a_row = -(-self.tile.keys // 32)

    @cute.jit
    def _write_bits(self, sRows: cute.Tensor, mBits: cute.Tensor, tile: Int32, thread: Int32) -> None:
        """Writes a tile's bits in the order of a thread's scores.

        A thread has one row, or two rows 8 apart with pairs of columns 8 apart. ``sRows``: (query, 32 keys).
        """
        t = self.tile
        columns_a_row = t.columns // 4  # of a thread
        for first in cutlass.range(thread // 128, t.warpgroups, _WARPS // 4, unroll=1):
            within = thread % 128
            words = cute.make_rmem_tensor(t.words, Int32)
            if const_expr(t.row_a_thread and t.rows_are_keys):
                words.fill(0)
                key, column = 128 * (first // t.sharing) + within, first % t.sharing * t.columns
                for c in cutlass.range_constexpr(t.columns):
                    bit = sRows[column + c, key // 32] >> (key % 32) & 1
                    words[c // 32] = words[c // 32] | bit << c % 32
            elif const_expr(t.row_a_thread):
                for w in cutlass.range_constexpr(t.words):
                    words[w] = sRows[128 * first + within, w]
            else:
                words.fill(0)
                for r in cutlass.range_constexpr(2):
                    row = 64 * first + within // 32 * 16 + within % 32 // 4 + 8 * r
                    for c in cutlass.range_constexpr(columns_a_row):
                        column, i = c // 2 * 8 + c % 2 + within % 4 * 2, r * columns_a_row + c
                        query, key = (column, row) if const_expr(t.rows_are_keys) else (row, column)
                        bit = sRows[query, key // 32] >> (key % 32) & 1
                        words[i // 32] = words[i // 32] | bit << i % 32
            cute.autovec_copy(words, mBits[Int64(tile), first, within, None])


class MaskTiles(_Tiles):
    """The kernel that reads the mask of a pass. One CTA a tile."""

    def __init__(self, config: Any):
        super().__init__(config)
        assert self.tile.rows_of_queries % (_WARPS * _AT_ONCE) == 0  # as many rows are read and stored at a time

    @cute.jit
    def __call__(self, a: Any, mCodes: cute.Tensor, mBits: cute.Tensor, stream) -> None:
        """Launches the kernel, which fills mCodes (row of tiles, block) and mBits (tile, warpgroup, thread, word).

        A code is ``FULL``, ``EMPTY``, or the index of a tile of bits.
        """
        sharing = Sharing.of(a.numbers)
        grid = sharing.sets * self.tiles_a_set(a) * mCodes.shape[1]
        self.kernel(a, mCodes, mBits).launch(grid=[grid, 1, 1], block=[32 * _WARPS, 1, 1], stream=stream)

    def tiles_a_set(self, a: Any) -> Int32:
        """Number of query tiles of one head and, if dense, of one batch entry."""
        if self.config.features.packed:
            return tiles.num_tiles(a.mQ, 1, a.mCuSeqlensQ, self.tile.queries)
        return Sharing.of(a.numbers).tiles

    @cute.jit
    def tile_of(self, a: Any, tile: Int32, batch: Int32) -> tuple[SeqRows, SeqRows, Int32, Int32]:
        """Queries and keys of a tile's sequence, its first query, and its row of codes."""
        if const_expr(self.config.features.packed):
            order = tiles.Order(last_first=False)
            work, q = tiles.row_tile(tile, a.mQ, 1, a.mCuSeqlensQ, a.mSeqUsedQ, self.tile.queries, order)
            length, k = Int32(0), SeqRows(Int32(0), Int32(0), Int32(0))
            if work.batch >= 0:
                length, k = q.length, keys_of(a, work.batch)
            return SeqRows(q.start, length), k, work.first_row, work.block
        else:
            q, k = rows_of(a.mQ, None, None, batch), rows_of(a.mK, None, None, batch)
            return q, k, tile * self.tile.queries, tile

    @cute.kernel
    def kernel(self, a: Any, mCodes: cute.Tensor, mBits: cute.Tensor) -> None:
        index, _, _ = cute.arch.block_idx()
        sharing, blocks, tiles_a_set = Sharing.of(a.numbers), mCodes.shape[1], self.tiles_a_set(a)
        block, tile, which = index % blocks, index // blocks % tiles_a_set, index // (blocks * tiles_a_set)
        head, batch = which % sharing.heads, which // sharing.heads
        q, k, first_query, row = self.tile_of(a, tile, batch)
        if first_query < q.length:
            gMask = part_of(a, a.mMask, q, batch)
            number = which * sharing.tiles + row
            t = self.tile
            thread, _, _ = cute.arch.thread_idx()
            warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
            smem = cutlass.memory.SmemAllocator()
            sRows = smem.allocate_tensor(Int32, cute.make_layout((t.rows_of_queries, self.words_a_row)))
            sFound = smem.allocate_tensor(Int32, cute.make_layout((_WARPS, 2)))
            first_key = block * t.keys
            rows = _Rows(a.numbers, gMask, sRows, head, first_query, q.length, first_key, k.length)
            some, every = Boolean(False), Boolean(True)
            if self._has_vectors(rows, warp, lane):
                some, every = self._read_vectors(rows, warp, lane)
            else:
                some, every = self._read_elements(rows, warp, lane)
            if lane == 0:
                sFound[warp, 0], sFound[warp, 1] = Int32(some), Int32(every)
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(_WARPS):
                some, every = some or sFound[i, 0] != 0, every and sFound[i, 1] != 0
            tile = number * mCodes.shape[1] + block
            if thread == 0:
                code = Int32(FULL) if every else tile
                mCodes[number, block] = code if some else Int32(EMPTY)
            if some and not every:
                self._write_bits(sRows, mBits, tile, thread)

    @cute.jit
    def _has_vectors(self, rows: "_Rows", warp: Int32, lane: Int32) -> Boolean:
        """Whether a warp can read its rows by 16 bytes: keys next to each other, and 128 of them in whole vectors."""
        t = self.tile
        found = Boolean(False)
        if const_expr(t.keys == 8 * _VECTOR):
            found = rows.gMask.stride[2] == 1 and rows.first_key + t.keys <= rows.gMask.shape[2]
            for i in cutlass.range_constexpr(0, t.rows_of_queries, 32):
                gRow, _, _, _ = self._row(rows, i + lane // 8 * _WARPS + warp)
                found = found and (gRow.iterator + rows.first_key).toint() % _VECTOR == 0
            found = cute.arch.vote_all_sync(found)
        return found

    def _row(self, rows: "_Rows", r: Int32) -> tuple[cute.Tensor, Int32, Int32, Boolean]:
        """A row of the tile, which keys of it are visible, start .. stop, and whether it can hide anything."""
        t, n = self.tile, rows.numbers
        query, shift = rows.first_query + r // t.group, rows.k_length - rows.q_length
        is_query = query < rows.q_length
        gRow = rows.gMask[rows.head * t.group + r % t.group, cutlass.min(query, rows.q_length - 1), None]
        stop = cutlass.min(rows.k_length, query + shift + n.window_right + 1)
        stop = cutlass.select_(is_query, cutlass.min(stop, rows.first_key + t.keys), Int32(0))
        # A row that is none hides nothing of a tile of queries, which does not store what becomes of it.
        is_real = Boolean(True) if const_expr(t.rows_are_keys) else is_query
        return gRow, query + shift - n.window_left, stop, is_real

    @cute.jit
    def _read_vectors(self, rows: "_Rows", warp: Int32, lane: Int32) -> tuple[Boolean, Boolean]:
        """Reads a warp's rows, eight lanes each; returns whether some element is visible, and whether all are."""
        t = self.tile
        vectors = cute.make_rmem_tensor((_VECTOR // 4, t.rows_of_queries // 32), Int32)
        for i in cutlass.range_constexpr(t.rows_of_queries // 32):
            gRow, _, _, _ = self._row(rows, 32 * i + lane // 8 * _WARPS + warp)
            place = (gRow.iterator + rows.first_key).toint() + lane % 8 * _VECTOR
            pointer = cute.make_ptr(Int32, place, cute.AddressSpace.gmem, assumed_align=_VECTOR)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(_VECTOR // 4)), vectors[None, i])
        some, every = Boolean(False), Boolean(True)
        for i in cutlass.range_constexpr(t.rows_of_queries // 32):
            r = 32 * i + lane // 8 * _WARPS + warp
            _, start, stop, is_real = self._row(rows, r)
            first_key = rows.first_key + lane % 8 * _VECTOR
            bits = Int32(0)
            for j in cutlass.range_constexpr(_VECTOR // 4):
                bits = bits | _bits_of_bytes(vectors[j, i]) << 4 * j
            first, end = (cutlass.min(cutlass.max(x - first_key, 0), _VECTOR) for x in (start, stop))
            bits = bits & ((1 << end) - 1) & -(1 << first)
            word = bits | cute.arch.shuffle_sync_bfly(bits, 1) << _VECTOR
            if lane % 2 == 0:
                rows.sRows[r, lane % 8 // 2] = word
                some = some or word != 0
                every = every and (word == -1 or not is_real)
        return cute.arch.vote_any_sync(some), cute.arch.vote_all_sync(every)

    @cute.jit
    def _read_elements(self, rows: "_Rows", warp: Int32, lane: Int32) -> tuple[Boolean, Boolean]:
        """Reads a warp's rows, one after the other, whatever their strides; returns the same as ``_read_vectors``."""
        t = self.tile
        some, every = Boolean(False), Boolean(True)
        for i in cutlass.range_constexpr(0, t.rows_of_queries // _WARPS, _AT_ONCE):
            seen = []
            for j in cutlass.range_constexpr(_AT_ONCE):
                gRow, start, stop, _ = self._row(rows, (i + j) * _WARPS + warp)
                for w in cutlass.range_constexpr(self.words_a_row):
                    key = rows.first_key + 32 * w + lane
                    shown = Int32(0)
                    if key >= start and key < stop:
                        shown = Int32(gRow[key])
                    seen.append(shown)
            for j in cutlass.range_constexpr(_AT_ONCE):
                r = (i + j) * _WARPS + warp
                _, _, _, is_real = self._row(rows, r)
                for w in cutlass.range_constexpr(self.words_a_row):
                    word = cute.arch.vote_ballot_sync(seen[j * self.words_a_row + w] != 0)
                    whole = -1 if const_expr(t.keys >= 32 * (w + 1)) else (1 << t.keys % 32) - 1
                    some = some or word != 0
                    every = every and (word == Int32(whole) or not is_real)
                    if lane == w:
                        rows.sRows[r, w] = word
        return some, every


@dataclass(frozen=True)
class _Rows:
    """Rows of a tile of a mask: where they come from and go to."""

    numbers: Any  # of the pass
    gMask: cute.Tensor  # (heads, queries, keys) of a sequence
    sRows: cute.Tensor  # (query, 32 keys)
    head: Int32
    first_query: Int32
    q_length: Int32
    first_key: Int32
    k_length: Int32


def _bits_of_bytes(word: Int32) -> Int32:
    """Four bits, each of which says whether a byte is not 0, the lowest byte first."""
    visible = ((word & 0x7F7F7F7F) + 0x7F7F7F7F | word) >> 7 & 0x01010101
    return visible * 0x01020408 >> 24 & 0xF


class BlockTiles(_Tiles):
    """The kernel that reorders a block mask's tiles of bits for the registers of one configuration. One CTA a tile.

    The mask's tiles have 128 x 128 scores, row by row (``sparsity.bits``); a configuration's tile is a part of one.
    """

    @cute.jit
    def __call__(self, a: BlockArguments, stream) -> cute.Tensor:
        """Launches the kernel; returns the bits, (tile and its part, warpgroup, thread, word)."""
        t, num_tiles = self.tile, a.mTiles.shape[0] // (BLOCK * BLOCK // 32)
        shape = num_tiles * (BLOCK // t.queries) * (BLOCK // t.keys), t.warpgroups, 128, t.words
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(4))
        mBits = cute.make_tensor(a.mBits.iterator, cute.make_layout(shape, stride=strides))
        mTiles = cute.make_tensor(
            a.mTiles.iterator,
            cute.make_layout((num_tiles, BLOCK, BLOCK // 32), stride=(BLOCK * BLOCK // 32, BLOCK // 32, 1)),
        )
        self.kernel(mTiles, mBits).launch(grid=[num_tiles, 1, 1], block=[32 * _WARPS, 1, 1], stream=stream)
        return mBits

    def kinds(self, mBits: cute.Tensor) -> cute.Tensor | None:
        """Kinds of the quarters of each tile, (tile,), behind the bits; None if the configuration has none."""
        if not self.tile.has_kinds:
            return None
        num_tiles = mBits.shape[0] // (BLOCK // self.tile.queries * (BLOCK // self.tile.keys))
        return cute.make_tensor(mBits.iterator + cute.size(mBits), cute.make_layout(num_tiles))

    def bits(self, a: BlockArguments, stream) -> cute.Tensor:
        """Bits of the block mask: reordered by the kernel, or a view where a thread has the scores of one query."""
        t = self.tile
        if self.config.reorders_bits:
            return self(a, stream)
        words_a_row, parts = BLOCK // 32, BLOCK // t.keys
        words_a_tile = BLOCK * words_a_row
        layout = cute.make_layout(
            ((parts, a.mTiles.shape[0] // words_a_tile), t.warpgroups, BLOCK, t.words),
            stride=((t.words, words_a_tile), words_a_tile, words_a_row, 1),
        )
        return cute.make_tensor(a.mTiles.iterator, layout)

    @cute.kernel
    def kernel(self, mTiles: cute.Tensor, mBits: cute.Tensor) -> None:
        t = self.tile
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        sRows = smem.allocate_tensor(Int32, cute.make_layout((BLOCK, BLOCK // 32), stride=(BLOCK // 32, 1)))
        for i in cutlass.range(thread, cute.size(sRows), 32 * _WARPS, unroll=1):
            row, word = i // (BLOCK // 32), i % (BLOCK // 32)
            sRows[row, word] = mTiles[Int64(index), row, word]
        cute.arch.sync_threads()
        parts = BLOCK // t.queries * (BLOCK // t.keys)
        for part in cutlass.range_constexpr(parts):  # a tile is cut along one side
            queries, keys = (part * t.queries, 0) if const_expr(t.queries < BLOCK) else (0, part * t.keys)
            own = cute.local_tile(sRows, (t.queries, self.words_a_row), (queries // t.queries, keys // t.keys))
            self._write_bits(own, mBits, index * parts + part, thread)
        if const_expr(t.has_kinds):
            kinds, mKinds = kinds_of_quarters(sRows, thread % 32), self.kinds(mBits)
            if thread == 0:
                mKinds[index] = kinds


@cute.jit
def kinds_of_quarters(sRows: cute.Tensor, lane: Int32) -> Int32:
    """Kinds of the four quarters of a tile (128 queries, 4 words of 32 keys), by a converged warp.

    Four bits for each half of the keys: whether the first and the second half of the queries attend to any of them
    (``SEEN``), and whether each of these attends to all (``ALL_SEEN``).
    """
    kinds = Int32(0)
    for keys in cutlass.range_constexpr(2):
        for queries in cutlass.range_constexpr(2):
            some, every = Int32(0), Int32(-1)
            for row in cutlass.range_constexpr(2):
                for word in cutlass.range_constexpr(2):
                    bits = sRows[64 * queries + 32 * row + lane, 2 * keys + word]
                    some, every = some | bits, every & bits
            seen = cute.arch.vote_any_sync(some != 0)
            whole = cute.arch.vote_all_sync(every == -1)
            kinds = kinds | (Int32(seen) * SEEN | Int32(whole) * ALL_SEEN) << 4 * keys + queries
    return kinds


class RowLists:
    """The kernel that lists the key blocks that a tile of queries attends to. One warp a list."""

    @cute.jit
    def __call__(self, mCodes: cute.Tensor, mLists: cute.Tensor, mEntries: cute.Tensor, stream) -> None:
        """Launches the kernel: from ``MaskTiles``'s codes to lists and entries, as ``block_lists.Tables`` has them."""
        grid = cute.ceil_div(mLists.shape[0], _WARPS)
        self.kernel(mCodes, mLists, mEntries).launch(grid=[grid, 1, 1], block=[32 * _WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mCodes: cute.Tensor, mLists: cute.Tensor, mEntries: cute.Tensor) -> None:
        index, _, _ = cute.arch.block_idx()
        number = index * _WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, blocks = cute.arch.lane_idx(), mCodes.shape[1]
        if number < mLists.shape[0]:
            first, num = number * blocks, Int32(0)
            for start in cutlass.range(0, blocks, 32, unroll=1):
                block, code = start + lane, Int32(EMPTY)
                if block < blocks:
                    code = mCodes[number, block]
                listed = cute.arch.vote_ballot_sync(code != EMPTY)
                if code != EMPTY:
                    place = first + num + cute.arch.popc(listed & ((1 << lane) - 1))
                    mEntries[place, 0], mEntries[place, 1] = block, code
                num += cute.arch.popc(listed)
            if lane == 0:
                mLists[number, 0], mLists[number, 1] = first, num


class RowTables:
    """Tables of a mask or a block mask for a forward kernel, made by kernels before it."""

    def __init__(self, config: Any):
        self.config = config
        self.mask_tiles, self.row_lists, self.block_tiles = MaskTiles(config), RowLists(), BlockTiles(config)

    @cute.jit
    def __call__(self, a: ForwardArguments, stream) -> Tables | None:
        """Launches the kernels that make the tables. Returns None without a mask."""
        c, tables = self.config, None
        if const_expr(c.features.mask):
            lists, blocks = Sharing.of(a.numbers).total, num_blocks(a.mMask, c.tile_n)
            tables = Tables(**carved(a.mWorkspace, c.mask_tile.parts_with_lists(lists, blocks), Int32))
            self.mask_tiles(a, tables.mCodes, tables.mBits, stream)
            self.row_lists(tables.mCodes, tables.mLists, tables.mEntries, stream)
        elif const_expr(c.features.block_mask):
            mBits = self.block_tiles.bits(a.blocks, stream)
            lists, entries = as_rows(a.blocks.mSpans, 2), as_rows(a.blocks.mEntries, 2)
            tables = Tables(lists, entries, None, mBits, self.block_tiles.kinds(mBits))
        return tables
