"""The counters from which the CTAs of a kernel take their tiles, one set a stream, device and thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_NUM_COUNTERS = 2  # of tiles, and in the backward pass of blocks to round


class _Counters(threading.local):
    """Threads share none: all of their default streams have one handle (cudaStreamPerThread), but run side by side."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], Tensor] = {}


_counters = _Counters()


def next_tile() -> Tensor:
    """Counters for a launch on the current device and stream, int32.

    They are 0, and 0 again after each kernel, so they serve all kernels of a stream. A graph may be replayed beside its
    stream, and gets counters of its own.
    """
    device = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=torch.device("cuda", device))
    key = device, torch._C._cuda_getCurrentRawStream(device)  # without making a Stream of it
    counters = _counters.kept.get(key)
    if counters is None:
        # By another thread: this one's memory may come from a pool, under torch.cuda.use_mem_pool or in torch.compile's
        # warm-up for CUDA graphs, which then gives it to others, whoever holds it. A pool is entered by one thread.
        with ThreadPoolExecutor(1) as executor:
            counters = executor.submit(_new, torch.cuda.current_stream()).result()
        _counters.kept[key] = counters
    return counters


def _new(stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):  # whose kernels come behind the zero
        return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=stream.device)
