"""Copies between global and shared memory, of boxes of rows and of bytes: the instructions, and the engine."""

import functools
import math
import struct
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lab.interpreter import weak
from lab.interpreter.state import (
    GLOBAL,
    PARAM_PITCH,
    PARAMS,
    RANK_PITCH,
    SHARED,
    Array,
    Copy,
    Cta,
    Effect,
    FaultError,
    Mask,
    Warp,
    converged,
    only,
    ranks_of,
    within_cta,
)
from lab.interpreter.statement import TYPES, Statement, vector

_ENCODING = struct.Struct("<QI5I5I3s5B")  # address, kind, strides / 16, sizes - 1, element strides - 1, box - 1
_PLAIN = 0x40002  # of the kind: tiles, of elements that follow each other, with zeros where there are none
_IS_LARGE = 1 << 21  # of the kind: a tensor of more than 128 KB
_OF_16_BITS = {6, 10}  # float16 and bfloat16, as the kind says


class TensorMap(NamedTuple):
    """A tensor map, read from its 128 bytes; its tensor has elements of 16 bits."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    box: tuple[int, ...]  # elements of a copy in each dimension
    swizzle: int  # bytes within which chunks of 16 change places

    @classmethod
    @functools.cache
    def of(cls, encoded: bytes) -> "TensorMap":
        """The map that a kernel gets, as the driver encodes it.

        Raises:
            FaultError: it is of another kind than these kernels use.
        """
        address, kind, *rest = _ENCODING.unpack_from(encoded)
        strides, sizes, (steps, *box) = rest[:5], rest[5:10], rest[10:]
        rank, element, swizzle = (kind >> 4 & 7) + 1, kind >> 7 & 15, 16 << (kind >> 13 & 3)
        is_plain = kind & ~(_IS_LARGE | 7 << 4 | 15 << 7 | 3 << 13) == _PLAIN and not any(steps)
        if not is_plain or element not in _OF_16_BITS or rank > 5 or 2 * (box[0] + 1) > swizzle:
            raise FaultError(f"a tensor map of another kind: {encoded.hex()}")
        in_bytes = 2, *(16 * stride for stride in strides[: rank - 1])
        all_sizes, boxes = (tuple(x + 1 for x in some[:rank]) for some in (sizes, box))
        return cls(address, all_sizes, in_bytes, boxes, swizzle)

    def elements(self, coordinates: list[int]) -> tuple[Array, Array]:
        """The addresses of a box's elements, a row for each of its rows, and which of them the tensor has.

        Raises:
            FaultError: the box begins apart from a multiple of 16 bytes, which is an illegal instruction on an H200.
        """
        if coordinates[0] % 8:
            raise FaultError(f"a box from column {coordinates[0]}, which TMA does not take")
        addresses, inside = np.array(self.address), np.array(True)
        for first, size, stride, count in zip(coordinates, self.sizes, self.strides, self.box, strict=True):
            if count == 1 and not 0 <= first < size:
                raise FaultError(f"a box outside of a tensor: {coordinates}")
            at = first + np.arange(count, dtype=np.int64)
            # Dimensions are those of arrays in reverse. Sums wrap around, as views of ragged rows have it.
            addresses = np.add.outer(at * np.int64(stride), addresses)
            inside = np.logical_and.outer((at >= 0) & (at < size), inside)
        return addresses.reshape(-1, self.box[0]), inside.reshape(-1, self.box[0])


def swizzled(addresses: Array, row_bytes: int = 128) -> Array:
    """Which number of 16 bits of shared memory is at addresses of a swizzled tile, of rows of 128 bytes or fewer."""
    return ((addresses ^ (addresses >> 7 & row_bytes // 16 - 1) << 4) - SHARED) // 2


@dataclass(kw_only=True, eq=False)
class Box(Copy):
    """Copy of a box of a tensor."""

    at: Array  # where its elements are in global memory, as numbers of 16 bits
    inside: Array  # which of them the tensor has
    shared: Array  # where they are in shared memory, likewise

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole box, behind the end of the tensor too."""
        return 2 * self.at.size

    def halves(self) -> list[Copy]:
        """Some of its rows, and the others."""
        rows = len(self.at) // 2
        parts = [slice(None, rows), slice(rows, None)] if rows else [slice(None)]
        return [replace(self, at=self.at[x], inside=self.inside[x], shared=self.shared[x]) for x in parts]

    def load(self, cta: Cta) -> None:
        """Copies from global memory, with zeros behind the end of the tensor."""
        weak.overwrite(self, cta, 2 * self.shared[:, ::8])
        data = np.where(self.inside, cta.memory.view("u2")[self.at], 0)
        for shared in (cta.shared, cta.shown):
            shared.view("u2")[self.shared] = data

    def read(self, cta: Cta) -> Array:
        """Reads the box, as TMA sees it."""
        return cta.shown.view("u2")[self.shared]

    def write(self, cta: Cta, data: Array) -> None:
        """Writes the elements that are within the tensor."""
        words, at, values = cta.memory.view("u2"), self.at[self.inside], data[self.inside]
        if len(at):
            weak.write_global(self.warp, 2 * at, 2, lambda: words.__setitem__(at, values))


