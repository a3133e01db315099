"""Bugs to plant in the PTX of the Blackwell kernels, and what finds each: the lint, an execution, or both.

    code        a kernel's PTX, what to look for in it, and how to change it
    table       what a bug is, and how the page ``docs/blackwell-checks.md`` shows them
    forward     bugs of the forward kernel
    backward    bugs of the backward kernel

``python -m tests.sm100_bugs`` writes the tables of the page.
"""

from tests.sm100_bugs.backward import BACKWARD
from tests.sm100_bugs.code import Code, arrivals, find, waits, where_barriers_are
from tests.sm100_bugs.forward import FORWARD
from tests.sm100_bugs.table import PAGE, Bug, Bugs, page, table

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PAGE",
    "Bug",
    "Bugs",
    "Code",
    "arrivals",
    "find",
    "page",
    "table",
    "waits",
    "where_barriers_are",
]
