"""Configurations of the Hopper kernel for key blocks that each query selects. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import ClassVar

from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.selection import BLOCKS, HEAD_DIMS, TILE_ROWS
from flash_attn_cute.kernels.sm90.config import Sm90Config

_READ = ("packed", "left", "right", "softcap", "sink")  # features that change the kernels


@dataclass(frozen=True)
class SelectionConfig(Sm90Config):
    """Configuration of the forward kernels of a selection."""

    pass_name: ClassVar[PassName] = "selection"
    ctas_a_tile: ClassVar[int] = 1
    tile_m: ClassVar[int] = TILE_ROWS
    stages: ClassVar[int] = 2  # tiles of Q in flight, for each warpgroup

    tile_dv: int  # columns of v
    tile_n: int  # keys of a block
    group: int  # heads of a query that are rows of one tile: a divisor of 64

    @property
    def picks_a_tile(self) -> int:
        """Picks of a query and the block of which a tile has the rows."""
        return TILE_ROWS // self.group

    @property
    def num_mma_warpgroups(self) -> int:
        """Mma warpgroups, of a tile each; scores of 128 keys leave registers for two."""
        return 3 if self.tile_n == BLOCKS[0] else 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer warpgroup and of the others."""
        return (32, 160) if self.num_mma_warpgroups == 3 else (40, 232)


def selection_config(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, *, group: int = 1, block: int = BLOCKS[0]
) -> SelectionConfig:
    """The configuration that serves a call, of blocks of so many keys and groups of so many heads."""
    tile_d, tile_dv = (next(n for n in HEAD_DIMS if n >= d) for d in (head_dim, head_dim_v))
    return SelectionConfig(
        dtype=dtype,
        tile_d=tile_d,
        features=replace(Features(), **{name: getattr(features, name) for name in _READ}),
        tile_dv=tile_dv,
        tile_n=block,
        group=group,
    )
