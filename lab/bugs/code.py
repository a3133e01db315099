"""A kernel's PTX, searched by what instructions do, and changed.

Instructions are found by what they are, by the warp that executes them and by the barrier that they are about. So a
description stays true where the compiler numbers registers otherwise. How many there are of a kind is part of it: a
description that no longer fits where it did is an error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from flash_attn_cute.kernels.schedule import Schedule
from lab.lint import barrier_operand
from lab.ptx import tree
from lab.ptx.threads import Program, Thread
from lab.ptx.tree import Instruction

_RANKS = {"first": 0, "second": 1}  # of a pair's CTAs
# What can be flipped: which operand it is of, and at which of its bits it begins.
_FIELDS = {
    "parity": (2, 0),  # of a wait
    "ctas": (1, 0),  # of a commit
    "rank": (2, 0),  # of mapa
    "target": (0, 0),  # of a product, and so are the others
    **{f"{x}{field}": (i, at) for i, x in ((1, "a"), (2, "b")) for field, at in (("", 0), (".leading", 16))},
    **{f"{x}{field}": (i, at) for i, x in ((1, "a"), (2, "b")) for field, at in ((".stride", 32), (".swizzle", 61))},
    "is_sparse": (3, 2),
    "saturates": (3, 3),
    "type_a": (3, 7),
    "negates_b": (3, 14),
    "transposes_a": (3, 15),
    "transposes_b": (3, 16),
    "columns": (3, 17),  # in units of 8
    "rows": (3, 24),  # in units of 16
    "accumulates": (5, 0),
}


def warps_of(schedule: Schedule, who: str) -> tuple[int | None, list[int]]:
    """Warps of a role, and the rank of the CTA whose they are, if it is of one alone.

    Args:
        schedule: of the kernel.
        who: the role's name. ":4" behind it are its warps from the fifth on, ":1:4" its second to fourth; "first " or
            "second " ahead of it is a CTA of a pair, and alone all warps of that.
    """
    cta, _, role = who.partition(" ")
    rank = _RANKS.get(cta)
    name, _, bounds = (who if rank is None else role).partition(":")
    first, _, last = bounds.partition(":")
    warps = [warp for each in schedule.roles if name in ("", each.name) for warp in each.warps]
    if not warps:
        raise ValueError(f"no role {who}")
    return rank, warps[int(first or 0) : int(last) if last else None]


class Edit(NamedTuple):
    """A piece of a text, and what comes in its place."""

    start: int
    end: int
    text: str


Change = Callable[["Code"], list[Edit]]


class Code:
    """A kernel's PTX: its module, in which there is no other kernel."""

    def __init__(self, text: str, kernel: str, schedule: Schedule):
        """A module's text, a part of the kernel's name, and its schedule, which names mbarriers, such as ``k.full``."""
        functions = tree.parse(text).functions
        (chosen,) = (function for function in functions if kernel in function.name)
        self.text = text[: functions[0].start] + text[chosen.start : chosen.end]
        self.schedule = schedule
        self.barriers = schedule.barriers
        (self.function,) = tree.parse(self.text).functions
        self.instructions = self.function.instructions
        self.numbers = {x.start: number for number, x in enumerate(self.instructions)}
        self._threads: dict[str, Thread] = {}

    @cached_property
    def _programs(self) -> list[Program]:
        """Programs of the two CTAs of a pair; of another kernel both are equal."""
        return [Program(self.function, rank) for rank in range(2)]

    def thread(self, who: str) -> Thread:
        """The first of a role's first warp, which is the elected one."""
        if who not in self._threads:
            rank, (first, *_) = warps_of(self.schedule, who)
            self._threads[who] = Thread(self._programs[rank or 0], 32 * first)
        return self._threads[who]

    def text_of(self, x: Instruction) -> str:
        """Text of an instruction as it is written."""
        return self.text[x.start : x.end]

    def is_about(self, thread: Thread, number: int, barrier: str) -> bool:
        """Whether a thread waits for an mbarrier of a name, or arrives at it; of one stage, ``name+stage``."""
        x = self.instructions[number]
        name, _, stage = barrier.partition("+")
        places = self.barriers[name]
        operand = 1 if x.is_a("mbarrier.try_wait", "mbarrier.test_wait") else barrier_operand(x)
        if x.is_a("cp.async.bulk"):
            operand = max(i for i, each in enumerate(x.operands) if each.marks == "[")
        address = thread.address(number, operand)
        return address is not None and address.number in ([places[int(stage)]] if stage else places)

    def nearest(self, x: Instruction, opcode: str, step: int) -> Instruction:
        """The next of a kind in the text, or the one before."""
        return next(y for y in self.instructions[self.numbers[x.start] + step :: step] if y.opcode.startswith(opcode))

    def span(self, x: Instruction) -> tuple[int, int]:
        """Where an instruction is, and around a wait its loop."""
        if not x.is_a("mbarrier.try_wait"):
            return x.start, x.end
        start, end = self.text.rindex("{", 0, x.start), self.text.index("}", x.end) + 1
        assert len(re.findall(r"^\s*DONE:", self.text[start:end], re.MULTILINE)) == 1
        return start, end

    def changed(self, change: Change) -> str:
        """The text with all edits of a change."""
        text, at = [], 0
        for edit in sorted(change(self)):
            assert edit.start >= at, "changes overlap"
            text += [self.text[at : edit.start], edit.text]
            at = edit.end
        assert text, "nothing is changed"
        return "".join([*text, self.text[at:]])


