"""Rows of blocks, made from an expression: the lists of key blocks that the forward pass goes over.

There is a row for each block of 128 queries. It holds every block once, full and partial ones merged, in ascending
order. Making rows reads back from the device how many blocks there are of what.
"""

import torch
from torch import Tensor

from flash_attn_cute.block_tables import BlockRows, RealRows
from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import ALL, FULL, SOME, TILE
from flash_attn_cute.sparsity.nodes import Blocks, Node, Sizes

_PAIRS_AT_ONCE = 1 << 22  # blocks that are classified at a time
_TILES_AT_ONCE = 1 << 12  # blocks whose tiles are compared at a time: 8 MB


def build(node: Node, sizes: Sizes, device: torch.device) -> BlockRows:
    """The rows of any expression, without gaps between them.

    Waits for the device a few times for every four million blocks that an expression cannot rule out.
    """
    shape = (sizes.batch, sizes.heads, sizes.blocks_q)
    start, stop = (x.expand(shape).flatten() for x in node.span(sizes, device))
    candidates = (stop - start).clamp(min=0)
    behind_row = candidates.cumsum(0)
    first = start + candidates - behind_row  # of each row, so that the nth candidate of all is block first + n
    found, row, before = _Found(sizes, device), 0, 0
    ends = behind_row.tolist()
    while row < len(ends):
        behind = row + 1
        while behind < len(ends) and ends[behind] - before <= _PAIRS_AT_ONCE:
            behind += 1
        rows = torch.arange(row, behind, device=device)
        of_row = rows.repeat_interleave(candidates[row:behind], output_size=ends[behind - 1] - before)
        n = first[of_row] + torch.arange(before, ends[behind - 1], device=device)
        found.classify(node, of_row, n)
        row, before = behind, ends[behind - 1]
    return found.rows()


class _Found:
    """The blocks found so far that are not empty, ascending by row and column."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.row = [torch.zeros(0, dtype=torch.int64, device=device)]
        self.block = [torch.zeros(0, dtype=torch.int64, device=device)]
        self.tile = [torch.zeros(0, dtype=torch.int64, device=device)]  # numbers in all of ``tiles``
        self.tiles = [torch.zeros(0, TILE, bits.WORDS, dtype=torch.int32, device=device)]
        self.num_tiles = 0

    def classify(self, node: Node, row: Tensor, n: Tensor) -> None:
        sizes = self.sizes
        blocks = Blocks(sizes, row, n)
        kinds = node.kinds(blocks)
        if sizes.seqlen_q % TILE:
            kinds = kinds.masked_fill((blocks.m == sizes.blocks_q - 1) & (kinds == ALL), SOME)
        if sizes.seqlen_k % TILE:
            kinds = kinds.masked_fill((n == sizes.blocks_k - 1) & (kinds == ALL), SOME)
        tile = torch.full_like(n, FULL)
        partial = (kinds == SOME).nonzero()[:, 0]
        if len(partial):
            kinds[partial], tile[partial] = self._of_partial(node, blocks.part(partial))
        kept = kinds.nonzero()[:, 0]  # NONE is 0
        self.row.append(row[kept])
        self.block.append(n[kept])
        self.tile.append(tile[kept])

    def _of_partial(self, node: Node, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """What blocks are that could be anything, (n,) int8, and which tiles they have, (n,) int64."""
        sizes = self.sizes
        alike, number = node.alike(blocks), None
        if alike is not None:
            cut_q = (blocks.m == sizes.blocks_q - 1) if sizes.seqlen_q % TILE else 0
            cut_k = (blocks.n == sizes.blocks_k - 1) if sizes.seqlen_k % TILE else 0
            first, number = bits.by_first((4 * alike[0] + 2 * cut_q + cut_k).unique(return_inverse=True))
            blocks = blocks.part(first)
        parts = [self._tiles_of(node, piece) for piece in blocks.pieces(_TILES_AT_ONCE)]
        kinds, tile = (torch.cat(x) for x in zip(*parts, strict=True))
        return (kinds, tile) if number is None else (kinds[number], tile[number])

    def _tiles_of(self, node: Node, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The same of few blocks, each looked at."""
        sizes = self.sizes
        tiles = node.tiles(blocks)
        if sizes.seqlen_q % TILE or sizes.seqlen_k % TILE:
            tiles = bits.cut(tiles, sizes.seqlen_q - blocks.m * TILE, sizes.seqlen_k - blocks.n * TILE)
        kinds = bits.kinds(tiles)
        some = (kinds == SOME).nonzero()[:, 0]
        distinct, number = bits.distinct(tiles[some])
        self.tiles.append(distinct)
        tile = torch.full_like(blocks.n, FULL).index_copy_(0, some, number + self.num_tiles)
        self.num_tiles += len(distinct)
        return kinds, tile

    def rows(self) -> BlockRows:
        sizes = self.sizes
        row, block, tile, tiles = (torch.cat(x) for x in (self.row, self.block, self.tile, self.tiles))
        if len(self.tiles) > 2:  # made in several parts, which may have some in common
            tiles, number = bits.distinct(tiles)
            tile = number[tile.clamp(min=0)].masked_fill(tile == FULL, FULL)
        edges = torch.searchsorted(row, torch.arange(sizes.batch * sizes.heads * sizes.blocks_q + 1, device=row.device))
        spans = torch.stack((edges[:-1], edges.diff()), 1).int()
        spans = spans.view(sizes.batch, sizes.heads, sizes.blocks_q, 2)
        return BlockRows(spans, torch.stack((block, tile), 1).int(), tiles)


