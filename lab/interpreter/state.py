"""The state of a CTA: its memory, barriers and warps, and what its engines have been asked for."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Mask = Array | None  # of lanes; None: all
Read = Callable[["Warp"], Array]
Write = Callable[["Warp", Array, Mask], None]
Effect = Callable[["Warp", Mask], None]  # of an instruction
Name = int | str  # a warp's number, or of an engine "loads", "stores", "products", "arrivals" or "warpgroups"
Lagging = frozenset[Name | tuple[int, Name]]  # of every CTA, or with a rank in a cluster of one

GLOBAL, SHARED, PARAMS = 1 << 28, 1 << 10, 1 << 46  # where each begins
PARAM_PITCH = 1 << 12
RANK_PITCH = 1 << 24  # from an address in shared memory to the same of the next CTA of the cluster
LANES = np.arange(32)
ALL = np.ones(32, bool)
COLUMNS = 512  # of tensor memory
_MOST_BARRIERS, _MOST_WARPS = 256, 32  # mbarriers of a cluster, and warps of a CTA
_MOST_CTAS = 16  # of a cluster


class Launch(NamedTuple):
    """A launch of a kernel: its parameters, and the sizes of all."""

    params: Sequence[bytes]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 2048  # bytes of a CTA's shared memory
    name: str = ""  # the kernel's


class FaultError(Exception):
    """A kernel does what no GPU would do, or nothing any more."""


def address_of(offset: int) -> int:
    """The address of a byte in global memory."""
    return GLOBAL + offset


def only(mask: Mask) -> int:
    """The lane that does something for its warp."""
    if mask is None or mask.sum() != 1:
        raise FaultError("something for one thread to do is done by another number of them")
    return int(np.argmax(mask))


def converged(mask: Mask) -> None:
    """Refuses what a part of a warp does, where it is for all of it to do."""
    if mask is not None:
        raise FaultError("something for a whole warp to do is done by a part of it")


def lanes_of(mask: Mask) -> Array:
    """Which lanes do something, as a mask."""
    return ALL if mask is None else mask


def nothing_known() -> Array:
    """A warp's knowledge at first: how many phases of each mbarrier are over, and how often each warp has arrived."""
    return np.zeros(_MOST_BARRIERS + _MOST_CTAS * _MOST_WARPS, np.int32)


def warp_number(rank: int, index: int) -> int:
    """Where a warp is in what warps know: one of the CTA of a rank in the cluster."""
    return _MOST_BARRIERS + _MOST_WARPS * rank + index


@dataclass
class Barrier:
    """An mbarrier in shared memory.

    An arrival brings what its warp knows. A warp that waits for the phase gets to know it.
    """

    count: int
    pending: int
    number: int = 0  # of the cluster's
    bytes: int = 0
    phase: int = 0
    committed: int = 0  # phases, up to the last one in which a commit of another CTA has arrived
    known: Array = field(default_factory=nothing_known)  # to warps that have arrived, up to the end of the last phase
    _gathered: Array = field(default_factory=nothing_known)  # to warps that have arrived so far
    # Arrivals in the two phases before this one, and in this: a warp's number, and how often it had arrived. A warp
    # knows that a phase is over if it knows of all its arrivals. None: an arrival of a commit or a copy.
    _arrivals: list[list[tuple[int, int] | None]] = field(default_factory=lambda: [[], [], []])

    def arrive(self, known: Array, count: int = 1, by: int | None = None) -> None:
        """Arrivals of a warp's thread, or of a commit."""
        self.pending -= count
        self._check(known, None if by is None else (by, int(known[by])))

    def is_over_for(self, known: Array) -> bool:
        """Whether a warp that knows so much knows that all phases but the last are over."""
        if known[self.number] >= self.phase - 1:
            return True
        return all(x is not None and known[x[0]] >= x[1] for x in self._arrivals[0])

    def complete(self, known: Array, num_bytes: int) -> None:
        """Bytes of a copy have arrived."""
        self.bytes -= num_bytes
        self._check(known, None)

    def expect(self, num_bytes: int) -> None:
        """Bytes are announced; hardware counts up to 2^20 - 1 of them."""
        self.bytes += num_bytes
        if abs(self.bytes) >= 1 << 20:
            raise FaultError(f"an mbarrier that {self.bytes} bytes are to come to")

    def _check(self, known: Array, arrival: tuple[int, int] | None) -> None:
        if self.pending < 0:
            raise FaultError("more arrivals than a phase has")
        self._arrivals[-1].append(arrival)
        self._gathered = np.maximum(self._gathered, known)
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self._gathered[self.number] = self.phase
            self.known, self._arrivals = self._gathered, [*self._arrivals[1:], []]


def within_cta(address: Any) -> Any:
    """An address in shared memory, or several, without the bits that say whose it is."""
    return address % RANK_PITCH


def ranks_of(mask: int) -> tuple[int, ...]:
    """CTAs of a cluster that bits of a mask stand for."""
    return tuple(rank for rank in range(16) if mask >> rank & 1)


