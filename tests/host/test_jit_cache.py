"""Compiled kernels on disk: found again, never trusted blindly, made once. Only the last test needs a GPU."""

import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flash_attn_cute import settings
from flash_attn_cute.jit import __main__ as command
from flash_attn_cute.jit import bundle, cache, disk, key
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS, ForwardConfig, Sm90Config, backward_config, forward_config
from flash_attn_cute.kernels.sm100 import config as sm100
from tests.conftest import NAME
from tests.lib.checks import hopper_alone

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

CONFIG = forward_config("bfloat16", 64, 64, Features())

PROCESS = """
import json, time
import cutlass.cute.runtime, tvm_ffi  # their imports are not our time
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.config import forward_config
start = time.perf_counter()
kernel = cache.kernel(forward_config("bfloat16", 64, 64, Features()))
seconds = time.perf_counter() - start
try:
    kernel(0)
except TypeError as error:
    print(json.dumps([cache.compile_count(), seconds, str(error)]))
"""


# As with the GPU that kernels are compiled for, where the compiler would also have them ready for itself.
COLD = """
import itertools
import json
from collections import Counter
from cutlass.base_dsl.compiler import Compiler
from cutlass.cutlass_dsl import tvm_ffi_provider
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.config import forward_config
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


class Outcome(NamedTuple):
    """Work of a process to get the kernel of ``CONFIG``."""

    compiles: int
    seconds: float
    signature: str  # what the kernel says to wrong arguments


def start(code: str, folder: Path, **variables: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"FLASH_ATTN_CUTE_CACHE_DIR": str(folder)} | variables
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def outcome(process: "subprocess.Popen[str]") -> Outcome:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return Outcome(*json.loads(output))


class Warm(NamedTuple):
    """A folder with the kernel of ``CONFIG``, and the processes that raced to fill it."""

    folder: Path
    outcomes: list[Outcome]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    folder = tmp_path_factory.mktemp("home") / "kernels"
    processes = [start(PROCESS, folder) for _ in range(3)]
    return Warm(folder, [outcome(process) for process in processes])


class Compiler:
    """Stands in for the compiler: hands out code that was compiled before, and counts."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        self.calls = 0

    def __call__(self, config: ForwardConfig) -> bytes:
        self.calls += 1
        return self.code


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


def test_tests_leave_the_users_folder_alone() -> None:
    path = settings.cache_dir()
    assert path is not None
    assert path.name.startswith("flash_attn_cute_tests_")


# Processes


@pytest.mark.slow
def test_cold_processes_compile_once(warm: Warm) -> None:
    """The others wait for the one that does, and all have the same kernel."""
    assert sorted(outcome.compiles for outcome in warm.outcomes) == [0, 0, 1]
    assert len({outcome.signature for outcome in warm.outcomes}) == 1
    assert "bfloat16" in warm.outcomes[0].signature


@pytest.mark.slow
def test_warm_processes_do_not_compile(warm: Warm) -> None:
    second = outcome(start(PROCESS, warm.folder))
    assert second.compiles == 0
    assert second.signature == warm.outcomes[0].signature
    assert second.seconds < 0.5


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


# Kernels out of the folder


