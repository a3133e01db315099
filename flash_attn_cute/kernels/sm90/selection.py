"""Attention forward on Hopper where each query selects key blocks: key-outer, and merged by lse.

``python -m flash_attn_cute.kernels describe sm90 selection --d 128`` prints its schedule (``selection_schedule``).

A pick is a query and one block that it selects. A CTA has an item: some of the picks of one block, of the heads of one
group. K and V of the block are loaded once and stay. Picks come in tiles of 64 rows: a pick is as many rows as heads
select together, and these follow each other in memory, so that TMA brings them without a gather. (Loops in this order
are also those of FlashMoBA and of the kernels of MSA, arXiv 2606.13392.)

A tile's softmax is over one block. Partial results of each pick, out and lse over its block alone, go to the workspace,
and a kernel behind this one merges those of a query in the order of its blocks (``common.selection_merge``). Each is
written once, and rows of a tile do not depend on each other: results have the same bits in every run, whatever the
items are.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_attn_cute.kernels.arguments import SelectionArguments
from flash_attn_cute.kernels.common.main_kernels import ForwardMmas
from flash_attn_cute.kernels.common.max_logits import raise_max_logit, raise_max_logit_by_warp
from flash_attn_cute.kernels.common.score import LN2, LOG2_E, ScoreScales, hidden
from flash_attn_cute.kernels.common.selection_merge import SelectionMerge
from flash_attn_cute.kernels.common.selection_tables import SelectedUnit
from flash_attn_cute.kernels.common.tma import ForwardTiles, RowTiles
from flash_attn_cute.kernels.common.workspace import carved
from flash_attn_cute.kernels.selection import TILE_ROWS, workspace_parts
from flash_attn_cute.kernels.sm90.mma import as_operand_a, convert, gemm, rows_and_columns, tiled_mma
from flash_attn_cute.kernels.sm90.scores import cap, raise_logits
from flash_attn_cute.kernels.sm90.selection_config import SelectionConfig
from flash_attn_cute.kernels.sm90.selection_kernel import ItemKernel, ItemWork
from flash_attn_cute.kernels.sm90.selection_transfers import BlockShared
from flash_attn_cute.kernels.sm90.shared import transposed, write
from flash_attn_cute.kernels.sm90.softmax import OnlineSoftmax

_BARRIER_EPILOGUE = 1  # a named barrier a warpgroup; 0 is the whole CTA's


@dataclass(frozen=True)
class _Shared(BlockShared):
    """Shared memory and what guards it."""

    sO: cute.Tensor


class SelectionSm90(ItemKernel):
    """The forward kernels of a selection, of one configuration."""

    def __init__(self, config: SelectionConfig):
        super().__init__(config, _Shared)
        self.merge = SelectionMerge(config)

    @cute.jit
    def __call__(self, arguments: SelectionArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel, a CTA an item, and the one that merges."""
        c, a, n = self.config, arguments, arguments.numbers
        picks = n.num_rows * n.top
        parts = carved(a.mWorkspace, workspace_parts(c, n.num_units, picks), Float32)
        tma = ForwardTiles(
            Q=self.loads_of_heads(a.mQ),
            K=self.loaded_tiles("sK", a.mK),
            V=self.loaded_tiles("sV", a.mV),
            O=self.stores_of_picks(parts["mOut"], c.tile_dv),
        )
        scales = ScoreScales.of(c.features, n.softmax_scale, n.softcap)
        tables = self.tables(a, stream)
        kernel = self.kernel(self.mmas(), tma, a, tables, parts["mLSE"], scales)
        self.launch(kernel, n.num_items * n.num_units, stream)
        self.merge(a, tables, parts, stream)

    def mmas(self) -> ForwardMmas:
        c = self.config
        return ForwardMmas(
            S=tiled_mma(self.dtype, c.tile_n), O=tiled_mma(self.dtype, c.tile_dv, mn_major="b", a_in_registers=True)
        )

    def loads(self, tma: Any, shared: Any) -> tuple[tuple[RowTiles, cute.Tensor], ...]:
        """TMA tiles of Q, and the buffer that they go to."""
        return ((tma.Q, shared.sQ),)

    @cute.jit
    def mma(self, work: ItemWork) -> None:
        """An mma warpgroup: every so many tiles of the item, from S to partial results."""
        work = self._work(work)
        work.shared.k_ring.wait_full(Int32(0))  # from warp 0
        if const_expr(self.config.features.max_logits):
            work.max_logits.fill(-Float32.inf)
        self.mainloop(work)
        if const_expr(self.config.features.max_logits):
            self._raise_max_logits(work)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until it has been read

    @cute.jit
    def _raise_max_logits(self, work: "_Work") -> None:
        """Raises the largest logits of the heads of this thread's rows, which are the same in all tiles."""
        a, group = work.arguments, self.config.group
        first_head = SelectedUnit.of(self.config, a, work.unit_idx).number * group
        if const_expr(group == 1):
            largest = cute.arch.fmax(work.max_logits[0], work.max_logits[1])
            raise_max_logit_by_warp(a.mMaxLogits, first_head, largest)
        else:
            for r in cutlass.range_constexpr(2):
                logit = work.max_logits[r]
                for lanes in cutlass.range_constexpr(1, 3):
                    logit = cute.arch.fmax(logit, cute.arch.shuffle_sync_bfly(logit, lanes))
                if work.thread % 4 == 0:
                    head = first_head + rows_and_columns(work.cS)[r, 0][0] % group
                    raise_max_logit(a.mMaxLogits, head, logit)

    def _work(self, work: ItemWork) -> "_Work":
        """Adds operands and accumulators of O, and what rows keep."""
        c, mma_O = self.config, work.mmas.O
        return _Work(
            **vars(work),
            tOrV=mma_O.make_fragment_B(mma_O.get_slice(0).partition_B(transposed(work.shared.sV))),
            acc_O=cute.make_rmem_tensor(
                mma_O.get_slice(work.thread).partition_shape_C((TILE_ROWS, c.tile_dv)), Float32
            ),
            softmax=OnlineSoftmax(2, work.scales.log2, is_natural=False),
            max_logits=cute.make_rmem_tensor(2, Float32) if c.features.max_logits else None,
        )

    @cute.jit
    def tile(self, work: "_Work", num_picks: Int32, step: Int32) -> None:
        """A tile of so many picks, which fewer than a whole one's have copies of the last behind them."""
        c, shared, thread, acc_S, acc_O = self.config, work.shared, work.thread, work.acc_S, work.acc_O
        ring = shared.q_ring(work.warpgroup)
        ring.wait_full(step)  # from the warpgroup's producer warp: Q and entries
        stage = ring.stage(step)
        gemm(work.mmas.S, acc_S, work.tSrQ[None, None, None, stage], work.tSrK, is_first=True)
        entries = shared.entries[None, stage, work.warpgroup]
        rows = [rows_and_columns(work.cS)[r, 0][0] for r in range(2)]
        picks = [entries[row // c.group] for row in rows]
        stored = self.entries_of_lanes(entries, thread)  # for the first warp, which stores
        visible = self.visible_keys(work, rows, picks, stage)
        warpgroup.wait_group(0)
        ring.release(step)  # to the producer warp
        if const_expr(c.features.softcap):
            if const_expr(c.features.max_logits):
                scale = work.arguments.numbers.softmax_scale
                self.mask_hidden(work, visible, hidden(scale))
                raise_logits(work.max_logits, acc_S, scale)
            cap(acc_S, work.scales.tanh)
        self.mask_hidden(work, visible, hidden(work.scales.log2))
        work.softmax.reset()
        work.softmax.step(acc_S, work.rP, acc_O, True)
        if const_expr(c.features.max_logits and not c.features.softcap):  # else row_max is of capped scores
            for r in cutlass.range_constexpr(2):
                work.max_logits[r] = cute.arch.fmax(work.max_logits[r], work.softmax.row_max[r] * LN2)
        shared.v_ring.wait_full(Int32(0))  # from warp 0
        gemm(work.mmas.O, acc_O, as_operand_a(work.rP), work.tOrV, is_first=True)
        warpgroup.wait_group(0)
        lse, mLSE, unit_idx = cute.make_rmem_tensor(2, Float32), work.parts, work.unit_idx
        work.softmax.finish(acc_O, lse, None)
        for r in cutlass.range_constexpr(2):
            if thread % 4 == 0 and rows[r] // c.group < num_picks:
                mLSE[unit_idx, Int64(picks[r]), rows[r] % c.group] = lse[r] * LOG2_E
        self._store(work, stored, num_picks)

    @cute.jit
    def _store(self, work: "_Work", entries: Constexpr, num_picks: Int32) -> None:
        """Stores the partial out of a tile's picks, ``entries_of_lanes``, through shared memory and TMA."""
        tO, sO = work.tma.O, work.shared.sO[None, None, work.warpgroup]
        rO = cute.make_rmem_tensor_like(work.acc_O, self.dtype)
        convert(work.acc_O, rO)
        stores = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
        together = {"barrier_id": _BARRIER_EPILOGUE + work.warpgroup, "number_of_threads": 128}
        if stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(**together)  # the last tile's O has left shared memory
        write(rO, work.mmas.O, sO, work.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(**together)
        if stores:
            self.store_picks(tO, sO, 0, work.unit_idx, entries, num_picks)
            cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class _Work(ItemWork):
    """An mma warpgroup's operands, accumulators and state."""

    tOrV: cute.Tensor  # (MMA, 1, MMA_K)
    acc_O: cute.Tensor
    softmax: OnlineSoftmax
    max_logits: cute.Tensor | None  # of the heads of this thread's rows, over the item
