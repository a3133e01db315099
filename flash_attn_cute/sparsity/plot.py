"""Pictures of a mask: its blocks with their turns, and when a model's CTAs work on which tile of keys."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from flash_attn_cute.sparsity import plan
from flash_attn_cute.sparsity.blocks import BlockMask
from flash_attn_cute.sparsity.model import Pass, Timeline
from flash_attn_cute.spec import BlockTables

_TURNS_UP_TO = 32  # blocks a side: with more there is no room for numbers
_EMPTY, _PARTIAL, _FULL = "white", "#9ecae1", "#3182bd"


def figure(mask: BlockMask, batch: int, head: int) -> Figure:
    """A batch entry and head of a mask, in blocks of 128 x 128, and the timeline of all of them.

    Raises:
        ValueError: a batch entry or head that the mask does not have.
    """
    for name, at, size in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= at < size:
            raise ValueError(f"{name}: expected 0 to {size - 1}, got {at}")
    tables = mask.tables(mask.device or torch.device("cpu"), backward=True)
    drawn = Figure(figsize=(14, 6), layout="constrained")
    left, right = drawn.subplots(1, 2)
    _draw_blocks(left, mask, tables, batch, head)
    work = Pass(plan.steps(tables.rows, mask.sizes).cpu(), mask.heads // tables.order.shape[1])
    order = tables.order.cpu().expand(work.order_shape)
    _draw_timeline(right, work.play(order), work.play(order, ordered=False).makespan)
    drawn.suptitle(repr(mask))
    return drawn


def _draw_blocks(axes: Any, mask: BlockMask, tables: BlockTables, batch: int, head: int) -> None:
    kinds, turns = _blocks_of(mask, tables, batch, head)
    axes.imshow(kinds.tolist(), cmap=ListedColormap([_EMPTY, _PARTIAL, _FULL]), vmin=0, vmax=2, aspect="equal")
    axes.set_xlabel("blocks of 128 keys")
    axes.set_ylabel("blocks of 128 queries")
    axes.set_title("full, partial and empty blocks" + (", and turns" if max(turns.shape) <= _TURNS_UP_TO else ""))
    if max(turns.shape) <= _TURNS_UP_TO:
        for m, n in (turns >= 0).nonzero().tolist():
            axes.text(n, m, int(turns[m, n]), ha="center", va="center", fontsize=7)


def _blocks_of(mask: BlockMask, tables: BlockTables, batch: int, head: int) -> tuple[Tensor, Tensor]:
    """(blocks_q, blocks_k): 0, 1 or 2 for empty, partial or full blocks, and their turns, -1 where there are none."""
    sizes = mask.sizes
    kinds = torch.zeros(sizes.blocks_q, sizes.blocks_k, dtype=torch.int64)
    turns = torch.full_like(kinds, -1)
    assert tables.columns is not None
    entries = tables.columns.entries.cpu()
    for n, (start, count) in enumerate(tables.columns.spans[1, batch, head].tolist()):
        m, tile, turn = entries[start : start + count].long().unbind(1)
        kinds[m, n] = 1 + (tile < 0).long()
        turns[m, n] = turn
    return kinds, turns


def _draw_timeline(axes: Any, told: Timeline, unordered: float) -> None:
    """A row a CTA; what a tile waited for its turns is drawn at its end, wherever it was."""
    for colour, waits in (("head", False), ("0.85", True)):
        spans = [
            (end - waited if waits else start, waited if waits else end - start - waited)
            for start, end, waited in zip(told.start, told.end, told.waited, strict=True)
        ]
        colours = [colour if waits else f"C{h % 10}" for h in told.head]
        axes.barh(told.cta, [width for _, width in spans], left=[at for at, _ in spans], height=1.0, color=colours)
    axes.set_xlabel("microseconds of the model; a colour a head, grey: waiting for turns")
    axes.set_ylabel("CTA")
    axes.set_title(f"{told.makespan:.0f} us, {unordered:.0f} us without an order of additions")
