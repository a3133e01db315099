"""The forward pass, executed by the interpreter of PTX, and compared with the oracle."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute.backends.cute import counters
from flash_attn_cute.backends.cute.backend import CuteBackend, Launch
from flash_attn_cute.backends.cute.plan import FEW_QUERIES, Shapes, plan_forward, takes_tiles
from flash_attn_cute.backends.cute.score_layout import score_layout
from flash_attn_cute.backends.packing import over_scores
from flash_attn_cute.kernels.registry import Architecture
from flash_attn_cute.spec import AttentionSpec, Results
from lab import interpreter
from tests.lib import oracle
from tests.lib.checks import assert_close, assert_max_logits_close
from tests.lib.configurations import forward_paired
from tests.lib.interpreted.common import (
    B200,
    Executed,
    architecture_of,
    as_given,
)
from tests.lib.oracle import Call

NUM_SMS = 2


def planned(call: Call, capability: tuple[int, int] = B200) -> tuple[Any, Any]:
    """The configuration of a call that kernels take as it is, dense or packed, and the numbers that they are given."""
    inputs, spec = as_given(call)
    num_sequences = 0 if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    layout = score_layout(over_scores(inputs))
    shapes = Shapes(call.q.shape, call.k.shape, num_sequences, FEW_QUERIES + 1, scores=layout)
    config, numbers, _ = plan_forward(architecture_of(capability), spec, shapes, NUM_SMS)
    return config, numbers


def by_pairs_of_ctas(architecture: Architecture) -> Architecture:
    """An architecture whose forward pass has the kernels of long sequences for all."""
    forward = architecture.passes["forward"]
    long = forward._replace(configure=lambda *given, **more: forward_paired(forward.configure(*given, **more)))
    return architecture._replace(passes=architecture.passes | {"forward": long})


class Interpreted(CuteBackend):
    """The backend, whose forward pass is executed by the interpreter."""

    def __init__(self, *, by_pairs: bool = False, capability: tuple[int, int] = B200, **options: Any):
        """``by_pairs``: with the kernel of long sequences, of any length."""
        architecture = architecture_of(capability)
        super().__init__(by_pairs_of_ctas(architecture) if by_pairs else architecture)
        self.options = options
        self.launch_of = self.prepare  # type: ignore[assignment]

    def prepare(self, plan_pass: Any, _: torch.device, spec: AttentionSpec, *given: Any) -> Launch:
        """Plans as ``_launch_of`` does, without a GPU."""
        plan = plan_pass(self.architecture, spec, *given, NUM_SMS)
        return Launch(Executed(plan, **self.options), plan, takes_tiles(plan.config))


def execute(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None = None,
    lagging: interpreter.Lagging | None = None,
    *,
    by_pairs: bool = False,
    wide: bool = False,
    capability: tuple[int, int] = B200,
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call; of a changed program instead of its configuration's, if there is one."""
    asked = {"wide": wide}
    results = results_of(call, draw, changed, lagging, by_pairs=by_pairs, capability=capability, asked=asked)
    return results.out, results.lse


def results_of(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None,
    lagging: interpreter.Lagging | None,
    *,
    by_pairs: bool,
    capability: tuple[int, int],
    asked: dict[str, Any],
) -> Results:
    """All results, of a call of whose spec some fields are changed."""
    inputs, spec = as_given(call)
    spec = spec._replace(**asked)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(counters, "next_tile", lambda *_: torch.zeros(4, dtype=torch.int32))
        backend = Interpreted(by_pairs=by_pairs, capability=capability, draw=draw, changed=changed, lagging=lagging)
        return backend._forward(spec, inputs)


def check(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None = None,
    lagging: interpreter.Lagging | None = None,
    *,
    by_pairs: bool = False,
    capability: tuple[int, int] = B200,
    max_logits: bool = False,
) -> None:
    """A call's results against the oracle's, and what stands in the padding."""
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in ("q", "k", "v")})
    asked = {"max_logits": max_logits}
    results = results_of(call, draw, changed, lagging, by_pairs=by_pairs, capability=capability, asked=asked)
    out, lse, *_ = results
    if results.max_logits is not None:
        assert_max_logits_close(results.max_logits, call)
    with torch.no_grad():
        expected, low = oracle.attention(call.to(torch.float64)), oracle.attention(call.to(call.q.dtype))
    for name, got, true, yardstick in zip(("out", "lse"), (out, lse), expected, low, strict=True):
        size = max(1.0, true[true.isfinite()].abs().max().item() if true.isfinite().any() else 0.0)
        assert_close(name, got, true, yardstick, 3.0 if call.softcap else 2.0, size)
    real = call.real_rows()[0]
    assert (out[~real] == 0).all(), "padding rows are not zero"
    assert lse.transpose(-1, -2)[~real].isneginf().all(), "lse: padding rows are not -inf"
