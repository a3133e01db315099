"""Tile sizes of Blackwell's backward kernels, and all else that changes their code. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from flash_attn_cute.kernels.backward import BackwardSizes
from flash_attn_cute.kernels.features import Case, Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    CTAS,
    PART_ROWS,
    SCORE_COLUMNS,
    TARGETS,
    TENSOR_COLUMNS,
    Sm100Config,
    tile_columns,
)

DQ_STAGES = 2  # pieces of dQ in shared memory


@dataclass(frozen=True)
class BackwardConfig(Sm100Config, BackwardSizes):
    """Configuration of all kernels of a backward pass. A tile of keys is the work of a CTA, or of a pair of CTAs.

    Its features are deterministic: what is added to dQ always has an order.
    """

    pass_name: ClassVar[PassName] = "backward"

    tile_dv: int  # columns of v, one of ``HEAD_DIMS``
    tile_m: int  # queries a block: as many as tensor memory has lanes, or half of them
    # Over the queries that attend to a tile: 1, or 2, of which the first sums dV and the second dK, in the same place.
    num_passes: int
    kv_stages: int  # tiles of keys and values in shared memory
    q_stages: int  # blocks of Q in shared memory
    do_stages: int  # and of dO
    ctas_a_tile: int = 1  # each with 128 keys

    @property
    def tile_n(self) -> int:
        return PART_ROWS * self.ctas_a_tile

    @property
    def stages(self) -> int:
        """Blocks of queries in flight."""
        return self.q_stages

    @property
    def mask_tile(self) -> MaskTile:
        """How a mask is cut: a thread has a key, and half of a block's queries."""
        return MaskTile(self.tile_m, self.tile_n, rows_are_keys=True, row_a_thread=True, sharing=COMPUTE_WARPGROUPS)

    @property
    def reorders_bits(self) -> bool:
        """Whether the tiles of a block mask are put into the order of threads."""
        return self.features.block_mask

    @property
    def semaphores(self) -> tuple[int, int]:
        """One a CTA, which has some rows of a block of queries, or some columns.

        Of keys one a warpgroup that computes, and a pass, at whose end they are added.
        """
        return self.ctas_a_tile, self.ctas_a_tile * self.num_passes * COMPUTE_WARPGROUPS

    @property
    def queries(self) -> int:
        """Number of a block's queries that a warpgroup computes with."""
        return self.tile_m // COMPUTE_WARPGROUPS

    @property
    def queries_shared(self) -> int:
        """Number of a block's queries that a CTA has in shared memory by rows, and whose dS it has for dQ."""
        return self.tile_m // self.ctas_a_tile

    # The map of tensor memory. P and dS, of 16 bits, lie where their S, or dP, has been: those of each warpgroup in
    # the first half of its own columns.

    first_S: ClassVar[int] = 0

    @property
    def first_dV(self) -> int:
        return self.tile_m

    @property
    def first_dP(self) -> int:
        return self.first_dV + self.tile_dv

    @property
    def first_dK(self) -> int:
        return self.first_dP + self.tile_m if self.num_passes == 1 else self.first_dV

    # A block of as many queries as there are lanes has dQ as one product, a query a lane. One of half as many has it
    # transposed, in parts: a column of dQ a lane.

    @property
    def transposes_dQ(self) -> bool:
        """Whether lanes are columns of dQ."""
        return self.tile_m < PART_ROWS

    @property
    def parts_dQ(self) -> int:
        """Products that dQ is. One of a pair has the lanes of both CTAs."""
        return -(-self.tile_d // (PART_ROWS * self.ctas_a_tile)) if self.transposes_dQ else 1

    @property
    def columns_dQ(self) -> int:
        """Columns of tensor memory that each part of dQ takes.

        A CTA of a pair has half of a block's rows, the second half of their columns in the lanes behind the first's;
        or of a dQ that is transposed one of two parts, which are computed together.
        """
        return self.tile_m if self.transposes_dQ else self.tile_d // self.ctas_a_tile

    def first_row_dQ(self, part: int) -> int:
        """The column of dQ that is a part's first lane. The last one of 192 columns begins with some of the first's."""
        return min(part * PART_ROWS, self.tile_d - PART_ROWS)

    @property
    def holds_keys(self) -> bool:
        """Whether K of a tile is in tensor memory, from where products of scores read it."""
        return self.ctas_a_tile == CTAS and self.num_passes == 2

    @property
    def first_K(self) -> int:
        """The first column of K, if it is there; two elements of 16 bits a column."""
        return max(self.first_dK + self.tile_d, self.first_dP + self.tile_m)

    @property
    def _end(self) -> int:
        """The column behind all but dQ."""
        return self.first_K + (self.tile_d // 2 if self.holds_keys else 0)

    @property
    def _has_place_of_dQ(self) -> bool:
        """Whether all of dQ has columns that nothing else needs."""
        return self._end + self.parts_dQ * self.columns_dQ <= TENSOR_COLUMNS

    @property
    def dQ_over_dP(self) -> bool:
        """Whether dQ, or its first part, takes the place of the dS that it is computed from."""
        return self.ctas_a_tile == 1 and not self._has_place_of_dQ

    @property
    def dQ_over_S(self) -> bool:
        """Whether dQ takes the place of S; in one pass the columns between P of the two warpgroups."""
        return self.ctas_a_tile == CTAS and not self._has_place_of_dQ

    @property
    def P_stride(self) -> int:
        """Columns of tensor memory from the first warpgroup's P to the second's."""
        return SCORE_COLUMNS // 4 * 3 if self.dQ_over_S and self.num_passes == 1 else self.queries

    def first_dQ(self, part: int = 0) -> int:
        """The first column of dQ, or of one of its parts."""
        if self.dQ_over_S:
            return self.first_S + (SCORE_COLUMNS // 4 if self.num_passes == 1 else 0)
        if self.dQ_over_dP:
            return self.first_dP if part == 0 else self._end + (part - 1) * self.columns_dQ
        return self._end + part * self.columns_dQ

    @property
    def piece_columns(self) -> int:
        """Columns of tensor memory that a piece of dQ has; its queries, if dQ is transposed."""
        return 32 // self.ctas_a_tile

    @property
    def piece_lanes(self) -> int:
        """Lanes of tensor memory that a piece of dQ has; if dQ is transposed, columns of dQ, half of all in a pair."""
        if not self.transposes_dQ:
            return PART_ROWS
        return PART_ROWS // 2 if self.ctas_a_tile == 1 else self.tile_d // CTAS

    @property
    def piece_numbers(self) -> int:
        """Number of elements of a piece of dQ."""
        return self.piece_lanes * self.piece_columns

    @property
    def pieces_dQ(self) -> int:
        """In which a CTA's part of a block of dQ goes through shared memory."""
        return self.tile_m * self.tile_d // self.ctas_a_tile // self.piece_numbers

    @property
    def columns_of_keys(self) -> int:
        """Columns that a CTA of a pair has of both CTAs' keys: those of dQ that it computes, the first or the last."""
        return PART_ROWS if self.transposes_dQ else self.tile_d // CTAS


class _BackwardTile(NamedTuple):
    """A row of the backward kernels' table."""

    tile_d: int
    tile_dv: int
    tile_m: int
    num_passes: int
    kv_stages: int
    q_stages: int
    do_stages: int
    ctas_a_tile: int = 1
    case: Case = Case()

    def fits(self, columns: int, columns_v: int, features: Features, keys: int, window: int | None) -> bool:
        fits_columns = self.tile_d == columns and self.tile_dv >= columns_v
        return fits_columns and self.case.fits(features, keys, window)


# The first row that fits is chosen. Tensor memory has to hold a block of scores, their gradients, dK and, but for two
# passes, dV; shared memory K, V, and a block of Q, dO and dS. Pairs of CTAs pay from so many keys
# on, by the model of the pipelines: of shorter sequences too much of the last tile of 256 keys may be empty, and under
# one bound a tile's first or last steps see too little of it, as under a narrow window all of them do. Lists are those
# of 128 keys, so that under a mask there are no pairs.
_BACKWARD_TILES = (
    _BackwardTile(64, 64, 128, 1, 2, 2, 2),
    _BackwardTile(128, 128, 128, 1, 1, 1, 1, ctas_a_tile=2, case=Case(without="left right bias listed", rows=1024)),
    _BackwardTile(128, 128, 128, 1, 1, 1, 1, ctas_a_tile=2, case=Case(without="bias listed", rows=2048, window=768)),
    _BackwardTile(128, 128, 128, 1, 1, 2, 1),
    _BackwardTile(192, 128, 64, 1, 1, 1, 1, ctas_a_tile=2, case=Case(without="left right bias listed", rows=512)),
    _BackwardTile(192, 128, 64, 1, 1, 1, 1, ctas_a_tile=2, case=Case(without="bias listed", rows=1024, window=640)),
    _BackwardTile(192, 128, 64, 1, 1, 2, 2),
    _BackwardTile(192, 192, 64, 2, 1, 2, 1, ctas_a_tile=2, case=Case(without="left right bias listed", rows=256)),
    _BackwardTile(192, 192, 64, 2, 1, 2, 1, ctas_a_tile=2, case=Case(without="bias listed", rows=512, window=128)),
    _BackwardTile(192, 192, 64, 2, 1, 2, 2),
    _BackwardTile(256, 256, 64, 2, 1, 2, 1, ctas_a_tile=2, case=Case(without="left right bias listed", rows=256)),
    _BackwardTile(256, 256, 64, 2, 1, 2, 1, ctas_a_tile=2, case=Case(without="bias listed", rows=512, window=64)),
    _BackwardTile(256, 256, 64, 2, 1, 1, 1),
)


def backward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    features: Features,
    *,
    keys: int = 0,
    window: int | None = None,
    low_contention: bool = False,
    target: str = TARGETS[10, 0],
) -> BackwardConfig:
    """The configuration that serves a call (``registry.Pass.configure``). Low contention is for other architectures."""
    del low_contention
    columns_v = tile_columns(head_dim_v)
    columns = max(tile_columns(head_dim), columns_v)
    tile = next(t for t in _BACKWARD_TILES if t.fits(columns, columns_v, features, keys, window))._asdict()
    del tile["case"]
    # Every thread reads its column of a bias element by element, wherever these are. Behind a softcap that one is for
    # all would be known too early, and spill.
    is_uniform = features.uniform_bias and not features.softcap
    unread = "strided_bias paired_bias tiled_bias dbias_of_scores dbias_of_keys half_columns stored_ds"
    others = dict.fromkeys(unread.split(), False)
    features = replace(features.of_pass("backward"), uniform_bias=is_uniform, deterministic=True, **others)
    return BackwardConfig(target=target, dtype=dtype, features=features, **tile)
