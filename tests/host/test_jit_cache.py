"""Compiled kernels in memory and on disk: found again, never trusted blindly, made once. One test needs a GPU."""

import contextlib
import dataclasses
import errno
import gc
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flash_attn_cute.jit import cache, disk, key
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.config import Sm90Config
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig, forward_config
from flash_attn_cute.runtime import settings
from tests.lib.checks import hopper_alone
from tests.lib.kernel_processes import CONFIG, PROCESS, Compiler, outcome, start

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

# As with the GPU that kernels are compiled for, where the compiler would also have them ready for itself.
COLD = """
import itertools
import json
from collections import Counter
from cutlass.base_dsl.compiler import Compiler
from cutlass.cutlass_dsl import tvm_ffi_provider
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.forward_config import forward_config
counts = Counter()
def count(place, name):
    function = getattr(place, name)
    def counted(*args, **keywords):
        counts[name] += 1
        return function(*args, **keywords)
    setattr(place, name, counted)
count(Compiler, "compile")
count(Compiler, "jit")
count(tvm_ffi_provider._aot_support, "export_module_to_bytes")
cache.kernel(forward_config("bfloat16", 64, 64, Features()))
print(json.dumps(counts))
"""


def test_tests_leave_the_users_folder_alone() -> None:
    path = settings.cache_dir()
    assert path is not None
    assert path.name.startswith("flash_attn_cute_tests_")


# Processes


@pytest.mark.slow
def test_processes_compile_once(tmp_path: Path) -> None:
    """The other waits for the one that does, one that comes later finds the kernel, and all have the same one."""
    processes = [start(PROCESS, tmp_path / "kernels") for _ in range(2)]
    outcomes = [outcome(process) for process in processes]
    assert sorted(each.compiles for each in outcomes) == [0, 1]
    later = outcome(start(PROCESS, tmp_path / "kernels"))
    assert later.compiles == 0
    assert later.seconds < 0.5
    (signature,) = {each.signature for each in (*outcomes, later)}
    assert "bfloat16" in signature


@pytest.mark.slow
def test_cold_calls_generate_code_once(tmp_path: Path) -> None:
    process = start(COLD, tmp_path / "kernels", CUTE_DSL_ARCH="sm_90a")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert json.loads(output) == {"compile": 1, "export_module_to_bytes": 1}


