"""Contents of an installed wheel: all of the package, nothing else, and commands that work from any folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, as a build leaves files among the sources."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    shutil.copytree(ROOT / "flash_attn_cute", source / "flash_attn_cute", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("lab", "tests"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(source.parent / done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    wheel.extractall(folder)
    return folder


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_contents(wheel: zipfile.ZipFile) -> None:
    sources = [
        path for path in (ROOT / "flash_attn_cute").rglob("*") if path.suffix == ".py" or path.name == "py.typed"
    ]
    expected = {path.relative_to(ROOT).as_posix() for path in sources}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "flash-attn-cute"
    assert metadata["License-File"] == "LICENSE"
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert "# flash_attn_cute" in str(metadata.get_payload())


def test_it_runs_elsewhere(installed: Path, tmp_path: Path) -> None:
    """Without importing what plots need, or compiles programs."""
    code = """
import sys, torch
import flash_attn_cute
print({"matplotlib", "torch._dynamo"} & sys.modules.keys())
q = torch.ones(1, 2, 1, 8)
print(flash_attn_cute.flash_attn_func(q, q, q).sum())
print(flash_attn_cute.__file__)
"""
    done = run(installed, tmp_path, "-c", code)
    file = installed / "flash_attn_cute" / "__init__.py"
    assert done.stdout.splitlines() == ["set()", "tensor(16.)", str(file)], done.stderr


@pytest.mark.slow
def test_all_of_it_can_be_imported(installed: Path, tmp_path: Path) -> None:
    """Also where nothing else of the repository is."""
    pytest.importorskip("matplotlib", reason="drawing block masks needs matplotlib")
    code = """
import importlib, pkgutil
import flash_attn_cute
found = [module.name for module in pkgutil.walk_packages(flash_attn_cute.__path__, "flash_attn_cute.")]
for name in found:
    importlib.import_module(name)
print(len(found))
"""
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 80


# Runs modules one after another, each as ``python -m`` does, and prints their exit statuses and what they print. No
# command of these needs the compiler.
RUNS = """
import contextlib, io, json, runpy, sys
sys.modules["cutlass"] = None
ends = []
for sys.argv in json.loads(sys.argv[1]):
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    ends.append([status or 0, printed.getvalue()])
print(json.dumps(ends))
"""
COMMANDS = {
    ("flash_attn_cute.jit", "list"): "",
    ("flash_attn_cute.kernels", "describe", "sm90", "forward", "--d", "64"): "sm90 forward, d = 64",
    ("flash_attn_cute.demo", "--help"): "Trains a small language model",
    ("flash_attn_cute.sparsity", "plot", "--help"): "--against",
    ("flash_attn_cute.profile", "--help"): "nsys --help and so on list the options",
    ("flash_attn_cute.profile", "ncu", "--help"): "usage: python -m flash_attn_cute.profile ncu",
}


def test_commands(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-c", RUNS, json.dumps(list(COMMANDS)))
    assert done.returncode == 0, done.stderr
    for (status, printed), (command, said) in zip(json.loads(done.stdout), COMMANDS.items(), strict=True):
        assert status == 0, command
        assert said in printed, command


def test_profiling_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    """By an nsys that writes its report, of a command; where PyTorch sees a GPU."""
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(
        """#!/bin/sh
case "$1" in
  profile) touch "$(printf "%s\\n" "$@" | sed -n s/--output=//p).nsys-rep"; shift 6; exec "$@";;
esac
"""
    )
    nsys.chmod(0o755)
    code = (
        "import sys, torch; torch.cuda.is_available = lambda: True; from flash_attn_cute.profile.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = run(
        installed, tmp_path, "-c", code, "nsys", "--out", "x", "--", "sh", "-c", "echo $FLASH_ATTN_CUTE_NVTX $PWD"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"1 {tmp_path}"
    assert f"wrote {tmp_path}/x.nsys-rep" in done.stdout
