"""The passes of selections on Hopper, executed by the interpreter of PTX, and compared with the oracle."""

import random

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.problem.spec import Results
from lab import interpreter
from tests.lib import oracle
from tests.lib.checks import assert_max_logits_close, assert_results_close, poisoned_dout
from tests.lib.interpreted.common import NUM_SMS, Interpreted, as_given, by_name
from tests.lib.oracle import Call

SM90 = ARCHITECTURES["sm90"]


def results_of(
    call: Call, draw: random.Random, lagging: interpreter.Lagging | None = None, *, max_logits: bool = False
) -> Results:
    """Results of a call."""
    inputs, spec = as_given(call)
    with torch.no_grad():
        return Interpreted(SM90, NUM_SMS, draw, None, lagging)._forward(spec._replace(max_logits=max_logits), inputs)


def check(
    call: Call, draw: random.Random, lagging: interpreter.Lagging | None = None, *, max_logits: bool = False
) -> Results:
    """A call's results against the oracle's, and what stands in the padding; returns them."""
    results = results_of(call, draw, lagging, max_logits=max_logits)
    assert_results_close(call, {"out": results.out, "lse": results.lse})
    if results.max_logits is not None:
        assert_max_logits_close(results.max_logits, call)
    return results


def gradients_of(
    call: Call,
    dout: Tensor,
    draw: random.Random,
    lagging: interpreter.Lagging | None = None,
    dlse: Tensor | None = None,
) -> dict[str, Tensor]:
    """Gradients of a call, of an out and lse that are the oracle's."""
    inputs, spec = as_given(call)
    has_sink = call.learnable_sink is not None
    with torch.no_grad():
        out, lse = oracle.attention(call.to(torch.float64))
        asked = BackwardCall(spec, inputs, out.to(call.q.dtype), lse.float(), dout, dlse, need_dsink=has_sink)
        found = by_name(Interpreted(SM90, NUM_SMS, draw, None, lagging)._backward(asked))
    assert ("dlearnable_sink" in found) == has_sink
    return found


def check_gradients(
    call: Call, draw: random.Random, lagging: interpreter.Lagging | None = None, *, through_lse: bool = False
) -> None:
    """Gradients of a call against the oracle's, and what stands in the padding."""
    out, lse = oracle.attention(call.to(call.q.dtype))
    dout = poisoned_dout(call, out)
    dlse = torch.randn(lse.shape) if through_lse else None
    assert_results_close(call, gradients_of(call, dout, draw, lagging, dlse), dout, dlse)
