"""Columns of blocks, made from rows: the lists of query blocks that the backward pass goes over.

There is a column for each block of 128 keys. It lists full and partial blocks together, each once: ascending, or in an
m_block order that has been found for the mask (``dq_order.contention_model``). Partial blocks first would cost: in that
model windows take 2 to 10 times as long where additions to dQ have an order.

Nothing waits for the device. Sizes of tables are upper bounds, and unused entries stand behind the used ones.
"""

import torch
from torch import Tensor

from flash_attn_cute.problem.block_tables import FULL_CODE, BlockColumns, BlockRows, BlockTables
from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import EMPTY, FULL, HALF
from flash_attn_cute.sparsity.dq_order import launch_orders
from flash_attn_cute.sparsity.dq_order.launch_orders import Launch
from flash_attn_cute.sparsity.dq_order.turns import last_first
from flash_attn_cute.sparsity.row_tables import owners
from flash_attn_cute.sparsity.score_blocks import Sizes


def launch_of(order: str | Tensor, rows: BlockRows, sizes: Sizes, group: int) -> Launch:
    """Finds the launch of a mask in a given order. Only ``"permutation"`` and ``"auto"`` wait for the device.

    The order is a name of ``launch_orders.NAMES``, or a launch order as ``launch_orders.checked`` returns it, which
    ``group`` heads share.
    """
    device = rows.spans.device
    if isinstance(order, Tensor):
        return Launch(order).to(device)
    if order == "default":
        return Launch()
    if order == "spt":
        return Launch(launch_orders.shortest_first_of_groups(column_lengths(rows, sizes), group))
    return launch_orders.search(order, steps(rows, sizes).cpu(), group, sizes.seqlen_q).to(device)


def column_lengths(rows: BlockRows, sizes: Sizes) -> Tensor:
    """Length of each column, in blocks of 64 queries: (batch, heads, blocks_k), int64."""
    row, is_used = owners(rows)
    column = row // max(sizes.blocks_q, 1) * sizes.blocks_k + rows.entries[:, 0] * is_used
    halves = _visible_halves(rows).sum(1) * is_used
    lengths = torch.zeros(sizes.batch * sizes.heads * sizes.blocks_k, dtype=torch.int64, device=row.device)
    return lengths.index_add_(0, column, halves).view(sizes.batch, sizes.heads, sizes.blocks_k)


def steps(rows: BlockRows, sizes: Sizes) -> Tensor:
    """Steps of 64 queries that each block takes, 0 to 2: (batch, heads, blocks_q, blocks_k), uint8."""
    row, is_used = owners(rows)
    n = torch.where(is_used, rows.entries[:, 0], sizes.blocks_k)  # unused entries go into a column of their own
    halves = torch.zeros((sizes.num_rows, sizes.blocks_k + 1), dtype=torch.uint8, device=n.device)
    halves[row, n] = _visible_halves(rows).sum(1, dtype=torch.uint8)
    return halves[:, :-1].unflatten(0, (sizes.batch, sizes.heads, sizes.blocks_q))


