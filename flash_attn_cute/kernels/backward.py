"""Sizes that the configurations of all architectures' backward passes have in common. Needs no cutlass."""

from typing import Any, ClassVar, NamedTuple

from flash_attn_cute.kernels.arguments import workspace_bytes
from flash_attn_cute.kernels.features import Case, Features
from flash_attn_cute.kernels.mask_tile import MaskTile

CELL_NUMBERS = 64 * 64 // 2  # of 4 bytes, of a cell of dS (``common.ds_cells``): 64 x 64 of 16 bits
NUM_RANGES = 5  # numbers of a tile of keys that fixed point needs (``common.fixed_point``)


class MaskSizes(NamedTuple):
    """Sizes of the tables that a backward pass makes of a mask."""

    sets: Any  # of batch entries and heads that do not see alike
    rows: Any  # blocks of queries of a set that do not see alike
    m_blocks: Any  # of queries a set
    blocks: Any  # of keys that a query can see
    key_tiles: Any  # a set


class CellSizes(NamedTuple):
    """Sizes of the tables of cells of dS (``common.ds_cells``)."""

    rows: Any  # blocks of queries that do not see alike
    heads: Any  # of all batch entries
    tile_heads: Any  # the same, but for those that share tiles of keys
    chunks: Any
    num: Any  # of cells


class PassSizes(NamedTuple):
    """Sizes of a backward pass: ints, or the kernels' Int32."""

    heads: Any  # of queries
    num_m_blocks: Any  # blocks of queries a head
    heads_k: Any
    num_n_blocks: Any  # tiles of keys a head
    mask: MaskSizes | None = None
    cells: CellSizes | None = None  # None where dQ is summed in the workspace


class BackwardSizes:
    """The workspace of a pass: what is in it, and how much of it."""

    ctas_a_tile: ClassVar[int]
    ctas_an_sm: ClassVar[int] = 1  # that are there at a time
    fixed_point: bool = False  # dQ is summed in integers (``common.fixed_point``)
    permutes_rows: ClassVar[bool] = False  # of lse and delta, as ``sm90.backward.workspace.permuted`` does
    # Whether the main kernel zeroes the sums of dQ; if not, and they have no order, a kernel ahead of it does.
    zeroes_sums: ClassVar[bool] = False
    stores_dS: ClassVar[bool] = False  # the main kernel stores dS in place of adding dQ (``common.ds_cells``)
    sums_heads: ClassVar[bool] = True  # whether a tile may be for several heads of a group
    persistent: ClassVar[bool] = True  # whether a CTA, or a cluster, takes one tile after the other

    features: Features
    tile_d: int
    tile_m: int  # queries a block
    tile_n: ClassVar[int]  # keys a tile
    mask_tile: ClassVar[MaskTile]  # how a mask is cut
    semaphores: ClassVar[tuple[int, int]]  # counters of additions a block of queries, and of keys

    @property
    def numbers_a_query(self) -> int:
        """Numbers of a query that come with it: lse, delta, and in fixed point the units of its dQ."""
        return 3 if self.fixed_point else 2

    @property
    def in_order(self) -> bool:
        """Whether tiles are launched in the order of their additions to dQ, for which they wait."""
        return self.features.deterministic and not self.fixed_point

    @property
    def counts_additions(self) -> bool:
        """Whether what is added to dQ is counted: to have an order, or because its rounding waits for all of it."""
        return self.features.deterministic

    @property
    def reverses_last(self) -> bool:
        """Whether the heads of the last section of tiles go the other way round (``common.key_tiles``)."""
        return self.in_order and Case("right", without="packed grouped").fits(self.features)

    def parts(self, sizes: PassSizes) -> dict[str, tuple[Any, ...]]:
        """The parts of the workspace, of numbers of 4 bytes, in the order in which they lie in it: their shapes."""
        heads, num_m_blocks, heads_k, num_n_blocks, mask, cells = sizes
        semaphores, semaphores_k = self.semaphores
        parts: dict[str, tuple[Any, ...]] = {"mStats": (self.numbers_a_query, heads, num_m_blocks, self.tile_m)}
        if cells is None:
            parts["mdQaccum"] = heads, num_m_blocks, self.tile_m * self.tile_d
        else:
            parts |= {
                "mCells": (heads, num_m_blocks),
                "mRowCells": (cells.rows,),
                "mHeadCells": (cells.heads,),
                "mTileHeadsCells": (cells.tile_heads,),
                "mChunks": (cells.chunks + 1,),
                "mCellKeys": (cells.num,),
                "mdS": (cells.num, CELL_NUMBERS),
            }
        if self.counts_additions:
            parts["mSemaphoresQ"] = semaphores, heads, num_m_blocks
        if self.fixed_point:
            parts["mRanges"] = NUM_RANGES, heads_k, num_n_blocks
            parts["mHeads"] = 3, heads_k, num_n_blocks
        if mask is not None:
            rows = mask.sets * mask.rows
            parts |= self.mask_tile.parts(rows, mask.blocks)
            parts["mOrder"] = rows, mask.blocks
            parts["mAdding"] = (rows,)
            parts["mLists"] = mask.sets * mask.key_tiles, 2
            parts["mEntries"] = mask.sets * mask.blocks * mask.m_blocks, 3
        if self.features.grouped:
            parts["mSemaphoresK"] = semaphores_k, heads_k, num_n_blocks
            parts["mdKVaccum"] = 2, heads_k, num_n_blocks, self.tile_n * self.tile_d
        return parts

    def workspace_size(self, sizes: PassSizes, *, shares: bool) -> int:
        """Bytes of workspace.

        ``shares``: whether tiles leave sums of dK and dV to others; else these, which are last, have no memory.
        """
        parts = self.parts(sizes)
        if not shares:
            parts.pop("mdKVaccum", None)
        return workspace_bytes(parts)
