"""From an expression to the tables that kernels read, and from rows of blocks to columns.

Rows are lists of key blocks, one for each block of 128 queries: what the forward pass walks over. Columns are lists of
query blocks, one for each block of 128 keys: what the backward pass walks over. Both hold every block once, full and
partial ones merged, in ascending order: in the model of ``sparsity.order`` a walk that takes partial blocks first costs
windows 2 to 10 times as much where additions to dQ have an order.

Making rows of an expression reads back how many there are of what. All else here follows on the device alone: sizes
are bounds, and what is not used stands behind what is.
"""

import torch
from torch import Tensor

from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import ALL, FULL, HALF, NONE, SOME, TILE
from flash_attn_cute.sparsity.nodes import Blocks, Node, Sizes
from flash_attn_cute.spec import BlockColumns, BlockRows

_PAIRS_AT_ONCE = 1 << 22  # blocks that are classified at a time
_TILES_AT_ONCE = 256  # blocks whose elements exist at a time: 4 MB, and indices


def build(node: Node, sizes: Sizes, device: torch.device) -> BlockRows:
    """The rows of any expression, without gaps between them.

    Waits for the device a few times for every four million blocks that an expression cannot rule out.
    """
    shape = (sizes.batch, sizes.heads, sizes.blocks_q)
    start, stop = (x.expand(shape).flatten() for x in node.span(sizes, device))
    candidates = (stop - start).clamp(min=0)
    found, row = _Found(sizes, device), 0
    ends = candidates.cumsum(0).tolist()
    while row < len(ends):
        before = ends[row - 1] if row else 0
        behind = row + 1
        while behind < len(ends) and ends[behind] - before <= _PAIRS_AT_ONCE:
            behind += 1
        rows = torch.arange(row, behind, device=device)
        of_row = rows.repeat_interleave(candidates[row:behind], output_size=ends[behind - 1] - before)
        nth = torch.arange(len(of_row), device=device) + before
        n = start[of_row] + nth - (candidates.cumsum(0) - candidates)[of_row]
        b, h = of_row // (sizes.heads * sizes.blocks_q), of_row // sizes.blocks_q % sizes.heads
        found.classify(node, Blocks(sizes, b, h, of_row % sizes.blocks_q, n))
        row = behind
    return found.rows()


