"""Copies between global and shared memory, of boxes of rows and of bytes: the instructions, and the engine."""

import abc
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.lib.ptx.state import (
    GLOBAL,
    PARAM_PITCH,
    PARAMS,
    SHARED,
    Array,
    Cta,
    Effect,
    FaultError,
    Mask,
    Warp,
    converged,
    only,
    within_cta,
)
from tests.lib.ptx.statement import Statement, vector

_WRAP = 1 << 30  # of a ragged view (``kernels.common.tma``)


class Rows(NamedTuple):
    """Descriptor of TMA of a tensor of rows, as far as these kernels need it; in elements of 16 bits."""

    offset: int  # of its first element in global memory
    rows: int
    columns: int
    heads: int
    row_stride: int
    head_stride: int
    batch_stride: int
    box: int  # rows of a copy
    box_columns: int = 64  # of each, which are what a row has in shared memory

    def elements(self, coordinates: list[int]) -> tuple[Array, Array]:
        """Where the elements of a box are in global memory, and which of them there are."""
        column, row, head, *rest = coordinates
        rows, columns = row + np.arange(self.box), column + np.arange(self.box_columns)
        if len(rest) == 1:
            inside = rows < self.rows
            first = rest[0] * self.batch_stride
        else:
            stop, wrap = rest
            inside = rows < _WRAP
            rows, first = rows + stop - _WRAP, 0
            if wrap != _WRAP or ((rows < 0) | (rows >= self.rows))[inside].any():
                raise FaultError(f"rows outside of a tensor: {coordinates}")
        if not 0 <= head < self.heads:
            raise FaultError(f"a head outside of a tensor: {coordinates}")
        first += self.offset + head * self.head_stride
        return first + rows[:, None] * self.row_stride + columns, inside[:, None] & (columns < self.columns)


