"""What one kernel spends its time on, by Nsight Compute: pipes, issue slots, stalls and memory, in a few lines.

    python -m tools.ncu --heads 16 --head-dim 128 --seqlen 8192 --causal
    python -m tools.ncu --documents 64,4096,1000 --causal --hot 20
    python -m tools.ncu --direction backward --kernel REGEX --set full

Profiles the first launch of the kernel after the warm-up, at whatever clock the GPU runs, and prints a summary and
where the report is, to be opened in the Nsight Compute window. ``--hot N`` adds the N instructions (SASS) at which
warps were found most often. Exits with 2 where ncu or a GPU is missing, with 1 if nothing was profiled.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import ncu_report, workload
from tools.machine import Unavailable, find, require_gpu
from tools.workload import Workload

_ROOT = Path(__file__).parent.parent
# Beyond the metrics of the summary, what the window needs for its own pages.
_SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
_MEMORY_SECTIONS = ("MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables")
_NO_PERMISSION = "ERR_NVGPUCTRPERM"


class Failed(Exception):
    """Nothing was profiled; the message holds what ncu said."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.ncu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/profiles/kernel.ncu-rep"), help="%(default)s")
    parser.add_argument("--kernel", metavar="REGEX", default="Sm90", help="of its name (%(default)s: this package's)")
    parser.add_argument(
        "--hot", type=workload.positive, default=0, metavar="N", help="list the N instructions with most samples"
    )
    parser.add_argument("--set", dest="section_set", metavar="NAME", help="also collect a set of ncu's, like full")
    workload.add_options(parser)
    options = parser.parse_args(arguments)
    report = options.out.resolve().with_suffix(".ncu-rep")
    try:
        ncu = find("ncu")
        require_gpu()
        collect(ncu, report, Workload.chosen(options), options.kernel, options.section_set, sampled=bool(options.hot))
        raw = _run([ncu, "--import", report, "--csv", "--page", "raw", "--print-units", "base"])
        for kernel in ncu_report.parse_raw(raw.stdout):
            print(f"\n{ncu_report.summary(kernel)}")
        if options.hot:
            source = _run([ncu, "--import", report, "--csv", "--page", "source"])
            print(f"\n{ncu_report.hot(ncu_report.parse_source(source.stdout), options.hot)}")
    except (Unavailable, Failed) as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2 if isinstance(reason, Unavailable) else 1
    print(f"\nwrote {report}")
    return 0


def collect(ncu: Path, report: Path, work: Workload, kernel: str, section_set: str | None, *, sampled: bool) -> None:
    """Writes a report on the first profiled launch of a kernel whose name the regular expression finds.

    Raises:
        Failed: no report was written.
    """
    known = ncu_report.parse_query(_run([ncu, "--query-metrics"]).stdout)
    metrics = ncu_report.wanted(known)
    sections = [*_SECTIONS, *_MEMORY_SECTIONS, *(["SourceCounters"] if sampled else [])]
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command: list[str | Path] = [
        *(ncu, "--force-overwrite", "--export", report),
        *("--profile-from-start", "off", "--kernel-name", f"regex:{kernel}", "--launch-count", "1"),
        *("--clock-control", "none"),  # locking clocks needs rights, and outlasts a run that is killed
        *(["--set", section_set] if section_set else []),
        *(argument for section in sections for argument in ("--section", section)),
        *(["--metrics", ",".join(metrics)] if metrics else []),
        *work.command(calls=1),
    ]
    print(" ".join(map(str, command)), flush=True)
    done = _run(command)
    if not report.exists():
        raise Failed(f"no profiled launch has a name that matches {kernel!r}.\n{done.stdout}{done.stderr}".rstrip())


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """What became of a command that succeeds.

    Raises:
        Failed: it did not.
    """
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    said = f"{done.stdout}{done.stderr}".rstrip()
    if _NO_PERMISSION in said:  # ncu may end with 0 all the same
        raise Failed(
            f"ncu may not read the GPU's counters: run as root, or load the driver with "
            f"NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/{_NO_PERMISSION}).\n{said}"
        )
    if done.returncode:
        raise Failed(f"ncu failed (exit code {done.returncode}).\n{said}")
    return done


if __name__ == "__main__":
    sys.exit(main())
