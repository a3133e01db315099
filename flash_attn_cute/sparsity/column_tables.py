"""Columns of blocks, made from rows: the lists of query blocks that the backward pass goes over.

There is a column for each block of 128 keys. It holds every block once, full and partial ones merged, in ascending
order or in one that has been found for it (``dq_order.contention_model``). In that model partial blocks first would
cost windows 2 to 10 times as much where additions to dQ have an order.

Nothing waits for the device: sizes are bounds, and what is not used stands behind what is.
"""

import torch
from torch import Tensor

from flash_attn_cute.block_tables import BlockColumns, BlockRows, BlockTables
from flash_attn_cute.dq_order import launch_orders
from flash_attn_cute.dq_order.launch_orders import Launch
from flash_attn_cute.dq_order.turns import last_first
from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import ALL, FULL, HALF, NONE
from flash_attn_cute.sparsity.nodes import Sizes
from flash_attn_cute.sparsity.row_tables import owners


def launch_of(order: str | Tensor, rows: BlockRows, sizes: Sizes, group: int) -> Launch:
    """The launch of a mask in an order, of which heads of a group have the same.

    Waits for the device only to find ``"permutation"`` and ``"auto"``.
    """
    device = rows.spans.device
    if isinstance(order, Tensor):
        return Launch(order.to(device).contiguous())
    if order == "default":
        return Launch()
    if order == "spt":
        return Launch(launch_orders.shortest_first_of_groups(lengths_of_columns(rows, sizes), group))
    return launch_orders.search(order, steps(rows, sizes).cpu(), group, sizes.seqlen_q).to(device)


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