@dataclass(kw_only=True, eq=False)
class _Range(Copy):
    """Copy of a range of bytes."""

    whole: slice  # at the other place
    shared: slice  # in the CTA's shared memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the range."""
        return int(self.shared.stop - self.shared.start)

    def halves(self) -> list[Copy]:
        """Some of its bytes, and the others."""
        return [replace(self, whole=x, shared=y) for x, y in zip(*map(_halves, (self.whole, self.shared)), strict=True)]


@dataclass(kw_only=True, eq=False)
class Bytes(_Range):
    """Copy of bytes to or from global memory, or an addition of numbers to it."""

    added: str = ""  # the type of numbers that are added; "": bytes replace what there is

    def load(self, cta: Cta) -> None:
        """Copies from global memory."""
        weak.overwrite(self, cta, self.shared)
        cta.shared[self.shared] = cta.shown[self.shared] = cta.memory[self.whole]

    def read(self, cta: Cta) -> Array:
        """Reads the range, as TMA sees it."""
        return cta.shown[self.shared].copy()

    def write(self, cta: Cta, data: Array) -> None:
        """Writes the range, or adds to what is there."""
        place = cta.memory[self.whole]

        def write() -> None:
            if self.added:
                place.view(TYPES[self.added])[:] += data.view(TYPES[self.added])
            else:
                place[:] = data

        weak.write_global(self.warp, np.array([self.whole.start]), len(place), write)


@dataclass(kw_only=True, eq=False)
class BetweenCtas(_Range):
    """Copy of bytes of shared memory to that of another CTA of the cluster."""

    target: Cta

    def load(self, cta: Cta) -> None:
        """Copies to the other CTA."""
        weak.overwrite(self, self.target, self.whole)
        self.target.shared[self.whole] = self.target.shown[self.whole] = cta.shown[self.shared]


def _halves(whole: slice) -> list[slice]:
    """Pieces of 16 bytes each, the first half of them and the others; one of them alone."""
    middle = whole.start + (whole.stop - whole.start) // 32 * 16
    return [slice(whole.start, middle), slice(middle, whole.stop)] if middle > whole.start else [whole]


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
    halves = copy.halves()
    if is_store:
        warp.open_group += halves
        warp.cta.stores += halves
    else:
        warp.cta.loads += halves


