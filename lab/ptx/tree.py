"""PTX as a tree: tokens, scopes, instructions with their operands, and the flow of control between them.

Follows the grammar of NVIDIA's PTX ISA as far as compilers write it. What an instruction means is for those who read
the tree: ``lab.emulator`` rewrites it, ``lab.lint`` checks it.
"""

import bisect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s+|//[^\n]*|/\*.*?\*/)+)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>0[fFdD][0-9a-fA-F]+|0[xX][0-9a-fA-F]+U?|\d+\.\d+(?:[eE][+-]?\d+)?|\d+U?(?![\w$]))
  | (?P<name>[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w]+)*|\.[A-Za-z_]\w*(?:(?:\.|::)\w+)*|_)
  | (?P<mark>[{}()\[\]<>,;:@!|+\-*=/&^~?])
    """,
    re.VERBOSE | re.DOTALL,
)
_REGISTERS = 64 * 1024  # of an SM


class PtxError(ValueError):
    """A text that is not PTX as it is known here."""


class Token(NamedTuple):
    """A piece of the text."""

    kind: str  # string, number, name, mark or end
    text: str
    start: int  # where it is in the text
    end: int


def tokens(text: str) -> list[Token]:
    """All tokens of a text, without space and comments.

    Raises:
        PtxError: a character that no token begins with.
    """
    found, position = [], 0
    for match in _TOKEN.finditer(text):
        start, end = match.span()
        if start != position:
            break  # at a character between both
        if match.lastgroup != "space":
            found.append(Token(str(match.lastgroup), match[0], start, end))
        position = end
    if position < len(text):
        line = text.count("\n", 0, position) + 1
        raise PtxError(f"line {line}: expected PTX, got {text[position : position + 20]!r}")
    return found


@dataclass(frozen=True)
class Operand:
    """Operand of an instruction: a name, a number, or several of them in brackets."""

    text: str  # as it is written
    marks: (
        str  # "" of a plain one, else "{" of a vector, "[" of an address, "(" of a list, "|" of a pair, "!", "-", "+"
    )
    parts: tuple["Operand", ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names in it, from left to right."""
        if self.parts:
            return tuple(name for part in self.parts for name in part.names)
        return (self.text,) if self.text[:1].isalpha() or self.text[:1] in ("_", "$", "%") else ()

    @cached_property
    def number(self) -> int | None:
        """Its value, of an integer; None of anything else."""
        text = self.text.removesuffix("U")
        if self.marks == "-" and self.parts[0].number is not None:
            return -self.parts[0].number
        if re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", text) is None:
            return None
        return int(text, 16) if text[:2] in ("0x", "0X") else int(text)


