"""Kernels ahead of a selection's backward kernel and behind it: lse and delta, and sums of what it leaves.

dQ is summed over the picks of a query, in the order of its blocks, and dK and dV over the items of a block, in the
order of its queries. The order follows from the selection alone, so the bits are the same in every run.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float16, Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import SelectionBackwardArguments
from flash_attn_cute.kernels.common.lengths import rows_of
from flash_attn_cute.kernels.common.picked_rows import VECTOR, PickedRows
from flash_attn_cute.kernels.common.rows import numbers_first, rows_first
from flash_attn_cute.kernels.common.score import LOG2_E
from flash_attn_cute.kernels.common.selection_tables import SelectedUnit, SelectionTables
from flash_attn_cute.kernels.selection import LANES

_THREADS = 256  # of a CTA, at the most
_FOUR = 4  # columns of dK and dV of a thread at a time


class SelectionPreprocess:
    """The preprocessing kernel: lse in base 2, and delta = rowsum(dO * O) - dlse, of every row.

    It has a thread for each vector of 16 bytes of a row, and more up to a power of 2. A row without a visible key gets
    an lse of inf, so that its P is 0.
    """

    def __init__(self, config: Any):
        self.config = config
        self.lanes = 1 << (config.tile_dv // VECTOR - 1).bit_length()

    @cute.jit
    def __call__(self, a: SelectionBackwardArguments, parts: dict[str, cute.Tensor], stream) -> None:
        """Launches the kernel, which fills lse and delta of the workspace."""
        rows = a.numbers.num_units * a.numbers.num_rows * self.config.group
        grid = [cute.ceil_div(rows, _THREADS // self.lanes), 1, 1]
        self.kernel(a, parts["mLSE"], parts["mDelta"]).launch(grid=grid, block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: SelectionBackwardArguments, mLSE: cute.Tensor, mDelta: cute.Tensor) -> None:
        n, group, packed = a.numbers, self.config.group, self.config.features.packed
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        index, lane = index * (_THREADS // self.lanes) + thread // self.lanes, thread % self.lanes
        row, unit_idx, in_group = index // group % n.num_rows, index // group // n.num_rows, index % group
        delta, lse = Float32(0.0), Float32.inf
        if unit_idx < n.num_units:
            head, entry = SelectedUnit.of(self.config, a, unit_idx).head_and_entry(in_group)
            gO, gdO = (rows_first(x, packed)[n.first_row + row, None, head, entry] for x in (a.mO, a.mdO))
            if lane * VECTOR < gO.shape[0]:
                delta = self._product(gO, gdO, lane)
            lse = numbers_first(a.mLSE, packed)[n.first_row + row, head, entry] * LOG2_E
            lse = lse if lse != -Float32.inf else Float32.inf
        for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            delta += cute.arch.shuffle_sync_bfly(delta, 1 << i)
        if unit_idx < n.num_units and lane == 0:
            if const_expr(a.mdLSE is not None):
                head, entry = SelectedUnit.of(self.config, a, unit_idx).head_and_entry(in_group)
                delta -= numbers_first(a.mdLSE, packed)[n.first_row + row, head, entry]
            mLSE[unit_idx, row, in_group] = lse
            mDelta[unit_idx, row, in_group] = delta if lse != Float32.inf else Float32(0.0)  # dlse may be NaN there

    @cute.jit
    def _product(self, gO: cute.Tensor, gdO: cute.Tensor, lane: Int32) -> Float32:
        """A lane's part of rowsum(dO * O)."""
        o, do = (cute.make_rmem_tensor(VECTOR, gO.element_type) for _ in range(2))
        for target, gX in ((o, gO), (do, gdO)):
            cute.autovec_copy(cute.local_tile(gX, (VECTOR,), (lane,)), target)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(VECTOR):
            # Where no key was seen O is 0, even if a sink gives an lse, and dO may be NaN.
            x = o[i].to(Float32)
            total += x * cutlass.select_(x != 0.0, do[i].to(Float32), Float32(0.0))
        return total


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
        together = math.lcm(config.tile_d // _FOUR, LANES)  # whole rows, and whole warps
        self.threads = _THREADS // together * together

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
            items = tables.mItemSpans[unit.set, column], tables.mItemSpans[unit.set, column + 1]
            if items[0] < items[1]:
                fields = tables.mItems[unit.set, items[0], None]
                sequence, first_key = fields[2], fields[3]
                k = rows_of(a.mK, a.mCuSeqlensK, None, sequence)  # to rows of padding items add zeros
                rows = cutlass.min(k.length - first_key, c.tile_n)
                for mX, mSums, scale in ((mdK, a.mdK, n.softmax_scale), (mdV, a.mdV, Float32(1.0))):
                    sums = rows_first(mSums, c.features.packed)[None, None, head, batch]
                    sums = cute.domain_offset((k.start + first_key, 0), sums)
                    self._add(mX[unit_idx, None, None], sums, items, rows, scale, thread)

    @cute.jit
    def _add(
        self, parts: cute.Tensor, sums: cute.Tensor, items: Constexpr, rows: Int32, scale: Float32, thread: Int32
    ) -> None:
        """Adds items, from a first one to one that is excluded, times a scale, to so many first rows of (rows, d)."""
        columns, of_item = parts.shape[1] // self.config.tile_n, self.config.sums_an_item
        for vector in cutlass.range(thread, parts.shape[1] // _FOUR, self.threads, unroll=1):
            row, column = vector * _FOUR // columns, vector * _FOUR % columns
            if row < rows and column < sums.shape[1]:
                total = cute.make_rmem_tensor(_FOUR, Float32)
                total.fill(0.0)
                for part in cutlass.range(items[0] * of_item, items[1] * of_item, unroll=4):
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
