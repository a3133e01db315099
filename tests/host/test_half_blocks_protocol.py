"""Barriers of the forward kernel of half blocks on a model: its warps end, whatever steps they have and however late.

The model has mbarriers, of which a waiter sees the phase's parity alone, and warps that run on in any order. Products
are done when all warps of a warpgroup have issued them. It follows ``forward_half_blocks`` line by line, in the order
of its waits and arrivals; how half blocks are paired is left out, as any order of steps has to end.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from flash_attn_cute.kernels.sm90.forward_half_blocks_schedule import MESSAGES

TILE_STAGES, WARPS = 2, 2  # WARPS of a warpgroup: two may decide differently, as four do
FIRST, SECOND, BOTH = 1, 2, 3  # warpgroups that have a step, as bits
END = -1

Agent = Iterator[Callable[[], bool]]  # yields what it waits for


class Barrier:
    """An mbarrier: a phase is over when so many have arrived; waits ask for its parity."""

    def __init__(self, count: int):
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self, times: int = 1) -> None:
        for _ in range(times):
            self.pending -= 1
            if not self.pending:
                self.pending, self.phase = self.count, self.phase + 1

    def passed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase % 2 != parity


class Stages:
    """Full and empty barriers, and what a stage holds."""

    def __init__(self, num: int, full: int, empty: int):
        self.num = num
        self.full, self.empty = ([Barrier(count) for _ in range(num)] for count in (full, empty))
        self.holds: list[object] = [None] * num

    def is_full(self, n: int) -> Callable[[], bool]:
        return self.full[n % self.num].passed(n // self.num % 2)

    def is_empty(self, n: int) -> Callable[[], bool]:
        return self.empty[n % self.num].passed(n // self.num % 2 ^ 1)


class Cta:
    """Rings of a CTA, and its roles as agents.

    Args:
        tiles: kinds of the steps of each tile.
        stages: of K and V.
        rng: of the order in which agents run.
        early: whether V is released before a wait for a step that is late.
    """

    def __init__(self, tiles: list[list[int]], stages: int, rng: random.Random, early: bool = True):
        self.tiles, self.stages, self.rng, self.early = tiles, stages, rng, early
        consumers = 2 * WARPS
        self.tile_ring, self.q = Stages(TILE_STAGES, 1, consumers), Stages(1, 2, consumers)
        self.k, self.v = (Stages(stages, 2, consumers) for _ in range(2))
        self.messages = [Stages(MESSAGES, 1, 1) for _ in range(2)]
        self.unread = [Counter[int]() for _ in range(2)]  # warps that have to read a stage
        self.issued: Counter[tuple[object, ...]] = Counter()  # warps that have issued products
        self.agents: list[Agent] = [self.producer(), *(self.mma(w, i) for w in range(2) for i in range(WARPS))]

    def run(self) -> bool:
        """Whether all agents end; some are slow."""
        waits = {agent: lambda: True for agent in self.agents}
        speed = {id(agent): self.rng.choice([0.01, 0.3, 1.0]) for agent in self.agents}
        while waits:
            ready = [agent for agent, wait in waits.items() if wait()]
            if not ready:
                return False
            agent = self.rng.choices(ready, [speed.get(id(agent), 0.2) for agent in ready])[0]
            num = len(self.agents)
            try:
                waits[agent] = next(agent)
            except StopIteration:
                del waits[agent]
            waits |= {transfer: lambda: True for transfer in self.agents[num:]}
        return True

    def load(self, ring: Stages, stage: int, what: object) -> None:
        """Arrives with the bytes that are expected, and begins a transfer, which arrives at any time."""
        ring.full[stage].arrive()

        def transfer() -> Agent:
            yield lambda: True
            ring.holds[stage] = what
            ring.full[stage].arrive()

        self.agents.append(transfer())

    def publish(self, w: int, number: int, fields: tuple[int, ...]) -> None:
        stage = number % MESSAGES
        assert not self.unread[w][stage], "a message is overwritten"
        self.unread[w][stage] = WARPS
        self.messages[w].holds[stage] = fields
        self.messages[w].full[stage].arrive()

    def producer(self) -> Agent:
        numbers, step = [0, 0], 0
        for count, kinds in enumerate(self.tiles):
            yield self.tile_ring.is_empty(count)
            yield self.q.is_empty(count)
            self.tile_ring.holds[count % TILE_STAGES] = count
            self.tile_ring.full[count % TILE_STAGES].arrive()
            self.load(self.q, 0, count)
            for kind in kinds:
                stage, phase = step % self.stages, step // self.stages % 2
                for ring in (self.k, self.v):
                    yield ring.is_empty(step)
                    if kind != BOTH:
                        ring.empty[stage].arrive(WARPS)
                    self.load(ring, stage, step)
                    for w in range(2):
                        if ring is self.k and kind >> w & 1:
                            self.publish(w, numbers[w], (stage, phase, step))
                            numbers[w] += 1
                step += 1
            for w in range(2):
                self.publish(w, numbers[w], (END, 0, 0))
                numbers[w] += 1
        yield self.tile_ring.is_empty(len(self.tiles))
        self.tile_ring.holds[len(self.tiles) % TILE_STAGES] = END
        self.tile_ring.full[len(self.tiles) % TILE_STAGES].arrive()

    def receive(self, w: int, number: int) -> tuple[int, int, int]:
        self.unread[w][number % MESSAGES] -= 1
        fields = self.messages[w].holds[number % MESSAGES]
        assert isinstance(fields, tuple)
        return fields

    def issue(self, *products: object) -> Callable[[], bool]:
        """Issues products; they are done when all warps have."""
        self.issued[products] += 1
        return lambda: self.issued[products] == WARPS

    def mma(self, w: int, warp: int) -> Agent:
        """A warp of a warpgroup."""
        k, v, ring = self.k, self.v, self.messages[w]
        count, number = 0, 0
        yield self.tile_ring.is_full(count)
        while self.tile_ring.holds[count % TILE_STAGES] != END:
            yield self.q.is_full(count)
            assert self.q.holds[0] == count
            self.q.empty[0].arrive()
            yield ring.is_full(number)
            stage, phase, step = self.receive(w, number)
            number += 1
            if stage != END:
                yield k.full[stage].passed(phase)
                assert k.holds[stage] == step
                yield self.issue(w, "S", step)
                k.empty[stage].arrive()
            if count:  # the epilogue of the tile before
                self.tile_ring.empty[(count - 1) % TILE_STAGES].arrive()
            while stage != END:
                yield v.full[stage].passed(phase)
                assert v.holds[stage] == step
                O_done, keeps_V = self.issue(w, "O", step), True
                if self.early and not ring.is_full(number)():
                    yield O_done
                    v.empty[stage].arrive()
                    keeps_V = False
                yield ring.is_full(number)
                next_stage, next_phase, next_step = self.receive(w, number)
                number += 1
                if next_stage != END:
                    if self.early and keeps_V and not k.full[next_stage].passed(next_phase)():
                        yield O_done
                        v.empty[stage].arrive()
                        keeps_V = False
                    yield k.full[next_stage].passed(next_phase)
                    assert k.holds[next_stage] == next_step
                    S_done = self.issue(w, "S", next_step)
                yield O_done
                if keeps_V:
                    v.empty[stage].arrive()
                if next_stage != END:
                    yield S_done
                    k.empty[next_stage].arrive()
                stage, phase, step = next_stage, next_phase, next_step
            count += 1
            yield self.tile_ring.is_full(count)
        if count:
            self.tile_ring.empty[(count - 1) % TILE_STAGES].arrive()


def random_tiles(rng: random.Random) -> list[list[int]]:
    """Tiles of any number of steps, none among them, and of any mixture of kinds."""
    tiles = []
    for _ in range(rng.randint(1, 5)):
        weights = [rng.choice([0, 1, 10]) + 1e-6 for _ in range(3)]
        tiles.append(rng.choices([FIRST, SECOND, BOTH], weights, k=rng.choice([0, 1, 2, 5, 12])))
    return tiles


@pytest.mark.parametrize("stages", [3, 4, 6])
def test_every_list_ends(stages: int) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        tiles = random_tiles(rng)
        assert Cta(tiles, stages, rng).run(), (seed, tiles)


def test_the_model_finds_a_deadlock() -> None:
    """A warpgroup that keeps V while it waits for its next step, which lies behind a whole ring of the other's."""
    tiles = [[FIRST, *[SECOND] * 5, FIRST]]
    assert Cta(tiles, 3, random.Random(0)).run()
    assert not Cta(tiles, 3, random.Random(0), early=False).run()
