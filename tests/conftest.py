"""Fixtures that every test shares: seeds, poisoned memory, devices."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from flash_attn_cute.jit import disk
from flash_attn_cute.runtime import settings
from tests.lib import checks, tiers

# Workers that share the machine's cores leave them to one another, and so do the processes that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Compiled kernels go to a folder of the session, never to the user's. Workers share that of the process above them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _kernels = tempfile.TemporaryDirectory(prefix="flash_attn_cute_tests_")
    os.environ["FLASH_ATTN_CUTE_CACHE_DIR"] = _kernels.name

# Tests name the backend that they are about; no call of theirs starts a check of the GPU.
os.environ.setdefault("FLASH_ATTN_CUTE_SELFCHECK", "0")

hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("another seed", hypothesis.settings.get_profile("default"), derandomize=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=0.3, help="how long to draw random calls a configuration")
    parser.addoption("--fuzz-seed", type=int, default=0, help="what random calls are drawn from; 0 draws the same ever")
    parser.addoption("--all-configurations", action="store_true", help="all that compiles, and rare calls")
    parser.addoption("--all-bugs", action="store_true", help="execute all bugs planted in kernels, not some")
    parser.addoption("--repetitions", type=int, default=20, help="how often to repeat what must give the same bits")


def pytest_configure(config: pytest.Config) -> None:
    """Draws of a run are those of any other run, unless it names a seed: a failure is the change's, not chance."""
    checks.fuzz_seed = config.getoption("--fuzz-seed")
    hypothesis.settings.load_profile("another seed" if checks.fuzz_seed else "default")


# What tests of a folder do, by the marker that chooses them.
FOLDERS = {
    "compile": "compiles",
    "blackwell": "interprets",
    "hopper": "interprets",
    "lab": "lab",
    "distributed": "ranks",
    "docs": "docs",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by their folder and notes down the files of all, before options choose among tests.

    Folders of many short tests come last, so that workers end together: the longest test of all is in numerics.
    """
    config.stash[tiers.COLLECTED] = {item.path for item in items}
    if not (config.getoption("--all-configurations") or config.getoption("--all-bugs")):
        rare = [item for item in items if item.get_closest_marker("rare")]
        config.hook.pytest_deselected(items=rare)
        items[:] = [item for item in items if item not in set(rare)]
    items.sort(key=lambda item: FOLDERS.get(item.path.parent.name) in ("compiles", "interprets", "lab"))
    for item in items:
        if item.path.parent.name in FOLDERS:
            item.add_marker(FOLDERS[item.path.parent.name])


def pytest_collection_finish() -> None:
    """Collects garbage rarely, and not among the modules that are imported by now.

    Parsing and interpreting PTX makes many objects, and collections by default cost more than a third of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_report_header() -> str:
    """Names the architecture whose kernels the GPU tests call."""
    return f"kernels: {checks.GPU_ARCHITECTURE or 'none, without a GPU that has any'}"


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """How long a test may go on drawing."""
    seconds: float = request.config.getoption("--fuzz-seconds")
    return seconds


@pytest.fixture
def all_bugs(request: pytest.FixtureRequest) -> bool:
    """Whether every planted bug is to be executed."""
    every: bool = request.config.getoption("--all-bugs")
    return every


@pytest.fixture
def repetitions(request: pytest.FixtureRequest) -> int:
    """How often a test is to repeat what must give the same bits."""
    count: int = request.config.getoption("--repetitions")
    return count


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Every tensor that torch would leave uninitialised starts as NaN, so that an unwritten element shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _settings_reread() -> Iterator[None]:
    """Environment variables are read anew, before the test and after it."""
    for setting in (settings.check_data, settings.nvtx):
        setting.cache_clear()
    yield
    for setting in (settings.check_data, settings.nvtx):
        setting.cache_clear()


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device this machine has."""
    kind: str = request.param
    return kind


@pytest.fixture
def made_in_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets modes of a test see how tables are made, which is else done where there are none."""
    monkeypatch.setattr("flash_attn_cute.runtime.kept.outside", lambda make, device: make())


NAME = "0123456789abcdef" * 4
IDENTITY = {"kind": "a kernel", "config": {"tile": 64}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, which has one entry, of that name and identity."""
    path = tmp_path / "kernels"
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(path))
    with disk.Folder(path) as opened:
        opened.write(NAME, IDENTITY, b"code")
    return path


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets benchmarks on a CPU measure its ceilings by small products and copies."""
    from benchmarks import work

    monkeypatch.setitem(work._GEMM_SIZE, "cpu", 256)
    monkeypatch.setitem(work._COPY_BYTES, "cpu", 1 << 20)
