"""Compiled kernels by what they were compiled for: in memory, in a bundle, in the folder on disk, or compiled."""

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flash_attn_cute.jit import ahead, bundle, disk, key
from flash_attn_cute.runtime import nvtx, settings
from flash_attn_cute.runtime.forks import begin_child_with

_lock = threading.Lock()
_kernels: dict[Any, Callable[..., None]] = {}
_compiles = 0
_has_paused_collection = False  # of garbage, by the thread that holds the lock
_needed_next: ContextVar[Callable[[], Any] | None] = ContextVar("needed_next", default=None)


def _begin_as_child() -> None:
    """After a fork: a thread of the parent's that was compiling is not here to unlock, or to collect garbage again."""
    global _lock
    _lock = threading.Lock()
    _resume_collection()
    disk.close_locks()


begin_child_with(_begin_as_child)


class NotKeptWarning(RuntimeWarning):
    """A kernel works, but could not be kept on disk: every process will compile it again."""


class NotBundledWarning(RuntimeWarning):
    """A kernel works, but is not in the bundle that was to have it: every process looks for it elsewhere."""


def kernel(config: Any) -> Callable[..., None]:
    """The kernel of a configuration (a frozen dataclass, see ``jit.key``): from memory, from disk, or compiled.

    Raises:
        bundle.DamagedBundleError: the bundle is not what its name says.
        disk.UnsafeFolderError: others could have put code into the folder of compiled kernels.
    """
    found = _kernels.get(config)
    if found is None:
        with _lock, _no_garbage_collection():
            found = _kernels.get(config)
            if found is None:
                # Not before it is needed: this is what imports cutlass.
                from flash_attn_cute.jit.code import load

                found = _kernels[config] = load(_code(config))
    return found


@contextlib.contextmanager
def compiling_beside(needed_next: Callable[[], Any]) -> Iterator[None]:
    """Has another process compile a kernel that will be needed next, if one has to be compiled meanwhile.

    It comes here through the folder on disk. Where there is none, nothing is done. ``needed_next`` gives its
    configuration, or None, and is called where a kernel is about to be compiled.
    """
    token = _needed_next.set(needed_next)
    try:
        yield
    finally:
        _needed_next.reset(token)


def compile_count() -> int:
    """How many kernels this process has compiled; those that it read from disk do not count."""
    return _compiles


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """For as long as a kernel is made.

    Importing cutlass and compiling leave many objects and few cycles, and each full collection on the way would look
    at all of them, and at those of PyTorch.
    """
    global _has_paused_collection
    _has_paused_collection = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _resume_collection()


def _resume_collection() -> None:
    global _has_paused_collection
    if _has_paused_collection:
        gc.enable()
    _has_paused_collection = False


def _code(config: Any) -> bytes:
    path = settings.bundle()
    if path is not None:
        code = bundle.opened(path).read(key.name(key.identity(config)))
        if code is not None:
            return code
        warnings.warn(
            f"FLASH_ATTN_CUTE_BUNDLE: {path} has no kernel of {config}, made from {key.surroundings()}. It comes from "
            "the folder of compiled kernels, or is compiled; make the bundle anew of a folder that has it",
            NotBundledWarning,
            stacklevel=2,
        )
    return _code_in_folder(config)


def _code_in_folder(config: Any) -> bytes:
    """The code of a configuration, read from disk or compiled: by one process, while others that need it wait.

    A disk that fails (no home, a read-only or full file system) costs time, and a warning, but no result.
    """
    path = None
    with contextlib.ExitStack() as stack:
        try:
            path = settings.cache_dir()
            folder = None if path is None else stack.enter_context(disk.Folder(path))
        except OSError as error:
            _warn(path, error)
            folder = None
        if folder is None:
            return _compile(config)
        identity = key.identity(config)
        name = key.name(identity)
        ahead.wait(config)
        code = folder.read(name)
        if code is None:
            try:
                stack.enter_context(folder.lock(name))
            except OSError as error:
                _warn(path, error)
                return _compile(config)
            code = folder.read(name)
        if code is None:
            _begin_next(folder)
            code = _compile(config)
            if key.sources_unchanged():  # or it would be found under the name of other sources
                try:
                    folder.write(name, identity, code)
                except OSError as error:
                    _warn(path, error)
        return code


def _begin_next(folder: disk.Folder) -> None:
    needed_next = _needed_next.get()
    config = None if needed_next is None else needed_next()
    if config is not None and config not in _kernels and folder.read(key.name(key.identity(config))) is None:
        ahead.begin(config)


def _compile(config: Any) -> bytes:
    global _compiles
    from flash_attn_cute.jit.code import export
    from flash_attn_cute.jit.compile import compile_kernel

    with nvtx.span(f"compile {config.pass_name} d{config.tile_d}"):
        code = export(compile_kernel(config))
    _compiles += 1
    return code


def _warn(path: Path | None, error: OSError) -> None:
    where = "" if path is None else f"{path}: "  # files in it are named without it
    warnings.warn(
        f"compiled kernels are not kept on disk ({where}{error}): set FLASH_ATTN_CUTE_CACHE_DIR to a folder that can "
        "be written, or to 0 to do without",
        NotKeptWarning,
        stacklevel=2,
    )
