"""Rows of blocks from lists of block numbers, as models make them for every step and layer: nothing waits for a device.

Blocks of any multiple of 128 are cut into blocks of 128. Of blocks of 64 up to four make one of 128, whose elements are
then one of fifteen patterns of quarters, or all of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import FULL, HALF, TILE
from flash_attn_cute.sparsity.nodes import BlockMap, Blocks, Node, Sizes
from flash_attn_cute.spec import BlockRows


@dataclass(eq=False, repr=False)
class Indices(Node):
    """For each block of queries the key blocks that it sees: (batch, heads, blocks_q, width), int64; others are < 0."""

    indices: Tensor
    block_q: int
    block_k: int
    sizes: Sizes

    @property
    def batch(self) -> int:
        """Of the indices."""
        return self.indices.shape[0]

    @property
    def heads(self) -> int:
        """Of the indices."""
        return self.indices.shape[1]

    @property
    def device(self) -> torch.device:
        """Of the indices."""
        return self.indices.device

    @functools.cached_property
    def _map(self) -> BlockMap:
        blocks_k = -(-self.sizes.seqlen_k // self.block_k)
        visible = self.indices.new_zeros(*self.indices.shape[:-1], blocks_k + 1, dtype=torch.bool)
        visible.scatter_(-1, torch.where(self.indices < 0, blocks_k, self.indices), True)
        return BlockMap(visible[..., :blocks_k], self.block_q, self.block_k)

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return self._map.kinds(blocks)

    def tiles(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return self._map.tiles(blocks)

    def rows(self) -> BlockRows:
        """The rows, each with room for as many blocks as could be in it."""
        sizes, indices = self.sizes, self.indices
        batch, heads, _, width = indices.shape
        # (batch, heads, blocks_q, lists, width): of the lists that a block of 128 queries takes part in.
        if self.block_q == HALF:
            missing = sizes.blocks_q * 2 - indices.shape[2]
            indices = torch.cat((indices, indices.new_full((batch, heads, missing, width), -1)), 2)
            lists = indices.unflatten(2, (sizes.blocks_q, 2))
            rows = torch.tensor([[0b0011], [0b1100]], device=indices.device)
        else:
            own = torch.arange(sizes.blocks_q, device=indices.device) // (self.block_q // TILE)
            lists = indices[:, :, own, None]
            rows = torch.tensor([[0b1111]], device=indices.device)
        if self.block_k == HALF:
            block, quarters = lists.div(2, rounding_mode="floor"), rows & torch.where(lists % 2 == 0, 0b0101, 0b1010)
        else:
            parts = torch.arange(self.block_k // TILE, device=indices.device)
            block = (lists[..., None] * len(parts) + parts).flatten(-2)
            quarters = rows.expand(block.shape)
        exists = (block >= 0) & (block < sizes.blocks_k)
        block = torch.where(exists, block, sizes.blocks_k).flatten(-2)
        quarters = torch.where(exists, quarters, 0).flatten(-2)
        block, by_block = block.sort(-1)
        merged = _merge(block, quarters.gather(-1, by_block), sizes.blocks_k)
        block, quarters = merged
        counts = (block < sizes.blocks_k).sum(-1)
        capacity = block.shape[-1]
        starts = torch.arange(counts.numel(), device=block.device).view_as(counts) * capacity
        tiles, number = self._tiles(quarters, block)
        entries = torch.stack((block.flatten(), number.flatten()), 1).int()
        return BlockRows(torch.stack((starts, counts), -1).int(), entries, tiles)

    def _tiles(self, quarters: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Every tile that could be needed, and which one each entry has, FULL if it has them all.

        Tile 16 * t + p has pattern p; t is 1 where the last query cuts the block, 2 where the last key does.
        """
        sizes, device = self.sizes, quarters.device
        inside = torch.arange(TILE, device=device)
        half = inside // HALF
        of_quarter = 2 * half[:, None] + half
        patterns = (torch.arange(16, device=device)[:, None, None] >> of_quarter).bitwise_and(1).bool()
        left_q, left_k = (length - (-(-length // TILE) - 1) * TILE for length in (sizes.seqlen_q, sizes.seqlen_k))
        cut_q, cut_k = left_q < TILE, left_k < TILE
        cuts = [patterns]
        if cut_q or cut_k:
            shown_q, shown_k = (inside < left_q)[:, None], inside < left_k
            cuts += [patterns & shown_q, patterns & shown_k, patterns & shown_q & shown_k]
        which = torch.zeros_like(quarters)
        if cut_q:
            last = torch.arange(sizes.blocks_q, device=device) == sizes.blocks_q - 1
            which = which + last[:, None].long()
        if cut_k:
            which = which + 2 * (block == sizes.blocks_k - 1).long()
        number = torch.where((which == 0) & (quarters == 0b1111), FULL, 16 * which + quarters)
        return bits.pack(torch.cat(cuts)), number


def _merge(block: Tensor, quarters: Tensor, absent: int) -> tuple[Tensor, Tensor]:
    """Entries of the same block made one, at the front: (..., n) ascending blocks, and their quarters."""
    is_first = torch.ones_like(block, dtype=torch.bool)
    is_first[..., 1:] = block[..., 1:] != block[..., :-1]
    place = is_first.cumsum(-1) - 1
    merged = torch.full_like(block, absent).scatter_(-1, place, block)
    seen = [
        torch.zeros_like(quarters).scatter_reduce_(-1, place, quarters >> bit & 1, "amax") << bit for bit in range(4)
    ]
    return merged, seen[0] | seen[1] | seen[2] | seen[3]
