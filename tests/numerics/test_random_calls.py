"""The command that makes random calls: it passes on plain PyTorch, and finds what it is there to find."""

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_cute import explain
from flash_attn_cute.backends.base import Gradients
from flash_attn_cute.calls import dispatch
from lab.emulator import mailbox
from lab.emulator.mailbox import Fault
from tests.lib import checks, random_calls
from tests.lib.checks import bits, draws, longest, needs_kernels

SMALL = ["--backend", "portable", "--longest", "40", "--seed", "1"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Calls are too small for several, which would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_plain_pytorch_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert random_calls.main([*SMALL, "--calls", "1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "seed 1"
    assert lines == [f"{kind}: 1 calls, 1 three times, 0 failed" for kind in random_calls.KINDS]


@needs_kernels
@pytest.mark.parametrize("kind", random_calls.KINDS)
def test_kernels_pass(kind: str, fuzz_seconds: float) -> None:
    """For as long as --fuzz-seconds says."""
    for number, _ in draws(kind, 2 * fuzz_seconds, least=5):
        random_calls.check(kind, number, checks.fuzz_seed, "sm90", 1100)


@pytest.mark.slow
def test_processes_share_calls() -> None:
    command = [sys.executable, "-m", "tests.lib.random_calls", *SMALL, "--calls", "3", "--processes", "2"]
    done = subprocess.run(
        [*command, "--kinds", "d64 (dense|sink)$"], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "seed 1",
        "process 0: 3 calls, 1 three times, 0 failed",
        "process 1: 3 calls, 1 three times, 0 failed",
        "d64 dense: 3 calls, 1 three times, 0 failed",
        "d64 sink: 3 calls, 1 three times, 0 failed",
    ]


Change = Callable[[Gradients, int], Gradients]


def _one_element_off(found: Gradients, count: int) -> Gradients:
    found.dq[-1, -1, -1, -1] += 1
    return found


def _padding_not_zero(found: Gradients, count: int) -> Gradients:
    found.dk[0, 0, 0] = 1e-4  # a row before the first sequence
    return found


def _other_bits(found: Gradients, count: int) -> Gradients:
    bits(found.dv).view(-1)[0] ^= count % 2
    return found


@pytest.mark.parametrize(
    ("kind", "change", "reported", "failed"),
    [
        ("d64 dense", _one_element_off, "dq: error", 4),
        ("d64 packed", _padding_not_zero, "dk: padding rows are not zero", 4),
        ("d64 dense", _other_bits, "not the same bits three times: dv", 1),
    ],
)
def test_wrong_results_are_reported(
    kind: str,
    change: Change,
    reported: str,
    failed: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend, count = dispatch.BACKENDS["portable"], 0
    backward = backend.backward

    def wrong(*given: Any, **needed: Any) -> Gradients:
        nonlocal count
        count += 1
        return change(backward(*given, **needed), count)

    monkeypatch.setattr(backend, "backward", wrong)
    assert random_calls.main([*SMALL, "--calls", "4", "--kinds", f"^{kind}$"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"{kind}: 4 calls, 1 three times, {failed} failed"
    assert err.count("FAILED") == err.count(reported) == failed
    # The call alone fails again.
    again = re.findall(r"again: the same command with (.*)", err)[-1]
    arguments = again.replace(f"'^{kind}$'", "KIND").split()
    arguments[arguments.index("KIND")] = f"^{kind}$"
    assert random_calls.main([*SMALL, *arguments]) == 1
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize("source", [checks.draws, checks.drawn])
def test_another_seed_draws_others(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def first() -> float:
        return next(source("a case", 0.0))[1].random()

    expected = first()
    assert first() == expected
    monkeypatch.setattr(checks, "fuzz_seed", checks.fuzz_seed + 1)
    assert first() != expected


def test_unknown_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        random_calls.main(["--kinds", "d63"])
    assert ended.value.code == 2
    assert "--kinds: expected some of ['d32 dense'" in capsys.readouterr().err


# Passes that pairs of CTAs compute, if sequences are long and no mask or bias is there.
PAIRS: dict[str, set[str]] = {
    "d32": set(),
    "d64": set(),
    "d96": {"backward"},
    "d128": {"backward"},
    "d192x128": {"forward", "backward"},
    "d192": {"backward"},
    "d256": {"forward", "backward"},
}


@pytest.mark.parametrize("heads", random_calls.HEADS)
def test_blackwells_kernels_serve_all_kinds(heads: str) -> None:
    """All their tiles among them; on any machine: nothing is computed."""
    found = set()
    for feature, number in itertools.product(random_calls.FEATURES, range(2)):
        call = random_calls.drawn(f"{heads} {feature}", random.Random(number), "cpu", 4096)
        given = {name: value for name, value in vars(replace(call, shown=None)).items() if value is not None}
        if call.cu_seqlens_q is not None:
            given |= longest(call)
        explained = explain(**given, gpu="sm100", backend="sm100")
        assert explained.backend == "sm100", explained
        passes = [planned.config for planned in (explained.forward, explained.backward) if planned is not None]
        found |= {(config.pass_name, config.ctas_a_tile) for config in passes}
    single: set[tuple[str, int]] = {("forward", 1), ("backward", 1)}
    assert found == single | {(name, 2) for name in PAIRS[heads]}


def test_faults_of_emulated_kernels_are_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where results are right. A GPU that answers no more ends the calls."""
    faults = [[Fault(10, (1, 2, 3), 4, 5, (6, 7, 8))] * 2, [], []]

    def synchronise() -> None:
        if len(faults) == 1:
            raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(random_calls, "check", lambda *_: None)
    monkeypatch.setattr(mailbox, "mailbox", lambda: SimpleNamespace(take_faults=lambda: faults.pop(0)))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronise)
    assert random_calls.main(["--calls", "9", "--kinds", "^d64 dense$"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == ["d64 dense: 3 calls, 1 three times, 2 failed"]
    assert err.count("PTX line 5, CTA (1, 2, 3), thread 4: tcgen05.dealloc") == 1
    assert err.count("unspecified launch failure") == 1
