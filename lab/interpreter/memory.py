"""Instructions on global and shared memory and on mbarriers."""

from collections.abc import Callable

import numpy as np

from lab.interpreter import weak
from lab.interpreter.state import GLOBAL, Array, Barrier, Effect, FaultError, Mask, Warp, converged, lanes_of
from lab.interpreter.statement import TYPES, Statement, base_and_offset, vector
from lab.ptx.tree import Operand


def _words(s: Statement, operand: Operand, count: int) -> Callable[[Warp, Mask], tuple[Array, Array]]:
    """Makes a function that gives memory in words of the instruction's type, and the first word of an access."""
    is_global, size = "global" in s.instruction.parts, int(s.kind[1:]) // 8
    address = s.address(operand, "u64" if is_global else "u32")
    unaligned = size * count - 1

    def place(warp: Warp, mask: Mask) -> tuple[Array, Array]:
        memory, first = (warp.cta.memory, GLOBAL) if is_global else (warp.cta.shared, warp.cta.first_shared)
        at = address(warp) - first
        if mask is not None:
            at = np.where(mask, at, 0)
        # One below zero is a large one without a sign.
        if np.count_nonzero((at.view(np.uint64) >= len(memory) - unaligned) | (at & unaligned)):
            raise FaultError(f"{s.name} at {at}")
        return memory.view(f"u{size}"), at // size

    return place


def load(s: Statement) -> Effect:
    """From global or shared memory, or of a parameter."""
    targets = [s.target(x) for x in vector(s.operands[0])]
    is_wide = s.operands[0].text.startswith("%rd")
    if s.instruction.is_a("ld.param"):
        base, offset = base_and_offset(s.operands[1].parts[0])
        which, width = s.params[base.text], int(s.kind[1:]) // 8

        def load_parameter(warp: Warp, mask: Mask) -> None:
            words = np.frombuffer(warp.cta.params[which], f"u{width}", len(targets), offset)
            for word, write in zip(words, targets, strict=True):
                write(warp, np.full(32, word), mask)

        return load_parameter
    place, is_global = _words(s, s.operands[1], len(targets)), "global" in s.instruction.parts
    is_signed = s.kind[0] == "s"
    wider: type | None = None
    if is_wide and s.kind[1:] == "32":
        wider = np.int64 if is_signed else np.uint64
    elif s.kind[1:] == "16" and not s.operands[0].text.startswith("%rs"):
        wider = np.int32 if is_signed else np.uint32
    if s.kind == "b8":  # no register is so narrow
        wider = np.uint16

    def load_words(warp: Warp, mask: Mask) -> None:
        words, at = place(warp, mask)
        if is_global:
            weak.read_global(warp, at[lanes_of(mask)] * words.itemsize, words.itemsize * len(targets))
        for i, write in enumerate(targets):
            value = words[at + i]
            write(warp, value if wider is None else value.view(TYPES[s.kind]).astype(wider), mask)

    return load_words


def store(s: Statement) -> Effect:
    """Into global or shared memory."""
    reads = [s.source(x, s.kind) for x in vector(s.operands[1])]
    place, is_global = _words(s, s.operands[0], len(reads)), "global" in s.instruction.parts
    following = np.arange(len(reads))

    def store_words(warp: Warp, mask: Mask) -> None:
        words, at = place(warp, mask)
        lanes = lanes_of(mask)
        values = [read(warp)[lanes].view(words.dtype) for read in reads]

        def write() -> None:
            for i, value in enumerate(values):
                words[at[lanes] + i] = value

        def show(chosen: Array) -> None:
            places = at[chosen][:, None] + following
            warp.cta.shown.view(words.dtype)[places] = words[places]

        if is_global:
            weak.write_global(warp, at[lanes] * words.itemsize, words.itemsize * len(reads), write)
            return
        write()
        if weak.is_late(warp.cta.draw):
            warp.late.to_async.append((lanes, show))
        else:
            show(lanes)

    return store_words


