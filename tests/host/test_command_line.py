"""Wrong arguments of commands: each is refused in a line that names it, without a traceback."""

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flash_attn_cute.runtime.command_line import run_command
from lab import prose
from tests.lib.refusals import pairs

WORKLOAD = ("--device", "cpu", "--dtype", "float32", "--seqlen", "4", "--batch", "1", "--heads", "2", "--head-dim", "8")


def _main_of(command: str) -> Callable[[list[str]], int]:
    """The function that a command runs, which is a package or a module."""
    module = importlib.import_module(command)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{command}.__main__")
    main: Callable[[list[str]], int] = module.main
    return main


REFUSED = """
benchmarks packed --cases [
    argument --cases: expected a regular expression, got '['
benchmarks context-parallel --cases [
    argument --cases: expected a regular expression, got '['
benchmarks packed --device cuda
    argument --device: expected cpu, as PyTorch sees no GPU, got cuda
benchmarks forward
    argument suite: expected packed or sparse-tables, as PyTorch sees no GPU
benchmarks packed --out /dev/null/x
    argument --out: expected a folder, got '/dev/null/x': Not a dir
benchmarks context-parallel --record /dev/null
    argument --record: /dev/null is no record of ranks (JSON
benchmarks context-parallel --ranks 0
    argument --ranks: expected a number, 1 or more, got '0'
benchmarks.plot /dev/null
    argument results: /dev/null is no record of a suite (JSONDecodeError:
benchmarks.host calls --device tpu
    argument --device: expected cpu or cuda, got 'tpu'
benchmarks.host calls --device cuda:9
    argument --device: expected one of 0 GPUs or cpu, got 'cuda:9'
benchmarks.host calls --rounds 0
    argument --rounds: expected a number, 1 or more, got '0'
benchmarks.gradient_errors --rows 40
    argument --rows: expected a multiple of 16, got 40
benchmarks.gradient_errors --kernels
    argument --kernels: expected a GPU, and PyTorch sees none
benchmarks.gradient_errors --only x
    argument --only: expected with --kernels
benchmarks.training_curve --steps 0
    argument --steps: expected a number, 1 or more, got '0'
benchmarks.trees
    the following arguments are required: old
benchmarks.trees /dev
    argument old: expected a folder that has the package, got
benchmarks.trees ROOT /dev
    argument new: expected a folder that has the package, got
benchmarks.trees ROOT --cases 16x127
    argument --cases: no row matches '16x127'
lab.bugs nope
    unrecognized arguments: nope
lab.emulator -- FILE.py
    expected a Hopper GPU, and PyTorch sees none
lab.emulator -- -m
    argument command: expected a module behind -m
lab.lint /nowhere
    argument files: expected a file, got '/nowhere'
lab.prose /nowhere
    argument PATH: expected a file, got '/nowhere'
examples.pretrain --length 0
    argument --length: expected a number, 1 or more, got '0'
flash_attn_cute.selfcheck --families (
    argument --families: expected a regular expression, got '('
flash_attn_cute.selfcheck --device -1
    argument --device: expected a number, 0 or more, got '-1'
flash_attn_cute.kernels describe sm90 backward --d 64 --rows -1
    argument --rows: expected a number, 0 or more, got '-1'
flash_attn_cute.profile ncu --skip -1
    argument --skip: expected a number, 0 or more, got '-1'
flash_attn_cute.profile workload --heads two
    argument --heads: expected a number, 1 or more, got 'two'
flash_attn_cute.profile workload --heads 0
    argument --heads: expected a number, 1 or more, got '0'
flash_attn_cute.profile workload --seqlen -3
    argument --seqlen: expected a number, 1 or more, got '-3'
flash_attn_cute.profile workload --documents 4,0
    argument --documents: expected a number, 1 or more, got '0'
flash_attn_cute.profile workload --documents 1,,2
    argument --documents: expected a number, 1 or more
flash_attn_cute.sparsity plot documents --document 0
    argument --document: expected a number, 1 or more
flash_attn_cute.sparsity plot causal --seqlen 0
    argument --seqlen: expected a number, 1 or more
flash_attn_cute.sparsity plot causal --against spt --out a.png
    argument --out: expected a .gif with
"""


@pytest.mark.parametrize(("command", "said"), pairs(REFUSED))
def test_wrong_arguments(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    module, *arguments = command.replace("ROOT", str(prose.ROOT)).split()
    with pytest.raises(SystemExit) as stopped:
        _main_of(module)(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


FAILING = """
flash_attn_cute.profile workload WORKLOAD --heads-k 3
    k: expected a number of heads
flash_attn_cute.profile timeline WORKLOAD --backend x
    backend: expected None or one of
flash_attn_cute.profile timeline WORKLOAD --calls 1 --out OUT
    Format 'nope' is not
flash_attn_cute.sparsity plot dilated --step 0 --out OUT
    step: expected at least 1
flash_attn_cute.sparsity plot causal --seqlen 256 --out OUT
    Format 'nope' is not
"""


@pytest.mark.parametrize(("command", "said"), pairs(FAILING))
def test_what_the_package_refuses(command: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    command = command.replace("WORKLOAD", " ".join(WORKLOAD)).replace("OUT", str(tmp_path / "picture.nope"))
    module, *arguments = command.split()
    assert _main_of(module)(arguments) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("flash_attn_cute.sparsity", ("plot", "causal", "--seqlen", "256")),
        ("flash_attn_cute.profile", ("timeline", *WORKLOAD, "--calls", "1")),
    ],
)
def test_pictures_are_where_the_command_says(
    command: str, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Matplotlib appends a suffix to names that have none."""
    pytest.importorskip("matplotlib")
    assert _main_of(command)([*arguments, "--out", str(tmp_path / "picture")]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path}/picture.png\n")
    assert (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(
    "command",
    [
        "flash_attn_cute.kernels describe sm90 forward --d 64",
        "flash_attn_cute.kernels describe --help",
        "flash_attn_cute.jit list",
        "flash_attn_cute.selfcheck",
    ],
)
@pytest.mark.parametrize("buffering", [-1, 1])
def test_a_command_ends_quietly_when_its_reader_has_gone(
    command: str, buffering: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader is one like ``| head``; the buffer is large or, as under PYTHONUNBUFFERED, none but a line."""
    reader, writer = os.pipe()
    os.close(reader)
    module, *arguments = command.split()
    main = _main_of(module)
    monkeypatch.setattr("flash_attn_cute.selfcheck.__main__.gpu_of", print)
    with os.fdopen(writer, "w", buffering) as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as ended:
            run_command(lambda: main(arguments))
    assert ended.value.code == 128 + signal.SIGPIPE
    assert not capsys.readouterr().err


def test_modules_with_a_command_line_run_as_commands() -> None:
    """Without that ``python -m`` would end without a word."""
    modules = {str(path): (prose.ROOT / path).read_text() for path in prose.tracked() if path.suffix == ".py"}
    commands = {name for name, code in modules.items() if re.search(r"^def main\(", code, re.MULTILINE)}
    assert "benchmarks/over_ranks.py" in commands
    assert {name for name in commands if '__name__ == "__main__"' not in modules[name]} == set()
    of_users = {name for name in commands if name.startswith("flash_attn_cute/")}
    assert {name for name in of_users if "    run_command(main)" not in modules[name]} == {
        "flash_attn_cute/selfcheck/worker.py"  # whose reader is the package's own
    }
