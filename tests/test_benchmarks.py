"""The benchmark harness: what it counts, how it takes turns, and that it never calls a bad run good."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import harness
from benchmarks.harness import Bar, Case, Contender, Disagreement, Results, Run, Suite, Unavailable
from benchmarks.memory import peak_extra_bytes
from benchmarks.suites import attention, packed
from benchmarks.work import Passes, Work, attention_flop, causal_area

CPU = torch.device("cpu")
CASE = Case(name="case", detail="a toy", device=CPU, dtype=torch.float32, work=Work(1e6, 1e6))
TINY = (
    packed.Shape("ragged", (5, 1, 17), 2, 2, 8),
    packed.Shape("gqa", (9, 30), 4, 2, 16),
)


def toy(*contenders: Contender[Case], bars: Sequence[Bar] = ()) -> Suite[Case]:
    """A suite of the one toy case, against a contender that computes ones."""
    return Suite(
        name="toy",
        cases=lambda: iter([CASE]),
        contenders=(constant("reference", 1.0), *contenders),
        reference="reference",
        bars=bars,
        rounds=3,
        seconds=1.0,
    )


def constant(name: str, value: float) -> Contender[Case]:
    """A contender whose every result is one value."""

    def run() -> Results:
        return {"out": torch.full((4,), value)}

    return Contender(name, lambda case: run)


def missing(case: Case) -> Run:
    """Makes nothing."""
    raise Unavailable("no such library")


def test_flop_counts_visible_pairs() -> None:
    lengths, nheads, d, d_v = (1, 7, 30), 3, 16, 8
    area = sum(bool(j <= i) for length in lengths for i in range(length) for j in range(length))
    assert causal_area(lengths) == area
    forward = sum(2 * d + 2 * d_v for _ in range(area) for _ in range(nheads))
    assert attention_flop(area, nheads, d, d_v, "forward") == forward
    assert attention_flop(area, nheads, d, d_v, "backward") == 2.5 * forward
    assert attention_flop(area, nheads, d, d_v, "both") == 3.5 * forward
    assert attention_flop(area, nheads, d, d, "forward") == 4 * area * nheads * d


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    seconds = {"fast": 1.0, "slow": 10.0}

    def clock(run: object) -> float:
        assert callable(run)
        return seconds[run()]

    def turn(name: str) -> str:
        turns.append(name)
        return name

    times = harness.interleave({"fast": lambda: turn("fast"), "slow": lambda: turn("slow")}, clock, 5, 25.0)
    assert turns == ["fast", "slow"] * 3 + ["fast"] * 2, "after three rounds the slow one has used its seconds"
    assert times == {"fast": [1.0] * 5, "slow": [10.0] * 3}


def test_ratios_are_taken_round_by_round() -> None:
    report = harness.CaseReport(
        name="case",
        detail="",
        work=Work(1e9, 1e6),
        reference="a",
        times={"a": [1.0, 2.0, 4.0, 8.0], "b": [3.0, 6.0, 12.0]},
        peak_bytes={},
        unavailable={},
        rates={"gemm": [1e9, 1e9], "copy": [1e9, 1e9]},
    )
    assert report.ratio("b", "a") == (3.0, 3.0, 3.0)
    assert report.bound == 1.0


@pytest.mark.parametrize("value", [1.001, torch.nan])
def test_disagreement_is_an_error(value: float) -> None:
    with pytest.raises(Disagreement, match="out of wrong"):
        harness.measure(toy(constant("wrong", value)), CASE)


def test_missing_results_are_an_error() -> None:
    incomplete = Contender[Case]("incomplete", lambda case: lambda: {})
    with pytest.raises(Disagreement, match="incomplete gives"):
        harness.measure(toy(incomplete), CASE)


def test_the_reference_must_be_available() -> None:
    suite: Suite[Case] = Suite("toy", lambda: iter([CASE]), (Contender("a", missing),), "a", (), 3, 1.0)
    with pytest.raises(Unavailable, match="no such library"):
        harness.measure(suite, CASE)


@pytest.mark.parametrize(
    ("most", "contender", "code", "line"),
    [
        (1e9, "same", 0, "bar: pass: case: same takes"),
        (1e-9, "same", 1, "bar: FAIL: case: same takes"),
        (1e9, "absent", 1, "bar: FAIL: case: absent takes not measured of the time of reference"),
    ],
)
def test_command_line(
    most: float,
    contender: str,
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    bars = [Bar("case", contender, "reference", most)]
    suite = toy(constant("same", 1.0), Contender("absent", missing), bars=bars)
    monkeypatch.setitem(cli.SUITES, "toy", lambda device, dtype: suite)
    assert cli.main(["toy", "--device", "cpu", "--out", str(tmp_path / "new")]) == code
    printed = capsys.readouterr().out
    assert line in printed
    assert "absent: unavailable: no such library" in printed

    content = json.loads((tmp_path / "new" / "toy-cpu-float32.json").read_text())
    assert content["environment"]["torch"] == torch.__version__
    (case,) = content["cases"]
    assert case["name"] == "case"
    assert case["work"] == {"flop": 1e6, "bytes": 1e6}
    assert {name: len(times) for name, times in case["times"].items()} == {"reference": 3, "same": 3}
    assert case["unavailable"] == {"absent": "no such library"}
    assert content["bars"][0]["passed"] is (code == 0)
    assert (tmp_path / "new" / "toy-cpu-float32.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_everything_but_the_plot_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(cli.SUITES, "toy", lambda device, dtype: toy())
    assert cli.main(["toy", "--device", "cpu", "--dtype", "float32", "--out", str(tmp_path)]) == 0
    assert "no plot: matplotlib is missing" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["toy-cpu-float32.json"]


def test_peak_memory_of_a_known_allocation() -> None:
    peak = peak_extra_bytes(lambda: torch.ones(1 << 24), CPU)
    if peak is None:
        pytest.skip("this platform does not tell the peak of resident memory")
    assert peak == pytest.approx(1 << 26, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_suite_on_tiny_shapes(dtype: torch.dtype) -> None:
    suite = replace(packed.suite(CPU, dtype, TINY), rounds=3)
    reports = [harness.measure(suite, case) for case in suite.cases()]
    assert [report.name for report in reports] == ["ragged", "gqa"]
    assert reports[0].work.flop == attention_flop(15 + 1 + 153, 2, 8, 8, "both")
    for report in reports:
        assert list(report.times) == [packed.LOOP, packed.PACKAGE, packed.PADDED]
    verdicts = harness.judge(suite.bars, reports)
    assert [verdict.bar.case for verdict in verdicts] == (["ragged"] if dtype == torch.float32 else [])
    assert all(verdict.ratio is not None for verdict in verdicts)


@pytest.mark.parametrize(
    ("passes", "calls", "names"),
    [("forward", 3, ["out"]), ("backward", 1, ["dq", "dk", "dv"]), ("both", 3, ["dq", "dk", "dv"])],
)
def test_passes_of_a_contender(passes: Passes, calls: int, names: list[str]) -> None:
    """A backward pass has its forward pass behind it; of both, both are run every time."""
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=passes != "forward") for _ in range(3))
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "dout": torch.randn(1, 5, 2, 8)}
    case = attention.AttentionCase(**vars(CASE), **tensors, causal=False, cu_seqlens=None, max_seqlen=5)
    count = 0

    def make(case: attention.AttentionCase) -> attention.Forward:
        def forward() -> torch.Tensor:
            nonlocal count
            count += 1
            return case.q * case.k + case.v

        return forward

    run = attention._passes(passes, make)(case)
    results = [run() for _ in range(3)][-1]
    assert count == calls
    assert list(results) == names
    if passes != "forward":
        assert torch.equal(results["dq"], case.dout * k)


def test_bars_of_the_attention_suites() -> None:
    expected: dict[Passes, set[float]] = {
        "forward": {0.98},
        "backward": {0.98, 1.05, 1.35},
        "both": {0.98, 1.05},
    }
    for passes, least in expected.items():
        suite = attention.suite(passes, CPU, torch.bfloat16)
        assert suite.name == passes
        bars = [bar for bar in suite.bars if bar.against == attention.FA4]
        assert len(bars) == len(attention.DENSE) + len(attention.PACKED)
        assert {round(1 / bar.most, 6) for bar in bars} == least
