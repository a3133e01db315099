"""Blackwell kernels as processes: flash-attn-4's published design, and ours.

One warp issues all products; they read operands from shared memory, P and dS from tensor memory, and write accumulators
there. A thread has a row of the scores, so that a step has 128 elements a thread forward and 64 backward.

flash-attn-4's roles, orders and barriers are those of its sources and of "FlashAttention-4" (Zadouri, Hoehnerbach,
Shah, Liu, Thakkar and Dao, 2026). What threads compute was counted by operation: instructions on pairs of
floats count once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lab.model.machine import B200, Machine
from lab.model.simulation import Barrier, Needs
from lab.model.sm import Sm, TileWork

_POLYNOMIAL = 5.5  # instructions an exponential that is not the unit's
_BIAS = 1.5  # instructions that unpack an element of 16 bits and add it, by pairs
MASK = 1.2  # instructions that hide an element: bits of a row are moved to predicates
BLOCK = 128  # rows of a tile in tensor memory, and keys of a block, but where a design says otherwise
_COLUMNS = 32  # of P, which are stored together


@dataclass(frozen=True)
class ForwardDesign:
    """Parameters of a forward kernel."""

    d: int
    d_v: int
    polynomials: float = 0.0  # share of the exponentials
    maxima: bool = True  # every block's are looked for, and a correction warpgroup compares them
    keys: int = BLOCK  # of a block
    persistent: bool = True
    stages: int = 3  # of keys or values
    o_over_q: bool = False  # O leaves through the place of Q, which can be loaded again when it has left
    tiles: int = 2  # of 128 queries
    warpgroups: int = 2  # of softmax: one a tile, or two that take one tile's blocks in turn, or one alone
    pair: bool = False  # two CTAs compute products together, and each holds half of the keys
    # Bytes of an element of a bias; 0: there is none. Threads read their rows of a block before the block's scores are
    # waited for, and add them to 64 at once.
    bias: int = 0


class Forward:
    """A CTA with two softmax warpgroups."""

    def __init__(self, design: ForwardDesign, machine: Machine = B200) -> None:
        self.design = design
        self.sm = Sm(machine)
        self.ctas = 2 if design.pair else 1
        self.rows, self.columns, self.persistent = BLOCK * design.tiles * self.ctas, design.keys, design.persistent
        self.num_passes = 1
        sm = self.sm
        tiles = range(design.tiles)
        self.q = [sm.ring(f"Q{t}", 1, empty=2 if design.o_over_q else 1) for t in tiles]
        self.kv = sm.ring("KV", design.stages)
        self.s_full = [sm.simulation.barrier(1, f"S{g}") for g in range(2)]
        self.p_ready = [sm.simulation.barrier(2 if design.maxima else 1, f"P{g}") for g in range(2)]
        self.p_last = [sm.simulation.barrier(1, f"last of P{g}") for g in range(2)]
        self.maxima = [sm.ring(f"maxima {g}", 1) for g in range(2)]
        self.o = [sm.ring(f"O{t}", 1) for t in tiles]
        self.bias = [sm.simulation.barrier(1, f"bias {g}") for g in range(2)]
        self.bias_read = [0, 0]  # times that a warpgroup has read some

    def run(self, work: Sequence[TileWork]) -> Sm:
        """Tiles, one after the other."""
        roles = {"load": self.load(work), "mma": self.mma(work)}
        roles |= {f"softmax {w}": self.softmax(w, work) for w in range(self.design.warpgroups)}
        if self.design.maxima:
            roles["correction"] = self.correction(work)
        return self.sm.run(roles | {"epilogue": self.epilogue(work)})

    def load(self, work: Sequence[TileWork]) -> Needs:
        """A warp: Q, K and V."""
        c, fill = self.design, 0
        part = 0.5 if c.pair else 1.0
        for tile, (num, _) in enumerate(work):
            for q in self.q:
                yield q.wait_empty(tile)
                self.sm.load("Q", 2 * BLOCK * c.d, q, tile)
            for _ in range(num):
                for what, columns in (("K", c.d), ("V", c.d_v)):
                    yield self.kv.wait_empty(fill)
                    self.sm.load(what, part * 2 * c.keys * columns, self.kv, fill)
                    fill += 1

    def mma(self, work: Sequence[TileWork]) -> Needs:
        """A warp: S of the next block behind the output of this one, tile by tile."""
        c, block = self.design, 0
        issued = [0, 0]  # products with P, a buffer
        for tile, (num, _) in enumerate(work):
            for i in range(num + 1):
                if c.tiles == 1 and i < num:
                    yield from self._scores(tile, i, num, block)
                if i > 0:
                    yield self.kv.wait_full(2 * (block + i - 1) + 1)
                for t in range(c.tiles):
                    if i > 0:
                        g = t if c.tiles == 2 else (i - 1) % 2
                        issued[g] += 1
                        yield from self._output(tile, t, g, i - 1, num, issued[g], block)
                    if c.tiles == 2 and i < num:
                        yield from self._scores(tile, i, num, block, t)
            block += num

    def _scores(self, tile: int, i: int, num: int, block: int, t: int = 0) -> Needs:
        """The i-th S of a tile."""
        c, m, sm = self.design, self.sm.machine, self.sm
        if i == 0:
            yield self.q[t].wait_full(tile)
        fill = 2 * (block + i)
        yield self.kv.wait_full(fill)
        then = [self.s_full[t if c.tiles == 2 else i % 2].arrive]
        if t + 1 == c.tiles:
            then.append(lambda: self.kv.release(fill))
        if i + 1 == num:
            then.append(lambda: self.q[t].release(tile))
        keys = c.keys // 2 if c.pair else c.keys
        operands = m.bytes_shared(2.0 * c.d * (BLOCK + keys))
        sm.products.issue("mma", f"S{t}", m.product(BLOCK, c.keys, c.d), operands, then)

    def _output(self, tile: int, t: int, g: int, i: int, num: int, number: int, block: int) -> Needs:
        """The i-th product with P of a tile, in two parts: one when all but the last 32 columns of P are stored."""
        c, m, sm = self.design, self.sm.machine, self.sm
        if i == 0:
            yield self.o[t].wait_empty(tile)
        columns = c.d_v / 2 if c.pair else c.d_v
        clocks, operands = m.product(BLOCK, c.d_v, c.keys), m.bytes_shared(2.0 * c.keys * columns)
        yield self.p_ready[g].phase(number)
        first = 1 - _COLUMNS / c.keys
        then = []
        if t + 1 == c.tiles:
            then.append(lambda: self.kv.release(2 * (block + i) + 1))
        if i + 1 == num:
            then.append(lambda: self.o[t].arrive(tile))
        sm.products.issue("mma", f"O{t}", clocks * first, operands * first)
        yield self.p_last[g].phase(number)
        sm.products.issue("mma", f"O{t}", clocks * (1 - first), operands * (1 - first), then)

    def softmax(self, warpgroup: int, work: Sequence[TileWork]) -> Needs:
        """A warpgroup: a row a thread."""
        c, sm, me = self.design, self.sm, f"softmax {warpgroup}"
        numbers = [0, 0]  # of blocks, a buffer
        pieces = c.keys // _COLUMNS
        each = 0.5 + (1 - c.polynomials) + _POLYNOMIAL * c.polynomials + 0.5
        hands_over = pieces - 2  # the piece behind which P is
        for num, masked in work:
            for i in range(num):
                g = warpgroup if c.tiles == 2 else i % 2
                if c.warpgroups == 2 and g != warpgroup:
                    continue
                numbers[g] += 1
                number = numbers[g]
                if c.bias:
                    self._read_bias(warpgroup, c.keys)
                yield self.s_full[g].phase(number)
                if c.bias:
                    yield from self._add_bias(warpgroup)
                hides = MASK * c.keys if i < masked else 0.0
                looks = c.keys / 2 if c.maxima or i == 0 else 0.0
                yield from sm.compute(me, "load S", 20 + looks + hides, tmem=4.0 * BLOCK * c.keys)
                if c.maxima:
                    yield self.maxima[g].wait_empty(number - 1)
                    self.maxima[g].arrive(number - 1)
                for piece in range(pieces):
                    instructions = each * _COLUMNS
                    if not c.maxima:  # sums show whether the row_max fits, before P is handed over,
                        instructions += _COLUMNS / 2
                        if piece == hands_over:  # and of a piece that is still to come its maximum
                            instructions += 15 + _COLUMNS / 2
                    unit, stored = _COLUMNS * (1 - c.polynomials), 2.0 * BLOCK * _COLUMNS
                    yield from sm.compute(me, "P", instructions, unit, tmem=stored, goes_on=True)
                    if piece == hands_over:
                        yield sm.machine.handover  # stores are complete
                        self.p_ready[g].arrive()
                    elif piece + 1 == pieces:
                        yield sm.machine.handover
                        self.p_last[g].arrive()
                if c.maxima:
                    yield from sm.compute(me, "sum", c.keys / 2 + 20, goes_on=True)

    def _read_bias(self, warpgroup: int, columns: int) -> None:
        """Begins to read some columns, of as many rows as a warpgroup has threads."""
        self.bias_read[warpgroup] += 1
        size = float(BLOCK * columns * self.design.bias)
        self.sm.read(f"softmax {warpgroup}", "bias", size, self.bias[warpgroup])

    def _add_bias(self, warpgroup: int) -> Needs:
        """Adds it to scores in tensor memory, piece by piece."""
        c, me = self.design, f"softmax {warpgroup}"
        columns = 2 * _COLUMNS
        for _ in range(c.keys // columns):
            yield self.bias[warpgroup].phase(self.bias_read[warpgroup])
            yield from self.sm.compute(me, "add bias", 10 + _BIAS * columns, tmem=2 * 4.0 * BLOCK * columns)

    def correction(self, work: Sequence[TileWork]) -> Needs:
        """A warpgroup: votes whether O is to be scaled, which it hardly ever is."""
        number = 0
        for num, _ in work:
            for i in range(num):
                for g in range(2) if self.design.tiles == 2 else [i % 2]:
                    step = number if self.design.tiles == 2 else number // 2
                    yield self.maxima[g].wait_full(step)
                    yield from self.sm.compute("correction", "vote", 25)
                    self.maxima[g].release(step)
                    self.p_ready[g].arrive()
                number += 1

    def epilogue(self, work: Sequence[TileWork]) -> Needs:
        """A warpgroup: O to global memory."""
        c = self.design
        for tile in range(len(work)):
            for o, q in zip(self.o, self.q, strict=True):
                yield o.wait_full(tile)
                size = BLOCK * c.d_v
                yield from self.sm.compute("epilogue", "O", 1.5 * c.d_v + 50, shared=2.0 * size, tmem=4.0 * size)
                o.release(tile)
                if c.o_over_q:
                    self.sm.simulation.after(self.sm.machine.load / 2, partial(q.release, tile))


@dataclass(frozen=True)
class BackwardDesign:
    """Parameters of a backward kernel. A tile is 128 keys a CTA."""

    d: int
    d_v: int
    pair: bool = False  # two CTAs compute products together, and exchange halves of dS
    ordered: bool = False
    # A warp of its own waits for turns ahead of time and signals additions, so that the drain waits for neither.
    turns_ahead: bool = False
    # Both compute warpgroups meet at barriers: before P is stored over S and behind that, behind each half of dP.
    meets: bool = True
    overwrites: bool = False  # the first to add to a block, so that they need no zeros before
    own_columns: bool = False  # dQ has columns of tensor memory that nothing else needs
    persistent: bool = False
    num_passes: int = 1  # over the queries that see a tile; of two ``two_pass`` has what is done
    queries: int = BLOCK  # of a block: as many as there are lanes, or half of them, and dQ is transposed
    kv_stages: int = 1
    q_stages: int = 2
    do_stages: int = 1
    piece_columns: int = 32  # of tensor memory, of dQ that is put out and added together
    piece_stages: int = 2


class Backward:
    """A CTA with two compute warpgroups, half of a block's queries each, and one that drains dQ."""

    def __init__(self, design: BackwardDesign, machine: Machine = B200) -> None:
        self.design = design
        self.sm = Sm(machine)
        self.ctas = 2 if design.pair else 1
        self.rows, self.columns, self.persistent = BLOCK * self.ctas, design.queries, design.persistent
        self.num_passes = design.num_passes
        sm, c = self.sm, design
        self.keys = sm.ring("K and V", design.kv_stages)
        # A pair has one stage of what is split by rows and of what is split by columns, and lse and delta apart.
        users = 1 if c.pair else 2
        self.q = sm.ring("Q", c.q_stages, empty=users)
        self.do = sm.ring("dO", c.do_stages, empty=users if c.num_passes == 1 else 1)
        self.q_columns, self.do_columns = sm.ring("Q by columns", 1), sm.ring("dO by columns", 1)
        self.stats = sm.ring("lse and delta", 2)
        self.s, self.dp = sm.ring("S", 1, empty=2), sm.ring("dP", 1, empty=2)
        self.p: Barrier = sm.simulation.barrier(2, "P")
        self.ds: Barrier = sm.simulation.barrier(2, "dS")
        self.dq = sm.ring("dQ", 1)
        self.s_loaded: Barrier = sm.simulation.barrier(2, "S is read")
        self.meeting, self.met = sm.simulation.barrier(2, "compute warpgroups"), [0, 0]
        self.ds_exchanged: Barrier = sm.simulation.barrier(1, "dS of the other CTA")
        self.ds_free: Barrier = sm.simulation.barrier(1, "room for dS")
        self.staging = sm.ring("staging", c.piece_stages)
        self.sums = sm.ring("dK and dV", 1)

    def run(self, work: Sequence[TileWork]) -> Sm:
        """Tiles, one after the other."""
        roles = {"load": self.load(work), "mma": self.mma(work)}
        roles |= {f"compute {g}": self.compute(g, work) for g in range(2)}
        return self.sm.run(roles | {"drain": self.drain(work), "add": self.add(work)})

    def load(self, work: Sequence[TileWork]) -> Needs:
        """A warp: keys and values once, Q and dO block by block. A pair loads each block for both its uses."""
        c, step = self.design, 0
        for tile, (num, _) in enumerate(work):
            yield self.keys.wait_empty(tile)
            self.sm.load("K and V", 2 * BLOCK * (c.d + c.d_v + self._columns_of_keys), self.keys, tile)
            for _ in range(num):
                if c.pair:
                    yield from self._load_halves(step)
                else:
                    yield self.q.wait_empty(step)
                    self.sm.load("Q", c.queries * (2 * c.d + 4), self.q, step)
                    yield self.do.wait_empty(step)
                    self.sm.load("dO", c.queries * (2 * c.d_v + 4), self.do, step)
                step += 1

    @property
    def _columns_of_keys(self) -> int:
        """Columns that a pair's CTA has of each 128 keys besides: twice those of dQ that it computes."""
        c = self.design
        if not c.pair:
            return 0
        return c.d if c.queries == BLOCK else 2 * BLOCK

    def _load_halves(self, step: int) -> Needs:
        """A block of each, half by rows and half by columns."""
        c = self.design
        yield self.q.wait_empty(step)
        self.sm.load("Q", c.queries * c.d, self.q, step)
        yield self.stats.wait_empty(step)
        self.sm.load("lse and delta", 8 * c.queries, self.stats, step)
        for what, ring, columns in (
            ("dO", self.do, c.d_v),
            ("dO by columns", self.do_columns, c.d_v),
            ("Q by columns", self.q_columns, c.d),
        ):
            yield ring.wait_empty(step)
            self.sm.load(what, c.queries * columns, ring, step)

    def mma(self, work: Sequence[TileWork]) -> Needs:
        """A warp: S(t + 1), dK(t), dQ(t), dP(t + 1), dV(t + 1); a pair's dQ waits for the other CTA, behind dP."""
        step = 0
        for tile, (num, _) in enumerate(work):
            yield self.keys.wait_full(tile)
            for i in range(num + 1):
                if i < num:
                    yield from self._scores(step)
                if i > 0:
                    yield from self._dK(step - 1)
                    if not self.design.pair:
                        yield from self._dQ(tile, step - 1, i == num)
                if i < num:
                    yield from self._dP(step)
                if i > 0 and self.design.pair:
                    yield from self._dQ(tile, step - 1, i == num)
                if i < num:
                    yield from self._dV(tile, step, i == 0)
                    step += 1

    def _left(self, columns: float) -> float:
        """Clocks of shared memory for an operand of 128 rows."""
        return self.sm.machine.bytes_shared(2.0 * BLOCK * columns)

    def _right(self, columns: float) -> float:
        """Clocks to read a right operand of a block's queries, of which a pair's CTA holds half."""
        return self.sm.machine.bytes_shared(2.0 * self.design.queries * columns) / self.ctas

    def _product(
        self, what: str, columns: int, summed: int, operands: float, then: Sequence[Callable[[], None]]
    ) -> None:
        self.sm.products.issue("mma", what, self.sm.machine.product(BLOCK, columns, summed), operands, then)

    def _scores(self, step: int) -> Needs:
        c = self.design
        yield self.q.wait_full(step)
        yield self.s.wait_empty(step)
        if c.pair and not c.own_columns and step > 0:
            yield self.dq.wait_empty(step - 1)  # of dQ(step - 2), which lies where S does
        then = [partial(self.s.arrive, step), *([partial(self.q.release, step)] if c.pair else [])]
        self._product("S", c.queries, c.d, self._left(c.d) + self._right(c.d), then)

    def _dK(self, step: int) -> Needs:
        c, ring = self.design, self.q
        yield self.ds.phase(step + 1)
        if c.pair:
            ring = self.q_columns
            yield ring.wait_full(step)
        self._product("dK", c.d, c.queries, self._right(c.d), [partial(ring.release, step)])

    def _dQ(self, tile: int, step: int, is_last: bool) -> Needs:
        c = self.design
        if c.pair:
            yield self.ds_exchanged.phase(step + 1)
            if not c.own_columns and not is_last:
                yield self.s_loaded.phase(step + 2)  # S(step + 1) lies where dQ will
        yield self.dq.wait_empty(step)
        self._issue_dQ(step, [partial(self.keys.release, tile), partial(self.sums.arrive, tile)] if is_last else [])

    def _issue_dQ(self, step: int, then: Sequence[Callable[[], None]]) -> None:
        c = self.design
        if c.queries == BLOCK:  # a pair's CTA has 64 queries and the keys of both
            columns, keys, operands = c.d, BLOCK, self._left(BLOCK) + self._left(c.d)
        else:  # 128 columns of dQ at a time, a pair's CTA once, and of the keys of both
            times, keys = 1 if c.pair else -(-c.d // BLOCK), BLOCK * self.ctas
            columns, operands = times * c.queries, times * (self._left(keys) + self._right(keys))
        self._product("dQ", columns, keys, operands, [partial(self.dq.arrive, step), self.ds_free.arrive, *then])

    def _dP(self, step: int) -> Needs:
        c = self.design
        yield self.do.wait_full(step)
        yield self.dp.wait_empty(step)
        if not c.pair and not c.own_columns:
            yield self.dq.wait_empty(step)  # of dQ(step - 1), which lies where dP does
        then = [partial(self.dp.arrive, step), *([partial(self.do.release, step)] if c.pair else [])]
        self._product("dP", c.queries, c.d_v, self._left(c.d_v) + self._right(c.d_v), then)

    def _dV(self, tile: int, step: int, is_first: bool) -> Needs:
        c, ring = self.design, self.do
        yield self.p.phase(step + 1)
        if is_first:
            yield self.sums.wait_empty(tile)
        if c.pair:
            ring = self.do_columns
            yield ring.wait_full(step)
        self._product("dV", c.d_v, c.queries, self._right(c.d_v), [partial(ring.release, step)])

    def compute(self, g: int, work: Sequence[TileWork]) -> Needs:
        """A warpgroup: a key a thread, half of the queries."""
        c, sm, me = self.design, self.sm, f"compute {g}"
        elements, step = c.queries / 2, 0
        half = 128 * elements  # elements of the warpgroup
        for tile, (num, masked) in enumerate(work):
            for i in range(num):
                if c.pair:
                    yield self.stats.wait_full(step)
                yield self.s.wait_full(step)
                each = 0.5 + 1.0 + 0.5 + (MASK if i < masked else 0.0)
                # lse and delta are read by all threads alike: a word a clock and query.
                read = 4 * 128.0 * elements / 4
                yield from sm.compute(me, "load S", 10, shared=read, tmem=4.0 * half)
                self.s_loaded.arrive()
                yield from self.meet(g)
                yield from sm.compute(me, "P", each * elements + 30, elements, tmem=2.0 * half, goes_on=True)
                yield sm.machine.handover  # stores are complete
                yield from self.meet(g)
                self.s.release(step)
                self.p.arrive()
                if g == 0 and not c.pair:
                    self.q.release(step)
                yield self.dp.wait_full(step)
                for _ in range(2):
                    yield from sm.compute(me, "dS", elements + 20, shared=read / 2, tmem=3.0 * half)
                    yield from self.meet(g)
                if step > 0:
                    yield self.ds_free.phase(step)
                yield from sm.compute(me, "write dS", 0.25 * elements + 20, shared=2.0 * half, goes_on=True)
                yield sm.machine.handover
                yield from self.meet(g)
                self.dp.release(step)
                self.ds.arrive()
                if g == 0 and c.pair:
                    self.stats.release(step)
                    sm.simulation.start("exchange", self._exchange())
                elif g == 0:
                    self.do.release(step)
                step += 1
            yield self.sums.wait_full(tile)
            size = 128.0 * (c.d + c.d_v) / 2
            yield from sm.compute(me, "dK and dV", 1.5 * (c.d + c.d_v) / 2 + 100, shared=2 * size, tmem=4 * size)
            if g == 0:
                self.sums.release(tile)

    def meet(self, g: int) -> Needs:
        """A named barrier of both compute warpgroups."""
        if self.design.meets:
            self.met[g] += 1
            self.meeting.arrive()
            yield self.meeting.phase(self.met[g])

    def _exchange(self) -> Needs:
        """Half of dS to the other CTA, as half of its comes here."""
        sm = self.sm
        yield sm.machine.load / 2
        yield from sm.simulation.work(
            "exchange", "dS", {sm.shared: 2 * sm.machine.bytes_shared(BLOCK * self.design.queries)}
        )
        self.ds_exchanged.arrive()

    @property
    def piece(self) -> float:
        """Bytes of a piece of dQ: of all lanes, or of those whose columns are added together."""
        c, lanes = self.design, BLOCK
        if c.queries < BLOCK:
            lanes = c.d // 2 if c.pair else BLOCK // 2
        return 4.0 * lanes * c.piece_columns

    @property
    def pieces(self) -> int:
        """In which a block of dQ is put out: half of it, if the CTA is one of a pair."""
        return round(4 * self.design.queries * self.design.d / self.ctas / self.piece)

    def drain(self, work: Sequence[TileWork]) -> Needs:
        """A warpgroup: dQ from tensor memory into shared memory."""
        c, sm, piece = self.design, self.sm, 0
        for step in range(sum(w.blocks for w in work)):
            yield self.dq.wait_full(step)
            yield from sm.compute("drain", "load dQ", 20, tmem=self.piece * self.pieces)
            self.dq.release(step)
            for i in range(self.pieces):
                yield self.staging.wait_empty(piece)
                yield from sm.compute("drain", "write dQ", 16, shared=self.piece, goes_on=True)
                if i == 0 and c.ordered and not c.turns_ahead:
                    yield sm.machine.load  # the counter is read ahead of the addition
                yield 2 * sm.machine.wake  # a fence and a named barrier
                self.staging.arrive(piece)
                piece += 1

    def add(self, work: Sequence[TileWork]) -> Needs:
        """A thread: issues the TMA additions of what is in shared memory."""
        c, sm = self.design, self.sm
        for piece in range(self.pieces * sum(w.blocks for w in work)):
            yield self.staging.wait_full(piece)
            yield from sm.add("add", "dQ", self.piece)
            if c.ordered and not c.turns_ahead:  # room is made when all has been added, and not when it has been read
                sm.simulation.after(sm.machine.load, partial(self.staging.release, piece))
            else:
                self.staging.release(piece)
