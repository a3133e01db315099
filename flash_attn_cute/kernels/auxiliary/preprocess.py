"""What the backward kernel needs of every query beside Q and dO, and zeros where it needs them.

delta = rowsum(dO * O) - dlse, the part of a score's gradient that its whole row shares, and lse in base 2. A query that
has seen no key, or that is none, gets an lse of inf: its weights vanish.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_cute.kernels.common import schedule, workspace
from flash_attn_cute.kernels.common.rows import numbers_first, rows_first
from flash_attn_cute.kernels.common.softmax import LOG2_E

_THREADS = 256


class PreprocessArguments(NamedTuple):
    """The launch arguments, in their order: tensors as in the forward kernel, and the workspace (see there)."""

    mO: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor
    mdLSE: cute.Tensor | None
    mStats: cute.Tensor
    mdQaccum: cute.Tensor | None  # if it is to be zero
    mTurns: cute.Tensor | None  # (parts, heads, blocks): if these are
    mTurnsK: cute.Tensor | None  # (parts, heads_k, tiles of a head): the same
    mCuSeqlensQ: cute.Tensor | None
    mSeqUsedQ: cute.Tensor | None


class Preprocess:
    """One CTA a block of ``tile_m`` queries of one head; a row by as many threads as it has vectors of 16 bytes."""

    def __init__(self, tile_m: int, tile_d: int, packed: bool):
        self.tile_m, self.packed = tile_m, packed
        self.lanes = 1 << (tile_d // 8).bit_length() - 1

    @cute.jit
    def __call__(self, a: PreprocessArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel."""
        _, heads, blocks, _ = a.mStats.shape
        self.kernel(a).launch(grid=[blocks * heads, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: PreprocessArguments) -> None:
        """One block."""
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mO, mdO = rows_first(a.mO, self.packed), rows_first(a.mdO, self.packed)
        mLSE = numbers_first(a.mLSE, self.packed)
        first = a.mStats.shape[1] if self.packed else 0  # those without a block are first and last
        work, start, length, _ = schedule.row_block(
            first + index, a.mO, self.packed, a.mCuSeqlensQ, a.mSeqUsedQ, self.tile_m
        )
        batch = Int32(0) if const_expr(self.packed) else work.batch
        rows_a_pass = _THREADS // self.lanes
        lane = thread % self.lanes
        for i in cutlass.range_constexpr(-(-self.tile_m // rows_a_pass)):
            within = i * rows_a_pass + thread // self.lanes
            row = work.first_row + within
            delta, lse = Float32(0.0), Float32.inf
            if row < length:
                gO, gdO = (x[start + row, None, work.head, batch] for x in (mO, mdO))
                for vector in cutlass.range(lane, gO.shape[0] // 8, self.lanes, unroll=1):
                    o, do = cute.make_rmem_tensor(8, gO.element_type), cute.make_rmem_tensor(8, gO.element_type)
                    cute.autovec_copy(cute.local_tile(gO, (8,), (vector,)), o)
                    cute.autovec_copy(cute.local_tile(gdO, (8,), (vector,)), do)
                    for j in cutlass.range_constexpr(8):
                        x, y = o[j].to(Float32), do[j].to(Float32)
                        # Where no key was seen O is 0, even if a sink gives an lse, and dO may be NaN.
                        delta += x * (y if x != 0.0 else Float32(0.0))
                lse = mLSE[start + row, work.head, batch] * LOG2_E
                lse = lse if lse != -Float32.inf else Float32.inf
            for j in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                delta += cute.arch.shuffle_sync_bfly(delta, 1 << j)
            if lane == 0:
                if const_expr(a.mdLSE is not None):
                    mdLSE = numbers_first(a.mdLSE, self.packed)
                    if row < length:
                        delta -= mdLSE[start + row, work.head, batch]
                delta = delta if lse != Float32.inf else Float32(0.0)  # dlse may be NaN there
                a.mStats[0, work.head, work.block, workspace.permuted(within)] = lse
                a.mStats[1, work.head, work.block, workspace.permuted(within)] = delta
        if const_expr(a.mTurns is not None):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
            if thread < a.mTurns.shape[0]:
                a.mTurns[thread, work.head, work.block] = Int32(0)
        if const_expr(a.mTurnsK is not None):
            turns = cute.make_tensor(a.mTurnsK.iterator, cute.make_layout(cute.size(a.mTurnsK)))
            for i in cutlass.range(index * _THREADS + thread, cute.size(turns), cute.arch.grid_dim()[0] * _THREADS):
                turns[i] = Int32(0)
        if const_expr(a.mdQaccum is not None):
            zeros = cute.make_rmem_tensor(4, Float32)
            zeros.fill(0.0)
            accum = a.mdQaccum[work.head, work.block, None]
            for i in cutlass.range(thread, accum.shape[0] // 4, _THREADS):
                cute.autovec_copy(zeros, cute.local_tile(accum, (4,), (i,)))
