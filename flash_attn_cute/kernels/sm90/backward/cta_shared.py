"""Shared memory of the backward kernel up to d = 128: layouts, storage and barriers (see ``cta``)."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from flash_attn_cute.kernels.common.key_tiles import NUM_FIELDS, WorkTileBroadcast
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.score_rows import SharedBias
from flash_attn_cute.kernels.sm90.config import BackwardCtaConfig
from flash_attn_cute.kernels.sm90.shared import swizzled

TILE_STAGES = 2
STEP_STAGES = 4  # warp 0 publishes a step when dQ of the step four before has been read


UNORDERED = -1  # in the place of a turn: integers are added


class StepFields(NamedTuple):
    """Fields of a step that warp 0 publishes. The last three exist under a mask alone, for the mma warpgroups."""

    block: Int32  # of dQ, counted over all heads, or if it has several sums, which of all
    turn: Int32  # the tile's, to add to it, or ``UNORDERED``
    m_block: Int32
    nth: Int32  # head of the tile
    code: Int32 | None  # where the bits are that hide scores (``common.block_lists``)


class Layouts(NamedTuple):
    """Layouts of the operands."""

    sK: cute.ComposedLayout  # (64, d, warpgroup, stage)
    sV: cute.ComposedLayout  # (64, d, warpgroup)
    sQ: cute.ComposedLayout  # (tile_m, d, stage)
    sdO: cute.ComposedLayout  # (tile_m, d, stage)
    sdS: cute.ComposedLayout  # (64, tile_m, warpgroup, 2), or if dQ is transposed (tile_m, 64, warpgroup, 2)
    sOut: cute.ComposedLayout  # (64, d, warpgroup)


def layouts_of(config: BackwardCtaConfig, dtype: type) -> Layouts:
    """How operands lie in shared memory."""
    c, warpgroups = config, config.num_mma_warpgroups
    dS = (c.tile_m, 64) if c.transposes_dQ else (64, c.tile_m)
    return Layouts(
        # No swizzled atom of K may hold columns of two parts of dQ.
        sK=swizzled(dtype, 64 if c.transposes_dQ else c.columns_dQ, (64, c.tile_d, warpgroups, c.k_stages)),
        sV=swizzled(dtype, c.tile_d, (64, c.tile_d, warpgroups)),
        sQ=swizzled(dtype, c.tile_d, (c.tile_m, c.tile_d, c.stages)),
        sdO=swizzled(dtype, c.tile_d, (c.tile_m, c.tile_d, c.stages)),
        sdS=swizzled(dtype, 64 if c.transposes_dQ else c.tile_m, (*dS, warpgroups, 2)),
        sOut=_apart(swizzled(dtype, c.tile_d, (64, c.tile_d)), warpgroups, _out_elements(c)),
    )


def _out_elements(config: BackwardCtaConfig) -> int:
    """Elements in whose place a warpgroup's part of dQ is, in float32; dV and dK are no more."""
    return 2 * 64 * config.columns_dQ


def _apart(layout: cute.ComposedLayout, number: int, stride: int) -> cute.ComposedLayout:
    """The layout so many times, so many elements apart, in a last mode."""
    outer = cute.append(layout.outer, cute.make_layout(number, stride=stride))
    return cute.make_composed_layout(layout.inner, layout.offset, outer)


def num_step_fields(config: BackwardCtaConfig) -> int:
    """Int32 in shared memory that describe a step."""
    return 5 if config.features.listed else 2


def storage_of(config: BackwardCtaConfig, dtype: type, layouts: Layouts) -> type:
    """All shared memory of a CTA."""
    c = config

    @cute.struct
    class Storage:
        tile_barriers: cute.struct.MemRange[Int64, 2 * TILE_STAGES]
        k_barriers: cute.struct.MemRange[Int64, 2 * c.k_stages]
        v_barriers: cute.struct.MemRange[Int64, 2]
        q_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
        do_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
        ds_barriers: cute.struct.MemRange[Int64, 2]
        out_barriers: cute.struct.MemRange[Int64, 2 * c.num_mma_warpgroups]
        bias_barriers: cute.struct.MemRange[Int64, 2 * c.bias_stages if c.bias_pitch else 0]
        step_barriers: cute.struct.MemRange[Int64, 2 * STEP_STAGES]
        tile_fields: cute.struct.MemRange[Int32, NUM_FIELDS * TILE_STAGES]
        step_fields: cute.struct.MemRange[Int32, num_step_fields(c) * STEP_STAGES]
        bias: cute.struct.Align[cute.struct.MemRange[Uint8, c.bias_stages * c.bias_rows * c.bias_pitch], 16]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, c.numbers_a_query * c.tile_m * c.stages], 128]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
        sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
        sdO: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO)], 1024]
        sdS: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdS)], 1024]
        sOut: cute.struct.Align[cute.struct.MemRange[dtype, c.num_mma_warpgroups * _out_elements(c)], 1024]

    return Storage


@dataclass(frozen=True)
class Shared(WorkTileBroadcast):
    """Shared memory and what guards it."""

    sK: cute.Tensor  # (64, d, warpgroup, stage)
    sV: cute.Tensor  # (64, d, warpgroup)
    sQ: cute.Tensor  # (tile_m, d, stage)
    sdO: cute.Tensor  # (tile_m, d, stage)
    sdS: cute.Tensor  # (64, tile_m, warpgroup, 2), or if dQ is transposed (tile_m, 64, warpgroup, 2)
    sOut: cute.Tensor  # (64, d, warpgroup): dV or dK on its way out
    sums: cute.Pointer  # the same place, for dQ: 64 rows of its columns a warpgroup
    stats: cute.Tensor  # (tile_m, lse, delta and what units dQ is in, stage)
    tile_fields: cute.Tensor  # (field, stage of tiles)
    step_fields: cute.Tensor  # (field, stage of steps)
    tiles: Ring
    steps: Ring
    k: Ring
    v: Ring
    ds_barriers: cute.Pointer
    out_barriers: cute.Pointer
    q: Ring
    do: Ring
    bias: SharedBias

    def out(self, warpgroup: Int32) -> Ring:
        """Ring that guards a warpgroup's part of sOut."""
        return Ring(self.out_barriers + 2 * warpgroup, 1)

    def publish_step(self, step: Int32, info: StepFields) -> None:
        """Publishes a step's fields, by one thread of warp 0, before it announces Q."""
        for i in range(self.step_fields.shape[0]):
            self.step_fields[i, self.steps.stage(step)] = info[i]
        cute.arch.mbarrier_arrive(self.steps.full(step))  # to warps 1 and 2

    def read_step(self, step: Int32) -> tuple[Int32, Int32]:
        """Block and turn of a step, for a role that has waited for the step, or that has its dQ."""
        return self.step_fields[0, self.steps.stage(step)], self.step_fields[1, self.steps.stage(step)]

    def read_scores_step(self, step: Int32) -> tuple[Int32, Int32, Int32]:
        """Under a mask, for a role that has Q: m_block, head and code of a step."""
        m_block, nth, code = (self.step_fields[i, self.steps.stage(step)] for i in range(2, 5))
        return m_block, nth, code


def piece_number(step: Int32, tile_idx: Int32) -> Int32:
    """Number of the next piece that a warpgroup puts out, in a step or behind it.

    dQ is a step late; dV and dK come once a tile. Where shared memory has one stage of K, the tile's last dQ comes
    before dV and dK. Where dV and dK are float32 they are no pieces, but are counted all the same: two more or less
    make no difference to a ring of one stage.
    """
    return step - 1 + 2 * tile_idx
