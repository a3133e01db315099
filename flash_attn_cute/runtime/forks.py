"""Processes that fork: what a child does first with state that outlives a call."""

import os
from collections.abc import Callable


def begin_child_with(function: Callable[[], None]) -> None:
    """Has each child of a fork call a function first. Where processes do not fork, as on Windows, nothing is to do."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
