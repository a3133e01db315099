"""Tile sizes of the Blackwell kernels, and all else that changes their code. Needs no cutlass."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from flash_attn_cute.kernels.arguments import BLOCK
from flash_attn_cute.kernels.backward import REVERSES_LAST, BackwardSizes
from flash_attn_cute.kernels.features import Case, Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile

# That tiles are made for: multiples of the 64 columns that a swizzled row of shared memory holds. TMA fills the columns
# that a call lacks with zeros.
HEAD_DIMS = (64, 128, 192, 256)
DTYPES = ("float16", "bfloat16")
TARGETS = {(10, 0): "sm_100a", (10, 3): "sm_103a"}  # what GPUs of a compute capability run
PART_ROWS = 128  # of a product: the lanes of tensor memory
WARPS = 16  # of a CTA
MMA_WARP, PRODUCER_WARP = 12, 13
CTAS = 2  # of a pair, whose products are computed together
SECOND = 1  # the rank of that which is not the leader
TENSOR_COLUMNS = 512  # of tensor memory, 32 bits each
SCORE_COLUMNS = 128  # of tensor memory that a product of scores takes

SHARED_MEMORY = 227 * 1024  # bytes of a CTA


@dataclass(frozen=True)
class Sm100Config:
    """Fields that every configuration has."""

    architecture: ClassVar[str] = "sm100"
    pass_name: ClassVar[PassName]
    reorders_bits: ClassVar[bool] = False  # of a block mask

    target: str  # one of ``TARGETS``
    dtype: str  # one of ``DTYPES``
    tile_d: int  # one of ``HEAD_DIMS``
    features: Features


class Registers(NamedTuple):
    """A thread's, by the role of its warpgroup."""

    softmax: int
    epilogue: int
    others: int
    none: int = 40  # of the second softmax warpgroup, where a tile has one part


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
        """Queries of a tile."""
        return self.ctas_a_tile * self.queries

    @property
    def keys_shared(self) -> int:
        """Keys of a block that a CTA has in shared memory."""
        return self.tile_n // self.ctas_a_tile

    @property
    def columns_shared(self) -> int:
        """Columns of v that a CTA has in shared memory."""
        return self.tile_dv // self.ctas_a_tile

    @property
    def mask_tile(self) -> MaskTile:
        """Cut of a mask: a part of a tile, which has a list of its own, and a block."""
        return MaskTile(PART_ROWS, self.tile_n, row_a_thread=True)

    @property
    def blocks_an_entry(self) -> int:
        """Blocks of keys to an entry of a list. Entries of a block mask are of 128 keys."""
        return BLOCK // self.tile_n if self.features.block_mask else 1

    def parts(self, lists: Any, blocks: Any) -> dict[str, tuple[Any, ...]]:
        """The parts of the workspace that a mask takes, for so many lists of at most so many blocks of keys."""
        return self.mask_tile.parts_with_lists(lists, blocks)

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

    @property
    def registers(self) -> Registers:
        """512 in sum, at most, over four warpgroups."""
        if self.q_parts == 1:
            return Registers(softmax=232, epilogue=120, others=120)
        if self.ctas_a_tile == 2:  # whose producers also keep the published fields, and their own share of each block
            return Registers(softmax=192, epilogue=72, others=56)
        return Registers(softmax=200, epilogue=72, others=40)

    # The map of tensor memory. P takes the place of the first half of its S: P of most pieces of a row is stored while
    # scores of its last piece are still to be read.

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


