"""A model of ordered backward passes: how long tiles wait for their turns under a launch order, and an m_block order.

What is modelled: CTAs draw tickets in launch order. A tile of keys takes a time to begin, and a step for every query
block. Before it adds to a block's dQ it waits for its turn, which the tile of the turn before signals some time after
its own addition. A tile waits for lower tickets alone, so tickets are played through one after the other.

Let ``ready`` be when a block's turn is signalled, and k the steps taken up to that block. A tile that begins at time s
is done with the block at ``step * k + max(s, max of ready - step * k)``, where the inner maximum is over the blocks so
far. This is the longest path of DASH's graph of additions (arXiv 2601.21824), with as many CTAs as there are.

How an m_block order is found: turns follow tickets, but a tile may take its query blocks in any order, which under
irregular masks decides how long it waits. It waits least if it takes them as they become ready: jobs with release
times, on one machine (Jackson, 1955). When they become ready depends on lower tickets alone, so an order for each tile
is found by playing the tickets in turn.

Simplifications:

- Heads of a section draw a ticket each, rank by rank, and the tiles of one rank are played together. A CTA that would
  be through with one of them in time to draw another does not.
- Orders are compared, and m_block orders found, in full swing: sections are played side by side, each by CTAs that come
  free one after the other, as they would from the section before.
- Everything beside the tiles is counted in bytes of memory: reading ahead of them, and sums of dQ, which are read in
  the end, and zeroed first if additions have no order.

It runs in numpy, where an operator on a few numbers takes a fraction of PyTorch's time, and in whole nanoseconds, so
that every host finds the same orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flash_attn_cute.sparsity.dq_order.turns import BYTES_IN_FLIGHT, BYTES_IN_FLIGHT_WITH_M_BLOCK_ORDER

Numbers: TypeAlias = NDArray[Any]

_LEAST_HEADS = 16
_TILES_TO_COMPARE = 1024  # of a mask, at least: eight for each CTA
_ROWS = 128  # queries of a block
_NARROW, _WIDE = 256, 512  # bytes of a row of 128 columns, in 16 bits and in float32
_NS = 1000  # a microsecond
_BLOCK_BITS = 20  # of a number that holds a time in nanoseconds, and in its last bits a query block
_NEVER = 1 << 42  # nanoseconds


class Machine(NamedTuple):
    """Times in microseconds, for blocks of 64 queries and 128 keys at d = 128 on an H200."""

    num_ctas: int = 132  # CTAs that run at a time
    section: int = 8  # heads that draw their tickets together
    tile: float = 4.0  # time to begin a tile
    step: float = 2.1  # time of a block of 64 queries
    signal: float = 2.0  # time from an addition until the next turn sees it
    steps_ahead: int = 2  # a CTA draws its next ticket when so many steps are left to it
    call: float = 35.0  # time of a call beside its tiles and traffic
    bytes_a_us: float = 4.2e6  # bytes that memory moves in a microsecond


H200 = Machine()


def machine_of(seqlen_q: int, has_m_block_order: bool = False) -> Machine:
    """An H200 with the sections that ``backends.cute.plan`` gives ordered passes at d = 128.

    A section has as many heads as the cache has room for, or more where few heads would wait too long for each other's
    first turns.
    """
    halves = max(1, -(-seqlen_q // 64))
    in_flight = BYTES_IN_FLIGHT_WITH_M_BLOCK_ORDER if has_m_block_order else BYTES_IN_FLIGHT
    in_cache = in_flight // (1024 * max(seqlen_q, 1))
    for_turns = -(-5 * H200.num_ctas // (2 * halves))
    return H200._replace(section=min(max(1, in_cache, for_turns), H200.num_ctas))


class Timeline(NamedTuple):
    """Timeline of a pass: for each tile, in the order of tickets, times in microseconds."""

    head: list[int]  # the tile's head
    n: list[int]  # its key block
    cta: list[int]  # the CTA that works on it
    start: list[float]  # when it begins
    end: list[float]  # when it is done
    waited: list[float]  # how long it has waited for turns

    @property
    def makespan(self) -> float:
        """Time at which the last tile is done."""
        return max(self.end, default=0.0)


class Pass:
    """The tiles of a backward pass: which query blocks each adds to, and which heads share a launch order."""

    def __init__(
        self, steps: Tensor, group: int = 1, machine: Machine = H200, m_block_order: Tensor | None = None
    ) -> None:
        """Prepares the pass of a mask.

        Args:
            steps: (batch, heads, blocks_q, blocks_k), bool or a small integer, on the CPU: how many steps a key tile
                takes at a query block, 0 where it adds nothing.
            group: heads that share a launch order.
            machine: what runs it.
            m_block_order: of the same shape, as ``find_m_block_order`` returns it; None: ascending.

        Raises:
            ValueError: a machine with fewer CTAs than a section has heads.
        """
        if machine.num_ctas < machine.section:
            raise ValueError(f"machine: expected at least a CTA for each head of a section, got {machine}")
        self.machine, self.group = machine, group
        self.shape = batch, heads, self.blocks_q, self.blocks_k = steps.shape
        self.num_masks = batch * heads
        # A mask of few heads is played several times, as for a batch.
        self.mask_of_head = np.tile(np.arange(self.num_masks), max(1, -(-_LEAST_HEADS // max(self.num_masks, 1))))
        self.order_shape = (batch, heads // group, self.blocks_k)
        positions = None if m_block_order is None else _by_tile(m_block_order)
        self.tiles = _Tiles(_by_tile(steps.to(torch.uint8)), machine, positions)

    def play(self, order: Tensor, *, ordered: bool = True) -> Timeline:
        """Plays the pass in an order (batch, key heads, blocks_k); ``ordered``: additions wait for their turns."""
        orders, size = order.flatten(0, 1).numpy(), self.machine.section
        device, parts = _Device(self.machine), []
        for first in range(0, len(self.mask_of_head), size):
            section = _Section(self, self.mask_of_head[first : first + size], device, ordered)
            for n in orders[section.masks // self.group].T:
                section.play(n, *device.draw(section.heads))
            parts.append(section.timeline(first))
        return Timeline(*(np.concatenate(x).tolist() for x in zip(*parts, strict=True)))

    def overhead(self, *, ordered: bool = True) -> float:
        """Microseconds of a pass beside its tiles.

        out and dout are read for delta. Sums of dQ are read in the end and rounded; they are zeroed first if additions
        have no order.
        """
        bytes_a_row = 2 * _NARROW + (1 if ordered else 2) * _WIDE + _NARROW
        rows = len(self.mask_of_head) * self.blocks_q * _ROWS
        return self.machine.call + rows * bytes_a_row / self.machine.bytes_a_us

    def on(self, machine: Machine) -> Pass:
        """A copy of the pass for a machine with another section."""
        other = copy(self)
        other.machine = machine
        return other

    def pass_time(self, slowdown: float) -> float:
        """Microseconds of an ordered pass whose tiles have a slowdown, evenly distributed over all CTAs."""
        copies = len(self.mask_of_head) / self.num_masks
        return self.overhead() + slowdown * copies * self.tiles.work / self.machine.num_ctas

    def slowdowns(self, orders: Sequence[Tensor]) -> list[float]:
        """Slowdowns of the tiles under several launch orders: their time over the time of their own work.

        They hold in full swing; the end of the pass is left out. Only some heads of a large mask are played.
        """
        size = self.machine.section
        sections = min(-(-self.num_masks // size), -(-_TILES_TO_COMPARE // max(size * self.blocks_k, 1)))
        masks = np.resize(np.arange(self.num_masks), sections * size)
        return self._in_full_swing(masks, orders).slowdowns(len(orders))

    def find_m_block_order(self, order: Tensor) -> tuple[Tensor, float]:
        """Finds the m_block order in which each tile takes its query blocks as they become ready, in a launch order.

        Returns the m_block order (batch, heads, blocks_q, blocks_k), int16: the position of a query block in the order
        of a key tile, anything for empty blocks. And the slowdown of the tiles with it.
        """
        size = self.machine.section
        masks = np.arange(-(-self.num_masks // size) * size) % max(self.num_masks, 1)
        section = self._in_full_swing(masks, [order], by_readiness=True)
        # (blocks_k, masks, ...), in the order of tickets; further heads are masks that are played once more.
        n = np.stack([n[: self.num_masks] for n, *_ in section.played])
        met = np.stack([met[: self.num_masks] for met in section.m_blocks])
        tile = np.arange(self.num_masks) * self.blocks_k + n
        positions = np.zeros((self.num_masks * self.blocks_k, self.blocks_q + 2), dtype=np.int16)
        positions.reshape(-1)[met + (tile * positions.shape[1])[:, :, None]] = np.arange(-1, met.shape[2] - 1)
        batch, heads, _, _ = self.shape
        by_tile = torch.from_numpy(positions).unflatten(0, (batch, heads, self.blocks_k))
        return by_tile.mT[:, :, : self.blocks_q], section.slowdowns(1)[0]

    def _in_full_swing(self, masks: Numbers, orders: Sequence[Tensor], *, by_readiness: bool = False) -> _Section:
        """Plays sections of masks side by side, under each of several launch orders."""
        by_set = np.stack([order.flatten(0, 1).numpy() for order in orders])
        size, lanes = self.machine.section, len(orders) * len(masks) // self.machine.section
        device = _Device(self.machine, lanes, self.tiles.work / len(self.tiles.count))
        section = _Section(self, np.tile(masks, len(orders)), device, by_readiness=by_readiness)
        drawn = device.first_of([size] * lanes)
        for n in by_set[:, masks // self.group].transpose(2, 0, 1).reshape(self.blocks_k, -1):
            section.play(n, *device.draw(drawn))
        return section


def _by_tile(of_blocks: Tensor) -> Numbers:
    """(batch, heads, blocks_q, blocks_k) as (batch * heads * blocks_k, blocks_q)."""
    return of_blocks.mT.flatten(0, 2).numpy()


class _Tiles:
    """Key tiles of all masks, and the query blocks that each adds to.

    Query blocks are numbered with two more than there are: one stands ahead of each tile's list, one behind it.

    Attributes:
        met: (masks * blocks_k, most blocks of a tile + 2): query blocks in the tile's m_block order.
        steps: (masks * blocks_k * (blocks_q + 2),): steps of a tile at a block.
        count: (masks * blocks_k,): query blocks of a tile.
        draws: (masks * blocks_k,): nanoseconds of steps after which a tile's CTA draws its next ticket.
        work: microseconds of all tiles without waits.
    """

    def __init__(self, steps: Numbers, machine: Machine, positions: Numbers | None) -> None:
        num_tiles, self.blocks_q = steps.shape
        found = (steps != 0).ravel().nonzero()[0]  # in one dimension, which takes a seventh of the time of two
        tile, m = np.divmod(found, max(1, self.blocks_q))
        self.count = np.bincount(tile, minlength=num_tiles)
        if positions is None:
            position = np.arange(len(tile)) - (self.count.cumsum() - self.count)[tile]
        else:
            position = positions.ravel()[found]
        self.met = np.full((num_tiles, 2 + int(self.count.max(initial=0))), self.blocks_q + 1)
        self.met[:, 0] = self.blocks_q
        self.met[tile, 1 + position] = m
        self.steps = np.zeros((num_tiles, self.blocks_q + 2), dtype=steps.dtype)
        self.steps[:, : self.blocks_q] = steps
        of_tile = np.bincount(tile, weights=steps.ravel()[found], minlength=num_tiles)
        self.draws = (of_tile - machine.steps_ahead).clip(0) * round(machine.step * _NS)
        self.work = machine.tile * num_tiles + machine.step * float(of_tile.sum())


class _Device:
    """CTAs of each lane: when each can draw a ticket, and when it is free to begin the tile.

    Lanes are played side by side. Initially CTAs come free evenly within a given time.
    """

    def __init__(self, machine: Machine, lanes: int = 1, within: float = 0.0) -> None:
        self.tile = round(machine.tile * _NS)
        self.draws = np.tile(np.arange(machine.num_ctas) * round(within * _NS) // machine.num_ctas, (lanes, 1))
        self.free = self.draws.copy()
        self.first = np.arange(lanes)[:, None] * machine.num_ctas

    def first_of(self, heads: Sequence[int]) -> Numbers:
        """Places of the CTAs that draw first for so many heads of each lane, among CTAs sorted by when they draw."""
        return np.concatenate([first + np.arange(n) for (first,), n in zip(self.first, heads, strict=True)])

    def draw(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """Draws a ticket for each head, at the places of ``first_of``: its CTA and when the tile begins, (heads,)."""
        if len(places) == len(self.draws):  # one of each lane
            ctas = self.draws.argmin(1) + self.first[:, 0]
        else:
            ctas = (self.draws.argsort(1, kind="stable") + self.first).take(places)
        return ctas, self.free.take(ctas) + self.tile

    def finish(self, ctas: Numbers, draws: Numbers, ends: Numbers) -> None:
        """Records when CTAs can draw again and are free. Among those that draw together, the first to be free draws."""
        self.draws.reshape(-1)[ctas] = draws + ends // 1000
        self.free.reshape(-1)[ctas] = ends


class _Section:
    """Heads that draw their tickets together, rank by rank, and the turns that their tiles have signalled.

    The time at which a block's turn is signalled is kept in one number with the block in its last bits, so that sorting
    such numbers yields an m_block order.
    """

    def __init__(
        self, work: Pass, masks: Numbers, device: _Device, ordered: bool = True, *, by_readiness: bool = False
    ) -> None:
        """Begins a section of heads with these masks, (lanes * heads,), on the device whose CTAs draw.

        ``ordered``: additions wait for their turns. ``by_readiness``: tiles take query blocks as they become ready,
        rather than in their m_block order.
        """
        self.masks, self.device, self.ordered, self.by_readiness = masks, device, ordered, by_readiness
        self.tiles = work.tiles
        self.step, self.signal = (round(x * _NS) for x in (work.machine.step, work.machine.signal))
        self.heads = np.arange(len(masks))
        self.first_tile = masks * work.blocks_k
        blocks = self.tiles.blocks_q + 2
        self.first_block = self.heads[:, None] * blocks
        signalled = np.tile(np.arange(blocks), (len(masks), 1))
        signalled[:, -1] += _NEVER << _BLOCK_BITS
        signalled[:, -2] -= 1 << _BLOCK_BITS  # ahead of all others, whatever their numbers
        self.signalled = signalled
        self.played: list[tuple[Numbers, ...]] = []
        self.m_blocks: list[Numbers] = []

    def play(self, n: Numbers, ctas: Numbers, start: Numbers) -> None:
        """Plays a tile of each head: its key block, its CTA and when it begins, (lanes * heads,) each."""
        tile = self.first_tile + n
        met = self.tiles.met.take(tile, 0)
        ready = self.signalled.take(met + self.first_block)
        if self.by_readiness:
            ready.sort(1)
            np.bitwise_and(ready, (1 << _BLOCK_BITS) - 1, out=met)
            self.m_blocks.append(met)
        ready >>= _BLOCK_BITS
        steps = self.tiles.steps.take(met + (tile * (self.tiles.blocks_q + 2))[:, None])
        taken = steps.cumsum(1, dtype=np.int64)
        taken *= self.step
        if self.ordered:
            ready -= taken
            ready[:, 0] = start
            done = np.maximum.accumulate(ready, 1, out=ready)
            done += taken
            self._signal(met, done + self.signal)
        else:
            done = taken + start[:, None]
        count = self.tiles.count.take(tile)
        end = done[self.heads, count]
        draws = (taken <= self.tiles.draws.take(tile)[:, None]).sum(1) - 1
        self.device.finish(ctas, done[self.heads, np.minimum(draws, count)], end)
        self.played.append((n, ctas, start, end, end - start - taken[:, -1]))

    def _signal(self, met: Numbers, when: Numbers) -> None:
        """Signals the next turns of query blocks, at given times."""
        at = met + self.first_block
        when <<= _BLOCK_BITS
        when += met
        beside = self.signalled[:, -2:].copy()
        self.signalled.reshape(-1)[at] = when
        self.signalled[:, -2:] = beside

    def slowdowns(self, orders: int) -> list[float]:
        """Time of the tiles over the time of their work, under each of so many launch orders."""
        _, _, start, end, waited = (np.stack(x).reshape(len(x), orders, -1) for x in zip(*self.played, strict=True))
        spent = (end - start + self.device.tile).sum((0, 2))
        return (spent / (spent - waited.sum((0, 2)))).tolist()

    def timeline(self, first_head: int) -> tuple[Numbers, ...]:
        """Fields of a ``Timeline``, (tickets,) each; heads are numbered from ``first_head`` on."""
        n, ctas, start, end, waited = (np.stack(x).ravel() for x in zip(*self.played, strict=True))
        times = ((start - self.device.tile) / _NS, end / _NS, waited / _NS)
        return (np.tile(first_head + self.heads, len(self.played)), n, ctas, *times)
