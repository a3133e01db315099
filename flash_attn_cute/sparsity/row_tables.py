"""Rows of blocks, made from an expression: the lists of key blocks that the forward pass goes over.

There is a row for each block of 128 queries. It lists full and partial blocks together, each once, in ascending order.
Making rows reads back from the device how many blocks there are of each kind.
"""

import math

import torch
from torch import Tensor

from flash_attn_cute.problem.block_tables import FULL_CODE, BlockRows, RealRows
from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import EMPTY, FULL, PARTIAL, TILE
from flash_attn_cute.sparsity.nodes import Node
from flash_attn_cute.sparsity.score_blocks import Blocks, Sizes

_BLOCKS_AT_ONCE = 1 << 22  # that are classified
_TILES_AT_ONCE = 1 << 12  # that are compared: 8 MB


def build(node: Node, sizes: Sizes, device: torch.device) -> BlockRows:
    """Makes the rows of an expression, without gaps between them.

    Waits for the device a few times for every four million candidates: blocks in the ranges of ``Node.block_range``.
    """
    shape = (sizes.batch, sizes.heads, sizes.blocks_q)
    start, stop = (x.expand(shape).flatten() for x in node.block_range(sizes, device))
    candidates = (stop - start).clamp(min=0)
    row_ends = candidates.cumsum(0)
    first = start + candidates - row_ends  # of each row, so that candidate i is key block first[row] + i
    found, row, before = _FoundBlocks(sizes, device), 0, 0
    ends = row_ends.tolist()
    while row < len(ends):
        next_row = row + 1
        while next_row < len(ends) and ends[next_row] - before <= _BLOCKS_AT_ONCE:
            next_row += 1
        rows = torch.arange(row, next_row, device=device)
        row_of = rows.repeat_interleave(candidates[row:next_row], output_size=ends[next_row - 1] - before)
        n = first[row_of] + torch.arange(before, ends[next_row - 1], device=device)
        found.classify(node, row_of, n)
        row, before = next_row, ends[next_row - 1]
    return found.rows()


def without_data(sizes: Sizes) -> BlockRows:
    """Rows on the meta device, where expressions cannot be asked: they have room for all blocks."""
    sets = sizes.batch, sizes.heads
    shapes = (*sets, sizes.blocks_q, 2), (math.prod(sets) * sizes.blocks_q * sizes.blocks_k, 2), (0, TILE, bits.WORDS)
    return BlockRows(*(torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes))


