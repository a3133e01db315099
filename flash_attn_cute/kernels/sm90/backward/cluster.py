"""Attention backward on Hopper for head dimensions above 128: clusters of two CTAs that exchange dS.

A tile (``tiles``) is 128 keys for one query head, and one cluster's only work: 64 keys a CTA. Both CTAs walk over
the same blocks of 64 queries in step, from the first that sees the tile to the last. Which tile it is, rank 0 asks a
counter, so tiles start in the order of their numbers.

Roles of a CTA (512 threads; registers a thread: ``BackwardClusterConfig.registers``):
    warp 0              producer of K, then of Q, lse and delta block by block.
    warp 1              producer of V, then of dO block by block.
    warps 2, 3          if deterministic, wait for turns to add to dQ, and pass them on.
    warpgroup 1         scores: P' = exp2(S' - lse), and dV. A bias it reads from global memory by itself.
    warpgroup 2         gradients: dS' = P' (dP' - delta), and dK.
    warpgroup 3         dQ: of all 64 queries half of the columns (those of its rank), over the keys of both CTAs.
Rank 0 loads Q for both CTAs by multicast, and rank 1 dO; each its own keys, lse and delta. For dQ a CTA also holds the
other CTA's K, in its own half of the columns.

Pipelines (``Ring``: stages in turn, a full and an empty mbarrier each; who fills -> who empties):
    q      2 stages. Warp 0, once, and the bytes of Q, lse and delta -> the warps of warpgroups 1 and 2 of both CTAs.
    do     2 stages, of a block or half of its columns. Warp 1, once, and the bytes -> as q.
    p      1 stage. The warps of warpgroup 1, when their weights are in shared memory -> those of warpgroup 2.
    ds     2 stages. The warps of warpgroup 2, when their part of dS is in shared memory, and 8 KB from those of the
           other CTA -> the warps of warpgroups 3 of both CTAs.
    turns  see ``common.turns``: warp 2 -> the warps of warpgroup 3 -> warp 3 -> warp 2. For dK and dV of grouped
           heads, once a tile, warpgroups 1 and 2 wait and count themselves.
    k, v   One mbarrier each, never emptied: warps 0 and 1 and the bytes -> whoever reads keys or values.

A step j of the mma warpgroups (transposed: rows are keys, columns queries), each with one product in flight:
    1   S' = K Q'       P to registers, and to warpgroup 2      dV += P' dO
    2   dP' = V dO'     dS to registers                         dK += dS' Q     under it dS to both CTAs
    3   dQ = dS K       dQ to the workspace
The tensor cores are one warpgroup's while the others compute, wait or add. Warpgroup 2 is half a step behind 1, and 3
behind both.

dO has the shortest life, dP to dV, so where shared memory is short it is the one that has no room for two blocks.
The weights travel as registers (thread to thread), dS as a tile that the tensor cores read.

Under a mask the walk is one over a list of blocks of queries (``common.key_lists``), which every role reads by itself.

Windows are those of the forward kernel with queries and keys exchanged. Which rows of the workspace belong to a query,
and how they are ordered, is ``workspace``'s business.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import turns
from flash_attn_cute.kernels.common.assembly import copy_to_cta, opaque
from flash_attn_cute.kernels.common.block_lists import bits_of
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.key_lists import entry_of, list_of
from flash_attn_cute.kernels.common.key_tiles import KeyTile, key_tile, num_key_tiles
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.rows import rows_first, zero_rows
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.score_rows import Place
from flash_attn_cute.kernels.common.score_tensors import ScoreTensors
from flash_attn_cute.kernels.common.tiles import take_tile
from flash_attn_cute.kernels.common.tma import RowTiles, make_row_tiles, prefetch_descriptors
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.workspace import add, four_stats
from flash_attn_cute.kernels.sm90.config import BackwardClusterConfig
from flash_attn_cute.kernels.sm90.mma import as_operand_a, convert, gemm, store_rows, tiled_mma
from flash_attn_cute.kernels.sm90.scores import Scores, differentiate, read_seen, read_transposed, weigh
from flash_attn_cute.kernels.sm90.shared import swizzled, transposed, write

_THREADS = 512
_WARPS = 4  # of a warpgroup
_STAGES = 2  # of Q, of dO, or as many of its halves, and of dS
_BOTH = 0b11  # CTAs of a cluster, for multicast
_RANK_OF_Q, _RANK_OF_DO = 0, 1  # who loads it for both

# Named barriers, of 128 threads each; 0 is the whole CTA's.
_BARRIER_DV, _BARRIER_DK = 1, 2


class _Layouts(NamedTuple):
    sK: cute.ComposedLayout  # (64, d)
    sK_peer: cute.ComposedLayout  # (64, columns of dQ)
    sV: cute.ComposedLayout  # (64, d_v)
    sQ: cute.ComposedLayout  # (64, d, stage)
    sdO: cute.ComposedLayout  # (64, d_v / parts of dO, stage)
    sdS: cute.ComposedLayout  # (64, 64, own and the other CTA's, stage)


class _Mmas(NamedTuple):
    """Products, called by their results."""

    S: cute.TiledMma  # and dP
    dV: cute.TiledMma  # of as many columns as a part of dO has
    dK: cute.TiledMma
    dQ: cute.TiledMma


class _Tma(NamedTuple):
    """Tiles of the tensors, by their names."""

    Q: RowTiles
    dO: RowTiles
    K: RowTiles
    K_peer: RowTiles
    V: RowTiles
    dK: RowTiles | None
    dV: RowTiles | None


class BackwardClusterSm90:
    """The backward kernel of one configuration."""

    def __init__(self, config: BackwardClusterConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    def _layouts(self) -> _Layouts:
        c = self.config
        return _Layouts(
            # No swizzled atom of K may hold columns of both halves of dQ.
            sK=swizzled(self.dtype, c.columns_dQ, (64, c.tile_d)),
            sK_peer=swizzled(self.dtype, c.columns_dQ, (64, c.columns_dQ)),
            sV=swizzled(self.dtype, c.tile_dv, (64, c.tile_dv)),
            sQ=swizzled(self.dtype, c.tile_d, (64, c.tile_d, _STAGES)),
            sdO=swizzled(self.dtype, c.columns_dO, (64, c.columns_dO, _STAGES)),
            sdS=swizzled(self.dtype, 64, (64, 64, 2, _STAGES)),
        )

    def _shared_storage(self, layouts: _Layouts) -> type:
        dtype, deterministic = self.dtype, self.config.features.deterministic

        @cute.struct
        class Storage:
            k_barrier: cute.struct.MemRange[Int64, 1]
            v_barrier: cute.struct.MemRange[Int64, 1]
            q_barriers: cute.struct.MemRange[Int64, 2 * _STAGES]
            do_barriers: cute.struct.MemRange[Int64, 2 * _STAGES]
            p_barriers: cute.struct.MemRange[Int64, 2]
            ds_barriers: cute.struct.MemRange[Int64, 2 * _STAGES]
            turn_barriers: cute.struct.MemRange[Int64, turns.Turns.num_barriers if deterministic else 0]
            turns_earlier: cute.struct.MemRange[Int32, turns.Turns.num_stages if deterministic else 0]
            tile: cute.struct.MemRange[Int32, 1]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 2 * 64 * _STAGES], 128]
            sP: cute.struct.Align[cute.struct.MemRange[Int32, 64 * 64 // 2], 128]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
            sK_peer: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK_peer)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
            sdO: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO)], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdS)], 1024]

        return Storage

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel."""
        c, dtype, packed = self.config, self.dtype, self.config.features.packed
        mQ, mK, mV, mdO, mdK, mdV = (rows_first(x, packed) for x in (a.mQ, a.mK, a.mV, a.mdO, a.mdK, a.mdV))
        layouts = self._layouts()
        self.Storage = self._shared_storage(layouts)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        mmas = _Mmas(
            S=tiled_mma(dtype, k_major, k_major, 64, registers if const_expr(c.keys_in_registers) else shared),
            dV=tiled_mma(dtype, k_major, mn_major, c.columns_dO, registers),
            dK=tiled_mma(dtype, k_major, mn_major, c.columns_dK, registers),
            dQ=tiled_mma(dtype, mn_major, mn_major, c.columns_dQ, shared),
        )
        to_both, load = cpasync.CopyBulkTensorTileG2SMulticastOp(), cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        sK, sK_peer, sV, sQ, sdO, _ = (cute.select(layout, mode=[0, 1]) for layout in layouts)
        leaves_wide = c.features.wide  # from registers
        tma = _Tma(
            Q=make_row_tiles(to_both, mQ, sQ, (64, c.tile_d), packed),
            dO=make_row_tiles(to_both, mdO, sdO, (64, c.columns_dO), packed),
            K=make_row_tiles(load, mK, sK, (64, c.tile_d), packed),
            K_peer=make_row_tiles(load, mK, sK_peer, (64, c.columns_dQ), packed),
            V=make_row_tiles(load, mV, sV, (64, c.tile_dv), packed),
            dK=None if const_expr(leaves_wide) else make_row_tiles(store, mdK, sQ, (64, c.tile_d), packed),
            dV=None if const_expr(leaves_wide) else make_row_tiles(store, mdV, sdO, (64, c.columns_dO), packed),
        )
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        self.kernel(mmas, tma, mdK, mdV, a, ws, scales).launch(
            grid=[2 * num_key_tiles(c, a), 1, 1],
            block=[_THREADS, 1, 1],
            cluster=[2, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        mmas: _Mmas,
        tma: _Tma,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        a: BackwardArguments,
        ws: Workspace,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared memory and barriers, learns the tile, then splits into roles."""
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_idx == 0:
            prefetch_descriptors(tma)
        layouts = self._layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        shared = _Shared(
            **{
                name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
                for name, layout in layouts._asdict().items()
            },
            sP=storage.sP.get_tensor(cute.make_layout((4, 128, 4), stride=(1, 4, 512))),
            dS=storage.sdS.data_ptr(),
            stats=storage.stats.get_tensor(cute.make_layout((64, 2, _STAGES))),
            k_full=storage.k_barrier.data_ptr(),
            v_full=storage.v_barrier.data_ptr(),
            q=Ring(storage.q_barriers.data_ptr(), _STAGES),
            do=Ring(storage.do_barriers.data_ptr(), _STAGES),
            p=Ring(storage.p_barriers.data_ptr(), 1),
            ds=Ring(storage.ds_barriers.data_ptr(), _STAGES),
            turns=turns.Turns(storage.turn_barriers.data_ptr(), storage.turns_earlier.data_ptr()),
            rank=rank,
        )
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.k_full, 1)
                cute.arch.mbarrier_init(shared.v_full, 1)
                both = 2  # CTAs
                shared.q.init(full=1, empty=both * 2 * _WARPS)
                shared.do.init(full=1, empty=both * 2 * _WARPS)
                shared.p.init(full=_WARPS, empty=_WARPS)
                shared.ds.init(full=_WARPS, empty=both * _WARPS)
                if const_expr(c.features.deterministic):
                    shared.turns.init(_WARPS)
            if rank == 0:
                tile = take_tile(a.mNextTile, num_key_tiles(c, a))
                if cute.arch.lane_idx() == 0:
                    storage.tile.data_ptr().store(tile)
        cute.arch.mbarrier_init_fence()
        # Both CTAs run, their barriers stand and rank 0 knows the tile.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        index = cute.arch.make_warp_uniform(cute.arch.map_dsmem_ptr(storage.tile.data_ptr(), 0).load())

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp_idx == 0:
                keys = ((tma.K, shared.sK, rank, 0), (tma.K_peer, shared.sK_peer, 1 - rank, rank))
                loads = _Loads(keys, shared.k_full, tma.Q, 1, shared.sQ, shared.q, _RANK_OF_Q)
                self.producer(a, ws, index, loads, shared)
            if warp_idx == 1:
                values = ((tma.V, shared.sV, rank, 0),)
                loads = _Loads(values, shared.v_full, tma.dO, c.parts_dO, shared.sdO, shared.do, _RANK_OF_DO)
                self.producer(a, ws, index, loads, shared)
            if const_expr(c.features.deterministic):
                if warp_idx == 2:
                    self.call_turns(a, ws, index, shared)
                elif warp_idx == 3:
                    self.pass_turns(a, ws, index, shared)
        elif warp_idx < 8:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.score(a, ws, index, mmas, tma.dV, mdV, shared, scales)
        elif warp_idx < 12:
            cute.arch.setmaxregister_increase(c.registers[2])
            self.differentiate(a, ws, index, mmas, tma.dK, mdK, shared)
        else:
            cute.arch.setmaxregister_decrease(c.registers[3])
            self.sum_queries(a, ws, index, mmas.dQ, shared)
        # Shared memory and barriers live until the other CTA writes to them and arrives at them no more.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def producer(self, a: BackwardArguments, ws: Workspace, index: Int32, loads: "_Loads", shared: "_Shared") -> None:
        """Warp 0 or 1: keys or values once, and Q or dO block by block."""
        c, rows, ring = self.config, loads.rows, loads.ring
        tile, entries = self._tile(a, ws, index)
        if tile.blocks.num > 0:
            num_bytes_keys = sum(2 * 64 * t.tile_columns for t, *_ in loads.keys)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loads.keys_full, num_bytes_keys)
            for t, sX, rank, column_tile in loads.keys:
                first = tile.first_key + 64 * rank
                last = cutlass.max(cutlass.min(first + 64, tile.k.length), first)
                g = t.at(tile.k.start + first, tile.k.start + last, tile.head_k, tile.batch, column_tile)
                t.load(g, sX, loads.keys_full)
        parts = loads.parts
        with_stats = ring is shared.q
        num_bytes = 2 * 64 * rows.tile_columns + (2 * 4 * 64 if with_stats else 0)
        numbers = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        for step in cutlass.range(tile.blocks.num, unroll=1):
            m_block = self._m_block(ws, tile, entries, step)
            for part in cutlass.range_constexpr(parts):
                fill = step * parts + part
                full, stage = ring.full(fill), ring.stage(fill)
                ring.wait_empty(fill)  # from warpgroups 1 and 2 of both CTAs: this stage is released
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                    if const_expr(with_stats):
                        for i in cutlass.range_constexpr(2):
                            cute.copy(
                                numbers,
                                ws.mStats[i, tile.head, tile.first_block + m_block, None],
                                shared.stats[None, i, stage],
                                mbar_ptr=full,
                            )
                # The other CTA's barrier counts bytes whether or not its own warp has been here.
                if shared.rank == loads.rank:
                    first = m_block * c.tile_m
                    last = tile.q.start + cutlass.min(first + c.tile_m, tile.q.length)
                    block = rows.at(tile.q.start + first, last, tile.head, tile.batch, part)
                    rows.load(block, loads.sX[None, None, stage], full, multicast=_BOTH)

    @cute.jit
    def call_turns(self, a: BackwardArguments, ws: Workspace, index: Int32, shared: "_Shared") -> None:
        """Warp 2: waits for the turns to add to the tile's blocks of dQ, one after the other."""
        c = self.config
        tile, entries = self._tile(a, ws, index)
        for step in cutlass.range(tile.blocks.num, unroll=1):
            m_block = self._m_block(ws, tile, entries, step)
            counter = turns.counter(ws.mTurnsQ, shared.rank, tile.head, tile.first_block + m_block)
            turn = ws.mEntries[entries + step, 2] if const_expr(c.features.listed) else tile.turn(c, m_block)
            shared.turns.call(step, counter, turn)

    @cute.jit
    def pass_turns(self, a: BackwardArguments, ws: Workspace, index: Int32, shared: "_Shared") -> None:
        """Warp 3: passes turns on to the tiles that come after."""
        tile, entries = self._tile(a, ws, index)
        step = Int32(0)
        while step < tile.blocks.num:
            m_block = self._m_block(ws, tile, entries, step)
            counters = turns.counter(ws.mTurnsQ, shared.rank, tile.head, tile.first_block + m_block)
            another = step + 1 < tile.blocks.num
            if const_expr(self.config.features.listed):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
                if another:  # its counter has to be the next one
                    another = self._m_block(ws, tile, entries, step + 1) == m_block + 1
            step += shared.turns.pass_on(step, counters, another)

    @cute.jit
    def _tile(self, a: BackwardArguments, ws: Workspace, index: Int32) -> tuple[KeyTile, Int32]:
        """The tile, and under a mask the first entry of its list."""
        tile, entries = key_tile(self.config, a, ws, index), Int32(0)
        if const_expr(self.config.features.listed):  # noqa: SIM102 (as above)
            if tile.blocks.num > 0:
                entries, _ = list_of(self.config, a, ws, tile.batch, tile.head, tile.block)
        return tile, entries

    def _m_block(self, ws: Workspace, tile: KeyTile, entries: Int32, step: Int32) -> Int32:
        """The block of queries of a step."""
        return ws.mEntries[entries + step, 0] if self.config.features.listed else tile.blocks.nth(step)

    @cute.jit
    def score(
        self,
        a: BackwardArguments,
        ws: Workspace,
        index: Int32,
        mmas: _Mmas,
        store: RowTiles | None,
        mdV: cute.Tensor,
        shared: "_Shared",
        scales: ScoreScales,
    ) -> None:
        """Warpgroup 1: weights, and dV."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        tile, entries = self._tile(a, ws, index)
        # Operands in shared memory are described once a warpgroup: by its first thread's slice.
        mma_S, mma_dV = mmas.S, mmas.dV
        slice_S, whole_S, whole_dV = mma_S.get_slice(thread), mma_S.get_slice(0), mma_dV.get_slice(0)
        tSrK = self._operand(mma_S, shared.sK, thread)
        tSrQ = mma_S.make_fragment_B(whole_S.partition_B(shared.sQ))  # (MMA, 1, MMA_K, PIPE)
        tVrdO = mma_dV.make_fragment_B(whole_dV.partition_B(transposed(shared.sdO)))  # (MMA, MMA_N, MMA_K, PIPE)
        acc_S = cute.make_rmem_tensor(slice_S.partition_shape_C((64, 64)), Float32)
        parts = c.parts_dO
        shape_dV = mma_dV.get_slice(thread).partition_shape_C((64, c.columns_dO))
        acc_dV = [cute.make_rmem_tensor(shape_dV, Float32) for _ in range(parts)]
        rP = cute.make_rmem_tensor_like(acc_S, self.dtype)
        quad = opaque(thread % 4)
        scores = Scores(
            acc_S=acc_S,
            rP=rP,
            rW=cute.make_rmem_tensor_like(rP) if c.features.softcap else rP,
            cS=slice_S.partition_C(cute.make_identity_tensor((64, 64))),
            scales=scales,
            tensors=ScoreTensors.of(c.features, a),
        )
        rW = cute.make_tensor(cute.recast_tensor(scores.rW, Int32).iterator, cute.make_layout((4, 4)))
        for acc in acc_dV:
            acc.fill(0.0)
        num_steps = tile.blocks.num
        if num_steps > 0:
            cute.arch.mbarrier_wait(shared.k_full, 0)  # from warp 0
            self._read_keys(mma_S, shared.sK, tSrK, thread)
            for step in cutlass.range(num_steps, unroll=1):
                stage, words, m_block = shared.q.stage(step), None, self._m_block(ws, tile, entries, step)
                if const_expr(c.features.listed):
                    _, code, _ = entry_of(c, ws, entries + step)
                    words, hides = bits_of(ws.mBits, code, shared.rank, thread), code >= 0
                else:
                    hides = tile.blocks.crosses_left(m_block)
                seen = None
                if const_expr(c.features.intervals):
                    seen = read_seen(a.mSeen, tile.batch, tile.k.length, self._first_key(tile), scores.cS)
                shared.q.wait_full(step)  # from warp 0
                gemm(mma_S, acc_S, tSrK, tSrQ[None, None, None, stage], True)
                elements: tuple[Any, ...] = ()
                if const_expr(c.features.bias):
                    elements = self._read_elements(scores, tile.place(c, 0, self._first_key(tile), m_block))
                warpgroup.wait_group(0)
                lse = shared.stats[None, 0, stage]
                if const_expr(c.features.hides_last_queries and not c.features.listed):
                    hides = hides or tile.blocks.crosses_right(m_block)
                weigh(
                    c,
                    scores,
                    hides,
                    lambda m_block=m_block: tile.place(c, 0, self._first_key(tile), m_block),
                    lambda i, lse=lse: self._four(lse, quad, i),
                    elements,
                    words,
                    seen,
                )
                shared.q.release_in_both(step)  # to warps 0: scores and lse have been read
                shared.p.wait_empty(step)  # warpgroup 2 has read the last weights
                for i in cutlass.range_constexpr(4):
                    cute.autovec_copy(rW[None, i], shared.sP[None, thread, i])
                shared.p.arrive(step)  # to warpgroup 2
                for part in cutlass.range_constexpr(parts):
                    fill = step * parts + part
                    shared.do.wait_full(fill)  # from warp 1
                    tVrdO_now = tVrdO[None, None, None, shared.do.stage(fill)]
                    gemm(mma_dV, acc_dV[part], as_operand_a(rP), tVrdO_now, False)
                for part in cutlass.range_constexpr(parts):
                    warpgroup.wait_group(parts - 1 - part)
                    shared.do.release_in_both(step * parts + part)  # to warps 1
            if const_expr(not c.features.grouped):
                # dO is over, and dV leaves through its place once all have read it.
                for i in cutlass.range_constexpr(_STAGES):
                    shared.do.wait_empty(num_steps * parts + i)
        if const_expr(c.features.grouped):
            self._add(ws, tile, acc_dV, 1, shared, thread, _BARRIER_DV)
        else:
            places = [shared.sdO[None, None, part] for part in range(parts)]
            self._store(a, tile, acc_dV, mma_dV, store, places, mdV, shared, thread, _BARRIER_DV)

    def _operand(self, mma: cute.TiledMma, sX: cute.Tensor, thread: Int32) -> cute.Tensor:
        """Keys or values as the A operand of S or dP, (MMA, 1, MMA_K): in shared memory, or registers for them."""
        if const_expr(self.config.keys_in_registers):
            return cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_A(sX.shape), self.dtype)
        return mma.make_fragment_A(mma.get_slice(0).partition_A(sX))

    @cute.jit
    def _read_keys(self, mma: cute.TiledMma, sX: cute.Tensor, operand: cute.Tensor, thread: Int32) -> None:
        """Fills the operand, if it is registers."""
        if const_expr(self.config.keys_in_registers):
            tiled_copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), mma)
            from_shared = tiled_copy.get_slice(thread)
            cute.copy(tiled_copy, from_shared.partition_S(sX), from_shared.retile(operand))

    def _read_elements(self, scores: Scores, place: Place) -> tuple[Any, ...]:
        """Those of a bias: now, as it takes long, or part by part when there are registers for them."""
        parts = self.config.parts_of_bias
        if parts == 1:
            return (read_transposed(scores, place),)
        return tuple(partial(read_transposed, scores, place, part, parts) for part in range(parts))

    def _first_key(self, tile: KeyTile) -> Int32:
        """This CTA's; its rank is read again, which is seldom, rather than kept in a register."""
        return tile.first_key + 64 * cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def _four(self, numbers: cute.Tensor, quad: Int32, i: int) -> cute.Tensor:
        """Lse or delta of this thread's four queries in the i-th group of sixteen."""
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(four_stats(numbers, quad, i), four)
        return four

    @cute.jit
    def differentiate(
        self,
        a: BackwardArguments,
        ws: Workspace,
        index: Int32,
        mmas: _Mmas,
        store: RowTiles | None,
        mdK: cute.Tensor,
        shared: "_Shared",
    ) -> None:
        """Warpgroup 2: gradients of the scores, for both CTAs, and dK."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        quad = opaque(thread % 4)
        tile, _ = self._tile(a, ws, index)
        mma_dP, mma_dK, parts = mmas.S, mmas.dK, c.parts_dO
        whole_dP, whole_dK = mma_dP.get_slice(0), mma_dK.get_slice(0)
        sV_parts = [cute.local_tile(shared.sV, (64, c.columns_dO), (0, part)) for part in range(parts)]
        tPrV = [self._operand(mma_dP, sV, thread) for sV in sV_parts]
        tPrdO = mma_dP.make_fragment_B(whole_dP.partition_B(shared.sdO))  # (MMA, 1, MMA_K, PIPE)
        tKrQ = mma_dK.make_fragment_B(whole_dK.partition_B(transposed(shared.sQ)))
        acc_dP = cute.make_rmem_tensor(mma_dP.get_slice(thread).partition_shape_C((64, 64)), Float32)
        acc_dK = cute.make_rmem_tensor(mma_dK.get_slice(thread).partition_shape_C((64, c.tile_d)), Float32)
        rdS = cute.make_rmem_tensor_like(acc_dP, self.dtype)
        acc_dK.fill(0.0)
        num_steps = tile.blocks.num
        if num_steps > 0:
            cute.arch.mbarrier_wait(shared.v_full, 0)  # from warp 1
            for sV, operand in zip(sV_parts, tPrV, strict=True):
                self._read_keys(mma_dP, sV, operand, thread)
            for step in cutlass.range(num_steps, unroll=1):
                for part, operand in enumerate(tPrV):
                    fill = step * parts + part
                    shared.do.wait_full(fill)  # from warp 1
                    gemm(mma_dP, acc_dP, operand, tPrdO[None, None, None, shared.do.stage(fill)], part == 0)
                for part in cutlass.range_constexpr(parts):
                    warpgroup.wait_group(parts - 1 - part)
                    shared.do.release_in_both(step * parts + part)  # to warps 1
                stage = shared.q.stage(step)
                shared.q.wait_full(step)  # from warp 0: with Q comes delta
                shared.p.wait_full(step)  # from warpgroup 1
                weights, delta = shared.sP[None, thread, None], shared.stats[None, 1, stage]
                differentiate(
                    acc_dP,
                    lambda i, weights=weights: self._eight(weights, i),
                    lambda i, delta=delta: self._four(delta, quad, i),
                    rdS,
                )
                shared.p.release(step)  # to warpgroup 1
                # Before dS is handed out: the tensor cores may well be idle.
                gemm(mma_dK, acc_dK, as_operand_a(rdS), tKrQ[None, None, None, stage], False)
                shared.ds.wait_empty(step)  # warpgroups 3 of both CTAs have read the dS of two steps before
                self._hand_out(rdS, mma_dP, shared, step, thread)
                warpgroup.wait_group(0)
                shared.q.release_in_both(step)  # to warps 0
        if const_expr(c.features.grouped):
            self._add(ws, tile, [acc_dK], 0, shared, thread, _BARRIER_DK)
        else:
            for i in cutlass.range_constexpr(cute.size(acc_dK)):
                acc_dK[i] = acc_dK[i] * a.numbers.softmax_scale
            # Q is over, where dK leaves through: warpgroup 1 had its last scores before it had the last weights.
            self._store(a, tile, [acc_dK], mma_dK, store, [shared.sQ[None, None, 0]], mdK, shared, thread, _BARRIER_DK)

    def _eight(self, weights: cute.Tensor, i: int) -> cute.Tensor:
        """This thread's weights of the i-th group of sixteen queries, two a register, from warpgroup 1."""
        packed = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(weights[None, i], packed)
        return packed

    @cute.jit
    def _hand_out(self, rdS: cute.Tensor, mma_dP: cute.TiledMma, shared: "_Shared", step: Int32, thread: Int32) -> None:
        """Gradients of scores to warpgroup 3 of both CTAs: each warp's 16 keys lie together, and it sends them."""
        stage = shared.ds.stage(step)
        write(rdS, mma_dP, shared.sdS[None, None, 0, stage], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        numbers = 16 * 64
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        own = shared.dS + (stage * 2 * 4 + warp) * numbers
        full = shared.ds.full(step)
        with cute.arch.elect_one():
            # The other CTA's same warp sends as many bytes as this one.
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * numbers)
            copy_to_cta(1 - shared.rank, own + 4 * numbers, own, 2 * numbers, full)

    @cute.jit
    def sum_queries(
        self, a: BackwardArguments, ws: Workspace, index: Int32, mma_dQ: cute.TiledMma, shared: "_Shared"
    ) -> None:
        """Warpgroup 3: half of the columns of dQ, to the workspace."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        tile, entries = self._tile(a, ws, index)
        whole = mma_dQ.get_slice(0)
        sK_half = cute.local_tile(shared.sK, (64, c.columns_dQ), (0, shared.rank))
        tQrK = [mma_dQ.make_fragment_B(whole.partition_B(transposed(x))) for x in (sK_half, shared.sK_peer)]
        tQrdS = mma_dQ.make_fragment_A(whole.partition_A(transposed(shared.sdS)))  # (MMA, 1, MMA_K, CTA, PIPE)
        acc_dQ = cute.make_rmem_tensor(mma_dQ.get_slice(thread).partition_shape_C((64, c.columns_dQ)), Float32)
        num_steps = tile.blocks.num
        if num_steps > 0:
            cute.arch.mbarrier_wait(shared.k_full, 0)  # from warp 0
        for step in cutlass.range(num_steps, unroll=1):
            m_block = self._m_block(ws, tile, entries, step)
            shared.ds.wait_full(step)  # from warpgroups 2 of both CTAs
            tQrdS_now = tQrdS[None, None, None, None, shared.ds.stage(step)]
            gemm(mma_dQ, acc_dQ, tQrdS_now[None, None, None, 0], tQrK[0], True, is_last=False)
            gemm(mma_dQ, acc_dQ, tQrdS_now[None, None, None, 1], tQrK[1], False)
            warpgroup.wait_group(0)
            shared.ds.release_in_both(step)  # to warpgroups 2
            block = ws.mdQaccum[tile.head, tile.first_block + m_block, None]
            is_first = None
            if const_expr(c.features.deterministic):
                is_first = shared.turns.wait(step)
            add(acc_dQ, cute.local_tile(block, (64 * c.columns_dQ,), (shared.rank,)), thread, is_first)
            if const_expr(c.features.deterministic):
                shared.turns.have_added(step)

    @cute.jit
    def _add(
        self,
        ws: Workspace,
        tile: KeyTile,
        accs: list[cute.Tensor],
        which: cutlass.Constexpr,
        shared: "_Shared",
        thread: Int32,
        barrier: cutlass.Constexpr,
    ) -> None:
        """A warpgroup's dK (0) or dV (1), side by side in parts, to the workspace."""
        c = self.config
        if tile.blocks.num > 0:
            counter = turns.counter(ws.mTurnsK, 2 * shared.rank + which, tile.head_k, tile.block)
            is_first = tile.await_turn(c, counter, barrier)
            block = ws.mdKVaccum[which, tile.head_k, tile.block, None]
            columns = (c.tile_d, c.tile_dv)[which]
            own = cute.local_tile(block, (64 * columns,), (shared.rank,))
            for part, acc in enumerate(accs):
                add(acc, cute.local_tile(own, (128 * cute.size(acc),), (part,)), thread, is_first)
            counts = True if const_expr(c.features.deterministic) else is_first
            if counts:
                turns.count_as_warpgroup(counter, barrier)

    @cute.jit
    def _store(
        self,
        a: BackwardArguments,
        tile: KeyTile,
        accs: list[cute.Tensor],
        mma: cute.TiledMma,
        store: RowTiles | None,
        places: list[cute.Tensor],
        mX: cute.Tensor,
        shared: "_Shared",
        thread: Int32,
        barrier: cutlass.Constexpr,
    ) -> None:
        """A warpgroup's dK or dV, side by side in parts, through shared memory and TMA; zeros into the padding.

        In float32 they are written from registers.
        """
        c = self.config
        start = tile.first_key + 64 * shared.rank
        stop = cutlass.min(start + 64, tile.k.length)
        if const_expr(c.features.wide):
            gX = mX[None, None, tile.head_k, tile.batch]
            for part, acc in enumerate(accs):
                first_column = 2 * cute.size(acc) * part  # 128 threads have 64 rows
                store_rows(acc, gX, tile.k.start + start, tile.k.start + stop, thread, first_column)
        else:
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # the warpgroup has read what was there
            for acc, sX in zip(accs, places, strict=True):
                rounded = cute.make_rmem_tensor_like(acc, self.dtype)
                convert(acc, rounded)
                write(rounded, mma, sX, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # the warpgroup has written
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0 and start < stop:
                for part, sX in enumerate(places):
                    g = store.at(tile.k.start + start, tile.k.start + stop, tile.head_k, tile.batch, part)
                    store.store(sX, g)
                cute.arch.cp_async_bulk_commit_group()
        if const_expr(c.features.packed and c.features.zero_padding):
            first = cutlass.max(start, tile.k.length)
            padding = cutlass.min(start + 64, tile.k.slot) - first
            zero_rows(mX[None, None, tile.head_k, tile.batch], tile.k.start + first, padding, thread, 128)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until it has been read


@dataclass(frozen=True)
class _Shared:
    """Shared memory and what guards it."""

    sK: cute.Tensor  # (64, d)
    sK_peer: cute.Tensor  # (64, columns of dQ): the other CTA's keys, this one's columns of dQ
    sV: cute.Tensor  # (64, d_v)
    sQ: cute.Tensor  # (64, d, stage)
    sdO: cute.Tensor  # (64, d_v / parts of dO, stage)
    sdS: cute.Tensor  # (64, 64, own and the other CTA's keys, stage)
    sP: cute.Tensor  # (4, thread, 4): pairs of weights, or of rW, as a thread has them in registers
    dS: cute.Pointer  # sdS without its swizzle
    stats: cute.Tensor  # (64, lse and delta, stage of q)
    k_full: cute.Pointer  # barriers
    v_full: cute.Pointer
    q: Ring
    do: Ring
    p: Ring
    ds: Ring
    turns: turns.Turns
    rank: Int32  # of this CTA


@dataclass(frozen=True)
class _Loads:
    """What one of the producers loads."""

    keys: tuple  # of K or V: tiles, where they go, which CTA's keys, which tile of columns
    keys_full: cute.Pointer  # where their bytes arrive
    rows: RowTiles  # of Q, with which come lse and delta, or of dO
    parts: cutlass.Constexpr  # side by side, that make up all columns
    sX: cute.Tensor  # where they go
    ring: Ring  # guards sX
    rank: cutlass.Constexpr  # of the CTA that loads for both
