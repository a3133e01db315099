"""The Hopper kernels as processes: roles, rings and their order as in ``flash_attn_cute.kernels.sm90``.

Rings are those of the kernels' schedules. Instructions a thread were counted in the compiled code (blocks without a
mask): 3.5 an element and 110 beside them in a forward step, 6.3 and 340 in a backward one up to d = 128.
"""

from collections.abc import Sequence
from functools import partial

from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardClusterConfig, BackwardCtaConfig
from flash_attn_cute.kernels.sm90.backward.cluster_schedule import cluster_schedule
from flash_attn_cute.kernels.sm90.backward.cta_schedule import cta_schedule
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward_schedule import forward_schedule
from lab.model.machine import H200, Machine
from lab.model.simulation import Needs
from lab.model.sm import MASK, Sm, TileWork


def size(machine: Machine, n: int, k: int, *, a_in_registers: float = 0.0) -> tuple[float, float]:
    """Clocks of the tensor cores, and of shared memory for operands, of a warpgroup's products of 64 rows."""
    return machine.product(64, n, k), machine.bytes_shared(2.0 * k * (n + 64 * (1 - a_in_registers)))


class Forward:
    """``sm90.forward``: a CTA works on tiles of queries, of so many blocks of keys each."""

    def __init__(self, config: ForwardConfig, machine: Machine = H200) -> None:
        self.config = config
        self.sm = Sm(machine)
        self.rows, self.columns, self.persistent, self.ctas = config.tile_m, config.tile_n, config.persistent, 1
        self.num_passes = 1
        self.warpgroups = config.num_mma_warpgroups
        rings = self.sm.rings(forward_schedule(config))
        self.tiles, self.k, self.v = (rings[name] for name in ("tiles", "k", "v"))
        self.turns = [self.sm.simulation.barrier(1, f"turn of warpgroup {w}") for w in range(self.warpgroups)]

    def run(self, work: Sequence[TileWork]) -> Sm:
        """Tiles, one after the other."""
        roles = {f"mma {w}": self.mma(w, work) for w in range(self.warpgroups)}
        return self.sm.run({"producer": self.producer(work)} | roles)

    def producer(self, work: Sequence[TileWork]) -> Needs:
        """Warp 0, which loads."""
        step = 0
        for tile, (num, _) in enumerate(work):
            yield self.tiles.wait_empty(tile)
            self.sm.fill("Q", self.tiles, tile)
            for _ in range(num):
                for what, ring in (("K", self.k), ("V", self.v)):
                    yield ring.wait_empty(step)
                    self.sm.fill(what, ring, step)
                step += 1

    def mma(self, w: int, work: Sequence[TileWork]) -> Needs:
        """A warpgroup of 64 queries. The scores of a step are issued before the output of the step before."""
        c, m, sm, me = self.config, self.sm.machine, self.sm, f"mma {w}"
        products = sm.products
        elements = c.tile_n / 2  # of the scores, a thread
        scores = size(m, c.tile_n, c.tile_d, a_in_registers=float(c.q_in_registers))
        output = size(m, c.tile_dv, c.tile_n, a_in_registers=1)
        if w == self.warpgroups - 1:
            self.turns[0].arrive()
        turn, step = 0, 0
        first = True
        for tile, (num, masked) in enumerate(work):
            for i in range(num):
                if i == 0:
                    yield self.tiles.wait_full(tile)
                yield self.k.wait_full(step)
                if not first:
                    turn += 1
                    yield self.turns[w].phase(turn)
                s = products.issue(me, "S", *scores)
                if first:
                    yield s
                    self.k.release(step)
                    first = False
                else:
                    yield self.v.wait_full(step - 1)
                    o = products.issue(me, "O", *output)
                    self.turns[(w + 1) % self.warpgroups].arrive()
                    yield s
                    self.k.release(step)
                    yield o
                    self.v.release(step - 1)
                if i == 0 and tile > 0:
                    yield from self.epilogue(me, tile - 1)
                # P of a tile's first block is computed with its maxima: an instruction and a half more an element.
                each = (5.0 if i == 0 else 3.5) + (MASK if i < masked else 0)
                yield from sm.compute(me, "softmax", each * elements + 110, elements)
                step += 1
        yield self.v.wait_full(step - 1)
        yield products.issue(me, "O", *output)
        yield from self.epilogue(me, len(work) - 1)

    def epilogue(self, me: str, tile: int) -> Needs:
        """O through shared memory."""
        c = self.config
        yield from self.sm.compute(me, "epilogue", 1.5 * c.tile_dv / 2 + 150, shared=2.0 * 64 * c.tile_dv)
        self.tiles.release(tile)


