"""Configurations of the Hopper kernels for key blocks that each query selects. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.selection import BLOCKS, HEAD_DIMS, TILE_ROWS, WARPGROUPS_BACKWARD
from flash_attn_cute.kernels.sm90.config import Sm90Config

# Features that change the kernels of the forward and of the backward pass.
_READ_BY_BOTH = "packed", "seqused_q", "seqused_k", "left", "right", "softcap"
_READ, _READ_BACKWARD = (*_READ_BY_BOTH, "sink", "max_logits"), (*_READ_BY_BOTH, "dlse")


@dataclass(frozen=True)
class SelectedConfig(Sm90Config):
    """Fields that the configurations of both passes have."""

    ctas_a_tile: ClassVar[int] = 1
    persistent: ClassVar[bool] = False
    tile_m: ClassVar[int] = TILE_ROWS
    stages: ClassVar[int] = 2  # tiles of Q in flight, for each warpgroup

    tile_dv: int  # columns of v
    tile_n: int  # keys of a block
    group: int  # heads of a query that are rows of one tile: a divisor of 64
    key_bits: bool  # whether picks have a bit for each key: selected blocks are not made of whole blocks of 64

    @property
    def picks_a_tile(self) -> int:
        """Picks (a query and a block that it selects) of which a tile has the rows."""
        return TILE_ROWS // self.group

    @property
    def num_mma_warpgroups(self) -> int:
        """Mma warpgroups, of a tile each."""
        raise NotImplementedError

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer warpgroup, which loads bits of keys, too, and of the others."""
        if self.num_mma_warpgroups == 3:
            return (40, 152) if self.key_bits else (32, 160)
        return 40, 232


@dataclass(frozen=True)
class SelectionConfig(SelectedConfig):
    """Configuration of the forward kernels of a selection."""

    pass_name: ClassVar[PassName] = "selection"

    @property
    def num_mma_warpgroups(self) -> int:
        """Mma warpgroups; scores of 128 keys leave registers for two."""
        return 3 if self.tile_n == BLOCKS[0] else 2


@dataclass(frozen=True)
class SelectionBackwardConfig(SelectedConfig):
    """Configuration of the backward kernels of a selection, of blocks of 64 keys: others are cut into such."""

    pass_name: ClassVar[PassName] = "selection_backward"
    num_mma_warpgroups: ClassVar[int] = WARPGROUPS_BACKWARD  # type: ignore[assignment]


def selection_config(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, *, group: int = 1, block: int = BLOCKS[0]
) -> SelectionConfig:
    """The configuration that serves a call, of selected blocks of so many keys and groups of so many heads."""
    given = _fields(dtype, head_dim, head_dim_v, features, group, block, _READ)
    tile_n = next((size for size in reversed(BLOCKS) if block % size == 0), BLOCKS[0])
    return SelectionConfig(**given, tile_n=tile_n)


def selection_backward_config(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, *, group: int = 1, block: int = BLOCKS[0]
) -> SelectionBackwardConfig:
    """The configuration that serves the backward pass of a call, likewise."""
    given = _fields(dtype, head_dim, head_dim_v, features, group, block, _READ_BACKWARD)
    return SelectionBackwardConfig(**given, tile_n=BLOCKS[0])


def _fields(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, group: int, block: int, read: tuple[str, ...]
) -> dict[str, Any]:
    tile_d, tile_dv = (next(n for n in HEAD_DIMS if n >= d) for d in (head_dim, head_dim_v))
    kept = replace(Features(), **{name: getattr(features, name) for name in read})
    return {
        "dtype": dtype,
        "tile_d": tile_d,
        "features": kept,
        "tile_dv": tile_dv,
        "group": group,
        "key_bits": block % BLOCKS[0] != 0,
    }