class Product(NamedTuple):
    """An MMA that has been issued."""

    target: int  # column of tensor memory
    a: int  # column of tensor memory, or a descriptor
    a_in_tensor_memory: bool
    b: int
    instruction: int
    accumulates: bool
    by_pair: bool  # of CTAs


class Commit(NamedTuple):
    """Arrivals when all products that were issued before are done."""

    barrier: int
    ranks: tuple[int, ...]  # of the CTAs at whose barriers, at the same place
    known: Array  # phases that are over, by the warp that issued it


@dataclass(eq=False)
class Sum:
    """A warp's part of the accumulators of products under way: numbers of each register, whose names are given."""

    names: tuple[str, ...]
    values: Array  # float32, (registers, 32)
    num_products: int = 0  # that the warp has not waited for


@dataclass(eq=False)
class WarpProduct:
    """A warp's part of a ``wgmma``: 16 rows."""

    warp: "Warp"
    sum: Sum
    a: tuple[tuple[str, Array], ...]  # registers of A, if it is in such, and what they held
    multiply: Callable[[], Array]  # what is added to the sum, or is it: (registers, 32)
    accumulates: bool
    is_done: bool = False


@dataclass(kw_only=True, eq=False)
class Copy:
    """A copy that has been asked for. One to global memory is read at one time, and written at a later one."""

    warp: "Warp"  # that has asked for it
    barrier: int = 0  # where one to shared memory signals its bytes, in its own CTA or in another one of the cluster
    data: Array | None = None  # what one to global memory has read
    is_written: bool = False
    known: Array = field(init=False)  # phases that are over, by the warp when it asked

    def __post_init__(self) -> None:
        self.known = self.warp.known

    @property
    def is_read(self) -> bool:
        """Whether shared memory has been read."""
        return self.data is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that a copy to shared memory signals."""
        raise NotImplementedError

    def signal(self, cta: "Cta") -> None:
        """Signals the mbarrier that a copy to shared memory is done."""
        cta.barrier(self.barrier, of_cluster=True).complete(self.known, self.num_bytes)

    def halves(self) -> list["Copy"]:
        """The copy in two, which are done at different times; what is too small for that stays whole."""
        return [self]

    def load(self, cta: "Cta") -> None:
        """Copies from global to shared memory."""
        raise NotImplementedError

    def read(self, cta: "Cta") -> Array:
        """Reads the source from shared memory."""
        raise NotImplementedError

    def write(self, cta: "Cta", data: Array) -> None:
        """Writes data into global memory."""
        raise NotImplementedError


class Written(NamedTuple):
    """A write to global memory: which bytes it changes, and what does it."""

    first: int
    last: int
    write: Callable[[], None]


@dataclass
class Late:
    """The effects of a warp that are still to be shown."""

    to_async: list[tuple[Array, Callable[[Array], None]]] = field(default_factory=list)  # by lanes
    loads: list[Callable[[], None]] = field(default_factory=list)  # from tensor memory
    stores: list[Callable[[], None]] = field(default_factory=list)  # to tensor memory
    to_global: list[Written] = field(default_factory=list)
    reading: Array = field(default_factory=lambda: np.zeros(32, bool))  # lanes that have read shared memory


@dataclass
class Cluster:
    """CTAs that reach each other's shared memory."""

    ctas: list["Cta"] = field(default_factory=list)
    num_warps: int = 0  # of all of them
    arrived: int = 0  # warps, at its barrier
    phase: int = 0  # of its barrier
    known: Array = field(default_factory=nothing_known)  # by warps that have arrived there
    num_barriers: int = 0  # mbarriers of all of them
    to_global: list[Written] = field(default_factory=list)  # by warps that have arrived at barriers since

    def arrive(self, known: Array) -> None:
        """Counts the arrival of a warp, with what it knows."""
        self.arrived, self.known = self.arrived + 1, np.maximum(self.known, known)
        if self.arrived == self.num_warps:
            self.arrived, self.phase = 0, self.phase + 1


