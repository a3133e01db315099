"""Attention forward on Hopper.

``python -m flash_attn_cute.kernels describe sm90 forward --d 128`` prints its schedule (``forward_schedule``).

Warpgroup 0 chooses tiles and loads; a tile whose first query is -1 ends the work. In the mainloop n counts down. A
named barrier keeps the order in which warpgroups use the tensor cores, so that the softmax of one runs beside the
products of the others (as in FlashAttention-3, Shah et al., arXiv 2407.08608). At the end of a tile S(n) is the next
tile's first, and O is stored while the other warpgroups have the tensor cores. So only the first tile of a CTA waits
for its loads. Where shared memory has no room for the next tile's Q and for O, a CTA has but one tile.

Masks of windows and sequence ends are applied only in blocks that an edge can cross: the mainloop is cut into parts
(``Blocks.parts``). Under a mask a tile iterates over a list of blocks instead (``common.block_lists``), which kernels
before this one make from the mask, or which a block mask brings. With K of a block, warp 0 publishes the block's index
and the place of the bits that mask its scores.

A bias comes through shared memory: by TMA, where its rows allow that, else copied by warps 1 to 3. A strided one is
loaded element by element. Where a configuration ``adds_to_bias``, a row of a bias that all queries share is in the
accumulators before the products. It takes neither registers nor additions there, so that tiles are as large as
without it.

Tiles of packed sequences load and store through ragged views (``common.tma``): rows behind a
sequence's end read as zeros, so NaN behind it cannot reach P V, and are not written. Padding rows of out and lse are
zeroed by the warpgroup whose tile they fall in. (A dense batch with padding is packed to this kernel: every slot of
equal size.)

Where tiles have rows of several heads, or out is float32, O leaves from registers, row by row.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState, PipelineUserType, make_pipeline_state

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.assembly import set_registers
from flash_attn_cute.kernels.common.block_lists import Tables, bits_of
from flash_attn_cute.kernels.common.blocks import Edges, Part, Window
from flash_attn_cute.kernels.common.main_kernels import ForwardKernel, ForwardMmas
from flash_attn_cute.kernels.common.max_logits import raise_max_logit, raise_max_logit_by_warp
from flash_attn_cute.kernels.common.query_tiles import QueryTile
from flash_attn_cute.kernels.common.rows import rows_first, scores_first, zero_rows
from flash_attn_cute.kernels.common.score import LOG2_E, ScoreScales, hidden
from flash_attn_cute.kernels.common.score_rows import Place, SharedBias
from flash_attn_cute.kernels.common.tma import ForwardTiles, RowTiles, prefetch_descriptors
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward_schedule import forward_schedule
from flash_attn_cute.kernels.sm90.forward_transfers import NO_EDGES, Entry, Shared, Transfers
from flash_attn_cute.kernels.sm90.mma import (
    as_operand_a,
    convert,
    rows_and_columns,
    store_residuals,
    store_row,
    tiled_mma,
)
from flash_attn_cute.kernels.sm90.scores import (
    add_bias,
    add_bias_tile,
    bias_elements,
    cap,
    fill_with_bias_row,
    hide,
    hide_by_bits,
    load_row_interval,
    mask_outside_interval,
    raise_logits,
    read_bias_row,
)
from flash_attn_cute.kernels.sm90.shared import read_a, read_c, swizzled, tma_pipeline, transposed, write
from flash_attn_cute.kernels.sm90.softmax import OnlineSoftmax

# Named barriers; 0 is the whole CTA's.
_BARRIER_TENSOR_CORES = 1  # one a warpgroup
_BARRIER_EPILOGUE = 4  # one a warpgroup


class ForwardSm90(ForwardKernel):
    """The forward kernel of one configuration."""

    transfers: Any = Transfers

    def __init__(self, config: ForwardConfig):
        super().__init__(config, forward_schedule(config), swizzled)
        self.warpgroups = config.num_mma_warpgroups
        self.queries = 64 // config.group  # of a warpgroup
        self.stores_rows = config.group > 1 or self.has_no_sO

    def mmas(self) -> ForwardMmas:
        c = self.config
        return ForwardMmas(
            S=tiled_mma(self.dtype, c.tile_n, a_in_registers=c.q_in_registers),
            O=tiled_mma(self.dtype, c.tile_dv, mn_major="b", a_in_registers=True),
        )

    def tma(self, a: ForwardArguments, mO: cute.Tensor) -> ForwardTiles:
        """See ``ForwardKernel``; of a bias, too, where its rows allow that."""
        tiles = super().tma(a, mO)
        if self.config.features.tiled_bias:
            load, mBias = self.load_operation(), scores_first(a.mBias)
            tiles = tiles._replace(bias=self.memory.row_tiles(load, "sBiasTile", mBias, False))
        return tiles

    @cute.kernel
    def kernel(
        self,
        mmas: ForwardMmas,
        tma: ForwardTiles,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        arguments: ForwardArguments,
        tables: Tables | None,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared memory and pipelines, then splits into roles."""
        c, schedule = self.config, self.schedule
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            prefetch_descriptors(tma)
        shared = self._set_up(arguments, self.memory.allocate(), warp_idx)
        if warp_idx < 4:
            set_registers(schedule.role("producer").registers, schedule.threads)
            transfers = self.transfers(c, arguments, tables, tma, shared)
            if warp_idx == 0:
                transfers.producer()
            if const_expr(c.bias_pitch):
                if warp_idx > 0:
                    transfers.bias_producer()
        else:
            set_registers(schedule.role("mma").registers, schedule.threads)
            given = {"arguments": arguments, "tables": tables, "tO": tma.O, "mO": mO, "mLSE": mLSE}
            self.mma(self._work(mmas, shared, scales, **given))

    @cute.jit
    def _set_up(self, a: ForwardArguments, storage: Any, warp_idx: Int32) -> Shared:
        """Initialises the barriers in shared memory."""
        schedule, memory = self.schedule, self.memory
        tiles, k, v = (memory.ring(storage, name) for name in ("tiles", "k", "v"))
        tile_full, tile_empty = tiles.barriers, tiles.barriers + tiles.stages
        if warp_idx == 0:
            with cute.arch.elect_one():
                memory.init(storage, "tiles", "bias")
        pipe_K, pipe_V = (tma_pipeline(schedule.pipeline(name), ring.barriers) for name, ring in (("k", k), ("v", v)))
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        tiled = memory.tensors(storage, "sBiasTile") if self.config.features.tiled_bias else {"sBiasTile": None}
        return Shared(
            **memory.tensors(storage, "sQ", "sK", "sV", "sO", "tiles", "entries"),
            **tiled,
            tile_full=tile_full,
            tile_empty=tile_empty,
            pipe_K=pipe_K,
            pipe_V=pipe_V,
            bias=SharedBias.of(self.config, a, memory, storage),
        )

    @cute.jit
    def mma(self, work: "_Work") -> None:
        """An mma warpgroup: 64 queries of every tile, from their first block of keys to out and lse."""
        c, shared = self.config, work.shared
        if work.warpgroup == self.warpgroups - 1:  # the tensor cores are warpgroup 0's first
            cute.arch.barrier_arrive(barrier_id=_BARRIER_TENSOR_CORES, number_of_threads=256)
        tile_state = make_pipeline_state(PipelineUserType.Consumer, c.tile_stages)
        k_state = make_pipeline_state(PipelineUserType.Consumer, c.stages)
        v_state = make_pipeline_state(PipelineUserType.Consumer, c.stages)
        cute.arch.mbarrier_wait(shared.tile_full, 0)  # from warp 0: the first tile
        working = shared.tiles[0, 0] >= 0
        num_blocks = QueryTile.read(c, shared.tiles[None, 0]).blocks.num
        if working and num_blocks > 0:
            self._receive_Q(work, tile_state.index)
            shared.pipe_K.consumer_wait(k_state)
            self._fill_S(work, k_state.count)
            self._start_S(work, tile_state.index, k_state.index)
            warpgroup.wait_group(0)
            shared.pipe_K.consumer_release(k_state)
            k_state.advance()
        while working:
            stage = tile_state.index
            work.acc_O.fill(0.0)
            work.softmax.reset()
            if const_expr(self.keeps_max_logits):
                work.max_logits.fill(-Float32.inf)
            if num_blocks > 0:
                k_state, v_state = self._mainloop(work, stage, k_state, v_state)
            tile_state.advance()
            following = Int32(0)
            working = Boolean(False)
            if const_expr(c.persistent):
                cute.arch.mbarrier_wait(shared.tile_full + tile_state.index, tile_state.phase)  # the next tile
                working = shared.tiles[0, tile_state.index] >= 0
                following = QueryTile.read(c, shared.tiles[None, tile_state.index]).blocks.num if working else Int32(0)
                if following > 0:
                    self._receive_Q(work, tile_state.index)
                    shared.pipe_K.consumer_wait(k_state)
                    self._fill_S(work, k_state.count)
            if num_blocks > 0:
                shared.pipe_V.consumer_wait(v_state)
                if following > 0:
                    self._acquire_tensor_cores(work)
                    self._start_S(work, tile_state.index, k_state.index)
                    self._start_O(work, v_state.index)
                    self._pass_tensor_cores(work)
                    warpgroup.wait_group(0)
                else:
                    self._start_O(work, v_state.index)
                    warpgroup.wait_group(0)
                shared.pipe_V.consumer_release(v_state)
                v_state.advance()
            elif following > 0:
                self._start_S(work, tile_state.index, k_state.index)
                warpgroup.wait_group(0)
            if following > 0:
                shared.pipe_K.consumer_release(k_state)
                k_state.advance()
            self.epilogue(work, stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.tile_empty + stage)
            num_blocks = following
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until it has been read

    def _work(self, mmas: ForwardMmas, shared: Any, scales: ScoreScales, **given: Any) -> "_Work":
        """Operands and accumulators of this mma warpgroup, beside fields that are given."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        w = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        slice_S, slice_O = mmas.S.get_slice(thread), mmas.O.get_slice(thread)
        # Operands in shared memory are described once a warpgroup: by its first thread's slice.
        whole_S, whole_O = mmas.S.get_slice(0), mmas.O.get_slice(0)
        acc_S = cute.make_rmem_tensor(slice_S.partition_shape_C((64, c.tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(slice_O.partition_shape_C((64, c.tile_dv)), Float32)
        if const_expr(c.adds_to_bias):  # scores are products times a factor, from the accumulators on
            scales = scales._replace(log2=scales.bias * LOG2_E)
        if const_expr(c.q_in_registers):
            tSrQ = cute.make_rmem_tensor(slice_S.partition_shape_A((64, c.tile_d)), self.dtype)
        else:
            tSrQ = mmas.S.make_fragment_A(whole_S.partition_A(shared.sQ[None, None, w, None]))
        return _Work(
            **given,
            warpgroup=w,
            thread=thread,
            mmas=mmas,
            tSrQ=tSrQ,
            tSrK=mmas.S.make_fragment_B(whole_S.partition_B(shared.sK)),
            tOrV=mmas.O.make_fragment_B(whole_O.partition_B(transposed(shared.sV))),
            acc_S=acc_S,
            acc_O=acc_O,
            rP=cute.make_rmem_tensor_like(acc_S, self.dtype),
            rBias=cute.make_rmem_tensor_like(acc_S, self.dtype) if c.features.tiled_bias else None,
            seen=cute.make_rmem_tensor((2, 2), Int32) if c.features.intervals else None,
            cS=slice_S.partition_C(cute.make_identity_tensor((64, c.tile_n))),
            softmax=OnlineSoftmax(2, scales.log2, is_natural=c.features.bias, keeps_max_P=self.keeps_max_P),
            max_logits=cute.make_rmem_tensor(2, Float32) if self.keeps_max_logits else None,
            reference=cute.make_rmem_tensor(1, Float32) if c.adds_to_bias else None,
            scales=scales,
            shared=shared,
        )

    @cute.jit
    def _receive_Q(self, work: "_Work", stage: Int32) -> None:
        """Q of a tile from shared memory into registers, where it belongs there."""
        if const_expr(self.config.q_in_registers):
            read_a(work.mmas.S, work.shared.sQ[None, None, work.warpgroup, stage], work.tSrQ, work.thread)

    @cute.jit
    def _mainloop(
        self, work: "_Work", stage: Int32, k_state: PipelineState, v_state: PipelineState
    ) -> tuple[PipelineState, PipelineState]:
        """All blocks of keys of a tile but the first's scores and the last's output, which neighbours have a part in.

        Each part of the mainloop applies the masks that it needs.
        """
        f, fields = self.config.features, work.shared.tiles[None, stage]
        blocks = QueryTile.read(self.config, fields).blocks
        if const_expr(f.listed):
            first = self._read_entry(work, v_state.count)
            if const_expr(f.intervals):
                tile = QueryTile.read(self.config, fields)
                first_row = tile.first_query + self.queries * work.warpgroup
                seen = load_row_interval(work.arguments.mIntervals, tile.batch, tile.q.length, first_row, work.cS)
                work.seen.store(seen.load())
        else:
            first = Entry(blocks.nth(Int32(0)), Edges(left=f.left, right=True))
        bias_row = self._read_bias_row(work, v_state.count)
        self._read_bias_tile(work, v_state.count)
        self._softmax_step(work, stage, first, True, v_state.count, bias_row)
        for part in [Part(NO_EDGES, Int32(1), blocks.num)] if f.listed else blocks.parts(f.left, f.right):
            for i in cutlass.range(part.first, part.end, unroll=1):
                entry = None if const_expr(f.listed) else Entry(blocks.nth(i), part.edges)
                self._step(work, stage, entry, k_state, v_state)
                k_state.advance()
                v_state.advance()
        return k_state, v_state

    @cute.jit
    def _read_entry(self, work: "_Work", step: Int32) -> Entry:
        """Entry of a step's block, published by warp 0 with K; its bits are being loaded."""
        entries, i = work.shared.entries, step % work.shared.entries.shape[1]
        block, code = entries[0, i], entries[1, i]
        words = bits_of(work.tables.mBits, code, work.warpgroup, work.thread, asks=True)
        return Entry(block, code=code, words=words)

    @cute.jit
    def _step(
        self, work: "_Work", stage: Int32, entry: Entry | None, k_state: PipelineState, v_state: PipelineState
    ) -> None:
        """One block of the steady state: its scores, and the output of the block before it.

        Without ``entry`` it is read here, as warp 0 has published it.
        """
        shared = work.shared
        shared.pipe_K.consumer_wait(k_state)
        if const_expr(entry is None):
            entry = self._read_entry(work, v_state.count + 1)
        bias_row = self._read_bias_row(work, v_state.count + 1)
        self._fill_S(work, v_state.count + 1)
        self._acquire_tensor_cores(work)
        self._start_S(work, stage, k_state.index)
        shared.pipe_V.consumer_wait(v_state)
        self._start_O(work, v_state.index)
        self._pass_tensor_cores(work)
        if const_expr(not self.config.reads_bias_late):
            self._read_bias_tile(work, v_state.count + 1)
        warpgroup.wait_group(1)
        shared.pipe_K.consumer_release(k_state)
        warpgroup.wait_group(0)
        shared.pipe_V.consumer_release(v_state)
        if const_expr(self.config.reads_bias_late):
            self._read_bias_tile(work, v_state.count + 1)
        self._softmax_step(work, stage, entry, False, v_state.count + 1, bias_row)

    @cute.jit
    def _read_bias_row(self, work: "_Work", step: Int32) -> cute.Tensor | None:
        """A step's row of a bias, to be added to the products, read before these are there; None without one."""
        bias = None
        if const_expr(self.config.has_bias_row and not self.config.adds_to_bias):
            bias = read_bias_row(work.shared.bias, step, work.cS)
        return bias

    @cute.jit
    def _read_bias_tile(self, work: "_Work", step: Int32) -> None:
        """Reads a step's bias into registers, if TMA has loaded it, and releases its stage."""
        if const_expr(self.config.features.tiled_bias):
            ring = work.shared.bias.ring.part(work.warpgroup, self.warpgroups)
            ring.wait_full(step)  # from warp 0
            stage = work.warpgroup * ring.stages + ring.stage(step)
            read_c(work.mmas.S, work.shared.sBiasTile[None, None, stage], work.rBias, work.thread)
            ring.release_read(step)  # to warp 0

    @cute.jit
    def _fill_S(self, work: "_Work", step: Int32) -> None:
        """Puts a step's row of a bias into the accumulators, where products are added to it."""
        if const_expr(self.config.adds_to_bias):
            work.reference[0] = fill_with_bias_row(work.acc_S, work.shared.bias, step, work.cS)

    @cute.jit
    def _acquire_tensor_cores(self, work: "_Work") -> None:
        cute.arch.barrier(barrier_id=_BARRIER_TENSOR_CORES + work.warpgroup, number_of_threads=256)

    @cute.jit
    def _pass_tensor_cores(self, work: "_Work") -> None:
        following = work.warpgroup + 1 if work.warpgroup < self.warpgroups - 1 else Int32(0)
        cute.arch.barrier_arrive(barrier_id=_BARRIER_TENSOR_CORES + following, number_of_threads=256)

    @cute.jit
    def _start_S(self, work: "_Work", stage: Int32, k_stage: Int32) -> None:
        """S = Q K^T, or S += Q K^T where a bias is in S (``_fill_S``); in flight on return."""
        tSrQ = work.tSrQ if const_expr(self.config.q_in_registers) else work.tSrQ[None, None, None, stage]
        mma = cute.make_mma_atom(work.mmas.S.op)
        mma.set(warpgroup.Field.ACCUMULATE, self.config.adds_to_bias)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
            cute.gemm(mma, work.acc_S, tSrQ[None, None, k], work.tSrK[None, None, k, k_stage], work.acc_S)
            if const_expr(k == 0):
                mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _start_O(self, work: "_Work", v_stage: Int32) -> None:
        """O += P V, in flight on return."""
        mma = cute.make_mma_atom(work.mmas.O.op)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        cute.gemm(mma, work.acc_O, as_operand_a(work.rP), work.tOrV[None, None, None, v_stage], work.acc_O)
        warpgroup.commit_group()

    @cute.jit
    def _softmax_step(
        self, work: "_Work", stage: Int32, entry: Entry, is_first: Constexpr, step: Int32, bias_row: cute.Tensor | None
    ) -> None:
        """Computes P from S: softcap, bias, mask, edges, softmax. Steps are counted over all tiles of this CTA."""
        c, shared = self.config, work.shared
        if const_expr(self.keeps_max_logits):
            scale = work.arguments.numbers.softmax_scale
            tile = QueryTile.read(c, shared.tiles[None, stage])
            self._hide(work, entry, self._place(work, tile, entry), scale)
            raise_logits(work.max_logits, work.acc_S, scale)
        if const_expr(c.features.softcap):
            cap(work.acc_S, work.scales.tanh)
        place, reference = None, work.reference[0] if const_expr(c.adds_to_bias) else None
        adds_bias = c.features.bias and not (c.adds_to_bias or c.features.tiled_bias)
        if const_expr(c.features.tiled_bias):
            add_bias_tile(work.acc_S, work.scales, work.rBias)
        if const_expr(entry.edges.left or entry.edges.right or adds_bias):
            tile = QueryTile.read(c, shared.tiles[None, stage])
            place = self._place(work, tile, entry)
            if const_expr(c.has_bias_row and adds_bias):
                add_bias(work.acc_S, work.scales, lambda row, column: bias_row[column])
            elif const_expr(adds_bias):
                if const_expr(c.bias_pitch):
                    shared.bias.ring.wait_full(step)  # from warps 1 to 3
                rows, coordinates = tile.rows_of_bias(c), rows_and_columns(work.cS)
                clips = entry.edges.right or c.features.listed
                bias = bias_elements(shared.bias, step, rows, place, 64 * work.warpgroup, coordinates, clips)
                add_bias(work.acc_S, work.scales, bias)
                if const_expr(c.bias_pitch):
                    shared.bias.ring.release(step)  # to warps 1 to 3
        self._hide(work, entry, place, work.scales.log2)
        work.softmax.step(work.acc_S, work.rP, work.acc_O, is_first, reference)

    def _place(self, work: "_Work", tile: QueryTile, entry: Entry) -> Place:
        """Where a block's scores are."""
        return Place(
            rows=tile.q,
            columns=tile.k,
            head=tile.head,
            batch=tile.batch,
            first_row=tile.first_query + self.queries * work.warpgroup,
            first_column=entry.block * self.config.tile_n,
            window=Window.of(self.config.features, work.arguments, tile.q.length, tile.k.length),
        )

    @cute.jit
    def _hide(self, work: "_Work", entry: Entry, place: Place | None, scale: Float32) -> None:
        """Masks scores that are yet to be multiplied by ``scale``: edges, bits and intervals."""
        c, edges = self.config, entry.edges
        if const_expr(edges.left or edges.right):
            hide(work.acc_S, work.cS, scale, place, edges, heads_a_row=c.group)
        if const_expr(c.features.listed):
            if entry.code >= 0:
                hide_by_bits(work.acc_S, entry.words, hidden(scale))
        if const_expr(c.features.intervals):
            first_column = entry.block * c.tile_n
            mask_outside_interval(work.acc_S, work.cS, work.seen, first_column, c.tile_n, hidden(scale))

    @cute.jit
    def epilogue(self, work: "_Work", stage: Int32) -> None:
        """Out through shared memory and TMA, lse from registers, zeros and -inf into the padding."""
        c, mO, mLSE, thread = self.config, work.mO, work.mLSE, work.thread
        tile = QueryTile.read(c, work.shared.tiles[None, stage])
        first_query = tile.first_query + self.queries * work.warpgroup
        stop = cutlass.min(first_query + self.queries, tile.q.length)
        coordinates = rows_and_columns(work.cS)
        rows = [first_query + coordinates[r, 0][0] // c.group for r in range(2)]
        heads = [tile.head * c.group + coordinates[r, 0][0] % c.group for r in range(2)]
        lse = cute.make_rmem_tensor(2, Float32)
        sinks = None
        if const_expr(work.arguments.mSink is not None):
            sinks = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                sinks[r] = work.arguments.mSink[heads[r]].to(Float32)
        if const_expr(c.features.max_logits):
            self._raise_max_logits(work, rows, heads, stop)
        work.softmax.finish(work.acc_O, lse, sinks)
        if const_expr(c.features.residual):
            mResidual = rows_first(work.arguments.mResidual, c.features.packed)
            for r in cutlass.range_constexpr(2):
                if rows[r] < stop:
                    gResidual = mResidual[tile.q.start + rows[r], None, heads[r], tile.batch]
                    store_residuals(work.acc_O, r, gResidual, thread, self.dtype)
        rO = work.acc_O
        if const_expr(not c.features.wide):
            rO = cute.make_rmem_tensor_like(work.acc_O, self.dtype)
            convert(work.acc_O, rO)
        if const_expr(not self.stores_rows):
            self._store_tile(work, tile, rO, first_query, stop)
        for r in cutlass.range_constexpr(2):
            if rows[r] < stop:
                if thread % 4 == 0:
                    mLSE[tile.q.start + rows[r], heads[r], tile.batch] = lse[r]
                if const_expr(self.stores_rows):
                    store_row(rO, r, mO[tile.q.start + rows[r], None, heads[r], tile.batch], thread)
        if const_expr(c.features.packed and c.features.zero_padding):
            first = cutlass.max(first_query, tile.q.length)
            padding = cutlass.min(first_query + self.queries, tile.q.slot) - first
            for g in cutlass.range(c.group, unroll=1):
                head = tile.head * c.group + g
                zero_rows(mO[None, None, head, tile.batch], tile.q.start + first, padding, thread, 128)
                for i in cutlass.range(thread, padding, 128, unroll=1):
                    mLSE[tile.q.start + first + i, head, tile.batch] = -Float32.inf

    @cute.jit
    def _raise_max_logits(self, work: "_Work", rows: Constexpr, heads: Constexpr, stop: Int32) -> None:
        """Raises the heads' largest logits to those of this thread's rows, of rows before ``stop``."""
        mMaxLogits, largest = work.arguments.mMaxLogits, -Float32.inf
        for r in cutlass.range_constexpr(2):
            logit = work.max_logits[r] if const_expr(self.keeps_max_logits) else work.softmax.max_logit(r)
            logit = cutlass.select_(rows[r] < stop, logit, -Float32.inf)
            if const_expr(self.config.group > 1):
                for lanes in cutlass.range_constexpr(1, 3):
                    logit = cute.arch.fmax(logit, cute.arch.shuffle_sync_bfly(logit, lanes))
                if work.thread % 4 == 0:
                    raise_max_logit(mMaxLogits, heads[r], logit)
            else:
                largest = cute.arch.fmax(largest, logit)
        if const_expr(self.config.group == 1):
            raise_max_logit_by_warp(mMaxLogits, heads[0], largest)

    @cute.jit
    def _store_tile(self, work: "_Work", tile: QueryTile, rO: cute.Tensor, start: Int32, stop: Int32) -> None:
        """Rows start .. stop of out through shared memory and TMA."""
        sO = work.shared.sO[None, None, work.warpgroup]
        stores = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
        together = {"barrier_id": _BARRIER_EPILOGUE + work.warpgroup, "number_of_threads": 128}
        if const_expr(self.config.persistent):
            if stores:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(**together)  # the last tile's O has left shared memory
        # Else in the place of this part of Q, which only this warpgroup reads, and has read.
        write(rO, work.mmas.O, sO, work.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(**together)
        if stores and start < stop:
            gO = work.tO.at(tile.q.start + start, tile.q.start + stop, tile.head, tile.batch)
            work.tO.store(sO, gO)
            cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class _Work:
    """An mma warpgroup's operands, accumulators and state, and where results go."""

    arguments: ForwardArguments
    tables: Tables | None
    warpgroup: Int32
    thread: Int32  # of the warpgroup
    mmas: ForwardMmas
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K) in registers, or (MMA, 1, MMA_K, tile stage)
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tOrV: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    rP: cute.Tensor  # acc_S rounded, laid out alike
    rBias: cute.Tensor | None  # a block's bias, laid out alike, if TMA has loaded it
    seen: cute.Tensor | None  # intervals of keys that this thread's rows see (``load_row_interval``)
    cS: cute.Tensor  # coordinates of acc_S
    softmax: OnlineSoftmax
    max_logits: cute.Tensor | None  # of this thread's rows, where they do not follow from P
    reference: cute.Tensor | None  # of the bias row that a step's products are added to
    scales: ScoreScales
    shared: Any  # ``Shared``, or a kernel's of its own
    tO: RowTiles | None
    mO: cute.Tensor
    mLSE: cute.Tensor
