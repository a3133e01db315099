"""The forward pass, executed by the interpreter of PTX, and compared with the oracle."""

import random
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.cute.plan import FEW_QUERIES, Shapes, plan_forward
from flash_attn_cute.backends.cute.score_layout import score_layout
from flash_attn_cute.backends.packing import over_scores
from flash_attn_cute.problem.spec import Results
from lab import interpreter
from tests.lib.checks import assert_max_logits_close, assert_results_close
from tests.lib.configurations import forward_paired
from tests.lib.interpreted import common
from tests.lib.interpreted.common import B200, architecture_of, as_given, fresh_counters, reconfigured
from tests.lib.oracle import Call

NUM_SMS = common.NUM_SMS


def planned(call: Call, capability: tuple[int, int] = B200) -> tuple[Any, Any]:
    """The configuration of a call that kernels take as it is, dense or packed, and the numbers that they are given."""
    inputs, spec = as_given(call)
    num_sequences = 0 if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    layout = score_layout(over_scores(inputs))
    shapes = Shapes(call.q.shape, call.k.shape, num_sequences, FEW_QUERIES + 1, scores=layout)
    config, numbers, _ = plan_forward(architecture_of(capability), spec, shapes, NUM_SMS)
    return config, numbers


class Interpreted(common.Interpreted):
    """The backend, whose forward pass is executed by the interpreter."""

    def __init__(self, *, by_pairs: bool = False, capability: tuple[int, int] = B200, **options: Any):
        """``by_pairs``: with the kernel of long sequences, of any length."""
        architecture = architecture_of(capability)
        if by_pairs:
            architecture = reconfigured(
                architecture, "forward", lambda own, *x, **more: forward_paired(own(*x, **more))
            )
        super().__init__(architecture, NUM_SMS, **options)


def results_of(call: Call, draw: random.Random, *, asked: dict[str, Any] | None = None, **options: Any) -> Results:
    """All results, of a call of whose spec some fields are changed; ``options`` are those of ``Interpreted``."""
    inputs, spec = as_given(call)
    with fresh_counters(), torch.no_grad():
        return Interpreted(draw=draw, **options)._forward(spec._replace(**asked or {}), inputs)


def execute(call: Call, draw: random.Random, *, wide: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """Out and lse of a call."""
    results = results_of(call, draw, asked={"wide": wide}, **options)
    return results.out, results.lse


def check(
    call: Call,
    draw: random.Random,
    changed: interpreter.Program | None = None,
    lagging: interpreter.Lagging | None = None,
    *,
    max_logits: bool = False,
    **options: Any,
) -> None:
    """A call's results against the oracle's; of a changed program instead of its configuration's, if there is one."""
    asked = {"max_logits": max_logits}
    results = results_of(call, draw, asked=asked, changed=changed, lagging=lagging, **options)
    assert_results_close(call, {"out": results.out, "lse": results.lse})
    if results.max_logits is not None:
        assert_max_logits_close(results.max_logits, call)
