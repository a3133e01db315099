"""Fixtures of the tests of compiled kernels: a folder that has one, and stand-ins for the compiler and for a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.cute import counters
from flash_attn_cute.jit import cache, disk, key
from tests.lib.compiled import code_for
from tests.lib.kernel_processes import CONFIG, Compiler
from tests.lib.launches import Launched


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the kernel of ``CONFIG``."""
    path, identity = tmp_path_factory.mktemp("home") / "kernels", key.identity(CONFIG)
    with disk.Folder(path) as folder:
        folder.write(key.name(identity), identity, code_for(CONFIG).host)
    return path


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """A process that has no kernel in memory, an empty folder of its own, and the stand-in for the compiler."""
    stand_in = Compiler(code_for(CONFIG).host)
    monkeypatch.setattr(cache, "_compile", stand_in)
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    return stand_in


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Every call of compiled code; tensors on the CPU pass for those of a GPU."""
    seen: list[Launched] = []

    def kernel(config: Any) -> Callable[[Any], None]:
        return lambda arguments: seen.append(Launched(config, arguments))

    monkeypatch.setattr(cache, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    properties = SimpleNamespace(multi_processor_count=132, major=10, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(counters._counters, "kept", {(None, 0): torch.zeros(2, dtype=torch.int32)})
    return seen
