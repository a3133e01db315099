"""Straight pieces of a program that compute registers from registers alone, executed at once.

No other warp sees what such instructions do, so their order among each other does not matter. Those of a piece that are
alike, and do not depend on each other, are one operation on arrays of (instructions, lanes). An unrolled loop over
scores takes a few operations instead of some hundred.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lab.interpreter.state import Array, Mask, Read, Warp
from lab.interpreter.statement import BITS, TYPES, Node, Source, as_bits, as_kind

_Blocks = list[Array]  # registers that are read, numbers and results: (rows, lanes)
_Fetch = Callable[[_Blocks], Array]


class _Row(NamedTuple):
    block: int
    number: int


class _Plan(NamedTuple):
    """Operations of a piece; their results are further blocks."""

    registers: list[list[str]]  # the first blocks: of each width that registers are read in
    numbers: list[Read]  # the next ones, of a row each
    operations: list[tuple[Callable[..., Array], list[_Fetch], int]]  # a function, its operands, and how many rows
    results: list[tuple[str, int, int]]  # registers that are kept, each with its block and row


class Piece:
    """Some computations that follow each other."""

    def __init__(self, nodes: Sequence[Node], is_read: Callable[[str], bool]):
        """Takes what is computed, in order, and which registers other instructions read."""
        self._nodes, self._is_read = nodes, is_read

    def __call__(self, warp: Warp, mask: Mask) -> None:
        """Executes the piece in some lanes."""
        plan, registers = self._plan, warp.registers
        blocks = [np.concatenate([registers[name] for name in names]).reshape(-1, 32) for names in plan.registers]
        blocks += [as_bits(read(warp))[None] for read in plan.numbers]
        for function, operands, rows in plan.operations:
            result = as_bits(function(*[fetch(blocks) for fetch in operands]))
            blocks.append(result if len(result) == rows else np.broadcast_to(result, (rows, 32)))
        for name, block, row in plan.results:
            value = blocks[block][row]
            if mask is not None and name in registers:
                value = np.where(mask, value, registers[name])
            registers[name] = value

    @functools.cached_property
    def _plan(self) -> _Plan:
        """Made when the piece is first executed."""
        nodes, latest = self._nodes, dict[str, int]()  # by register: the node that has written it last
        operands: list[list[int | Source]] = []  # by node: what it reads; of another node its number
        for number, node in enumerate(nodes):
            operands.append([latest.get(x.name, x) if x.read is None else x for x in node.sources])
            latest[node.target] = number
        given = [x for some in operands for x in some if not isinstance(x, int)]
        widths = defaultdict[type, dict[str, None]](dict)
        for x in given:
            if x.read is None:
                widths[_width(x.kind)][x.name] = None
        registers, numbers = [[*names] for names in widths.values()], {x: x.read for x in given if x.read is not None}
        places = {name: _Row(block, row) for block, names in enumerate(registers) for row, name in enumerate(names)}
        rows: dict[int | Source, _Row] = {x: places[x.name] for x in given if x.read is None}
        rows.update((x, _Row(len(registers) + i, 0)) for i, x in enumerate(numbers))
        sizes = [*map(len, registers), *(1 for _ in numbers)]
        operations = []
        for group in _groups(nodes, operands):
            first = nodes[group[0]]
            fetches = [
                _fetch([rows[operands[node][i]] for node in group], x.kind, sizes) for i, x in enumerate(first.sources)
            ]
            operations.append((first.function, fetches, len(group)))
            rows.update((node, _Row(len(sizes), row)) for row, node in enumerate(group))
            sizes.append(len(group))
        results = [(name, *rows[x]) for name, x in latest.items() if name in places or self._is_read(name)]
        return _Plan(registers, list(numbers.values()), operations, results)


def _width(kind: str) -> type:
    """The type of registers of a kind."""
    return BITS[{"bf16": 2, "pred": 1}.get(kind) or np.dtype(TYPES[kind]).itemsize]


def _groups(nodes: Sequence[Node], operands: Sequence[list[int | Source]]) -> Iterator[list[int]]:
    """Nodes that are computed together, in an order in which what each reads is there: the most at a time."""
    missing, users, ready = [0] * len(nodes), defaultdict[int, list[int]](list), defaultdict[object, list[int]](list)
    for number, some in enumerate(operands):
        for x in {x for x in some if isinstance(x, int)}:
            missing[number] += 1
            users[x].append(number)
        if not missing[number]:
            ready[nodes[number].key].append(number)
    while ready:
        group = ready.pop(max(ready, key=lambda key: len(ready[key])))
        yield group
        for user in (user for number in group for user in users[number]):
            missing[user] -= 1
            if not missing[user]:
                ready[nodes[user].key].append(user)


def _fetch(rows: list[_Row], kind: str, sizes: Sequence[int]) -> _Fetch:
    """Makes a function that gathers an operand of several nodes from blocks; one row if all have the same."""
    if len(set(rows)) == 1:
        rows = rows[:1]
    parts: list[tuple[int, slice | Array]] = []
    for block, some in itertools.groupby(rows, lambda row: row.block):
        numbers = [row.number for row in some]
        following = range(numbers[0], numbers[0] + len(numbers))
        is_slice = numbers == list(following)
        parts.append((block, slice(following.start, following.stop) if is_slice else np.array(numbers)))
    (first, chosen), *others = parts
    if others:
        return lambda blocks: as_kind(np.concatenate([blocks[block][some] for block, some in parts]), kind)
    if kind not in TYPES:
        return lambda blocks: as_kind(blocks[first][chosen], kind)
    numbers_of = TYPES[kind]
    if isinstance(chosen, slice) and chosen == slice(0, sizes[first]):
        return lambda blocks: blocks[first].view(numbers_of)
    return lambda blocks: blocks[first][chosen].view(numbers_of)
