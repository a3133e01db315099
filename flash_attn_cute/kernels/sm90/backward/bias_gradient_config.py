"""Tile sizes of Hopper's kernel for the gradient of a bias, and all else that changes its code. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import ClassVar

from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile
from flash_attn_cute.kernels.sm90.backward.backward_config import backward_config
from flash_attn_cute.kernels.sm90.config import SHARED_MEMORY, Sm90Config, bias_pitch, read_alike, tile_columns


@dataclass(frozen=True)
class BiasGradientConfig(Sm90Config):
    """Configuration of a bias-gradient kernel."""

    pass_name: ClassVar[PassName] = "bias_gradient"

    tile_dv: int  # columns of v
    tile_n: int  # keys a tile
    stats_m: int  # queries a block of lse and delta, as the backward pass leaves them
    split: bool  # several CTAs share a tile
    tile_m: ClassVar[int] = 128  # queries a tile

    @property
    def bias_pitch(self) -> int:
        """See ``ForwardConfig.bias_pitch``."""
        return bias_pitch(self.features, self.tile_n)

    @property
    def bias_rows(self) -> int:
        """See ``ForwardConfig.bias_rows``."""
        return 1 if self.features.uniform_bias else self.tile_m

    @property
    def mask_tile(self) -> MaskTile:
        """How a mask is cut."""
        return MaskTile(self.tile_m, self.tile_n)

    @property
    def operands(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a tile of Q, K, dO and V."""
        return tuple((rows, columns) for columns in (self.tile_d, self.tile_dv) for rows in (self.tile_m, self.tile_n))

    @property
    def stages(self) -> int:
        """Pieces whose operands are in shared memory."""
        return 2 if self._bytes(2) <= SHARED_MEMORY else 1

    def _bytes(self, stages: int) -> int:
        """Bytes of Q, K, dO and V, of a bias tile, of its warps' sums over queries, and 4 KB for pieces."""
        operands = 2 * sum(rows * columns for rows, columns in self.operands)
        return stages * operands + self.bias_rows * self.bias_pitch + 4 * self.tile_m // 16 * self.tile_n + 4096


def bias_gradient_config(
    dtype: str, head_dim: int, head_dim_v: int, features: Features, *, split: bool = False
) -> BiasGradientConfig:
    """The configuration that serves a call, from the features of its backward pass."""
    stats_m = backward_config(dtype, head_dim, head_dim_v, features).tile_m
    tile_d, tile_dv = tile_columns(head_dim), tile_columns(head_dim_v)
    features = replace(read_alike(features.of_pass("bias_gradient")), tiled_bias=False)
    widths = (64, 32) if features.strided_bias else (128, 64, 32)  # read one by one, more keys spill
    tiles = (BiasGradientConfig(dtype, tile_d, features, tile_dv, tile_n, stats_m, split) for tile_n in widths)
    return next(tile for tile in tiles if tile._bytes(1) <= SHARED_MEMORY)
