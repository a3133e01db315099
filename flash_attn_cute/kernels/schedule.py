"""A kernel's schedule as data: its roles, pipelines, shared and tensor memory, and the steps of its steady state.

A main kernel has one description, a function of its configuration, in a file beside it (``*_schedule.py``). Shared
memory, arrive counts, expected bytes and registers follow from it, and the page that ``python -m
flash_attn_cute.kernels describe`` prints. Needs no cutlass.
"""

import importlib
import math
from dataclasses import dataclass
from typing import Any

KEY_TILE_FIELDS = 16  # Int32 that describe a tile of keys: ``common.key_tiles.KeyTile``
PIECE_FIELDS = 12  # Int32 that describe a piece: ``common.bias_pieces.Piece``
PIECE_BATCH = 32  # pieces that are published together
PIECE_STAGES = 2  # batches that a producer may have published
PIECE_OPERANDS = ("sQ", "sK", "sdO", "sV")  # buffers of a piece's operands
QUERY_TILE_FIELDS = 12  # Int32 that describe a tile of queries: ``common.query_tiles.QueryTile``

BARRIER_BYTES = 8  # of an mbarrier
_BOTH = "both CTAs"  # of a pair
ELEMENT_BYTES = {"operand": 2, "int32": 4, "float32": 4, "uint8": 1}  # an operand has the configuration's dtype


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of a role at a barrier, for one phase."""

    role: str
    each: str  # who of the role arrives: "", one thread; or what stands ahead of the role's name
    count: int
    ctas: str = ""  # whose roles arrive at the barrier of the cluster's first CTA; "": those of its own CTA


@dataclass(frozen=True)
class Role:
    """Warps that execute the same code."""

    name: str
    warps: range  # of the CTA
    registers: int  # a thread
    does: str

    def once(self) -> Arrivals:
        """One arrival, by one thread."""
        return Arrivals(self.name, "", 1)

    def commit(self) -> Arrivals:
        """One arrival by the tensor cores, when the products that the role has issued are done."""
        return Arrivals(self.name, "a commit of", 1)

    def per_warp(self, ctas: int = 1) -> Arrivals:
        """One arrival by each warp, in so many CTAs."""
        return Arrivals(self.name, "each warp of", len(self.warps) * ctas, _BOTH if ctas > 1 else "")

    def per_warp_of_a_warpgroup(self, ctas: int = 1) -> Arrivals:
        """One arrival by each warp of one of its warpgroups, in so many CTAs."""
        return Arrivals(self.name, "each warp of a warpgroup of", 4 * ctas, _BOTH if ctas > 1 else "")

    def per_thread(self) -> Arrivals:
        """One arrival by each thread."""
        return Arrivals(self.name, "each thread of", 32 * len(self.warps))


@dataclass(frozen=True)
class Pipeline:
    """Stages that a producer fills and consumers release, each with a full and, by default, an empty mbarrier."""

    name: str
    stages: int  # 0: the configuration does without
    count: str  # what goes through in one step
    full: tuple[Arrivals, ...]  # of producers, when a stage is filled
    empty: tuple[Arrivals, ...]  # of consumers, when they have read it; none: another pipeline shows that
    num_bytes: int = 0  # that TMA brings to a stage
    has_empty: bool = True  # False: stages are filled once, or what else shows that they are free needs no barrier here

    @property
    def full_count(self) -> int:
        """Arrive count of a full barrier."""
        return sum(arrivals.count for arrivals in self.full)

    @property
    def empty_count(self) -> int:
        """Arrive count of an empty barrier; 1 if no role arrives."""
        return sum(arrivals.count for arrivals in self.empty) or 1

    @property
    def arrive_counts(self) -> tuple[int, ...]:
        """Arrive counts of all barriers, in the order of their addresses: those of full stages, then of empty ones."""
        return (self.full_count,) * self.stages + (self.empty_count,) * (self.stages * self.has_empty)


@dataclass(frozen=True)
class Buffer:
    """An array in shared memory."""

    name: str
    shape: tuple[int, ...]  # a size of 0: the configuration does without
    modes: str  # what each size counts
    dtype: str = "operand"  # a key of ``ELEMENT_BYTES``
    align: int = 4  # bytes
    swizzle: int = 0  # columns of which its swizzled atoms have a divisor; 0: it is not swizzled
    apart: int = 0  # elements from one index of the last mode to the next, if that is not contiguous
    place_of: str = ""  # the buffer in whose place it lies; "" if it has its own
    offset: int = 0  # elements, from where that place begins

    @property
    def extent(self) -> int:
        """Number of elements from its first to its last."""
        return self.shape[-1] * self.apart if self.apart else math.prod(self.shape)

    @property
    def elements(self) -> int:
        """Number of elements of its own place."""
        return 0 if self.place_of else self.extent

    @property
    def num_bytes(self) -> int:
        """Bytes of its own place."""
        return self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def stage_bytes(self) -> int:
        """Bytes of one index of the last mode."""
        return math.prod(self.shape[:-1]) * ELEMENT_BYTES[self.dtype]


def operand(name: str, shape: tuple[int, ...], modes: str, swizzle: int = 0, **others: Any) -> Buffer:
    """A tile for TMA and the tensor cores, in swizzled atoms over ``swizzle`` of its columns, by default over all."""
    return Buffer(name, shape, modes, align=1024, swizzle=swizzle or shape[1], **others)


@dataclass(frozen=True)
class Columns:
    """Columns of tensor memory, 32 bits each."""

    name: str
    first: int
    count: int
    holds: str


@dataclass(frozen=True)
class Order:
    """Data that one proxy, thread or CTA writes and another reads, and what orders the two."""

    data: str
    by: str


@dataclass(frozen=True)
class Step:
    """A step of a role, once an iteration of its mainloop."""

    role: str
    waits: str  # barriers, such as "k.full", or another event
    does: str
    signals: str = ""  # barriers at which the role, or what it has issued, arrives


@dataclass(frozen=True)
class Schedule:
    """A kernel's schedule in one configuration."""

    kernel: str  # file and class, as "kernels/sm90/forward.py:ForwardSm90"
    work: str  # what a CTA computes
    roles: tuple[Role, ...]
    pipelines: tuple[Pipeline, ...]  # in the order of their barriers in shared memory
    shared: tuple[Buffer, ...]  # behind the barriers, in the order of their addresses
    steps: tuple[Step, ...]  # of the steady state, in the order of issue of each role
    timeline: str  # a picture of the steady state: a line for each unit, moments from left to right
    tensor_memory: tuple[Columns, ...] = ()
    orders: tuple[Order, ...] = ()

    def make_kernel(self, config: Any) -> Any:
        """The kernel of the configuration that the schedule is of. Imports cutlass."""
        file, name = self.kernel.removeprefix("kernels/").split(".py:")
        return getattr(importlib.import_module(f"{__package__}.{file.replace('/', '.')}"), name)(config)

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def pipeline(self, name: str) -> Pipeline:
        return next(pipeline for pipeline in self.pipelines if pipeline.name == name)

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.shared if buffer.name == name)

    @property
    def threads(self) -> int:
        return 32 * (1 + max(role.warps[-1] for role in self.roles))

    @property
    def arrive_counts(self) -> tuple[int, ...]:
        """Arrive counts of all mbarriers, in the order of their addresses."""
        return tuple(count for pipeline in self.pipelines for count in pipeline.arrive_counts)

    @property
    def barriers(self) -> dict[str, range]:
        """Addresses of mbarriers, from the beginning of shared memory, by names such as ``k.full``."""
        found, end = {}, 0
        for pipeline in self.pipelines:
            for side in ("full", "empty")[: 1 + pipeline.has_empty]:
                found[f"{pipeline.name}.{side}"] = range(end, end + BARRIER_BYTES * pipeline.stages, BARRIER_BYTES)
                end += BARRIER_BYTES * pipeline.stages
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        end = BARRIER_BYTES * len(self.arrive_counts)
        for buffer in self.shared:
            end = -(-end // buffer.align) * buffer.align + buffer.num_bytes
        return end
