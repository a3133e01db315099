"""Attention backward on Hopper, up to d = 128: a tile of keys is the work of a CTA.

``python -m flash_attn_cute.kernels describe sm90 backward --d 128`` prints its schedule (``cta_schedule``).

A CTA takes one tile of keys after the other (``common.key_tiles``). Its mainloop goes over the queries that attend to
the tile, from the first to the last or, under a right bound, for some heads from the last to the first. A block is a
*step*, and steps are counted over all tiles of the CTA. Products are transposed: rows are keys, columns are queries.
    S' = K Q'
    dP' = V dO'        in flight while P' = exp2(S' - lse) is computed, in registers
    dV += P' dO        in flight while dS' = P' (dP' - delta) is computed, into registers and, for both warpgroups,
                       into shared memory
    dQ = dS K          of the step before: dS has had half a step to change hands; each warpgroup has a part of dQ.
                       Where a block has 80 queries, it is dQ' = K' dS', because products have 64 rows
    dK += dS' Q        in flight while dQ is written to shared memory
So the first step of a tile computes the last dQ of the tile before. Where there is room for one K only, a tile ends
with its own last dQ instead.

dQ is added to the workspace by TMA. Ordered additions follow semaphores; the first contributor stores instead of
adding. Storing warps wait for their turns, and warp 3 signals what they have added, as a release takes longer than they
have time for. Every wait ends all the same: ``Transfers.signal_added`` says why. Unordered ones are added to zeros:
those of warp 3, for which storing warps wait at the beginning of a tile, or under masks those of the preprocessing
kernel. In fixed point (``common.fixed_point``) all are added to these zeros: integers as they come, float32 numbers of
heads with outliers in turns. When no tile is left, mma warps round dQ (``common.dq_rounding``). lse and delta of a
query behind its sequence are such that it has no weight.

A bias comes through shared memory: by TMA, where its rows allow that, else copied by warp 3. A strided one, or one in
float32 at d = 128, for which there is no room, threads read from global memory behind the start of S', into the
registers that dP' would have, which so starts behind P'. Where every score's gradient is wanted, it is dS': TMA stores
it from shared memory, where a row of dS is a query's then, or threads store it from registers. Where all queries have
the same bias, a thread sums dS over the queries, in float32, for its two keys.

Under a mask the mainloop goes over a list of blocks of queries, of all the tile's heads (``common.key_lists``). With Q
of a block, the producer publishes its index and the place of the bits that mask its scores (``common.block_lists``).

Masks are those of the forward kernel with queries and keys exchanged. ``workspace`` says how sums lie in memory.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import opaque, set_registers
from flash_attn_cute.kernels.common.block_lists import bits_of
from flash_attn_cute.kernels.common.dq_rounding import round_blocks
from flash_attn_cute.kernels.common.fixed_point import FLOAT32, to_fixed_point
from flash_attn_cute.kernels.common.key_tiles import KeyTile, zero_fully_masked_keys
from flash_attn_cute.kernels.common.main_kernels import BackwardKernel
from flash_attn_cute.kernels.common.rows import rows_first, scores_first
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.score_rows import Place
from flash_attn_cute.kernels.common.tma import BackwardTiles, prefetch_descriptors
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardCtaConfig
from flash_attn_cute.kernels.sm90.backward.cta_schedule import cta_schedule
from flash_attn_cute.kernels.sm90.backward.cta_shared import Shared
from flash_attn_cute.kernels.sm90.backward.cta_transfers import Transfers
from flash_attn_cute.kernels.sm90.backward.rounding import round_block
from flash_attn_cute.kernels.sm90.backward.workspace import add, load_four, put, take
from flash_attn_cute.kernels.sm90.mma import as_operand_a, convert, gemm, rows_and_columns, store_rows, tiled_mma
from flash_attn_cute.kernels.sm90.scores import (
    Scores,
    SharedTransposed,
    Transposed,
    compute_dS,
    compute_P,
    load_row_interval,
    read_transposed,
    store_transposed,
)
from flash_attn_cute.kernels.sm90.shared import read_a, read_c, swizzled, transposed, write

_ROUNDED_AT_ONCE = 4  # times eight columns of two rows of dQ that a thread reads before it writes
_BARRIER_GROUPED = 1  # a named barrier for each warpgroup; 0 is the whole CTA's


class _Mmas(NamedTuple):
    """Products, called by their results."""

    S: cute.TiledMma  # and dP
    S_registers: cute.TiledMma  # the same with K from registers
    dV: cute.TiledMma
    dK: cute.TiledMma
    dQ: cute.TiledMma


class BackwardCtaSm90(BackwardKernel):
    """The backward kernel of one configuration: a persistent CTA an SM."""

    describe = staticmethod(cta_schedule)
    transfers = Transfers

    def __init__(self, config: BackwardCtaConfig):
        super().__init__(config, self.describe(config), swizzled)
        self.warpgroups = config.num_mma_warpgroups

    def mmas(self) -> _Mmas:
        c, dtype = self.config, self.dtype
        of_dQ = "a" if c.transposes_dQ else "b" if c.dS_by_queries else "ab"
        return _Mmas(
            S=tiled_mma(dtype, c.tile_m),
            S_registers=tiled_mma(dtype, c.tile_m, a_in_registers=True),
            dV=tiled_mma(dtype, c.tile_d, mn_major="b", a_in_registers=True),
            dK=tiled_mma(dtype, c.tile_d, mn_major="b", a_in_registers=True),
            dQ=tiled_mma(dtype, c.columns_dQ, mn_major=of_dQ),
        )

    def tma(self, a: BackwardArguments, mdK: cute.Tensor, mdV: cute.Tensor) -> BackwardTiles:
        c, f, row_tiles = self.config, self.config.features, self.memory.row_tiles
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        return BackwardTiles(
            Q=self.loaded_tiles("sQ", a.mQ),
            dO=self.loaded_tiles("sdO", a.mdO),
            K=self.loaded_tiles("sK", a.mK),
            V=self.loaded_tiles("sV", a.mV),
            dK=None if f.wide else row_tiles(store, "sOut", mdK, f.packed),
            dV=None if f.wide else row_tiles(store, "sOut", mdV, f.packed),
            bias=row_tiles(load, "sBiasTile", scores_first(a.mBias), False) if c.features.tiled_bias else None,
            dBias=row_tiles(store, "sdS", scores_first(a.mdBias, f.packed), f.packed) if c.tiles_dbias else None,
        )

    @cute.kernel
    def kernel(
        self,
        mmas: _Mmas,
        tma: BackwardTiles,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        a: BackwardArguments,
        ws: Workspace,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared memory and pipelines, then splits into roles."""
        c, schedule = self.config, self.schedule
        producer, mma = map(schedule.role, ("producer", "mma"))
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            prefetch_descriptors(tma)
        storage = self.memory.allocate()
        shared = Shared.of(c, a, self.memory, storage)
        if warp_idx == 0:
            with cute.arch.elect_one():
                self.memory.init(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp_idx < 4:
            set_registers(producer.registers, c.ctas_an_sm * schedule.threads)
            transfers = self.transfers(c, a, ws, tma, shared)
            if warp_idx == 0:
                transfers.producer()
            elif warp_idx <= self.warpgroups:
                transfers.carry_out(warp_idx - 1)
            if warp_idx == 3:
                if const_expr(c.zeroes_sums):  # first, as others wait for zeros
                    transfers.zero_sums()
                if const_expr(c.bias_pitch):
                    transfers.load_bias()
                elif const_expr(c.tiles_dbias):
                    transfers.store_dS()
                if const_expr(c.signals_apart):
                    transfers.signal_added(mdK, mdV)
                elif const_expr(c.features.may_mask_keys):
                    index, _, _ = cute.arch.block_idx()
                    zero_fully_masked_keys(c, a, ws, mdK, mdV, index, cute.arch.grid_dim()[0])
        else:
            set_registers(mma.registers, c.ctas_an_sm * schedule.threads)
            self.mma(a, ws, mmas, shared, scales)
            if const_expr(not c.stores_dS):
                sizes = {"tile_d": c.tile_d, "columns": c.columns_dQ, "num_threads": 32, "at_once": _ROUNDED_AT_ONCE}
                rounded = partial(round_block, scale=a.numbers.softmax_scale, transposed=c.transposes_dQ, **sizes)
                round_blocks(c, a, ws, 4 * self.warpgroups, rounded)

    @cute.jit
    def mma(self, a: BackwardArguments, ws: Workspace, mmas: _Mmas, shared: Shared, scales: ScoreScales) -> None:
        """An mma warpgroup: 64 keys of every tile, over all queries that see it."""
        c, work = self.config, self._work(a, ws, mmas, shared, scales)
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            work.acc_dV.fill(0.0)
            work.acc_dK.fill(0.0)
            if const_expr(c.features.dbias_of_keys):
                work.row_sums.fill(0.0)
            if const_expr(c.features.grouped and not c.features.listed):
                for nth in cutlass.range(a.numbers.heads_a_tile, unroll=1):
                    tile = shared.reload_tile(c, a, tile_idx)
                    step = self._mainloop(work, tile, tile_idx, step, nth)
            else:  # under a mask a tile's blocks are those of all its heads
                step = self._mainloop(work, shared.tile(c, a, tile_idx), tile_idx, step, 0)
            if const_expr(not c.delays_dQ):
                shared.rings.k.release(tile_idx)  # to warp 0
            if const_expr(c.features.dbias_of_keys):
                self._store_row_sums(work, shared.reload_tile(c, a, tile_idx))
            if const_expr(c.features.grouped):
                self._share_dKV(work, shared.reload_tile(c, a, tile_idx))
            piece = c.piece_number(step, tile_idx)
            if const_expr(c.k_stages == 1 and c.delays_dQ):
                self._finish_dQ(work, step, tile_idx, piece)
                shared.rings.k.release(tile_idx)  # to warp 0
                piece += 1
            self._put_out_dKV(work, tile_idx, piece, shared.reload_tile(c, a, tile_idx).is_last)
            shared.tiles.release(tile_idx)  # to warp 0
            tile_idx += 1
        if const_expr(c.k_stages == 2):
            self._finish_dQ(work, step, tile_idx - 1, c.piece_number(step, tile_idx))

    def _work(self, a: BackwardArguments, ws: Workspace, mmas: _Mmas, shared: Shared, scales: ScoreScales) -> "_Work":
        """Operands and accumulators of the calling warpgroup."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        w = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        slices = _Mmas(*(mma.get_slice(thread) for mma in mmas))
        # Operands in shared memory are described once a warpgroup: by its first thread's slice.
        wholes = _Mmas(*(mma.get_slice(0) for mma in mmas))
        sA, sB = self._operands_of_dQ(shared, w)
        acc_S = cute.make_rmem_tensor(slices.S.partition_shape_C((64, c.tile_m)), Float32)
        acc_dP = cute.make_rmem_tensor_like(acc_S)
        rP, rdS = (cute.make_rmem_tensor_like(acc_S, self.dtype) for _ in range(2))
        return _Work(
            arguments=a,
            warpgroup=w,
            thread=thread,
            quad=opaque(thread % 4),
            workspace=ws,
            mmas=mmas,
            tSrK=mmas.S.make_fragment_A(wholes.S.partition_A(shared.sK)),
            rK=cute.make_rmem_tensor(slices.S_registers.partition_shape_A((64, c.columns_K)), self.dtype),
            tSrQ=mmas.S.make_fragment_B(wholes.S.partition_B(shared.sQ)),
            tPrV=mmas.S.make_fragment_A(wholes.S.partition_A(shared.sV)),
            tPrdO=mmas.S.make_fragment_B(wholes.S.partition_B(shared.sdO)),
            tVrdO=mmas.dV.make_fragment_B(wholes.dV.partition_B(transposed(shared.sdO))),
            tKrQ=mmas.dK.make_fragment_B(wholes.dK.partition_B(transposed(shared.sQ))),
            tQrA=mmas.dQ.make_fragment_A(wholes.dQ.partition_A(sA)),
            tQrB=mmas.dQ.make_fragment_B(wholes.dQ.partition_B(sB)),
            scores=Scores(
                acc_S=acc_S,
                rP=rP,
                rW=rdS if c.features.softcap else rP,
                cS=slices.S.partition_C(cute.make_identity_tensor((64, c.tile_m))),
                scales=scales,
                arguments=a,
            ),
            acc_dP=acc_dP,
            acc_dV=cute.make_rmem_tensor(slices.dV.partition_shape_C((64, c.tile_d)), Float32),
            acc_dK=cute.make_rmem_tensor(slices.dK.partition_shape_C((64, c.tile_d)), Float32),
            acc_dQ=cute.make_rmem_tensor(slices.dQ.partition_shape_C((64, c.columns_dQ)), Float32),
            rdS=rdS,
            rUnits=cute.make_rmem_tensor(2, Float32),
            rBias=cute.make_rmem_tensor_like(acc_S, self.dtype) if c.features.tiled_bias else None,
            row_sums=cute.make_rmem_tensor(2, Float32),
            rStats=cute.make_rmem_tensor((4, 4 if c.short_steps else 1), Float32),
            shared=shared,
        )

    @cute.jit
    def _finish_dQ(self, work: "_Work", step: Int32, tile_idx: Int32, piece: Int32) -> None:
        """Computes dQ of the last step before ``step``, if there was one."""
        shared = work.shared
        if step > 0:
            # From all mma warps: the last step's dS is there.
            shared.rings.ds.wait_full(step - 1)
        self._start_dQ(work, step - 1, tile_idx)
        warpgroup.wait_group(0)
        if step > 0:
            self._put_out_dQ(work, piece)
            if const_expr(self.config.hands_out_late):
                self._hand_out(work, piece)

    @cute.jit
    def _mainloop(self, work: "_Work", tile: KeyTile, tile_idx: Int32, step: Int32, nth: Int32 | int) -> Int32:
        """All queries of the tile's nth head, or, if it is an int, of all of its heads; returns the next step."""
        is_first = nth == 0
        is_last = True if const_expr(isinstance(nth, int)) else nth + 1 == work.arguments.numbers.heads_a_tile
        first, end = tile.blocks.positions
        if const_expr(self.config.reverses_last):
            direction = tile.blocks.direction
            n = first
            while n != end:
                self._step(
                    work, tile, tile_idx, n, step, nth, is_first and n == first, is_last and n + direction == end
                )
                step += 1
                n += direction
        else:  # the compiler knows more of such a loop, and keeps its bound in a uniform register
            for n in cutlass.range(first, end, unroll=1):
                self._step(work, tile, tile_idx, n, step, nth, is_first and n == first, is_last and n + 1 == end)
                step += 1
        if const_expr(self.config.hands_out_late):
            if is_last and step > 1:
                self._hand_out(work, self.config.piece_number(step - 1, tile_idx))
        return step

    @cute.jit
    def _step(
        self,
        work: "_Work",
        tile: KeyTile,
        tile_idx: Int32,
        n: Int32,
        step: Int32,
        nth: Int32 | int,
        is_first: Boolean,
        is_last: Boolean,
    ) -> None:
        """One block of queries: the n-th of the mainloop, for the tile's nth head, and the tile's first or last one."""
        shared, stage, do_stage = work.shared, work.shared.rings.q.stage(step), work.shared.rings.do.stage(step)
        blocks, reads_lse_early = tile.blocks, self.config.short_steps or not self.config.delays_dQ
        m_block, words, code, seen = blocks.at(n), None, None, None
        if is_first:
            shared.rings.k.wait_full(tile_idx)  # from warp 0
            self._read_K(work, tile_idx)
        shared.rings.q.wait_full(step)  # from warp 0
        if const_expr(reads_lse_early):
            self._read_stats(work, 0, stage)  # before products, as it would stand behind them in the queue
        self._start_S(work, tile_idx, stage)
        if const_expr(self.config.features.listed):
            m_block, nth, code = shared.read_scores_step(step)
            part = work.warpgroup if const_expr(self.warpgroups > 1) else tile.first_key // 64 % 2  # of a tile of bits
            words = bits_of(work.workspace.mBits, code, part, work.thread)
        if const_expr(not self.config.delays_dQ):
            self._read_units(work, stage)
        if const_expr(self.config.features.intervals):
            keys = shared.reload_tile(self.config, work.arguments, tile_idx)
            first_row = keys.first_key + 64 * work.warpgroup
            seen = load_row_interval(work.arguments.mIntervals, keys.batch, keys.k.length, first_row, work.scores.cS)
        if const_expr(self.config.hands_out_late):
            if not is_first and step > 1:  # not earlier: now the fence has nothing to wait for
                self._hand_out(work, self.config.piece_number(step - 1, tile_idx))
        if is_first:
            shared.rings.v.wait_full(tile_idx)  # from warp 0
        shared.rings.do.wait_full(step)  # from warp 0
        tPrV, tPrdO = work.tPrV[None, None, None, work.warpgroup], work.tPrdO[None, None, None, do_stage]
        elements: tuple[Any, ...] = ()
        reads_bias = self.config.features.bias and not (self.config.bias_pitch or self.config.features.tiled_bias)
        if const_expr(reads_bias):
            # In the registers that dP would have.
            elements = (read_transposed(work.scores, self._place(work, tile_idx, nth, m_block)),)
        else:
            gemm(work.mmas.S, work.acc_dP, tPrV, tPrdO, True)
        if const_expr(self.config.bias_pitch):
            rows = shared.reload_tile(self.config, work.arguments, tile_idx).rows_of_bias(self.config, nth, m_block)
            elements = (SharedTransposed(shared.bias, step, rows, 64 * work.warpgroup, work.scores.cS),)
        if const_expr(self.config.features.tiled_bias):
            elements = (self._read_bias(work, step),)
        if const_expr(not reads_lse_early):
            self._read_stats(work, 0, stage)
        warpgroup.wait_group(0 if reads_bias else 1)  # the scores are there
        if const_expr(self.config.bias_pitch):
            shared.bias.ring.wait_full(step)  # from warp 3
        hides = code >= 0 if const_expr(self.config.features.listed) else blocks.position_crosses_left(n)
        if const_expr(self.config.features.hides_last_queries and not self.config.features.listed):
            again = work.shared.reload_tile(self.config, work.arguments, tile_idx)
            hides = hides or again.blocks.crosses_right(m_block)
        compute_P(
            self.config,
            work.scores,
            hides,
            lambda: self._place(work, tile_idx, nth, m_block),
            lambda i: self._stats(work, 0, stage, i),
            elements,
            words,
            seen,
            partial(self._start_dV, work, do_stage, (0, 2)) if const_expr(self.config.halves_dV) else None,
        )
        if const_expr(self.config.bias_pitch):
            shared.bias.ring.release(step)  # to warp 3
        if const_expr(reads_bias):
            gemm(work.mmas.S, work.acc_dP, tPrV, tPrdO, True)
        self._read_stats(work, 1, do_stage)
        self._start_dV(work, do_stage, (1, 2) if const_expr(self.config.halves_dV) else (0, 1))
        warpgroup.wait_group(1)  # dP is there
        if is_last:
            shared.rings.v.release(tile_idx)  # to warp 0
        rW = cute.recast_tensor(cute.make_tensor(work.scores.rW.iterator, cute.size(work.scores.rW)), Int32)
        compute_dS(
            work.acc_dP,
            lambda i: cute.local_tile(rW, (4,), (i,)),
            lambda i: self._stats(work, 1, do_stage, i),
            work.rdS,
            work.row_sums if const_expr(self.config.features.dbias_of_keys) else None,
        )
        if const_expr(self.config.features.dbias and not self.config.tiles_dbias):
            place = self._place(work, tile_idx, nth, m_block)
            store_transposed(work.rdS, work.arguments, place, work.scores.cS)
        self._add_products_of_dS(work, tile_idx, step, is_first)

    @cute.jit
    def _add_products_of_dS(self, work: "_Work", tile_idx: Int32, step: Int32, is_first: Boolean) -> None:
        """Adds a step's dK, and dQ of the step before.

        What comes before the first block of a tile is the last one of the tile before. The very first step, or where
        shared memory has but one K every tile's first, computes a dQ of anything, as the compiler lets products overlap
        only where none is under a condition.
        """
        shared, stage = work.shared, work.shared.rings.q.stage(step)
        # From all mma warps: the last step's dS is there, and the one that was here before is read no more, nor by TMA.
        shared.rings.ds.wait_full(step - 1)
        sdS = shared.sdS[None, None, work.warpgroup, step & 1]
        transposes = self.config.dS_by_queries
        write(work.rdS, work.mmas.S, transposed(sdS) if const_expr(transposes) else sdS, work.thread, transposes)
        warpgroup.wait_group(0)  # dV is there
        shared.rings.do.release(step)  # to warp 0
        last_tile_idx = tile_idx - 1 if is_first else tile_idx
        self._start_dQ(work, step - 1, last_tile_idx)
        gemm(work.mmas.dK, work.acc_dK, as_operand_a(work.rdS), work.tKrQ[None, None, None, stage], False)
        warpgroup.wait_group(1)  # dQ is there
        if const_expr(self.config.k_stages == 2):
            if is_first and tile_idx > 0:
                shared.rings.k.release(last_tile_idx)  # to warp 0
        cute.arch.fence_proxy("async.shared", space="cta")  # not earlier, as above
        # To all mma warps: this warp's part of dS is there, and it reads the other buffer no more.
        shared.rings.ds.arrive(step)
        if not is_first if const_expr(self.config.k_stages == 1) else step > 0:
            self._put_out_dQ(work, self.config.piece_number(step, tile_idx))
        self._read_units(work, stage)
        warpgroup.wait_group(0)  # dK is there
        if const_expr(self.config.fixed_point):
            shared.rings.q.release_read(step)  # to warp 0
        else:
            shared.rings.q.release(step)

    @cute.jit
    def _read_K(self, work: "_Work", tile_idx: Int32) -> None:
        """The first columns of K, for all steps of a tile."""
        sK = work.shared.sK[None, None, work.warpgroup, work.shared.rings.k.stage(tile_idx)]
        sK = cute.local_tile(sK, (64, self.config.columns_K), (0, 0))
        read_a(work.mmas.S_registers, sK, work.rK, work.thread)

    @cute.jit
    def _read_bias(self, work: "_Work", step: Int32) -> Transposed:
        """This thread's elements of a step's bias, which TMA has loaded."""
        ring, sBias = work.shared.rings.bias, work.shared.sBiasTile
        sBias = cute.local_tile(sBias, (64, 64, ring.stages), (0, work.warpgroup, 0))
        ring.wait_full(step)  # from warp 0
        read_c(work.mmas.S, transposed(sBias)[None, None, ring.stage(step)], work.rBias, work.thread, transposes=True)
        ring.release_read(step)  # to warp 0
        bias = rows_and_columns(work.rBias)
        return Transposed(bias, range(cute.size(bias, mode=[1])))

    @cute.jit
    def _start_S(self, work: "_Work", tile_idx: Int32, stage: Int32) -> None:
        """Scores of a block: the first columns of K are in registers, the others in shared memory."""
        acc, tSrQ, rK = work.scores.acc_S, work.tSrQ[None, None, None, stage], work.rK
        tSrK = work.tSrK[None, None, None, work.warpgroup, work.shared.rings.k.stage(tile_idx)]
        in_registers, in_all = cute.size(rK, mode=[2]), cute.size(tSrK, mode=[2])
        parts = (cute.make_mma_atom(work.mmas.S_registers.op), rK), (cute.make_mma_atom(work.mmas.S.op), tSrK)
        warpgroup.fence()
        for k in cutlass.range_constexpr(in_all):
            mma, operand = parts[0] if k < in_registers else parts[1]
            mma.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, acc, operand[None, None, k], tSrQ[None, None, k], acc)
        warpgroup.commit_group()

    @cute.jit
    def _start_dV(self, work: "_Work", stage: Int32, part: Constexpr) -> None:
        """Issues dV += P' dO over a part of the block's queries (``gemm``); the last part ends the group."""
        nth, parts = part
        rP, tVrdO = as_operand_a(work.scores.rP), work.tVrdO[None, None, None, stage]
        gemm(work.mmas.dV, work.acc_dV, rP, tVrdO, False, nth == parts - 1, part)

    @cute.jit
    def _start_dQ(self, work: "_Work", step: Int32, tile_idx: Int32) -> None:
        """This warpgroup's part of a step's dQ."""
        for i in cutlass.range_constexpr(self.warpgroups):
            of_dS, of_K = step & 1, work.shared.rings.k.stage(tile_idx)
            stage_a, stage_b = (of_K, of_dS) if const_expr(self.config.transposes_dQ) else (of_dS, of_K)
            tQrA, tQrB = work.tQrA[None, None, None, i, stage_a], work.tQrB[None, None, None, i, stage_b]
            gemm(work.mmas.dQ, work.acc_dQ, tQrA, tQrB, i == 0, i == self.warpgroups - 1)

    def _operands_of_dQ(self, shared: Shared, w: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Operands of warpgroup w's part of dQ = dS K, or of dQ' = K' dS': (rows, keys, warpgroup, stage)."""
        c, warpgroups = self.config, self.warpgroups
        if c.transposes_dQ:  # 64 columns of K, which are rows
            return transposed(cute.local_tile(shared.sK, (64, 64, warpgroups, c.k_stages), (0, w, 0, 0))), shared.sdS
        parts_a_row = c.tile_d // c.columns_dQ
        which = (w // parts_a_row, 0) if c.dS_by_queries else (0, w // parts_a_row)
        sdS = cute.local_tile(shared.sdS, (64, 64, warpgroups, 2), (*which, 0, 0))
        sK = cute.local_tile(shared.sK, (64, c.columns_dQ, warpgroups, c.k_stages), (0, w % parts_a_row, 0, 0))
        return sdS if c.dS_by_queries else transposed(sdS), transposed(sK)

    @cute.jit
    def _put_out_dQ(self, work: "_Work", piece: Int32) -> None:
        """Writes this warpgroup's part of dQ to shared memory, in the order that it has in the workspace.

        If steps are short, the signal to warp 1 or 2 comes later.
        """
        shared, size = work.shared, cute.size(work.acc_dQ)
        out = shared.out(work.warpgroup)
        part = cute.make_tensor(shared.sums + 128 * size * work.warpgroup, cute.make_layout(128 * size))
        out.wait_empty(piece)  # from warp 1 or 2
        if const_expr(self.config.fixed_point):
            if work.rUnits[0] != FLOAT32:
                to_fixed_point(work.acc_dQ, work.rUnits)
        put(work.acc_dQ, part, work.thread)
        if const_expr(not self.config.hands_out_late):
            self._hand_out(work, piece)

    @cute.jit
    def _hand_out(self, work: "_Work", piece: Int32) -> None:
        """Signals warp 1 or 2 that a part is in shared memory."""
        cute.arch.fence_proxy("async.shared", space="cta")
        work.shared.out(work.warpgroup).arrive(piece)  # to warp 1 or 2

    @cute.jit
    def _put_out_dKV(self, work: "_Work", tile_idx: Int32, piece: Int32, is_whole: Boolean | bool) -> None:
        """DV, then dK, if they are whole: into shared memory, or, in float32, to where they belong."""
        a, f, shared = work.arguments, self.config.features, work.shared
        for i in cutlass.range_constexpr(cute.size(work.acc_dK)):
            work.acc_dK[i] = work.acc_dK[i] * work.arguments.numbers.softmax_scale
        both = (work.acc_dV, work.mmas.dV, a.mdV), (work.acc_dK, work.mmas.dK, a.mdK)
        for i, (acc, mma, mX) in enumerate(both):
            if const_expr(f.wide):
                if is_whole:
                    tile = shared.reload_tile(self.config, a, tile_idx)
                    # Opaque, or the compiler keeps what they are multiplied by in registers from the start.
                    gX = rows_first(mX, f.packed)[None, None, opaque(tile.head_k), tile.batch]
                    first = opaque(tile.k.start + tile.first_key + 64 * work.warpgroup)
                    store_rows(acc, gX, first, tile.k.start + tile.k.length, work.thread)
            else:
                self._put_out_rounded(work, acc, mma, piece + i * self.config.pieces_a_gradient, is_whole)

    @cute.jit
    def _put_out_rounded(
        self, work: "_Work", acc: cute.Tensor, mma: cute.TiledMma, piece: Int32, is_whole: Boolean | bool
    ) -> None:
        """Writes dV or dK to shared memory."""
        out, rounded = work.shared.out(work.warpgroup), cute.make_rmem_tensor_like(acc, self.dtype)
        convert(acc, rounded)
        out.wait_empty(piece)  # from warp 1 or 2
        if is_whole:
            write(rounded, mma, work.shared.out_tile(work.warpgroup, piece), work.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
        out.arrive(piece)  # to warp 1 or 2

    @cute.jit
    def _store_row_sums(self, work: "_Work", tile: KeyTile) -> None:
        """Stores the sums of dS over the queries of a tile, one a key."""
        coordinates, gSums = rows_and_columns(work.scores.cS), work.arguments.mdBiasOfKeys[tile.batch, tile.head, None]
        for r in cutlass.range_constexpr(2):
            row_sum = work.row_sums[r]
            for j in cutlass.range_constexpr(2):
                row_sum += cute.arch.shuffle_sync_bfly(row_sum, 1 << j)
            key = tile.first_key + 64 * work.warpgroup + coordinates[r, 0][0]
            if work.thread % 4 == 0 and key < tile.k.length:
                gSums[key] = row_sum

    @cute.jit
    def _share_dKV(self, work: "_Work", tile: KeyTile) -> None:
        """This warpgroup's keys' dK and dV to the workspace, from registers; their last tile takes what is there."""
        barrier = _BARRIER_GROUPED + work.warpgroup
        semaphore = semaphores.at(work.workspace.mSemaphoresK, work.warpgroup, tile.head_k, tile.block)
        if tile.tiles_after > 0:
            is_first = tile.wait_turn(self.config, semaphore, barrier)
            for i, acc in enumerate((work.acc_dK, work.acc_dV)):
                add(acc, self._sums(work, tile, i), work.thread, is_first)
            semaphores.signal_as_warpgroup(semaphore, barrier)
        elif tile.tiles_before > 0:
            semaphores.wait_as_warpgroup(semaphore, tile.tiles_before, barrier)
            for i, acc in enumerate((work.acc_dK, work.acc_dV)):
                take(acc, self._sums(work, tile, i), work.thread)

    def _sums(self, work: "_Work", tile: KeyTile, which: int) -> cute.Tensor:
        """Where this warpgroup's part of dK (0) or dV (1) is in the workspace."""
        # Opaque, or the compiler keeps what the index is multiplied by in a register from the start.
        block = work.workspace.mdKVaccum[opaque(Int32(which)), tile.head_k, tile.block, None]
        return cute.local_tile(block, (64 * self.config.tile_d,), (work.warpgroup,))

    def _place(self, work: "_Work", tile_idx: Int32, nth: Int32 | int, m_block: Int32) -> Place:
        """Location of the scores; reloads the tile, which is rarely needed, to keep it out of registers."""
        tile = work.shared.reload_tile(self.config, work.arguments, tile_idx)
        return tile.place(self.config, nth, tile.first_key + 64 * work.warpgroup, m_block)

    def _read_units(self, work: "_Work", stage: Int32) -> None:
        """Reads the units of this thread's two rows of a step's dQ."""
        if self.config.fixed_point:
            row = work.thread // 32 * 16
            if self.warpgroups > 1:
                row = work.warpgroup // (self.config.tile_d // self.config.columns_dQ) * 64 + row
            row += work.thread % 32 // 4
            for i in range(2):
                work.rUnits[i] = work.shared.stats[row + 8 * i, 2, stage]

    def _read_stats(self, work: "_Work", which: int, stage: Int32) -> None:
        """This thread's lse (0) or delta (1) into registers, ahead of time: the tensor cores are before us in line."""
        for i in range(cute.size(work.rStats, mode=[1])):
            work.rStats[None, i].store(load_four(work.shared.stats[None, which, stage], work.quad, i).load())

    def _stats(self, work: "_Work", which: int, stage: Int32, i: int) -> cute.Tensor:
        """Lse or delta of this thread's four queries in the i-th group of sixteen."""
        if i < cute.size(work.rStats, mode=[1]):
            return work.rStats[None, i]
        return load_four(work.shared.stats[None, which, stage], work.quad, i)


@dataclass(frozen=True)
class _Work:
    """An mma warpgroup's operands and accumulators.

    ``t<product>r<operand>``; a product is called by its result: S, P (for dP), V, K and Q (for dV, dK and dQ).
    """

    arguments: BackwardArguments
    warpgroup: Int32
    thread: Int32
    quad: Int32
    workspace: Workspace
    mmas: _Mmas
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, warpgroup, stage of k)
    rK: cute.Tensor  # (MMA, 1, MMA_K): the columns of K that are in registers
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tPrV: cute.Tensor
    tPrdO: cute.Tensor
    tVrdO: cute.Tensor
    tKrQ: cute.Tensor
    tQrA: cute.Tensor  # (MMA, 1, MMA_K, warpgroup, stage): dS, or if dQ is transposed K
    tQrB: cute.Tensor  # (MMA, 1, MMA_K, warpgroup, stage): the other
    scores: Scores  # its rW is where rdS will be, with a softcap
    acc_dP: cute.Tensor
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor
    acc_dQ: cute.Tensor
    rdS: cute.Tensor
    rBias: cute.Tensor | None  # a step's bias, laid out as acc_S, if TMA has loaded it
    row_sums: cute.Tensor  # of dS, over all queries so far, of the two keys that this thread has
    rUnits: cute.Tensor  # of the two rows of dQ that this thread has (``common.fixed_point``)
    rStats: cute.Tensor  # (four, group of sixteen queries): lse, then delta, of as many as there are registers for
    shared: Shared
