"""Tile sizes of Blackwell's kernel for the gradient of a bias, and all else that changes its code. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile
from flash_attn_cute.kernels.sm100.backward.backward_config import backward_config
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    PART_ROWS,
    SHARED_MEMORY,
    TARGETS,
    Sm100Config,
    tile_columns,
)

_BARRIERS_AND_PIECES = 5 * 1024  # bytes, an upper bound


@dataclass(frozen=True)
class BiasGradientConfig(Sm100Config):
    """Configuration of a bias-gradient kernel."""

    pass_name: ClassVar[PassName] = "bias_gradient"
    tile_m: ClassVar[int] = PART_ROWS  # queries a tile
    score_stages: ClassVar[int] = 2  # tiles of scores in tensor memory

    tile_dv: int  # columns of v, one of ``HEAD_DIMS``
    tile_n: int  # keys a tile
    stats_m: int  # queries a block of lse and delta, as the backward pass leaves them
    split: bool  # several CTAs share a tile

    @property
    def keys(self) -> int:
        """Number of a tile's keys that a warpgroup computes with."""
        return self.tile_n // COMPUTE_WARPGROUPS

    @property
    def mask_tile(self) -> MaskTile:
        return MaskTile(self.tile_m, self.tile_n, row_a_thread=True)

    # The map of tensor memory.

    def first_S(self, stage: Any) -> Any:
        return self.tile_n * stage

    @property
    def first_dP(self) -> int:
        return self.score_stages * self.tile_n

    @property
    def first_bias(self) -> int:
        """The first column of the tile's bias."""
        return self.first_dP + self.tile_n

    @property
    def operands(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a tile of Q, K, dO and V."""
        return tuple((rows, columns) for columns in (self.tile_d, self.tile_dv) for rows in (self.tile_m, self.tile_n))

    @property
    def numbers_a_stage(self) -> int:
        """Number of 16-bit elements of a piece's operands."""
        return sum(rows * columns for rows, columns in self.operands)

    @property
    def stages(self) -> int:
        """Pieces whose operands are in shared memory."""
        return 2 if self._bytes(2) <= SHARED_MEMORY else 1

    def _bytes(self, stages: int) -> int:
        """Bytes of shared memory, at most: Q, K, dO and V, fields of pieces, and barriers."""
        return 2 * stages * self.numbers_a_stage + _BARRIERS_AND_PIECES


def bias_gradient_config(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, *, split: bool = False, target: str = TARGETS[10, 0]
) -> BiasGradientConfig:
    """The configuration that serves a call, from the features of its backward pass."""
    stats_m = backward_config(dtype, head_dim, head_dim_v, features).tile_m
    tile_d, tile_dv = tile_columns(head_dim), tile_columns(head_dim_v)
    # As in the forward pass.
    unread = "uniform_bias paired_bias tiled_bias"
    features = replace(features.of_pass("bias_gradient"), **dict.fromkeys(unread.split(), False))
    tiles = (
        BiasGradientConfig(target, dtype, tile_d, features, tile_dv, tile_n, stats_m, split) for tile_n in (128, 64)
    )
    config = next(tile for tile in tiles if tile._bytes(1) <= SHARED_MEMORY)
    # The sums go through shared memory in the place of operands.
    assert 2 * config.stages * config.numbers_a_stage >= 4 * config.tile_m * (config.tile_n + 1)
    return config
