"""Shared memory of the forward kernels, as their roles read it: ``forward_schedule`` describes all of it."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.sm100.config import O_COLUMNS, PART_ROWS
from flash_attn_cute.kernels.sm100.forward_config import O_STAGES
from flash_attn_cute.kernels.sm100.tensor_memory import Held


@dataclass(frozen=True)
class Shared(Held):
    """Shared memory and what guards it."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor | None  # None, if O leaves through the place of Q
    tiles: cute.Tensor
    entries: cute.Tensor | None
    iterator: cute.Tensor | None
    stats: cute.Tensor
    rings: Any  # those of the schedule, by name
    holder: cute.Pointer

    @classmethod
    def of(cls, memory: SharedMemory, storage: Any, **more: Any) -> "Shared":
        """Shared memory of a CTA, on the device, with more fields of a subclass."""
        names = ("sQ", "sK", "sV", "sO", "tiles", "entries", "iterator", "stats")
        rings = memory.rings(storage)
        return cls(**memory.tensors(storage, *names), rings=rings, holder=storage.holder.data_ptr(), **more)

    def piece_of_O(self, part: Int32, piece: int, number: Int32) -> cute.Tensor:
        """Where 64 columns of a part's O are put, (128, 64); ``number`` counts what has been put so far."""
        if self.sO is not None:
            return self.sO[None, None, number % O_STAGES]
        return cute.local_tile(self.sQ[None, None, part], (PART_ROWS, O_COLUMNS), (0, piece))
