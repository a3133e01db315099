"""A model of CTAs that draw tiles and add to shared sums by turns, event by event.

It knows nothing of attention: a tile is a list of additions, each a step of work, a turn to wait for, and a turn to
signal.
"""

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor


class Addition(NamedTuple):
    """One tile's part of a sum."""

    to: Hashable
    turn: int  # how many additions to it come before


@dataclass(frozen=True)
class Machine:
    """CTAs that run the tiles. Times are in microseconds; ``vary`` draws a duration around one of them."""

    num_ctas: int
    steps_ahead: float = 2.0  # a CTA draws its next ticket when so many steps are left to it,
    tickets_ahead: int = 1  # unless it has so many that it has not begun
    tile: float = 4.0  # once a tile
    step: float = 2.1  # before every addition
    signal: float = 2.0  # from an addition until the next turn sees it
    vary: Callable[[float], float] = float


class DeadlockError(Exception):
    """Nothing will happen any more, and tiles are left."""


class Run(NamedTuple):
    """Result of a simulated pass."""

    makespan: float
    added: dict[Hashable, list[int]]  # to every sum: the tickets, in the order in which they were added


def simulate(tiles: Sequence[Sequence[Addition]], machine: Machine) -> Run:
    """Runs the tiles, whose tickets are their positions.

    Raises:
        DeadlockError: some tile waits for a turn that never comes.
    """
    return _Simulation(tiles, machine).run()


class _Simulation:
    def __init__(self, tiles: Sequence[Sequence[Addition]], machine: Machine):
        self.tiles = tiles
        self.machine = machine
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()  # events of the same time happen in the order in which they were announced
        self.next_ticket = 0
        self.finished = 0
        self.turns: defaultdict[Hashable, int] = defaultdict(int)
        self.waiting: dict[Addition, Iterator[float | Addition]] = {}
        self.added: defaultdict[Hashable, list[int]] = defaultdict(list)

    def run(self) -> Run:
        for _ in range(self.machine.num_ctas):
            self.after(0.0, partial(self.go_on, self.cta()))
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        if self.finished < len(self.tiles):
            waits = ", ".join(f"{to}: turn {turn} at {self.turns[to]}" for to, turn in self.waiting)
            raise DeadlockError(f"{self.finished} of {len(self.tiles)} tiles finished; {waits}")
        return Run(self.now, dict(self.added))

    def after(self, mean: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + self.machine.vary(mean), next(self.count), happen))

    def go_on(self, cta: Iterator[float | Addition]) -> None:
        """Lets a CTA work until it needs time, or a turn that has not come."""
        for need in cta:
            if isinstance(need, float):
                self.after(need, partial(self.go_on, cta))
                break
            if need.turn != self.turns[need.to]:
                self.waiting[need] = cta
                break

    def signal(self, to: Hashable) -> None:
        self.turns[to] += 1
        cta = self.waiting.pop(Addition(to, self.turns[to]), None)
        if cta is not None:
            self.go_on(cta)

    def cta(self) -> Iterator[float | Addition]:
        """Yields the needs of a CTA, one after the other: a duration, or its turn."""
        machine, tiles = self.machine, self.tiles
        held: deque[int] = deque()
        while held or self.next_ticket < len(tiles):
            ticket = held.popleft() if held else self.draw()
            yield machine.tile
            for step, addition in enumerate(tiles[ticket]):
                left = len(tiles[ticket]) - step + sum(len(tiles[other]) for other in held)
                while (
                    left <= machine.steps_ahead and len(held) < machine.tickets_ahead and self.next_ticket < len(tiles)
                ):
                    held.append(self.draw())
                    left += len(tiles[held[-1]])
                yield machine.step
                yield addition
                self.added[addition.to].append(ticket)
                self.after(machine.signal, partial(self.signal, addition.to))
            self.finished += 1

    def draw(self) -> int:
        self.next_ticket += 1
        return self.next_ticket - 1


def backward(
    turns: Tensor,
    launch: Tensor,
    *,
    group: int = 1,
    section: int = 1,
    m_blocks: Sequence[int] | None = None,
    m_block_order: Tensor | None = None,
) -> list[list[Addition]]:
    """The tiles that a kernel draws.

    Args:
        turns: (heads, blocks_q, blocks_k).
        launch: (heads, blocks_k).
        group: query heads of a key head; more than one add to dK and dV.
        section: so many heads, one after the other, draw each their next tile; then all of the next section.
        m_blocks: query blocks in the order in which a tile takes them; None: ascending.
        m_block_order: (heads, blocks_q, blocks_k), positions of query blocks in the order of each tile; replaces
            ``m_blocks``.
    """
    heads, blocks_q, blocks_k = turns.shape
    table, order = turns.tolist(), launch.tolist()
    tickets = [
        (head, order[head][rank])
        for first in range(0, heads, section)
        for rank in range(blocks_k)
        for head in range(first, min(first + section, heads))
    ]
    tiles = []
    positions = None if m_block_order is None else m_block_order.tolist()
    for head, n in tickets:
        of_tile = range(blocks_q) if m_blocks is None else m_blocks
        if positions is not None:
            of_tile = sorted(of_tile, key=lambda m: positions[head][m][n])
        additions = [Addition(("dQ", head, m), table[head][m][n]) for m in of_tile if table[head][m][n] >= 0]
        if group > 1:
            additions.append(Addition(("dKV", head // group, n), head % group))
        tiles.append(additions)
    return tiles


def uneven(rng: random.Random) -> Callable[[float], float]:
    """Durations between nothing and thirty times the mean."""
    return lambda mean: mean * rng.choice((0.0, rng.random(), 30 * rng.random()))