O_COLUMNS, O_STAGES = 64, 2  # of a piece of O in shared memory, and how many there are
TILE_STAGES = 2  # tiles that the producer may have published
ENTRY_STAGES = 8  # published entries of lists: more than there are blocks in flight
WINDOW = 32  # blocks of keys in a window of the block iterator
ITERATOR_FIELDS = 2 + WINDOW  # Int32 in shared memory, a part of a tile, that it keeps


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
    queries: int = 0  # of a sequence, at least
    window: int = 0  # keys that a query attends to, at least, if a window bounds both sides
    case: Case = Case()

    def fits(self, columns: int, columns_v: int, features: Features, queries: int, window: int | None) -> bool:
        """Whether it serves a call. Of v's columns each CTA has 64, or a multiple of it."""
        fits_v = self.tile_dv >= columns_v and columns_v % (64 * self.ctas_a_tile) == 0
        is_long = self.queries <= queries and _is_wide(window, self.window)
        return self.tile_d == columns and fits_v and is_long and self.case.fits(features)


def _is_wide(window: int | None, least: int) -> bool:
    """Whether a query attends to so many keys. A window of None does not bound both sides."""
    return window is None or window >= least


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
    _ForwardTile(192, 128, 2, 128, 2, 2, ctas_a_tile=2, queries=512, case=Case(without=f"left right {_TENSORS}")),
    _ForwardTile(192, 128, 2, 128, 2, 2, ctas_a_tile=2, queries=2048, window=768, case=Case(without=_TENSORS)),
    _ForwardTile(192, 128, 2, 128, 2, 1, o_in_q=True),
    _ForwardTile(192, 192, 1, 64, 2, 4),
    _ForwardTile(256, 256, 1, 128, 2, 2, ctas_a_tile=2, queries=256, case=Case(without=f"right {_TENSORS}")),
    _ForwardTile(256, 256, 1, 128, 2, 2, ctas_a_tile=2, queries=512, case=Case("right", without=_TENSORS)),
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
    """The configuration that serves a call.

    Args:
        dtype: one of ``DTYPES``.
        head_dim: of q and k.
        head_dim_v: of v.
        features: of the call.
        group: for few queries, whose heads other architectures have in one tile; here they never share one.
        queries: of a sequence, on average; 0 if that is not known.
        window: keys that a query attends to, if a window bounds both sides.
        target: one of ``TARGETS``.
    """
    del group
    # Every thread reads its row of a bias, by words, wherever it is.
    features = replace(features.of_pass("forward"), uniform_bias=False, paired_bias=False, half_blocks=False)
    columns_v = _tile_columns(head_dim_v)
    columns = max(_tile_columns(head_dim), columns_v)
    tile = next(t for t in _FORWARD_TILES if t.fits(columns, columns_v, features, queries, window))._asdict()
    del tile["queries"], tile["window"], tile["case"]
    return ForwardConfig(target=target, dtype=dtype, features=features, **tile | {"tile_dv": columns_v})


def _tile_columns(head_dim: int) -> int:
    return next(columns for columns in HEAD_DIMS if columns >= head_dim)


class BackwardRegisters(NamedTuple):
    """A thread's, by the role of its warpgroup."""

    drain: int
    compute: int  # of each of two warpgroups
    others: int


