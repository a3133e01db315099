"""From an expression to the tables that kernels read, and from rows of blocks to columns.

Rows are lists of key blocks, one for each block of 128 queries: what the forward pass walks over. Columns are lists of
query blocks, one for each block of 128 keys: what the backward pass walks over. Both hold every block once, full and
partial ones merged, in ascending order, or columns as walks have been found: in the model of ``sparsity.order`` a walk
that takes partial blocks first costs windows 2 to 10 times as much where additions to dQ have an order.

Making rows of an expression reads back how many there are of what. All else here follows on the device alone: sizes
are bounds, and what is not used stands behind what is.
"""

import torch
from torch import Tensor

from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import ALL, FULL, HALF, NONE, SOME, TILE
from flash_attn_cute.sparsity.nodes import Blocks, Node, Sizes
from flash_attn_cute.sparsity.order import last_first
from flash_attn_cute.spec import BlockColumns, BlockRows, BlockTables, RealRows

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


def lengths_of_columns(rows: BlockRows, sizes: Sizes) -> Tensor:
    """How many blocks of 64 queries see each block of keys: (batch, heads, blocks_k), int64."""
    row, is_used = owners(rows)
    column = row // max(sizes.blocks_q, 1) * sizes.blocks_k + rows.entries[:, 0] * is_used
    seen = _halves_seen(rows).sum(1) * is_used
    lengths = torch.zeros(sizes.batch * sizes.heads * sizes.blocks_k, dtype=torch.int64, device=row.device)
    return lengths.index_add_(0, column, seen).view(sizes.batch, sizes.heads, sizes.blocks_k)


def steps(rows: BlockRows, sizes: Sizes) -> Tensor:
    """How many halves of a block of queries see a block of keys: (batch, heads, blocks_q, blocks_k), uint8."""
    row, is_used = owners(rows)
    n = torch.where(is_used, rows.entries[:, 0], sizes.blocks_k)  # what is not used goes into a column of its own
    shape = (sizes.batch * sizes.heads * sizes.blocks_q, sizes.blocks_k + 1)
    seen = torch.zeros(shape, dtype=torch.uint8, device=n.device)
    seen[row, n] = _halves_seen(rows).sum(1, dtype=torch.uint8)
    return seen[:, :-1].unflatten(0, (sizes.batch, sizes.heads, sizes.blocks_q))


