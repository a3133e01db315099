"""Discrete events: processes that take clocks of units, and wait at barriers.

A process is a generator. It yields a number of clocks to let pass, or a ``Phase`` of a barrier to wait for. Units serve
processes in the order of asking; work is cut into pieces, so that those who work at the same time share a unit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

_PIECE = 64.0  # clocks of a unit that no other process gets in between
_PIECES_AHEAD = 3  # of products, whose operands are read


class Interval(NamedTuple):
    """When a process used a unit: from ``start`` to ``end``, in clocks."""

    who: str
    what: str
    start: float
    end: float


class Phase(NamedTuple):
    """The ``number``-th time that all arrivals at a barrier have come; number 0 is over when the kernel starts."""

    barrier: Barrier
    number: int


Needs: TypeAlias = Generator[float | Phase, None, None]


class DeadlockError(Exception):
    """Nothing will happen any more, and processes wait."""


class Unit:
    """Part of an SM that serves one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.free = 0.0  # from then on
        self.busy: list[Interval] = []

    def take(self, now: float, clocks: float, who: str, what: str) -> float:
        """Reserves the unit for so many clocks, behind all who have asked before; returns when they are over."""
        start = max(now, self.free)
        self.free = start + clocks
        if clocks:
            last = self.busy[-1] if self.busy else None
            if last and last.end == start and last.who == who and last.what == what:
                self.busy[-1] = Interval(who, what, last.start, self.free)
            else:
                self.busy.append(Interval(who, what, start, self.free))
        return self.free

    def clocks(self, start: float, end: float) -> float:
        """For how many clocks between two times it was busy."""
        return math.fsum(max(0.0, min(end, i.end) - max(start, i.start)) for i in self.busy)


class Barrier:
    """An mbarrier: a phase ends when as many have arrived as it was made for."""

    def __init__(self, simulation: Simulation, arrivals: int, name: str = "") -> None:
        self.name = name
        self._simulation = simulation
        self._arrivals = arrivals
        self._arrived = 0
        self.waiting: list[tuple[int, _Process]] = []

    @property
    def phases(self) -> int:
        """Number of phases that have ended."""
        return self._arrived // self._arrivals

    def arrive(self) -> None:
        """Counts one arrival, now."""
        self._arrived += 1
        woken = [process for number, process in self.waiting if number <= self.phases]
        self.waiting = [x for x in self.waiting if x[0] > self.phases]
        for process in woken:
            self._simulation.resume(process)

    def phase(self, number: int = 1) -> Phase:
        """To be yielded by a process that waits for it."""
        return Phase(self, number)