def test_threads_compile_once(compiler: Compiler) -> None:
    kernels: list[Any] = []
    threads = [threading.Thread(target=lambda: kernels.append(cache.kernel(CONFIG))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.calls == 1
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_later(
    is_enabled: bool, fails: bool, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a kernel is made, and then as before, whatever came of it."""
    seen = []

    def compile_kernel(config: ForwardConfig) -> bytes:
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("no kernel")
        return compiler(config)

    monkeypatch.setattr(cache, "_compile", compile_kernel)
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="no kernel") if fails else contextlib.nullcontext():
            cache.kernel(CONFIG)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert seen == [False]


def test_forks_collect_garbage_while_the_parent_compiles() -> None:
    """The thread that was to collect it again is not in the child."""
    has_begun, may_end = threading.Event(), threading.Event()

    def compiling() -> None:
        with cache._no_garbage_collection():
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=compiling)
    thread.start()
    has_begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 1)
    _, status = os.waitpid(child, 0)
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()
    assert status == 0


def test_forks_do_not_hold_the_locks_of_their_parents(tmp_path: Path) -> None:
    """Others would wait for a child that outlives a parent which was killed while it compiled."""
    with disk.Folder(tmp_path / "kernels") as folder, folder.lock("0" * 64):
        (lock,) = (tmp_path / "kernels").iterdir()
        child = os.fork()
        if child == 0:
            os._exit(sum(path.exists() and path.samefile(lock) for path in Path("/proc/self/fd").iterdir()))
        _, status = os.waitpid(child, 0)
        with disk.Folder(tmp_path / "kernels") as other, other.lock("0" * 64, waits=False) as is_held:
            assert is_held is False
    assert status == 0


# Kernels out of the folder


def test_kernels_with_one_symbol_are_apart(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object file calls its kernel the same; here two of them differ in rank."""
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(warm))
    monkeypatch.setattr(cache, "_kernels", {})
    before = cache.compile_count()
    packed = cache.kernel(forward_config("float16", 64, 64, Features(packed=True)))
    dense = cache.kernel(CONFIG)
    assert cache.compile_count() == before + 1
    with pytest.raises(TypeError, match=r"Tensor\(\[n0, n1, n2\], float16\)"):
        packed(0)
    with pytest.raises(TypeError, match=r"Tensor\(\[n0, n1, n2, n3\], bfloat16\)"):
        dense(0)


def test_kernels_come_from_the_folder_unless_they_are_damaged(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.kernel(CONFIG)
    path = settings.cache_dir()
    assert path is not None
    (entry,) = path.glob("*.kernel")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1])
    monkeypatch.setattr(cache, "_kernels", {})
    made = cache.kernel(CONFIG)
    assert cache.kernel(CONFIG) is made
    monkeypatch.setattr(cache, "_kernels", {})
    found = cache.kernel(CONFIG)
    assert found is not made
    assert compiler.calls == 2
    for kernel in (made, found):
        with pytest.raises(TypeError, match="bfloat16"):
            kernel(0)
    assert entry.read_bytes() == whole


def test_unsafe_folders_raise(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(disk.UnsafeFolderError, match="FLASH_ATTN_CUTE_CACHE_DIR: the cache folder"):
        cache.kernel(CONFIG)
    assert compiler.calls == 0


@pytest.mark.parametrize("missing", ["home", "folder", "lock", "space"])
def test_failing_disks_cost_a_warning(
    missing: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels"
    if missing == "home":
        for name in ("FLASH_ATTN_CUTE_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    elif missing == "folder":
        path.write_text("a file")
    elif missing == "lock":
        (path / f"{key.name(key.identity(CONFIG))}.lock").mkdir(parents=True)
    else:
        monkeypatch.setattr(disk.Folder, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.warns(cache.NotKeptWarning, match="not kept on disk .*set FLASH_ATTN_CUTE_CACHE_DIR") as warned:
        kernel = cache.kernel(CONFIG)
    assert len(warned) == 1
    assert missing == "home" or str(path) in str(warned[0].message)
    assert cache.kernel(CONFIG) is kernel
    assert compiler.calls == 1


def test_without_locks_kernels_are_kept(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none."""
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    for _ in range(2):
        cache.kernel(CONFIG)
        monkeypatch.setattr(cache, "_kernels", {})
    assert compiler.calls == 1


def test_a_warm_folder_need_not_be_writable(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.kernel(CONFIG)
    monkeypatch.setattr(cache, "_kernels", {})
    # Permissions would not stop root.
    plain = os.open

    def read_only(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return plain(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", read_only)
    cache.kernel(CONFIG)
    assert compiler.calls == 1


def test_the_disk_can_be_left_out(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", "0")
    kernel = cache.kernel(CONFIG)
    assert cache.kernel(CONFIG) is kernel
    assert compiler.calls == 1
    assert not list(tmp_path.iterdir())


def test_edited_sources_are_not_kept(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was compiled after an edit may be of either version."""
    monkeypatch.setattr(key, "_hash_sources", lambda: "another")
    cache.kernel(CONFIG)
    assert not list((tmp_path / "kernels").glob("*.kernel"))


def test_locks_of_editors_are_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emacs marks a file that is being edited by a link to no file; importing the package failed on it."""
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "forward.py"
    source.write_text("pass\n")
    (tmp_path / "kernels" / ".#forward.py").symlink_to("user@host.1234:5678")
    monkeypatch.setattr(key, "_PACKAGE", tmp_path)
    assert key.files_below("kernels") == [source]
    first = key.hash_of(key.files_below("kernels"))
    source.write_text("pass\npass\n")
    assert key.hash_of(key.files_below("kernels")) != first


# Names


def test_every_field_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dataclasses.asdict(CONFIG) | {"features": CONFIG.features}
    others: list[Any] = []
    for field, value in fields.items():
        if field != "features":
            other = "float16" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1
            others.append(ForwardConfig(**fields | {field: other}))
    for flag, value in dataclasses.asdict(CONFIG.features).items():
        features = dataclasses.replace(CONFIG.features, **{flag: not value})
        others.append(dataclasses.replace(CONFIG, features=features))
    names = {key.name(key.identity(config)) for config in (CONFIG, *others)}
    assert len(names) == 1 + len(others)
    monkeypatch.setattr(Sm90Config, "target", "sm_99a")
    assert key.name(key.identity(CONFIG)) not in names


def test_other_kinds_have_other_names() -> None:
    fields = dataclasses.asdict(CONFIG)
    other = dataclasses.make_dataclass("BackwardConfig", list(fields), bases=(Sm90Config,), frozen=True)(**fields)
    assert key.name(key.identity(other)) != key.name(key.identity(CONFIG))


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("importlib.metadata.version", lambda distribution: "4.8.99" if distribution.endswith("cu13") else "4.8.1"),
        ("cutlass.CUDA_VERSION", type("Version", (), {"major": 99, "minor": 0})),
        ("platform.machine", lambda: "riscv64"),
        ("flash_attn_cute.jit.key._processor_features", lambda: "flags : of another processor"),
        ("sys.implementation.cache_tag", "cpython-399"),
        ("flash_attn_cute.jit.key._SOURCES", "another"),
        ("os.environ", {**os.environ, "CUTE_DSL_LINEINFO": "1"}),
    ],
)
def test_sources_compiler_and_host_are_in_the_name(place: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        key._compiler.cache_clear()
        key._host.cache_clear()

    name = key.name(key.identity(CONFIG))
    forget()
    assert key.name(key.identity(CONFIG)) == name
    forget()
    monkeypatch.setattr(place, change)
    changed = key.name(key.identity(CONFIG))
    monkeypatch.undo()
    forget()
    assert changed != name


def test_changed_sources_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    shutil.copytree(key._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(key, "_PACKAGE", package)
    assert key.sources_unchanged()
    with open(package / "calls/ops.py", "a") as file:
        file.write("# says nothing about kernels\n")
    assert key.sources_unchanged()
    for path in ("kernels/common/score.py", "kernels/sm90/forward_config.py", "jit/compile.py", "jit/code.py"):
        before = (package / path).read_text()
        (package / path).write_text(before + "\n")
        assert not key.sources_unchanged()
        (package / path).write_text(before)
    (package / "kernels/new.py").touch()
    assert not key.sources_unchanged()
    (package / "kernels/new.py").unlink()
    (package / "kernels/common/blocks.py").rename(package / "kernels/common/walks.py")
    assert not key.sources_unchanged()
    shutil.rmtree(package)
    assert not key.sources_unchanged()


# On a GPU

CALL = """
import json, time
import cutlass.cute.runtime, torch, tvm_ffi
from flash_attn_cute import flash_attn_func
from flash_attn_cute.jit import cache
torch.manual_seed(0)
q, k, v = (torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
out = flash_attn_func(q, k, v, backend="sm90")
torch.cuda.synchronize()
seconds = time.perf_counter() - start
print(json.dumps([cache.compile_count(), seconds, out.view(torch.int16).cpu().numpy().tobytes().hex()]))
"""


@hopper_alone("the other process calls its kernels, and their time is limited")
def test_first_call_of_a_warm_process(tmp_path: Path) -> None:
    """It gives the bits of the process that compiled the kernel, and soon."""
    cold, warm = (outcome(start(CALL, tmp_path / "kernels")) for _ in range(2))
    assert (cold.compiles, warm.compiles) == (1, 0)
    assert cold.signature == warm.signature
    assert warm.seconds < 0.5
