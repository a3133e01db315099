"""The gradient of a bias on Hopper, by a kernel of its own behind the backward pass: any broadcast shape, no atomics.

A CTA owns a tile of the gradient in the bias's own shape. It goes through all scores that this tile is the sum of: the
batch entries, heads, queries or keys over which the bias was broadcast. Their gradients are computed once more, from
the lse and delta that the backward pass has left. The CTA sums them in registers and writes the tile once. So the sums
are in float32, rounded once, and the same to the bit from run to run. Where a bias has fewer tiles than the GPU has
SMs, a tile's pieces are split between CTAs, which leave float32 sums; a small kernel adds them up in their order.

What limits it is how fast operands come from the L2 cache: 128 KB a piece at d = 128, twice what the tensor cores have
time for. The bias is the same for all pieces of a tile, and copied once.

``python -m flash_attn_cute.kernels describe sm90 bias_gradient --d 128 --features bias`` prints its schedule.

Pieces without visible scores are skipped by all roles. A kernel before this one finds out which pieces a mask leaves.
With one stage of operands, Q and K are loaded while dO and V are multiplied.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_attn_cute.kernels.arguments import BiasGradientArguments
from flash_attn_cute.kernels.common.assembly import set_registers
from flash_attn_cute.kernels.common.bias_pieces import Owner, Piece, Pieces, Tables
from flash_attn_cute.kernels.common.block_lists import bits_of
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.main_kernels import BiasGradientKernel
from flash_attn_cute.kernels.common.score import ScoreScales, hidden, probability
from flash_attn_cute.kernels.common.score_rows import Place, SharedBias
from flash_attn_cute.kernels.common.tma import RowTiles, prefetch_descriptors
from flash_attn_cute.kernels.schedule import PIECE_OPERANDS
from flash_attn_cute.kernels.sm90.backward.bias_gradient_config import BiasGradientConfig
from flash_attn_cute.kernels.sm90.backward.bias_gradient_schedule import bias_gradient_schedule
from flash_attn_cute.kernels.sm90.backward.workspace import permuted
from flash_attn_cute.kernels.sm90.mma import gemm, rows_and_columns, tiled_mma
from flash_attn_cute.kernels.sm90.scores import add_bias, bias_elements, cap, hide, hide_by_bits
from flash_attn_cute.kernels.sm90.shared import swizzled

_WARPGROUPS = 2  # of mma
_BARRIER_SUMS = 1  # named, of the mma warpgroups; 0 is the whole CTA's


class BiasGradientSm90(BiasGradientKernel):
    """The kernel of one configuration."""

    def __init__(self, config: BiasGradientConfig):
        super().__init__(config, bias_gradient_schedule(config), swizzled)

    def mmas(self) -> cute.TiledMma:
        return tiled_mma(self.dtype, self.config.tile_n)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma: tuple[RowTiles, ...],
        a: BiasGradientArguments,
        tables: Tables | None,
        mStats: cute.Tensor,
        partial_sums: cute.Tensor | None,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared memory and barriers, then splits into roles."""
        c, memory, threads = self.config, self.memory, self.schedule.threads
        producer, mma_role = map(self.schedule.role, ("producer", "mma"))
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.memory.allocate()
        rings = memory.rings(storage)
        bias = SharedBias.of(c, a, memory, storage)
        pieces = Pieces.at(rings.pieces, storage.pieces, c.features.packed)
        if warp_idx == 0:
            prefetch_descriptors(tma)
            with cute.arch.elect_one():
                memory.init(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        operands = list(memory.tensors(storage, *PIECE_OPERANDS).values())
        if warp_idx < mma_role.warps.start:
            set_registers(producer.registers, threads)
            if warp_idx == 0:
                self.map.load(a, tables, tma, operands, rings, pieces)
            elif const_expr(c.bias_pitch):
                self.bias_producer(a, bias)
        else:
            set_registers(mma_role.registers, threads)
            sums = storage.sums.get_tensor(cute.make_layout((c.tile_n, 4 * _WARPGROUPS)))
            self.compute(a, tables, mma, mStats, partial_sums, scales, operands, rings, pieces, bias, sums)

    @cute.jit
    def bias_producer(self, a: BiasGradientArguments, shared: SharedBias) -> None:
        """Warps 1 to 3: the tile's bias. All pieces have the same, as it is broadcast over what they differ in."""
        owner = self.map.owner(a)
        num_columns = cutlass.min(a.mBias.shape[3] - owner.n_block * self.config.tile_n, self.config.tile_n)
        rows = self.map.rows_of_bias(a, owner)
        shared.load(Int32(0), rows, owner.n_block * self.config.tile_n, num_columns, cute.arch.thread_idx()[0] - 32)

    @cute.jit
    def compute(
        self,
        a: BiasGradientArguments,
        tables: Tables | None,
        mma: cute.TiledMma,
        mStats: cute.Tensor,
        partial_sums: cute.Tensor | None,
        scales: ScoreScales,
        operands: list[cute.Tensor],
        rings: Any,
        pieces: Pieces,
        shared: SharedBias,
        sums: cute.Tensor,
    ) -> None:
        """An mma warpgroup: 64 queries of every piece."""
        c, f = self.config, self.config.features
        thread = cute.arch.thread_idx()[0] % 128
        w = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        whole, own = mma.get_slice(0), mma.get_slice(thread)
        tQ, tK, tdO, tV = (
            mma.make_fragment_A(whole.partition_A(cute.local_tile(x, (64, columns, c.stages), (w, 0, 0))))
            if i % 2 == 0
            else mma.make_fragment_B(whole.partition_B(x))
            for i, (x, (_, columns)) in enumerate(zip(operands, c.operands, strict=True))
        )
        acc_S = cute.make_rmem_tensor(own.partition_shape_C((64, c.tile_n)), Float32)
        acc_dP, acc_dB = cute.make_rmem_tensor_like(acc_S), cute.make_rmem_tensor_like(acc_S)
        cS = own.partition_C(cute.make_identity_tensor((64, c.tile_n)))
        coordinates = rows_and_columns(cS)
        acc_dB.fill(0.0)
        step, owner = Int32(0), self.map.owner(a)
        rows = self.map.rows_of_bias(a, owner)
        if const_expr(c.bias_pitch):
            shared.ring.wait_full(Int32(0))  # from warps 1 to 3
        for i in cutlass.range(owner.stop - owner.first, unroll=1):
            p = pieces.wait_for(i)
            if p.seen:
                # Ahead of time, as both take long to come.
                stats = self._stats(mStats, p, p.first_query + 64 * w, coordinates)
                words = None
                if const_expr(f.listed):
                    words = bits_of(tables.mBits, p.code, w, thread)
                stage = rings.qk.stage(step)
                rings.qk.wait_full(step)  # from warp 0
                gemm(mma, acc_S, tQ[None, None, None, stage], tK[None, None, None, stage], True)
                rings.dov.wait_full(step)  # from warp 0
                gemm(mma, acc_dP, tdO[None, None, None, stage], tV[None, None, None, stage], True)
                warpgroup.wait_group(1)
                rings.qk.release(step)  # to warp 0
                place = Place(
                    rows=p.q,
                    columns=p.k,
                    head=p.head,
                    batch=p.batch,
                    first_row=p.first_query + 64 * w,
                    first_column=p.first_key,
                    window=Window.of(f, a, p.q.length, p.k.length),
                )
                if const_expr(f.softcap):
                    cap(acc_S, scales.tanh)
                add_bias(acc_S, scales, bias_elements(shared, Int32(0), rows, place, 64 * w, coordinates, True))
                if const_expr(f.listed):
                    if p.code >= 0:
                        hide_by_bits(acc_S, words, hidden(scales.log2))
                if p.hides:
                    hide(acc_S, cS, scales.log2, place, Edges(left=f.left, right=True), hides_rows=True)
                warpgroup.wait_group(0)
                rings.dov.release(step)  # to warp 0
                self._add(acc_S, acc_dP, acc_dB, stats, scales)
                step += 1
            pieces.release(i)
        if const_expr(c.split):
            self.leave_sums(acc_dB, partial_sums, cute.arch.thread_idx()[0] - 128)
        else:
            self._write(a, owner, acc_dB, coordinates, cute.arch.thread_idx()[0] - 128, sums)

    @cute.kernel
    def add_up(self, a: BiasGradientArguments, partial_sums: cute.Tensor) -> None:
        """Sums of CTAs that share a tile, in their order, and writes it."""
        c, thread = self.config, cute.arch.thread_idx()[0]
        own = self.mmas().get_slice(thread % 128)
        acc_dB = cute.make_rmem_tensor(own.partition_shape_C((64, c.tile_n)), Float32)
        coordinates = rows_and_columns(own.partition_C(cute.make_identity_tensor((64, c.tile_n))))
        self.gather_sums(a, acc_dB, partial_sums, thread)
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((c.tile_n, 4 * _WARPGROUPS)))
        self._write(a, self.map.owner(a), acc_dB, coordinates, thread, sums)

    @cute.jit
    def _stats(self, mStats: cute.Tensor, p: Piece, first_row: Int32, coordinates: cute.Tensor) -> cute.Tensor:
        """(row, lse and delta) of this thread's rows of a piece."""
        stats = cute.make_rmem_tensor((cute.size(coordinates, mode=[0]), 2), Float32)
        for r in cutlass.range_constexpr(cute.size(stats, mode=[0])):
            # Of rows behind the sequence those of its last one: their scores are masked, like those of fully masked
            # queries.
            row = cutlass.max(cutlass.min(first_row + coordinates[r, 0][0], p.q.length - 1) - p.num_fully_masked, 0)
            block, within = p.first_block + row // self.config.stats_m, permuted(row % self.config.stats_m)
            for which in cutlass.range_constexpr(2):
                stats[r, which] = mStats[which, p.head, block, within]
        return stats

    @cute.jit
    def _add(
        self, acc_S: cute.Tensor, acc_dP: cute.Tensor, acc_dB: cute.Tensor, stats: cute.Tensor, scales: ScoreScales
    ) -> None:
        """Adds the gradients of a piece's scores."""
        scores, grads, total = (rows_and_columns(x) for x in (acc_S, acc_dP, acc_dB))
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            lse, delta = stats[r, 0], stats[r, 1]
            for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                p = probability(scores[r, i], lse, scales, has_bias=True)
                # Padding may have put NaN into gradients of weights that are none.
                gradient = cutlass.select_(p != 0.0, p * (grads[r, i] - delta), Float32(0.0))
                total[r, i] = total[r, i] + gradient

    @cute.jit
    def _write(
        self,
        a: BiasGradientArguments,
        owner: Owner,
        acc_dB: cute.Tensor,
        coordinates: cute.Tensor,
        thread: Int32,
        sums: cute.Tensor,
    ) -> None:
        """The tile, summed over its queries or keys if the bias was broadcast over them, by all mma threads."""
        c, n, mdBias = self.config, a.numbers, a.mdBias
        total = rows_and_columns(acc_dB)
        num_rows, num_columns = cute.size(total, mode=[0]), cute.size(total, mode=[1])
        batch, q, _, first_query, _, _ = self.map.sequence(a, owner.entry, owner.block)
        lane, w = cute.arch.lane_idx(), thread // 128
        if n.sums_keys > 0:
            for r in cutlass.range_constexpr(num_rows):
                row_sum = total[r, 0]
                for i in cutlass.range_constexpr(1, num_columns):
                    row_sum += total[r, i]
                    total[r, i] = Float32(0.0)
                for j in cutlass.range_constexpr(2):
                    row_sum += cute.arch.shuffle_sync_bfly(row_sum, 1 << j)
                total[r, 0] = row_sum if lane % 4 == 0 else Float32(0.0)
        entry, first_row, last_row = self.map.rows_of_gradient(a, batch, q, first_query)
        first_key = owner.n_block * c.tile_n
        first_column = first_key + coordinates[0, 0][1]
        if n.sums_queries > 0:
            warp = thread // 32
            for i in cutlass.range_constexpr(num_columns):
                column_sum = total[0, i]
                for r in cutlass.range_constexpr(1, num_rows):
                    column_sum += total[r, i]
                for j in cutlass.range_constexpr(2, 5):
                    column_sum += cute.arch.shuffle_sync_bfly(column_sum, 1 << j)
                if lane < 4:
                    sums[coordinates[0, 0][1] + (i // 2 * 8 + i % 2), warp] = column_sum
            cute.arch.barrier(barrier_id=_BARRIER_SUMS, number_of_threads=self.threads)
            column = thread
            if column < c.tile_n and first_key + column < mdBias.shape[3]:
                column_sum = sums[column, 0]
                for j in cutlass.range_constexpr(1, 4 * _WARPGROUPS):
                    column_sum += sums[column, j]
                mdBias[entry, owner.head, 0, first_key + column] = column_sum.to(mdBias.element_type)
        else:
            for r in cutlass.range_constexpr(num_rows):
                row = first_row + 64 * w + coordinates[r, 0][0]
                if row < last_row:
                    gR = mdBias[entry, owner.head, row, None]
                    for i in cutlass.range_constexpr(num_columns):
                        column = first_column + (i // 2 * 8 + i % 2)
                        if column < mdBias.shape[3]:
                            gR[column] = total[r, i].to(mdBias.element_type)
