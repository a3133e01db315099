"""Configurations of the Hopper kernel of column sums: a table of tile sizes. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import ClassVar

from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.sm90.config import Sm90Config, tile_columns

_READ = "packed", "seqused_q", "seqused_k", "left", "right"  # features that change the kernel

# Queries of a block and blocks in flight, by d. Shared memory has to hold the blocks and a tile of keys. Registers have
# to hold K of 128 keys a warpgroup, and S of these keys and a block.
_TILES = {32: (128, 4), 64: (128, 4), 96: (128, 4), 128: (128, 4), 192: (64, 4), 256: (64, 2)}


@dataclass(frozen=True)
class ColumnSumsConfig(Sm90Config):
    """Configuration of a kernel of column sums."""

    pass_name: ClassVar[PassName] = "column_sums"
    ctas_a_tile: ClassVar[int] = 1
    persistent: ClassVar[bool] = True
    tile_m: ClassVar[int] = 256  # keys of a tile, 128 a warpgroup
    num_mma_warpgroups: ClassVar[int] = 2
    registers: ClassVar[tuple[int, int]] = 24, 240  # a thread of the producer warpgroup and of the others

    tile_n: int  # queries of a block
    stages: int  # blocks in flight


def column_sums_config(dtype: str, head_dim: int, head_dim_v: int, features: Features) -> ColumnSumsConfig:
    """The configuration that serves a call; d_v, which it has in common with those of other passes, is not read."""
    del head_dim_v
    tile_d = tile_columns(head_dim)
    kept = replace(Features(), **{name: getattr(features, name) for name in _READ})
    tile_n, stages = _TILES[tile_d]
    return ColumnSumsConfig(dtype, tile_d, kept, tile_n, stages)
