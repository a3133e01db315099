"""Counts of a mask's blocks, from its tables."""

from __future__ import annotations

from typing import NamedTuple

from flash_attn_cute.problem.block_tables import FULL_CODE, BlockRows
from flash_attn_cute.sparsity.row_tables import owners
from flash_attn_cute.sparsity.score_blocks import Sizes


class Statistics(NamedTuple):
    """Counts of blocks of 128 x 128, over all batch entries and heads that a mask has."""

    blocks: int
    full: int  # whose scores are all visible
    partial: int  # whose scores are visible in part
    tiles: int  # of partial blocks, distinct ones

    @classmethod
    def of(cls, rows: BlockRows, sizes: Sizes) -> Statistics:
        """Counts the blocks of rows; waits for the device."""
        _, is_used = owners(rows)
        code = rows.entries[is_used, 1]
        full = int((code == FULL_CODE).sum())
        blocks = sizes.num_rows * sizes.blocks_k
        return cls(blocks, full, len(code) - full, len(code[code != FULL_CODE].unique()))

    @property
    def visible(self) -> int:
        """Number of full and partial blocks."""
        return self.full + self.partial

    @property
    def visible_share(self) -> float:
        """Share of blocks that are full or partial; 1 for a mask of no blocks, which leaves nothing out."""
        return self.visible / self.blocks if self.blocks else 1.0

    def __str__(self) -> str:
        """The counts in a line."""
        share = f"{self.visible_share:.1%}"
        return f"{self.visible} of {self.blocks} blocks ({share}), {self.partial} partial ({self.tiles} distinct)"