@dataclass
class Cta:
    """State that the threads of a CTA have in common."""

    cluster: Cluster
    rank: int  # in it
    index: tuple[int, int, int]  # in the grid
    grid: tuple[int, int, int]
    params: Sequence[bytes]
    memory: Array  # global memory, in bytes
    tensors: Sequence[slice]  # where tensors are in it; none: anywhere
    shared: Array  # in bytes
    draw: random.Random  # decides whose turn it is
    shown: Array = field(init=False)  # shared memory as TMA and tensor cores see it
    # Of warps that read shared memory, for each 16 bytes: which arrival of the warp the last read has ended ahead of.
    reads: dict[int, Array] = field(default_factory=dict)
    tensor_memory: Array = field(default_factory=lambda: np.full((128, COLUMNS), 0x7FC0DEAD, np.uint32))
    columns: int = 0  # of tensor memory that are allocated
    barriers: dict[int, Barrier] = field(default_factory=dict)
    # What engines have been asked for.
    loads: list[Copy] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)
    products: deque[Product | Commit] = field(default_factory=deque)
    arrivals: list[tuple[int, Array]] = field(default_factory=list)  # of commits, at mbarriers, with what they know
    warp_products: list[WarpProduct] = field(default_factory=list)  # of warpgroups
    issued: dict[tuple[int, int], list[Any]] = field(default_factory=dict)  # warpgroup, number: its wgmma, of each warp
    is_over: bool = False  # all its warps have returned
    free_registers: int = 0  # a thread of a warp, that some warps have given back and no others have got

    def __post_init__(self) -> None:
        self.shown = self.shared.copy()

    @property
    def first_shared(self) -> int:
        """The address of the first byte of its shared memory."""
        return SHARED + self.rank * RANK_PITCH

    def owner(self, address: int) -> "Cta":
        """The CTA of the cluster in whose shared memory an address is."""
        rank = address // RANK_PITCH
        if not 0 <= rank < len(self.cluster.ctas):
            raise FaultError(f"an address of no CTA of the cluster: {address}")
        if self.cluster.ctas[rank].is_over:
            raise FaultError("shared memory of a CTA that is over")
        return self.cluster.ctas[rank]

    def barrier(self, address: int, *, of_cluster: bool = False) -> Barrier:
        """The mbarrier at an address: its own, or of any CTA of the cluster."""
        if not of_cluster and address // RANK_PITCH != self.rank:
            raise FaultError(f"an mbarrier of another CTA: {address}")
        barriers = self.owner(address).barriers
        if address not in barriers:
            raise FaultError(f"no mbarrier at {address}")
        return barriers[address]


@dataclass(eq=False)
class Warp:
    """A warp's registers, and where its lanes are: several places where they have gone different ways."""

    cta: Cta
    index: int
    num_registers: int  # a thread's: what it holds of the CTA's
    registers: dict[str, Array] = field(default_factory=dict)
    places: dict[int, Array] = field(default_factory=lambda: {0: ALL})
    held: set[int] = field(default_factory=set)  # places where lanes wait for the others of the warp
    waits_for: tuple[str, int, int] | None = None
    is_done: bool = False
    polls: bool = False  # whether it does no more than look for what others write
    open_group: list[Copy] = field(default_factory=list)  # of stores
    groups: list[list[Copy]] = field(default_factory=list)
    late: Late = field(default_factory=Late)
    meeting: int | None = None  # the phase of the cluster's barrier at which it has arrived
    known: Array = field(default_factory=nothing_known)  # of mbarriers and warps of the cluster; never written to
    # Products of warpgroups: those that no group has, the groups that it has not waited for, and their sums.
    open_products: list[WarpProduct] = field(default_factory=list)
    product_groups: list[list[WarpProduct]] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    num_products: int = 0  # issued
    fenced: dict[str, Array] = field(default_factory=dict)  # registers as they were at the last wgmma.fence

    @property
    def elected(self) -> Array:
        """The one lane that hardware chooses, which is any, and always the same."""
        return np.eye(len(LANES), dtype=bool)[(5 + 7 * self.index) % len(LANES)]

    def __post_init__(self) -> None:
        for name, value in {
            "%tid.x": 32 * self.index + LANES,
            **{f"%ctaid.{axis}": np.full(32, n) for axis, n in zip("xyz", self.cta.index, strict=True)},
            **{f"%nctaid.{axis}": np.full(32, n) for axis, n in zip("xyz", self.cta.grid, strict=True)},
            "%laneid": LANES,
            "%cluster_ctarank": np.full(32, self.cta.rank),
        }.items():
            self.registers[name] = value.astype(np.uint32)

    @property
    def number(self) -> int:
        """Where it is in what warps know."""
        return warp_number(self.cta.rank, self.index)

    def count_arrival(self) -> None:
        """Counts an arrival that it is about to make."""
        self.known = self.known.copy()
        self.known[self.number] += 1

    def learn(self, known: Array) -> None:
        """Gets to know what others know."""
        self.known = np.maximum(self.known, known)

    def go_behind(self, address: int) -> None:
        """Ends a wait for the last phase of the mbarrier at an address, which names the phase by its parity.

        Raises:
            FaultError: the phase before it may still be under way, as far as the warp knows. The one before that would
                then be taken for the one that is waited for.
        """
        barrier = self.cta.barrier(address)
        if not barrier.is_over_for(self.known):
            where = f"warp {self.index} of CTA {self.cta.rank}, the mbarrier at byte {address - self.cta.first_shared}"
            raise FaultError(f"{where}: waits for phase {barrier.phase - 1}, and may be two phases early")
        self.learn(barrier.known)

    def get_registers(self, count: int) -> bool:
        """Raises what it holds to a number; returns whether there are so many. It never gives any back."""
        lacking = max(count - self.num_registers, 0)
        if lacking > self.cta.free_registers:
            return False
        self.cta.free_registers -= lacking
        self.num_registers += lacking
        return True

    def pending_groups(self, state: str) -> int:
        """Groups of stores that are not all in a state (``is_read``, ``is_written``), or that come behind such."""
        done = [all(getattr(store, state) for store in group) for group in self.groups]
        return len(done) - next((i for i, is_done in enumerate(done) if not is_done), len(done))
