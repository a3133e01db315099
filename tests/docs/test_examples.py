"""The examples, a few steps of each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import context_parallel

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_finetune() -> None:
    printed = run("finetune.py", "--steps", "4", "--rows", "512")
    assert re.search(r"flash_attn_cute: held-out loss .* bytes/s\n +eager: held-out", printed)
    assert printed.endswith("PASSED\n")


@pytest.mark.slow
def test_pretrain(tmp_path: Path) -> None:
    sizes = ["--width", "64", "--layers", "1", "--length", "96", "--tokens", "256", "--steps", "6"]
    printed = run("pretrain.py", *sizes, "--out", str(tmp_path / "out"))
    losses = [[float(x) for x in pair] for pair in re.findall(r"loss (\S+) packed, (\S+) padded", printed)]
    assert len(losses) == 6
    assert all(abs(packed - padded) < 0.01 for packed, padded in losses)
    assert losses[-1][0] < losses[0][0]
    assert "resumed: bitwise equal" in printed


@pytest.mark.slow
def test_sparse_attention() -> None:
    assert run("sparse_attention.py").endswith("PASSED\n")


@pytest.mark.slow
def test_long_context() -> None:
    printed = run("long_context.py", "--tokens", "1500", "--documents", "3", "--heads", "2")
    assert "1500 tokens in 3 documents" in printed
    assert printed.endswith("PASSED\n")


@pytest.mark.slow
def test_context_parallel_runs_alone() -> None:
    assert "step 1: loss" in run("context_parallel.py", "--tokens", "64", "--longest", "32", "--steps", "2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "64", "--heads", "3"], "--heads: expected an even --width // --heads, .* got 21"),
        (["--width", "2", "--heads", "4"], "--heads: expected an even --width // --heads, .* got 0"),
        (["--heads", "4", "--heads-k", "3"], "--heads-k: expected a divisor of the 4 heads, got 3"),
    ],
)
def test_context_parallel_refuses_heads(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        context_parallel.options(options)
    assert re.search(message, capsys.readouterr().err)
