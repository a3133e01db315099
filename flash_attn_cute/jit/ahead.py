"""Kernels that will be needed soon, compiled by another process while this one compiles: that holds Python's lock.

The process leaves the kernel in the folder on disk. It does without PyTorch, whose import would take as long as the
compile. If it fails, the process that needs the kernel compiles it, and says what is wrong.
"""

import contextlib
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

# The package's own __init__ would import PyTorch, and so would libraries that can do without.
_PROGRAM = """
import os, pickle, sys, types
path, sys.dont_write_bytecode, sys.pycache_prefix, folder, config = pickle.loads(bytes.fromhex(sys.argv[1]))
sys.path[:] = path
sys.modules["torch"] = None
os.environ.pop("FLASH_ATTN_CUTE_NVTX", None)
package = sys.modules["flash_attn_cute"] = types.ModuleType("flash_attn_cute")
package.__path__ = [folder]
from flash_attn_cute.jit import cache
cache.kernel(pickle.loads(config))
"""
_waiting: dict[Any, threading.Thread] = {}


def begin(config: Any) -> None:
    """Has another process compile the kernel of a configuration, if one can be started; returns at once."""
    if _is_interpreter(sys.executable) and config not in _waiting:
        thread = threading.Thread(target=_compile, args=(config,), daemon=True)
        with contextlib.suppress(RuntimeError):  # there are as many threads as there may be, or Python ends
            thread.start()
            _waiting[config] = thread


def wait(config: Any) -> None:
    """Waits for the process that compiles the kernel of a configuration, if there is one."""
    thread = _waiting.get(config)
    if thread is not None:
        thread.join()


def command(config: Any) -> list[str]:
    """The command that compiles the kernel of a configuration, unless it is in the folder."""
    bytecode = sys.dont_write_bytecode, sys.pycache_prefix  # environment variables, which -I ignores
    given = pickle.dumps((sys.path, *bytecode, str(Path(__file__).parents[1]), pickle.dumps(config))).hex()
    return [sys.executable, "-I", "-c", _PROGRAM, given]  # nothing from the folder that it is begun in


def _is_interpreter(program: str | None) -> bool:
    """Whether a program runs Python code that it is given; applications with Python in them would start once more."""
    return not hasattr(sys, "frozen") and Path(program or "").name.startswith(("python", "pypy"))


def _compile(config: Any) -> None:
    nothing = subprocess.DEVNULL
    # Where no process can be started, that is as good as one that fails.
    with contextlib.suppress(OSError):
        subprocess.run(command(config), stdin=nothing, stdout=nothing, stderr=nothing)
