"""Answers to the dispatcher: whether kernels that are checked first may serve a call that names no backend.

The first such call of a process reads the verdict of the self-check from disk, or has the check run. What comes of it
holds for the process. It cannot run while a CUDA graph is captured or a program is traced, or in a process that was
forked from one that uses the GPU. There a verdict is read, and if there is none the answer holds for that call alone.
"""

import functools
import logging
import threading
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.jit.disk import UnsafeFolderError
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec
from flash_attn_cute.runtime import kept, settings
from flash_attn_cute.runtime.forks import begin_child_with

if TYPE_CHECKING:
    from flash_attn_cute.selfcheck.verdict import Verdict

_COMMAND = "python -m flash_attn_cute.selfcheck"
_TRACED = "while torch.compile traces"
_STARTED = time.time()
_log = logging.getLogger("flash_attn_cute")
_lock = threading.Lock()
_answers: dict[tuple[str, int], "Verdict | str"] = {}  # or why there is none, by architecture and device
_has_warned = False


def _begin_as_child() -> None:
    """After a fork: a thread of the parent's that was running the check is not here to unlock."""
    global _lock
    _lock = threading.Lock()


begin_child_with(_begin_as_child)


class Answer(NamedTuple):
    """Answer of the self-check about a call."""

    refusal: str  # why it is not served; empty if it is
    lasts: bool  # whether all calls that look alike get the same answer


def ask(backend: CuteBackend, spec: AttentionSpec, inputs: AttentionInputs, *, is_run: bool) -> Answer:
    """Whether a backend may serve a call; has the check run if a call is to be run and there is no verdict."""
    if backend.is_supposed:
        return Answer("its self-check has not run, as the GPU is only supposed", True)
    index, is_traced = _index_of(inputs.q.device), torch.compiler.is_compiling()
    why_not_now = _TRACED if is_traced else _why_not_now(inputs.q, is_run)
    flags = {
        "left": spec.window_left is not None,
        "right": spec.window_right is not None,
        "mask": spec.has_mask,
        "block_mask": spec.has_block_mask,
        "bias": spec.has_bias,
        "max_logits": spec.max_logits,
    }
    on = ",".join([name for name, is_on in flags.items() if is_on])
    rows = None if is_traced else _rows(inputs)
    refusal = _refusal(backend.name, index, int(spec.head_dim), int(spec.head_dim_v), on, rows, why_not_now)
    return Answer(refusal, is_traced or (backend.name, index) in _answers)


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _why_not_now(q: Tensor, is_run: bool) -> str:
    """Why the check cannot run now; empty if it can."""
    if not is_run:
        return "for an explanation: the first call runs it"
    if type(q) not in (Tensor, Parameter):
        from torch._subclasses.fake_tensor import is_fake  # which takes long to import

        if is_fake(q):
            return "for fake tensors"
    if torch.cuda._is_in_bad_fork():
        return "in a process that was forked from one that uses the GPU"
    return "while a CUDA graph is captured" if kept.is_captured(q.device) else ""


def _rows(inputs: AttentionInputs) -> tuple[int, int] | None:
    """Rows of a sequence of queries and of keys, on average, at most; None if they are symbols.

    Pairs of CTAs are chosen by them, or by fewer, where sequences are split.
    """
    found = []
    for x, offsets in ((inputs.q, inputs.cu_seqlens_q), (inputs.k, inputs.cu_seqlens_k)):
        rows = x.shape[-3]
        found.append(rows if offsets is None else rows // max(1, offsets.shape[0] - 1))
    return (found[0], found[1]) if all(type(rows) is int for rows in found) else None


def _refusal(
    name: str, index: int, d: int, d_v: int, flags: str, rows: tuple[int, int] | None, why_not_now: str
) -> str:
    verdict = _verdict(name, index, why_not_now)
    if isinstance(verdict, str):
        return verdict
    return verdict.refusal(_families(name, d, d_v, flags, rows))


# Dynamo calls it, and takes the answer for a constant of the program. ``torch.compiler.assume_constant_result`` sets
# the same, and imports all of Dynamo.
_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _families(name: str, d: int, d_v: int, flags: str, rows: tuple[int, int] | None) -> frozenset[str]:
    from flash_attn_cute.selfcheck import steps  # with what runs them: not before it is needed

    return steps.families_of_call(ARCHITECTURES[name], d, d_v, frozenset(filter(None, flags.split(","))), rows)


def _verdict(name: str, index: int, why_not_now: str) -> "Verdict | str":
    with _lock:
        answer = _answers.get((name, index))
        if answer is None:
            answer = _found(name, index, why_not_now)
            if answer is None:
                return _without_verdict(why_not_now)
            _answers[name, index] = answer
    return answer


def _found(name: str, index: int, why_not_now: str) -> "Verdict | str | None":
    """The verdict, made now if need be; or why this process gets none; or None if it may get one later."""
    from flash_attn_cute.selfcheck import verdict

    setting = settings.selfcheck()
    if setting == "0":
        return "FLASH_ATTN_CUTE_SELFCHECK is 0"
    since = _STARTED if setting == "force" else 0.0
    try:
        gpu = verdict.Gpu.of(name, index)
        if why_not_now:
            return verdict.stored(gpu, since)
        return verdict.made(gpu, since, say=lambda line: _log.warning("flash_attn_cute: %s", line))
    except (OSError, UnsafeFolderError) as error:
        return f"its self-check cannot run: {error}"


def _without_verdict(why_not_now: str) -> str:
    global _has_warned
    refusal = f"its self-check has not run on this GPU, and does not run {why_not_now}. `{_COMMAND}` runs it"
    if why_not_now == _TRACED and not _has_warned:
        _has_warned = True
        warnings.warn(f"flash_attn_cute: a compiled program gets the backend 'portable': {refusal}", stacklevel=2)
    return refusal
