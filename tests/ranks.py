"""Ranks of a test: processes on this machine that share a Gloo group.

The first process imports all that the ranks need and forks them, which takes less time than starting each anew.
"""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=120)


def run(function: Callable[[], None], num_ranks: int, folder: Path, **environment: str) -> None:
    """Runs a function of a module on so many ranks; fails with what a rank raised.

    Args:
        function: what every rank runs, after it has joined the group of all.
        num_ranks: how many processes.
        folder: an empty one, where the ranks meet.
        environment: variables that the ranks are to see.
    """
    command = [sys.executable, "-m", "tests.ranks", function.__module__, function.__qualname__, str(num_ranks)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [*command, str(folder)], env=env, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _main(module: str, name: str, num_ranks: int, folder: Path) -> int:
    function = getattr(import_module(module), name)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_rank, args=(function, rank, num_ranks, folder)) for rank in range(num_ranks)]
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


def _rank(function: Callable[[], None], rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=_TIMEOUT
        )
        function()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank} of {num_ranks}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
