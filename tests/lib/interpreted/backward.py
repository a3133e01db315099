"""The backward pass, executed by the interpreter of PTX, and compared with the oracle."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.backends.cute import counters
from flash_attn_cute.backends.cute.backend import CuteBackend, Launch
from flash_attn_cute.spec import AttentionSpec
from lab import interpreter
from tests.lib import oracle
from tests.lib.checks import assert_close, gradients, poisoned_dout
from tests.lib.configurations import LONG, paired
from tests.lib.interpreted.common import B200, Executed, architecture_of, as_given
from tests.lib.oracle import Call

NUM_SMS = 2


class Interpreted(CuteBackend):
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
        backward = architecture.passes["backward"]
        configure = backward.configure
        if as_long:
            backward = backward._replace(configure=lambda *given, **more: configure(*given, **more | {"keys": LONG}))
        elif by_pairs:
            backward = backward._replace(configure=lambda *given, **more: paired(configure(*given, **more)))
        architecture = architecture._replace(passes=architecture.passes | {"backward": backward})
        super().__init__(architecture)
        self.draw, self.num_ctas, self.changed, self.lagging = draw, num_ctas, changed, lagging
        self.deterministic = deterministic
        self.launch_of = self.prepare  # type: ignore[assignment]

    def prepare(self, plan_pass: Any, _: torch.device, spec: AttentionSpec, *given: Any) -> Launch:
        """Plans as ``_launch_of`` does, without a GPU."""
        plan = plan_pass(self.architecture, spec, *given, self.num_ctas)
        return Launch(Executed(plan, self.draw, self.changed, self.lagging), plan, takes_tiles=True)


def execute(
    call: Call, backend: Interpreted, lse: Tensor, dout: Tensor, dlse: Tensor | None, *, wide: bool = False
) -> dict[str, Tensor]:
    """The gradients of a call, from the results of its forward pass in float64."""
    inputs, spec = as_given(call, backward=True, deterministic=backend.deterministic, backend=backend)
    spec = spec._replace(wide=wide)
    with torch.no_grad():
        out = oracle.attention(call.to(call.q.dtype))[0].detach()
        sink, bias = call.learnable_sink is not None, call.bias is not None and call.bias.requires_grad
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counters, "next_tile", lambda *_: torch.zeros(4, dtype=torch.int32))
            found = backend._backward(BackwardCall(spec, inputs, out, lse, dout, dlse, None, bias, sink))
    got = {"dq": found.dq, "dk": found.dk, "dv": found.dv, "dbias": found.dbias, "dlearnable_sink": found.dsink}
    return {name: x for name, x in got.items() if x is not None}


def check(call: Call, backend: Interpreted, *, through_lse: bool = False) -> dict[str, Tensor]:
    """A call's gradients against the oracle's, and what stands in the padding; returns them."""
    truth, low = call.to(torch.float64), call.to(call.q.dtype)
    out, lse = oracle.attention(truth)
    dout = poisoned_dout(call, out.to(call.q.dtype))
    dlse = torch.randn(lse.shape) if through_lse else None
    got = execute(call, backend, lse.detach().float(), dout, dlse)
    expected = gradients(truth, out, lse, dout, dlse)
    yardstick = gradients(low, *oracle.attention(low), dout, dlse)
    size = max([1.0, *(x.abs().max().item() for x in expected.values() if x.numel())])
    for name, x in got.items():
        assert_close(name, x, expected[name], yardstick[name], 3.0 if call.softcap else 2.0, size)
    real_q, real_k = call.real_rows()
    for name, real in (("dq", real_q), ("dk", real_k), ("dv", real_k)):
        assert (got[name][~real] == 0).all(), f"{name}: padding rows are not zero"
    return got
