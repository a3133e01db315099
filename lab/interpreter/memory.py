"""Instructions on global and shared memory and on mbarriers."""

from collections.abc import Callable

import numpy as np

from lab.interpreter import weak
from lab.interpreter.state import ALL, GLOBAL, Array, Barrier, Effect, FaultError, Mask, Warp, converged, lanes_of
from lab.interpreter.statement import TYPES, Statement, base_and_offset, vector
from lab.ptx.tree import Operand


def _words(s: Statement, operand: Operand, count: int) -> Callable[[Warp, Mask], tuple[Array, Array]]:
    """Makes a function that gives memory in words of the instruction's type, and the first word of an access."""
    is_global, of_cluster = ("global" in s.instruction.parts, "shared::cluster" in s.instruction.parts)
    size = int(s.kind[1:]) // 8
    address = s.address(operand, "u64" if is_global else "u32")
    unaligned = size * count - 1

    def place(warp: Warp, mask: Mask) -> tuple[Array, Array]:
        at = address(warp)
        if is_global:
            memory, first = warp.cta.memory, GLOBAL
        else:
            cta = warp.cta.owner(int(at[lanes_of(mask)][0])) if of_cluster else warp.cta
            memory, first = cta.shared, cta.first_shared
        at = at - first
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
    of_cluster = "shared::cluster" in s.instruction.parts
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
        elif not of_cluster:
            weak.read_shared(warp, at[lanes_of(mask)] * words.itemsize, lanes_of(mask))
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

        if is_global:
            weak.write_global(warp, at[lanes] * words.itemsize, words.itemsize * len(reads), write)
            return
        write()
        show_later(warp, words, at[:, None] + following, lanes)

    return store_words


def show_later(warp: Warp, words: Array, places: Array, lanes: Array) -> None:
    """Shows what lanes have stored in shared memory, each at places of its own, to TMA and tensor cores, by chance."""

    def show(chosen: Array) -> None:
        warp.cta.shown.view(words.dtype)[places[chosen]] = words[places[chosen]]

    if weak.is_late(warp.cta.draw):
        warp.late.to_async.append((lanes, show))
    else:
        show(lanes)


def matrices(s: Statement) -> Effect:
    """Loads or stores matrices of 8 x 8 numbers of 16 bits, whose rows are at addresses that eight lanes each give."""
    is_load, transposes = s.instruction.is_a("ldmatrix"), "trans" in s.instruction.parts
    of_registers, of_memory = s.operands if is_load else s.operands[::-1]
    names = vector(of_registers)
    targets, reads = ([s.target(x) for x in names], []) if is_load else ([], [s.source(x, "b32") for x in names])
    address = s.address(of_memory)

    def move(warp: Warp, mask: Mask) -> None:
        converged(mask)
        at = address(warp)[: 8 * len(names)] - warp.cta.first_shared
        if ((at < 0) | (at + 16 > len(warp.cta.shared)) | (at % 16 != 0)).any():
            raise FaultError(f"{s.name} at {at}")
        places = at.reshape(-1, 8, 1) // 2 + np.arange(8)  # (matrix, row, column)
        if transposes:
            places = places.swapaxes(1, 2)
        memory, places = warp.cta.shared.view("u2"), places.reshape(len(names), 64)  # two numbers a thread
        if is_load:
            weak.read_shared(warp, at, ALL)
            for write, words in zip(targets, memory[places].view(np.uint32), strict=True):
                write(warp, words, None)
            return
        memory[places] = np.array([read(warp) for read in reads]).view(np.uint16)
        show_later(warp, memory, places.reshape(len(names), 32, 2).swapaxes(0, 1), ALL)

    return move


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
            weak.end_reads(warp, lanes_of(mask))
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
        places = tested(warp)
        is_over = np.array([warp.cta.barrier(at).phase for at in places.tolist()]) & 1 != parity(warp)
        for at in {*places[is_over & lanes_of(mask)].tolist()}:
            warp.go_behind(at)
        write(warp, is_over, mask)

    return test


def init_barrier(s: Statement) -> Effect:
    """An mbarrier of so many arrivals a phase."""

    def init(warp: Warp, at: int, n: int) -> None:
        if warp.cta.owner(at) is not warp.cta:
            raise FaultError(f"an mbarrier of another CTA: {at}")
        warp.cta.barriers[at] = Barrier(n, n, warp.cta.cluster.num_barriers)
        warp.cta.cluster.num_barriers += 1

    return _each_lane(s, s.operands[0], init)


def arrive_at_barrier(s: Statement) -> Effect:
    """Arrivals, and bytes that are announced with one."""
    of_cluster = "shared::cluster" in s.instruction.parts

    def arrive(warp: Warp, at: int, n: int) -> None:
        weak.arrive(warp)
        warp.count_arrival()
        barrier = warp.cta.barrier(at, of_cluster=of_cluster)
        if ".expect_tx." in s.name:
            barrier.expect(n)
            n = 1
        barrier.arrive(warp.known, n, warp.number)

    return _each_lane(s, s.operands[1], arrive)


def arrive_in_cluster(s: Statement) -> Effect:
    """At the barrier of all warps of the cluster."""

    def arrive(warp: Warp, mask: Mask) -> None:
        converged(mask)
        if warp.meeting is not None:
            raise FaultError("arrives twice at the cluster's barrier")
        weak.arrive(warp)
        warp.count_arrival()
        warp.meeting = warp.cta.cluster.phase
        warp.cta.cluster.arrive(warp.known)

    return arrive


def _each_lane(s: Statement, at: Operand, function: Callable[[Warp, int, int], None]) -> Effect:
    address, number = s.address(at), s.source(s.operands[-1], "u32")

    def change(warp: Warp, mask: Mask) -> None:
        for lane in np.nonzero(lanes_of(mask))[0]:
            function(warp, int(address(warp)[lane]), int(number(warp)[lane]))

    return change
