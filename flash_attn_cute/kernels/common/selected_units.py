"""Units of a selection's pass: the heads of a batch entry that select together and are rows of one tile."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from flash_attn_cute.kernels.arguments import SelectionArguments


@dataclass(frozen=True)
class SelectedUnit:
    """A unit, and where its selection is."""

    config: cutlass.Constexpr
    batch: Int32
    number: Int32  # among those of the batch entry
    set: Int32  # of selections

    @staticmethod
    def of(config: Any, a: SelectionArguments, unit_idx: Int32) -> "SelectedUnit":
        """The unit of that number in a launch."""
        n, units = a.numbers, a.mQ.shape[-2] // config.group
        batch, number = (n.first_unit + unit_idx) // units, (n.first_unit + unit_idx) % units
        return SelectedUnit(config, batch, number, batch % n.sets_batch * n.sets_heads + number * n.sets_heads // units)

    def head_and_entry(self, in_group: Int32) -> tuple[Int32, Int32]:
        """A head of the unit among all heads, and the batch entry in tensors: 0 if packed."""
        entry = Int32(0) if self.config.features.packed else self.batch
        return self.number * self.config.group + in_group, entry
