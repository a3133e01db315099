"""Lower bounds of a case: FLOP and bytes, and the rates at which this machine does either."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeAlias

import torch

from flash_attn_cute.kernels.registry import architecture_for

Passes: TypeAlias = Literal["forward", "backward", "both"]

_PASS_FACTORS: dict[Passes, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5}
_GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}


class Work(NamedTuple):
    """Work of any implementation: arithmetic, and traffic from and to memory."""

    flop: float
    bytes: float


class Ceiling(NamedTuple):
    """A plain PyTorch operation that runs at a rate attention cannot pass.

    One ``run`` does ``amount`` (FLOP or bytes).
    """

    run: Callable[[], object]
    amount: float


def gpu_backend() -> str:
    """The backend with kernels for this machine's GPU; Hopper's, where there is no GPU that has any."""
    found = architecture_for(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return found or "sm90"


def causal_area(lengths: Iterable[int]) -> int:
    """Visible (query, key) pairs of causal self-attention over sequences of these lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)


def attention_flop(area: int, nheads: int, d: int, d_v: int, passes: Passes) -> float:
    """FLOP of attention over ``area`` visible pairs a head: two products forward, five backward."""
    return 2.0 * area * nheads * (d + d_v) * _PASS_FACTORS[passes]


def gemm(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """A large square product: the arithmetic ceiling."""
    n = _GEMM_SIZE[device.type]
    if device.type == "cpu" and dtype.itemsize == 2:  # without instructions for it, a large one takes minutes
        n = 512
    a, b, c = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))
    return Ceiling(lambda: torch.mm(a, b, out=c), 2.0 * n**3)


def copy(device: torch.device) -> Ceiling:
    """A large copy, bytes read and written counted: the bandwidth ceiling."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return Ceiling(lambda: target.copy_(source), 2.0 * source.nbytes)
