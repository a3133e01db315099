"""Tile sizes of the Hopper kernels, and all else that changes their code: a table of cases for each kernel.

A table is read from the top; the first row whose head dimension and features fit is taken. Needs no cutlass.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from flash_attn_cute.kernels.arguments import BLOCK
from flash_attn_cute.kernels.backward import REVERSES_LAST, BackwardSizes
from flash_attn_cute.kernels.features import Case, Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile

HEAD_DIMS = (64, 96, 128, 192, 256)  # that tiles are made for; TMA fills the columns that a call lacks with zeros
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


def _read_alike(features: Features) -> Features:
    """Without what kernels do not look at: strided biases are read element by element, whatever else they are."""
    return replace(features, uniform_bias=False) if features.strided_bias else features


def bias_pitch(features: Features, columns: int) -> int:
    """Bytes of a row of a tile of the bias in shared memory; 0 without one, or if it does not come through it."""
    return pitch_of(columns, 4 if features.float32_bias else 2) if features.bias and not features.strided_bias else 0


def pitch_of(columns: int, element_bytes: int) -> int:
    """Bytes from row to row of a tile: a vector of 16 more than it has, for rows that do not begin with one."""
    return -(-columns * element_bytes // 16) * 16 + 16


@dataclass(frozen=True)
class ForwardConfig(Sm90Config):
    """Configuration of a forward kernel."""

    pass_name: ClassVar[PassName] = "forward"
    ctas_a_tile: ClassVar[int] = 1

    tile_dv: int  # columns of v
    tile_m: int  # rows of a tile, 64 a warpgroup
    tile_n: int  # keys a block
    stages: int  # blocks of keys in flight
    q_in_registers: bool  # Q is read from shared memory once, not for every block
    group: int  # query heads of a key head that are rows of one tile; 1, or a divisor of 64

    @property
    def has_bias_row(self) -> bool:
        """Whether all rows of a tile share one row of the bias; it is float32 in shared memory (``load_row``)."""
        return self.features.uniform_bias and self.group == 1

    @property
    def adds_to_bias(self) -> bool:
        """Whether products are added to that row, which is in the accumulators before and takes no registers.

        That is so where it was seen to win, by the larger tiles that it leaves room for. Never with a softcap, which
        comes between them, nor with largest logits, which are products.
        """
        case = Case(without=f"left {'block_mask' if self.tile_d == 64 else 'listed'} softcap max_logits")
        has_larger = self.tile_d in (64, 256) or (self.tile_d == 128 and self.features.right)
        return self.has_bias_row and has_larger and case.fits(self.features)

    @property
    def bias_pitch(self) -> int:
        """Bytes of a row of a tile of the bias in shared memory; 0 without."""
        return pitch_of(self.tile_n, 4) if self.has_bias_row else bias_pitch(self.features, self.tile_n)

    @property
    def bias_rows(self) -> int:
        """Number of rows of a bias tile in shared memory."""
        return 1 if self.has_bias_row else self.tile_m

    @property
    def bias_stages(self) -> int:
        """Tiles of the bias in flight: two if a CTA that works on one tile has room for them."""
        return 2 if self._bytes(1, 2) <= SHARED_MEMORY else 1

    def _bytes(self, tile_stages: int, bias_stages: int) -> int:
        """Bytes of shared memory for tiles. O takes the place of Q if there is only one stage of Q.

        A row of the bias is not counted: its stages are 1 KB at the most, beside the barriers.
        """
        rows_O = self.tile_dv if tile_stages > 1 else 0
        rows = self.tile_m * (tile_stages * self.tile_d + rows_O)
        rows += self.stages * self.tile_n * (self.tile_d + self.tile_dv)
        bias = 0 if self.has_bias_row else self.bias_rows * self.bias_pitch
        return 2 * rows + bias_stages * bias

    @property
    def keys_a_load(self) -> int:
        """Keys that come to shared memory together: a block of 64 of the two that a step has, or all of a step."""
        return BLOCK // 2 if self.features.half_blocks else self.tile_n

    @property
    def mask_tile(self) -> MaskTile:
        """How a mask is cut."""
        half_blocks = self.features.half_blocks
        return MaskTile(self.tile_m // self.group, self.keys_a_load, self.group, has_kinds=half_blocks)

    @property
    def blocks_an_entry(self) -> int:
        """Number of key blocks of a list entry.

        It is more than 1 where registers do not suffice for all keys of a block mask's block: a step then has a part of
        them.
        """
        if not self.features.block_mask:
            return 1
        assert self.tile_m == BLOCK
        assert BLOCK % self.tile_n == 0
        return BLOCK // self.keys_a_load

    def parts(self, lists: Any, blocks: Any) -> dict[str, tuple[Any, ...]]:
        """The parts of the workspace that a mask takes, for so many lists of at most so many blocks of keys."""
        return self.mask_tile.parts_with_lists(lists, blocks)

    @property
    def num_mma_warpgroups(self) -> int:
        """Mma warpgroups; one more is the producer's."""
        return self.tile_m // 64

    @property
    def persistent(self) -> bool:
        """Whether a CTA works on many tiles: if shared memory has room for two tiles of Q and one of O.

        With half blocks Q lies in registers, and O leaves from there, so that one tile of Q is enough.
        """
        return self.features.half_blocks or self._bytes(2, self.bias_stages) <= SHARED_MEMORY

    @property
    def tile_stages(self) -> int:
        """Tiles whose fields are in shared memory, and but for half blocks their Q."""
        return 2 if self.persistent else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer warpgroup and of the others; at most 512 in sum over the warpgroups."""
        # Who loads a bias has addresses to compute, and who loads half blocks keeps those without a partner.
        of_two = (40, 232) if self.bias_pitch or self.features.half_blocks else (24, 240)
        return of_two if self.num_mma_warpgroups == 2 else (32, 160)


class _ForwardTile(NamedTuple):
    """A row of the forward kernel's table."""

    tile_d: int
    case: Case
    tile_m: int
    tile_n: int
    stages: int
    q_in_registers: bool = False