def test_kernels_come_from_the_folder(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.kernel(CONFIG)
    assert cache.kernel(CONFIG) is first
    monkeypatch.setattr(cache, "_kernels", {})
    again = cache.kernel(CONFIG)
    assert again is not first
    assert compiler.calls == 1
    for kernel in (first, again):
        with pytest.raises(TypeError, match="bfloat16"):
            kernel(0)


def test_kernels_with_one_symbol_are_apart(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object file calls its kernel the same; here two of them differ in rank."""
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(warm.folder))
    monkeypatch.setattr(cache, "_kernels", {})
    before = cache.compile_count()
    packed = cache.kernel(forward_config("float16", 64, 64, Features(packed=True)))
    dense = cache.kernel(CONFIG)
    assert cache.compile_count() == before + 1
    with pytest.raises(TypeError, match=r"Tensor\(\[n0, n1, n2\], float16\)"):
        packed(0)
    with pytest.raises(TypeError, match=r"Tensor\(\[n0, n1, n2, n3\], bfloat16\)"):
        dense(0)


def test_damaged_kernels_are_compiled_again(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.kernel(CONFIG)
    path = settings.cache_dir()
    assert path is not None
    (entry,) = path.glob("*.kernel")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1])
    for calls in (2, 2):  # made again, and found again
        monkeypatch.setattr(cache, "_kernels", {})
        cache.kernel(CONFIG)
        assert compiler.calls == calls
    assert entry.read_bytes() == whole


def test_unsafe_folders_raise(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(disk.UnsafeFolderError, match="FLASH_ATTN_CUTE_CACHE_DIR: the cache folder"):
        cache.kernel(CONFIG)
    assert compiler.calls == 0


def no_home(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASH_ATTN_CUTE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


def no_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("a file")


def no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / f"{key.name(key.identity(CONFIG))}.lock").mkdir(parents=True)


def no_space(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.Folder, "write", write)


@pytest.mark.parametrize("failure", [no_home, no_folder, no_lock, no_space])
def test_failing_disks_cost_a_warning(
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    failure(tmp_path / "kernels", monkeypatch)
    with pytest.warns(cache.NotKeptWarning, match="not kept on disk .*set FLASH_ATTN_CUTE_CACHE_DIR") as warned:
        kernel = cache.kernel(CONFIG)
    assert len(warned) == 1
    assert cache.kernel(CONFIG) is kernel
    assert compiler.calls == 1


def test_without_locks_kernels_are_kept(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none."""

    def flock(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
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
    ],
)
def test_compiler_and_host_are_in_the_name(place: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_compiler_settings_are_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = key.name(key.identity(CONFIG))
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert key.name(key.identity(CONFIG)) != name


def test_sources_are_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    shutil.copytree(key._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(key, "_PACKAGE", package)
    assert key.sources_unchanged()
    with open(package / "calls/ops.py", "a") as file:
        file.write("# says nothing about kernels\n")
    assert key.sources_unchanged()
    for path in ("kernels/common/score.py", "kernels/sm90/config.py", "jit/compile.py", "jit/code.py"):
        before = (package / path).read_text()
        (package / path).write_text(before + "\n")
        assert not key.sources_unchanged()
        (package / path).write_text(before)
    (package / "kernels/new.py").touch()
    assert not key.sources_unchanged()
    (package / "kernels/new.py").unlink()
    (package / "kernels/common/blocks.py").rename(package / "kernels/common/walks.py")
    assert not key.sources_unchanged()

    monkeypatch.undo()
    name = key.name(key.identity(CONFIG))
    monkeypatch.setattr(key, "_SOURCES", "another")
    assert key.name(key.identity(CONFIG)) != name


# Bundles


@pytest.fixture
def bundled(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with the kernel of ``CONFIG``, named by the setting; memory and the folder have it no longer."""
    path = made_bundle(tmp_path, monkeypatch)
    monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", str(path))
    shutil.rmtree(tmp_path / "kernels")
    assert compiler.calls == 1
    return path


def made_bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache.kernel(CONFIG)
    monkeypatch.setattr(cache, "_kernels", {})
    assert command.main(["bundle", str(folder / "bundles")]) == 0
    (path,) = (folder / "bundles").iterdir()
    return path


def test_kernels_come_from_the_bundle(bundled: Path, compiler: Compiler, tmp_path: Path) -> None:
    """By anybody, as its name says what is in it: neither owner nor mode matter."""
    bundled.chmod(0o666)
    assert callable(cache.kernel(CONFIG))
    assert compiler.calls == 1
    assert not (tmp_path / "kernels").exists()


@pytest.mark.slow
def test_processes_with_a_bundle_do_not_compile(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do they need a folder."""
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(warm.folder))
    assert command.main(["bundle", str(tmp_path)]) == 0
    path = capsys.readouterr().out.strip()
    processes = [start(PROCESS, tmp_path / "kernels", FLASH_ATTN_CUTE_BUNDLE=path) for _ in range(3)]
    outcomes = [outcome(process) for process in processes]
    assert [each.compiles for each in outcomes] == [0, 0, 0]
    assert {each.signature for each in outcomes} == {warm.outcomes[0].signature}
    assert not (tmp_path / "kernels").exists()


def test_a_bundle_serves_the_architectures_that_it_was_made_for(bundled: Path, compiler: Compiler) -> None:
    with pytest.warns(cache.NotBundledWarning, match=r"has no kernel of ForwardConfig\(.*target='sm_100a'"):
        cache.kernel(sm100.forward_config("bfloat16", 64, 64, Features()))
    assert compiler.calls == 2


def test_the_same_kernels_give_the_same_bundle(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bundled.read_bytes()
    bundled.unlink()
    monkeypatch.delenv("FLASH_ATTN_CUTE_BUNDLE")
    capsys.readouterr()
    assert made_bundle(tmp_path, monkeypatch) == bundled
    assert bundled.read_bytes() == content
    assert capsys.readouterr().out == f"{bundled}\n"


@pytest.mark.parametrize("place", ["index", "code", "end"])
def test_damaged_bundles_raise(place: str, bundled: Path, compiler: Compiler) -> None:
    content = bytearray(bundled.read_bytes())
    if place == "end":
        del content[-1]
    else:
        content[10 if place == "index" else content.index(b"\n") + 10] ^= 1
    bundled.write_bytes(content)
    with pytest.raises(bundle.DamagedBundleError, match=f"FLASH_ATTN_CUTE_BUNDLE: {bundled}.*Copy the bundle again"):
        cache.kernel(CONFIG)
    assert compiler.calls == 1


def test_a_bundle_by_another_name_is_refused(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = bundled.rename(bundled.with_name(f"{'0' * 64}.bundle"))
    monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", str(renamed))
    with pytest.raises(bundle.DamagedBundleError, match="another digest than its name says"):
        cache.kernel(CONFIG)


def test_what_a_bundle_lacks_is_compiled(bundled: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_SOURCES", "another")
    monkeypatch.setattr(key, "_hash_sources", lambda: "another")
    with pytest.warns(cache.NotBundledWarning, match="'sources': 'another'"):
        cache.kernel(CONFIG)
    assert compiler.calls == 2
    monkeypatch.setattr(cache, "_kernels", {})
    with pytest.warns(cache.NotBundledWarning):
        cache.kernel(CONFIG)
    assert compiler.calls == 2  # the folder has it


def test_only_kernels_that_can_be_used_are_bundled(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.kernel(CONFIG)
    (tmp_path / "kernels" / f"{NAME}.kernel").write_text("damaged")
    monkeypatch.setattr(key, "_SOURCES", "another")
    assert command.main(["bundle", str(tmp_path / "bundles")]) == 1
    assert "no kernels that this installation can use: python -m flash_attn_cute.jit warm" in capsys.readouterr().err
    assert not (tmp_path / "bundles").exists()


def test_a_bundle_is_an_absolute_path(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", "here")
    with pytest.raises(ValueError, match="FLASH_ATTN_CUTE_BUNDLE: expected an absolute path, got 'here'"):
        cache.kernel(CONFIG)


# The command line


def test_list(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["list"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/kernels: 0 kernels, 0.0 MB\n"
    assert not (tmp_path / "kernels").exists()

    cache.kernel(CONFIG)
    (tmp_path / "kernels" / f"{NAME}.kernel").write_text("damaged")
    (tmp_path / "kernels" / "notes.txt").write_text("not an entry")
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 kernels" in lines[0]
    assert len(lines) == 3
    for part in ("sm90.config.ForwardConfig", "dtype=bfloat16", "tile_d=64", "DSL 4.8", "CUDA 1"):
        assert part in lines[1]
    assert "packed" not in lines[1]
    assert time.strftime("%Y-%m-%d") in lines[1]
    assert "unusable" in lines[2]


def test_clear(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Other files stay: the variable may name a home directory."""
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(folder))
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


def test_warm(warm: Warm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(warm.folder))
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
def test_warm_insists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where calls would go on with a warning, there is nothing left to do."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(tmp_path / "file"))
    assert command.main(["warm", "--head-dims", "64", "--masks", "full", "--layouts", "dense"]) == 1
    assert "not kept on disk" in capsys.readouterr().err


def test_workers_end_with_a_killed_command(tmp_path: Path) -> None:
    """They hold its output open as long as they live."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import time
from flash_attn_cute.jit import cache, warm

def kernel(config):
    print("compiling", flush=True)
    time.sleep(60)

cache.kernel = kernel
if __name__ == "__main__":
    list(warm.warm([None], 1))
"""
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as warming:
        assert warming.stdout is not None
        assert warming.stdout.readline() == "compiling\n"
        warming.send_signal(signal.SIGKILL)
        assert warming.communicate(timeout=20)[0] == ""


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
def test_wrong_options(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parser().parse_args(["warm", option, value])
    assert stopped.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["list", "warm", "clear"])
@pytest.mark.parametrize(("value", "complaint"), [("0", "while it is 0"), ("here", "an absolute path")])
def test_commands_need_a_folder(
    name: str, value: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", value)
    assert command.main([name]) == 1
    assert complaint in capsys.readouterr().err


def test_commands_refuse_unsafe_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(folder))
    folder.chmod(0o777)
    for name in ("list", "clear"):
        assert command.main([name]) == 1
        assert "can be written by others" in capsys.readouterr().err
    assert (folder / f"{NAME}.kernel").exists()


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
