"""What a suite's run leaves behind: a table and verdicts on the terminal, a JSON file, a PNG plot."""

import dataclasses
import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import CaseReport, Spread, Verdict

_PROJECT = Path(__file__).parents[1]


def table(report: CaseReport) -> str:
    """One case: what it is, what bounds it, a line a contender."""
    scale, unit = _flop_unit(report)
    rows = [("contender", "median ms", "p10..p90", unit, "of bound", "time ratio", "p10..p90", "peak MB")]
    for name, times in report.times.items():
        time, ratio, peak = Spread.of(times), report.ratio(name, report.reference), report.peak_bytes[name]
        rows.append(
            (
                name,
                _ms(time.median),
                f"{_ms(time.p10)}..{_ms(time.p90)}",
                f"{report.work.flop / time.median / scale:.0f}",
                f"{report.bound / time.median:.0%}",
                f"{ratio.median:.2f}",
                f"{ratio.p10:.2f}..{ratio.p90:.2f}",
                "unknown" if peak is None else f"{peak / 1e6:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flop, traffic = report.work
    gemm, copy = report.flop_rate, report.byte_rate
    lines = [
        f"{report.name}: {report.detail}",
        f"  takes {_ms(report.bound)} ms or more: "
        f"{flop / 1e9:.1f} GFLOP take {_ms(flop / gemm.median)} ms at the {gemm.median / scale:.0f} "
        f"({gemm.p10 / scale:.0f}..{gemm.p90 / scale:.0f}) {unit} of a gemm, "
        f"{traffic / 1e6:.0f} MB take {_ms(traffic / copy.median)} ms at the {copy.median / 1e9:.0f} GB/s of a copy",
    ]
    for name, *numbers in rows:
        cells = [name.ljust(widths[0])] + [x.rjust(width) for x, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells))
    lines += [f"  {name}: unavailable: {reason}" for name, reason in report.unavailable.items()]
    return "\n".join(lines)


def verdict_line(verdict: Verdict) -> str:
    """One bar and whether it holds."""
    bar = verdict.bar
    measured = "not measured" if verdict.ratio is None else f"{verdict.ratio:.3g}"
    return (
        f"bar: {'pass' if verdict.passed else 'FAIL'}: {bar.case}: {bar.contender} takes {measured} of the time of "
        f"{bar.against} (at most {bar.most:.3g})"
    )


def write_json(
    path: Path, device: torch.device, dtype: torch.dtype, reports: Sequence[CaseReport], verdicts: Sequence[Verdict]
) -> None:
    """Everything measured, raw times included, and where."""
    content = {
        "environment": _environment(device) | {"dtype": str(dtype)},
        "cases": [dataclasses.asdict(report) | {"work": report.work._asdict()} for report in reports],
        "bars": [
            dataclasses.asdict(verdict.bar) | {"ratio": verdict.ratio, "passed": verdict.passed} for verdict in verdicts
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_plot(path: Path, title: str, reports: Sequence[CaseReport]) -> None:
    """Throughput as bars with their p10..p90, cases side by side, the bound of each case as a line.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for report in reports for name in report.times))
    width = 0.8 / len(names)
    scale, unit = _flop_unit(reports[0])
    figure = Figure(figsize=(2 + 2 * len(reports), 4.5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        shown = [(x, r) for x, r in enumerate(reports) if name in r.times]
        speeds = [Spread.of([r.work.flop / time / scale for time in r.times[name]]) for _, r in shown]
        axes.bar(
            [x + (i - (len(names) - 1) / 2) * width for x, _ in shown],
            [speed.median for speed in speeds],
            width,
            yerr=[[speed.median - speed.p10 for speed in speeds], [speed.p90 - speed.median for speed in speeds]],
            capsize=2,
            label=name,
        )
    bounds = [report.work.flop / report.bound / scale for report in reports]
    places = range(len(reports))
    axes.hlines(bounds, [x - 0.45 for x in places], [x + 0.45 for x in places], "black", "dashed", label="bound")
    axes.set_xticks(places, [report.name for report in reports])
    axes.set_ylabel(f"{unit}, visible pairs only")
    axes.set_title(title)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.3f}"


def _flop_unit(report: CaseReport) -> tuple[float, str]:
    return (1e12, "TFLOP/s") if report.flop_rate.median >= 1e13 else (1e9, "GFLOP/s")


def _environment(device: torch.device) -> dict[str, Any]:
    status = _git("status", "--porcelain")
    return {
        "torch": torch.__version__,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "commit": _git("rev-parse", "--verify", "--quiet", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _git(*command: str) -> str | None:
    """What a git command prints; None outside a repository, or where there is no git."""
    try:
        return subprocess.run(
            ("git", *command), cwd=_PROJECT, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
