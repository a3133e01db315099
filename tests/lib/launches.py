"""Calls of compiled code, as the kernels' backend makes them."""

from typing import Any, NamedTuple


class Launched(NamedTuple):
    """A call of compiled code."""

    config: Any
    arguments: Any
