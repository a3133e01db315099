"""A model of the backward pass, in which launch orders are compared, and walks found.

CTAs draw tickets in the order of launch. A tile of keys takes a time to begin and a step for every block of queries
that it meets; before it adds to a block's dQ it waits for its turn, which the tile before hands over after a while. So
a tile only ever waits for tickets below its own, and tickets can be played through one after the other: if r is when a
block is handed over, and k the steps taken up to it, a tile that begins at time s is done with a block at
``step * k + max(s, max of r - step * k)``, the inner maximum over the blocks so far. Of a block that has several sums r
is when the one is handed over to which the tile of this turn adds. That is the longest path of DASH's graph of
additions (arXiv 2601.21824), with as many CTAs as there are.

Turns follow tickets, but in which order a tile walks over its blocks is its own affair, and under irregular masks that
decides how long it waits. A tile waits the least if it takes what is handed over first before the rest: jobs with
release times, on one machine (Jackson, 1955). When that is depends on the tiles before alone, so playing them in the
order of tickets finds a walk for each.

Heads of a section draw a ticket each, in turn. Those of one rank are played together: that a CTA could be through with
one of them and draw another is left out.

Walks are found, and orders compared, in a pass in full swing: sections are played side by side, each by CTAs that come
free one after the other, as they would from the section before.

A pass is more than its tiles: a call, what is read ahead of them, and sums of dQ, zeroed ahead of additions in no order
and read behind all. That is counted in bytes of memory.

It is played in numpy, where an operator on a few numbers takes a fraction of what it takes in PyTorch, and in whole
nanoseconds, so that every host finds the same walks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flash_attn_cute.dq_order.turns import BYTES_IN_FLIGHT, BYTES_IN_FLIGHT_OF_WALKS, SUMS

Numbers: TypeAlias = NDArray[Any]

_LEAST_HEADS = 16
_TILES_TO_COMPARE = 1024  # of a mask, at the least: eight for each CTA
_ROWS = 128  # queries of a block
_NARROW, _WIDE = 256, 512  # bytes of a row of 128 columns, in 16 bits and in float32
_NS = 1000  # a microsecond
_BLOCK_BITS = 20  # of a number that is a time in nanoseconds and behind it a block of queries
_NEVER = 1 << 42  # nanoseconds


class Machine(NamedTuple):
    """Times in microseconds, for blocks of 64 queries and 128 keys at d = 128 on an H200."""

    ctas: int = 132
    section: int = 8  # heads that draw their tickets in turn
    tile: float = 4.0
    step: float = 2.1
    hand_over: float = 2.0
    sums: int = 1  # of a block of queries, to which tiles add in turn
    steps_ahead: int = 2  # a CTA draws its next ticket when so many steps are left to it
    call: float = 35.0
    bytes_a_us: float = 4.2e6  # of memory


H200 = Machine()


def machine_of(seqlen_q: int, waits_little: bool = False, has_walks: bool = False) -> Machine:
    """An H200, with as many heads in flight as deterministic backward passes at d = 128 have on it.

    As ``backends.cute.plan`` has it: so many as the cache has room for, or more where few would wait too long for each
    other's first turns. A block of queries has one sum where a mask ``waits_little`` or ``has_walks``.
    """
    sums = 1 if waits_little or has_walks else SUMS
    halves = max(1, -(-seqlen_q // 64))
    in_flight = BYTES_IN_FLIGHT_OF_WALKS if has_walks else BYTES_IN_FLIGHT
    in_cache = in_flight // (512 * (1 + sums) * max(seqlen_q, 1))
    for_turns = -(-5 * H200.ctas // (2 * halves))
    return H200._replace(section=min(max(1, in_cache, for_turns), H200.ctas), sums=sums)


class Timeline(NamedTuple):
    """How a pass went: of each tile, in the order of tickets."""

    head: list[int]
    n: list[int]
    cta: list[int]
    start: list[float]
    end: list[float]
    waited: list[float]

    @property
    def makespan(self) -> float:
        """When the last one was done."""
        return max(self.end, default=0.0)


class Pass:
    """The tiles of a backward pass: which blocks of queries see each, and which heads share an order."""

    def __init__(self, steps: Tensor, group: int = 1, machine: Machine = H200, walks: Tensor | None = None) -> None:
        """The pass of a mask.

        Args:
            steps: (batch, heads, blocks_q, blocks_k), bool or a small integer, on the CPU: how many steps it takes to
                add to a block of queries, 0 where nothing is added.
            group: heads that share an order.
            machine: what runs it.
            walks: of the same shape, as ``walks`` returns them; None: tiles walk over their blocks as these ascend.

        Raises:
            ValueError: a machine of fewer CTAs than heads of a section.
        """
        if machine.ctas < machine.section:
            raise ValueError(f"machine: expected at least a CTA for each head of a section, got {machine}")
        self.machine, self.group = machine, group
        self.shape = batch, heads, self.blocks_q, self.blocks_k = steps.shape
        self.num_masks = batch * heads
        # A mask of few heads is played through several times, as for a batch.
        self.mask_of_head = np.tile(np.arange(self.num_masks), max(1, -(-_LEAST_HEADS // max(self.num_masks, 1))))
        self.order_shape = (batch, heads // group, self.blocks_k)
        self.tiles = _Tiles(_by_tile(steps.to(torch.uint8)), machine, None if walks is None else _by_tile(walks))

    def play(self, order: Tensor, *, ordered: bool = True) -> Timeline:
        """With a launch order (batch, key heads, blocks_k); unordered if additions do not wait for their turns."""
        every, size = order.flatten(0, 1).numpy(), self.machine.section
        device, told = _Device(self.machine), []
        for first in range(0, len(self.mask_of_head), size):
            section = _Section(self, self.mask_of_head[first : first + size], device, ordered)
            for n in every[section.masks // self.group].T:
                section.play(n, *device.draw(section.heads))
            told.append(section.told(first))
        return Timeline(*(np.concatenate(x).tolist() for x in zip(*told, strict=True)))

    def around(self, *, ordered: bool = True) -> float:
        """Microseconds that a pass takes beside its tiles.

        Out and its gradient are read for delta. Sums of dQ are read in the end and rounded, and zeroed first where
        tiles add to them in no order.
        """
        wide = self.machine.sums if ordered else 2
        a_row = 2 * _NARROW + wide * _WIDE + _NARROW
        rows = len(self.mask_of_head) * self.blocks_q * _ROWS
        return self.machine.call + rows * a_row / self.machine.bytes_a_us

    def on(self, machine: Machine) -> Pass:
        """The same pass on a machine with other heads in flight and sums."""
        other = copy(self)
        other.machine = machine
        return other

    def whole(self, slowdown: float) -> float:
        """Microseconds of an ordered pass whose tiles take so many times the time of their work, evenly on all CTAs."""
        copies = len(self.mask_of_head) / self.num_masks
        return self.around() + slowdown * copies * self.tiles.work / self.machine.ctas

    def slowdowns(self, orders: Sequence[Tensor]) -> list[float]:
        """In how many times the time of their own work tiles are done, under each of several launch orders.

        Of a pass in full swing: how it ends is left out. Of a large mask only some heads are played.
        """
        size = self.machine.section
        sections = min(-(-self.num_masks // size), -(-_TILES_TO_COMPARE // max(size * self.blocks_k, 1)))
        masks = np.resize(np.arange(self.num_masks), sections * size)
        return self._in_full_swing(masks, orders).slowdowns(len(orders))

    def walks(self, order: Tensor) -> tuple[Tensor, float]:
        """Those of tiles that take of their blocks that first which is handed over first.

        Returns:
            (batch, heads, blocks_q, blocks_k), int16: the place of a block of queries in the walk of a tile of keys,
            anything where they do not meet. And in how many times the time of their own work tiles are done with it.
        """
        size = self.machine.section
        masks = np.arange(-(-self.num_masks // size) * size) % max(self.num_masks, 1)
        section = self._in_full_swing(masks, [order], free=True)
        # (blocks_k, masks, ...), in the order of tickets; further heads are masks played once more.
        n = np.stack([n[: self.num_masks] for n, *_ in section.played])
        met = np.stack([met[: self.num_masks] for met in section.walks])
        tile = np.arange(self.num_masks) * self.blocks_k + n
        walks = np.zeros((self.num_masks * self.blocks_k, self.blocks_q + 2), dtype=np.int16)
        walks.reshape(-1)[met + (tile * walks.shape[1])[:, :, None]] = np.arange(-1, met.shape[2] - 1)
        batch, heads, _, _ = self.shape
        by_tile = torch.from_numpy(walks).unflatten(0, (batch, heads, self.blocks_k))
        return by_tile.mT[:, :, : self.blocks_q], section.slowdowns(1)[0]

    def _in_full_swing(self, masks: Numbers, orders: Sequence[Tensor], *, free: bool = False) -> _Section:
        """Sections of masks, side by side, under each of several orders."""
        every = np.stack([order.flatten(0, 1).numpy() for order in orders])
        size, lanes = self.machine.section, len(orders) * len(masks) // self.machine.section
        device = _Device(self.machine, lanes, self.tiles.work / len(self.tiles.count))
        section = _Section(self, np.tile(masks, len(orders)), device, free=free)
        drawn = device.first_of([size] * lanes)
        for n in every[:, masks // self.group].transpose(2, 0, 1).reshape(self.blocks_k, -1):
            section.play(n, *device.draw(drawn))
        return section


def _by_tile(of_blocks: Tensor) -> Numbers:
    """(batch, heads, blocks_q, blocks_k) as (batch * heads * blocks_k, blocks_q)."""
    return of_blocks.mT.flatten(0, 2).numpy()


class _Tiles:
    """What the tiles of all masks meet.

    Of blocks of queries there are two more than there are: one stands before each walk, one behind it.

    Attributes:
        met: (masks * blocks_k, most blocks met + 2): blocks of queries, as tiles walk over them.
        steps: (masks * blocks_k * (blocks_q + 2),): how many a tile takes at a block.
        count: (masks * blocks_k,): how many blocks a tile meets.
        draws: (masks * blocks_k,): nanoseconds of steps after which a tile's CTA draws its next ticket.
        work: microseconds that all take without waiting.
    """

    def __init__(self, steps: Numbers, machine: Machine, places: Numbers | None) -> None:
        num_tiles, self.blocks_q = steps.shape
        found = (steps != 0).ravel().nonzero()[0]  # of one dimension that takes a seventh of the time of two
        tile, m = np.divmod(found, max(1, self.blocks_q))
        self.count = np.bincount(tile, minlength=num_tiles)
        if places is None:
            place = np.arange(len(tile)) - (self.count.cumsum() - self.count)[tile]
        else:
            place = places.ravel()[found]
        self.met = np.full((num_tiles, 2 + int(self.count.max(initial=0))), self.blocks_q + 1)
        self.met[:, 0] = self.blocks_q
        self.met[tile, 1 + place] = m
        self.steps = np.zeros((num_tiles, self.blocks_q + 2), dtype=steps.dtype)
        self.steps[:, : self.blocks_q] = steps
        of_tile = np.bincount(tile, weights=steps.ravel()[found], minlength=num_tiles)
        self.draws = (of_tile - machine.steps_ahead).clip(0) * round(machine.step * _NS)
        self.work = machine.tile * num_tiles + machine.step * float(of_tile.sum())


class _Device:
    """The CTAs of each lane: when they can draw, and when they are free to begin; at first within a time given."""

    def __init__(self, machine: Machine, lanes: int = 1, within: float = 0.0) -> None:
        self.tile = round(machine.tile * _NS)
        self.draws = np.tile(np.arange(machine.ctas) * round(within * _NS) // machine.ctas, (lanes, 1))
        self.free = self.draws.copy()
        self.first = np.arange(lanes)[:, None] * machine.ctas

    def first_of(self, heads: Sequence[int]) -> Numbers:
        """Where those stand that draw first for so many heads of each lane, if CTAs of a lane are in that order."""
        return np.concatenate([first + np.arange(n) for (first,), n in zip(self.first, heads, strict=True)])

    def draw(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """Who draws next for each head, at the places of ``first_of``, and begins its tile when: (heads,) each."""
        if len(places) == len(self.draws):  # one of each lane
            ctas = self.draws.argmin(1) + self.first[:, 0]
        else:
            ctas = (self.draws.argsort(1, kind="stable") + self.first).take(places)
        return ctas, self.free.take(ctas) + self.tile

    def finish(self, ctas: Numbers, draws: Numbers, ends: Numbers) -> None:
        """When these can draw again, and are free. Of those that can draw together the one draws that is free first."""
        self.draws.reshape(-1)[ctas] = draws + ends // 1000
        self.free.reshape(-1)[ctas] = ends


class _Section:
    """Heads that draw their tickets in turn, rank by rank, and what their tiles have handed over.

    When a block is handed over is a number whose last bits are the block's, so that sorting these makes a walk.
    """

    def __init__(
        self, work: Pass, masks: Numbers, device: _Device, ordered: bool = True, *, free: bool = False
    ) -> None:
        """With the mask of each head, of each lane. Free walks take that first which is handed over first."""
        self.masks, self.device, self.ordered, self.free = masks, device, ordered, free
        self.tiles = work.tiles
        self.step, self.after = (round(x * _NS) for x in (work.machine.step, work.machine.hand_over))
        self.heads = np.arange(len(masks))
        self.first_tile = masks * work.blocks_k
        blocks = self.tiles.blocks_q + 2
        self.first_block = self.heads[:, None] * blocks
        handed_over = np.tile(np.arange(blocks), (len(masks), 1))
        handed_over[:, -1] += _NEVER << _BLOCK_BITS
        handed_over[:, -2] -= 1 << _BLOCK_BITS  # before all others, whatever their numbers
        # Of each of a block's sums, that of the next turn first.
        self.handed_over = [handed_over.copy() for _ in range(work.machine.sums)]
        self.played: list[tuple[Numbers, ...]] = []
        self.walks: list[Numbers] = []

    def play(self, n: Numbers, ctas: Numbers, start: Numbers) -> None:
        """Has the heads work on a tile of keys each: (lanes * heads,) each."""
        tile = self.first_tile + n
        met = self.tiles.met.take(tile, 0)
        ready = self.handed_over[0].take(met + self.first_block)
        if self.free:
            ready.sort(1)
            np.bitwise_and(ready, (1 << _BLOCK_BITS) - 1, out=met)
            self.walks.append(met)
        ready >>= _BLOCK_BITS
        steps = self.tiles.steps.take(met + (tile * (self.tiles.blocks_q + 2))[:, None])
        taken = steps.cumsum(1, dtype=np.int64)
        taken *= self.step
        if self.ordered:
            ready -= taken
            ready[:, 0] = start
            done = np.maximum.accumulate(ready, 1, out=ready)
            done += taken
            self._hand_over(met, done + self.after)
        else:
            done = taken + start[:, None]
        count = self.tiles.count.take(tile)
        end = done[self.heads, count]
        draws = (taken <= self.tiles.draws.take(tile)[:, None]).sum(1) - 1
        self.device.finish(ctas, done[self.heads, np.minimum(draws, count)], end)
        self.played.append((n, ctas, start, end, end - start - taken[:, -1]))

    def _hand_over(self, met: Numbers, when: Numbers) -> None:
        """The blocks met, when those who are next may add to them."""
        at = met + self.first_block
        when <<= _BLOCK_BITS
        when += met
        for this, following in zip(self.handed_over, self.handed_over[1:], strict=False):
            this.reshape(-1)[at] = following.take(at)
        last = self.handed_over[-1]
        before, behind = last[:, -2].copy(), last[:, -1].copy()
        last.reshape(-1)[at] = when
        last[:, -2], last[:, -1] = before, behind

    def slowdowns(self, orders: int) -> list[float]:
        """The time of tiles over that of their work, under each of so many orders."""
        _, _, start, end, waited = (np.stack(x).reshape(len(x), orders, -1) for x in zip(*self.played, strict=True))
        spent = (end - start + self.device.tile).sum((0, 2))
        return (spent / (spent - waited.sum((0, 2)))).tolist()

    def told(self, first_head: int) -> tuple[Numbers, ...]:
        """What a timeline has of it, whose heads are numbered from that one on: (tickets,) each."""
        n, ctas, start, end, waited = (np.stack(x).ravel() for x in zip(*self.played, strict=True))
        times = ((start - self.device.tile) / _NS, end / _NS, waited / _NS)
        return (np.tile(first_head + self.heads, len(self.played)), n, ctas, *times)
