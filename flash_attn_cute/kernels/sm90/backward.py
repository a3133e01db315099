"""Attention backward on Hopper: gradients of keys and values whole, those of queries as sums in float32.

Roles (a CTA takes one tile after the other, ``key_tiles``, as in the forward kernel, and walks over the queries that
see it, from the first to the last):
    warpgroup 0         warp 0 chooses tiles, and loads by TMA: K, Q, dO and two numbers a query, V, block by block.
                        If deterministic, warp 1 waits for turns to add to the workspace, warp 2 passes them on.
                        Warp 3 writes zeros into dK and dV where nothing else is to be.
    warpgroups 1, 2     multiply, 64 keys each.

Pipelines (``Ring``: stages in turn, a full and an empty mbarrier each; who fills -> who empties):
    tiles  4 stages, what a tile is: warp 0 -> one arrival a warp that needs to know, when it is done with the tile: the
           multiplying ones, and warps 1 and 2 if deterministic. Only tiles that some query sees are told of.
    k      2 stages: warp 0 and the bytes -> one arrival a multiplying warp, after the tile's last dQ.
    v      1 stage: the same, after the tile's last dP.
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
The tensor cores are one warpgroup's while the other computes. Tiles follow each other without a break: the last step
of one computes the first scores of the next, whose first step computes the last dQ of the one before; in between, dK
and dV leave through shared memory.

Masks are those of the forward kernel with queries and keys exchanged. Which rows of the workspace belong to a query,
and how they are ordered, is ``common.workspace``'s business.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from flash_attn_cute.kernels.common import schedule, semaphore, workspace
from flash_attn_cute.kernels.common.assembly import opaque
from flash_attn_cute.kernels.common.fragments import as_operand_a, convert
from flash_attn_cute.kernels.common.ring import Ring, arrive_as_warp
from flash_attn_cute.kernels.common.rows import rows_first, zero_rows
from flash_attn_cute.kernels.common.semaphore import Turns
from flash_attn_cute.kernels.common.shared import swizzled, tma_pipeline, transposed, write
from flash_attn_cute.kernels.common.softmax import score_scales
from flash_attn_cute.kernels.common.tma import RowTiles, make_row_tiles
from flash_attn_cute.kernels.sm90.config import BackwardConfig
from flash_attn_cute.kernels.sm90.key_tiles import NUM_FIELDS, BackwardArguments, KeyTile, key_tile, num_key_tiles
from flash_attn_cute.kernels.sm90.products import gemm, tiled_mma
from flash_attn_cute.kernels.sm90.weights import Scores, differentiate, weigh

# With two, a tile of one step would wait for the next one before it adds the last dQ of the one before: for ever.
_TILE_STAGES = 4
_START, _STOP = NUM_FIELDS - 4, NUM_FIELDS - 1  # of a tile's blocks, among its fields
_BARRIER_EPILOGUE = 1  # a named barrier for each warpgroup; 0 is the whole CTA's


class _Layouts(NamedTuple):
    sK: cute.ComposedLayout  # (64, d, warpgroup, 2)
    sV: cute.ComposedLayout  # (64, d, warpgroup)
    sQ: cute.ComposedLayout  # (tile_m, d, stage)
    sdO: cute.ComposedLayout  # (tile_m, d, stage)
    sdS: cute.ComposedLayout  # (64, tile_m, warpgroup, 2)
    sdX: cute.ComposedLayout  # (64, d, warpgroup)


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
            sK=swizzled(self.dtype, c.columns_dQ, (64, c.tile_d, self.warpgroups, 2)),
            sV=swizzled(self.dtype, c.tile_d, (64, c.tile_d, self.warpgroups)),
            sQ=swizzled(self.dtype, c.tile_d, (c.tile_m, c.tile_d, c.stages)),
            sdO=swizzled(self.dtype, c.tile_d, (c.tile_m, c.tile_d, c.stages)),
            sdS=swizzled(self.dtype, c.tile_m, (64, c.tile_m, self.warpgroups, 2)),
            sdX=swizzled(self.dtype, c.tile_d, (64, c.tile_d, self.warpgroups)),
        )

    def _shared_storage(self, layouts: _Layouts) -> type:
        c, dtype = self.config, self.dtype

        @cute.struct
        class Storage:
            tile_barriers: cute.struct.MemRange[Int64, 2 * _TILE_STAGES]
            k_barriers: cute.struct.MemRange[Int64, 4]
            v_barriers: cute.struct.MemRange[Int64, 2]
            q_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
            do_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
            ds_barriers: cute.struct.MemRange[Int64, 2]
            turn_barriers: cute.struct.MemRange[Int64, Turns.num_barriers if c.deterministic else 0]
            turns_earlier: cute.struct.MemRange[Int32, Turns.num_stages if c.deterministic else 0]
            tile_fields: cute.struct.MemRange[Int32, NUM_FIELDS * _TILE_STAGES]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.tile_m * c.stages], 128]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
            sdO: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO)], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdS)], 1024]
            sdX: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdX)], 1024]

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
        sK, sV, sQ, sdO, _, sdX = (cute.select(layout, mode=[0, 1]) for layout in layouts)
        tQ = make_row_tiles(load, mQ, sQ, (c.tile_m, c.tile_d), c.packed)
        tdO = make_row_tiles(load, mdO, sdO, (c.tile_m, c.tile_d), c.packed)
        tK = make_row_tiles(load, mK, sK, (64, c.tile_d), c.packed)
        tV = make_row_tiles(load, mV, sV, (64, c.tile_d), c.packed)
        tdK = make_row_tiles(store, mdK, sdX, (64, c.tile_d), c.packed)
        tdV = make_row_tiles(store, mdV, sdX, (64, c.tile_d), c.packed)
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
        tiles = Ring(storage.tile_barriers.data_ptr(), _TILE_STAGES)
        k, v = Ring(storage.k_barriers.data_ptr(), 2), Ring(storage.v_barriers.data_ptr(), 1)
        ds_barriers, turns = (
            storage.ds_barriers.data_ptr(),
            Turns(storage.turn_barriers.data_ptr(), storage.turns_earlier.data_ptr()),
        )
        if warp_idx == 0:
            with cute.arch.elect_one():
                tiles.init(full=1, empty=4 * self.warpgroups + (2 if c.deterministic else 0))
                k.init(full=1, empty=4 * self.warpgroups)
                v.init(full=1, empty=4 * self.warpgroups)
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

        loads = {
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
            tile_fields=storage.tile_fields.get_tensor(cute.make_layout((NUM_FIELDS, _TILE_STAGES))),
            tiles=tiles,
            k=k,
            v=v,
            ds_barriers=ds_barriers,
            turns=turns,
            pipe_Q=pipe_Q,
            pipe_dO=pipe_dO,
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp_idx == 0:
                self.load(arguments, loads, shared)
            if const_expr(c.deterministic):
                if warp_idx == 1:
                    self.call_turns(arguments, shared)
                elif warp_idx == 2:
                    self.pass_turns(arguments, shared)
            # Every dense key is seen if there is no window, and postprocessing writes all of grouped heads.
            if const_expr(not c.grouped and (c.packed or c.has_left or c.has_right)):  # noqa: SIM102 (as elsewhere)
                if warp_idx == 3:
                    self.zero(arguments, mdK, mdV)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            stores = (
                RowTiles(atom_dK, tma_dK, 64, c.tile_d, c.packed),
                RowTiles(atom_dV, tma_dV, 64, c.tile_d, c.packed),
            )
            self.multiply(arguments, mma_S, mma_dV, mma_dK, mma_dQ, stores, shared, score_scale, scale_log2)

    @cute.jit
    def load(self, a: BackwardArguments, tiles: dict, shared: "_Shared") -> None:
        """Warp 0: chooses tiles, and loads all that they need in the order in which it is consumed."""
        c = self.config
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.stages)
        num_tiles = num_key_tiles(c, a)
        num_questions = num_tiles + cute.arch.grid_dim()[0]  # every CTA asks until it gets none
        index = schedule.take_tile(a.mNextTile, num_questions)
        walk = Int32(0)
        while index < num_tiles:
            tile = key_tile(c, a, index)
            start, stop = tile.blocks.start, tile.blocks.stop
            if start < stop:  # the others are nobody's but warp 3's
                shared.tiles.wait_empty(walk)  # all have read what was here
                with cute.arch.elect_one():
                    tile.write(shared.tile_fields[None, shared.tiles.stage(walk)])
                    cute.arch.mbarrier_arrive(shared.tiles.full(walk))
                self._load_keys(tile, tiles["K"], shared.sK[None, None, None, shared.k.stage(walk)], shared.k, walk)
                for m in cutlass.range(start, stop, unroll=1):
                    self._load_queries(a, tile, tiles, shared, m, state)
                    state.advance()
                    if m == start:  # behind the first queries, for which there is room before there is for V
                        self._load_keys(tile, tiles["V"], shared.sV, shared.v, walk)
                walk += 1
            # Not earlier: until it is begun, whoever needs its turn behind it would wait.
            index = schedule.take_tile(a.mNextTile, num_questions)
        shared.tiles.wait_empty(walk)
        with cute.arch.elect_one():  # a tile of no blocks is the end
            for i in (_START, _STOP):
                shared.tile_fields[i, shared.tiles.stage(walk)] = Int32(0)
            cute.arch.mbarrier_arrive(shared.tiles.full(walk))

    @cute.jit
    def zero(self, a: BackwardArguments, mdK: cute.Tensor, mdV: cute.Tensor) -> None:
        """Warp 3: zeros in dK and dV of padding, and of keys that nobody sees, whosever tiles they are in."""
        c = self.config
        num_tiles = num_key_tiles(c, a)
        for mX in (mdK, mdV):
            index, _, _ = cute.arch.block_idx()
            while index < num_tiles:
                tile = key_tile(c, a, index)
                first = cutlass.max(tile.first_key, tile.k.length)
                if tile.blocks.start == tile.blocks.stop:
                    first = tile.first_key
                stop = tile.k.slot if const_expr(c.packed and c.zero_padding) else tile.k.length
                num_rows = cutlass.min(tile.first_key + c.tile_n, stop) - first
                gX = mX[None, None, tile.head_k, tile.batch]
                zero_rows(gX, tile.k.start + first, num_rows, cute.arch.lane_idx(), 32)
                index += cute.arch.grid_dim()[0]

    @cute.jit
    def _load_keys(self, tile: KeyTile, t: RowTiles, sX: cute.Tensor, ring: Ring, walk: Int32) -> None:
        """K or V."""
        c = self.config
        ring.wait_empty(walk)  # all warpgroups are done with what was here
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full(walk), 2 * c.tile_n * c.tile_d)
        for w in cutlass.range_constexpr(self.warpgroups):
            start = tile.first_key + 64 * w
            stop = cutlass.max(cutlass.min(start + 64, tile.k.length), start)
            g = t.at(tile.k.start + start, tile.k.start + stop, tile.head_k, tile.batch)
            t.load(g, sX[None, None, w], ring.full(walk))

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

    def _tile(self, a: BackwardArguments, shared: "_Shared", walk: Int32) -> KeyTile:
        """What warp 0 has told of a tile."""
        return KeyTile.read(self.config, a, shared.tile_fields[None, shared.tiles.stage(walk)])

    @cute.jit
    def _has_tile(self, shared: "_Shared", walk: Int32) -> Boolean:
        """Whether there is another tile; warp 0 tells."""
        shared.tiles.wait_full(walk)  # from warp 0
        return (
            shared.tile_fields[_START, shared.tiles.stage(walk)] < shared.tile_fields[_STOP, shared.tiles.stage(walk)]
        )

    @cute.jit
    def call_turns(self, a: BackwardArguments, shared: "_Shared") -> None:
        """Warp 1: waits for turns to add, in the multiplying warps' order: dK and dV before the last dQ."""
        c = self.config
        turn, walk = Int32(0), Int32(0)
        while self._has_tile(shared, walk):
            tile = self._tile(a, shared, walk)
            for m in cutlass.range(tile.blocks.start, tile.blocks.stop, unroll=1):
                if const_expr(c.grouped):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
                    if m + 1 == tile.blocks.stop:
                        counter = semaphore.counter(a.mTurnsK, tile.head_k, 0, tile.block)
                        shared.turns.call(turn, counter, tile.earlier_heads)
                        turn += 1
                counter = semaphore.counter(a.mTurnsQ, tile.head, 0, tile.first_block + m)
                shared.turns.call(turn, counter, tile.earlier(c, m))
                turn += 1
            shared.tiles.release(walk)
            walk += 1

    @cute.jit
    def pass_turns(self, a: BackwardArguments, shared: "_Shared") -> None:
        """Warp 2: passes turns on to the tiles that come after."""
        c = self.config
        turn, walk = Int32(0), Int32(0)
        while self._has_tile(shared, walk):
            tile = self._tile(a, shared, walk)
            m, last = tile.blocks.start, tile.blocks.stop - 1
            while m <= last:
                if const_expr(c.grouped):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
                    if m == last:
                        counter = semaphore.counter(a.mTurnsK, tile.head_k, 0, tile.block)
                        turn += shared.turns.pass_on(turn, counter, Boolean(False))
                counters = semaphore.counter(a.mTurnsQ, tile.head, 0, tile.first_block + m)
                passed = shared.turns.pass_on(turn, counters, m + 1 < last)
                turn += passed
                m += passed
            shared.tiles.release(walk)
            walk += 1

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
        sK_part = cute.local_tile(shared.sK, (64, c.columns_dQ, self.warpgroups, 2), (0, w % parts_a_row, 0, 0))
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
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        walk, step, last_head, last_block = (Int32(0) for _ in range(4))
        has_tile = self._has_tile(shared, walk)
        if has_tile:
            shared.k.wait_full(walk)  # from warp 0
            shared.pipe_Q.consumer_wait(state)
        self._start_S(work, walk, state.index)
        self._read_stats(work, 0, state.index)
        warpgroup.wait_group(0)
        while has_tile:
            tile = self._tile(a, shared, walk)
            start, stop = tile.blocks.start, tile.blocks.stop
            work.acc_dV.fill(0.0)
            work.acc_dK.fill(0.0)
            for m in cutlass.range(start, stop, unroll=1):
                self._step(work, tile, walk, m, step, (last_head, last_block), state)
                state.advance()
                step += 1
            last_head, last_block = tile.head, tile.first_block + stop - 1
            if const_expr(c.grouped):
                self._add_dKV(work, tile, self._turn(step, walk))
            else:
                self._store(work, tile, stores)
            shared.tiles.release(walk)
            walk += 1
            has_tile = self._has_tile(shared, walk)
        if step > 0:
            cute.arch.mbarrier_wait(shared.ds_barriers + (step - 1 & 1), step - 1 >> 1 & 1)  # all warps' last dS
        self._start_dQ(work, step - 1, walk - 1)
        warpgroup.wait_group(0)
        if step > 0:
            self._add_dQ(work, last_head, last_block, self._turn(step, walk))
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until it has been read

    def _turn(self, step: Int32, walk: Int32) -> Int32:
        """The number of the addition that is next in a step, or behind it: dQ is a step late."""
        return step - 1 + walk if self.config.grouped else step - 1

    @cute.jit
    def _step(
        self,
        work: "_Work",
        tile: KeyTile,
        walk: Int32,
        m: Int32,
        step: Int32,
        before: tuple[Int32, Int32],
        state: pipeline.PipelineState,
    ) -> None:
        """One block of queries: its scores are there on entry, and the next one's on return.

        What comes before the first block of a tile is the last one of the tile before, and the other way round. The
        very first step computes a dQ of anything, and the very last one scores of anything, as the compiler lets
        products overlap only where none is under a condition.

        Args:
            work: this warpgroup's operands.
            tile: the keys.
            walk: counts tiles.
            m: the block's number within the sequence.
            step: counts blocks, over all tiles of this CTA.
            before: head and block, in the workspace, of the last step of the tile before.
            state: of the pipelines of Q and dO.
        """
        shared, stage, rW = work.shared, state.index, work.scores.rW
        is_first, is_last = m == tile.blocks.start, m + 1 == tile.blocks.stop
        tPrdO = work.tPrdO[None, None, None, stage]
        if is_first:
            shared.v.wait_full(walk)  # from warp 0
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
        if is_last:
            shared.v.release(walk)  # to warp 0
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
        head, block, walk_before, walk_after = tile.head, tile.first_block + m - 1, walk, walk
        if is_first:
            head, block = before
            walk_before = walk - 1
        self._start_dQ(work, step - 1, walk_before)
        gemm(work.mma_dK, work.acc_dK, as_operand_a(work.rdS), work.tKrQ[None, None, None, stage], False)
        warpgroup.wait_group(1)  # dQ is there
        if walk_before < walk and walk > 0:
            shared.k.release(walk_before)  # to warp 0: a tile of one step waits for the next one's keys, which go there
        following = state.clone()
        following.advance()
        follows = Boolean(True)
        if is_last:
            walk_after = walk + 1
            follows = self._has_tile(shared, walk_after)
            if follows:
                shared.k.wait_full(walk_after)  # from warp 0
        if follows:
            shared.pipe_Q.consumer_wait(following)
        self._start_S(work, walk_after, following.index)
        self._read_stats(work, 0, following.index)
        # This warp's part of dS is there, and the other buffer is read by it no more.
        arrive_as_warp(shared.ds_barriers + (step & 1))
        if step > 0:
            self._add_dQ(work, head, block, self._turn(step, walk))
        warpgroup.wait_group(0)  # dK and the next scores are there
        shared.pipe_Q.consumer_release(state)

    @cute.jit
    def _start_S(self, work: "_Work", walk: Int32, stage: Int32) -> None:
        """Scores of a block."""
        tSrK = work.tSrK[None, None, None, work.warpgroup, work.shared.k.stage(walk)]
        gemm(work.mma_S, work.scores.acc_S, tSrK, work.tSrQ[None, None, None, stage], True)

    @cute.jit
    def _start_dQ(self, work: "_Work", step: Int32, walk: Int32) -> None:
        """This warpgroup's part of a step's dQ."""
        for i in cutlass.range_constexpr(self.warpgroups):
            tQrdS = work.tQrdS[None, None, None, i, step & 1]
            tQrK = work.tQrK[None, None, None, i, work.shared.k.stage(walk)]
            gemm(work.mma_dQ, work.acc_dQ, tQrdS, tQrK, i == 0, i == self.warpgroups - 1)

    @cute.jit
    def _add_dQ(self, work: "_Work", head: Int32, block: Int32, turn: Int32) -> None:
        """This warpgroup's part of dQ to the workspace."""
        is_first = None
        if const_expr(self.config.deterministic):
            is_first = work.shared.turns.wait(turn)
        self._add(work, work.acc_dQ, work.arguments.mdQaccum[head, block, None], is_first)
        if const_expr(self.config.deterministic):
            work.shared.turns.have_added(turn)

    @cute.jit
    def _add_dKV(self, work: "_Work", tile: KeyTile, turn: Int32) -> None:
        """This warpgroup's keys' dK and dV to the workspace."""
        is_first = None
        if const_expr(self.config.deterministic):
            is_first = work.shared.turns.wait(turn)
        for i, acc in enumerate((work.acc_dK, work.acc_dV)):
            self._add(work, acc, work.arguments.mdKVaccum[i, tile.head_k, tile.block, None], is_first)
        if const_expr(self.config.deterministic):
            work.shared.turns.have_added(turn)

    @cute.jit
    def _add(self, work: "_Work", acc: cute.Tensor, block: cute.Tensor, is_first: Boolean | None) -> None:
        part = cute.local_tile(block, (128 * cute.size(acc),), (work.warpgroup,))
        workspace.add(acc, part, work.thread, is_first)

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
    def _store(self, work: "_Work", tile: KeyTile, stores: tuple) -> None:
        """DV and dK, one after the other, through shared memory and TMA."""
        w, shared, barrier = work.warpgroup, work.shared, _BARRIER_EPILOGUE + work.warpgroup
        stores_tiles = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
        start = tile.first_key + 64 * w
        stop = cutlass.min(start + 64, tile.k.length)
        for i in cutlass.range_constexpr(cute.size(work.acc_dK)):
            work.acc_dK[i] = work.acc_dK[i] * work.arguments.softmax_scale
        for acc, mma, t in ((work.acc_dV, work.mma_dV, stores[1]), (work.acc_dK, work.mma_dK, stores[0])):
            rounded = cute.make_rmem_tensor_like(acc, self.dtype)
            convert(acc, rounded)
            if stores_tiles:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # what was here has left
            write(rounded, mma, shared.sdX[None, None, w], work.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
            if stores_tiles and start < stop:
                g = t.at(tile.k.start + start, tile.k.start + stop, tile.head_k, tile.batch)
                t.store(shared.sdX[None, None, w], g)
                cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class _Shared:
    """Shared memory and what guards it."""

    sK: cute.Tensor  # (64, d, warpgroup, 2)
    sV: cute.Tensor  # (64, d, warpgroup)
    sQ: cute.Tensor  # (tile_m, d, stage)
    sdO: cute.Tensor  # (tile_m, d, stage)
    sdS: cute.Tensor  # (64, tile_m, warpgroup, 2)
    sdX: cute.Tensor  # (64, d, warpgroup): dV and dK on their way out
    stats: cute.Tensor  # (tile_m, lse and delta, stage)
    tile_fields: cute.Tensor  # (field, stage of tiles)
    tiles: Ring
    k: Ring
    v: Ring
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
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, warpgroup, stage of k)
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tPrV: cute.Tensor
    tPrdO: cute.Tensor
    tVrdO: cute.Tensor
    tKrQ: cute.Tensor
    tQrdS: cute.Tensor  # (MMA, 1, MMA_K, warpgroup, PIPE)
    tQrK: cute.Tensor  # (MMA, 1, MMA_K, warpgroup, stage of k)
    scores: Scores  # its rW is where rdS will be, with a softcap
    acc_dP: cute.Tensor
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor
    acc_dQ: cute.Tensor
    rdS: cute.Tensor
    rStats: cute.Tensor  # (four, group of sixteen queries): lse, then delta, of as many as there are registers for
    shared: _Shared
