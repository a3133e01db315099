"""Units of a selection's pass: the heads of a batch entry that select together and are rows of one tile."""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32

from flash_attn_cute.kernels.arguments import SelectionArguments


@dataclass(frozen=True)
class SelectedUnit:
    """A unit, and where its selection is."""

    batch: Int32
    number: Int32  # among those of the batch entry
    set: Int32  # of selections

    @staticmethod
    def of(config: Any, a: SelectionArguments, unit_idx: Int32) -> "SelectedUnit":
        """The unit of that number in a launch."""
        n, units = a.numbers, a.mQ.shape[-2] // config.group
        batch, number = (n.first_unit + unit_idx) // units, (n.first_unit + unit_idx) % units
        return SelectedUnit(batch, number, batch % n.sets_batch * n.sets_heads + number * n.sets_heads // units)
