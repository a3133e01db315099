"""The forward pass of selections on Hopper, executed by the interpreter of PTX, and compared with the oracle."""

import random
from typing import Any

import torch

from flash_attn_cute.backends.cute import backend as cute_backend
from flash_attn_cute.backends.cute import selection
from flash_attn_cute.backends.cute.backend import CuteBackend
from flash_attn_cute.backends.cute.plan import Shapes
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.spec import AttentionSpec, Results
from lab import interpreter
from tests.lib.checks import assert_forward_close
from tests.lib.interpreted.common import Executed, as_given
from tests.lib.oracle import Call

NUM_SMS = 2


class Interpreted(CuteBackend):
    """The backend, whose forward pass of selections is executed by the interpreter."""

    def __init__(self, **options: Any):
        super().__init__(ARCHITECTURES["sm90"])
        self.options = options
        self._prepare_selection = self.prepare  # type: ignore[assignment]

    def prepare(self, spec: AttentionSpec, q: Any, k: Any, num: int, selected: Any, _: Any) -> Any:
        """Plans as ``_plan_selection`` does, without a GPU."""
        plan = selection.plan_selection(self.architecture, spec, Shapes(q, k, num, 0), selected, NUM_SMS)
        return cute_backend._Launch(Executed(plan, **self.options), plan, takes_tiles=False)


def results_of(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None = None,
    lagging: interpreter.Lagging | None = None,
) -> Results:
    """Out and lse of a call; of a changed program instead of its configuration's, if there is one."""
    inputs, spec = as_given(call)
    with torch.no_grad():
        return Interpreted(draw=draw, changed=changed, lagging=lagging)._forward(spec, inputs)


def check(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None = None,
    lagging: interpreter.Lagging | None = None,
) -> Results:
    """A call's results against the oracle's, and what stands in the padding; returns them."""
    results = results_of(call, draw, changed, lagging)
    assert_forward_close(call, results.out, results.lse)
    return results
