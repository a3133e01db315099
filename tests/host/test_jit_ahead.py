"""A kernel that is needed next, compiled by another process beside the one that is needed now."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flash_attn_cute.jit import ahead, cache, disk, key
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.forward_config import forward_config
from tests.lib.kernel_processes import CONFIG, Compiler

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

NEXT = forward_config("bfloat16", 64, 64, Features(packed=True))


class Process:
    """Stands in for the process: leaves the kernel in the folder, or fails."""

    def __init__(self, folder: Path, code: bytes) -> None:
        self.folder, self.code, self.works = folder, code, True
        self.begun = 0

    def run(self, command: list[str], **options: Any) -> None:
        """Compiles ``NEXT``, in no time."""
        self.begun += 1
        assert command == ahead.command(NEXT)
        if self.works:
            identity = key.identity(NEXT)
            with disk.Folder(self.folder) as folder:
                folder.write(key.name(identity), identity, self.code)


@pytest.fixture
def process(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    stand_in = Process(tmp_path / "kernels", compiler.code)
    monkeypatch.setattr(subprocess, "run", stand_in.run)
    monkeypatch.setattr(ahead, "_waiting", {})
    return stand_in


def kernel_beside(needed_next: Callable[[], Any] = lambda: NEXT) -> None:
    with cache.compiling_beside(needed_next):
        cache.kernel(CONFIG)
    ahead.wait(NEXT)


def test_the_next_kernel_is_waited_for(process: Process, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kernel`` itself waits for the process, however long that takes to come to the folder."""
    may_end = threading.Event()

    def late(command: list[str], **options: Any) -> None:
        assert may_end.wait(60)
        process.run(command)

    monkeypatch.setattr(subprocess, "run", late)
    with cache.compiling_beside(lambda: NEXT):
        cache.kernel(CONFIG)
    threading.Timer(0.1, may_end.set).start()
    cache.kernel(NEXT)
    assert (process.begun, compiler.calls) == (1, 1)


@pytest.mark.parametrize("failing", ["process", "its start", "start of a thread"])
def test_what_fails_is_compiled_here(
    failing: str, process: Process, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.works = False
    if failing == "its start":
        monkeypatch.setattr(subprocess, "run", Mock(side_effect=PermissionError("no processes")))
    elif failing == "start of a thread":
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    kernel_beside()
    cache.kernel(NEXT)
    assert (process.begun, compiler.calls) == (failing == "process", 2)


@pytest.mark.parametrize("program", [None, "", "/opt/app/trainer", "python3.12"])
def test_applications_are_not_started_again(
    program: str | None, process: Process, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python is part of an application, that is ``sys.executable``; frozen ones may have any name."""
    monkeypatch.setattr(sys, "executable", program)
    if program == "python3.12":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    kernel_beside()
    assert (process.begun, compiler.calls) == (0, 1)


def test_processes_are_begun_only_where_something_is_compiled(
    process: Process, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.kernel(NEXT)
    kernel_beside()  # the next one is there
    monkeypatch.setattr(cache, "_kernels", {})
    kernel_beside()  # both are in the folder
    kernel_beside()  # in memory
    kernel_beside(lambda: pytest.fail("is asked for the next kernel where nothing is compiled"))
    for each in process.folder.glob("*.kernel"):
        each.unlink()
    monkeypatch.setattr(cache, "_kernels", {})
    kernel_beside(lambda: None)
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", "0")
    kernel_beside()  # would come through the folder
    assert process.begun == 0


def test_the_process_does_without_torch(warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the kernel that is there under the same name, and compiles nothing; files beside it are not imported.

    Bytecode goes where that of its parent does.
    """
    (tmp_path / "pickle.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", "/bytecode")
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(warm))
    *python, program, given = ahead.command(CONFIG)
    program += "\nassert cache.compile_count() == 0 and sys.modules['torch'] is None"
    program += "\nassert sys.dont_write_bytecode and sys.pycache_prefix == '/bytecode'"
    assert python[0] == sys.executable
    done = subprocess.run([*python, program, given], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(ahead, "_waiting", {})
    ahead.begin(CONFIG)
    ahead.wait(CONFIG)
    with disk.Folder(tmp_path / "kernels") as folder:
        code = folder.read(key.name(key.identity(CONFIG)))
    assert code is not None
