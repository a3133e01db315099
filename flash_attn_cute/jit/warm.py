"""Kernels compiled before they are needed, by several processes."""

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from flash_attn_cute.jit import cache


class LostWorkerError(RuntimeError):
    """A process that compiled has ended by itself, as where the system has no memory left."""


class Warmed(NamedTuple):
    """Record of how a kernel came to be on disk."""

    config: Any
    compiled: bool  # False if it was there
    seconds: float


def warm(configs: Sequence[Any], jobs: int) -> Iterator[Warmed]:
    """Puts the kernels that are not on disk there, and reports each as soon as it is.

    The first error ends it: of the other kernels only those are waited for that are being compiled. An interrupt waits
    for none.

    Raises:
        cache.NotKeptWarning: calls can do without the disk, but here it is the purpose.
        key.NoCompilerError: there is no compiler.
        LostWorkerError: a process has ended.
    """
    # Fresh interpreters: this one has threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(min(jobs, len(configs)), context, _prepare_worker) as pool:
        try:
            # Workers are started here, and inherit that: interrupts are the command's alone.
            heard = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                futures = [pool.submit(_warm, config) for config in configs]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, heard)
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise LostWorkerError(
                "--jobs: a process that compiled was killed, perhaps as memory ran out: expected fewer than "
                f"{jobs} processes, or more memory. What was compiled before is kept"
            ) from error
        except (KeyboardInterrupt, GeneratorExit):
            for worker in multiprocessing.active_children():
                if worker not in others:
                    worker.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    warnings.simplefilter("error", cache.NotKeptWarning)
    os.environ.pop("FLASH_ATTN_CUTE_BUNDLE", None)  # what is in a bundle need not be in the folder
    threading.Thread(target=_end_with_command, daemon=True).start()


def _end_with_command() -> None:
    """Ends the worker where the command ends without a word to it, as one that is killed does."""
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _warm(config: Any) -> Warmed:
    before, start = cache.compile_count(), time.perf_counter()
    cache.kernel(config)
    return Warmed(config, cache.compile_count() > before, time.perf_counter() - start)
