"""Preprocessing of a selection's backward pass: lse in base 2, and delta = rowsum(dO * O) - dlse, of every row.

A row without a visible key gets an lse of inf, so that its P is 0.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_cute.kernels.arguments import SelectionBackwardArguments
from flash_attn_cute.kernels.common.rows import numbers_first, rows_first
from flash_attn_cute.kernels.common.score import LOG2_E
from flash_attn_cute.kernels.common.selection_tables import SelectedUnit

_THREADS = 256
_VECTOR = 8  # columns of a thread at a time


class SelectionPreprocess:
    """The preprocessing kernel: a thread for each vector of 16 bytes of a row, and more up to a power of 2."""

    def __init__(self, config: Any):
        self.config = config
        self.lanes = 1 << (config.tile_dv // _VECTOR - 1).bit_length()

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
            if lane * _VECTOR < gO.shape[0]:
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
        o, do = (cute.make_rmem_tensor(_VECTOR, gO.element_type) for _ in range(2))
        for target, gX in ((o, gO), (do, gdO)):
            cute.autovec_copy(cute.local_tile(gX, (_VECTOR,), (lane,)), target)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(_VECTOR):
            # Where no key was seen O is 0, even if a sink gives an lse, and dO may be NaN.
            x = o[i].to(Float32)
            total += x * cutlass.select_(x != 0.0, do[i].to(Float32), Float32(0.0))
        return total
