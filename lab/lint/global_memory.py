"""Rules of the lint for global memory: offsets that may wrap, and loops that wait for what others write.

A kernel's sizes are known when it runs. The product of two sizes, or of one and a large constant, is an offset that a
long call brings beyond 32 bits, so that it has to be computed in 64. For each register the analysis keeps how many
sizes its number is the product of, and the constant beside them. A register has one value for all paths.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from lab.ptx.threads import Program
from lab.ptx.tree import Instruction, Operand

# By sizes: a tile's number times its rows is a row, times its elements an offset; of all heads' tiles there are more.
MOST_SCALE = (2.0**64, 4096, 512)
_MOST_SIZES = 2  # more make no difference
_MOST = 2.0**64
WIDE_SCOPES = {"gpu", "sys", "gl"}  # words of instructions that reach other CTAs' threads
_OF_POLLS = ("setp", "bra", "mov", "add", "and", "or", "not", "selp", "cvt", "nanosleep")


class Size(NamedTuple):
    """How large a number of 32 bits may be."""

    sizes: int  # run-time sizes that it is a product of; 0: a constant bounds it
    scale: float  # the constant that multiplies them; without sizes, the bound

    @property
    def may_wrap(self) -> bool:
        """Whether a call of some length brings it beyond 32 bits."""
        return self.scale > MOST_SCALE[self.sizes]

    def times(self, other: "Size") -> "Size":
        """The product of both."""
        return Size(min(self.sizes + other.sizes, _MOST_SIZES), min(self.scale * other.scale, _MOST))


_UNKNOWN = Size(1, 1.0)  # a parameter, an element of memory, the number of a CTA
_BOUNDED = {"%tid": 1024, "%laneid": 32, "%warpid": 32, "%cluster_ctarank": 16, "%cluster_ctaid": 16, "%ntid": 1024}


def offsets_that_may_wrap(program: Program) -> Iterator[tuple[Instruction, Instruction]]:
    """Accesses to global memory, each with the instruction that makes 64 bits of a number that may have wrapped."""
    analysis = _Analysis(program)
    for x in program.instructions:
        if "global" not in x.parts or not x.is_a("ld", "st", "red", "atom", "cp"):
            continue
        for operand in x.operands:
            for name in operand.names if operand.marks == "[" else ():
                for widening in sorted(analysis.wrapped[x.register(name)]):
                    yield x, program.instructions[widening]


def polls(program: Program) -> Iterator[Instruction]:
    """Loads of global memory in loops that only load from the same address again, and end by what they load alone."""
    successors = program.function.successors
    of_polls = {i for i, x in enumerate(program.instructions) if _loads(x) or x.is_a(*_OF_POLLS)}
    for number, x in enumerate(program.instructions):
        if not _loads(x):
            continue
        seen: set[int] = set()
        waiting = set(successors[number]) & of_polls
        while waiting:
            seen |= waiting
            waiting = {after for at in waiting for after in successors[at]} & of_polls - seen
        changed = {result for at in seen for result in program.resolved[at].results}
        if number not in seen or changed & set(program.resolved[number].sources):
            continue
        loaded = _made_of(program, seen, set(program.resolved[number].results))
        ends = (at for at in seen if not seen.issuperset(successors[at]))
        if all(program.resolved[at].guard in loaded for at in ends):
            yield x


def _made_of(program: Program, numbers: set[int], registers: set[str]) -> set[str]:
    """The registers that some instructions make of others, and these."""
    made, before = set(registers), 0
    while len(made) > before:
        before = len(made)
        for number in numbers:
            one = program.resolved[number]
            if made & set(one.sources):
                made |= set(one.results)
    return made


def _loads(x: Instruction) -> bool:
    return x.is_a("ld") and "global" in x.parts


def _remainders(program: Program) -> Iterator[tuple[int, Operand]]:
    """Subtractions ``a - a / b * b``, each with ``b``, which its result is less than.

    Division, product and subtraction follow each other on one path, on which nothing writes ``a`` or ``b``.
    """
    starts = {x.scope.label(x.operands[0].text) for x in program.instructions if x.is_a("bra")}
    quotients: dict[str, Instruction] = {}  # by register, of the path so far
    products: dict[str, Instruction] = {}  # of a quotient and its divisor: the division
    for number, (x, one) in enumerate(zip(program.instructions, program.resolved, strict=True)):
        if number in starts:
            quotients, products = {}, {}
        texts = [operand.text for operand in x.operands]
        division = product = None
        if x.is_a("sub.s32", "sub.u32") and x.register(texts[2]) in products:
            of = products[x.register(texts[2])]
            if x.register(texts[1]) == of.register(of.operands[1].text):
                yield number, of.operands[2]
        elif x.is_a("div.s32", "div.u32") and x.guard is None:
            division = x
        elif x.is_a("mul.lo.s32", "mul.lo.u32") and x.guard is None:
            for quotient, other in (texts[1:], texts[:0:-1]):
                found = quotients.get(x.register(quotient))
                if found is not None and x.register(other) == found.register(found.operands[2].text):
                    product = found
        for known, new in ((quotients, division), (products, product)):
            for register in one.results:
                known.pop(register, None)
            if new is not None:
                known[one.results[0]] = new
            for register, of in tuple(known.items()):
                if {of.register(operand.text) for operand in of.operands[1:]} & set(one.results):
                    del known[register]


class _Analysis:
    """Sizes of all registers, and of those of 64 bits where they were widened."""

    def __init__(self, program: Program) -> None:
        self.sizes: dict[str, Size] = {}
        self.wrapped: dict[str, set[int]] = defaultdict(set)  # instructions that widened what may have wrapped
        self.resolved = program.resolved
        self.divisors = dict(_remainders(program))
        changed = True
        while changed:
            changed = False
            for number, x in enumerate(program.instructions):
                changed |= self._execute(number, x)

    def _execute(self, number: int, x: Instruction) -> bool:
        """Joins an instruction's results to what its registers may hold; returns whether that changed anything."""
        one, changed = self.resolved[number], False
        if not one.results or x.is_a("setp", "ld", "atom", "wgmma", "tcgen05", "mbarrier", "mapa"):
            if x.is_a("ld", "atom"):
                for result in one.results:
                    changed |= self._join(result, _UNKNOWN)
            return changed
        origins = set().union(*(self.wrapped[source] for source in one.sources))
        size = self._size(x)
        if number in self.divisors:
            size = min(self._of(x, x.operands[1]), self._of(x, self.divisors[number]))
        is_wide = bool(x.parts & {"s64", "u64", "b64"}) or "wide" in x.parts
        if x.is_a("mul.wide", "mad.wide") or (x.is_a("cvt") and is_wide):
            narrow = x.operands[1:3] if "wide" in x.parts else x.operands[1:2]
            if any(self._of(x, operand).may_wrap for operand in narrow):
                origins.add(number)
        for result in one.results:
            changed |= self._join(result, size)
            if not origins <= self.wrapped[result]:
                self.wrapped[result] |= origins
                changed = True
        return changed

    def _join(self, register: str, size: Size) -> bool:
        old = self.sizes.get(register)
        if old is not None:
            size = Size(max(old.sizes, size.sizes), max(old.scale, size.scale))
        self.sizes[register] = size
        return size != old

    def _of(self, x: Instruction, operand: Operand) -> Size:
        if operand.number is not None:
            return Size(0, float(abs(operand.number)))
        name = operand.text.split(".")[0]
        if name in _BOUNDED:
            return Size(0, float(_BOUNDED[name]))
        if operand.marks:
            found = [self._of(x, part) for part in operand.parts]
            return max(found, default=_UNKNOWN)
        return self.sizes.get(x.register(operand.text), Size(0, 0.0) if operand.text[:2] == "%r" else _UNKNOWN)

    def _size(self, x: Instruction) -> Size:
        """Size of an instruction's result."""
        op = x.operation
        given = [self._of(x, operand) for operand in x.operands[1:]]
        constants = [operand.number for operand in x.operands[1:]]
        if x.parts & {"s64", "u64", "b64"} and "wide" not in x.parts and op != "cvt":
            return _UNKNOWN  # its lower half, if that is used, is as large as any size
        if op in ("mul", "mad"):
            product = min(given[:2]) if "hi" in x.parts else given[0].times(given[1])
            return max(product, given[2]) if op == "mad" else product
        if op == "shl":
            return given[0].times(Size(0, 2.0 ** min(constants[1] or 0, 64)))
        if op in ("shr", "div"):
            divisor = constants[1] or 1
            return given[0].times(Size(0, 1 / (2.0**divisor if op == "shr" and constants[1] else divisor)))
        is_masked = op == "and" and any(c is not None and c >= 0 for c in constants)
        return min(given) if op in ("rem", "min") or is_masked else max(given, default=_UNKNOWN)