# Shared memory has to hold Q and all stages of K and V; registers S and P of tile_n, and O of tile_dv columns. Under a
# block mask tiles have the queries of its blocks, and their keys or a part of these.
_FORWARD_TILES = (
    _ForwardTile(64, Case("half_blocks", without="bias intervals"), 128, 128, 6, q_in_registers=True),
    _ForwardTile(96, Case("half_blocks", without="bias intervals"), 128, 128, 4, q_in_registers=True),
    _ForwardTile(128, Case("half_blocks", without="bias intervals"), 128, 128, 3, q_in_registers=True),
    _ForwardTile(64, Case("block_mask strided_bias"), 128, 64, 2),
    _ForwardTile(64, Case("block_mask bias"), 128, 128, 2),
    _ForwardTile(64, Case("block_mask"), 128, 128, 4),
    _ForwardTile(96, Case("block_mask strided_bias"), 128, 64, 2),
    _ForwardTile(128, Case("block_mask strided_bias"), 128, 64, 2),
    _ForwardTile(128, Case("block_mask float32_bias"), 128, 64, 2),
    _ForwardTile(192, Case("block_mask strided_bias"), 128, 32, 2),
    _ForwardTile(192, Case("block_mask"), 128, 64, 2),
    _ForwardTile(256, Case("block_mask strided_bias"), 128, 32, 2),
    _ForwardTile(256, Case("block_mask float32_bias"), 128, 32, 2),
    _ForwardTile(256, Case("block_mask"), 128, 64, 2),
    _ForwardTile(64, Case("strided_bias"), 128, 80, 2),  # larger ones spill, here and below
    _ForwardTile(64, Case("bias"), 192, 96, 2),
    _ForwardTile(64, Case("left softcap"), 192, 96, 2),  # 128 keys spill
    _ForwardTile(64, Case(), 192, 128, 3),
    _ForwardTile(96, Case("strided_bias"), 128, 80, 2),
    _ForwardTile(96, Case(), 128, 128, 2),
    # A third less traffic of keys and values: 4 % at 8k. Under a window smaller tiles of queries win.
    _ForwardTile(128, Case(without="left right softcap mask block_mask"), 192, 80, 2),
    _ForwardTile(128, Case("uniform_mask", without="softcap bias"), 192, 80, 2),
    _ForwardTile(128, Case("strided_bias"), 128, 64, 2),
    _ForwardTile(128, Case("float32_bias"), 128, 96, 2),
    _ForwardTile(128, Case("bias"), 128, 128, 2),
    _ForwardTile(128, Case("left softcap"), 128, 128, 2),  # Q in registers spills
    _ForwardTile(128, Case("max_logits"), 128, 128, 2),  # 2 to 3 % under a causal mask
    _ForwardTile(128, Case(), 128, 128, 2, q_in_registers=True),  # 1 %; other head dimensions lack the registers
    _ForwardTile(192, Case("strided_bias"), 128, 48, 2),
    _ForwardTile(192, Case("float32_bias"), 128, 64, 2),
    _ForwardTile(192, Case("bias"), 128, 80, 2),
    _ForwardTile(192, Case(), 128, 96, 2),
    _ForwardTile(256, Case("strided_bias"), 128, 48, 2),
    _ForwardTile(256, Case("float32_bias"), 128, 48, 2),
    _ForwardTile(256, Case("bias"), 128, 64, 2),
    _ForwardTile(256, Case(), 128, 80, 2),
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
) -> ForwardConfig:
    """The configuration that serves a call: its kernel's tiles, and what is compiled into it.

    ``queries``, how many a sequence has, and ``window``, how many keys a query attends to, are for other architectures.
    """
    del queries, window
    tile_dv = _tile_columns(head_dim_v)
    tile_d = max(_tile_columns(head_dim), tile_dv)
    needs = _read_alike(features.of_pass("forward"))

    def with_tiles_of(features: Features) -> ForwardConfig:
        tile = next(t for t in _FORWARD_TILES if t.tile_d == tile_d and t.case.fits(features))
        return ForwardConfig(
            dtype=dtype,
            tile_d=tile_d,
            features=replace(needs, half_blocks="half_blocks" in tile.case.needs),
            tile_dv=tile_dv,
            tile_m=tile.tile_m,
            tile_n=tile.tile_n,
            stages=tile.stages,
            q_in_registers=tile.q_in_registers,
            group=group,
        )

    config = with_tiles_of(features)
    # Tiles are those without a bias where it takes no registers.
    return with_tiles_of(replace(features, bias=False, float32_bias=False)) if config.adds_to_bias else config


