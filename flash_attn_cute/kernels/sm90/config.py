"""Sizes and fields that the configurations of all Hopper kernels have. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import ClassVar

from flash_attn_cute.kernels.features import Features, PassName

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # that tiles are made for; TMA fills the columns that a call lacks with zeros
DTYPES = ("float16", "bfloat16")
SHARED_MEMORY = 224 * 1024  # bytes of a CTA for tiles; the rest is for barriers, and for a row of a bias


@dataclass(frozen=True)
class Sm90Config:
    """Fields that every configuration has.

    Lengths, strides, scale and window sizes are arguments (``kernels.arguments``).
    """

    architecture: ClassVar[str] = "sm90"
    target: ClassVar[str] = "sm_90a"
    pass_name: ClassVar[PassName]

    dtype: str  # one of ``DTYPES``
    tile_d: int  # one of ``HEAD_DIMS``
    features: Features

    @property
    def reorders_bits(self) -> bool:
        """Whether the tiles of a block mask are put into the order of registers."""
        return self.features.block_mask


def read_alike(features: Features) -> Features:
    """Without what kernels do not look at: strided biases are read element by element, whatever else they are."""
    return replace(features, uniform_bias=False) if features.strided_bias else features


def tile_columns(head_dim: int) -> int:
    """Columns of the narrowest tile that a head dimension fits."""
    return next(columns for columns in HEAD_DIMS if columns >= head_dim)


def bias_pitch(features: Features, columns: int) -> int:
    """Bytes of a row of a tile of the bias in shared memory; 0 without one, or if it does not come through it."""
    return pitch_of(columns, 4 if features.float32_bias else 2) if features.bias and not features.strided_bias else 0


def pitch_of(columns: int, element_bytes: int) -> int:
    """Bytes from row to row of a tile: a vector of 16 more than it has, for rows that do not begin with one."""
    return -(-columns * element_bytes // 16) * 16 + 16
