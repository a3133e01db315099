"""Merges what the blocks that a query selects give alone, by their lse: the end of a selection's forward pass.

out = sum of w O over the query's picks, where w = exp(lse of a pick - lse), and lse is logsumexp of those. A pick's O
has been divided by its row sum. Sinks are one more logit. Picks are taken in the order of the query's blocks.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import SelectionArguments
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.rows import numbers_first, rounded, rows_first
from flash_attn_cute.kernels.common.selected_units import SelectedUnit
from flash_attn_cute.kernels.common.selection_tables import SelectionTables
from flash_attn_cute.kernels.common.softmax import finalize
from flash_attn_cute.kernels.selection import threads_of_rows

_VECTOR = 8  # columns of a thread


class SelectionMerge:
    """The merging kernel: so many threads a row of out as it has vectors of 16 bytes."""

    def __init__(self, config: Any):
        self.config = config
        self.lanes = config.tile_dv // _VECTOR
        self.threads = threads_of_rows(self.lanes)

    @cute.jit
    def __call__(self, a: SelectionArguments, tables: SelectionTables, parts: dict[str, cute.Tensor], stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel behind the one that has filled ``parts`` (``kernels.selection.workspace_parts``)."""
        n = a.numbers
        rows = n.num_units * n.num_rows * self.config.group
        grid = [cute.ceil_div(rows, self.threads // self.lanes), 1, 1]
        self.kernel(a, tables.mColumns, parts["mOut"], parts["mLSE"]).launch(
            grid=grid, block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, a: SelectionArguments, mColumns: cute.Tensor, mOut: cute.Tensor, mLSE: cute.Tensor) -> None:
        """Merges the picks of some rows."""
        n, group = a.numbers, self.config.group
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        index = index * (self.threads // self.lanes) + thread // self.lanes
        row, unit_idx = index // group % n.num_rows, index // group // n.num_rows
        if unit_idx < n.num_units:
            self._merge(a, mColumns, mOut, mLSE, unit_idx, row, index % group, thread % self.lanes)

    @cute.jit
    def _merge(
        self,
        a: SelectionArguments,
        mColumns: cute.Tensor,
        mOut: cute.Tensor,
        mLSE: cute.Tensor,
        unit_idx: Int32,
        row: Int32,
        in_group: Int32,
        lane: Int32,
    ) -> None:
        """Merges the picks of a unit's row of the launch, for a head of the group, into a vector of out."""
        c, n, packed = self.config, a.numbers, self.config.features.packed
        unit, pick = SelectedUnit.of(c, a, unit_idx), row * n.top
        columns = cute.domain_offset((pick,), mColumns[unit.set, None])
        lse_of = cute.domain_offset((Int64(pick),), mLSE[unit_idx, None, in_group])
        out_of = cute.domain_offset((Int64(pick), 0), mOut[unit_idx, None, None])  # of more than 2^31 numbers
        row_max, row_sum = -Float32.inf, Float32(0.0)
        for rank in cutlass.range(n.top, unroll=4):
            if columns[rank] < n.columns:
                row_max = cute.arch.fmax(row_max, lse_of[rank])
        shift = row_max if row_max != -Float32.inf else Float32(0.0)
        total = cute.make_rmem_tensor(_VECTOR, Float32)
        total.fill(0.0)
        for rank in cutlass.range(n.top, unroll=4):
            if columns[rank] < n.columns:
                weight = cute.math.exp2(lse_of[rank] - shift, fastmath=True)
                row_sum += weight
                vector = cute.local_tile(out_of[rank, None], (_VECTOR // 2,), (in_group * self.lanes + lane,))
                self._add(total, vector, weight)
        head = unit.number * c.group + in_group
        sink = a.mSink[head] if const_expr(a.mSink is not None) else None
        factor, lse = finalize(row_sum, row_max, sink, False)
        lse = lse if columns[0] <= n.columns else -Float32.inf  # of a row of padding, which has no sink either
        row, entry = n.first_row + row, Int32(0) if const_expr(packed) else unit.batch
        gLSE, gO = numbers_first(a.mLSE, packed)[None, head, entry], rows_first(a.mO, packed)[row, None, head, entry]
        if lane == 0:
            gLSE[row] = lse
        if lane * _VECTOR < gO.shape[0]:
            words = rounded(total, factor, gO.element_type)
            cute.autovec_copy(words, cute.recast_tensor(cute.local_tile(gO, (_VECTOR,), (lane,)), Int32))

    @cute.jit
    def _add(self, total: cute.Tensor, vector: cute.Tensor, weight: Float32) -> None:
        """Adds a vector of operands, two in 4 bytes, times a weight."""
        words = cute.make_rmem_tensor(_VECTOR // 2, Float32)
        cute.autovec_copy(vector, words)
        numbers = cute.recast_tensor(words, DTYPES[self.config.dtype])
        for i in cutlass.range_constexpr(_VECTOR):
            total[i] += weight * numbers[i].to(Float32)
