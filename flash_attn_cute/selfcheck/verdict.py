"""The verdict of the self-check on a kind of GPU, on disk.

It lies in the folder ``selfcheck`` of the folder of compiled kernels, under the name of all that it holds for: the
GPU's name and size, the driver, and the sources, compiler and settings that kernels are made of. Under another of these
it is not found, and the check runs anew. ``jit.disk`` writes it whole, and takes one that is damaged, or another
user's, for none.
"""

import functools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from flash_attn_cute.jit import disk, key
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.runtime import settings
from flash_attn_cute.selfcheck import runner, steps
from flash_attn_cute.selfcheck.worker import Request

_PACKAGE = Path(__file__).parents[1]
_DRIVER = Path("/proc/driver/nvidia/version")
_UNFINISHED_FOR = 600.0  # seconds that a verdict holds which another run may change
_WAIT_FOR_OTHERS = 500.0  # seconds, for another process that runs the check: a little longer than it may take
_ALL_STEPS = 7200.0  # seconds, with the long steps
_POLL = 1.0  # seconds, or up to twice as many, between looks at whether they have ended
_REPETITIONS, _REPETITIONS_OF_ALL = 30, 200


class Gpu(NamedTuple):
    """A GPU as verdicts know it."""

    device: str  # its number in this process, such as "cuda:0"; verdicts do not depend on it
    uuid: str  # likewise
    architecture: str
    name: str
    capability: tuple[int, int]
    num_sms: int
    memory: int  # GiB
    driver: str

    @classmethod
    def of(cls, architecture: str, index: int) -> "Gpu":
        """The GPU of a number, with kernels of an architecture."""
        found = torch.cuda.get_device_properties(index)
        capability = (found.major, found.minor)
        memory = round(found.total_memory / 2**30)
        sizes = found.multi_processor_count, memory, _driver()
        return cls(f"cuda:{index}", str(found.uuid), architecture, found.name, capability, *sizes)

    def identity(self) -> dict[str, Any]:
        """All that a verdict holds for, as JSON. Imports cutlass."""
        gpu = self._asdict()
        del gpu["device"], gpu["uuid"]
        return {"kind": "verdict", "gpu": gpu, "host code": _host_code(), **key.surroundings()}


def _driver() -> str:
    return _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else "unknown"


@functools.cache
def _host_code() -> str:
    """A hash of the code that plans and launches kernels, makes tables for them, and checks them."""
    rooms = ("backends", "problem", "selfcheck", "sparsity")
    return key.hash_of(path for room in rooms for path in key.files_below(room))


@dataclass(frozen=True)
class Verdict:
    """Result of the self-check on a kind of GPU."""

    # Of kernels, and why each is not to serve calls that name no backend; None if it has passed.
    families: dict[str, str | None]
    left_out: dict[str, str]  # steps that said nothing there, and why
    is_final: bool  # whether another run would find the same
    made: float  # when, in seconds since the epoch
    seconds: float  # how long it took
    log: str  # the file with all details

    def refusal(self, families: Iterable[str]) -> str:
        """Why a call that needs these families is not served; empty if it is."""
        wrong = [
            f"{name} ({why or 'not among its steps'})"
            for name in sorted(families)
            if (why := self.families.get(name, "")) is not None
        ]
        return f"its self-check on this GPU has not passed {'; '.join(wrong)}. The log is {self.log}" if wrong else ""


def read(folder: disk.Folder, name: str, since: float = 0.0) -> Verdict | None:
    """The verdict of a name, if there is a whole one that still holds and was made after a time."""
    content = folder.read(name)
    if content is None:
        return None
    try:
        found = Verdict(**json.loads(content))
    except (ValueError, TypeError):  # of another version, or not written by this package
        return None
    # Either way: where the clock was ahead, it may have been set right.
    holds = found.is_final or abs(time.time() - found.made) < _UNFINISHED_FOR
    return found if holds and found.made >= since else None


def stored(gpu: Gpu, since: float = 0.0) -> Verdict | None:
    """The verdict on a GPU that is on disk, if there is one, made after ``since``; raises as ``made`` does."""
    path = settings.cache_dir()
    if path is None:
        return None
    try:
        with disk.Folder(path, create=False), disk.Folder(path / "selfcheck", create=False, kind="verdict") as folder:
            return read(folder, key.name(gpu.identity()), since)
    except FileNotFoundError:
        return None


