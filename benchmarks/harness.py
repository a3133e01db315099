"""Runs contenders against each other: one process, taking turns, results compared before anything is timed.

A suite has cases (what is computed), contenders (who computes it) and bars (what must hold). Of every case
each contender first runs once for its results, which must agree with the reference's, and once for its peak
memory; both runs warm it up. One that raises at first is reported, and takes no turns. Then all others take
turns, A B A B ..., with a gemm and a copy among them, so that whatever slows the machine down slows everyone.
Ratios are taken round by round: they are the result, and absolute figures only describe one machine.
"""

import functools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from benchmarks import work
from benchmarks.memory import peak_extra_bytes
from benchmarks.work import Work

Results: TypeAlias = Mapping[str, Tensor]
Run: TypeAlias = Callable[[], Results]
Clock: TypeAlias = Callable[[Callable[[], object]], float]

# Largest difference from the reference, relative to the largest value.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_MIN_ROUNDS = 3


class Unavailable(Exception):
    """Why a contender cannot run a case."""


class NoPart(Exception):
    """The case is none of the contender's, so that it is not spoken of."""


class Disagreement(Exception):
    """Contenders computed different things, so their times say nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One thing to compute. Suites derive their own, which carry the input tensors.

    Cases of one panel are averaged together, and plotted together: as lines if they have lengths.
    """

    name: str
    detail: str
    device: torch.device
    dtype: torch.dtype
    work: Work
    panel: str = ""
    length: int | None = None


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Contender(Generic[C]):
    """One implementation. ``make(case)`` returns what runs one repetition, or raises ``Unavailable`` or ``NoPart``.

    Everything a real user would do once and not every step (offsets, masks, compiling) belongs in ``make``.
    Its ratios are to the contender ``against``, if not to the reference. Its results are compared with the reference's,
    but for those that it ``omits``; none of them if it computes something else, whose time is of interest.
    """

    name: str
    make: Callable[[C], Run]
    against: str | None = None
    omits: frozenset[str] = frozenset()
    compared: bool = True


@dataclass(frozen=True)
class Bar:
    """In this case the contender must take at most ``most`` times as long as ``against``."""

    case: str
    contender: str
    against: str
    most: float


@dataclass(frozen=True)
class Limit:
    """In this case the contender may take so many seconds, and so many bytes at its peak; None: any number."""

    case: str
    contender: str
    seconds: float
    bytes: float | None


@dataclass(frozen=True)
class Suite(Generic[C]):
    """Cases are made one at a time, so that only one case's tensors exist.

    A contender takes turns for ``rounds`` rounds, or at least three and then until it has used ``seconds``.
    """

    name: str
    cases: Callable[[], Iterator[C]]
    contenders: Sequence[Contender[C]]
    reference: str
    bars: Sequence[Bar]
    rounds: int
    seconds: float
    limits: Sequence[Limit] = ()


class Spread(NamedTuple):
    """A median and the range that holds all but the extreme tenths."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The spread of at least two samples."""
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[-1])


@dataclass(frozen=True)
class CaseReport:
    """Measurements of one case: seconds by contender, FLOP/s of the gemm and bytes/s of the copy.

    Wide spreads of these rates, or changes from case to case, are signs of a busy machine. ``against`` names whom a
    contender's ratios are to. Contenders without ratios are not in it. ``ratios`` has time over time by contender and
    opponent: of the pairs in ``against``, and of those that a bar compares.
    """

    name: str
    detail: str
    panel: str
    length: int | None
    work: Work
    against: dict[str, str]
    times: dict[str, Spread]
    ratios: dict[tuple[str, str], Spread]
    peak_bytes: dict[str, int | None]
    unavailable: dict[str, str]
    flop_rate: Spread
    byte_rate: Spread

    @property
    def bound(self) -> float:
        """Seconds that no implementation can beat at the rates of the gemm and the copy."""
        return max(self.work.flop / self.flop_rate.median, self.work.bytes / self.byte_rate.median)

    def peak_ratio(self, contender: str, against: str) -> float | None:
        """Peak memory over peak memory; None if one of them is unknown or nothing."""
        mine, others = self.peak_bytes[contender], self.peak_bytes[against]
        return mine / others if mine and others else None