@dataclass
class Scope:
    """A function's body, or what is between braces: names are valid in it and in scopes within it."""

    parent: "Scope | None"
    number: int
    registers: dict[str, str] = field(default_factory=dict)  # name, or prefix and "<": type
    labels: dict[str, int] = field(default_factory=dict)  # name: the number of the instruction behind it
    _unique: dict[str, str] = field(default_factory=dict, repr=False)  # name: what ``register`` has returned

    def outwards(self) -> "Iterator[Scope]":
        """This scope, and those that it is in."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def holder(self, register: str) -> "Scope | None":
        """The innermost scope that declares a register."""
        names = {register, register.rstrip("0123456789") + "<"}
        return next((scope for scope in self.outwards() if not names.isdisjoint(scope.registers)), None)

    def register(self, name: str) -> str:
        """Register of a name, distinguished from those of the same name in other scopes. All are declared by now."""
        if name not in self._unique:
            holder = self.holder(name)
            self._unique[name] = f"{name}@{holder.number}" if holder is not None else name
        return self._unique[name]

    def label(self, name: str) -> int:
        """The number of the instruction behind a label."""
        for scope in self.outwards():
            if name in scope.labels:
                return scope.labels[name]
        raise PtxError(f"no label {name}")


@cache  # a text has some hundred opcodes, and is asked about some dozen kinds of instructions
def _begins(opcode: str, prefixes: tuple[str, ...]) -> bool:
    return any(f"{opcode}.".startswith(f"{prefix}.") for prefix in prefixes)


@dataclass(frozen=True)
class Instruction:
    """One instruction, with where it is written."""

    opcode: str  # with all modifiers
    operands: tuple[Operand, ...]
    guard: str | None  # the predicate's register
    negated: bool  # whether the predicate has to be false
    start: int  # where it is in the text, its guard and its semicolon included
    end: int
    line: int  # from 1
    scope: Scope = field(repr=False, compare=False)

    @cached_property
    def parts(self) -> frozenset[str]:
        """The words of the opcode: of ``bar.warp.sync``, bar, warp and sync."""
        return frozenset(self.opcode.split("."))

    @cached_property
    def operation(self) -> str:
        """The first word of the opcode."""
        return self.opcode.partition(".")[0]

    def is_a(self, *prefixes: str) -> bool:
        """Whether the opcode begins with the whole words of one of them."""
        return _begins(self.opcode, prefixes)

    def register(self, name: str) -> str:
        """Register of a name, distinguished from those of the same name in other scopes."""
        return self.scope.register(name)


@dataclass(frozen=True)
class Function:
    """A kernel or a device function that has a body."""

    name: str
    is_entry: bool
    instructions: tuple[Instruction, ...]
    directives: dict[str, tuple[int, ...]]  # of the head, such as .reqntid: (512, 1, 1)
    start: int
    end: int

    @cached_property
    def num_threads(self) -> int:
        """Threads of a CTA, at most; 1 if the head lacks them."""
        return math.prod(self.directives.get(".reqntid") or self.directives.get(".maxntid") or (1,))

    @cached_property
    def registers(self) -> int:
        """Registers a thread at launch, of a kernel that changes them: an SM's, shared out to its CTAs."""
        if ".maxnreg" in self.directives:
            return self.directives[".maxnreg"][0]
        (ctas,) = self.directives.get(".minnctapersm", (1,))
        return _REGISTERS // (ctas * self.num_threads) // 8 * 8

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the instructions that may follow each one; ``len(instructions)`` is the end.

        Raises:
            PtxError: a jump to where no label is, or by a table.
        """
        found = []
        for number, instruction in enumerate(self.instructions):
            next_ones = [number + 1]
            if instruction.is_a("bra"):
                next_ones.insert(0, instruction.scope.label(instruction.operands[0].text))
            elif instruction.is_a("brx"):
                raise PtxError(f"line {instruction.line}: {instruction.opcode} is not known")
            elif instruction.operation in ("ret", "exit", "trap"):
                next_ones.insert(0, len(self.instructions))
            if instruction.guard is None:  # it always goes where it goes first
                next_ones = next_ones[:1]
            found.append(tuple(dict.fromkeys(next_ones)))
        return tuple(found)


@dataclass(frozen=True)
class Module:
    """A text and what is in it."""

    text: str = field(repr=False)
    target: str
    functions: tuple[Function, ...]
    head_end: int  # where the lines .version, .target and .address_size end


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [*tokens(text), Token("end", "", len(text), len(text))]
        self.at = 0
        self.scopes = 0
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self, position: int) -> int:
        return bisect.bisect_right(self.line_starts, position)

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> Token:
        token = self.tokens[self.at]
        if token.kind == "end":
            raise PtxError(f"expected {expected or 'more'}, got the end")
        if expected is not None and token.text != expected:
            raise PtxError(f"line {self.line(token.start)}: expected {expected!r}, got {token.text!r}")
        self.at += 1
        return token

    def skip_bracketed(self) -> None:
        """Goes behind the bracket that closes the one at hand."""
        depth = 0
        while True:
            text = self.take().text
            depth += (text in "([{") - (text in ")]}")
            if depth == 0:
                return

    def skip_statement(self) -> None:
        """Goes behind the semicolon that ends a directive, and over initial values."""
        while self.peek() != ";":
            if self.peek() in ("{", "(", "["):
                self.skip_bracketed()
            else:
                self.take()
        self.take(";")

    def module(self) -> Module:
        target, head_end = "", 0
        functions = []
        while self.tokens[self.at].kind != "end":
            token = self.tokens[self.at]
            if token.text == ".version":
                self.at += 2
            elif token.text == ".target":
                self.take()
                target = self.take().text
                while self.peek() == ",":
                    self.at += 2
            elif token.text == ".address_size":
                self.at += 1
                head_end = self.take().end
            elif token.text in (".file", ".section", ".loc"):
                raise PtxError(f"line {self.line(token.start)}: debug information ({token.text}) is not known")
            else:
                function = self.declaration()
                if function is not None:
                    functions.append(function)
        if not target or not head_end:
            raise PtxError("expected .target and .address_size")
        return Module(self.text, target, tuple(functions), head_end)

    def declaration(self) -> Function | None:
        """A function with a body, or None: a variable, or a function without one."""
        start = self.tokens[self.at].start
        while self.peek() in (".visible", ".extern", ".weak", ".common"):
            self.take()
        if self.peek() not in (".entry", ".func"):
            self.skip_statement()
            return None
        is_entry = self.take().text == ".entry"
        while self.peek() in (".attribute", ".noreturn", "("):
            self.skip_bracketed() if self.peek() == "(" else self.take()
        name = self.take().text
        if self.peek() == "(":
            self.skip_bracketed()
        directives: dict[str, tuple[int, ...]] = {}
        while self.peek() not in ("{", ";"):
            directive = self.take().text
            numbers = []
            while self.tokens[self.at].kind == "number" or self.peek() == ",":
                token = self.take()
                if token.kind == "number":
                    numbers.append(int(token.text))
            directives[directive] = tuple(numbers)
        if self.peek() == ";":
            self.take()
            return None
        instructions: list[Instruction] = []
        self.block(None, instructions)
        end = self.tokens[self.at - 1].end
        return Function(name, is_entry, tuple(instructions), directives, start, end)

    def block(self, parent: Scope | None, instructions: list[Instruction]) -> None:
        scope = Scope(parent, self.scopes)
        self.scopes += 1
        self.take("{")
        while self.peek() != "}":
            if self.peek() == "{":
                self.block(scope, instructions)
            elif self.peek().startswith("."):
                self.directive(scope)
            elif self.peek(1) == ":":
                scope.labels[self.take().text] = len(instructions)
                self.take(":")
            elif self.peek() == ";":
                self.take()
            else:
                instructions.append(self.instruction(scope))
        self.take("}")

    def directive(self, scope: Scope) -> None:
        directive = self.take().text
        if directive not in (".reg", ".param"):
            if directive in (".loc", ".branchtargets", ".callprototype"):
                raise PtxError(f"line {self.line(self.tokens[self.at].start)}: {directive} is not known")
            self.skip_statement()
            return
        kind = ""
        while self.peek() != ";":
            token = self.take()
            if token.text.startswith("."):
                kind = token.text
            elif token.kind == "name":
                ranges = self.peek() == "<"
                scope.registers[token.text + "<" * ranges] = kind
                if ranges:
                    self.skip_to(">")
            elif token.text == "[":
                self.skip_to("]")
        self.take(";")

    def skip_to(self, mark: str) -> None:
        while self.take().text != mark:
            pass

    def instruction(self, scope: Scope) -> Instruction:
        first = self.tokens[self.at]
        guard, negated = None, False
        if first.text == "@":
            self.take()
            if self.peek() == "!":
                negated = bool(self.take())
            guard = self.take().text
        opcode = self.take()
        if opcode.kind != "name":
            raise PtxError(f"line {self.line(opcode.start)}: expected an instruction, got {opcode.text!r}")
        operands = self.operands(";")
        end = self.take(";").end
        return Instruction(
            opcode.text, tuple(operands), guard, negated, first.start, end, self.line(opcode.start), scope
        )

    def operands(self, closing: str) -> list[Operand]:
        found = [] if self.peek() == closing else [self.operand()]
        while self.peek() == ",":
            self.take()
            found.append(self.operand())
        return found

    def operand(self) -> Operand:
        start = self.tokens[self.at].start
        whole = self.primary()
        while self.peek() in ("|", "+", "-"):
            mark = self.take().text
            right = self.primary()
            if mark == "-":
                right = Operand(f"-{right.text}", "-", (right,))
                mark = "+"
            whole = Operand(self.text[start : self.tokens[self.at - 1].end], mark, (whole, right))
        return whole

    def primary(self) -> Operand:
        token = self.take()
        closing = {"{": "}", "[": "]", "(": ")"}.get(token.text)
        parts = []
        if closing:
            parts = self.operands(closing)
            self.take(closing)
        elif token.text in ("!", "-"):
            parts.append(self.primary())
        elif token.kind == "mark":
            raise PtxError(f"line {self.line(token.start)}: expected an operand, got {token.text!r}")
        marks = token.text if token.kind == "mark" else ""
        return Operand(self.text[token.start : self.tokens[self.at - 1].end], marks, tuple(parts))


@lru_cache(maxsize=2)  # a text is checked, translated and interpreted in turn
def parse(text: str) -> Module:
    """The tree of a text.

    Args:
        text: a PTX module; a zero byte at its end, which C puts there, is left out.

    Raises:
        PtxError: it is not PTX, or has debug information, indirect jumps or indirect calls.
    """
    return _Parser(text.rstrip("\x00")).module()


def instructions(module: Module) -> Iterator[Instruction]:
    """All instructions of all functions."""
    for function in module.functions:
        yield from function.instructions
