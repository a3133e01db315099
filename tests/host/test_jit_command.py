"""The command ``python -m flash_attn_cute.jit``: what it lists, clears and warms."""

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from flash_attn_cute.jit import __main__ as command
from flash_attn_cute.jit import cache, disk, key
from flash_attn_cute.jit import warm as warming
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.backward.backward_config import backward_config
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from flash_attn_cute.kernels.sm90.forward_config import forward_config
from tests.conftest import NAME
from tests.lib.kernel_processes import CONFIG, Compiler

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

Capture = pytest.CaptureFixture[str]


def test_list(compiler: Compiler, tmp_path: Path, capsys: Capture) -> None:
    assert command.main(["list"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/kernels: 0 kernels, 0.0 MB\n"
    assert not (tmp_path / "kernels").exists()

    cache.kernel(CONFIG)
    with disk.Folder(tmp_path / "kernels") as opened:
        opened.write("e" * 64, {"kind": "Forward", "config": {"d": 64}}, b"code")
    (tmp_path / "kernels" / f"{'f' * 64}.kernel").write_text("damaged")
    (tmp_path / "kernels" / "notes.txt").write_text("not an entry")
    assert command.main(["list"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "3 kernels" in first
    assert len(lines) == 3
    (ours,) = (line for line in lines if "ForwardConfig" in line)
    for part in ("sm90.forward_config", "dtype=bfloat16", "tile_d=64", "DSL 4.8", "CUDA 1", time.strftime("%Y-%m-%d")):
        assert part in ours
    assert "packed" not in ours
    for part in ("unusable", "of another version of the package"):
        assert sum(part in line for line in lines) == 1


def test_clear(folder: Path, capsys: Capture) -> None:
    """Other files stay: the variable may name a home directory."""
    ours = [f"{NAME}.kernel", f"{NAME}.lock", f"{NAME}.{'0' * 16}.tmp"]
    others = ["notes.txt", "short.kernel", f"{NAME}.kernel.bak", f"x{NAME}.kernel", f"{NAME}.tmp"]
    for name in ours + others:
        (folder / name).touch()
    assert command.main(["clear"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)
    assert capsys.readouterr().out == f"{folder}: 1 kernels removed\n"
    shutil.rmtree(folder)
    assert command.main(["clear"]) == 0
    assert capsys.readouterr().out == f"{folder}: 0 kernels removed\n"


def test_warm(warm: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(warm))
    arguments = ["warm", "--head-dims", "64", "40", "--masks", "full", "--layouts", "dense", "--jobs", "1"]
    assert command.main([*arguments, "--passes", "forward"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("was there")
    assert "ForwardConfig" in line
    assert "tile_d=64" in line


def test_a_pass_in_one_line() -> None:
    lines = [
        command.describe(dataclasses.asdict(backward_config("bfloat16", 64, 64, Features(dlse=x, deterministic=True))))
        for x in (False, True)
    ]
    assert lines[1] == lines[0].replace(" deterministic", " dlse deterministic") != lines[0]
    assert lines[0].startswith("dtype=bfloat16 tile_d=64")


@pytest.mark.slow
def test_warm_insists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Where calls would go on with a warning, there is nothing left to do."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(tmp_path / "file"))
    one = ["--head-dims", "64", "--masks", "full", "--layouts", "dense", "--passes", "forward"]
    assert command.main(["warm", *one]) == 1
    assert "not kept on disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (cache.NotKeptWarning("not kept on disk"), "not kept on disk\n"),
        (BrokenProcessPool("terminated abruptly"), "--jobs: a process that compiled was killed"),
    ],
)
def test_the_first_error_ends_warming(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    begun: list[Any] = []
    is_over = threading.Event()

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int, *others: Any) -> None:
            super().__init__(workers)

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_over.set()
            super().shutdown(wait)

    def fail(config: Any) -> Any:
        begun.append(config)
        if len(begun) > 1:
            assert is_over.wait(60)
        raise error

    monkeypatch.setattr(warming, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(warming, "_warm", fail)
    assert command.main(["warm", "--jobs", "1"]) == 1
    assert capsys.readouterr().err.startswith(said)
    assert len(begun) <= 2


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_command(sent: signal.Signals, tmp_path: Path) -> None:
    """They hold its output open as long as they live. An interrupt, which reaches all processes, ends it quietly."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import signal, sys, time
from flash_attn_cute.jit import cache, __main__ as command

def kernel(config):
    print("compiling", flush=True)
    time.sleep(60)

cache.kernel = kernel
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    sys.exit(command.main(["warm", "--jobs", "1"]))
"""
    )
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script)], start_new_session=True, **output) as warming:
        assert warming.stdout is not None
        assert warming.stdout.readline() == "compiling\n"
        (os.killpg if sent == signal.SIGINT else os.kill)(warming.pid, sent)
        found, errors = warming.communicate(timeout=20)
    assert found == ""
    if sent == signal.SIGINT:
        assert (warming.returncode, errors) == (130, "")


def test_what_is_warmed() -> None:
    def configs(*arguments: str) -> list[Any]:
        return command.configurations(command.parser().parse_args(["warm", *arguments]))

    common: list[tuple[int, int, Features]] = [
        (d, d, Features(packed=packed, right=causal))
        for d in (64, 128)
        for packed in (False, True)
        for causal in (False, True)
    ]
    keys = (1, 2048, 1 << 20)  # kernels of short, of other and of long sequences
    backward = {backward_config("bfloat16", *options, keys=number) for options in common for number in keys}
    assert set(configs()) == {*(forward_config("bfloat16", *options) for options in common), *backward}
    assert set(configs("--passes", "backward")) == backward
    dense = ("--masks", "full", "--layouts", "dense")
    wide = ("--head-dims", "256", *dense, "--passes", "backward")
    assert configs(*wide) == [backward_config("bfloat16", 256, 256, Features())]
    assert {config.group for config in configs("--passes", "forward", "--groups", "1", "8")} == {1, 8}
    one = ("--masks", "window", "--layouts", "dense", "--dtypes", "float16", "--passes", "forward")
    window = Features(left=True, right=True)
    assert configs("--head-dims", "192:128", *one) == [forward_config("float16", 192, 128, window)]
    features = dataclasses.replace(window, packed=True, seqused_q=True, sink=True, zero_padding=False)
    assert configs("--head-dims", "8", "--features", "seqused_q", "sink", "no_zero_padding", *one) == [
        forward_config("float16", 8, 8, features)
    ]
    of_one_pass = configs("--head-dims", "64", *dense, "--features", "sink", "dlse", "grouped", "deterministic")
    assert of_one_pass == [
        forward_config("bfloat16", 64, 64, Features(sink=True)),
        backward_config("bfloat16", 64, 64, Features(dlse=True, grouped=True, deterministic=True)),
    ]
    for low, deterministic in itertools.product((False, True), repeat=2):
        features = Features(block_mask=True, deterministic=deterministic or low)
        wanted = backward_config("bfloat16", 128, 128, features, low_contention=low)
        assert wanted in configs(*dense, "--features", "block_mask", *(["deterministic"] if deterministic else []))
    everything = configs(
        *("--passes", "forward", "--head-dims", *map(str, HEAD_DIMS)),
        *("--dtypes", "bfloat16", "float16", "--masks", *command.MASKS),
    )
    assert len(everything) == len(HEAD_DIMS) * 2 * 4 * 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--head-dims", value) for value in ("0", "12", "264", "64:", "64:64:64", "d")),
        *(("--groups", value) for value in ("0", "3", "128", "x")),
        ("--jobs", "0"),
        ("--masks", "round"),
    ],
)
def test_wrong_options(option: str, value: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parser().parse_args(["warm", option, value])
    assert stopped.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        *(([name], "0", "while it is 0") for name in ("list", "warm", "clear")),
        *(([name], "here", "an absolute path") for name in ("list", "warm", "clear")),
        *(([name], "unsafe", "can be written by others") for name in ("list", "clear")),
        (["warm", "--passes", "bias_gradient"], None, "expected bias_gradient with --features bias"),
        (["warm", "--passes", "forward", "bias_gradient"], None, "expected bias_gradient with --features bias"),
        (["bundle", "/dev/null/bundles"], None, "nvidia-cutlass-dsl, which cannot be imported"),
    ],
)
def test_refusals(
    arguments: list[str],
    variable: str | None,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Commands name what is wrong, and do nothing."""
    if variable == "unsafe":
        folder.chmod(0o777)
    elif variable is not None:
        monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", variable)
    if arguments[0] == "bundle":
        monkeypatch.setitem(sys.modules, "cutlass", None)
        key._compiler.cache_clear()
    assert command.main(arguments) == 1
    assert said in capsys.readouterr().err
    assert (folder / f"{NAME}.kernel").exists()