class BackwardCta:
    """``sm90.backward.cta``: a CTA works on tiles of 128 keys, of so many blocks of queries each."""

    def __init__(self, config: BackwardCtaConfig, machine: Machine = H200) -> None:
        self.config = config
        self.sm = Sm(machine)
        self.rows, self.columns, self.persistent, self.ctas = config.tile_n, config.tile_m, True, 1
        self.num_passes = 1
        self.warpgroups = config.num_mma_warpgroups
        schedule = cta_schedule(config)
        rings = self.sm.rings(schedule)
        self.warp_3_reads_tiles = any(arrivals.role == "filling" for arrivals in schedule.pipeline("tiles").empty)
        self.tiles, self.k, self.v, self.q, self.do, self.ds = (
            rings[name] for name in ("tiles", "k", "v", "q", "do", "ds")
        )
        self.out = [rings[f"out_{w}"] for w in range(1, 1 + self.warpgroups)]

    def run(self, work: Sequence[TileWork]) -> Sm:
        """Tiles, one after the other."""
        roles = {"producer": self.producer(work)}
        for w in range(self.warpgroups):
            roles |= {f"mma {w}": self.mma(w, work), f"store {w}": self.store(w, work)}
        if self.warp_3_reads_tiles:
            roles["filling"] = self.fill(work)
        return self.sm.run(roles)

    def fill(self, work: Sequence[TileWork]) -> Needs:
        """Warp 3, whose work takes no other warp any time, reads the fields of a tile."""
        for tile, _ in enumerate(work):
            yield self.tiles.wait_full(tile)
            self.tiles.release(tile)

    def producer(self, work: Sequence[TileWork]) -> Needs:
        """Warp 0, which loads."""
        step = 0
        for tile, (num, _) in enumerate(work):
            yield self.tiles.wait_empty(tile)
            self.tiles.arrive(tile)
            yield self.k.wait_empty(tile)
            self.sm.fill("K", self.k, tile)
            for i in range(num):
                for what, ring in (("Q", self.q), ("dO", self.do)):
                    yield ring.wait_empty(step)
                    self.sm.fill(what, ring, step)
                if i == 0:
                    yield self.v.wait_empty(tile)
                    self.sm.fill("V", self.v, tile)
                step += 1

    def mma(self, w: int, work: Sequence[TileWork]) -> Needs:
        """A warpgroup of 64 keys; dQ is that of the step before."""
        c, m, sm, me = self.config, self.sm.machine, self.sm, f"mma {w}"
        products, out = sm.products, self.out[w]
        elements = c.tile_m / 2  # of the scores, a thread
        scores = size(m, c.tile_m, c.tile_d, a_in_registers=c.columns_K / c.tile_d)
        gradient = size(m, c.tile_d, c.tile_m, a_in_registers=1)
        queries = size(m, c.columns_dQ, c.tile_n)
        step = piece = 0
        pending = False  # a dQ whose barrier the store warp has yet to get an arrival at
        for tile, (num, masked) in enumerate(work):
            yield self.tiles.wait_full(tile)
            for i in range(num):
                if i == 0:
                    yield self.k.wait_full(tile)
                yield self.q.wait_full(step)
                s = products.issue(me, "S", *scores)
                if pending:
                    yield from sm.compute(me, "fence", 20)
                    out.arrive(piece - 1)
                    pending = False
                if i == 0:
                    yield self.v.wait_full(tile)
                yield self.do.wait_full(step)
                dp = products.issue(me, "dP", *size(m, c.tile_m, c.tile_d))
                yield s
                each = 2.6 + (MASK if i < masked else 0)
                yield from sm.compute(me, "weigh", each * elements + 80, elements, shared=64 * c.tile_m)
                dv = products.issue(me, "dV", *gradient)
                yield dp
                if i + 1 == num:
                    self.v.release(tile)
                yield from sm.compute(me, "dS", 2.7 * elements + 80, shared=64 * c.tile_m)
                if step > 0:
                    yield self.ds.wait_full(step - 1)
                yield from sm.compute(me, "write dS", 0.5 * elements + 60, shared=2.0 * 64 * c.tile_m)
                yield dv
                self.do.release(step)
                if step > 0:
                    dq = products.issue(me, "dQ", *queries)
                dk = products.issue(me, "dK", *gradient)
                if step > 0:
                    yield dq
                    if i == 0 and tile > 0:
                        self.k.release(tile - 1)
                self.ds.arrive(step)
                if step > 0:
                    yield out.wait_empty(piece)
                    yield from self.put_out(me)
                    piece += 1
                    pending = c.short_steps
                    if not pending:
                        out.arrive(piece - 1)
                yield dk
                self.q.release(step)
                step += 1
            if pending:
                out.arrive(piece - 1)
                pending = False
            for what in ("dV", "dK"):
                yield from sm.compute(me, f"round {what}", 1.5 * c.tile_d / 2 + 60)
                yield out.wait_empty(piece)
                yield from sm.compute(me, f"write {what}", 60, shared=2.0 * 64 * c.tile_d)
                out.arrive(piece)
                piece += 1
            self.tiles.release(tile)
        yield self.ds.wait_full(step - 1)
        yield products.issue(me, "dQ", *queries)
        yield out.wait_empty(piece)
        yield from self.put_out(me)
        out.arrive(piece)

    def put_out(self, me: str) -> Needs:
        """A warpgroup's dQ into shared memory."""
        columns = self.config.columns_dQ
        yield from self.sm.compute(me, "put out dQ", 0.5 * columns + 100, shared=4.0 * 64 * columns)

    def store(self, w: int, work: Sequence[TileWork]) -> Needs:
        """Warp 1 or 2: the last dQ of a tile comes with the first step of the next one."""
        c, out, piece = self.config, self.out[w], 0
        for tile, (num, _) in enumerate(work):
            pieces = [("add dQ", 4.0 * 64 * c.columns_dQ)] * (num if tile else num - 1)
            pieces += [("store dV", 2.0 * 64 * c.tile_d), ("store dK", 2.0 * 64 * c.tile_d)]
            for what, size in pieces:
                yield out.wait_full(piece)
                yield from self.sm.add(f"store {w}", what, size)
                out.release(piece)
                piece += 1
            self.tiles.release(tile)
        yield out.wait_full(piece)
        yield from self.sm.add(f"store {w}", "add dQ", 4.0 * 64 * c.columns_dQ)


