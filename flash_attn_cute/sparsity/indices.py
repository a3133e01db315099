"""Rows of blocks, made from lists of block numbers as models select them in every step and layer.

Nothing waits for the device. Blocks whose size is a multiple of 128 are cut into blocks of 128. Up to four blocks of 64
are quarters of one block of 128, which then has one of fifteen tiles, or is full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_cute import kept, settings
from flash_attn_cute.block_tables import FULL_CODE, BlockRows
from flash_attn_cute.sparsity import bits, mask_arguments
from flash_attn_cute.sparsity.bits import HALF, TILE, WORDS
from flash_attn_cute.sparsity.nodes import BlockMap, Node
from flash_attn_cute.sparsity.score_blocks import Blocks, Sizes


@dataclass(eq=False, repr=False)
class Indices(Node):
    """Key blocks that each query block attends to.

    Attributes:
        indices: the caller's tensor, (batch, heads, blocks_q, width), int32 or int64; below 0 is none.
        counts: the caller's tensor, (batch, heads, blocks_q), int32 or int64: how many of each row count. None: all.
    """

    indices: Tensor
    counts: Tensor | None
    block_q: int
    block_k: int
    sizes: Sizes

    @classmethod
    def of(
        cls, indices: Tensor, counts: Tensor | None, block: tuple[int, int], seqlen_q: int | None, seqlen_k: int
    ) -> Indices:
        """Checks the arguments of ``BlockMask.from_indices`` and makes a node of them."""
        mask_arguments.check_integers("indices", indices, (4,), "(batch, heads, blocks_q, width)")
        if any(size != HALF and size % TILE for size in block):
            raise ValueError(f"block: expected 64 or multiples of 128, got {block}")
        block_q, block_k = block
        seqlen_q = mask_arguments.check_blocks("seqlen_q", seqlen_q, indices.shape[2], block_q)
        mask_arguments.check_lengths(seqlen_q, seqlen_k)
        if counts is not None:
            mask_arguments.check_integers("counts", counts, (3,), "(batch, heads, blocks_q)", beside=indices)
            if counts.shape != indices.shape[:3]:
                raise ValueError(f"counts: expected shape {tuple(indices.shape[:3])}, got {tuple(counts.shape)}")
        sizes = Sizes(indices.shape[0], indices.shape[1], seqlen_q, seqlen_k)
        node = cls(indices, counts, block_q, block_k, sizes)
        if not torch.compiler.is_compiling() and settings.check_data():
            mask_arguments.check_indices(node._counted(), counts, node.blocks_k)
        return node

    @property
    def batch(self) -> int:
        """Batch entries of the indices."""
        return self.indices.shape[0]

    @property
    def heads(self) -> int:
        """Heads of the indices."""
        return self.indices.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the indices."""
        return self.indices.device

    @property
    def half_blocks(self) -> bool:
        return HALF in (self.block_q, self.block_k)

    @property
    def blocks_k(self) -> int:
        """Number of key blocks of the size that the indices count."""
        return -(-self.sizes.seqlen_k // self.block_k)

    def _counted(self) -> Tensor:
        """Indices as they are now, in their dtype, with -1 behind the counts.

        Nothing is worked out of the sources before this. So ``use`` notices every write to them, and a graph or a
        compiled program reads them whenever it runs.
        """
        if self.counts is None:
            return self.indices
        place = torch.arange(self.indices.shape[3], device=self.indices.device)
        return self.indices.masked_fill(place >= self.counts[..., None], -1)

    @property
    def _map(self) -> BlockMap:
        """Map of the blocks, for ``&`` and ``|``."""
        return kept.made(self._kept, "map", self.indices.device, self._find_map)

    def _find_map(self) -> BlockMap:
        indices = self._counted().long()
        visible = indices.new_zeros(*indices.shape[:-1], self.blocks_k + 1, dtype=torch.bool)
        is_block = (indices >= 0) & (indices < self.blocks_k)  # others are none, as in ``rows``
        visible.scatter_(-1, torch.where(is_block, indices, self.blocks_k), True)
        return BlockMap(visible[..., :-1], self.block_q, self.block_k)

    def kinds(self, blocks: Blocks) -> Tensor:
        return self._map.kinds(blocks)

    def tiles(self, blocks: Blocks) -> Tensor:
        return self._map.tiles(blocks)

    def rows(self) -> BlockRows:
        """Makes the rows, each with room for as many entries as it could have."""
        sizes, device = self.sizes, self.indices.device
        block, quarters = _merged(self._quarter_keys(), 4 * sizes.blocks_k, self._quarters_of_first)
        counts = (block < sizes.blocks_k).sum(-1)
        capacity = block.shape[-1]
        starts = torch.arange(counts.numel(), device=device) * capacity
        spans = torch.stack((starts.view_as(counts), counts), -1).int()
        tiles, code = self._tiles(quarters, block)
        return BlockRows(spans, torch.stack((block.flatten(), code.flatten()), 1).int(), tiles)

    @property
    def _quarters_of_first(self) -> int:
        """Quarters of a block of 128 that its first part covers: bit 2 * half of the queries + half of the keys."""
        return (0b0011 if self.block_q == HALF else 0b1111) & (0b0101 if self.block_k == HALF else 0b1111)

    def _quarter_keys(self) -> Tensor:
        """Sort keys of the parts of blocks of 128 in each row: 4 * block + 2 * half of the queries + half of the keys.

        Returns:
            (batch, heads, blocks_q, ...), int32. Keys out of range are no part.
        """
        sizes, indices = self.sizes, self._counted().clamp(-1, self.blocks_k).int()
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
        """Makes every tile that could be needed, and the code of each entry.

        Tile 16 * t + p shows the quarters p; t is 1 where the last query cuts the block, 2 where the last key does, and
        3 where both do.

        Args:
            quarters: (batch, heads, blocks_q, n), int32: bits of the quarters that each entry has.
            block: likewise, the key block of each entry.
        """
        sizes, device = self.sizes, quarters.device
        quarter = torch.arange(4, dtype=torch.int32, device=device).view(2, 1, 2, 1)
        patterns = -(torch.arange(16, dtype=torch.int32, device=device).view(16, 1, 1, 1, 1) >> quarter & 1)
        tiles = patterns.expand(16, 2, HALF, 2, WORDS // 2).reshape(16, TILE, WORDS)
        code = quarters
        left_q, left_k = (length - (-(-length // TILE) - 1) * TILE for length in (sizes.seqlen_q, sizes.seqlen_k))
        cut_q, cut_k = left_q < TILE, left_k < TILE
        if cut_q or cut_k:
            ends = torch.full((2,), TILE, device=device)
            all_tiles = [tiles]
            for queries, keys in ((left_q, TILE), (TILE, left_k), (left_q, left_k)):
                all_tiles.append(bits.cut(tiles, ends.new_full((16,), queries), ends.new_full((16,), keys)))
            tiles = torch.cat(all_tiles)
        if cut_q:
            last = torch.arange(sizes.blocks_q, device=device) == sizes.blocks_q - 1
            code = code + 16 * last[:, None]
        if cut_k:
            code = code + 32 * (block == sizes.blocks_k - 1)
        return tiles, torch.where(code == 0b1111, FULL_CODE, code)


def _merged(keys: Tensor, absent: int, quarters_of_first: int) -> tuple[Tensor, Tensor]:
    """Blocks of sort keys, (..., n) ascending, each once and at the front, and the quarters that each has.

    Args:
        keys: (..., n), int32, see ``Indices._quarter_keys``.
        absent: Keys below 0 and from here on are no part. Block ``absent // 4`` takes their places.
        quarters_of_first: bits of the quarters that the first part of a block covers.
    """
    keys = keys.masked_fill(keys < 0, absent).clamp_(max=absent).sort(-1).values
    block = keys >> 2
    steps = torch.zeros_like(keys)
    steps[..., 1:] = block.diff()
    place = (steps != 0).cumsum(-1)
    quarters = quarters_of_first << (keys & 3)
    quarters[..., 1:].masked_fill_(keys.diff() == 0, 0)  # repeats an earlier part
    merged = torch.full_like(block, absent // 4).scatter_(-1, place, block)
    return merged, torch.zeros_like(quarters).scatter_add_(-1, place, quarters)
