"""Threads of a kernel as its PTX shows them: which instructions each may reach, and with which addresses.

Constants are propagated through registers and branches together (Wegman and Zadeck, "Constant propagation with
conditional branches", 1991), for one thread at a time, whose number is a constant. Roles of warps depend on it, so
what is left of a kernel for a thread is its role's part. Shared memory begins at 0. Of a number that is unknown but for
what is added to it, the known part is kept: the address of a stage of a ring is where the ring begins. An address in
the shared memory of another CTA of the cluster is the same as in the own one, and knows whose it is.
"""

import copy
import functools
import operator
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lab.ptx.tree import Function, Instruction, Operand

WARP = 32
_MOST_CHANGES = 8  # of a register's value, before it counts as unknown
_WITHOUT_RESULT = re.compile(
    r"""
    (st|stmatrix|red|bar|barrier|bra|ret|exit|trap|fence|membar|cp|prefetch|prefetchu|setmaxnreg|nanosleep|griddepcontrol
    |discard|applypriority|mbarrier\.(init|inval|expect_tx|complete_tx)|tcgen05\.(st|alloc|dealloc|mma|cp|commit)
    |wgmma\.(fence|commit_group|wait_group))(\.|$)""",
    re.VERBOSE,
)


class Value(NamedTuple):
    """Value of a register, as far as it is known."""

    number: int
    is_exact: bool = True  # if not, something unknown is added to it, or it is the least of several
    is_shared: bool = False  # an address in shared memory, or made of one
    rank: int | None = None  # of the CTA whose memory that is, if it comes from ``mapa``


@dataclass(frozen=True)
class Resolved:
    """Registers of an instruction, distinguished from those of the same name in other scopes."""

    results: tuple[str, ...]
    sources: tuple[str, ...]
    guard: str | None


def has_result(instruction: Instruction) -> bool:
    """Whether the first operand is written, as far as it is a register."""
    return _WITHOUT_RESULT.match(instruction.opcode) is None


def resolve(instruction: Instruction) -> Resolved:
    """The registers that an instruction writes and reads."""
    results: tuple[str, ...] = ()
    operands = instruction.operands
    if operands and has_result(instruction) and operands[0].marks != "[":
        results = operands[0].names
        if not instruction.is_a("wgmma.mma_async"):  # whose accumulators are read as well
            operands = operands[1:]
    sources = tuple(name for operand in operands for name in operand.names)
    name = instruction.register
    guard = None if instruction.guard is None else name(instruction.guard)
    return Resolved(tuple(map(name, results)), tuple(map(name, sources)), guard)


Reader = Callable[["Thread"], Value | None]  # reads an operand
Evaluator = Callable[["Thread"], Sequence[Value | None]]  # computes an instruction's results


def _reader(instruction: Instruction, operand: Operand) -> Reader:
    """Makes the reader of an operand; of an address it reads the value within the brackets."""
    if operand.marks == "[":
        return _reader(instruction, operand.parts[0])
    if operand.marks == "+":
        a, b = (_reader(instruction, part) for part in operand.parts)
        return lambda thread: _add(a(thread), b(thread))
    if operand.marks == "!":
        negated = _reader(instruction, operand.parts[0])
        return lambda thread: _predicate("not", [negated(thread)])
    if operand.number is not None or operand.marks:
        constant = None if operand.number is None else Value(operand.number)
        return lambda thread: constant
    name = operand.text
    if name in ("%laneid", "%cluster_ctarank") or (name.startswith("%") and "." in name):
        return lambda thread: thread.special(name)
    is_shared = instruction.scope.holder(name) is None and re.search(r"sh(ared_)?mem", name)
    register, undefined = instruction.register(name), Value(0, True, True) if is_shared else None
    return lambda thread: thread.values.get(register, undefined)


