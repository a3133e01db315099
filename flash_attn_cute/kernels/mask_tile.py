"""The tiles of bits into which a mask is cut for the kernels of any architecture. Needs no cutlass."""

from dataclasses import dataclass
from typing import Any

from flash_attn_cute.kernels.arguments import BLOCK


@dataclass(frozen=True)
class MaskTile:
    """A tile of a mask: the scores of some warpgroups, of which each thread has some.

    With ``row_a_thread`` a warpgroup has 128 rows of scores and a thread one of them, as tensor memory has it; else a
    warpgroup has 64 rows, and a thread scores of two of them, as the registers of Hopper's products have it.
    Warpgroups follow each other by rows, and those that share rows by columns.
    """

    queries: int
    keys: int
    group: int = 1  # heads of a query that are rows of one tile
    rows_are_keys: bool = False  # of scores
    row_a_thread: bool = False
    sharing: int = 1  # warpgroups that have the same rows of scores, and each as many of their columns
    has_kinds: bool = False  # a word for each tile of a block mask says which of its quarters are empty or full

    @property
    def rows_of_queries(self) -> int:
        """Rows of the mask."""
        return self.queries * self.group

    @property
    def columns(self) -> int:
        """Number of score columns of a warpgroup."""
        return (self.queries if self.rows_are_keys else self.keys) // self.sharing

    @property
    def rows_a_warpgroup(self) -> int:
        """Number of score rows of a warpgroup."""
        return 128 if self.row_a_thread else 64

    @property
    def warpgroups(self) -> int:
        """Which have those rows and columns of scores each."""
        rows = self.keys if self.rows_are_keys else self.rows_of_queries
        return rows // self.rows_a_warpgroup * self.sharing

    @property
    def words(self) -> int:
        """Number of 32-bit words that hold the bits of a thread's scores."""
        return -(-self.columns * self.rows_a_warpgroup // (128 * 32))

    @property
    def words_a_block(self) -> int:
        """Number of 32-bit words of all tiles that a block of a block mask is cut into, and of its kinds."""
        tiles = BLOCK // self.queries * (BLOCK // self.keys)
        return tiles * self.warpgroups * 128 * self.words + self.has_kinds

    def parts(self, lists: Any, blocks: Any) -> dict[str, tuple[Any, ...]]:
        """Parts of a workspace, as in ``BackwardSizes.parts``, for so many rows of tiles, of at most so many blocks."""
        return {"mCodes": (lists, blocks), "mBits": (lists * blocks, self.warpgroups, 128, self.words)}

    def parts_with_lists(self, lists: Any, blocks: Any) -> dict[str, tuple[Any, ...]]:
        """``parts``, followed by lists of key blocks, one a row of tiles."""
        return {"mLists": (lists, 2), "mEntries": (lists * blocks, 2)} | self.parts(lists, blocks)
