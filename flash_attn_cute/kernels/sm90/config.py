"""Tile sizes of the Hopper kernels, and all else that changes their code."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class ForwardConfig:
    """What a compiled forward kernel is made for. Lengths, strides, scale and window sizes are run-time arguments."""

    dtype: str  # "bfloat16" or "float16"
    tile_d: int  # head dimension of q and k, rounded up; TMA fills the rest with zeros
    tile_dv: int
    tile_m: int  # rows of a tile, 64 a warpgroup
    tile_n: int  # keys a block
    stages: int  # blocks of keys in flight
    group: int  # query heads of a key head that are rows of one tile; 1, or a divisor of 64
    packed: bool
    has_seqused_q: bool
    has_seqused_k: bool
    has_left: bool  # a window bounded to the left
    has_right: bool  # to the right; causal is a right of 0
    has_softcap: bool
    has_sink: bool
    zero_padding: bool

    @property
    def num_mma_warpgroups(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return self.tile_m // 64

    @property
    def q_in_registers(self) -> bool:
        """Q is read from shared memory once, not for every block: 1 % at d = 128; elsewhere it takes too many."""
        roomy = self.num_mma_warpgroups == 2 and not (self.has_left and self.has_softcap)
        return self.tile_d == 128 and roomy

    @property
    def persistent(self) -> bool:
        """Whether a CTA works on many tiles: if shared memory has room for two tiles of Q and one of O."""
        rows = self.tile_m * (2 * self.tile_d + self.tile_dv) + self.stages * self.tile_n * (self.tile_d + self.tile_dv)
        return 2 * rows <= 224 * 1024

    @property
    def tile_stages(self) -> int:
        """Tiles whose Q is in shared memory."""
        return 2 if self.persistent else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the loading warpgroup and of the others; 512 in sum over the warpgroups."""
        return {2: (24, 240), 3: (32, 160)}[self.num_mma_warpgroups]


# Head dimensions that tiles are made for, and (tile_m, tile_n, stages) of each. Shared memory: Q and all K and V
# stages within 227 KiB. Registers: S and P of tile_n and O of tile_dv columns within the budget above.
_TILES = {
    64: (192, 128, 3),
    96: (128, 128, 2),
    128: (128, 128, 2),
    192: (128, 96, 2),
    256: (128, 80, 2),
}
HEAD_DIMS = tuple(_TILES)


def tile_shape(tile_d: int, has_left: bool, has_right: bool, has_softcap: bool) -> tuple[int, int, int]:
    """(tile_m, tile_n, stages) for one of ``HEAD_DIMS``, the kind of window and a softcap."""
    if tile_d == 64 and has_left and has_softcap:
        return 192, 96, 2  # 128 keys spill
    if tile_d == 128 and not (has_left or has_right or has_softcap):
        return 192, 80, 2  # 4 % at 8k: a third less traffic of keys and values; under a window smaller tiles win
    return _TILES[tile_d]


def forward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    *,
    group: int = 1,
    packed: bool = False,
    has_seqused_q: bool = False,
    has_seqused_k: bool = False,
    has_left: bool = False,
    has_right: bool = False,
    has_softcap: bool = False,
    has_sink: bool = False,
    zero_padding: bool = True,
) -> ForwardConfig:
    """The configuration that serves a call: its kernel's tiles, and what is compiled into it."""
    tile_dv = _tile_columns(head_dim_v)
    tile_d = max(_tile_columns(head_dim), tile_dv)
    tile_m, tile_n, stages = tile_shape(tile_d, has_left, has_right, has_softcap)
    return ForwardConfig(
        dtype=dtype,
        tile_d=tile_d,
        tile_dv=tile_dv,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        group=group,
        packed=packed,
        has_seqused_q=has_seqused_q,
        has_seqused_k=has_seqused_k,
        has_left=has_left,
        has_right=has_right,
        has_softcap=has_softcap,
        has_sink=has_sink,
        zero_padding=zero_padding,
    )


def _tile_columns(head_dim: int) -> int:
    return next(columns for columns in HEAD_DIMS if columns >= head_dim)


@dataclass(frozen=True)
class _BackwardFeatures:
    """What calls ask of either backward kernel."""

    dtype: str
    tile_d: int  # columns of q, k and v; TMA fills what they lack with zeros
    packed: bool
    has_seqused_q: bool
    has_seqused_k: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    grouped: bool  # query heads share a key head
    zero_padding: bool


