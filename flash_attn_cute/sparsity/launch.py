"""Launch orders by name, and walks, for the tables of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute import kept
from flash_attn_cute.sparsity import plan
from flash_attn_cute.sparsity.nodes import Sizes
from flash_attn_cute.sparsity.order import last_first, shortest_first
from flash_attn_cute.spec import BlockRows

NAMES = ("auto", "default", "spt", "permutation")
WAITING = ("auto", "permutation")  # for the device

_WORTH = 0.98  # of the time of walks that ascend, which share more in the cache
_LITTLE = 1.02  # of the time of the work alone: "auto" looks no further


class Launch(NamedTuple):
    """In which order blocks of keys are launched, and how each walks over its blocks of queries."""

    order: Tensor | None = None  # (batch or 1, key heads or 1, blocks_k), int32; None: last keys first
    walks: Tensor | None = None  # (batch, heads, blocks_q, blocks_k), int16: places; None: as blocks ascend
    waits_little: bool = False  # as a search has found


def of(order: str | Tensor, rows: BlockRows, sizes: Sizes, group: int) -> Launch:
    """The launch of a mask in an order, of which heads of a group have the same.

    Waits for the device only to find ``"permutation"`` and ``"auto"``.
    """
    device = rows.spans.device
    if isinstance(order, Tensor):
        return Launch(order.to(device).contiguous())
    if order == "default":
        return Launch()
    spt = _shortest_first(plan.lengths_of_columns(rows, sizes), group)
    if order == "spt":
        return Launch(spt)
    orders = [x.cpu() for x in (last_first(sizes.blocks_k, device).expand_as(spt), spt)]
    best, walks, waits_little = _found(order, orders, plan.steps(rows, sizes).cpu(), group, sizes.seqlen_q)
    return Launch(best.to(device).contiguous(), None if walks is None else walks.to(device), waits_little)


def _shortest_first(lengths: Tensor, group: int) -> Tensor:
    """By the lengths of columns, (batch, heads, blocks_k), of which heads of a group share an order."""
    return shortest_first(lengths.unflatten(1, (-1, group)).sum(2))


def _found(
    order: str, orders: Sequence[Tensor], steps: Tensor, group: int, seqlen_q: int
) -> tuple[Tensor, Tensor | None, bool]:
    """Of these orders, the default one ahead, that in which tiles wait the least, and walks if they are worth it.

    The first one on ties. "auto" takes the default where that waits for little, which is told as well.
    """
    from flash_attn_cute.sparsity.model import Pass, machine_of  # few masks need it

    if not steps.numel():
        return orders[0], None, False
    work = Pass(steps, group, machine_of(seqlen_q))
    slowdowns = work.slowdowns(orders)
    if order == "auto" and slowdowns[0] <= _LITTLE:  # with two sums; tiles that wait little are to have one
        (slowdown,) = work.on(machine_of(seqlen_q, waits_little=True)).slowdowns(orders[:1])
        if slowdown <= _LITTLE:
            return orders[0], None, True
    least = min(slowdowns)
    best = orders[slowdowns.index(least)]
    walking = work.on(machine_of(seqlen_q, has_walks=True))
    walks, slowdown = walking.walks(best)
    return best, walks if walking.whole(slowdown) <= _WORTH * work.whole(least) else None, False


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
