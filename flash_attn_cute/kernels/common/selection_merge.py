"""Merges what the blocks that a query selects give alone, by their lse: the end of a selection's forward pass.

out = sum of w O over the query's picks, where w = exp(lse of a pick - lse), and lse is logsumexp of those. A pick's O
has been divided by its row sum. Sinks are one more logit. Picks are taken in the order of the query's blocks, 32 ranks
at a time: a rank's lse is read by one lane, and what has been added is scaled to the new maximum.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.arguments import SelectionArguments
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.picked_rows import VECTOR, PickedRows
from flash_attn_cute.kernels.common.rows import numbers_first, rows_first
from flash_attn_cute.kernels.common.selection_tables import SelectionTables
from flash_attn_cute.kernels.common.softmax import finalize
from flash_attn_cute.kernels.selection import LANES


class SelectionMerge:
    """The merging kernel: a lane for 16 bytes of a row of out."""

    def __init__(self, config: Any):
        self.config = config
        self.rows = PickedRows(config, config.tile_dv)

    @cute.jit
    def __call__(self, a: SelectionArguments, tables: SelectionTables, parts: dict[str, cute.Tensor], stream) -> None:
        """Launches the kernel behind the one that has filled ``parts`` (``kernels.selection.workspace_parts``)."""
        self.kernel(a, tables.mColumns, parts["mOut"], parts["mLSE"]).launch(
            **self.rows.shape_of_launch(a), stream=stream
        )

    @cute.kernel
    def kernel(self, a: SelectionArguments, mColumns: cute.Tensor, mOut: cute.Tensor, mLSE: cute.Tensor) -> None:
        c, n, packed, place = self.config, a.numbers, self.config.features.packed, self.rows.place(a)
        if place.unit_idx < n.num_units:
            lse_of, out_of = (self.rows.of_row(a, x, place) for x in (mLSE, mOut))
            row_max, total = cute.make_rmem_tensor(self.rows.heads, Float32), cute.make_rmem_tensor(VECTOR, Float32)
            row_max.fill(-Float32.inf)
            total.fill(0.0)
            row_sum, own_max = Float32(0.0), -Float32.inf
            for first in cutlass.range(0, n.top, LANES, unroll=1):
                picks = self.rows.picks(a, mColumns, place, first)
                weights, own_max, scale = self._weights(lse_of, place, n, first, picks, row_max)
                row_sum *= scale
                for i in cutlass.range_constexpr(VECTOR):
                    total[i] *= scale
                row_sum = self.rows.add(total, out_of, DTYPES[c.dtype], place, first, picks, row_sum, weights)
            head, entry = place.unit.head_and_entry(place.in_group)
            sink = a.mSink[head] if const_expr(a.mSink is not None) else None
            factor, lse = finalize(row_sum, own_max, sink, False)
            is_padding = mColumns[place.unit.set, place.row * n.top] > n.columns  # which has no sink either
            lse = -Float32.inf if is_padding else lse
            row, gLSE = n.first_row + place.row, numbers_first(a.mLSE, packed)[None, head, entry]
            gO = rows_first(a.mO, packed)[row, None, head, entry]
            if place.has_head:
                if place.lane == 0:
                    gLSE[row] = lse
                self.rows.store(total, factor, gO, place)

    @cute.jit
    def _weights(
        self, lse_of: cute.Tensor, place: Constexpr, n: Any, first: Int32, picks: Int32, row_max: cute.Tensor
    ) -> tuple[list[Float32], Float32, Float32]:
        """Weights of the ranks from ``first`` on, one a lane, relative to the maxima so far, which are raised.

        Returns them for each of the warp's heads; and of the lane's head its maximum, and the factor of what was
        relative to the one before.
        """
        lane, weights, own_max, scale = cute.arch.lane_idx(), [], -Float32.inf, Float32(0.0)
        rank, is_pick = cutlass.min(first + lane, n.top - 1), picks >> lane & 1 != 0
        for i in cutlass.range_constexpr(self.rows.heads):
            lse = lse_of[rank, cutlass.min(place.first_head + i, self.config.group - 1)]
            lse = lse if is_pick else -Float32.inf
            largest = lse
            for j in cutlass.range_constexpr(LANES.bit_length() - 1):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << j))
            largest = cute.arch.fmax(largest, row_max[i])
            shift = largest if largest != -Float32.inf else Float32(0.0)
            weights.append(cute.math.exp2(lse - shift, fastmath=True))
            if place.in_group - place.first_head == i:
                own_max, scale = largest, cute.math.exp2(row_max[i] - shift, fastmath=True)
            row_max[i] = largest
        return weights, own_max, scale
