"""Attention backward on Blackwell, d = d_v = 192 and 256, by pairs of CTAs: two passes, and products of both CTAs.

A tile is 256 keys, the work of a cluster of two. The pair makes two passes over the blocks of 64 queries that attend to
it, as dK and dV do not fit tensor memory together. S is computed, and Q and dO are loaded, in both.

``python -m flash_attn_cute.kernels describe sm100 backward --d 256 --rows 8192`` prints ``backward_schedule``. Roles
are those of ``pair``. A block in either pass is a *step*, and steps are counted over all tiles of the pair.

K, which both passes multiply by Q, is copied to tensor memory once a tile, by compute warps, a key a thread and half of
the columns a warpgroup: so products of scores read nothing but Q from shared memory. Products, by which halves a CTA r
has (rows are ``left``'s and the sum's, columns ``right``'s):
    pass      sum, in tensor memory        left                              right, in shared memory
    both      S' = K Q'     keys r x 64    K, tensor memory: keys r x d      Q: queries r x d
    first     dV += P' dO   keys r x d_v   P', tensor memory: keys r         dO: 64 queries x columns r
    second    dP' = V dO'   keys r x 64    V: keys r x d_v                   dO: queries r x d_v
              dK += dS' Q   keys r x d     dS', tensor memory: keys r        Q: 64 queries x columns r
              dQ' = K' dS   128 columns    K: 256 keys x 128 columns         dS: 256 keys x queries r
                            x 64
dQ is transposed, as 64 queries are not as many as the lanes of both CTAs. At d = 256 CTA r computes and adds columns
128 r .. 128 r + 127. At d = 192 the product has 256 lanes for 192 columns: CTA r computes columns 64 r .. 64 r + 127,
and adds columns 96 r .. 96 r + 95. The dS of the other CTA's queries is sent there by the compute warpgroup that has
them.

Operands share places in shared memory. Both places of Q have one ring, ``q``, whatever they hold, and numbers as
``scores`` has them:
    first pass    Q by rows, of one step after the other
    second pass   Q by rows in the one, and by columns in the other

Two places of 64 columns in tensor memory are one ring, ``scores``: S of the first pass, and P over it; S of the second
in the one, and dP in the other, and dS over that. A tile of an odd number of steps begins its second pass with S in the
other place. At d = 192 dQ has columns of its own. At d = 256 it takes the place of the second pass's S: so it is
computed when S has been read, and the next S when dQ has.

Steps of ``stats`` are those of both passes, of ``do_columns`` the first passes', of ``do``, ``dq``, ``pieces``
and ``exchange`` the second passes'.

In the second pass dQ, and the exchange of dS before it, have the time in which the next dS is computed. This waits for
dQ with its writes to shared memory alone.

Products are done in the order in which they were issued, and a commit arrives when all before it are done. Hence:
  - S(t + 2) of the first pass may take the place of P(t), which dV(t) reads ahead of it, and the second pass's first S
    and dP those of the first one's last two P. dP(t + 1) takes the place of dS(t), which dK(t) reads ahead of it.
  - Compute warps wait for dQ(t) before they write dS(t + 1) to shared memory. Then dS(t) has been read in both CTAs.
  - dV of a tile's first step overwrites the last tile's dK, and dK the tile's own dV, when compute warps have read it.
  - dV leaves through the place of K, where K by columns is loaded behind it, and dK through that of V.
  - dO by rows is loaded when the first pass's last dV is done, and dS written when that and the first dP are: so where
    dO by columns was. The next tile's dO by columns is loaded behind its K, so when the last dQ is done.
  - S of a tile's first steps is where dQ of the last tile's last step was, which the mma warp waits for.

The tensor cores bind the first pass, and shared memory the second (docs/blackwell-model.md counts the clocks).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.backward.cta import MmaWarp
from flash_attn_cute.kernels.sm100.backward.cta_scores import Block
from flash_attn_cute.kernels.sm100.backward.pair import BackwardPairSm100, PairCompute
from flash_attn_cute.kernels.sm100.backward.pair_transfers import PairTwoPassTransfers
from flash_attn_cute.kernels.sm100.backward.two_pass import TwoPassCompute, first_column, plus
from flash_attn_cute.kernels.sm100.config import COMPUTE_WARPGROUPS, O_COLUMNS, PART_ROWS
from flash_attn_cute.kernels.sm100.mma import commit_to_both, read_row

_COLUMNS_OF_K = 32  # that a compute thread copies at once


class PairTwoPassCompute(TwoPassCompute, PairCompute):
    """A compute warpgroup of a pair's CTA, in two passes, which copies K to tensor memory."""

    @cute.jit
    def begin(self, tile_idx: Int32) -> None:
        """Copies the warpgroup's half of the columns of K to tensor memory."""
        c, shared, rings = self.config, self.shared, self.shared.rings
        num = c.tile_d // COMPUTE_WARPGROUPS
        rings.k.wait_full(tile_idx)  # from the producer
        for first in cutlass.range_constexpr(0, num, _COLUMNS_OF_K):
            column = num * self.warpgroup + first
            sK = cute.local_tile(shared.sK[None, None, 0], (PART_ROWS, O_COLUMNS), (0, column // O_COLUMNS))
            keys = cute.make_rmem_tensor(_COLUMNS_OF_K, self.dtype)
            read_row(keys, sK, self.thread, column % O_COLUMNS)
            words = cute.recast_tensor(keys, Int32)
            place = self.address + (c.first_K + column // 2)
            tensor_memory.store(place, [words[j] for j in range(_COLUMNS_OF_K // 2)])
        tensor_memory.before_sync()
        rings.keys.arrive(tile_idx)  # to the mma warp

    def compute_P(self, block: Block, step: Int32, number: Int32, first: None, *, stores: bool = True) -> list[Int32]:
        """Computes P as ``Scores`` does, in the second pass from scores that are all read at once."""
        shared, rings, place = self.shared, self.shared.rings, self.await_scores(block, step, number, first)
        lse = shared.lse[None, rings.stats.stage(step)]
        if stores:
            P = self.write_P(place, lse, stores)
            tensor_memory.before_sync()
            rings.scores.release(number)  # to the mma warp: P is there
            rings.stats.release_read(step)  # to the producer
            return P
        scores = tensor_memory.load(place, self.config.queries)
        tensor_memory.before_sync()
        rings.scores.release(number)  # to the mma warp: S is read
        return self.P_of(scores, 0, lse)[1]

    @property
    def ways_out(self) -> tuple[tuple[cute.Tensor, Ring], tuple[cute.Tensor, Ring]]:
        return (self.shared.sdV, self.shared.rings.k_columns), (self.shared.sV, self.shared.rings.v)


class PairTwoPassMmaWarp(MmaWarp):
    """The leader's warp that issues the products of both CTAs."""

    @cute.jit
    def __call__(self) -> None:
        """A pass behind the other."""
        c, a, shared, rings = self.config, self.a, self.shared, self.shared.rings
        tile_idx, dq_step, number = Int32(0), Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the leader's producer
            rings.keys.wait_full(tile_idx)  # from compute warps: K is there, the last tile's scores are read
            if const_expr(c.dQ_over_S):
                rings.dq.wait_empty(dq_step)  # from drain warps: they have the last tile's dQ, where scores are to be
            tensor_memory.after_sync()
            self._first_pass(tile_idx, dq_step, number, num_steps)
            number += num_steps
            rings.v.wait_full(tile_idx)  # from producers
            self._second_pass(tile_idx, dq_step, number, num_steps)
            dq_step, number = dq_step + num_steps, number + 2 * num_steps
            tile_idx += 1

    @cute.jit
    def _first_pass(self, tile_idx: Int32, step: Int32, number: Int32, num: Int32) -> None:
        """S of a step ahead of dV of the one before."""
        c, rings = self.config, self.shared.rings
        for i in cutlass.range(num + 1, unroll=1):
            if i < num:
                rings.q.wait_full(number + i)  # from producers
                self.start_S(tile_idx, number + i, first_column(c, rings.scores, number + i))
                commit_to_both(rings.q.empty(number + i))  # to producers
                commit_to_both(rings.scores.full(number + i))  # to compute warps
            if i > 0:
                before = plus(i, -1)
                rings.do_columns.wait_full(step + before)  # from producers
                rings.scores.wait_empty(number + before + 2)  # from compute warps: P is there
                if i == 1:
                    rings.dk.wait_empty(tile_idx)  # from compute warps: they have the last tile's dK
                tensor_memory.after_sync()
                self.start_dV(step + before, first_column(c, rings.scores, number + before), i > 1)
                commit_to_both(rings.do_columns.empty(step + before))  # to producers
        commit_to_both(rings.dv.full(tile_idx))  # to compute warps

    @cute.jit
    def _second_pass(self, tile_idx: Int32, dq_step: Int32, number: Int32, num: Int32) -> None:
        """DK of the step before, S and dP of a step, and dQ of the one before."""
        c, rings = self.config, self.shared.rings
        first_S, first_dP = first_column(c, rings.scores, number), first_column(c, rings.scores, number + 1)
        for i in cutlass.range(num + 1, unroll=1):
            scores, gradients = number + 2 * i, plus(number, 2 * i + 1)
            before, columns = plus(dq_step + i, -1), plus(number, 2 * i - 1)
            if i > 0:
                rings.scores.wait_empty(gradients)  # from compute warps: dS is there
                rings.q.wait_full(columns)  # from producers
                if i == 1:
                    rings.dv.wait_empty(tile_idx + 1)  # from compute warps: they have dV
                tensor_memory.after_sync()
                self.start_dK(columns, first_dP, i > 1)
                commit_to_both(rings.q.empty(columns))  # to producers
                rings.dq.wait_empty(before)  # from drain warps: they have the dQ of the step before that
            if i < num:
                rings.q.wait_full(scores)  # from producers
                tensor_memory.after_sync()
                self.start_S(tile_idx, scores, first_column(c, rings.scores, scores))
                commit_to_both(rings.q.empty(scores))  # to producers
                commit_to_both(rings.scores.full(scores))  # to compute warps
                rings.do.wait_full(dq_step + i)  # from producers
                self.start_dP(tile_idx, dq_step + i, first_dP)
                commit_to_both(rings.do.empty(dq_step + i))  # to producers
                commit_to_both(rings.scores.full(gradients))  # to compute warps
            if i > 0:
                if const_expr(c.dQ_over_S):
                    if i < num:
                        rings.scores.wait_empty(scores + 2)  # from compute warps: S is read, in whose place dQ is to be
                rings.exchange.wait_full(before)  # from the second CTA's compute warps: their dS
                rings.exchange.wait_empty(before + 1)  # from its mma warp: this CTA's has come there
                if i == 1:
                    rings.k_columns.wait_full(tile_idx)  # from producers
                tensor_memory.after_sync()
                self.start_dQ(tile_idx, first_S if const_expr(c.dQ_over_S) else c.first_dQ())
                commit_to_both(rings.dq.full(before))  # to drain and compute warps
        commit_to_both(rings.k.empty(tile_idx))  # to producers
        commit_to_both(rings.dk.full(tile_idx))  # to compute warps; the last commit that anybody waits for


class BackwardPairTwoPassSm100(BackwardPairSm100):
    """The backward kernel of one configuration."""

    transfers, compute, mma_warp = PairTwoPassTransfers, PairTwoPassCompute, PairTwoPassMmaWarp
