"""Rounding of dQ from the float32 workspace, within the backward kernel that sums it there.

A warp that finds no tile left takes blocks of queries instead, one by one from a counter. It waits until all tiles that
attend to the block have added to it, and rounds it. So SMs that would be idle at the end work, and no kernel follows.
No tile waits for rounding, so every tile ends, and with the tiles these waits end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores, tiles
from flash_attn_cute.kernels.common.blocks import Window
from flash_attn_cute.kernels.common.key_lists import num_adding_of
from flash_attn_cute.kernels.common.key_tiles import key_tiles_of
from flash_attn_cute.kernels.common.rows import rows_first, zero_rows
from flash_attn_cute.kernels.common.score_tensors import keys_of
from flash_attn_cute.kernels.common.workspace import Workspace


@cute.jit
def round_blocks(
    config: Constexpr, a: BackwardArguments, ws: Workspace, warps: Constexpr, round_block: Constexpr
) -> None:
    """Rounds blocks until none is left, by a converged warp, of so many ``warps`` of a CTA.

    ``round_block`` rounds one block. It takes the block's sums, dQ (rows, d) of its head, its first row within the
    sequence and the sequence's rows, behind whose length it writes zeros; then the row of the sequence before which
    writing ends, and the lane. In fixed point (``common.fixed_point``) it also takes ``row_units`` and ``num_adding``,
    how many tiles have added.
    """
    c, f = config, config.features
    mdQ = rows_first(a.mdQ, f.packed)
    lane = cute.arch.lane_idx()
    _, heads, blocks, _ = ws.mStats.shape
    # Every warp asks until it gets none.
    num_blocks = tiles.num_row_tiles(heads, blocks, f.packed)
    num_questions = num_blocks + warps * cute.arch.grid_dim()[0]
    next_block = cute.domain_offset((1,), a.mNextTile)
    # A head's all together, and its sequences, as tiles of them are taken.
    order = tiles.Order(heads_in_cache=Int32(1), last_first=f.packed)
    index = tiles.take_tile(next_block, num_questions)
    while index < num_blocks:
        work, rows = tiles.row_tile(index, a.mQ, heads, a.mCuSeqlensQ, a.mSeqUsedQ, c.tile_m, order)
        gdQ = mdQ[None, None, work.head, Int32(0) if const_expr(f.packed) else work.batch]
        stop = rows.slot if const_expr(f.zero_padding) else rows.length
        num_adding = Int32(0)
        if work.first_row < rows.length:
            if const_expr(f.listed):
                batch = Int32(0) if const_expr(f.packed) else work.batch
                num_adding = num_adding_of(a, ws, batch, work.head, work.listed(f.packed, c.tile_m))
            else:
                k_length = keys_of(a, work.batch).length if const_expr(f.packed) else a.mK.shape[1]
                window = Window.of(f, a, rows.length, k_length)
                num_adding = key_tiles_of(c, work.first_row, k_length, window).num
        if num_adding > 0:
            place = gdQ, work.first_row, rows, stop, lane
            last = Int32(0) if const_expr(c.fixed_point) else num_adding
            semaphores.wait_for_all_parts(ws.mSemaphoresQ, work.head, work.block, last)
            units = {}
            if const_expr(c.fixed_point):
                units = {"row_units": ws.mStats[2, work.head, work.block, None], "num_adding": num_adding}
            round_block(ws.dQ_sums(work.head, work.block), *place, **units)
        else:  # the workspace holds nothing
            num_rows = cutlass.min(stop - work.first_row, c.tile_m)
            zero_rows(gdQ, rows.start + work.first_row, num_rows, lane, 32)
        index = tiles.take_tile(next_block, num_questions)
