"""An SM: its units, and the moves that all kernels make with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from flash_attn_cute.kernels.schedule import Arrivals, Schedule
from lab.model.machine import Machine
from lab.model.simulation import Barrier, Needs, Products, Ring, Simulation, Unit

MASK = 2.9  # instructions that hide an element, counted in the Hopper kernels' compiled code


class TileWork(NamedTuple):
    """Work of a CTA on a tile: blocks of the other side, the first ``masked`` of which need a mask."""

    blocks: int
    masked: int = 0


class Kernel(Protocol):
    """Model of a CTA on its SM. Rows are queries in the forward pass, keys in the backward pass."""

    rows: int  # of a tile
    ctas: int  # that work on a tile together
    columns: int  # of a block
    persistent: bool  # it works on one tile after the other
    num_passes: int  # over the blocks of a tile

    def run(self, work: Sequence[TileWork]) -> "Sm":
        """Simulates the work on these tiles. For one use."""


class Maker(NamedTuple):
    """Makes a CTA to simulate: one of a kernel, a configuration or a design of it, and the GPU that it is on."""

    kernel: Callable[[Any, Machine], Kernel]
    design: Any
    machine: Machine

    def __call__(self) -> Kernel:
        """Makes a kernel."""
        return self.kernel(self.design, self.machine)


class Sm:
    """One SM, and the simulation of the CTA on it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.simulation = Simulation(machine.wake)
        self.tensor, self.exp2, self.shared = Unit("tensor cores"), Unit("exp2"), Unit("shared memory")
        self.tmem = Unit("tensor memory")
        self.issue, self.l2, self.adds = Unit("instructions"), Unit("L2 reads"), Unit("L2 additions")
        self.products = Products(self.simulation, self.tensor, self.shared, machine.handover)
        self.units = self.tensor, self.exp2, self.shared, self.tmem, self.issue, self.l2, self.adds

    def run(self, roles: Mapping[str, Needs]) -> "Sm":
        """Simulates roles, by their names, until all have ended; returns itself."""
        for name, needs in roles.items():
            self.simulation.start(name, needs)
        self.simulation.run()
        return self

    def ring(self, name: str, stages: int, *, full: int = 1, empty: int = 1) -> Ring:
        """Stages of shared or tensor memory."""
        return Ring(self.simulation, name, stages, full=full, empty=empty)

    def rings(self, schedule: Schedule) -> dict[str, Ring]:
        """Rings of a kernel's pipelines, by name, at whose barriers processes of the kernel's own CTA arrive.

        A warpgroup is one process, and so is each warp of a role of fewer. An arrival that TMA's bytes come with is
        theirs. Bytes that come beside arrivals of several warps are one more.
        """

        def count(all_of: tuple[Arrivals, ...]) -> int:
            warps = [min(arrivals.count, len(schedule.role(arrivals.role).warps)) for arrivals in all_of]
            return sum(number // 4 if number % 4 == 0 else number for number in warps)

        return {
            p.name: Ring(
                self.simulation,
                p.name,
                p.stages,
                full=count(p.full) + (p.num_bytes > 0 and p.full_count > 1),
                empty=count(p.empty) or 1,
                num_bytes=p.num_bytes,
            )
            for p in schedule.pipelines
        }

    def compute(
        self,
        who: str,
        what: str,
        instructions: float,
        exp2: float = 0.0,
        shared: float = 0.0,
        tmem: float = 0.0,
        *,
        goes_on: bool = False,
    ) -> Needs:
        """A warpgroup computes.

        Args:
            who: its name.
            what: what it computes.
            instructions: of a thread.
            exp2: exponentials of a thread.
            shared: bytes that the warpgroup reads from shared memory or writes there.
            tmem: the same of tensor memory.
            goes_on: with what it has done before, so that nothing has to be waited for at first.
        """
        m = self.machine
        clocks = {
            self.issue: instructions * m.dispatch,
            self.exp2: 128 * exp2 / m.exp2,
            self.shared: m.bytes_shared(shared),
            self.tmem: tmem / m.tmem,
        }
        if not goes_on:
            yield m.handover
        yield from self.simulation.work(who, what, {unit: x for unit, x in clocks.items() if x})

    def read(self, who: str, what: str, size: float, arrived: Barrier) -> None:
        """Threads begin to load so many bytes into registers, which arrive at a barrier as what TMA loads does."""
        self.simulation.start(f"{who} reads {what}", self._read(who, what, size, arrived))

    def _read(self, who: str, what: str, size: float, arrived: Barrier) -> Needs:
        yield self.machine.load
        yield from self.simulation.work(who, what, {self.l2: size / self.machine.l2})
        arrived.arrive()

    def load(self, what: str, size: float, ring: Ring, step: int) -> None:
        """TMA begins to load so many bytes, and arrives when they are there."""
        self.simulation.start(f"load {what}", self._load(what, size, ring, step))

    def fill(self, what: str, ring: Ring, step: int) -> None:
        """``load`` of the bytes of a stage."""
        self.load(what, ring.num_bytes, ring, step)

    def _load(self, what: str, size: float, ring: Ring, step: int) -> Needs:
        yield self.machine.load
        clocks = {self.l2: size / self.machine.l2, self.shared: self.machine.bytes_shared(size)}
        yield from self.simulation.work("TMA", what, clocks)
        ring.arrive(step)

    def add(self, who: str, what: str, size: float) -> Needs:
        """TMA reads so many bytes from shared memory to add them to global memory; until they have been read."""
        clocks = {self.adds: size / self.machine.adds, self.shared: self.machine.bytes_shared(size)}
        yield from self.simulation.work(who, what, clocks, least=self.machine.load / 2)
