"""Pictures of a mask: its blocks with their turns, and when a model's CTAs work on which tile of keys, also moving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from flash_attn_cute.block_tables import BlockTables
from flash_attn_cute.dq_order.contention_model import Pass, Timeline, machine_of
from flash_attn_cute.sparsity.column_tables import steps, walks_of
from flash_attn_cute.sparsity.nodes import Sizes

_TURNS_UP_TO = 32  # blocks a side: with more there is no room for numbers
_EMPTY, _PARTIAL, _FULL = "white", "#9ecae1", "#3182bd"
_WAITING, _RUNNING = "0.8", "#fd8d3c"
_FRAMES, _MILLISECONDS, _STILL = 24, 240, 3000  # of a moving picture: of each frame, and of the last one
_STEPS = 240  # of time, that a moving timeline is drawn in
_COLOURS = 16


class DrawnMask(Protocol):
    """The side of a ``BlockMask`` that pictures read."""

    @property
    def batch(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def seqlen_q(self) -> int: ...

    @property
    def device(self) -> torch.device | None: ...

    @property
    def sizes(self) -> Sizes: ...

    @property
    def waits_little(self) -> bool: ...

    @property
    def has_walks(self) -> bool: ...

    def tables(self, device: torch.device, *, backward: bool) -> BlockTables: ...


def figure(mask: DrawnMask, batch: int, head: int) -> Figure:
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
    work, order = _pass_of(mask, tables)
    _draw_timeline(right, work.play(order), work.play(order, ordered=False).makespan)
    drawn.suptitle(repr(mask))
    return drawn


def animation(masks: Sequence[DrawnMask], names: Sequence[str], path: Path) -> None:
    """A moving picture of one mask under several orders: what is done of a head in the middle, and what all CTAs do.

    Args:
        masks: the same mask, with some orders.
        names: of the orders.
        path: the GIF to be written.
    """
    drawn = Figure(figsize=(7.5, 2.4 * len(masks)), dpi=80, layout="constrained")
    axes = drawn.subplots(len(masks), 2, squeeze=False, width_ratios=(1, 2.4))
    lanes = []
    for (left, right), mask, name in zip(axes, masks, names, strict=True):
        tables = mask.tables(mask.device or torch.device("cpu"), backward=True)
        work, order = _pass_of(mask, tables)
        head = len(work.mask_of_head) // 2
        visible = _blocks_of(mask, tables, *divmod(int(work.mask_of_head[head]), mask.heads))[0] > 0
        lanes.append(_Lane(left, right, visible, head, work.play(order), name))
    latest = max(lane.told.makespan for lane in lanes)
    for lane in lanes:
        lane.prepare(latest)

    canvas, frames = FigureCanvasAgg(drawn), []
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")  # nothing moves but what happens
    for frame in range(_FRAMES + 1):
        for lane in lanes:
            lane.show(frame / _FRAMES * latest)
        canvas.draw()
        frames.append(Image.frombytes("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB"))
    # The same few colours for all, so that what stays takes no room; those of an early frame, and of the last one.
    width, height = frames[0].size
    both = Image.new("RGB", (width, 2 * height))
    both.paste(frames[_FRAMES // 4])
    both.paste(frames[-1], (0, height))
    palette = both.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE)
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    durations = [_MILLISECONDS] * _FRAMES + [_STILL]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True, disposal=1)


class _Lane:
    """One order in a moving picture."""

    def __init__(self, blocks: Any, timeline: Any, visible: Tensor, head: int, told: Timeline, name: str) -> None:
        self.blocks, self.timeline, self.visible, self.told, self.name = blocks, timeline, visible, told, name
        listed = [[told.n[i], told.start[i], told.end[i]] for i, h in enumerate(told.head) if h == head]
        by_block = torch.tensor(listed, device="cpu")
        by_block = by_block[by_block[:, 0].argsort()]
        self.start, self.end = by_block[:, 1], by_block[:, 2]  # (blocks_k,), of the head whose blocks are shown

    def prepare(self, latest: float) -> None:
        """Draws all that does not move; time goes up to ``latest``."""
        told, self.latest = self.told, latest
        # (CTAs, time): 0 nothing, 1 waiting, and beyond that heads in turn.
        self.doing = torch.zeros(max(told.cta, default=0) + 1, _STEPS, dtype=torch.int64, device="cpu")
        for head, cta, *times, waited in zip(told.head, told.cta, told.start, told.end, told.waited, strict=True):
            start, end, waits = (round(at / latest * _STEPS) for at in (*times, times[1] - waited))
            self.doing[cta, start:waits] = 2 + head % 8
            self.doing[cta, waits:end] = 1
        colours = ["white", _WAITING, *(f"C{i}" for i in range(8))]
        extent = (0, latest, len(self.doing), 0)
        self.bars = self.timeline.imshow(
            self.doing.tolist(), ListedColormap(colours), vmin=0, vmax=9, aspect="auto", extent=extent
        )
        self.bars.set_interpolation("nearest")
        self.columns = self.blocks.imshow(
            self.visible.long().tolist(), ListedColormap([_EMPTY, _PARTIAL, _RUNNING, _FULL]), vmin=0, vmax=3
        )
        self.columns.set_interpolation("nearest")
        self.blocks.set_ylabel(self.name)
        self.blocks.set_xticks([])
        self.blocks.set_yticks([])
        self.timeline.set_yticks([])
        self.timeline.set_ylabel("CTAs")
        self.timeline.set_xlabel("us of the model; a colour a head, grey: waiting for turns", fontsize=8)
        self.timeline.set_title(f"{self.name}: {told.makespan:.0f} us", fontsize=9)
        self.blocks.set_title("a head's blocks: at work, done", fontsize=9)

    def show(self, now: float) -> None:
        """Draws what there is at a time."""
        doing = self.doing.clone()
        doing[:, round(now / self.latest * _STEPS) :] = 0
        self.bars.set_data(doing.tolist())
        state = 1 + (self.start < now).long() + (self.end <= now).long()
        self.columns.set_data(torch.where(self.visible, state, 0).tolist())


def _pass_of(mask: DrawnMask, tables: BlockTables) -> tuple[Pass, Tensor]:
    """The backward pass of a mask, and its launch order."""
    assert tables.columns is not None
    order = tables.columns.order
    group = mask.heads // order.shape[1]
    machine = machine_of(mask.seqlen_q, mask.waits_little, mask.has_walks)
    work = Pass(steps(tables.rows, mask.sizes).cpu(), group, machine, walks_of(tables, mask.sizes).cpu())
    return work, order.cpu().expand(work.order_shape)


def _draw_blocks(axes: Any, mask: DrawnMask, tables: BlockTables, batch: int, head: int) -> None:
    kinds, turns = _blocks_of(mask, tables, batch, head)
    axes.imshow(kinds.tolist(), cmap=ListedColormap([_EMPTY, _PARTIAL, _FULL]), vmin=0, vmax=2, aspect="equal")
    axes.set_xlabel("blocks of 128 keys")
    axes.set_ylabel("blocks of 128 queries")
    axes.set_title("full, partial and empty blocks" + (", and turns" if max(turns.shape) <= _TURNS_UP_TO else ""))
    if max(turns.shape) <= _TURNS_UP_TO:
        for m, n in (turns >= 0).nonzero().tolist():
            axes.text(n, m, int(turns[m, n]), ha="center", va="center", fontsize=7)


def _blocks_of(mask: DrawnMask, tables: BlockTables, batch: int, head: int) -> tuple[Tensor, Tensor]:
    """(blocks_q, blocks_k): 0, 1 or 2 for empty, partial or full blocks, and their turns, -1 where there are none."""
    sizes = mask.sizes
    kinds = torch.zeros(sizes.blocks_q, sizes.blocks_k, dtype=torch.int64, device="cpu")
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
