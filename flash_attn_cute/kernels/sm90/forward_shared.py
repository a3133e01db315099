"""Shared memory of the forward kernel (``forward``): layouts, storage, and the fields that roles read."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr, pipeline

from flash_attn_cute.kernels.common.query_tiles import TILE_FIELDS
from flash_attn_cute.kernels.common.score_rows import SharedBias
from flash_attn_cute.kernels.sm90.config import ForwardConfig
from flash_attn_cute.kernels.sm90.shared import swizzled


class Layouts(NamedTuple):
    """Layouts of the operands, and of O on its way out."""

    sQ: cute.ComposedLayout  # (64, d, warpgroup, tile stage)
    sK: cute.ComposedLayout  # (tile_n, d, stage)
    sV: cute.ComposedLayout  # (tile_n, d_v, stage)
    sO: cute.ComposedLayout  # (64, d_v, warpgroup)


def layouts_of(config: ForwardConfig, dtype: type) -> Layouts:
    """How operands lie in shared memory, swizzled; made anew on the host's and on the kernel's side."""
    c, warpgroups = config, config.num_mma_warpgroups
    sO = swizzled(dtype, c.tile_dv, (64, c.tile_dv, warpgroups))
    if const_expr(not c.persistent):
        # No other tile follows, and a warpgroup's part of O takes the place of its own part of Q.
        places = cute.make_layout(warpgroups, stride=64 * c.tile_d)
        outer = cute.append(cute.select(sO.outer, mode=[0, 1]), places)
        sO = cute.make_composed_layout(sO.inner, sO.offset, outer)
    return Layouts(
        sQ=swizzled(dtype, c.tile_d, (64, c.tile_d, warpgroups, c.tile_stages)),
        sK=swizzled(dtype, c.tile_d, (c.tile_n, c.tile_d, c.stages)),
        sV=swizzled(dtype, c.tile_dv, (c.tile_n, c.tile_dv, c.stages)),
        sO=sO,
    )


def entry_stages(config: ForwardConfig) -> int:
    """Number of stages of entries that warp 0 publishes under a mask.

    Warp 0 publishes a block before it knows that the block's stage of K is released. The stage of the block before is
    released, so the scores of the block ``stages`` before that have been computed, and its entry read.
    """
    return 2 * config.stages


def storage_of(config: ForwardConfig, dtype: type, layouts: Layouts) -> type:
    """All shared memory of a CTA."""
    c = config
    assert c.tile_dv <= c.tile_d
    elements_O = cute.cosize(layouts.sO) if c.persistent else 0
    bytes_of_bias = c.bias_stages * c.bias_rows * c.bias_pitch

    @cute.struct
    class Storage:
        tile_barriers: cute.struct.MemRange[Int64, 2 * c.tile_stages]
        k_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
        bias_barriers: cute.struct.MemRange[Int64, 2 * c.bias_stages if c.bias_pitch else 0]
        tiles: cute.struct.MemRange[Int32, TILE_FIELDS * c.tile_stages]
        entries: cute.struct.MemRange[Int32, 2 * entry_stages(c) if c.features.listed else 0]
        sO: cute.struct.Align[cute.struct.MemRange[dtype, elements_O], 1024]
        sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
        bias: cute.struct.Align[cute.struct.MemRange[Uint8, bytes_of_bias], 128]

    return Storage


@dataclass(frozen=True)
class Entry:
    """A block of keys, and under a mask what hides some of it."""

    block: Int32
    code: Int32 | None  # whether there are bits: if not negative
    words: cute.Tensor | None


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it."""

    sQ: cute.Tensor  # (64, d, warpgroup, tile stage)
    sK: cute.Tensor  # (tile_n, d, stage)
    sV: cute.Tensor  # (tile_n, d_v, stage)
    sO: cute.Tensor  # (64, d_v, warpgroup)
    tiles: cute.Tensor  # (field, tile stage)
    tile_full: cute.Pointer
    tile_empty: cute.Pointer
    pipe_K: pipeline.PipelineTmaAsync
    pipe_V: pipeline.PipelineTmaAsync
    entries: cute.Tensor | None  # (block and code, stage), under a mask
    bias: SharedBias