def swizzled(addresses: Array, row_bytes: int = 128) -> Array:
    """Which number of 16 bits of shared memory is at addresses of a swizzled tile, of rows of 128 or 64 bytes."""
    return ((addresses ^ (addresses >> 7 & row_bytes // 16 - 1) << 4) - SHARED) // 2


@dataclass(kw_only=True)
class Copy(abc.ABC):
    """A copy that has been asked for. One to global memory is read at one time, and written at a later one."""

    barrier: int = 0  # where one to shared memory signals its bytes, in its own CTA or in another one of the cluster
    data: Array | None = None  # what one to global memory has read
    is_written: bool = False

    @property
    def is_read(self) -> bool:
        """Whether shared memory has been read."""
        return self.data is not None

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes that a copy to shared memory signals."""

    @abc.abstractmethod
    def load(self, cta: Cta) -> None:
        """Copies from global to shared memory."""

    @abc.abstractmethod
    def read(self, cta: Cta) -> Array:
        """Reads the source from shared memory."""

    @abc.abstractmethod
    def write(self, cta: Cta, data: Array) -> None:
        """Writes data into global memory."""


@dataclass(kw_only=True)
class Box(Copy):
    """Copy of a box of a tensor."""

    tensor: Rows
    coordinates: list[int]
    shared: Array  # where its elements are, as numbers of 16 bits

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole box, behind the end of the tensor too."""
        return 2 * self.tensor.box * self.tensor.box_columns

    def load(self, cta: Cta) -> None:
        """With zeros behind the end of the tensor."""
        at, is_there = self.tensor.elements(self.coordinates)
        data = np.where(is_there, cta.memory.view("u2")[np.where(is_there, at, 0)], 0)
        cta.shared.view("u2")[self.shared] = data

    def read(self, cta: Cta) -> Array:
        """Reads the whole box."""
        return cta.shared.view("u2")[self.shared]

    def write(self, cta: Cta, data: Array) -> None:
        """Writes the elements that are within the tensor."""
        at, is_there = self.tensor.elements(self.coordinates)
        cta.memory.view("u2")[at[is_there]] = data[is_there]


@dataclass(kw_only=True)
class Bytes(Copy):
    """Copy of bytes as they are, or an addition of float32 numbers."""

    whole: slice  # in global memory
    shared: slice
    adds: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the range."""
        return int(self.shared.stop - self.shared.start)

    def load(self, cta: Cta) -> None:
        """Copies the whole range."""
        cta.shared[self.shared] = cta.memory[self.whole]

    def read(self, cta: Cta) -> Array:
        """Reads the whole range."""
        return cta.shared[self.shared].copy()

    def write(self, cta: Cta, data: Array) -> None:
        """In place of what is there, or added to it."""
        place = cta.memory[self.whole]
        if self.adds:
            place.view(np.float32)[:] += data.view(np.float32)
        else:
            place[:] = data


@dataclass(kw_only=True)
class BetweenCtas(Copy):
    """Copy of bytes of shared memory to that of another CTA of the cluster."""

    target: Cta
    whole: slice  # there
    shared: slice

    @property
    def num_bytes(self) -> int:
        """Bytes of the range."""
        return int(self.shared.stop - self.shared.start)

    def load(self, cta: Cta) -> None:
        """Copies the whole range."""
        self.target.shared[self.whole] = cta.shared[self.shared]

    def read(self, cta: Cta) -> Array:
        """There are no such stores."""
        raise NotImplementedError

    def write(self, cta: Cta, data: Array) -> None:
        """There are no such stores."""
        raise NotImplementedError


def commit_group(s: Statement) -> Effect:
    """Stores so far are a group."""

    def commit(warp: Warp, mask: Mask) -> None:
        converged(mask)
        warp.groups.append(warp.open_group)
        warp.open_group = []

    return commit


def _is_store(s: Statement) -> bool:
    return ".global.shared::cta." in s.name


def _ask(warp: Warp, copy: Copy, *, is_store: bool) -> None:
    if is_store:
        warp.open_group.append(copy)
        warp.cta.stores.append(copy)
    else:
        warp.cta.loads.append(copy)


def copy_box(s: Statement) -> Effect:
    """Asks for a load or a store of a box."""
    is_store = _is_store(s)
    whole, other = (s.operands[0], s.operands[1]) if is_store else (s.operands[1], s.operands[0])
    descriptor, place = whole.parts
    which, shared = s.source(descriptor, "u64"), s.address(other)
    coordinates = [s.source(x, "s32") for x in vector(place)]
    barrier = None if is_store else s.address(s.operands[2])

    def ask(warp: Warp, mask: Mask) -> None:
        if is_store:  # written as the whole warp's, which issues one
            converged(mask)
        lane = 0 if is_store else only(mask)
        tensor = warp.cta.tensors[(int(which(warp)[lane]) - PARAMS) // PARAM_PITCH]
        address = int(shared(warp)[lane])
        if address % 1024 or (not is_store and warp.cta.owner(address) is not warp.cta):
            raise FaultError(f"a box at {address}")
        row_bytes = 2 * tensor.box_columns
        rows = within_cta(address) + np.arange(tensor.box)[:, None] * row_bytes
        at_barrier = None if barrier is None else int(barrier(warp)[lane])
        if at_barrier is not None:  # either CTA of a pair may get the signal
            warp.cta.barrier(at_barrier, of_cluster="cta_group::2" in s.instruction.parts)
        box = Box(
            tensor=tensor,
            coordinates=[int(c(warp)[lane]) for c in coordinates],
            shared=swizzled(rows + np.arange(tensor.box_columns) * 2, row_bytes),
            barrier=at_barrier or 0,
        )
        _ask(warp, box, is_store=is_store)

    return ask


def _copy_within_cluster(s: Statement) -> Effect:
    reads = [s.address(s.operands[i]) for i in (0, 1, 3)]
    size = s.source(s.operands[2], "u32")

    def ask(warp: Warp, mask: Mask) -> None:
        lane = only(mask)
        target, source, barrier = (int(read(warp)[lane]) for read in reads)
        num_bytes, places = int(size(warp)[lane]), []
        owner = warp.cta.owner(target)
        if owner.barrier(barrier) is None or warp.cta.owner(source) is not warp.cta:
            raise FaultError(f"from {source} to {target}")
        for address in (target, source):
            start = within_cta(address) - SHARED
            if start < 0 or start + num_bytes > len(owner.shared) or start % 16 or num_bytes % 16:
                raise FaultError(f"{num_bytes} bytes from {source} to {target}")
            places.append(slice(start, start + num_bytes))
        _ask(warp, BetweenCtas(target=owner, whole=places[0], shared=places[1], barrier=barrier), is_store=False)

    return ask


def copy_bytes(s: Statement) -> Effect:
    """Asks for a load, a store or an addition of bytes, or for a copy to another CTA of the cluster."""
    if ".shared::cluster.shared::cta." in s.name:
        return _copy_within_cluster(s)
    is_store = _is_store(s)
    whole, shared = (s.operands[0], s.operands[1]) if is_store else (s.operands[1], s.operands[0])
    reads = [s.address(whole, "u64"), s.address(shared), s.source(s.operands[2], "u32")]
    barrier = None if is_store else s.address(s.operands[3])

    def ask(warp: Warp, mask: Mask) -> None:
        lane = only(mask)
        first, begin, size = (int(read(warp)[lane]) for read in reads)
        places = []
        for memory, start in ((warp.cta.memory, first - GLOBAL), (warp.cta.shared, begin - warp.cta.first_shared)):
            if start < 0 or start + size > len(memory) or start % 16 or size % 16:
                raise FaultError(f"{size} bytes between {first} and {begin}")
            places.append(slice(start, start + size))
        copy = Bytes(
            whole=places[0],
            shared=places[1],
            adds=s.instruction.is_a("cp.reduce"),
            barrier=0 if barrier is None else int(barrier(warp)[lane]),
        )
        _ask(warp, copy, is_store=is_store)

    return ask


def load(cta: Cta) -> None:
    """The engine's next load, any of those that have been asked for."""
    copy = cta.loads.pop(cta.draw.randrange(len(cta.loads)))
    copy.load(cta)
    cta.barrier(copy.barrier, of_cluster=True).complete(copy.num_bytes)


def store(cta: Cta) -> None:
    """The engine's next store, any of those that have been asked for: reads it, or writes what has been read."""
    copy = cta.stores.pop(cta.draw.randrange(len(cta.stores)))
    if copy.data is None:
        copy.data = copy.read(cta)
        cta.stores.append(copy)
    else:
        copy.write(cta, copy.data)
        copy.is_written = True
