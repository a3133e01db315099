"""Ranks of a test: processes on this machine that share a group, of Gloo, or of NCCL with a GPU each.

NCCL refuses ranks that share a GPU. Gloo's, whose messages then go by way of the host, can do so ("shared").

The first process imports all that the ranks need and forks them, which takes less time than starting each anew.
"""

import gc
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flash_attn_cute.jit import warm

_TIMEOUT = timedelta(seconds=60)


def run(
    functions: Sequence[Callable[[], None]], num_ranks: int, folder: Path, backend: str = "gloo", **environment: str
) -> None:
    """Runs functions, one after the other, on so many ranks; fails with what a rank raised.

    On GPUs their kernels are compiled ahead, by as many processes as there are processors.

    Args:
        functions: what every rank runs, after it has joined the group of all.
        num_ranks: how many processes.
        folder: an empty one, where the ranks meet.
        backend: "gloo", or "nccl", with which each rank has the GPU of its number for the current one, or "shared",
            which is Gloo with the first GPU for all.
        environment: variables that the ranks are to see.
    """
    names = [f"{function.__module__}:{function.__qualname__}" for function in functions]
    where = [backend, str(num_ranks), str(folder)]
    command = [sys.executable, "-m", "tests.lib.ranks", *where, *names]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    here = Path(__file__).parents[2]
    # What ranks print is pytest's to show: at once with -s, else where they fail.
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, cwd=here, check=False)
    assert done.returncode == 0, done.stderr


def by_way_of_the_host() -> None:
    """From here on this process's messages are copied to the host, sent, and copied back where they arrive."""
    batch, all_to_all, all_reduce = dist.batch_isend_irecv, dist.all_to_all_single, dist.all_reduce
    all_gather = dist.all_gather

    def batched(operations: list[dist.P2POp]) -> list[Any]:
        places = [operation.tensor for operation in operations]
        for operation in operations:
            operation.tensor = operation.tensor.cpu()
        for work in batch(operations):
            work.wait()
        for operation, place in zip(operations, places, strict=True):
            if operation.op is dist.irecv:
                place.copy_(operation.tensor)
        return []

    def traded(output: torch.Tensor, given: torch.Tensor, *sizes: Any, **options: Any) -> None:
        found = output.cpu()
        all_to_all(found, given.cpu(), *sizes, **options)
        output.copy_(found)

    def reduced(x: torch.Tensor, *options: Any, **more: Any) -> None:
        found = x.cpu()
        all_reduce(found, *options, **more)
        x.copy_(found)

    def gathered(outputs: list[torch.Tensor], given: torch.Tensor, **options: Any) -> None:
        found = [x.cpu() for x in outputs]
        all_gather(found, given.cpu(), **options)
        for output, x in zip(outputs, found, strict=True):
            output.copy_(x)

    for name, function in (
        ("batch_isend_irecv", batched),
        ("all_to_all_single", traded),
        ("all_reduce", reduced),
        ("all_gather", gathered),
    ):
        setattr(dist, name, function)


def _main(backend: str, num_ranks: int, folder: Path, *names: str) -> int:
    functions = [getattr(import_module(module), name) for module, name in (x.split(":") for x in names)]
    gc.collect()
    gc.freeze()  # modules, among which ranks' own collections would look each time
    # A process that has asked for GPUs cannot fork.
    context: Any = multiprocessing.get_context("fork" if backend == "gloo" else "spawn")
    arguments = [(functions, backend, rank, num_ranks, folder) for rank in range(num_ranks)]
    children = [context.Process(target=_rank, args=given) for given in arguments]
    for child in children:
        child.start()
    # A rank that has failed leaves the others waiting.
    while any(child.is_alive() for child in children):
        for child in children:
            child.join(0.05)
        if any(child.exitcode for child in children):
            for child in children:
                child.join(2.0)
                child.kill()
    return max(abs(child.exitcode or 0) for child in children)


def _rank(functions: Sequence[Callable[[], None]], backend: str, rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        if backend != "gloo":
            torch.cuda.set_device(rank if backend == "nccl" else 0)
        dist.init_process_group(
            "nccl" if backend == "nccl" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=_TIMEOUT if backend == "gloo" else 5 * _TIMEOUT,  # while kernels are compiled, ranks wait
            device_id=torch.device("cuda", rank) if backend == "nccl" else None,
        )
        if backend == "shared":
            by_way_of_the_host()
        if backend != "gloo":
            _compile_ahead(functions, rank, num_ranks)
        for function in functions:
            torch.manual_seed(0)  # all draw the same
            function()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank} of {num_ranks}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


def _compile_ahead(functions: Sequence[Callable[[], None]], rank: int, num_ranks: int) -> None:
    # Not imported above: it asks for the GPU, and processes that compile import this module.
    from tests.lib import rehearsal

    needed: list[Any] = [None] * num_ranks
    dist.all_gather_object(needed, rehearsal.needed_by(functions))
    configs = list(dict.fromkeys(chain.from_iterable(needed)))
    if rank == 0 and configs:
        begin = time.monotonic()
        compiled = sum(warmed.compiled for warmed in warm.warm(configs, len(os.sched_getaffinity(0))))
        print(f"{compiled} of {len(configs)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    dist.barrier()


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
