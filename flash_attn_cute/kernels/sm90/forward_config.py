"""Tile sizes of Hopper's forward kernels, and all else that changes their code: a table of cases.

The table is read from the top; the first row whose head dimension and features fit is taken. Needs no cutlass.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from flash_attn_cute.kernels.arguments import BLOCK
from flash_attn_cute.kernels.features import Case, Features, PassName
from flash_attn_cute.kernels.mask_tile import MaskTile
from flash_attn_cute.kernels.sm90.config import (
    SHARED_MEMORY,
    Sm90Config,
    bias_pitch,
    pitch_of,
    read_alike,
    tile_columns,
)


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
        case = Case(without=f"left {'block_mask' if self.tile_d <= 64 else 'listed'} softcap max_logits")
        has_larger = self.tile_d in (32, 64, 256) or (self.tile_d == 128 and self.features.right)
        return self.has_bias_row and has_larger and case.fits(self.features)

    @property
    def bias_pitch(self) -> int:
        """Bytes of a row of a tile of the bias in shared memory; 0 without."""
        if self.features.tiled_bias:
            return 0
        return pitch_of(self.tile_n, 4) if self.has_bias_row else bias_pitch(self.features, self.tile_n)

    @property
    def bias_rows(self) -> int:
        """Number of rows of a bias tile in shared memory."""
        return 1 if self.has_bias_row else self.tile_m

    @property
    def bias_stages(self) -> int:
        """Tiles of the bias in flight: two if there is room for them, without more tiles of Q.

        A warpgroup's rows of a tile that TMA loads have stages of their own. So one is nearly as good as two, and
        persistent CTAs have the room.
        """
        tile_stages = 2 if self.features.tiled_bias and self._bytes(2, 1) <= SHARED_MEMORY else 1
        return 2 if self._bytes(tile_stages, 2) <= SHARED_MEMORY else 1

    @property
    def reads_bias_late(self) -> bool:
        """Whether a tile of the bias is read when scores are there: registers do not suffice for it beside P."""
        return self.features.tiled_bias and self.tile_n + self.tile_dv // 2 > self.registers[1] - 40

    def _bytes(self, tile_stages: int, bias_stages: int) -> int:
        """Bytes of shared memory for tiles. O takes the place of Q if there is only one stage of Q.

        A row of the bias is not counted: its stages are 1 KB at the most, beside the barriers.
        """
        rows_O = self.tile_dv if tile_stages > 1 else 0
        rows = self.tile_m * (tile_stages * self.tile_d + rows_O)
        rows += self.stages * self.tile_n * (self.tile_d + self.tile_dv)
        bias_row = 2 * self.tile_n if self.features.tiled_bias else self.bias_pitch
        return 2 * rows + bias_stages * (0 if self.has_bias_row else self.bias_rows * bias_row)

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
    _ForwardTile(32, Case("half_blocks", without="bias intervals"), 128, 128, 6, q_in_registers=True),
    _ForwardTile(32, Case("block_mask"), 128, 128, 4),
    _ForwardTile(32, Case("strided_bias"), 128, 128, 2),
    _ForwardTile(32, Case("tiled_bias softcap"), 192, 96, 2),  # 128 keys spill
    # 144 keys are 4 to 7 % faster over 16k keys, and 7 to 14 % slower over 512.
    _ForwardTile(32, Case(), 192, 128, 3),
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
    _ForwardTile(64, Case("tiled_bias", without="left softcap"), 192, 128, 2),
    _ForwardTile(64, Case("bias"), 192, 96, 2),
    _ForwardTile(64, Case("left softcap"), 192, 96, 2),  # 128 keys spill
    _ForwardTile(64, Case(), 192, 128, 3),
    _ForwardTile(96, Case("strided_bias"), 128, 80, 2),
    _ForwardTile(96, Case(), 128, 128, 2),
    _ForwardTile(128, Case("tiled_bias", without="left right softcap mask block_mask"), 192, 64, 3),
    _ForwardTile(128, Case("tiled_bias", without="block_mask"), 128, 64, 3),
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
    tile_dv = tile_columns(head_dim_v)
    tile_d = max(tile_columns(head_dim), tile_dv)
    if group > 1:  # rows of a tile are heads in turn
        features = replace(features, tiled_bias=False)
    needs = read_alike(features.of_pass("forward"))

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
