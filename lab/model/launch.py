"""From a CTA to a pass: tiles over SMs in the order of their numbers, turns of additions, and what memory takes."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.model.machine import Machine
from lab.model.sm import Maker, Sm, TileWork

START_CTA = 1500.0  # assumed: clocks from the end of a CTA to the first load of the next
LAUNCH = 3e-6  # seconds between kernels: benchmarks/notes/backward.md


@dataclass(frozen=True)
class Shape:
    """A batch of sequences, queries as many as keys; all pairs are visible, or those that its masks leave."""

    batch: int
    seqlen: int
    heads: int
    d: int
    d_v: int
    causal: bool = False
    backward: bool = False
    window: int | None = None  # keys that a query sees, itself the last of them; only if causal

    @property
    def flop(self) -> float:
        """FLOP of visible pairs: two products forward, five backward."""
        hidden = 0 if self.window is None else max(0, self.seqlen - self.window)
        triangles = [rows * (rows + 1) / 2 for rows in (self.seqlen, hidden)]
        pairs = triangles[0] - triangles[1] if self.causal else float(self.seqlen) ** 2
        columns = 3 * self.d + 2 * self.d_v if self.backward else self.d + self.d_v
        return 2.0 * self.batch * self.heads * pairs * columns

    @property
    def rows(self) -> int:
        """Rows of all heads."""
        return self.batch * self.heads * self.seqlen


class Order(NamedTuple):
    """How tiles are numbered: as ``kernels.common.tiles.Order``."""

    heads_together: int
    last_first: bool
    sections: int | None = None  # all heads behind those are one section,
    reverses_last: bool = False  # which goes the other way round


class Tile(NamedTuple):
    """Blocks of a head that a tile iterates over, in order, and how many of them need a mask."""

    head: int
    blocks: range
    masked: int


def tiles_of(shape: Shape, rows: int, columns: int, order: Order) -> Iterator[Tile]:
    """All tiles of a pass, in the order in which they are taken."""
    heads, num = shape.batch * shape.heads, -(-shape.seqlen // rows)
    first = 0
    while first < heads:
        is_last = order.sections is not None and first // order.heads_together >= order.sections
        together = heads - first if is_last else min(order.heads_together, heads - first)
        reverses = is_last and order.reverses_last
        for i in range(num):
            n = num - 1 - i if order.last_first != reverses else i
            for head in range(first, first + together):
                yield Tile(head, *_blocks_of(shape, rows, columns, n, reverses))
        first += together


def _blocks_of(shape: Shape, rows: int, columns: int, n: int, reverses: bool) -> tuple[range, int]:
    """Blocks that the n-th tile of a head sees: keys from the last on, or queries from the first on."""
    num = -(-shape.seqlen // columns)
    at_an_edge = -(-rows // columns)
    if not shape.causal:
        blocks, masked = range(num), 0
    elif shape.window is not None:
        first, last = n * rows, min((n + 1) * rows, shape.seqlen) - 1
        first, last = (first, last + shape.window - 1) if shape.backward else (first - shape.window + 1, last)
        blocks, masked = range(max(0, first) // columns, min(num, last // columns + 1)), 2 * at_an_edge
    elif shape.backward:
        blocks, masked = range(n * rows // columns, num), at_an_edge
    else:
        blocks, masked = range(min(num, -(-(n + 1) * rows // columns))), at_an_edge
    return (blocks[::-1] if reverses else blocks), min(masked, len(blocks))


class Cost(NamedTuple):
    """Clocks of a CTA."""

    start: float  # once
    tile: float  # a tile
    step: float  # a block


@cache
def cost_of(make: Maker, masked: int = 0) -> Cost:
    """Time of a tile and of a step, from simulations of a few tiles.

    A CTA that has but one tile costs what it takes to start another one, too: ``START_CTA``.
    """
    short, long = 6, 14
    if not make().persistent:
        one, other = (make().run([TileWork(n, masked)]).simulation.now for n in (short, long))
        step = (other - one) / (long - short)
        return Cost(0.0, one - short * step + START_CTA, step)
    took = {(n, k): make().run([TileWork(n, masked)] * k).simulation.now for n in (short, long) for k in (2, 4)}
    one, other = ((took[n, 4] - took[n, 2]) / 2 for n in (short, long))
    step = (other - one) / (long - short)
    tile = one - short * step
    return Cost(START_CTA + took[short, 2] - 2 * one, tile, step)


class Schedule(NamedTuple):
    """How tiles went, in clocks: when the last one was done, and how long SMs waited for turns on the mean."""

    end: float
    waited: float


def schedule(tiles: Sequence[Tile], workers: int, cost: Cost, hand_over: float | None = None) -> Schedule:
    """Gives the next tile to the worker that is free first.

    With ``hand_over`` the additions of tiles to a block have the order of the tiles: one may add when the one before
    has added, and so many clocks have passed.
    """
    free = [cost.start] * workers
    handed: dict[int, NDArray[np.float64]] = {}
    most = 1 + max(max(tile.blocks[0], tile.blocks[-1]) for tile in tiles)
    waited = 0.0
    for tile in tiles:
        start, all_steps = heapq.heappop(free) + cost.tile, cost.step * len(tile.blocks)
        end = start + all_steps
        if hand_over is not None:
            took = cost.step * np.arange(1, len(tile.blocks) + 1)
            ready = handed.setdefault(tile.head, np.zeros(most))
            begin, stop, stride = tile.blocks.start, tile.blocks.stop, tile.blocks.step
            where = slice(begin, stop if stop >= 0 else None, stride)
            done = took + np.maximum(start, np.maximum.accumulate(ready[where] - took))
            ready[where] = done + hand_over
            end = float(done[-1])
        heapq.heappush(free, end)
        waited += end - start - all_steps
    return Schedule(max(free), waited / workers)


class Prediction(NamedTuple):
    """Prediction of a pass."""

    flop: float
    clocks: float  # of the main kernel
    memory: float  # seconds, of kernels that only move bytes, and of launches
    step: float  # clocks of a block in the steady state
    busy: dict[str, float]  # share of those clocks in which each unit is busy
    tensor: float  # share of all clocks in which the tensor cores are busy, also with what a mask hides

    def seconds(self, ghz: float) -> float:
        """Seconds at a clock rate."""
        return self.clocks / (ghz * 1e9) + self.memory

    def tflops(self, ghz: float) -> float:
        """FLOP of visible pairs a second, / 1e12."""
        return self.flop / self.seconds(ghz) / 1e12

    @property
    def bound(self) -> str:
        """The unit that is busiest."""
        return max(self.busy, key=lambda name: self.busy[name])


def steady_state(make: Maker) -> tuple[Sm, float, float]:
    """A long mainloop, and the clocks of its steady state; in two passes, three tiles and one of them."""
    kernel = make()
    if kernel.num_passes == 2:
        sm = kernel.run([TileWork(48)] * 3)
        return sm, sm.simulation.now / 3, sm.simulation.now * 2 / 3
    sm = kernel.run([TileWork(24)])
    return sm, 0.4 * sm.simulation.now, 0.8 * sm.simulation.now


@cache
def busy_of(make: Maker) -> dict[str, float]:
    """The share of the steady state in which each unit is busy."""
    sm, start, end = steady_state(make)
    return {unit.name: unit.clocks(start, end) / (end - start) for unit in sm.units}


def predict(
    shape: Shape,
    machine: Machine,
    make: Maker,
    order: Order,
    *,
    hand_over: float | None = None,
    memory: float = 0.0,
    launches: int = 1,
) -> Prediction:
    """A pass of one kernel, and of others before and behind it that only move bytes.

    Args:
        shape: what is computed.
        machine: the GPU.
        make: a new CTA of the kernel, to simulate.
        order: of tiles.
        hand_over: clocks, if additions have an order.
        memory: bytes that other kernels read and write.
        launches: of kernels.
    """
    kernel = make()
    tiles = list(tiles_of(shape, kernel.rows, kernel.columns, order))
    cost = cost_of(make, masked=max(tile.masked for tile in tiles))
    went = schedule(tiles, machine.sms // kernel.ctas, cost, hand_over)
    busy = busy_of(make)
    # Of the L2 cache all SMs together get less than each alone.
    reads, additions = busy["L2 reads"] * machine.l2, busy["L2 additions"] * machine.adds
    crowd = max(1.0, reads / machine.l2_together, additions / machine.adds_together)
    steps = sum(len(tile.blocks) for tile in tiles) / (machine.sms // kernel.ctas)
    seconds = memory / machine.dram + launches * LAUNCH
    return Prediction(
        flop=shape.flop,
        clocks=went.end * crowd,
        memory=seconds,
        step=cost.step * crowd,
        busy=busy,
        tensor=busy["tensor cores"] * cost.step * steps / (went.end * crowd),
    )
