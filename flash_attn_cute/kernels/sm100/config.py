"""Tile sizes of the Blackwell kernels, and all else that changes their code. Needs no cutlass."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from flash_attn_cute.kernels.features import Features, PassName

# That tiles are made for: multiples of the 64 columns that a swizzled row of shared memory holds. TMA fills the columns
# that a call lacks with zeros.
HEAD_DIMS = (64, 128, 192, 256)
DTYPES = ("float16", "bfloat16")
TARGETS = {(10, 0): "sm_100a", (10, 3): "sm_103a"}  # what GPUs of a compute capability run
LACKING = ("MASK", "BIAS", "BLOCK_MASK")  # features of calls that no kernel serves yet
PART_ROWS = 128  # of a product: the lanes of tensor memory
TENSOR_COLUMNS = 512  # of tensor memory, 32 bits each
SCORE_COLUMNS = 128  # of tensor memory that a product of scores takes

SHARED_MEMORY = 227 * 1024  # bytes of a CTA
_BARRIERS_AND_STATS = 3 * 1024  # of them, an upper bound


class Registers(NamedTuple):
    """A thread's, by the role of its warpgroup."""

    softmax: int
    epilogue: int
    others: int
    none: int = 40  # of the second softmax warpgroup, where a tile has one part


@dataclass(frozen=True)
class ForwardConfig:
    """What a compiled forward kernel is made for."""

    architecture: ClassVar[str] = "sm100"
    pass_name: ClassVar[PassName] = "forward"
    persistent: ClassVar[bool] = True  # a CTA works on many tiles
    group: ClassVar[int] = 1  # query heads that are rows of one tile
    tile_n: ClassVar[int] = SCORE_COLUMNS  # keys a block

    target: str  # one of ``TARGETS``
    dtype: str  # one of ``DTYPES``
    tile_d: int  # one of ``HEAD_DIMS``
    features: Features
    tile_dv: int  # columns of v, one of ``HEAD_DIMS``
    q_parts: int  # of a tile of queries, with 128 of them and a softmax warpgroup each
    k_stages: int  # blocks of keys in shared memory
    v_stages: int  # and of values
    o_in_q: bool  # O leaves through the place of its part of Q, as there is no other

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return self.q_parts * PART_ROWS

    @property
    def blocks_ahead(self) -> int:
        """Blocks whose scores are begun before the output of one is: two products of scores are under way."""
        return 2 // self.q_parts

    @property
    def polynomial_every(self) -> int:
        """One of so many pairs of weights comes from a polynomial. 0: none, as a B300 has twice the units of a B200."""
        return 8 if self.target == TARGETS[10, 0] else 0

    @property
    def registers(self) -> Registers:
        """512 in sum, at most, over four warpgroups."""
        if self.q_parts == 1:
            return Registers(softmax=232, epilogue=120, others=120)
        return Registers(softmax=200, epilogue=72, others=40)

    # The map of tensor memory. Weights take the place of the second half of the scores that they are of.
    columns_before_P: ClassVar[int] = SCORE_COLUMNS // 2

    def first_S(self, stage: Any) -> Any:
        """The first column of scores."""
        return SCORE_COLUMNS * stage

    def first_O(self, part: Any) -> Any:
        """The first column of a part's O."""
        return 2 * SCORE_COLUMNS + self.tile_dv * part

    @property
    def stages(self) -> int:
        """Blocks of keys in flight."""
        return self.k_stages

    @property
    def bytes_shared(self) -> int:
        """Of shared memory, at most: Q, K, V, two pieces of O on its way out, and what guards them."""
        numbers = self.tile_m * self.tile_d + self.tile_n * (self.k_stages * self.tile_d + self.v_stages * self.tile_dv)
        if not self.o_in_q:
            numbers += O_STAGES * PART_ROWS * O_COLUMNS
        return 2 * numbers + _BARRIERS_AND_STATS


O_COLUMNS, O_STAGES = 64, 2  # of a piece of O in shared memory, and how many there are
TILE_STAGES = 2  # tiles that roles have been told of


class _ForwardTile(NamedTuple):
    """A row of the forward kernel's table."""

    tile_d: int
    tile_dv: int
    q_parts: int
    k_stages: int
    v_stages: int
    o_in_q: bool = False


# Tensor memory has to hold two blocks of scores and O of all parts; shared memory Q of all parts, K and V.
_FORWARD_TILES = (
    _ForwardTile(64, 64, 2, 4, 4),
    _ForwardTile(128, 128, 2, 2, 2),
    _ForwardTile(192, 128, 2, 2, 1, o_in_q=True),
    _ForwardTile(192, 192, 1, 2, 1),
    _ForwardTile(256, 256, 1, 1, 1),
)


def forward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    features: Features,
    *,
    group: int = 1,
    target: str = TARGETS[10, 0],
) -> ForwardConfig:
    """The configuration that serves a call.

    ``group`` is for few queries, whose heads other architectures have in one tile; here they never share one.

    Raises:
        ValueError: features that no kernel serves yet.
    """
    lacking = [name.lower() for name in LACKING if getattr(features, name.lower())]
    if lacking:
        raise ValueError(f"features: expected none that the sm100 kernels lack, got {', '.join(lacking)}")
    del group
    columns_v = _tile_columns(head_dim_v)
    columns = max(_tile_columns(head_dim), columns_v)
    tile = next(t for t in _FORWARD_TILES if t.tile_d == columns and t.tile_dv >= columns_v)
    config = ForwardConfig(
        target=target,
        dtype=dtype,
        tile_d=tile.tile_d,
        features=features.of_pass("forward"),
        tile_dv=columns_v,
        q_parts=tile.q_parts,
        k_stages=tile.k_stages,
        v_stages=tile.v_stages,
        o_in_q=tile.o_in_q,
    )
    assert config.bytes_shared <= SHARED_MEMORY
    return config


def _tile_columns(head_dim: int) -> int:
    return next(columns for columns in HEAD_DIMS if columns >= head_dim)
