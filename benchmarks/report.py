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
# What files have of a contender, and of a case. Here it is in seconds, FLOP/s and bytes/s.
_UNITS = {
    "time": "us: median, p10, p90",
    "ratio": "to the time of the one in against: median, p10, p90 of the rounds' ratios",
    "peak": "bytes",
    "flop_rate": "TFLOP/s: median, p10, p90",
    "byte_rate": "TB/s: median, p10, p90",
}
_MICRO, _TERA = 1e-6, 1e12
_COLUMNS = 120
# What files leave out of a case.
_EMPTY: dict[str, Any] = {"panel": "", "length": None, "unavailable": {}, "ratios": {}}


def table(report: CaseReport) -> str:
    """One case: what it is, what bounds it, a line a contender."""
    scale, unit = flop_unit(report)
    headers = "contender", "median ms", "p10..p90", unit, "of bound", "peak MB"
    rows = [(*headers, "time ratio", "p10..p90", "peak ratio", "to")]
    for name, time in report.times.items():
        peak = report.peak_bytes[name]
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
    """Writes medians and quantiles of times and ratios. Whenever the process ends, the file is a whole one."""
    content = {
        "environment": environment,
        "units": _UNITS,
        "against": {name: other for report in reports for name, other in report.against.items()},
        "cases": [_written(report) for report in reports],
        "means": [dataclasses.asdict(mean) for mean in harness.means(reports)],
        "bars": [
            dataclasses.asdict(verdict.bar) | {"ratio": verdict.ratio, "passed": verdict.passed} for verdict in verdicts
        ],
        "limits": [dataclasses.asdict(ruling) | {"passed": ruling.passed} for ruling in rulings],
    }
    partial = path.with_suffix(".partial")
    partial.write_text(text(content))
    partial.replace(path)


def read_json(path: Path) -> list[CaseReport]:
    """The cases of a file that ``write_json`` has written, with the digits and the ratios that the file has."""
    content = json.loads(path.read_text())
    reports = []
    for case in content["cases"]:
        measured = case.pop("measured")
        case["against"] = {name: content["against"][name] for name, found in measured.items() if "ratio" in found}
        case["work"] = Work(**case["work"])
        case["times"] = {name: Spread(*(x * _MICRO for x in found["time"])) for name, found in measured.items()}
        case["peak_bytes"] = {name: found["peak"] for name, found in measured.items()}
        pairs = {(name, other): measured[name]["ratio"] for name, other in case["against"].items()}
        pairs |= {
            (name, other): found for name, others in case.get("ratios", {}).items() for other, found in others.items()
        }
        case["ratios"] = {pair: Spread(*found) for pair, found in pairs.items()}
        for rate in ("flop_rate", "byte_rate"):
            case[rate] = Spread(*(x * _TERA for x in case[rate]))
        reports.append(CaseReport(**_EMPTY | case))
    return reports


def _written(report: CaseReport) -> dict[str, Any]:
    """JSON fields of a case: in the file's units, a line a contender, nothing empty, no ratio both ways."""
    measured: dict[str, dict[str, Any]] = {}
    for name, time in report.times.items():
        measured[name] = {"time": [x / _MICRO for x in time]}
        if name in report.against:
            measured[name]["ratio"] = report.ratios[name, report.against[name]]
        measured[name]["peak"] = report.peak_bytes[name]
    ratios: dict[str, dict[str, Spread]] = {}
    for (name, other), found in report.ratios.items():
        if report.against.get(name) != other and report.against.get(other) != name:
            ratios.setdefault(name, {})[other] = found
    case = {
        "name": report.name,
        "detail": report.detail,
        "panel": report.panel,
        "length": report.length,
        "work": {name: round(amount) for name, amount in report.work._asdict().items()},
        "measured": measured,
        "ratios": ratios,
        "unavailable": report.unavailable,
        "flop_rate": [x / _TERA for x in report.flop_rate],
        "byte_rate": [x / _TERA for x in report.byte_rate],
    }
    return {key: value for key, value in case.items() if key not in _EMPTY or value != _EMPTY[key]}


def text(content: Any) -> str:
    """JSON of a record: six digits a number, and a line for what fits on one."""
    return _laid_out(_rounded(content)) + "\n"


def _rounded(content: Any) -> Any:
    if isinstance(content, float):
        number = float(f"{content:.6g}")
        return int(number) if number.is_integer() else number
    if isinstance(content, Mapping):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_rounded(value) for value in content]
    return content


def _laid_out(content: Any, indent: str = "") -> str:
    """JSON with a line for what fits on one."""
    line, deeper = json.dumps(content, separators=(",", ":")), indent + " "
    if len(indent) + len(line) <= _COLUMNS or not isinstance(content, dict | list):
        return line
    if isinstance(content, dict):
        parts = [f"{json.dumps(key)}:{_laid_out(value, deeper)}" for key, value in content.items()]
    else:
        parts = [_laid_out(value, deeper) for value in content]
    start, end = line[0], line[-1]
    return f"{start}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{end}"


def _ratios(report: CaseReport, contender: str) -> tuple[str, str, str, str]:
    against = report.against.get(contender)
    if against is None:
        return "", "", "", ""
    time = report.ratios[contender, against]
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
