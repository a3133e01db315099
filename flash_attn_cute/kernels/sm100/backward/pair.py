"""Attention backward on Blackwell by pairs of CTAs: a tile of 256 keys is the work of a cluster of two.

At d = d_v = 128 blocks have 128 queries, and at (192, 128) they have 64. The tensor cores of a pair compute products
together (``cta_group::2``). Each CTA holds its half of what a product sums in its own tensor memory, and reads
of the right operand only its own half from shared memory: the other half comes from the other CTA. As shared memory is
what binds this pass, a pair gains by it; and it adds to dQ half as often as two CTAs with 128 keys each. (All of this
is FlashAttention-4's, at d = 128.)

``python -m flash_attn_cute.kernels describe sm100 backward --d 128 --rows 8192`` prints ``backward_schedule``. Roles
are those of ``cta``. A CTA of the pair has 128 keys of a tile. The leader (rank 0) issues the products of both CTAs,
and publishes tiles to both; each loads for its own CTA. Each CTA drains half of a step's dQ, over the keys of both, and
adds it with semaphores of its own.

Products, by which halves a CTA r has (rows are ``left``'s and the sum's, columns ``right``'s); m is a block's queries:
                          sum, in tensor memory         left                               right, in shared memory
    S' = K Q'             keys r x m queries            K: keys r x d                      Q: queries r x d
    dP' = V dO'           keys r x m queries            V: keys r x d_v                    dO: queries r x d_v
    dV += P' dO           keys r x d_v                  P', tensor memory: keys r          dO: m queries x columns r
    dK += dS' Q           keys r x d                    dS', tensor memory: keys r         Q: m queries x columns r
    dQ = dS K             queries r x d                 dS: 256 keys x queries r           K: 256 keys x columns r
    or dQ' = K' dS        128 columns x m queries       K: 256 keys x 128 columns          dS: 256 keys x queries r
So Q, dO and K are there twice, split along either dimension. One descriptor serves both CTAs: the same operand lies at
the same place in both. For dQ, the compute warpgroup that has the other CTA's queries sends its dS there, a warp 4 KB,
or 2.

Of (192, 128) dQ is transposed, as 64 queries are not as many as the lanes of both CTAs. The product has 256 lanes for
192 columns: CTA r computes columns 64 r .. 64 r + 127, and adds columns 96 r .. 96 r + 95, which are its first lanes or
its last. Half of 192 columns of Q, and 32 queries of dS, are not a multiple of 64: of a row 32 are contiguous there.

At d = 128 P of the first warpgroup takes the first quarter of S in tensor memory, that of the second the last. dQ of 64
columns (64 queries, whose columns from 64 on are in lanes from 64 on) takes the two quarters between. So dQ may be
computed when S has been read, and the next S when dQ has. At (192, 128) dQ has a place of its own.

dQ is issued behind the next dP, as it waits for dS from the other CTA. Products are done in the order in which they
were issued, and a commit arrives when all before it are done. Hence:
  - S(t + 1) may take the place of P(t), which dV(t) reads ahead of it, and dP(t + 1) that of dS(t), which dK(t) reads.
  - Compute warps wait for dQ(t) before they write dS(t + 1) to shared memory. Then dS(t) has been read in both CTAs,
    and its two places are free: the operand's, and the one that is sent from.
  - At d = 128 the mma warp waits before dQ(t) until S(t + 1) has been read, and before S(t + 2) for the drain. At
    (192, 128) it waits for the drain before dQ(t + 1).
  - dV and dK of a tile's first step overwrite, when compute warps of both CTAs have read those of the last tile.
dV leaves through the place of V, and dK through that of K, when all products of the tile that read these are done.
"""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.rows import rows_first
from flash_attn_cute.kernels.common.tma import BackwardTiles, make_row_tiles
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.backward.cta import BackwardCtaSm100, Compute, MmaWarp
from flash_attn_cute.kernels.sm100.backward.cta_scores import COLUMNS, Block
from flash_attn_cute.kernels.sm100.backward.cta_shared import OUT, PairShared
from flash_attn_cute.kernels.sm100.backward.pair_transfers import PairTransfers
from flash_attn_cute.kernels.sm100.backward.two_pass import first_column
from flash_attn_cute.kernels.sm100.config import O_COLUMNS, PART_ROWS
from flash_attn_cute.kernels.sm100.mma import commit_to_both, swizzled


