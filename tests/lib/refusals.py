"""Tables of wrong calls, and of the errors that they raise."""

import builtins
import re
from typing import Any

import pytest


def pairs(table: str) -> list[tuple[str, str]]:
    """Calls of a table, and their errors.

    A line of the table is a call, and those below it, which are indented, its error: the type, and how its message
    begins, where "..." between spaces, or at the start, stands for anything.
    """
    found = re.findall(r"^(\S.*)\n((?: +.*\n)+)", table, re.MULTILINE)
    assert len(found) == len(re.findall(r"^\S", table, re.MULTILINE)), "a call has no error, and would not be made"
    return [(call, " ".join(error.split())) for call, error in found]


def refusals(table: str) -> pytest.MarkDecorator:
    """Parametrises a test with ``call`` and ``error`` of a table."""
    found = pairs(table)
    ids = [error.partition(": ")[2][:40] for _, error in found]
    return pytest.mark.parametrize(("call", "error"), found, ids=ids)


def assert_refused(call: str, error: str, names: dict[str, Any]) -> None:
    """Evaluates a call of a table, in which names are these."""
    kind, _, message = error.partition(": ")
    pattern = ".*".join(map(re.escape, re.split(r"(?:^| )\.\.\. ", message)))
    with pytest.raises(getattr(builtins, kind), match=f"^{pattern}"):
        eval(call, names)
