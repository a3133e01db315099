"""The rules of the lint, but for those about global memory: each is a function that yields findings."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lab.lint.global_memory import WIDE_SCOPES, offsets_that_may_wrap, polls
from lab.ptx import tree
from lab.ptx.threads import WARP, Program, Thread, Value
from lab.ptx.tree import Function, Instruction

MOST_REGION = 32768  # bytes behind an address that TMA or tensor cores read, unless something else begins before
_STEP = 8  # of setmaxnreg, and bytes of an mbarrier
_CTAS = 2  # of a cluster
_NOT_OF_HOPPER = ("scope",)
_ByRing = dict[tuple[int, int], dict[tuple[int, int], set[int]]]  # by CTA and ring, and by CTA and warp: arrivals


class Finding(NamedTuple):
    """A rule that is broken."""

    rule: str
    line: int  # of the PTX
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.text}"


def lint(text: str) -> list[Finding]:
    """Findings in the kernels of a PTX module, by line.

    Raises:
        PtxError: it is not PTX as ``lab.ptx.tree`` knows it.
    """
    module = tree.parse(text)
    found = {finding for function in module.functions for finding in check(function)}
    if module.target.startswith("sm_90"):  # whose clusters have been measured as they are
        found = {finding for finding in found if finding.rule not in _NOT_OF_HOPPER}
    return sorted(found, key=lambda finding: (finding.line, finding.rule, finding.text))


def check(function: Function) -> Iterator[Finding]:
    """Findings in a kernel."""
    program = Program(function)
    kernel = _Kernel(program)
    yield from _paths(kernel)
    for rule in (_election, _group, _columns, _registers, _arrivals, _expected_bytes, _polls, _offsets):
        yield from rule(kernel)


class _Kernel:
    """A kernel's threads, and what several rules want to know of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.instructions = program.instructions
        self.threads = [thread for warp in program.warps for thread in warp]
        self.counts: dict[int, int] = {}  # of mbarriers whose initialisation is known, by address
        for thread, number, x in self.where("mbarrier.init"):
            address, count = thread.address(number, 0), thread.value(x, x.operands[1])
            if address is not None and count is not None and address.is_exact:
                self.counts[address.number] = count.number
        self.region_starts, self.readers = self._regions()
        # Of products, and of what frees columns: they reach all of tensor memory, others a quarter of the lanes.
        self.issuers = {thread.number for thread, _, _ in self.where("tcgen05.mma", "tcgen05.cp", "tcgen05.dealloc")}
        self.ring_starts = {
            value.number for _, _, value in self._arrivals() if value is not None and not value.is_exact
        }
        self.audiences = self._audiences()
        self.committed = {self.ring(value) for _, x, value in self._arrivals() if x.is_a("tcgen05.commit")}
        self.accessed_by_arriving = {
            self.ring(value)
            for thread, x, value in self._arrivals()
            if x.is_a("mbarrier.arrive")
            and "expect_tx" not in x.parts
            and thread.executes_any("tcgen05.ld", "tcgen05.st")
        }

    def where(self, *prefixes: str) -> Iterator[tuple[Thread, int, Instruction]]:
        """Threads, and the instructions of a kind that they may execute."""
        numbers = self.program.numbers(*prefixes)
        for thread in self.threads:
            for number in numbers:
                if thread.executes(number):
                    yield thread, number, self.instructions[number]

    def ring(self, value: Value | None) -> int | None:
        """Where the ring of mbarriers that one belongs to begins; None if that is unknown."""
        if value is None:
            return None
        address = value.number
        count = self.counts.get(address)
        while address not in self.ring_starts and self.counts.get(address - _STEP) == count is not None:
            address -= _STEP
        return address if address in self.ring_starts else value.number

    def are_beside(self, a: int, b: int) -> bool:
        """Whether all mbarriers from one to another have the same count, so that they may be of one ring."""
        return len({self.counts.get(x) for x in range(min(a, b), max(a, b) + 1, _STEP)}) == 1

    def region(self, address: int) -> int | None:
        """Where the piece of shared memory begins that an address is in, if TMA or tensor cores read it."""
        start = max((x for x in self.region_starts if x <= address), default=None)
        return start if start in self.readers and address < start + MOST_REGION else None

    def regions_read(self, thread: Thread, number: int) -> Iterator[Value]:
        """Where the pieces of shared memory begin that TMA or tensor cores read with an instruction."""
        x = self.instructions[number]
        if x.is_a("wgmma.mma_async", "tcgen05.mma"):
            for operand in x.operands[1:3]:
                value = None if operand.marks else thread.value(x, operand)
                if value is not None and value.is_shared:
                    yield value._replace(number=(value.number & 0x3FFF) << 4)
        elif x.is_a("cp.async.bulk", "cp.reduce.async.bulk") and len(x.operands) > 1 and reads_by_bulk(x):
            address = thread.address(number, 1)
            if address is not None:
                yield address

    def hands_over(self, thread: Thread, number: int, region: int) -> bool:
        """Whether those who go on behind an instruction may read a piece of shared memory by TMA or tensor cores."""
        x = self.instructions[number]
        readers = self.readers[region]
        if x.is_a("bar.warp"):
            warp = thread.number // WARP
            return any(t // WARP == warp and not thread.executes(n) for t, n in readers)
        waiting = self.audiences[self.meeting(thread, number)]
        return any(t in waiting for t, _ in readers)

    def reaches_users(self, thread: Thread, number: int) -> bool:
        """Whether those who go on behind an instruction reach what the thread reaches in tensor memory."""
        if self.instructions[number].is_a("bar.warp"):
            return False
        waiting = self.audiences[self.meeting(thread, number)]
        warp = thread.number // WARP
        return any(t in self.issuers or (t // WARP != warp and t // WARP % 4 == warp % 4) for t in waiting)

    def meeting(self, thread: Thread, number: int) -> str:
        """Key that an arrival and waits for it share: an mbarrier, or the number of a barrier."""
        x = self.instructions[number]
        if x.is_a("mbarrier"):
            address = thread.address(number, barrier_operand(x))
            return f"mbarrier {self.ring(address)}"
        if x.is_a("barrier.cluster"):
            return "cluster"
        value = thread.value(x, x.operands[0])
        return f"barrier {value.number if value is not None and value.is_exact else None}"

    def _arrivals(self) -> list[tuple[Thread, Instruction, Value | None]]:
        """All that arrive at mbarriers, with what is known of where."""
        return [
            (thread, x, thread.address(number, barrier_operand(x)))
            for thread, number, x in self.where("mbarrier.arrive", "tcgen05.commit", "cp.async.mbarrier.arrive")
        ]

    def _regions(self) -> tuple[set[int], dict[int, set[tuple[int, int]]]]:
        """Where pieces of shared memory begin, and threads and instructions that read them by TMA or tensor cores."""
        starts, readers = set(self.counts), defaultdict(set)
        for thread, number, x in self.where("cp.async.bulk", "cp.reduce.async.bulk", "wgmma.mma_async", "tcgen05.mma"):
            address = thread.address(number, 0) if x.is_a("cp") and is_bulk_load(x) else None
            starts |= {address.number} if address is not None else set()
            for start in self.regions_read(thread, number):
                readers[start.number].add((thread.number, number))
        return starts | readers.keys(), dict(readers)

    def _audiences(self) -> dict[str, set[int]]:
        """By what they wait for: threads."""
        found = defaultdict(set)
        for thread, number, x in self.where("mbarrier.try_wait", "mbarrier.test_wait", "bar", "barrier"):
            if not x.is_a("bar.warp") and "arrive" not in x.parts:
                found[self.meeting(thread, number)].add(thread.number)
        return found


def is_bulk_load(x: Instruction) -> bool:
    """Whether TMA writes shared memory with it, be it another CTA's."""
    words = x.opcode.split(".")
    spaces = [word for word in words if word in ("global", "shared::cta", "shared::cluster")]
    return len(spaces) == 2 and spaces[0] != "global"


def reads_by_bulk(x: Instruction) -> bool:
    """Whether TMA reads shared memory with it, be it for another CTA's."""
    return not is_bulk_load(x) or ".shared::cluster.shared::cta." in x.opcode


def barrier_operand(x: Instruction) -> int:
    """Which operand of an instruction that arrives at an mbarrier is its address."""
    return next(i for i, operand in enumerate(x.operands) if operand.marks == "[")


# What has happened to a thread on some path, and by which instruction; that of the first line, if there are several.
_State = dict[str, int]
# Operations that rules about paths are about; others only write registers.
_OF_PATHS = {"st", "stmatrix", "ld", "red", "cp", "mbarrier", "bar", "barrier", "fence", "membar", "setmaxnreg"}
_OF_PATHS |= {"tcgen05", "wgmma"}


def _paths(kernel: _Kernel) -> Iterator[Finding]:
    """The rules about what must lie between two instructions."""
    findings: list[Finding] = []
    for thread in {frozenset(thread.executed): thread for thread in reversed(kernel.threads)}.values():
        _Scan(kernel, thread, findings).run()
    yield from findings


class _Scan:
    """All paths of a thread: states before instructions, joined until they stay."""

    def __init__(self, kernel: _Kernel, thread: Thread, findings: list[Finding]) -> None:
        self.kernel = kernel
        self.thread = thread
        self.findings = findings
        self.others = kernel.program.warps[thread.number // WARP][1]  # of its warp
        self.issues_products = thread.executes_any("tcgen05.mma")
        self.uses_tensor_memory = thread.executes_any("tcgen05")

    def run(self) -> None:
        """Follows each straight piece to its end: states are kept, and joined, where several paths meet."""
        states: dict[int, _State] = {0: {"alone": 0, "unreleased": 0}}
        waiting, end, meetings = [0], len(self.kernel.instructions), self.kernel.program.meetings
        while waiting:
            number = waiting.pop()
            after = dict(states[number])
            while True:
                if self.thread.executes(number):
                    self.step(number, after)
                successors = self.thread.next_ones(number)
                if len(successors) != 1 or successors[0] in meetings:
                    break
                (number,) = successors
            for successor in successors:
                if successor == end:
                    if after.keys() & {"remote", "leaving"}:
                        origin = after.get("remote", after.get("leaving", 0))
                        self.report("cluster", number, origin, "ends without meeting the other CTA behind")
                    continue
                joined = after if successor not in states else _joined(states[successor], after)
                if successor not in states or joined != states[successor]:
                    states[successor] = joined
                    waiting.append(successor)

    def report(self, rule: str, number: int, origin: int, text: str) -> None:
        line = self.kernel.instructions[origin].line
        here = self.kernel.instructions[number]
        self.findings.append(Finding(rule, here.line, f"{here.opcode} {text} line {line}"))

    def once(self, rule: str, number: int, state: _State, fact: str, text: str) -> None:
        """Reports a fact that is to be over by now, and forgets it: once is enough."""
        if fact in state:
            self.report(rule, number, state.pop(fact), text)

    def step(self, number: int, state: _State) -> None:
        """Applies an executed instruction to a state, and reports the rules that it breaks there."""
        x = self.kernel.instructions[number]
        if x.operation not in _OF_PATHS:
            if self.uses_tensor_memory:
                self.registers_loaded(number, x, state)
            return
        if is_arrival(x):
            self.check_telling(number, x, state)
        self.warp(number, x, state)
        self.turn(number, x, state)
        self.cluster(number, x, state)
        self.release(number, x, state)
        if x.is_a("setmaxnreg.dec") and "awaited" in state:
            self.report("registers", number, state["awaited"], "gives registers back only behind the wait of")
        if x.is_a("mbarrier.try_wait", "mbarrier.test_wait"):
            state.setdefault("awaited", number)
        if x.is_a("mbarrier.init"):
            state.setdefault("initialised", number)
        elif x.is_a("fence.mbarrier_init", "fence.proxy.async"):
            state.pop("initialised", None)
        if x.is_a("st.shared", "stmatrix"):
            address = self.thread.address(number, 0)
            region = None if address is None else self.kernel.region(address.number)
            if region is not None:
                state.setdefault(f"proxy {region}", number)
        elif x.is_a("fence.proxy.async") and "global" not in x.parts:
            for fact in [fact for fact in state if fact.startswith("proxy ")]:
                del state[fact]
        else:
            for read in self.kernel.regions_read(self.thread, number):
                origin = state.get(f"proxy {read.number}")
                if origin is None:
                    continue
                written = self.thread.address(origin, 0)
                # Of a ring this may be another stage than what was written.
                if read.is_exact and written is not None and written.is_exact:
                    self.unfenced(number, state, read.number)
        if self.uses_tensor_memory:
            self.tensor_memory(number, x, state)

    def cluster(self, number: int, x: Instruction, state: _State) -> None:
        """The other CTA has begun before its memory is reached, and ends when it is reached no more."""
        if _reaches_others(x) or (is_bulk_load(x) and reads_by_bulk(x)):
            state["remote"] = number
            if "alone" in state:
                self.report("cluster", number, number, "without meeting the other CTA ahead of")
            if x.is_a("mbarrier.arrive") and not x.parts >= {"release", "cluster"}:
                self.report("scope", number, number, "releases nothing to the other CTA: expected .release.cluster in")
        elif x.is_a("barrier.cluster.arrive"):
            state.pop("remote", None)
            state["leaving"] = number
            if "relaxed" in x.parts:
                self.report("scope", number, number, "releases nothing to the other CTA: expected no .relaxed in")
        elif x.is_a("barrier.cluster.wait"):
            state.pop("leaving", None)
            state.pop("alone", None)

    def release(self, number: int, x: Instruction, state: _State) -> None:
        """Checks that what a thread has stored, or knows to be stored, is released when it counts in global memory."""
        if x.is_a("fence.acq_rel", "fence.sc", "membar") and x.parts & WIDE_SCOPES:
            state.pop("unreleased", None)
        elif x.is_a("red") and {"global", "add"} <= x.parts and x.parts & {"s32", "u32", "s64", "u64"}:
            if "unreleased" in state and not ("release" in x.parts and x.parts & WIDE_SCOPES):
                self.report("scope", number, state["unreleased"], "without .release.gpu or fence.acq_rel.gpu behind")
        elif is_arrival(x) or x.is_a("st", "red", "cp", "mbarrier.try_wait", "mbarrier.test_wait", "barrier"):
            state.setdefault("unreleased", number)

    def warp(self, number: int, x: Instruction, state: _State) -> None:
        """Checks that a warp's threads meet after accesses of all, before one of them arrives for all.

        What they have loaded from shared memory may be for another mbarrier, and is no concern of this one.
        """
        if x.operation in ("bar", "barrier"):
            state.pop("accessed", None)
            state.pop("stored", None)
        elif self.others.executes(number):
            if x.is_a("st.shared", "stmatrix", "tcgen05.ld", "tcgen05.st"):
                state.setdefault("accessed", number)
            if x.is_a("st.shared", "stmatrix"):
                state.setdefault("stored", number)
        elif x.is_a("cp.async.bulk", "cp.reduce.async.bulk") and [*self.kernel.regions_read(self.thread, number)]:
            self.once("warp", number, state, "stored", "without bar.warp.sync behind the store of")
        elif x.is_a("mbarrier.arrive") and "expect_tx" not in x.parts:
            self.once("warp", number, state, "accessed", "without bar.warp.sync behind the access of")

    def turn(self, number: int, x: Instruction, state: _State) -> None:
        """Checks the fences between the wait for a turn, additions to global memory by TMA, and the signal."""
        if x.is_a("ld.acquire"):
            state.setdefault("acquired", number)
        elif x.is_a("fence.proxy.async") and not any(word.startswith("shared") for word in x.parts):
            state.pop("acquired", None)
        elif x.is_a("cp.async.bulk.global", "cp.reduce.async.bulk.global"):
            self.once("turn", number, state, "acquired", "without fence.proxy.async.global behind the load of")
            state.setdefault("added", number)
        elif x.opcode == "cp.async.bulk.wait_group" and x.operands[0].number == 0:
            state.pop("added", None)
        elif x.is_a("red.release"):
            self.once("turn", number, state, "added", "without cp.async.bulk.wait_group 0 behind the addition of")

    def unfenced(self, number: int, state: _State, region: int) -> None:
        self.once("proxy", number, state, f"proxy {region}", "without fence.proxy.async behind the store of")

    def check_telling(self, number: int, x: Instruction, state: _State) -> None:
        """Rules of instructions behind which other threads go on."""
        if not x.is_a("bar.warp"):
            self.once("init-fence", number, state, "initialised", "without fence.mbarrier_init behind")
        for region in [int(fact.split()[1]) for fact in state if fact.startswith("proxy ")]:
            if self.kernel.hands_over(self.thread, number, region):
                self.unfenced(number, state, region)
        if not (state.keys() & {"load", "store", "unfenced"} and self.kernel.reaches_users(self.thread, number)):
            return
        if "load" in state:
            self.report("load-wait", number, state["load"], "without tcgen05.wait::ld behind the load of")
        if "store" in state:
            self.report("store-wait", number, state["store"], "without tcgen05.wait::st behind the store of")
        self.once("fence-before", number, state, "unfenced", "without tcgen05.fence::before_thread_sync behind")

    def registers_loaded(self, number: int, x: Instruction, state: _State) -> None:
        """Follows the registers that loads of tensor memory write, until the warp has waited for these."""
        resolved = self.kernel.program.resolved[number]
        if "load" not in state:
            return
        pending = {register for register in resolved.sources if f"register {register}" in state}
        if pending:
            origin = min(state[f"register {register}"] for register in pending)
            if x.is_a("mov"):  # a copy is as little there as what it is a copy of
                state.update((f"register {register}", origin) for register in resolved.results)
                return
            self.report("load-wait", number, origin, "uses a register without tcgen05.wait::ld behind the load of")
            for fact in [fact for fact in state if fact.startswith("register ") and state[fact] == origin]:
                del state[fact]  # once is enough
        for register in resolved.results:
            state.pop(f"register {register}", None)

    def tensor_memory(self, number: int, x: Instruction, state: _State) -> None:
        """Checks waits and fences around accesses to tensor memory."""
        self.registers_loaded(number, x, state)
        if x.is_a("tcgen05.ld", "tcgen05.st", "tcgen05.mma"):
            self.once(
                "fence-after", number, state, "waited", "without tcgen05.fence::after_thread_sync behind the wait of"
            )
        if x.is_a("tcgen05.ld"):
            state.setdefault("load", number)
            state.setdefault("unfenced", number)
            results = self.kernel.program.resolved[number].results
            state.update((f"register {register}", number) for register in results)
        elif x.is_a("tcgen05.st"):
            state.setdefault("store", number)
            state.setdefault("unfenced", number)
        elif x.opcode.startswith("tcgen05.wait::ld"):
            for fact in [fact for fact in state if fact == "load" or fact.startswith("register ")]:
                del state[fact]
        elif x.opcode.startswith("tcgen05.wait::st"):
            state.pop("store", None)
        elif x.opcode.startswith("tcgen05.fence::before"):
            state.pop("unfenced", None)
        elif x.opcode.startswith("tcgen05.fence::after"):
            state.pop("waited", None)
        elif x.is_a("tcgen05.commit") and "store" in state:
            self.report("store-wait", number, state["store"], "without tcgen05.wait::st behind the store of")
        elif x.is_a("mbarrier.try_wait", "mbarrier.test_wait"):
            ring = self.kernel.ring(self.thread.address(number, 1))
            guards = self.kernel.accessed_by_arriving if self.issues_products else self.kernel.committed
            if ring in guards and ring is not None:
                state.setdefault("waited", number)


def _joined(a: _State, b: _State) -> _State:
    return {fact: min(a.get(fact, b.get(fact, 0)), b.get(fact, a.get(fact, 0))) for fact in a.keys() | b.keys()}


def is_arrival(x: Instruction) -> bool:
    """Whether threads that wait for this one go on behind it."""
    if x.is_a("mbarrier.arrive"):
        return True
    return x.operation in ("bar", "barrier") and "wait" not in x.parts


def _by_warp(kernel: _Kernel, *prefixes: str) -> dict[int, dict[int, int]]:
    """By instruction and warp, how many threads execute it: 1 (the first), 31 (all others) or 32."""
    found: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for thread, number, _ in kernel.where(*prefixes):
        found[number][thread.number // WARP] += 1 if thread.number % WARP == 0 else WARP - 1
    return found


def _election(kernel: _Kernel) -> Iterator[Finding]:
    for prefixes, expected in (
        (("tcgen05.mma", "tcgen05.commit"), 1),
        (("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.ld", "tcgen05.st"), WARP),
    ):
        for number, warps in _by_warp(kernel, *prefixes).items():
            x = kernel.instructions[number]
            for warp, threads in warps.items():
                if threads != expected:
                    yield Finding("election", x.line, f"{x.opcode} by {threads} threads of warp {warp}, not {expected}")


def _group(kernel: _Kernel) -> Iterator[Finding]:
    groups: dict[str, Instruction] = {}
    for x in kernel.instructions:
        for word in x.parts:
            if word.startswith("cta_group::") and x.is_a("tcgen05"):
                groups.setdefault(word, x)
    for word, x in sorted(groups.items())[1:]:
        yield Finding("group", x.line, f"{x.opcode} beside {min(groups)} (line {groups[min(groups)].line}): not {word}")


def _columns(kernel: _Kernel) -> Iterator[Finding]:
    sizes: dict[str, set[int | None]] = defaultdict(set)
    for kind in ("alloc", "dealloc"):
        by_warp: dict[int, list[int]] = defaultdict(list)
        for thread, number, x in kernel.where(f"tcgen05.{kind}"):
            value = thread.value(x, x.operands[1])
            sizes[kind].add(None if value is None else value.number)
            by_warp[thread.number // WARP].append(number)
            if value is not None and value.number not in (32, 64, 128, 256, 512):
                yield Finding("columns", x.line, f"{x.opcode} of {value.number} columns")
        if len(by_warp) > 1:
            x = kernel.instructions[min(by_warp.values())[0]]
            yield Finding("columns", x.line, f"{x.opcode} by warps {sorted(by_warp)}, not by one")
        for warp, numbers in by_warp.items():
            if _ends_without(kernel.program.warps[warp][0], set(numbers)):
                x = kernel.instructions[numbers[0]]
                yield Finding("columns", x.line, f"{x.opcode} not on every path of warp {warp}")
    if sizes["alloc"] != sizes["dealloc"]:
        x = next(x for x in kernel.instructions if x.is_a("tcgen05.alloc", "tcgen05.dealloc"))
        columns = {kind: sorted(map(str, sizes[kind])) for kind in sizes}
        yield Finding("columns", x.line, f"allocated {columns['alloc']}, freed {columns['dealloc']}")


def _ends_without(thread: Thread, numbers: set[int]) -> bool:
    """Whether a path of a thread ends without any of the instructions."""
    seen, waiting = set(), [0]
    while waiting:
        number = waiting.pop()
        if number in seen or number in numbers:
            continue
        seen.add(number)
        if number == len(thread.program.instructions):
            return True
        waiting.extend(thread.next_ones(number))
    return False


def _registers(kernel: _Kernel) -> Iterator[Finding]:
    launched = kernel.program.function.registers
    values: dict[int, set[int]] = defaultdict(set)  # by warp
    first: dict[int, Instruction] = {}
    for thread, _, x in kernel.where("setmaxnreg"):
        count = x.operands[0].number or 0
        values[thread.number // WARP].add(count)
        first.setdefault(thread.number // WARP, x)
        if count % _STEP or not 24 <= count <= 256:
            yield Finding("registers", x.line, f"{x.opcode} of {count}: expected a multiple of 8 from 24 to 256")
        if count != launched and (count > launched) != ("inc" in x.parts):
            text = "only .inc gets registers" if count > launched else "only .dec gives registers back"
            yield Finding("registers", x.line, f"{x.opcode} of {count}, of {launched} at launch: {text}")
    if not values:
        return
    at = first[min(first)].line
    head = kernel.program.function.directives
    if not head.keys() & {".minnctapersm", ".maxnreg"}:
        yield Finding("registers", at, "setmaxnreg without .minnctapersm or .maxnreg is left out by the assembler")
    num_warps = (kernel.program.function.num_threads + WARP - 1) // WARP
    total = pool = 0
    for group in range(0, num_warps, 4):
        warps = range(group, min(group + 4, num_warps))
        given = [sorted(values.get(warp, {launched})) for warp in warps]
        if any(each != given[0] for each in given) or len(given[0]) != 1:
            yield Finding("registers", at, f"setmaxnreg of warps {group} to {warps[-1]}: {given}, not one value")
        total += max(given[0])
        pool += launched
    if total > pool:
        yield Finding("registers", at, f"setmaxnreg comes to {total} registers a thread of each warpgroup, of {pool}")


def _arrivals(kernel: _Kernel) -> Iterator[Finding]:
    """Compares counts with arrivals, those from the other CTA of a pair included, where all of both are known."""
    kernels = [kernel]
    if any(_reaches_others(x) for x in kernel.instructions):
        if not any(operand.text == "%cluster_ctarank" for x in kernel.instructions for operand in x.operands):
            return  # which CTA does what depends on something that is unknown here
        kernels = [_Kernel(kernel.program.of_rank(rank)) for rank in range(_CTAS)]
    # By whose ring it is, and by whose warp, of those at the address of the ring, and of all: where a ring ends is not
    # certain.
    at_start: _ByRing = defaultdict(lambda: defaultdict(set))
    in_ring: _ByRing = defaultdict(lambda: defaultdict(set))
    lines: dict[tuple[int, int], int] = {}
    for rank, each in enumerate(kernels):
        for number, warps in _by_warp(each, "mbarrier.arrive", "tcgen05.commit", "cp.async.mbarrier.arrive").items():
            x = kernel.instructions[number]
            for warp, threads in warps.items():
                executing = [t for t in each.program.warps[warp] if t.executes(number)]
                addresses = [t.address(number, barrier_operand(x)) for t in executing]
                reached = {_ctas_reached(t, x, a, rank) for t, a in zip(executing, addresses, strict=True)}
                address, ctas = addresses[0], reached.pop()
                ring = kernel.ring(address)
                if address is None or ring is None or ctas is None or reached:
                    return
                count = x.operands[-1].number if x.is_a("mbarrier.arrive") and "expect_tx" not in x.parts else None
                total = threads * (1 if count is None else count)
                for cta in ctas:
                    in_ring[cta, ring][rank, warp].add(total)
                    if address.number == ring:
                        at_start[cta, ring][rank, warp].add(total)
                    lines.setdefault((cta, ring), x.line)
    for (cta, ring), warps_of_ring in in_ring.items():
        expected = kernel.counts.get(ring)
        others = (other for of, other in in_ring if of == cta and kernel.are_beside(ring, other))
        beside = _merged(in_ring[cta, other] for other in others)
        totals = {sum(map(max, arrivals.values())) for arrivals in (at_start[cta, ring], warps_of_ring, beside)}
        if expected is None or expected in totals or any(len(each) > 1 for each in warps_of_ring.values()):
            continue
        of_cta, of_rank = (f" of CTA {cta}", " of CTA {}") if len(kernels) > 1 else ("", "")
        by_warp = sorted(warps_of_ring.items())
        arrivals = ", ".join(f"{max(each)} of warp {warp}{of_rank.format(rank)}" for (rank, warp), each in by_warp)
        text = f"the mbarrier at {ring}{of_cta} has a count of {expected}, and arrivals: {arrivals}"
        yield Finding("arrivals", lines[cta, ring], text)
    for rank, each in enumerate(kernels):
        for thread, number, x in each.where("mbarrier.try_wait", "mbarrier.test_wait"):
            ring = kernel.ring(thread.address(number, 1))
            first_phase_passes = "parity" in x.parts and thread.value(x, x.operands[2]) == Value(1)
            if ring in kernel.counts and ring is not None and (rank, ring) not in in_ring and not first_phase_passes:
                yield Finding("arrivals", x.line, f"waits for the mbarrier at {ring}, at which nothing arrives")


def _merged(arrivals: Iterable[dict[tuple[int, int], set[int]]]) -> dict[tuple[int, int], set[int]]:
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for by_warp in arrivals:
        for warp, counts in by_warp.items():
            found[warp] |= counts
    return found


def _reaches_others(x: Instruction) -> bool:
    """Whether it arrives at barriers that may be another CTA's."""
    return _is_remote(x) or (x.is_a("tcgen05.commit") and "multicast::cluster" in x.parts)


def _ctas_reached(thread: Thread, x: Instruction, address: Value | None, rank: int) -> tuple[int, ...] | None:
    """The CTAs at whose barriers a thread of one arrives; None if that is unknown."""
    if x.is_a("tcgen05.commit") and "multicast::cluster" in x.parts:
        mask = thread.value(x, x.operands[1])
        return None if mask is None or not mask.is_exact else tuple(cta for cta in range(16) if mask.number >> cta & 1)
    if not _is_remote(x):
        return (rank,)
    return None if address is None or address.rank is None else (address.rank,)


def _is_remote(x: Instruction) -> bool:
    """Whether it arrives at a barrier that a thread has mapped to another CTA."""
    return x.is_a("mbarrier.arrive") and "shared::cluster" in x.parts


def _polls(kernel: _Kernel) -> Iterator[Finding]:
    for x in polls(kernel.program):
        if not ("acquire" in x.parts and x.parts & WIDE_SCOPES):
            yield Finding("scope", x.line, f"{x.opcode} in a loop that waits: expected ld.acquire.gpu")


def _offsets(kernel: _Kernel) -> Iterator[Finding]:
    for x, widened in offsets_that_may_wrap(kernel.program):
        text = f"{widened.opcode} of a product of sizes in 32 bits, an offset of {x.opcode} in line {x.line}"
        yield Finding("offset", widened.line, text)


def _expected_bytes(kernel: _Kernel) -> Iterator[Finding]:
    expecting: dict[int | None, Instruction] = {}
    signalled: dict[int | None, Instruction] = {}
    for thread, number, x in kernel.where("mbarrier.arrive.expect_tx", "mbarrier.expect_tx"):
        expecting.setdefault(kernel.ring(thread.address(number, barrier_operand(x))), x)
    for thread, number, x in kernel.where("cp.async.bulk"):
        if is_bulk_load(x):
            operand = max(i for i, operand in enumerate(x.operands) if operand.marks == "[")
            signalled.setdefault(kernel.ring(thread.address(number, operand)), x)
    if None not in expecting:
        for ring in signalled.keys() - expecting.keys() - {None}:
            x = signalled[ring]
            text = f"{x.opcode} signals the mbarrier at {ring}, which expects no bytes"
            yield Finding("expected-bytes", x.line, text)
    if None not in signalled:
        for ring in expecting.keys() - signalled.keys() - {None}:
            yield Finding("expected-bytes", expecting[ring].line, f"nothing brings bytes to the mbarrier at {ring}")
