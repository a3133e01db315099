"""Attention backward on Hopper for block masks of blocks of 64, with dS in global memory: the kernel of dK and dV.

A CTA has 64 keys and one mma warpgroup, and an SM two CTAs, as in ``half_blocks`` (``half_blocks_schedule``). That
kernel adds each block of dQ to a sum in global memory, 32 KB at d = 128, and these additions are what limits it
(``benchmarks/notes/block-masks.md``). Here a bulk copy takes dS instead, rounded as dK's product takes it, 8 KB at any
d, each block to a cell of its own (``common.ds_cells``). ``gradient_q`` multiplies it by K.

What leaves shared memory, dS of a step, and dV and dK of a tile by 64 columns, has one size, and one ring.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_attn_cute.kernels.backward import CELL_NUMBERS
from flash_attn_cute.kernels.common.assembly import store_from_shared
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardStoredDSConfig
from flash_attn_cute.kernels.sm90.backward.cta import _Work
from flash_attn_cute.kernels.sm90.backward.half_blocks import BackwardHalfBlocksSm90, HalfBlocksTransfers
from flash_attn_cute.kernels.sm90.mma import convert
from flash_attn_cute.kernels.sm90.shared import write


@dataclass(frozen=True)
class _Transfers(HalfBlocksTransfers):
    """Roles of warpgroup 0: producer, and the warp that stores results."""

    @cute.jit
    def _put_out_step(self, tile_idx: Int32, step: Int32, piece: Int32) -> None:
        """Stores a step's dS in its cell, and the block of keys beside it."""
        c, ws, shared, out = self.config, self.ws, self.shared, self.shared.out(Int32(0))
        shared.rings.steps.wait_full(step)  # from warp 0
        block, turn = shared.read_step(step)
        cells = cute.make_tensor(ws.mCells.iterator, cute.make_layout(cute.size(ws.mCells)))  # as blocks are counted
        cell = cells[block] + turn
        place = cute.domain_offset((cell, 0), ws.mdS).iterator.toint()
        out.wait_full(piece)  # from the mma warpgroup
        with cute.arch.elect_one():
            store_from_shared(place, shared.sums + CELL_NUMBERS * out.stage(piece), 4 * CELL_NUMBERS)
            ws.mCellKeys[cell] = shared.reload_tile(c, self.a, tile_idx).first_key // c.tile_n
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        out.release(piece)  # to the mma warpgroup


class BackwardStoredDSSm90(BackwardHalfBlocksSm90):
    """The kernel of one configuration: two persistent CTAs an SM."""

    config: BackwardStoredDSConfig
    transfers = _Transfers

    @cute.jit
    def _put_out_dS(self, work: _Work, piece: Int32) -> None:
        """Writes dS to shared memory, for warp 1."""
        self._put_out_piece(work, work.rdS, piece, True)

    @cute.jit
    def _put_out_rounded(
        self, work: _Work, acc: cute.Tensor, mma: cute.TiledMma, piece: Int32, is_whole: Boolean | bool
    ) -> None:
        """Writes dV or dK to shared memory, 64 columns at a time; what a last piece has beyond them is never stored."""
        size = cute.size(work.rdS)
        for i in cutlass.range_constexpr(self.config.pieces_a_gradient):
            rounded, num = cute.make_rmem_tensor_like(work.rdS), min(size, cute.size(acc) - i * size)
            if const_expr(num < size):
                rounded.fill(0.0)
            source = cute.make_tensor(acc.iterator + i * size, cute.make_layout(num))
            convert(source, cute.make_tensor(rounded.iterator, cute.make_layout(num)))
            self._put_out_piece(work, rounded, piece + i, is_whole)

    @cute.jit
    def _put_out_piece(self, work: _Work, rounded: cute.Tensor, piece: Int32, is_whole: Boolean | bool) -> None:
        out = work.shared.out(work.warpgroup)
        out.wait_empty(piece)  # from warp 1
        if is_whole:
            write(rounded, work.mmas.S, work.shared.out_tile(work.warpgroup, piece), work.thread)
        self._hand_out(work, piece)  # to warp 1
