"""Lists of query blocks for tiles of keys, and the order in which tiles add to a block of dQ.

Under a mask, tiles are taken from the last keys to the first (``common.key_tiles``). A tile's turn at a block of
queries is therefore the number of later key blocks that the block attends to. A block mask brings its own lists, turns
and tile order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import BLOCK, BackwardArguments
from flash_attn_cute.kernels.backward import MaskSizes
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.block_lists import EMPTY, Sharing, as_rows, num_blocks
from flash_attn_cute.kernels.common.lengths import rows_of
from flash_attn_cute.kernels.common.mask_tiles import BlockTiles, MaskTiles
from flash_attn_cute.kernels.common.workspace import Workspace, packed_block

_WARPS = 8


def mask_sizes(config: Any, a: BackwardArguments) -> MaskSizes | None:
    """Sizes of the tables of a mask; None without a mask."""
    if not config.features.mask:
        return None
    packed, blocks = config.features.packed, num_blocks(a.mMask, config.tile_n)
    m_blocks = a.numbers.num_m_blocks if packed else cute.ceil_div(a.mQ.shape[1], config.tile_m)
    return MaskSizes(m_blocks, blocks, a.numbers.num_n_blocks if packed else blocks)


@cute.jit
def order_row(a: BackwardArguments, ws: Workspace, batch: Int32, head: Int32, row: Int32) -> None:
    """Computes the order of additions to a block of queries, by one warp.

    Only the first of the rows that share a row of codes does so.
    """
    sharing, lane = Sharing.of(a.numbers), cute.arch.lane_idx()
    if batch < sharing.batch and head < sharing.heads and row < sharing.tiles:
        number, blocks, num = sharing.number(batch, head, row), ws.mCodes.shape[1], Int32(0)
        for start in cutlass.range(0, blocks, 32, unroll=1):
            block, code = blocks - 1 - start - lane, Int32(EMPTY)
            if block >= 0:
                code = ws.mCodes[number, block]
            seen = cute.arch.vote_ballot_sync(code != EMPTY)
            if block >= 0:
                ws.mOrder[number, block] = num + cute.arch.popc(seen & ((1 << lane) - 1))
            num += cute.arch.popc(seen)
        if lane == 0:
            ws.mAdding[number] = num


def num_adding_of(a: BackwardArguments, ws: Workspace, batch: Int32, head: Int32, row: Int32) -> Int32:
    """Number of tiles that add to a block of queries."""
    return ws.mAdding[Sharing.of(a.numbers).number(batch, head, row)]


def list_of(
    config: Any, a: BackwardArguments, ws: Workspace, batch: Int32 | int, head: Int32, tile: Int32
) -> tuple[Int32, Int32]:
    """First entry and length of the list of a tile of keys; tiles are numbered over all sequences."""
    sharing = Sharing.of(a.numbers)
    key_tiles = blocks_of_keys(config, a) if config.features.block_mask else mask_sizes(config, a).key_tiles
    number = sharing.set_of(batch, head) * key_tiles + tile % key_tiles
    return ws.mLists[number, 0], ws.mLists[number, 1]


@cute.jit
def entry_of(config: Constexpr, ws: Workspace, i: Int32) -> tuple[Int32, Int32, Int32]:
    """An entry of a list: block of queries, code, and the tile's turn to add to its dQ."""
    m_block, code, turn = (ws.mEntries[i, j] for j in range(3))
    if const_expr(config.features.block_mask):
        parts = BLOCK // config.tile_m
        code = code * parts + m_block % parts if code >= 0 else code
    return m_block, code, turn


def launched(config: Any, a: BackwardArguments, batch: Int32, head_k: Int32, block: Int32) -> Int32:
    """The block of keys that a block mask's launch order puts in the place of ``block``.

    ``block`` is one of the default order, from the last block to the first: the last one has rank 0. Unordered passes
    go from the first to the last, so they read the launch order from its end.
    """
    n, blocks = a.numbers, blocks_of_keys(config, a)
    rank = blocks - 1 - block
    sets_before = batch % n.orders_batch * n.orders_heads + head_k % n.orders_heads
    return a.mLaunchOrder[Int64(sets_before) * blocks + rank]


def blocks_of_keys(config: Any, a: BackwardArguments) -> Int32:
    """Number of key blocks of a head in a dense batch."""
    return cute.ceil_div(a.mK.shape[1], config.tile_n)


