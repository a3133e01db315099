"""Attention backward on Hopper: gradients of keys and values whole, those of queries as sums in float32.

Roles (a CTA takes one tile after the other, ``key_tiles``, as in the forward kernel, and walks over the queries that
see it, from the first to the last):
    warpgroup 0         warp 0 chooses tiles, and loads by TMA: K and V once a tile, then Q, dO and two numbers a query,
                        block by block, the first of a tile before its K and V.
                        If deterministic, warp 1 waits for turns to add to the workspace, warp 2 passes them on.
    warpgroups 1, 2     multiply, 64 keys each.

Pipelines:
    tiles  mbarriers, two stages: what the next tile is. Warp 0 -> one arrival a warp that needs to know, when it has
           read it: the multiplying ones, and warps 1 and 2 if deterministic.
    kv     mbarriers, one stage: warp 0 -> one arrival a multiplying warp, after the last product of a tile.
    q, do  PipelineTmaAsync, ``stages`` deep: warp 0 -> one arrival a multiplying warp. With Q comes lse, with dO comes
           delta = rowsum(dO * O), both zero or infinite such that a query behind its sequence has no weight.
    ds     mbarriers, two: one arrival a multiplying warp, when its part of dS is in shared memory -> the same warps.
    turns  see ``common.semaphore``: warp 1 -> the multiplying warps -> warp 2 -> warp 1.

A step of a multiplying warpgroup (transposed: rows are keys, columns are queries), its products in their order:
    dP' = V dO'        in flight while P' = exp2(S' - lse) is computed, in registers
    dV += P' dO        behind it, in flight while dS' = P' (dP' - delta) is computed, into registers and, for both
                       warpgroups, into shared memory
    dQ = dS K          of the step before: dS has had half a step to change hands; of dQ each warpgroup has a part
    dK += dS' Q        in flight while dQ is added to the workspace, from registers
    S' = K Q'          of the step to come
The tensor cores are one warpgroup's while the other computes.

Masks are those of the forward kernel with queries and keys exchanged. Which rows of the workspace belong to a query,
and how they are ordered, is ``common.workspace``'s business.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from flash_attn_cute.kernels.common import schedule, semaphore, workspace
from flash_attn_cute.kernels.common.assembly import opaque
from flash_attn_cute.kernels.common.fragments import as_operand_a, convert
from flash_attn_cute.kernels.common.ring import arrive_as_warp
from flash_attn_cute.kernels.common.rows import rows_first, zero_rows
from flash_attn_cute.kernels.common.semaphore import Turns
from flash_attn_cute.kernels.common.shared import swizzled, tma_pipeline, transposed, write
from flash_attn_cute.kernels.common.softmax import score_scales
from flash_attn_cute.kernels.common.tma import RowTiles, make_row_tiles
from flash_attn_cute.kernels.sm90.config import BackwardConfig
from flash_attn_cute.kernels.sm90.key_tiles import BackwardArguments, KeyTile, key_tile, num_key_tiles
from flash_attn_cute.kernels.sm90.products import gemm, tiled_mma
from flash_attn_cute.kernels.sm90.weights import Scores, differentiate, weigh

_TILE_STAGES = 2

_BARRIER_EPILOGUE = 1  # a named barrier for each warpgroup; 0 is the whole CTA's


class _Layouts(NamedTuple):
    sK: cute.ComposedLayout  # (64, d, warpgroup)
    sV: cute.ComposedLayout  # (64, d, warpgroup)
    sQ: cute.ComposedLayout  # (tile_m, d, stage)
    sdO: cute.ComposedLayout  # (tile_m, d, stage)
    sdS: cute.ComposedLayout  # (64, tile_m, warpgroup, 2)
    sdK: cute.ComposedLayout  # (64, d, warpgroup)
    sdV: cute.ComposedLayout  # (64, d, warpgroup)


class BackwardSm90:
    """The backward kernel of one configuration."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        self.warpgroups = config.num_mma_warpgroups
        self.threads = 128 * (self.warpgroups + 1)

    def _layouts(self) -> _Layouts:
        c = self.config
        return _Layouts(
            # No swizzled atom of K may hold columns of two parts of dQ.
            sK=swizzled(self.dtype, c.columns_dQ, (64, c.tile_d, self.warpgroups)),
            sV=swizzled(self.dtype, c.tile_d, (64, c.tile_d, self.warpgroups)),
            sQ=swizzled(self.dtype, c.tile_d, (c.tile_m, c.tile_d, c.stages)),
            sdO=swizzled(self.dtype, c.tile_d, (c.tile_m, c.tile_d, c.stages)),
            sdS=swizzled(self.dtype, c.tile_m, (64, c.tile_m, self.warpgroups, 2)),
            sdK=swizzled(self.dtype, c.tile_d, (64, c.tile_d, self.warpgroups)),
            sdV=swizzled(self.dtype, c.tile_d, (64, c.tile_d, self.warpgroups)),
        )

    def _shared_storage(self, layouts: _Layouts) -> type:
        c, dtype = self.config, self.dtype

        @cute.struct
        class Storage:
            tile_barriers: cute.struct.MemRange[Int64, 2 * _TILE_STAGES]
            kv_barriers: cute.struct.MemRange[Int64, 2]
            q_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
            do_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
            ds_barriers: cute.struct.MemRange[Int64, 2]
            turn_barriers: cute.struct.MemRange[Int64, Turns.num_barriers if c.deterministic else 0]
            tiles: cute.struct.MemRange[Int32, _TILE_STAGES]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.tile_m * c.stages], 128]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
            sdO: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO)], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdS)], 1024]
            sdK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdK)], 1024]
            sdV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdV)], 1024]

        return Storage

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel."""
        c, a, dtype = self.config, arguments, self.dtype
        mQ, mK, mV, mdO, mdK, mdV = (rows_first(x, c.packed) for x in (a.mQ, a.mK, a.mV, a.mdO, a.mdK, a.mdV))
        layouts = self._layouts()
        self.Storage = self._shared_storage(layouts)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        mma_S = tiled_mma(dtype, k_major, k_major, c.tile_m, shared)
        mma_dV = tiled_mma(dtype, k_major, mn_major, c.tile_d, registers)
        mma_dK = tiled_mma(dtype, k_major, mn_major, c.tile_d, registers)
        mma_dQ = tiled_mma(dtype, mn_major, mn_major, c.columns_dQ, shared)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sK, sV, sQ, sdO, _, sdK, sdV = (cute.select(layout, mode=[0, 1]) for layout in layouts)
        tQ = make_row_tiles(load, mQ, sQ, (c.tile_m, c.tile_d), c.packed)
        tdO = make_row_tiles(load, mdO, sdO, (c.tile_m, c.tile_d), c.packed)
        tK = make_row_tiles(load, mK, sK, (64, c.tile_d), c.packed)
        tV = make_row_tiles(load, mV, sV, (64, c.tile_d), c.packed)
        tdK = make_row_tiles(store, mdK, sdK, (64, c.tile_d), c.packed)
        tdV = make_row_tiles(store, mdV, sdV, (64, c.tile_d), c.packed)
        score_scale, scale_log2 = score_scales(a.softmax_scale, a.softcap, c.has_softcap)
        ctas = cutlass.min(num_key_tiles(c, a), a.num_ctas)
        self.kernel(
            mma_S,
            mma_dV,
            mma_dK,
            mma_dQ,
            *tQ.operands,
            *tdO.operands,
            *tK.operands,
            *tV.operands,
            *tdK.operands,
            *tdV.operands,
            mdK,
            mdV,
            a,
            score_scale,
            scale_log2,
        ).launch(grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        mma_S: cute.TiledMma,
        mma_dV: cute.TiledMma,
        mma_dK: cute.TiledMma,
        mma_dQ: cute.TiledMma,
        atom_Q: cute.CopyAtom,
        tma_Q: cute.Tensor,
        atom_dO: cute.CopyAtom,
        tma_dO: cute.Tensor,
        atom_K: cute.CopyAtom,
        tma_K: cute.Tensor,
        atom_V: cute.CopyAtom,
        tma_V: cute.Tensor,
        atom_dK: cute.CopyAtom,
        tma_dK: cute.Tensor,
        atom_dV: cute.CopyAtom,
        tma_dV: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        arguments: BackwardArguments,
        score_scale: Float32,
        scale_log2: Float32,
    ) -> None:
        """Sets up shared memory and pipelines, then splits into roles."""
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (atom_Q, atom_dO, atom_K, atom_V, atom_dK, atom_dV):
                cpasync.prefetch_descriptor(atom)
        layouts = self._layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        tile_full, kv_full = storage.tile_barriers.data_ptr(), storage.kv_barriers.data_ptr()
        tile_empty, kv_empty = tile_full + _TILE_STAGES, kv_full + 1
        ds_barriers, turns = storage.ds_barriers.data_ptr(), Turns(storage.turn_barriers.data_ptr())
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(kv_full, 1)
                cute.arch.mbarrier_init(kv_empty, 4 * self.warpgroups)
                for i in cutlass.range_constexpr(_TILE_STAGES):
                    cute.arch.mbarrier_init(tile_full + i, 1)
                    cute.arch.mbarrier_init(tile_empty + i, 4 * self.warpgroups + (2 if c.deterministic else 0))
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(ds_barriers + i, 4 * self.warpgroups)
                if const_expr(c.deterministic):
                    turns.init(4 * self.warpgroups)
        pipe_Q, pipe_dO = (
            tma_pipeline(barriers.data_ptr(), c.stages, 4 * self.warpgroups, c.tile_m * (2 * c.tile_d + 4))
            for barriers in (storage.q_barriers, storage.do_barriers)
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        tiles = {
            "Q": RowTiles(atom_Q, tma_Q, c.tile_m, c.tile_d, c.packed),
            "dO": RowTiles(atom_dO, tma_dO, c.tile_m, c.tile_d, c.packed),
            "K": RowTiles(atom_K, tma_K, 64, c.tile_d, c.packed),
            "V": RowTiles(atom_V, tma_V, 64, c.tile_d, c.packed),
        }
        shared = _Shared(
            **{
                name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
                for name, layout in layouts._asdict().items()
            },
            stats=storage.stats.get_tensor(cute.make_layout((c.tile_m, 2, c.stages))),
            tiles=storage.tiles.get_tensor(cute.make_layout(_TILE_STAGES)),
            tile_full=tile_full,
            tile_empty=tile_empty,
            kv_full=kv_full,
            kv_empty=kv_empty,
            ds_barriers=ds_barriers,
            turns=turns,
            pipe_Q=pipe_Q,
            pipe_dO=pipe_dO,
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp_idx == 0:
                self.load(arguments, tiles, shared)
            if const_expr(c.deterministic):
                if warp_idx == 1:
                    self.call_turns(arguments, shared)
                elif warp_idx == 2:
                    self.pass_turns(arguments, shared)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            stores = (
                RowTiles(atom_dK, tma_dK, 64, c.tile_d, c.packed),
                RowTiles(atom_dV, tma_dV, 64, c.tile_d, c.packed),
            )
            self.multiply(arguments, mma_S, mma_dV, mma_dK, mma_dQ, stores, shared, mdK, mdV, score_scale, scale_log2)

    @cute.jit
    def load(self, a: BackwardArguments, tiles: dict, shared: "_Shared") -> None:
        """Warp 0: chooses tiles, and loads all that they need in the order in which it is consumed."""
        c = self.config
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, _TILE_STAGES)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.stages)
        num_tiles = num_key_tiles(c, a)
        num_questions = num_tiles + cute.arch.grid_dim()[0]  # every CTA asks until it gets none
        index = schedule.take_tile(a.mNextTile, num_questions)
        kv_phase = Int32(1)
        while index < num_tiles:
            self._announce(index, shared, tile_state)
            tile_state.advance()
            tile = key_tile(c, a, index)
            for m in cutlass.range(tile.blocks.start, tile.blocks.stop, unroll=1):
                self._load_queries(a, tile, tiles, shared, m, state)
                state.advance()
                if m == tile.blocks.start:  # behind the first queries, for which there is room before there is for keys
                    cute.arch.mbarrier_wait(shared.kv_empty, kv_phase)  # all warpgroups are done with the last tile's
                    kv_phase ^= 1
                    self._load_keys(tile, tiles, shared)
            # Not earlier: until it is begun, whoever needs its turn behind it would wait.
            index = schedule.take_tile(a.mNextTile, num_questions)
        self._announce(Int32(-1), shared, tile_state)

    @cute.jit
    def _announce(self, index: Int32, shared: "_Shared", state: pipeline.PipelineState) -> None:
        """Tells all others of a tile, or that there is none any more."""
        cute.arch.mbarrier_wait(shared.tile_empty + state.index, state.phase)  # all have read what was here
        with cute.arch.elect_one():
            shared.tiles[state.index] = index
            cute.arch.mbarrier_arrive(shared.tile_full + state.index)

    @cute.jit
    def _load_keys(self, tile: KeyTile, tiles: dict, shared: "_Shared") -> None:
        c = self.config
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.kv_full, 4 * c.tile_n * c.tile_d)
        for w in cutlass.range_constexpr(self.warpgroups):
            start = tile.first_key + 64 * w
            stop = cutlass.max(cutlass.min(start + 64, tile.k.length), start)
            for t, s in ((tiles["K"], shared.sK), (tiles["V"], shared.sV)):
                g = t.at(tile.k.start + start, tile.k.start + stop, tile.head_k, tile.batch)
                t.load(g, s[None, None, w], shared.kv_full)

    @cute.jit
    def _load_queries(
        self,
        a: BackwardArguments,
        tile: KeyTile,
        tiles: dict,
        shared: "_Shared",
        m: Int32,
        state: pipeline.PipelineState,
    ) -> None:
        """Q, dO, lse and delta of a block of queries."""
        start = m * self.config.tile_m
        stop = tile.q.start + cutlass.min(start + self.config.tile_m, tile.q.length)
        start += tile.q.start
        numbers = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        for i, (t, s, pipe) in enumerate(
            ((tiles["Q"], shared.sQ, shared.pipe_Q), (tiles["dO"], shared.sdO, shared.pipe_dO))
        ):
            pipe.producer_acquire(state)  # all warpgroups have released this stage
            barrier = pipe.producer_get_barrier(state)
            t.load(t.at(start, stop, tile.head, tile.batch), s[None, None, state.index], barrier)
            with cute.arch.elect_one():
                cute.copy(
                    numbers,
                    a.mStats[i, tile.head, tile.first_block + m, None],
                    shared.stats[None, i, state.index],
                    mbar_ptr=barrier,
                )

    @cute.jit
    def call_turns(self, a: BackwardArguments, shared: "_Shared") -> None:
        """Warp 1: waits for the turns to add to the blocks of a tile, one after the other."""
        c = self.config
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, _TILE_STAGES)
        turn = Int32(0)
        index = self._next_tile(shared, tile_state)
        while index >= 0:
            tile_state.advance()
            tile = key_tile(c, a, index)
            for m in cutlass.range(tile.blocks.start, tile.blocks.stop, unroll=1):
                counter = semaphore.counter(a.mTurnsQ, tile.head, 0, tile.first_block + m)
                shared.turns.call(turn, counter, tile.earlier(c, m))
                turn += 1
            if const_expr(c.grouped):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
                if tile.blocks.stop > tile.blocks.start:
                    counter = semaphore.counter(a.mTurnsK, tile.head_k, 0, tile.block)
                    shared.turns.call(turn, counter, tile.earlier_heads)
                    turn += 1
            index = self._next_tile(shared, tile_state)

    @cute.jit
    def pass_turns(self, a: BackwardArguments, shared: "_Shared") -> None:
        """Warp 2: passes turns on to the tiles that come after."""
        c = self.config
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, _TILE_STAGES)
        turn = Int32(0)
        index = self._next_tile(shared, tile_state)
        while index >= 0:
            tile_state.advance()
            tile = key_tile(c, a, index)
            m = tile.blocks.start
            while m < tile.blocks.stop:
                counters = semaphore.counter(a.mTurnsQ, tile.head, 0, tile.first_block + m)
                passed = shared.turns.pass_on(turn, counters, m + 1 < tile.blocks.stop)
                turn += passed
                m += passed
            if const_expr(c.grouped):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
                if tile.blocks.stop > tile.blocks.start:
                    counter = semaphore.counter(a.mTurnsK, tile.head_k, 0, tile.block)
                    turn += shared.turns.pass_on(turn, counter, cutlass.Boolean(False))
            index = self._next_tile(shared, tile_state)

    @cute.jit
    def multiply(
        self,
        a: BackwardArguments,
        mma_S: cute.TiledMma,
        mma_dV: cute.TiledMma,
        mma_dK: cute.TiledMma,
        mma_dQ: cute.TiledMma,
        stores: tuple,
        shared: "_Shared",
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        score_scale: Float32,
        scale_log2: Float32,
    ) -> None:
        """A multiplying warpgroup: 64 keys of every tile, over all queries that see it."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        w = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        slice_S, slice_dV, slice_dK, slice_dQ = (mma.get_slice(thread) for mma in (mma_S, mma_dV, mma_dK, mma_dQ))
        # Operands in shared memory are described once a warpgroup: by its first thread's slice.
        whole_S, whole_dV, whole_dK, whole_dQ = (mma.get_slice(0) for mma in (mma_S, mma_dV, mma_dK, mma_dQ))
        parts_a_row = c.tile_d // c.columns_dQ
        sK_part = cute.local_tile(shared.sK, (64, c.columns_dQ, self.warpgroups), (0, w % parts_a_row, 0))
        sdS_part = cute.local_tile(shared.sdS, (64, 64, self.warpgroups, 2), (0, w // parts_a_row, 0, 0))
        acc_S = cute.make_rmem_tensor(slice_S.partition_shape_C((64, c.tile_m)), Float32)
        acc_dP = cute.make_rmem_tensor_like(acc_S)
        rP, rdS = (cute.make_rmem_tensor_like(acc_S, self.dtype) for _ in range(2))
        work = _Work(
            arguments=a,
            warpgroup=w,
            thread=thread,
            quad=opaque(thread % 4),
            mma_S=mma_S,
            mma_dV=mma_dV,
            mma_dK=mma_dK,
            mma_dQ=mma_dQ,
            tSrK=mma_S.make_fragment_A(whole_S.partition_A(shared.sK)),
            tSrQ=mma_S.make_fragment_B(whole_S.partition_B(shared.sQ)),
            tPrV=mma_S.make_fragment_A(whole_S.partition_A(shared.sV)),
            tPrdO=mma_S.make_fragment_B(whole_S.partition_B(shared.sdO)),
            tVrdO=mma_dV.make_fragment_B(whole_dV.partition_B(transposed(shared.sdO))),
            tKrQ=mma_dK.make_fragment_B(whole_dK.partition_B(transposed(shared.sQ))),
            tQrdS=mma_dQ.make_fragment_A(whole_dQ.partition_A(transposed(sdS_part))),
            tQrK=mma_dQ.make_fragment_B(whole_dQ.partition_B(transposed(sK_part))),
            scores=Scores(
                acc_S=acc_S,
                rP=rP,
                rW=rdS if c.has_softcap else rP,
                cS=slice_S.partition_C(cute.make_identity_tensor((64, c.tile_m))),
                score_scale=score_scale,
                scale_log2=scale_log2,
            ),
            acc_dP=acc_dP,
            acc_dV=cute.make_rmem_tensor(slice_dV.partition_shape_C((64, c.tile_d)), Float32),
            acc_dK=cute.make_rmem_tensor(slice_dK.partition_shape_C((64, c.tile_d)), Float32),
            acc_dQ=cute.make_rmem_tensor(slice_dQ.partition_shape_C((64, c.columns_dQ)), Float32),
            rdS=rdS,
            # 128 queries leave registers for one group of theirs.
            rStats=cute.make_rmem_tensor((4, 4 if c.tile_m == 64 else 1), Float32),
            shared=shared,
        )
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, _TILE_STAGES)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        kv_phase, steps_before, turns_before = Int32(0), Int32(0), Int32(0)
        index = self._next_tile(shared, tile_state)
        while index >= 0:
            tile_state.advance()
            tile = key_tile(c, a, index)
            start, stop = tile.blocks.start, tile.blocks.stop
            work.acc_dV.fill(0.0)
            work.acc_dK.fill(0.0)
            if start < stop:
                cute.arch.mbarrier_wait(shared.kv_full, kv_phase)  # from warp 0: K and V have arrived
                kv_phase ^= 1
                shared.pipe_Q.consumer_wait(state)
                self._start_S(work, state.index)
                self._read_stats(work, 0, state.index)
                warpgroup.wait_group(0)
                for m in cutlass.range(start, stop, unroll=1):
                    self._step(work, tile, m, steps_before + m - start, state, turns_before + m - start - 1)
                    state.advance()
                steps_before += stop - start
                turns_before += stop - start
                last = steps_before - 1
                cute.arch.mbarrier_wait(shared.ds_barriers + (last & 1), last >> 1 & 1)  # all warps' last dS is there
                self._start_dQ(work, last)
                warpgroup.wait_group(0)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.kv_empty)
                self._add_dQ(work, tile, stop - 1, turns_before - 1)
                if const_expr(c.grouped):
                    self._add_dKV(work, tile, turns_before)
                    turns_before += 1
            if const_expr(not c.grouped):
                self._store(work, tile, stores, mdK, mdV)
            index = self._next_tile(shared, tile_state)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until it has been read

    @cute.jit
    def _next_tile(self, shared: "_Shared", state: pipeline.PipelineState) -> Int32:
        """The index of the next tile, or -1."""
        cute.arch.mbarrier_wait(shared.tile_full + state.index, state.phase)  # from warp 0
        index = cute.arch.make_warp_uniform(shared.tiles[state.index])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.tile_empty + state.index)
        return index

    @cute.jit
    def _step(
        self,
        work: "_Work",
        tile: KeyTile,
        m: Int32,
        step: Int32,
        state: pipeline.PipelineState,
        turn: Int32,
    ) -> None:
        """One block of queries: its scores are there on entry, and the next one's on return.

        The first step of a tile computes a dQ of anything, and the last one scores of anything, as the compiler lets
        products overlap only where none is under a condition.

        Args:
            work: this warpgroup's operands.
            tile: the keys.
            m: the block's number within the sequence.
            step: counts blocks, over all tiles of this CTA.
            state: of the pipelines of Q and dO.
            turn: counts additions; that of dQ of the step before.
        """
        shared, stage, rW = work.shared, state.index, work.scores.rW
        tPrdO = work.tPrdO[None, None, None, stage]
        shared.pipe_dO.consumer_wait(state)
        gemm(work.mma_S, work.acc_dP, work.tPrV[None, None, None, work.warpgroup], tPrdO, True)
        weigh(
            self.config,
            work.scores,
            tile,
            lambda: tile.first_key + 64 * work.warpgroup,
            m,
            lambda i: self._stats(work, 0, stage, i),
        )
        self._read_stats(work, 1, stage)
        gemm(work.mma_dV, work.acc_dV, as_operand_a(work.scores.rP), work.tVrdO[None, None, None, stage], False)
        warpgroup.wait_group(1)  # dP is there
        differentiate(
            work.acc_dP,
            lambda i: cute.local_tile(cute.make_tensor(rW.iterator, cute.size(rW)), (8,), (i,)),
            lambda i: self._stats(work, 1, stage, i),
            work.rdS,
        )
        # From all multiplying warps: the last step's dS is there, and the one that was here before is read no more.
        cute.arch.mbarrier_wait(shared.ds_barriers + (step - 1 & 1), step - 1 >> 1 & 1)
        write(work.rdS, work.mma_S, shared.sdS[None, None, work.warpgroup, step & 1], work.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.wait_group(0)  # dV is there
        shared.pipe_dO.consumer_release(state)
        self._start_dQ(work, step - 1)
        gemm(work.mma_dK, work.acc_dK, as_operand_a(work.rdS), work.tKrQ[None, None, None, stage], False)
        following = state.clone()
        following.advance()
        if m + 1 < tile.blocks.stop:
            shared.pipe_Q.consumer_wait(following)
        self._start_S(work, following.index)
        self._read_stats(work, 0, following.index)
        warpgroup.wait_group(2)  # dQ is there
        # This warp's part of dS is there, and the other buffer is read by it no more.
        arrive_as_warp(shared.ds_barriers + (step & 1))
        if m > tile.blocks.start:
            self._add_dQ(work, tile, m - 1, turn)
        warpgroup.wait_group(0)  # dK and the next scores are there
        shared.pipe_Q.consumer_release(state)

    @cute.jit
    def _start_S(self, work: "_Work", stage: Int32) -> None:
        """Scores of a block."""
        tSrK, tSrQ = work.tSrK[None, None, None, work.warpgroup], work.tSrQ[None, None, None, stage]
        gemm(work.mma_S, work.scores.acc_S, tSrK, tSrQ, True)

    @cute.jit
    def _start_dQ(self, work: "_Work", step: Int32) -> None:
        """This warpgroup's part of a step's dQ."""
        for i in cutlass.range_constexpr(self.warpgroups):
            tQrdS, tQrK = work.tQrdS[None, None, None, i, step & 1], work.tQrK[None, None, None, i]
            gemm(work.mma_dQ, work.acc_dQ, tQrdS, tQrK, i == 0, i == self.warpgroups - 1)

    @cute.jit
    def _add_dQ(self, work: "_Work", tile: KeyTile, m: Int32, turn: Int32) -> None:
        """This warpgroup's part of dQ to the workspace."""
        if const_expr(self.config.deterministic):
            work.shared.turns.wait(turn)
        self._add(work, work.acc_dQ, work.arguments.mdQaccum[tile.head, tile.first_block + m, None])
        if const_expr(self.config.deterministic):
            work.shared.turns.have_added(turn)

    @cute.jit
    def _add_dKV(self, work: "_Work", tile: KeyTile, turn: Int32) -> None:
        """This warpgroup's keys' dK and dV to the workspace."""
        if const_expr(self.config.deterministic):
            work.shared.turns.wait(turn)
        for i, acc in enumerate((work.acc_dK, work.acc_dV)):
            self._add(work, acc, work.arguments.mdKVaccum[i, tile.head_k, tile.block, None])
        if const_expr(self.config.deterministic):
            work.shared.turns.have_added(turn)

    @cute.jit
    def _add(self, work: "_Work", acc: cute.Tensor, block: cute.Tensor) -> None:
        workspace.add(acc, cute.local_tile(block, (128 * cute.size(acc),), (work.warpgroup,)), work.thread)

    def _read_stats(self, work: "_Work", which: int, stage: Int32) -> None:
        """This thread's lse (0) or delta (1) into registers, ahead of time: the tensor cores are before us in line."""
        for i in range(cute.size(work.rStats, mode=[1])):
            self._read_four(work, which, stage, i, work.rStats[None, i])

    def _stats(self, work: "_Work", which: int, stage: Int32, i: int) -> cute.Tensor:
        """Lse or delta of this thread's four queries in the i-th group of sixteen."""
        if i < cute.size(work.rStats, mode=[1]):
            return work.rStats[None, i]
        four = cute.make_rmem_tensor(4, Float32)
        self._read_four(work, which, stage, i, four)
        return four

    def _read_four(self, work: "_Work", which: int, stage: Int32, i: int, four: cute.Tensor) -> None:
        cute.autovec_copy(workspace.four_stats(work.shared.stats[None, which, stage], work.quad, i), four)

    @cute.jit
    def _store(self, work: "_Work", tile: KeyTile, stores: tuple, mdK: cute.Tensor, mdV: cute.Tensor) -> None:
        """DK and dV through shared memory and TMA, and zeros into the padding."""
        c, w, thread, shared = self.config, work.warpgroup, work.thread, work.shared
        stores_tiles = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
        if stores_tiles:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=_BARRIER_EPILOGUE + w, number_of_threads=128)  # the last tile has left
        for i in cutlass.range_constexpr(cute.size(work.acc_dK)):
            work.acc_dK[i] = work.acc_dK[i] * work.arguments.softmax_scale
        for acc, mma, sX in ((work.acc_dK, work.mma_dK, shared.sdK), (work.acc_dV, work.mma_dV, shared.sdV)):
            rounded = cute.make_rmem_tensor_like(acc, self.dtype)
            convert(acc, rounded)
            write(rounded, mma, sX[None, None, w], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_BARRIER_EPILOGUE + w, number_of_threads=128)
        start = tile.first_key + 64 * w
        stop = cutlass.min(start + 64, tile.k.length)
        if stores_tiles and start < stop:
            for t, sX in zip(stores, (shared.sdK, shared.sdV), strict=True):
                t.store(sX[None, None, w], t.at(tile.k.start + start, tile.k.start + stop, tile.head_k, tile.batch))
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(c.packed and c.zero_padding):
            first = cutlass.max(start, tile.k.length)
            padding = cutlass.min(start + 64, tile.k.slot) - first
            for mX in (mdK, mdV):
                zero_rows(mX[None, None, tile.head_k, tile.batch], tile.k.start + first, padding, thread, 128)


