"""Compiled kernels by what they were compiled for, kept for the life of the process."""

import threading
from collections.abc import Callable
from typing import Any

from flash_attn_cute import profiling
from flash_attn_cute.kernels.sm90.config import ForwardConfig

_lock = threading.Lock()
_kernels: dict[ForwardConfig, Callable[..., None]] = {}
_compiles = 0


def forward_kernel(config: ForwardConfig) -> Callable[..., None]:
    """The kernel of a configuration, compiled if this process has not needed it yet."""
    kernel = _kernels.get(config)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(config)
            if kernel is None:
                kernel = _kernels[config] = _compile(config)
    return kernel


def compile_count() -> int:
    """How many kernels this process has compiled."""
    return _compiles


def _compile(config: ForwardConfig) -> Any:
    global _compiles
    with profiling.span(f"compile forward d{config.tile_d}/{config.tile_dv}"):
        # Not before it is needed: this is what imports cutlass.
        from flash_attn_cute.jit.compile import compile_forward

        kernel = compile_forward(config)
    _compiles += 1
    return kernel
