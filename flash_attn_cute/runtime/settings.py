"""Every environment variable the package reads, in one place; ``docs/environment.md`` says what each is for.

A variable that holds anything else than its function says raises ValueError. The compiler's own (``CUTE_DSL_*``) are
read as they are: kernels compiled under other ones are other kernels.
"""

import functools
import os
from pathlib import Path


# Both switches are read once: os.environ takes longer than a call can spare for something that is off.
@functools.cache
def check_data() -> bool:
    """Whether every call verifies the values of its offsets (``FLASH_ATTN_CUTE_CHECK``, 0 or 1)."""
    return _switch("FLASH_ATTN_CUTE_CHECK")


@functools.cache
def nvtx() -> bool:
    """Whether passes and compiling are marked with NVTX ranges (``FLASH_ATTN_CUTE_NVTX``, 0 or 1)."""
    return _switch("FLASH_ATTN_CUTE_NVTX")


@functools.cache
def selfcheck() -> str:
    """How the self-check of kernels is used, "0", "1" or "force" (``FLASH_ATTN_CUTE_SELFCHECK``)."""
    value = os.environ.get("FLASH_ATTN_CUTE_SELFCHECK", "1")
    if value not in ("0", "1", "force"):
        raise ValueError(f"FLASH_ATTN_CUTE_SELFCHECK: expected 0, 1 or force, got {value!r}")
    return value


def cache_dir() -> Path | None:
    """The folder of compiled kernels (``FLASH_ATTN_CUTE_CACHE_DIR``, an absolute path or 0); None if it is 0.

    Raises FileNotFoundError if it is not set, and the user has no home.
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
    """The bundle of compiled kernels (``FLASH_ATTN_CUTE_BUNDLE``, an absolute path); None if there is none."""
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