def _evaluator(program: "Program", instruction: Instruction, count: int) -> Evaluator | None:
    """Makes what computes so many results of an instruction; None if they are always unknown."""
    unknown: list[Value | None] = [None] * count
    op, words = instruction.operation, instruction.parts
    if op == "elect":
        return lambda thread: [*unknown[1:], Value(int(thread.number % WARP == 0))]
    if op == "mov" and instruction.operands[1].marks == "{":
        halves = [program.reader(instruction, x) for x in instruction.operands[1].parts]
        return (lambda thread: [_whole(*(read(thread) for read in halves))]) if len(halves) == 2 else None
    compute = _computation(op, words)
    if count == 2 and op == "mov":  # of 64 bits into two registers
        read_whole = program.reader(instruction, instruction.operands[1])
        return lambda thread: _halves(read_whole(thread))
    if count != 1 and op == "shfl":
        first = program.reader(instruction, instruction.operands[1])
        return lambda thread: [first(thread), *unknown[1:]]
    if count != 1 or compute is None:
        return None
    readers = [program.reader(instruction, x) for x in instruction.operands[1:]]
    return lambda thread: [compute([read(thread) for read in readers])]


class Step(NamedTuple):
    """An instruction as threads execute it."""

    results: tuple[str, ...]
    evaluate: Evaluator | None
    guard: str | None
    negated: bool
    next_ones: tuple[int, ...]
    is_inert: bool  # all that a thread knows behind it is that it has come there


class Program:
    """A function, with what all its threads share."""

    def __init__(self, function: Function, rank: int | None = None) -> None:
        """``rank`` is that of the CTA in its cluster; None: any."""
        self.function = function
        self.rank = rank
        self.instructions = function.instructions
        self.resolved = [resolve(x) for x in function.instructions]
        self.users: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(self.resolved):
            for register in {*one.sources, *([one.guard] if one.guard else [])}:
                self.users[register].append(number)
        self._readers: dict[int, Reader] = {}  # by the identity of operands, which the function keeps
        self._numbers: dict[tuple[str, ...], list[int]] = {}
        self.steps = self._steps()

    def _steps(self) -> list[Step]:
        both = [*zip(self.instructions, self.resolved, strict=True)]
        evaluators = [_evaluator(self, x, len(one.results)) for x, one in both]
        known = {one.guard for one in self.resolved}  # registers whose values matter, whatever these are
        for (_, one), evaluate in zip(both, evaluators, strict=True):
            if evaluate is not None:
                known.update(one.results)
        return [
            Step(
                one.results,
                evaluate,
                one.guard,
                x.negated,
                next_ones,
                one.guard is None and len(next_ones) == 1 and known.isdisjoint(one.results),
            )
            for (x, one), evaluate, next_ones in zip(both, evaluators, self.function.successors, strict=True)
        ]

    def of_rank(self, rank: int) -> "Program":
        """This program, of the CTA of a rank."""
        other = copy.copy(self)
        other.rank = rank
        other.__dict__.pop("warps", None)
        return other

    def numbers(self, *prefixes: str) -> list[int]:
        """Numbers of the instructions that begin with the whole words of one of some prefixes."""
        if prefixes not in self._numbers:
            self._numbers[prefixes] = [i for i, x in enumerate(self.instructions) if x.is_a(*prefixes)]
        return self._numbers[prefixes]

    @cached_property
    def meetings(self) -> set[int]:
        """Numbers of instructions at which paths of the function meet, or begin; and the end."""
        count = Counter(x for step in self.steps for x in step.next_ones)
        return {0, len(self.steps), *(number for number, paths in count.items() if paths > 1)}

    def reader(self, instruction: Instruction, operand: Operand) -> Reader:
        """Finds the reader of an operand, which is made once for all threads."""
        found = self._readers.get(id(operand))
        if found is None:
            found = self._readers[id(operand)] = _reader(instruction, operand)
        return found

    @cached_property
    def warps(self) -> list[tuple["Thread", "Thread"]]:
        """First thread of every warp, which is the elected one, and its second, which stands for all others."""
        return [(Thread(self, first), Thread(self, first + 1)) for first in range(0, self.function.num_threads, WARP)]