def _tile_columns(head_dim: int) -> int:
    return next(columns for columns in HEAD_DIMS if columns >= head_dim)


@dataclass(frozen=True)
class BackwardConfig(Sm90Config, BackwardSizes):
    """Configuration of the kernels of a backward pass; the main kernel comes in two kinds, see below."""

    pass_name: ClassVar[PassName] = "backward"
    tile_n: ClassVar[int] = 128  # keys a tile
    permutes_rows: ClassVar[bool] = True

    tile_m: int  # queries a block

    @property
    def columns_dQ(self) -> int:
        """Columns of a part of a block of dQ, which one warpgroup or CTA computes."""
        raise NotImplementedError

    @property
    def mask_tile(self) -> MaskTile:
        """How a mask is cut."""
        return MaskTile(self.tile_m, self.tile_n, rows_are_keys=True)

    def mask_parts(self, lists: Any, blocks: Any) -> dict[str, tuple[Any, ...]]:
        """See ``BackwardSizes``."""
        return self.mask_tile.parts(lists, blocks)


@dataclass(frozen=True)
class BackwardCtaConfig(BackwardConfig):
    """Up to d = 128: a tile of keys is one CTA's work.

    Additions to dQ have an order where that is asked for, or faster (``_adds_in_order``).
    """

    ctas_a_tile: ClassVar[int] = 1
    counts_additions: ClassVar[bool] = True
    stages: ClassVar[int] = 2  # blocks of queries in flight
    pieces_a_gradient: ClassVar[int] = 1  # in which dV leaves, and dK

    # Columns of K that are in registers for the scores, and not read from shared memory for every block.
    columns_K: int
    # Whether a step is a chain of short links, in which to wait for a load or a fence is what costs most. Then lse is
    # read before the scores are begun, and dQ is signalled in the next step.
    short_steps: bool
    registers: tuple[int, int]  # a thread of the producer warpgroup and of the others
    fixed_point: bool = False
    halves_dV: bool = False  # dV is issued by halves of a block's queries, the first while P of the second is computed

    @property
    def zeroes_sums(self) -> bool:
        """Whether warp 3 zeroes the sums of dQ. If so, each tile counts its additions at its end."""
        return not self.features.deterministic and not self.features.listed

    @property
    def signals_apart(self) -> bool:
        """Whether warp 3 signals ordered additions of storing warps: with a bias or under a mask it has more to do."""
        return self.in_order and not (self.features.bias or self.features.listed)

    @property
    def num_mma_warpgroups(self) -> int:
        """Mma warpgroups, 64 keys each; one more is the producer's."""
        return self.tile_n // 64

    @property
    def bias_pitch(self) -> int:
        """See ``ForwardConfig``. At d = 128 float32 has no room, except for one row."""
        return _backward_bias_pitch(self.tile_d, self.features)

    @property
    def tiles_bias(self) -> bool:
        """Whether TMA loads the bias of a step."""
        return self.features.tiled_bias

    @property
    def tiles_dbias(self) -> bool:
        """Whether TMA stores dS, as the gradient of a bias with an element for every score."""
        return self.tiles_bias and self.features.dbias

    @property
    def bias_rows(self) -> int:
        """See ``ForwardConfig.bias_rows``."""
        return 1 if self.features.uniform_bias else self.tile_m

    @property
    def bias_stages(self) -> int:
        """Tiles of the bias in shared memory."""
        return 2 if self._bytes(2) <= SHARED_MEMORY else 1

    def _bytes(self, bias_stages: int) -> int:
        """Bytes of shared memory: K and V, Q and dO, dS in two stages, dQ on its way out, and the bias."""
        keys, queries = (self.k_stages + 1) * self.tile_n, 2 * self.stages * self.tile_m
        sums = 2 * self.num_mma_warpgroups * 64 * self.columns_dQ
        columns = (keys + queries) * self.tile_d + 2 * self.tile_n * self.tile_m + sums
        bias = 2 * self.tile_m * self.tile_n if self.tiles_bias else self.bias_rows * self.bias_pitch
        return 2 * columns + bias_stages * bias

    @property
    def k_stages(self) -> int:
        """Tiles of K in shared memory: one, where a bias or a larger block of queries leaves no room for two."""
        takes_room = self.tiles_bias or (self.bias_pitch and self.bias_rows > 1) or self.tile_m > 64
        return 1 if self.tile_d == 128 and takes_room else 2

    @property
    def transposes_dQ(self) -> bool:
        """Whether rows of a product are columns of dQ, as a block's queries are no multiple of the 64 rows."""
        return self.tile_m % 64 != 0

    @property
    def dS_by_queries(self) -> bool:
        """Whether a row of dS in shared memory is a query's, as dQ' = K' dS' and the gradient of a bias need it."""
        return self.transposes_dQ or self.tiles_bias

    @property
    def hands_out_late(self) -> bool:
        """Whether mma warps signal a dQ in the next step only, which with one K would be too late behind a tile."""
        return self.short_steps and self.k_stages == 2

    @property
    def columns_dQ(self) -> int:
        """Columns of a warpgroup's product of 64 rows: some of dQ's, or, if that is transposed, queries."""
        return self.tile_d * self.tile_m // 64 // self.num_mma_warpgroups

    @property
    def groups_of_stats(self) -> int:
        """Groups of sixteen queries whose lse, and then delta, a thread reads ahead of time."""
        return 4 if self.short_steps else 1

    @property
    def semaphores(self) -> tuple[int, int]:
        """Number of semaphores of a block: one a warpgroup."""
        return self.num_mma_warpgroups, self.num_mma_warpgroups

    @property
    def reverses_last(self) -> bool:
        """Whether the last section's tiles have the opposite order, where that pays."""
        return self.in_order and REVERSES_LAST.fits(self.features)


