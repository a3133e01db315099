"""Kernels that add up what the picks of a query have left: their threads, and their loop over the picks.

A lane has a vector of 8 columns of a row, and a warp the rows of one query, for some heads of its unit. A warp reads
the columns of 32 ranks at a time, and a ballot finds those with a pick: what the other ranks would have is not read.
Such a kernel reads each number once, so memory bounds it, as long as enough bytes are on their way: a lane loads the
vectors of the next picks before it adds the last ones.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.common.rows import rounded
from flash_attn_cute.kernels.common.selection_tables import SelectedUnit
from flash_attn_cute.kernels.selection import LANES, SCALED_COLUMNS

VECTOR = 8  # columns of a thread
_WARPS = 8  # of a CTA
_TOGETHER = 4  # picks whose vectors are on their way at a time


@dataclass(frozen=True)
class Place:
    """A warp's query and heads, and a lane's vector."""

    unit_idx: Int32  # of the launch; behind the last one if the warp has no query
    row: Int32  # of the launch
    unit: SelectedUnit
    first_head: Int32  # of the warp's, in the group
    in_group: Int32  # the lane's head
    lane: Int32  # of the head's row; a row may have fewer vectors
    has_head: Boolean  # else the lane has the last head of the group once more


class PickedRows:
    """Rows of so many columns, for each head of a group, as warps have them: as many heads as a warp has lanes for."""

    def __init__(self, config: Any, columns: int):
        self.config = config
        self.vectors = columns // VECTOR  # of a row
        self.lanes = 1 << (self.vectors - 1).bit_length()  # of a row
        self.heads = LANES // self.lanes  # of a warp
        self.warps = -(-config.group // self.heads)  # of a query

    def shape_of_launch(self, a: Any) -> dict[str, list[Int32 | int]]:
        """Grid and block of a kernel for all rows of a launch."""
        warps = a.numbers.num_units * a.numbers.num_rows * self.warps
        return {"grid": [cute.ceil_div(warps, _WARPS), 1, 1], "block": [_WARPS * LANES, 1, 1]}

    @cute.jit
    def place(self, a: Any) -> Place:
        index, _, _ = cute.arch.block_idx()
        index, lane = index * _WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        query, first_head = index // self.warps, index % self.warps * self.heads
        unit_idx, head = query // a.numbers.num_rows, first_head + lane // self.lanes
        return Place(
            unit_idx=unit_idx,
            row=query % a.numbers.num_rows,
            unit=SelectedUnit.of(self.config, a, unit_idx),
            first_head=first_head,
            in_group=cutlass.min(head, self.config.group - 1),
            lane=lane % self.lanes,
            has_head=head < self.config.group,
        )

    @cute.jit
    def picks(self, a: Any, mColumns: cute.Tensor, place: Constexpr, first: Int32) -> Int32:
        """Bits of the ranks ``first`` .. ``first`` + 32 with a pick, by all lanes of a warp."""
        rank, n = first + cute.arch.lane_idx(), a.numbers
        column = mColumns[place.unit.set, place.row * n.top + cutlass.min(rank, n.top - 1)]
        return cute.arch.vote_ballot_sync(rank < n.top and column < n.columns)

    def of_row(self, a: Any, mX: cute.Tensor, place: Place) -> cute.Tensor:
        """Rows of mX (unit, pick, ...), of more than 2^31 numbers, by the ranks of the warp's query: (rank, ...)."""
        of_unit = mX[place.unit_idx, None, None]
        return cute.domain_offset((Int64(place.row * a.numbers.top), 0), of_unit)

    @cute.jit
    def store(self, total: cute.Tensor, factor: Float32, gX: cute.Tensor, place: Constexpr) -> None:
        """Stores the lane's vector, times a factor and rounded, in a row, if the row has it."""
        if place.lane * VECTOR < gX.shape[0]:
            words, vector = rounded(total, factor, gX.element_type), cute.local_tile(gX, (VECTOR,), (place.lane,))
            cute.autovec_copy(words, cute.recast_tensor(vector, Int32))

    @cute.jit
    def add(
        self,
        total: cute.Tensor,
        mX: cute.Tensor,
        dtype: Constexpr,
        place: Constexpr,
        first: Int32,
        picks: Int32,
        row_sum: Float32,
        weights: Constexpr = None,
        scales: cute.Tensor | None = None,
    ) -> Float32:
        """Adds the vectors of some picks, times their weights, in ascending order; all lanes of a warp call it.

        ``picks`` has bits of ranks from ``first`` on. mX has rows (rank, numbers of 4 bytes, one or two of ``dtype``)
        of the query, for the heads of its group. ``weights`` has, for each of the warp's heads, one number a lane, the
        weight of a rank. ``scales`` has (rank, numbers) of the query, by 64 columns and heads. Without either, weights
        are 1. Those of the lane's head are added to ``row_sum``, which is returned.
        """
        ranks = cute.make_rmem_tensor(_TOGETHER, Int32)  # of the vectors, -1 of none
        vectors = [cute.make_rmem_tensor(VECTOR * dtype.width // 32, Float32) for _ in range(_TOGETHER)]
        factors = cute.make_rmem_tensor(_TOGETHER, Float32)
        left, loaded = picks, (vectors, factors, ranks)
        source = [None if const_expr(x is None) else cute.domain_offset((first, 0), x) for x in (mX, scales)]
        for i in cutlass.range_constexpr(_TOGETHER):
            left = self._load(loaded, i, source, place, left)
        for _ in cutlass.range(cute.ceil_div(cute.arch.popc(picks), _TOGETHER), unroll=1):
            for i in cutlass.range_constexpr(_TOGETHER):
                rank, numbers = ranks[i], cute.recast_tensor(vectors[i], dtype)
                weight = self._weight(weights, rank, place) if const_expr(weights is not None) else factors[i]
                weight = weight if rank >= 0 else Float32(0.0)
                row_sum += weight
                for j in cutlass.range_constexpr(VECTOR):
                    total[j] += weight * numbers[j].to(Float32)
                left = self._load(loaded, i, source, place, left)
        return row_sum

    @cute.jit
    def _load(self, loaded: Constexpr, i: Constexpr, source: Constexpr, place: Constexpr, picks: Int32) -> Int32:
        """Loads the lane's vector of the first of some picks, or zeros if there are none, and returns the others."""
        (vectors, factors, ranks), (numbers, scales) = loaded, source
        vector = vectors[i]
        ranks[i] = cute.arch.popc(~picks & (picks - 1)) if picks != 0 else Int32(-1)
        factors[i] = 1.0
        if picks != 0:
            lane = cutlass.min(place.lane, self.vectors - 1)
            number = place.in_group * self.vectors + lane
            cute.autovec_copy(cute.local_tile(numbers[ranks[i], None], (cute.size(vector),), (number,)), vector)
            if const_expr(scales is not None):
                factors[i] = scales[ranks[i], lane // (SCALED_COLUMNS // VECTOR) * self.config.group + place.in_group]
        else:
            vector.fill(0.0)  # not the last pick's, which may be infinite
        return picks & (picks - 1)

    @cute.jit
    def _weight(self, weights: Constexpr, rank: Int32, place: Constexpr) -> Float32:
        """The weight of a rank, for the lane's head."""
        found = cute.arch.shuffle_sync(weights[0], rank)
        for i in cutlass.range_constexpr(1, self.heads):
            other = cute.arch.shuffle_sync(weights[i], rank)
            found = other if place.in_group - place.first_head == i else found
        return found
