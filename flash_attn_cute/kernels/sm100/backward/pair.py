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

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.rows import rows_first
from flash_attn_cute.kernels.common.tma import BackwardTiles, make_row_tiles
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.cta import BackwardCtaSm100
from flash_attn_cute.kernels.sm100.backward.cta_scores import COLUMNS, Scores, Work
from flash_attn_cute.kernels.sm100.backward.cta_shared import OUT, PairShared
from flash_attn_cute.kernels.sm100.backward.pair_transfers import PairTransfers
from flash_attn_cute.kernels.sm100.backward.products import Mmas, Products
from flash_attn_cute.kernels.sm100.config import O_COLUMNS, PART_ROWS
from flash_attn_cute.kernels.sm100.mma import commit_to_both, swizzled


class BackwardPairSm100(BackwardCtaSm100):
    """The backward kernel of one configuration."""

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.transfers = PairTransfers(config)
        self.scores = PairScores(config)

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

    def _shared(self, storage: Any) -> PairShared:
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        names = ("sK_columns", "sQ_columns", "sdO_columns", *(("sdV",) if self.config.holds_keys else ()))
        return PairShared.of(self.memory, storage, rank=rank, **self.memory.tensors(storage, *names))

    @cute.jit
    def mma(self, a: BackwardArguments, mmas: Mmas, shared: PairShared) -> None:
        """A warp of each CTA, of which only the leader's issues products."""
        if shared.is_leader:
            self._multiply(a, mmas, shared)
        else:
            self._signal_dS(a, shared)

    @cute.jit
    def _multiply(self, a: BackwardArguments, mmas: Mmas, shared: PairShared) -> None:
        """The products of both CTAs, S and dP of a step ahead of dQ of the one before."""
        c, rings = self.config, shared.rings
        products = Products.of(c, mmas, shared)
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
                products.start_S(tile_idx, step, c.first_S)
                commit_to_both(rings.q.empty(step))  # to producers
                commit_to_both(rings.scores.full(step))  # to compute warps
                if i > 0:
                    self._start_dK(products, shared, tile_idx, step - 1, i == 1)
                else:
                    rings.v.wait_full(tile_idx)  # from producers
                rings.do.wait_full(step)  # from producers
                products.start_dP(tile_idx, step, c.first_dP)
                commit_to_both(rings.do.empty(step))  # to producers
                commit_to_both(rings.dp.full(step))  # to compute warps
                if i > 0:
                    if const_expr(c.dQ_over_S):
                        rings.scores.wait_empty(step + 1)  # from compute warps: S is read, in whose place dQ is to be
                    self._start_dQ(products, shared, tile_idx, step - 1, i == 1)
                rings.p.wait_full(step)  # from compute warps
                rings.do_columns.wait_full(step)  # from producers
                if i == 0:
                    rings.dv.wait_empty(tile_idx)  # from compute warps: they have the last tile's dV
                tensor_memory.after_sync()
                products.start_dV(step, c.first_S, i > 0)
                commit_to_both(rings.do_columns.empty(step))  # to producers
                step += 1
            commit_to_both(rings.dv.full(tile_idx))  # to compute warps
            self._start_dK(products, shared, tile_idx, step - 1, num_steps == 1)
            if const_expr(c.dQ_over_S):
                rings.dq.wait_empty(step - 1)  # from drain warps: they have the dQ of the step before
            self._start_dQ(products, shared, tile_idx, step - 1, num_steps == 1)
            commit_to_both(rings.k_columns.empty(tile_idx))  # to producers
            commit_to_both(rings.dk.full(tile_idx))  # to compute warps; the last commit that anybody waits for
            tile_idx += 1

    @cute.jit
    def _start_dK(
        self, products: Products, shared: PairShared, tile_idx: Int32, step: Int32, is_first: Boolean
    ) -> None:
        """Begins dK of a step, which may be its tile's first."""
        c, rings = self.config, shared.rings
        rings.dp.wait_empty(step + 1)  # from compute warps: dS is there
        rings.q_columns.wait_full(step)  # from producers
        if is_first:
            rings.dk.wait_empty(tile_idx)  # from compute warps: they have the last tile's dK
        tensor_memory.after_sync()
        products.start_dK(step, c.first_dP, not is_first)
        commit_to_both(rings.q_columns.empty(step))  # to producers

    @cute.jit
    def _start_dQ(
        self, products: Products, shared: PairShared, tile_idx: Int32, step: Int32, is_first: Boolean
    ) -> None:
        """Begins dQ of a step, which may be its tile's first."""
        c, rings = self.config, shared.rings
        if const_expr(not c.dQ_over_S):
            rings.dq.wait_empty(step)  # from drain warps: they have the dQ of the step before
        rings.exchange.wait_full(step)  # from the second CTA's compute warps: their dS
        rings.exchange.wait_empty(step + 1)  # from its mma warp: this CTA's has come there
        if is_first:
            rings.k_columns.wait_full(tile_idx)  # from producers
        tensor_memory.after_sync()
        products.start_dQ(tile_idx, c.first_dQ())
        commit_to_both(rings.dq.full(step))  # to drain and compute warps

    @cute.jit
    def _signal_dS(self, a: BackwardArguments, shared: PairShared) -> None:
        """Signals the leader, in the second CTA, that its dS has come."""
        c, exchange = self.config, shared.rings.exchange
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the leader's producer
            for _ in cutlass.range(num_steps, unroll=1):
                exchange.wait_full(step)  # from the leader's compute warps
                exchange.release(step)  # to the leader's mma warp
                step += 1
            tile_idx += 1

    @cute.jit
    def _step(self, work: Work, tile_idx: Int32, nth: Int32, i: Int32, step: Int32) -> None:
        """Computes a warpgroup's half of a step: the i-th block of the tile's nth head."""
        c, shared, rings = self.config, work.shared, work.shared.rings
        rings.stats.wait_full(step)  # from the producer
        rings.scores.wait_full(step)  # from the tensor cores
        tensor_memory.after_sync()
        stage, place = rings.stats.stage(step), work.address + (c.first_S + c.queries * work.warpgroup)
        self.scores.change(work, self.scores.block(work, tile_idx, nth, i, step), place)
        scores = tensor_memory.load(place, c.queries)
        if const_expr(c.dQ_over_S):
            tensor_memory.before_sync()
            rings.scores.release(step)  # to the mma warp: S is read
        P, place = [], work.address + (c.first_S + c.P_stride * work.warpgroup)
        for first in cutlass.range_constexpr(0, c.queries, COLUMNS):
            some = scores[first : first + COLUMNS]
            in_pairs, times_slope = self.scores.P_of(work, some, first, shared.lse[None, stage])
            tensor_memory.store(place + first // 2, in_pairs)
            P += times_slope
        tensor_memory.before_sync()
        rings.p.arrive(step)  # to the mma warp: P is there
        rings.dp.wait_full(step)  # from the tensor cores
        rings.dq.wait_full(step - 1)  # likewise: the last step's dS is read no more, here and in the other CTA
        tensor_memory.after_sync()
        place = work.address + (c.first_dP + c.queries * work.warpgroup)
        self.scores.hand_over(work, place, P, shared.delta[None, stage], step)
        rings.dp.release(step)  # to the mma warp: dS is there
        rings.stats.release(step)  # to the producer


class PairScores(Scores):
    """Scores of a backward step in a CTA of a pair."""

    def place_of_dS(self, work: Work) -> tuple[cute.Tensor, Int32 | int]:
        """Place for dS: the operand's for the CTA's own queries, the one to send from for the other CTA's."""
        rank = work.shared.rank
        place = cutlass.select_(work.warpgroup == rank, rank, Int32(OUT))
        return work.shared.sdS[None, None, place], 0

    @cute.jit
    def hand_over(
        self,
        work: Work,
        place: Int32,
        P: Constexpr,
        delta: cute.Tensor,
        exchange: Int32,
        await_room: Constexpr = lambda: None,
    ) -> None:
        """Calls ``write_dS``. dS is where it is multiplied, or on its way there, in the exchange of that number."""
        self.write_dS(work, place, P, delta, await_room)
        tensor_memory.before_sync()
        if work.warpgroup == work.shared.rank:
            cute.arch.fence_proxy("async.shared", space="cta")
        else:
            work.shared.send_dS(exchange, work.thread // 32)
