"""Wrong arguments of commands: each is refused in a line that names it, without a traceback."""

import importlib
from pathlib import Path

import pytest
import torch

WORKLOAD = ("--device", "cpu", "--dtype", "float32", "--seqlen", "4", "--batch", "1", "--heads", "2", "--head-dim", "8")


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("benchmarks", "packed --cases [", "argument --cases: expected a regular expression, got '['"),
        ("benchmarks", "context-parallel --cases [", "argument --cases: expected a regular expression, got '['"),
        ("benchmarks", "packed --device cuda", "argument --device: expected cpu, as PyTorch sees no GPU, got cuda"),
        ("flash_attn_cute.selfcheck", "--families (", "argument --families: expected a regular expression, got '('"),
        ("flash_attn_cute.selfcheck", "--device -1", "argument --device: expected a number, 0 or more, got '-1'"),
        ("flash_attn_cute.profile", "ncu --skip -1", "argument --skip: expected a number, 0 or more, got '-1'"),
        (
            "flash_attn_cute.profile",
            "workload --heads two",
            "argument --heads: expected a number, 1 or more, got 'two'",
        ),
        ("flash_attn_cute.profile", "workload --documents 1,,2", "argument --documents: expected a number, 1 or more"),
        (
            "flash_attn_cute.sparsity",
            "plot documents --document 0",
            "argument --document: expected a number, 1 or more",
        ),
        ("flash_attn_cute.sparsity", "plot causal --seqlen 0", "argument --seqlen: expected a number, 1 or more"),
    ],
)
def test_wrong_arguments(
    command: str, arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"{command}.__main__").main(arguments.split())
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("flash_attn_cute.profile", ("workload", *WORKLOAD, "--heads-k", "3"), "k: expected a number of heads"),
        ("flash_attn_cute.profile", ("timeline", *WORKLOAD, "--backend", "x"), "backend: expected None or one of"),
        ("flash_attn_cute.profile", ("timeline", *WORKLOAD, "--calls", "1", "--out", "OUT"), "Format 'nope' is not"),
        ("flash_attn_cute.sparsity", ("plot", "dilated", "--step", "0", "--out", "OUT"), "step: expected at least 1"),
        ("flash_attn_cute.sparsity", ("plot", "causal", "--seqlen", "256", "--out", "OUT"), "Format 'nope' is not"),
    ],
)
def test_what_the_package_refuses(
    command: str, arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    given = [str(tmp_path / "picture.nope") if argument == "OUT" else argument for argument in arguments]
    assert importlib.import_module(f"{command}.__main__").main(given) == 1
    assert said in capsys.readouterr().err
