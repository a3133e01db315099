"""DOC"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.key_tiles import heads_a_tile
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.tma import BackwardTiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.backward.cta import DK, DV, BackwardCtaSm100, Mmas, Products, Work
from flash_attn_cute.kernels.sm100.backward.cta_shared import Shared
from flash_attn_cute.kernels.sm100.mma import commit


class BackwardTwoWalksSm100(BackwardCtaSm100):
    """The backward kernel of one configuration."""

    @cute.jit
    def mma(self, a: BackwardArguments, mmas: Mmas, shared: Shared) -> None:
        """One warp: issues all products."""
        c, rings = self.config, shared.rings
        products = Products.of(c, mmas, shared)
        walk, step, number, dq_step = Int32(0), Int32(0), Int32(0), Int32(0)
        while shared.has_tile(walk):
            num_steps = heads_a_tile(c, a) * shared.tile(c, a, walk).blocks.num
            shared.tiles.release(walk)  # to the producer
            rings.k.wait_full(walk)  # from the producer
            self._first_walk(products, shared, walk, step, number, num_steps)
            step, number = step + num_steps, number + num_steps
            rings.v.wait_full(walk)  # from the producer: dV has left its place
            self._second_walk(products, shared, walk, step, number, dq_step, num_steps)
            step, number, dq_step = step + num_steps, number + 2 * num_steps, dq_step + num_steps
            walk += 1

    @cute.jit
    def _first_walk(
        self, products: Products, shared: Shared, walk: Int32, step: Int32, number: Int32, num_steps: Int32
    ) -> None:
        """S of a step ahead of dV of the one before."""
        rings = shared.rings
        for i in cutlass.range(num_steps + 1, unroll=1):
            if i < num_steps:
                rings.q.wait_full(step + i)  # from the producer
                products.start_S(walk, step + i, self._first_column(number + i))
                commit(rings.scores.full(number + i))  # to compute warps
                commit(rings.q.empty(step + i))  # to the producer
            if i > 0:
                rings.do.wait_full(step + i - 1)  # from the producer
                rings.scores.wait_empty(number + i + 1)  # from compute warps: P of the step before is there
                if i == 1:
                    rings.dk.wait_empty(walk)  # from compute warps: they have the last tile's dK
                tensor_memory.after_sync()
                products.start_dV(step + i - 1, self._first_column(number + i - 1), i > 1)
                commit(rings.do.empty(step + i - 1))  # to the producer
        commit(rings.dv.full(walk))  # to compute warps

    @cute.jit
    def _second_walk(
        self,
        products: Products,
        shared: Shared,
        walk: Int32,
        step: Int32,
        number: Int32,
        dq_step: Int32,
        num_steps: Int32,
    ) -> None:
        """DK of a step, dP of the next one, dQ, and S of the next one."""
        c, rings = self.config, shared.rings
        first_S, first_dP = self._first_column(number), self._first_column(number + 1)
        for i in cutlass.range(num_steps + 1, unroll=1):
            scores, gradients = number + 2 * i, number + 2 * i + 1
            if i > 0:
                rings.scores.wait_empty(gradients)  # from compute warps: dS of the step before is there, S was read
                if i == 1:
                    rings.dv.wait_empty(walk + 1)  # from compute warps: they have dV
                for part in cutlass.range_constexpr(c.parts_dQ):
                    # From the drain warps: they have the dQ before.
                    rings.dq.wait_empty(c.parts_dQ * (dq_step + i - 1) + part)
                tensor_memory.after_sync()
                products.start_dK(step + i - 1, first_dP, i > 1)
                commit(rings.q.empty(step + i - 1))  # to the producer
            if i < num_steps:
                rings.do.wait_full(step + i)  # from the producer
                products.start_dP(walk, step + i, first_dP)
                commit(rings.scores.full(gradients))  # to compute warps
                commit(rings.do.empty(step + i))  # to the producer
            if i > 0:
                for part in cutlass.range_constexpr(c.parts_dQ):
                    products.start_dQ(walk, part)
                    commit(rings.dq.full(c.parts_dQ * (dq_step + i - 1) + part))  # to the drain warps
            if i < num_steps:
                rings.q.wait_full(step + i)  # from the producer
                products.start_S(walk, step + i, first_S)
                commit(rings.scores.full(scores))  # to compute warps
        commit(rings.dk.full(walk))  # to compute warps; the last commit that anybody waits for

    def _first_column(self, number: Int32) -> Int32:
        """Of scores, or gradients of weights, by their number in their ring."""
        return number % 2 * self.config.first_dP

    @cute.jit
    def compute(
        self,
        a: BackwardArguments,
        ws: Workspace,
        tma: BackwardTiles,
        shared: Shared,
        scales: ScoreScales,
        warpgroup: Int32,
        thread: Int32,
    ) -> None:
        """A compute warpgroup: half of every step's queries; dV of the tile behind the first walk, dK behind the other."""
        c, rings = self.config, shared.rings
        address = tensor_memory.row_address(shared.tensor_memory, thread)
        work = Work(a, shared, scales, warpgroup, thread, address)
        walk, step, number = Int32(0), Int32(0), Int32(0)
        while shared.has_tile(walk):
            num_blocks = shared.tile(c, a, walk).blocks.num
            for _ in cutlass.range(heads_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    self._to_weights(work, walk, i, step, number, self._first_column(number))
                    rings.do.wait_full(step)  # from the producer, or this would empty the place of the step before
                    rings.do.release(step)  # to the producer: delta is not asked for
                    step, number = step + 1, number + 1
            self._put_out(work, ws, tma, walk, (DV,))
            first_S, first_dP = self._first_column(number), self._first_column(number + 1)
            for _ in cutlass.range(heads_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    weights = self._to_weights(work, walk, i, step, number, first_S)
                    self._to_gradients(work, weights, step, rings.scores, number + 1, first_dP)
                    step, number = step + 1, number + 2
            self._put_out(work, ws, tma, walk, (DK,))
            shared.tiles.release(walk)  # to the producer
            walk += 1