@dataclass(frozen=True)
class Verdict:
    """Whether a bar holds; ``ratio`` is None if it could not be measured, which counts as failing."""

    bar: Bar
    ratio: float | None

    @property
    def passed(self) -> bool:
        """Whether the bar holds."""
        return self.ratio is not None and self.ratio <= self.bar.most


@dataclass(frozen=True)
class Ruling:
    """Whether a limit holds; None in the place of what could not be measured, which counts as failing."""

    limit: Limit
    seconds: float | None
    bytes: int | None

    @property
    def passed(self) -> bool:
        """Whether the limit holds."""
        in_time = self.seconds is not None and self.seconds <= self.limit.seconds
        return in_time and (self.limit.bytes is None or (self.bytes is not None and self.bytes <= self.limit.bytes))


@dataclass(frozen=True)
class Mean:
    """Geometric means of a contender's ratios to another, over the cases of a panel that both ran."""

    panel: str
    contender: str
    against: str
    cases: int
    time: float
    peak: float | None


def measure(suite: Suite[C], case: C, clock: Clock | None = None) -> CaseReport:
    """Verifies and times every contender in one case.

    Args:
        suite: whose contenders.
        case: what they compute.
        clock: what times a run; None: a clock of the case's device.

    Raises:
        Disagreement: a contender's results differ from the reference's.
        Exception: whatever the reference raises.
    """
    runs, unavailable = _verified(suite, case)
    peak_bytes = {name: peak_extra_bytes(run, case.device) for name, run in runs.items()}

    ceilings = {"gemm": work.gemm(case.device, case.dtype), "copy": work.copy(case.device)}
    for ceiling in ceilings.values():
        ceiling.run()
    clock = clock or clock_of(case.device)
    everyone: dict[str, Callable[[], object]] = {**runs, **{name: ceiling.run for name, ceiling in ceilings.items()}}
    times = interleave(everyone, clock, suite.rounds, suite.seconds)
    rates = {
        name: Spread.of([ceiling.amount / seconds for seconds in times[name]]) for name, ceiling in ceilings.items()
    }
    against = _opponents(suite, runs)
    compared = [*against.items(), *((bar.contender, bar.against) for bar in suite.bars if bar.case == case.name)]
    return CaseReport(
        name=case.name,
        detail=case.detail,
        panel=case.panel,
        length=case.length,
        work=case.work,
        against=against,
        times={name: Spread.of(times[name]) for name in runs},
        ratios={(a, b): ratio(times[a], times[b]) for a, b in compared if runs.keys() >= {a, b}},
        peak_bytes=peak_bytes,
        unavailable=unavailable,
        flop_rate=rates["gemm"],
        byte_rate=rates["copy"],
    )


def ratio(times: Sequence[float], others: Sequence[float]) -> Spread:
    """Time over time, round by round; rounds that only one of the two ran are left out."""
    return Spread.of([a / b for a, b in zip(times, others, strict=False)])


