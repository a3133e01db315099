"""The backward pass, executed by the interpreter of PTX, and compared with the oracle."""

import random
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall
from lab import interpreter
from tests.lib import oracle
from tests.lib.checks import assert_results_close, poisoned_dout
from tests.lib.configurations import LONG, paired
from tests.lib.interpreted import common
from tests.lib.interpreted.common import B200, NUM_SMS, architecture_of, as_given, by_name, fresh_counters, reconfigured
from tests.lib.oracle import Call


class Interpreted(common.Interpreted):
    """The backend, whose backward pass is executed by the interpreter."""

    def __init__(
        self,
        draw: random.Random,
        num_ctas: int = NUM_SMS,
        changed: interpreter.Program | None = None,
        lagging: interpreter.Lagging | None = None,
        *,
        by_pairs: bool = False,
        as_long: bool = False,
        capability: tuple[int, int] = B200,
        deterministic: bool = False,
    ):
        """Either kernel serves any length: that of ``LONG`` keys (``as_long``), or that of pairs (``by_pairs``)."""
        architecture = architecture_of(capability)
        if as_long:
            configure: Any = lambda own, *given, **more: own(*given, **more | {"keys": LONG})  # noqa: E731
            architecture = reconfigured(architecture, "backward", configure)
        elif by_pairs:
            architecture = reconfigured(architecture, "backward", lambda own, *x, **more: paired(own(*x, **more)))
        super().__init__(architecture, num_ctas, draw, changed, lagging)
        self.deterministic = deterministic


def execute(
    call: Call, backend: Interpreted, lse: Tensor, dout: Tensor, dlse: Tensor | None, *, wide: bool = False
) -> dict[str, Tensor]:
    """The gradients of a call, from the results of its forward pass in float64."""
    inputs, spec = as_given(call, backward=True, deterministic=backend.deterministic, backend=backend)
    spec = spec._replace(wide=wide)
    out = oracle.attention(call.to(call.q.dtype))[0].detach()
    sink, bias = call.learnable_sink is not None, call.bias is not None and call.bias.requires_grad
    with fresh_counters(), torch.no_grad():
        return by_name(backend._backward(BackwardCall(spec, inputs, out, lse, dout, dlse, None, bias, sink)))


def check(call: Call, backend: Interpreted, *, through_lse: bool = False, only: str | None = None) -> dict[str, Tensor]:
    """A call's gradients, or one of them, against the oracle's, and what stands in the padding; returns them."""
    out, lse = oracle.attention(call.to(torch.float64))
    dout = poisoned_dout(call, out.to(call.q.dtype))
    dlse = torch.randn(lse.shape) if through_lse else None
    got = execute(call, backend, lse.detach().float(), dout, dlse)
    assert_results_close(call, got if only is None else {only: got[only]}, dout, dlse)
    return got
