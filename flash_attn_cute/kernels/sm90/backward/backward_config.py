"""Tile sizes of Hopper's backward kernels, and all else that changes their code: a table of cases for each kind.

A table is read from the top; the first row whose head dimension and features fit is taken. Needs no cutlass.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from flash_attn_cute.kernels.arguments import BLOCK
from flash_attn_cute.kernels.backward import BackwardSizes
from flash_attn_cute.kernels.features import Case, Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile
from flash_attn_cute.kernels.sm90.config import SHARED_MEMORY, Sm90Config, bias_pitch, read_alike, tile_columns


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


@dataclass(frozen=True)
class BackwardCtaConfig(BackwardConfig):
    """Up to d = 128: a tile of keys is one CTA's work.

    Additions to dQ have an order where that is asked for, or faster (``_adds_in_order``).
    """

    ctas_a_tile: ClassVar[int] = 1
    counts_additions: ClassVar[bool] = True
    stages: ClassVar[int] = 2  # blocks of queries in flight
    pieces_a_gradient: ClassVar[int] = 1  # in which dV leaves, and dK
    delays_dQ: ClassVar[bool] = True  # dQ of a step is computed in the next one

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
    def tiles_dbias(self) -> bool:
        """Whether TMA stores dS, as the gradient of a bias with an element for every score."""
        return self.features.tiled_bias and self.features.dbias

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
        bias = 2 * self.tile_m * self.tile_n if self.features.tiled_bias else self.bias_rows * self.bias_pitch
        return 2 * columns + bias_stages * bias

    @property
    def k_stages(self) -> int:
        """Tiles of K in shared memory: one, where a bias or a larger block of queries leaves no room for two."""
        takes_room = self.features.tiled_bias or (self.bias_pitch and self.bias_rows > 1) or self.tile_m > 64
        return 1 if self.tile_d == 128 and takes_room else 2

    @property
    def transposes_dQ(self) -> bool:
        """Whether rows of a product are columns of dQ, as a block's queries are no multiple of the 64 rows."""
        return self.tile_m % 64 != 0

    @property
    def dS_by_queries(self) -> bool:
        """Whether a row of dS in shared memory is a query's, as dQ' = K' dS' and the gradient of a bias need it."""
        return self.transposes_dQ or self.features.tiled_bias

    @property
    def hands_out_late(self) -> bool:
        """Whether mma warps signal a dQ in the next step only, which with one K would be too late behind a tile."""
        return self.short_steps and self.k_stages == 2

    @property
    def columns_dQ(self) -> int:
        """Columns of a warpgroup's product of 64 rows: some of dQ's, or, if that is transposed, queries."""
        return self.tile_d * self.tile_m // 64 // self.num_mma_warpgroups

    @property
    def semaphores(self) -> tuple[int, int]:
        """Number of semaphores of a block: one a warpgroup."""
        return self.num_mma_warpgroups, self.num_mma_warpgroups

    def piece_number(self, step: Any, tile_idx: Any) -> Any:
        """Number of the next piece that a warpgroup puts out, in a step or behind a tile's last: dQ, or dV, then dK.

        Where shared memory has one stage of K, the tile's last dQ comes before dV and dK. Where dV and dK are float32
        they are no pieces, but are counted all the same: two more or less make no difference to a ring of one stage.
        """
        return step - 1 + 2 * tile_idx


@dataclass(frozen=True)
class BackwardHalfBlocksConfig(BackwardCtaConfig):
    """Up to d = 128, for block masks of blocks of 64: a tile of 64 keys is the work of one of the two CTAs of an SM."""

    tile_n: ClassVar[int] = BLOCK // 2
    ctas_an_sm: ClassVar[int] = 2
    delays_dQ: ClassVar[bool] = False

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
        return 2 if self.tile_d <= 64 else 1

    @property
    def mask_tile(self) -> MaskTile:
        """How a mask is cut: both tiles of a block have their bits side by side."""
        return MaskTile(self.tile_m, BLOCK, rows_are_keys=True)

    @property
    def pieces_dQ(self) -> int:
        """Pieces in which a block of dQ leaves: no larger than dV or dK, where room is short."""
        return 1 if self.tile_d <= 64 else 2

    def piece_number(self, step: Any, tile_idx: Any) -> Any:
        """See ``BackwardCtaConfig``; float32 is not counted."""
        pieces_a_tile = 0 if self.features.wide else 2 * self.pieces_a_gradient
        return self.pieces_dQ * step + pieces_a_tile * tile_idx


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


