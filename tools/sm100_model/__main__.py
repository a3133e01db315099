"""``python -m tools.sm100_model``: predictions beside what was measured, of designs, and timelines."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tools.sm100_model import timeline
from tools.sm100_model.designs import CHANGES, DESIGNS, PUBLISHED, Case
from tools.sm100_model.launch import Shape, steady_state
from tools.sm100_model.machine import B200, B200_BY_POWER, B300, H200, Machine
from tools.sm100_model.record import hopper_pass, rows
from tools.sm100_model.sm import Maker

_MACHINES = {"B200": (B200, B200_BY_POWER), "B300": (B300, replace(B200_BY_POWER, exp2=B300.exp2))}
_HOPPER = {
    "hopper forward full": Shape(4, 8192, 16, 128, 128),
    "hopper forward causal": Shape(4, 8192, 16, 128, 128, causal=True),
    "hopper forward d = 64": Shape(4, 8192, 32, 64, 64),
    "hopper backward": Shape(4, 8192, 16, 128, 128, backward=True),
    "hopper backward d = 256": Shape(4, 8192, 8, 256, 256, backward=True),
}


def main() -> None:
    """Parses the command line and prints tables in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tools.sm100_model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="the Hopper kernels, beside benchmarks/results")
    commands.add_parser("published", help="flash-attn-4 on a B200, beside what was published")
    commands.add_parser("sensitivity", help="the same with other constants")
    designs = commands.add_parser("designs", help="our kernels for Blackwell")
    designs.add_argument("--machine", choices=_MACHINES, default="B200")
    commands.add_parser("changes", help="what one change does to them")
    shows = commands.add_parser("timeline", help="a stretch of a kernel's steady state")
    shows.add_argument("name", choices=_makers())
    shows.add_argument("--clocks", type=float, default=6000.0)
    shows.add_argument("--png", type=Path, help="draw it (needs matplotlib)")
    given = parser.parse_args()
    lines: dict[str, Callable[[], Iterable[str]]] = {
        "record": _record,
        "published": _published,
        "sensitivity": _sensitivity,
        "designs": lambda: _designs(_MACHINES[given.machine]),
        "changes": _changes,
        "timeline": lambda: _timeline(given.name, given.clocks, given.png),
    }
    for line in lines[given.command]():
        print(line, flush=True)


def _makers() -> dict[str, Maker]:
    named = {name: hopper_pass(shape).make for name, shape in _HOPPER.items()}
    named |= {f"flash-attn-4 {name}": case.make() for name, case in PUBLISHED.items()}
    return named | {f"our {name}": Case(design, causal=False).make() for name, design in DESIGNS.items()}


def _table(*columns: str) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)


def _record() -> Iterator[str]:
    yield from _table("suite, case", "GHz", "measured, TFLOP/s", "predicted", "error of time", "clocks a step", "bound")
    for suite in ("forward", "backward", "lengths", "bias"):
        for row in rows(suite):
            p = hopper_pass(row.shape).predict()
            busiest = f"{p.bound} {p.busy[p.bound]:.0%}"
            predicted = row.tflops / (1 + row.error(p))
            yield (
                f"| {suite} {row.name} | {row.ghz(p):.2f} | {row.tflops:.0f} | {predicted:.0f} "
                f"| {row.error(p):+.1%} | {p.step:.0f} | {busiest} |"
            )


def _published() -> Iterator[str]:
    yield from _table(
        "pass",
        "published, TFLOP/s",
        "predicted",
        "error",
        "clocks a step",
        "bound",
        "by power",
        "error",
        "GHz",
        "clocks a step",
    )
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
        yield f"| {' | '.join(cells)} |"


def _sensitivity() -> Iterator[str]:
    machines = {
        "as it is": B200,
        **{f"dispatch {x}": replace(B200, dispatch=x) for x in (1.2, 1.6)},
        **{f"handover {x:.0f}": replace(B200, handover=x) for x in (50.0, 150.0)},
        **{f"load {x:.0f}": replace(B200, load=x) for x in (700.0, 1200.0)},
        "adds 15": replace(B200, adds=15.0, adds_together=15.0),
        "L2 35 when all read": replace(B200, l2_together=H200.l2_together),
        "power alone": replace(B200, gemm=B200_BY_POWER.gemm),
    }
    yield from _table("error of", *machines)
    for name, case in PUBLISHED.items():
        assert case.published is not None
        errors = (case.tflops(case.predict(m), m) / case.published - 1 for m in machines.values())
        yield f"| {name} | {' | '.join(f'{x:+.1%}' for x in errors)} |"


def _designs(machines: tuple[Machine, Machine]) -> Iterator[str]:
    yield from _table(
        "design", "full / causal, TFLOP/s", "by power", "clocks a step", "by power", "busiest units, clocks a step"
    )
    for name, design in DESIGNS.items():
        rates, steps, units = [], [], ""
        for machine in machines:
            cases = [Case(design, causal) for causal in (False, True)]
            full, causal = (case.predict(machine) for case in cases)
            rates.append(" / ".join(f"{c.tflops(p, machine):.0f}" for c, p in zip(cases, (full, causal), strict=True)))
            steps.append(f"{full.step:.0f}")
            if not units:
                busiest = sorted(full.busy.items(), key=lambda x: -x[1])[:3]
                units = ", ".join(f"{unit} {share * full.step:.0f}" for unit, share in busiest)
        yield f"| {' | '.join([name, *rates, *steps, units])} |"


def _changes() -> Iterator[str]:
    yield from _table("change", "full / causal", "by power", "clocks a step", "by power")
    for name, designs in CHANGES.items():
        gains, steps = [], []
        for machine in (B200, B200_BY_POWER):
            rates = [
                [case.tflops(case.predict(machine), machine) for case in (Case(design, False), Case(design, True))]
                for design in designs
            ]
            gains.append(" / ".join(f"{after / before - 1:+.1%}" for before, after in zip(*rates, strict=True)))
            steps.append(" to ".join(f"{Case(design, False).predict(machine).step:.0f}" for design in designs))
        yield f"| {' | '.join([name, *gains, *steps])} |"


def _timeline(name: str, clocks: float, png: Path | None) -> Iterator[str]:
    sm, start, _ = steady_state(_makers()[name])
    yield from timeline.text(sm, start, start + clocks)
    if png is not None:
        timeline.picture(sm, start, start + clocks, png)


if __name__ == "__main__":
    main()