@dataclass(frozen=True)
class BackwardConfig(Sm100Config, BackwardSizes):
    """Configuration of all kernels of a backward pass. A tile of keys is the work of a CTA, or of a pair of CTAs.

    Its features are deterministic: what is added to dQ always has an order.
    """

    pass_name: ClassVar[PassName] = "backward"
    counts_additions: ClassVar[bool] = True

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
        """Number of keys of a tile."""
        return PART_ROWS * self.ctas_a_tile

    @property
    def stages(self) -> int:
        """Blocks of queries in flight."""
        return self.q_stages

    @property
    def delta_stages(self) -> int:
        """Stages of delta in shared memory: it comes with dO, or in two passes with Q."""
        return self.do_stages if self.num_passes == 1 else self.q_stages

    @property
    def mask_tile(self) -> MaskTile:
        """How a mask is cut: a thread has a key, and half of a block's queries."""
        return MaskTile(self.tile_m, self.tile_n, rows_are_keys=True, row_a_thread=True, sharing=COMPUTE_WARPGROUPS)

    @property
    def reorders_bits(self) -> bool:
        """Whether the tiles of a block mask are put into the order of threads."""
        return self.features.block_mask

    def mask_parts(self, lists: Any, blocks: Any) -> dict[str, tuple[Any, ...]]:
        """Parts of the workspace for a mask, see ``BackwardSizes``."""
        return self.mask_tile.parts(lists, blocks)

    @property
    def registers(self) -> BackwardRegisters:
        """512 in sum, at most, over four warpgroups: who drains dQ holds a row of a product."""
        if self.tile_m < PART_ROWS:
            return BackwardRegisters(drain=112, compute=160, others=80)
        if self.tile_d == 64:
            return BackwardRegisters(drain=96, compute=168, others=80)
        if self.ctas_a_tile == 2:
            return BackwardRegisters(drain=96, compute=176, others=64)
        return BackwardRegisters(drain=152, compute=160, others=40)

    @property
    def semaphores(self) -> tuple[int, int]:
        """One a CTA, which has some rows of a block of queries, or some columns.

        Of keys one a warpgroup that computes, and a pass, at whose end they are added.
        """
        return self.ctas_a_tile, self.ctas_a_tile * self.num_passes * COMPUTE_WARPGROUPS

    @property
    def reverses_last(self) -> bool:
        """Whether the last section's tiles have the opposite order, where that pays."""
        return REVERSES_LAST.fits(self.features)

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
        """The first column of dV."""
        return self.tile_m

    @property
    def first_dP(self) -> int:
        """The first column of dP."""
        return self.first_dV + self.tile_dv

    @property
    def first_dK(self) -> int:
        """The first column of dK."""
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

    @property
    def pieces_dK(self) -> int:
        """Number of pieces of 64 columns in which dK leaves."""
        return self.tile_d // O_COLUMNS

    @property
    def pieces_dV(self) -> int:
        """Number of pieces of 64 columns in which dV leaves."""
        return self.tile_dv // O_COLUMNS


COMPUTE_WARPGROUPS = 2  # of a backward kernel, with half of a block's queries each
DQ_STAGES = 2  # pieces of dQ in shared memory


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
    keys: int = 0  # of a sequence, at least
    window: int = 0  # keys that a query attends to, at least, if a window bounds both sides
    case: Case = Case()

    def fits(self, columns: int, columns_v: int, features: Features, keys: int, window: int | None) -> bool:
        """Whether it serves a call."""
        is_long = self.keys <= keys and _is_wide(window, self.window)
        return self.tile_d == columns and self.tile_dv >= columns_v and is_long and self.case.fits(features)


