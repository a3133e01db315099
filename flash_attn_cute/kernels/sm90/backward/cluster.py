"""Attention backward on Hopper for head dimensions above 128: clusters of two CTAs that exchange dS.

``python -m flash_attn_cute.kernels describe sm90 backward --d 256`` prints its schedule (``cluster_schedule``).

A tile (``common.key_tiles``) is one cluster's only work. Both CTAs go over the same blocks of 64 queries in lockstep,
from the first that attends to the tile to the last. Rank 0 takes the tile's index from a counter, so tiles start in the
order of their numbers.

Q and dO come to both CTAs by multicast; keys, lse and delta each CTA loads itself. For dQ a CTA also holds the other
CTA's K, in its own half of the columns.

Products are transposed (rows are keys, columns queries), and each mma warpgroup has one in flight. Gradients are half a
step behind scores, and sums behind both. dQ is added in the order of semaphores if deterministic. For dK and dV of
grouped heads warpgroups wait and signal themselves, once a tile.

dO has the shortest life, dP to dV, so where shared memory is short it is the one that has no room for two blocks.
P travels as registers (thread to thread), dS as a tile that the tensor cores read.

Under a mask the mainloop goes over a list of blocks of queries. Every role reads it by itself (``BlockIterator``).

Windows are those of the forward kernel with queries and keys exchanged. ``workspace`` says how sums lie in memory.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import copy_to_cta, opaque, set_registers
from flash_attn_cute.kernels.common.block_lists import bits_of
from flash_attn_cute.kernels.common.key_lists import entry_of
from flash_attn_cute.kernels.common.key_tiles import KeyTile, num_key_tiles
from flash_attn_cute.kernels.common.main_kernels import BackwardKernel
from flash_attn_cute.kernels.common.ring import end_reads
from flash_attn_cute.kernels.common.rows import rows_first, scaled, zero_rows
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.score_rows import Place
from flash_attn_cute.kernels.common.tiles import take_tile
from flash_attn_cute.kernels.common.tma import prefetch_descriptors
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardClusterConfig
from flash_attn_cute.kernels.sm90.backward.cluster_schedule import STAGES, cluster_schedule
from flash_attn_cute.kernels.sm90.backward.cluster_transfers import BlockIterator, Shared, Tiles, Transfers
from flash_attn_cute.kernels.sm90.backward.workspace import add, load_four
from flash_attn_cute.kernels.sm90.mma import as_operand_a, convert, gemm, store_rows, tiled_mma
from flash_attn_cute.kernels.sm90.scores import Scores, compute_dS, compute_P, load_row_interval, read_transposed
from flash_attn_cute.kernels.sm90.shared import read_a, swizzled, transposed, write

# Gradients of keys, as ``which`` names them; to each belongs a named barrier of 128 threads. 0 is the whole CTA's.
_DK, _DV = 0, 1
_BARRIERS = 2, 1


class _Mmas(NamedTuple):
    """Products, called by their results."""

    S: cute.TiledMma  # and dP
    dV: cute.TiledMma  # of as many columns as a part of dO has
    dK: cute.TiledMma
    dQ: cute.TiledMma


class BackwardClusterSm90(BackwardKernel):
    """The backward kernel of one configuration: a cluster a tile."""

    def __init__(self, config: BackwardClusterConfig):
        super().__init__(config, cluster_schedule(config), swizzled)

    def mmas(self) -> _Mmas:
        c, dtype = self.config, self.dtype
        return _Mmas(
            S=tiled_mma(dtype, 64, a_in_registers=c.keys_in_registers),
            dV=tiled_mma(dtype, c.columns_dO, mn_major="b", a_in_registers=True),
            dK=tiled_mma(dtype, c.columns_dK, mn_major="b", a_in_registers=True),
            dQ=tiled_mma(dtype, c.columns_dQ, mn_major="ab"),
        )

    def tma(self, a: BackwardArguments, mdK: cute.Tensor, mdV: cute.Tensor) -> Tiles:
        f, row_tiles = self.config.features, self.memory.row_tiles
        to_both, store = cpasync.CopyBulkTensorTileG2SMulticastOp(), cpasync.CopyBulkTensorTileS2GOp()
        return Tiles(
            Q=row_tiles(to_both, "sQ", rows_first(a.mQ, f.packed), f.packed),
            dO=row_tiles(to_both, "sdO", rows_first(a.mdO, f.packed), f.packed),
            K=self.loaded_tiles("sK", a.mK),
            K_peer=self.loaded_tiles("sK_peer", a.mK),
            V=self.loaded_tiles("sV", a.mV),
            dK=None if f.wide else row_tiles(store, "sQ", mdK, f.packed),
            dV=None if f.wide else row_tiles(store, "sdO", mdV, f.packed),
        )

    @cute.kernel
    def kernel(
        self,
        mmas: _Mmas,
        tma: Tiles,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        a: BackwardArguments,
        ws: Workspace,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared memory and barriers, learns the tile, then splits into roles."""
        c, threads = self.config, self.schedule.threads
        scores, gradients, sums = map(self.schedule.role, ("scores", "gradients", "sums"))
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_idx == 0:
            prefetch_descriptors(tma)
        storage = self.memory.allocate()
        shared = Shared.of(self.memory, storage, rank)
        if warp_idx == 0:
            with cute.arch.elect_one():
                self.memory.init(storage)
            if rank == 0:
                tile = take_tile(a.mNextTile, num_key_tiles(c, a))
                if cute.arch.lane_idx() == 0:
                    storage.tile.data_ptr().store(tile)
        cute.arch.mbarrier_init_fence()
        # Both CTAs run, their barriers stand and rank 0 knows the tile.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        index = cute.arch.make_warp_uniform(cute.arch.map_dsmem_ptr(storage.tile.data_ptr(), 0).load())

        work = _Work(a, ws, index, shared, mmas, tma, (mdK, mdV))
        if warp_idx < scores.warps.start:
            set_registers(self.schedule.role("q_producer").registers, threads)
            transfers = Transfers(c, a, ws, index, tma, shared)
            if warp_idx == 0:
                transfers.load(of_queries=True)
            if warp_idx == 1:
                transfers.load(of_queries=False)
            if const_expr(c.features.deterministic):
                if warp_idx == 2:
                    transfers.wait_semaphores()
                elif warp_idx == 3:
                    transfers.signal_semaphores()
        elif warp_idx < scores.warps.stop:
            set_registers(scores.registers, threads)
            self.score(work, scales)
        elif warp_idx < gradients.warps.stop:
            set_registers(gradients.registers, threads)
            self.compute_dS(work)
        else:
            set_registers(sums.registers, threads)
            self.sum_queries(work)
        # Shared memory and barriers live until the other CTA writes to them and arrives at them no more.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def score(self, work: "_Work", scales: ScoreScales) -> None:
        """Warpgroup 1: weights, and dV."""
        c, a, ws, shared = self.config, work.arguments, work.workspace, work.shared
        thread = cute.arch.thread_idx()[0] % 128
        blocks = BlockIterator.of(c, a, ws, work.index)
        tile = blocks.tile
        # Operands in shared memory are described once a warpgroup: by its first thread's slice.
        mma_S, mma_dV = work.mmas.S, work.mmas.dV
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
            arguments=a,
        )
        rW = cute.make_tensor(cute.recast_tensor(scores.rW, Int32).iterator, cute.make_layout((4, 4)))
        for acc in acc_dV:
            acc.fill(0.0)
        num_steps = tile.blocks.num
        if num_steps > 0:
            shared.rings.k.wait_full(Int32(0))  # from warp 0
            if const_expr(c.keys_in_registers):
                read_a(mma_S, shared.sK, tSrK, thread)
            for step in cutlass.range(num_steps, unroll=1):
                stage, words, m_block = shared.rings.q.stage(step), None, blocks.m_block(c, ws, step)
                if const_expr(c.features.listed):
                    _, code, _ = entry_of(c, ws, blocks.first_entry + step)
                    words, hides = bits_of(ws.mBits, code, shared.rank, thread), code >= 0
                else:
                    hides = tile.blocks.crosses_left(m_block)
                seen = None
                if const_expr(c.features.intervals):
                    seen = load_row_interval(a.mIntervals, tile.batch, tile.k.length, self._first_key(tile), scores.cS)
                shared.rings.q.wait_full(step)  # from warp 0
                gemm(mma_S, acc_S, tSrK, tSrQ[None, None, None, stage], True)
                elements: tuple[Any, ...] = ()
                if const_expr(c.features.bias):
                    elements = self._read_elements(scores, tile.place(c, 0, self._first_key(tile), m_block))
                warpgroup.wait_group(0)
                lse = shared.stats[None, 0, stage]
                if const_expr(c.features.hides_last_queries and not c.features.listed):
                    hides = hides or tile.blocks.crosses_right(m_block)
                compute_P(
                    c,
                    scores,
                    hides,
                    lambda m_block=m_block: tile.place(c, 0, self._first_key(tile), m_block),
                    lambda i, lse=lse: load_four(lse, quad, i),
                    elements,
                    words,
                    seen,
                )
                end_reads()
                shared.rings.q.release_in_both(step)  # to warps 0: scores and lse have been read
                shared.rings.p.wait_empty(step)  # warpgroup 2 has read the last weights
                for i in cutlass.range_constexpr(4):
                    cute.autovec_copy(rW[None, i], shared.sP[None, thread, i])
                shared.rings.p.arrive(step)  # to warpgroup 2
                for part in cutlass.range_constexpr(parts):
                    fill = step * parts + part
                    shared.rings.do.wait_full(fill)  # from warp 1
                    tVrdO_now = tVrdO[None, None, None, shared.rings.do.stage(fill)]
                    gemm(mma_dV, acc_dV[part], as_operand_a(rP), tVrdO_now, False)
                for part in cutlass.range_constexpr(parts):
                    warpgroup.wait_group(parts - 1 - part)
                    shared.rings.do.release_in_both(step * parts + part)  # to warps 1
            if const_expr(not c.features.grouped):
                # dO is over, and dV leaves through its place once all have read it.
                for i in cutlass.range_constexpr(STAGES):
                    shared.rings.do.wait_empty(num_steps * parts + i)
        self._put_out(work, tile, acc_dV, _DV, thread)

    def _operand(self, mma: cute.TiledMma, sX: cute.Tensor, thread: Int32) -> cute.Tensor:
        """Keys or values as the A operand of S or dP, (MMA, 1, MMA_K): in shared memory, or registers for them."""
        if const_expr(self.config.keys_in_registers):
            return cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_A(sX.shape), self.dtype)
        return mma.make_fragment_A(mma.get_slice(0).partition_A(sX))

    def _read_elements(self, scores: Scores, place: Place) -> tuple[Any, ...]:
        """Elements of a bias: loaded now, because it takes long, or part by part when registers are free."""
        parts = self.config.parts_of_bias
        if parts == 1:
            return (read_transposed(scores, place),)
        return tuple(partial(read_transposed, scores, place, part, parts) for part in range(parts))

    def _first_key(self, tile: KeyTile) -> Int32:
        """This CTA's; its rank is read again, which is seldom, rather than kept in a register."""
        return tile.first_key + 64 * cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    @cute.jit
    def compute_dS(self, work: "_Work") -> None:
        """Warpgroup 2: gradients of the scores, for both CTAs, and dK."""
        c, a, shared = self.config, work.arguments, work.shared
        thread = cute.arch.thread_idx()[0] % 128
        quad = opaque(thread % 4)
        tile = BlockIterator.of(c, a, work.workspace, work.index).tile
        mma_dP, mma_dK, parts = work.mmas.S, work.mmas.dK, c.parts_dO
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
            shared.rings.v.wait_full(Int32(0))  # from warp 1
            if const_expr(c.keys_in_registers):
                for sV, operand in zip(sV_parts, tPrV, strict=True):
                    read_a(mma_dP, sV, operand, thread)
            for step in cutlass.range(num_steps, unroll=1):
                for part, operand in enumerate(tPrV):
                    fill = step * parts + part
                    shared.rings.do.wait_full(fill)  # from warp 1
                    gemm(mma_dP, acc_dP, operand, tPrdO[None, None, None, shared.rings.do.stage(fill)], part == 0)
                for part in cutlass.range_constexpr(parts):
                    warpgroup.wait_group(parts - 1 - part)
                    shared.rings.do.release_in_both(step * parts + part)  # to warps 1
                stage = shared.rings.q.stage(step)
                shared.rings.q.wait_full(step)  # from warp 0: with Q comes delta
                shared.rings.p.wait_full(step)  # from warpgroup 1
                P, delta = shared.sP[None, thread, None], shared.stats[None, 1, stage]
                compute_dS(
                    acc_dP, lambda i, P=P: self._eight(P, i), lambda i, delta=delta: load_four(delta, quad, i), rdS
                )
                shared.rings.p.release(step)  # to warpgroup 1
                # Before dS is handed out: the tensor cores may well be idle.
                gemm(mma_dK, acc_dK, as_operand_a(rdS), tKrQ[None, None, None, stage], False)
                shared.rings.ds.wait_empty(step)  # warpgroups 3 of both CTAs have read the dS of two steps before
                self._hand_out(rdS, mma_dP, shared, step, thread)
                warpgroup.wait_group(0)
                shared.rings.q.release_in_both(step)  # to warps 0
        if const_expr(not c.features.grouped):
            for i in cutlass.range_constexpr(cute.size(acc_dK)):
                acc_dK[i] = scaled(acc_dK[i], a.numbers.softmax_scale)
        # Q is over, where dK leaves through: warpgroup 1 had its last scores before it had the last weights.
        self._put_out(work, tile, [acc_dK], _DK, thread)

    def _eight(self, P: cute.Tensor, i: int) -> cute.Tensor:
        """This thread's weights of the i-th group of sixteen queries, two a register, from warpgroup 1."""
        packed = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(P[None, i], packed)
        return packed

    @cute.jit
    def _hand_out(self, rdS: cute.Tensor, mma_dP: cute.TiledMma, shared: Shared, step: Int32, thread: Int32) -> None:
        """Gradients of scores to warpgroup 3 of both CTAs: each warp's 16 keys lie together, and it sends them."""
        stage = shared.rings.ds.stage(step)
        write(rdS, mma_dP, shared.sdS[None, None, 0, stage], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        numbers = 16 * 64
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        own = shared.dS + (stage * 2 * 4 + warp) * numbers
        full = shared.rings.ds.full(step)
        with cute.arch.elect_one():
            # The other CTA's same warp sends as many bytes as this one.
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * numbers)
            copy_to_cta(1 - shared.rank, own + 4 * numbers, own, 2 * numbers, full)

    @cute.jit
    def sum_queries(self, work: "_Work") -> None:
        """Warpgroup 3: half of the columns of dQ, to the workspace."""
        c, ws, shared, mma_dQ = self.config, work.workspace, work.shared, work.mmas.dQ
        thread = cute.arch.thread_idx()[0] % 128
        blocks = BlockIterator.of(c, work.arguments, ws, work.index)
        tile = blocks.tile
        whole = mma_dQ.get_slice(0)
        sK_half = cute.local_tile(shared.sK, (64, c.columns_dQ), (0, shared.rank))
        tQrK = [mma_dQ.make_fragment_B(whole.partition_B(transposed(x))) for x in (sK_half, shared.sK_peer)]
        tQrdS = mma_dQ.make_fragment_A(whole.partition_A(transposed(shared.sdS)))  # (MMA, 1, MMA_K, CTA, PIPE)
        acc_dQ = cute.make_rmem_tensor(mma_dQ.get_slice(thread).partition_shape_C((64, c.columns_dQ)), Float32)
        num_steps = tile.blocks.num
        if num_steps > 0:
            shared.rings.k.wait_full(Int32(0))  # from warp 0
        for step in cutlass.range(num_steps, unroll=1):
            m_block = blocks.m_block(c, ws, step)
            shared.rings.ds.wait_full(step)  # from warpgroups 2 of both CTAs
            tQrdS_now = tQrdS[None, None, None, None, shared.rings.ds.stage(step)]
            gemm(mma_dQ, acc_dQ, tQrdS_now[None, None, None, 0], tQrK[0], True, is_last=False)
            gemm(mma_dQ, acc_dQ, tQrdS_now[None, None, None, 1], tQrK[1], False)
            warpgroup.wait_group(0)
            shared.rings.ds.release_in_both(step)  # to warpgroups 2
            block = ws.dQ_sums(tile.head, tile.first_block + m_block)
            is_first = None
            if const_expr(c.features.deterministic):
                is_first = shared.order.wait(step)
            add(acc_dQ, cute.local_tile(block, (64 * c.columns_dQ,), (shared.rank,)), thread, is_first)
            if const_expr(c.features.deterministic):
                shared.order.arrive(step)

    @cute.jit
    def _put_out(self, work: "_Work", tile: KeyTile, accs: list[cute.Tensor], which: Constexpr, thread: Int32) -> None:
        """Puts out a warpgroup's dK or dV, side by side in parts: of grouped heads to the workspace."""
        if const_expr(self.config.features.grouped):
            self._add(work, tile, accs, which, thread)
        else:
            self._store(work, tile, accs, which, thread)

    @cute.jit
    def _add(self, work: "_Work", tile: KeyTile, accs: list[cute.Tensor], which: Constexpr, thread: Int32) -> None:
        """Adds to the workspace."""
        c, ws, shared, barrier = self.config, work.workspace, work.shared, _BARRIERS[which]
        if tile.blocks.num > 0:
            semaphore = semaphores.at(ws.mSemaphoresK, 2 * shared.rank + which, tile.head_k, tile.block)
            is_first = tile.wait_turn(c, semaphore, barrier)
            block = ws.mdKVaccum[which, tile.head_k, Int64(tile.block), None]
            columns = (c.tile_d, c.tile_dv)[which]
            own = cute.local_tile(block, (64 * columns,), (shared.rank,))
            for part, acc in enumerate(accs):
                add(acc, cute.local_tile(own, (128 * cute.size(acc),), (part,)), thread, is_first)
            counts = True if const_expr(c.features.deterministic) else is_first
            if counts:
                semaphores.signal_as_warpgroup(semaphore, barrier)

    @cute.jit
    def _store(self, work: "_Work", tile: KeyTile, accs: list[cute.Tensor], which: Constexpr, thread: Int32) -> None:
        """Stores through shared memory and TMA, or from registers in float32; zeros into the padding."""
        c, shared, barrier, mX = self.config, work.shared, _BARRIERS[which], work.gradients[which]
        mma, store = (work.mmas.dK, work.mmas.dV)[which], (work.tma.dK, work.tma.dV)[which]
        places = [(shared.sQ, shared.sdO)[which][None, None, part] for part in range(len(accs))]
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
class _Work:
    """State that all mma warpgroups of a CTA share."""

    arguments: BackwardArguments
    workspace: Workspace
    index: Int32  # of the tile
    shared: Shared
    mmas: _Mmas
    tma: Tiles
    gradients: tuple[cute.Tensor, cute.Tensor]  # dK and dV
