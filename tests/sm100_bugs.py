"""Bugs to plant in the PTX of the Blackwell kernels, and what finds each: the lint, an execution, or both.

A bug changes instructions that are told by what they are, by the warp that executes them and by the barrier that they
are about, so that a row of the table stays true where the compiler numbers registers otherwise. How many instructions
there are of a kind is part of the row: a bug that no longer fits where it did is an error, not a bug less.

``python -m tests.sm100_bugs`` writes the table of ``docs/blackwell-checks.md``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tests.ptx import Lagging
from tools import ptx
from tools.ptx import Instruction
from tools.ptx_lint import barrier_operand
from tools.ptx_threads import Program, Thread

PAGE = Path(__file__).parents[1] / "docs" / "blackwell-checks.md"


class Edit(NamedTuple):
    """A piece of a text, and what comes in its place."""

    start: int
    end: int
    text: str


class Code:
    """A kernel's PTX, searched by what instructions do."""

    def __init__(self, text: str, kernel: str, barriers: Mapping[str, range]):
        """A module's text, a part of the kernel's name, and where mbarriers of a name, such as ``k.full``, are.

        Their addresses count from the beginning of shared memory.
        """
        self.text = text
        self.barriers = barriers
        (self.function,) = (function for function in ptx.parse(text).functions if kernel in function.name)
        self.instructions = self.function.instructions
        self.numbers = {x.start: number for number, x in enumerate(self.instructions)}
        self._threads: dict[int, Thread] = {}

    @cached_property
    def _program(self) -> Program:
        return Program(self.function)

    def thread(self, warp: int) -> Thread:
        """The first of a warp, which is the elected one."""
        if warp not in self._threads:
            self._threads[warp] = Thread(self._program, 32 * warp)
        return self._threads[warp]

    # What to look for.

    def find(self, count: int, opcode: str, by: int, barrier: str = "", having: str = "") -> list[Instruction]:
        """Instructions that a warp executes.

        Args:
            count: how many there are.
            opcode: how they begin, in whole words.
            by: the warp.
            barrier: the name of the mbarriers that they wait for, or arrive at; of one stage, ``name+stage``.
            having: a regular expression that is found in them.

        Raises:
            ValueError: there is another number of them.
        """
        thread = self.thread(by)
        found = [
            x
            for number, x in enumerate(self.instructions)
            if x.is_a(opcode)
            and thread.executes(number)
            and (not barrier or self._is_about(thread, number, barrier))
            and re.search(having, self.text[x.start : x.end])
        ]
        if len(found) != count:
            lines = [x.line for x in found]
            raise ValueError(f"{opcode} {barrier} {having} of warp {by}: expected {count}, got those of lines {lines}")
        return found

    def _is_about(self, thread: Thread, number: int, barrier: str) -> bool:
        x = self.instructions[number]
        name, _, stage = barrier.partition("+")
        places = self.barriers[name]
        operand = 1 if x.is_a("mbarrier.try_wait", "mbarrier.test_wait") else barrier_operand(x)
        if x.is_a("cp.async.bulk"):
            operand = max(i for i, each in enumerate(x.operands) if each.marks == "[")
        address = thread.address(number, operand)
        return address is not None and address.number in ([places[int(stage)]] if stage else places)

    def waits(self, count: int, by: int, barrier: str) -> list[Instruction]:
        """Those for an mbarrier."""
        return self.find(count, "mbarrier.try_wait", by, barrier)

    def arrivals(self, count: int, by: int, barrier: str) -> list[Instruction]:
        """Those of threads at an mbarrier."""
        return self.find(count, "mbarrier.arrive", by, barrier)

    def behind(self, x: Instruction, opcode: str) -> Instruction:
        """The next of a kind in the text."""
        return next(y for y in self.instructions[self.numbers[x.start] + 1 :] if y.opcode.startswith(opcode))

    def ahead(self, x: Instruction, opcode: str) -> Instruction:
        """The one before of a kind in the text."""
        return next(y for y in reversed(self.instructions[: self.numbers[x.start]]) if y.opcode.startswith(opcode))

    # What to change.

    def _span(self, x: Instruction) -> tuple[int, int]:
        """An instruction, and around a wait its loop."""
        if not x.is_a("mbarrier.try_wait"):
            return x.start, x.end
        start, end = self.text.rindex("{", 0, x.start), self.text.index("}", x.end) + 1
        assert len(re.findall(r"^\s*DONE:", self.text[start:end], re.MULTILINE)) == 1
        return start, end

    def without(self, found: Iterable[Instruction]) -> list[Edit]:
        """Left out."""
        return [Edit(*self._span(x), "") for x in found]

    def rewritten(self, found: Iterable[Instruction], pattern: str, replacement: str) -> list[Edit]:
        """With another text, where a regular expression fits once."""
        edits = []
        for x in found:
            text, count = re.subn(pattern, replacement, self.text[x.start : x.end])
            if count != 1:
                raise ValueError(f"line {x.line}, {self.text[x.start : x.end]}: {pattern} fits {count} times, not once")
            edits.append(Edit(x.start, x.end, text))
        return edits

    def flipped(self, found: Iterable[Instruction], operand: int, bits: int) -> list[Edit]:
        """With other bits in the register of an operand, for the time of the instruction."""
        edits = []
        for x in found:
            (register,) = x.operands[operand].names
            width = 64 if register.startswith("%rd") else 32
            flip = f"\nxor.b{width} {register}, {register}, {bits};\n"
            if register.startswith("%p"):
                flip = f"\nnot.pred {register}, {register};\n"
            start, end = self._span(x)
            edits += [Edit(start, start, flip), Edit(end, end, flip)]
        return edits

    def moved_by(self, found: Iterable[Instruction], operand: int, distance: int) -> list[Edit]:
        """With another address, some bytes or columns further."""
        edits = []
        for x in found:
            register, *offset = x.operands[operand].parts[0].parts or x.operands[operand].parts
            total = distance + sum(each.number or 0 for each in offset)
            old = x.operands[operand].text
            edits += self.rewritten([x], re.escape(old), f"[{register.text}+{total}]")
        return edits

    def inserted(self, x: Instruction, text: str) -> list[Edit]:
        """With some lines ahead of it."""
        start, _ = self._span(x)
        return [Edit(start, start, f"\n{text}\n")]

    def moved(self, x: Instruction, behind: Instruction) -> list[Edit]:
        """Behind another instruction."""
        _, end = self._span(behind)
        return [Edit(x.start, x.end, ""), Edit(end, end, f"\n{self.text[x.start : x.end]}\n")]

    def with_bug(self, bug: "Bug") -> str:
        """The text in which a bug is planted."""
        edits = sorted(bug.plant(self))
        assert edits, bug
        text, at = [], 0
        for edit in edits:
            assert edit.start >= at, f"changes overlap: {bug}"
            text += [self.text[at : edit.start], edit.text]
            at = edit.end
        return "".join([*text, self.text[at:]])


