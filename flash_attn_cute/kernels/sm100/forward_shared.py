"""Shared memory of the forward kernels, as their roles read it: ``forward_schedule`` describes all of it."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.query_tiles import QueryTile
from flash_attn_cute.kernels.common.ring import StepInfo
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.sm100.config import O_COLUMNS, PART_ROWS
from flash_attn_cute.kernels.sm100.forward_config import O_STAGES, ForwardConfig
from flash_attn_cute.kernels.sm100.tensor_memory import Held


@dataclass(frozen=True)
class Shared(Held):
    """Shared memory and what guards it."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor | None  # None, if O leaves through the place of Q
    tiles: cute.Tensor
    entries: StepInfo | None  # a block, and its code for each part
    iterator: cute.Tensor | None
    stats: cute.Tensor
    rings: Any  # those of the schedule, by name
    holder: cute.Pointer

    @classmethod
    def of(cls, memory: SharedMemory, storage: Any, **more: Any) -> "Shared":
        """Shared memory of a CTA, on the device, with more fields of a subclass."""
        names = ("sQ", "sK", "sV", "sO", "tiles", "iterator", "stats")
        rings = memory.rings(storage)
        entries = StepInfo.of(rings, memory.tensors(storage, "entries"))
        return cls(**memory.tensors(storage, *names), **entries, rings=rings, holder=storage.holder.data_ptr(), **more)

    def tile(self, config: ForwardConfig, step: Int32) -> QueryTile:
        """The tile of a step, as published; read where it is needed, to keep it out of registers."""
        return QueryTile.read(config, self.tiles[None, self.rings.tiles.stage(step)])

    @cute.jit
    def publish(self, tile: QueryTile, step: Int32) -> None:
        """Publishes a tile to the other roles, by the producer."""
        ring = self.rings.tiles
        ring.wait_empty(step)  # from all other roles: they are done with the stage's last tile
        with cute.arch.elect_one():
            tile.write(self.tiles[None, ring.stage(step)])
            cute.arch.mbarrier_arrive(ring.full(step))

    @cute.jit
    def publish_end(self, step: Int32) -> None:
        """Publishes the end of work to the other roles: a tile of no sequence."""
        ring = self.rings.tiles
        ring.wait_empty(step)  # as above
        with cute.arch.elect_one():
            self.tiles[0, ring.stage(step)] = Int32(-1)
            cute.arch.mbarrier_arrive(ring.full(step))

    def piece_of_O(self, part: Int32, piece: int, number: Int32) -> cute.Tensor:
        """Where 64 columns of a part's O are put, (128, 64); ``number`` counts what has been put so far."""
        if self.sO is not None:
            return self.sO[None, None, number % O_STAGES]
        return cute.local_tile(self.sQ[None, None, part], (PART_ROWS, O_COLUMNS), (0, piece))
