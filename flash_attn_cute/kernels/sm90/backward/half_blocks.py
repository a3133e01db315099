"""Attention backward on Hopper for block masks of blocks of 64, up to d = 128: 64 keys are the work of a CTA.

``cta`` has 128 keys a CTA, half of which many of a step's 64 queries do not see under such a mask: in a random one of
25 % a step computes 1.75 times what is visible. Here a CTA has one mma warpgroup and its 64 keys, and an SM has two
such CTAs (``half_blocks_schedule``). They know nothing of each other: the products of one run while the other computes
P or dS, waits, or ends a tile. Lists have blocks of 64 queries that see some of the 64 keys (half columns of
``BlockTables``).

Products are those of ``cta``. But dK += dS' Q is in flight while dS' is written to shared memory, and then dQ = dS K is
computed in the step itself, for no other warpgroup has a part in it.

Half of an SM's shared memory has room for one K, V and dS. A block of dQ leaves through it in two pieces. All of it is
in registers where S and dP have been, so dK is complete before dQ is begun: else products would wait for each other.

Sums of dQ have no order, or are in fixed point (``common.fixed_point``). ``cta`` serves other passes in order. A block
of dQ is added for each 64 keys, and so more often than by ``cta``: these additions are what limits the kernel
(``benchmarks/notes/block-masks.md``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import add_from_shared, add_integers_from_shared
from flash_attn_cute.kernels.common.fixed_point import FLOAT32, to_fixed_point
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardHalfBlocksConfig
from flash_attn_cute.kernels.sm90.backward.cta import BackwardCtaSm90, _Work
from flash_attn_cute.kernels.sm90.backward.cta_shared import UNORDERED, Shared
from flash_attn_cute.kernels.sm90.backward.cta_transfers import Transfers
from flash_attn_cute.kernels.sm90.backward.half_blocks_schedule import half_blocks_schedule
from flash_attn_cute.kernels.sm90.backward.workspace import put
from flash_attn_cute.kernels.sm90.mma import as_operand_a, gemm
from flash_attn_cute.kernels.sm90.shared import transposed, write

_BARRIER_MMA = 2  # a named barrier of the mma warpgroup; another one is ``cta``'s


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
                self._put_out_step(tile_idx, step, c.piece_number(step, tile_idx))
                step += 1
            if const_expr(not c.features.wide):
                self._store_dKV(out, w, tile_idx, c.piece_number(step, tile_idx))
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


class BackwardHalfBlocksSm90(BackwardCtaSm90):
    """The backward kernel of one configuration: two persistent CTAs an SM."""

    config: BackwardHalfBlocksConfig
    describe = staticmethod(half_blocks_schedule)  # type: ignore[assignment]
    transfers = HalfBlocksTransfers

    @cute.jit
    def _add_products_of_dS(self, work: _Work, tile_idx: Int32, step: Int32, is_first: Boolean) -> None:
        """Adds a step's dK, and its dQ where the kernel has dQ."""
        rings, piece = work.shared.rings, self.config.piece_number(step, tile_idx)
        tKrQ = work.tKrQ[None, None, None, rings.q.stage(step)]
        gemm(work.mmas.dK, work.acc_dK, as_operand_a(work.rdS), tKrQ, False)
        self._put_out_dS(work, piece)
        warpgroup.wait_group(1)  # dV is there
        rings.do.release(step)  # to warp 0
        warpgroup.wait_group(0)  # dK is there, or registers would not suffice for dQ
        rings.q.release(step)  # to warp 0
        if const_expr(not self.config.stores_dS):
            gemm(work.mmas.dQ, work.acc_dQ, work.tQrA[None, None, None, 0, 0], work.tQrB[None, None, None, 0, 0], True)
            warpgroup.wait_group(0)  # dQ is there
            self._put_out_dQ(work, piece)

    @cute.jit
    def _put_out_dS(self, work: _Work, piece: Int32) -> None:
        """Writes dS to shared memory, for the product of all warps."""
        # No warp of the warpgroup reads dS of the step before any more.
        cute.arch.barrier(barrier_id=_BARRIER_MMA, number_of_threads=128)
        write(work.rdS, work.mmas.S, work.shared.sdS[None, None, 0, 0], work.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_BARRIER_MMA, number_of_threads=128)  # all of dS is there

    def _operands_of_dQ(self, shared: Shared, w: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Operands of dQ = dS K, (rows, keys, warpgroup, stage) of one each."""
        return transposed(shared.sdS), transposed(shared.sK)

    @cute.jit
    def _put_out_dQ(self, work: _Work, piece: Int32) -> None:
        """Writes dQ to shared memory, in pieces of neighbouring columns, in the order that it has in the workspace."""
        out = work.shared.out(work.warpgroup)
        if const_expr(self.config.fixed_point):
            if work.rUnits[0] != FLOAT32:
                to_fixed_point(work.acc_dQ, work.rUnits)
        size = cute.size(work.acc_dQ) // self.config.pieces_dQ
        for i in cutlass.range_constexpr(self.config.pieces_dQ):
            acc = cute.make_tensor(work.acc_dQ.iterator + i * size, cute.make_layout(size))
            place = work.shared.sums + 128 * size * out.stage(piece + i)
            out.wait_empty(piece + i)  # from warp 1
            put(acc, cute.make_tensor(place, cute.make_layout(128 * size)), work.thread)
            self._hand_out(work, piece + i)
