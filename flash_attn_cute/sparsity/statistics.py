"""Counts of a mask's blocks, from its tables."""

from __future__ import annotations

from typing import NamedTuple

from flash_attn_cute.block_tables import BlockRows
from flash_attn_cute.sparsity.bits import FULL
from flash_attn_cute.sparsity.nodes import Sizes
from flash_attn_cute.sparsity.row_tables import owners


class Statistics(NamedTuple):
    """Counts of blocks of 128 x 128, over all its batch entries and heads."""

    blocks: int
    full: int
    partial: int
    tiles: int  # how many kinds of partial blocks there are

    @classmethod
    def of(cls, rows: BlockRows, sizes: Sizes) -> Statistics:
        """Counts the blocks of rows; waits for the device."""
        _, is_used = owners(rows)
        tile = rows.entries[is_used, 1]
        full = int((tile == FULL).sum())
        blocks = sizes.batch * sizes.heads * sizes.blocks_q * sizes.blocks_k
        return cls(blocks, full, len(tile) - full, len(tile[tile != FULL].unique()))

    @property
    def share_seen(self) -> float:
        """The share of blocks of which some query sees something; all of none."""
        return (self.full + self.partial) / self.blocks if self.blocks else 1.0

    def __str__(self) -> str:
        """The counts in a line."""
        seen = self.full + self.partial
        share = seen / self.blocks if self.blocks else 0.0
        return f"{seen} of {self.blocks} blocks ({share:.1%}), {self.partial} partial ({self.tiles} distinct)"
