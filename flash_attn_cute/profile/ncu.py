"""Nsight Compute on one kernel: pipes, issue slots, stalls and memory, in a few lines.

    python -m flash_attn_cute.profile ncu --skip 100 -- python train.py --steps 20
    python -m flash_attn_cute.profile ncu --documents 64,4096,1000 --causal --hot 20
    python -m flash_attn_cute.profile ncu --direction backward --kernel REGEX --set full

Profiles one launch of a kernel, at whatever clock the GPU runs, and prints a summary and where the report is, to be
opened in the Nsight Compute window: in the command behind ``--`` the launch after the first so many, or else, of
attention alone in the shape that options choose, the first one after a warm-up. ``--hot N`` adds the N instructions
(SASS) at which warps were found most often. Exits with 2 where ncu or a GPU is missing, with 1 if nothing was profiled.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_attn_cute.profile import ncu_report, workload
from flash_attn_cute.profile.machine import Unavailable, find, require_gpu
from flash_attn_cute.profile.workload import Workload
from flash_attn_cute.runtime.command_line import make_folder, natural, positive, run_command

# Beyond the metrics of the summary, what the window needs for its own pages.
_SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
_MEMORY_SECTIONS = ("MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables")
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_MAIN_KERNELS = "(Forward|Backward|BiasGradient)[A-Za-z0-9]*_object_at"  # this package's, by their classes
_LINES = 20  # of a command's words, in an error


class Failed(Exception):
    """Nothing was profiled; the message holds what ncu said."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    own, command = workload.split(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_cute.profile ncu",
        usage="%(prog)s [options] [-- command ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/profiles/kernel.ncu-rep"), help="the report's file (%(default)s)"
    )
    parser.add_argument("--kernel", metavar="REGEX", default=_MAIN_KERNELS, help="of its name (%(default)s)")
    parser.add_argument(
        "--hot", type=positive, default=0, metavar="N", help="list the N instructions with most samples"
    )
    parser.add_argument("--set", dest="section_set", metavar="NAME", help="also collect a set of ncu's, like full")
    parser.add_argument(
        "--skip",
        type=natural,
        default=10,
        metavar="N",
        help="launches of the kernel in a command before the profiled one (%(default)s)",
    )
    workload.add_options(parser)
    options = parser.parse_args(own)
    report = workload.report_at(options.out, ".ncu-rep")
    try:
        ncu = find("ncu")
        require_gpu()
        make_folder(parser, "--out", report.parent)
        if command:
            which = ["--target-processes", "all", "--launch-skip", str(options.skip)]
        else:
            which, command = ["--profile-from-start", "off"], Workload.chosen(options).command(calls=1)
        which += ["--kernel-name", f"regex:{options.kernel}", "--launch-count", "1"]
        which += ["--set", options.section_set] if options.section_set else []
        collect(ncu, report, which, command, sampled=bool(options.hot))
        raw = _run([ncu, "--import", report, "--csv", "--page", "raw", "--print-units", "base"])
        for kernel in ncu_report.parse_raw(raw):
            print(f"\n{ncu_report.summary(kernel)}")
        if options.hot:
            source = _run([ncu, "--import", report, "--csv", "--page", "source"])
            print(f"\n{ncu_report.hot(ncu_report.parse_source(source), options.hot)}")
    except (Unavailable, Failed) as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2 if isinstance(reason, Unavailable) else 1
    print(f"\nwrote {report}")
    return 0


def collect(ncu: Path, report: Path, which: Sequence[str], command: Sequence[str], *, sampled: bool) -> None:
    """Writes a report on what the options ``which`` choose of a command's launches.

    Raises:
        Failed: no report was written.
    """
    known = ncu_report.parse_query(_run([ncu, "--query-metrics"]))
    metrics = ncu_report.wanted(known)
    sections = [*_SECTIONS, *_MEMORY_SECTIONS, *(["SourceCounters"] if sampled else [])]
    report.unlink(missing_ok=True)
    profiling: list[str | Path] = [
        *(ncu, "--force-overwrite", "--export", report),
        *which,
        *("--clock-control", "none"),  # locking clocks needs rights, and outlasts a run that is killed
        *(argument for section in sections for argument in ("--section", section)),
        *(["--metrics", ",".join(metrics)] if metrics else []),
        *command,
    ]
    print(" ".join(map(str, profiling)), flush=True)
    said = []
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # The command's output may be anything.
    with subprocess.Popen(profiling, **output, encoding="utf-8", errors="replace") as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)  # a training run may take its time
            said.append(line)
    last = "".join(said[-_LINES:])
    _check(process.returncode, last)
    if not report.exists():
        raise Failed(f"no launch was profiled with {' '.join(which)}.\n{last}".rstrip())


def _run(command: Sequence[str | Path]) -> str:
    """Output of a command that succeeds.

    Raises:
        Failed: it did not.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    _check(done.returncode, f"{done.stdout}{done.stderr}")
    return done.stdout


def _check(code: int, said: str) -> None:
    """Looks at what became of an ncu.

    Raises:
        Failed: it did not succeed.
    """
    if _NO_PERMISSION in said:  # ncu may end with 0 all the same
        raise Failed(
            f"ncu may not read the GPU's counters: run as root, or load the driver with "
            f"NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/{_NO_PERMISSION}).\n{said.rstrip()}"
        )
    if code:
        raise Failed(f"ncu failed (exit code {code}).\n{said.rstrip()}")


if __name__ == "__main__":
    run_command(main)
