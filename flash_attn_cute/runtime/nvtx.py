"""NVTX ranges around what the package does, for timelines such as that of Nsight Systems.

Off unless ``FLASH_ATTN_CUTE_NVTX=1``. Names hold what stays the same from step to step, so that tools which group by
name group the steps of a training run: ``flash_attn_cute forward sm90 b4 s8192 h16 d128 bfloat16 causal``, and for
packed sequences ``flash_attn_cute backward sm90 packed h32/8 d128 bfloat16 causal``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from flash_attn_cute.runtime import settings

_OFF = nullcontext()


def span(name: str) -> AbstractContextManager[None]:
    """A range around a ``with`` block, named after the package and ``name``; nothing while ranges are off."""
    return _range(f"flash_attn_cute {name}") if settings.nvtx() else _OFF


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
