"""Rows of blocks from lists of block numbers, as models make them for every step and layer: nothing waits for a device.

Blocks of any multiple of 128 are cut into blocks of 128. Of blocks of 64 up to four make one of 128, whose elements are
then one of fifteen patterns of quarters, or all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_cute import kept
from flash_attn_cute.block_tables import BlockRows
from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import FULL, HALF, TILE, WORDS
from flash_attn_cute.sparsity.nodes import BlockMap, Blocks, Node, Sizes


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

    @property
    def blocks_k(self) -> int:
        """Blocks of keys, of their own size."""
        return -(-self.sizes.seqlen_k // self.block_k)

    @property
    def _map(self) -> BlockMap:
        return kept.made(self._kept, "map", self.indices.device, self._find_map)

    def _find_map(self) -> BlockMap:
        visible = self.indices.new_zeros(*self.indices.shape[:-1], self.blocks_k + 1, dtype=torch.bool)
        is_block = (self.indices >= 0) & (self.indices < self.blocks_k)  # others stand for nothing, as in ``rows``
        visible.scatter_(-1, torch.where(is_block, self.indices, self.blocks_k), True)
        return BlockMap(visible[..., :-1], self.block_q, self.block_k)

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return self._map.kinds(blocks)

    def tiles(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return self._map.tiles(blocks)

    def rows(self) -> BlockRows:
        """The rows, each with room for as many blocks as could be in it."""
        sizes, device = self.sizes, self.indices.device
        block, quarters = _merged(self._keys(), 4 * sizes.blocks_k, self._quarters_of_first)
        counts = (block < sizes.blocks_k).sum(-1)
        capacity = block.shape[-1]
        starts = torch.arange(counts.numel(), device=device) * capacity
        spans = torch.stack((starts.view_as(counts), counts), -1).int()
        tiles, number = self._tiles(quarters, block)
        return BlockRows(spans, torch.stack((block.flatten(), number.flatten()), 1).int(), tiles)

    @property
    def _quarters_of_first(self) -> int:
        """Which quarters of a block of 128 its first part is: bit 2 * half of the queries + half of the keys."""
        return (0b0011 if self.block_q == HALF else 0b1111) & (0b0101 if self.block_k == HALF else 0b1111)

    def _keys(self) -> Tensor:
        """Of all that each row sees, (batch, heads, blocks_q, ...) int32: four times the block, and its part.

        The part is 2 * half of the queries + half of the keys. Numbers out of range stand for nothing.
        """
        sizes, indices = self.sizes, self.indices.clamp(-1, self.blocks_k).int()
        if self.block_k == HALF:
            keys = 2 * indices - (indices & 1)  # 4 * (index // 2) + index % 2
        else:
            keys = 4 * indices
            parts = self.block_k // TILE
            if parts > 1:
                keys = (parts * keys[..., None] + torch.arange(0, 4 * parts, 4, device=keys.device)).flatten(-2)
        if self.block_q == HALF:
            if sizes.blocks_q * 2 > keys.shape[2]:
                keys = torch.nn.functional.pad(keys, (0, 0, 0, 1), value=-4)
            halves = keys.unflatten(2, (sizes.blocks_q, 2))
            return (halves + torch.arange(0, 4, 2, dtype=torch.int32, device=keys.device)[:, None]).flatten(-2)
        if self.block_q > TILE:
            own = torch.arange(sizes.blocks_q, device=keys.device) // (self.block_q // TILE)
            keys = keys.index_select(2, own)
        return keys

    def _tiles(self, quarters: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Every tile that could be needed, and which one each entry has, FULL if it has them all.

        Tile 16 * t + p has pattern p; t is 1 where the last query cuts the block, 2 where the last key does.
        """
        sizes, device = self.sizes, quarters.device
        quarter = torch.arange(4, dtype=torch.int32, device=device).view(2, 1, 2, 1)
        patterns = -(torch.arange(16, dtype=torch.int32, device=device).view(16, 1, 1, 1, 1) >> quarter & 1)
        tiles = patterns.expand(16, 2, HALF, 2, WORDS // 2).reshape(16, TILE, WORDS)
        number = quarters
        left_q, left_k = (length - (-(-length // TILE) - 1) * TILE for length in (sizes.seqlen_q, sizes.seqlen_k))
        cut_q, cut_k = left_q < TILE, left_k < TILE
        if cut_q or cut_k:
            ends = torch.full((2,), TILE, device=device)
            shown = [tiles]
            for queries, keys in ((left_q, TILE), (TILE, left_k), (left_q, left_k)):
                shown.append(bits.cut(tiles, ends.new_full((16,), queries), ends.new_full((16,), keys)))
            tiles = torch.cat(shown)
        if cut_q:
            last = torch.arange(sizes.blocks_q, device=device) == sizes.blocks_q - 1
            number = number + 16 * last[:, None]
        if cut_k:
            number = number + 32 * (block == sizes.blocks_k - 1)
        return tiles, torch.where(number == 0b1111, FULL, number)


def _merged(keys: Tensor, absent: int, quarters_of_first: int) -> tuple[Tensor, Tensor]:
    """Blocks, (..., n) ascending, each once and at the front, and which of their quarters are among the keys.

    Keys below 0, and from ``absent`` on, are of no block; their place is taken by block ``absent // 4``.
    """
    keys = keys.masked_fill(keys < 0, absent).clamp_(max=absent).sort(-1).values
    block = keys >> 2
    steps = torch.zeros_like(keys)
    steps[..., 1:] = block.diff()
    place = (steps != 0).cumsum(-1)
    quarters = quarters_of_first << (keys & 3)
    quarters[..., 1:].masked_fill_(keys.diff() == 0, 0)  # the same again
    merged = torch.full_like(block, absent // 4).scatter_(-1, place, block)
    return merged, torch.zeros_like(quarters).scatter_add_(-1, place, quarters)
