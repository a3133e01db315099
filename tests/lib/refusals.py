"""Tables of wrong calls, and of the errors that they raise."""

import builtins
import re
from typing import Any

import pytest


def refusals(table: str) -> pytest.MarkDecorator:
    """Parametrises a test with ``call`` and ``error``.

    A line of the table is a call, and those below it, which are indented, its error: the type, and how its message
    begins, where "..." between spaces, or at the start, stands for anything.
    """
    pairs = [
        (call, " ".join(error.split())) for call, error in re.findall(r"^(\S.*)\n((?: +.*\n)+)", table, re.MULTILINE)
    ]
    ids = [error.partition(": ")[2][:40] for _, error in pairs]
    return pytest.mark.parametrize(("call", "error"), pairs, ids=ids)


def assert_refused(call: str, error: str, names: dict[str, Any]) -> None:
    """Evaluates a call of a table, in which names are these."""
    kind, _, message = error.partition(": ")
    pattern = ".*".join(map(re.escape, re.split(r"(?:^| )\.\.\. ", message)))
    with pytest.raises(getattr(builtins, kind), match=f"^{pattern}"):
        eval(call, names)
