"""The largest logit of each head, ``return_max_logits=True``, against float64's."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from tests.lib import oracle
from tests.lib.checks import (
    DEVICES,
    Case,
    assert_matches_oracle,
    assert_max_logits_close,
    bitwise_equal,
    call_of,
    call_on,
    each_on,
    hopper_alone,
    needs_kernels,
    on_each_backend,
    run,
    same_bits,
)
from tests.lib.oracle import Call
from tests.lib.waits import captured

CASES: dict[str, Case] = {
    "full": {},
    "dense": {"packed": False},
    "causal": {"causal": True},
    "causal, dense": {"causal": True, "packed": False},
    "window": {"window_size": (20, 3)},
    "window that hides all": {"window_size": (None, 0), "lengths": ([200], [5])},
    "grouped": {"nheads_k": 2, "causal": True},
    "few queries, grouped": {"nheads_k": 1, "lengths": ([7, 5, 0], [300, 5, 20])},
    "few queries of 16 heads a group": {"nheads": 16, "nheads_k": 1, "lengths": ([3, 9], [30, 150])},
    "padding": {"seqused": True, "causal": True},
    "padding, dense": {"seqused": True, "packed": False},
    "sink": {"sink": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "softcap, negative scale": {"softcap": 2.0, "softmax_scale": -0.4, "window_size": (30, 40)},
    "negative scale": {"softmax_scale": -0.4, "causal": True},
    "no scale": {"softmax_scale": 0.0},
    "mask": {"mask": (1, 1, 1)},
    "mask, dense, causal": {"mask": (1, 0, 1, 1), "packed": False, "causal": True},
    "mask and softcap": {"mask": (0, 1, 1), "softcap": 2.0},
    "bias": {"bias": (1, 1, 1)},
    "bias, causal, grouped": {"bias": (0, 0, 1), "causal": True, "nheads_k": 2},
    "bias, strided": {"bias": (1, 1, 1), "bias_layout": "transposed", "causal": True},
    "bias, mask and softcap": {"bias": (1, 1, 1), "mask": (1, 1, 1), "softcap": 2.0},
    "d128, float16": {"head_dim": 128, "causal": True, "packed": False, "dtype": torch.float16},
    "d256": {"head_dim": 256, "causal": True},
    "d192, dv128": {"head_dim": 192, "head_dim_v": 128},
    "d72": {"head_dim": 72, "causal": True},
    "d72, dv40": {"head_dim": 72, "head_dim_v": 40},
}


@pytest.mark.parametrize(
    "asked", [{"return_max_logits": True}, {"precise_gradients": True, "through_lse": True}], ids=str
)
@each_on(CASES)
def test_beside_other_features(backend: str, case: Case, asked: Case) -> None:
    """Both passes, too, and precise gradients: none goes through max_logits, and all are right."""
    assert_matches_oracle(call_of(backend, case), backend=backend, **asked)


@on_each_backend
def test_documents_of_a_block_mask_become_packed(backend: str) -> None:
    call = call_on(backend, [300], [300], packed=False, causal=True)
    ids = torch.arange(300, device=DEVICES[backend])[None] // 90
    mask = BlockMask.documents(ids)
    max_logits = flash_attn_func(
        call.q, call.k, call.v, causal=True, block_mask=mask, backend=backend, return_max_logits=True
    )[1]
    assert_max_logits_close(max_logits, dataclasses.replace(call, mask=ids[:, None, :, None] == ids[:, None, None]))


@on_each_backend
@pytest.mark.parametrize("case", [{}, {"softcap": 3.0}, {"nheads_k": 1}], ids=["full", "softcap", "grouped"])
def test_rows_behind_the_last_do_not_count(backend: str, case: Case) -> None:
    """All logits are negative, and rows that tiles have beyond a sequence are zeros, whose logits are larger."""
    for lengths in ([130], [61, 7]):
        call = call_on(backend, lengths, lengths, head_dim=64, packed=True, **case)
        with torch.no_grad():
            call.q.abs_().add_(0.1)
            call.k.abs_().add_(0.1).neg_()
        max_logits = run(call, backend=backend, return_max_logits=True)[1]
        assert (max_logits < 0).all()
        assert_max_logits_close(max_logits, call)


@on_each_backend
def test_a_head_that_sees_nothing(backend: str) -> None:
    """-inf; another head beside it has a number."""
    call = call_on(backend, [40], [50], packed=False, nheads=2)
    mask = torch.zeros(1, 2, 1, 50, dtype=torch.bool, device=DEVICES[backend])
    mask[:, 1, :, 7] = True
    call = dataclasses.replace(call, mask=mask)
    hidden, visible = run(call, backend=backend, return_max_logits=True)[1].tolist()
    assert hidden == -torch.inf
    assert visible == pytest.approx(oracle.max_logits(call.to(torch.float64))[1].item(), rel=1e-4)
    for lengths in ([0], [3]), ([3], [0]), ([], []):
        empty = call_on(backend, *lengths, nheads=2)
        assert run(empty, backend=backend, return_max_logits=True)[1].isneginf().all()


@on_each_backend
def test_a_maximum_that_comes_late_or_early(backend: str) -> None:
    """The largest logit lies in the first or the last block of keys, far or hardly above all others of its row."""
    for key, factor in ((0, 8.0), (299, 8.0), (299, 1.02), (0, 1.02), (150, 3.0)):
        call = call_on(backend, [150], [300], packed=False, nheads=2)
        with torch.no_grad():
            call.k[:] = 0.05 * call.k
            call.k[:, key, 1] = factor * call.q[:, 70, 1]
        max_logits = run(call, backend=backend, return_max_logits=True)[1]
        assert_max_logits_close(max_logits, call)


def test_what_is_returned() -> None:
    """In the order out, lse, max_logits; and what is not a bool is refused."""
    call = call_on("portable", [5], [7], packed=False)
    attend: Any = flash_attn_func
    out, lse, max_logits = attend(*call.qkv, return_lse=True, return_max_logits=True)
    assert (out.shape, lse.shape, max_logits.shape) == ((1, 5, 4, 64), (1, 4, 5), (4,))
    alone, beside = attend(*call.qkv, return_max_logits=True)
    assert torch.equal(alone, out)
    assert torch.equal(beside, max_logits)
    with pytest.raises(TypeError, match="return_max_logits: expected a bool, got 1"):
        attend(*call.qkv, return_max_logits=1)
    wide = run(call.to(torch.float64), return_max_logits=True)[1]
    assert wide.dtype == torch.float64
    assert_max_logits_close(wide, call.to(torch.float64))


@on_each_backend
def test_compiled_programs(backend: str) -> None:
    """One graph serves both passes and any scale."""
    call = call_on(backend, [70, 30], [70, 30], causal=True)

    def program(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, max_logits = flash_attn_varlen_func(
            q, k, v, cu, cu, 70, 70, causal=True, softmax_scale=scale, backend=backend, return_max_logits=True
        )
        return out, max_logits * 2

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.3):
        out, doubled = compiled(*call.qkv, call.cu_seqlens_q, scale)
        assert not doubled.requires_grad
        assert_max_logits_close(doubled / 2, dataclasses.replace(call, softmax_scale=scale))
        out.sum().backward()
        assert call.q.grad is not None


def test_transforms() -> None:
    """A maximum for each slice that is mapped over, and gradients of functions whose auxiliary result it is."""
    call = call_on("portable", [9] * 6, [11] * 6, packed=False)
    q, k, v = (x.detach().unflatten(0, (2, 3)) for x in call.qkv)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, max_logits = flash_attn_func(q, k, v, return_max_logits=True)
        return out.sum(), max_logits

    _, mapped = torch.func.vmap(attend)(q, k, v)
    assert torch.equal(mapped, torch.stack([attend(*slices)[1] for slices in zip(q, k, v, strict=True)]))
    dq, beside = torch.func.grad(attend, has_aux=True)(q[0], k[0], v[0])
    assert torch.equal(beside, mapped[0])
    leaf = q[0].clone().requires_grad_()
    torch.testing.assert_close(dq, torch.autograd.grad(attend(leaf, k[0], v[0])[0], leaf)[0])


@on_each_backend
def test_nested_tensors_and_autocast(backend: str) -> None:
    call = call_on(backend, [70, 30], [70, 30], nheads=2)
    offsets = call.cu_seqlens_q.long()
    nested = [torch.nested.nested_tensor_from_jagged(x.detach(), offsets) for x in call.qkv]
    attend: Any = flash_attn_func
    out, max_logits = attend(*nested, backend=backend, return_max_logits=True)
    assert out.is_nested
    assert_max_logits_close(max_logits, call)
    with torch.autocast(DEVICES[backend], torch.bfloat16):
        _, rounded = run(call.to(torch.float32), backend=backend, return_max_logits=True)
    assert_max_logits_close(rounded, call.to(torch.bfloat16))


@hopper_alone("Blackwell's kernels compute P without polynomials where they need its digits")
@pytest.mark.parametrize("case", [{}, {"causal": True, "head_dim": 128}, {"softcap": 3.0}, {"bias": (1, 1, 1)}])
def test_other_results_have_the_same_bits(case: Case) -> None:
    call = call_of("sm90", case)
    with torch.no_grad():
        plain = run(call, backend="sm90", return_lse=True)
        first, second = (run(call, backend="sm90", return_lse=True, return_max_logits=True) for _ in range(2))
    assert same_bits(plain, first[:2])
    assert bitwise_equal(first[2], second[2])


@needs_kernels
def test_cuda_graphs() -> None:
    """A replay has its own maximum: a smaller one, too."""
    call: Call = call_on("sm90", [300], packed=False, causal=True)
    call.q, call.k, call.v = (x.detach() for x in call.qkv)
    run(call, backend="sm90", return_max_logits=True)
    graph, (_, max_logits) = captured(lambda: run(call, backend="sm90", return_max_logits=True))
    for factor in (1.0, 3.0, 0.1):
        with torch.no_grad():
            call.q.mul_(factor)
        graph.replay()
        assert_max_logits_close(max_logits, call)
