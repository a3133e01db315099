"""Launch orders by name, for the tables of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_cute.sparsity import plan
from flash_attn_cute.sparsity.nodes import Sizes
from flash_attn_cute.sparsity.order import shortest_first
from flash_attn_cute.spec import BlockRows

_WORTH = 0.98  # of the time of a plain order
_GOOD_ENOUGH = 1.05  # of the time without an order of additions: "auto" looks no further


NAMES = ("auto", "default", "spt", "permutation")
WAITING = ("auto", "permutation")  # for the device


def order_of(order: str | Tensor, rows: BlockRows, sizes: Sizes, group: int) -> Tensor:
    """The order of a mask: (batch or 1, key heads or 1, blocks_k), int32.

    Waits for the device only to find ``"permutation"`` and ``"auto"``.
    """
    device = rows.spans.device
    if isinstance(order, Tensor):
        return order.to(device).contiguous()
    last_first = torch.arange(sizes.blocks_k - 1, -1, -1, dtype=torch.int32, device=device)[None, None]
    if order == "default":
        return last_first
    if order == "spt":
        return _shortest_first(plan.lengths_of_columns(rows, sizes), group)
    steps = plan.steps(rows, sizes).cpu()
    found = _fastest(order, last_first.cpu(), steps, group, sizes.seqlen_q)
    return found.to(device).contiguous()


def _shortest_first(lengths: Tensor, group: int) -> Tensor:
    """By the lengths of columns, (batch, heads, blocks_k), of which heads of a group share an order."""
    return shortest_first(lengths.unflatten(1, (-1, group)).sum(2))


def _fastest(order: str, last_first: Tensor, steps: Tensor, group: int, seqlen_q: int) -> Tensor:
    """The order that takes the model the least time; a plain one unless another is worth it, the first one on ties."""
    from flash_attn_cute.sparsity.model import Pass, machine_of  # few masks need it

    spt = _shortest_first(steps.sum(2), group)
    last_first = last_first.expand_as(spt)
    if not steps.numel():
        return last_first
    machine = machine_of(seqlen_q)
    work = Pass(steps, group, machine)
    if order == "auto":
        unordered = work.cta_times([last_first], ordered=False)[0]
        if work.cta_times([last_first])[0] <= _GOOD_ENOUGH * unordered:
            return last_first
    twice = 1 << (2 * machine.section - 1).bit_length()  # as many heads as are in flight, or some more
    orders = [last_first, spt, *work.schedule(spt, (twice, 2 * twice))]
    times = work.cta_times(orders)
    plain = min((0, 1), key=times.__getitem__)
    best = min(range(len(orders)), key=times.__getitem__)
    return orders[best if times[best] <= _WORTH * times[plain] else plain]


def checked(order: Tensor, batch: int, heads: int, blocks_k: int) -> Tensor:
    """An order given as a tensor: (batch or 1, heads or 1, blocks_k), int32.

    Raises:
        TypeError: another dtype.
        ValueError: a wrong shape, or what is no permutation.
    """
    if order.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"order: expected dtype torch.int32 or torch.int64, got {order.dtype}")
    whole = order[(None,) * (3 - order.ndim)] if 1 <= order.ndim <= 3 else order
    fits = whole.ndim == 3 and whole.shape[2] == blocks_k
    if not fits or whole.shape[0] not in (1, batch) or whole.shape[1] not in (1, heads):
        expected = f"a shape that broadcasts to ({batch}, {heads}, {blocks_k})"
        raise ValueError(f"order: expected {expected}, got {tuple(order.shape)}")
    if not torch.equal(whole.sort(-1).values, torch.arange(blocks_k, device=order.device).expand_as(whole)):
        raise ValueError(f"order: expected permutations of 0 .. {blocks_k - 1}, got {order.tolist()}")
    return whole.int()
