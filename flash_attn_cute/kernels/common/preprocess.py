"""Preprocessing of the backward pass: delta and lse of every query, and the zeros that the main kernel needs.

delta = rowsum(dO * O) - dlse is what the gradients of a row's scores share; lse is in base 2, or natural with a bias. A
fully masked query, or a row that is none, gets an lse of inf, so that its P is 0.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.ds_cells import first_cell
from flash_attn_cute.kernels.common.fixed_point import ranges_of_head, units_of
from flash_attn_cute.kernels.common.key_lists import num_adding_of, order_row
from flash_attn_cute.kernels.common.residuals import load_residuals, restored
from flash_attn_cute.kernels.common.rows import numbers_first, rows_first
from flash_attn_cute.kernels.common.score import LOG2_E, LOWEST_LSE
from flash_attn_cute.kernels.common.semaphores import NOT_ZEROED
from flash_attn_cute.kernels.common.workspace import Workspace

_THREADS = 256


class Preprocess:
    """The preprocessing kernel. One CTA a block of ``tile_m`` queries of one head.

    A power of 2 of threads reads a row, a vector of 16 bytes each. Under a mask the kernel also computes the order in
    which tiles add to the block's dQ. It sets the semaphores, if there are any (``common.semaphores``), and zeroes the
    sums of dQ if additions are unordered.
    """

    def __init__(self, config: Any, place: Callable[[Int32], Int32] | None = None):
        """``place``: where the numbers of a block's row are kept; None: in the order of rows."""
        self.config, self.place = config, place
        self.tile_m, self.packed, self.has_bias = config.tile_m, config.features.packed, config.features.bias
        self.zeroes_sums = not (config.stores_dS or config.in_order or config.zeroes_sums)
        self.lanes = 1 << (config.tile_d // 8).bit_length() - 1

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:
        _, heads, blocks, _ = ws.mStats.shape
        self.kernel(a, ws).launch(grid=[blocks * heads, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: BackwardArguments, ws: Workspace) -> None:
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mO, mdO = rows_first(a.mO, self.packed), rows_first(a.mdO, self.packed)
        mLSE = numbers_first(a.mLSE, self.packed)
        heads = a.mO.shape[-2]
        first = heads if self.packed else 0  # those without a block are first and last
        work, rows = tiles.row_tile(first + index, a.mO, heads, a.mCuSeqlensQ, a.mSeqUsedQ, self.tile_m, tiles.Order())
        batch = Int32(0) if const_expr(self.packed) else work.batch
        rows_a_pass = _THREADS // self.lanes
        ranges = ranges_of_head(self.config, a, ws, batch, work.head) if const_expr(self.config.fixed_point) else None
        lane = thread % self.lanes
        for i in cutlass.range_constexpr(-(-self.tile_m // rows_a_pass)):
            within = i * rows_a_pass + thread // self.lanes
            row = work.first_row + within
            delta, lse, squares = Float32(0.0), Float32.inf, Float32(0.0)
            if row < rows.length:
                gO, gdO = (x[rows.start + row, None, work.head, batch] for x in (mO, mdO))
                for vector in cutlass.range(lane, gO.shape[0] // 8, self.lanes, unroll=1):
                    o, do = cute.make_rmem_tensor(8, gO.element_type), cute.make_rmem_tensor(8, gO.element_type)
                    cute.autovec_copy(cute.local_tile(gO, (8,), (vector,)), o)
                    cute.autovec_copy(cute.local_tile(gdO, (8,), (vector,)), do)
                    if const_expr(a.mResidual is not None):
                        mResidual = rows_first(a.mResidual, self.packed)
                        residuals = load_residuals(mResidual[rows.start + row, None, work.head, batch], vector)
                    for j in cutlass.range_constexpr(8):
                        x, y = o[j].to(Float32), do[j].to(Float32)
                        # Where no key was seen O is 0, even if a sink gives an lse, and dO may be NaN.
                        is_seen = x != 0.0
                        if const_expr(a.mResidual is not None):
                            x = cutlass.select_(is_seen, restored(x, residuals[j], gO.element_type), x)
                        delta += x * cutlass.select_(is_seen, y, Float32(0.0))
                        squares += y * y
                lse = mLSE[rows.start + row, work.head, batch]
                if const_expr(self.has_bias):
                    lse = Float32.inf if lse < LOWEST_LSE else lse
                else:
                    lse = lse * LOG2_E
                    lse = lse if lse != -Float32.inf else Float32.inf
            for j in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                delta += cute.arch.shuffle_sync_bfly(delta, 1 << j)
                if const_expr(self.config.fixed_point):
                    squares += cute.arch.shuffle_sync_bfly(squares, 1 << j)
            if lane == 0:
                if const_expr(a.mdLSE is not None):
                    mdLSE = numbers_first(a.mdLSE, self.packed)
                    if row < rows.length:
                        delta -= mdLSE[rows.start + row, work.head, batch]
                delta = delta if lse != Float32.inf else Float32(0.0)  # dlse may be NaN there
                place = within if const_expr(self.place is None) else self.place(within)
                ws.mStats[0, work.head, work.block, place] = lse
                ws.mStats[1, work.head, work.block, place] = delta
                if const_expr(self.config.fixed_point):
                    units = units_of(ranges, cute.math.sqrt(squares), delta, lse != Float32.inf)
                    ws.mStats[2, work.head, work.block, within] = units
        if const_expr(ws.mCodes is not None):
            if thread < 32:
                order_row(a, ws, batch, work.head, work.listed(self.packed, self.tile_m))
        if const_expr(ws.mSemaphoresQ is not None):
            if thread < ws.mSemaphoresQ.shape[0]:
                count = Int32(NOT_ZEROED if self.config.zeroes_sums else 0)
                if const_expr(self.config.fixed_point):
                    count = -num_adding_of(a, ws, batch, work.head, work.listed(self.packed, self.tile_m))
                ws.mSemaphoresQ[thread, work.head, work.block] = count
        if const_expr(ws.mCells is not None):
            if thread == 0:
                m_block = work.listed(self.packed, self.tile_m)
                ws.mCells[work.head, work.block] = first_cell(a, ws, batch, work.head, m_block)
        if const_expr(self.zeroes_sums):
            zeros = cute.make_rmem_tensor(4, Float32)
            zeros.fill(0.0)
            sums = ws.dQ_sums(work.head, work.block)
            for i in cutlass.range(thread, sums.shape[0] // 4, _THREADS):
                cute.autovec_copy(zeros, cute.local_tile(sums, (4,), (i,)))
        if const_expr(ws.mSemaphoresK is not None):
            turns = cute.make_tensor(ws.mSemaphoresK.iterator, cute.make_layout(cute.size(ws.mSemaphoresK)))
            for i in cutlass.range(index * _THREADS + thread, cute.size(turns), cute.arch.grid_dim()[0] * _THREADS):
                turns[i] = Int32(0)
