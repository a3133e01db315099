"""The runner of the self-check: whatever a step does becomes a verdict on its family, and the others go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from flash_attn_cute.selfcheck import runner
from flash_attn_cute.selfcheck.runner import Findings, Limits
from flash_attn_cute.selfcheck.steps import Step
from flash_attn_cute.selfcheck.worker import Request

WORKER = Path(__file__).parents[1] / "lib" / "selfcheck_worker.py"
LIMITS = Limits(start=20.0, end=5.0, all_steps=60.0)


def steps(*names: str, seconds: float = 20.0) -> list[Step]:
    """Steps that go wrong as their names say: "family: what"."""
    return [Step(name, name.partition(":")[0], _never, seconds=seconds) for name in names]


def _never(target: object) -> None:
    raise AssertionError("steps run in another process")


class Run:
    """A run of steps, with its log and what was said of each step."""

    def __init__(self, chosen: Sequence[Step], log: Path, limits: Limits = LIMITS, start: Sequence[str] = ()) -> None:
        names = [step.name for step in chosen]
        command = [sys.executable, str(WORKER)]
        request = Request("sm100", "portable", "cpu", "", 1, [*start, *names], command)
        self.said: list[str] = []
        with log.open("wb", buffering=0) as file:
            self.found: Findings = runner.run(request, chosen, file, say=self.said.append, limits=limits)
        self.log = log.read_text()

    @property
    def processes(self) -> int:
        return len({line.partition(":")[0] for line in self.log.splitlines() if line.startswith("pid")})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_steps_that_pass_share_a_process(log: Path) -> None:
    run = Run(steps("a: fine", "b: fine", "a: megabytes", "b: left out"), log)
    assert run.found == Findings({}, {}, {"b: left out": "no memory"}, True)
    assert run.processes == 1
    assert len(run.log) > 20 * 2**20
    assert [line.partition("s  ")[2] for line in run.said] == [
        "a: fine: done",
        "b: fine: done",
        "a: megabytes: done",
        "b: left out: done: no memory",
    ]


@pytest.mark.parametrize(
    ("what", "why", "processes"),
    [
        ("wrong", "out: 3 of 4 elements are wrong", 1),
        ("raise", "ValueError: no", 2),
        ("abort", "the process ended with signal SIGABRT", 2),
        ("exit", "the process ended with exit code 3", 2),
        ("no JSON", "it answered b'Segmentation fault'", 2),
        ("hang", "it did not end within 1 seconds", 2),
        ("leaves another", "it did not end within 1 seconds", 2),
    ],
)
def test_what_goes_wrong_is_a_verdict_on_its_family(what: str, why: str, processes: int, log: Path) -> None:
    """The next step runs, in a new process if need be; the family itself is not asked for again."""
    bad = steps(f"bad: {what}", seconds=2.0 if "1 seconds" in why else 40.0)
    run = Run([*steps("good: fine"), *bad, *steps("bad: fine", "good: left out")], log, LIMITS._replace(scale=0.5))
    assert run.found.failed == {"bad": f"bad: {what}: {why}"}
    assert run.found.left_out == {"good: left out": "no memory"}
    assert not run.found.unjudged
    assert run.found.is_final
    assert run.processes == processes
    assert "'bad: fine'" not in run.log


def test_no_process_is_left(log: Path) -> None:
    """Not even one that a step has started."""
    run = Run(steps("a: leaves another", "b: fine", seconds=1.0), log)
    groups = {int(line.split()[1].rstrip(":")) for line in run.log.splitlines() if line.startswith("pid")}
    assert groups
    for group in groups:
        assert not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_alive_in(pid, group)]


def _is_alive_in(pid: int, group: int) -> bool:
    try:
        state, _, its_group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(its_group) == group and state != "Z"


def test_steps_that_prepare_others_judge_no_family(log: Path) -> None:
    run = Run([Step(": abort", "", _never), *steps("a: fine")], log)
    assert run.found == Findings({}, {}, {}, True)


def test_steps_without_what_they_need_are_not_run(log: Path) -> None:
    needs = Step("masks: fine", "masks", _never, needs=("bad",))
    run = Run([*steps("bad: wrong"), needs, *steps("good: fine")], log)
    assert run.found.failed.keys() == {"bad"}
    assert "'masks: fine'" not in run.log
    assert "'failed': ['bad']" in run.log


@pytest.mark.parametrize("start", ["start: unable", "start: exit", "start: hang"])
def test_a_process_that_does_not_start_says_nothing_of_kernels(start: str, log: Path) -> None:
    run = Run(steps("a: fine", "b: fine"), log, LIMITS._replace(start=1.0 if "hang" in start else 20.0), [start])
    assert not run.found.failed
    assert not run.found.is_final
    assert run.found.unjudged.keys() == {"a", "b"}
    assert all(why.startswith("not judged, as") for why in run.found.unjudged.values())
    assert run.processes == 0


def test_a_full_gpu_says_nothing_of_kernels(log: Path) -> None:
    run = Run(steps("a: fine", "b: unable", "a: left out", "c: fine"), log)
    assert not run.found.failed
    assert not run.found.is_final
    assert run.found.unjudged == dict.fromkeys("bac", "not judged, as the GPU's memory is full")


def test_time_ends(log: Path) -> None:
    run = Run(steps("a: fine", "b: fine"), log, LIMITS._replace(all_steps=-1.0))
    assert run.found.unjudged.keys() == {"a", "b"}
    assert not run.found.is_final


def test_a_process_that_cannot_be_ended_ends_the_check(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may not leave the GPU. Nothing more is launched there, now or by a second run."""
    started: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: started.append(group))
    run = Run(steps("a: hang", "b: fine", seconds=1.0), log, LIMITS._replace(end=0.1))
    monkeypatch.undo()
    os.killpg(started[0], signal.SIGKILL)
    assert run.found.failed == {"a": "a: hang: it did not end within 1 seconds"}
    assert run.found.unjudged == {"b": "not judged, as the process of the step 'a: hang' cannot be ended"}
    assert run.found.is_final


CHILD = """
import time
from flash_attn_cute.selfcheck.worker import _end_with_parent
_end_with_parent()
print("ready", flush=True)
time.sleep(1000)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_worker_ends_with_its_parent() -> None:
    """Whatever it waits for, as where a job is killed."""
    command = [sys.executable, "-c", PARENT, CHILD]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=WORKER.parents[2])
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    group = os.getpgid(child)
    assert _is_alive_in(child, group)
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 10
    while _is_alive_in(child, group) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _is_alive_in(child, group)
