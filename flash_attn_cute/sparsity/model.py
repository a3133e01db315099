"""A model of the backward pass, in which launch orders are compared, and found.

CTAs draw tickets in the order of launch. A tile of keys takes a time to begin and a step for every block of queries
that it meets, in ascending order; before it adds to a block's dQ it waits for its turn, which the tile before hands
over after a while. So a tile only ever waits for tickets below its own, and tickets can be played through one after
the other: if r is when a block is handed over, and k the steps taken up to it, a tile that begins at time s is done
with a block at ``step * k + max(s, max of r - step * k)``, the inner maximum over the blocks so far. Of a block that
has several sums r is when the one is handed over to which the tile of this turn adds. That is the longest path of
DASH's graph of additions (arXiv 2601.21824), with as many CTAs as there are.

Heads of a section draw a ticket each, in turn. Those of one rank are played together: that a CTA could be through with
one of them and draw another is left out.

List scheduling (Graham, 1969) finds orders: whoever draws gets, of the next tiles of a given order, the one that will
wait the least. How long a tile would wait in all takes no more than the maximum over its blocks, as what it takes up to
each of them is known beforehand. Where few heads draw in turn most tiles of a head are under way at once, and whoever
draws can only wait: orders found for more heads are better there, too.

Orders are found and compared in a pass in full swing: sections are played side by side, each by CTAs that come free one
after the other, as they would from the section before.

A pass is more than its tiles: a call, what is read ahead of them and, where dQ is not rounded by whoever adds last,
what is written before and read behind them. That is counted in bytes of memory.

It is played in numpy, where an operator on a few numbers takes a fraction of what it takes in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flash_attn_cute.sparsity.order import SUMS

Numbers: TypeAlias = NDArray[Any]

_CANDIDATES = 8  # tiles that list scheduling chooses among
_LATER = 1e-4  # us that a tile may wait more for each place that it comes earlier: of those that do not wait the first
_LEAST_HEADS = 16
_TILES_TO_COMPARE = 1024  # of a mask, at the least: eight for each CTA
_ROWS = 128  # queries of a block
_NARROW, _WIDE = 256, 512  # bytes of a row of 128 columns, in 16 bits and in float32


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


def machine_of(seqlen_q: int, waits_little: bool = False) -> Machine:
    """An H200, with as many heads in flight as deterministic backward passes at d = 128 have on it.

    As ``backends.cute.plan`` has it: so many as the cache has room for, or more where few would wait too long for each
    other's first turns. A block of queries has one sum where a mask ``waits_little``.
    """
    sums = 1 if waits_little else SUMS
    halves = max(1, -(-seqlen_q // 64))
    in_cache = 16_000_000 // (512 * (1 + sums) * max(seqlen_q, 1))
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

    def __init__(self, steps: Tensor, group: int = 1, machine: Machine = H200) -> None:
        """The pass of a mask.

        Args:
            steps: (batch, heads, blocks_q, blocks_k), bool or a small integer, on the CPU: how many steps it takes to
                add to a block of queries, 0 where nothing is added.
            group: heads that share an order.
            machine: what runs it.

        Raises:
            ValueError: a machine of fewer CTAs than heads of a section.
        """
        if machine.ctas < machine.section:
            raise ValueError(f"machine: expected at least a CTA for each head of a section, got {machine}")
        self.machine, self.group = machine, group
        batch, heads, self.blocks_q, self.blocks_k = steps.shape
        self.num_masks = batch * heads
        # A mask of few heads is played through several times, as for a batch.
        self.mask_of_head = np.tile(np.arange(self.num_masks), max(1, -(-_LEAST_HEADS // max(self.num_masks, 1))))
        self.order_shape = (batch, heads // group, self.blocks_k)
        self.tiles = _Tiles(steps.flatten(0, 1).mT.to(torch.uint8).contiguous().numpy(), machine)

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

        Out and its gradient are read for delta. Sums of dQ that are added to in no order are zeroed, and those, or
        several of them, are read in the end and rounded; a single one in an order is rounded by whoever adds last.
        """
        a_row = 2 * _NARROW
        if not ordered:
            a_row += 2 * _WIDE + _NARROW
        elif self.machine.sums > 1:
            a_row += self.machine.sums * _WIDE + _NARROW
        rows = len(self.mask_of_head) * self.blocks_q * _ROWS
        return self.machine.call + rows * a_row / self.machine.bytes_a_us

    def cta_times(self, orders: Sequence[Tensor], *, ordered: bool = True) -> list[float]:
        """What tiles take of CTAs in a pass in full swing, under each of several launch orders: microseconds in all.

        Of a large mask only some heads are played. How a pass ends is left out.
        """
        every = np.stack([order.flatten(0, 1).numpy() for order in orders])
        size = self.machine.section
        sections = min(-(-self.num_masks // size), -(-_TILES_TO_COMPARE // max(size * self.blocks_k, 1)))
        masks = np.resize(np.arange(self.num_masks), sections * size)
        device = _Device(self.machine, len(orders) * sections, self.tiles.mean_time)
        section = _Section(self, np.tile(masks, len(orders)), device, ordered)
        drawn = device.first_of([size] * (len(orders) * sections))
        for n in every[:, masks // self.group].transpose(2, 0, 1).reshape(self.blocks_k, -1):
            section.play(n, *device.draw(drawn))
        spent = np.stack([self.machine.tile + end - start for _, _, start, end, _ in section.played]).sum(0)
        times: list[float] = spent.reshape(len(orders), -1).sum(1).tolist()
        return times

    def schedule(self, order: Tensor, heads_at_once: Sequence[int]) -> list[Tensor]:
        """Orders found by list scheduling in a given one, in a pass in full swing, each with so many heads at once.

        They are found side by side, which takes hardly more calls of numpy than one.
        """
        at_once = [min(heads, self.machine.ctas) for heads in heads_at_once]
        sections = [-(-self.num_masks // heads) for heads in at_once]
        device = _Device(self.machine, sum(sections), self.tiles.mean_time)
        masks = [np.resize(np.arange(self.num_masks), heads * n) for heads, n in zip(at_once, sections, strict=True)]
        section = _Section(self, np.concatenate(masks), device)
        queue = order.flatten(0, 1).numpy()
        of_head = np.concatenate([i * len(queue) + of // self.group for i, of in enumerate(masks)])
        choice = _Choice(section, np.tile(queue, (len(at_once), 1)), of_head)
        drawn = device.first_of([heads for heads, n in zip(at_once, sections, strict=True) for _ in range(n)])
        for rank in range(self.blocks_k):
            ctas, start = device.draw(drawn)
            section.play(choice.next(rank, start), ctas, start)
        found = torch.from_numpy(np.stack(choice.chosen, 1)).int()
        return list(found.view(len(at_once), *self.order_shape))


class _Tiles:
    """What the tiles of all masks meet: (masks * blocks_k, most blocks met + 1) each.

    ``met`` has blocks of queries, ascending, and ``taken`` the time that steps up to each of them take. Before the
    first one and behind the last one stands a block that nobody hands over, with nothing taken, and all. ``draws``
    (masks * blocks_k,) is the place of the block after which the CTA draws.
    """

    def __init__(self, steps: Numbers, machine: Machine) -> None:
        self.blocks_q = steps.shape[2]
        by_tile = steps.reshape(steps.shape[0] * steps.shape[1], self.blocks_q)
        found = (by_tile != 0).ravel().nonzero()[0]  # of one dimension that takes a seventh of the time of two
        tile, m = np.divmod(found, max(1, self.blocks_q))
        count = np.bincount(tile, minlength=len(by_tile))
        place = np.arange(1, len(tile) + 1) - (count.cumsum() - count)[tile]
        shape = len(by_tile), 1 + int(count.max(initial=0))
        steps_at = np.zeros(shape, dtype=np.int32)
        steps_at[tile, place] = by_tile.ravel()[found]
        steps_at.cumsum(1, out=steps_at)
        self.met = np.full(shape, self.blocks_q)
        self.met[tile, place] = m
        self.taken = (machine.step * steps_at).astype(np.float32)
        self.draws = np.maximum((steps_at <= steps_at[:, -1:] - machine.steps_ahead).sum(1) - 1, 0)
        self.mean_time = machine.tile + float(self.taken[:, -1].mean()) if len(tile) else machine.tile


class _Device:
    """The CTAs of each lane: when they can draw, and when they are free to begin; at first within a time given."""

    def __init__(self, machine: Machine, lanes: int = 1, within: float = 0.0) -> None:
        self.tile = machine.tile
        self.draws = np.tile(np.arange(machine.ctas) * (within / machine.ctas), (lanes, 1))
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
        self.draws.reshape(-1)[ctas] = draws + 1e-3 * ends
        self.free.reshape(-1)[ctas] = ends


class _Section:
    """Heads that draw their tickets in turn, rank by rank, and what their tiles have handed over."""

    def __init__(self, work: Pass, masks: Numbers, device: _Device, ordered: bool = True) -> None:
        """With the mask of each head, of each lane."""
        self.masks, self.device, self.ordered = masks, device, ordered
        self.tiles, self.after = work.tiles, np.float32(work.machine.hand_over)
        self.heads = np.arange(len(masks))
        self.first_tile = masks * work.blocks_k
        self.handed_over = np.full((len(masks), self.tiles.blocks_q + 1), -np.inf, dtype=np.float32)
        # Of a block with several sums that of the next turn; behind it those of the turns after it, the last one first.
        self.later = [self.handed_over.copy() for _ in range(work.machine.sums - 1)]
        self.first_block = self.heads[:, None] * (self.tiles.blocks_q + 1)
        self.played: list[tuple[Numbers, ...]] = []

    def play(self, n: Numbers, ctas: Numbers, start: Numbers) -> None:
        """Has the heads work on a tile of keys each: (lanes * heads,) each."""
        tile = self.first_tile + n
        taken = self.tiles.taken.take(tile, 0)
        if self.ordered:
            met = self.tiles.met.take(tile, 0)
            met += self.first_block
            done = self.handed_over.take(met)
            done -= taken
            done[:, 0] = start
            np.maximum.accumulate(done, 1, out=done)
            done += taken
            ready = done + self.after
            for sums in self.later:
                of_turn_before = sums.take(met)
                sums.reshape(-1)[met] = ready
                ready = of_turn_before
            self.handed_over.reshape(-1)[met] = ready
            for sums in (self.handed_over, *self.later):
                sums[:, -1] = -np.inf
        else:
            done = taken + start[:, None]
        end = done[:, -1]
        self.device.finish(ctas, done[self.heads, self.tiles.draws.take(tile)], end)
        self.played.append((n, ctas, start, end, end - start - taken[:, -1]))

    def told(self, first_head: int) -> tuple[Numbers, ...]:
        """What a timeline has of it, whose heads are numbered from that one on: (tickets,) each."""
        n, ctas, start, end, waited = (np.stack(x).ravel() for x in zip(*self.played, strict=True))
        return np.tile(first_head + self.heads, len(self.played)), n, ctas, start - self.device.tile, end, waited


class _Choice:
    """The next tile of each order: of those at hand the one that its heads would wait the least for."""

    def __init__(self, section: _Section, queue: Numbers, orders: Numbers) -> None:
        """With the tiles of each order in the sequence given, and which order each head has."""
        self.section, self.queue, self.of = section, queue, orders
        self.each = np.arange(len(queue))
        self.judges = np.float32(orders == self.each[:, None])  # (orders, heads)
        self.at_hand = queue[:, :_CANDIDATES].copy()
        self.later = np.tile(_LATER * np.arange(self.at_hand.shape[1]), (len(queue), 1))
        # (blocks met, heads, tiles at hand): where blocks are handed over, and what is taken up to them.
        shape = (-1, len(orders), self.at_hand.shape[1])
        met, taken = self._costs((section.first_tile[:, None] + self.at_hand[orders]).ravel(), self.at_hand.shape[1])
        self.met, self.taken = met.reshape(shape), taken.reshape(shape)
        self.chosen: list[Numbers] = []

    def next(self, rank: int, start: Numbers) -> Numbers:
        """A tile for each head, (heads,)."""
        waits = self.section.handed_over.take(self.met)
        waits -= self.taken
        longest = np.maximum(np.maximum.reduce(waits, 0) - start[:, None], 0)
        best = (self.judges @ longest + self.later).argmin(1)
        chosen = self.at_hand[self.each, best]
        self.chosen.append(chosen)
        upcoming = rank + self.at_hand.shape[1]
        if upcoming < self.queue.shape[1]:
            tiles = self.queue[:, upcoming]
            self.at_hand[self.each, best] = tiles
            self.later[self.each, best] = _LATER * upcoming
            place = slice(None), self.section.heads, best[self.of]
            self.met[place], self.taken[place] = self._costs(self.section.first_tile + tiles[self.of], 1)
        else:
            self.later[self.each, best] = np.inf
        return chosen[self.of]

    def _costs(self, tiles: Numbers, of_each: int) -> tuple[Numbers, Numbers]:
        """(blocks met, tiles): of so many tiles of each head."""
        met = self.section.tiles.met.take(tiles, 0) + self.section.first_block.repeat(of_each, 0)
        return met.T, self.section.tiles.taken.take(tiles, 0).T
