"""Launch orders by name, and the search for one that suits a mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import check_plain
from flash_attn_cute.runtime import kept
from flash_attn_cute.sparsity.dq_order.turns import last_first, shortest_first

NAMES = ("auto", "default", "spt", "permutation")
SEARCHED = ("auto", "permutation")  # found on the host, which waits for the device

# An m_block order is taken below this share of the time of ascending ones, which share more in the cache.
_WORTH_IT = 0.98
# Up to this slowdown the default order has low contention, and "auto" searches no further.
_LOW_CONTENTION = 1.02


class Launch(NamedTuple):
    """Order in which key tiles are launched, and in which each takes its query blocks."""

    # (batch or 1, key heads or 1, blocks_k), int32: key blocks in launch order; None: last keys first.
    order: Tensor | None = None
    # (batch, heads, blocks_q, blocks_k), int16: the position of a query block in the order of a key tile; None:
    # ascending.
    m_block_order: Tensor | None = None
    low_contention: bool = False  # whether a search has found that tiles wait little for their turns

    def to(self, device: torch.device) -> Launch:
        """Moves the tensors to a device."""
        order, m_block_order = (None if x is None else x.to(device) for x in (self.order, self.m_block_order))
        return Launch(None if order is None else order.contiguous(), m_block_order, self.low_contention)


def shortest_first_of_groups(lengths: Tensor, group: int) -> Tensor:
    """Shortest processing time first, by lengths of columns (batch, heads, blocks_k), one order a group of heads."""
    return shortest_first(lengths.unflatten(1, (-1, group)).sum(2))


def search(name: str, steps: Tensor, group: int, seqlen_q: int) -> Launch:
    """Searches the launch in which tiles of a mask wait least for their turns, on a model of the device.

    It compares last keys first with shortest processing time first; on ties it takes the former, and for ``"auto"`` at
    once if that has low contention. Then it finds an m_block order for the better one, and takes that if it is worth
    it. ``steps``, (batch, heads, blocks_q, blocks_k), uint8, on the CPU: see ``contention_model.Pass``.
    """
    from flash_attn_cute.sparsity.dq_order.contention_model import Pass, machine_of  # few masks need numpy

    spt = shortest_first_of_groups(steps.sum(2), group)
    orders = [last_first(steps.shape[-1], steps.device).expand_as(spt), spt]
    if not steps.numel():
        return Launch(orders[0])
    work = Pass(steps, group, machine_of(seqlen_q))
    slowdowns = work.slowdowns(orders)
    if name == "auto" and slowdowns[0] <= _LOW_CONTENTION:
        return Launch(orders[0], low_contention=True)
    least = min(slowdowns)
    best = orders[slowdowns.index(least)]
    reordered = work.on(machine_of(seqlen_q, has_m_block_order=True))
    m_block_order, slowdown = reordered.find_m_block_order(best)
    is_worth_it = reordered.pass_time(slowdown) <= _WORTH_IT * work.pass_time(least)
    return Launch(best, m_block_order if is_worth_it else None)


def checked(order: Tensor, batch: int, heads: int, blocks_k: int) -> Tensor:
    """Checks a launch order ([[batch or 1,] heads or 1,] blocks_k), and copies it. Waits for the device.

    Returns (batch or 1, heads or 1, blocks_k), int32. Raises TypeError for another dtype, and ValueError for a wrong
    shape, or no permutation.
    """
    if order.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"order: expected dtype torch.int32 or torch.int64, got {order.dtype}")
    check_plain("order", order)
    order = kept.copied(order)
    whole = order[(None,) * (3 - order.ndim)] if 1 <= order.ndim <= 3 else order
    fits = whole.ndim == 3 and whole.shape[2] == blocks_k
    if not fits or whole.shape[0] not in (1, batch) or whole.shape[1] not in (1, heads):
        expected = f"a shape that broadcasts to ({batch}, {heads}, {blocks_k})"
        raise ValueError(f"order: expected {expected}, got {tuple(order.shape)}")
    ascending = torch.arange(blocks_k, device=order.device).expand_as(whole)
    if not (order.is_meta or torch.equal(whole.sort(-1).values, ascending)):  # the meta device has no numbers
        raise ValueError(f"order: expected permutations of 0 .. {blocks_k - 1}, got {order.tolist()}")
    return whole.int()
