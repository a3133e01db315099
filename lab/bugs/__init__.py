"""Bugs to plant in the PTX of the Blackwell and Hopper kernels, and what finds each: the lint, an execution, or both.

    code           a kernel's PTX, what to look for in it, and how to change it
    implied        waits that need no bug, as others imply them
    table          what a bug is, and the tables of ``docs/blackwell-checks.md``, which count them
    launches       bugs of the code that launches the kernels

A module has the bugs of one kernel, or those that a variant of it adds:

    forward        forward kernel
    lists          forward kernel under masks
    forward_pair   forward kernel of pairs of CTAs
    backward       backward kernel
    columns        backward kernel under masks
    pair           backward kernel of pairs of CTAs
    wide_pair      backward kernel of pairs of CTAs, at (192, 128)
    two_pass       backward kernel of two passes
    pair_two_pass  backward kernel of two passes, of pairs of CTAs
    bias           kernel of a bias's gradient
    hopper         Hopper's forward and backward kernels

``python -m lab.bugs`` writes the tables of the page, and ``--list`` prints every bug.
"""

from lab.bugs.backward import BACKWARD
from lab.bugs.bias import BIAS
from lab.bugs.code import Code, LeftOut, find, waits
from lab.bugs.columns import COLUMNS
from lab.bugs.forward import FORWARD
from lab.bugs.forward_pair import FORWARD_PAIR
from lab.bugs.hopper import HOPPER_BACKWARD, HOPPER_CLUSTER, HOPPER_FORWARD
from lab.bugs.implied import IMPLIED
from lab.bugs.launches import LAUNCHES
from lab.bugs.lists import LISTS
from lab.bugs.pair import PAIR
from lab.bugs.pair_two_pass import PAIR_TWO_PASS
from lab.bugs.table import PAGE, AnyBugs, Bug, Bugs, listed, page
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
    "Hopper forward": HOPPER_FORWARD,
    "Hopper backward": HOPPER_BACKWARD,
    "Hopper clusters": HOPPER_CLUSTER,
}
ALL: dict[str, AnyBugs] = {**TABLES, "launches": LAUNCHES}

__all__ = [
    "ALL",
    "IMPLIED",
    "PAGE",
    "TABLES",
    "Bug",
    "Bugs",
    "Code",
    "LeftOut",
    "find",
    "listed",
    "page",
    "waits",
]
