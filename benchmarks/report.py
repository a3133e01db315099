"""Report of a suite's run: tables, means and verdicts on the terminal, and a JSON file."""

import datetime
import json
import math
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import CaseReport, Mean, Ruling, Spread, Verdict
from benchmarks.work import Work

_PROJECT = Path(__file__).parents[1]
_MICRO, _MEGA, _TERA = 1e-6, 1e6, 1e12
_DIGITS, _COLUMNS = 6, 120
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
    flop, traffic = report.work
    gemm, copy = report.flop_rate, report.byte_rate
    lines = [
        f"{report.name}: {report.detail}",
        f"  takes {_ms(report.bound)} ms or more: "
        f"{flop / 1e9:.1f} GFLOP take {_ms(flop / gemm.median)} ms at the {gemm.median / scale:.0f} "
        f"({gemm.p10 / scale:.0f}..{gemm.p90 / scale:.0f}) {unit} of a gemm, "
        f"{traffic / 1e6:.0f} MB take {_ms(traffic / copy.median)} ms at the {copy.median / 1e9:.0f} GB/s of a copy",
    ]
    return "\n".join([*lines, *aligned(rows), *unavailable(report)])


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of rows of cells: names on the left, everything else on the right of its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        cells = [name.ljust(widths[0])] + [x.rjust(width) for x, width in zip(numbers, widths[1:], strict=True)]
        yield "  " + "  ".join(cells).rstrip()


def unavailable(report: CaseReport) -> Iterator[str]:
    """A line for each contender that did not run the case."""
    return (f"  {name}: unavailable: {reason}" for name, reason in report.unavailable.items())


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


def write_json(path: Path, environment: Mapping[str, Any], reports: Sequence[CaseReport]) -> None:
    """Writes what was measured; whenever the process ends, the file is a whole one.

    Of a case, ``work`` is FLOP and bytes; ``rates`` are medians, TFLOP/s of a gemm and TB/s of a copy. ``measured`` has
    by contender us (median, p10, p90), MB at the peak and, if ``against`` names another contender, the median ratio to
    its time; ``ratios`` are other such medians.
    """
    content = {
        "environment": environment,
        "against": {name: other for report in reports for name, other in report.against.items()},
        "cases": [_written(report) for report in reports],
    }
    partial = path.with_suffix(".partial")
    partial.write_text(text(content))
    partial.replace(path)


def read_json(path: Path) -> list[CaseReport]:
    """The cases of a file that ``write_json`` has written. Of rates and ratios it has medians alone: others are NaN."""
    content = json.loads(path.read_text())
    return [_read(_EMPTY | case, content["against"]) for case in content["cases"]]


def _written(report: CaseReport) -> dict[str, Any]:
    """JSON fields of a case, in the file's units: a line a contender, nothing empty, no ratio both ways."""
    measured: dict[str, list[float | None]] = {}
    for name, time in report.times.items():
        peak, against = report.peak_bytes[name], report.against.get(name)
        measured[name] = [*(x / _MICRO for x in time), None if peak is None else peak / _MEGA]
        if against is not None:
            measured[name].append(report.ratios[name, against].median)
    ratios: dict[str, dict[str, float]] = {}
    for (name, other), found in report.ratios.items():
        if report.against.get(name) != other and report.against.get(other) != name:
            ratios.setdefault(name, {})[other] = found.median
    case = {
        "name": report.name,
        "detail": report.detail,
        "panel": report.panel,
        "length": report.length,
        "work": [round(amount) for amount in report.work],
        "rates": [rate.median / _TERA for rate in (report.flop_rate, report.byte_rate)],
        "measured": measured,
        "ratios": ratios,
        "unavailable": report.unavailable,
    }
    return {key: value for key, value in case.items() if key not in _EMPTY or value != _EMPTY[key]}


def _read(case: Mapping[str, Any], against: Mapping[str, str]) -> CaseReport:
    times, peak_bytes, opponents, ratios = {}, {}, {}, {}
    for name, (median, p10, p90, peak, *ratio) in case["measured"].items():
        times[name] = Spread(median * _MICRO, p10 * _MICRO, p90 * _MICRO)
        peak_bytes[name] = None if peak is None else round(peak * _MEGA)
        if ratio:
            opponents[name] = against[name]
            ratios[name, against[name]] = _median(*ratio)
    for name, others in case["ratios"].items():
        ratios |= {(name, other): _median(ratio) for other, ratio in others.items()}
    flop_rate, byte_rate = (_median(rate * _TERA) for rate in case["rates"])
    return CaseReport(
        name=case["name"],
        detail=case["detail"],
        panel=case["panel"],
        length=case["length"],
        work=Work(*case["work"]),
        against=opponents,
        times=times,
        ratios=ratios,
        peak_bytes=peak_bytes,
        unavailable=case["unavailable"],
        flop_rate=flop_rate,
        byte_rate=byte_rate,
    )


def _median(x: float) -> Spread:
    """A spread of which nothing else is known."""
    return Spread(x, math.nan, math.nan)


def text(content: Any) -> str:
    """JSON of a record: six digits a number, and a line for what fits on one."""
    return _laid_out(_rounded(content)) + "\n"


def _rounded(content: Any) -> Any:
    if isinstance(content, float):
        number = float(f"{content:.{_DIGITS}g}")
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
