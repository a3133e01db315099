"""Attention backward on Hopper where each query selects key blocks: key-outer, as ``sm90.selection`` is.

``python -m flash_attn_cute.kernels describe sm90 selection_backward --d 128`` prints its schedule
(``sm90.selection_schedule``).

A CTA has an item: some of the picks (a query and a block that it selects) of one block of 64 keys, of the heads of one
group. K and V stay. Each mma warpgroup takes tiles of 64 rows in turn, a pick being as many rows as heads select
together. Rows of products are queries, so that lse and delta are two numbers a thread. P and dS go through shared
memory, from where they are read transposed for dV and dK, whose sums stay in registers over all tiles of the item.
Above 128 columns a warpgroup has registers for one of the sums. Then the warpgroups take their tiles in step: each
computes P and dS of its own, the first adds to dV by both tiles, and the second to dK.

dQ of a pick, and the sums of an item's warpgroups, go to the workspace. Kernels behind this one add them in a fixed
order: the same bits every time. One ahead computes lse in base 2 and delta (``common.selection_gradients``).

Sums are float32, and so is dQ of float16 operands. With bfloat16 ones dQ is scaled and rounded to float16: 64 columns
of a row by a power of two that makes their largest magnitude 2^14 to 2^15. It goes through the places of P and dS in
shared memory.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_attn_cute.kernels.arguments import SelectionBackwardArguments
from flash_attn_cute.kernels.common.assembly import as_bits, as_float, fma, largest_magnitude, pack
from flash_attn_cute.kernels.common.score import ScoreScales, capped_slope, hidden
from flash_attn_cute.kernels.common.selection_gradients import (
    SelectionKeyGradients,
    SelectionPreprocess,
    SelectionQueryGradients,
)
from flash_attn_cute.kernels.common.tma import RowTiles
from flash_attn_cute.kernels.common.workspace import carved
from flash_attn_cute.kernels.selection import TILE_ROWS, backward_workspace_parts
from flash_attn_cute.kernels.sm90.mma import as_operand_a, gemm, rows_and_columns, store_row, store_rows, tiled_mma
from flash_attn_cute.kernels.sm90.scores import cap
from flash_attn_cute.kernels.sm90.selection_config import SelectionBackwardConfig
from flash_attn_cute.kernels.sm90.selection_kernel import ItemKernel, ItemWork
from flash_attn_cute.kernels.sm90.selection_transfers import COLUMNS, BlockShared
from flash_attn_cute.kernels.sm90.shared import one_of, transposed, write

_BARRIER_WARPGROUP = 1  # a named barrier a warpgroup; 0 is the whole CTA's
_BARRIER_IN_STEP = 3  # of both warpgroups
_LARGEST = 14  # exponent of the largest magnitude of scaled numbers; float16 has 15, and numbers round up


class _Tma(NamedTuple):
    """TMA tiles, by name."""

    Q: RowTiles
    K: RowTiles
    V: RowTiles
    dO: RowTiles
    dQ: RowTiles | None  # scaled


class _Parts(NamedTuple):
    """Parts of the workspace that the kernel reads and writes."""

    mLSE: cute.Tensor  # (unit, row, head of the group), in base 2
    mDelta: cute.Tensor
    mdQ: cute.Tensor  # (unit, pick, head of the group and column)
    mScale: cute.Tensor | None  # (unit, pick, 64 columns and head of the group): inverse scales of dQ
    mdK: cute.Tensor  # (unit, warpgroup of an item, key and column)
    mdV: cute.Tensor


class _Mmas(NamedTuple):
    """Products, called by their results."""

    S: cute.TiledMma
    dV: cute.TiledMma
    dK: cute.TiledMma
    dQ: cute.TiledMma  # of ``COLUMNS`` columns at a time


class _Sum(NamedTuple):
    """A warpgroup's sum of dV or dK over the tiles of one or both warpgroups."""

    mma: cute.TiledMma
    acc: cute.Tensor
    scores: list[cute.Tensor]  # operands: P' or dS' of each tile,
    rows: list[cute.Tensor]  # and dO or Q, (MMA, 1, MMA_K, PIPE)


