"""Attention backward on Blackwell, up to d = 128, and (192, 128): a tile of 128 keys is the work of a CTA.

Roles (a CTA of 512 threads takes one tile after the other, ``common.key_tiles``, and goes over the blocks of 128
queries that attend to it, at d = 192 of 64; a block is a *step*, and steps are counted over all tiles of the CTA):
    warps 0 .. 3             drain: dQ of every step from tensor memory into shared memory, a query a thread, or at
                             d = 192 a column. When no tile is left, zeros into dK and dV of keys that have no tile.
    warps 4 .. 7, 8 .. 11    compute: two warpgroups. A thread has a key, and half of a step's queries: P from S,
                             dS from dP. Then dK and dV of the tile. When no tile is left, they round dQ
                             (``common.dq_rounding``).
    warp 12                  mma: issues all products, and owns tensor memory.
    warp 13                  producer: chooses tiles; loads K and V once a tile, Q with lse and dO with delta each step.
    warps 14, 15             add dQ to the workspace by TMA, a step each in turn: one waits until its block's turn has
                             come (``common.semaphores``), or until what it has added is there, while the other adds.
Registers a thread: ``BackwardConfig.registers``.

Products are transposed, but for the last one: rows are keys.
    S' = K Q'          both from shared memory
    dP' = V dO'        both from shared memory
    dV += P' dO        P' from tensor memory
    dK += dS' Q        dS' from tensor memory
    dQ = dS K          dS from shared memory
At d = 192 shared memory has no room for 128 queries, and dQ of 64, who are not as many as tensor memory has lanes, is
transposed: dQ' = K' dS, in two parts of 128 columns of dQ, of which the second begins with half of the first's.
One copy of K, V, Q and dO serves all products: rows of 64 columns in shared memory are read along either dimension.

Tensor memory (512 columns; first ones of d = 128 and 64): S 0; dV 128; dP 256 and 192; dK 384 and 320; dQ in the place
of dP, or at 384. At d = 192: S 0; dV 64; dP 192; dK 256; the parts of dQ in the place of dP, and at 448. P (16 bits, so
half as many columns) takes the place of S, and dS that of dP: those of each warpgroup the first half of its own
columns, half of all, so that no warpgroup waits for the other.

Pipelines are ``Ring``s, each of a full and an empty barrier a stage, whose steps go on counting from tile to tile. What
fills and what empties a stage, and the arrivals on its barriers (a warp arrives once, behind ``__syncwarp``):

    ring     stages  counts    full by                        empty by
    tiles    2       tiles     1, producer                    15: all other warps
    k, v     table   tiles     1 + bytes, producer's TMA      1 a warpgroup that has pieces of dK, or dV: they have left
    q        2       steps     1 + bytes, producer's TMA      1, commit of dK; 8, compute: lse is read
    do       table   steps     1 + bytes, producer's TMA      1, commit of dV; 8, compute: delta is read
    scores   1       steps     1, commit of S                 8, compute: P is there
    dp       1       steps     1, commit of dP                8, compute: dS is there, twice
    dq       1 or 2  parts     1, commit of dQ, or of a part  4, drain: it is read
    pieces   2 x 2   pieces    4, drain: 32 columns of dQ     1, the adding warp: TMA has read them
    dv, dk   1       tiles     1, commit of the last one      4 a warpgroup that has pieces, compute: dV, or dK, is read
    entries  8       steps     1, producer                    8, compute: it is read; under a mask alone
    turns    8       steps     1, producer                    2, adding warps: likewise

Pieces of dQ have two places, and each adding warp has barriers of its own, because a warp that waits must not miss two
phases of a barrier. Where dQ is transposed, a piece is 32 queries of 64 columns.

The mma warp issues S(t + 1), dK(t), dQ(t), dP(t + 1), dV(t + 1), for one step t after the other:

    tensor cores   S0 dP0 | dV0 S1 dK0 | dQ0 dP1 | dV1 S2 dK1 | dQ1 dP2 ...
    compute          P0     dS0      P1            dS1      P2
    drain                                     dQ0                    dQ1

so that P of a step is computed beside dK and dQ of the one before, and dS beside dV and the next S. Products are done
in the order in which they were issued, and a commit arrives when all before it are done. Hence:
  - S(t + 1) may take the place of P(t), which dV(t) reads ahead of it, and dQ(t) that of dS(t), which dK(t) reads.
  - dP(t + 1), for which compute warps wait, shows them that dQ(t) is done: there is room for dS in shared memory.
  - Where dQ lies in the place of dP, the mma warp waits for the drain before dP(t + 1), and else before dQ(t + 1).
  - dV and dK of a tile's first step overwrite, when compute warps have read those of the last tile.
dV leaves through the place of V, which is not needed behind the last dP, and dK through that of K, behind the last dQ.

What is read or overwritten by another proxy or thread, and what orders it:
    S, dP, dQ, dV, dK, tensor cores -> threads  commit -> wait, tcgen05.fence::after_thread_sync, tcgen05.ld, wait::ld
    P, dS -> tensor cores                       tcgen05.st, wait::st, fence::before_thread_sync, arrival -> wait, after
    dQ, dV, dK read -> overwritten              tcgen05.ld, wait::ld, fence::before, arrival -> wait, fence::after
    operands and stats, TMA -> all              mbarrier; read -> overwritten: commits and arrivals -> wait, TMA
    dS in shared memory -> tensor cores         st.shared, fence.proxy.async, arrival -> wait; then commit -> wait
    pieces of dQ -> TMA                         st.shared, fence.proxy.async, arrival -> wait, TMA; then bulk wait
    dK, dV in shared memory -> TMA              st.shared, fence.proxy.async, named barrier, TMA; then bulk wait
    dQ in the workspace                         ``common.semaphores``
Tensor memory is allocated by the mma warp ahead of the CTA's first barrier, and freed by it behind the last.

Windows and ends are looked at only in steps that an edge crosses. Under a mask the mainloop goes over lists of blocks
of queries, those of all its heads (``common.key_lists``). Ahead of Q of a block the producer publishes to compute warps
which it is, and where the bits are that hide its scores (``common.block_lists``), and adding warps where its dQ is
added, and when. Bits are read while scores are computed. How sums and stats lie in the workspace is ``sums``' business.
(The roles, the order of products and the places in tensor memory are FlashAttention-4's.)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import opaque, pack, set_registers
from flash_attn_cute.kernels.common.dq_rounding import round_blocks
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.key_tiles import KeyTile, num_key_tiles, rounds_a_tile, zero_fully_masked_keys
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.rows import rows_first, store_columns
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.tma import BackwardTiles, make_row_tiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100 import frame, tensor_memory
from flash_attn_cute.kernels.sm100.backward.cta_scores import COLUMNS, Scores, Work
from flash_attn_cute.kernels.sm100.backward.cta_shared import Shared, layouts_of, storage_of
from flash_attn_cute.kernels.sm100.backward.cta_transfers import Transfers
from flash_attn_cute.kernels.sm100.backward.sums import by_fours, round_block, round_transposed, share, take
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    MMA_WARP,
    O_COLUMNS,
    PART_ROWS,
    PRODUCER_WARP,
    BackwardConfig,
)
from flash_attn_cute.kernels.sm100.mma import commit, gemm, swizzled, tiled_mma, transposed, write_row

_COMPUTE_WARPS, _ADDING_WARPS = 4, 14  # the first ones
_BARRIER_OUT = 1  # a named barrier for each compute warpgroup; 0 is the whole CTA's
DV, DK = 0, 1  # which of a tile's results


class Mmas(NamedTuple):
    """Products, called by their results."""

    S: cute.TiledMma  # and dP, if that is not another one
    dV: cute.TiledMma
    dK: cute.TiledMma
    dQ: cute.TiledMma
    dP: cute.TiledMma | None = None


class BackwardCtaSm100:
    """The backward kernel of one configuration."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.transfers = Transfers(config)
        self.scores = Scores(config)

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel over all SMs."""
        c, dtype, packed = self.config, self.dtype, self.config.features.packed
        mQ, mK, mV, mdO, mdK, mdV = (rows_first(x, packed) for x in (a.mQ, a.mK, a.mV, a.mdO, a.mdK, a.mdV))
        layouts = layouts_of(c, dtype)
        self.Storage = storage_of(c, dtype, layouts)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shared, tensors = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM
        mmas = Mmas(
            S=tiled_mma(dtype, k_major, c.tile_m, shared),
            dV=tiled_mma(dtype, mn_major, c.tile_dv, tensors),
            dK=tiled_mma(dtype, mn_major, c.tile_d, tensors),
            dQ=tiled_mma(dtype, mn_major, c.columns_dQ, shared, mn_major),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sK, sV, sQ, sdO = (cute.select(layout, mode=[0, 1]) for layout in layouts[:4])  # of one stage
        sOut = swizzled(dtype, (c.tile_n, O_COLUMNS))  # a piece
        leaves_wide = c.features.wide  # from registers
        tma = BackwardTiles(
            Q=make_row_tiles(load, mQ, sQ, (c.tile_m, c.tile_d), packed),
            dO=make_row_tiles(load, mdO, sdO, (c.tile_m, c.tile_dv), packed),
            K=make_row_tiles(load, mK, sK, (c.tile_n, c.tile_d), packed),
            V=make_row_tiles(load, mV, sV, (c.tile_n, c.tile_dv), packed),
            dK=None if const_expr(leaves_wide) else make_row_tiles(store, mdK, sOut, (c.tile_n, O_COLUMNS), packed),
            dV=None if const_expr(leaves_wide) else make_row_tiles(store, mdV, sOut, (c.tile_n, O_COLUMNS), packed),
        )
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        ctas = cutlass.min(num_key_tiles(c, a), a.numbers.num_sms)
        self.kernel(mmas, tma, mdK, mdV, a, ws, scales).launch(
            grid=[ctas, 1, 1], block=[frame.THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        mmas: Mmas,
        tma: BackwardTiles,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        a: BackwardArguments,
        ws: Workspace,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared and tensor memory, then splits into roles."""
        c, f = self.config, self.config.features
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0] % 128
        shared = self._shared(cutlass.memory.SmemAllocator().allocate(self.Storage))
        frame.begin(partial(shared.rings.init, c), tma, shared.holder, warp_idx, c.ctas_a_tile)
        if warp_idx < _COMPUTE_WARPS:
            set_registers(c.registers.drain, frame.THREADS)
            self.transfers.drain(a, shared, thread)
            if const_expr(f.packed or f.left or f.right or f.listed):  # else every key is attended to
                index, num = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
                zero_fully_masked_keys(c, a, ws, mdK, mdV, _COMPUTE_WARPS * index + warp_idx, _COMPUTE_WARPS * num)
        elif warp_idx < MMA_WARP:
            set_registers(c.registers.compute, frame.THREADS)
            self.compute(a, ws, tma, shared, scales, warp_idx // 4 - 1, thread)
            rounding = partial(round_block, parts=c.ctas_a_tile)
            if const_expr(c.transposes_dQ):
                rounding = partial(round_transposed, part_columns=c.piece_lanes)
            rounded = partial(rounding, scale=a.numbers.softmax_scale, tile_d=c.tile_d)
            round_blocks(c, a, ws, 4 * COMPUTE_WARPGROUPS, rounded)
        else:
            set_registers(c.registers.others, frame.THREADS)
            if warp_idx == MMA_WARP:
                self.mma(a, mmas, shared)
            elif warp_idx == PRODUCER_WARP:
                self.transfers.producer(a, ws, tma, shared)
            else:
                self.transfers.add(a, ws, shared, warp_idx - _ADDING_WARPS)
        frame.end(shared, warp_idx, c.ctas_a_tile)

    def _shared(self, storage: Any) -> Shared:
        """Shared memory of the CTA."""
        return Shared.of(self.config, self.dtype, storage)

    @cute.jit
    def mma(self, a: BackwardArguments, mmas: Mmas, shared: Shared) -> None:
        """One warp: issues all products, S of a step ahead of what is left of the one before."""
        c, rings = self.config, shared.rings
        products = Products.of(c, mmas, shared)
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release(tile_idx)  # to the producer
            rings.k.wait_full(tile_idx)  # from the producer
            for i in cutlass.range(num_steps, unroll=1):
                rings.q.wait_full(step)  # from the producer
                products.start_S(tile_idx, step, c.first_S)
                commit(rings.scores.full(step))  # to compute warps
                if i > 0:
                    self._finish(products, shared, tile_idx, step - 1, i == 1)
                else:
                    rings.v.wait_full(tile_idx)  # from the producer
                rings.do.wait_full(step)  # from the producer
                if const_expr(c.dQ_over_dP):
                    rings.dq.wait_empty(c.parts_dQ * step)  # from the drain warps: they have what lies there of dQ
                    tensor_memory.after_sync()
                products.start_dP(tile_idx, step, c.first_dP)
                commit(rings.dp.full(step))  # to compute warps
                rings.scores.wait_empty(step + 1)  # from compute warps: P is there
                if i == 0:
                    rings.dv.wait_empty(tile_idx)  # from compute warps: they have the last tile's dV
                tensor_memory.after_sync()
                products.start_dV(step, c.first_S, i > 0)
                commit(rings.do.empty(step))  # to the producer
                step += 1
            commit(rings.dv.full(tile_idx))  # to compute warps
            self._finish(products, shared, tile_idx, step - 1, num_steps == 1)
            commit(rings.dk.full(tile_idx))  # to compute warps; the last commit that anybody waits for
            tile_idx += 1

    @cute.jit
    def _finish(self, products: "Products", shared: Shared, tile_idx: Int32, step: Int32, is_first: Boolean) -> None:
        """Begins dK and dQ of a step, which may be its tile's first."""
        c, rings = self.config, shared.rings
        rings.dp.wait_empty(step + 1)  # from compute warps: dS is there
        if is_first:
            rings.dk.wait_empty(tile_idx)  # from compute warps: they have the last tile's dK
        for part in cutlass.range_constexpr(int(c.dQ_over_dP), c.parts_dQ):
            rings.dq.wait_empty(c.parts_dQ * step + part)  # from the drain warps: they have the last step's dQ
        tensor_memory.after_sync()
        products.start_dK(step, c.first_dP, not is_first)
        commit(rings.q.empty(step))  # to the producer
        for part in cutlass.range_constexpr(c.parts_dQ):
            products.start_dQ(tile_idx, part)
            commit(rings.dq.full(c.parts_dQ * step + part))  # to the drain warps

    @cute.jit
    def compute(
        self,
        a: BackwardArguments,
        ws: Workspace,
        tma: BackwardTiles,
        shared: Shared,
        scales: ScoreScales,
        warpgroup: Int32,
        thread: Int32,
    ) -> None:
        """A compute warpgroup: half of every step's queries, then dK and dV of the tile."""
        c = self.config
        address = tensor_memory.row_address(shared.tensor_memory, thread)
        work = Work(a, shared, scales, warpgroup, thread, address, ws.mBits)
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_blocks = shared.tile(c, a, tile_idx).blocks.num
            for nth in cutlass.range(rounds_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    self._step(work, tile_idx, nth, i, step)
                    step += 1
            self._put_out(work, ws, tma, tile_idx)
            shared.tiles.release(tile_idx)  # to the producer
            tile_idx += 1

    @cute.jit
    def _step(self, work: Work, tile_idx: Int32, nth: Int32, i: Int32, step: Int32) -> None:
        """Computes a warpgroup's half of a step: the i-th block of the tile's nth head."""
        c = self.config
        block = self.scores.block(work, tile_idx, nth, i, step)
        P = self.scores.compute_P(work, block, step, step, c.first_S)
        self.scores.compute_dS(work, P, block, step, work.shared.rings.dp, step, c.first_dP)

    @cute.jit
    def _put_out(
        self,
        work: Work,
        ws: Workspace,
        tma: BackwardTiles,
        tile_idx: Int32,
        results: cutlass.Constexpr = (DV, DK),
    ) -> None:
        """This warpgroup's pieces of dV and dK, to where they belong, or to the workspace if other tiles follow."""
        c, a, shared, barrier = self.config, work.arguments, work.shared, _BARRIER_OUT + work.warpgroup
        tile = shared.reload_tile(c, a, tile_idx)
        is_last, tiles_before, is_first = tile.is_last, tile.tiles_before, Boolean(True)
        if const_expr(c.features.grouped):
            part = work.warpgroup + COMPUTE_WARPGROUPS * (results[0] + c.num_passes * shared.rank)
            semaphore = semaphores.at(ws.mSemaphoresK, part, tile.head_k, tile.block)
            if not is_last or tiles_before > 0:
                is_first = tile.wait_turn(c, semaphore, barrier)
        self._pieces(work, ws, tma, tile_idx, is_first, results)
        if const_expr(c.features.grouped):
            if not is_last:
                semaphores.signal_as_warpgroup(semaphore, barrier)

    @cute.jit
    def _pieces(
        self,
        work: Work,
        ws: Workspace,
        tma: BackwardTiles,
        tile_idx: Int32,
        is_first: Boolean,
        results: cutlass.Constexpr,
    ) -> None:
        """Stores pieces of 64 columns of dV or dK, a warpgroup every other one.

        Of an odd number of pieces the first one of dV is the first warpgroup's, and that of dK the second one's.
        """
        c = self.config
        for which in results:
            num = (c.pieces_dV, c.pieces_dK)[which]
            odd = num % COMPUTE_WARPGROUPS
            if const_expr(odd):
                if work.warpgroup == which:
                    self._piece(work, ws, tma, tile_idx, which, Int32(0), num == 1, is_first)
            for first in cutlass.range_constexpr(odd, num, COMPUTE_WARPGROUPS):
                self._piece(work, ws, tma, tile_idx, which, first + work.warpgroup, first + 2 == num, is_first)
        if work.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            for which in results:
                if const_expr((c.pieces_dV, c.pieces_dK)[which] > 1) or work.warpgroup == which:
                    self._ways_out(work.shared)[which][1].release(tile_idx)  # to the producer

    def _ways_out(self, shared: Any) -> tuple[tuple[cute.Tensor, Ring], tuple[cute.Tensor, Ring]]:
        """Where dV and dK leave through, and the rings of what is loaded there."""
        return (shared.sV, shared.rings.v), (shared.sK, shared.rings.k)

    @cute.jit
    def _piece(
        self,
        work: Work,
        ws: Workspace,
        tma: BackwardTiles,
        tile_idx: Int32,
        which: cutlass.Constexpr,
        piece: Int32,
        is_last: cutlass.Constexpr,
        is_first: Boolean,
    ) -> None:
        """A piece of dV or dK, this warpgroup's last one or not."""
        c, a, shared, rings = self.config, work.arguments, work.shared, work.shared.rings
        ring, first, t = ((rings.dv, c.first_dV, tma.dV), (rings.dk, c.first_dK, tma.dK))[which]
        sX, kv = self._ways_out(shared)[which]
        sX = cute.local_tile(sX[None, None, kv.stage(tile_idx)], (PART_ROWS, O_COLUMNS), (0, piece))
        scale = a.numbers.softmax_scale if const_expr(which == DK) else Float32(1.0)
        address = work.address + (first + O_COLUMNS * piece)
        ring.wait_full(tile_idx)  # from the tensor cores: it is complete, and what sX held not needed any more
        tensor_memory.after_sync()
        tile = shared.reload_tile(c, a, tile_idx)
        for column in cutlass.range_constexpr(0, O_COLUMNS, COLUMNS):
            numbers = tensor_memory.load(address + column, COLUMNS)
            acc = cute.make_rmem_tensor(COLUMNS, Float32)
            for j in cutlass.range_constexpr(COLUMNS):
                acc[j] = numbers[j] * scale
            if const_expr(c.features.grouped):
                # Opaque, or the compiler keeps what the index is multiplied by in a register from the start.
                block = ws.mdKVaccum[opaque(Int32(which)), tile.head_k, tile.block, None]
                columns_before = c.tile_d * shared.rank + O_COLUMNS * piece + column
                place = cute.domain_offset((columns_before * PART_ROWS,), block)
                sums = by_fours(place.iterator, COLUMNS)
                if not tile.is_last:
                    share([acc[j] for j in range(COLUMNS)], sums, work.thread, is_first)
                elif tile.tiles_before > 0:
                    take(acc, sums, work.thread)
            if const_expr(c.features.wide):
                self._write_row(work, tile, which, acc, O_COLUMNS * piece + column)
            else:
                numbers = cute.make_rmem_tensor(COLUMNS, self.dtype)
                packed = cute.recast_tensor(numbers, Int32)
                for j in cutlass.range_constexpr(COLUMNS // 2):
                    packed[j] = pack(acc[2 * j], acc[2 * j + 1], self.dtype)
                write_row(numbers, sX, work.thread, column)
        if const_expr(not c.features.wide):
            cute.arch.fence_proxy("async.shared", space="cta")
        tensor_memory.before_sync()
        if const_expr(is_last):
            ring.release(tile_idx)  # to the mma warp: it may be overwritten
        if const_expr(not c.features.wide):
            cute.arch.barrier(barrier_id=_BARRIER_OUT + work.warpgroup, number_of_threads=128)
            if work.thread < 32:
                if tile.is_last:
                    start, stop = tile.keys_of(shared.rank, PART_ROWS)
                    t.store(sX, t.at(start, stop, tile.head_k, tile.batch, piece))
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _write_row(
        self, work: Work, tile: KeyTile, which: cutlass.Constexpr, acc: cute.Tensor, first_column: Int32
    ) -> None:
        """A thread's float32 columns of its key, from one on, to where dV or dK belongs, if they are whole."""
        a = work.arguments
        mX = rows_first((a.mdV, a.mdK)[which], self.config.features.packed)
        gX = mX[None, None, tile.head_k, tile.batch]
        start, stop = tile.keys_of(work.shared.rank, PART_ROWS)
        row, end = start + work.thread, Int32(0)
        if tile.is_last and row < stop:
            end = Int32(gX.shape[1])
        store_columns(acc, gX[row, None], first_column, end)


@dataclass(frozen=True)
class Products:
    """All products, called by their results; in flight on return."""

    config: BackwardConfig
    mmas: Mmas
    shared: Shared
    memory: cute.Pointer  # tensor memory
    # ``t<product>r<operand>``; a product is called by its result: S, P (for dP), V, K and Q (for dV, dK and dQ).
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, stage)
    tSrQ: cute.Tensor
    tPrV: cute.Tensor
    tPrdO: cute.Tensor
    tVrdO: cute.Tensor
    tKrQ: cute.Tensor
    tQrdS: cute.Tensor  # (MMA, 1, MMA_K)
    tQrK: tuple[cute.Tensor, ...]  # of its parts; with stages, but for those of a dQ that is transposed

    @staticmethod
    def of(config: BackwardConfig, mmas: Mmas, shared: Shared) -> "Products":
        """Products of all operands in shared memory."""
        S, dV, dK, dQ = (mma.get_slice(0) for mma in mmas[:4])
        c, tdS = config, transposed(shared.sdS)
        if c.transposes_dQ:
            tQrdS = mmas.dQ.make_fragment_B(dQ.partition_B(tdS))
            layout = swizzled(DTYPES[c.dtype], (c.tile_n, PART_ROWS)).outer
            columns = (shared.sK.iterator + c.first_row_dQ(part) * c.tile_n for part in range(c.parts_dQ))
            parts = (transposed(cute.make_tensor(x, layout)) for x in columns)
            tQrK = tuple(mmas.dQ.make_fragment_A(dQ.partition_A(part)) for part in parts)
        else:
            tQrdS = mmas.dQ.make_fragment_A(dQ.partition_A(tdS))
            tQrK = (mmas.dQ.make_fragment_B(dQ.partition_B(transposed(shared.sK))),)
        return Products(
            config=config,
            mmas=mmas,
            shared=shared,
            memory=shared.tensor_memory,
            tSrK=mmas.S.make_fragment_A(S.partition_A(shared.sK)),
            tSrQ=mmas.S.make_fragment_B(S.partition_B(shared.sQ)),
            tPrV=mmas.S.make_fragment_A(S.partition_A(shared.sV)),
            tPrdO=mmas.S.make_fragment_B(S.partition_B(shared.sdO)),
            tVrdO=mmas.dV.make_fragment_B(dV.partition_B(transposed(shared.sdO))),
            tKrQ=mmas.dK.make_fragment_B(dK.partition_B(transposed(shared.sQ))),
            tQrdS=tQrdS,
            tQrK=tQrK,
        )

    def start_S(self, tile_idx: Int32, step: Int32, first: Int32 | int) -> None:
        """S' = K Q', from a column on."""
        rings = self.shared.rings
        a, b = self.tSrK[None, None, None, rings.k.stage(tile_idx)], self.tSrQ[None, None, None, rings.q.stage(step)]
        gemm(self.mmas.S, self._sum(self.mmas.S, first, self.config.tile_m), a, b, Boolean(False))

    def start_dP(self, tile_idx: Int32, step: Int32, first: Int32 | int) -> None:
        """DP' = V dO', from a column on."""
        rings = self.shared.rings
        a, b = self.tPrV[None, None, None, rings.v.stage(tile_idx)], self.tPrdO[None, None, None, rings.do.stage(step)]
        gemm(self.mmas.S, self._sum(self.mmas.S, first, self.config.tile_m), a, b, Boolean(False))

    def start_dV(self, step: Int32, first: Int32 | int, accumulates: Boolean) -> None:
        """DV += P' dO, with P where S was."""
        c, mma = self.config, self.mmas.dV
        b = self.tVrdO[None, None, None, self.shared.rings.do.stage(step)]
        gemm(mma, self._sum(mma, c.first_dV, c.tile_dv), halves(c, mma, self.memory + first), b, accumulates)

    def start_dK(self, step: Int32, first: Int32 | int, accumulates: Boolean) -> None:
        """DK += dS' Q, with dS where dP was."""
        c, mma = self.config, self.mmas.dK
        b = self.tKrQ[None, None, None, self.shared.rings.q.stage(step)]
        gemm(mma, self._sum(mma, c.first_dK, c.tile_d), halves(c, mma, self.memory + first), b, accumulates)

    def start_dQ(self, tile_idx: Int32, part: int) -> None:
        """DQ = dS K, or a part of dQ' = K' dS."""
        c, mma = self.config, self.mmas.dQ
        if c.transposes_dQ:
            a, b = self.tQrK[part], self.tQrdS
        else:
            a, b = self.tQrdS, self.tQrK[part][None, None, None, self.shared.rings.k.stage(tile_idx)]
        gemm(mma, self._sum(mma, c.first_dQ(part), c.columns_dQ), a, b, Boolean(False))

    def _sum(self, mma: cute.TiledMma, first: Int32 | int, columns: int) -> cute.Tensor:
        """128 rows of some columns of tensor memory, as a product's result."""
        layout = mma.make_fragment_C(mma.partition_shape_C((PART_ROWS, columns))).layout
        return cute.make_tensor(self.memory + first, layout)


def halves(config: BackwardConfig, mma: cute.TiledMma, first: cute.Pointer, pitch: int | None = None) -> cute.Tensor:
    """An operand of a column of 16 bits a query in tensor memory, of each warpgroup's queries one after the other.

    Args:
        config: of the kernel.
        mma: the product that it is for.
        first: where those of the first warpgroup begin.
        pitch: columns of 32 bits from there to the second's; None: each are in the first half of its own columns.
    """
    layout = mma.make_fragment_A(mma.partition_shape_A((config.tile_n, config.tile_m))).layout
    steps, within = cute.size(layout, mode=[2]) // COMPUTE_WARPGROUPS, layout.stride[2]
    distance = 2 * steps * within if pitch is None else 2 * pitch
    layout = cute.make_layout(
        (*layout.shape[:2], (steps, COMPUTE_WARPGROUPS)), stride=(*layout.stride[:2], (within, distance))
    )
    return cute.make_tensor(cute.recast_ptr(first, dtype=DTYPES[config.dtype]), layout)