class Thread:
    """One thread: which instructions it may execute, and the values of its registers."""

    def __init__(self, program: Program, number: int) -> None:
        self.program = program
        self.number = number
        self.values: dict[str, Value | None] = {}  # of registers whose values may be known, or that are predicates
        self.reached: set[int] = set()
        self._next_ones: dict[int, tuple[int, ...]] = {}  # of instructions that are guarded
        self._changes: dict[str, int] = defaultdict(int)
        self._run()
        self._executed = {x for x in self.reached if self._guard(x) is not False}

    @cached_property
    def executed(self) -> list[int]:
        """The numbers of the instructions that it may execute, their guards being considered."""
        return sorted(self._executed)

    def executes(self, number: int) -> bool:
        """Whether it may execute an instruction."""
        return number in self._executed

    def executes_any(self, *prefixes: str) -> bool:
        """Whether it may execute an instruction of a kind."""
        return not self._executed.isdisjoint(self.program.numbers(*prefixes))

    def next_ones(self, number: int) -> tuple[int, ...]:
        """Where it may go on behind an instruction that it reaches."""
        return self._next_ones.get(number, self.program.steps[number].next_ones)

    def value(self, instruction: Instruction, operand: Operand) -> Value | None:
        """Value of an operand; of an address, the value within the brackets."""
        return self.program.reader(instruction, operand)(self)

    def address(self, number: int, operand: int) -> Value | None:
        """Where in shared memory an operand of an instruction points to, if that is known in part."""
        instruction = self.program.instructions[number]
        found = self.value(instruction, instruction.operands[operand])
        return found if found is not None and found.is_shared else None

    def special(self, name: str) -> Value | None:
        """Value of a register that the hardware writes."""
        known = {"%tid.x": self.number, "%tid.y": 0, "%tid.z": 0, "%laneid": self.number % WARP}
        known |= {"%ntid.x": self.program.function.num_threads, "%ntid.y": 1, "%ntid.z": 1}
        if self.program.rank is not None:
            known["%cluster_ctarank"] = self.program.rank
        return Value(known[name]) if name in known else None

    def _guard(self, number: int) -> bool | None:
        """Whether an instruction's predicate lets it be executed; None if that is unknown."""
        step = self.program.steps[number]
        if step.guard is None:
            return True
        value = self.values.get(step.guard)
        return None if value is None or not value.is_exact else bool(value.number) != step.negated

    def _run(self) -> None:
        steps, users, reached = self.program.steps, self.program.users, self.reached
        end = len(steps)
        waiting: deque[int] = deque([0])
        while waiting:
            number = waiting.popleft()
            while number != end and steps[number].is_inert:
                reached.add(number)
                (number,) = steps[number].next_ones
                if number in reached:
                    number = end
            if number == end:
                continue
            reached.add(number)
            changed = self._execute(number)
            next_ones = steps[number].next_ones
            if steps[number].guard is not None:
                next_ones = self._next_of_guarded(number)
            waiting.extend([x for x in next_ones if x not in reached])
            for register in changed:
                waiting.extend([x for x in users[register] if x in reached])

    def _next_of_guarded(self, number: int) -> tuple[int, ...]:
        """Where the thread goes on as far as it is known by now, which is noted down beside what was known."""
        step, guard = self.program.steps[number], self._guard(number)
        next_ones = step.next_ones
        if len(next_ones) == 2 and guard is not None:
            next_ones = next_ones[:1] if guard else next_ones[1:]
        elif step.guard not in self.values:
            next_ones = ()  # its predicate has no value yet
        self._next_ones[number] = tuple(dict.fromkeys((*self._next_ones.get(number, ()), *next_ones)))
        return next_ones

    def _execute(self, number: int) -> list[str]:
        """Joins an instruction's results to what its registers may hold; returns those that changed."""
        results, evaluate, guard, *_ = self.program.steps[number]
        if not results or (guard is not None and self._guard(number) is False):
            return []
        changed = []
        for register, value in zip(results, evaluate(self) if evaluate else [None] * len(results), strict=True):
            if register in self.values:
                old = self.values[register]
                value = _join(old, value)
                if value == old:
                    continue
                self._changes[register] += 1
                if self._changes[register] > _MOST_CHANGES:
                    value = None
            self.values[register] = value
            changed.append(register)
        return changed


def _join(a: Value | None, b: Value | None) -> Value | None:
    if a == b or a is None:
        return a
    if b is None or a.is_shared != b.is_shared:
        return None
    return Value(min(a.number, b.number), False, a.is_shared, a.rank if a.rank == b.rank else None)


def _add(a: Value | None, b: Value | None) -> Value | None:
    return _binary(a, b, operator.add)


