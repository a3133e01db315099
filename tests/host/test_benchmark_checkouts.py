"""Benchmarks of two checkouts of the package, by turns."""

import json
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import trees
from benchmarks.suites import attention


def test_rows_of_two_checkouts() -> None:
    """The suites' rows and a few beside them; none is lost because another has its name."""
    found = list(trees.rows().values())
    assert len(set(found)) == len(found)
    for kind in ("forward", "backward"):
        expected: set[trees.Row] = {(*heads, heads[2], None, True) for heads in attention.PACKED}
        expected |= {(heads, heads_k, d, d, length, causal) for heads, heads_k, d, length, causal in attention.DENSE}
        assert {row for of, row in found if of == kind} == expected | set(trees.MORE)
    assert {row[2] for of, row in found if of == "deterministic"} == {192, 256}, "smaller ones are in any case"
    assert {of for of, _ in found} == {"forward", "backward", "deterministic"}


Checkouts = tuple[Path, Path]


@pytest.fixture
def checkouts(tmp_path: Path) -> Checkouts:
    """Two folders that each have a package, which ends the process: with 41, and with 42."""
    folders = tmp_path / "old", tmp_path / "new"
    for code, folder in enumerate(folders, 41):
        (folder / "flash_attn_cute").mkdir(parents=True)
        (folder / "flash_attn_cute" / "__init__.py").write_text(f"raise SystemExit({code})")
    return folders


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Processes of checkouts are stood in for; returns who was asked what.

    Their times grow from turn to turn. The new one takes 1.5 times as long, and without a causal mask 6 times.
    """
    turns: list[tuple[str, str, int]] = []

    @contextmanager
    def server(checkout: Path) -> Iterator[trees.Ask]:
        own = 0

        def ask(name: str, times: int) -> list[float]:
            nonlocal own
            turns.append((checkout.name, name, times))
            own += 1
            factor = 1.0 if checkout.name == "old" else 1.5 if "causal" in name else 6.0
            return [factor * own**2] * times

        yield ask

    monkeypatch.setattr(trees, "_server", server)
    return turns


def test_checkouts_take_turns(
    asked: list[tuple[str, str, int]], checkouts: Checkouts, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["forward causal", "backward full"]
    found = trees.compare(*checkouts, names, rounds=3, times=2)
    # The first row's turns took 1, 4 and 9, the other one's 16, 25 and 36.
    assert found == {
        "forward causal": {"old": 4.0, "new": 6.0, "ratio": 1.5},
        "backward full": {"old": 25.0, "new": 150.0, "ratio": 6.0},
    }
    compiled, timed = asked[:4], asked[4:]
    assert sorted(compiled) == sorted((who, name, 1) for who in ("old", "new") for name in names)
    order = ["new", "old", "old", "new", "new", "old"]
    assert timed == [(who, name, 2) for name in names for who in order]
    assert re.search(r"backward full +25\.0000 +150\.0000 ms +6\.0000", capsys.readouterr().out)


def test_command_line_of_two_checkouts(
    asked: list[tuple[str, str, int]], checkouts: Checkouts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    trees.main([*map(str, checkouts), "--cases", r"^forward .*x256", "--rounds", "1", "--output", str(output)])
    content = json.loads(output.read_text())
    assert content["rows"].keys() == {"forward 8x256 8192 causal", "forward 8x256 8192 full"}
    assert content["geometric mean"] == pytest.approx(3.0)
    assert "geometric mean 3.0000, worst 6.0000 (forward 8x256 8192 full)" in capsys.readouterr().out
    assert {times for _, _, times in asked} == {1, 4}


@pytest.mark.parametrize("module", ["trees", "report", "harness", "work", "suites/attention"])
def test_processes_of_older_checkouts_find_what_they_import(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import this checkout's benchmarks beside a package that need not have the types of arguments."""
    monkeypatch.setitem(sys.modules, "flash_attn_cute.runtime.command_line", None)
    assert runpy.run_path(str(trees.ROOT / "benchmarks" / f"{module}.py"), run_name="imported")


def test_a_process_imports_the_package_of_its_checkout(checkouts: Checkouts) -> None:
    """The error that ends it is reported, not waited for."""
    for folder, code in zip(checkouts, (41, 42), strict=True):
        with (
            trees._server(folder) as ask,
            pytest.raises(RuntimeError, match=rf"{folder.name}: its process has ended with {code}, asked for 'a row'"),
        ):
            ask("a row", 1)
