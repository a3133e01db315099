"""Whether, and how often, a host waits for its device, and CUDA graphs, in whose capture it must not."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.checks import same_bits

Captured = TypeVar("Captured")


def synchronisations(function: Any) -> int:
    """How often a function makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def captured(function: Callable[[], Captured]) -> tuple[torch.cuda.CUDAGraph, Captured]:
    """A CUDA graph of a function that has run before, and where its replays leave their results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def assert_captured(function: Callable[[], Iterable[Tensor]], change: Callable[[], object]) -> None:
    """A function never waits, and replays of its graph, after each change of what it reads, have the bits of calls."""
    function()
    assert synchronisations(function) == 0
    graph, found = captured(function)
    for _ in range(2):  # of the workspace nothing may be left
        change()
        graph.replay()
        assert same_bits(found, function())


class Waits(AssertionError):
    """Something has read a tensor's values."""


class NeverWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        waits = name in self.WAITS or "unique" in name
        if func is torch.ops.aten.index.Tensor:
            waits = any(i is not None and i.dtype == torch.bool for i in args[1])
        if func is torch.ops.aten.repeat_interleave.Tensor:
            waits = "output_size" not in given
        if waits:
            raise Waits(func)
        return func(*args, **given)
