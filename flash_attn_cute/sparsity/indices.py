"""Rows of blocks, made from lists of block numbers as models select them in every step and layer.

Nothing waits for the device. Blocks whose size is a multiple of 128 are cut into blocks of 128. Up to four blocks of 64
are quarters of one block of 128, which then has one of fifteen tiles, or is full. Blocks of which only the first rows
are real, as video sparse attention has them (VSA, arXiv 2505.13389), have such tiles for each pair of lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_cute.problem.block_tables import FULL_CODE, BlockRows, RealRows
from flash_attn_cute.runtime import kept, settings
from flash_attn_cute.sparsity import bits, mask_arguments
from flash_attn_cute.sparsity.bits import HALF, PARTIAL, TILE, WORDS
from flash_attn_cute.sparsity.nodes import BlockMap, PerHead
from flash_attn_cute.sparsity.score_blocks import Blocks, Sizes

_MOST_LENGTHS = 32  # of a block of 128: a tile of 2 KB each for 16 * 32 * 32 combinations are 32 MB


@dataclass(eq=False, repr=False)
class Indices(PerHead):
    """Key blocks that each query block attends to."""

    indices: Tensor  # the caller's tensor, (batch, heads, blocks_q, width), int32 or int64; below 0 is none
    # The caller's tensor, (batch, heads, blocks_q), int32 or int64: how many of each row count. None: all.
    counts: Tensor | None
    block_q: int
    block_k: int
    sizes: Sizes
    # (n, 2), int64: real rows of both halves that a block of 128 may have. None: all rows are real.
    lengths: Tensor | None = None
    # (blocks of 128 + 1,), int64: which of them each block has, of queries and keys alike, and at the end that of no
    # block.
    length_of: Tensor | None = None

    @classmethod
    def of(
        cls,
        indices: Tensor,
        counts: Tensor | None,
        block: tuple[int, int],
        seqlen_q: int | None,
        seqlen_k: int,
        block_lengths: Sequence[int] | Tensor | None,
    ) -> Indices:
        """Checks the arguments of ``BlockMask.from_indices`` and makes a node of them."""
        mask_arguments.check_integers("indices", indices, (4,), "(batch, heads, blocks_q, width)")
        mask_arguments.check_heads("indices", indices)
        if any(size != HALF and size % TILE for size in block):
            raise ValueError(f"block: expected 64 or multiples of 128, got {block}")
        block_q, block_k = block
        seqlen_q = mask_arguments.check_blocks("seqlen_q", seqlen_q, indices.shape[2], block_q)
        seqlen_q, seqlen_k = mask_arguments.check_lengths(seqlen_q, seqlen_k)
        if counts is not None:
            mask_arguments.check_integers("counts", counts, (3,), "(batch, heads, blocks_q)", beside=indices)
            if counts.shape != indices.shape[:3]:
                raise ValueError(f"counts: expected shape {tuple(indices.shape[:3])}, got {tuple(counts.shape)}")
        sizes = Sizes(indices.shape[0], indices.shape[1], seqlen_q, seqlen_k)
        lengths = length_of = None
        if block_lengths is not None:
            real = mask_arguments.check_block_lengths(block_lengths, block, sizes)
            lengths, length_of = _lengths_of_tiles(real, block_q, indices.device)
        node = cls(indices, counts, block_q, block_k, sizes, lengths, length_of)
        if not torch.compiler.is_compiling() and settings.check_data():
            mask_arguments.check_indices(node._counted(), counts, node.blocks_k)
        return node

    @property
    def per_head(self) -> Tensor:
        return self.indices

    @property
    def half_blocks(self) -> bool:
        return HALF in (self.block_q, self.block_k) and self.lengths is None

    @property
    def padding(self) -> tuple[Tensor, Tensor] | None:
        if self.lengths is None or self.length_of is None:
            return None
        padding = ~self._real_of_tile[self.length_of[:-1]].view(1, -1)[:, : self.sizes.seqlen_k]
        return padding, padding

    @property
    def real(self) -> RealRows | None:
        """Rows that are no padding, found without waiting for the device; None if no row is padding."""
        padding = self.padding
        return None if padding is None else RealRows(~padding[0], ~padding[1])

    @property
    def _real_of_tile(self) -> Tensor:
        """Real rows of a block of 128 by its lengths: (n, 128), bool."""
        assert self.lengths is not None
        return (torch.arange(HALF, device=self.lengths.device) < self.lengths[..., None]).flatten(1)

    @property
    def half_columns(self) -> bool:
        """Whether blocks have 64 keys, and no query block attends to more than half of them."""
        return self.half_blocks and self.block_k == HALF and 2 * self.indices.shape[3] <= self.blocks_k

    def most_halves(self, sizes: Sizes) -> int:
        _, _, blocks_q, width = self.indices.shape
        return blocks_q * width * (self.block_q // HALF) * (self.block_k // HALF)

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
        kinds = self._map.kinds(blocks)
        return kinds if self.lengths is None else kinds.clamp(max=PARTIAL)

    def tiles(self, blocks: Blocks) -> Tensor:
        tiles = self._map.tiles(blocks)
        if self.length_of is None:
            return tiles
        real = self._real_of_tile[self.length_of]
        return tiles & bits.pack(real[blocks.m][:, :, None] & real[blocks.n][:, None])

    def rows(self) -> BlockRows:
        """Makes the rows, each with room for as many entries as it could have."""
        sizes, device = self.sizes, self.indices.device
        keys = self._quarter_keys()
        if not sizes.blocks_k:  # columns have no place for spare entries
            keys = keys[..., :0]
        block, quarters = _merged(keys, 4 * sizes.blocks_k, self._quarters_of_first)
        counts = (block < sizes.blocks_k).sum(-1)
        capacity = block.shape[-1]
        starts = torch.arange(counts.numel(), device=device) * capacity
        spans = torch.stack((starts.view_as(counts), counts), -1).int()
        tiles, code = (self._tiles if self.lengths is None else self._tiles_by_lengths)(quarters, block)
        return BlockRows(spans, torch.stack((block.flatten(), code.flatten()), 1).int(), tiles)

    @property
    def _quarters_of_first(self) -> int:
        """Quarters of a block of 128 that its first part covers: bit 2 * half of the queries + half of the keys."""
        return (0b0011 if self.block_q == HALF else 0b1111) & (0b0101 if self.block_k == HALF else 0b1111)

    def _quarter_keys(self) -> Tensor:
        """Sort keys (batch, heads, blocks_q, ...), int32, of the parts of blocks of 128 in each row.

        They are 4 * block + 2 * half of the queries + half of the keys. Keys out of range are no part.
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

    def _tiles_by_lengths(self, quarters: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Makes every tile that could be needed, and the code of each entry, where only first rows of blocks are real.

        Tile 16 * (n * i + j) + p shows the quarters p of queries with lengths i and keys with lengths j, of n lengths.
        """
        assert self.lengths is not None
        assert self.length_of is not None
        real, is_whole = self._real_of_tile, (self.lengths == HALF).all(1)
        pairs = bits.pack((real[:, None, :, None] & real[:, None]).flatten(0, 1))
        tiles = (pairs[:, None] & _tiles_of_quarters(quarters.device)).flatten(0, 1)
        i, j = self.length_of[:-1, None], self.length_of[block.long()]
        code = 16 * (len(real) * i + j) + quarters
        return tiles, torch.where((quarters == 0b1111) & is_whole[i] & is_whole[j], FULL_CODE, code)

    def _tiles(self, quarters: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Makes every tile that could be needed, and the code of each entry.

        Tile 16 * t + p shows the quarters p; t is 1 where the last query cuts the block, 2 where the last key does, and
        3 where both do. Entries are (batch, heads, blocks_q, n), int32: bits of the quarters that each has, and its key
        block.
        """
        sizes, device = self.sizes, quarters.device
        tiles, code = _tiles_of_quarters(device), quarters
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


def _tiles_of_quarters(device: torch.device) -> Tensor:
    """Tile p shows the quarters p: (16, 128, 4), int32."""
    quarter = torch.arange(4, dtype=torch.int32, device=device).view(2, 1, 2, 1)
    patterns = -(torch.arange(16, dtype=torch.int32, device=device).view(16, 1, 1, 1, 1) >> quarter & 1)
    return patterns.expand(16, 2, HALF, 2, WORDS // 2).reshape(16, TILE, WORDS)


def _lengths_of_tiles(real: Sequence[int], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``Indices.lengths`` and ``length_of`` of blocks with so many real rows, copied to a device without waiting."""
    halves = [min(max(rows - start, 0), HALF) for rows in real for start in range(0, block, HALF)]
    halves += [0] * (len(halves) % 2)
    pairs = list(zip(halves[::2], halves[1::2], strict=True))
    distinct = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))} or {(0, 0): 0}
    if len(distinct) > _MOST_LENGTHS:
        raise ValueError(
            f"block_lengths: expected at most {_MOST_LENGTHS} different lengths in blocks of {TILE} rows, "
            f"got {len(distinct)}"
        )
    lengths, length_of = torch.tensor(list(distinct), device="cpu"), [*map(distinct.__getitem__, pairs), 0]
    return (
        lengths.to(device, non_blocking=True),
        torch.tensor(length_of, device="cpu").to(device, non_blocking=True),
    )


def _merged(keys: Tensor, absent: int, quarters_of_first: int) -> tuple[Tensor, Tensor]:
    """Blocks of sort keys, (..., n) ascending, each once and at the front, and the quarters that each has.

    Keys below 0 and from ``absent`` on are no part. Block ``absent // 4`` takes their places. ``quarters_of_first``:
    bits of the quarters that the first part of a block covers.
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