@dataclass(frozen=True)
class Bug:
    """A bug, and what finds it."""

    kind: str
    text: str  # what is wrong
    plant: Callable[[Code], list[Edit]]
    call: str  # that shows it, by its name
    lags: Lagging = frozenset()  # who is to lag for it to show
    lint: str = ""  # the rule that finds it; "": none
    shows: bool = False  # whether the call ends in a fault, in a deadlock or with wrong numbers

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def forward_barriers(config: Any) -> dict[str, range]:
    """Where the mbarriers of the forward kernel are, by name."""
    from flash_attn_cute.kernels.sm100.forward_shared import Rings

    found, first = {}, 0
    for name, stages in Rings.stages(config).items():
        for state in ("full", "empty"):
            found[f"{name}.{state}"] = range(8 * first, 8 * (first + stages), 8)
            first += stages
    return found


# The forward kernel's roles, by a warp of each; operands of its instructions; where parts of descriptors begin.
_SOFTMAX, _EPILOGUE, _MMA, _PRODUCER = 0, 8, 12, 13
_PARITY = 2  # of a wait
_ADDRESS = 1  # of an arrival, and of a wait
_TARGET, _A, _B, _KIND, _ACCUMULATES = 0, 1, 2, 3, 5  # of a product
_STRIDE, _SWIZZLE = 32, 61
_SOFTMAX_LAGS, _EPILOGUE_LAGS = frozenset(range(8)), frozenset(range(8, 12))
_LOADS_LAG, _STORES_LAG, _PRODUCTS_LAG = frozenset({"loads"}), frozenset({"stores"}), frozenset({"products"})
_OF_S, _OF_O = (
    r"^\S+\s+\[%r\d+\], %rd",
    r"^\S+\s+\[%r\d+\], \[%r",
)  # products: A from shared memory, or from tensor memory
# Of what is stored of a row's weights: what most of them end with, and the others.
_END_OF_MOST, _OTHERS = r"\[%r\d+ \+ 32\]", r"\.x16\S+\s+\[%r\d+ \+ 0\]"


