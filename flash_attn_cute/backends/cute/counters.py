"""The counters from which the CTAs of a kernel take their tiles, one set a stream, device and thread."""

import threading

import torch
from torch import Tensor

from flash_attn_cute.runtime import kept

_NUM_COUNTERS = 3  # of tiles, and in the backward pass of blocks to round and to zero


class _Counters(threading.local):
    """Threads share none: all of their default streams have one handle (cudaStreamPerThread), but run side by side."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], Tensor] = {}


_counters = _Counters()


def next_tile(device: int | None = None) -> Tensor:
    """Counters for a launch on the current device, whose index may be given, and the current stream, int32.

    They are 0, and 0 again after each kernel, so they serve all kernels of a stream. A graph may be replayed beside its
    stream, and gets counters of its own.
    """
    if device is None:
        device = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        return _new(device)
    key = device, torch._C._cuda_getCurrentRawStream(device)  # without making a Stream of it
    counters = _counters.kept.get(key)
    if counters is None:
        # On this stream, whose kernels come behind the zero, and in memory of no pool.
        counters = _counters.kept[key] = kept.apart(lambda: _new(device), torch.device("cuda", device))
    return counters


def _new(device: int) -> Tensor:
    return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=torch.device("cuda", device))
