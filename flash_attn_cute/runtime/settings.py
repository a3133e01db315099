"""Every environment variable the package reads, in one place.

FLASH_ATTN_CUTE_CHECK=1  Read cu_seqlens and seqused on every call, whatever the backend, and raise
                         ValueError where they contradict the tensors. Debugging only: on a GPU it
                         waits for the device. Read once, by the first call with offsets.
FLASH_ATTN_CUTE_NVTX=1   NVTX ranges around every forward and backward pass and around compiling, for
                         the timelines of profilers. Needs a PyTorch built with CUDA. Read once, by
                         the first call.
FLASH_ATTN_CUTE_CACHE_DIR
                         The folder of compiled kernels, an absolute path, or 0 to keep none on disk.
                         Code is loaded from it: it must belong to the user, and no other user may be
                         able to write to it. Default: flash_attn_cute in $XDG_CACHE_HOME or ~/.cache.
FLASH_ATTN_CUTE_BUNDLE   A bundle of compiled kernels, the absolute path that ``python -m flash_attn_cute.jit
                         bundle`` printed. It is read ahead of the folder, and verified by its name.
FLASH_ATTN_CUTE_SELFCHECK
                         The self-check of Blackwell's kernels. 1 (default): the first call that they could serve runs
                         it, unless there is a verdict. 0: none is run or read, and only calls that name the backend
                         get the kernels. force: a verdict from before this process is not read. Read once, by
                         the first such call.
CUTE_DSL_*               Settings of the compiler. Kernels compiled under other ones are other kernels.
"""

import functools
import os
from pathlib import Path


# Both switches are read once: os.environ takes longer than a call can spare for something that is off.
@functools.cache
def check_data() -> bool:
    """Whether every call verifies the values of its offsets (``FLASH_ATTN_CUTE_CHECK``).

    Raises:
        ValueError: the variable holds anything but ``0`` or ``1``.
    """
    return _switch("FLASH_ATTN_CUTE_CHECK")


@functools.cache
def nvtx() -> bool:
    """Whether passes and compiling are marked with NVTX ranges (``FLASH_ATTN_CUTE_NVTX``).

    Raises:
        ValueError: the variable holds anything but ``0`` or ``1``.
    """
    return _switch("FLASH_ATTN_CUTE_NVTX")


@functools.cache
def selfcheck() -> str:
    """How the self-check of kernels is used, "0", "1" or "force" (``FLASH_ATTN_CUTE_SELFCHECK``).

    Raises:
        ValueError: the variable holds anything else.
    """
    value = os.environ.get("FLASH_ATTN_CUTE_SELFCHECK", "1")
    if value not in ("0", "1", "force"):
        raise ValueError(f"FLASH_ATTN_CUTE_SELFCHECK: expected 0, 1 or force, got {value!r}")
    return value


def cache_dir() -> Path | None:
    """The folder of compiled kernels (``FLASH_ATTN_CUTE_CACHE_DIR``); None if none are kept on disk.

    Raises:
        ValueError: the variable holds neither an absolute path nor ``0``.
        FileNotFoundError: it is not set, and the user has no home.
    """
    value = os.environ.get("FLASH_ATTN_CUTE_CACHE_DIR")
    if value is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the XDG specification has relative ones ignored
            base = os.path.expanduser("~/.cache")
        if not os.path.isabs(base):
            raise FileNotFoundError("no home folder: neither FLASH_ATTN_CUTE_CACHE_DIR nor XDG_CACHE_HOME nor HOME")
        return Path(base, "flash_attn_cute")
    if value == "0":
        return None
    if not os.path.isabs(value):
        raise ValueError(f"FLASH_ATTN_CUTE_CACHE_DIR: expected an absolute path or 0, got {value!r}")
    return Path(value)


def bundle() -> Path | None:
    """The bundle of compiled kernels (``FLASH_ATTN_CUTE_BUNDLE``); None if there is none.

    Raises:
        ValueError: the variable does not hold an absolute path.
    """
    value = os.environ.get("FLASH_ATTN_CUTE_BUNDLE")
    if value is None:
        return None
    if not os.path.isabs(value):
        raise ValueError(f"FLASH_ATTN_CUTE_BUNDLE: expected an absolute path, got {value!r}")
    return Path(value)


def compiler_environment() -> dict[str, str]:
    """The variables that the compiler reads (``CUTE_DSL_*``)."""
    return {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")}


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
