"""Attention backward on Blackwell where dK and dV do not fit tensor memory together: d, d_v up to 256.

A tile is 128 keys, and the work of a CTA. The CTA makes two passes over the blocks of 64 queries that attend to it:
    first pass    S' = K Q'    dV += P' dO
    second pass   S' = K Q'    dP' = V dO'    dK += dS' Q    dQ' = K' dS
So S is computed, and Q and dO are loaded, twice: six products for five. (Halves of the columns of all three gradients
would make it seven, as S and dP would be computed twice; so would a kernel for dQ and one for dK and dV, and these two
fill tensor memory. Two CTAs that share a tile, one of them with dV, take as long as one CTA that does both.)

``python -m flash_attn_cute.kernels describe sm100 backward --d 256`` prints ``backward_schedule``. Roles are those of
``cta``. A block in either pass is a *step*, and steps are counted over all tiles of the CTA.

dQ is transposed: a column of it has a lane. Tensor memory has lanes for 128 queries, and shared memory has no room for
as many. dQ has two parts of 128 columns. Of 192 columns the second part begins with half of the first one's.

Two places of 64 columns in tensor memory are one ring, ``scores``, whatever they hold:
    first pass    S of one step after the other, and P over it
    second pass   S, which is only read, in the one, and dP in the other, and dS over that
Products have numbers in that ring. A tile of an odd number of steps begins its second pass with S in the other place.

Steps are those of both passes, also where they are entries of lists. Steps of drain and adding warps (dq, pieces,
turns) are the second passes' alone. A piece is 32 queries of 64 columns.

At d = 256 there is one Q and one dO. In the second pass the next dO is loaded beside all but dP, and the next Q, behind
it, beside dP and dQ; so delta comes with Q, and no role waits for compute warps ahead of dO.

Products are done in the order in which they were issued, and a commit arrives when all before it are done. Hence:
  - S(t + 2) of the first pass may take the place of P(t), which dV(t) reads ahead of it, and the second pass's first S
    and dP those of the first one's last two P.
  - S(t + 1) of the second pass, for which compute warps wait, shows them that dQ(t) is done: there is room for dS.
  - dQ(t) may be computed when the drain has read dQ(t - 1), for which the mma warp waits ahead of dK(t).
dV leaves through the place of V, which is loaded behind it, and dK through that of K, behind the last dQ. dK overwrites
dV when compute warps have read that, and dV the last tile's dK.

Shared memory binds both passes (docs/blackwell-model.md counts the clocks).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.assembly import opaque
from flash_attn_cute.kernels.common.key_tiles import rounds_a_tile
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.cta import DK, DV, BackwardCtaSm100, Compute, MmaWarp
from flash_attn_cute.kernels.sm100.mma import commit


class TwoPassCompute(Compute):
    """A compute warpgroup, in two passes over the queries."""

    @cute.jit
    def __call__(self) -> None:
        """Half of every step's queries; dV after the first pass, dK after the second."""
        c, a, shared, scores = self.config, self.a, self.shared, self.shared.rings.scores
        tile_idx, step, number, dq_step = (Int32(0) for _ in range(4))
        while shared.has_tile(tile_idx):
            num_blocks = shared.tile(c, a, tile_idx).blocks.num
            self.begin(tile_idx)
            for nth in cutlass.range(rounds_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    block = self.block(tile_idx, nth, i, step)
                    self.compute_P(block, step, number, self._first_column(number))
                    step, number = step + 1, number + 1
            self._put_out(tile_idx, (DV,))
            first_S, first_dP = self._first_column(number), self._first_column(number + 1)
            for nth in cutlass.range(rounds_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    block = self.block(tile_idx, nth, i, step)
                    P = self.compute_P(block, step, number, first_S, stores=False)
                    self.compute_dS(P, block, step, dq_step, scores, plus(number, 1), first_dP)
                    step, number, dq_step = step + 1, number + 2, dq_step + 1
            self._put_out(tile_idx, (DK,))
            shared.tiles.release_fields(tile_idx)  # to the producer
            tile_idx += 1

    def begin(self, tile_idx: Int32) -> None:
        """Begins a tile: a CTA alone has nothing to do."""

    def _first_column(self, number: Int32) -> Int32 | None:
        """See ``first_column``; None: a pair finds it where it is needed, as registers are short."""
        return None if self.config.holds_keys else first_column(self.config, self.shared.rings.scores, number)


class TwoPassMmaWarp(MmaWarp):
    """The warp that issues all products."""

    @cute.jit
    def __call__(self) -> None:
        """A pass behind the other."""
        c, a, shared, rings = self.config, self.a, self.shared, self.shared.rings
        tile_idx, step, number, dq_step = Int32(0), Int32(0), Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the producer
            rings.k.wait_full(tile_idx)  # from the producer
            self._first_pass(tile_idx, step, number, num_steps)
            step, number = step + num_steps, number + num_steps
            rings.v.wait_full(tile_idx)  # from the producer: dV has left its place
            self._second_pass(tile_idx, step, number, dq_step, num_steps)
            step, number, dq_step = step + num_steps, number + 2 * num_steps, dq_step + num_steps
            tile_idx += 1

    @cute.jit
    def _first_pass(self, tile_idx: Int32, step: Int32, number: Int32, num_steps: Int32) -> None:
        """S of a step ahead of dV of the one before."""
        c, rings = self.config, self.shared.rings
        for i in cutlass.range(num_steps + 1, unroll=1):
            if i < num_steps:
                rings.q.wait_full(step + i)  # from the producer
                self.start_S(tile_idx, step + i, first_column(c, rings.scores, number + i))
                commit(rings.scores.full(number + i))  # to compute warps
                commit(rings.q.empty(step + i))  # to the producer
            if i > 0:
                before = plus(i, -1)
                rings.do.wait_full(step + before)  # from the producer
                rings.scores.wait_empty(number + before + 2)  # from compute warps: P is there
                if i == 1:
                    rings.dk.wait_empty(tile_idx)  # from compute warps: they have the last tile's dK
                tensor_memory.after_sync()
                self.start_dV(step + before, first_column(c, rings.scores, number + before), i > 1)
                commit(rings.do.empty(step + before))  # to the producer
        commit(rings.dv.full(tile_idx))  # to compute warps

    @cute.jit
    def _second_pass(self, tile_idx: Int32, step: Int32, number: Int32, dq_step: Int32, num_steps: Int32) -> None:
        """DK of the step before, dP of a step, dQ of the one before, and S of the step."""
        c, rings = self.config, self.shared.rings
        first_S, first_dP = first_column(c, rings.scores, number), first_column(c, rings.scores, number + 1)
        for i in cutlass.range(num_steps + 1, unroll=1):
            scores, gradients = number + 2 * i, number + 2 * i + 1
            before = plus(i, -1)
            dq_before = c.parts_dQ * (dq_step + before)
            if i > 0:
                rings.scores.wait_empty(gradients)  # from compute warps: dS of the step before is there, S was read
                if i == 1:
                    rings.dv.wait_empty(tile_idx + 1)  # from compute warps: they have dV
                for part in cutlass.range_constexpr(c.parts_dQ):
                    rings.dq.wait_empty(dq_before + part)  # from the drain warps: they have the dQ before that
                tensor_memory.after_sync()
                self.start_dK(step + before, first_dP, i > 1)
                commit(rings.q.empty(step + before))  # to the producer
            if i < num_steps:
                rings.do.wait_full(step + i)  # from the producer
                self.start_dP(tile_idx, step + i, first_dP)
                commit(rings.scores.full(gradients))  # to compute warps
                commit(rings.do.empty(step + i))  # to the producer
            if i > 0:
                for part in cutlass.range_constexpr(c.parts_dQ):
                    self.start_dQ(tile_idx, c.first_dQ(part), part)
                    commit(rings.dq.full(dq_before + part))  # to the drain warps
            if i < num_steps:
                rings.q.wait_full(step + i)  # from the producer
                self.start_S(tile_idx, step + i, first_S)
                commit(rings.scores.full(scores))  # to compute warps
        commit(rings.dk.full(tile_idx))  # to compute warps; the last commit that anybody waits for


class BackwardTwoPassSm100(BackwardCtaSm100):
    """The backward kernel of one configuration."""

    compute, mma_warp = TwoPassCompute, TwoPassMmaWarp


def first_column(config: BackwardConfig, scores: Ring, number: Int32) -> Int32:
    """First column of scores, or of dP, by their number in their ring: a stage is one of the two places."""
    return scores.stage(number) * config.first_dP


def plus(number: Int32, distance: int) -> Int32:
    """Number of another step or product. Opaque, so that its stages are found like others, and the lint can follow."""
    return opaque(number + distance)
