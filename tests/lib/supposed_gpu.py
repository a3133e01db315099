"""A process that takes this machine for one with a GPU of some compute capability, or with none.

    python -m tests.lib.supposed_gpu 10 3 -- TESTS
    python -m tests.lib.supposed_gpu -- TESTS

It runs no test and makes no call. The last line that it prints, as JSON, says what it would do.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cute.calls import dispatch
from flash_attn_cute.jit import cache
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options


class Plan:
    """A pytest plugin: which tests would run, and why others would be skipped, parameters aside."""

    def __init__(self) -> None:
        self.run: dict[str, None] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes whether a test would run or be skipped."""
        if report.when != "setup":
            return
        name = report.nodeid.split("[")[0]
        if isinstance(report.longrepr, tuple):
            self.skipped[name] = report.longrepr[2]
        elif report.passed:
            self.run[name] = None


class AskedError(Exception):
    """A call would have this kernel compiled."""


def _ask(config: Any) -> None:
    raise AskedError(config.target)


def targets(device: str) -> dict[str, str]:
    """Targets, backends or refusals of calls that ask for a backend, or for none."""
    found = {}
    with FakeTensorMode(), patch.object(cache, "kernel", _ask):
        q = torch.empty(1, 300, 2, 64, dtype=torch.bfloat16, device=device)
        inputs = AttentionInputs(q, q, q, None, None, None, None, None, None, None, 300, 300)
        spec = AttentionSpec.of(inputs, Options(None, None, None, 0.0, False, True))
        for requested in (None, "sm90", "sm100"):
            try:
                name = found[str(requested)] = dispatch.select(spec, inputs, requested).name
                if name != "portable":
                    dispatch.BACKENDS[name].forward(spec, inputs)
            except (ValueError, AskedError) as answer:
                found[str(requested)] = str(answer)
    return found


def main(capability: tuple[int, ...], tests: list[str]) -> None:
    """Prints what calls would be compiled for, as users make them and in tests, and which tests would run."""
    properties = SimpleNamespace(multi_processor_count=148, name="supposed", uuid="0", total_memory=2**37)
    if capability:
        properties.major, properties.minor = capability
    device = "cuda" if capability else "cpu"
    with patch.multiple(
        torch.cuda,
        is_available=lambda: bool(capability),
        device_count=lambda: 2 * bool(capability),
        current_device=lambda: 0,
        get_device_capability=lambda device=None: capability,
        get_device_properties=lambda device=None: properties,
    ):
        users, plan = targets(device), Plan()
        pytest.main(["--setup-plan", "-q", "-p", "no:cacheprovider", *tests], plugins=[plan])
        report = {"users": users, "tests": targets(device), "run": [*plan.run], "skipped": plan.skipped}
    print(f"\n{json.dumps(report)}")


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(tuple(map(int, sys.argv[1:split])), sys.argv[split + 1 :])