class _Found:
    """The blocks found so far that are not empty, ascending by row and column."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.row: list[Tensor] = []
        self.block: list[Tensor] = []
        self.tile: list[Tensor] = []  # numbers in all of ``tiles``
        self.tiles: list[Tensor] = []
        self.num_tiles = 0

    def classify(self, node: Node, blocks: Blocks) -> None:
        kinds = node.kinds(blocks)
        kept = (kinds != NONE).nonzero().flatten()
        blocks, kinds = blocks.part(kept), kinds[kept]
        sizes = self.sizes
        whole = ((blocks.m + 1) * TILE <= sizes.seqlen_q) & ((blocks.n + 1) * TILE <= sizes.seqlen_k)
        kinds = torch.where(whole, kinds, SOME)
        tile = torch.full_like(blocks.m, FULL)
        partial = (kinds != ALL).nonzero().flatten()
        seen = torch.ones_like(kinds, dtype=torch.bool)
        for start in range(0, len(partial), _TILES_AT_ONCE):
            part = partial[start : start + _TILES_AT_ONCE]
            some_blocks = blocks.part(part)
            ends = sizes.seqlen_q - some_blocks.m * TILE, sizes.seqlen_k - some_blocks.n * TILE
            tiles = bits.cut(node.tiles(some_blocks), *ends)
            kind = bits.kinds(tiles)
            some = (kind == SOME).nonzero().flatten()
            distinct, number = bits.distinct(tiles[some])
            tile[part[some]] = number + self.num_tiles
            seen[part] = kind != NONE
            self.tiles.append(distinct)
            self.num_tiles += len(distinct)
        kept = seen.nonzero().flatten()
        blocks = blocks.part(kept)
        self.row.append((blocks.b * sizes.heads + blocks.h) * sizes.blocks_q + blocks.m)
        self.block.append(blocks.n)
        self.tile.append(tile[kept])

    def rows(self) -> BlockRows:
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        row, block, tile = (torch.cat(x) if x else none for x in (self.row, self.block, self.tile))
        no_tiles = torch.zeros(0, TILE, bits.WORDS, dtype=torch.int32, device=self.device)
        tiles, number = bits.distinct(torch.cat(self.tiles) if self.tiles else no_tiles)
        if self.num_tiles:
            tile = torch.where(tile == FULL, FULL, number[tile.clamp(min=0)])
        sizes = self.sizes
        counts = _counts(row, None, sizes.batch * sizes.heads * sizes.blocks_q)
        spans = torch.stack((counts.cumsum(0) - counts, counts), -1).int()
        spans = spans.view(sizes.batch, sizes.heads, sizes.blocks_q, 2)
        return BlockRows(spans, torch.stack((block, tile), 1).int(), tiles)


def lengths_of_columns(rows: BlockRows, sizes: Sizes) -> Tensor:
    """How many blocks of 64 queries see each block of keys: (batch, heads, blocks_k), int64."""
    additions = _additions(rows)
    owner, n = additions.owner, torch.where(additions.is_used, additions.n, 0)
    lengths = torch.zeros(sizes.batch * sizes.heads * sizes.blocks_k, dtype=torch.int64, device=n.device)
    lengths.scatter_add_(0, owner * sizes.blocks_k + n, torch.where(additions.is_used, _halves_seen(rows), 0))
    return lengths.view(sizes.batch, sizes.heads, sizes.blocks_k)


def steps(rows: BlockRows, sizes: Sizes) -> Tensor:
    """How many halves of a block of queries see a block of keys: (batch, heads, blocks_q, blocks_k), uint8."""
    additions = _additions(rows)
    row = additions.owner * sizes.blocks_q + additions.m
    n = torch.where(additions.is_used, additions.n, sizes.blocks_k)  # what is not used goes into a column of its own
    shape = (sizes.batch * sizes.heads * sizes.blocks_q, sizes.blocks_k + 1)
    seen = torch.zeros(shape, dtype=torch.uint8, device=n.device)
    seen[row, n] = _halves_seen(rows).to(torch.uint8)
    return seen[:, :-1].unflatten(0, (sizes.batch, sizes.heads, sizes.blocks_q))


def _halves_seen(rows: BlockRows) -> Tensor:
    """Of each entry, (entries,) int64: in how many halves of the block of queries something is visible."""
    of_tile = (_kinds_of_halves(rows.tiles) != NONE).sum(0)
    return of_tile[rows.entries[:, 1].long()]


def columns(rows: BlockRows, order: Tensor, seqlen_q: int) -> BlockColumns:
    """The columns of rows, under an order in which key blocks are launched; nothing waits for the device.

    Args:
        rows: of a mask.
        order: (1 or batch, 1 or a divisor of heads, blocks_k), int32: key blocks as they are launched, permutations of
            0 .. blocks_k - 1. Heads that share an order are neighbours.
        seqlen_q: queries.
    """
    batch, heads, blocks_q, _ = rows.spans.shape
    blocks_k = order.shape[-1]
    group = heads // order.shape[1]
    rank = torch.empty_like(order).scatter_(
        -1, order.long(), torch.arange(blocks_k, dtype=torch.int32, device=order.device).expand_as(order)
    )
    rank = rank.repeat_interleave(group, 1).expand(batch, heads, blocks_k).reshape(-1)
    halves, whole = -(-seqlen_q // HALF), _additions(rows)
    spans, entries, contributors = [], [], []
    start = 0
    for part, length in ((_halved(whole, rows.tiles), halves), (whole, blocks_q)):
        span, entry, contributor = part.by_column(rank, batch * heads, length, blocks_k, start)
        spans.append(span.view(batch, heads, blocks_k, 2))
        entries.append(entry)
        contributors.append(contributor.view(batch, heads, length))
        start += len(entry)
    return BlockColumns(torch.stack(spans), torch.cat(entries), contributors[0])


class _Additions:
    """What key blocks add to the dQ of query blocks, in any order: (n,) each."""

    def __init__(self, owner: Tensor, m: Tensor, n: Tensor, tile: Tensor, is_used: Tensor) -> None:
        self.owner, self.m, self.n, self.tile, self.is_used = owner, m, n, tile, is_used

    def by_column(
        self, rank: Tensor, owners: int, blocks_q: int, blocks_k: int, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Spans (owners * blocks_k, 2), entries (n, 3) and contributors (owners * blocks_q,)."""
        n = torch.where(self.is_used, self.n, 0)  # what is not used may hold anything
        row, column = self.owner * blocks_q + self.m, self.owner * blocks_k + n
        contributors = _counts(row, self.is_used, owners * blocks_q)
        by_launch = torch.where(self.is_used, row * blocks_k + rank[column], owners * blocks_q * blocks_k).argsort()
        first = (contributors.cumsum(0) - contributors)[row[by_launch].clamp(max=max(owners * blocks_q - 1, 0))]
        turn = torch.empty_like(row)
        turn[by_launch] = torch.arange(len(row), device=row.device) - first
        by_column = torch.where(self.is_used, column * blocks_q + self.m, owners * blocks_k * blocks_q).argsort()
        entries = torch.stack((self.m, self.tile, turn), 1)[by_column].int()
        lengths = _counts(column, self.is_used, owners * blocks_k)
        spans = torch.stack((lengths.cumsum(0) - lengths + start, lengths), -1).int()
        return spans, entries, contributors.int()


