"""``python -m lab.model``: predictions beside what was measured, of designs, and timelines."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lab.model import timeline
from lab.model.blackwell import ForwardDesign
from lab.model.designs import DESIGNS, OPEN, PUBLISHED, Case, Change, on
from lab.model.launch import Prediction, Shape, steady_state
from lab.model.machine import B200, B200_BY_POWER, B300, Machine
from lab.model.record import Row, hopper_pass, rows
from lab.model.sm import Maker

PAGE = Path(__file__).parents[2] / "docs" / "blackwell-model.md"
_PRINTED = re.compile(r"^(<!-- python -m lab\.model (.+) -->\n\n)((?:\|.*\n)+)", re.MULTILINE)
_SUITES = ("forward", "backward", "lengths", "bias")
_MACHINES = {"B200": (B200, B200_BY_POWER), "B300": (B300, replace(B200_BY_POWER, exp2=B300.exp2))}
_HOPPER = {
    "hopper forward full": Shape(4, 8192, 16, 128, 128),
    "hopper forward causal": Shape(4, 8192, 16, 128, 128, causal=True),
    "hopper forward d = 64": Shape(4, 8192, 32, 64, 64),
    "hopper backward": Shape(4, 8192, 16, 128, 128, backward=True),
    "hopper backward d = 256": Shape(4, 8192, 8, 256, 256, backward=True),
}


def main() -> None:
    """Parses the command line and prints tables in Markdown, or writes them into the page."""
    given = _parser().parse_args()
    if given.command == "page":
        PAGE.write_text(_PRINTED.sub(lambda table: table[1] + printed(table[2]), PAGE.read_text()))
        return
    for line in given.lines(given):
        print(line, flush=True)


def commands_of_page() -> list[str]:
    """The commands whose tables the page shows: a comment above each table names its own."""
    return [command for _, command, _ in _PRINTED.findall(PAGE.read_text())]


def printed(command: str) -> str:
    """Output of a command, a line each."""
    given = _parser().parse_args(command.split())
    return "".join(f"{line}\n" for line in given.lines(given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, lines: Callable[[argparse.Namespace], Iterable[str]]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(lines=lines)
        return command

    add("record", "the Hopper kernels, beside benchmarks/results, rows of equal heads and masks together", _record)
    add("published", "flash-attn-4 on a B200, beside what was published", _published)
    designs = add("designs", "our kernels for Blackwell", _designs)
    designs.add_argument("--machine", choices=_MACHINES, default="B200")
    designs.add_argument("--forward", action="store_true", help="those alone")
    add("open", "what changes that have not been made would gain, the largest first", _open)
    shows = add("timeline", "a stretch of a kernel's steady state", _timeline)
    shows.add_argument("name", choices=_makers())
    shows.add_argument("--clocks", type=float, default=6000.0)
    commands.add_parser("page", help="writes the tables of docs/blackwell-model.md anew")
    return parser


def _makers() -> dict[str, Maker]:
    named = {name: hopper_pass(shape).make for name, shape in _HOPPER.items()}
    named |= {f"flash-attn-4 {name}": case.make() for name, case in PUBLISHED.items()}
    return named | {f"our {name}": Case(design, causal=False).make() for name, design in DESIGNS.items()}


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*columns: str) -> str:
    return f"{_row(*columns)}\n|{'---|' * len(columns)}"


def _record(_: argparse.Namespace) -> Iterator[str]:
    yield _head("pass, heads x d, mask", "rows", "GHz", "error of time", "clocks a step", "bound")
    kinds: dict[str, list[tuple[Row, Prediction]]] = {}
    for row in (row for suite in _SUITES for row in rows(suite)):
        shape = row.shape
        direction, mask = "backward" if shape.backward else "forward", "causal" if shape.causal else "full"
        kind = f"{direction} {shape.heads}x{shape.d} {mask}"
        kinds.setdefault(kind, []).append((row, hopper_pass(shape).predict()))
    for kind, found in kinds.items():
        clocks = _range([f"{x:.2f}" for x in sorted(row.ghz(p) for row, p in found)])
        errors = _range([f"{x:+.1%}" for x in sorted(row.error(p) for row, p in found)])
        p = found[0][1]
        yield f"| {kind} | {len(found)} | {clocks} | {errors} | {p.step:.0f} | {p.bound} {p.busy[p.bound]:.0%} |"


def _range(ascending: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([ascending[0], ascending[-1]]))


def _published(_: argparse.Namespace) -> Iterator[str]:
    as_it_is = "predicted", "error", "clocks a step", "bound"
    yield _head("pass", "published, TFLOP/s", *as_it_is, "by power", "error", "GHz", "clocks a step")
    for name, case in PUBLISHED.items():
        assert case.published is not None
        cells = [name, f"{case.published:.0f}"]
        for machine in (B200, B200_BY_POWER):
            p = case.predict(machine)
            predicted = case.tflops(p, machine)
            cells += [f"{predicted:.0f}", f"{predicted / case.published - 1:+.1%}"]
            if machine is B200:
                cells += [f"{p.step:.0f}", f"{p.bound} {p.busy[p.bound]:.0%}"]
            else:
                cells += [f"{machine.clock(p.busy['tensor cores']):.2f}", f"{p.step:.0f}"]
        yield _row(*cells)


def _designs(given: argparse.Namespace) -> Iterator[str]:
    yield _head(
        "design", "full / causal, TFLOP/s", "by power", "clocks a step", "by power", "busiest units, clocks a step"
    )
    for name, of_b200 in DESIGNS.items():
        if given.forward and not isinstance(of_b200, ForwardDesign):
            continue
        design = on(given.machine, of_b200)
        rates, steps, units = [], [], ""
        for constants in _MACHINES[given.machine]:
            full = Case(design, causal=False).predict(constants)
            rates.append(" / ".join(f"{Case(design, causal).rate(constants):.0f}" for causal in (False, True)))
            steps.append(f"{full.step:.0f}")
            if not units:
                busiest = sorted(full.busy.items(), key=lambda x: -x[1])[:3]
                units = ", ".join(f"{unit} {share * full.step:.0f}" for unit, share in busiest)
        yield _row(name, *rates, *steps, units)


def _rates(change: Change, machine: Machine) -> list[tuple[float, float]]:
    """TFLOP/s before and after, with each mask."""
    cases = [change.cases(causal) for causal in change.masks]
    return [(before.rate(machine), after.rate(machine)) for before, after in cases]


def _gains(rates: Iterable[tuple[float, float]]) -> str:
    return " / ".join(f"{after / before - 1:+.1%}" for before, after in rates)


def _open(_: argparse.Namespace) -> Iterator[str]:
    yield _head("change", "full / causal, or a window: TFLOP/s", "with it", "gain", "by power", "with it", "gain")
    found = {name: [_rates(change, machine) for machine in (B200, B200_BY_POWER)] for name, change in OPEN.items()}
    for name, readings in sorted(found.items(), key=lambda item: -_least_gain(item[1])):
        cells = [name]
        for rates in readings:
            cells += [" / ".join(f"{x:.0f}" for x in which) for which in zip(*rates, strict=True)]
            cells.append(_gains(rates))
        yield _row(*cells)


def _least_gain(readings: Iterable[Iterable[tuple[float, float]]]) -> float:
    """Least gain over all readings and masks."""
    return min(after / before for rates in readings for before, after in rates)


def _timeline(given: argparse.Namespace) -> Iterator[str]:
    sm, start, _ = steady_state(_makers()[given.name])
    yield from timeline.text(sm, start, start + given.clocks)


if __name__ == "__main__":
    main()