class BackwardCluster:
    """``sm90.backward.cluster``: one of two CTAs that work on 64 keys each of a tile.

    The other CTA does the same at the same time, so what comes from it comes when this one sends.
    """

    def __init__(self, config: BackwardClusterConfig, machine: Machine = H200) -> None:
        self.config = config
        self.sm = Sm(machine)
        self.rows, self.columns, self.persistent, self.ctas = config.tile_n, config.tile_m, False, 2
        self.num_passes = 1
        rings = self.sm.rings(cluster_schedule(config))
        self.k, self.v, self.q, self.do, self.p, self.ds = (rings[name] for name in ("k", "v", "q", "do", "p", "ds"))

    def run(self, work: Sequence[TileWork]) -> Sm:
        """A tile: a CTA has only one."""
        (only,) = work
        roles = {"producer": self.producer(only), "score": self.score(only)}
        return self.sm.run(roles | {"differentiate": self.differentiate(only), "sum": self.sum_queries(only)})

    def producer(self, work: TileWork) -> Needs:
        """Warps 0 and 1; each block comes once for both CTAs, so that each reads half of it."""
        c, fill = self.config, 0
        self.sm.fill("K", self.k, 0)
        self.sm.fill("V", self.v, 0)
        for step in range(work.blocks):
            yield self.q.wait_empty(step)
            self.sm.fill("Q", self.q, step)
            for _ in range(c.parts_dO):
                yield self.do.wait_empty(fill)
                self.sm.fill("dO", self.do, fill)
                fill += 1

    def compute(self, me: str, what: str, instructions: float, exp2: float = 0.0, *, shared: float) -> Needs:
        """Computes as ``Sm.compute`` does, but loads and stores queue with additions from registers."""
        now = self.sm.simulation.now
        yield self.sm.adds.take(now, 0.0, me, what) - now
        yield from self.sm.compute(me, what, instructions, exp2, shared)

    def score(self, work: TileWork) -> Needs:
        """Warpgroup 1: P and dV."""
        c, m, sm, me = self.config, self.sm.machine, self.sm, "score"
        products = sm.products
        scores = size(m, 64, c.tile_d, a_in_registers=float(c.keys_in_registers))
        gradient = size(m, c.columns_dO, 64, a_in_registers=1)
        yield self.k.wait_full(0)
        for step in range(work.blocks):
            yield self.q.wait_full(step)
            yield products.issue(me, "S", *scores)
            yield from self.compute(me, "weigh", 200 + (MASK * 32 if step < work.masked else 0), 32, shared=64 * 64)
            self.q.release(step)
            yield self.p.wait_empty(step)
            yield from self.compute(me, "hand over P", 30, shared=2 * 64 * 64)
            self.p.arrive(step)
            ends = []
            for part in range(c.parts_dO):
                yield self.do.wait_full(step * c.parts_dO + part)
                ends.append(products.issue(me, "dV", *gradient))
            for part, end in enumerate(ends):
                yield end
                self.do.release(step * c.parts_dO + part)
        yield from sm.compute(me, "store dV", 1.5 * c.tile_dv / 2 + 150, shared=2 * 64 * c.tile_dv)

    def differentiate(self, work: TileWork) -> Needs:
        """Warpgroup 2: gradients of scores, and dK."""
        c, m, sm, me = self.config, self.sm.machine, self.sm, "differentiate"
        products = sm.products
        scores = size(m, 64, c.columns_dO, a_in_registers=float(c.keys_in_registers))
        yield self.v.wait_full(0)
        for step in range(work.blocks):
            ends = []
            for part in range(c.parts_dO):
                yield self.do.wait_full(step * c.parts_dO + part)
                ends.append(products.issue(me, "dP", *scores))
            for part, end in enumerate(ends):
                yield end
                self.do.release(step * c.parts_dO + part)
            yield self.q.wait_full(step)
            yield self.p.wait_full(step)
            yield from self.compute(me, "dS", 230, shared=3 * 64 * 64)
            self.p.release(step)
            dk = products.issue(me, "dK", *size(m, c.tile_d, 64, a_in_registers=1))
            yield self.ds.wait_empty(step)
            yield from self.compute(me, "hand out dS", 80, shared=4 * 64 * 64)
            self.ds.arrive(step)
            sm.simulation.after(m.load / 2, partial(self.ds.arrive, step))  # the other CTA's half
            yield dk
            self.q.release(step)
        yield from sm.compute(me, "store dK", 1.5 * c.tile_d / 2 + 150, shared=2 * 64 * c.tile_d)

    def sum_queries(self, work: TileWork) -> Needs:
        """Warpgroup 3: half of the columns of dQ, added from registers."""
        c, m, sm, me = self.config, self.sm.machine, self.sm, "sum"
        products = sm.products
        for step in range(work.blocks):
            yield self.ds.wait_full(step)
            yield products.issue(me, "dQ", *size(m, c.columns_dQ, 128))
            self.ds.release(step)
            yield from sm.compute(me, "dQ", 67)
            end = sm.adds.take(sm.simulation.now, 4.0 * 64 * c.columns_dQ / m.adds, me, "add dQ")
            yield end - sm.simulation.now
