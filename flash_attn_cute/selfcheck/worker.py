"""The process that runs steps of the self-check on a GPU.

    python -m flash_attn_cute.selfcheck.worker REQUEST DESCRIPTOR

REQUEST is JSON (``Request``). Each line of standard input names a step and the families that have failed so far. Each
answer is a line of JSON to the descriptor: {"ready": ...} first, then for each step one of

    {"done": why it was left out, or null}
    {"wrong": what}                          results are wrong, and the process goes on
    {"broken": what}                         anything else was raised, and the process ends
    {"unable": why}                          it says nothing of the kernels: no such GPU, no memory; the process ends

What the process prints goes to the log.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import torch

from flash_attn_cute.backends.base import Backend
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.selfcheck.samples import WrongResultError
from flash_attn_cute.selfcheck.steps import Step, Target, steps_of

_LARGEST_FILE = 256 * 2**20  # bytes that the process may write to one file: a log is not to fill the disk
_PARENT_DEATH_SIGNAL = 1  # of prctl


class Request(NamedTuple):
    """Order to a worker."""

    architecture: str  # whose steps
    backend: str  # which computes: the architecture's name, or "portable"
    device: str  # "cpu", or a GPU as the parent names it, such as "cuda:1"
    uuid: str  # of the GPU, which may have another number here; "" of a CPU
    repetitions: int
    steps: list[str]  # the names of those that are to run
    command: list[str]  # of such a process, without its arguments


def main(arguments: Sequence[str], steps_of: Callable[[Any], list[Step]] = steps_of) -> int:
    """Runs the steps that are named; returns the exit code."""
    request = Request(**json.loads(arguments[0]))
    _end_with_parent()
    with os.fdopen(int(arguments[1]), "w") as answers:
        return _answer(request, answers, steps_of(ARCHITECTURES[request.architecture]))


def _answer(request: Request, answers: IO[str], steps: list[Step]) -> int:
    def say(**answer: str | None) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    device = _device(request)
    if device is None:
        say(unable=f"another process does not see {request.device} (UUID {request.uuid})")
        return 1
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # a GPU of one process alone, or without memory
        say(unable=f"another process cannot use {request.device}: {error}")
        return 1
    # Memory that has not been written is NaN.
    torch.use_deterministic_algorithms(True)
    by_name = {step.name: step for step in steps}
    say(ready=None)
    for line in sys.stdin:
        asked = json.loads(line)
        print(f"--- {asked['step']}", flush=True)
        try:
            note = by_name[asked["step"]].run(_target(request, device, asked["failed"]))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except WrongResultError as error:
            traceback.print_exc()
            say(wrong=str(error))
        except torch.OutOfMemoryError as error:
            traceback.print_exc()
            say(unable=f"the GPU's memory is full: {error}")
            return 1
        except Exception as error:
            traceback.print_exc()
            say(broken=f"{type(error).__name__}: {error}")
            return 1
        else:
            say(done=note)
    return 0


def _target(request: Request, device: torch.device, failed: list[str]) -> Target:
    @contextmanager
    def other_process(names: list[str]) -> Iterator[Callable[[], bool]]:
        """Runs steps in a process like this one."""
        read, write = os.pipe()
        command = [*request.command, json.dumps(request._asdict()), str(write)]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write], text=True)
        os.close(write)
        try:
            assert other.stdin is not None
            other.stdin.writelines(json.dumps({"step": name, "failed": failed}) + "\n" for name in names)
            other.stdin.close()
            yield lambda: other.poll() is not None
            with os.fdopen(read) as answers:
                found = [json.loads(line) for line in answers]
            if other.wait() or found[1:] != [{"done": None}] * len(names):
                raise WrongResultError(f"the other process ended with {other.returncode} and answered {found}")
        finally:
            other.kill()
            other.wait()

    name = request.backend
    backend: Backend = PortableBackend() if name == "portable" else CuteBackend(ARCHITECTURES[name])
    return Target(backend, device, request.repetitions, frozenset(request.steps), frozenset(failed), other_process)


def _device(request: Request) -> torch.device | None:
    """The device that the parent means, whatever its number is here; None if it is not among those of this process."""
    if request.device == "cpu":
        return torch.device("cpu")
    for i in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(i).uuid) == request.uuid:
            torch.cuda.set_device(i)
            return torch.device("cuda", i)
    return None


def _end_with_parent() -> None:
    """Has the process end with its parent, whatever it is waiting for; and write neither cores nor endless logs."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
