"""Sums of what a selection's backward kernel leaves: dQ over the picks of a query, dK and dV over the items of a block.

Both are added in an order that follows from the selection alone, and so with the same bits in every run: picks in the
order of a query's blocks, items in the order of a block's queries.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import SelectionBackwardArguments
from flash_attn_cute.kernels.common.lengths import rows_of
from flash_attn_cute.kernels.common.picked_rows import VECTOR, PickedRows
from flash_attn_cute.kernels.common.rows import rows_first
from flash_attn_cute.kernels.common.selection_tables import SelectedUnit, SelectionTables
from flash_attn_cute.kernels.selection import LANES, threads_of_rows

_FOUR = 4  # columns of dK and dV of a thread at a time


class SelectionQueryGradients:
    """The kernel of dQ: a lane for 8 columns of a row."""

    def __init__(self, config: Any):
        self.config = config
        self.rows = PickedRows(config, config.tile_d)

    @cute.jit
    def __call__(
        self, a: SelectionBackwardArguments, tables: SelectionTables, parts: dict[str, cute.Tensor], stream
    ) -> None:
        """Launches the kernel behind the one that has filled ``parts`` (``backward_workspace_parts``)."""
        kernel = self.kernel(a, tables.mColumns, parts["mdQ"], parts.get("mScale"))
        kernel.launch(**self.rows.shape_of_launch(a), stream=stream)

    @cute.kernel
    def kernel(
        self, a: SelectionBackwardArguments, mColumns: cute.Tensor, mdQ: cute.Tensor, mScale: cute.Tensor | None
    ) -> None:
        """Sums up some queries, in a lane a vector of one."""
        c, n, place = self.config, a.numbers, self.rows.place(a)
        if place.unit_idx < n.num_units:
            dQ_of, total = self.rows.of_row(a, mdQ, place), cute.make_rmem_tensor(VECTOR, Float32)
            scales = self.rows.of_row(a, mScale, place) if const_expr(mScale is not None) else None
            dtype = Float16 if const_expr(c.has_scaled_dQ) else Float32
            total.fill(0.0)
            for first in cutlass.range(0, n.top, LANES, unroll=1):
                picks = self.rows.picks(a, mColumns, place, first)
                self.rows.add(total, dQ_of, dtype, place, first, picks, Float32(0.0), scales=scales)
            if place.has_head:
                head, entry = place.unit.head_and_entry(place.in_group)
                gdQ = rows_first(a.mdQ, c.features.packed)[n.first_row + place.row, None, head, entry]
                self.rows.store(total, n.softmax_scale, gdQ, place)


class SelectionKeyGradients:
    """The kernel of dK and dV: a CTA a block of keys and key head, which adds to the sums of launches before."""

    def __init__(self, config: Any):
        self.config = config
        self.threads = threads_of_rows(config.tile_d // _FOUR)

    @cute.jit
    def __call__(
        self, a: SelectionBackwardArguments, tables: SelectionTables, parts: dict[str, cute.Tensor], stream
    ) -> None:
        heads = a.mK.shape[-2] * (1 if self.config.features.packed else a.mK.shape[0])
        self.kernel(a, tables, parts["mdK"], parts["mdV"]).launch(
            grid=[a.numbers.columns * heads, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, a: SelectionBackwardArguments, tables: SelectionTables, mdK: cute.Tensor, mdV: cute.Tensor
    ) -> None:
        c, n = self.config, a.numbers
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        column, index, heads = index % n.columns, index // n.columns, a.mK.shape[-2]
        head, batch = index % heads, index // heads
        units = a.mQ.shape[-2] // c.group  # of a batch entry
        of_head = units // heads
        first = batch * units + head * of_head - n.first_unit
        for unit_idx in cutlass.range(cutlass.max(first, 0), cutlass.min(first + of_head, n.num_units), unroll=1):
            unit = SelectedUnit.of(c, a, unit_idx)
            start, stop = tables.mItemSpans[unit.set, column], tables.mItemSpans[unit.set, column + 1]
            if start < stop:
                fields = tables.mItems[unit.set, start, None]
                sequence, first_key = fields[2], fields[3]
                k = rows_of(a.mK, a.mCuSeqlensK, None, sequence)  # to rows of padding items add zeros
                rows = cutlass.min(k.length - first_key, c.tile_n)
                for mX, mSums, scale in ((mdK, a.mdK, n.softmax_scale), (mdV, a.mdV, Float32(1.0))):
                    sums = rows_first(mSums, c.features.packed)[None, None, head, batch]
                    sums = cute.domain_offset((k.start + first_key, 0), sums)
                    self._add(mX[unit_idx, None, None], sums, start, stop, rows, scale, thread)

    @cute.jit
    def _add(
        self,
        parts: cute.Tensor,
        sums: cute.Tensor,
        start: Int32,
        stop: Int32,
        rows: Int32,
        scale: Float32,
        thread: Int32,
    ) -> None:
        """Adds items start .. stop, times a scale, to the first so many rows of the sums (rows, d)."""
        columns, of_item = parts.shape[1] // self.config.tile_n, self.config.sums_an_item
        for vector in cutlass.range(thread, parts.shape[1] // _FOUR, self.threads, unroll=1):
            row, column = vector * _FOUR // columns, vector * _FOUR % columns
            if row < rows and column < sums.shape[1]:
                total = cute.make_rmem_tensor(_FOUR, Float32)
                total.fill(0.0)
                for part in cutlass.range(start * of_item, stop * of_item, unroll=4):
                    add(total, cute.local_tile(parts[Int64(part), None], (_FOUR,), (vector,)))
                target = cute.local_tile(sums[row, None], (_FOUR,), (column // _FOUR,))
                for i in cutlass.range_constexpr(_FOUR):
                    total[i] *= scale
                add(total, target)
                cute.autovec_copy(total, target)


@cute.jit
def add(total: cute.Tensor, vector: cute.Tensor) -> None:
    """Adds numbers in global memory to a thread's own."""
    numbers = cute.make_rmem_tensor(cute.size(total), Float32)
    cute.autovec_copy(vector, numbers)
    for i in cutlass.range_constexpr(cute.size(total)):
        total[i] += numbers[i]