def _additions(rows: BlockRows) -> _Additions:
    row, is_used = owners(rows)
    blocks_q = max(rows.spans.shape[2], 1)
    block, tile = rows.entries.long().unbind(1)
    return _Additions(row // blocks_q, row % blocks_q, block, tile, is_used)


def _halved(whole: _Additions, tiles: Tensor) -> _Additions:
    """Blocks of 64 queries, without those that see nothing; a tile may be full in one of its halves."""
    kinds = _kinds_of_halves(tiles)[:, whole.tile]
    parts = []
    for half, kind in enumerate(kinds):
        m = 2 * whole.m + half
        tile = torch.where(kind == ALL, FULL, whole.tile)
        parts.append((whole.owner, m, whole.n, tile, whole.is_used & (kind != NONE)))
    return _Additions(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _kinds_of_halves(tiles: Tensor) -> Tensor:
    """NONE, SOME or ALL of each: (2, tiles + 1), int8, where the last one is that of FULL, which is -1."""
    kinds = torch.stack([bits.kinds(half) for half in tiles.split(HALF, 1)])
    return torch.cat((kinds, kinds.new_full((2, 1), ALL)), 1)


def owners(rows: BlockRows) -> tuple[Tensor, Tensor]:
    """The row that each entry belongs to, (entries,) int64, and whether it is used at all."""
    place = torch.arange(len(rows.entries), device=rows.spans.device)
    start, count = rows.spans.flatten(0, 2).long().unbind(-1)
    row = torch.searchsorted(start.contiguous(), place, right=True) - 1
    return row, place < (start + count)[row]


def _counts(index: Tensor, is_used: Tensor | None, size: int) -> Tensor:
    """How often each of 0 .. size - 1 is among the used ones: (size,), int64."""
    ones = torch.ones_like(index) if is_used is None else is_used.long()
    index = index if is_used is None else torch.where(is_used, index, 0)
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_add_(0, index, ones)
