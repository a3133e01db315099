"""Blackwell's out in float32, its residuals, and delta of out with them, executed on the CPU from their PTX."""

import random

import pytest
import torch

from flash_attn_cute.backends.base import BackwardCall
from tests.lib import oracle
from tests.lib.checks import bitwise_equal, gradients
from tests.lib.interpreted import backward, forward
from tests.lib.interpreted.common import as_given, dense, fresh_counters, packed
from tests.lib.residuals import assert_restored
from tests.lib.tiers import tiered

# Calls, and whether pairs of CTAs compute them.
CASES = {
    "d64": (dense([150], head_dim=64, dtype=torch.float16), False),
    "d96-packed": (packed([40, 0, 130], head_dim=96, head_dim_v=72, causal=True, sink=True), False),
    "d128": (dense([140], head_dim=128, causal=True), False),
    "d192": (dense([140], head_dim=192, causal=True), False),
    "d192-dv128-packed": (packed([40, 0, 130], head_dim=192, head_dim_v=128), False),  # O has no place but that of Q
    "pair-d256": (dense([140], head_dim=256), True),
}


@pytest.mark.parametrize("case", tiered(CASES, rare=["d64", "d96-packed", "d128"]))
def test_residuals_are_what_rounding_has_lost(case: str) -> None:
    """Against the out in float32 that parts of a call over ranks have, and whose rounding is out else."""
    draw_call, by_pairs = CASES[case]
    call = draw_call(nheads_k=1)
    rounded, wide = (
        forward.results_of(call, random.Random(0), by_pairs=by_pairs, asked=asked)
        for asked in ({"precise_gradients": True}, {"wide": True})
    )
    assert rounded.residual is not None
    assert wide.out.dtype == torch.float32
    assert bitwise_equal(wide.out.to(rounded.out.dtype), rounded.out)
    assert bitwise_equal(wide.lse, rounded.lse)
    real = call.real_rows()[0]
    assert_restored(rounded.out[real], rounded.residual[real], wide.out[real])


@pytest.mark.slow
def test_gradients_are_as_with_an_out_that_is_not_rounded() -> None:
    """Values have a large mean, which makes delta large, and so its error in an out that is rounded."""
    call = dense([130], nheads=1)()
    with torch.no_grad():
        call.v.add_(8)
    asked = {"precise_gradients": True}
    given = forward.results_of(call, random.Random(0), asked=asked)
    inputs, spec = as_given(call, backward=True)
    dout, truth = torch.randn_like(given.out), call.to(torch.float64)
    expected = gradients(truth, *oracle.attention(truth), dout, None)
    errors = []
    for residual in (given.residual, None):
        spec = spec._replace(precise_gradients=residual is not None)
        kernels = backward.Interpreted(random.Random(0))
        with fresh_counters():
            found = kernels._backward(BackwardCall(spec, inputs, given.out, given.lse, dout, None, residual))
        errors.append({name: (x - expected[name]).norm().item() for name, x in (("dq", found.dq), ("dk", found.dk))})
    for name, error in errors[0].items():
        assert 3 * error < errors[1][name], name
