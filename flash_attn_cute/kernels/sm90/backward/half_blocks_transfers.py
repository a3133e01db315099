"""Warpgroup 0 of the backward kernel of blocks of 64 (``half_blocks_schedule``): that of ``cta`` but for dQ."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import add_from_shared, add_integers_from_shared
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardHalfBlocksConfig
from flash_attn_cute.kernels.sm90.backward.cta_shared import UNORDERED
from flash_attn_cute.kernels.sm90.backward.cta_transfers import Transfers


@dataclass(frozen=True)
class HalfBlocksTransfers(Transfers):
    """Roles of warpgroup 0: producer, and the warp that stores and adds results."""

    config: BackwardHalfBlocksConfig

    @cute.jit
    def carry_out(self, w: Int32) -> None:
        """Warp 1: to global memory what the warpgroup puts out: dQ of every step, dV and dK of every tile.

        In float32 the warpgroup itself writes these two.
        """
        c, shared = self.config, self.shared
        step, tile_idx, out = Int32(0), Int32(0), shared.out(w)
        while shared.has_tile(tile_idx):
            for _ in cutlass.range(shared.tile(c, self.a, tile_idx).blocks.num, unroll=1):
                self._put_out_step(tile_idx, step, piece_number(c, step, tile_idx))
                step += 1
            if const_expr(not c.features.wide):
                self._store_dKV(out, w, tile_idx, piece_number(c, step, tile_idx))
            shared.tiles.release(tile_idx)  # to warp 0
            tile_idx += 1

    @cute.jit
    def _put_out_step(self, tile_idx: Int32, step: Int32, piece: Int32) -> None:
        """Adds a step's dQ to the workspace."""
        c, ws, shared, out = self.config, self.ws, self.shared, self.shared.out(Int32(0))
        size = c.tile_m * c.tile_d // c.pieces_dQ
        shared.rings.steps.wait_full(step)  # from warp 0
        block, turn = shared.read_step(step)
        semaphore = semaphores.at(ws.mSemaphoresQ, 0, 0, block)
        if const_expr(c.fixed_point):
            if turn != UNORDERED:
                semaphores.wait(semaphore, turn)
                cute.arch.fence_proxy("async.global")  # what others have added comes before what TMA adds
        for i in cutlass.range_constexpr(c.pieces_dQ):
            out.wait_full(piece + i)  # from the mma warpgroup
            part = cute.domain_offset((0, Int64(block), size * i), ws.mdQaccum).iterator.toint()
            source = shared.sums + size * out.stage(piece + i)
            with cute.arch.elect_one():
                if const_expr(not c.fixed_point):
                    add_from_shared(part, source, 4 * size)
                elif turn == UNORDERED:
                    add_integers_from_shared(part, source, 4 * size)
                else:
                    add_from_shared(part, source, 4 * size)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            out.release(piece + i)  # to the mma warpgroup
        cute.arch.cp_async_bulk_wait_group(0)  # all of it has been added
        with cute.arch.elect_one():
            semaphores.signal(semaphore)


def piece_number(config: BackwardHalfBlocksConfig, step: Int32, tile_idx: Int32) -> Int32:
    """Number of the next piece that the warpgroup puts out: dQ of a step, or behind a tile's last step dV, then dK.

    Where dV and dK are float32 they are no pieces.
    """
    tiles = config.pieces_dKV * tile_idx if config.pieces_dKV else Int32(0)
    return config.pieces_dQ * step + tiles