def _binary(a: Value | None, b: Value | None, compute: Callable[[int, int], int]) -> Value | None:
    """Computes with two known numbers. Of a known and an unknown one, an address is kept, and then is not exact."""
    if a is None or b is None:
        known = a if a is not None else b
        return known._replace(is_exact=False) if known is not None and known.is_shared else None
    number = compute(_signed(a.number), _signed(b.number))
    exact, shared = a.is_exact and b.is_exact, a.is_shared or b.is_shared
    return Value(number & (1 << 64) - 1 if number >= 0 else number, exact, shared, a.rank if b.rank is None else b.rank)


def _signed(number: int) -> int:
    return number - (1 << 32) if 1 << 31 <= number < 1 << 32 else number


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": lambda x, y: x << y if 0 <= y < 64 else 0,
    "shr": lambda x, y: x >> y if 0 <= y < 64 else 0,
    "mul": operator.mul,
    "min": min,
    "max": max,
    "div": lambda x, y: x // y if x >= 0 and y > 0 else 0,
    "rem": lambda x, y: x % y if x >= 0 and y > 0 else 0,
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge},  # without signs
}
_INTEGERS = {f"{kind}{width}" for kind in "bsu" for width in (16, 32, 64)}


Operands = list[Value | None]


@functools.cache
def _computation(op: str, words: frozenset[str]) -> Callable[[Operands], Value | None] | None:
    """Finds what computes the result of an instruction of integers or predicates; None if it is always unknown."""
    if "pred" in words:
        return functools.partial(_predicate, op)
    if not words & _INTEGERS:
        return None
    if op == "setp":
        return functools.partial(_comparison, words)
    if op == "selp":
        return _selected
    if op == "mapa":
        return _mapped
    if op in ("mov", "cvt", "cvta", "shfl"):
        return None if any(word.startswith("f") for word in words) else lambda operands: operands[0]
    if "hi" in words:
        return None
    if op == "mad":
        return lambda operands: _add(_binary(operands[0], operands[1], _BINARY["mul"]), operands[2])
    if op not in _BINARY:
        return None
    compute, needs_both = _BINARY[op], op in ("mul", "min", "max", "div", "rem")
    return lambda operands: None if needs_both and None in operands else _binary(operands[0], operands[1], compute)


def _whole(low: Value | None, high: Value | None) -> Value | None:
    """64 bits of two registers."""
    return None if low is None else low._replace(number=low.number | (high.number << 32 if high is not None else 0))


def _halves(whole: Value | None) -> list[Value | None]:
    """Two registers of 64 bits."""
    if whole is None:
        return [None, None]
    low = Value(whole.number & 0xFFFFFFFF, whole.is_exact, whole.is_shared)
    return [low, Value(whole.number >> 32 & 0xFFFFFFFF) if whole.is_exact else None]


def _selected(operands: Operands) -> Value | None:
    condition = operands[2]
    if condition is None or not condition.is_exact:
        return _join(*operands[:2])
    return operands[0] if condition.number else operands[1]


def _mapped(operands: Operands) -> Value | None:
    """An address in the shared memory of another CTA."""
    address, to = operands
    return address and address._replace(rank=to.number if to is not None and to.is_exact else None)


def _predicate(op: str, operands: list[Value | None]) -> Value | None:
    numbers = [None if x is None or not x.is_exact else bool(x.number) for x in operands]
    if op == "mov":
        return operands[0]
    if op == "not":
        return None if numbers[0] is None else Value(int(not numbers[0]))
    if op == "and" and False in numbers:
        return Value(0)
    if op == "or" and True in numbers:
        return Value(1)
    if None in numbers or op not in ("and", "or", "xor"):
        return None
    return Value(int(_BINARY[op](*map(bool, numbers))))


def _comparison(words: frozenset[str], operands: list[Value | None]) -> Value | None:
    a, b = operands[:2]
    if a is None or b is None or not (a.is_exact and b.is_exact) or not words & _INTEGERS:
        return None
    name = next((word for word in words if word in _COMPARED), None)
    if name is None:
        return None
    x, y = _signed(a.number), _signed(b.number)
    if words & {"u16", "u32", "u64"} or name in ("lo", "ls", "hi", "hs"):
        x, y = (number % (1 << (64 if "u64" in words else 32)) for number in (a.number, b.number))
    found = Value(int(_COMPARED[name](x, y)))
    for combined in words & {"and", "or", "xor"}:
        return _predicate(combined, [found, operands[2]])
    return found
