"""Backward kernels for Blackwell in two passes over the queries: dK and dV do not fit tensor memory together.

The first pass sums dV, the second dK and dQ, by blocks of 64 queries. A CTA does so alone, or is one of a pair, which
has K in tensor memory (``kernels/sm100/backward/two_pass.py``, ``pair_two_pass.py``). Of a pair each stage of Q is a
half, by rows or by columns, and dO has two stages by columns in the first pass and one by rows in the second.
"""

from collections.abc import Callable, Sequence
from functools import partial

from lab.model.blackwell import BLOCK, MASK, Backward, BackwardDesign
from lab.model.machine import B200, Machine
from lab.model.simulation import Barrier, Needs, Phase, Ring
from lab.model.sm import TileWork


class BackwardTwoPass(Backward):
    """A CTA with two compute warpgroups, half of a block's queries each, and one that drains dQ."""

    def __init__(self, design: BackwardDesign, machine: Machine = B200) -> None:
        super().__init__(design, machine)
        sm = self.sm
        self.k, self.v, self.k_columns = (sm.ring(name, 1) for name in ("K", "V", "K by columns"))
        self.copied: Barrier = sm.simulation.barrier(2, "K in tensor memory")
        self.scores = sm.ring("scores", 2, empty=2)  # S and dP, by their numbers
        self.dv, self.dk = (sm.ring(name, 1, empty=2) for name in ("dV", "dK"))
        if design.pair:
            self.do_columns = sm.ring("dO by columns", 2)
        # Places that dV and dK leave through, by what is loaded there.
        self.ways_out = (self.k_columns, self.v) if design.pair else (self.v, self.k)

    def load(self, work: Sequence[TileWork]) -> Needs:
        """A warp: keys and values once, Q and dO block by block, in both passes."""
        c, step, number = self.design, 0, 0
        for tile, (num, _) in enumerate(work):
            yield self.k.wait_empty(tile)
            self.sm.load("K", 2 * BLOCK * c.d, self.k, tile)
            if c.pair:
                yield from self._load_halves_of_passes(tile, step, number, num)
            else:
                yield from self._load_blocks(tile, step, num)
            step, number = step + 2 * num, number + 3 * num

    def _load_blocks(self, tile: int, first: int, num: int) -> Needs:
        """Loads of a single CTA: dO ahead of Q in the second pass; V when dV has left through its place."""
        for step in range(first, first + num):
            yield from self._load_Q(step)
            yield from self._load_dO(self.do, step)
        for step in range(first + num, first + 2 * num):
            yield from self._load_dO(self.do, step)
            yield from self._load_Q(step)
            if step == first + num:
                yield self.v.wait_empty(tile + 1)
                self.sm.load("V", 2 * BLOCK * self.design.d_v, self.v, tile)

    def _load_halves_of_passes(self, tile: int, step: int, number: int, num: int) -> Needs:
        """Loads of a pair's CTA: Q a step ahead of dO in the first pass, and by columns as well in the second."""
        do_step = step // 2  # of each pass
        for i in range(num + 1):
            if i < num:
                yield from self._load_Q(number + i)
            if i > 0:
                yield from self._load_stats(step + i - 1)
                yield from self._load_dO(self.do_columns, do_step + i - 1)
            if i == 1:
                yield self.v.wait_empty(tile)
                self.sm.load("V", 2 * BLOCK * self.design.d_v, self.v, tile)
        yield self.do_columns.wait_empty(do_step + num + 1)
        for i in range(num):
            yield from self._load_Q(number + num + 2 * i)
            yield from self._load_stats(step + num + i)
            yield from self._load_dO(self.do, do_step + i)
            yield from self._load_Q(number + num + 2 * i + 1)
            if i == 0:  # through whose place dV has left
                yield self.k_columns.wait_empty(tile + 1)
                self.sm.load("K by columns", 2 * self.ctas * BLOCK * BLOCK, self.k_columns, tile)

    def _load_Q(self, number: int) -> Needs:
        c = self.design
        yield self.q.wait_empty(number)
        stats = 0.0 if c.pair else 8.0 * c.queries  # which a pair loads apart
        self.sm.load("Q", 2 * c.queries * c.d / self.ctas + stats, self.q, number)

    def _load_dO(self, ring: Ring, step: int) -> Needs:
        c = self.design
        yield ring.wait_empty(step)
        self.sm.load("dO", 2 * c.queries * c.d_v / self.ctas, ring, step)

    def _load_stats(self, step: int) -> Needs:
        yield self.stats.wait_empty(step)
        self.sm.load("lse and delta", 8 * self.design.queries, self.stats, step)

    def mma(self, work: Sequence[TileWork]) -> Needs:
        """A warp: both passes over each tile."""
        c, done, number = self.design, 0, 0  # steps of each pass
        for tile, (num, _) in enumerate(work):
            step = 2 * done
            if c.pair:
                yield self.copied.phase(tile + 1)
                if not c.own_columns:
                    yield self.dq.wait_empty(done)
                yield from self._first_pass(tile, number, number, self.do_columns, done, num)
                yield self.v.wait_full(tile)
                yield from self._second_pass_of_pair(tile, number + num, done, num)
            else:
                yield self.k.wait_full(tile)
                yield from self._first_pass(tile, number, step, self.do, step, num)
                yield self.v.wait_full(tile)
                yield from self._second_pass(tile, number + num, step + num, done, num)
            done, number = done + num, number + 3 * num

    def _first_pass(self, tile: int, number: int, of_Q: int, do: Ring, of_dO: int, num: int) -> Needs:
        """S(t + 1), dV(t)."""
        for i in range(num + 1):
            if i < num:
                yield from self._S(number + i, of_Q + i, releases=True)
            if i > 0:
                before = i - 1
                yield do.wait_full(of_dO + before)
                yield self.scores.wait_empty(number + before + 2)
                if i == 1:
                    yield self.dk.wait_empty(tile)
                then = [partial(do.release, of_dO + before)]
                if i == num:
                    then.append(partial(self.dv.arrive, tile))
                self._product("dV", self.design.d_v, self.design.queries, self._right(self.design.d_v), then)

    def _second_pass(self, tile: int, number: int, step: int, dq_step: int, num: int) -> Needs:
        """DK(t), dP(t + 1), dQ(t), S(t + 1)."""
        for i in range(num + 1):
            if i > 0:
                yield from self._dK_of(tile, number + 2 * i - 1, step + i - 1, is_first=i == 1)
            if i < num:
                yield from self._dP_of(number + 2 * i + 1, step + i)
            if i > 0:
                yield from self._dQ_of(tile, dq_step + i - 1, is_last=i == num)
            if i < num:
                yield from self._S(number + 2 * i, step + i, releases=False)

    def _second_pass_of_pair(self, tile: int, number: int, dq_step: int, num: int) -> Needs:
        """DK(t), S(t + 1), dP(t + 1), dQ(t)."""
        c = self.design
        for i in range(num + 1):
            if i > 0:
                yield from self._dK_of(tile, number + 2 * i - 1, number + 2 * i - 1, is_first=i == 1)
                yield self.dq.wait_empty(dq_step + i - 1)
            if i < num:
                yield from self._S(number + 2 * i, number + 2 * i, releases=True)
                yield from self._dP_of(number + 2 * i + 1, dq_step + i)
            if i > 0:
                if i < num and not c.own_columns:
                    yield self.scores.wait_empty(number + 2 * i + 2)  # S is read, in whose place dQ is to be
                yield self.ds_exchanged.phase(dq_step + i)
                if i == 1:
                    yield self.k_columns.wait_full(tile)
                yield from self._dQ_of(tile, dq_step + i - 1, is_last=i == num)

    def _S(self, number: int, of_Q: int, *, releases: bool) -> Needs:
        c = self.design
        yield self.q.wait_full(of_Q)
        then = [partial(self.scores.arrive, number), *([partial(self.q.release, of_Q)] if releases else [])]
        operands = self._right(c.d) + (0.0 if c.pair else self._left(c.d))
        self._product("S", c.queries, c.d, operands, then)

    def _dP_of(self, number: int, step: int) -> Needs:
        c = self.design
        yield self.do.wait_full(step)
        then = [partial(self.scores.arrive, number), partial(self.do.release, step)]
        self._product("dP", c.queries, c.d_v, self._left(c.d_v) + self._right(c.d_v), then)

    def _dK_of(self, tile: int, number: int, of_Q: int, *, is_first: bool) -> Needs:
        c = self.design
        yield self.scores.wait_empty(number + 2)
        yield self.q.wait_full(of_Q)
        if is_first:
            yield self.dv.wait_empty(tile + 1)
        self._product("dK", c.d, c.queries, self._right(c.d), [partial(self.q.release, of_Q)])

    def _dQ_of(self, tile: int, step: int, *, is_last: bool) -> Needs:
        yield self.dq.wait_empty(step)
        then: list[Callable[[], None]] = []
        if is_last:
            then.append(partial(self.dk.arrive, tile))
            if self.design.pair:
                then.append(partial(self.k.release, tile))
        self._issue_dQ(step, then)

    def compute(self, g: int, work: Sequence[TileWork]) -> Needs:
        """A warpgroup: a pair's K to tensor memory; half of the queries; dV and dK after their passes."""
        c, sm, me = self.design, self.sm, f"compute {g}"
        stats = self.stats if c.pair else self.q
        step, number, dq_step = 0, 0, 0
        for tile, (num, masked) in enumerate(work):
            if c.pair:
                yield self.k.wait_full(tile)
                size = 2.0 * BLOCK * c.d / 2
                yield from sm.compute(me, "copy K", c.d / 4 + 20, shared=size, tmem=size)
                yield sm.machine.handover
                self.copied.arrive()
            for i in range(num):
                yield from self._weights(me, stats.wait_full(step), number, is_masked=i < masked, stores=True)
                if g == 0:
                    stats.release(step)
                step, number = step + 1, number + 1
            yield from self._put_out(g, tile, 0)
            for i in range(num):
                yield from self._weights(me, stats.wait_full(step), number, is_masked=i < masked, stores=False)
                yield from self._gradients(g, number + 1, dq_step)
                if g == 0:
                    stats.release(step)
                step, number, dq_step = step + 1, number + 2, dq_step + 1
            yield from self._put_out(g, tile, 1)

    def _weights(self, me: str, stats: Phase, number: int, *, is_masked: bool, stores: bool) -> Needs:
        sm, elements = self.sm, self.design.queries / 2
        half, each = 128 * elements, 0.5 + 1.0 + 0.5 + (MASK if is_masked else 0.0)
        yield stats
        yield self.scores.wait_full(number)
        # Lse and delta are read by all threads alike: a word a clock and query.
        yield from sm.compute(me, "load S", 10, shared=128.0 * elements, tmem=4.0 * half)
        if not stores:
            self.scores.release(number)
        tmem = 2.0 * half if stores else 0.0
        yield from sm.compute(me, "P", each * elements + 30, elements, tmem=tmem, goes_on=True)
        if stores:
            yield sm.machine.handover  # they are complete
            self.scores.release(number)

    def _gradients(self, g: int, number: int, dq_step: int) -> Needs:
        sm, me, elements = self.sm, f"compute {g}", self.design.queries / 2
        half = 128 * elements
        yield self.scores.wait_full(number)
        yield from sm.compute(me, "dS", 2 * (elements + 20), shared=128.0 * elements, tmem=6.0 * half)
        yield self.ds_free.phase(dq_step)
        yield from sm.compute(me, "write dS", 0.25 * elements + 20, shared=2.0 * half, goes_on=True)
        yield sm.machine.handover
        self.scores.release(number)
        if g == 0 and self.design.pair:
            sm.simulation.start("exchange", self._exchange())

    def _put_out(self, g: int, tile: int, which: int) -> Needs:
        """Half of dV or dK, to where it leaves."""
        sm, ring, columns = self.sm, (self.dv, self.dk)[which], (self.design.d_v, self.design.d)[which]
        yield ring.wait_full(tile)
        size = 128.0 * columns / 2
        name = ("dV", "dK")[which]
        yield from sm.compute(f"compute {g}", name, 1.5 * columns / 2 + 50, shared=2 * size, tmem=4 * size)
        ring.release(tile)
        if g == 0:
            sm.simulation.after(sm.machine.load / 2, partial(self.ways_out[which].release, tile))
