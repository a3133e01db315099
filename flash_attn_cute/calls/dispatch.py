"""Which backend serves a call: the required features within the supported ones, or the reasons why not."""

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch

from flash_attn_cute.backends.base import Backend
from flash_attn_cute.backends.cute import CUTE_BACKENDS, CuteBackend
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec
from flash_attn_cute.selfcheck import gate

# Behind the portable one, which serves all calls, are those that are checked first: they serve what the check passed.
_IN_ORDER_OF_PREFERENCE: list[Backend] = [
    *(backend for backend in CUTE_BACKENDS.values() if not backend.architecture.is_checked_first),
    PortableBackend(),
    *(backend for backend in CUTE_BACKENDS.values() if backend.architecture.is_checked_first),
]
BACKENDS = {backend.name: backend for backend in _IN_ORDER_OF_PREFERENCE}

_has_warned = False
_has_warned_of_refusal = False


class Selection(NamedTuple):
    """A backend's name, why each one preferred to it was passed over, and which serve the call only if asked for.

    ``refusal`` is why the latter do, and ``lasts`` is whether all calls that look alike get the same.
    """

    name: str
    passed_over: dict[str, tuple[str, ...]]
    on_request: tuple[str, ...] = ()
    refusal: str = ""
    lasts: bool = True


def missing(backend: Backend, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
    """Why the backend cannot serve a call: features that it lacks, and its limits; empty if it can."""
    lacking = tuple(feature.value for feature in spec.required if feature not in backend.features)
    return lacking + backend.limits(spec, inputs)


def supposing(gpu: str) -> dict[str, Backend]:
    """The backends of a machine that has the usual GPU of an architecture; they explain calls and run none.

    Raises ValueError where there are no kernels for such a GPU.
    """
    if not isinstance(gpu, str) or gpu not in CUTE_BACKENDS:
        raise ValueError(f"gpu: expected None or one of {list(CUTE_BACKENDS)}, got {gpu!r}")
    supposed = CuteBackend(CUTE_BACKENDS[gpu].architecture, is_supposed=True)
    names = [name for name in BACKENDS if name == gpu or name not in CUTE_BACKENDS]
    return {name: supposed if name == gpu else BACKENDS[name] for name in names}


def warn_of_fallback(selection: Selection, device: torch.device) -> None:
    """Warns, once a process, that a call runs on another backend although kernels exist for its GPU.

    It does not warn if the caller chose the backend. What the self-check refuses has a warning of its own.
    """
    global _has_warned, _has_warned_of_refusal
    has_warned = _has_warned_of_refusal if selection.on_request else _has_warned
    if not selection.passed_over or torch.compiler.is_compiling() or has_warned:
        return
    faster = {
        name: f"cannot serve it: {'; '.join(reasons)}"
        for name, reasons in selection.passed_over.items()
        if BACKENDS[name].is_made_for(device) and not BACKENDS[selection.name].is_made_for(device)
    }
    faster |= {
        name: f"serves calls with backend={name!r} alone, as {selection.refusal}" for name in selection.on_request
    }
    for name, why in faster.items():
        _has_warned |= not selection.on_request
        _has_warned_of_refusal |= bool(selection.on_request) and selection.lasts
        warnings.warn(
            f"flash_attn_cute: a call on {device} goes to the backend {selection.name!r}, which is slower than "
            f"{name!r}, which {why}. backend={selection.name!r} says that this is "
            "meant. Calls after this one are not told of; flash_attn_cute.explain tells of any",
            stacklevel=2,
        )


def select(
    spec: AttentionSpec,
    inputs: AttentionInputs,
    requested: str | None = None,
    backends: Mapping[str, Backend] | None = None,
    *,
    is_run: bool = True,
) -> Selection:
    """The requested backend if it can serve the call, or the first that can if None is requested.

    ``backends``: those there are, if they are not this machine's. ``is_run``: the call is to be run, so that kernels
    which are checked first may be checked now. Raises ValueError for an unknown backend, or a requested one that cannot
    serve the call; the message has all reasons.
    """
    backends = BACKENDS if backends is None else backends
    if requested is not None:
        if requested not in backends:
            raise ValueError(f"backend: expected None or one of {list(backends)}, got {requested!r}")
        lacking = missing(backends[requested], spec, inputs)
        if lacking:
            raise ValueError(
                f"backend: expected one that can serve this call, got {requested!r}, which cannot: {'; '.join(lacking)}"
            )
        return Selection(requested, {})
    passed_over: dict[str, tuple[str, ...]] = {}
    names = list(backends)
    for i, (name, backend) in enumerate(backends.items()):
        lacking = missing(backend, spec, inputs)
        if not lacking:
            for other in names[i + 1 :]:
                checked_first = backends[other]
                if isinstance(checked_first, CuteBackend) and checked_first.is_made_for(inputs.q.device):
                    lacking = missing(checked_first, spec, inputs)
                    if lacking:
                        passed_over[other] = lacking
                        continue
                    answer = gate.ask(checked_first, spec, inputs, is_run=is_run)
                    if not answer.refusal:
                        return Selection(other, passed_over, lasts=answer.lasts)
                    return Selection(name, passed_over, (other,), *answer)
            return Selection(name, passed_over)
        passed_over[name] = lacking
    reasons = ", ".join(f"{name} cannot: {'; '.join(lacking)}" for name, lacking in passed_over.items())
    raise ValueError(f"backend: expected at least one that can serve this call, but none can ({reasons})")