def _products(c: Code, kind: str) -> list[Instruction]:
    """Those that the mma warp issues: four steps, and for each part; of O twice, as it is issued without S, too."""
    return c.find(8 if kind == _OF_S else 16, "tcgen05.mma", _MMA, having=kind)


def _elected(c: Code, arrival: Instruction) -> str:
    """An arrival by a thread of a warp that has not been elected yet."""
    text = re.sub(r"%rd\d+, (\[.*\]), %r\d+", r"_, \1, 1", c.text[arrival.start : arrival.end])
    return f"{{\n.reg .pred %early;\nelect.sync _|%early, -1;\n@%early {text}\n}}"


def _told_too_early(c: Code) -> list[Edit]:
    (arrival,) = c.arrivals(1, _SOFTMAX, "scores.empty")
    edits = c.without([arrival])
    for store in (
        *c.find(2, "tcgen05.st", _SOFTMAX, having=_OTHERS),
        c.find(3, "tcgen05.st", _SOFTMAX, having=_END_OF_MOST)[-1],
    ):
        edits += c.inserted(store, _elected(c, arrival))
    return edits


def _in_both(c: Code, opcode: str, number: str) -> list[Edit]:
    """Another number of columns."""
    (x,) = c.find(1, opcode, _MMA)
    return c.rewritten([c.ahead(x, "mov.b32")], r"512", number)