@dataclass(frozen=True)
class BackwardConfig(_BackwardFeatures):
    """What a compiled backward kernel is made for."""

    tile_m: int  # queries a block
    tile_n: int  # keys a tile, 64 a warpgroup
    stages: int  # blocks of queries in flight

    ctas_a_tile: ClassVar[int] = 1
    deterministic: ClassVar[bool] = True  # asked for or not: it takes no longer

    @property
    def turns_last(self) -> bool:
        """Whether the last section of heads goes the other way round (``key_tiles``)."""
        return self.has_right and not (self.packed or self.grouped)

    @property
    def num_mma_warpgroups(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return self.tile_n // 64

    @property
    def columns_dQ(self) -> int:
        """Columns of dQ that a warpgroup computes, for 64 queries: all of them if there are queries for each."""
        return self.tile_d * self.tile_m // 64 // self.num_mma_warpgroups

    @property
    def columns_K(self) -> int:
        """Columns of K that are in registers for the scores, and not read from shared memory for every block.

        Where they spill nothing 64 are 1 to 2.5 % faster, but for windows bounded to the right at d = 128.
        """
        roomy = {64: not self.has_softcap, 96: False, 128: not self.has_right}[self.tile_d]
        return 64 if roomy and not self.grouped else 16

    @property
    def short_steps(self) -> bool:
        """Whether a step is a chain of short links, in which to wait for a load or a fence is what costs most.

        Then lse is read before the scores are begun, and of dQ others are told in the next step. With 128 queries in
        a step the products last longer than either, and causal passes are 2 % faster if both happen when they can, but
        full ones slower.
        """
        return self.tile_m == 64 or not self.has_right

    @property
    def groups_of_stats(self) -> int:
        """Groups of sixteen queries whose lse, and then delta, a thread reads ahead of time."""
        return 4 if self.short_steps else 1

    @property
    def counters(self) -> tuple[int, int]:
        """Counters of additions a block of queries, and of keys, one a warpgroup."""
        return self.num_mma_warpgroups, self.num_mma_warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the first warpgroup and of the others."""
        return (40, 232) if self.tile_d == 96 else (24, 240)


@dataclass(frozen=True)
class BackwardWideConfig(_BackwardFeatures):
    """What a compiled backward kernel for head dimensions above 128 is made for."""

    deterministic: bool

    ctas_a_tile: ClassVar[int] = 2
    turns_last: ClassVar[bool] = False

    @property
    def tile_m(self) -> int:
        """Queries a block."""
        return 64

    @property
    def tile_n(self) -> int:
        """Keys a tile, 64 a CTA of a cluster of two."""
        return 128

    @property
    def columns_dQ(self) -> int:
        """Columns of dQ that a CTA computes."""
        return self.tile_d // 2

    @property
    def columns_dO(self) -> int:
        """Columns of dO that are loaded and released together, and of dV and dK in a product.

        Shared memory has no room for two blocks of 256, and the assembler refuses such products of 512 threads.
        """
        return {192: 192, 256: 128}[self.tile_d]

    @property
    def counters(self) -> tuple[int, int]:
        """Counters of additions a block of queries, one a CTA, and of keys, for dK and dV each."""
        return 2, 4

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """Registers a thread of each warpgroup; 512 in sum."""
        return 24, 200, 192, 96


PART_ALIGN = 128  # bytes of which each part of a backward pass's workspace takes a multiple


@dataclass(frozen=True)
class BackwardPassConfig:
    """What the kernels of a backward pass are made for; those before and after the main one go by its configuration."""

    main: BackwardConfig | BackwardWideConfig
    has_dlse: bool

    @property
    def tile_d(self) -> int:
        """Columns of a block."""
        return self.main.tile_d

    def parts(self, heads: Any, blocks: Any, heads_k: Any, blocks_k: Any) -> dict[str, tuple[Any, ...]]:
        """The parts of the workspace, of numbers of 4 bytes, in the order in which they lie in it: their shapes.

        Args:
            heads: of queries; like all others an int, or the kernels' Int32.
            blocks: of queries a head.
            heads_k: of keys.
            blocks_k: tiles of keys a head.
        """
        c = self.main
        counters, counters_k = c.counters
        parts: dict[str, tuple[Any, ...]] = {
            "mStats": (2, heads, blocks, c.tile_m),
            "mdQaccum": (heads, blocks, c.tile_m * c.tile_d),
        }
        if c.deterministic:
            parts["mTurnsQ"] = counters, heads, blocks
        if c.grouped:
            parts["mTurnsK"] = counters_k, heads_k, blocks_k
            parts["mdKVaccum"] = 2, heads_k, blocks_k, c.tile_n * c.tile_d
        return parts

    def workspace_size(self, heads: int, blocks: int, heads_k: int, blocks_k: int, shares: bool) -> int:
        """Bytes of workspace: of its parts, each a multiple of ``PART_ALIGN``.

        Args:
            heads: as in ``parts``.
            blocks: as in ``parts``.
            heads_k: as in ``parts``.
            blocks_k: as in ``parts``.
            shares: whether tiles leave sums of dK and dV to others; else these, which are last, have no memory.
        """
        parts = self.parts(heads, blocks, heads_k, blocks_k)
        if not shares:
            parts.pop("mdKVaccum", None)
        return sum(-(-4 * math.prod(shape) // PART_ALIGN) * PART_ALIGN for shape in parts.values())


def backward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    *,
    packed: bool = False,
    has_seqused_q: bool = False,
    has_seqused_k: bool = False,
    has_left: bool = False,
    has_right: bool = False,
    has_softcap: bool = False,
    has_dlse: bool = False,
    grouped: bool = False,
    deterministic: bool = False,
    zero_padding: bool = True,
) -> BackwardPassConfig:
    """The configuration that serves a call: its kernels' tiles, and what is compiled into them."""
    tile_d = _tile_columns(max(head_dim, head_dim_v))
    features: dict[str, Any] = {
        "dtype": dtype,
        "tile_d": tile_d,
        "packed": packed,
        "has_seqused_q": has_seqused_q,
        "has_seqused_k": has_seqused_k,
        "has_left": has_left,
        "has_right": has_right,
        "has_softcap": has_softcap,
        "grouped": grouped,
        "zero_padding": zero_padding,
    }
    main: BackwardConfig | BackwardWideConfig
    if tile_d > 128:
        main = BackwardWideConfig(**features, deterministic=deterministic)
    else:
        tile_m = 128 if tile_d == 64 and not has_softcap else 64  # 128 spill elsewhere
        main = BackwardConfig(**features, tile_m=tile_m, tile_n=128, stages=2)
    return BackwardPassConfig(main, has_dlse)
