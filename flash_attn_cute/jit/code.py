"""Compiled code as bytes: out of the compiler, and into a process. Needs no GPU."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cutlass.cute.runtime import load_module

_SYMBOL = "kernel"


def export(kernel: Any) -> bytes:
    """A kernel that ``cute.compile`` returned, as an object file: the launching code with the GPU's code in it."""
    with _memory_file() as (descriptor, path):
        kernel.export_to_c(path, _SYMBOL, export_only_tvm_ffi_symbols=True)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()


def load(code: bytes) -> Callable[..., None]:
    """The kernel that was exported to ``code``. The driver sees it when it is first called."""
    with _memory_file() as (descriptor, path):
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        kernel: Callable[..., None] = getattr(load_module(path, enable_tvm_ffi=True), _SYMBOL)
        return kernel


@contextmanager
def _memory_file() -> Iterator[tuple[int, str]]:
    """A file that is in no folder, for the compiler and the loader, which know paths only.

    So what is loaded is to the byte what was verified.
    """
    descriptor = os.memfd_create("flash_attn_cute")
    try:
        yield descriptor, f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
