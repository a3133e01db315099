"""What a suite's run leaves behind: tables, means and verdicts on the terminal, a JSON file, a PNG plot."""

import dataclasses
import datetime
import json
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks import harness
from benchmarks.harness import CaseReport, Mean, Ruling, Spread, Verdict

_PROJECT = Path(__file__).parents[1]
# What to draw of the seconds that a case took.
_Quantity: TypeAlias = Callable[[CaseReport, float], float]
# A list of numbers, which is to be on one line.
_NUMBERS = re.compile(r"\[([\d\s.,e+-]+)\]")


def table(report: CaseReport) -> str:
    """One case: what it is, what bounds it, a line a contender."""
    scale, unit = _flop_unit(report)
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
    told = f"{limit.case}: {limit.contender} takes {seconds}, at its peak {peak} (at most {most})"
    return f"limit: {'pass' if ruling.passed else 'FAIL'}: {told}"


def environment(device: torch.device, dtype: torch.dtype, commit: str | None) -> dict[str, Any]:
    """What is run, and where. ``commit`` is as of ``git describe --dirty``; without it git is asked."""
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
        "cases": [dataclasses.asdict(report) | {"work": report.work._asdict()} for report in reports],
        "means": [dataclasses.asdict(mean) for mean in harness.means(reports)],
        "bars": [
            dataclasses.asdict(verdict.bar) | {"ratio": verdict.ratio, "passed": verdict.passed} for verdict in verdicts
        ],
        "limits": [dataclasses.asdict(ruling) | {"passed": ruling.passed} for ruling in rulings],
    }
    partial = path.with_suffix(".partial")
    text = json.dumps(_rounded(content), indent=1)
    partial.write_text(_NUMBERS.sub(_on_one_line, text) + "\n")
    partial.replace(path)


def _on_one_line(numbers: re.Match[str]) -> str:
    """A list of raw times or rates, with five digits each: more do not repeat."""
    return f"[{', '.join(f'{float(number):.5g}' for number in numbers[1].split(','))}]"


def _rounded(content: Any) -> Any:
    """With seven digits a number, which is more than clocks have."""
    if isinstance(content, float):
        return float(f"{content:.7g}")
    if isinstance(content, Mapping):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_rounded(value) for value in content]
    return content


def write_plot(path: Path, title: str, reports: Sequence[CaseReport]) -> None:
    """Medians with their p10..p90, and the bound of each case in black.

    Throughput as bars, cases side by side; if they have lengths, time and throughput over them, a column a panel.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    scale, unit = _flop_unit(reports[0])
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for r in reports for name in r.times))}

    def speed(report: CaseReport, seconds: float) -> float:
        return report.work.flop / seconds / scale

    def milliseconds(report: CaseReport, seconds: float) -> float:
        return 1e3 * seconds

    if reports[0].length is None:
        figure = Figure(figsize=(2 + 2 * len(reports), 4.5), layout="constrained")
        left = figure.subplots()
        _draw_bars(left, reports, colours, speed)
    else:
        panels: dict[str, list[CaseReport]] = {}
        for report in reports:
            panels.setdefault(report.panel, []).append(report)
        figure = Figure(figsize=(3 + 4 * len(panels), 8), layout="constrained")
        above, below = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
        for times, speeds, (panel, those) in zip(above, below, panels.items(), strict=True):
            _draw_lines(times, those, colours, milliseconds)
            _draw_lines(speeds, those, colours, speed)
            times.set_title(panel)
            speeds.set_xlabel("sequence length")
        above[0].set_yscale("log")
        above[0].set_ylabel("ms")
        left = below[0]
    left.set_ylim(bottom=0)
    left.set_ylabel(f"{unit}, visible pairs only")
    figure.suptitle(title)
    drawn = {label: x for axes in figure.axes for x, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper")
    figure.savefig(path, dpi=100)


def _draw_bars(axes: Any, reports: Sequence[CaseReport], colours: Mapping[str, str], quantity: _Quantity) -> None:
    width = 0.8 / len(colours)
    for i, (name, colour) in enumerate(colours.items()):
        shown = [(x, report) for x, report in enumerate(reports) if name in report.times]
        heights, whiskers = _spreads(name, [report for _, report in shown], quantity)
        middles = [x + (i - (len(colours) - 1) / 2) * width for x, _ in shown]
        axes.bar(middles, heights, width, yerr=whiskers, capsize=2, color=colour, label=name)
    bounds = [quantity(report, report.bound) for report in reports]
    places = range(len(reports))
    axes.hlines(bounds, [x - 0.45 for x in places], [x + 0.45 for x in places], "black", "dashed", label="bound")
    axes.set_xticks(places, [report.name.replace(" ", "\n") for report in reports])


def _draw_lines(axes: Any, reports: Sequence[CaseReport], colours: Mapping[str, str], quantity: _Quantity) -> None:
    for name, colour in colours.items():
        shown = [report for report in reports if name in report.times]
        heights, whiskers = _spreads(name, shown, quantity)
        if shown:
            lengths = [report.length for report in shown]
            axes.errorbar(lengths, heights, yerr=whiskers, marker=".", capsize=2, color=colour, label=name)
    lengths = [report.length for report in reports]
    axes.plot(lengths, [quantity(report, report.bound) for report in reports], "k--", label="bound")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, lengths, rotation=45)


def _spreads(
    name: str, reports: Sequence[CaseReport], quantity: _Quantity
) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Medians of a contender's quantity, and how far p10 and p90 are from them."""
    spreads = [Spread.of([quantity(report, seconds) for seconds in report.times[name]]) for report in reports]
    below = [max(0.0, x.median - x.p10) for x in spreads]  # rounding can make a quantile of equal samples a bit larger
    above = [max(0.0, x.p90 - x.median) for x in spreads]
    return [x.median for x in spreads], (below, above)


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


def _flop_unit(report: CaseReport) -> tuple[float, str]:
    return (1e12, "TFLOP/s") if report.flop_rate.median >= 1e13 else (1e9, "GFLOP/s")


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