FORWARD = (
    Bug(
        "missing wait",
        "scores are begun before K is there",
        lambda c: c.without(c.waits(1, _MMA, "k.full")),
        "d64",
        lags=_LOADS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "outputs are begun before V is there",
        lambda c: c.without(c.waits(2, _MMA, "v.full")),
        "d64",
        lags=_LOADS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "scores are begun before Q is there",
        lambda c: c.without(c.waits(2, _MMA, "q.full")),
        "d64",
        lags=_LOADS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "outputs are begun before most weights are stored",
        lambda c: c.without(c.waits(4, _MMA, "weights.full")),
        "d64",
        lags=_SOFTMAX_LAGS,
        shows=True,
    ),
    Bug(
        "missing wait",
        "outputs of the last keys are begun before their weights are stored",
        lambda c: c.without(c.waits(4, _MMA, "scores.empty")),
        "long",
        lags=_SOFTMAX_LAGS,
        shows=True,
    ),
    Bug(
        "missing wait",
        "a tile's first output overwrites O that the epilogue has not read",
        lambda c: c.without(c.waits(4, _MMA, "outputs.empty")),
        "d64",
        lags=_EPILOGUE_LAGS,
        shows=True,
    ),
    Bug(
        "missing wait",
        "the mma warp frees tensor memory before its last products are done",
        lambda c: c.without(c.waits(1, _MMA, "v.empty")),
        "d64",
        lags=_PRODUCTS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "softmax reads scores that are not complete",
        lambda c: c.without(c.waits(1, _SOFTMAX, "scores.full")),
        "d64",
        lags=_PRODUCTS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "softmax overwrites sums that the epilogue has not read",
        lambda c: c.without(c.waits(1, _SOFTMAX, "stats.empty")),
        "short",
        lags=_EPILOGUE_LAGS,
        shows=True,
    ),
    Bug(
        "missing wait",
        "softmax rescales O that the last product is still added to (one part)",
        lambda c: c.without(c.waits(1, _SOFTMAX, "added.full")),
        "d256",
        lags=_PRODUCTS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "the epilogue reads sums before they are there",
        lambda c: c.without(c.waits(1, _EPILOGUE, "stats.full")),
        "d64",
        lags=_SOFTMAX_LAGS,
        shows=True,
    ),
    Bug(
        "missing wait",
        "the epilogue stores O before it is complete",
        lambda c: c.without(c.waits(1, _EPILOGUE, "outputs.full")),
        "d64",
        lags=_PRODUCTS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "the epilogue overwrites a piece of O in shared memory that TMA still reads",
        lambda c: c.without(c.find(1, "cp.async.bulk.wait_group", _EPILOGUE, having=r"\b1;")),
        "d64",
        lags=_STORES_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "the CTA ends while TMA still reads its shared memory",
        lambda c: c.without(c.find(1, "cp.async.bulk.wait_group", _EPILOGUE, having=r"\b0;")),
        "d64",
        lags=_STORES_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "the place of Q is given back while TMA still reads O from it",
        lambda c: c.without(c.find(2, "cp.async.bulk.wait_group", _EPILOGUE)[:1]),
        "d192",
        lags=_STORES_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "K is loaded over K that products still read",
        lambda c: c.without(c.waits(1, _PRODUCER, "k.empty")),
        "long",
        lags=_PRODUCTS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "V is loaded over V that products still read",
        lambda c: c.without(c.waits(1, _PRODUCER, "v.empty")),
        "long",
        lags=_PRODUCTS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "Q is loaded over Q that products still read",
        lambda c: c.without(c.waits(2, _PRODUCER, "q.empty")),
        "d64",
        lags=_PRODUCTS_LAG,
        shows=True,
    ),
    Bug(
        "missing wait",
        "a tile is told of in the place of one that is still worked on",
        lambda c: c.without(c.waits(2, _PRODUCER, "tiles.empty")),
        "short",
        lags=_EPILOGUE_LAGS,
        shows=True,
    ),
    Bug(
        "wrong phase",
        "the mma warp waits for the phase of V that is over",
        lambda c: c.flipped(c.waits(2, _MMA, "v.full"), _PARITY, 1),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong phase",
        "the producer waits for K as if stages began full",
        lambda c: c.flipped(c.waits(1, _PRODUCER, "k.empty"), _PARITY, 1),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong phase",
        "softmax is a phase late with scores",
        lambda c: c.flipped(c.waits(1, _SOFTMAX, "scores.full"), _PARITY, 1),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong phase",
        "the epilogue is a phase late with O",
        lambda c: c.flipped(c.waits(1, _EPILOGUE, "outputs.full"), _PARITY, 1),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong stage",
        "K is put a stage further than products read it",
        lambda c: c.moved_by(c.find(1, "cp.async.bulk.tensor", _PRODUCER, "k.full"), 0, 16384),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong stage",
        "products read V of the neighbouring stage",
        lambda c: c.flipped(_products(c, _OF_O), _B, 16384 >> 4),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong stage",
        "scores of the first part are told to the second",
        lambda c: c.moved_by(c.find(1, "tcgen05.commit", _MMA, "scores.full+0"), 0, 8),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong stage",
        "outputs that are begun give back a stage of K instead of V",
        lambda c: c.moved_by(
            c.find(2, "tcgen05.commit", _MMA, "v.empty"), 0, c.barriers["k.empty"][0] - c.barriers["v.empty"][0]
        ),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "groups of 8 rows of K are looked for at half their distance",
        lambda c: c.flipped(_products(c, _OF_S), _B, 0x60 << _STRIDE),
        "one",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "groups of 8 keys of V are looked for at half their distance",
        lambda c: c.flipped(_products(c, _OF_O), _B, 0x60 << _STRIDE),
        "one",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "the second 64 columns of V are looked for at the place of the first",
        lambda c: c.flipped(_products(c, _OF_O), _B, 0x400 << 16),
        "d128",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "Q is said to be swizzled in 64 bytes",
        lambda c: c.flipped(_products(c, _OF_S), _A, 6 << _SWIZZLE),
        "one",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "a step multiplies the 16 columns of Q that are the next one's",
        lambda c: c.flipped(_products(c, _OF_S), _A, 2),
        "one",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "V is said to have keys contiguous",
        lambda c: c.flipped(_products(c, _OF_O), _KIND, 1 << 16),
        "one",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "weights are said to be float16",
        lambda c: c.flipped(_products(c, _OF_O), _KIND, 1 << 7),
        "one",
        shows=True,
    ),
    Bug(
        "wrong descriptor",
        "products of scores are said to have half the keys",
        lambda c: c.flipped(_products(c, _OF_S), _KIND, (16 ^ 8) << 17),
        "one",
        shows=True,
    ),
    Bug(
        "wrong column",
        "scores take the place of the other part's",
        lambda c: c.flipped(_products(c, _OF_S), _TARGET, 128),
        "one",
        shows=True,
    ),
    Bug(
        "wrong column",
        "products read weights where there are scores",
        lambda c: c.flipped(_products(c, _OF_O), _A, 64),
        "one",
        shows=True,
    ),
    Bug(
        "wrong column",
        "the parts' outputs change places",
        lambda c: c.flipped(_products(c, _OF_O), _TARGET, 64),
        "one",
        shows=True,
    ),
    Bug(
        "wrong column",
        "the last of most weights are stored a column further",
        lambda c: c.rewritten(c.find(3, "tcgen05.st", _SOFTMAX, having=_END_OF_MOST), r"\+ 32", "+ 33"),
        "one",
        shows=True,
    ),
    Bug(
        "wrong column",
        "warps of softmax reach for lanes of others",
        lambda c: c.rewritten(c.find(1, "and.b32", _SOFTMAX, having="6291456"), "6291456", "4194304"),
        "one",
        shows=True,
    ),
    Bug(
        "wrong count",
        "weights are said to be stored when three of four warps have stored them",
        lambda c: c.rewritten(c.find(2, "mbarrier.init", _PRODUCER, "scores.empty"), r", %r\d+", ", 3"),
        "d64",
        lint="arrivals",
        shows=True,
    ),
    Bug(
        "wrong count",
        "a tile's place is said to be free when all but one warp have read it",
        lambda c: c.rewritten(c.find(2, "mbarrier.init", _PRODUCER, "tiles.empty"), r", %r\d+", ", 12"),
        "short",
        lags=_EPILOGUE_LAGS,
        lint="arrivals",
        shows=True,
    ),
    Bug(
        "wrong count",
        "the place of Q is said to be free before O has left it",
        lambda c: c.rewritten(c.find(2, "mbarrier.init", _PRODUCER, "q.empty"), r", %r\d+", ", 1"),
        "d192",
        lags=_STORES_LAG,
        lint="arrivals",
        shows=True,
    ),
    Bug(
        "wrong count",
        "all threads of a warp arrive for it",
        lambda c: c.without([c.ahead(x, "bra") for x in c.arrivals(1, _SOFTMAX, "scores.empty")]),
        "d64",
        lint="arrivals",
        shows=True,
    ),
    Bug(
        "wrong count",
        "an arrival counts twice",
        lambda c: c.rewritten(c.arrivals(1, _EPILOGUE, "outputs.empty"), r", %r\d+;", ", 2;"),
        "d64",
        lint="arrivals",
        shows=True,
    ),
    Bug(
        "missing arrival",
        "softmax does not say that its sums are there",
        lambda c: c.without(c.arrivals(1, _SOFTMAX, "stats.full")),
        "d64",
        shows=True,
    ),
    Bug(
        "missing arrival",
        "nobody is told of complete scores: there is no commit",
        lambda c: c.without(c.find(2, "tcgen05.commit", _MMA, "scores.full")),
        "d64",
        shows=True,
    ),
    Bug(
        "missing arrival",
        "the producer is not told that products are done with K: there is no commit",
        lambda c: c.without(c.find(1, "tcgen05.commit", _MMA, "k.empty")),
        "long",
        shows=True,
    ),
    Bug(
        "wrong order",
        "weights are handed over before they are stored",
        _told_too_early,
        "long",
        lags=_SOFTMAX_LAGS,
        shows=True,
    ),
    Bug(
        "wrong order",
        "a commit stands ahead of the last product that it is about",
        lambda c: c.moved(_products(c, _OF_S)[3], behind=c.find(1, "tcgen05.commit", _MMA, "scores.full+0")[0]),
        "d64",
        lags=frozenset({_MMA}),
        shows=True,
    ),
    Bug(
        "wrong order",
        "Q is given back behind the first block of keys, not the last",
        lambda c: c.without([c.ahead(c.ahead(x, "bra"), "bra") for x in c.find(2, "tcgen05.commit", _MMA, "q.empty")]),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong order",
        "tensor memory is freed while others may still read it",
        lambda c: c.without([c.ahead(c.find(1, "tcgen05.dealloc", _MMA)[0], "bar.sync")]),
        "d64",
        lags=_EPILOGUE_LAGS,
        shows=True,
    ),
    Bug(
        "wrong bytes",
        "half the bytes of K are expected",
        lambda c: c.rewritten(c.arrivals(1, _PRODUCER, "k.full"), r", %r\d+;", ", 8192;"),
        "d64",
        shows=True,
    ),
    Bug(
        "wrong bytes",
        "no bytes of V are expected",
        lambda c: c.rewritten(c.arrivals(1, _PRODUCER, "v.full"), r"\.expect_tx(.*), %r\d+;", r"\1, 1;"),
        "d64",
        lags=_LOADS_LAG,
        lint="expected-bytes",
        shows=True,
    ),
    Bug(
        "wrong bytes",
        "Q signals the barrier of K",
        lambda c: c.moved_by(
            c.find(2, "cp.async.bulk.tensor", _PRODUCER, "q.full"), 2, c.barriers["k.full"][0] - c.barriers["q.full"][0]
        ),
        "d64",
        lint="expected-bytes",
        shows=True,
    ),
    Bug(
        "missing fence",
        "O in shared memory is stored by TMA without fence.proxy.async",
        lambda c: c.without(c.find(1, "fence.proxy.async", _EPILOGUE)),
        "one",
        lint="proxy",
    ),
    Bug(
        "missing fence",
        "mbarriers are not made known to TMA and tensor cores",
        lambda c: c.without(c.find(1, "fence.mbarrier_init", _PRODUCER)),
        "one",
        lint="init-fence",
    ),
    Bug(
        "missing fence",
        "no tcgen05.fence::before_thread_sync between the weights and their arrival",
        lambda c: c.without([c.ahead(x, "tcgen05.fence::before") for x in c.arrivals(1, _SOFTMAX, "scores.empty")]),
        "one",
        lint="fence-before",
    ),
    Bug(
        "missing fence",
        "no tcgen05.fence::before_thread_sync between reading O and giving it back",
        lambda c: c.without([c.ahead(x, "tcgen05.fence::before") for x in c.arrivals(1, _EPILOGUE, "outputs.empty")]),
        "one",
        lint="fence-before",
    ),
    Bug(
        "missing fence",
        "no tcgen05.fence::after_thread_sync between the weights' arrival and their product",
        lambda c: c.without([c.behind(c.waits(4, _MMA, "outputs.empty")[0], "tcgen05.fence::after")]),
        "one",
        lint="fence-after",
    ),
    Bug(
        "missing fence",
        "no tcgen05.fence::after_thread_sync between a commit and scores that are read",
        lambda c: c.without([c.behind(c.waits(1, _SOFTMAX, "scores.full")[0], "tcgen05.fence::after")]),
        "one",
        lint="fence-after",
    ),
    Bug(
        "missing fence",
        "no tcgen05.fence::after_thread_sync between a commit and O that is stored",
        lambda c: c.without([c.behind(c.waits(1, _EPILOGUE, "outputs.full")[0], "tcgen05.fence::after")]),
        "one",
        lint="fence-after",
    ),
    Bug(
        "missing fence",
        "no tcgen05.fence::after_thread_sync between a commit and O that is rescaled (one part)",
        lambda c: c.without([c.behind(c.waits(1, _SOFTMAX, "added.full")[0], "tcgen05.fence::after")]),
        "d256",
        lint="fence-after",
    ),
    Bug(
        "missing tcgen05.wait",
        "scores are computed with before they are in registers",
        lambda c: c.without([c.behind(c.find(18, "tcgen05.ld", _SOFTMAX)[4], "tcgen05.wait::ld")]),
        "one",
        lint="load-wait",
    ),
    Bug(
        "missing tcgen05.wait",
        "O is computed with before it is in registers",
        lambda c: c.without([c.behind(c.find(4, "tcgen05.ld", _EPILOGUE)[-1], "tcgen05.wait::ld")]),
        "one",
        lint="load-wait",
    ),
    Bug(
        "missing tcgen05.wait",
        "weights are handed over before they are in tensor memory",
        lambda c: c.without([c.behind(c.find(3, "tcgen05.st", _SOFTMAX, having=_END_OF_MOST)[0], "tcgen05.wait::st")]),
        "one",
        lint="store-wait",
    ),
    Bug(
        "missing tcgen05.wait",
        "O that has been rescaled is handed over before it is in tensor memory",
        lambda c: c.without([c.behind(c.find(14, "tcgen05.st", _SOFTMAX)[-3], "tcgen05.wait::st")]),
        "one",
        lint="store-wait",
    ),
    Bug(
        "missing barrier",
        "a thread tells of its warp's sums without waiting for the warp",
        lambda c: c.without([c.ahead(x, "bar.warp.sync") for x in c.arrivals(1, _SOFTMAX, "stats.full")]),
        "d64",
        lint="warp",
    ),
    Bug(
        "missing barrier",
        "a warp of the epilogue stores O that others have not written",
        lambda c: c.without(c.find(2, "bar.sync", _EPILOGUE, having=r"\b1, 128")[1:]),
        "d64",
        shows=True,
    ),
    Bug(
        "missing barrier",
        "warps of the epilogue write to where the first one's TMA still reads",
        lambda c: c.without(c.find(2, "bar.sync", _EPILOGUE, having=r"\b1, 128")[:1]),
        "d64",
        lags=_STORES_LAG,
        shows=True,
    ),
    Bug(
        "missing barrier",
        "the epilogue takes the CTA's barrier for its own",
        lambda c: c.rewritten(c.find(2, "bar.sync", _EPILOGUE, having=r"\b1, 128"), r"\b1,", "0,"),
        "d64",
        shows=True,
    ),
    Bug(
        "missing barrier",
        "the epilogue's barrier waits for three of its four warps",
        lambda c: c.rewritten(c.find(2, "bar.sync", _EPILOGUE, having=r"\b1, 128"), r"128", "96"),
        "d64",
        shows=True,
    ),
    Bug(
        "columns",
        "tensor memory is not freed",
        lambda c: c.without(c.find(1, "tcgen05.dealloc", _MMA)),
        "one",
        lint="columns",
        shows=True,
    ),
    Bug(
        "columns",
        "half the columns are freed",
        lambda c: _in_both(c, "tcgen05.dealloc", "256"),
        "one",
        lint="columns",
        shows=True,
    ),
    Bug(
        "columns",
        "fewer columns are allocated and freed than products write",
        lambda c: _in_both(c, "tcgen05.alloc", "256") + _in_both(c, "tcgen05.dealloc", "256"),
        "one",
        shows=True,
    ),
    Bug(
        "registers",
        "softmax takes more registers than others have given",
        lambda c: c.rewritten(c.find(1, "setmaxnreg", _SOFTMAX), r"200", "208"),
        "one",
        lint="registers",
    ),
    Bug(
        "registers",
        "one warp of a warpgroup asks for other registers than the rest",
        lambda c: c.inserted(c.waits(2, _MMA, "tiles.full")[0], "setmaxnreg.dec.sync.aligned.u32 48;"),
        "one",
        lint="registers",
    ),
    Bug(
        "dropped predicate",
        "lse is written for rows behind a sequence's end",
        lambda c: c.without([c.ahead(x, "bra") for x in c.find(2, "st.global.b32", _EPILOGUE)[:1]]),
        "packed",
        shows=True,
    ),
    Bug(
        "dropped predicate",
        "keys behind a sequence's end are not hidden",
        lambda c: c.rewritten([c.ahead(c.find(18, "tcgen05.ld", _SOFTMAX)[0], "bra")], r"@%p\d+ ", ""),
        "packed",
        shows=True,
    ),
    Bug(
        "dropped predicate",
        "a tile's first output is added to the last tile's, and later ones overwrite",
        lambda c: c.flipped(_products(c, _OF_O)[::4], _ACCUMULATES, 1),
        "d64",
        shows=True,
    ),
    Bug(
        "dropped predicate",
        "O is not rescaled when a row's reference rises",
        lambda c: c.rewritten([c.ahead(c.find(18, "tcgen05.ld", _SOFTMAX)[-2], "bra")], r"@%p\d+ ", ""),
        "d64",
        shows=True,
    ),
    Bug(
        "dropped predicate",
        "O is rescaled when there is none yet",
        lambda c: c.without([c.ahead(c.find(18, "tcgen05.ld", _SOFTMAX)[-2], "bra")]),
        "d64",
        shows=True,
    ),
)


def table() -> str:
    """What finds what, for the page."""
    none = "\N{EM DASH}"
    lines = ["| bug | | lint | execution |", "|---|---|---|---|"]
    for bug in FORWARD:
        lint = f"`{bug.lint}`" if bug.lint else none
        lines.append(f"| {bug.kind} | {bug.text} | {lint} | {'yes' if bug.shows else none} |")
    return "\n".join(lines)


def page(old: str) -> str:
    """The page with the table in it, from the first line of a table to its last."""
    return re.sub(r"^\| bug \|.*?\n(?=\n)", lambda _: table() + "\n", old, count=1, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