def interleave(
    runs: Mapping[str, Callable[[], object]],
    clock: Clock,
    rounds: int,
    seconds: float,
) -> dict[str, list[float]]:
    """Times of each run, taking turns; after three rounds, one that has used its seconds sits out.

    Every other round is in the opposite order, so that no run always comes behind the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: -1 if index % 2 else 1]:
            if index < _MIN_ROUNDS or sum(times[name]) < seconds:
                times[name].append(clock(runs[name]))
    return times


def clock_of(device: torch.device) -> Clock:
    """Clock that times a run on a device, in seconds."""
    return cuda_seconds if device.type == "cuda" else _cpu_seconds


def judge(bars: Sequence[Bar], reports: Sequence[CaseReport]) -> list[Verdict]:
    """A verdict on every bar, also on those of cases that were not measured."""
    by_name = {report.name: report for report in reports}
    verdicts = []
    for bar in bars:
        report = by_name.get(bar.case)
        found = report and report.ratios.get((bar.contender, bar.against))
        verdicts.append(Verdict(bar, found.median if found else None))
    return verdicts


def rule(limits: Sequence[Limit], reports: Sequence[CaseReport]) -> list[Ruling]:
    """A ruling on every limit, also on those of cases that were not measured."""
    by_name = {report.name: report for report in reports}
    rulings = []
    for limit in limits:
        report = by_name.get(limit.case)
        if report is None or limit.contender not in report.times:
            rulings.append(Ruling(limit, None, None))
        else:
            peak = report.peak_bytes[limit.contender]
            rulings.append(Ruling(limit, report.times[limit.contender].median, peak))
    return rulings


def means(reports: Sequence[CaseReport]) -> list[Mean]:
    """The means of every contender that has ratios, panel by panel."""
    together: dict[tuple[str, str, str], list[CaseReport]] = {}
    for report in reports:
        for contender, against in report.against.items():
            together.setdefault((report.panel, contender, against), []).append(report)
    result = []
    for (panel, contender, against), those in together.items():
        times = [report.ratios[contender, against].median for report in those]
        peaks = [report.peak_ratio(contender, against) for report in those]
        known = [peak for peak in peaks if peak is not None]
        peak = statistics.geometric_mean(known) if len(known) == len(peaks) else None
        result.append(Mean(panel, contender, against, len(those), statistics.geometric_mean(times), peak))
    return result


def _verified(suite: Suite[C], case: C) -> tuple[dict[str, Run], dict[str, str]]:
    """Runs that agree with the reference's, which is the first of them, and why there are none of the others."""
    reference, *others = sorted(suite.contenders, key=lambda contender: contender.name != suite.reference)
    runs = {reference.name: reference.make(case)}
    expected = runs[reference.name]()
    unavailable = {}
    for contender in others:
        try:
            run = contender.make(case)
            results = run()
        except NoPart:
            continue
        except Unavailable as reason:
            unavailable[contender.name] = str(reason)
        except Exception as error:  # one contender's failure does not keep the others from being measured
            first, _, _ = "".join(traceback.format_exception_only(error)).strip().partition("\n")
            unavailable[contender.name] = f"raised {first}"
        else:
            if contender.compared:
                left = {part: x for part, x in expected.items() if part not in contender.omits}
                _verify(case, contender.name, results, reference.name, left)
            runs[contender.name] = run
    return runs, unavailable


def _verify(case: Case, name: str, results: Results, reference: str, expected: Results) -> None:
    if results.keys() != expected.keys():
        raise Disagreement(f"{case.name}: {reference} gives {list(expected)}, {name} gives {list(results)}")
    for part, x in results.items():
        difference, largest = (y.abs().max().item() for y in (x - expected[part], expected[part]))
        if not difference <= _TOLERANCES[case.dtype] * largest:  # NaN must not pass
            raise Disagreement(
                f"{case.name}: {part} of {name} is up to {difference:.1e} off that of {reference}, "
                f"whose largest value is {largest:.1e}"
            )


def _opponents(suite: Suite[C], runs: Mapping[str, Run]) -> dict[str, str]:
    """To whom each contender's ratios are, where both run."""
    pairs = {contender.name: contender.against or suite.reference for contender in suite.contenders}
    return {name: other for name, other in pairs.items() if name != suite.reference and {name, other} <= runs.keys()}


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    _results = run()  # freed after the clock has stopped
    return time.perf_counter() - start


def cuda_seconds(
    run: Callable[[], object], *, before: Callable[[], object] = lambda: None, ballast_rounds: int = 1
) -> float:
    """Seconds that one run takes the current GPU, which has first done what ``before`` launches."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Empties the L2 cache, and keeps the device busy until the host has launched the run: launching takes longer than
    # short kernels, and is not what is compared here.
    for _ in range(ballast_rounds):
        _ballast().zero_()
    before()
    start.record()
    _results = run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


@functools.cache
def _ballast() -> Tensor:
    return torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
