"""Shared memory of the forward kernel (``forward``), as its roles read it."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, pipeline

from flash_attn_cute.kernels.common.score_rows import SharedBias


@dataclass(frozen=True)
class Entry:
    """A block of keys, and under a mask what hides some of it."""

    block: Int32
    code: Int32 | None  # whether there are bits: if not negative
    words: cute.Tensor | None


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it: ``forward_schedule`` describes all of it."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor
    tiles: cute.Tensor
    tile_full: cute.Pointer
    tile_empty: cute.Pointer
    pipe_K: pipeline.PipelineTmaAsync
    pipe_V: pipeline.PipelineTmaAsync
    entries: cute.Tensor | None  # under a mask
    bias: SharedBias
    sBiasTile: cute.Tensor | None  # of a bias that TMA loads: stages of warpgroup 0, then those of the next
