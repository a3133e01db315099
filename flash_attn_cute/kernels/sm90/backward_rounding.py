"""DQ from the workspace, within the backward kernel up to d = 128 (see ``backward``).

Multiplying warps that find no tile left take blocks of queries instead, one by one, from a counter, wait until all
tiles that see a block have added to it, and round it. So SMs that would be idle at the end are not, and no kernel
follows. Tiles wait for nobody who rounds, so they all come to their end, and with them these waits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_cute.kernels.common import schedule, semaphore
from flash_attn_cute.kernels.common.rounding import round_block
from flash_attn_cute.kernels.common.rows import rows_first, zero_rows
from flash_attn_cute.kernels.common.sequence import KeyBlocks, Rows, Window
from flash_attn_cute.kernels.sm90.key_tiles import BackwardArguments, packed_rows

_AT_ONCE = 4


@cute.jit
def round_blocks(config: cutlass.Constexpr, a: BackwardArguments) -> None:
    """By a converged multiplying warp: rounds blocks until none is left."""
    c = config
    mdQ = rows_first(a.mdQ, c.packed)
    lane = cute.arch.lane_idx()
    _, heads, blocks, _ = a.mStats.shape
    # Every warp asks until it gets none.
    num_blocks = schedule.num_row_blocks(heads, blocks, c.packed)
    num_questions = num_blocks + 4 * c.num_mma_warpgroups * cute.arch.grid_dim()[0]
    next_block = cute.domain_offset((1,), a.mNextTile)
    index = schedule.take_tile(next_block, num_questions)
    while index < num_blocks:
        # A head's all together, and its sequences, as tiles of them are taken.
        work, start, length, slot = schedule.row_block(
            index, a.mQ, c.packed, a.mCuSeqlensQ, a.mSeqUsedQ, c.tile_m, heads_in_cache=Int32(1), last_first=c.packed
        )
        gdQ = mdQ[None, None, work.head, Int32(0) if const_expr(c.packed) else work.batch]
        stop = slot if const_expr(c.zero_padding) else length
        num_tiles = Int32(0)
        if work.first_row < length:
            num_tiles = _num_tiles(c, a, work, length)
        if num_tiles > 0:
            semaphore.wait_for_all(a.mTurnsQ, work.head, work.block, num_tiles)
            round_block(
                a.mdQaccum[work.head, work.block, None],
                gdQ,
                work.first_row,
                Rows(start, length),
                stop,
                a.softmax_scale,
                c.tile_d,
                c.columns_dQ,
                lane,
                32,
                _AT_ONCE,
            )
        else:  # the workspace holds nothing
            num_rows = cutlass.min(stop - work.first_row, c.tile_m)
            zero_rows(gdQ, start + work.first_row, num_rows, lane, 32)
        index = schedule.take_tile(next_block, num_questions)


@cute.jit
def _num_tiles(c: cutlass.Constexpr, a: BackwardArguments, work: schedule.WorkTile, q_length: Int32) -> Int32:
    """How many tiles add to a block."""
    if const_expr(c.packed):
        _, k_length = packed_rows(a.mK, a.mCuSeqlensK, a.mSeqUsedK, work.batch)
    else:
        k_length = a.mK.shape[1]
    left, right = a.window_left if c.has_left else None, a.window_right if c.has_right else None
    keys = KeyBlocks.of(work.first_row, c.tile_m, k_length, Window(left, right, k_length - q_length), c.tile_n)
    return keys.stop - keys.start
