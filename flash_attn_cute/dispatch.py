"""Which backend serves a call: the required features within the supported ones, or the reasons why not."""

from typing import NamedTuple

import torch

from flash_attn_cute.backends.base import Backend
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.spec import AttentionSpec

_IN_ORDER_OF_PREFERENCE: list[Backend] = [*map(CuteBackend, ARCHITECTURES.values()), PortableBackend()]
BACKENDS = {backend.name: backend for backend in _IN_ORDER_OF_PREFERENCE}


class Selection(NamedTuple):
    """A backend's name, and why each one preferred to it was passed over."""

    name: str
    passed_over: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        reasons = [f"{name} does not serve {', '.join(lacking)}" for name, lacking in self.passed_over.items()]
        return f"{self.name} ({'; '.join(reasons) or 'the first choice'})"


def missing(backend: Backend, spec: AttentionSpec, device: torch.device) -> tuple[str, ...]:
    """What the backend lacks to serve spec on device; empty if it can."""
    lacking = tuple(feature.value for feature in spec.required if feature not in backend.features)
    return lacking + backend.limits(spec, device)


def select(spec: AttentionSpec, device: torch.device, requested: str | None = None) -> Selection:
    """The requested backend if it can serve spec on device, or the first that can if None is requested.

    Raises:
        ValueError: an unknown backend, or a requested one that lacks something (the message lists all of it).
    """
    if requested is not None:
        if requested not in BACKENDS:
            raise ValueError(f"backend: expected None or one of {list(BACKENDS)}, got {requested!r}")
        lacking = missing(BACKENDS[requested], spec, device)
        if lacking:
            raise ValueError(
                f"backend: expected one that can serve this call, got {requested!r}, which does not serve: "
                + "; ".join(lacking)
            )
        return Selection(requested, {})
    passed_over: dict[str, tuple[str, ...]] = {}
    for name, backend in BACKENDS.items():
        lacking = missing(backend, spec, device)
        if not lacking:
            return Selection(name, passed_over)
        passed_over[name] = lacking
    raise ValueError(
        "backend: expected at least one that can serve this call, but "
        + ", ".join(f"{name} does not serve: {'; '.join(lacking)}" for name, lacking in passed_over.items())
    )
