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

_CANDIDATES = 16  # tiles that list scheduling chooses among
_LATER = 1e-4  # us that a tile may wait more for each place that it comes earlier: of those that do not wait the first
_LEAST_HEADS = 16


class Machine(NamedTuple):
    """Times in microseconds, for blocks of 64 queries and 128 keys at d = 128 on an H200."""

    ctas: int = 132
    section: int = 8  # heads that draw their tickets in turn
    tile: float = 4.0
    step: float = 2.1
    hand_over: float = 2.0
    sums: int = 1  # of a block of queries, to which tiles add in turn
    steps_ahead: int = 2  # a CTA draws its next ticket when so many steps are left to it


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

    def __init__(self, steps: Tensor, group: int = 1, machine: Machine = H200, *, least_tiles: int = 0) -> None:
        """The pass of a mask.

        Args:
            steps: (batch, heads, blocks_q, blocks_k), bool or a small integer, on the CPU: how many steps it takes to
                add to a block of queries, 0 where nothing is added.
            group: heads that share an order.
            machine: what runs it.
            least_tiles: a mask of fewer tiles is played through several times, as for a batch.

        Raises:
            ValueError: a machine of fewer CTAs than heads of a section.
        """
        if machine.ctas < machine.section:
            raise ValueError(f"machine: expected at least a CTA for each head of a section, got {machine}")
        self.machine = machine
        batch, heads, self.blocks_q, self.blocks_k = steps.shape
        self.order_shape = (batch, heads // group, self.blocks_k)
        sets = np.arange(batch * heads)
        least_heads = max(_LEAST_HEADS, -(-least_tiles // max(self.blocks_k, 1)))
        self.sets = np.tile(sets, max(1, -(-least_heads // max(len(sets), 1))))  # of each head
        self.orders = self.sets // group
        self.tiles = _Tiles(steps.flatten(0, 1).mT.to(torch.uint8).contiguous().numpy(), machine)

    def play(self, order: Tensor, *, ordered: bool = True) -> Timeline:
        """With a launch order (batch, key heads, blocks_k); unordered if additions do not wait for their turns."""
        return self._play([order], ordered)[0]

    def makespans(self, orders: Sequence[Tensor]) -> list[float]:
        """What several launch orders take, in microseconds."""
        return [timeline.makespan for timeline in self._play(orders)]

    def schedule(self, order: Tensor, heads_at_once: int) -> Tensor:
        """A launch order found by list scheduling in a given one, so many heads drawing in turn."""
        given = order.flatten(0, 1).numpy()
        found = np.full(given.shape, -1)
        device = _Device(self.machine, lanes=1)
        for heads in self._sections(heads_at_once):
            section = _Section(self, heads, device)
            choice = _Choice(section, given, found, self.orders[heads])
            for rank in range(self.blocks_k):
                ctas, start = device.draw(len(heads))
                section.play(choice.next(rank, start), ctas, start)
            choice.keep(found)
            if (found[:, 0] >= 0).all():  # other heads have the same masks
                break
        return torch.from_numpy(found).int().view(self.order_shape)

    def _play(self, orders: Sequence[Tensor], ordered: bool = True) -> list[Timeline]:
        """Lanes that differ by their orders, and know nothing of each other."""
        every = np.stack([order.flatten(0, 1).numpy() for order in orders])
        device, told = _Device(self.machine, lanes=len(orders)), []
        for heads in self._sections(self.machine.section):
            section = _Section(self, heads, device, ordered)
            for n in every[:, self.orders[heads]].transpose(2, 0, 1).reshape(self.blocks_k, -1):
                section.play(n, *device.draw(len(heads)))
            told.append(section.told())
        return _timelines(told)

    def _sections(self, size: int) -> list[Numbers]:
        """The heads of each."""
        return np.split(np.arange(len(self.sets)), range(size, len(self.sets), size))


class _Tiles:
    """What the tiles of all masks meet: (sets * blocks_k, most blocks met + 1) each.

    ``met`` has blocks of queries, ascending, and ``taken`` the time that steps up to each of them take. Before the
    first one and behind the last one stands a block that nobody hands over, with nothing taken, and all. ``draws``
    (sets * blocks_k,) is the place of the block after which the CTA draws.
    """

    def __init__(self, steps: Numbers, machine: Machine) -> None:
        self.blocks_q = steps.shape[2]
        by_tile = steps.reshape(steps.shape[0] * steps.shape[1], self.blocks_q)
        tile, m = (by_tile != 0).nonzero()
        count = np.bincount(tile, minlength=len(by_tile))
        place = np.arange(1, len(tile) + 1) - (count.cumsum() - count)[tile]
        shape = len(by_tile), 1 + int(count.max(initial=0))
        steps_at = np.zeros(shape, dtype=np.int32)
        steps_at[tile, place] = by_tile[tile, m]
        steps_at.cumsum(1, out=steps_at)
        self.met = np.full(shape, self.blocks_q)
        self.met[tile, place] = m
        self.taken = (machine.step * steps_at).astype(np.float32)
        self.draws = np.maximum((steps_at <= steps_at[:, -1:] - machine.steps_ahead).sum(1) - 1, 0)

    def costs(self, tiles: Numbers) -> Numbers:
        """(tiles, blocks_q + 1): the time that some take up to each block, infinite where they do not meet it."""
        costs = np.full((len(tiles), self.blocks_q + 1), np.inf, dtype=np.float32)
        np.put_along_axis(costs, self.met[tiles], self.taken[tiles], 1)
        costs[:, -1] = np.inf
        return costs


class _Device:
    """The CTAs of each lane: when they can draw, and when they are free to begin."""

    def __init__(self, machine: Machine, lanes: int) -> None:
        self.tile, self.lanes = machine.tile, lanes
        self.draws, self.free = np.zeros((2, lanes, machine.ctas))
        self.first = np.arange(lanes)[:, None] * machine.ctas

    def draw(self, heads: int) -> tuple[Numbers, Numbers]:
        """Those that draw next, one for each head, and when they begin their tiles: (lanes * heads,) each."""
        ctas = (self.draws.argsort(1, kind="stable")[:, :heads] + self.first).ravel()
        return ctas, self.free.take(ctas) + self.tile

    def finish(self, ctas: Numbers, draws: Numbers, ends: Numbers) -> None:
        """When these can draw again, and are free. Of those that can draw together the one draws that is free first."""
        self.draws.put(ctas, draws + 1e-3 * ends)
        self.free.put(ctas, ends)


class _Section:
    """Heads that draw their tickets in turn, rank by rank, and what their tiles have handed over."""

    def __init__(self, work: Pass, heads: Numbers, device: _Device, ordered: bool = True) -> None:
        self.heads, self.device, self.ordered = heads, device, ordered
        self.tiles, self.after = work.tiles, np.float32(work.machine.hand_over)
        self.lanes_heads = np.arange(device.lanes * len(heads))
        self.first_tile = np.tile(work.sets[heads] * work.blocks_k, device.lanes)
        self.handed_over = np.full((len(self.lanes_heads), self.tiles.blocks_q + 1), -np.inf, dtype=np.float32)
        # Of a block with several sums that of the next turn; behind it those of the turns after it, the last one first.
        self.later = [self.handed_over.copy() for _ in range(work.machine.sums - 1)]
        self.first_block = self.lanes_heads[:, None] * (self.tiles.blocks_q + 1)
        self.played: list[tuple[Numbers, ...]] = []

    def play(self, n: Numbers, ctas: Numbers, start: Numbers) -> None:
        """Has each lane's heads work on a tile of keys each: (lanes * heads,) each."""
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
                sums.put(met, ready)
                ready = of_turn_before
            self.handed_over.put(met, ready)
            for sums in (self.handed_over, *self.later):
                sums[:, -1] = -np.inf
        else:
            done = taken + start[:, None]
        end = done[:, -1]
        self.device.finish(ctas, done[self.lanes_heads, self.tiles.draws.take(tile)], end)
        self.played.append((n, ctas, start, end, end - start - taken[:, -1]))

    def told(self) -> tuple[Numbers, Numbers]:
        """Heads, tiles and CTAs; starts, ends and waits: (3, lanes, tickets) each."""
        lanes = self.device.lanes
        n, ctas, start, end, waited = (
            np.stack(x).reshape(len(self.played), lanes, -1).swapaxes(0, 1) for x in zip(*self.played, strict=True)
        )
        places = np.broadcast_to(self.heads, n.shape), n, ctas - self.device.first[..., None]
        times = start - self.device.tile, end, waited
        return np.stack(places).reshape(3, lanes, -1), np.stack(times).reshape(3, lanes, -1)


class _Choice:
    """The next tile of each order of a section, where it is not known from a section before."""

    def __init__(self, section: _Section, given: Numbers, found: Numbers, orders: Numbers) -> None:
        self.section = section
        self.orders, self.of = np.unique(orders, return_inverse=True)
        known = found[self.orders, 0] >= 0
        self.queue = np.where(known[:, None], found[self.orders], given[self.orders])
        self.all_known = known.all()
        if self.all_known:
            return
        self.each, self.heads = np.arange(len(self.orders)), np.arange(len(orders))
        # (orders, heads): by whom an order is judged, which is nobody if it is known.
        self.judges = np.float32((self.of == self.each[:, None]) & ~known[:, None])
        self.at_hand = self.queue[:, :_CANDIDATES].copy()
        self.later = np.tile(_LATER * np.arange(self.at_hand.shape[1]), (len(self.orders), 1))
        blocks_k = self.queue.shape[1]
        self.costs = section.tiles.costs((section.first_tile[:, None] + np.arange(blocks_k)).ravel())
        self.first_cost = self.heads * blocks_k
        self.costs_at_hand = self.costs[self.first_cost[:, None] + self.at_hand[self.of]]
        self.waits = np.empty_like(self.costs_at_hand)
        self.chosen: list[Numbers] = []

    def next(self, rank: int, start: Numbers) -> Numbers:
        """A tile for each head, (heads,)."""
        if self.all_known:
            return self.queue[self.of, rank]
        np.subtract(self.section.handed_over[:, None], self.costs_at_hand, out=self.waits)
        waits = np.maximum(np.maximum.reduce(self.waits, 2) - start[:, None], 0)
        best = (self.judges @ waits + self.later).argmin(1)
        chosen = self.at_hand[self.each, best]
        self.chosen.append(chosen)
        upcoming = rank + self.at_hand.shape[1]
        if upcoming < self.queue.shape[1]:
            tiles = self.queue[:, upcoming]
            self.at_hand[self.each, best] = tiles
            self.later[self.each, best] = _LATER * upcoming
            costs = self.costs.take(self.first_cost + tiles[self.of], 0)
            self.costs_at_hand[self.heads, best[self.of]] = costs
        else:
            self.later[self.each, best] = np.inf
        return chosen[self.of]

    def keep(self, found: Numbers) -> None:
        """Writes down what has been chosen."""
        if not self.all_known:
            found[self.orders] = np.stack(self.chosen, 1)


def _timelines(told: list[tuple[Numbers, Numbers]]) -> list[Timeline]:
    """Of each lane, from those of sections."""
    places, times = (np.concatenate(x, 2).swapaxes(0, 1).tolist() for x in zip(*told, strict=True))
    return [Timeline(*of_place, *of_time) for of_place, of_time in zip(places, times, strict=True)]
