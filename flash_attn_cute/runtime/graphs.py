"""Keeps alive what CUDA graphs read, as long as they live.

A graph is a list of launches with addresses in them. Who captured it may drop the tensors at those addresses before
it is replayed. So the graph gets a user object of the CUDA driver, which it and all that is instantiated from it hold.
When they are gone the driver calls the object's destructor, in a thread of its own, where no CUDA may be called. That
destructor is C's ``sem_post`` on a semaphore: it takes no lock of Python's, and works while the process ends. ``keep``
and whatever makes new things look at the semaphores, and let go of what belongs to those that have been posted.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

from flash_attn_cute.runtime.forks import begin_child_with

_SEMAPHORE = 64  # bytes, no less than a sem_t has
_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class _Read(NamedTuple):
    """Something that a graph reads, and the semaphore that says when it is gone."""

    value: Any
    semaphore: ctypes.c_void_p


# By the number of the capture and the id of the value, which is that of no other while it is here.
_reads: dict[tuple[int, int], _Read] = {}
_releasing = threading.Lock()
_of_parent: list[_Read] = []


def keep(stream: int, value: Any) -> None:
    """Keeps a value for the graph that a stream, by its handle, is capturing, and lets go of what earlier ones keep."""
    release()
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    outputs = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
    _check("cuStreamGetCaptureInfo_v2", _driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *outputs))
    if status.value != _ACTIVE:
        raise RuntimeError("expected a stream that is capturing a CUDA graph, got one whose capture has failed")
    key = number.value, id(value)
    if key not in _reads:
        _reads[key] = _Read(value, _attached(graph))


def release() -> None:
    """Lets go of what no graph reads any more. Memory is freed here, not in the driver's thread.

    One thread does at a time, for another one must not look at a semaphore that this one frees.
    """
    if not _releasing.acquire(blocking=False):
        return
    try:
        for key, read in list(_reads.items()):
            if _libc().sem_trywait(read.semaphore) == 0:
                del _reads[key]
                _libc().sem_destroy(read.semaphore)
                _libc().free(read.semaphore)
    finally:
        _releasing.release()


def _attached(graph: ctypes.c_void_p) -> ctypes.c_void_p:
    """A semaphore that is posted when a graph, and all that has been made of it, is gone."""
    libc, driver, holder = _libc(), _driver(), ctypes.c_void_p()
    semaphore = ctypes.c_void_p(libc.malloc(_SEMAPHORE))  # not Python's: it outlives the interpreter
    libc.sem_init(semaphore, 0, 0)
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
    made = driver.cuUserObjectCreate(ctypes.byref(holder), semaphore, post, 1, _NO_DESTRUCTOR_SYNC)
    _check("cuUserObjectCreate", made)
    _check("cuGraphRetainUserObject", driver.cuGraphRetainUserObject(graph, holder, 1, _MOVE))
    return semaphore


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    return libc


def _check(name: str, result: int) -> None:
    if result:
        raise RuntimeError(f"a CUDA graph cannot keep the tables of a block mask alive: {name} gave error {result}")


def _begin_as_child() -> None:
    """After a fork: graphs are the parent's, and memory on its GPUs must not be freed here."""
    global _releasing
    _releasing = threading.Lock()  # a thread of the parent's may have had it
    _of_parent.extend(_reads.values())
    _reads.clear()


begin_child_with(_begin_as_child)