@dataclass(frozen=True)
class BackwardHalfBlocksConfig(BackwardCtaConfig):
    """Up to d = 128, for block masks of blocks of 64: a tile of 64 keys is the work of one of the two CTAs of an SM."""

    tile_n: ClassVar[int] = BLOCK // 2
    ctas_an_sm: ClassVar[int] = 2

    @property
    def k_stages(self) -> int:
        """Tiles whose K is in shared memory: two CTAs leave room for one each."""
        return 1

    @property
    def do_stages(self) -> int:
        """Blocks of dO in flight, as many as half of an SM's shared memory has room for."""
        return 2 if self.tile_d < 128 else 1

    @property
    def out_stages(self) -> int:
        """Pieces of results on their way out, likewise."""
        return 2 if self.tile_d == 64 else 1

    @property
    def mask_tile(self) -> MaskTile:
        """How a mask is cut: both tiles of a block have their bits side by side."""
        return MaskTile(self.tile_m, BLOCK, rows_are_keys=True)

    @property
    def pieces_dQ(self) -> int:
        """Pieces in which a block of dQ leaves: no larger than dV or dK, where room is short."""
        return 1 if self.tile_d == 64 else 2

    @property
    def pieces_dKV(self) -> int:
        """Pieces in which dV and dK of a tile leave; none where they are float32."""
        return 0 if self.features.wide else 2 * self.pieces_a_gradient


