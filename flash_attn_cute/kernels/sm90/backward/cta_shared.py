"""Shared memory of the backward kernel up to d = 128, as its roles read it (``cta_schedule`` describes it)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.key_tiles import WorkTileBroadcast
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.score_rows import SharedBias
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardCtaConfig

UNORDERED = 1  # in the place of a turn, in fixed point: integers are added


class StepFields(NamedTuple):
    """Fields of a step that warp 0 publishes. The last three exist under a mask alone, for the mma warpgroups."""

    block: Int32  # of dQ, counted over all heads
    turn: Int32  # the tile's, to add to it; in fixed point how many tiles have yet to add, negative, or ``UNORDERED``
    m_block: Int32
    nth: Int32  # head of the tile
    code: Int32 | None  # where the bits are that hide scores (``common.block_lists``)


@dataclass(frozen=True)
class Shared(WorkTileBroadcast):
    """Shared memory and what guards it."""

    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    sOut: cute.Tensor  # dV or dK on its way out
    sBiasTile: cute.Tensor | None  # of a bias that TMA loads
    sums: cute.Pointer  # the same place, for dQ: 64 rows of its columns a warpgroup
    stats: cute.Tensor
    tile_fields: cute.Tensor
    step_fields: cute.Tensor
    tiles: Ring
    rings: Any  # those of the schedule, by name
    bias: SharedBias
    added_blocks: cute.Tensor | None = None  # (warpgroup, stage): blocks to signal, which a storing warp has added to

    @staticmethod
    def of(config: BackwardCtaConfig, a: BackwardArguments, memory: SharedMemory, storage: Any) -> "Shared":
        """Shared memory of a CTA, on the device."""
        rings = memory.rings(storage)
        tensors = ("sK", "sV", "sQ", "sdO", "sdS", "sOut", "stats", "tile_fields", "step_fields")
        tensors += ("added_blocks",) if config.signals_apart else ()
        tiled = memory.tensors(storage, "sBiasTile") if config.features.tiled_bias else {"sBiasTile": None}
        return Shared(
            **memory.tensors(storage, *tensors),
            **tiled,
            tiles=rings.tiles,
            rings=rings,
            sums=cute.recast_ptr(storage.sOut.data_ptr(), dtype=Float32),
            bias=SharedBias.of(config, a, memory, storage),
        )

    def out(self, warpgroup: Int32) -> Ring:
        """Ring that guards a warpgroup's part of sOut: ``out_1``, or the one behind it."""
        stages = self.rings.out_1.stages
        return Ring(self.rings.out_1.barriers + 2 * stages * warpgroup, stages)

    def added(self, warpgroup: Int32 | int) -> Ring:
        """Ring of a storing warp's additions that warp 3 has to signal: ``added_1``, or the one behind it."""
        stages = self.rings.added_1.stages
        return Ring(self.rings.added_1.barriers + 2 * stages * warpgroup, stages)

    def out_tile(self, warpgroup: Int32, piece: Int32) -> cute.Tensor:
        """Place in sOut of dV or dK that a warpgroup puts out as a piece of that number."""
        return self.sOut[None, None, warpgroup if self.rings.out_1.stages == 1 else self.rings.out_1.stage(piece)]

    def publish_step(self, step: Int32, info: StepFields) -> None:
        """Publishes a step's fields, by one thread of warp 0, before it announces Q."""
        for i in range(self.step_fields.shape[0]):
            self.step_fields[i, self.rings.steps.stage(step)] = info[i]
        cute.arch.mbarrier_arrive(self.rings.steps.full(step))  # to warps 1 and 2

    def read_step(self, step: Int32) -> tuple[Int32, Int32]:
        """Block and turn of a step, for a role that has waited for the step, or that has its dQ."""
        return self.step_fields[0, self.rings.steps.stage(step)], self.step_fields[1, self.rings.steps.stage(step)]

    def read_scores_step(self, step: Int32) -> tuple[Int32, Int32, Int32]:
        """Under a mask, for a role that has Q: m_block, head and code of a step."""
        m_block, nth, code = (self.step_fields[i, self.rings.steps.stage(step)] for i in range(2, 5))
        return m_block, nth, code