def columns(rows: BlockRows, order: Tensor | None, sizes: Sizes, walks: Tensor | None = None) -> BlockColumns:
    """The columns of rows, under an order in which key blocks are launched; nothing waits for the device.

    Args:
        rows: of a mask.
        order: (1 or batch, 1 or a divisor of heads, blocks_k), int32: key blocks as they are launched, permutations of
            0 .. blocks_k - 1. Heads that share an order are neighbours. None: last keys first, which takes no sorting
            as rows ascend.
        sizes: of the mask.
        walks: (batch, heads, blocks_q, blocks_k), int16: the place of a block of queries in the walk of a tile of keys,
            anything where they do not meet; None: walks ascend.
    """
    blocks_q, blocks_k, device = sizes.blocks_q, sizes.blocks_k, rows.spans.device
    start, count = rows.spans.flatten(0, 2).unbind(1)
    row, is_used = owners(rows)
    block, tile = rows.entries.unbind(1)
    kinds = _kinds_of_halves(rows)
    # Who adds to the first half of a block of queries, to the second one, and to the whole: (3, entries).
    adds = torch.cat(((kinds != NONE).T, is_used[None])) & is_used

    # Turns are counted from the end of a row, whose entries are in the reverse of the order of launches, or brought
    # into it: what is used stays ahead of what is not, and the row where it is.
    column = row // max(blocks_q, 1) * blocks_k + block * is_used
    turn, by_half = _turns(adds, row, start, start + count, _reverse(order, row, column, is_used, sizes))
    by_half = by_half.T.reshape(sizes.batch, sizes.heads, 2 * blocks_q)
    contributors = by_half[..., : -(-sizes.seqlen_q // HALF)].contiguous()

    # Stable: query blocks ascend within a column as they do among the rows.
    num_columns = sizes.batch * sizes.heads * blocks_k
    column = torch.where(is_used, column, num_columns)
    if walks is None:
        column, by_column = column.sort(stable=True)
    else:
        place = walks.flatten().index_select(0, row * blocks_k + block * is_used)
        by_column = (column.long() * (blocks_q + 1) + place).argsort()
        column = column[by_column]
    edges = torch.searchsorted(column, torch.arange(num_columns + 1, dtype=torch.int32, device=device))
    m = row % max(blocks_q, 1)
    whole = torch.stack((m, tile, turn[2]), 1)[by_column]
    half = torch.arange(2, dtype=torch.int32, device=device)
    halves = torch.stack((2 * m[:, None] + half, tile[:, None].masked_fill(kinds == ALL, FULL), turn[:2].T), 2)[
        by_column
    ]  # (entries, 2, 3)

    # Halves that see nothing are left out: each of the others goes behind those before it.
    kept = adds[:2].T[by_column].flatten()
    before = _summed(kept)
    entries = halves.new_zeros(3 * len(row) + 1, 3)  # the last one is nobody's
    entries.index_copy_(0, torch.where(kept, before[:-1], 3 * len(row)).long(), halves.flatten(0, 1))
    entries[2 * len(row) : -1] = whole
    ends = torch.stack((before[2 * edges], edges + 2 * len(row)))
    spans = torch.stack((ends[:, :-1], ends.diff(dim=1)), 2).int()
    spans = spans.view(2, sizes.batch, sizes.heads, blocks_k, 2)
    return BlockColumns(spans, entries[:-1], contributors, last_first(blocks_k, device) if order is None else order)


def walks_of(tables: BlockTables, sizes: Sizes) -> Tensor:
    """The walks that columns have, as ``columns`` takes them."""
    assert tables.columns is not None
    start, count = tables.columns.spans[1].flatten(0, 2).long().unbind(1)
    column = torch.arange(len(count), device=start.device).repeat_interleave(count)
    place = torch.arange(len(column), device=start.device) - (count.cumsum(0) - count)[column]
    walks = torch.zeros(len(count), sizes.blocks_q, dtype=torch.int16, device=start.device)
    walks[column, tables.columns.entries[start[column] + place, 0].long()] = place.to(torch.int16)
    return walks.view(sizes.batch, sizes.heads, sizes.blocks_k, sizes.blocks_q).mT


def _reverse(order: Tensor | None, row: Tensor, column: Tensor, is_used: Tensor, sizes: Sizes) -> Tensor | None:
    """The places of entries, row by row, in the reverse of the order of launches; None if they are so already."""
    if order is None:
        return None
    blocks_k = sizes.blocks_k
    rank = torch.empty_like(order).scatter_(
        -1, order.long(), torch.arange(blocks_k, dtype=torch.int32, device=order.device).expand_as(order)
    )
    rank = rank.repeat_interleave(sizes.heads // order.shape[1], 1).expand(sizes.batch, sizes.heads, blocks_k)
    from_last = torch.where(is_used, blocks_k - rank.flatten().index_select(0, column), blocks_k + 1)
    return (row.long() * (blocks_k + 2) + from_last).argsort()


def _turns(adds: Tensor, row: Tensor, start: Tensor, end: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """The turns of entries, (3, entries), and how many add to the halves of each row, (2, rows); int32.

    Args:
        adds: (3, entries), bool.
        row: (entries,), the row of each.
        start: (rows,), where entries of a row start.
        end: (rows,), where they end.
        places: of entries, within each row in the reverse of the order of launches; None if they are so.
    """
    summed = _summed(adds if places is None else adds[:, places])
    at_end = summed.index_select(1, end)
    turn = at_end.index_select(1, row) - summed[:, 1:]
    if places is not None:
        turn = torch.empty_like(turn).index_copy_(1, places, turn)
    return turn, (at_end - summed.index_select(1, start))[:2]


def _summed(flags: Tensor) -> Tensor:
    """How many of the flags (..., n) before each place, and before the end, are set: (..., n + 1), int32.

    Further rows go on counting where those before them ended, so that a GPU scans all as one: PyTorch takes a single
    CTA to a row.
    """
    ahead = torch.nn.functional.pad(flags, (1, 0))
    return ahead.flatten().cumsum(0, dtype=torch.int32).view_as(ahead)


def _kinds_of_halves(rows: BlockRows) -> Tensor:
    """NONE, SOME or ALL of either half of each entry: (entries, 2), int8."""
    words = rows.tiles.view(-1, 2, HALF * bits.WORDS)
    of_tile = (words != 0).any(2).to(torch.int8) + (words == -1).all(2)
    return torch.cat((of_tile.new_full((1, 2), ALL), of_tile)).index_select(0, rows.entries[:, 1] + 1)  # FULL is -1


def _halves_seen(rows: BlockRows) -> Tensor:
    """In which halves of the block of queries an entry shows something: (entries, 2), bool."""
    return _kinds_of_halves(rows) != NONE


def owners(rows: BlockRows) -> tuple[Tensor, Tensor]:
    """The row that each entry belongs to, (entries,) int32, and whether it is used at all."""
    place = torch.arange(len(rows.entries), dtype=torch.int32, device=rows.spans.device)
    start, count = rows.spans.flatten(0, 2).unbind(1)
    row = torch.searchsorted(start.contiguous(), place, right=True, out_int32=True) - 1
    return row, place < (start + count).index_select(0, row)
