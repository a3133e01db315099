"""Copies of 16 bytes a thread to shared memory (``cp.async``): instructions, and what the engine of loads does."""

from dataclasses import dataclass

import numpy as np

from lab.interpreter import memory
from lab.interpreter.state import GLOBAL, Array, Copy, Cta, Effect, FaultError, Mask, Warp, lanes_of
from lab.interpreter.statement import Statement


@dataclass(kw_only=True, eq=False)
class Lines(Copy):
    """Copy of 16 bytes by each of some threads, which signal its end themselves."""

    whole: Array  # where in global memory, by lanes
    shared: Array  # and in the CTA's shared memory
    lanes: Array

    def load(self, cta: Cta) -> None:
        """Copies from global memory; TMA and tensor cores see it behind a fence of the thread, as if it had stored."""
        of_line = np.arange(16)
        places = self.shared[:, None] + of_line
        cta.shared[places[self.lanes]] = cta.memory[(self.whole[:, None] + of_line)[self.lanes]]
        memory.show_later(self.warp, cta.shared, places, self.lanes)

    def signal(self, cta: Cta) -> None:
        """Leaves the barrier as it is: its threads arrive themselves."""


@dataclass(kw_only=True, eq=False)
class LinesEnd(Copy):
    """Arrivals of some threads when the lines that their warp has asked for are there."""

    lines: list[Lines]
    count: int

    def load(self, cta: Cta) -> None:
        """Copies what is not there yet."""
        for line in self.lines:
            if line in cta.loads:
                cta.loads.remove(line)
                line.load(cta)

    def signal(self, cta: Cta) -> None:
        """Arrives at the barrier for all of the threads."""
        cta.barrier(self.barrier).arrive(self.known, self.count)


def copy(s: Statement) -> Effect:
    """Asks for 16 bytes a thread, from global to shared memory."""
    shared, whole = s.address(s.operands[0]), s.address(s.operands[1], "u64")
    if s.operands[2].number != 16 or len(s.operands) > 3:
        raise FaultError(f"a copy of other lines: {s.name}")

    def ask(warp: Warp, mask: Mask) -> None:
        lanes = lanes_of(mask)
        places = []
        for at, space in (
            (whole(warp) - GLOBAL, warp.cta.memory),
            (shared(warp) - warp.cta.first_shared, warp.cta.shared),
        ):
            if ((at[lanes] < 0) | (at[lanes] + 16 > len(space)) | (at[lanes] % 16 != 0)).any():
                raise FaultError(f"{s.name} at {at}")
            places.append(np.where(lanes, at, 0))
        warp.cta.loads.append(Lines(warp=warp, whole=places[0], shared=places[1], lanes=lanes, barrier=0))

    return ask


def arrive_behind(s: Statement) -> Effect:
    """An arrival of each thread, when its lines so far are there."""
    barrier = s.address(s.operands[0])

    def ask(warp: Warp, mask: Mask) -> None:
        places = barrier(warp)[lanes_of(mask)]
        if (places != places[0]).any():
            raise FaultError(f"arrivals at several mbarriers: {places}")
        warp.cta.barrier(int(places[0]))
        lines = [x for x in warp.cta.loads if isinstance(x, Lines) and x.warp is warp]
        warp.cta.loads.append(LinesEnd(warp=warp, lines=lines, count=len(places), barrier=int(places[0])))

    return ask