def atomic_add(s: Statement) -> Effect:
    """To a word, which is also read."""
    write, read = s.target(s.operands[0]), s.source(s.operands[2], s.kind)
    place = _words(s, s.operands[1], 1)

    def add(warp: Warp, mask: Mask) -> None:
        words, at = place(warp, mask)
        before, added = np.zeros(32, words.dtype), read(warp).view(words.dtype)
        weak.read_global(warp, at[lanes_of(mask)] * words.itemsize, words.itemsize)
        for lane in np.nonzero(lanes_of(mask))[0]:
            before[lane] = words[at[lane]]
            words[at[lane]] += added[lane]
        write(warp, before, mask)

    return add


def reduce(s: Statement) -> Effect:
    """Words and what a warp has, one lane after the other: their sum, or the largest or the smallest."""
    operations = {"add": np.add, "max": np.maximum, "min": np.minimum}
    (combine,) = (operations[part] for part in operations if part in s.instruction.parts)
    reads = [s.source(x, s.kind) for x in vector(s.operands[1])]
    place, releases = _words(s, s.operands[0], len(reads)), _releases(s)

    def reduced(warp: Warp, mask: Mask) -> None:
        words, at = place(warp, mask)
        lanes = lanes_of(mask)
        values = [read(warp)[lanes] for read in reads]

        def write() -> None:
            for i, value in enumerate(values):
                combine.at(words.view(TYPES[s.kind]), at[lanes] + i, value)

        if releases:
            weak.release(warp)
        if s.kind == "f32":
            weak.write_global(warp, at[lanes] * words.itemsize, words.itemsize * len(reads), write)
        else:  # a counter, which overtakes what it is not ordered behind
            write()

    return reduced


def fence(s: Statement) -> Effect:
    """Shows what the thread has written: to TMA and tensor cores, or to all."""
    to_async, releases = "proxy" in s.instruction.parts and "global" not in s.instruction.parts, _releases(s)

    def show(warp: Warp, mask: Mask) -> None:
        if to_async:
            weak.show_to_async(warp, lanes_of(mask))
        if releases:
            weak.release(warp)

    return show


def _releases(s: Statement) -> bool:
    parts = set(s.instruction.parts)
    return bool(parts & {"release", "acq_rel", "sc"}) and bool(parts & {"gpu", "sys"})


def test_barrier(s: Statement) -> Effect:
    """Whether a phase of an mbarrier is over."""
    write, tested, parity = s.target(s.operands[0]), s.address(s.operands[1]), s.source(s.operands[2], "u32")

    def test(warp: Warp, mask: Mask) -> None:
        phases = np.array([warp.cta.barrier(at).phase for at in tested(warp).tolist()])
        write(warp, phases & 1 != parity(warp), mask)

    return test


def init_barrier(s: Statement) -> Effect:
    """An mbarrier of so many arrivals a phase."""

    def init(warp: Warp, at: int, n: int) -> None:
        if warp.cta.owner(at) is not warp.cta:
            raise FaultError(f"an mbarrier of another CTA: {at}")
        warp.cta.barriers[at] = Barrier(n, n)

    return _each_lane(s, s.operands[0], init)


def arrive_at_barrier(s: Statement) -> Effect:
    """Arrivals, and bytes that are announced with one."""
    of_cluster = "shared::cluster" in s.instruction.parts

    def arrive(warp: Warp, at: int, n: int) -> None:
        weak.arrive(warp)
        barrier = warp.cta.barrier(at, of_cluster=of_cluster)
        if ".expect_tx." in s.name:
            barrier.expect(n)
            barrier.arrive()
        else:
            barrier.arrive(n)

    return _each_lane(s, s.operands[1], arrive)


def arrive_in_cluster(s: Statement) -> Effect:
    """At the barrier of all warps of the cluster."""

    def arrive(warp: Warp, mask: Mask) -> None:
        converged(mask)
        if warp.meeting is not None:
            raise FaultError("arrives twice at the cluster's barrier")
        weak.arrive(warp)
        warp.meeting = warp.cta.cluster.phase
        warp.cta.cluster.arrive()

    return arrive


def _each_lane(s: Statement, at: Operand, function: Callable[[Warp, int, int], None]) -> Effect:
    address, number = s.address(at), s.source(s.operands[-1], "u32")

    def change(warp: Warp, mask: Mask) -> None:
        for lane in np.nonzero(lanes_of(mask))[0]:
            function(warp, int(address(warp)[lane]), int(number(warp)[lane]))

    return change
