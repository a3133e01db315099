"""Tile sizes of Blackwell's forward kernels, and all else that changes their code. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from flash_attn_cute.kernels.arguments import BLOCK
from flash_attn_cute.kernels.features import Case, Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile
from flash_attn_cute.kernels.sm100.config import PART_ROWS, SCORE_COLUMNS, TARGETS, Sm100Config, tile_columns

O_STAGES = 2  # pieces of O in shared memory
WINDOW = 32  # blocks of keys in a window of the block iterator
ITERATOR_FIELDS = 2 + WINDOW  # Int32 in shared memory, a part of a tile, that it keeps


@dataclass(frozen=True)
class ForwardConfig(Sm100Config):
    """Configuration of a forward kernel."""

    pass_name: ClassVar[PassName] = "forward"
    persistent: ClassVar[bool] = True  # a CTA works on many tiles
    group: ClassVar[int] = 1  # query heads that are rows of one tile

    tile_dv: int  # columns of v, one of ``HEAD_DIMS``
    q_parts: int  # of a CTA's queries, with 128 of them and a softmax warpgroup each
    tile_n: int  # keys a block
    k_stages: int  # blocks of keys in shared memory
    v_stages: int  # and of values
    o_in_q: bool  # O leaves through the place of its part of Q, as there is no other
    ctas_a_tile: int = 1  # each with as many parts; of a block, two have half of the keys each, and half of v's columns

    @property
    def queries(self) -> int:
        """Number of a tile's queries that a CTA has."""
        return self.q_parts * PART_ROWS

    @property
    def tile_m(self) -> int:
        return self.ctas_a_tile * self.queries

    @property
    def keys_shared(self) -> int:
        """Keys of a block that a CTA has in shared memory."""
        return self.tile_n // self.ctas_a_tile

    @property
    def mask_tile(self) -> MaskTile:
        """Cut of a mask: a part of a tile, which has a list of its own, and a block."""
        return MaskTile(PART_ROWS, self.tile_n, row_a_thread=True)

    @property
    def blocks_an_entry(self) -> int:
        """Blocks of keys to an entry of a list. Entries of a block mask are of 128 keys."""
        return BLOCK // self.tile_n if self.features.block_mask else 1

    @property
    def leaves_out(self) -> bool:
        """Whether a block of a tile may be EMPTY for a part, which then gets no products of it."""
        return self.features.listed and self.q_parts > 1

    @property
    def blocks_ahead(self) -> int:
        """Blocks whose scores are begun before the output of one is: two products of scores are under way."""
        return 2 // self.q_parts

    @property
    def polynomial_every(self) -> int:
        """One of so many pairs of P comes from a polynomial. 0: none, as a B300 has twice the units of a B200.

        Nor are there any with a bias, which takes longer to read than P to compute, and registers; or where the largest
        logits follow from P, of which a polynomial has four digits.
        """
        f = self.features
        return 8 if self.target == TARGETS[10, 0] and not (f.bias or f.max_logits) else 0

    # The map of tensor memory. P takes the place of the first half of its S: P of most pieces of a row is stored while
    # scores of its last piece are still to be read.

    def first_S(self, stage: Any) -> Any:
        return SCORE_COLUMNS * stage

    def first_O(self, part: Any) -> Any:
        """The first column of a part's O."""
        return 2 * SCORE_COLUMNS + self.tile_dv * part

    @property
    def stages(self) -> int:
        """Blocks of keys in flight."""
        return self.k_stages


class _ForwardTile(NamedTuple):
    """A row of the forward kernel's table."""

    tile_d: int
    tile_dv: int
    q_parts: int
    tile_n: int
    k_stages: int
    v_stages: int
    o_in_q: bool = False
    ctas_a_tile: int = 1
    case: Case = Case()

    def fits(self, columns: int, columns_v: int, features: Features, queries: int, window: int | None) -> bool:
        """Whether it serves a call. Of v's columns each CTA has 64, or a multiple of it."""
        fits_v = self.tile_dv >= columns_v and columns_v % (64 * self.ctas_a_tile) == 0
        return self.tile_d == columns and fits_v and self.case.fits(features, queries, window)


# The first row that fits is chosen. Tensor memory has to hold two blocks of scores and O of all parts; shared memory Q
# of all parts, K and V. With 64 keys a block products of scores wait for shared memory, but where it has no room for
# two blocks of 128 they would have to wait for global memory, block by block. A pair of CTAs, which share a block, have
# the room. They pay from so many queries on, by the model of the pipelines: of shorter sequences too much of the last
# tile may be empty, and under a right bound a tile's first queries see too little of its blocks. Of a window with both
# bounds that is so of all tiles: where it is narrow, a pair of two parts goes over many more blocks than a part needs.
_TENSORS = "mask block_mask bias"  # that pairs do not read
_FORWARD_TILES = (
    _ForwardTile(64, 64, 2, 128, 4, 4),
    _ForwardTile(128, 128, 2, 128, 2, 2),
    _ForwardTile(192, 128, 2, 128, 2, 2, ctas_a_tile=2, case=Case(without=f"left right {_TENSORS}", rows=512)),
    _ForwardTile(192, 128, 2, 128, 2, 2, ctas_a_tile=2, case=Case(without=_TENSORS, rows=2048, window=768)),
    _ForwardTile(192, 128, 2, 128, 2, 1, o_in_q=True),
    _ForwardTile(192, 192, 1, 64, 2, 4),
    _ForwardTile(256, 256, 1, 128, 2, 2, ctas_a_tile=2, case=Case(without=f"right {_TENSORS}", rows=256)),
    _ForwardTile(256, 256, 1, 128, 2, 2, ctas_a_tile=2, case=Case("right", without=_TENSORS, rows=512)),
    _ForwardTile(256, 256, 1, 64, 2, 2),
)


def forward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    features: Features,
    *,
    group: int = 1,
    queries: int = 0,
    window: int | None = None,
    target: str = TARGETS[10, 0],
) -> ForwardConfig:
    """The configuration that serves a call (``registry.Pass.configure``). Heads of a group never share a tile here."""
    del group
    # Every thread reads its row of a bias, by words, wherever it is.
    unread = "uniform_bias paired_bias tiled_bias half_blocks"
    features = replace(features.of_pass("forward"), **dict.fromkeys(unread.split(), False))
    columns_v = tile_columns(head_dim_v)
    columns = max(tile_columns(head_dim), columns_v)
    tile = next(t for t in _FORWARD_TILES if t.fits(columns, columns_v, features, queries, window))._asdict()
    del tile["case"]
    return ForwardConfig(target=target, dtype=dtype, features=features, **tile | {"tile_dv": columns_v})
