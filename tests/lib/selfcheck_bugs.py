"""A worker of the self-check whose GPU has a bug, for tests on a Hopper GPU.

    python -m tests.lib.selfcheck_bugs BUG REQUEST DESCRIPTOR

A bug changes what a kernel is given, what becomes of its results, or how it is compiled.
"""

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from flash_attn_cute.jit import cache
from flash_attn_cute.selfcheck import worker

Kernel = Callable[[Any], None]


class Bug(NamedTuple):
    """A bug, and the verdict on it."""

    families: str  # of Hopper's kernels, that steps are run of: a regular expression
    failed: str  # the family that has to fail
    why: str  # part of why
    plant: Callable[[Any, Kernel], Kernel]  # of a configuration and its kernel makes what is called in its place


def _before(change: Callable[[Any, Any], Any], pass_name: str = "forward") -> Callable[[Any, Kernel], Kernel]:
    """A kernel of a pass that is given other arguments: what the change makes of its configuration and of them."""

    def plant(config: Any, kernel: Kernel) -> Kernel:
        return (lambda given: kernel(change(config, given))) if config.pass_name == pass_name else kernel

    return plant


def _behind(change: Callable[[Any], object], pass_name: str = "forward") -> Callable[[Any, Kernel], Kernel]:
    """A kernel of a pass with something done behind it."""

    def plant(config: Any, kernel: Kernel) -> Kernel:
        def run(given: Any) -> None:
            kernel(given)
            change(given)

        return run if config.pass_name == pass_name else kernel

    return plant


def _numbers(given: Any, **changed: Any) -> Any:
    return given._replace(numbers=given.numbers._replace(**changed))


def _spin(config: Any, given: Any) -> Any:
    torch.cuda._sleep(2**60)  # cycles: decades
    return given


def _abort(config: Any, given: Any) -> Any:
    os.abort()


def _fault(config: Any, given: Any) -> Any:
    torch.zeros(1, device="cuda")[torch.full((1,), 10**6, device="cuda")]
    torch.cuda.synchronize()
    return given


def _window(config: Any, given: Any) -> Any:
    return _numbers(given, window_right=given.numbers.window_right + 1)


def _last_key(config: Any, given: Any) -> Any:
    return given if given.mSeqUsedK is None else given._replace(mSeqUsedK=(given.mSeqUsedK - 1).clamp(min=0))


def _next_head(name: str) -> Callable[[Any, Any], Any]:
    def change(config: Any, given: Any) -> Any:
        x = getattr(given, name)
        return given if x is None else given._replace(**{name: x.roll(1, -2 if name == "mK" else 1)})

    return change


_calls = itertools.count(1)


def _flip_a_bit(given: Any) -> None:
    given.mdQ.view(torch.int16).view(-1)[0] ^= next(_calls) % 7 == 0


def _compiled_with(**changed: bool) -> Callable[[Any, Kernel], Kernel]:
    """A kernel that was compiled for other features."""

    def plant(config: Any, kernel: Kernel) -> Kernel:
        other = replace(config, features=replace(config.features, **changed))
        return _compiled(other) if config.pass_name == "forward" and config.features.packed else kernel

    return plant


def _compiled(config: Any) -> Kernel:
    """A kernel that is compiled here, not read from disk, nor left there."""
    from flash_attn_cute.jit.code import load

    return load(cache._compile(config))


def _releases_are_missing(config: Any, kernel: Kernel) -> Kernel:
    """Every stage of K and V waits for an arrival more than there are, and so from its second use on for ever."""
    from flash_attn_cute.kernels.sm90 import forward

    if config.pass_name != "forward":
        return kernel
    create = vars(forward)["tma_pipeline"]

    def with_one_more(barriers: Any, stages: int, consumer_warps: int, num_bytes: int) -> Any:
        return create(barriers, stages, consumer_warps + 1, num_bytes)

    with patch.object(forward, "tma_pipeline", with_one_more):
        return _compiled(config)


BUGS = {
    "the GPU spins": Bug("forward d64", "forward d64", "did not end within", _before(_spin)),
    "a barrier waits for ever": Bug("forward d64", "forward d64", "did not end within", _releases_are_missing),
    "the process aborts": Bug("forward d64", "forward d64", "signal SIGABRT", _before(_abort)),
    "a fault of the GPU": Bug("backward d64", "backward d64", "CUDA error", _before(_fault, "backward")),
    "scale 5 % off": Bug(
        "backward d128",
        "backward d128",
        "elements are wrong",
        _before(lambda config, x: _numbers(x, softmax_scale=1.05 * x.numbers.softmax_scale), "backward"),
    ),
    "window a key wider": Bug("forward d128", "forward d128", "elements are wrong", _before(_window)),
    "last key left out": Bug("forward d64", "forward d64", "elements are wrong", _before(_last_key)),
    "padding is not written": Bug("forward d64", "forward d64", "are wrong", _compiled_with(zero_padding=False)),
    "lse in base 2": Bug(
        "forward d256", "forward d256", "lse: ", _behind(lambda given: given.mLSE.mul_(1.4426950408889634))
    ),
    "keys of the next head": Bug("backward d96", "backward d96", "are wrong", _before(_next_head("mK"), "backward")),
    "bias of the next head": Bug("biases", "biases", "are wrong", _before(_next_head("mBias"))),
    "other bits now and then": Bug("backward d64", "backward d64", "bits", _behind(_flip_a_bit, "backward")),
}


def main(name: str, arguments: list[str]) -> int:
    """Runs the worker with a bug; returns its exit code."""
    kernel_of = cache.kernel
    cache.kernel = lambda config: BUGS[name].plant(config, kernel_of(config))
    return worker.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
