"""The benchmark of host time and first calls: whom it measures, and that it hides no failure."""

import json
from typing import Any

import pytest
import torch

from benchmarks import host

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "flash_attn_cute", "SDPA"
    monkeypatch.setattr(host, "CONTENDERS", {name: host.CONTENDERS[name] for name in names} | {"absent": "absent:f"})


def test_contenders_agree() -> None:
    q, k, v, _ = host.operands(CPU, 40, 64)
    ours, sdpa = (host.attention(name)(q, k, v).float() for name in ("flash_attn_cute", "SDPA"))
    assert (ours - sdpa).abs().max() < 0.05
    assert not torch.equal(ours[:, 0], ours[:, 1])


def test_calls_are_measured_in_every_mode() -> None:
    times = host.calls(CPU, rounds=1, repetitions=1)
    assert list(times) == [*host.MODES, "backward"]
    assert all(each.keys() == {"flash_attn_cute", "SDPA"} and min(each.values()) > 0 for each in times.values())


def test_first_calls_are_measured_apart(capsys: pytest.CaptureFixture[str]) -> None:
    host.first_calls("SDPA", "cpu")
    seconds = json.loads(capsys.readouterr().out)
    assert list(seconds) == ["import", "first forward", "first backward"]
    assert min(seconds.values()) >= 0


class Done:
    """A process that is over."""

    def __init__(self, name: str, *, of_absence: str = "ModuleNotFoundError: No module named 'absent'") -> None:
        self.returncode = int(name == "absent")
        self.stdout, self.stderr = '{"import": 0.5}', of_absence


def test_processes_find_no_kernels_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    folders, bytecode = [], set()

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Done:
        bytecode.add((env["PYTHONPYCACHEPREFIX"], env["PYTHONDONTWRITEBYTECODE"]))
        if "first_calls" not in command[-1]:  # imports alone
            return Done("everything")
        folders.append(env["FLASH_ATTN_CUTE_CACHE_DIR"])
        return Done(command[-1].split("'")[1])

    monkeypatch.setattr("subprocess.run", run)
    assert host.first(CPU, rounds=2) == {"import": {"flash_attn_cute": 0.5, "SDPA": 0.5}}
    assert len(set(folders)) == 6  # no process finds the kernels of another
    assert len(bytecode) == 1  # but all find the same bytecode


def test_failures_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **options: Done("absent", of_absence="RuntimeError: no GPU"))
    with pytest.raises(RuntimeError, match="flash_attn_cute: its first calls failed:\nRuntimeError: no GPU"):
        host.first(CPU, rounds=1)


def test_a_table_has_a_line_a_row() -> None:
    lines = host.table({"recording": {"ours": 12.34, "SDPA": 5.0}}, "us", 1).splitlines()
    assert [line.split() for line in lines] == [["us", "ours", "SDPA"], ["recording", "12.3", "5.0"]]