@dataclass(frozen=True)
class BackwardStoredDSConfig(BackwardHalfBlocksConfig):
    """Block masks of which dS has room in the workspace: another kernel multiplies it by K.

    Masks of blocks of 64 have it, and in deterministic passes those of larger blocks of which not too many are visible.
    Nothing is added in global memory but dK and dV of grouped heads, so that all other passes are deterministic. For
    d = 128 alone: a block of dS takes as much memory at any d, and at d = 64 and 96 passes are slower by it.
    """

    stores_dS: ClassVar[bool] = True
    counts_additions: ClassVar[bool] = False
    in_order: ClassVar[bool] = False  # type: ignore[assignment]
    zeroes_sums: ClassVar[bool] = False  # type: ignore[assignment]
    pieces_dQ: ClassVar[int] = 1  # type: ignore[assignment]  # of dS, 64 x 64
    pieces_a_gradient: ClassVar[int] = 2  # of dV, or of dK: 64 columns, as dS has them
    do_stages: ClassVar[int] = 2  # type: ignore[assignment]  # dQ takes no time in which a block could come
    out_stages: ClassVar[int] = 1  # type: ignore[assignment]  # pieces on their way out
    stages_of_dQ: ClassVar[int] = 4  # blocks of dS and K in flight, in the kernel of dQ
    ctas_of_dQ: ClassVar[int] = 2  # an SM, as many as shared memory has room for


def _backward_bias_pitch(tile_d: int, features: Features) -> int:
    if features.tiled_bias:
        return 0
    if tile_d == 128 and features.float32_bias and not features.uniform_bias:
        return 0
    return bias_pitch(features, BackwardConfig.tile_n)


class _BackwardTile(NamedTuple):
    """A row of the table of the backward kernel up to d = 128."""

    tile_d: int
    case: Case
    tile_m: int
    columns_K: int
    short_steps: bool
    registers: tuple[int, int] = (24, 240)
    halves_dV: bool = False
    least_keys: int = 0  # of a sequence


# Every query attends to every key; only variants that have been timed.
_FULL = Case(without="right left softcap bias mask block_mask packed wide deterministic")
_FULL_UNGROUPED = Case(without="right left softcap bias mask block_mask packed wide grouped")
_FULL_GROUPED_IN_ORDER = Case("grouped deterministic", without="right left softcap bias mask block_mask packed wide")
_LONG = 8192  # keys of a sequence, from which on full masks at d = 128 have a row of their own

# d = 128: blocks of 80 queries read K and V a fifth less often, but leave room for one K alone, so that tiles do not
# overlap. Full masks over 8k and 16k keys are 0.6 to 2.6 % faster on an H100. On an H200 those of grouped heads are 5
# and 1 % faster over 8k and 32k keys, and in order 1 to 3.5 % over 4k and 8k. Ungrouped ones over 2k and 4k keys are
# 6 % slower. Causal passes gain nothing.
# d = 64: with dV in halves full masks are 3 to 8 % faster on an H200, 8k causal 2 % slower. The bits are the same.

