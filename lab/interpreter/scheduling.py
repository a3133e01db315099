"""Schedules of CTAs, their warps and their engines, at random."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np

from lab.interpreter import tensor, tma, warpgroup, weak
from lab.interpreter.program import Program
from lab.interpreter.state import ALL, Array, Cluster, Cta, FaultError, Lagging, Launch, Name, Warp, converged

_MOST_ROUNDS = 100_000  # of warps and engines, in a launch: many times what any test takes
_MOST_IDLE = 1000  # rounds one after the other in which no warp does more than poll
_MOST_RESIDENT = 8  # clusters; others of a launch begin as these end
_MOST_BETWEEN_POLLS = 50  # instructions of a loop that does no more


_Place = tuple[int, Name]  # the rank of a CTA, and who of it


class _Schedule:
    """A cluster of CTAs that run a program."""

    def __init__(self, program: Program, cluster: Cluster, draw: random.Random, lagging: Lagging | None):
        """``lagging``: what goes on only when nothing else can; None: drawn, half of the time nothing."""
        self.code, self.ctas, self.draw = program.code, cluster.ctas, draw
        # By CTA and number: threads, who is there, and what they knew when they came.
        self.meetings: dict[tuple[int, int], tuple[int, list[Warp], list[Array]]] = {}
        self.warps = {
            (cta.rank, i): Warp(cta, i, program.num_registers) for cta in self.ctas for i in range(program.num_warps)
        }
        cluster.num_warps = len(self.warps)
        groups = [frozenset(range(first, first + 4)) for first in range(0, program.num_warps, 4)]
        multiplying = ("warpgroups",) if program.has_warpgroups else ("products", "arrivals")
        some: list[Lagging] = [*(frozenset({name}) for name in ("loads", "stores", *multiplying)), *groups]
        drawn = draw.choice((draw.choice(some), frozenset()))
        ranks = [[cta.rank] for cta in self.ctas] + [[cta.rank for cta in self.ctas]]
        slow = draw.choice(ranks) if lagging is None and len(self.ctas) > 1 else ranks[-1]  # one's, or those of all
        chosen = drawn if lagging is None else lagging
        self.lagging = {each if isinstance(each, tuple) else (rank, each) for rank in slow for each in chosen}
        # What each does, and what there is to do.
        self.engines: dict[_Place, tuple[Callable[[], None], Sized]] = {}
        for cta in self.ctas:
            for name, act, work in (
                ("loads", tma.load, cta.loads),
                ("stores", tma.store, cta.stores),
                ("products", self._some(tensor.advance, "products"), cta.products),
                ("warpgroups", self._some(warpgroup.advance, "warpgroups"), cta.warp_products),
                ("arrivals", tensor.arrive, cta.arrivals),
            ):
                self.engines[cta.rank, name] = functools.partial(act, cta), work

    def run(self) -> Iterator[bool]:
        """Until all warps have returned; others may come between. Says each time whether there was more than polling.

        Raises:
            FaultError: something that no GPU would do, or a deadlock.
        """
        eagerness = self.draw.choice((0.02, 0.1, 0.5, 0.9))  # of the engines
        pace = {place: self.draw.choice((1.0, 1.0, 0.01)) for place in self.warps}  # some warps lag far behind
        while not all(warp.is_done for warp in self.warps.values()):
            with np.errstate(all="ignore"):
                able = {place: warp for place, warp in self.warps.items() if self._can_go_on(warp)}
                busy = {place: run for place, (run, work) in self.engines.items() if len(work)}
                working = busy.keys() | {place for place, warp in able.items() if not warp.polls}
                behind = self.lagging if not self.lagging >= working else set()
                ready = [place for place in able if place not in behind]
                engines = [run for place, run in busy.items() if place not in behind]
                if engines and (not ready or self.draw.random() < eagerness):
                    self.draw.choice(engines)()
                elif ready:
                    # Who polls for what has come may be slow, but is not to be taken for waiting in vain.
                    (place,) = self.draw.choices(ready, [pace[place] if working else 1.0 for place in ready])
                    self._run(able[place], self.draw.choice((1, 5, 50, 400)))
                    if able[place].is_done:
                        self._end(able[place].cta)
                else:
                    waiting = {place: warp.waits_for for place, warp in self.warps.items() if not warp.is_done}
                    raise FaultError(f"deadlock: {waiting}")
            yield bool(working)

    def _end(self, cta: Cta) -> None:
        """Ends a CTA, if the last of its warps has returned."""
        if not all(warp.is_done for warp in self.warps.values() if warp.cta is cta):
            return
        if cta.columns:
            raise FaultError("tensor memory is not freed")
        if cta.issued:
            raise FaultError(f"a part of a warpgroup issues products: {cta.issued}")
        if cta.loads or cta.products or cta.warp_products or not all(store.is_read for store in cta.stores):
            raise FaultError("ends while copies are under way")
        known = np.maximum.reduce([warp.known for warp in self.warps.values() if warp.cta is cta])
        if any(barrier.committed > known[barrier.number] for barrier in cta.barriers.values()):
            raise FaultError("ends, while commits of the other CTA may still have to arrive")
        while cta.stores:
            tma.store(cta)
        while cta.arrivals:
            tensor.arrive(cta)
        for warp in self.warps.values():
            if warp.cta is cta:
                weak.release(warp)
        cta.is_over = True

    def _some(self, advance: Callable[[Cta, int], None], engine: str) -> Callable[[Cta], None]:
        """Advances an engine of products by one, if it lags, or by up to a number that is drawn."""
        return lambda cta: advance(cta, 1 if (cta.rank, engine) in self.lagging else self.draw.choice((1, 4, 16)))

    def _can_go_on(self, warp: Warp) -> bool:
        if warp.waits_for is not None:
            kind, what, number = warp.waits_for
            arrived = kind == "wait" and warp.cta.barriers[what].phase & 1 != number
            met = kind == "cluster" and warp.cta.cluster.phase > number
            granted = kind == "registers" and warp.get_registers(number)
            computed = kind == "products" and warpgroup.is_over(warp, number)
            copied = kind.startswith("is_") and warp.pending_groups(kind) <= number
            if arrived:
                warp.go_behind(what)
            if met:
                warp.learn(warp.cta.cluster.known)
            if arrived or met or granted or computed or copied:
                warp.waits_for = None
        return warp.waits_for is None and not warp.is_done

    def _run(self, warp: Warp, instructions: int) -> None:
        """Some instructions of a warp; of lanes at different places those that are furthest behind."""
        code = self.code
        place, lanes = self._furthest_behind(warp)
        counted, count = lanes, np.count_nonzero(lanes)
        for _ in range(instructions):
            text, kind, what, predicate = code[place]
            place += 1
            chosen = lanes if predicate is None else lanes & (warp.registers[predicate[0]] != predicate[1])
            if chosen is not counted:
                counted, count = chosen, np.count_nonzero(chosen)
            mask = None if count == len(chosen) else chosen
            if not count:
                pass
            elif kind in ("run", "poll") or (kind == "together" and (mask is None or not warp.places)):
                try:
                    what(warp, mask)
                except Exception as error:
                    raise FaultError(f"warp {warp.index}, {text}: {error}") from error
                if kind == "poll" or ("mbarrier.arrive" in text and (warp.cta.rank, warp.index) in self.lagging):
                    warp.polls = kind == "poll"
                    break  # another warp may be able to go on now
            elif kind == "branch":
                self._put(warp, what, chosen)
                if count < np.count_nonzero(lanes):
                    self._put(warp, place, lanes & ~chosen)
                place, lanes = self._furthest_behind(warp)
            elif kind == "return":
                warp.is_done = not warp.places
                return
            elif mask is not None and warp.places:  # others of the warp may come here by a longer way
                self._put(warp, place - 1, lanes)
                warp.held.add(place - 1)
                place, lanes = self._furthest_behind(warp)
            else:
                converged(mask)
                warp.polls = False
                self._wait(warp, kind, what)
                if warp.waits_for is not None:
                    break
            if warp.places and place >= min(warp.places):  # others are no longer ahead
                self._put(warp, place, lanes)
                place, lanes = self._furthest_behind(warp)
        else:
            warp.polls = warp.polls and instructions < _MOST_BETWEEN_POLLS
        self._put(warp, place, lanes)

    def _put(self, warp: Warp, place: int, lanes: Array) -> None:
        warp.places[place] = warp.places[place] | lanes if place in warp.places else lanes
        warp.held.discard(place)

    def _furthest_behind(self, warp: Warp) -> tuple[int, Array]:
        places = warp.places.keys() - warp.held
        if not places:
            raise FaultError("parts of a warp wait at different places")
        return min(places), warp.places.pop(min(places))

    def _wait(self, warp: Warp, kind: str, what: Any) -> None:
        if kind in ("registers", "products") or kind.startswith("is_"):
            warp.waits_for = (kind, 0, what)
            return
        if kind == "cluster":
            if warp.meeting is None:
                raise FaultError("waits at the cluster's barrier, where it has not arrived")
            warp.waits_for = (kind, 0, warp.meeting)
            warp.meeting = None
            return
        first, second = (int(read(warp)[0]) for read in what[:2])
        if kind != "arrive":
            warp.waits_for = (kind, first, second)
        if kind == "wait":
            warp.cta.barrier(first)
            what[2](warp, ALL, None)  # once it goes on, it need not try again
        else:
            self._meet(warp, first, second)

    def _meet(self, warp: Warp, barrier: int, num_threads: int) -> None:
        """Arrives at a barrier of the CTA, of so many threads."""
        weak.arrive(warp)
        number, together, known = self.meetings.setdefault((warp.cta.rank, barrier), (num_threads, [], []))
        if number != num_threads:
            raise FaultError(f"barrier {barrier} has different numbers of threads: {num_threads} by {warp.index}")
        if warp in together:
            raise FaultError(f"warp {warp.index} arrives twice at barrier {barrier}")
        warp.count_arrival()
        together.append(warp)
        known.append(warp.known)
        if 32 * len(together) == num_threads:
            del self.meetings[warp.cta.rank, barrier]
            for each in together:
                if each.waits_for == ("meet", barrier, num_threads):
                    each.waits_for = None
                    each.learn(np.maximum.reduce(known))


def run(
    program: Program,
    launch: Launch,
    memory: Array,
    draw: random.Random,
    lagging: Lagging | None = None,
    tensors: Sequence[slice] = (),
) -> None:
    """Runs all CTAs of a launch, by turns.

    Args:
        program: what they run.
        launch: how it is launched.
        memory: global memory, in bytes, which they change.
        draw: decides whose turn it is.
        lagging: those that go on only when nothing else of their cluster can, but for polling; None: drawn.
        tensors: where tensors are in global memory: a box of TMA is of one of them. None: anywhere.

    Raises:
        FaultError: something that no GPU would do, a deadlock, or a loop that does not seem to end.
    """
    _check_launch(program, launch)
    columns, rows, layers = launch.grid
    ctas_a_cluster = launch.cluster[0]

    def clusters() -> Iterator[Iterator[bool]]:
        firsts = range(0, columns, ctas_a_cluster)
        for z, y, first in itertools.product(range(layers), range(rows), firsts):
            cluster = Cluster()
            for rank in range(ctas_a_cluster):
                shared = np.full(launch.shared, 0xFF, np.uint8)
                index = first + rank, y, z
                cta = Cta(cluster, rank, index, launch.grid, launch.params, memory, tensors, shared, draw)
                cluster.ctas.append(cta)
            yield _Schedule(program, cluster, draw, lagging).run()

    waiting = clusters()
    resident = list(itertools.islice(waiting, _MOST_RESIDENT))
    rounds = idle = 0
    while resident:
        running = draw.choice(resident)
        for _ in range(draw.choice((1, 20, 400))):
            works = next(running, None)
            if works is None:
                resident.remove(running)
                resident += itertools.islice(waiting, 1)
                break
            rounds, idle = rounds + 1, 0 if works else idle + 1
            if not works:
                break
        if rounds > _MOST_ROUNDS or idle > _MOST_IDLE:
            raise FaultError("no end: some threads wait in a loop for what does not come")


def _check_launch(program: Program, launch: Launch) -> None:
    """Refuses what kernels are not written for, or CUDA does not launch."""
    ctas_a_cluster, *others = launch.cluster
    is_known = all(launch.grid) and not launch.grid[0] % ctas_a_cluster and {1} == {*others}
    if not is_known or launch.block != (32 * program.num_warps, 1, 1):
        raise FaultError(f"a launch of {launch.grid} CTAs of {launch.block} threads, in clusters of {launch.cluster}")