@dataclass(frozen=True)
class Found:
    """Instructions to look for, and ways to change them, each of which is a ``Change``."""

    look: Callable[[Code], list[Instruction]]
    wait: tuple[str, str] | None = None  # the role that waits by them, and for which barrier

    def __getitem__(self, which: int | slice) -> "Found":
        """Some of these instructions."""
        return Found(lambda c: self.look(c)[which] if isinstance(which, slice) else [self.look(c)[which]], self.wait)

    def __add__(self, other: "Found") -> "Found":
        """These instructions and those of another."""
        return Found(lambda c: self.look(c) + other.look(c))

    def behind(self, opcode: str) -> "Found":
        """Instructions of a kind that come next."""
        return Found(lambda c: [c.nearest(x, opcode, 1) for x in self.look(c)])

    def ahead(self, opcode: str) -> "Found":
        """Instructions of a kind that come before."""
        return Found(lambda c: [c.nearest(x, opcode, -1) for x in self.look(c)])

    def left_out(self) -> "LeftOut":
        """Leaves these instructions out."""
        return LeftOut(self)

    def rewritten(self, pattern: str, replacement: str) -> Change:
        """They have another text, where a regular expression fits once."""
        return lambda c: [_rewritten(c, x, pattern, replacement) for x in self.look(c)]

    def flipped(self, field: str, bits: int = 1) -> Change:
        """A field of ``_FIELDS`` has other bits in the register that it is in, for the time of the instruction."""
        operand, at = _FIELDS[field]

        def change(c: Code) -> list[Edit]:
            edits = []
            for x in self.look(c):
                (register,) = x.operands[operand].names
                width = {"%rd": 64, "%rs": 16}.get(register[:3], 32)
                flip = f"\nxor.b{width} {register}, {register}, {bits << at};\n"
                if register.startswith("%p"):
                    flip = f"\nnot.pred {register}, {register};\n"
                start, end = c.span(x)
                edits += [Edit(start, start, flip), Edit(end, end, flip)]
            return edits

        return change

    def further(self, operand: int, distance: int | Callable[[Code], int]) -> Change:
        """They have another address, some bytes or columns further."""

        def change(c: Code) -> list[Edit]:
            edits = []
            for x in self.look(c):
                register, *offset = x.operands[operand].parts[0].parts or x.operands[operand].parts
                total = (distance if isinstance(distance, int) else distance(c)) + sum(y.number or 0 for y in offset)
                edits.append(_rewritten(c, x, re.escape(x.operands[operand].text), f"[{register.text}+{total}]"))
            return edits

        return change

    def ending_with(self, number: int) -> Change:
        """Their last operand, such as an arrival's count or its bytes, is a number instead of a register."""
        return self.rewritten(r", %r\d+;", f", {number};")

    def at_other_barrier(self, operand: int, here: str, there: str) -> Change:
        """They are about the first stage of another barrier than that of a name."""
        return self.further(operand, lambda c: c.barriers[there][0] - c.barriers[here][0])

    def preceded_by(self, text: str) -> Change:
        """Some lines are ahead of each."""

        def change(c: Code) -> list[Edit]:
            starts = [c.span(x)[0] for x in self.look(c)]
            return [Edit(start, start, f"\n{text}\n") for start in starts]

        return change

    def moved_behind(self, other: "Found") -> Change:
        """The one of them is behind another one."""

        def change(c: Code) -> list[Edit]:
            (x,), (place,) = self.look(c), other.look(c)
            _, end = c.span(place)
            return [Edit(x.start, x.end, ""), Edit(end, end, f"\n{c.text_of(x)}\n")]

        return change


