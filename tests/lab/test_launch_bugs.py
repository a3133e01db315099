"""Bugs of the code that launches Blackwell's passes: executions of what it launches show them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab import interpreter
from lab.bugs.launches import LAUNCHES, LaunchBug
from lab.interpreter.host import Memory
from tests.lib.interpreted import backward, forward
from tests.lib.interpreted.bias_gradient import WithGradient, check_dbias
from tests.lib.interpreted.common import Executed, dense
from tests.lib.oracle import Call

PLANTED = {f"{kind}: {bug.text}": bug for kind, bugs in LAUNCHES.items() for bug in bugs}


def call(lengths_q: list[int], lengths_k: list[int], **options: Any) -> Call:
    torch.manual_seed(0)
    return dense(lengths_q, lengths_k, **options)()


def run_forward(given: Call, **options: Any) -> None:
    forward.check(given, random.Random(0), **options)


def run_backward(given: Call, **options: Any) -> None:
    backward.check(given, backward.Interpreted(random.Random(0), **options))


def run_bias(given: Call, num_sms: int) -> None:
    check_dbias(given, WithGradient(random.Random(0), num_sms, is_alone=True))


CALLS: dict[str, Callable[[], None]] = {
    "forward": lambda: run_forward(call([130], [200])),
    "mask": lambda: run_forward(call([130], [200], mask=(1, 1), nheads=1)),
    "forward pair": lambda: run_forward(call([150], [100], head_dim=256, nheads=1), by_pairs=True),
    "backward": lambda: run_backward(call([130], [200])),
    "pair": lambda: run_backward(call([130], [140], head_dim=128, nheads=1), by_pairs=True),
    "bias": lambda: run_bias(call([100], [150], bias=(1, 1)), 1),
    "split bias": lambda: run_bias(call([100], [100], nheads=4, bias=(1, 1)), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_without_a_bug(name: str) -> None:
    CALLS[name]()


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED.values(), ids=PLANTED)
def test_planted(bug: LaunchBug, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Executed.launches

    def with_bug(self: Executed, a: Any, memory: Memory) -> list[interpreter.Launch]:
        return bug.change(launches(self, a, memory), memory.places)

    monkeypatch.setattr(Executed, "launches", with_bug)
    with pytest.raises((interpreter.FaultError, AssertionError)):
        CALLS[bug.call]()
