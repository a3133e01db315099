"""Executes the PTX of a Blackwell kernel on a CPU, for small shapes, and for missing waits.

The 32 lanes of a warp are numpy arrays. CTAs and warps take turns at random, some warps rarely. TMA and the tensor
cores are engines that do what they have been asked for at some later time, copies in any order, products in the order
in which they were issued; so a kernel that does not wait for something sooner or later misses it. It is sooner where
somebody lags: an engine, or some warps, that go on only when nobody else of the CTA can. Shared and tensor memory start
with NaN. Instructions that are not known are refused when a program is read, addresses outside of memory when it runs,
and where no warp can go on ``FaultError`` says what each waits for.

It cannot see what only hardware's memory model asks for: a missing proxy fence, ``tcgen05.fence`` or ``wait::ld``.
"""

import functools
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Mask = Array | None  # of lanes; None: all
Read = Callable[["Warp"], Array]
Write = Callable[["Warp", Array, Mask], None]
Instruction = Callable[["Warp", Mask], None]
Lagging = frozenset[int | str]  # numbers of warps, and of engines "loads", "stores", "products"

_GLOBAL, _SHARED, _PARAMS = 1 << 28, 1 << 10, 1 << 46  # where each begins
_PARAM_PITCH = 1 << 12
_LANES = np.arange(32)
_ALL = np.ones(32, bool)
_WRAP = 1 << 30  # of a ragged view (``kernels.common.tma``)
_COLUMNS = 512  # of tensor memory
_NUM_WARPS = 16
_MOST_ROUNDS = 200_000  # of warps and engines, in a launch: many times what any test takes
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("b32", "u32"), np.uint32),
    **dict.fromkeys(("b64", "u64"), np.uint64),
    "s32": np.int32,
    "s64": np.int64,
    "f32": np.float32,
}


class FaultError(Exception):
    """A kernel does what no GPU would do, or nothing any more."""


class Rows(NamedTuple):
    """What a descriptor of TMA tells of a tensor of rows, as far as these kernels need it; in elements of 16 bits."""

    offset: int  # of its first element in global memory
    rows: int
    columns: int
    heads: int
    row_stride: int
    head_stride: int
    batch_stride: int
    box: int  # rows of a copy, of 64 columns each


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def arrive(self, count: int = 1) -> None:
        """Arrivals of a thread, or of a commit."""
        self.pending -= count
        self._check()

    def complete(self, num_bytes: int) -> None:
        """Bytes of a copy have arrived."""
        self.bytes -= num_bytes
        self._check()

    def _check(self) -> None:
        if self.pending < 0:
            raise FaultError("more arrivals than a phase has")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass
class Store:
    """A copy to global memory: of which tensor, to where, from where in shared memory; whether that has been read."""

    parameter: int
    coordinates: list[int]
    source: int
    is_read: bool = False

    @property
    def is_written(self) -> bool:
        """At the same time."""
        return self.is_read


@dataclass
class BulkStore:
    """A copy of bytes to global memory, or an addition of float32 numbers: read at one time, written at a later one."""

    target: int
    source: int
    size: int
    adds: bool
    data: Array | None = None
    is_written: bool = False

    @property
    def is_read(self) -> bool:
        """Whether shared memory has been read."""
        return self.data is not None


