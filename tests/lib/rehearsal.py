"""Kernels that a test needs, compiled ahead of it by many processes.

Ranks wait for one another wherever one of them compiles, so that kernels are compiled one by one. A rehearsal runs the
test's functions with kernels that launch nothing, notes their configurations, and compares no results.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.calls import dispatch
from tests.lib import checks


def needed_by(functions: Sequence[Callable[[], None]], backends: dict[str, Any] | None = None) -> list[Any]:
    """Configurations of all kernels that functions would launch, each once.

    What functions do may not depend on results, which are memory that nothing was written to. They compare by
    ``checks.assert_close`` and ``checks.differing``.

    Args:
        functions: run one after the other.
        backends: those whose kernels are noted; None: this machine's.
    """
    needed: dict[Any, None] = {}

    def note(config: Any) -> Callable[..., None]:
        needed[config] = None
        return lambda *_: None

    backends = dispatch.BACKENDS if backends is None else backends
    dry = {
        name: CuteBackend(backend.architecture, is_supposed=backend.is_supposed, kernel_of=note)
        for name, backend in backends.items()
        if isinstance(backend, CuteBackend)
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(dispatch.BACKENDS, dry))
        stack.enter_context(patch.object(checks, "assert_close", lambda *_: None))
        stack.enter_context(patch.object(checks, "differing", lambda *_: []))
        for function in functions:
            function()
    return list(needed)
