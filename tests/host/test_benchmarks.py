"""The benchmark harness: what it counts, how it takes turns, and that it never calls a bad run good."""

import json
import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import harness, plot, report
from benchmarks.harness import (
    Bar,
    Case,
    CaseReport,
    Contender,
    Disagreement,
    Limit,
    Mean,
    NoPart,
    Results,
    Run,
    Spread,
    Suite,
    Unavailable,
)
from benchmarks.memory import peak_extra_bytes
from benchmarks.suites.passes import Forward, PassCase, run_passes
from benchmarks.work import Passes, Work, attention_flop, causal_area

pytestmark = pytest.mark.usefixtures("small_ceilings")

CPU = torch.device("cpu")
CASE = Case(name="case", detail="a toy", device=CPU, dtype=torch.float32, work=Work(1e6, 1e6))


def toy(*contenders: Contender[Case], bars: Sequence[Bar] = (), cases: Sequence[str] = ("case",)) -> Suite[Case]:
    """A suite of toy cases of these names, against a contender that computes ones."""
    return Suite(
        name="toy",
        cases=lambda: (replace(CASE, name=name) for name in cases),
        contenders=(constant("reference", 1.0), *contenders),
        reference="reference",
        bars=bars,
        rounds=3,
        seconds=1.0,
    )


def constant(name: str, value: float) -> Contender[Case]:

    def run() -> Results:
        return {"out": torch.full((4,), value)}

    return Contender(name, lambda case: run)


def missing(case: Case) -> Run:
    raise Unavailable("no such library")


def measured(
    panel: str, against: dict[str, str], peak_bytes: dict[str, int | None], **times: list[float]
) -> CaseReport:
    """A report of these times at a gemm of 1 GFLOP/s."""
    return CaseReport(
        name="case",
        detail="",
        panel=panel,
        length=None,
        work=Work(1e9, 1e6),
        against=against,
        times={name: Spread.of(x) for name, x in times.items()},
        ratios={pair: harness.ratio(*(times[name] for name in pair)) for pair in against.items()},
        peak_bytes=peak_bytes,
        unavailable={},
        flop_rate=Spread(1e9, 1e9, 1e9),
        byte_rate=Spread(1e9, 1e9, 1e9),
    )


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
    assert turns[:6] == ["fast", "slow", "slow", "fast", "fast", "slow"], "every other round is the other way round"
    assert turns[6:] == ["fast"] * 2, "after three rounds the slow one has used its seconds"
    assert times == {"fast": [1.0] * 5, "slow": [10.0] * 3}


def test_ratios_are_taken_round_by_round() -> None:
    result = measured("", {"b": "a"}, {}, a=[1.0, 2.0, 4.0, 8.0], b=[3.0, 6.0, 12.0])
    assert result.ratios["b", "a"] == (3.0, 3.0, 3.0)
    assert result.bound == 1.0


def test_means_are_geometric_and_over_a_panel() -> None:
    known: dict[str, int | None] = {"a": 10, "b": 20, "c": 5}
    reports = [
        measured("one", {"b": "a", "c": "b"}, known, a=[1.0, 1.0], b=[2.0, 2.0], c=[1.0, 1.0]),
        measured("one", {"b": "a"}, {"a": 10, "b": 80}, a=[1.0, 1.0], b=[8.0, 8.0]),
        measured("two", {"b": "a"}, {"a": 0, "b": None}, a=[2.0, 2.0], b=[1.0, 1.0]),
    ]
    rounded = [
        replace(mean, time=round(mean.time, 9), peak=mean.peak and round(mean.peak, 9))
        for mean in harness.means(reports)
    ]
    assert rounded == [
        Mean("one", "b", "a", 2, 4.0, 4.0),
        Mean("one", "c", "b", 1, 0.5, 0.25),
        Mean("two", "b", "a", 1, 0.5, None),
    ]
    assert report.mean_line(harness.means(reports)[0]).startswith(
        "mean: one: b takes 4 of the time of a and 4.00 of its"
    )


INCOMPLETE = Contender[Case]("incomplete", lambda case: lambda: {})
BROKEN = Contender[Case]("broken", lambda case: lambda: {"out": torch.ones(4, device="nowhere")})


