"""Fixtures of the tests of compiled kernels: a folder that has one, and a stand-in for the compiler."""

from pathlib import Path

import pytest

from flash_attn_cute.jit import cache, disk, key
from tests.lib.kernel_processes import CONFIG, PROCESS, Compiler, Warm, outcome, start


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    folder = tmp_path_factory.mktemp("home") / "kernels"
    processes = [start(PROCESS, folder) for _ in range(3)]
    return Warm(folder, [outcome(process) for process in processes])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm: Warm) -> Compiler:
    """A process that has no kernel in memory, an empty folder of its own, and the stand-in for the compiler."""
    with disk.Folder(warm.folder) as folder:
        code = folder.read(key.name(key.identity(CONFIG)))
    assert code is not None
    stand_in = Compiler(code)
    monkeypatch.setattr(cache, "_compile", stand_in)
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    return stand_in
