"""Shared memory of the backward kernel above d = 128, as its roles read it (``cluster_schedule`` describes it)."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.semaphores import OrderedAdds
from flash_attn_cute.kernels.common.storage import SharedMemory


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it."""

    sK: cute.Tensor
    sK_peer: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    sP: cute.Tensor
    dS: cute.Pointer  # sdS without its swizzle
    stats: cute.Tensor
    rings: Any  # those of the schedule, by name
    order: OrderedAdds  # if deterministic
    rank: Int32  # of this CTA

    @staticmethod
    def of(memory: SharedMemory, storage: Any, rank: Int32) -> "Shared":
        """Shared memory of a CTA, on the device."""
        rings = memory.rings(storage)
        return Shared(
            **memory.tensors(storage, "sK", "sK_peer", "sV", "sQ", "sdO", "sdS", "sP", "stats"),
            rings=rings,
            dS=storage.sdS.data_ptr(),
            order=OrderedAdds(rings.order, rings.added, memory.tensors(storage, "turns")["turns"]),
            rank=rank,
        )
