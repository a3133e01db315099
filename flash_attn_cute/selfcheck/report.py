"""A report of a GPU: the self-check with all steps, the tests and the benchmarks of a clone, in one archive."""

import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from flash_attn_cute.selfcheck.verdict import Gpu, Verdict

_ROOT = Path(__file__).parents[2]
_SUITES = ("forward", "backward", "both", "lengths", "bias", "sparse")


class Command(NamedTuple):
    """A command of the report."""

    name: str  # of the file with its output
    words: Sequence[str]
    seconds: float  # that it may take
    needs: str = ""  # a folder of the clone


def commands(folder: Path) -> list[Command]:
    """Commands of a report, in order; benchmarks write to the folder themselves."""
    python = sys.executable or "python3"
    suites = [
        Command(f"benchmarks-{suite}", (python, "-m", "benchmarks", suite, "--out", str(folder)), 3600.0, "benchmarks")
        for suite in _SUITES
    ]
    return [
        Command("machine", ("nvidia-smi", "-q"), 60.0),
        Command("packages", (python, "-m", "pip", "freeze"), 60.0),
        Command("commit", ("git", "log", "-1"), 60.0, ".git"),
        Command("tests", (python, "-m", "pytest", "-n", "4", "--repetitions", "200", "tests"), 2 * 3600.0, "tests"),
        *suites,
    ]


def begin(folder: Path) -> None:
    """Makes the folder of a report; raises FileExistsError if there is something in it already."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"--report: expected a new or empty folder, got {folder}")


def write(folder: Path, gpu: Gpu, verdict: Verdict, summary: str, chosen: Sequence[Command] | None = None) -> Path:
    """Runs what belongs to a report, and writes it into the folder where ``begin`` has been; returns the archive.

    A command that fails or takes too long is part of it. ``chosen`` takes the place of ``commands``.
    """
    folder = folder.resolve()
    shutil.copy(verdict.log, folder / "selfcheck.log")
    (folder / "verdict.json").write_text(json.dumps({"gpu": gpu._asdict(), "verdict": asdict(verdict)}, indent=1))
    lines = [
        f"# {gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.num_sms} SMs",
        f"{gpu.driver}; torch {torch.__version__}; Python {platform.python_version()}; {platform.platform()}",
        time.strftime("%Y-%m-%d %H:%M %Z"),
        f"## self-check\n\n{summary}",
        "## commands",
    ]
    for command in commands(folder) if chosen is None else chosen:
        outcome = _run(command, folder / f"{command.name}.txt")
        print(f"{command.name}: {outcome}", flush=True)
        lines.append(f"- {command.name}: {outcome}")
    (folder / "report.md").write_text("\n\n".join(lines) + "\n")
    return Path(shutil.make_archive(str(folder), "gztar", folder.parent, folder.name))


def _run(command: Command, output: Path) -> str:
    """Runs a command with its output to a file; returns how it ended."""
    if command.needs and not (_ROOT / command.needs).exists():
        return f"left out: no clone of the repository, which has {command.needs}"
    start = time.monotonic()
    with output.open("wb") as file:
        try:
            code = subprocess.run(
                command.words, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=command.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not over after {command.seconds:.0f} seconds"
        except FileNotFoundError as error:
            return f"left out: {error}"
    return f"exit code {code}, {time.monotonic() - start:.0f} seconds, in {output.name}"
