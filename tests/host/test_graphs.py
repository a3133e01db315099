"""Things that CUDA graphs keep alive while they may read them, with the driver's part of it replaced, and on a GPU."""

import ctypes
import gc
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.runtime import graphs
from tests.lib.checks import needs_kernels


class Driver:
    """Stands in for CUDA's driver: one capture at a time, whose graph holds what it is given."""

    def __init__(self) -> None:
        self.status, self.error, self.number = 1, 0, 1
        self.made: list[tuple[Any, Any]] = []
        self.held: list[tuple[Any, Any]] = []

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, graph: Any, *_: None) -> int:
        status._obj.value, number._obj.value = self.status, self.number
        return 0

    def cuUserObjectCreate(self, made: Any, given: Any, destructor: Any, count: int, flags: int) -> int:
        self.made.append((destructor, given))
        return self.error

    def cuGraphRetainUserObject(self, graph: Any, held: Any, count: int, flags: int) -> int:
        self.held.append(self.made.pop())
        return 0

    def destroy(self) -> None:
        """Ends the graph, and begins another capture."""
        for destructor, given in self.held:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor.value)(given.value)
        self.held, self.number = [], self.number + 1


def test_graphs_hold_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they are gone, and the next one keeps something. Children keep nothing of their parents' graphs."""
    driver = Driver()
    monkeypatch.setattr(graphs, "_driver", lambda: driver)
    monkeypatch.setattr(graphs, "_reads", {})
    value = {torch.zeros(3)}
    (reference,) = map(weakref.ref, value)
    for _ in range(2):
        graphs.keep(5, value)
    assert len(driver.held) == 1
    del value
    graphs.release()
    assert reference() is not None
    child = os.fork()
    if not child:
        os._exit((len(graphs._reads), len(graphs._of_parent)) != (0, 1))  # nor do they free it
    assert os.waitpid(child, 0)[1] == 0
    driver.destroy()
    graphs.keep(5, {})
    assert reference() is None
    driver.status = 2
    with pytest.raises(RuntimeError, match="got one whose capture has failed"):
        graphs.keep(5, {})
    driver.status, driver.error = 1, 801
    with pytest.raises(RuntimeError, match="cuUserObjectCreate gave error 801"):
        graphs.keep(5, {})


def test_threads_free_what_graphs_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that finds a graph gone while another one is freeing what it read leaves the semaphore alone."""
    driver = Driver()
    looked: list[Any] = []
    freed: list[Any] = []
    monkeypatch.setattr(graphs, "_driver", lambda: driver)
    monkeypatch.setattr(graphs, "_reads", {})
    graphs.keep(5, {})
    driver.destroy()
    original = graphs._libc()

    def sem_trywait(semaphore: Any) -> int:
        assert not freed
        looked.append(semaphore)
        if len(looked) == 1:  # another thread does all of it here
            thread = threading.Thread(target=graphs.release)
            thread.start()
            thread.join()
        return original.sem_trywait(semaphore) if not freed else -1

    libc = SimpleNamespace(sem_trywait=sem_trywait, sem_destroy=original.sem_destroy, free=freed.append)
    monkeypatch.setattr(graphs, "_libc", lambda: libc)
    graphs.release()
    assert len(looked) == len(freed) == 1
    graphs.release()  # nothing is left, and the lock is free
    assert len(looked) == 1


@needs_kernels
def test_graphs_let_go_of_what_they_kept() -> None:
    """Many captures of new masks take no more memory than a few."""
    allocated, seqlen = [], 2048  # half a megabyte of tables
    x = torch.randn(1, seqlen, 2, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(12):
        made = BlockMask.from_dense(torch.rand(seqlen, seqlen, device="cuda") < 0.5).build()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = flash_attn_func(x, x, x, block_mask=made)
            graph.replay()
        torch.cuda.synchronize()
        del graph, out, made
        gc.collect()
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] < allocated[2] + (2 << 20), "tables of about nine masks have piled up"
