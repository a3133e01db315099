"""A timeline by Nsight Systems, with ranges around every forward and backward pass and around compiling.

    python -m flash_attn_cute.profile nsys --out train.nsys-rep -- python train.py --steps 20
    python -m flash_attn_cute.profile nsys --heads 32 --heads-k 8 --seqlen 4096 --causal

Profiles the command behind ``--``, or attention alone of the shape that options choose, from beginning to end with
FLASH_ATTN_CUTE_NVTX=1. Prints where the report is, to be opened in the Nsight Systems window, and the longest ranges
and kernels. Some installations capture but cannot make a report; then it prints where the raw capture is, and exits
with 0. Else it exits with the command's exit code, with 1 if nothing was captured, or with 2 where nsys or a GPU is
missing.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flash_attn_cute.profile import workload
from flash_attn_cute.profile.machine import Unavailable, find, require_gpu
from flash_attn_cute.profile.workload import Workload
from flash_attn_cute.runtime.command_line import make_folder, run_command

_ROWS = 10
_SUFFIX = ".nsys-rep"


class Entry(NamedTuple):
    """One line of a summary: a range or a kernel, how often it ran, and nanoseconds in all and at the median."""

    name: str
    calls: int
    total: float
    median: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    own, command = workload.split(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_cute.profile nsys",
        usage="%(prog)s [options] [-- command ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/profiles/timeline.nsys-rep"), help="the report's file (%(default)s)"
    )
    workload.add_options(parser)
    workload.add_calls(parser)
    parser.set_defaults(direction="both")
    options = parser.parse_args(own)
    try:
        nsys = find("nsys")
        require_gpu()
        report = workload.report_at(options.out, _SUFFIX)
        make_folder(parser, "--out", report.parent)
    except Unavailable as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    return profile(nsys, report, command or Workload.chosen(options).command(options.calls))


def profile(nsys: Path, report: Path, command: Sequence[str]) -> int:
    """Profiles a command and prints a summary; the exit code."""
    report.unlink(missing_ok=True)
    before = _captures(report)
    code = subprocess.run(
        [
            *(nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
            *("--force-overwrite=true", f"--output={str(report).removesuffix(_SUFFIX)}", *command),
        ],
        env={**os.environ, "FLASH_ATTN_CUTE_NVTX": "1"},
    ).returncode
    if report.exists():
        print(f"wrote {report}")
        _print_summaries(nsys, report)
        return code
    new = _captures(report).items() - before.items()
    if not new:
        print(f"nsys (exit code {code}) captured nothing: its own words are above")
        return code or 1
    # nsys may report that it made no report by its exit code, which then is not the command's.
    capture, _ = max(new, key=lambda item: item[1])
    print(
        f"captured {capture}, of which this nsys (exit code {code}) could make no report: {nsys.parent} holds no "
        "importer, or it failed. Open the file in the window of a full Nsight Systems (File > Open), or convert it "
        "with its QdstrmImporter."
    )
    return 0


def parse_summary(text: str) -> list[Entry]:
    """The entries of a summary that ``nsys stats --format csv`` printed; none if it found nothing to summarise."""
    lines = text.splitlines()
    header = next((number for number, line in enumerate(lines) if line.startswith("Time (%)")), len(lines))
    return [
        Entry(
            name=(row.get("Range") or row["Name"]).removeprefix(":"),
            calls=int(row["Instances"]),
            total=float(row["Total Time (ns)"]),
            median=float(row["Med (ns)"]),
        )
        for row in csv.DictReader(lines[header:])
    ]


def table(title: str, entries: Sequence[Entry]) -> str:
    """The entries that took the longest, as text."""
    lines = [f"{'calls':>7} {'total ms':>10} {'median us':>10}  {title}"]
    for entry in sorted(entries, key=lambda entry: -entry.total)[:_ROWS]:
        lines.append(f"{entry.calls:7} {entry.total / 1e6:10.3f} {entry.median / 1e3:10.1f}  {_shortened(entry.name)}")
    if not entries:
        lines.append("   none")
    return "\n".join(lines)


def _print_summaries(nsys: Path, report: Path) -> None:
    for title, kind in (("range (time on the host)", "nvtx_sum"), ("kernel", "cuda_gpu_kern_sum")):
        wishes = ("--quiet", "--force-export=true", "--report", kind, "--format=csv", "--output=-")
        stats = subprocess.run([str(nsys), "stats", *wishes, str(report)], capture_output=True, text=True)
        if stats.returncode:
            print(f"no table: `nsys stats` failed, the report is whole.\n{(stats.stdout + stats.stderr).strip()}")
            return
        print(f"\n{table(title, parse_summary(stats.stdout))}")


def _captures(report: Path) -> dict[Path, int]:
    """Raw captures and when they were written. nsys leaves them beside the report to be, or in a temporary folder."""
    temporary = Path(tempfile.gettempdir())
    folders = (report.parent, temporary, *temporary.glob("nvidia/nsight_systems/*"))
    return {path: path.stat().st_mtime_ns for folder in folders for path in folder.glob("*.qdstrm")}


def _shortened(name: str, width: int = 90) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."


if __name__ == "__main__":
    run_command(main)