def made(gpu: Gpu, since: float = 0.0, *, say: Callable[[str], None], check: "Check | None" = None) -> Verdict | str:
    """The verdict on a GPU, made now if there is none; or why none can be made.

    Of processes that share the folder, and of those of a machine, one runs the check (None: ``checked``) and the others
    wait for it; ``say`` receives a line about that. No verdict made before ``since``, in seconds since the epoch, is
    taken.

    Raises:
        OSError: the folder cannot be written to, or no process started.
        UnsafeFolderError: others could write to it.
    """
    path = settings.cache_dir()
    if path is None:
        return "FLASH_ATTN_CUTE_CACHE_DIR is 0, so that no verdict of its self-check can be kept"
    name, until, has_said = key.name(gpu.identity()), time.monotonic() + _WAIT_FOR_OTHERS, False
    # The outer folder is opened, too, as it is refused if others could have put the inner one there.
    with disk.Folder(path), disk.Folder(path / "selfcheck", kind="verdict") as folder:
        while True:
            with folder.lock(name, waits=False) as is_held:
                found = read(folder, name, since)
                if found is not None:
                    return found
                if is_held is None:
                    return (
                        "its self-check is not run by all processes at once, and neither the folder nor /tmp has locks"
                    )
                if is_held:
                    return _made(gpu, folder, path / "selfcheck", say, check or checked)
            if time.monotonic() > until:
                return f"another process has been running its self-check for {_WAIT_FOR_OTHERS:.0f} seconds"
            if not has_said:
                say("another process checks this kind of GPU; waiting for its verdict")
            has_said = True
            time.sleep(_POLL * (1 + random.random()))


Check = Callable[[Gpu, IO[bytes]], tuple[runner.Findings, list[str]]]


def _made(gpu: Gpu, folder: disk.Folder, path: Path, say: Callable[[str], None], check: Check) -> Verdict:
    descriptor, log = tempfile.mkstemp(".log", time.strftime("%Y%m%d-%H%M%S-"), path)
    say(
        f"checking the kernels of {gpu.architecture} on {gpu.name}, once, which takes a minute or two; the log is {log}"
    )
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        verdict = verdict_of(gpu, check, file, log)
        file.write(f"verdict: {json.dumps(asdict(verdict), indent=1)}\n".encode())
    folder.write(key.name(gpu.identity()), gpu.identity(), json.dumps(asdict(verdict)).encode())
    return verdict


def verdict_of(gpu: Gpu, check: Check, file: IO[bytes], log: str) -> Verdict:
    """Runs the check, and makes a verdict of what it finds."""
    start = time.monotonic()
    findings, families = check(gpu, file)
    by_family = {name: findings.failed.get(name, findings.unjudged.get(name)) for name in families}
    seconds = time.monotonic() - start
    return Verdict(by_family, findings.left_out, findings.is_final, time.time(), seconds, log)


def checked(
    gpu: Gpu,
    log: IO[bytes],
    *,
    backend: str | None = None,
    everything: bool = False,
    chosen: Callable[[str], bool] = lambda family: True,
    command: Iterable[str] = runner.WORKER,
    say: Callable[[str], None] = lambda line: None,
    limits: runner.Limits | None = None,
) -> tuple[runner.Findings, list[str]]:
    """Runs the steps of a GPU's architecture; returns what they found, and the families that they judge.

    ``everything``: with the long steps. ``chosen``: whether a family is checked. ``say`` receives a line for each step
    that is over. Without ``limits`` they may take eight minutes in all, with the long steps two hours.
    """
    every = [step for step in steps.steps_of(ARCHITECTURES[gpu.architecture]) if everything or not step.is_long]
    some = [step for step in every if not step.family or chosen(step.family)]
    repetitions = _REPETITIONS_OF_ALL if everything else _REPETITIONS
    names = [step.name for step in some]
    request = Request(
        gpu.architecture, backend or gpu.architecture, gpu.device, gpu.uuid, repetitions, names, list(command)
    )

    def note(line: str) -> None:
        log.write(f"=== {line}\n".encode())
        say(line)

    log.write(f"{json.dumps(gpu._asdict())}\n".encode())
    if limits is None:
        limits = runner.Limits(all_steps=_ALL_STEPS) if everything else runner.Limits()
    findings = runner.run(request, some, log, say=note, limits=limits)
    return findings, list(dict.fromkeys(step.family for step in some if step.family))
