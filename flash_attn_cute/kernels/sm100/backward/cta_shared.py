"""Shared memory of the backward kernels, as their roles read it: ``backward_schedule`` describes all of it."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.key_tiles import WorkTileBroadcast
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.sm100.backward.backward_config import DQ_STAGES, BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_schedule import ADDING_WARPS
from flash_attn_cute.kernels.sm100.tensor_memory import Held


def piece_number(config: BackwardConfig, step: Int32, i: int) -> Int32:
    """Number of a step's i-th piece, counted over the steps of its adding warp."""
    return step // ADDING_WARPS * config.pieces_dQ + i


@dataclass(frozen=True)
class StepInfo:
    """Numbers that the producer publishes step by step."""

    ring: Ring
    numbers: cute.Tensor  # (number, stage)

    @cute.jit
    def publish(self, step: Int32, numbers: tuple[Int32, ...]) -> None:
        """Publishes the numbers of a step, by the producer, when all readers have released the stage."""
        self.ring.wait_empty(step)  # from those who read
        with cute.arch.elect_one():
            for i, number in enumerate(numbers):
                self.numbers[i, self.ring.stage(step)] = number
            cute.arch.mbarrier_arrive(self.ring.full(step))  # to them

    def read(self, step: Int32) -> tuple[Int32, ...]:
        """Reads the numbers of a step and releases its stage, once by each warp."""
        self.ring.wait_full(step)  # from the producer
        found = tuple(self.numbers[i, self.ring.stage(step)] for i in range(cute.size(self.numbers, mode=[0])))
        self.ring.release(step)  # to it
        return found


@dataclass(frozen=True)
class Shared(WorkTileBroadcast, Held):
    """Shared memory and what guards it."""

    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    dQ: cute.Tensor
    tile_fields: cute.Tensor
    tiles: Ring
    rings: Any  # those of the schedule, by name
    holder: cute.Pointer
    # Under a mask, a step's block of queries, its code and, with a bias, the head, to compute warps; and which block of
    # dQ, counted over all heads, it adds to, and its turn, to adding warps, whose steps are those that have a dQ.
    entries: StepInfo | None
    turns: StepInfo | None

    rank = 0  # of the CTA, among those of a tile

    @classmethod
    def of(cls, memory: SharedMemory, storage: Any, **more: Any) -> "Shared":
        """Shared memory of a CTA, on the device, with more fields of a subclass."""
        rings = memory.rings(storage)
        infos = memory.tensors(storage, "entries", "turns")
        return cls(
            **memory.tensors(storage, "sK", "sV", "sQ", "sdO", "sdS", "lse", "delta", "dQ", "tile_fields"),
            tiles=rings.tiles,
            rings=rings,
            holder=storage.holder.data_ptr(),
            **{name: None if x is None else StepInfo(getattr(rings, name), x) for name, x in infos.items()},
            **more,
        )

    def pieces(self, step: Int32) -> Ring:
        """Ring of dQ's pieces for the adding warp that has the step. Each adding warp has every other step."""
        return Ring(self.rings.pieces_even.barriers + 2 * DQ_STAGES * (step % ADDING_WARPS), DQ_STAGES)