@dataclass(frozen=True)
class _Shared:
    """Shared memory and what guards it."""

    sK: cute.Tensor  # (64, d, warpgroup)
    sV: cute.Tensor  # (64, d, warpgroup)
    sQ: cute.Tensor  # (tile_m, d, stage)
    sdO: cute.Tensor  # (tile_m, d, stage)
    sdS: cute.Tensor  # (64, tile_m, warpgroup, 2)
    sdK: cute.Tensor  # (64, d, warpgroup)
    sdV: cute.Tensor  # (64, d, warpgroup)
    stats: cute.Tensor  # (tile_m, lse and delta, stage)
    tiles: cute.Tensor  # (tile stage,)
    tile_full: cute.Pointer  # barriers
    tile_empty: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    ds_barriers: cute.Pointer
    turns: Turns
    pipe_Q: pipeline.PipelineTmaAsync
    pipe_dO: pipeline.PipelineTmaAsync


@dataclass(frozen=True)
class _Work:
    """A multiplying warpgroup's operands and accumulators.

    ``t<product>r<operand>``; a product is called by its result: S, P (for dP), V, K and Q (for dV, dK and dQ).
    """

    arguments: BackwardArguments
    warpgroup: Int32
    thread: Int32
    quad: Int32
    mma_S: cute.TiledMma
    mma_dV: cute.TiledMma
    mma_dK: cute.TiledMma
    mma_dQ: cute.TiledMma
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, warpgroup)
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tPrV: cute.Tensor
    tPrdO: cute.Tensor
    tVrdO: cute.Tensor
    tKrQ: cute.Tensor
    tQrdS: cute.Tensor  # (MMA, 1, MMA_K, warpgroup, PIPE)
    tQrK: cute.Tensor  # (MMA, 1, MMA_K, warpgroup)
    scores: Scores  # its rW is where rdS will be, with a softcap
    acc_dP: cute.Tensor
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor
    acc_dQ: cute.Tensor
    rdS: cute.Tensor
    rStats: cute.Tensor  # (four, group of sixteen queries): lse, then delta, of as many as there are registers for
    shared: _Shared