def real_rows(node: Node, rows: BlockRows, sizes: Sizes) -> RealRows | None:
    """Which rows are no padding, of an expression and its rows of blocks; None if none is. Waits for the device.

    A row of no document is padding only if the whole mask hides it, for ``|`` may show it all the same.
    """
    padding = node.padding
    if padding is None or not bool(padding[0].any() | padding[1].any()):
        return None
    row, is_used = owners(rows)
    row, (block, tile) = row[is_used], rows.entries[is_used].long().unbind(1)
    entry, m = row // (sizes.heads * max(sizes.blocks_q, 1)), row % max(sizes.blocks_q, 1)
    sees = _shown_of(rows.tiles.any(2), entry, m, tile, sizes.blocks_q, sizes.batch)
    seen = _shown_of(bits.seen_by_any(rows.tiles), entry, block, tile, sizes.blocks_k, sizes.batch)
    real = RealRows(~padding[0] | sees[:, : sizes.seqlen_q], ~padding[1] | seen[:, : sizes.seqlen_k])
    return None if bool(real.queries.all() & real.keys.all()) else real


def _shown_of(of_tile: Tensor, entry: Tensor, block: Tensor, tile: Tensor, blocks: int, batch: int) -> Tensor:
    """Which rows of blocks any of their tiles shows: (batch, 128 * blocks), bool.

    Args:
        of_tile: (tiles, 128), bool: which rows of a block each tile shows.
        entry: (entries,): the batch entry of each.
        block: (entries,): its block, of queries or of keys.
        tile: (entries,), int64: its tile, or FULL.
        blocks: how many there are.
        batch: likewise.
    """
    of_tile = torch.cat((of_tile.new_ones(1, TILE), of_tile))  # FULL is -1
    pairs = ((entry * blocks + block) * len(of_tile) + tile + 1).unique()
    shown = torch.zeros(batch * blocks, TILE, dtype=torch.int32, device=tile.device)
    shown.index_add_(0, pairs // len(of_tile), of_tile[pairs % len(of_tile)].int())
    return (shown > 0).view(batch, blocks * TILE)


def owners(rows: BlockRows) -> tuple[Tensor, Tensor]:
    """The row that each entry belongs to, (entries,) int32, and whether it is used at all."""
    place = torch.arange(len(rows.entries), dtype=torch.int32, device=rows.spans.device)
    start, count = rows.spans.flatten(0, 2).unbind(1)
    row = torch.searchsorted(start.contiguous(), place, right=True, out_int32=True) - 1
    return row, place < (start + count).index_select(0, row)
