"""Sizes that the configurations of all architectures' backward passes have in common. Needs no cutlass."""

from typing import Any, ClassVar, NamedTuple

from flash_attn_cute.kernels.arguments import workspace_bytes
from flash_attn_cute.kernels.features import Case, Features
from flash_attn_cute.kernels.mask_tile import MaskTile

CELL_NUMBERS = 64 * 64 // 2  # of 4 bytes, of a cell of dS (``common.ds_cells``): 64 x 64 of 16 bits
NUM_RANGES = 5  # numbers of a tile of keys that fixed point needs (``common.fixed_point``)


class MaskSizes(NamedTuple):
    """Sizes of the tables that a backward pass makes of a mask, for each set of batch entries and heads with a list."""

    m_blocks: Any  # of queries
    blocks: Any  # of keys that a query can see
    key_tiles: Any


class PassSizes(NamedTuple):
    """Sizes of a backward pass: ints, or the kernels' Int32."""

    numbers: Any  # ``arguments.BackwardNumbers``
    batch: Any  # entries of a dense batch
    heads: Any  # of queries
    heads_k: Any
    mask: MaskSizes | None = None


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
        n, batch, heads, heads_k, mask = sizes
        num_m_blocks, num_n_blocks = n.num_m_blocks, n.num_n_blocks
        semaphores, semaphores_k = self.semaphores
        parts: dict[str, tuple[Any, ...]] = {"mStats": (self.numbers_a_query, heads, num_m_blocks, self.tile_m)}
        if not self.stores_dS:
            parts["mdQaccum"] = heads, num_m_blocks, self.tile_m * self.tile_d
        else:  # ``common.ds_cells``
            parts |= {
                "mCells": (heads, num_m_blocks),
                "mRowCells": (n.lists_batch * n.lists_heads * n.lists_tiles,),
                "mHeadCells": (batch * heads,),
                "mTileHeadsCells": (batch * heads // n.heads_a_tile,),
                "mChunks": (n.num_chunks + 1,),
                "mCellKeys": (n.num_cells,),
                "mdS": (n.num_cells, CELL_NUMBERS),
            }
        if self.counts_additions:
            parts["mSemaphoresQ"] = semaphores, heads, num_m_blocks
        if self.fixed_point:
            parts["mRanges"] = NUM_RANGES, heads_k, num_n_blocks
            parts["mHeads"] = 3, heads_k, num_n_blocks
        if mask is not None:
            sets = n.lists_batch * n.lists_heads
            rows = sets * n.lists_tiles
            parts |= self.mask_tile.parts(rows, mask.blocks)
            parts["mOrder"] = rows, mask.blocks
            parts["mAdding"] = (rows,)
            parts["mLists"] = sets * mask.key_tiles, 2
            parts["mEntries"] = sets * mask.blocks * mask.m_blocks, 3
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