# 64 columns of K are 1 to 2.5 % faster where they spill nothing; a windowed d = 128 has the registers, but is slower.
# With 128 queries in a step the products last longer than any wait: causal passes are 2 % faster if a step hands its
# results out as soon as it can, but full ones slower.
_BACKWARD_TILES = (
    _BackwardTile(64, Case("softcap"), 64, 16, True),  # 128 queries spill
    _BackwardTile(64, Case("bias"), 64, 16, True),  # likewise
    _BackwardTile(64, Case("right", without="grouped"), 128, 64, False),
    _BackwardTile(64, Case("right"), 128, 16, False),  # to add to what others have left takes registers
    _BackwardTile(64, _FULL_UNGROUPED, 128, 64, True, halves_dV=True),
    _BackwardTile(64, Case(without="grouped"), 128, 64, True),
    _BackwardTile(64, Case(), 128, 16, True),
    _BackwardTile(96, Case(), 64, 16, True, (40, 232)),
    _BackwardTile(128, Case("strided_bias"), 64, 16, True),
    _BackwardTile(128, Case("float32_bias", without="uniform_bias"), 64, 16, True),
    _BackwardTile(128, Case("uniform_bias"), 64, 16, True),
    _BackwardTile(128, Case("bias"), 64, 16, False),  # where there is but one K, steps of tiles do not overlap
    _BackwardTile(128, _FULL, 80, 16, True, least_keys=_LONG),
    _BackwardTile(128, _FULL_GROUPED_IN_ORDER, 80, 16, True, least_keys=_LONG // 2),
    _BackwardTile(128, Case(without="right grouped"), 64, 64, True),
    _BackwardTile(128, Case(), 64, 16, True),
)


_MAY_HAVE_HALVES = Case("block_mask", without="bias intervals packed")  # tiles of 64 keys


# Keys of a sequence up to which sums in order are faster: zeros in sums that have none are traffic to memory, as much
# for short sequences as for long ones. On an H100 at d = 128 causal passes in order take 0.95 of the time at 512 keys,
# 1.02 at 1k, 1.10 at 2k and above.
KEYS_IN_ORDER = 512


def _adds_in_order(features: Features, keys: int) -> bool:
    """Whether additions to dQ have an order without ``deterministic=True``.

    They have with a bias or a left bound, except where TMA stores the bias's gradient. That takes 0.88 to 0.95 of the
    time without an order on an H200, causal 0.85; ALiBi 1.01, causal 1.05. Other cases have not been measured. Under
    masks tiles would wait.
    """
    waits = features.left or (features.bias and not (features.tiled_bias and features.dbias))
    return not features.listed and (waits or 0 < keys <= KEYS_IN_ORDER)


@dataclass(frozen=True)
class BackwardClusterConfig(BackwardConfig):
    """Above d = 128: a tile of keys is the work of a cluster of two CTAs, 64 keys each."""

    ctas_a_tile: ClassVar[int] = 2
    sums_heads: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    reverses_last: ClassVar[bool] = False

    tile_dv: int  # columns of v
    columns_dO: int  # that are loaded and released together, and of dV in a product
    columns_dK: int  # in a product
    keys_in_registers: bool  # K and V are read from shared memory once, not for every block of queries
    registers: tuple[int, int, int, int]  # a thread of each warpgroup; 512 in sum

    @property
    def parts_of_bias(self) -> int:
        """Parts in which the bias of a step is read, where registers do not suffice for all of it."""
        return 4 if self.tile_d == 256 and not self.features.softcap else 1

    @property
    def parts_dO(self) -> int:
        """Parts of a block of dO."""
        return self.tile_dv // self.columns_dO

    @property
    def columns_dQ(self) -> int:
        """Number of dQ columns that a CTA computes."""
        return self.tile_d // 2

    @property
    def semaphores(self) -> tuple[int, int]:
        """Number of semaphores: of queries one a CTA; of keys one a CTA and gradient, dK and dV."""
        return 2, 4


class _ClusterTile(NamedTuple):
    """A row of the table of the backward kernel above d = 128: a case, and fields of its configuration."""

    case: Case
    tile_d: int
    tile_dv: int
    columns_dO: int
    columns_dK: int
    keys_in_registers: bool
    registers: tuple[int, int, int, int]


_CLUSTER_TILES = (
    # Multi-head latent attention. Narrow values leave registers for K and V: 7 %, as shared memory is what is busiest.
    _ClusterTile(Case(without="bias"), 192, 128, 128, 192, True, (24, 184, 208, 96)),
    _ClusterTile(Case(), 192, 128, 128, 192, False, (24, 200, 192, 96)),  # a bias takes registers
    _ClusterTile(Case(), 192, 192, 192, 192, False, (24, 200, 192, 96)),
    # Shared memory has no room for two blocks of dO, and the assembler refuses products of 256 columns of 512 threads.
    _ClusterTile(Case(), 256, 256, 128, 128, False, (24, 200, 192, 96)),
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
) -> BackwardConfig:
    """The configuration that serves a call: its kernels' tiles, and what is compiled into them.

    Args:
        dtype: one of ``DTYPES``.
        head_dim: of q and k.
        head_dim_v: of v.
        features: of the call.
        keys: of a sequence, on average; 0 if that is not known.
        window: keys that a query attends to, for other architectures.
        low_contention: of the call's block mask (``AttentionSpec``). Up to d = 128 its additions to dQ have an order,
            asked for or not; clusters are faster without.
    """
    del window
    tile_d = _tile_columns(max(head_dim, head_dim_v))
    features = replace(_read_alike(features.of_pass("backward")), paired_bias=False)
    if features.dbias_of_scores:
        features = replace(features, dbias=True, dbias_of_scores=False)
    if tile_d > 128:
        # It reads all biases alike, and others compute their gradient.
        others = "strided_bias uniform_bias tiled_bias dbias dbias_of_scores dbias_of_keys half_columns stored_ds"
        features = replace(features, **dict.fromkeys(others.split(), False))
        fitting = (t for t in _CLUSTER_TILES if t.tile_d == tile_d and t.tile_dv >= head_dim_v)
        tile = next(t for t in fitting if t.case.fits(features))._asdict()
        del tile["case"]
        return BackwardClusterConfig(dtype=dtype, features=features, tile_m=64, **tile)
    fitting = (t for t in _BACKWARD_TILES if t.tile_d == tile_d and t.case.fits(features))
    row = next(t for t in fitting if keys >= t.least_keys)
    in_order = features.deterministic or low_contention or _adds_in_order(features, keys)
    features = replace(features, deterministic=in_order)
    # Warpgroup 0 has more to keep where it copies rows of a bias, loads its tiles and stores theirs of dS under a right
    # bound, or looks after the lists of several heads.
    copies = _backward_bias_pitch(tile_d, features) > 0 and not features.uniform_bias
    stores = features.tiled_bias and features.dbias and features.right
    is_busy = copies or stores or (features.listed and features.grouped)
    registers = (40, 232) if is_busy else row.registers
    # Tiles of other masks wait so little for their turns that to convert dQ takes longer.
    fixed_point = features.deterministic and features.block_mask and not (low_contention or features.packed)
    if _MAY_HAVE_HALVES.fits(features) and (fixed_point or (features.half_columns and not in_order)):
        if features.stored_ds and tile_d == 128:
            # As many columns of K as registers suffice for: what is read from shared memory limits the kernel.
            columns_K, features = 16 if features.softcap else 32, replace(features, half_columns=True)
            return BackwardStoredDSConfig(dtype, tile_d, features, BLOCK // 2, columns_K, False, (24, 232))
        if features.half_columns:
            features = replace(features, stored_ds=False)
            return BackwardHalfBlocksConfig(dtype, tile_d, features, BLOCK // 2, 16, False, (24, 232), fixed_point)
    features = replace(features, half_columns=False, stored_ds=False)
    return BackwardCtaConfig(
        dtype, tile_d, features, row.tile_m, row.columns_K, row.short_steps, registers, fixed_point, row.halves_dV
    )


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
    tile_d, tile_dv = _tile_columns(head_dim), _tile_columns(head_dim_v)
    features = _read_alike(features.of_pass("bias_gradient"))
    widths = (64, 32) if features.strided_bias else (128, 64, 32)  # read one by one, more keys spill
    tiles = (BiasGradientConfig(dtype, tile_d, features, tile_dv, tile_n, stats_m, split) for tile_n in widths)
    return next(tile for tile in tiles if tile._bytes(1) <= SHARED_MEMORY)
