"""Bugs planted in the Blackwell forward kernel are found, each by what the table of ``tests.sm100_bugs`` says."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ptx, sm100_bugs, test_sm100
from tests.checks import random_call
from tests.oracle import Call
from tests.sm100_bugs import FORWARD, Bug, Code, forward_barriers, page, table
from tools.ptx_lint import lint

SEEDS = 8  # schedules, at most, under which a bug is to show


def rising(lengths_q: list[int], lengths_k: list[int], **options: Any) -> Call:
    """Of blocks of keys, which are worked on from the last to the first, each has larger scores than the one before."""
    call = random_call(lengths_q, lengths_k, packed=False, dtype=torch.bfloat16, **options)
    with torch.no_grad():
        call.q[:, ::3] *= 8
        call.k *= torch.linspace(4, 0.1, call.k.shape[1], dtype=call.k.dtype)[:, None, None]
    return call


PLAIN: dict[str, Any] = {"head_dim": 64, "nheads": 1, "dtype": torch.bfloat16}
# As small as what they show allows; one CTA has all heads.
CALLS: dict[str, Callable[[], Call]] = {
    "d64": lambda: rising([130], [200], head_dim=64, nheads=2),
    "one": lambda: rising([130], [100], head_dim=64, nheads=1),
    "short": lambda: rising([130], [100], head_dim=64, nheads=4),  # tiles of one block
    "long": lambda: random_call([130], [600], packed=False, **PLAIN),  # more blocks than stages
    "packed": lambda: random_call([130, 20], [130, 300], **PLAIN),
    "d128": lambda: rising([130], [100], head_dim=128, nheads=1),
    "d192": lambda: rising([130], [100], head_dim=192, head_dim_v=128, nheads=2),
    "d256": lambda: rising([128], [260], head_dim=256, nheads=1),
}


@pytest.fixture(autouse=True)
def _one_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_sm100, "NUM_SMS", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what is compiled."""
    return tmp_path_factory.mktemp("kernels")


@functools.cache
def code_of(config: Any, folder: Path) -> Code:
    return Code(test_sm100.text_of(config, folder), "ForwardSm100", forward_barriers(config))


def call_of(name: str) -> tuple[Call, Any]:
    """A call and its configuration."""
    torch.manual_seed(0)
    call = CALLS[name]()
    return call, test_sm100.planned(call)[0]


def ends_well(call: Call, folder: Path, program: ptx.Program, seed: int, lags: ptx.Lagging) -> bool:
    try:
        test_sm100.check(call, folder, random.Random(seed), program, lags)
    except (ptx.FaultError, AssertionError):
        return False
    return True


@pytest.mark.parametrize("bug", FORWARD, ids=str)
def test_planted(bug: Bug, folder: Path) -> None:
    assert bug.lint or bug.shows
    call, config = call_of(bug.call)
    text = code_of(config, folder).with_bug(bug)
    if bug.lint:
        assert bug.lint in {finding.rule for finding in lint(text)}
    if bug.shows:
        program = ptx.Program(text)
        assert not all(ends_well(call, folder, program, seed, bug.lags) for seed in range(SEEDS))


@pytest.mark.parametrize("name", CALLS)
def test_without_a_bug(name: str, folder: Path) -> None:
    """The same calls end well, whoever lags, and the lint finds nothing."""
    call, config = call_of(name)
    text = code_of(config, folder).text
    assert not lint(text)
    program = ptx.Program(text)
    for lags in {bug.lags for bug in FORWARD if bug.call == name}:
        test_sm100.check(call, folder, random.Random(0), program, lags)


def test_the_table() -> None:
    """It is in the docs as it is here."""
    assert len(FORWARD) >= 25
    assert len({bug.text for bug in FORWARD}) == len(FORWARD)
    assert table() in sm100_bugs.PAGE.read_text()
    assert page(sm100_bugs.PAGE.read_text()) == sm100_bugs.PAGE.read_text(), "python -m tests.sm100_bugs writes it"


def test_what_does_not_fit_is_an_error(folder: Path) -> None:
    """A bug is never planted in another place, or in fewer of them, without anyone's notice."""
    code = code_of(call_of("d64")[1], folder)
    with pytest.raises(ValueError, match=r"tcgen05.dealloc .* of warp 12: expected 2, got those of lines \[\d+\]"):
        code.find(2, "tcgen05.dealloc", by=12)
    with pytest.raises(ValueError, match="expected 1, got those of lines \\[\\]"):
        code.waits(1, by=0, barrier="k.full")
    with pytest.raises(ValueError, match="128 fits 0 times, not once"):
        code.rewritten(code.find(1, "tcgen05.dealloc", by=12), "128", "256")