class KeyLists:
    """The kernel that makes the lists from codes and the order of additions. One warp a list."""

    def __init__(self, config: Any):
        self.config = config

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:
        grid = cute.ceil_div(self._tiles_a_set(a) * Sharing.of(a.numbers).sets, _WARPS)
        self.kernel(a, ws).launch(grid=[grid, 1, 1], block=[32 * _WARPS, 1, 1], stream=stream)

    def _tiles_a_set(self, a: BackwardArguments) -> Int32:
        """Number of key tiles, including those that belong to no sequence."""
        if self.config.features.packed:
            return tiles.num_tiles(a.mK, 1, a.mCuSeqlensK, self.config.tile_n)
        return mask_sizes(self.config, a).key_tiles

    @cute.kernel
    def kernel(self, a: BackwardArguments, ws: Workspace) -> None:
        c, sizes, sharing = self.config, mask_sizes(self.config, a), Sharing.of(a.numbers)
        sets, (index, _, _) = sharing.sets, cute.arch.block_idx()
        index = index * _WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, tiles_a_set = cute.arch.lane_idx(), self._tiles_a_set(a)
        which = index // tiles_a_set
        tile, block, first_block, num = index % tiles_a_set, Int32(0), Int32(0), Int32(0)
        if which < sets:
            if const_expr(c.features.packed):
                order = tiles.Order(last_first=False)
                work, _ = tiles.row_tile(tile, a.mK, 1, a.mCuSeqlensK, a.mSeqUsedK, c.tile_n, order)
                tile, block = Int32(-1), work.first_row // c.tile_n
                if work.batch >= 0:
                    q = rows_of(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, work.batch)
                    first_block = packed_block(q.start, work.batch, c.tile_m)
                    is_seen = block >= 0 and block < sizes.blocks
                    num = cute.ceil_div(cutlass.max(q.length, 0), c.tile_m) if is_seen else Int32(0)
                    tile = work.block
            else:
                block, num = tile, sizes.m_blocks
            if tile >= 0:
                first, listed = (which * sizes.blocks + block) * sizes.m_blocks + first_block, Int32(0)
                for start in cutlass.range(0, num, 32, unroll=1):
                    m_block, code, turn = start + lane, Int32(EMPTY), Int32(0)
                    if m_block < num:
                        row = which * sharing.tiles + (first_block + m_block) % sharing.tiles
                        code, turn = ws.mCodes[row, block], ws.mOrder[row, block]
                    seen = cute.arch.vote_ballot_sync(code != EMPTY)
                    if code != EMPTY:
                        place = first + listed + cute.arch.popc(seen & ((1 << lane) - 1))
                        for i, value in enumerate((m_block, code, turn)):
                            ws.mEntries[place, i] = value
                    listed += cute.arch.popc(seen)
                if lane == 0:
                    number = which * sizes.key_tiles + tile
                    ws.mLists[number, 0], ws.mLists[number, 1] = first, listed


class KeyTables:
    """Tables of a mask or a block mask for a backward kernel, made by kernels before it."""

    def __init__(self, config: Any):
        self.config = config
        self.mask_tiles, self.key_lists = (
            (MaskTiles(config), KeyLists(config)) if config.features.mask else (None, None)
        )
        self.block_tiles = BlockTiles(config) if config.features.block_mask else None

    @cute.jit
    def begin(self, a: BackwardArguments, stream) -> Workspace:
        """Returns the workspace, with a block mask's tables, or with a mask's codes and bits, which it launches."""
        ws = Workspace.of(self.config, a, mask_sizes(self.config, a))
        if const_expr(self.block_tiles is not None):
            ws = ws._replace(
                mBits=self.block_tiles(a.blocks, stream),
                mLists=as_rows(a.blocks.mSpans, 2),
                mEntries=as_rows(a.blocks.mEntries, 3),
                mAdding=a.mContributors,
            )
        if const_expr(self.mask_tiles is not None):
            self.mask_tiles(a, ws.mCodes, ws.mBits, stream)
        return ws

    @cute.jit
    def finish(self, a: BackwardArguments, ws: Workspace, stream) -> None:
        """Launches the kernel that makes a mask's lists, after preprocessing, which orders additions."""
        if const_expr(self.key_lists is not None):
            self.key_lists(a, ws, stream)