@dataclass(frozen=True)
class LeftOut:
    """A ``Change`` that leaves instructions out."""

    found: Found

    def __call__(self, c: Code) -> list[Edit]:
        """Edits that take the instructions out of a kernel."""
        return [Edit(*c.span(x), "") for x in self.found.look(c)]


def _rewritten(c: Code, x: Instruction, pattern: str, replacement: str) -> Edit:
    text, count = re.subn(pattern, replacement, c.text_of(x))
    if count != 1:
        raise ValueError(f"line {x.line}, {c.text_of(x)}: {pattern} fits {count} times, not once")
    return Edit(x.start, x.end, text)


def find(by: str, opcode: str, count: int = 1, barrier: str = "", having: str = "") -> Found:
    """Instructions that the first warp of a role executes.

    Args:
        by: the role, as ``warps_of`` takes it.
        opcode: how they begin, in whole words.
        count: how many there are, or it is a ``ValueError``.
        barrier: the name of the mbarriers that they wait for, or arrive at; of one stage, ``name+stage``.
        having: a regular expression that is found in them.
    """

    def look(c: Code) -> list[Instruction]:
        thread = c.thread(by)
        found = [
            x
            for number, x in enumerate(c.instructions)
            if x.is_a(opcode)
            and thread.executes(number)
            and (not barrier or c.is_about(thread, number, barrier))
            and re.search(having, c.text_of(x))
        ]
        if len(found) != count:
            lines = [x.line for x in found]
            raise ValueError(f"{opcode} {barrier} {having} of {by}: expected {count}, got those of lines {lines}")
        return found

    return Found(look)


def waits(by: str, barrier: str, count: int = 1) -> Found:
    """Waits of a warp for an mbarrier."""
    return Found(find(by, "mbarrier.try_wait", count, barrier).look, (by, barrier))


def arrivals(by: str, barrier: str, count: int = 1) -> Found:
    """Arrivals of threads at an mbarrier."""
    return find(by, "mbarrier.arrive", count, barrier)


def commits(barrier: str, count: int = 1) -> Found:
    """Commits, which arrive at an mbarrier when products are done."""
    return find("mma", "tcgen05.commit", count, barrier)


def uncounted(barrier: str, number: int, by: str = "producer") -> Change:
    """Barriers of a name, which a role sets up, count so many arrivals less than their schedule says."""

    def change(c: Code) -> list[Edit]:
        name, _, side = barrier.partition(".")
        pipeline = c.schedule.pipeline(name)
        count = (pipeline.full_count if side == "full" else pipeline.empty_count) - number
        return find(by, "mbarrier.init", pipeline.stages, barrier).ending_with(count)(c)

    return change


def meetings(by: str) -> Found:
    """Where a warp meets the other CTA of its pair, by an arrival and a wait: as it begins, and as it ends."""
    return find(by, "barrier.cluster", 4)


# Where tiles are published to a pair's second CTA.
PUBLISHED = find("producer", "cp.async.bulk.shared::cluster", 4, "tiles.full")


def both(*changes: Change) -> Change:
    """All of some changes."""
    return lambda c: [edit for change in changes for edit in change(c)]
