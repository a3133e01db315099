"""Plots of a suite's run, also of one on record.

    python -m benchmarks.plot benchmarks/results/bias-cuda-bfloat16.json

writes ``build/benchmarks/bias-cuda-bfloat16.png``. It needs matplotlib.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness import CaseReport
from benchmarks.report import flop_unit, read_json
from flash_attn_cute.runtime.command_line import make_folder

# What a contender is drawn with.
_Styles: TypeAlias = Mapping[str, Mapping[str, str]]
_MARKERS, _COLOURS = "osDv^P*X", 24


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws what the command line names."""
    description, _, _ = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=description)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files that `python -m benchmarks` wrote")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="the plots' folder (%(default)s)")
    chosen = parser.parse_args(arguments)
    make_folder(parser, "--out", chosen.out)
    for path in chosen.results:
        try:
            reports = read_json(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"argument results: {path} is no record of a suite ({type(error).__name__}: {error})")
        plot = chosen.out / f"{path.stem}.png"
        write_plot(plot, path.stem, reports)
        print(f"wrote {plot}")


def write_plot(path: Path, title: str, reports: Sequence[CaseReport]) -> None:
    """Medians with their p10..p90, and the bound of each case in black.

    Throughput as points, a line a case; if cases have lengths, over them, a column a panel.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    scale, unit = flop_unit(reports[0])
    names = dict.fromkeys(name for report in reports for name in report.times)
    styles = {name: {"color": f"C{i}", "marker": _MARKERS[i % len(_MARKERS)]} for i, name in enumerate(names)}

    if reports[0].length is None:
        figure = Figure(figsize=(9, 1.2 + 0.24 * len(reports)), layout="constrained")
        axes = figure.subplots()
        _draw_points(axes, reports, styles, scale)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{unit}, visible pairs only")
    else:
        panels: dict[str, list[CaseReport]] = {}
        for report in reports:
            panels.setdefault(report.panel, []).append(report)
        figure = Figure(figsize=(1 + 2.7 * len(panels), 4.5), layout="constrained")
        (columns,) = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axes, (panel, those) in zip(columns, panels.items(), strict=True):
            _draw_lines(axes, those, styles, scale)
            axes.set_title(panel)
            axes.set_xlabel("sequence length")
        columns[0].set_ylim(bottom=0)
        columns[0].set_ylabel(f"{unit}, visible pairs only")
    figure.suptitle(title)
    drawn = {label: x for axes in figure.axes for x, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3)
    save(path, figure)


def save(path: Path, figure: Any) -> None:
    """Writes a matplotlib figure as a PNG of few colours, which is small."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.dpi = 100
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.frombytes("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    picture.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def _draw_points(axes: Any, reports: Sequence[CaseReport], styles: _Styles, scale: float) -> None:
    for name, style in styles.items():
        shown = [(y, report) for y, report in enumerate(reports) if name in report.times]
        middles, whiskers = _spreads(name, [report for _, report in shown], scale)
        axes.errorbar(
            middles, [y for y, _ in shown], xerr=whiskers, linestyle="", markersize=5, capsize=2, label=name, **style
        )
    places = range(len(reports))
    bounds = [report.work.flop / report.bound / scale for report in reports]
    axes.plot(bounds, places, "|", color="black", markersize=10, label="bound")
    axes.set_yticks(places, [report.name for report in reports])
    axes.set_ylim(len(reports) - 0.5, -0.5)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def _draw_lines(axes: Any, reports: Sequence[CaseReport], styles: _Styles, scale: float) -> None:
    for name, style in styles.items():
        shown = [report for report in reports if name in report.times]
        heights, whiskers = _spreads(name, shown, scale)
        if shown:
            lengths = [report.length for report in shown]
            axes.errorbar(lengths, heights, yerr=whiskers, markersize=4, capsize=2, label=name, **style)
    lengths = [report.length for report in reports]
    axes.plot(lengths, [report.work.flop / report.bound / scale for report in reports], "k--", label="bound")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, lengths, rotation=90)


def _spreads(
    name: str, reports: Sequence[CaseReport], scale: float
) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Medians of a contender's throughput, and how far p10 and p90 are from them."""
    rates = [[report.work.flop / x / scale for x in report.times[name]] for report in reports]
    # A longer time is a lower rate. Rounding can put a quantile of equal samples on the median's other side.
    below = [max(0.0, middle - lower) for middle, _, lower in rates]
    above = [max(0.0, upper - middle) for middle, upper, _ in rates]
    return [middle for middle, _, _ in rates], (below, above)


if __name__ == "__main__":
    main()
