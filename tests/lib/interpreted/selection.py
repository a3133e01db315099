"""The forward pass of selections on Hopper, executed by the interpreter of PTX, and compared with the oracle."""

import random
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute.backend import CuteBackend, Launch
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.spec import AttentionSpec, Results
from lab import interpreter
from tests.lib import oracle
from tests.lib.checks import assert_close, assert_forward_close, assert_max_logits_close, gradients, poisoned_dout
from tests.lib.interpreted.common import Executed, as_given
from tests.lib.oracle import Call

NUM_SMS = 2


class Interpreted(CuteBackend):
    """The backend, whose forward pass of selections is executed by the interpreter."""

    def __init__(self, **options: Any):
        super().__init__(ARCHITECTURES["sm90"])
        self.options = options
        self.launch_of = self.prepare  # type: ignore[assignment]

    def prepare(self, plan_pass: Any, _: torch.device, spec: AttentionSpec, *given: Any) -> Launch:
        """Plans as ``_launch_of`` does, without a GPU."""
        plan = plan_pass(self.architecture, spec, *given, NUM_SMS)
        return Launch(Executed(plan, **self.options), plan, takes_tiles=False)


def results_of(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None = None,
    lagging: interpreter.Lagging | None = None,
    *,
    max_logits: bool = False,
) -> Results:
    """Results of a call; of a changed program instead of its configuration's, if there is one."""
    inputs, spec = as_given(call)
    backend = Interpreted(draw=draw, changed=changed, lagging=lagging)
    with torch.no_grad():
        return backend._forward(spec._replace(max_logits=max_logits), inputs)


def check(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None = None,
    lagging: interpreter.Lagging | None = None,
    *,
    max_logits: bool = False,
) -> Results:
    """A call's results against the oracle's, and what stands in the padding; returns them."""
    results = results_of(call, draw, changed, lagging, max_logits=max_logits)
    assert_forward_close(call, results.out, results.lse)
    if results.max_logits is not None:
        assert_max_logits_close(results.max_logits, call)
    return results


def gradients_of(call: Call, dout: Tensor, draw: random.Random) -> Gradients:
    """Gradients of a call, of an out and lse that are the oracle's."""
    inputs, spec = as_given(call)
    out, lse = oracle.attention(call.to(torch.float64))
    with torch.no_grad():
        asked = BackwardCall(spec, inputs, out.to(call.q.dtype), lse.float(), dout, None)
        return Interpreted(draw=draw)._backward(asked)


def check_gradients(
    call: Call,
    draw: random.Random,
    lagging: interpreter.Lagging | None = None,
    *,
    through_lse: bool = False,
) -> dict[str, Tensor]:
    """Gradients of a call against the oracle's, and what stands in the padding; returns them."""
    inputs, spec = as_given(call)
    truth, low = call.to(torch.float64), call.to(call.q.dtype)
    out, lse = oracle.attention(truth)
    dout = poisoned_dout(call, out.to(call.q.dtype))
    dlse = torch.randn(lse.shape) if through_lse else None
    with torch.no_grad():
        given = out.to(call.q.dtype), lse.float(), dout, dlse
        asked = BackwardCall(spec, inputs, *given, need_dsink=call.learnable_sink is not None)
        found = Interpreted(draw=draw, lagging=lagging)._backward(asked)
    expected = gradients(truth, out, lse, dout, dlse)
    yardstick = gradients(low, *oracle.attention(low), dout, dlse)
    size = max([1.0, *(x.abs().max().item() for x in expected.values() if x.numel())])
    assert (found.dsink is None) == (call.learnable_sink is None)
    if found.dsink is not None:
        dsink = expected["dlearnable_sink"], yardstick["dlearnable_sink"]
        assert_close("dsink", found.dsink, *dsink, 3.0 if call.softcap else 2.0, size)
    got = {"dq": found.dq, "dk": found.dk, "dv": found.dv}
    real_q, real_k = call.real_rows()
    for (name, x), real in zip(got.items(), (real_q, real_k, real_k), strict=True):
        assert_close(name, x, expected[name], yardstick[name], 3.0 if call.softcap else 2.0, size)
        assert (x[~real] == 0).all(), f"{name}: padding rows are not zero"
    return got
