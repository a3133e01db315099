"""Launch orders by name: which there are, and the search for those that are found for a mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute import kept
from flash_attn_cute.dq_order.turns import last_first, shortest_first

NAMES = ("auto", "default", "spt", "permutation")
WAITING = ("auto", "permutation")  # for the device

_WORTH = 0.98  # of the time of walks that ascend, which share more in the cache
_LITTLE = 1.02  # of the time of the work alone: "auto" looks no further


class Launch(NamedTuple):
    """In which order blocks of keys are launched, and how each walks over its blocks of queries."""

    order: Tensor | None = None  # (batch or 1, key heads or 1, blocks_k), int32; None: last keys first
    walks: Tensor | None = None  # (batch, heads, blocks_q, blocks_k), int16: places; None: as blocks ascend
    waits_little: bool = False  # as a search has found

    def to(self, device: torch.device) -> Launch:
        """The same with its tensors on a device."""
        order, walks = (None if x is None else x.to(device) for x in (self.order, self.walks))
        return Launch(None if order is None else order.contiguous(), walks, self.waits_little)


def shortest_first_of_groups(lengths: Tensor, group: int) -> Tensor:
    """By the lengths of columns, (batch, heads, blocks_k), of which heads of a group share an order."""
    return shortest_first(lengths.unflatten(1, (-1, group)).sum(2))


def search(name: str, steps: Tensor, group: int, seqlen_q: int) -> Launch:
    """The launch in which tiles of a mask wait the least, with walks if they are worth it.

    Last keys first and shortest first are compared, the former on ties.

    Args:
        name: ``"permutation"``, or ``"auto"``, which takes last keys first where that waits for little.
        steps: (batch, heads, blocks_q, blocks_k), uint8, on the CPU: see ``contention_model.Pass``.
        group: heads that share an order.
        seqlen_q: queries.
    """
    from flash_attn_cute.dq_order.contention_model import Pass, machine_of  # few masks need it

    spt = shortest_first_of_groups(steps.sum(2), group)
    orders = [last_first(steps.shape[-1], steps.device).expand_as(spt), spt]
    if not steps.numel():
        return Launch(orders[0])
    work = Pass(steps, group, machine_of(seqlen_q))
    slowdowns = work.slowdowns(orders)
    if name == "auto" and slowdowns[0] <= _LITTLE:  # with two sums; tiles that wait little are to have one
        (slowdown,) = work.on(machine_of(seqlen_q, waits_little=True)).slowdowns(orders[:1])
        if slowdown <= _LITTLE:
            return Launch(orders[0], waits_little=True)
    least = min(slowdowns)
    best = orders[slowdowns.index(least)]
    walking = work.on(machine_of(seqlen_q, has_walks=True))
    walks, slowdown = walking.walks(best)
    return Launch(best, walks if walking.whole(slowdown) <= _WORTH * work.whole(least) else None)


def checked(order: Tensor, batch: int, heads: int, blocks_k: int) -> Tensor:
    """An order given as a tensor, copied: (batch or 1, heads or 1, blocks_k), int32.

    Raises:
        TypeError: another dtype.
        ValueError: a wrong shape, or what is no permutation.
    """
    if order.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"order: expected dtype torch.int32 or torch.int64, got {order.dtype}")
    order = kept.copied(order)
    whole = order[(None,) * (3 - order.ndim)] if 1 <= order.ndim <= 3 else order
    fits = whole.ndim == 3 and whole.shape[2] == blocks_k
    if not fits or whole.shape[0] not in (1, batch) or whole.shape[1] not in (1, heads):
        expected = f"a shape that broadcasts to ({batch}, {heads}, {blocks_k})"
        raise ValueError(f"order: expected {expected}, got {tuple(order.shape)}")
    if not torch.equal(whole.sort(-1).values, torch.arange(blocks_k, device=order.device).expand_as(whole)):
        raise ValueError(f"order: expected permutations of 0 .. {blocks_k - 1}, got {order.tolist()}")
    return whole.int()