class Ring:
    """Stages of memory in turn, as the kernels' ``Ring``: a full and an empty barrier each; steps count on."""

    def __init__(
        self, simulation: Simulation, name: str, stages: int, *, full: int = 1, empty: int = 1, num_bytes: int = 0
    ) -> None:
        self.num_bytes = num_bytes  # that TMA brings to a stage
        self._full = [Barrier(simulation, full, f"{name} full") for _ in range(stages)]
        self._empty = [Barrier(simulation, empty, f"{name} empty") for _ in range(stages)]
        self._stages = stages

    def wait_full(self, step: int) -> Phase:
        """Until what belongs to this step is there."""
        return self._full[step % self._stages].phase(step // self._stages + 1)

    def wait_empty(self, step: int) -> Phase:
        """Until the stage is free for this step."""
        return self._empty[step % self._stages].phase(step // self._stages)

    def arrive(self, step: int) -> None:
        """One of those that fill it has done so."""
        self._full[step % self._stages].arrive()

    def release(self, step: int) -> None:
        """One of those that empty it has done so."""
        self._empty[step % self._stages].arrive()


class _Process(NamedTuple):
    name: str
    needs: Needs


class Simulation:
    """Time, in clocks, and the processes.

    Args:
        wake: clocks from the last arrival at a barrier until who waits for it goes on.
    """

    def __init__(self, wake: float = 0.0) -> None:
        self.now = 0.0
        self._wake = wake
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()  # events of the same time happen in the order in which they were announced
        self._waited_at: set[Barrier] = set()
        self._unfinished = 0

    def barrier(self, arrivals: int, name: str = "") -> Barrier:
        """Makes a barrier."""
        return Barrier(self, arrivals, name)

    def start(self, name: str, needs: Needs) -> None:
        """Begins a process, now."""
        self._unfinished += 1
        process = _Process(name, needs)
        self.after(0.0, lambda: self._go_on(process))

    def after(self, clocks: float, happen: Callable[[], None]) -> None:
        """Has something happen so many clocks from now."""
        heapq.heappush(self._events, (self.now + clocks, next(self._count), happen))

    def resume(self, process: _Process) -> None:
        """Lets a process go on whose barrier's phase is over."""
        self.after(self._wake, lambda: self._go_on(process))

    def run(self) -> float:
        """Until nothing happens any more; returns the time.

        Raises:
            DeadlockError: processes wait for barriers at which none will arrive; it says who, and where.
        """
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        if self._unfinished:
            stuck = sorted({f"{p.name} at {b.name}" for b in self._waited_at for _, p in b.waiting})
            raise DeadlockError("; ".join(stuck))
        return self.now

    def work(self, who: str, what: str, units: Mapping[Unit, float], least: float = 0.0) -> Needs:
        """Takes clocks of units at the same time, piece by piece, and at least so many clocks in all."""
        begin = self.now
        pieces = max(1, round(max(units.values(), default=0.0) / _PIECE))
        shares = [(unit, clocks / pieces) for unit, clocks in units.items()]
        for _ in range(pieces):
            now = self.now
            yield max([unit.take(now, clocks, who, what) for unit, clocks in shares]) - now
        if self.now < begin + least:
            yield begin + least - self.now

    def _go_on(self, process: _Process) -> None:
        for need in process.needs:
            if isinstance(need, Phase):
                if need.barrier.phases < need.number:
                    need.barrier.waiting.append((need.number, process))
                    self._waited_at.add(need.barrier)
                    return
            else:
                return self.after(need, lambda: self._go_on(process))
        self._unfinished -= 1


@dataclass
class _Piece:
    who: str
    what: str
    clocks: float
    operands: float
    then: Sequence[Callable[[], None]]  # when it is done
    ready: float | None = None  # when its operands have been read, if that has begun


class Products:
    """Products of matrices, which the tensor cores compute in the order in which they are issued, by whatever role.

    While a piece is computed, the operands of the next ones are read from shared memory. Who waits for a product learns
    of its end ``latency`` clocks later, when the tensor cores already compute the next.
    """

    def __init__(self, simulation: Simulation, tensor: Unit, shared: Unit, latency: float) -> None:
        self._simulation = simulation
        self._tensor = tensor
        self._shared = shared
        self._latency = latency
        self._pieces: deque[_Piece] = deque()
        self._running = False

    def issue(
        self, who: str, what: str, clocks: float, operands: float, then: Iterable[Callable[[], None]] = ()
    ) -> Phase:
        """Queues a product.

        Args:
            who: issues it.
            what: its name.
            clocks: of the tensor cores.
            operands: clocks of shared memory, to read them.
            then: what happens when it is done, as arrivals of a commit.

        Returns:
            its end, to be yielded by who waits for it.
        """
        done = self._simulation.barrier(1, f"product {what} of {who}")
        num = max(1, round(clocks / _PIECE))
        for i in range(num):
            last = (done.arrive, *then) if i + 1 == num else ()
            self._pieces.append(_Piece(who, what, clocks / num, operands / num, last))
        if not self._running:
            self._running = True
            self._simulation.start("tensor cores", self._run())
        return done.phase()

    def _run(self) -> Needs:
        while self._pieces:
            for piece in itertools.islice(self._pieces, _PIECES_AHEAD):
                if piece.ready is None:
                    piece.ready = self._shared.take(self._simulation.now, piece.operands, piece.who, piece.what)
            piece = self._pieces.popleft()
            assert piece.ready is not None
            yield max(0.0, piece.ready - self._simulation.now)
            yield self._tensor.take(self._simulation.now, piece.clocks, piece.who, piece.what) - self._simulation.now
            for happen in piece.then:
                self._simulation.after(self._latency, happen)
        self._running = False
