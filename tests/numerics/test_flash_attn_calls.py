"""Calls as flash-attn 2 and 3 write them, ALiBi among them: results and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import oracle
from tests.lib.checks import Case, bitwise_equal, gradients, longest, packed_or_dense, random_call, same_bits
from tests.lib.integrations import alibi_truth, assert_served, fa, fa3, recorded
from tests.lib.oracle import Call


def dense_call(**options: Any) -> Call:
    given: Case = {"nheads": 4, "nheads_k": 2, "head_dim": 8, "dtype": torch.float64, **options}
    return random_call([7] * 2, [9] * 2, packed=False, **given)


def with_flash_attn(
    call: Call, form: str = "q k v", *, slopes: Tensor | None = None, deterministic: bool = False
) -> Any:
    """The call by the function that takes q, k, v, or "kv" or "qkv" in one tensor; all options by position."""
    window = tuple(-1 if side is None else side for side in call.window_size)
    options = (0.0, call.softmax_scale, call.causal, window, call.softcap, slopes, deterministic, True)
    (q, k, v), packed = call.qkv, call.cu_seqlens_q is not None
    bound_q, bound_k = longest(call).values()
    where: tuple[Any, ...] = (call.cu_seqlens_q, call.cu_seqlens_k, bound_q, bound_k)
    tensors: tuple[Tensor, ...] = (q, k, v)
    if form == "kv":
        tensors = q, torch.stack([k, v], -3)
    elif form == "qkv":
        tensors, where = (torch.stack([q, k, v], -3),), (call.cu_seqlens_q, bound_q)
    name = f"flash_attn_{'varlen_' * packed}{'' if form == 'q k v' else form + 'packed_'}func"
    used = {"seqused_q": call.seqused_q, "seqused_k": call.seqused_k} if packed and form == "q k v" else {}
    out, lse, probabilities = getattr(fa, name)(*tensors, *(where if packed else ()), *options, **used)
    assert probabilities is None
    return out, lse


@pytest.mark.parametrize("form", ["q k v", "kv", "qkv"])
@packed_or_dense
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "softmax_scale": 0.3},
        {"window_size": (3, None), "softcap": 2.0, "dtype": torch.float32},
        {"window_size": (2, 1), "dtype": torch.bfloat16},
    ],
    ids=["causal", "left softcap", "window"],
)
def test_flash_attn(form: str, packed: bool, options: Case) -> None:
    heads: Case = {"nheads": 4, "nheads_k": 4 if form == "qkv" else 2, "head_dim": 8}
    lengths_q, lengths_k = ([5, 0, 9], [8, 3, 4]) if packed else ([7] * 2, [9] * 2)
    heads["dtype"] = torch.float64
    heads |= options
    call = random_call(lengths_q, lengths_q if form == "qkv" else lengths_k, packed=packed, **heads)
    assert_served(call, with_flash_attn(call, form), through_lse=True)


@pytest.mark.parametrize(("form", "packed"), [("q k v", False), ("q k v", True), ("qkv", False), ("heads", False)])
def test_flash_attn_3(form: str, packed: bool) -> None:
    """All by position, in its order."""
    lengths_q, lengths_k = ([5, 9], [8, 9]) if packed else ([7] * 2, [9] * 2)
    options: Case = {"nheads": 4, "nheads_k": 4 if form == "qkv" else 2, "head_dim": 8, "seqused": packed}
    options |= {"dtype": torch.float64, "window_size": (3, 1), "softcap": 2.0, "softmax_scale": 0.3}
    call = random_call(lengths_q, lengths_q if form != "q k v" else lengths_k, packed=packed, **options)
    head, tail = (0.3, False, None, None, None), ((3, 1), 0, 2.0)
    if form == "q k v":
        where: tuple[Any, ...] = ()
        if packed:
            where = (call.cu_seqlens_q, call.cu_seqlens_k, 20, 20, call.seqused_q, call.seqused_k)
        function = fa3.flash_attn_varlen_func if packed else fa3.flash_attn_func
        found = function(*call.qkv, *where, *head, None, *tail, 1, None, True, 0, True)
    elif form == "qkv":
        found = fa3.flash_attn_qkvpacked_func(torch.stack(call.qkv, 2), *head, *tail, True, None, 0, True)
    else:
        found = fa3.flash_attn_qkvpacked_func(torch.cat(call.qkv, 2), *head, *tail, True, 4, 0, True)
    assert_served(call, found, through_lse=True)
    dense = dense_call()
    assert isinstance(fa3.flash_attn_func(*dense.qkv), Tensor)


def test_flash_attn_returns_out_alone_unless_asked() -> None:
    call = dense_call()
    out = fa.flash_attn_func(*call.qkv)
    assert isinstance(out, Tensor)
    assert bitwise_equal(out, with_flash_attn(call)[0])
    assert isinstance(fa.flash_attn_func(*call.qkv, alibi_slopes=torch.rand(4)), Tensor)


WINDOWS = [
    {"causal": True},
    {"causal": True, "window_size": (3, None)},
    {},
    {"window_size": (2, 3)},
    {"window_size": (None, 1)},
    {"window_size": (4, None)},
    {"window_size": (4, 0)},
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(7, 9), (9, 7), (1, 5), (6, 1)], ids=str)
@pytest.mark.parametrize("dims", [1, 2], ids=["heads", "batch and heads"])
def test_alibi_dense(window: dict[str, Any], lengths: tuple[int, int], dims: int) -> None:
    options: Case = {"nheads": 4, "nheads_k": 2, "head_dim": 8, "dtype": torch.float64, "softcap": 5.0}
    call = random_call([lengths[0]] * 2, [lengths[1]] * 2, packed=False, **options, **window)
    slopes = torch.rand((4,) if dims == 1 else (2, 4))
    assert_served(call, with_flash_attn(call, slopes=slopes), alibi_truth(call, slopes), through_lse=True)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("seqused", [False, True])
def test_alibi_packed(window: dict[str, Any], seqused: bool) -> None:
    options: Case = {"nheads": 4, "nheads_k": 2, "head_dim": 8, "dtype": torch.float64, "seqused": seqused}
    call = random_call([5, 0, 9, 1, 3], [8, 3, 4, 6, 0], **options, **window)
    slopes = torch.rand(4)
    found = with_flash_attn(call, slopes=slopes.expand(5, 4))
    assert_served(call, found, alibi_truth(call, slopes), through_lse=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_alibi_at_low_precision(causal: bool, dtype: torch.dtype) -> None:
    call = random_call([130], [150], packed=False, nheads=4, causal=causal, dtype=dtype)
    slopes = 2.0 ** -torch.arange(1.0, 5.0)
    assert_served(call, with_flash_attn(call, slopes=slopes), alibi_truth(call, slopes))


@pytest.mark.parametrize("causal", [True, False])
def test_gradient_of_alibi_slopes(causal: bool) -> None:
    call = dense_call(causal=causal)
    slopes = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    out, lse = with_flash_attn(call, slopes=slopes)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    (got,) = torch.autograd.grad([out, lse], slopes, [dout, dlse])
    truth = alibi_truth(call, slopes).to(torch.float64)
    dbias = gradients(truth, *oracle.attention(truth), dout, dlse)["dbias"]
    distance = (torch.arange(7)[:, None] + 2 - torch.arange(9)).abs()
    torch.testing.assert_close(got, -(dbias * distance).sum((-1, -2)))


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_is_never_as_large_as_the_scores(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at least of float32, which holds the positions."""
    dense, packed = (recorded(monkeypatch, name) for name in ("flash_attn_func", "flash_attn_varlen_func"))
    with_flash_attn(dense_call(causal=causal), slopes=torch.rand(4))
    with_flash_attn(random_call([5, 9], causal=causal, dtype=torch.bfloat16), slopes=torch.rand(2))
    assert [x["bias"].shape for x in dense] == [(4, 1, 9)] * (1 if causal else 2)
    assert [x["bias"].shape for x in packed] == [(2, 1, 9)] * (1 if causal else 2)
    assert {x["bias"].dtype for x in dense} == {torch.float64}
    assert {x["bias"].dtype for x in packed} == {torch.float32}


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_does_not_round_alibi(causal: bool) -> None:
    call = dense_call(dtype=torch.float32, causal=causal)
    slopes = torch.rand(4)
    low = call.to(torch.bfloat16)
    expected = with_flash_attn(low, slopes=slopes)
    with torch.autocast("cpu", torch.bfloat16):
        got = with_flash_attn(call, slopes=slopes)
    assert got[0].dtype == torch.bfloat16
    assert same_bits(got, expected)
