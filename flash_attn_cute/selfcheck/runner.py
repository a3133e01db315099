"""Running steps of the self-check in another process, which is watched.

A step that hangs, crashes or raises is a verdict on its family. The other process is started afresh, so it shares
nothing with this one but the GPU. It is ended behind a step that leaves it unusable, and a new one goes on with the
next step. This process uses no GPU.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from flash_attn_cute.selfcheck.steps import Step
from flash_attn_cute.selfcheck.worker import Request

WORKER = (sys.executable or "python3", "-m", "flash_attn_cute.selfcheck.worker")
_ROOT = Path(__file__).parents[2]
# Profilers, which are not to watch another process, and what a CUDA graph cannot be captured with.
_NOT_PASSED_ON = (
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


class Limits(NamedTuple):
    """How long things may take, in seconds."""

    start: float = 240.0  # until a process has imported everything and opened the GPU
    end: float = 30.0  # until a process that was killed is gone
    all_steps: float = 480.0  # ranks of a job wait for each other for ten minutes, by default
    scale: float = 1.0  # of a step's own limit


class Findings(NamedTuple):
    """Verdicts of steps, by the family that each judges."""

    failed: dict[str, str]  # families, and what failed
    unjudged: dict[str, str]  # families that some step has not judged, and why
    left_out: dict[str, str]  # steps that say nothing on this machine, and why
    is_final: bool  # whether another run would find the same


def run(
    request: Request,
    steps: Sequence[Step],
    log: IO[bytes],
    *,
    say: Callable[[str], None] = lambda line: None,
    limits: Limits = Limits(),  # noqa: B008
) -> Findings:
    """Runs steps one after the other; a family that failed is not asked for again.

    The process that runs them is given the request; all its output goes to the log. ``say`` receives a line for each
    step that is over. Raises OSError if the process cannot be started.
    """
    failed: dict[str, str] = {}
    unjudged: dict[str, str] = {}
    left_out: dict[str, str] = {}
    worker: _Worker | None = None
    why_not, is_final = "", True
    start = time.monotonic()
    try:
        for step in steps:
            if not why_not and time.monotonic() > start + limits.all_steps:
                why_not, is_final = f"{limits.all_steps:.0f} seconds were over", False
            if why_not:
                unjudged.setdefault(step.family, f"not judged, as {why_not}")
            if why_not or not step.judged_by(failed):
                continue
            begin = time.monotonic()
            if worker is None:
                worker = _Worker(request, log)
                answer = worker.answer(limits.start)
                if answer.keys() & {"hung", "broken"}:  # before it came to any step
                    answer = {"unable": f"its process did not start ({''.join(map(str, answer.values()))})"}
            if "unable" not in answer:
                worker.ask(step.name, failed)
                answer = worker.answer(step.seconds * limits.scale)
            kind, what = next(iter(answer.items()))
            say(f"{time.monotonic() - begin:6.1f} s  {step.name}: {kind}{f': {what}' if what else ''}")
            if kind == "unable":
                why_not, is_final = str(what), False
                unjudged.setdefault(step.family, f"not judged, as {why_not}")
            elif kind == "done" and what:
                left_out[step.name] = str(what)
            elif kind != "done":
                failed.setdefault(step.family, f"{step.name}: {what}")
            if kind not in ("done", "wrong"):
                if not worker.end(limits.end):
                    # A kernel does not leave the GPU. No more of them are launched, now or by another process.
                    why_not, is_final = f"the process of the step {step.name!r} cannot be ended", True
                worker = None
    finally:
        if worker is not None:
            worker.end(limits.end)
    failed.pop("", None)  # a step that only prepares others
    unjudged.pop("", None)
    return Findings(failed, {name: why for name, why in unjudged.items() if name not in failed}, left_out, is_final)


class _Worker:
    """A process that runs steps."""

    def __init__(self, request: Request, log: IO[bytes]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        environment |= {"FLASH_ATTN_CUTE_SELFCHECK": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        self._answers, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*request.command, json.dumps(request._asdict()), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                cwd=_ROOT,  # where it finds this package
                env=environment,
                start_new_session=True,  # with all that it starts
            )
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(write)
        self._read = b""

    def ask(self, step: str, failed: dict[str, str]) -> None:
        """Has it run a step."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, and so is its answer
            self._process.stdin.write(json.dumps({"step": step, "failed": list(failed)}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """Waits for its answer, see ``worker``; gives {"hung": ...} or {"broken": ...} if there is none."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(max(0.0, until - time.monotonic())):
                    return {"hung": f"it did not end within {seconds:.0f} seconds"}
                more = os.read(self._answers, 2**16)
                if not more:
                    return {"broken": f"the process ended with {self._exit()}"}
                self._read += more
        line, _, self._read = self._read.partition(b"\n")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            return {"broken": f"it answered {line!r}"}
        return found

    def _exit(self) -> str:
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "nothing but its answers"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def end(self, seconds: float) -> bool:
        """Ends it and all that it has started; returns whether it is gone."""
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._answers)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # likewise: a name of a step was still in the buffer
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