class _FoundBlocks:
    """Blocks with visible scores found so far, ascending by row and key block, and the tiles of partial ones."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.row = [torch.zeros(0, dtype=torch.int64, device=device)]
        self.block = [torch.zeros(0, dtype=torch.int64, device=device)]
        self.code = [torch.zeros(0, dtype=torch.int64, device=device)]
        self.tiles = [torch.zeros(0, TILE, bits.WORDS, dtype=torch.int32, device=device)]
        self.num_tiles = 0

    def classify(self, node: Node, row: Tensor, n: Tensor) -> None:
        """Finds out the kinds of blocks, and keeps those that are not empty."""
        sizes = self.sizes
        blocks = Blocks(sizes, row, n)
        kinds = node.kinds(blocks)
        if sizes.seqlen_q % TILE:
            kinds = kinds.masked_fill((blocks.m == sizes.blocks_q - 1) & (kinds == FULL), PARTIAL)
        if sizes.seqlen_k % TILE:
            kinds = kinds.masked_fill((n == sizes.blocks_k - 1) & (kinds == FULL), PARTIAL)
        code = torch.full_like(n, FULL_CODE)
        partial = (kinds == PARTIAL).nonzero()[:, 0]
        if len(partial):
            kinds[partial], code[partial] = self._tiles_by_pattern(node, blocks.select(partial))
        visible = (kinds != EMPTY).nonzero()[:, 0]
        self.row.append(row[visible])
        self.block.append(n[visible])
        self.code.append(code[visible])

    def _tiles_by_pattern(self, node: Node, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Makes the tiles of blocks that may be partial, one for each pattern.

        Returns the kinds of the blocks, (n,) int8, and their codes, (n,) int64.
        """
        sizes = self.sizes
        patterns, index = node.patterns(blocks), None
        if patterns is not None:
            cut_q = (blocks.m == sizes.blocks_q - 1) if sizes.seqlen_q % TILE else 0
            cut_k = (blocks.n == sizes.blocks_k - 1) if sizes.seqlen_k % TILE else 0
            first, index = bits.by_first((4 * patterns[0] + 2 * cut_q + cut_k).unique(return_inverse=True))
            blocks = blocks.select(first)
        chunks = [self._tiles_of(node, chunk) for chunk in blocks.chunks(_TILES_AT_ONCE)]
        kinds, code = (torch.cat(x) for x in zip(*chunks, strict=True))
        return (kinds, code) if index is None else (kinds[index], code[index])

    def _tiles_of(self, node: Node, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Makes a tile for every block; returns kinds and codes as ``_tiles_by_pattern`` does."""
        sizes = self.sizes
        tiles = node.tiles(blocks)
        if sizes.seqlen_q % TILE or sizes.seqlen_k % TILE:
            tiles = bits.cut(tiles, sizes.seqlen_q - blocks.m * TILE, sizes.seqlen_k - blocks.n * TILE)
        kinds = bits.kinds(tiles)
        partial = (kinds == PARTIAL).nonzero()[:, 0]
        distinct, index = bits.distinct(tiles[partial])
        self.tiles.append(distinct)
        code = torch.full_like(blocks.n, FULL_CODE).index_copy_(0, partial, index + self.num_tiles)
        self.num_tiles += len(distinct)
        return kinds, code

    def rows(self) -> BlockRows:
        """Joins all that has been found."""
        sizes = self.sizes
        row, block, code, tiles = (torch.cat(x) for x in (self.row, self.block, self.code, self.tiles))
        if len(self.tiles) > 2 and self.num_tiles:  # made in several chunks, which may have some in common
            tiles, index = bits.distinct(tiles)
            code = index[code.clamp(min=0)].masked_fill(code == FULL_CODE, FULL_CODE)
        edges = torch.searchsorted(row, torch.arange(sizes.num_rows + 1, device=row.device))
        spans = torch.stack((edges[:-1], edges.diff()), 1).int()
        spans = spans.view(sizes.batch, sizes.heads, sizes.blocks_q, 2)
        return BlockRows(spans, torch.stack((block, code), 1).int(), tiles)


def real_rows(node: Node, rows: BlockRows, sizes: Sizes) -> RealRows | None:
    """Rows that are no padding of an expression; None if no row is padding. Waits for the device.

    A row of no document is padding only if the whole mask hides it: ``|`` may make it visible.
    """
    padding = node.padding
    if padding is None or not bool(padding[0].any() | padding[1].any()):
        return None
    row, is_used = owners(rows)
    row, (block, code) = row[is_used], rows.entries[is_used].long().unbind(1)
    entry, m = row // (sizes.heads * max(sizes.blocks_q, 1)), row % max(sizes.blocks_q, 1)
    queries = _visible_rows(rows.tiles.any(2), entry, m, code, sizes.blocks_q, sizes.batch)
    keys = _visible_rows(bits.visible_keys(rows.tiles), entry, block, code, sizes.blocks_k, sizes.batch)
    real = RealRows(~padding[0] | queries[:, : sizes.seqlen_q], ~padding[1] | keys[:, : sizes.seqlen_k])
    return None if bool(real.queries.all() & real.keys.all()) else real


def _visible_rows(of_tile: Tensor, entry: Tensor, block: Tensor, code: Tensor, num_blocks: int, batch: int) -> Tensor:
    """Queries, or keys, that are visible in at least one listed block: (batch, 128 * num_blocks), bool.

    ``of_tile``, (tiles, 128), bool: which of a block each tile shows. Of each listed block, (entries,): ``entry`` is
    its batch entry, ``block`` its number among ``num_blocks`` blocks of queries, or of keys, and ``code`` is int64.
    """
    of_tile = torch.cat((of_tile.new_ones(1, TILE), of_tile))  # FULL_CODE is -1
    pairs = ((entry * num_blocks + block) * len(of_tile) + code + 1).unique()
    count = torch.zeros(batch * num_blocks, TILE, dtype=torch.int32, device=code.device)
    count.index_add_(0, pairs // len(of_tile), of_tile[pairs % len(of_tile)].int())
    return (count > 0).view(batch, num_blocks * TILE)


def owners(rows: BlockRows) -> tuple[Tensor, Tensor]:
    """The row that each entry belongs to, (entries,) int32, and whether the entry is used, (entries,) bool."""
    place = torch.arange(len(rows.entries), dtype=torch.int32, device=rows.spans.device)
    start, count = rows.spans.flatten(0, 2).unbind(1)
    row = torch.searchsorted(start.contiguous(), place, right=True, out_int32=True) - 1
    return row, place < (start + count).index_select(0, row)
