"""Pictures of a mask, still and moving: its blocks with their turns, and the timeline of a model's CTAs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from flash_attn_cute.problem.block_tables import FULL_CODE, BlockTables
from flash_attn_cute.problem.spec import check_int
from flash_attn_cute.sparsity.bits import EMPTY, FULL, PARTIAL
from flash_attn_cute.sparsity.column_tables import m_block_order_of, steps
from flash_attn_cute.sparsity.dq_order.contention_model import Pass, Timeline, machine_of
from flash_attn_cute.sparsity.tabled_mask import TabledMask

_TURNS_UP_TO = 32  # blocks a side; with more there is no room for numbers
_EMPTY, _PARTIAL, _FULL = "white", "#9ecae1", "#3182bd"
_WAITING, _RUNNING = "0.8", "#fd8d3c"
_FRAMES, _MILLISECONDS, _STILL = 12, 480, 3000  # of a moving picture, of each frame, and of the last one
_STEPS = 240  # steps of time in a moving timeline
_COLOURS = 16


def figure(mask: TabledMask, batch: int, head: int) -> Figure:
    """Draws a batch entry and head of a mask in blocks of 128 x 128, and the timeline of all heads.

    Raises TypeError and ValueError for an entry or head that the mask does not have, or for one without queries or
    keys.
    """
    for name, at, size in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= check_int(name, at) < size:
            raise ValueError(f"{name}: expected 0 to {size - 1}, got {at}")
    *_, seqlen_q, seqlen_k = mask.sizes
    if not seqlen_q or not seqlen_k:
        raise ValueError(f"block_mask: expected one with queries and keys to draw, got one over {(seqlen_q, seqlen_k)}")
    tables = mask.tables(mask.device or torch.device("cpu"), backward=True)
    drawn = Figure(figsize=(14, 6), layout="constrained")
    left, right = drawn.subplots(1, 2)
    _draw_blocks(left, mask, tables, batch, head)
    work, order = _pass_of(mask, tables)
    _draw_timeline(right, work.play(order), work.play(order, ordered=False).makespan)
    drawn.suptitle(repr(mask))
    return drawn


def animation(masks: Sequence[TabledMask], names: Sequence[str], path: Path) -> None:
    """Writes a GIF of one mask under several orders, by name: the progress of a head, and the work of all CTAs."""
    drawn = Figure(figsize=(7.5, 2.4 * len(masks)), dpi=80, layout="constrained")
    axes = drawn.subplots(len(masks), 2, squeeze=False, width_ratios=(1, 2.4))
    lanes = []
    for (left, right), mask, name in zip(axes, masks, names, strict=True):
        tables = mask.tables(mask.device or torch.device("cpu"), backward=True)
        work, order = _pass_of(mask, tables)
        head = len(work.mask_of_head) // 2
        visible = _blocks_of(mask, tables, *divmod(int(work.mask_of_head[head]), mask.heads))[0] > 0
        lanes.append(_Lane(left, right, visible, head, work.play(order), name))
    latest = max(lane.timeline.makespan for lane in lanes)
    for lane in lanes:
        lane.prepare(latest)

    canvas, frames = FigureCanvasAgg(drawn), []
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")  # axes stay where they are
    for frame in range(_FRAMES + 1):
        for lane in lanes:
            lane.show(frame / _FRAMES * latest)
        canvas.draw()
        frames.append(Image.frombytes("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB"))
    # One palette for all frames, from an early frame and the last one: what does not change takes no room.
    width, height = frames[0].size
    both = Image.new("RGB", (width, 2 * height))
    both.paste(frames[_FRAMES // 4])
    both.paste(frames[-1], (0, height))
    palette = both.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE)
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    durations = [_MILLISECONDS] * _FRAMES + [_STILL]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True, disposal=1)


class _Lane:
    """One order of a moving picture."""

    def __init__(self, blocks: Any, cta_axes: Any, visible: Tensor, head: int, timeline: Timeline, name: str) -> None:
        self.blocks, self.cta_axes, self.visible, self.timeline, self.name = blocks, cta_axes, visible, timeline, name
        listed = [[timeline.n[i], timeline.start[i], timeline.end[i]] for i, h in enumerate(timeline.head) if h == head]
        by_block = torch.tensor(listed, device="cpu")
        by_block = by_block[by_block[:, 0].argsort()]
        self.start, self.end = by_block[:, 1], by_block[:, 2]  # (blocks_k,), of the head whose blocks are drawn

    def prepare(self, latest: float) -> None:
        """Draws everything that does not move; the axis of time ends at ``latest``."""
        timeline, self.latest = self.timeline, latest
        # (CTAs, time): 0 for nothing, 1 for waiting, and from 2 on colours of heads.
        self.doing = torch.zeros(max(timeline.cta, default=0) + 1, _STEPS, dtype=torch.int64, device="cpu")
        tiles = zip(timeline.head, timeline.cta, timeline.start, timeline.end, timeline.waited, strict=True)
        for head, cta, *times, waited in tiles:
            start, end, waits = (round(at / latest * _STEPS) for at in (*times, times[1] - waited))
            self.doing[cta, start:waits] = 2 + head % 8
            self.doing[cta, waits:end] = 1
        colours = ["white", _WAITING, *(f"C{i}" for i in range(8))]
        extent = (0, latest, len(self.doing), 0)
        self.bars = self.cta_axes.imshow(
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
        self.cta_axes.set_yticks([])
        self.cta_axes.set_ylabel("CTAs")
        self.cta_axes.set_xlabel("us of the model; a colour a head, grey: waiting for turns", fontsize=8)
        self.cta_axes.set_title(f"{self.name}: {timeline.makespan:.0f} us", fontsize=9)
        self.blocks.set_title("a head's blocks: at work, done", fontsize=9)

    def show(self, now: float) -> None:
        """Draws the state at a time."""
        doing = self.doing.clone()
        doing[:, round(now / self.latest * _STEPS) :] = 0
        self.bars.set_data(doing.tolist())
        state = 1 + (self.start < now).long() + (self.end <= now).long()
        self.columns.set_data(torch.where(self.visible, state, 0).tolist())


def _pass_of(mask: TabledMask, tables: BlockTables) -> tuple[Pass, Tensor]:
    """Backward pass of a mask, and its launch order."""
    assert tables.columns is not None
    order = tables.columns.order
    group = mask.heads // order.shape[1]
    machine = machine_of(mask.seqlen_q, mask.has_m_block_order)
    work = Pass(steps(tables.rows, mask.sizes).cpu(), group, machine, m_block_order_of(tables, mask.sizes).cpu())
    return work, order.cpu().expand(work.order_shape)


def _draw_blocks(axes: Any, mask: TabledMask, tables: BlockTables, batch: int, head: int) -> None:
    kinds, turns = _blocks_of(mask, tables, batch, head)
    axes.imshow(kinds.tolist(), cmap=ListedColormap([_EMPTY, _PARTIAL, _FULL]), vmin=0, vmax=2, aspect="equal")
    axes.set_xlabel("blocks of 128 keys")
    axes.set_ylabel("blocks of 128 queries")
    axes.set_title("full, partial and empty blocks" + (", and turns" if max(turns.shape) <= _TURNS_UP_TO else ""))
    if max(turns.shape) <= _TURNS_UP_TO:
        for m, n in (turns >= 0).nonzero().tolist():
            axes.text(n, m, int(turns[m, n]), ha="center", va="center", fontsize=7)


def _blocks_of(mask: TabledMask, tables: BlockTables, batch: int, head: int) -> tuple[Tensor, Tensor]:
    """Kinds of blocks, EMPTY, PARTIAL or FULL, and their turns, -1 for empty ones: (blocks_q, blocks_k) each."""
    sizes = mask.sizes
    kinds = torch.full((sizes.blocks_q, sizes.blocks_k), EMPTY, dtype=torch.int64, device="cpu")
    turns = torch.full_like(kinds, -1)
    assert tables.columns is not None
    entries = tables.columns.entries.cpu()
    for n, (start, count) in enumerate(tables.columns.spans[1, batch, head].tolist()):
        m, code, turn = entries[start : start + count].long().unbind(1)
        kinds[m, n] = torch.where(code == FULL_CODE, FULL, PARTIAL)
        turns[m, n] = turn
    return kinds, turns


def _draw_timeline(axes: Any, timeline: Timeline, unordered: float) -> None:
    """Draws a row for each CTA. The waits of a tile are drawn together at its end."""
    for colour, waits in (("head", False), ("0.85", True)):
        spans = [
            (end - waited if waits else start, waited if waits else end - start - waited)
            for start, end, waited in zip(timeline.start, timeline.end, timeline.waited, strict=True)
        ]
        colours = [colour if waits else f"C{h % 10}" for h in timeline.head]
        axes.barh(timeline.cta, [width for _, width in spans], left=[at for at, _ in spans], height=1.0, color=colours)
    axes.set_xlabel("microseconds of the model; a colour a head, grey: waiting for turns")
    axes.set_ylabel("CTA")
    axes.set_title(f"{timeline.makespan:.0f} us, {unordered:.0f} us without an order of additions")