@pytest.mark.parametrize(
    ("suite", "error", "said"),
    [
        (toy(constant("wrong", 1.001)), Disagreement, "out of wrong"),
        (toy(constant("wrong", torch.nan)), Disagreement, "out of wrong"),
        (toy(INCOMPLETE), Disagreement, "incomplete gives"),
        (replace(toy(Contender("missing", missing)), reference="missing"), Unavailable, "no such library"),
        (replace(toy(BROKEN), reference="broken"), RuntimeError, "nowhere"),
    ],
)
def test_errors(suite: Suite[Case], error: type[Exception], said: str) -> None:
    """Contenders disagree, or the reference has no results."""
    with pytest.raises(error, match=said):
        harness.measure(suite, CASE)


def test_a_contender_that_raises_is_reported() -> None:
    """Nothing is said of one that has no part in the case."""
    refused, absent = (
        Contender[Case](name, mock.Mock(side_effect=error))
        for name, error in (("refused", AssertionError), ("absent", NoPart))
    )
    opponent = replace(constant("opponent", 1.0), against="broken")
    result = harness.measure(toy(BROKEN, refused, absent, opponent, constant("same", 1.0)), CASE)
    assert list(result.times) == ["reference", "opponent", "same"]
    assert result.unavailable.pop("broken").startswith("raised RuntimeError: ")
    assert result.unavailable == {"refused": "raised AssertionError"}
    assert result.against == {"same": "reference"}, "the one against whom the opponent is compared did not run"
    assert "  refused: unavailable: raised AssertionError" in report.table(result).splitlines()
    assert "absent" not in report.table(result)


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
    assert case["work"] == [1e6, 1e6]
    assert {name: len(found) for name, found in case["measured"].items()} == {"reference": 4, "same": 5}
    assert case["unavailable"] == {"absent": "no such library"}
    assert (tmp_path / "new" / "toy-cpu-float32.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("limit", "code", "line"),
    [
        (Limit("case", "reference", 1e9, 1e9), 0, "limit: pass: case: reference takes"),
        (Limit("case", "reference", 1e9, None), 0, "MB (at most 1000000000000.0 ms)"),
        (Limit("case", "reference", 1e-9, 1e9), 1, "limit: FAIL: case: reference takes"),
        (Limit("case", "reference", 1e9, -1), 1, "limit: FAIL: case: reference takes"),
        (Limit("case", "absent", 1e9, None), 1, "limit: FAIL: case: absent takes not measured, at its peak unknown"),
    ],
)
def test_limits(
    limit: Limit, code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(harness, "peak_extra_bytes", lambda run, device: 5)
    monkeypatch.setitem(cli.SUITES, "toy", lambda device, dtype: replace(toy(), limits=[limit]))
    assert cli.main(["toy", "--device", "cpu", "--out", str(tmp_path)]) == code
    assert line in capsys.readouterr().out
    unknown = harness.rule([replace(limit, contender="a", bytes=1.0)], [measured("", {}, {"a": None}, a=[1e-12] * 2)])
    assert not unknown[0].passed


def test_without_matplotlib_everything_but_the_plot_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(cli.SUITES, "toy", lambda device, dtype: toy())
    assert cli.main(["toy", "--device", "cpu", "--dtype", "float32", "--out", str(tmp_path)]) == 0
    assert "no plot: matplotlib is missing" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["toy-cpu-float32.json"]


def test_chosen_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Bars of the others are not judged; a choice of none is an error."""
    names = ["2k causal", "8k causal", "8k full"]
    suite = toy(constant("same", 1.0), bars=[Bar(name, "same", "reference", 1e9) for name in names], cases=names)
    monkeypatch.setitem(cli.SUITES, "toy", lambda device, dtype: suite)
    command = ["toy", "--device", "cpu", "--out", str(tmp_path), "--commit", "c0ffee-dirty", "--cases"]
    assert cli.main([*command, "^8k"]) == 0
    printed = capsys.readouterr().out
    assert "2k" not in printed
    assert "mean: same takes" in printed
    assert "cases: 2" in printed
    content = json.loads((tmp_path / "toy-cpu-float32.json").read_text())
    assert [case["name"] for case in content["cases"]] == re.findall(r"bar: pass: ([^:]*)", printed) == names[1:]
    assert (content["environment"]["commit"], content["environment"]["dirty"]) == ("c0ffee", True)
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "16k"])
    assert "no case of toy matches '16k'" in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(case: Case) -> Run:
        if case.name == "third":
            raise KeyboardInterrupt
        return lambda: {"out": torch.ones(4)}

    names = ["first", "second", "third"]
    suite = toy(Contender("cut off", make), cases=names)
    monkeypatch.setitem(cli.SUITES, "toy", lambda device, dtype: suite)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["toy", "--device", "cpu", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "toy-cpu-float32.json").read_text())
    assert [case["name"] for case in content["cases"]] == ["first", "second"]
    assert [path.name for path in tmp_path.iterdir()] == ["toy-cpu-float32.json"]


def test_a_result_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    report.write_json(path, {"commit": "a"}, [])
    write = Path.write_text

    def cut_off(self: Path, text: str) -> None:
        write(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(KeyboardInterrupt):
        report.write_json(path, {"commit": "b"}, [])
    assert json.loads(path.read_text())["environment"] == {"commit": "a"}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Times with six digits, medians of ratios, but for the inverse of another one, and of rates."""
    path = tmp_path / "results.json"
    first = measured("one", {"b": "a"}, {"a": 10, "b": None}, a=[1.23456789e-4] * 3, b=[3e-5, 6e-5])
    rate, pair = Spread(8.25e14, 8e14, 8.5e14), Spread(2.125, 1.5, 2.5)
    second = measured("two", {"b": "a"}, {"a": 7, "b": 8, "c": 9}, a=[1.0, 2.0], b=[3.0, 6.0], c=[4.0, 6.0])
    second = replace(second, length=512, unavailable={"d": "no such library"}, flop_rate=rate)
    written = replace(second, ratios=second.ratios | {("c", "b"): pair, ("a", "b"): pair})
    report.write_json(path, {}, [first, written])
    one, other = report.read_json(path)
    assert one.times["a"] == pytest.approx([1.23457e-4] * 3, rel=1e-9)
    assert one.ratios["b", "a"].median == pytest.approx(first.ratios["b", "a"].median, rel=1e-5)
    assert other.flop_rate.median == pytest.approx(rate.median)
    expected = second.ratios | {("c", "b"): pair}
    assert {names: found.median for names, found in other.ratios.items()} == {
        names: found.median for names, found in expected.items()
    }
    for before, after in ((first, one), (second, other)):
        assert after.times.keys() == before.times.keys()
        rough = {name: getattr(before, name) for name in ("times", "ratios", "flop_rate", "byte_rate")}
        assert replace(after, **rough) == before


def test_a_record_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases without lengths are points, cases with lengths are lines."""
    pytest.importorskip("matplotlib")
    case = measured("one", {"b": "a"}, {"a": 10, "b": 20}, a=[1.0, 2.0], b=[3.0, 6.0])
    sizes: dict[str, list[int]] = {}
    for name, reports in (("points", [case] * 3), ("lines", [replace(case, length=n) for n in (512, 1024)])):
        report.write_json(tmp_path / f"{name}.json", {}, reports)
        plot.main([str(tmp_path / f"{name}.json"), "--out", str(tmp_path / "plots")])
        picture = tmp_path / "plots" / f"{name}.png"
        assert str(picture) in capsys.readouterr().out
        *sizes[name], _depth, colour_type = struct.unpack(">IIBB", picture.read_bytes()[16:26])
        assert colour_type == 3, "it has a palette"
    assert sizes["points"][0] == 900
    assert sizes["lines"][1] == 450


def test_peak_memory_of_a_known_allocation() -> None:
    peak = peak_extra_bytes(lambda: torch.ones(1 << 24), CPU)
    if peak is None:
        pytest.skip("this platform does not tell the peak of resident memory")
    assert peak == pytest.approx(1 << 26, rel=0.1)


@pytest.mark.parametrize(
    ("passes", "calls", "names"),
    [("forward", 3, ["out"]), ("backward", 1, ["dq", "dk", "dv"]), ("both", 3, ["dq", "dk", "dv"])],
)
def test_passes_of_a_contender(passes: Passes, calls: int, names: list[str]) -> None:
    """A backward pass has its forward pass behind it; of both, both are run every time."""
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=passes != "forward") for _ in range(3))
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "dout": torch.randn(1, 5, 2, 8)}
    case = PassCase(**vars(CASE), passes=passes, **tensors)
    count = 0

    def make(case: PassCase) -> Forward:
        def forward() -> torch.Tensor:
            nonlocal count
            count += 1
            return case.q * case.k + case.v

        return forward

    run = run_passes(make)(case)
    results = [run() for _ in range(3)][-1]
    assert count == calls
    assert list(results) == names
    if passes != "forward":
        assert torch.equal(results["dq"], case.dout * k)


def test_results_that_are_not_compared() -> None:
    other = replace(constant("other", 2.0), compared=False)
    some = replace(INCOMPLETE, name="some", omits=frozenset({"out"}))
    assert list(harness.measure(toy(other, some), CASE).times) == ["reference", "other", "some"]
