"""Every environment variable the package reads, in one place.

FLASH_ATTN_CUTE_CHECK=1  Read cu_seqlens and seqused on every call, whatever the backend, and raise
                         ValueError where they contradict the tensors. Debugging only: on a GPU it
                         waits for the device.
FLASH_ATTN_CUTE_NVTX=1   NVTX ranges around every forward and backward pass and around compiling, for
                         the timelines of profilers. Needs a PyTorch built with CUDA. Read once, by
                         the first call.
"""

import functools
import os


def check_data() -> bool:
    """Whether every call verifies the values of its offsets (``FLASH_ATTN_CUTE_CHECK``).

    Raises:
        ValueError: the variable holds anything but ``0`` or ``1``.
    """
    return _switch("FLASH_ATTN_CUTE_CHECK")


@functools.cache  # os.environ takes longer than a call can spare for something that is off
def nvtx() -> bool:
    """Whether passes and compiling are marked with NVTX ranges (``FLASH_ATTN_CUTE_NVTX``).

    Raises:
        ValueError: the variable holds anything but ``0`` or ``1``.
    """
    return _switch("FLASH_ATTN_CUTE_NVTX")


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
