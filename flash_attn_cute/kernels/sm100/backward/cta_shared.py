"""Shared memory of the backward kernels, as their roles read it: ``backward_schedule`` describes all of it."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_attn_cute.kernels.common.key_tiles import WorkTileBroadcast
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.sm100.backward.backward_schedule import ADDING_WARPS
from flash_attn_cute.kernels.sm100.config import DQ_STAGES, BackwardConfig


@dataclass(frozen=True)
class Rings:
    """Pipelines of the schedule, by name; None for those that a configuration does without."""

    tiles: Ring
    k: Ring
    v: Ring
    q: Ring
    do: Ring
    scores: Ring
    dp: Ring | None
    dq: Ring
    pieces_even: Ring  # of even steps; the others are behind
    pieces_odd: Ring
    dv: Ring
    dk: Ring
    # Under a mask.
    entries: Ring | None
    turns: Ring | None
    # Of a pair.
    k_columns: Ring | None
    q_columns: Ring | None
    do_columns: Ring | None
    p: Ring | None
    exchange: Ring | None
    stats: Ring | None
    keys: Ring | None

    def pieces(self, step: Int32) -> Ring:
        """Ring of dQ's pieces for the adding warp that has the step. Each adding warp has every other step."""
        return Ring(self.pieces_even.barriers + 2 * DQ_STAGES * (step % ADDING_WARPS), DQ_STAGES)

    @cute.jit
    def put_out(self, config: cutlass.Constexpr, step: Int32, i: cutlass.Constexpr) -> None:
        """By a drain warp: a step's i-th piece of dQ is there."""
        for which, ring in enumerate((self.pieces_even, self.pieces_odd)):
            if step % ADDING_WARPS == which:
                ring.arrive(piece_number(config, step, i))  # to the adding warp whose step it is


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
class Shared(WorkTileBroadcast):
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
    rings: Rings
    holder: cute.Pointer  # of where tensor memory begins
    # Under a mask, a step's block of queries, its code and, with a bias, the head, to compute warps; and which block of
    # dQ, counted over all heads, it adds to, and its turn, to adding warps, whose steps are those that have a dQ.
    entries: StepInfo | None
    turns: StepInfo | None

    rank = 0  # of the CTA, among those of a tile

    @classmethod
    def of(cls, memory: SharedMemory, storage: Any, **more: Any) -> "Shared":
        """Shared memory of a CTA, on the device, with more fields of a subclass."""
        rings = Rings(**memory.rings(storage))
        infos = memory.tensors(storage, "entries", "turns")
        return cls(
            **memory.tensors(storage, "sK", "sV", "sQ", "sdO", "sdS", "lse", "delta", "dQ", "tile_fields"),
            tiles=rings.tiles,
            rings=rings,
            holder=storage.holder.data_ptr(),
            **{name: None if x is None else StepInfo(getattr(rings, name), x) for name, x in infos.items()},
            **more,
        )

    @property
    def tensor_memory(self) -> cute.Pointer:
        """Where it begins, read every time: one register for all roles would live too long."""
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self.holder)
