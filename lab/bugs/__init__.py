"""Bugs to plant in the PTX of the Blackwell kernels, and what finds each: the lint, an execution, or both.

    code          a kernel's PTX, what to look for in it, and how to change it
    table         what a bug is, and how the page ``docs/blackwell-checks.md`` shows them
    forward       bugs of the forward kernel
    lists         of the same, what is another under masks
    forward_pair  bugs of that of pairs of CTAs, where it is another
    backward      bugs of the backward kernel
    columns       of the same, what is another under masks
    pair          bugs of that of pairs of CTAs, where it is another
    wide_pair     of the same, what is another at (192, 128)
    two_pass      bugs of that of two passes, where it is another
    pair_two_pass  bugs of that of pairs of CTAs of two passes
    bias          bugs of the kernel of a bias's gradient
    launches      bugs of the code that launches the kernels

``python -m lab.bugs`` writes the tables of the page.
"""

from lab.bugs.backward import BACKWARD
from lab.bugs.bias import BIAS
from lab.bugs.code import Code, arrivals, find, waits, where_barriers_are
from lab.bugs.columns import COLUMNS
from lab.bugs.forward import FORWARD
from lab.bugs.forward_pair import FORWARD_PAIR
from lab.bugs.launches import LAUNCHES
from lab.bugs.lists import LISTS
from lab.bugs.pair import PAIR
from lab.bugs.pair_two_pass import PAIR_TWO_PASS
from lab.bugs.table import PAGE, Bug, Bugs, page, table
from lab.bugs.two_pass import TWO_PASS
from lab.bugs.wide_pair import WIDE_PAIR

# By kernels, in the order of the page.
TABLES: dict[str, Bugs] = {
    "forward": FORWARD,
    "masks": LISTS,
    "forward pairs": FORWARD_PAIR,
    "backward": BACKWARD,
    "backward under masks": COLUMNS,
    "pairs": PAIR,
    "wide pairs": WIDE_PAIR,
    "two passes": TWO_PASS,
    "pairs in two passes": PAIR_TWO_PASS,
    "bias": BIAS,
}

__all__ = [
    "LAUNCHES",
    "PAGE",
    "TABLES",
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
