"""The peak memory that one run takes beyond what was allocated before it."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

_PROC = Path("/proc/self")


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Runs once and returns the growth of memory at its peak, results included; None where it is unknown.

    On a GPU this is what PyTorch's allocator was asked for, as it may hand out a megabyte more. On a Linux CPU it is
    resident memory, which the kernel counts in pages: temporaries that fit what the allocator already holds show as
    nothing.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc only: give freed memory back, so that the run takes it anew
        (_PROC / "clear_refs").write_text("5")  # the high-water mark falls to what is resident now
        resident = _high_water_bytes()
    except (OSError, AttributeError, TypeError):  # TypeError: no CDLL(None) on Windows
        return None
    run()
    return _high_water_bytes() - resident


def _high_water_bytes() -> int:
    match = re.search(r"^VmHWM:\s+(\d+) kB$", (_PROC / "status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError("/proc/self/status has no VmHWM")
    return int(match[1]) * 1024