def copy_box(s: Statement) -> Effect:
    """Asks for a load or a store of a box; a load may be for several CTAs, at the same place in each."""
    is_store = _is_store(s)
    whole, other = (s.operands[0], s.operands[1]) if is_store else (s.operands[1], s.operands[0])
    descriptor, place = whole.parts
    which, shared = s.source(descriptor, "u64"), s.address(other)
    coordinates = [s.source(x, "s32") for x in vector(place)]
    barrier = None if is_store else s.address(s.operands[2])
    ranks = s.source(s.operands[3], "b16") if "multicast::cluster" in s.instruction.parts else None

    def ask(warp: Warp, mask: Mask) -> None:
        if is_store:  # written as the whole warp's, which issues one
            converged(mask)
        lane = 0 if is_store else only(mask)
        number, offset = divmod(int(which(warp)[lane]) - PARAMS, PARAM_PITCH)
        tensor = TensorMap.of(warp.cta.params[number][offset : offset + 128])
        address, pitch = int(shared(warp)[lane]), 2 * tensor.box[0]
        rows = math.prod(tensor.box[1:])
        if address % 128 or (not is_store and warp.cta.owner(address) is not warp.cta):
            raise FaultError(f"a box at {address}")
        at_barrier = None if barrier is None else int(barrier(warp)[lane])
        if at_barrier is not None:  # either CTA of a pair may get the signal
            warp.cta.barrier(at_barrier, of_cluster="cta_group::2" in s.instruction.parts)
        at, inside = tensor.elements([int(c(warp)[lane]) for c in coordinates])
        _check_in_a_tensor(warp.cta, at[inside] - GLOBAL)
        places = within_cta(address) + np.arange(rows)[:, None] * pitch + np.arange(tensor.box[0]) * 2
        box = Box(
            warp=warp,
            at=np.where(inside, at - GLOBAL, 0) // 2,
            inside=inside,
            shared=swizzled(places, tensor.swizzle),
            barrier=at_barrier or 0,
        )
        if ranks is None:
            _ask(warp, box, is_store=is_store)
            return
        for rank in ranks_of(int(ranks(warp)[lane])):
            there = within_cta(box.barrier) + rank * RANK_PITCH
            warp.cta.owner(there).loads += replace(box, barrier=there).halves()

    return ask


def _check_in_a_tensor(cta: Cta, places: Array) -> None:
    if not places.size:
        return
    first, last = places.min(), places.max()
    tensors = cta.tensors or [slice(0, len(cta.memory))]
    if not any(tensor.start <= first and last < tensor.stop for tensor in tensors):
        raise FaultError(f"a box from {first} to {last}, outside of tensors")


def _range(space: Array, start: int, size: int) -> slice:
    if start < 0 or start + size > len(space) or start % 16 or size % 16:
        raise FaultError(f"{size} bytes from {start} on, of {len(space)}")
    return slice(start, start + size)


def _copy_within_cluster(s: Statement) -> Effect:
    reads = [s.address(s.operands[i]) for i in (0, 1, 3)]
    size = s.source(s.operands[2], "u32")

    def ask(warp: Warp, mask: Mask) -> None:
        lane = only(mask)
        target, source, barrier = (int(read(warp)[lane]) for read in reads)
        num_bytes = int(size(warp)[lane])
        owner = warp.cta.owner(target)
        if owner.barrier(barrier) is None or warp.cta.owner(source) is not warp.cta:
            raise FaultError(f"from {source} to {target}")
        whole, shared = (_range(owner.shared, within_cta(x) - SHARED, num_bytes) for x in (target, source))
        copy = BetweenCtas(warp=warp, target=owner, whole=whole, shared=shared, barrier=barrier)
        _ask(warp, copy, is_store=False)

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
        copy = Bytes(
            warp=warp,
            whole=_range(warp.cta.memory, first - GLOBAL, size),
            shared=_range(warp.cta.shared, begin - warp.cta.first_shared, size),
            added=s.kind if s.instruction.is_a("cp.reduce") else "",
            barrier=0 if barrier is None else int(barrier(warp)[lane]),
        )
        _ask(warp, copy, is_store=is_store)

    return ask


def load(cta: Cta) -> None:
    """The engine's next load, any of those that have been asked for."""
    copy = cta.loads.pop(cta.draw.randrange(len(cta.loads)))
    copy.load(cta)
    copy.signal(cta)


def store(cta: Cta) -> None:
    """The engine's next store, any of those that have been asked for: reads it, or writes what has been read."""
    copy = cta.stores.pop(cta.draw.randrange(len(cta.stores)))
    if copy.data is None:
        copy.data = copy.read(cta)
        cta.stores.append(copy)
    else:
        copy.write(cta, copy.data)
        copy.is_written = True
