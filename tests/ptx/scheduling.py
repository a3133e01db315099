"""Whose turn it is: CTAs, their warps and their engines, at random."""

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from tests.ptx import tensor, tma
from tests.ptx.program import Program
from tests.ptx.state import ALL, Array, Cta, FaultError, Lagging, Warp, converged

_MOST_ROUNDS = 100_000  # of warps and engines, in a launch: many times what any test takes


class _Schedule:
    """A CTA that runs a program."""

    def __init__(self, program: Program, cta: Cta, lagging: Lagging | None):
        """``lagging``: who goes on only when nobody else can; None: drawn, half of the time nobody."""
        self.code, self.cta, self.draw = program.code, cta, cta.draw
        self.meetings: dict[int, list[Warp]] = {}
        self.warps = [Warp(cta, i) for i in range(program.num_warps)]
        groups = [frozenset(range(first, first + 4)) for first in range(0, program.num_warps, 4)]
        some: list[Lagging] = [*(frozenset({name}) for name in ("loads", "stores", "products")), *groups]
        drawn = self.draw.choice((self.draw.choice(some), frozenset()))
        self.lagging = drawn if lagging is None else lagging
        # What each does, and what there is to do.
        self.engines: dict[str, tuple[Callable[[], None], Sized]] = {
            "loads": (functools.partial(tma.load, cta), cta.loads),
            "stores": (functools.partial(tma.store, cta), cta.stores),
            "products": (self._advance_products, cta.products),
        }

    def run(self) -> Iterator[None]:
        """Until all warps have returned; others may come between.

        Raises:
            FaultError: something that no GPU would do, or a deadlock.
        """
        eagerness = self.draw.choice((0.02, 0.1, 0.5, 0.9))  # of the engines
        pace = [self.draw.choice((1.0, 1.0, 0.01)) for _ in self.warps]  # some warps lag far behind
        while not all(warp.is_done for warp in self.warps):
            with np.errstate(all="ignore"):
                able = {warp.index: warp for warp in self.warps if self._can_go_on(warp)}
                busy = {name: run for name, (run, work) in self.engines.items() if len(work)}
                behind = self.lagging if not self.lagging >= able.keys() | busy.keys() else frozenset()
                ready = [warp for index, warp in able.items() if index not in behind]
                engines = [run for name, run in busy.items() if name not in behind]
                if engines and (not ready or self.draw.random() < eagerness):
                    self.draw.choice(engines)()
                elif ready:
                    (warp,) = self.draw.choices(ready, [pace[warp.index] for warp in ready])
                    self._run(warp, self.draw.choice((1, 5, 50, 400)))
                else:
                    waiting = {warp.index: warp.waits_for for warp in self.warps if not warp.is_done}
                    raise FaultError(f"deadlock: {waiting}")
            yield
        if self.cta.columns:
            raise FaultError("tensor memory is not freed")
        if self.cta.loads or self.cta.products or not all(store.is_read for store in self.cta.stores):
            raise FaultError("ends while copies are under way")
        while self.cta.stores:
            tma.store(self.cta)

    def _advance_products(self) -> None:
        tensor.advance(self.cta, 1 if "products" in self.lagging else self.draw.choice((1, 4, 16)))

    def _can_go_on(self, warp: Warp) -> bool:
        if warp.waits_for is not None:
            kind, what, number = warp.waits_for
            arrived = kind == "wait" and self.cta.barriers[what].phase & 1 != number
            if arrived or (kind.startswith("is_") and warp.pending_groups(kind) <= number):
                warp.waits_for = None
        return warp.waits_for is None and not warp.is_done

    def _run(self, warp: Warp, instructions: int) -> None:
        """Some instructions of a warp; of lanes at different places those that are furthest behind."""
        code = self.code
        place, lanes = self._furthest_behind(warp)
        for _ in range(instructions):
            text, kind, what, predicate = code[place]
            place += 1
            chosen = lanes if predicate is None else lanes & (warp.registers[predicate[0]] != predicate[1])
            count = np.count_nonzero(chosen)
            mask = None if count == len(chosen) else chosen
            if not count:
                pass
            elif kind in ("run", "poll"):
                try:
                    what(warp, mask)
                except Exception as error:
                    raise FaultError(f"warp {warp.index}, {text}: {error}") from error
                if kind == "poll" or ("mbarrier.arrive" in text and warp.index in self.lagging):
                    break  # somebody else may be able to go on now
            elif kind == "branch":
                self._put(warp, what, chosen)
                if count < np.count_nonzero(lanes):
                    self._put(warp, place, lanes & ~chosen)
                place, lanes = self._furthest_behind(warp)
            elif kind == "return":
                warp.is_done = not warp.places
                return
            else:
                converged(mask)
                self._wait(warp, kind, what)
                if warp.waits_for is not None:
                    break
            if warp.places and place >= min(warp.places):  # others are no longer ahead
                self._put(warp, place, lanes)
                place, lanes = self._furthest_behind(warp)
        self._put(warp, place, lanes)

    def _furthest_behind(self, warp: Warp) -> tuple[int, Array]:
        place = min(warp.places)
        return place, warp.places.pop(place)

    def _put(self, warp: Warp, place: int, lanes: Array) -> None:
        warp.places[place] = warp.places[place] | lanes if place in warp.places else lanes

    def _wait(self, warp: Warp, kind: str, what: Any) -> None:
        if kind.startswith("is_"):
            warp.waits_for = (kind, 0, what)
            return
        first, second = (int(read(warp)[0]) for read in what[:2])
        warp.waits_for = (kind, first, second)
        if kind == "wait":
            self.cta.barrier(first)
            what[2](warp, ALL, None)  # once it goes on, it need not try again
            return
        together = self.meetings.setdefault(first, [])
        if any(each.waits_for != warp.waits_for for each in together):
            raise FaultError(f"barrier {first} is awaited by different numbers of threads: {second} by {warp.index}")
        together.append(warp)
        if 32 * len(together) == second:
            for each in self.meetings.pop(first):
                each.waits_for = None


def run(
    program: Program,
    params: Sequence[bytes],
    memory: Array,
    tensors: Mapping[int, tma.Rows],
    num_ctas: int,
    draw: random.Random,
    bytes_shared: int,
    lagging: Lagging | None = None,
) -> None:
    """Runs all CTAs of a launch, by turns.

    Args:
        program: what they run.
        params: of the kernel.
        memory: global memory, in bytes, which they change.
        tensors: of the parameters that are descriptors of TMA, by their numbers.
        num_ctas: how many.
        draw: decides whose turn it is.
        bytes_shared: shared memory of a CTA.
        lagging: those that go on only when nobody else of their CTA can; None: drawn. Nobody may where warps wait in
            loops for what others write into global memory.

    Raises:
        FaultError: something that no GPU would do, a deadlock, or a loop that does not seem to end.
    """
    ctas = []
    for index in range(num_ctas):
        shared = np.full(bytes_shared, 0xFF, np.uint8)
        ctas.append(_Schedule(program, Cta(index, num_ctas, params, memory, shared, tensors, draw), lagging).run())
    count = 0
    while ctas:
        cta = draw.choice(ctas)
        for _ in range(draw.choice((1, 20, 400))):
            count += 1
            if next(cta, cta) is cta:
                ctas.remove(cta)
                break
        if count > _MOST_ROUNDS:
            raise FaultError("no end: some threads wait in a loop for what does not come")
