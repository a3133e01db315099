"""NVTX ranges around what the package does, for timelines such as that of Nsight Systems.

Off unless ``FLASH_ATTN_CUTE_NVTX=1``. Names hold what stays the same from step to step, so that tools which group by
name group the steps of a training run: ``flash_attn_cute forward sm90 b4 s8192 h16 d128 bfloat16 causal``, and for
packed sequences ``flash_attn_cute backward sm90 packed h32/8 d128 bfloat16 causal``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from flash_attn_cute import settings

if TYPE_CHECKING:
    from flash_attn_cute.spec import AttentionInputs, AttentionSpec

_OFF = nullcontext()


def span(name: str) -> AbstractContextManager[None]:
    """A range around a ``with`` block, named after the package and ``name``; nothing while ranges are off.

    Raises:
        RuntimeError: on entry, ranges are on and this PyTorch has no NVTX.
        ValueError: ``FLASH_ATTN_CUTE_NVTX`` holds anything but ``0`` or ``1``.
    """
    return _range(f"flash_attn_cute {name}") if settings.nvtx() else _OFF


def pass_span(name: str, spec: AttentionSpec, inputs: AttentionInputs) -> AbstractContextManager[None]:
    """A ``span`` around one pass of a backend, which describes the call."""
    return span(f"{name} {_describe(spec, inputs)}")


@contextmanager
def _range(name: str) -> Iterator[None]:
    import torch  # which processes that only compile do without

    try:
        torch.cuda.nvtx.range_push(name)
    except RuntimeError as error:
        raise RuntimeError(
            "FLASH_ATTN_CUTE_NVTX: expected 0, as this PyTorch has no NVTX (it was built without CUDA), got 1"
        ) from error
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _describe(spec: AttentionSpec, inputs: AttentionInputs) -> str:
    words = []
    if spec.packed:
        words.append("packed")
    else:
        batch, seqlen_q = inputs.q.shape[:2]
        words += [f"b{batch}", f"s{_either(seqlen_q, inputs.k.shape[1])}"]
    words += [f"h{_either(spec.nheads, spec.nheads_k)}", f"d{_either(spec.head_dim, spec.head_dim_v)}"]
    words.append(str(spec.dtype).removeprefix("torch."))
    window = spec.window_left, spec.window_right
    if window == (None, 0):
        words.append("causal")
    elif window != (None, None):
        words.append(f"window {window[0]},{window[1]}")
    return " ".join(words)


def _either(a: int, b: int) -> str:
    return str(a) if a == b else f"{a}/{b}"
