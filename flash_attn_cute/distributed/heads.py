"""Trading rows for heads: within a group every rank gets all of the group's rows, and a part of the heads.

DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509). What follows is an attention over fewer ranks, or over one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flash_attn_cute.distributed.groups import weakly
from flash_attn_cute.distributed.sharding import Sharding


def refusal(nheads: int, nheads_k: int, size: int) -> str | None:
    """Why heads cannot be dealt over ranks, if they cannot."""
    if nheads % size:
        return f"{size} ranks do not divide the {nheads} heads of q"
    if nheads_k % size and size % nheads_k:
        return f"of {size} ranks and the {nheads_k} heads of k neither divides the other"
    return None


class Rows:
    """The rows of some ranks, which trade them for heads: dealt over the ranks, or together in order."""

    def __init__(self, sharding: Sharding, merged: Sharding, rank: int, device: torch.device) -> None:
        """Of the ranks of a sharding that are one rank of the merged one, and of which ``rank`` is this one."""
        self.size = sharding.num_ranks // merged.num_ranks
        self.rank = rank % self.size
        together = rank // self.size
        ranks = range(together * self.size, (together + 1) * self.size)
        self.counts = [sharding.num_rows(rank) for rank in ranks]
        theirs = torch.cat([sharding.index(rank) for rank in ranks])
        # Which of the ranks' rows, one rank behind another, each row of the merged sharding is, and the inverse.
        place = torch.empty(merged.total, dtype=torch.int64)
        place[theirs] = torch.arange(len(theirs))
        order = place[merged.index(together)]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        self.order, self.inverse = order.to(device), inverse.to(device)


class _ToHeads(torch.autograd.Function):
    """(ranks, rows, width), a part a rank, to (rows of all, width); the inverse is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
        """The part of this rank of all rows."""
        ctx.rows, ctx.group = rows, weakly(group)
        return _to_heads(x, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """To where the rows came from."""
        return _to_rows(grad, ctx.rows, ctx.group()), None, None


class _ToRows(torch.autograd.Function):
    """(rows of all, width) to (ranks, rows, width), of each rank its part; the inverse is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
        """All parts of this rank's rows."""
        ctx.rows, ctx.group = rows, weakly(group)
        return _to_rows(x, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """To where the parts came from."""
        return _to_heads(grad, ctx.rows, ctx.group()), None, None


def _to_heads(x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
    sent = [rows.counts[rows.rank]] * rows.size
    return _exchanged(x.contiguous().flatten(0, 1), rows.counts, sent, group).index_select(0, rows.order)


def _to_rows(x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
    count = rows.counts[rows.rank]
    received = _exchanged(x.index_select(0, rows.inverse), [count] * rows.size, rows.counts, group)
    return received.unflatten(0, (rows.size, count))


def _exchanged(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup | None) -> Tensor:
    """The rows that come from each rank of a group for those that it is sent; of no group, the same."""
    if group is None:
        return x
    found = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(found, x, received, sent, group=group)
    return found


def split_heads(
    q: Tensor, k: Tensor, v: Tensor, rows_q: Rows, rows_k: Rows, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Q (rows, nheads, d), k and v (rows, nheads_k, d or d_v) of the group's rows, of this rank's part of the heads.

    Ranks that share a head of k and v all get it.
    """
    size = rows_q.size
    if k.shape[1] % size:
        k, v = (x.repeat_interleave(size // x.shape[1], 1) for x in (k, v))
    q_part = part_of(q, rows_q, group)
    d, heads = k.shape[2], k.shape[1] // size
    both = torch.cat((_dealt(k, size).flatten(2), _dealt(v, size).flatten(2)), 2)
    k_part, v_part = _ToHeads.apply(both, rows_k, group).split((heads * d, heads * v.shape[2]), 1)
    return q_part, k_part.unflatten(1, (heads, -1)), v_part.unflatten(1, (heads, -1))


def part_of(x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
    """(rows of this rank, all heads, d) to (rows of the group, heads of this rank, d); ``join_heads`` inverts it."""
    return _ToHeads.apply(_dealt(x, rows.size).flatten(2), rows, group).unflatten(1, (x.shape[1] // rows.size, -1))


def join_heads(x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
    """(rows of the group, heads of this rank, ...) to (rows of this rank, all heads, ...)."""
    parts = _ToRows.apply(x.flatten(1), rows, group)
    return parts.unflatten(2, x.shape[1:]).transpose(0, 1).flatten(1, 2)


def own_heads(x: Tensor, rows: Rows) -> Tensor:
    """This rank's part of (heads,)."""
    return x.unflatten(0, (rows.size, -1))[rows.rank]


def _dealt(x: Tensor, size: int) -> Tensor:
    """(rows, heads, d) as (ranks, rows, heads of a rank, d), a view."""
    return x.unflatten(1, (size, -1)).transpose(0, 1)
