"""State that outlives a call: how it is made once, read by any stream, and what it is made of.

docs/architecture.md has the rule ("State that outlives a call"). Owners (block masks, their nodes, shardings) have a
dictionary each. ``made`` puts things into it and ``found`` finds them; ``Sources`` are the tensors that they are made
of. Nothing else of the package keeps tensors between calls, but the tile counters of ``backends/cute/counters.py``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import (
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _get_dispatch_mode,
    _is_torch_function_mode_enabled,
    _TorchDispatchModeKey,
)
from torch.nn import Parameter

from flash_attn_cute.runtime import graphs
from flash_attn_cute.runtime.forks import begin_child_with

T = TypeVar("T")

# What an owner keeps: a ``Kept`` a key or, while one is made, an ``_Unfinished``.
Store = dict[Any, Any]

_MOST = 64  # things of an owner; shardings may be asked for new plans with every batch


class Kept(Generic[T]):
    """A value that many calls read, and on a GPU the stream on which it was made.

    Other streams wait for it once. The allocator knows them (``record_stream``), so that memory which they
    read is not given away while they do. A CUDA graph that reads it keeps it alive.
    """

    def __init__(self, value: T, device: torch.device, *, is_new: bool = True) -> None:
        """Notes the current stream of a device, which is that of the tensors in the value.

        These may be in tuples, lists, dictionaries and objects of this package. ``is_new``: it has been computed just
        now, and others wait for that alone; else they wait for all that the stream has been given by the time they ask.
        """
        self.value = value
        # The GPU; None where nothing is to be done: elsewhere, and in a graph, which owns what it computes.
        self._gpu = device.index if device.type == "cuda" and not is_captured(device) else None
        if self._gpu is not None:
            self._stream = torch.cuda.current_stream(self._gpu)
            self._event = self._stream.record_event() if is_new else None
            # With the thread, as the default streams of all may have one handle (cudaStreamPerThread).
            self._readers = {(self._stream.cuda_stream, threading.get_ident())}
            _on_gpus.add(self)

    def get(self) -> T:
        """The value, ready to be read by the current stream; RuntimeError in a process forked from its maker's."""
        gpu = self._gpu
        if gpu is not None and not torch.compiler.is_compiling():  # a compiled program has it among its inputs
            stream = torch._C._cuda_getCurrentRawStream(gpu)
            if (stream, threading.get_ident()) not in self._readers or _is_capturing(gpu):
                self._admit(stream, gpu)
        return self.value

    def finish(self) -> None:
        """Has the host wait until it is computed, so that streams may read it without asking."""
        if self._gpu is not None and self._event is not None:
            self._event.synchronize()

    def _admit(self, handle: int, gpu: int) -> None:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "expected what this process can use, got tables on a GPU that were made before it was forked: start "
                "it by the method 'spawn', or give it a mask on the CPU (BlockMask.to)"
            )
        if _is_capturing(gpu):
            # Events from before a capture cannot be waited for in it; torch.cuda.graph has waited for everything.
            graphs.keep(handle, self.value)
            return
        stream = torch.cuda.current_stream(gpu)
        if self._event is not None:
            stream.wait_event(self._event)
        elif not _captures(self._stream):
            stream.wait_stream(self._stream)
        for x in tensors_of(self.value):
            x.record_stream(stream)
        self._readers.add((handle, threading.get_ident()))


class Sources:
    """Tensors that things will be made of, as they are now.

    They are checked when they are read: PyTorch counts the writes to a tensor, but not those by replays of graphs,
    through ``.data`` or by other libraries, and none to tensors of inference mode.
    """

    def __init__(self, named: dict[str, list[Tensor]]) -> None:
        """By the names of arguments."""
        self._before = _versions(named)
        # Held, as tensors that come after one that is gone may have its id.
        self._tensors = [x for some in named.values() for x in some]
        self.are_real = all(map(_is_real, self._tensors))
        gpu = next((x.device for x in self._tensors if x.is_cuda), None) if self.are_real else None
        self._kept = None if gpu is None else Kept(self._tensors, gpu, is_new=False)

    def use(self, named: dict[str, list[Tensor]], *, checked: bool = True) -> None:
        """Has the current stream read them, and raises ValueError if one of them has been written to.

        Not ``checked``: they may have been, as a graph or a compiled program reads them when it runs.
        """
        if torch.compiler.is_compiling():
            return
        if self._kept is not None:
            self._kept.get()
        if not checked:
            return
        for name, versions in _versions(named).items():
            if versions != self._before[name]:
                raise ValueError(
                    f"{name}: expected what it was when the BlockMask was made of it, got a tensor that has been "
                    f"written to since: build() the mask before that, or make it of a clone()"
                )


def _versions(named: dict[str, list[Tensor]]) -> dict[str, list[tuple[int, int]]]:
    """Which tensors they are, and how often each has been written to."""
    return {name: [(id(x), 0 if x.is_inference() else x._version) for x in some] for name, some in named.items()}


def made(store: Store, key: Hashable, device: torch.device, make: Callable[[], T], *, in_thread: bool = False) -> T:
    """Finds what an owner keeps under a key, ready for the current stream, or makes it now, in none of PyTorch's modes.

    Threads that ask at the same time get one thing. Nothing is kept of what fails. ``device`` is that of its tensors;
    ``in_thread``: always in another thread, see ``apart``.
    """
    while True:
        there = store.get(key)
        if there is None:
            unfinished = _Unfinished(store, key)
            try:
                _unfinished.add(unfinished)  # first, for a fork may follow at once
                there = store.setdefault(key, unfinished)
                if there is unfinished:
                    return _make(unfinished, device, make, in_thread)
            finally:
                unfinished.end()
        if isinstance(there, Kept):
            value: T = there.get()
            return value
        there.done.wait()