# The first row that fits is chosen. Tensor memory has to hold a block of scores, their gradients, dK and, but for two
# passes, dV; shared memory K, V, and a block of Q, dO and dS. Pairs of CTAs pay from so many keys
# on, by the model of the pipelines: of shorter sequences too much of the last tile of 256 keys may be empty, and under
# one bound a tile's first or last steps see too little of it, as under a narrow window all of them do. Lists are those
# of 128 keys, so that under a mask there are no pairs.
_BACKWARD_TILES = (
    _BackwardTile(64, 64, 128, 1, 2, 2, 2),
    _BackwardTile(128, 128, 128, 1, 1, 1, 1, ctas_a_tile=2, keys=1024, case=Case(without="left right bias listed")),
    _BackwardTile(128, 128, 128, 1, 1, 1, 1, ctas_a_tile=2, keys=2048, window=768, case=Case(without="bias listed")),
    _BackwardTile(128, 128, 128, 1, 1, 2, 1),
    _BackwardTile(192, 128, 64, 1, 1, 1, 1, ctas_a_tile=2, keys=512, case=Case(without="left right bias listed")),
    _BackwardTile(192, 128, 64, 1, 1, 1, 1, ctas_a_tile=2, keys=1024, window=640, case=Case(without="bias listed")),
    _BackwardTile(192, 128, 64, 1, 1, 2, 2),
    _BackwardTile(192, 192, 64, 2, 1, 2, 1, ctas_a_tile=2, keys=256, case=Case(without="left right bias listed")),
    _BackwardTile(192, 192, 64, 2, 1, 2, 1, ctas_a_tile=2, keys=512, window=128, case=Case(without="bias listed")),
    _BackwardTile(192, 192, 64, 2, 1, 2, 2),
    _BackwardTile(256, 256, 64, 2, 1, 2, 1, ctas_a_tile=2, keys=256, case=Case(without="left right bias listed")),
    _BackwardTile(256, 256, 64, 2, 1, 2, 1, ctas_a_tile=2, keys=512, window=64, case=Case(without="bias listed")),
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
    """The configuration that serves a call.

    Args:
        dtype: one of ``DTYPES``.
        head_dim: of q and k.
        head_dim_v: of v.
        features: of the call.
        keys: of a sequence, on average; 0 if that is not known.
        window: keys that a query attends to, if a window bounds both sides.
        low_contention: of the call's block mask, for other architectures.
        target: one of ``TARGETS``.
    """
    del low_contention
    columns_v = _tile_columns(head_dim_v)
    columns = max(_tile_columns(head_dim), columns_v)
    tile = next(t for t in _BACKWARD_TILES if t.fits(columns, columns_v, features, keys, window))._asdict()
    del tile["keys"], tile["window"], tile["case"]
    # Every thread reads its column of a bias element by element, wherever these are. Behind a softcap that one is for
    # all would be known too early, and spill.
    is_uniform = features.uniform_bias and not features.softcap
    features = replace(
        features.of_pass("backward"),
        uniform_bias=is_uniform,
        strided_bias=False,
        paired_bias=False,
        tiled_bias=False,
        dbias_of_scores=False,
        dbias_of_keys=False,
        half_columns=False,
        stored_ds=False,
        deterministic=True,
    )
    return BackwardConfig(target=target, dtype=dtype, features=features, **tile)


class BiasGradientRegisters(NamedTuple):
    """A thread's, by the role of its warpgroup."""

    compute: int  # of each of two warpgroups
    others: int  # and of two others


@dataclass(frozen=True)
class BiasGradientConfig(Sm100Config):
    """Configuration of a bias-gradient kernel."""

    pass_name: ClassVar[PassName] = "bias_gradient"
    registers: ClassVar[BiasGradientRegisters] = BiasGradientRegisters(compute=208, others=48)
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
        """How a mask is cut."""
        return MaskTile(self.tile_m, self.tile_n, row_a_thread=True)

    # The map of tensor memory.

    def first_S(self, stage: Any) -> Any:
        """The first column of scores."""
        return self.tile_n * stage

    @property
    def first_dP(self) -> int:
        """The first column of dP."""
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


_BARRIERS_AND_PIECES = 5 * 1024  # bytes, an upper bound


def bias_gradient_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    features: Features,
    *,
    split: bool = False,
    target: str = TARGETS[10, 0],
) -> BiasGradientConfig:
    """The configuration that serves a call, from the features of its backward pass."""
    stats_m = backward_config(dtype, head_dim, head_dim_v, features).tile_m
    tile_d, tile_dv = _tile_columns(head_dim), _tile_columns(head_dim_v)
    # As in the forward pass.
    features = replace(features.of_pass("bias_gradient"), uniform_bias=False, paired_bias=False)
    tiles = (
        BiasGradientConfig(target, dtype, tile_d, features, tile_dv, tile_n, stats_m, split) for tile_n in (128, 64)
    )
    config = next(tile for tile in tiles if tile._bytes(1) <= SHARED_MEMORY)
    # The sums go through shared memory in the place of operands.
    assert 2 * config.stages * config.numbers_a_stage >= 4 * config.tile_m * (config.tile_n + 1)
    return config