def columns(rows: BlockRows, order: Tensor | None, sizes: Sizes, m_block_order: Tensor | None = None) -> BlockColumns:
    """Makes the columns of a mask's rows under a launch order; nothing waits for the device.

    Args:
        rows: of the mask.
        order: (1 or batch, 1 or a divisor of heads, blocks_k), int32: key blocks in launch order, permutations of
            0 .. blocks_k - 1. Heads that share an order are neighbours. None: last keys first, which takes no sorting
            as rows ascend.
        sizes: of the mask.
        m_block_order: (batch, heads, blocks_q, blocks_k), int16: the position of each query block in its column,
            anything for empty blocks; None: ascending.
    """
    blocks_q, blocks_k, device = sizes.blocks_q, sizes.blocks_k, rows.spans.device
    start, count = rows.spans.flatten(0, 2).unbind(1)
    row, is_used = owners(rows)
    block, code = rows.entries.unbind(1)
    kinds = _kinds_of_halves(rows)
    # Which entries add to the first half of a query block, to the second half, and to the whole: (3, entries).
    adds = torch.cat(((kinds != EMPTY).T, is_used[None])) & is_used

    # Turns are counted from the end of a row, as its entries are in the reverse of the launch order, or are brought
    # into that: used entries stay ahead of unused ones, and a row stays where it is.
    column = row // max(blocks_q, 1) * blocks_k + block * is_used
    turn, by_half = _turns(adds, row, start, start + count, _reverse_launch_order(order, row, column, is_used, sizes))
    by_half = by_half.T.reshape(sizes.batch, sizes.heads, 2 * blocks_q)
    contributors = by_half[..., : -(-sizes.seqlen_q // HALF)].contiguous()

    edges, by_column = _sorted_by_column(row, column, block, is_used, sizes, m_block_order)
    m = row % max(blocks_q, 1)
    whole = torch.stack((m, code, turn[2]), 1)[by_column]
    half = torch.arange(2, dtype=torch.int32, device=device)
    halves = torch.stack((2 * m[:, None] + half, code[:, None].masked_fill(kinds == FULL, FULL_CODE), turn[:2].T), 2)[
        by_column
    ]  # (entries, 2, 3)

    visible = adds[:2].T[by_column].flatten()
    entries, before = _without_empty(halves.flatten(0, 1), visible)
    entries = torch.cat((entries, whole))
    ends = torch.stack((before[2 * edges], edges + 2 * len(row)))
    spans = torch.stack((ends[:, :-1], ends.diff(dim=1)), 2).int()
    spans = spans.view(2, sizes.batch, sizes.heads, blocks_k, 2)
    return BlockColumns(spans, entries, contributors, last_first(blocks_k, device) if order is None else order)


def half_columns(
    rows: BlockRows,
    order: Tensor | None,
    sizes: Sizes,
    m_block_order: Tensor | None = None,
    most: int | None = None,
) -> BlockColumns:
    """Makes the columns of blocks of 64 keys, and of 64 queries; other arguments are those of ``columns``.

    A block of 128 is launched as its second half, then its first one, so that last keys come first in either size.
    ``most``: how many visible blocks of 64 x 64 there are at the most; backends size workspaces by the number of
    entries. None: they are counted, which waits for the device.
    """
    blocks_q, blocks_k, device = sizes.blocks_q, sizes.blocks_k, rows.spans.device
    start, count = rows.spans.flatten(0, 2).unbind(1)
    row, is_used = owners(rows)
    block, code = rows.entries.unbind(1)
    kinds = _kinds_of_quarters(rows)
    adds = (kinds != EMPTY) & is_used[:, None, None]
    half = torch.arange(2, dtype=torch.int32, device=device)

    # An entry has two places in its row, one for each half of its keys.
    column = row // max(blocks_q, 1) * blocks_k + block * is_used
    places = _reverse_launch_order(order, row, column, is_used, sizes)
    if places is not None:
        places = (2 * places[:, None] + half).flatten()
    by_place = adds.transpose(0, 1).flatten(1)
    turn, by_half = _turns(by_place, row.repeat_interleave(2), 2 * start, 2 * (start + count), places)
    turn = turn.unflatten(1, (-1, 2))  # (half of the queries, entry, half of the keys)
    by_half = by_half.T.reshape(sizes.batch, sizes.heads, 2 * blocks_q)
    contributors = by_half[..., : -(-sizes.seqlen_q // HALF)].contiguous()

    edges, by_column = _sorted_by_column(row, column, block, is_used, sizes, m_block_order)
    m = 2 * (row % max(blocks_q, 1))[:, None] + half
    halves = torch.stack(
        (
            m.expand(2, -1, -1),
            code[:, None, None].masked_fill(kinds == FULL, FULL_CODE).permute(2, 0, 1),
            turn.permute(2, 1, 0),
        ),
        3,
    )[:, by_column]  # (half of the keys, entry, half of the queries, 3)
    visible = adds.permute(2, 0, 1)[:, by_column].flatten()
    entries, before = _without_empty(halves.flatten(0, 2), visible)
    entries = entries[: int(before[-1]) if most is None else most].clone()  # not a view, which keeps all of it
    ends = before[2 * (edges + len(row) * half[:, None])]
    spans = torch.stack((ends[:, :-1], ends.diff(dim=1)), 2).int()
    spans = spans.view(2, sizes.batch, sizes.heads, blocks_k, 2).permute(1, 2, 3, 0, 4).flatten(2, 3)
    num = -(-sizes.seqlen_k // HALF)
    order = last_first(num, device) if order is None else _order_of_halves(order, num)
    return BlockColumns(spans[None, :, :, :num].contiguous(), entries, contributors, order)


def _order_of_halves(order: Tensor, num: int) -> Tensor:
    """Launch order of so many blocks of 64 keys, from that of blocks of 128."""
    order = torch.stack((2 * order + 1, 2 * order), -1).flatten(-2)
    is_none = (order >= num).to(torch.int8)  # a second half behind the last key goes to the end, and is left out
    return order.gather(-1, is_none.argsort(stable=True, dim=-1))[..., :num].contiguous()


def _sorted_by_column(
    row: Tensor, column: Tensor, block: Tensor, is_used: Tensor, sizes: Sizes, m_block_order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where each column begins and the last one ends, (columns + 1,), and which entry stands where: (entries,).

    A stable sort: query blocks ascend within a column as they do among the rows. Unused entries come last.
    """
    num_columns = sizes.batch * sizes.heads * sizes.blocks_k
    column = torch.where(is_used, column, num_columns)
    if m_block_order is None:
        column, by_column = column.sort(stable=True)
    else:
        position = m_block_order.flatten().index_select(0, row * sizes.blocks_k + block * is_used)
        by_column = (column.long() * (sizes.blocks_q + 1) + position).argsort()
        column = column[by_column]
    edges = torch.searchsorted(column, torch.arange(num_columns + 1, dtype=torch.int32, device=row.device))
    return edges, by_column


def _without_empty(entries: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Entries (n, 3) of which each visible one goes behind those before it; and their counts before each place."""
    before = _counts_before(visible)
    found = entries.new_zeros(len(entries) + 1, 3)  # the last one takes what is left out
    found.index_copy_(0, torch.where(visible, before[:-1], len(entries)).long(), entries)
    return found[:-1], before


def m_block_order_of(tables: BlockTables, sizes: Sizes) -> Tensor:
    """The m_block order of columns, as ``columns`` takes it; raises ValueError for tables without columns."""
    if tables.columns is None:
        raise ValueError("tables: expected some with columns, got rows alone: make them with backward=True")
    start, count = tables.columns.spans[1].flatten(0, 2).long().unbind(1)
    column = torch.arange(len(count), device=start.device).repeat_interleave(count)
    position = torch.arange(len(column), device=start.device) - (count.cumsum(0) - count)[column]
    found = torch.zeros(len(count), sizes.blocks_q, dtype=torch.int16, device=start.device)
    found[column, tables.columns.entries[start[column] + position, 0].long()] = position.to(torch.int16)
    return found.view(sizes.batch, sizes.heads, sizes.blocks_k, sizes.blocks_q).mT


def _reverse_launch_order(
    order: Tensor | None, row: Tensor, column: Tensor, is_used: Tensor, sizes: Sizes
) -> Tensor | None:
    """Places of entries, row by row, in the reverse of the launch order; None if entries have that order already."""
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
    """Turns of entries, (3, entries), and how many entries add to the halves of each row, (2, rows); int32.

    ``adds``: (3, entries), bool. ``row``: (entries,), the row of each. ``start`` and ``end``: (rows,), the index of a
    row's first entry, and behind its last one. ``places``: of entries, within each row in the reverse of the launch
    order; None if they have that order already.
    """
    before = _counts_before(adds if places is None else adds[:, places])
    at_end = before.index_select(1, end)
    turn = at_end.index_select(1, row) - before[:, 1:]
    if places is not None:
        turn = torch.empty_like(turn).index_copy_(1, places, turn)
    return turn, (at_end - before.index_select(1, start))[:2]


def _counts_before(flags: Tensor) -> Tensor:
    """How many flags (..., n) are set before each place, and before the end: (..., n + 1), int32.

    Counts go on from row to row, so that a GPU scans all rows as one: PyTorch gives each row to a single CTA.
    """
    ahead = torch.nn.functional.pad(flags, (1, 0))
    return ahead.flatten().cumsum(0, dtype=torch.int32).view_as(ahead)


def _kinds_of_halves(rows: BlockRows) -> Tensor:
    """Kinds of both halves of each entry: EMPTY, PARTIAL or FULL, (entries, 2), int8."""
    words = rows.tiles.view(-1, 2, HALF * bits.WORDS)
    of_tile = (words != 0).any(2).to(torch.int8) + (words == -1).all(2)
    of_tile = torch.cat((of_tile.new_full((1, 2), FULL), of_tile))  # FULL_CODE is -1
    return of_tile.index_select(0, rows.entries[:, 1] + 1)


def _kinds_of_quarters(rows: BlockRows) -> Tensor:
    """Kinds of the quarters of each entry: (entries, half of the queries, half of the keys), int8."""
    words = rows.tiles.view(-1, 2, HALF, 2, bits.WORDS // 2)
    of_tile = (words != 0).any(4).any(2).to(torch.int8) + (words == -1).all(4).all(2)
    of_tile = torch.cat((of_tile.new_full((1, 2, 2), FULL), of_tile))  # FULL_CODE is -1
    return of_tile.index_select(0, rows.entries[:, 1] + 1)


def _visible_halves(rows: BlockRows) -> Tensor:
    """Halves of entries with visible scores: (entries, 2), bool."""
    return _kinds_of_halves(rows) != EMPTY