@dataclass
class Warp:
    """A warp's registers, and where its lanes are: several places where they have gone different ways."""

    cta: "Cta"
    index: int
    registers: dict[str, Array] = field(default_factory=dict)
    places: dict[int, Array] = field(default_factory=lambda: {0: _ALL})
    waits_for: tuple[str, int, int] | None = None
    is_done: bool = False
    open_group: list[Store | BulkStore] = field(default_factory=list)
    groups: list[list[Store | BulkStore]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, value in {
            "%tid.x": 32 * self.index + _LANES,
            "%ctaid.x": np.full(32, self.cta.index),
            "%nctaid.x": np.full(32, self.cta.num_ctas),
            "%laneid": _LANES,
            "%cluster_ctarank": np.zeros(32),
        }.items():
            self.registers[name] = value.astype(np.uint32)

    def pending_groups(self, state: str) -> int:
        """Groups of stores that are not all in a state (``is_read``, ``is_written``), or that come behind such."""
        done = [all(getattr(store, state) for store in group) for group in self.groups]
        return len(done) - next((i for i, is_done in enumerate(done) if not is_done), len(done))


class Program:
    """A kernel's instructions, and the names and sizes of its parameters."""

    def __init__(self, ptx: str, dtype: str):
        self.dtype = dtype
        ptx = re.sub(r"\bkernel_\w*_param_(\d+)", r"P\1", ptx)
        declared = re.finditer(r"\.param (?:\.align \d+ )?\.[a-z](\d+) P\d+(?:\[(\d+)\])?", ptx)
        self.param_sizes = [int(m[2] or int(m[1]) // 8) for m in declared]
        self.labels: dict[str, int] = {}
        self.code: list[Any] = []
        decoder = _Decoder(dtype)
        for statement in self._statements(ptx[ptx.index("{", ptx.index(".reqntid")) + 1 :]):
            self.code.append((statement, *decoder.decode(statement)))

    def _statements(self, body: str) -> Iterator[str]:
        count = 0
        for line in body.splitlines():
            text = line.split("//")[0].strip()
            # A wait in a loop, as the compiler writes it, is one instruction here.
            if re.match(r"^([{}]$|\.|LAB_WAIT:|DONE:|@P1 bra|bra.uni\s+LAB_WAIT)", text) or not text:
                continue
            if label := re.match(r"^(\$\w+):$", text):
                self.labels[label[1]] = count
                continue
            count += 1
            yield text.removesuffix(";")


class _Decoder:
    """From a line of PTX to what it does."""

    def __init__(self, dtype: str):
        self.dtype = dtype

    def decode(self, statement: str) -> tuple[str, Any, Any]:
        """What kind of instruction it is, its predicate (register, whether negated), and what belongs to its kind."""
        half = re.fullmatch(r"\{ .*mov\.b32 \{low, high\}, (%\w+); cvt\.f32\.f16 (%\w+), (low|high); \}", statement)
        if half is not None:  # inline assembly with registers of its own (``common.assembly.unpack``)
            return "run", None, self.compute([half[2], half[1]], ["u32"], functools.partial(_half, half[3] == "high"))
        m = re.match(r"^(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)$", statement)
        if m is None:
            raise FaultError(f"not an instruction: {statement}")
        predicate = (m[2], m[1] == "!") if m[2] else None
        name, operands = m[3], _split(m[4])
        if name in ("bra", "bra.uni"):
            return "branch", predicate, operands[0]
        if name == "ret":
            return "return", predicate, None
        if name.startswith("mbarrier.try_wait.parity"):
            return "wait", predicate, (self.address(operands[1]), self.source(operands[2], "u32"))
        if name == "bar.sync":
            count = self.source(operands[1] if len(operands) > 1 else str(32 * _NUM_WARPS), "u32")
            return "meet", predicate, (self.source(operands[0], "u32"), count)
        if name in ("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group"):
            return ("is_read" if name.endswith(".read") else "is_written"), predicate, int(operands[0])
        for prefix, decode in _INSTRUCTIONS.items():
            if name == prefix or name.startswith((f"{prefix}.", f"{prefix}::")):
                return "run", predicate, decode(self, name, operands)
        raise FaultError(f"an instruction that is not known: {statement}")

    def source(self, operand: str, kind: str) -> Read:
        """What reads an operand: a register, a number, a parameter's address or that of shared memory."""
        if operand.startswith("%"):
            if kind == "pred":
                return lambda warp: warp.registers[operand]
            return lambda warp: warp.registers[operand].view(_TYPES[kind])
        if operand == "__dynamic_shmem__0":
            value = _SHARED
        elif re.fullmatch(r"P\d+", operand):
            value = _PARAMS + int(operand[1:]) * _PARAM_PITCH
        else:
            value = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        if kind == "pred":
            constant: Array = np.full(32, bool(value))
        else:
            width = np.dtype(_TYPES[kind]).itemsize
            bits = np.full(32, value & ((1 << 8 * width) - 1), np.uint32 if width == 4 else np.uint64)
            constant = bits.view(_TYPES[kind])
        return lambda warp: constant

    def target(self, operand: str) -> Write:
        """What writes a register, in some lanes."""

        def write(warp: Warp, value: Array, mask: Mask) -> None:
            if value.dtype != bool:
                value = value.view(np.uint64 if value.dtype.itemsize == 8 else np.uint32)
            if mask is not None and operand in warp.registers:
                value = np.where(mask, value, warp.registers[operand])
            warp.registers[operand] = value

        return (lambda warp, value, mask: None) if operand == "_" else write

    def address(self, operand: str, kind: str = "u32") -> Read:
        """What reads an address: ``[register + offset]``."""
        m = re.fullmatch(r"\[\s*([^\]+\s]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if m is None:
            raise FaultError(f"not an address: {operand}")
        base, offset = self.source(m[1], kind), int(m[2] or 0)
        return lambda warp: base(warp).astype(np.int64) + offset

    def compute(self, operands: list[str], kinds: list[str], function: Callable[..., Array]) -> Instruction:
        """A register from others."""
        write, reads = self.target(operands[0]), [self.source(*pair) for pair in zip(operands[1:], kinds, strict=False)]
        return lambda warp, mask: write(warp, function(*(read(warp) for read in reads)), mask)


def _split(text: str) -> list[str]:
    """Operands, at commas that are in no brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[(?:[^\]{]|\{[^}]*\})*\]|[^,])+", text)]


def _vector(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _only(mask: Mask) -> int:
    """The lane that does something for its warp."""
    if mask is None or mask.sum() != 1:
        raise FaultError("something for one thread to do is done by another number of them")
    return int(np.argmax(mask))


def _converged(mask: Mask) -> None:
    if mask is not None:
        raise FaultError("something for a whole warp to do is done by a part of it")


def _plain(function: Callable[..., Array]) -> Callable[[_Decoder, str, list[str]], Instruction]:
    """An instruction whose operands are all of the type that ends its name."""
    return lambda d, name, operands: d.compute(operands, [name.split(".")[-1]] * 3, function)


def _arithmetic(function: Callable[..., Array]) -> Callable[[_Decoder, str, list[str]], Instruction]:
    """The same, or on pairs of float32."""

    def on_pairs(*pairs: Array) -> Array:
        flat = function(*(np.ascontiguousarray(x).view(np.float32) for x in pairs))
        return np.ascontiguousarray(flat.astype(np.float32)).view(np.uint64)

    def decode(d: _Decoder, name: str, operands: list[str]) -> Instruction:
        if name.endswith(".f32x2"):
            return d.compute(operands, ["b64"] * 3, on_pairs)
        return _plain(function)(d, name, operands)

    return decode


def _fused(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _multiply(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    kind = name.split(".")[-1]
    if kind == "f32x2":
        return _arithmetic(operator.mul)(d, name, operands)
    if ".wide." in name:
        wide = np.int64 if kind == "s32" else np.uint64
        return d.compute(operands, [kind] * 2, lambda a, b: a.astype(wide) * b.astype(wide))
    return d.compute(operands, [kind] * 2, operator.mul)


def _divide(a: Array, b: Array) -> Array:
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return (quotient * np.sign(a.astype(np.int64)) * np.sign(b.astype(np.int64))).astype(np.int32)


def _add(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    return _arithmetic(_sum_rounded_down if ".rm." in name else operator.add)(d, name, operands)


def _sum_rounded_down(a: Array, b: Array) -> Array:
    exact = a.astype(np.float64) + b.astype(np.float64)
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _extreme(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    ignores_nan = name.endswith(".f32") and ".NaN." not in name
    least, most = (np.fmin, np.fmax) if ignores_nan else (np.minimum, np.maximum)

    def extreme(*x: Array) -> Array:
        found: Array = functools.reduce(least if name.startswith("min") else most, x)
        return np.maximum(found, 0) if ".relu." in name else found

    return _plain(extreme)(d, name, operands)


def _shift(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    kind = name.split(".")[-1].replace("b", "u")
    bits = int(kind[1:])

    def shift(x: Array, count: Array) -> Array:
        within = np.minimum(count, bits - 1).astype(x.dtype)
        if name.startswith("shl"):
            return np.where(count < bits, x << within, 0).astype(x.dtype)
        return np.where((count < bits) | (kind[0] == "s"), x >> within, 0).astype(x.dtype)

    return d.compute(operands, [kind, "u32"], shift)


def _funnel(low: Array, high: Array, count: Array) -> Array:
    both = high.astype(np.uint64) << np.uint64(32) | low
    return ((both << (count & 31).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def _bit_mask(start: Array, count: Array) -> Array:
    both = zip(start.tolist(), count.tolist(), strict=True)
    return np.array([((1 << min(n, 32)) - 1 << min(first, 32)) & 0xFFFFFFFF for first, n in both], np.uint32)


def _move(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    if operands[0].startswith("{"):
        low, high = (d.target(x) for x in _vector(operands[0]))
        read = d.source(operands[1], "b64")

        def unpack(warp: Warp, mask: Mask) -> None:
            value = read(warp)
            low(warp, value.astype(np.uint32), mask)
            high(warp, (value >> np.uint64(32)).astype(np.uint32), mask)

        return unpack
    if operands[1].startswith("{"):
        joined = [operands[0], *_vector(operands[1])]
        return d.compute(joined, ["b32"] * 2, lambda a, b: b.astype(np.uint64) << np.uint64(32) | a)
    return d.compute(operands, [name.split(".")[-1]], lambda x: x)


def _convert(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    if name.startswith("cvt.rn."):
        return d.compute(operands, ["f32"] * 2, lambda high, low: _rounded(high, d) << 16 | _rounded(low, d))
    kind, given = name.split(".")[-2:]
    return d.compute(operands, [given], lambda x: x.astype(_TYPES[kind]))


def _half(is_high: bool, x: Array) -> Array:
    """One of two float16 numbers of a register."""
    bits = (x >> 16 if is_high else x & 0xFFFF).astype(np.uint16)
    return bits.view(np.float16).astype(np.float32)


def _rounded(x: Array, decoder: _Decoder) -> Array:
    """Float32 rounded to 16 bits."""
    if decoder.dtype == "float16":
        return x.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = x.view(np.uint32).astype(np.uint64)
    even = bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
    return np.where(np.isnan(x), np.uint64(0x7FFF), even).astype(np.uint32)


_COMPARE: dict[str, Callable[..., Array]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "neu": lambda a, b: ~(a == b),
}


def _compare(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    _, relation, kind = name.split(".")
    return d.compute(operands, [kind] * 2, _COMPARE[relation])


def _select(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    kind = name.split(".")[-1]

    def select(a: Array, b: Array, chosen: Array) -> Array:
        return np.where(chosen, a, b)

    return d.compute(operands, [kind, kind, "pred"], select)


def _shuffle(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    def shuffle(x: Array, lane: Array) -> Array:
        return x[lane & 31]

    return d.compute(operands[:3], ["b32", "u32"], shuffle)


def _vote(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    write, read = d.target(operands[0]), d.source(operands[1], "pred")

    def vote(warp: Warp, mask: Mask) -> None:
        _converged(mask)
        given = read(warp)
        if ".ballot." in name:
            write(warp, np.full(32, int((given << _LANES).sum()), np.uint32), mask)
        else:
            write(warp, np.full(32, given.any() if ".any." in name else given.all()), mask)

    return vote


def _elect(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    write = d.target(operands[0].split("|")[1])

    def elect(warp: Warp, mask: Mask) -> None:
        _converged(mask)
        write(warp, _LANES == 0, mask)

    return elect


def _nothing(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    return lambda warp, mask: None


def _memory(name: str, operand: str, d: _Decoder) -> tuple[Callable[[Warp, Mask, int], tuple[Array, Array]], int, str]:
    """What gives memory in words of a width, and which of its words an access means; the width; the type."""
    kind, space = name.split(".")[-1], "global" if ".global." in name else "shared"
    size = int(kind[1:]) // 8
    address = d.address(operand, "u64" if space == "global" else "u32")

    def place(warp: Warp, mask: Mask, i: int) -> tuple[Array, Array]:
        memory, first = (warp.cta.memory, _GLOBAL) if space == "global" else (warp.cta.shared, _SHARED)
        at = np.where(_ALL if mask is None else mask, address(warp) - first + i * size, 0)
        if (at < 0).any() or (at + size > len(memory)).any() or (at % size).any():
            raise FaultError(f"{name} at {at}")
        return memory.view(f"u{size}"), at // size

    return place, size, kind


def _load(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    targets = [d.target(x) for x in _vector(operands[0])]
    is_wide = operands[0].startswith("%rd")
    if ".param." in name:
        m = re.fullmatch(r"\[P(\d+)(?:\+(\d+))?\]", operands[1])
        size = int(name.split(".")[-1][1:]) // 8
        assert m is not None
        which, offset = int(m[1]), int(m[2] or 0)

        def load_parameter(warp: Warp, mask: Mask) -> None:
            words = np.frombuffer(warp.cta.params[which], f"u{size}", len(targets), offset)
            for word, write in zip(words, targets, strict=True):
                write(warp, np.full(32, word), mask)

        return load_parameter
    place, size, kind = _memory(name, operands[1], d)

    def load(warp: Warp, mask: Mask) -> None:
        for i, write in enumerate(targets):
            words, at = place(warp, mask, i)
            value = words[at]
            if is_wide and size == 4:
                value = value.view(_TYPES[kind]).astype(np.int64 if kind[0] == "s" else np.uint64)
            write(warp, value, mask)

    return load


def _store(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    place, _, kind = _memory(name, operands[0], d)
    reads = [d.source(x, kind) for x in _vector(operands[1])]

    def store(warp: Warp, mask: Mask) -> None:
        for i, read in enumerate(reads):
            words, at = place(warp, mask, i)
            lanes = _ALL if mask is None else mask
            words[at[lanes]] = read(warp)[lanes].view(words.dtype)

    return store


def _atomic(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    write, address, read = d.target(operands[0]), d.address(operands[1], "u64"), d.source(operands[2], "u32")

    def add(warp: Warp, mask: Mask) -> None:
        words, before = warp.cta.memory.view("u4"), np.zeros(32, np.uint32)
        for lane in np.nonzero(_ALL if mask is None else mask)[0]:
            at = (int(address(warp)[lane]) - _GLOBAL) // 4
            before[lane] = words[at]
            words[at] += read(warp)[lane]
        write(warp, before, mask)

    return add


def _reduce(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    kind = name.split(".")[-1]
    address, reads = d.address(operands[0], "u64"), [d.source(x, kind) for x in _vector(operands[1])]

    def add(warp: Warp, mask: Mask) -> None:
        words = warp.cta.memory.view(_TYPES[kind])
        for lane in np.nonzero(_ALL if mask is None else mask)[0]:
            at = (int(address(warp)[lane]) - _GLOBAL) // 4
            for i, read in enumerate(reads):
                words[at + i] += read(warp)[lane]

    return add


def _mbarrier(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    if name.startswith("mbarrier.test_wait.parity"):
        write, tested, parity = d.target(operands[0]), d.address(operands[1]), d.source(operands[2], "u32")

        def test(warp: Warp, mask: Mask) -> None:
            phases = np.array([warp.cta.barriers[at].phase for at in tested(warp).tolist()])
            write(warp, phases & 1 != parity(warp), mask)

        return test
    is_init = name.startswith("mbarrier.init")
    address = d.address(operands[0 if is_init else 1])
    number = d.source(operands[-1], "u32")

    def change(warp: Warp, mask: Mask) -> None:
        for lane in np.nonzero(_ALL if mask is None else mask)[0]:
            at, n = int(address(warp)[lane]), int(number(warp)[lane])
            if is_init:
                warp.cta.barriers[at] = Barrier(n, n)
            elif ".expect_tx." in name:
                warp.cta.barriers[at].bytes += n
                warp.cta.barriers[at].arrive()
            else:
                warp.cta.barriers[at].arrive(n)

    return change


def _bulk_copy(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    if name.endswith(".commit_group"):

        def commit_group(warp: Warp, mask: Mask) -> None:
            _converged(mask)
            warp.groups.append(warp.open_group)
            warp.open_group = []

        return commit_group
    if ".tensor." not in name:
        return _bulk_bytes(d, name, operands)
    is_store = ".global.shared::cta." in name
    whole, other = (operands[0], operands[1]) if is_store else (operands[1], operands[0])
    descriptor, place = re.fullmatch(r"\[(\S+), (\{.*\})\]", whole).groups()  # type: ignore[union-attr]
    which, shared = d.source(descriptor, "u64"), d.address(other)
    coordinates = [d.source(x, "s32") for x in _vector(place)]
    barrier = None if is_store else d.address(operands[2])

    def copy(warp: Warp, mask: Mask) -> None:
        # Stores are written as the whole warp's, which issues one.
        lane = 0 if is_store else _only(mask)
        parameter = (int(which(warp)[lane]) - _PARAMS) // _PARAM_PITCH
        at, where = [int(c(warp)[lane]) for c in coordinates], int(shared(warp)[lane])
        if barrier is None:
            _converged(mask)
            store = Store(parameter, at, where)
            warp.open_group.append(store)
            warp.cta.stores.append(store)
        else:
            warp.cta.loads.append((parameter, at, where, int(barrier(warp)[lane])))

    return copy


def _bulk_bytes(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    is_store = ".global.shared::cta." in name
    kinds = ("u64", "u32") if is_store else ("u32", "u64")
    target, source = (d.address(*pair) for pair in zip(operands[:2], kinds, strict=True))
    size = d.source(operands[2], "u32")
    barrier = None if is_store else d.address(operands[3])

    def copy(warp: Warp, mask: Mask) -> None:
        lane = _only(mask)
        to, what, num = (int(read(warp)[lane]) for read in (target, source, size))
        if barrier is None:
            store = BulkStore(to - _GLOBAL, what - _SHARED, num, adds=name.startswith("cp.reduce."))
            warp.open_group.append(store)
            warp.cta.stores.append(store)
        else:
            warp.cta.loads.append((to - _SHARED, what - _GLOBAL, num, int(barrier(warp)[lane])))

    return copy


def _tensor_memory(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    is_load = ".ld." in name
    of_memory, of_registers = (1, 0) if is_load else (0, 1)
    address, names = d.address(operands[of_memory]), _vector(operands[of_registers])
    targets, reads = [d.target(x) for x in names], [d.source(x, "b32") for x in names]

    def access(warp: Warp, mask: Mask) -> None:
        _converged(mask)
        at = address(warp)
        lane, column = int(at[0]) >> 16, int(at[0]) & 0xFFFF
        if (at != at[0]).any() or lane != 32 * (warp.index % 4) or column + len(names) > warp.cta.columns:
            raise FaultError(f"{name} by warp {warp.index} at lane {lane}, column {column}")
        rows = warp.cta.tensor_memory[lane : lane + 32]
        for i, (write, read) in enumerate(zip(targets, reads, strict=True)):
            if is_load:
                write(warp, rows[:, column + i].copy(), mask)
            else:
                rows[:, column + i] = read(warp)

    return access


def _allocate(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    holder, count = d.address(operands[0]), d.source(operands[1], "u32")

    def allocate(warp: Warp, mask: Mask) -> None:
        _converged(mask)
        if warp.cta.columns:
            raise FaultError("allocated twice")
        warp.cta.columns = int(count(warp)[0])
        warp.cta.shared.view("u4")[(int(holder(warp)[0]) - _SHARED) // 4] = 0

    return allocate


def _deallocate(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    count = d.source(operands[1], "u32")

    def deallocate(warp: Warp, mask: Mask) -> None:
        _converged(mask)
        if warp.cta.products or count(warp)[0] != warp.cta.columns:
            raise FaultError("freed twice, or in part, or while products are under way")
        warp.cta.columns = 0

    return deallocate


def _commit(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    address = d.address(operands[0])

    def commit(warp: Warp, mask: Mask) -> None:
        warp.cta.products.append(int(address(warp)[_only(mask)]))

    return commit


class Product(NamedTuple):
    """An MMA that has been issued."""

    target: int  # column of tensor memory
    a: int  # column of tensor memory, or a descriptor
    a_in_tensor_memory: bool
    b: int
    instruction: int
    accumulates: bool


def _mma(d: _Decoder, name: str, operands: list[str]) -> Instruction:
    in_memory = operands[1].startswith("[")
    target, b = d.address(operands[0]), d.source(operands[2], "b64")
    a = d.address(operands[1]) if in_memory else d.source(operands[1], "b64")
    instruction, accumulates = d.source(operands[3], "u32"), d.source(operands[-1], "pred")

    def issue(warp: Warp, mask: Mask) -> None:
        lane = _only(mask)
        numbers = (int(read(warp)[lane]) for read in (target, a, b, instruction))
        column, of_a, of_b, descriptor = numbers
        warp.cta.products.append(Product(column, of_a, in_memory, of_b, descriptor, bool(accumulates(warp)[lane])))

    return issue


# By how an instruction's name begins; the first that fits.
_INSTRUCTIONS: dict[str, Callable[[_Decoder, str, list[str]], Instruction]] = {
    "mov.b16": lambda d, name, operands: _nothing(d, name, operands),  # of masks that nobody reads
    "mov": _move,
    "cvta.param": _plain(lambda x: x),
    "add": _add,
    "sub": _arithmetic(operator.sub),
    "fma": _arithmetic(_fused),
    "mul": _multiply,
    "mad": _plain(lambda a, b, c: a * b + c),
    "div.s32": _plain(_divide),
    "rem.s32": _plain(lambda a, b: a - _divide(a, b) * b),
    "mapa": _plain(lambda a, rank: a),  # a CTA is alone in its cluster
    "neg": _plain(operator.neg),
    "not": _plain(operator.inv),
    "and": _plain(operator.and_),
    "or": _plain(operator.or_),
    "xor": _plain(operator.xor),
    "min": _extreme,
    "max": _extreme,
    "shl": _shift,
    "shr": _shift,
    "shf.l.wrap.b32": _plain(_funnel),
    "bmsk.clamp": lambda d, name, operands: d.compute(operands, ["u32"] * 2, _bit_mask),
    "popc": lambda d, name, operands: d.compute(
        operands, ["u32"], lambda x: np.array([bin(n).count("1") for n in x.tolist()], np.uint32)
    ),
    "cvt": _convert,
    "setp": _compare,
    "selp": _select,
    "ex2.approx": _plain(lambda x: np.exp2(x).astype(np.float32)),
    "lg2.approx": _plain(lambda x: np.log2(x).astype(np.float32)),
    "rcp.approx": _plain(lambda x: (np.float32(1) / x).astype(np.float32)),
    "tanh.approx": _plain(lambda x: np.tanh(x).astype(np.float32)),
    "shfl.sync.idx": _shuffle,
    "vote.sync": _vote,
    "elect.sync": _elect,
    "ld": _load,
    "st": _store,
    "atom.global.add": _atomic,
    "red": _reduce,
    "mbarrier": _mbarrier,
    "cp.async.bulk": _bulk_copy,
    "cp.reduce.async.bulk": _bulk_bytes,
    "tcgen05.ld": _tensor_memory,
    "tcgen05.st": _tensor_memory,
    "tcgen05.alloc": _allocate,
    "tcgen05.dealloc": _deallocate,
    "tcgen05.commit": _commit,
    "tcgen05.mma": _mma,
    **dict.fromkeys(
        ("tcgen05.wait", "tcgen05.fence", "tcgen05.relinquish_alloc_permit", "fence", "bar.warp.sync"), _nothing
    ),
    **dict.fromkeys(("setmaxnreg", "prefetch.tensormap", "nanosleep"), _nothing),
}


class Cta:
    """A CTA that runs a program: its memory, its warps, and what the engines have been asked for."""

    def __init__(
        self,
        program: Program,
        params: list[bytes],
        memory: Array,
        tensors: dict[int, Rows],
        index: int,
        num_ctas: int,
        draw: random.Random,
        bytes_shared: int,
        lagging: Lagging | None,
    ):
        """``tensors``: of the parameters that are descriptors of TMA. ``memory`` is global memory, in bytes.

        ``lagging``: who goes on only when nobody else can; None: drawn, half of the time nobody.
        """
        self.program, self.params, self.memory, self.tensors = program, params, memory, tensors
        self.index, self.num_ctas, self.draw = index, num_ctas, draw
        self.shared = np.full(bytes_shared, 0xFF, np.uint8)
        self.tensor_memory = np.full((128, _COLUMNS), 0x7FC0DEAD, np.uint32)
        self.columns = 0  # of tensor memory that are allocated
        self.barriers: dict[int, Barrier] = {}
        self.meetings: dict[int, list[Warp]] = {}
        # Of boxes: parameter, coordinates, address, barrier; of bytes: where to, where from, how many, barrier.
        self.loads: list[tuple[int, list[int] | int, int, int]] = []
        self.stores: list[Store | BulkStore] = []
        self.products: list[Product | int] = []  # an int: a commit to a barrier
        self.warps = [Warp(self, i) for i in range(_NUM_WARPS)]
        some = [frozenset({name}) for name in self._engines()] + [
            frozenset(range(first, first + 4)) for first in range(0, _NUM_WARPS, 4)
        ]
        drawn = draw.choice((draw.choice(some), frozenset()))
        self.lagging = drawn if lagging is None else lagging

    def run(self) -> Iterator[None]:
        """Until all warps have returned; others may come between.

        Raises:
            FaultError: something that no GPU would do, or a deadlock.
        """
        eagerness = self.draw.choice((0.02, 0.1, 0.5, 0.9))  # of the engines
        pace = [self.draw.choice((1.0, 1.0, 0.01)) for _ in self.warps]  # some warps lag far behind
        while not all(warp.is_done for warp in self.warps):
            with np.errstate(all="ignore"):
                able = {warp.index: warp for warp in self.warps if self._can_go_on(warp)}
                busy = {name: run for name, (run, work) in self._engines().items() if work}
                behind = self.lagging if not self.lagging >= able.keys() | busy.keys() else frozenset()
                ready = [warp for index, warp in able.items() if index not in behind]
                engines = [run for name, run in busy.items() if name not in behind]
                if engines and (not ready or self.draw.random() < eagerness):
                    self.draw.choice(engines)()
                elif ready:
                    (warp,) = self.draw.choices(ready, [pace[warp.index] for warp in ready])
                    self._step(warp, self.draw.choice((1, 5, 50, 400)))
                else:
                    waiting = {warp.index: warp.waits_for for warp in self.warps if not warp.is_done}
                    raise FaultError(f"deadlock: {waiting}")
            yield
        if self.columns:
            raise FaultError("tensor memory is not freed")
        if self.loads or self.stores or self.products:
            raise FaultError("ends while copies are under way")

    def _engines(self) -> dict[str, tuple[Callable[[], None], list[Any]]]:
        return {
            "loads": (self._load, self.loads),
            "stores": (self._store, self.stores),
            "products": (self._multiply, self.products),
        }

    def _can_go_on(self, warp: Warp) -> bool:
        if warp.waits_for is not None:
            kind, what, number = warp.waits_for
            arrived = kind == "wait" and self.barriers[what].phase & 1 != number
            if arrived or (kind.startswith("is_") and warp.pending_groups(kind) <= number):
                warp.waits_for = None
        return warp.waits_for is None and not warp.is_done

    def _step(self, warp: Warp, instructions: int) -> None:
        """Some instructions of a warp; of lanes at different places those that are furthest behind."""
        code, labels = self.program.code, self.program.labels
        place = min(warp.places)
        lanes = warp.places.pop(place)
        for _ in range(instructions):
            mask = None if lanes.all() else lanes
            statement, kind, predicate, what = code[place]
            chosen = lanes
            if predicate is not None:
                chosen = lanes & (warp.registers[predicate[0]] != predicate[1])
            place += 1
            if kind == "run":
                if chosen.any():
                    try:
                        what(warp, mask if chosen is lanes or (chosen == lanes).all() else chosen)
                    except Exception as error:
                        raise FaultError(f"warp {warp.index}, {statement}: {error}") from error
                if "mbarrier.arrive" in statement and warp.index in self.lagging:
                    break  # somebody else may be able to go on now
            elif kind == "return":
                warp.is_done = not warp.places
                return
            elif kind == "branch":
                stay = lanes & ~chosen
                if chosen.any() and stay.any():
                    self._put(warp, place, stay)
                    self._put(warp, labels[what], chosen)
                    place = min(warp.places)
                    lanes = warp.places.pop(place)
                elif chosen.any():
                    place = labels[what]
            else:
                _converged(mask)
                self._wait(warp, kind, what)
            if warp.waits_for is not None:
                break
            if warp.places and place >= min(warp.places):  # others are no longer ahead
                self._put(warp, place, lanes)
                place = min(warp.places)
                lanes = warp.places.pop(place)
        self._put(warp, place, lanes)

    def _put(self, warp: Warp, place: int, lanes: Array) -> None:
        warp.places[place] = warp.places[place] | lanes if place in warp.places else lanes

    def _wait(self, warp: Warp, kind: str, what: Any) -> None:
        if kind.startswith("is_"):
            warp.waits_for = (kind, 0, what)
            return
        first, second = (int(read(warp)[0]) for read in what)
        warp.waits_for = (kind, first, second)
        if kind == "meet":
            together = self.meetings.setdefault(first, [])
            if any(each.waits_for != warp.waits_for for each in together):
                raise FaultError(
                    f"barrier {first} is awaited by different numbers of threads: {second} by {warp.index}"
                )
            together.append(warp)
            if 32 * len(together) == second:
                for each in self.meetings.pop(first):
                    each.waits_for = None

    def _elements(self, parameter: int, coordinates: list[int]) -> tuple[Array, Array]:
        """Where the elements of a box are in global memory, and which of them there are."""
        t = self.tensors[parameter]
        column, row, head, *rest = coordinates
        rows, columns = row + np.arange(t.box), column + np.arange(64)
        if len(rest) == 1:
            inside = rows < t.rows
            first = rest[0] * t.batch_stride
        else:
            stop, wrap = rest
            inside = rows < _WRAP
            rows, first = rows + stop - _WRAP, 0
            if wrap != _WRAP or ((rows < 0) | (rows >= t.rows))[inside].any():
                raise FaultError(f"rows outside of a tensor: {coordinates}")
        if not 0 <= head < t.heads:
            raise FaultError(f"a head outside of a tensor: {coordinates}")
        first += t.offset + head * t.head_stride
        return first + rows[:, None] * t.row_stride + columns, inside[:, None] & (columns < t.columns)

    def _box(self, address: int, rows: int) -> Array:
        """Where its elements are in shared memory, swizzled."""
        if address % 1024:
            raise FaultError(f"a box at {address}")
        return self._swizzled(address + np.arange(rows)[:, None] * 128 + np.arange(64) * 2)

    def _swizzled(self, addresses: Array) -> Array:
        return ((addresses ^ (addresses >> 7 & 7) << 4) - _SHARED) // 2

    def _load(self) -> None:
        parameter, coordinates, address, barrier = self.loads.pop(self.draw.randrange(len(self.loads)))
        if isinstance(coordinates, int):
            to, what, num = parameter, coordinates, address
            self.shared[to : to + num] = self.memory[what : what + num]
            self.barriers[barrier].complete(num)
            return
        at, is_there = self._elements(parameter, coordinates)
        rows = self.tensors[parameter].box
        data = np.where(is_there, self.memory.view("u2")[np.where(is_there, at, 0)], 0)
        self.shared.view("u2")[self._box(address, rows)] = data
        self.barriers[barrier].complete(128 * rows)

    def _store(self) -> None:
        store = self.stores.pop(self.draw.randrange(len(self.stores)))
        if isinstance(store, BulkStore):
            self._store_bytes(store)
            return
        at, is_there = self._elements(store.parameter, store.coordinates)
        data = self.shared.view("u2")[self._box(store.source, self.tensors[store.parameter].box)]
        self.memory.view("u2")[at[is_there]] = data[is_there]
        store.is_read = True

    def _store_bytes(self, store: BulkStore) -> None:
        if store.data is None:
            store.data = self.shared[store.source : store.source + store.size].copy()
            self.stores.append(store)
            return
        place = self.memory[store.target : store.target + store.size]
        if store.adds:
            place.view(np.float32)[:] += store.data.view(np.float32)
        else:
            place[:] = store.data
        store.is_written = True

    def _multiply(self) -> None:
        at_once = 1 if "products" in self.lagging else self.draw.choice((1, 4, 16))
        for _ in range(min(len(self.products), at_once)):
            product = self.products.pop(0)
            if isinstance(product, int):
                self.barriers[product].arrive()
            else:
                self._product(product)

    def _product(self, p: Product) -> None:
        i = p.instruction
        columns, kind = (i >> 17 & 63) * 8, 0 if self.program.dtype == "float16" else 1
        # 128 rows, float32 sums, both operands of the kind.
        if (i >> 24 & 31, i >> 4 & 3, i >> 7 & 7, i >> 10 & 7) != (8, 1, kind, kind):
            raise FaultError(f"a product of another kind: {i:#x}")
        is_transposed = bool(i >> 15 & 1)
        if p.a_in_tensor_memory:
            if is_transposed:
                raise FaultError(f"a transposed operand in tensor memory: {i:#x}")
            a = self._floats(np.ascontiguousarray(self.tensor_memory[:, p.a : p.a + 8]).view("u2"))
        else:
            a = self._operand(p.a, 128, is_transposed=is_transposed)
        result = a @ self._operand(p.b, columns, is_transposed=bool(i >> 16 & 1)).T
        place = self.tensor_memory[:, p.target : p.target + columns]
        if p.accumulates:
            result = place.view(np.float32) + result
        place[:] = result.astype(np.float32).view(np.uint32)

    def _operand(self, descriptor: int, rows: int, *, is_transposed: bool) -> Array:
        """16 of the columns that are summed over, of some rows, from where a descriptor says."""
        start, leading, stride = (descriptor >> bits << 4 & 0x3FFF0 for bits in (0, 16, 32))
        if (descriptor >> 46 & 3, descriptor >> 49 & 7, descriptor >> 61) != (1, 0, 2):
            raise FaultError(f"another layout: {descriptor:#x}")
        row, k = np.arange(rows)[:, None], np.arange(16)
        if is_transposed:
            offsets = row % 64 * 2 + row // 64 * leading + k % 8 * 128 + k // 8 * stride
        else:
            offsets = row % 8 * 128 + row // 8 * stride + k * 2
        return self._floats(self.shared.view("u2")[self._swizzled(start + offsets)])

    def _floats(self, bits: Array) -> Array:
        if self.program.dtype == "float16":
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)


def run(
    program: Program,
    params: list[bytes],
    memory: Array,
    tensors: dict[int, Rows],
    num_ctas: int,
    draw: random.Random,
    bytes_shared: int,
    lagging: Lagging | None = None,
) -> None:
    """Runs all CTAs of a launch, by turns, which change ``memory``; see ``Cta``.

    ``lagging`` are those that go on only when nobody else of their CTA can; None: drawn. Nobody may where warps wait in
    loops for what others write into global memory.

    Raises:
        FaultError: something that no GPU would do, a deadlock, or a loop that does not seem to end.
    """
    ctas = [
        Cta(program, params, memory, tensors, i, num_ctas, draw, bytes_shared, lagging).run() for i in range(num_ctas)
    ]
    count = 0
    while ctas:
        cta = draw.choice(ctas)
        for _ in range(draw.choice((1, 20, 400))):
            count += 1
            if next(cta, cta) is cta:
                ctas.remove(cta)
                break
        if count > _MOST_ROUNDS:
            raise FaultError("no end: some threads wait in a loop for what does not come")


def address_of(offset: int) -> int:
    """The address of a byte in global memory."""
    return _GLOBAL + offset
