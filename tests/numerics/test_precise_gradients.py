"""``precise_gradients=True``: gradients that do not suffer from the rounding of out.

``test_max_logits.py`` has them beside every other feature.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gradient_errors
from benchmarks.gradient_errors import Data, Gradients
from flash_attn_cute import flash_attn_func
from flash_attn_cute.calls import dispatch, flat_call, ops
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.prepared_call import Plan, prepare
from flash_attn_cute.problem.spec import AttentionInputs, Options, Results, residual_columns
from tests.lib.checks import (
    DEVICES,
    assert_compiles,
    bitwise_equal,
    call_on,
    needs_kernels,
    on_each_backend,
    random_call,
    run,
)
from tests.lib.interpreted.common import as_given
from tests.lib.residuals import assert_restored

OPTIONS = Options(window_right=0, precise_gradients=True)
MEANS = "means in q, k, v, dout"


def _gradients(x: Data, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Gradients]:
    leaves = [part.to(dtype)[None, :, None].requires_grad_() for part in (x.q, x.k, x.v)]
    out = flash_attn_func(*leaves, causal=True, **options)
    grads = torch.autograd.grad(out, leaves, x.dout.to(dtype)[None, :, None])
    return out.detach(), {name: g[0, :, 0].float() for name, g in zip(("dq", "dk", "dv"), grads, strict=True)}


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_as_close_as_with_an_out_that_is_not_rounded(backend: str, dtype: torch.dtype) -> None:
    """And out is what it is without. Roundings of kernels are simulated; the portable backend has fewer."""
    x = gradient_errors.draw(MEANS, 1024, 1024, dtype)
    true, simulated = gradient_errors.truth(x), gradient_errors.simulated(x, dtype)
    unrounded, rounded = (
        gradient_errors.errors({k: g.to(dtype) for k, g in simulated[name].items()}, true)
        for name in ("unrounded", "rounded")
    )
    data = Data(*(part.to(DEVICES[backend]) for part in x))
    out, grads = _gradients(data, dtype, backend=backend, precise_gradients=True)
    found = gradient_errors.errors({name: g.cpu() for name, g in grads.items()}, true)
    assert rounded["dq"][0] > 3 * unrounded["dq"][0]
    for name in ("dq", "dk"):
        assert found[name][0] < 1.25 * unrounded[name][0]  # P of dS may be rounded, too
    assert bitwise_equal(out, _gradients(data, dtype, backend=backend)[0])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dims", [(128, 128), (64, 64), (96, 72), (192, 128), (256, 256)], ids=str)
def test_residuals_are_what_rounding_has_lost(dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """Against the out in float32 that parts of a call over ranks have, of the same products in the same order."""
    d, d_v = head_dims
    call = random_call([300, 65], [300, 65], head_dim=d, head_dim_v=d_v, causal=True, dtype=dtype, device="cuda")
    inputs, spec = as_given(call, backward=True)
    backend = dispatch.BACKENDS["sm90"]
    exact = backend.forward(spec._replace(wide=True), inputs).out
    out, _, _, residual = backend.forward(spec._replace(precise_gradients=True), inputs)
    assert residual is not None
    assert residual.shape == (*out.shape[:-1], residual_columns(d_v))
    assert_restored(out, residual, exact, at_least=0.999)  # P of some tiles may be of another maximum


@on_each_backend
@pytest.mark.parametrize("bias", [(0, 0, 1), (1, 0, 1)], ids=["a row", "a row a head"])
def test_gradients_of_bias_and_sink_are_summed_in_float32(backend: str, bias: tuple[int, int, int]) -> None:
    """In bfloat16 they are those in float32, rounded once, which is an error of 2^-8 at the most."""
    call = call_on(backend, [300] * 3, [300] * 3, packed=False, bias=bias, sink=True, dtype=torch.bfloat16)
    dout, found = torch.randn_like(call.q), {}
    for dtype in (torch.bfloat16, torch.float32):
        b, sink = (x.detach().bfloat16().to(dtype).requires_grad_() for x in (call.bias, call.learnable_sink))
        out = flash_attn_func(*(x.detach() for x in call.qkv), bias=b, learnable_sink=sink, backend=backend)
        found[dtype] = torch.autograd.grad(out, (b, sink), dout)
    for low, exact in zip(found[torch.bfloat16], found[torch.float32], strict=True):
        assert 0 < (low - exact).norm() < 2.0**-8 * exact.norm()


@on_each_backend
def test_nothing_is_kept_without_gradients(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, run_forward = [], ops._run_forward

    def noted(inputs: AttentionInputs, plan: Plan) -> Results:
        asked.append(plan.spec.precise_gradients)
        return run_forward(inputs, plan)

    monkeypatch.setattr(ops, "_run_forward", noted)
    call = call_on(backend, [40], [40], packed=False)
    with torch.no_grad():
        run(call, backend=backend, precise_gradients=True)
    run(call, backend=backend, precise_gradients=True)
    assert asked == [False, True]


@on_each_backend
def test_compiled_and_checked_operators(backend: str) -> None:
    """Fakes know of residuals as kernels do, and the compiled program saves them for its backward pass."""
    call = call_on(backend, [70], [70], packed=False, causal=True, dtype=torch.bfloat16)
    with torch.no_grad():
        inputs, plan = prepare(AttentionCall(*call.qkv, options=OPTIONS, backend=backend), backward=True)
        flat = flat_call.flatten(inputs, plan)
        torch.library.opcheck(
            torch.ops.flash_attn_cute.forward.default, flat, test_utils=("test_schema", "test_faketensor")
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, precise_gradients=True, backend=backend)

    assert_compiles(attend, [call.qkv], 1)


def test_what_is_refused() -> None:
    x = torch.randn(1, 4, 2, 16)
    with pytest.raises(TypeError, match="precise_gradients: expected a bool, got 1"):
        flash_attn_func(x, x, x, precise_gradients=1)  # type: ignore[call-overload]
