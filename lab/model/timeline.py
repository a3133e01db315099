"""Timeline of an SM, as text."""

from collections.abc import Iterator

from lab.model.simulation import Interval
from lab.model.sm import Sm

_WIDTH = 120


def lanes(sm: Sm, start: float, end: float) -> dict[str, list[Interval]]:
    """Work done between two times: by the tensor cores, by each role that computes, and on the ways to memory."""
    found: dict[str, list[Interval]] = {sm.tensor.name: list(sm.tensor.busy)}
    for interval in sm.issue.busy:
        found.setdefault(interval.who, []).append(interval)
    for unit in (sm.l2, sm.adds):
        found[unit.name] = list(unit.busy)
    inside = {name: [i for i in busy if i.start < end and i.end > start] for name, busy in found.items()}
    return {name: busy for name, busy in inside.items() if busy}


def text(sm: Sm, start: float, end: float) -> Iterator[str]:
    """A line a lane, a letter a piece of work; behind it the share of the time, and then what the letters mean."""
    found = lanes(sm, start, end)
    letters: dict[str, str] = {}
    for what in sorted({i.what for busy in found.values() for i in busy}):
        free = (
            c for c in what + what.upper() + what.lower() + "0123456789" if c.isalnum() and c not in letters.values()
        )
        letters[what] = next(free)
    a_column = (end - start) / _WIDTH
    for name, busy in found.items():
        line = [" "] * _WIDTH
        for i in busy:
            first, last = (int(min(max(x - start, 0), end - start) / a_column) for x in (i.start, i.end))
            line[first : max(last, first + 1)] = letters[i.what] * (max(last, first + 1) - first)
        share = sum(min(i.end, end) - max(i.start, start) for i in busy) / (end - start)
        yield f"{name:15s}|{''.join(line[:_WIDTH])}| {share:4.0%}"
    yield f"a column: {a_column:.0f} clocks; " + ", ".join(f"{letter} {what}" for what, letter in letters.items())