class PairCompute(Compute):
    """A compute warpgroup of a pair's CTA, which sends dS of the other CTA's queries there."""

    shared: PairShared

    def compute_P(self, block: Block, step: Int32, number: Int32, first: Int32 | int) -> list[Int32]:
        """Computes P as ``Scores`` does, from scores that are all read before P takes their place."""
        c, shared, rings = self.config, self.shared, self.shared.rings
        scores, found = tensor_memory.load(self.await_scores(block, step, number, first), c.queries), []
        if c.dQ_over_S:
            tensor_memory.before_sync()
            rings.scores.release(number)  # to the mma warp: S is read
        place, lse = self.address + (first + c.P_stride * self.warpgroup), shared.lse[None, rings.stats.stage(step)]
        for column in range(0, c.queries, COLUMNS):
            P, times_slope = self.P_of(scores[column : column + COLUMNS], column, lse)
            tensor_memory.store(place + column // 2, P)
            found += times_slope
        tensor_memory.before_sync()
        rings.p.arrive(step)  # to the mma warp: P is there
        return found

    def await_scores(self, block: Block, step: Int32, number: Int32, first: Int32 | int | None) -> Int32:
        """Waits for scores, and changes them. Returns the address of the thread's."""
        rings = self.shared.rings
        rings.stats.wait_full(step)  # from the producer
        rings.scores.wait_full(number)  # from the tensor cores
        tensor_memory.after_sync()
        place = self._place(rings.scores, number, first)
        self.change(block, place)
        return place

    def _place(self, ring: Ring, number: Int32, first: Int32 | int | None) -> Int32:
        """``place`` of S, or dP, from its first column; None: that of its number, in two passes."""
        return self.place(first_column(self.config, ring, number) if first is None else first)

    @cute.jit
    def compute_dS(
        self, P: Constexpr, block: Block, step: Int32, dq_step: Int32, ring: Constexpr, number: Int32, first: Constexpr
    ) -> None:
        """See ``Scores``. dS is where it is multiplied, or on its way there, in the exchange of ``dq_step``."""
        shared, rings, one_pass = self.shared, self.shared.rings, self.config.num_passes == 1
        # From the tensor cores: the last step's dS is read no more, here and in the other CTA.
        await_room = partial(rings.dq.wait_full, dq_step - 1)
        ring.wait_full(number)  # from the tensor cores
        if const_expr(one_pass):
            await_room()
        tensor_memory.after_sync()
        delta = shared.delta[None, rings.stats.stage(step)]
        self.write_dS(self._place(ring, number, first), P, delta, None if const_expr(one_pass) else await_room)
        tensor_memory.before_sync()
        if self.warpgroup == shared.rank:
            cute.arch.fence_proxy("async.shared", space="cta")
        else:
            shared.send_dS(dq_step, self.thread // 32)
        ring.release(number)  # to the mma warp: dS is there
        rings.stats.release(step)  # to the producer

    def place_of_dS(self) -> tuple[cute.Tensor, Int32 | int]:
        """Place for dS: the operand's for the CTA's own queries, the one to send from for the other CTA's."""
        rank = self.shared.rank
        place = cutlass.select_(self.warpgroup == rank, rank, Int32(OUT))
        return self.shared.sdS[None, None, place], 0


class PairMmaWarp(MmaWarp):
    """The leader's warp that issues the products of both CTAs."""

    @cute.jit
    def __call__(self) -> None:
        """S and dP of a step ahead of dQ of the one before."""
        c, a, shared, rings = self.config, self.a, self.shared, self.shared.rings
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the leader's producer
            rings.k.wait_full(tile_idx)  # from producers
            for i in cutlass.range(num_steps, unroll=1):
                rings.q.wait_full(step)  # from producers
                if const_expr(c.dQ_over_S):
                    # From drain warps: they have all dQ that has been begun, of a tile's first step that of the last.
                    rings.dq.wait_empty(step - cutlass.min(i, 1))
                    tensor_memory.after_sync()
                self.start_S(tile_idx, step, c.first_S)
                commit_to_both(rings.q.empty(step))  # to producers
                commit_to_both(rings.scores.full(step))  # to compute warps
                if i > 0:
                    self._issue_dK(tile_idx, step - 1, i == 1)
                else:
                    rings.v.wait_full(tile_idx)  # from producers
                rings.do.wait_full(step)  # from producers
                self.start_dP(tile_idx, step, c.first_dP)
                commit_to_both(rings.do.empty(step))  # to producers
                commit_to_both(rings.dp.full(step))  # to compute warps
                if i > 0:
                    if const_expr(c.dQ_over_S):
                        rings.scores.wait_empty(step + 1)  # from compute warps: S is read, in whose place dQ is to be
                    self._issue_dQ(tile_idx, step - 1, i == 1)
                rings.p.wait_full(step)  # from compute warps
                rings.do_columns.wait_full(step)  # from producers
                if i == 0:
                    rings.dv.wait_empty(tile_idx)  # from compute warps: they have the last tile's dV
                tensor_memory.after_sync()
                self.start_dV(step, c.first_S, i > 0)
                commit_to_both(rings.do_columns.empty(step))  # to producers
                step += 1
            commit_to_both(rings.dv.full(tile_idx))  # to compute warps
            self._issue_dK(tile_idx, step - 1, num_steps == 1)
            if const_expr(c.dQ_over_S):
                rings.dq.wait_empty(step - 1)  # from drain warps: they have the dQ of the step before
            self._issue_dQ(tile_idx, step - 1, num_steps == 1)
            commit_to_both(rings.k_columns.empty(tile_idx))  # to producers
            commit_to_both(rings.dk.full(tile_idx))  # to compute warps; the last commit that anybody waits for
            tile_idx += 1

    @cute.jit
    def _issue_dK(self, tile_idx: Int32, step: Int32, is_first: Boolean) -> None:
        """Begins dK of a step, which may be its tile's first, when its operands are there."""
        c, rings = self.config, self.shared.rings
        rings.dp.wait_empty(step + 1)  # from compute warps: dS is there
        rings.q_columns.wait_full(step)  # from producers
        if is_first:
            rings.dk.wait_empty(tile_idx)  # from compute warps: they have the last tile's dK
        tensor_memory.after_sync()
        self.start_dK(step, c.first_dP, not is_first)
        commit_to_both(rings.q_columns.empty(step))  # to producers

    @cute.jit
    def _issue_dQ(self, tile_idx: Int32, step: Int32, is_first: Boolean) -> None:
        """Begins dQ of a step, which may be its tile's first, when its operands are there."""
        c, rings = self.config, self.shared.rings
        if const_expr(not c.dQ_over_S):
            rings.dq.wait_empty(step)  # from drain warps: they have the dQ of the step before
        rings.exchange.wait_full(step)  # from the second CTA's compute warps: their dS
        rings.exchange.wait_empty(step + 1)  # from its mma warp: this CTA's has come there
        if is_first:
            rings.k_columns.wait_full(tile_idx)  # from producers
        tensor_memory.after_sync()
        self.start_dQ(tile_idx, c.first_dQ())
        commit_to_both(rings.dq.full(step))  # to drain and compute warps


class BackwardPairSm100(BackwardCtaSm100):
    """The backward kernel of one configuration."""

    transfers, compute, mma_warp, shared_memory = PairTransfers, PairCompute, PairMmaWarp, PairShared.of

    def load_operation(self) -> Any:
        """See ``MainKernel``: bytes for both CTAs arrive at the leader's barriers."""
        return cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)

    def tma(self, a: BackwardArguments, mdK: cute.Tensor, mdV: cute.Tensor) -> BackwardTiles:
        c, packed, mK = self.config, self.config.features.packed, rows_first(a.mK, self.config.features.packed)
        tensors = {"Q": a.mQ, "Q_columns": a.mQ, "dO": a.mdO, "dO_columns": a.mdO, "K": a.mK, "V": a.mV}
        loaded = {name: self.loaded_tiles(f"s{name}", x) for name, x in tensors.items()}
        if c.holds_keys:  # whose bytes count in their own CTA
            loaded["K"] = self.memory.row_tiles(cpasync.CopyBulkTensorTileG2SOp(), "sK", mK, packed)
        piece = swizzled(self.dtype, O_COLUMNS, (PART_ROWS, O_COLUMNS))
        loaded["K_columns"] = make_row_tiles(self.load_operation(), mK, piece, (PART_ROWS, O_COLUMNS), packed)
        return BackwardTiles(**loaded, **self._tiles_out(mdK, mdV))
