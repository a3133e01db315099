"""The custom operators under tracing: opcheck, torch.compile without recompiles, fake tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from tests.checks import bitwise_equal, offsets, random_call, run
from tests.oracle import Call

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "seqused": True},
    "everything": {
        "sink": True,
        "bias": (1, 1),
        "mask": (1, 1, 1),
        "softcap": 2.0,
        "window_size": (4, 0),
        "head_dim_v": 8,
        "nheads_k": 1,
    },
}


def op_arguments(call: Call) -> tuple[Any, ...]:
    left, right = call.window_size
    longest = max(call.q.shape[-3], call.k.shape[-3])
    tensors = (call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    extra = (call.learnable_sink, call.mask, call.bias)
    right = 0 if call.causal else right
    return *tensors, *extra, longest, longest, call.softmax_scale, left, right, call.softcap, True, True, "portable"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck(options: dict[str, Any], packed: bool, device: str) -> None:
    """Schema, fakes, autograd registration and tracing with dynamic shapes, of both operators."""
    call = random_call([9, 6] if packed else [9, 9], packed=packed, device=device, **options)
    arguments = op_arguments(call)
    with torch.no_grad():
        for x in (call.q, call.k, call.v):
            x.nan_to_num_(0, 0, 0)
    torch.library.opcheck(torch.ops.flash_attn_cute.forward.default, arguments)
    out, lse = (x.detach() for x in torch.ops.flash_attn_cute.forward(*arguments))
    lse.masked_fill_(lse.isneginf(), 0)
    detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    backward = (out, lse, torch.randn_like(out), torch.randn_like(lse))
    for need in (True, False):
        need_dbias, need_dsink = need and call.bias is not None, need and call.learnable_sink is not None
        torch.library.opcheck(
            torch.ops.flash_attn_cute.backward.default, (*backward, need_dbias, need_dsink, *detached)
        )


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> tuple[Callable[..., Any], Any]:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def packed_step(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor) -> Tensor:
    out: Tensor = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True, deterministic=True
    )
    return out * 2


def qkv(*shape: int, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("bound", ["int", "tensor"])
def test_compile_with_changing_lengths(bound: str, device: str) -> None:
    """One tensor as both offsets, a new max_seqlen every step: one compile for fixed, one for changing sizes."""
    step, counter = compiled(packed_step)
    for i, total in enumerate((20, 31, 47, 64, 90, 128)):
        q, k, v = qkv(total, 4, 16, device=device)
        cu_seqlens = offsets([total // 2 - i, total - total // 2 + i], device=device)
        longest = total - total // 2 + i
        max_seqlen = longest if bound == "int" else torch.tensor(longest, device=device)
        got = torch.autograd.grad(step(q, k, v, cu_seqlens, max_seqlen).square().sum(), (q, k, v))
        expected = torch.autograd.grad(packed_step(q, k, v, cu_seqlens, max_seqlen).square().sum(), (q, k, v))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert counter.frame_count <= 2


def test_compile_with_fixed_sizes(device: str) -> None:
    """Offsets are data: a packed batch of one size never compiles twice, whatever its documents and bound."""
    step, counter = compiled(packed_step)
    for cut in (1, 7, 30, 63):
        q, k, v = qkv(64, 4, 16, device=device)
        step(q, k, v, offsets([cut, 64 - cut], device=device), 64)
    assert counter.frame_count == 1


def test_compile_with_inductor() -> None:
    step, _ = compiled(packed_step, "inductor")
    q, k, v = qkv(40, 4, 16, device="cpu")
    cu_seqlens = offsets([15, 25])
    got = torch.autograd.grad(step(q, k, v, cu_seqlens, 25).square().sum(), (q, k, v))
    expected = torch.autograd.grad(packed_step(q, k, v, cu_seqlens, 25).square().sum(), (q, k, v))
    torch.testing.assert_close(got, expected)


def test_compile_dense_with_everything(device: str) -> None:
    def function(*tensors: Tensor) -> Any:
        q, k, v, sink, bias, mask = tensors
        return flash_attn_func(
            q, k, v, window_size=(9, 1), softcap=2.0, learnable_sink=sink, bias=bias, mask=mask, return_lse=True
        )

    step, counter = compiled(function)
    for seqlen in (12, 19, 33, 40):
        leaves = qkv(2, seqlen, 4, 16, device=device)
        leaves += [torch.randn(4, device=device), torch.randn(4, 1, seqlen, device=device)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        mask = torch.rand(seqlen, seqlen, device=device) < 0.8
        grads = []
        for attend in (step, function):
            out, lse = attend(*leaves, mask)
            grads.append(torch.autograd.grad(out.sum() + lse.clamp(min=-9).sum(), leaves))
        torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert counter.frame_count <= 2


def test_errors_survive_compilation() -> None:
    step, _ = compiled(packed_step)
    q, k, v = qkv(20, 4, 16, device="cpu")
    with pytest.raises(Exception, match="cu_seqlens_q: expected int32"):
        step(q, k, v, torch.tensor([0, 20]), 20)


def test_fake_tensors_need_no_data() -> None:
    with FakeTensorMode():
        q, k, v = qkv(20, 4, 16, device="cpu")
        out = packed_step(q, k, v, torch.zeros(4, dtype=torch.int32), 20)
        out.sum().backward()
        assert out.shape == q.shape
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_checkpointing_recomputes_the_same() -> None:
    call = random_call([20, 9], causal=True)
    expected = torch.autograd.grad(run(call).square().sum(), call.q)

    def attend(q: Tensor) -> Tensor:
        out: Tensor = run(replace(call, q=q))
        return out

    again = torch.utils.checkpoint.checkpoint(attend, call.q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.square().sum(), call.q)[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["fused", "blockwise"])
def test_autocast_changes_nothing(softcap: float, dtype: torch.dtype, device: str) -> None:
    """Not the dtype, and not the precision inside."""
    call = random_call([20, 9], softcap=softcap, dtype=dtype, device=device)
    dout = torch.randn_like(call.q)
    results = []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            out, lse = run(call, return_lse=True)
            results.append((out, lse, *torch.autograd.grad(out, (call.q, call.k, call.v), dout)))
    for a, b in zip(*results, strict=True):
        assert bitwise_equal(a, b)


def test_compile_with_changing_scales(device: str) -> None:
    """Layers of one model may differ in their scale and softcap: none compiles again once seen."""

    def function(x: Tensor, scale: float, softcap: float) -> Tensor:
        out: Tensor = flash_attn_func(x, x, x, softmax_scale=scale, softcap=softcap)
        return out

    step, counter = compiled(function)
    x = torch.randn(1, 9, 2, 16, device=device)
    layers = ((0.1, 2.0), (0.2, 2.0), (0.3, 5.0))
    for scale, softcap in layers:
        torch.testing.assert_close(step(x, scale, softcap), function(x, scale, softcap), rtol=0, atol=0)
    compiles = counter.frame_count
    for scale, softcap in layers:
        step(x, scale, softcap)
    assert counter.frame_count == compiles