@dataclass(frozen=True)
class _Shared(BlockShared):
    """Shared memory and what guards it."""

    sdO: cute.Tensor
    sP: cute.Tensor
    sdS: cute.Tensor


class SelectionBackwardSm90(ItemKernel):
    """The backward kernels of a selection, of one configuration."""

    def __init__(self, config: SelectionBackwardConfig):
        super().__init__(config, _Shared)
        self.preprocess = SelectionPreprocess(config)
        self.query_gradients = SelectionQueryGradients(config)
        self.key_gradients = SelectionKeyGradients(config)

    @cute.jit
    def __call__(self, arguments: SelectionBackwardArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel, a CTA an item, one ahead, and two behind."""
        c, a, n = self.config, arguments, arguments.numbers
        sizes = backward_workspace_parts(c, n.num_units, n.num_rows, n.num_rows * n.top, n.num_items)
        parts = carved(a.mWorkspace, sizes, Float32)
        tma = _Tma(
            Q=self.loads_of_heads(a.mQ),
            K=self.loaded_tiles("sK", a.mK),
            V=self.loaded_tiles("sV", a.mV),
            dO=self.loads_of_heads(a.mdO),
            dQ=self.stores_of_picks(parts["mdQ"], c.tile_d) if const_expr(c.has_scaled_dQ) else None,
        )
        scales = ScoreScales.of(c.features, n.softmax_scale, n.softcap)
        tables = self.tables(a, stream)
        self.preprocess(a, parts, stream)
        own = _Parts(*(parts.get(name) for name in _Parts._fields))
        kernel = self.kernel(self.mmas(), tma, a, tables, own, scales)
        self.launch(kernel, n.num_items * n.num_units, stream)
        self.query_gradients(a, tables, parts, stream)
        self.key_gradients(a, tables, parts, stream)

    def mmas(self) -> _Mmas:
        c = self.config
        return _Mmas(
            S=tiled_mma(self.dtype, c.tile_n),
            dV=tiled_mma(self.dtype, c.tile_dv, mn_major="ab"),
            dK=tiled_mma(self.dtype, c.tile_d, mn_major="ab"),
            dQ=tiled_mma(self.dtype, COLUMNS, mn_major="b", a_in_registers=True),
        )

    def loads(self, tma: Any, shared: Any) -> tuple[tuple[RowTiles, cute.Tensor], ...]:
        """TMA tiles of Q and dO, and the buffers that they go to."""
        return (tma.Q, shared.sQ), (tma.dO, shared.sdO)

    @cute.jit
    def mma(self, work: ItemWork) -> None:
        """An mma warpgroup: every other tile of the item, then its sums of dV and dK."""
        work = self._work(work)
        c, number, mdK, mdV = self.config, work.number, work.parts.mdK, work.parts.mdV
        work.shared.k_ring.wait_full(Int32(0))  # from warp 0
        work.shared.v_ring.wait_full(Int32(0))
        for each in work.sums:
            each.acc.fill(0.0)
        self.mainloop(work)
        if const_expr(c.in_step):
            if work.warpgroup == 0:
                self._store_sum(work, work.sums[0].acc, mdV, number)
            else:
                self._store_sum(work, work.sums[0].acc, mdK, number)
        else:
            part = number * c.num_mma_warpgroups + work.warpgroup
            for each, mX in zip(reversed(work.sums), (mdK, mdV), strict=True):
                self._store_sum(work, each.acc, mX, part)
        self._wait_stored()  # shared memory lives until it has been read

    def _store_sum(self, work: "_Work", acc: cute.Tensor, mX: cute.Tensor, part: Int32) -> None:
        """Stores a warpgroup's sum to its part of the workspace."""
        rows = self.config.tile_n
        columns = mX.shape[2] // rows
        part_of = mX[work.unit_idx, Int64(part), None].iterator
        gX = cute.make_tensor(part_of, cute.make_layout((rows, columns), stride=(columns, 1)))
        store_rows(acc, gX, Int32(0), Int32(rows), work.thread)

    def _work(self, work: ItemWork) -> "_Work":
        """Adds operands and accumulators of dP, dV, dK and dQ."""
        c, mmas, shared, w = self.config, work.mmas, work.shared, work.warpgroup
        S, dQ = mmas.S.get_slice(0), mmas.dQ.get_slice(0)  # operands are described by the first thread's
        shape_dQ = mmas.dQ.get_slice(work.thread).partition_shape_C((TILE_ROWS, COLUMNS))
        return _Work(
            **vars(work),
            tPrdO=mmas.S.make_fragment_A(S.partition_A(shared.sdO[None, None, None, w])),
            tPrV=mmas.S.make_fragment_B(S.partition_B(shared.sV)),
            sums=self._sums(mmas, shared, w, work.thread),
            tQrK=[
                mmas.dQ.make_fragment_B(
                    dQ.partition_B(transposed(cute.local_tile(shared.sK, (c.tile_n, COLUMNS), (0, i))))
                )
                for i in range(c.tile_d // COLUMNS)
            ],
            sP=shared.sP[None, None, w],
            sdS=shared.sdS[None, None, w],
            acc_dP=cute.make_rmem_tensor_like(work.acc_S),
            acc_dQ=cute.make_rmem_tensor(shape_dQ, Float32),
            rdS=cute.make_rmem_tensor_like(work.rP),
        )

    def _sums(self, mmas: _Mmas, shared: _Shared, w: Int32, thread: Int32) -> list[_Sum]:
        """Sums of dV and dK over a warpgroup's own tiles; or, in step, of dV (first) or dK over those of both."""
        if const_expr(not self.config.in_step):
            own = [(shared.sP, shared.sdO), (shared.sdS, shared.sQ)]
            tiles = [(scores[None, None, w], rows[None, None, None, w]) for scores, rows in own]
            return [self._sum(mma, [tile], thread) for mma, tile in zip((mmas.dV, mmas.dK), tiles, strict=True)]
        scores, rows = one_of(w == 0, shared.sP, shared.sdS), one_of(w == 0, shared.sdO, shared.sQ)
        each = range(self.config.num_mma_warpgroups)
        return [self._sum(mmas.dV, [(scores[None, None, i], rows[None, None, None, i]) for i in each], thread)]

    def _sum(self, mma: cute.TiledMma, tiles: list[tuple[cute.Tensor, cute.Tensor]], thread: Int32) -> _Sum:
        """A sum of the products of tiles of scores and rows."""
        whole, columns = mma.get_slice(0), cute.size(tiles[0][1], mode=[1])
        return _Sum(
            mma=mma,
            acc=cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((TILE_ROWS, columns)), Float32),
            scores=[mma.make_fragment_A(whole.partition_A(transposed(scores))) for scores, _ in tiles],
            rows=[mma.make_fragment_B(whole.partition_B(transposed(rows))) for _, rows in tiles],
        )

    @cute.jit
    def tile(self, work: "_Work", num_picks: Int32, step: Int32) -> None:
        """A tile of so many picks. Fewer than a whole one's have copies of the last behind them, whose P is 0."""
        c, shared, n = self.config, work.shared, work.arguments.numbers
        ring = shared.q_ring(work.warpgroup)
        ring.wait_full(step)  # from the warpgroup's producer warp: Q, dO and entries
        stage = ring.stage(step)
        gemm(work.mmas.S, work.acc_S, work.tSrQ[None, None, None, stage], work.tSrK, is_first=True)
        gemm(work.mmas.S, work.acc_dP, work.tPrdO[None, None, None, stage], work.tPrV, is_first=True)
        rows = [rows_and_columns(work.cS)[r, 0][0] for r in range(2)]
        picks = [shared.entries[row // c.group, stage, work.warpgroup] for row in rows]
        visible = self.visible_keys(work, rows, picks, stage)
        lse, delta = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        for r in cutlass.range_constexpr(2):
            place = work.unit_idx, picks[r] // n.top, rows[r] % c.group
            lse[r], delta[r] = work.parts.mLSE[place], work.parts.mDelta[place]
            for i in cutlass.range_constexpr(0 if c.key_bits else 1, 2):  # no bits, or an interval that ends at 0
                visible[i, r] = visible[i, r] if rows[r] // c.group < num_picks else Int32(0)
        warpgroup.wait_group(1)
        self._compute_P(work, visible, lse)
        self._wait_stored()
        cute.arch.barrier(**self._all(work))  # dQ of the last tile has left the places of P and dS
        write(work.rP, work.mmas.S, work.sP, work.thread)
        warpgroup.wait_group(0)
        packed = cute.recast_tensor(work.rdS, Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            low, high = (work.acc_S[2 * i + j] * (work.acc_dP[2 * i + j] - delta[i % 2]) for j in range(2))
            packed[i] = pack(low, high, self.dtype)
        write(work.rdS, work.mmas.S, work.sdS, work.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(**self._all(work))
        if const_expr(c.in_step):
            shared.q_ring(1 - work.warpgroup).wait_full(step)  # from the other warpgroup's producer warp
        for each in work.sums:
            for scores, of_rows in zip(each.scores, each.rows, strict=True):
                gemm(each.mma, each.acc, scores, of_rows[None, None, None, stage], False)
        entries = self.entries_of_lanes(shared.entries[None, stage, work.warpgroup], work.thread % 32)
        for i in cutlass.range_constexpr(c.tile_d // COLUMNS):
            gemm(work.mmas.dQ, work.acc_dQ, as_operand_a(work.rdS), work.tQrK[i], is_first=True)
            warpgroup.wait_group(0)
            if const_expr(i == 0):
                ring.release(step)  # to the producer warp
                if const_expr(c.in_step):
                    shared.q_ring(1 - work.warpgroup).release(step)  # to the other one
            if const_expr(c.has_scaled_dQ):
                self._store_scaled(work, i, rows, entries, num_picks)
            else:
                for r in cutlass.range_constexpr(2):
                    if rows[r] // c.group < num_picks:
                        heads = work.parts.mdQ[work.unit_idx, Int64(picks[r]), None]
                        gX = cute.local_tile(heads, (c.tile_d,), (rows[r] % c.group,))
                        store_row(work.acc_dQ, r, gX, work.thread, COLUMNS * i)

    @cute.jit
    def _store_scaled(self, work: "_Work", i: Constexpr, rows: Constexpr, entries: Constexpr, num_picks: Int32) -> None:
        """Stores the i-th columns of dQ, scaled, through shared memory, and inverse scales of this thread's rows.

        Columns take the places of P and dS in turn, and two of them are stored together.
        """
        places, pieces = (work.sP, work.sdS), self.config.tile_d // COLUMNS
        if const_expr(i == 0):
            cute.arch.barrier(**self._all(work))  # all warps' products have read P and dS
        elif const_expr(i % 2 == 0):
            self._wait_stored()
            cute.arch.barrier(**self._own(work))  # the columns before have left
        write(self._scaled(work, i, rows, entries, num_picks), work.mmas.dQ, places[i % 2], work.thread)
        if const_expr(i % 2 == 1 or i == pieces - 1):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(**self._own(work))
            if self._stores():
                for j in cutlass.range_constexpr(i // 2 * 2, i + 1):
                    self.store_picks(work.tma.dQ, places[j % 2], j, work.unit_idx, entries, num_picks)
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _scaled(
        self, work: "_Work", i: Constexpr, rows: Constexpr, entries: Constexpr, num_picks: Int32
    ) -> cute.Tensor:
        """Scales the i-th columns of dQ to float16, in registers of the operands' dtype, and stores inverse scales."""
        c, own = self.config, rows_and_columns(work.acc_dQ)
        scale, rdQ = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor_like(work.acc_dQ, self.dtype)
        for r in cutlass.range_constexpr(2):
            largest = Float32(0.0)
            for j in cutlass.range_constexpr(cute.size(own, mode=[1])):
                largest = largest_magnitude(largest, own[r, j])
            for j in cutlass.range_constexpr(2):  # four threads have a row
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << j))
            scale[r], inverse = _scale_of(largest)
            number = rows[r] // c.group
            pick = self.entry_of(entries, number)
            if number < num_picks and work.thread % 4 == 0:
                work.parts.mScale[work.unit_idx, Int64(pick), i * c.group + rows[r] % c.group] = inverse
        packed = cute.recast_tensor(rdQ, Int32)
        for j in cutlass.range_constexpr(cute.size(packed)):
            low, high = (work.acc_dQ[2 * j + half] * scale[j % 2] for half in range(2))
            packed[j] = pack(low, high, Float16)
        return rdQ

    def _all(self, work: "_Work") -> dict[str, Any]:
        """The barrier of the threads whose products read a warpgroup's P and dS."""
        if const_expr(self.config.in_step):
            return {"barrier_id": _BARRIER_IN_STEP, "number_of_threads": 128 * self.config.num_mma_warpgroups}
        return self._own(work)

    def _own(self, work: "_Work") -> dict[str, Any]:
        """The barrier of a warpgroup."""
        return {"barrier_id": _BARRIER_WARPGROUP + work.warpgroup, "number_of_threads": 128}

    def _stores(self) -> Boolean:
        """Whether this warp stores its warpgroup's dQ."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0

    @cute.jit
    def _wait_stored(self) -> None:
        """The storing warp waits until dQ that it has stored has left shared memory."""
        if const_expr(self.config.has_scaled_dQ):
            if self._stores():
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _compute_P(self, work: "_Work", visible: cute.Tensor, lse: cute.Tensor) -> None:
        """Computes P from S: rounded into rP, and in place of S times the derivative of a softcap."""
        c, acc_S, log2 = self.config, work.acc_S, work.scales.log2
        if const_expr(c.features.softcap):
            cap(acc_S, work.scales.tanh)
        self.mask_hidden(work, visible, hidden(log2))
        packed = cute.recast_tensor(work.rP, Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            low, high = (cute.math.exp2(fma(acc_S[2 * i + j], log2, -lse[i % 2]), fastmath=True) for j in range(2))
            packed[i] = pack(low, high, self.dtype)
            if const_expr(c.features.softcap):  # what is masked is infinite
                low = low * capped_slope(acc_S[2 * i]) if low != 0.0 else Float32(0.0)
                high = high * capped_slope(acc_S[2 * i + 1]) if high != 0.0 else Float32(0.0)
            acc_S[2 * i], acc_S[2 * i + 1] = low, high


def _scale_of(largest: Float32) -> tuple[Float32, Float32]:
    """A power of two that makes a largest magnitude 2^14 to 2^15, and its inverse.

    Both are normal numbers, so that a magnitude below 2^-112 gets a smaller one. Infinity stays infinite.
    """
    exponent = cutlass.min(127 + _LARGEST + 127 - (as_bits(largest) >> 23), Int32(253))
    return as_float(exponent << 23), as_float((254 - exponent) << 23)


@dataclass(frozen=True)
class _Work(ItemWork):
    """An mma warpgroup's operands, accumulators and state."""

    tPrdO: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tPrV: cute.Tensor
    sums: list[_Sum]
    tQrK: list[cute.Tensor]  # by columns of dQ
    sP: cute.Tensor  # (row, key)
    sdS: cute.Tensor
    acc_dP: cute.Tensor
    acc_dQ: cute.Tensor
    rdS: cute.Tensor  # laid out like acc_S
