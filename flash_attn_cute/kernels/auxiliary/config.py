"""What the kernels before and after the backward kernel are compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PreprocessConfig:
    """A kernel that comes before the backward kernel."""

    dtype: str
    tile_d: int
    tile_m: int  # queries a block
    packed: bool
    has_seqused_q: bool
    has_dlse: bool
    zeroes: bool  # the workspace; else, where the first to add to a block overwrites it, the counters of additions


@dataclass(frozen=True)
class PostprocessConfig:
    """A kernel that follows the backward kernel."""

    dtype: str
    tile_d: int
    tile_m: int  # rows a block
    columns: int  # of a part of a block
    packed: bool
    has_seqused: bool
    zero_padding: bool
    counted: bool  # blocks have counters of additions, and hold nothing if there were none