# Every query attends to every key; only variants that have been timed.
_LONG = 8192  # keys of a sequence, from which on full masks at d = 128 have a row of their own
_FULL = Case(without="right left softcap bias mask block_mask packed wide deterministic", rows=_LONG)
_FULL_UNGROUPED = Case(without="right left softcap bias mask block_mask packed wide grouped")
_FULL_GROUPED_IN_ORDER = Case(
    "grouped deterministic", without="right left softcap bias mask block_mask packed wide", rows=_LONG // 2
)

# d = 128: blocks of 80 queries read K and V a fifth less often, but leave room for one K alone, so that tiles do not
# overlap. Full masks over 8k and 16k keys are 0.6 to 2.6 % faster on an H100. On an H200 those of grouped heads are 5
# and 1 % faster over 8k and 32k keys, and in order 1 to 3.5 % over 4k and 8k. Ungrouped ones over 2k and 4k keys are
# 6 % slower. Causal passes gain nothing.
# d = 64: with dV in halves full masks are 3 to 8 % faster on an H200, 8k causal 2 % slower. The bits are the same.

# 64 columns of K are 1 to 2.5 % faster where they spill nothing; a windowed d = 128 has the registers, but is slower.
# With 128 queries in a step the products last longer than any wait: causal passes are 2 % faster if a step hands its
# results out as soon as it can, but full ones slower.
_BACKWARD_TILES = (
    _BackwardTile(32, Case("softcap"), 64, 32, True, (40, 232)),  # 128 queries spill
    _BackwardTile(32, Case("right"), 128, 32, False, (40, 232)),
    _BackwardTile(32, _FULL_UNGROUPED, 128, 32, True, halves_dV=True),
    _BackwardTile(32, Case(), 128, 32, True, (40, 232)),
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
    _BackwardTile(128, _FULL, 80, 16, True),
    _BackwardTile(128, _FULL_GROUPED_IN_ORDER, 80, 16, True),
    _BackwardTile(128, Case(without="right grouped"), 64, 64, True),
    _BackwardTile(128, Case(), 64, 16, True),
)
_HAS_HALVES = Case("block_mask half_columns", without="bias intervals packed")  # tiles of 64 keys

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
    """The configuration that serves a call (``registry.Pass.configure``).

    Under a block mask of low contention (``AttentionSpec``) additions to dQ have an order up to d = 128, asked for or
    not; clusters are faster without. The window is for other architectures.
    """
    del window
    tile_d = tile_columns(max(head_dim, head_dim_v))
    features = replace(read_alike(features.of_pass("backward")), paired_bias=False)
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
    row = next(t for t in _BACKWARD_TILES if t.tile_d == tile_d and t.case.fits(features, keys))
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
    if _HAS_HALVES.fits(features) and (fixed_point or not in_order):
        if features.stored_ds and tile_d == 128:
            # As many columns of K as registers suffice for: what is read from shared memory limits the kernel.
            columns_K = 16 if features.softcap else 32
            if not features.grouped:  # nothing is added that could have another order: the machine code is the same
                features = replace(features, deterministic=True)
            return BackwardStoredDSConfig(dtype, tile_d, features, BLOCK // 2, columns_K, False, (24, 232))
        features = replace(features, stored_ds=False)
        return BackwardHalfBlocksConfig(dtype, tile_d, features, BLOCK // 2, 16, False, (24, 232), fixed_point)
    features = replace(features, half_columns=False, stored_ds=False)
    return BackwardCtaConfig(
        dtype, tile_d, features, row.tile_m, row.columns_K, row.short_steps, registers, fixed_point, row.halves_dV
    )
