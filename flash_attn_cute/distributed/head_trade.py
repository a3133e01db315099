"""All-to-all exchange of rows for heads: every rank of a group gets all of its rows and a part of the heads.

It is DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509). The attention is then over fewer ranks, or one.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

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
        """Plans for ``rank`` and the ranks of the sharding that are the same rank of the merged sharding."""
        self.size = sharding.num_ranks // merged.num_ranks
        self.rank = rank % self.size
        together = rank // self.size
        ranks = range(together * self.size, (together + 1) * self.size)
        self.counts = [sharding.num_rows(rank) for rank in ranks]
        theirs = torch.cat([sharding.index(rank) for rank in ranks])
        # Which of the ranks' rows, one rank behind another, each row of the merged sharding is, and the inverse.
        place = torch.empty(merged.total, dtype=torch.int64, device="cpu")
        place[theirs] = torch.arange(len(theirs), device="cpu")
        order = place[merged.index(together)]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device="cpu")
        self.order, self.inverse = order.to(device), inverse.to(device)


def _to_heads(x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
    """(ranks, rows, width), a part a rank, to (rows of all, width), of this rank's part."""
    sent = [rows.counts[rows.rank]] * rows.size
    return _exchanged(x.contiguous().flatten(0, 1), rows.counts, sent, group).index_select(0, rows.order)


def _to_rows(x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
    """The inverse: (rows of all, width) to (ranks, rows, width), all parts of this rank's rows."""
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


class Trade(NamedTuple):
    """The rows of queries and of keys that ranks trade for heads."""

    queries: Rows
    keys: Rows
    ranks_a_head: int  # that get the same head of k and v, and so have a part each of its gradients

    @classmethod
    def of(cls, queries: Rows, keys: Rows, nheads_k: int) -> "Trade":
        """The trade for nheads_k heads of k and v, for which ``refusal`` is None."""
        return cls(queries, keys, max(1, queries.size // nheads_k))

    def split(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Inputs of this rank's rows and all heads to those of the group's rows and this rank's heads.

        Q is (rows, nheads, d), k (rows, nheads_k, d), v (rows, nheads_k, d_v), and the sink (nheads,).
        """
        k, v = (x.repeat_interleave(self.ranks_a_head, 1) if self.ranks_a_head > 1 else x for x in (k, v))
        size, d, nheads_k = self.keys.size, k.shape[2], k.shape[1] // self.keys.size
        both = torch.cat((_dealt(k, size).flatten(2), _dealt(v, size).flatten(2)), 2)
        q_part = self.part_of(q, group)
        k_part, v_part = _to_heads(both, self.keys, group).split((nheads_k * d, nheads_k * v.shape[2]), 1)
        own_sink = None if sink is None else self._own(sink)
        return q_part, k_part.unflatten(1, (nheads_k, -1)), v_part.unflatten(1, (nheads_k, -1)), own_sink

    def join(self, out: Tensor, lse: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Out (rows, nheads, d_v) and lse (nheads, rows) of what ``split`` gives to those of what it gets."""
        return _joined(out, self.queries, group), _joined(lse.transpose(0, 1), self.queries, group).transpose(0, 1)

    def part_of(self, x: Tensor, group: ProcessGroup | None) -> Tensor:
        """Q, or out or its gradient, of this rank's rows and all heads to the group's rows and this rank's heads."""
        parts = _to_heads(_dealt(x, self.queries.size).flatten(2), self.queries, group)
        return parts.unflatten(1, (x.shape[1] // self.queries.size, -1))

    def part_of_lse(self, lse: Tensor, group: ProcessGroup | None) -> Tensor:
        """``part_of`` for lse or its gradient (nheads, rows); contiguous, as backends write it."""
        return self.part_of(lse.transpose(0, 1)[..., None], group)[..., 0].transpose(0, 1).contiguous()

    def join_gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of what ``split`` gives to those of what it gets, rounded to a dtype.

        Those of k and v, if ranks share heads, are rounded when their parts have been summed.
        """
        if self.ranks_a_head == 1:
            dk, dv = dk.to(dtype), dv.to(dtype)
        both = _joined(torch.cat((dk, dv), 2), self.keys, group)
        if self.ranks_a_head > 1:
            both = both.unflatten(1, (-1, self.ranks_a_head)).sum(2).to(dtype)
        dk, dv = both.split((dk.shape[2], dv.shape[2]), 2)
        return _joined(dq.to(dtype), self.queries, group), dk, dv

    def among_all_heads(self, x: Tensor, others: float) -> Tensor:
        """Numbers of this rank's heads as (nheads,), with another number in heads of other ranks."""
        joined = x.new_full((self.queries.size * x.shape[0],), others)
        self._own(joined).copy_(x)
        return joined

    def _own(self, x: Tensor) -> Tensor:
        """This rank's part of (heads,)."""
        return x.unflatten(0, (self.queries.size, -1))[self.queries.rank]


def _joined(x: Tensor, rows: Rows, group: ProcessGroup | None) -> Tensor:
    """(rows of the group, heads of this rank, ...) to (rows of this rank, all heads, ...)."""
    parts = _to_rows(x.flatten(1), rows, group)
    return parts.unflatten(2, x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _dealt(x: Tensor, size: int) -> Tensor:
    """(rows, heads, d) as (ranks, rows, heads of a rank, d), a view."""
    return x.unflatten(1, (size, -1)).transpose(0, 1)
