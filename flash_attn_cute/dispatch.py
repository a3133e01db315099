"""Which backend serves a call: the required features within the supported ones, or the reasons why not."""

from typing import NamedTuple

from flash_attn_cute.backends.base import Backend
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.spec import AttentionInputs, AttentionSpec

_IN_ORDER_OF_PREFERENCE: list[Backend] = [*map(CuteBackend, ARCHITECTURES.values()), PortableBackend()]
BACKENDS = {backend.name: backend for backend in _IN_ORDER_OF_PREFERENCE}


class Selection(NamedTuple):
    """A backend's name, and why each one preferred to it was passed over."""

    name: str
    passed_over: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.name} ({_refusals(self.passed_over) or 'the first choice'})"


def missing(backend: Backend, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
    """Why the backend cannot serve a call: features that it lacks, and its limits; empty if it can."""
    lacking = tuple(feature.value for feature in spec.required if feature not in backend.features)
    return lacking + backend.limits(spec, inputs)


def select(spec: AttentionSpec, inputs: AttentionInputs, requested: str | None = None) -> Selection:
    """The requested backend if it can serve the call, or the first that can if None is requested.

    Raises:
        ValueError: an unknown backend, or a requested one that cannot serve the call (the message has all reasons).
    """
    if requested is not None:
        if requested not in BACKENDS:
            raise ValueError(f"backend: expected None or one of {list(BACKENDS)}, got {requested!r}")
        lacking = missing(BACKENDS[requested], spec, inputs)
        if lacking:
            raise ValueError(
                f"backend: expected one that can serve this call, got {requested!r}, which cannot: {'; '.join(lacking)}"
            )
        return Selection(requested, {})
    passed_over: dict[str, tuple[str, ...]] = {}
    for name, backend in BACKENDS.items():
        lacking = missing(backend, spec, inputs)
        if not lacking:
            return Selection(name, passed_over)
        passed_over[name] = lacking
    raise ValueError(
        f"backend: expected at least one that can serve this call, but none can ({_refusals(passed_over)})"
    )


def _refusals(passed_over: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{name} cannot: {'; '.join(lacking)}" for name, lacking in passed_over.items())