def found(store: Store, key: Hashable) -> Kept[Any] | None:
    """Finds what an owner keeps under a key, if anything."""
    there = store.get(key)
    return there if isinstance(there, Kept) else None


def finish(store: Store) -> None:
    """Has the host wait until all that an owner keeps is computed."""
    for there in list(store.values()):
        if isinstance(there, Kept):
            there.finish()


def _make(unfinished: _Unfinished, device: torch.device, make: Callable[[], T], in_thread: bool) -> T:
    store, key = unfinished.store, unfinished.key
    kept = Kept((apart if in_thread else outside)(make, device), device)
    if len(store) > _MOST:
        store.pop(next((other for other, there in list(store.items()) if isinstance(there, Kept)), None), None)
    store[key] = kept
    graphs.release()
    return kept.value


def outside(make: Callable[[], T], device: torch.device) -> T:
    """Runs a function in none of PyTorch's modes, on the current stream of a device, and without gradients.

    Modes are of threads: inference, autocast, fake tensors, transforms of torch.func, a default device. In a thread
    that is in any of them another one runs it.
    """
    if _modes() != _no_modes():
        return apart(make, device)
    with torch.no_grad():
        return make()


def apart(make: Callable[[], T], device: torch.device) -> T:
    """Runs a function as ``outside`` does, but always in another thread, as this one's memory may come from a pool.

    So it is under torch.cuda.use_mem_pool, and while torch.compile warms up for CUDA graphs, which then gives it to
    others even if a tensor holds it. A pool is entered by one thread.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> T:
        with torch.cuda.stream(stream), torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def copied(x: Tensor) -> Tensor:
    """A copy that only the package writes to, made in none of PyTorch's modes; in a traced program, a part of it."""
    if torch.compiler.is_compiling() or not _is_real(x):
        return x.clone()
    return outside(lambda: x.detach().clone(), x.device)


def lasting(x: Tensor) -> Tensor:
    """The tensor as calls after this one may read it.

    One of torch.func.grad or jvp is without their wrappers, which end with them. One of inference mode, whose writes
    are not counted and which no backward pass may save, becomes a copy.
    """
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return copied(x) if x.is_inference() else x


def is_captured(device: torch.device) -> bool:
    """Whether what is launched now on a device becomes part of a CUDA graph."""
    return device.type == "cuda" and _is_capturing(device.index)


def _is_capturing(gpu: int) -> bool:
    if torch._C._cuda_getDevice() == gpu:
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(gpu):
        return torch._C._cuda_isCurrentStreamCapturing()


def as_fakes(value: Any) -> Any:
    """Named tuples of tensors as the fake mode of this thread wants them, if it is in one."""
    if torch.compiler.is_compiling():
        return value
    mode = _get_dispatch_mode(_TorchDispatchModeKey.FAKE)
    return value if mode is None else _mapped(value, mode.from_tensor)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if _is_real(value) else value
    return type(value)(*(_mapped(x, change) for x in value)) if isinstance(value, tuple) else value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dictionaries and objects of this package."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for x in value.values():
            yield from tensors_of(x)
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from tensors_of(x)
    elif type(value).__module__.startswith(f"{__package__}."):
        yield from tensors_of(vars(value))


def _is_real(x: Tensor) -> bool:
    """Whether a tensor holds numbers that do not depend on what a traced program is given."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    if type(x) not in (Tensor, Parameter):
        from torch._subclasses.fake_tensor import is_fake  # which takes long to import

        return not is_fake(x)
    proxy = _get_dispatch_mode(_TorchDispatchModeKey.PROXY)
    if proxy is None:
        return True
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    return get_proxy_slot(x, proxy.tracer, None) is None


class _Unfinished:
    """Something that a thread is making; the others wait for it."""

    def __init__(self, store: Store, key: Hashable) -> None:
        self.store, self.key = store, key
        self.done = threading.Event()

    def forget(self) -> None:
        """Lets others make it, unless it has been made."""
        if self.store.get(self.key) is self:
            del self.store[self.key]

    def end(self) -> None:
        """Has the others look for what has been made; nothing is kept of what failed."""
        self.forget()
        _unfinished.discard(self)
        self.done.set()


_unfinished: set[_Unfinished] = set()
_on_gpus: WeakSet[Kept[Any]] = WeakSet()
_of_parent: list[Kept[Any]] = []


def _begin_as_child() -> None:
    """After a fork: what other threads were making never comes, and what is on the parent's GPUs is never freed."""
    for unfinished in _unfinished:
        unfinished.forget()
    _unfinished.clear()
    for kept in _on_gpus:
        kept._readers.clear()  # so that each asks anew
        _of_parent.append(kept)


begin_child_with(_begin_as_child)


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _modes() -> tuple[int, int, bool]:
    """Modes of this thread, but whether it records gradients."""
    keys = _dispatch_tls_local_include_set().raw_repr(), _dispatch_tls_local_exclude_set().raw_repr()
    return *keys, _is_torch_function_mode_enabled()


@functools.cache
def _no_modes() -> tuple[int, int, bool]:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_modes).result()
