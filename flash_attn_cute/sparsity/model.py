"""A model of the backward pass, in which launch orders are compared, and found.

CTAs draw tickets in the order of launch. A tile of keys takes a time to begin and a step for every block of queries
that it meets, in ascending order; before it adds to a block's dQ it waits for its turn, which the tile before hands
over after a while. So a tile only ever waits for tickets below its own, and tickets can be played through one after
the other: if r is when a block is handed over, and k the number of blocks met so far, a tile that begins at time s is
done with a block at ``step * k + max(s, max of r - step * k)``, the inner maximum over the blocks so far. That is the
longest path of DASH's graph of additions (arXiv 2601.21824), with as many CTAs as there are.

Heads of a section draw a ticket each, in turn. Those of one rank are played together: that a CTA could be through with
one of them and draw another is left out.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

_CANDIDATES = 16  # tiles that list scheduling chooses among
_ENOUGH_HEADS = 16  # a mask of fewer is played through several times, as for a batch


class Machine(NamedTuple):
    """Times in microseconds, for blocks of 64 queries and 128 keys at d = 128 on an H200."""

    ctas: int = 132
    section: int = 8  # heads that draw their tickets in turn
    tile: float = 4.0
    step: float = 2.1
    hand_over: float = 2.0
    steps_ahead: int = 2  # a CTA draws its next ticket when so many steps are left to it


H200 = Machine()


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

    def __init__(self, visible: Tensor, group: int = 1, machine: Machine = H200) -> None:
        """The pass of a mask.

        Args:
            visible: (batch, heads, blocks_q, blocks_k), bool, on the CPU.
            group: heads that share an order.
            machine: what runs it.

        Raises:
            ValueError: a machine of fewer CTAs than heads of a section.
        """
        if machine.ctas < machine.section:
            raise ValueError(f"machine: expected at least a CTA for each head of a section, got {machine}")
        self.machine = machine
        batch, heads, _, self.blocks_k = visible.shape
        self.columns = visible.flatten(0, 1).mT.contiguous()  # (sets, blocks_k, blocks_q)
        self.order_shape = (batch, heads // group, self.blocks_k)
        sets = list(range(batch * heads))
        self.sets = sets * max(1, -(-_ENOUGH_HEADS // max(len(sets), 1)))  # of each head
        self.orders = [s // group for s in self.sets]

    def play(self, order: Tensor, *, ordered: bool = True) -> Timeline:
        """With a launch order (batch, key heads, blocks_k); unordered if additions do not wait for their turns."""
        return _Play(self, ordered).run(order.flatten(0, 1).tolist(), choose=False)[1]

    def schedule(self, order: Tensor) -> tuple[Tensor, Timeline]:
        """A launch order found by list scheduling, and how it went.

        Whoever draws gets, of the next 16 tiles of the given order, the one that will wait the least.
        """
        found, timeline = _Play(self, True).run(order.flatten(0, 1).tolist(), choose=True)
        return torch.tensor(found, dtype=torch.int32).view(self.order_shape), timeline


class _Play:
    def __init__(self, work: Pass, ordered: bool) -> None:
        self.work, self.machine, self.ordered = work, work.machine, ordered
        self.timeline = Timeline([], [], [], [], [], [])
        # When a CTA can draw, when it is free to begin, and its number.
        self.ctas = [(0.0, 0.0, i) for i in range(work.machine.ctas)]

    def run(self, orders: list[list[int]], *, choose: bool) -> tuple[list[list[int]], Timeline]:
        found: list[list[int]] = [[] for _ in orders]
        num_heads, section = len(self.work.sets), self.machine.section
        for first in range(0, num_heads, section):
            heads = range(first, min(first + section, num_heads))
            self._section(heads, orders, found if choose else orders, choose)
        return found, self.timeline

    def _section(self, heads: range, orders: list[list[int]], found: list[list[int]], choose: bool) -> None:
        columns = self.work.columns[[self.work.sets[h] for h in heads]]
        handed_over = torch.full((len(heads), columns.shape[2]), -torch.inf)
        left = {o: list(orders[o]) for o in {self.work.orders[h] for h in heads} if choose and not found[o]}
        for rank in range(self.work.blocks_k):
            ctas = [heapq.heappop(self.ctas) for _ in heads]
            start = torch.tensor([free for _, free, _ in ctas]) + self.machine.tile
            for o, chosen in self._chosen(heads, columns, handed_over, start, left).items():
                found[o].append(chosen)
                left[o].remove(chosen)
            tiles = [found[self.work.orders[h]][rank] for h in heads]
            sees = columns[torch.arange(len(heads)), tiles]
            done, count = self._walk(sees, handed_over, start)
            handed_over = torch.where(sees, done + self.machine.hand_over, handed_over)
            self._finish(heads, tiles, ctas, start, sees, done, count)

    def _chosen(
        self, heads: range, columns: Tensor, handed_over: Tensor, start: Tensor, left: dict[int, list[int]]
    ) -> dict[int, int]:
        """Of each order that is to be found, the tile that makes its heads wait the least; the first one on ties."""
        if not left:
            return {}
        at_hand = {o: (tiles[:_CANDIDATES] * _CANDIDATES)[:_CANDIDATES] for o, tiles in left.items()}
        own = [i for i, h in enumerate(heads) if self.work.orders[h] in left]
        candidates = torch.tensor([at_hand[self.work.orders[heads[i]]] for i in own])
        sees = columns[torch.tensor(own)[:, None], candidates]  # (heads, candidates, blocks_q)
        done, count = self._walk(sees, handed_over[own, None], start[own, None])
        end = torch.where(sees, done, -torch.inf).amax(-1).maximum(start[own, None])
        waited = end - start[own, None] - self.machine.step * count[..., -1]
        places = {o: i for i, o in enumerate(left)}
        to = torch.tensor([places[self.work.orders[heads[i]]] for i in own])
        best = torch.zeros(len(left), _CANDIDATES).index_add_(0, to, waited).argmin(1).tolist()
        return {o: at_hand[o][best[places[o]]] for o in left}

    def _walk(self, sees: Tensor, handed_over: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """When tiles are done with each block of queries, and how many they have met: (..., blocks_q) each."""
        count = sees.cumsum(-1)
        taken = self.machine.step * count
        if not self.ordered:
            return start[..., None] + taken, count
        # A wait of a block comes before its addition, which ends the step.
        waits = torch.where(sees, handed_over - taken, -torch.inf).cummax(-1).values
        return taken + waits.maximum(start[..., None]), count

    def _finish(
        self,
        heads: range,
        tiles: list[int],
        ctas: list[tuple[float, float, int]],
        start: Tensor,
        sees: Tensor,
        done: Tensor,
        count: Tensor,
    ) -> None:
        before_last = sees & (count <= count[:, -1:] - self.machine.steps_ahead)
        ends, draws = (torch.where(x, done, -torch.inf).amax(-1).maximum(start) for x in (sees, before_last))
        waited = ends - start - self.machine.step * count[:, -1]
        rows = zip(heads, tiles, ctas, start.tolist(), ends.tolist(), draws.tolist(), waited.tolist(), strict=True)
        for head, n, (_, _, cta), begin, end, draw, wait in rows:
            heapq.heappush(self.ctas, (draw, end, cta))
            for told, value in zip(self.timeline, (head, n, cta, begin - self.machine.tile, end, wait), strict=True):
                told.append(value)  # type: ignore[attr-defined]
