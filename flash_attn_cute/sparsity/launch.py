"""Launch orders by name, for the tables of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_cute.sparsity import plan
from flash_attn_cute.sparsity.nodes import Sizes
from flash_attn_cute.sparsity.order import shortest_first
from flash_attn_cute.spec import BlockRows

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
    lengths = plan.lengths_of_columns(rows, sizes)
    spt = shortest_first(lengths.unflatten(1, (-1, group)).sum(2))
    if order == "spt":
        return spt
    return _fastest(order, last_first.expand_as(spt).cpu(), spt.cpu(), rows, sizes, group).to(device).contiguous()


def _fastest(order: str, last_first: Tensor, spt: Tensor, rows: BlockRows, sizes: Sizes, group: int) -> Tensor:
    """The order that takes the model the least time; the first one on ties."""
    from flash_attn_cute.sparsity.model import Pass  # few masks need it

    work = Pass(plan.visible_halves(rows, sizes).cpu(), group)
    if not work.columns.numel():
        return last_first
    times = [(work.play(candidate).makespan, candidate) for candidate in (last_first, spt)]
    if order == "auto" and times[0][0] <= _GOOD_ENOUGH * work.play(last_first, ordered=False).makespan:
        return last_first
    for candidate in (last_first, spt):
        found, timeline = work.schedule(candidate)
        times.append((timeline.makespan, found))
    return min(times, key=lambda told: told[0])[1]


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
