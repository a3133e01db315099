"""Configurations of the Hopper kernels for key blocks that each query selects. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.selection import BLOCKS, HEAD_DIMS, TILE_ROWS
from flash_attn_cute.kernels.sm90.config import SHARED_MEMORY, Sm90Config

# Features that change the kernels of the forward and of the backward pass.
_READ_BY_BOTH = "packed", "seqused_q", "seqused_k", "left", "right", "softcap"
_READ, _READ_BACKWARD = (*_READ_BY_BOTH, "sink", "max_logits"), (*_READ_BY_BOTH, "dlse")
_NARROW = 128  # head dimension up to which a warpgroup's registers have room for sums of dK and of dV


@dataclass(frozen=True)
class SelectedConfig(Sm90Config):
    """Fields that the configurations of both passes have."""

    ctas_a_tile: ClassVar[int] = 1
    persistent: ClassVar[bool] = False
    tile_m: ClassVar[int] = TILE_ROWS

    tile_dv: int  # columns of v
    tile_n: int  # keys of a block
    group: int  # heads of a query that are rows of one tile: a divisor of 64
    key_bits: bool  # whether picks have a bit for each key: selected blocks are not made of whole blocks of 64

    @property
    def picks_a_tile(self) -> int:
        """Picks (a query and a block that it selects) of which a tile has the rows."""
        return TILE_ROWS // self.group

    @property
    def is_wide(self) -> bool:
        """Whether rows are longer than one warpgroup has registers for in all of its sums."""
        return max(self.tile_d, self.tile_dv) > _NARROW

    @property
    def num_mma_warpgroups(self) -> int:
        """Mma warpgroups, of a tile each."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Tiles in flight for each warpgroup: two, or the one that shared memory has room for."""
        return 2 if self.fits(2) else 1

    def fits(self, stages: int) -> bool:
        """Whether shared memory has room for tiles of so many stages."""
        block, tile = self.tile_n * (self.tile_d + self.tile_dv), self.elements_a_tile(stages)
        return 2 * (block + self.num_mma_warpgroups * tile) <= SHARED_MEMORY

    @property
    def in_step(self) -> bool:
        """Whether warpgroups take tiles together."""
        return False

    def elements_a_tile(self, stages: int) -> int:
        """Elements in shared memory for the tiles of one warpgroup."""
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
        """Mma warpgroups; scores of 128 keys, or wide rows of O, leave registers for two."""
        return 3 if self.tile_n == BLOCKS[0] and not self.is_wide else 2

    def elements_a_tile(self, stages: int) -> int:
        """See ``SelectedConfig``: Q, and O."""
        return TILE_ROWS * (stages * self.tile_d + self.tile_dv)


@dataclass(frozen=True)
class SelectionBackwardConfig(SelectedConfig):
    """Configuration of the backward kernels of a selection, of blocks of 64 keys: others are cut into such."""

    pass_name: ClassVar[PassName] = "selection_backward"
    num_mma_warpgroups: ClassVar[int] = 2  # type: ignore[assignment]

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producers, and of the others, of which scaling dQ needs more."""
        return (24, 240) if self.has_scaled_dQ else super().registers

    @property
    def in_step(self) -> bool:
        """See ``SelectedConfig``: one sums up dV of both tiles, the other dK; else each has both sums of its own."""
        return self.is_wide

    @property
    def has_scaled_dQ(self) -> bool:
        """Whether dQ of picks is in float16, times a power of two.

        That rounds by an eighth of what bfloat16 does, so that dS, which is of the operands' dtype, has most of dQ's
        error. Of float16 operands dS has no more error than such a dQ: theirs is in float32.
        """
        return self.dtype == "bfloat16"

    @property
    def sums_an_item(self) -> int:
        """Sums of dK, and of dV, that an item leaves."""
        return 1 if self.in_step else self.num_mma_warpgroups

    def elements_a_tile(self, stages: int) -> int:
        """See ``SelectedConfig``: Q and dO, and P and dS."""
        return TILE_ROWS * (stages * (self.tile_d + self.tile_dv) + 2 * self.tile_n)


def selection_config(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, *, group: int = 1, block: int = BLOCKS[0]
) -> SelectionConfig:
    """The configuration that serves a call, of groups of so many heads.

    Selected blocks of ``block`` keys are cut into the largest that divide them and leave room in shared memory, or else
    picks have bits of keys.
    """
    given = _fields(dtype, head_dim, head_dim_v, features, group, block, _READ)
    sizes = [size for size in reversed(BLOCKS) if block % size == 0] or BLOCKS[:1]
    configs = (SelectionConfig(**given, tile_n=size) for size in sizes)
    return next(config for config in configs if config.fits(1))


def selection_backward_config(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, *, group: int = 1, block: int = BLOCKS[0]
) -> SelectionBackwardConfig:
    """The configuration that serves the backward pass of a call, likewise, whose blocks have 64 keys.

    Warpgroups that take tiles together have sums of one size: the narrower of two head dimensions is filled with zeros.
    """
    given = _fields(dtype, head_dim, head_dim_v, features, group, block, _READ_BACKWARD)
    config = SelectionBackwardConfig(**given, tile_n=BLOCKS[0])
    widest = max(config.tile_d, config.tile_dv)
    return replace(config, tile_d=widest, tile_dv=widest) if config.in_step else config


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
