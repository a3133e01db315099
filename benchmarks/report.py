"""Report of a suite's run: tables, means and verdicts on the terminal, and a JSON file."""

import dataclasses
import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import CaseReport, Mean, Ruling, Spread, Verdict
from benchmarks.work import Work

_PROJECT = Path(__file__).parents[1]
# In files, of what is in seconds, FLOP/s and bytes/s here.
_UNITS = {"times": "us", "flop_rate": "TFLOP/s: median, p10, p90", "byte_rate": "TB/s: median, p10, p90"}
_MICRO, _TERA = 1e-6, 1e12
_COLUMNS = 120
# What files leave out of a case.
_EMPTY: dict[str, Any] = {"panel": "", "length": None, "unavailable": {}}


def table(report: CaseReport) -> str:
    """One case: what it is, what bounds it, a line a contender."""
    scale, unit = flop_unit(report)
    headers = "contender", "median ms", "p10..p90", unit, "of bound", "peak MB"
    rows = [(*headers, "time ratio", "p10..p90", "peak ratio", "to")]
    for name, times in report.times.items():
        time, peak = Spread.of(times), report.peak_bytes[name]
        rows.append(
            (
                name,
                _ms(time.median),
                f"{_ms(time.p10)}..{_ms(time.p90)}",
                f"{report.work.flop / time.median / scale:.0f}",
                f"{report.bound / time.median:.0%}",
                "unknown" if peak is None else f"{peak / 1e6:.0f}",
                *_ratios(report, name),
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
        lines.append("  " + "  ".join(cells).rstrip())
    lines += [f"  {name}: unavailable: {reason}" for name, reason in report.unavailable.items()]
    return "\n".join(lines)


def mean_line(mean: Mean) -> str:
    """The mean ratios of one contender."""
    return (
        f"mean: {mean.panel + ': ' if mean.panel else ''}{mean.contender} takes {mean.time:.3g} of the time of "
        f"{mean.against} and {_peak_ratio(mean.peak)} of its peak memory (geometric means, cases: {mean.cases})"
    )


def verdict_line(verdict: Verdict) -> str:
    """One bar and whether it holds."""
    bar = verdict.bar
    measured = "not measured" if verdict.ratio is None else f"{verdict.ratio:.3g}"
    return (
        f"bar: {'pass' if verdict.passed else 'FAIL'}: {bar.case}: {bar.contender} takes {measured} of the time of "
        f"{bar.against} (at most {bar.most:.3g})"
    )


def ruling_line(ruling: Ruling) -> str:
    """One limit and whether it holds."""
    limit = ruling.limit
    seconds = "not measured" if ruling.seconds is None else f"{_ms(ruling.seconds)} ms"
    peak = "unknown" if ruling.bytes is None else f"{ruling.bytes / 1e6:.3g} MB"
    most = f"{_ms(limit.seconds)} ms" + ("" if limit.bytes is None else f", {limit.bytes / 1e6:.3g} MB")
    text = f"{limit.case}: {limit.contender} takes {seconds}, at its peak {peak} (at most {most})"
    return f"limit: {'pass' if ruling.passed else 'FAIL'}: {text}"


def environment(device: torch.device, dtype: torch.dtype, commit: str | None) -> dict[str, Any]:
    """Software and machine of the run. ``commit`` is as of ``git describe --dirty``; without it git is asked."""
    if commit is None:
        commit, status = _git("rev-parse", "--verify", "--quiet", "HEAD"), _git("status", "--porcelain")
        dirty = None if status is None else bool(status)
    else:
        commit, dirty = commit.removesuffix("-dirty"), commit.endswith("-dirty")
    return {
        "torch": torch.__version__,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "dtype": str(dtype),
    }


def write_json(
    path: Path,
    environment: Mapping[str, Any],
    reports: Sequence[CaseReport],
    verdicts: Sequence[Verdict],
    rulings: Sequence[Ruling] = (),
) -> None:
    """Everything measured, raw times included. Whenever the process ends, the file is a whole one."""
    content = {
        "environment": environment,
        "units": _UNITS,
        "against": {name: other for report in reports for name, other in report.against.items()},
        "cases": [_written(report) for report in reports],
        "means": [_rounded(dataclasses.asdict(mean), 5) for mean in harness.means(reports)],
        "bars": [
            _rounded(dataclasses.asdict(verdict.bar) | {"ratio": verdict.ratio}, 5) | {"passed": verdict.passed}
            for verdict in verdicts
        ],
        "limits": [dataclasses.asdict(ruling) | {"passed": ruling.passed} for ruling in rulings],
    }
    partial = path.with_suffix(".partial")
    partial.write_text(_laid_out(_rounded(content, 7)) + "\n")
    partial.replace(path)


def read_json(path: Path) -> list[CaseReport]:
    """The cases of a file that ``write_json`` has written, with five digits of each time."""
    content = json.loads(path.read_text())
    reports = []
    for case in content["cases"]:
        ran = case["times"].keys()
        case["against"] = {name: other for name, other in content["against"].items() if {name, other} <= ran}
        case["work"] = Work(**case["work"])
        case["times"] = {name: [x * _MICRO for x in times] for name, times in case["times"].items()}
        for rate in ("flop_rate", "byte_rate"):
            case[rate] = Spread(*(x * _TERA for x in case[rate]))
        reports.append(CaseReport(**_EMPTY | case))
    return reports


def _written(report: CaseReport) -> dict[str, Any]:
    """JSON fields of a case: in the file's units, raw times with five digits, as more do not repeat, nothing empty."""
    times = {name: _rounded([x / _MICRO for x in times], 5) for name, times in report.times.items()}
    rates = {name: [x / _TERA for x in getattr(report, name)] for name in ("flop_rate", "byte_rate")}
    case = dataclasses.asdict(report) | {"work": report.work._asdict(), "times": times} | rates
    del case["against"]  # the same in all cases that both ran
    return {key: value for key, value in case.items() if key not in _EMPTY or value != _EMPTY[key]}


def _rounded(content: Any, digits: int) -> Any:
    """With so many digits a number."""
    if isinstance(content, float):
        number = float(f"{content:.{digits}g}")
        return int(number) if number.is_integer() else number
    if isinstance(content, Mapping):
        return {key: _rounded(value, digits) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_rounded(value, digits) for value in content]
    return content


def _laid_out(content: Any, indent: str = "") -> str:
    """JSON with a line for what fits on one, and for any list of numbers."""
    if isinstance(content, list) and all(isinstance(x, int | float) for x in content):
        return json.dumps(content, separators=(",", ":"))
    line, deeper = json.dumps(content), indent + " "
    if len(indent) + len(line) <= _COLUMNS or not isinstance(content, dict | list):
        return line
    if isinstance(content, dict):
        parts = [f"{json.dumps(key)}: {_laid_out(value, deeper)}" for key, value in content.items()]
    else:
        parts = [_laid_out(value, deeper) for value in content]
    start, end = line[0], line[-1]
    return f"{start}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{end}"


def _ratios(report: CaseReport, contender: str) -> tuple[str, str, str, str]:
    against = report.against.get(contender)
    if against is None:
        return "", "", "", ""
    time = report.ratio(contender, against)
    return (
        f"{time.median:.2f}",
        f"{time.p10:.2f}..{time.p90:.2f}",
        _peak_ratio(report.peak_ratio(contender, against)),
        against,
    )


def _peak_ratio(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.3f}"


def flop_unit(report: CaseReport) -> tuple[float, str]:
    """Divisor of FLOP/s, and the unit that it gives."""
    return (1e12, "TFLOP/s") if report.flop_rate.median >= 1e13 else (1e9, "GFLOP/s")


def _git(*command: str) -> str | None:
    """Output of a git command; None outside a repository, or where there is no git."""
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
