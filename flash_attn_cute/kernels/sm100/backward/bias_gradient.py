"""The gradient of a bias on Blackwell, by a kernel behind the backward pass: any broadcast shape, no atomics.

A CTA owns a tile of the gradient, or shares it with others, and goes through its pieces (``common.bias_pieces``). It
computes the gradients of their scores once more, from the lse and delta that the backward pass has left, sums them in
registers, and writes the tile once. So the sums are in float32, rounded once, and the same to the bit from run to run.
CTAs that share a tile leave float32 sums; a small kernel adds them up in their order.

``python -m flash_attn_cute.kernels describe sm100 bias_gradient --d 128 --features bias`` prints
``bias_gradient_schedule``.

Pieces without visible scores are skipped by all roles. A kernel before this one finds out which pieces a mask leaves.
All others are *steps*. The tile's bias, which is the same for all pieces, is in tensor memory, in float32.

At the end of a tile the sums go through shared memory, in the place of operands, for which the last products are waited
for. There they are summed over queries or keys that share a bias, and warps write rows of the tile from there.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from flash_attn_cute.kernels.arguments import BiasGradientArguments
from flash_attn_cute.kernels.common.assembly import opaque, set_registers
from flash_attn_cute.kernels.common.bias_pieces import Owner, Piece, Pieces, Tables
from flash_attn_cute.kernels.common.block_lists import bits_of
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.main_kernels import BiasGradientKernel
from flash_attn_cute.kernels.common.score import ScoreScales, probability
from flash_attn_cute.kernels.common.score_tensors import part_of
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.common.tma import RowTiles
from flash_attn_cute.kernels.schedule import PIECE_OPERANDS
from flash_attn_cute.kernels.sm100 import frame, tensor_memory
from flash_attn_cute.kernels.sm100.backward.bias_gradient_config import BiasGradientConfig
from flash_attn_cute.kernels.sm100.backward.bias_gradient_schedule import bias_gradient_schedule
from flash_attn_cute.kernels.sm100.config import MMA_WARP, PRODUCER_WARP
from flash_attn_cute.kernels.sm100.mma import commit, gemm, swizzled, tiled_mma
from flash_attn_cute.kernels.sm100.scores import (
    BiasRow,
    add_in_memory,
    cap_in_memory,
    hide_by_bits_in_memory,
    hide_in_memory,
)

_BARRIER_TILE = 1  # named, of compute warps; 0 is the whole CTA's
_COLUMNS = 32  # of tensor memory that a compute thread reads at once


@dataclass(frozen=True)
class _Shared(frame.Held):
    """Shared memory, and what guards it."""

    operands: list[cute.Tensor]  # (rows, columns, stage), Q, K, dO and V
    tile: cute.Tensor  # (query, key), in their place
    pieces: Pieces


class BiasGradientSm100(BiasGradientKernel):
    """The kernel of one configuration."""

    def __init__(self, config: BiasGradientConfig):
        super().__init__(config, bias_gradient_schedule(config), swizzled)

    def mmas(self) -> cute.TiledMma:
        return tiled_mma(self.dtype, OperandMajorMode.K, self.config.tile_n, tcgen05.OperandSource.SMEM)

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
        """Sets up shared and tensor memory, then splits into roles."""
        compute, mma_role = map(self.schedule.role, ("compute", "mma"))
        warp_idx, _, shared = frame.begin(self, tma)
        if warp_idx < compute.warps.stop:
            set_registers(compute.registers, frame.THREADS)
            warpgroup, thread = warp_idx // 4, cute.arch.thread_idx()[0]
            address = tensor_memory.row_address(shared.tensor_memory, thread % 128) + self.config.keys * warpgroup
            self.compute(_Work(a, tables, mStats, shared, scales, warpgroup, thread % 128, address), partial_sums)
        elif warp_idx < MMA_WARP:
            set_registers(mma_role.registers, frame.THREADS)
        else:
            set_registers(mma_role.registers, frame.THREADS)
            if warp_idx == MMA_WARP:
                self.multiply(a, mma, shared)
            elif warp_idx == PRODUCER_WARP:
                self.map.load(a, tables, tma, shared.operands, shared.rings, shared.pieces)
        frame.end(shared, warp_idx)

    def shared_memory(self, memory: SharedMemory, storage: Any) -> _Shared:
        operands = list(memory.tensors(storage, *PIECE_OPERANDS).values())
        tile = self._tile(cute.recast_ptr(storage.sQ.data_ptr(), dtype=Float32))
        pieces = Pieces.at(memory.ring(storage, "pieces"), storage.pieces, self.config.features.packed)
        return _Shared.of(memory, storage, operands=operands, tile=tile, pieces=pieces)

    def _tile(self, place: cute.Pointer) -> cute.Tensor:
        """The tile in shared memory: neither threads of a row nor those of a column are in each other's way."""
        c = self.config
        return cute.make_tensor(place, cute.make_layout((c.tile_m, c.tile_n), stride=(c.tile_n + 1, 1)))

    @cute.jit
    def multiply(self, a: BiasGradientArguments, mma: cute.TiledMma, shared: _Shared) -> None:
        """One warp: issues all products."""
        c, rings, pieces, own = self.config, shared.rings, shared.pieces, mma.get_slice(0)
        Q, K, dO, V = (
            mma.make_fragment_A(own.partition_A(x)) if i % 2 == 0 else mma.make_fragment_B(own.partition_B(x))
            for i, x in enumerate(shared.operands)
        )
        memory = shared.tensor_memory
        step, owner = Int32(0), self.map.owner(a)
        for i in cutlass.range(owner.stop - owner.first, unroll=1):
            if pieces.wait_for(i).seen:
                stage = rings.qk.stage(step)
                rings.qk.wait_full(step)  # from the producer
                rings.scores.wait_empty(step)  # from compute warps: S of two steps before is read
                tensor_memory.after_sync()
                S = memory + c.first_S(rings.scores.stage(step))
                gemm(mma, S, Q[None, None, None, stage], K[None, None, None, stage], Boolean(False))
                commit(rings.qk.empty(step))  # to the producer
                commit(rings.scores.full(step))  # to compute warps
                rings.dov.wait_full(step)  # from the producer
                rings.dp.wait_empty(step)  # from compute warps: dP of the step before is read
                tensor_memory.after_sync()
                gemm(mma, memory + c.first_dP, dO[None, None, None, stage], V[None, None, None, stage], Boolean(False))
                commit(rings.dov.empty(step))  # to the producer
                commit(rings.dp.full(step))  # to compute warps; the last commit, which they wait for
                step += 1
            pieces.release(i)

    @cute.jit
    def compute(self, work: "_Work", partial_sums: cute.Tensor | None) -> None:
        """A compute warpgroup: half of the keys of every piece."""
        c, a, shared = self.config, work.arguments, work.shared
        step, owner = Int32(0), self.map.owner(a)
        self._read_bias(work, owner)
        sums = cute.make_rmem_tensor(c.keys, Float32)
        sums.fill(0.0)
        for i in cutlass.range(owner.stop - owner.first, unroll=1):
            piece = shared.pieces.wait_for(i)
            if piece.seen:
                self._add(work, sums, piece, step)
                step += 1
            shared.pieces.release(i)
        thread = cute.arch.thread_idx()[0]
        if const_expr(c.split):
            self.leave_sums(sums, partial_sums, thread)
        else:
            self._write(a, owner, sums, shared.tile, thread)

    @cute.jit
    def _read_bias(self, work: "_Work", owner: Owner) -> None:
        """The tile's bias into tensor memory. All pieces have the same, as it is broadcast over what they differ in."""
        c, a = self.config, work.arguments
        rows = self.map.rows_of_bias(a, owner)
        if rows.num > 0:
            gX = part_of(a, a.mBias, rows.q, rows.batch)
            row = BiasRow.of(
                rows.of(gX, cutlass.min(work.thread, rows.num - 1)), a.mBias.shape[3], c.features.strided_bias
            )
            first_key = owner.n_block * c.tile_n + c.keys * work.warpgroup
            for first in cutlass.range(0, c.keys, _COLUMNS, unroll=1):
                bias = row.numbers(row.read(first_key + first, _COLUMNS))
                tensor_memory.store(work.address + c.first_bias + first, bias)
            tensor_memory.before_sync()

    @cute.jit
    def _add(self, work: "_Work", sums: cute.Tensor, piece: Piece, step: Int32) -> None:
        """Adds the gradients of a piece's scores."""
        c, rings = self.config, work.shared.rings
        lse, delta = self._stats(work, piece)  # ahead of time, as they take long to come
        rings.scores.wait_full(step)  # from the tensor cores
        tensor_memory.after_sync()
        place = work.address + c.first_S(rings.scores.stage(step))
        self._change(work, piece, place)
        P = []
        for first in cutlass.range_constexpr(0, c.keys, _COLUMNS):
            P += [probability(s, lse, work.scales, True) for s in tensor_memory.load(place + first, _COLUMNS)]
        tensor_memory.before_sync()
        rings.scores.release(step)  # to the mma warp
        rings.dp.wait_full(step)  # from the tensor cores
        tensor_memory.after_sync()
        for first in cutlass.range_constexpr(0, c.keys, _COLUMNS):
            gradients = tensor_memory.load(work.address + (c.first_dP + first), _COLUMNS)
            for j in cutlass.range_constexpr(_COLUMNS):
                p = P[first + j]
                # Padding may have put NaN into gradients of weights that are none.
                gradient = cutlass.select_(p != 0.0, p * (gradients[j] - delta), Float32(0.0))
                sums[first + j] = sums[first + j] + gradient
        tensor_memory.before_sync()
        rings.dp.release(step)  # to the mma warp

    def _stats(self, work: "_Work", piece: Piece) -> tuple[Float32, Float32]:
        """Lse and delta of this thread's query.

        Of queries behind the sequence those of its last one: their scores are masked, like those of fully masked
        queries.
        """
        row = cutlass.max(cutlass.min(piece.first_query + work.thread, piece.q.length - 1) - piece.num_fully_masked, 0)
        block, within = piece.first_block + row // self.config.stats_m, row % self.config.stats_m
        lse, delta = (work.stats[which, piece.head, block, within] for which in range(2))
        return lse, delta

    @cute.jit
    def _change(self, work: "_Work", piece: Piece, place: Int32) -> None:
        """Caps scores, adds the bias, and hides those that a mask or an edge does, where they are in tensor memory."""
        c, f, a, scale_log2 = self.config, self.config.features, work.arguments, work.scales.log2
        if const_expr(f.softcap):
            cap_in_memory(place, c.keys, work.scales.tanh)
        for first in cutlass.range_constexpr(0, c.keys, _COLUMNS):
            bias = tensor_memory.load(work.address + (c.first_bias + first), _COLUMNS)
            add_in_memory(place + first, work.scales.bias, bias)
        if const_expr(f.listed):
            if piece.code >= 0:
                words = bits_of(work.tables.mBits, piece.code, Int32(0), work.thread)
                own = [
                    cutlass.select_(work.warpgroup == 0, words[w], words[c.keys // 32 + w]) for w in range(c.keys // 32)
                ]
                hide_by_bits_in_memory(place, scale_log2, own)
        if piece.hides:
            query, first_key = piece.first_query + work.thread, piece.first_key + c.keys * work.warpgroup
            rows, columns, edges = piece.q.length, piece.k.length, Edges(left=f.left, right=True)
            window = Window.of(f, a, rows, columns)
            hide_in_memory(place, c.keys, scale_log2, query, first_key, columns, window, edges, rows)

    @cute.kernel
    def add_up(self, a: BiasGradientArguments, partial_sums: cute.Tensor) -> None:
        """Sums of CTAs that share a tile, in their order, and writes it."""
        c, thread = self.config, cute.arch.thread_idx()[0]
        sums = cute.make_rmem_tensor(c.keys, Float32)
        self.gather_sums(a, sums, partial_sums, thread)
        layout = cute.make_layout(c.tile_m * (c.tile_n + 1))
        place = cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout)
        self._write(a, self.map.owner(a), sums, self._tile(place.iterator), thread)

    @cute.jit
    def _write(
        self, a: BiasGradientArguments, owner: Owner, sums: cute.Tensor, tile: cute.Tensor, thread: Int32
    ) -> None:
        """The tile, summed over its queries or keys if the bias was broadcast over them; by all threads that compute.

        ``sums`` of a thread are those of a query and half of the keys.
        """
        c, n, mdBias = self.config, a.numbers, a.mdBias
        for j in cutlass.range_constexpr(c.keys):
            tile[thread % 128, thread // 128 * c.keys + j] = sums[j]
        self._meet()
        if n.sums_keys > 0:
            if thread < c.tile_m:
                row = tile[thread, None]
                total = row[0]
                for j in cutlass.range(1, c.tile_n):
                    total += row[j]
                row[0] = total
            self._meet()
        batch, q, _, first_query, _, _ = self.map.sequence(a, owner.entry, owner.block)
        entry, first_row, last_row = self.map.rows_of_gradient(a, batch, q, first_query)
        first_key = owner.n_block * c.tile_n
        num_keys = cutlass.min(mdBias.shape[3] - first_key, c.tile_n)
        gX = cute.domain_offset((0, first_key), mdBias[entry, owner.head, None, None])
        if n.sums_queries > 0:
            if thread < num_keys:
                column = tile[None, thread]
                total = column[0]
                for i in cutlass.range(1, c.tile_m):
                    total += column[i]
                gX[0, thread] = total.to(mdBias.element_type)
        else:
            warp = opaque(thread // 32)  # or its register is the loop's, and the lint knows warps no more
            for i in cutlass.range(warp, cutlass.min(last_row - first_row, c.tile_m), self.threads // 32):
                for j in cutlass.range(thread % 32, num_keys, 32):
                    gX[first_row + i, j] = tile[i, j].to(mdBias.element_type)

    def _meet(self) -> None:
        """All threads that compute, to see what they have put where TMA wrote and the tensor cores read."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_BARRIER_TILE, number_of_threads=self.threads)


@dataclass(frozen=True)
class _Work:
    """State of a thread of a compute warpgroup."""

    arguments: BiasGradientArguments
    tables: Tables | None
    stats: cute.Tensor  # (lse and delta, heads, blocks, stats_m)
    shared: _Shared
    scales: ScoreScales
    warpgroup: Int32
    thread: Int32  # of the warpgroup: its query
    address: Int32  # of this thread's row in tensor memory, from the warpgroup's first key on
