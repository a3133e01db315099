"""Calls as other libraries write them: results and gradients, orders of arguments, and refusals."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

from flash_attn_cute import flash_attn_func
from flash_attn_cute.integrations import bert_padding
from tests.lib.checks import offsets, random_call
from tests.lib.integrations import (
    PADDING_SIGNATURES,
    SIGNATURES,
    assert_served,
    dot,
    fa,
    fa3,
    packed_attn,
    recorded,
    te,
    top_left,
)
from tests.lib.oracle import Call
from tests.lib.refusals import assert_refused, refusals

sdpa = dot.scaled_dot_product_attention

# Signatures: positional arguments with their defaults, then keywords. Those of flash-attn are of its release 2.8.4 and,
# for flash-attn 3, of its hopper/flash_attn_interface.py in August 2026.


@pytest.mark.parametrize(
    ("function", "expected"), SIGNATURES + PADDING_SIGNATURES, ids=lambda x: getattr(x, "__name__", "")
)
def test_signatures(function: Callable[..., Any], expected: str) -> None:
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    shown = str(inspect.Signature(plain))
    assert shown == f"({expected})"


def test_varlen_attn_takes_what_the_installed_torch_takes() -> None:
    theirs = inspect.signature(torch_varlen.varlen_attn).parameters
    ours = inspect.signature(packed_attn.varlen_attn).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
    positional = [name for name, parameter in theirs.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional


# scaled_dot_product_attention.


def assert_as_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, **options: Any
) -> None:
    """Results and gradients are those of PyTorch in float64, of a causal mask aligned to the top left."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.requires_grad_())
    out = sdpa(q, k, v, mask, 0.0, is_causal, **options)
    theirs = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() if is_causal else mask
    if mask is not None:
        theirs = (mask.double() if mask.is_floating_point() else mask).expand(*q.shape[:-1], k.shape[-2])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, theirs, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    dout = torch.randn_like(out)
    for got, grad in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        torch.testing.assert_close(got, grad, rtol=0, atol=1e-11 if got.dtype == torch.float64 else 1e-6)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("lengths", [(7, 7), (7, 12), (12, 7), (1, 6), (6, 1)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_sdpa(lengths: tuple[int, int], batch: tuple[int, ...], is_causal: bool) -> None:
    q, k, v = normal(*batch, 4, lengths[0], 8), normal(*batch, 4, lengths[1], 8), normal(*batch, 4, lengths[1], 6)
    assert_as_torch(q, k, v, None, is_causal, scale=0.3)


@pytest.mark.parametrize("is_causal", [True, False])
def test_sdpa_gqa(is_causal: bool) -> None:
    assert_as_torch(normal(2, 4, 9, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8), None, is_causal, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((), (6, 9)),
        ((), (4, 6, 9)),
        ((2,), ()),
        ((2,), (9,)),
        ((2,), (6, 1)),
        ((2,), (6, 9)),
        ((2,), (2, 1, 1, 9)),
        ((2,), (4, 6, 9)),
        ((2, 3), (4, 1, 9)),
        ((2, 3), (1, 1, 4, 6, 9)),
        ((2, 3), (2, 3, 1, 6, 9)),
        ((2, 3), (2, 1, 1, 6, 9)),
    ],
    ids=str,
)
def test_sdpa_masks(dtype: torch.dtype, batch: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.7 if dtype == torch.bool else torch.randn(shape, dtype=dtype)
    if dtype == torch.bool:
        mask.view(shape or (1,))[..., 0] = True
    assert_as_torch(normal(*batch, 4, 6, 8), normal(*batch, 4, 9, 8), normal(*batch, 4, 9, 8), mask)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (9, 9), (1, 5)], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_sdpa_causal_biases(make: Any, lengths: tuple[int, int], heads: int) -> None:
    """Tensors by class alone: what they store is not initialised."""
    q, k = (torch.randn(2, heads, n, 16, dtype=torch.float64) for n in lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more queries than keys: some see none
        bias = make(*lengths)
    got = sdpa(q, k, k, bias)
    assert type(got) is Tensor
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, bias._materialize())
    torch.testing.assert_close(got, expected.nan_to_num(0.0))


class Meaning(Tensor):
    """A subclass whose functions could do anything."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor):
    """A subclass by name alone."""


def test_subclasses_are_refused_unless_they_are_what_they_store() -> None:
    """Wrong types are refused as masks, and as q, k, v, offsets and the like, in all functions."""
    q = torch.randn(2, 3, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(
        sdpa(q, q, q, mask.as_subclass(Named)).as_subclass(Tensor),
        sdpa(q, q, q),
    )
    odd = mask.as_subclass(Meaning)
    message = r"expected a plain tensor, got (Meaning|CausalBias), a subclass .* \.as_subclass\(torch.Tensor\)"
    with pytest.raises(TypeError, match=f"^attn_mask: {message}"):
        sdpa(q, q, q, odd)
    with pytest.raises(TypeError, match=f"^key: {message}"):
        sdpa(q, q.as_subclass(Meaning), q)
    with pytest.raises(TypeError, match=f"bias: {message}"):
        flash_attn_func(q, q, q, bias=causal_upper_left(3, 3))
    with pytest.raises(
        ValueError, match=r"attn_mask: expected a CausalBias of \(5, 5\) rows of query and key, got one"
    ):
        sdpa(q, q, q, causal_lower_right(5, 6))


def test_sdpa_nested_tensors_are_refused() -> None:
    q = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(4, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match="query: expected a dense tensor, got a nested one"):
        sdpa(q, q, q)


def test_sdpa_broadcasts_batch_dimensions() -> None:
    assert_as_torch(normal(2, 3, 4, 6, 8), normal(3, 4, 9, 8), normal(1, 1, 4, 9, 8), None)


def test_sdpa_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows before heads in memory, as projections leave them; a causal mask is a window."""
    calls = recorded(monkeypatch, "flash_attn_func")
    projected = torch.randn(3, 2, 12, 4, 8).transpose(2, 3)
    key = projected[1]
    for query in (projected[0], projected[0][..., :5, :], torch.randn(2, 4, 20, 8)):
        out = sdpa(query, key, projected[2], is_causal=True)
        assert out.transpose(1, 2).is_contiguous()
        assert calls[-1]["q"].data_ptr() == query.data_ptr()
        assert calls[-1]["k"].data_ptr() == key.data_ptr()
        assert calls[-1]["mask"] is calls[-1]["bias"] is None
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    sdpa(projected[0], key, projected[2], mask)
    assert calls[-1]["mask"] is mask


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_if_torch_is(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, packed = (recorded(monkeypatch, name) for name in ("flash_attn_func", "flash_attn_varlen_func"))
    torch.use_deterministic_algorithms(deterministic)
    sdpa(*torch.randn(3, 1, 2, 5, 8))
    packed_attn.varlen_attn(*torch.randn(3, 5, 2, 8), offsets([5]), offsets([5]), 5, 5)
    packed_attn.varlen_attn(*torch.randn(3, 5, 2, 8), offsets([5]), offsets([5]), 5, 5, num_splits=1)
    assert dense[0]["deterministic"] is packed[0]["deterministic"] is deterministic
    assert packed[1]["deterministic"] == "invariant"  # as PyTorch promises it


# varlen_attn.


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 2)], ids=str)
def test_varlen_attn(window: tuple[int, int]) -> None:
    options: dict[str, Any] = {"nheads": 4, "nheads_k": 2, "head_dim": 8, "dtype": torch.float64, "window_size": window}
    call = random_call([5, 0, 9], [8, 3, 4], softmax_scale=0.3, **options)
    aux = torch_varlen.AuxRequest(lse=True)
    settings: Any = {"return_aux": aux, "scale": 0.3, "window_size": window, "enable_gqa": True, "num_splits": 1}
    where: Any = (call.cu_seqlens_q, call.cu_seqlens_k, 9, 8)
    assert_served(call, packed_attn.varlen_attn(*call.qkv, *where, **settings), through_lse=True)


def test_varlen_attn_of_older_releases() -> None:
    """is_causal was the eighth argument."""
    call = random_call([5, 9], nheads=2, causal=True, dtype=torch.float64)
    where: Any = (call.cu_seqlens_q, call.cu_seqlens_k, 9, 9)
    assert_served(call, packed_attn.varlen_attn(*call.qkv, *where, True))


def test_varlen_attn_seqused() -> None:
    call = random_call([5, 3], [8, 9], seqused=True, dtype=torch.float64)
    call = replace(call, seqused_q=None)
    with torch.no_grad():
        call.q.copy_(torch.randn_like(call.q))
    where: Any = (call.cu_seqlens_q, call.cu_seqlens_k, 20, 20)
    assert_served(call, packed_attn.varlen_attn(*call.qkv, *where, seqused_k=call.seqused_k))


# Transformer Engine.


def with_te(call: Call, lengths_q: list[int], lengths_k: list[int], mask: str, **options: Any) -> Tensor:
    true_q = offsets(lengths_q)
    true_k = true_q if lengths_k is lengths_q else offsets(lengths_k)
    where: Any = (true_q, true_k, call.cu_seqlens_q, call.cu_seqlens_k, max(lengths_q), max(lengths_k))
    out = te.thd_attention(*call.qkv, *where, mask, **options)
    assert out.ndim == 2
    return out.unflatten(-1, (call.q.shape[-2], -1))


TE_Q, TE_K = [5, 0, 9, 1, 4, 6], [8, 3, 4, 6, 0, 6]


@pytest.mark.parametrize(
    ("mask", "window", "options"),
    [
        ("padding", None, {}),
        ("padding", (-1, 0), {}),
        ("padding", (2, 3), {"window_size": (2, 3)}),
        ("padding_causal_bottom_right", None, {"causal": True}),
        ("padding_causal_bottom_right", (-1, -1), {"causal": True}),
        ("padding_causal_bottom_right", (3, 0), {"causal": True, "window_size": (3, 0)}),
        ("causal_bottom_right", (3, 2), {"causal": True, "window_size": (3, 0)}),
    ],
)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_thd(mask: str, window: tuple[int, int] | None, options: dict[str, Any], sink: bool) -> None:
    """True lengths in padded memory that is filled with NaN and infinities."""
    heads: dict[str, Any] = {"nheads": 4, "nheads_k": 2, "head_dim": 8, "dtype": torch.float64}
    call = random_call(TE_Q, TE_K, seqused=True, softmax_scale=0.3, sink=sink, **heads, **options)
    settings: Any = {"window_size": window, "softmax_scale": 0.3}
    assert_served(call, with_te(call, TE_Q, TE_K, mask, **settings, learnable_sink=call.learnable_sink))


@pytest.mark.parametrize("window", [None, (0, 0), (2, 0), (5, 3)])
@pytest.mark.parametrize("lengths_k", [TE_K, TE_Q, list(TE_Q)], ids=["cross", "same", "equal"])
@pytest.mark.parametrize("mask", ["padding_causal", "padding,causal", "causal,padding", "causal"])
def test_thd_top_left(mask: str, lengths_k: list[int], window: tuple[int, int] | None) -> None:
    """Windows too, of more queries than keys and of fewer, and of equal lengths in one tensor or in two."""
    heads: dict[str, Any] = {"nheads": 4, "nheads_k": 2, "head_dim": 8, "dtype": torch.float64}
    call = random_call(TE_Q, lengths_k, seqused=True, sink=True, **heads)
    found = with_te(call, TE_Q, lengths_k, mask, window_size=window, learnable_sink=call.learnable_sink)
    assert_served(call, found, top_left(call, None if window is None else window[0]))


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_thd_of_the_same_lengths_copies_nothing(
    window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the same tensor or, as in reentrant checkpoints, a view of the same memory."""
    calls = recorded(monkeypatch, "flash_attn_varlen_func")
    q, true, memory = torch.randn(30, 2, 8), offsets([5, 0, 9]), offsets([9, 3, 12])
    q[5:12] = torch.nan
    outs = [
        te.thd_attention(q, q, q, true, other, memory, memory, window_size=window)
        for other in (true, true.detach(), true[:], true.clone())
    ]
    assert [call["q"] is q for call in calls] == [True, True, True, False]
    for out in outs:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-6)


def test_thd_in_checkpoints() -> None:
    true = offsets([5, 0, 9])
    found = []
    for reentrant in (None, False, True):
        q = torch.linspace(-1, 1, 14 * 16).view(14, 2, 8).requires_grad_()
        attend = lambda q, a, b: te.thd_attention(q.sin(), q, q, a, b, window_size=(3, 0))  # noqa: E731
        out = attend(q, true, true) if reentrant is None else checkpoint(attend, q, true, true, use_reentrant=reentrant)
        out.sum().backward()
        found.append(q.grad)
    expected, *others = (x for x in found if x is not None)
    assert len(others) == 2
    assert all(torch.equal(expected, grad) for grad in others)


def test_thd_without_padding() -> None:
    call = random_call(TE_Q, TE_K, nheads=2, head_dim=8, dtype=torch.float64, causal=True)
    for mask, truth in (("padding_causal_bottom_right", call), ("padding_causal", top_left(call))):
        out = te.thd_attention(*call.qkv, call.cu_seqlens_q, call.cu_seqlens_k, attn_mask_type=mask)
        assert_served(call, out.unflatten(-1, (2, -1)), truth)


# All of them.


def test_compiled() -> None:
    """Each function compiles into one graph."""
    q, k, v = torch.randn(3, 2, 9, 4, 8)
    packed = torch.randn(24, 3, 4, 8)
    cu_q, cu_k = offsets([5, 9, 10]), offsets([7, 2, 15])

    def everything(slopes: Tensor) -> list[Tensor]:
        return [
            fa.flash_attn_func(q, k, v, alibi_slopes=slopes),
            *fa.flash_attn_varlen_qkvpacked_func(packed, cu_q, 10, 0.0, None, True, alibi_slopes=slopes),
            fa3.flash_attn_func(q, k, v, 0.3, True),
            sdpa(q, k[..., :3, :], v[..., :3, :], is_causal=True),
            packed_attn.varlen_attn(*packed.unbind(1), cu_q, cu_k, 10, 15, window_size=(-1, 0)),
            te.thd_attention(*packed.unbind(1), cu_q, cu_k),
        ]

    slopes = torch.rand(4)
    expected, got = everything(slopes), torch.compile(everything, fullgraph=True, backend="eager")(slopes)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("function", "batched"),
    [
        (fa.flash_attn_func, False),
        (lambda q, k, v: fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4)), False),
        (lambda q, k, v, slopes: fa.flash_attn_func(q, k, v, alibi_slopes=slopes), True),
        (fa3.flash_attn_func, False),
        (lambda q, k, v: sdpa(*(x.transpose(1, 2) for x in (q, k, v))), False),
    ],
    ids=["fa", "slopes", "slopes of batch", "fa3", "sdpa"],
)
def test_compiled_for_any_batch_and_lengths(function: Any, batched: bool) -> None:
    """No size becomes a constant: marked ones would be refused."""
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for batch, seqlen_q, seqlen_k in ((2, 5, 7), (3, 9, 4)):
        q, k, v = (torch.randn(batch, rows, 4, 8) for rows in (seqlen_q, seqlen_k, seqlen_k))
        tensors = (q, k, v, torch.rand(batch, 4)) if batched else (q, k, v)
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 0)
            if x.ndim > 2:
                torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(*tensors), function(*tensors))


def test_thd_exported_for_any_number_of_sequences() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
            return te.thd_attention(q, k, v, cu_q, cu_k)

    few, many = (
        (*torch.randn(3, 9, 2, 8), offsets(x), offsets(y)) for x, y in (([4, 5], [2, 7]), ([3, 2, 4], [6, 0, 3]))
    )
    sizes = tuple({0: torch.export.Dim.AUTO} for _ in few)
    layer = torch.export.export(Layer(), few, dynamic_shapes=sizes).module()
    torch.testing.assert_close(layer(*many), Layer()(*many))


def test_sdpa_compiled_for_any_batch_beside_a_mask_of_one() -> None:
    """Sizes are numbers in the mask, and symbols in the tensors beside it."""
    q, mask = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 1, 5, 5)
    expected = sdpa(q, q, q, mask)
    for dim in (0, 1):
        torch._dynamo.maybe_mark_dynamic(q, dim)
    got = torch.compile(sdpa, fullgraph=True, backend="eager")(q, q, q, mask)
    torch.testing.assert_close(got, expected)


def arguments() -> dict[str, Any]:
    """Tensors of valid calls, by name."""
    (q, k, v), packed = torch.randn(3, 2, 6, 4, 8), torch.randn(10, 3, 4, 8)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "packed": packed, "rows": packed.unbind(1), "cu": offsets([4, 6])}
    return given | {"one": torch.ones(1), "slopes": torch.rand(4), "mask": None, "bert_padding": bert_padding}


# What attention itself refuses has the names of the user's call, too.
@refusals("""
fa.flash_attn_func(q, k, v, 0.5)
    ValueError: dropout_p: expected 0.0
fa.flash_attn_func(q, k, v, None, True)
    ValueError: dropout_p: expected 0.0, dropout is not
fa.flash_attn_varlen_func(*rows, cu, cu, 6, 6, cu.diff(), cu.diff())
    ValueError: dropout_p: expected 0.0, dropout is not supported, got Tensor (flash-attn 3 has no dropout_p: its order
    of
fa.flash_attn_func(q, k, v, qv=q)
    ValueError: qv: expected None, a second query
fa.flash_attn_func(q, k, v, q_descale=one)
    ValueError: q_descale: expected None, FP8
fa.flash_attn_func(q, k, v, v_descale=one)
    ValueError: v_descale: expected None, FP8
fa.flash_attn_func(q, k, v, sm_margin=8)
    ValueError: sm_margin: expected 0, kernels
fa.flash_attn_func(q, k, v, attention_chunk=8)
    ValueError: attention_chunk: expected 0
fa.flash_attn_qkvpacked_func(q)
    ValueError: qkv: expected shape (batch, seqlen, 3, nheads
fa.flash_attn_qkvpacked_func(None)
    TypeError: qkv: expected a torch.Tensor, got NoneType
fa.flash_attn_kvpacked_func(q, q)
    ValueError: kv: expected shape (batch, seqlen_k, 2, nh
fa.flash_attn_varlen_kvpacked_func(packed[:, 0], packed, cu, cu, 6, 6)
    ValueError: kv: expected shape (total_k, 2, nheads_k, d), got shape (10, 3, 4, 8)
fa.flash_attn_varlen_qkvpacked_func(packed[:, :2], cu, 6)
    ValueError: qkv: expected shape (total, 3, nheads, d), got shape (10, 2, 4, 8)
fa.flash_attn_func(q, k, v, alibi_slopes=torch.rand(3))
    ValueError: alibi_slopes: expected shape (4,) or (2, 4), got shape (3,)
fa.flash_attn_varlen_qkvpacked_func(packed, cu, 6, alibi_slopes=torch.rand(2, 4))
    ValueError: alibi_slopes: expected shape (4,) for packed sequences, got shape (2, 4)
fa.flash_attn_func(q, k, v, alibi_slopes=[0.5] * 4)
    TypeError: alibi_slopes: expected a torch.Tensor, got list
fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4, dtype=torch.int32))
    TypeError: alibi_slopes: expected a floating-point dtype, got torch.int32
fa.flash_attn_func(q, None, v, alibi_slopes=slopes)
    TypeError: k: expected a torch.Tensor, got NoneType
fa.flash_attn_varlen_func(*rows, [0, 10], cu, 6, 6, alibi_slopes=slopes)
    TypeError: cu_seqlens_q: expected a torch.Tensor, got list
fa3.flash_attn_func(q, k, v, sm_margin=cu)
    ValueError: sm_margin: expected 0, kernels leave no multiprocessors free, got Tensor
fa3.flash_attn_func(q, k, v, attention_chunk=cu)
    ValueError: attention_chunk: expected 0, chunked attention is not supported, got Tensor
fa.flash_attn_varlen_qkvpacked_func(packed.to_sparse(), cu, 6)
    TypeError: qkv: expected a strided tensor, got torch.sparse_coo
fa3.flash_attn_func(q, k, v, 0.1, True, q)
    ValueError: qv: expected None, a second query
fa3.flash_attn_varlen_func(q, k, v, cu, cu, 6, 6)
    ValueError: q: expected shape (total_q,
fa3.flash_attn_func(q, k, v, 0.0, causal=True)
    ValueError: softmax_scale: expected None or a number other than 0, got 0.0 (flash-attn 2 has dropout_p in this
    place:
fa3.flash_attn_varlen_func(*rows, cu, cu, 6, 6, 0.0, causal=True)
    TypeError: seqused_q: expected a torch.Tensor or None, got 0.0 (flash-attn 2 has dropout_p in this place:
fa3.flash_attn_qkvpacked_func(q, num_heads_q=3)
    ValueError: qkv: expected shape (batch, seqlen, 3, nheads, d), or (batch, seqlen, num_heads_q + 2 * nheads_k, d),
    got shape (2, 6, 4, 8) with num_heads_q=3
fa.flash_attn_func(q, k, v, alibi_slopes=slopes.to("meta"))
    ValueError: alibi_slopes: expected the device of q, cpu, got meta
fa.flash_attn_func(q, k, v, window_size=3, alibi_slopes=slopes)
    TypeError: window_size: expected a pair (left, right), each an int or None, got 3
fa.flash_attn_func(q, k, v, window_size=(1, 2.5), alibi_slopes=slopes)
    TypeError: window_size: expected a pair (left, right), each an int or None, got (1, 2.5)
fa.flash_attn_func(q, k[0, 0, 0], v, alibi_slopes=slopes)
    ValueError: k: expected shape (batch, seqlen_k, nheads_k, d), got shape (8,)
fa.flash_attn_varlen_qkvpacked_func(packed, cu[None], 6, alibi_slopes=slopes)
    ValueError: cu_seqlens: expected shape (batch + 1,), got shape (1, 3)
fa.flash_attn_varlen_qkvpacked_func(packed, cu.to("meta"), 6, alibi_slopes=slopes)
    ValueError: cu_seqlens: expected the device of qkv, cpu, got meta
fa.flash_attn_varlen_qkvpacked_func(packed, cu, None, alibi_slopes=slopes)
    TypeError: max_seqlen: expected an int or a 0-d tensor, got None
fa.flash_attn_varlen_func(*rows, cu, cu, 6, 6, alibi_slopes=slopes, seqused_k=[1, 2])
    TypeError: seqused_k: expected a torch.Tensor, got list
sdpa(q, k, v, dropout_p=0.1)
    ValueError: dropout_p: expected 0.0
sdpa(q, k, v, None, q)
    ValueError: dropout_p: expected 0.0, dropout is not supported, got Tensor
sdpa(q, k, v, None, 0.0, q)
    TypeError: is_causal: expected a bool, got tensor(
sdpa(q, k, v, enable_gqa=1)
    TypeError: enable_gqa: expected a bool, got 1
sdpa(q, k.to_sparse(), v)
    TypeError: key: expected a strided tensor, got torch.sparse_coo
sdpa(q, k, None)
    TypeError: value: expected a torch.Tensor, got None
sdpa(q, k, v, True)
    TypeError: attn_mask: expected None or a torch.Tensor, got bool
sdpa(q, k, v, torch.ones(4, 4, dtype=torch.int64))
    TypeError: attn_mask: expected bool (True = may attend) or a floating-point dtype, got torch.int64
sdpa(q.double(), k.double(), v.double(), torch.zeros(4, 4).half())
    TypeError: attn_mask: expected
sdpa(q[0, 0], k[0, 0], v[0, 0])
    ValueError: query: expected shape (..., nheads, rows, d), got shape (4, 8)
sdpa(q, torch.cat([k, k[:1]]), v)
    ValueError: key, value: expected batch dimensions that broadcast with query's, got (2, 6, 4, 8), (3, 6, 4, 8),
sdpa(q[None], k[None], v[None], torch.zeros(1, 3, 1, 4, 4))
    ValueError: attn_mask: expected batch dimensions that broadcast to (1, 2), got shape (1, 3, 1, 4, 4)
packed_attn.varlen_attn(one, packed[:, 1], packed[:, 2], cu, cu, 6, 6)
    ValueError: query: expected shape (rows, heads, d), got shape
packed_attn.varlen_attn(*rows, cu, cu, 6, 6, return_aux=True)
    TypeError: return_aux: expected None or an object with a bool lse, got True
packed_attn.varlen_attn(packed[:, 0], packed[:, 1, :2], packed[:, 2, :2], cu, cu, 6, 6)
    ValueError: key: expected the 4 heads of query (fewer need enable_gqa=True), got 2
packed_attn.varlen_attn(*rows, cu, cu, 6, 6, enable_gqa=cu)
    TypeError: enable_gqa: expected a bool, got tensor(
packed_attn.varlen_attn(None, q, q, cu, cu, 6, 6)
    TypeError: query: expected a torch.Tensor
te.thd_attention(*rows, [0, 4, 10], [0, 4, 10])
    TypeError: cu_seqlens_q: expected a torch.Tensor, got list
te.thd_attention(one, *rows[1:], cu, cu.clone())
    ValueError: query_layer: expected shape (rows, heads, d), got shape
te.thd_attention(None, q, q, cu, cu)
    TypeError: query_layer: expected a torch.Tensor, got
te.thd_attention(*rows, cu, cu, window_size=3)
    ValueError: window_size: expected None or a pair (left, right), got 3
te.thd_attention(*rows, cu, cu, attn_mask_type=None)
    ValueError: attn_mask_type: expected one of no_mask, padding, causal, padding_causal, causal_padding,
    causal_bottom_right
sdpa(q, k.half(), v)
    TypeError: key: expected the dtype of query, torch.float32, got torch.float16
sdpa(q, k, v, torch.zeros(5, 4))
    ValueError: attn_mask: expected a shape that broadcasts to (batch, nheads, seqlen_q, seqlen_k)
packed_attn.varlen_attn(*rows, cu, cu.long(), 6, 6)
    TypeError: cu_seq_k: expected int32, got torch.int64
te.thd_attention(*rows, cu, cu, cu.long(), cu)
    TypeError: cu_seqlens_q_padded: expected int32, got torch.int64
te.thd_attention(*rows, cu, cu, max_seqlen_q=6, max_seqlen_kv=3)
    ValueError: max_seqlen_kv: expected an upper bound on the sequence lengths, got 3 with a sequence of 6
fa.flash_attn_varlen_qkvpacked_func(packed, cu.long(), 6)
    TypeError: cu_seqlens: expected int32, got torch.int64
fa.flash_attn_varlen_qkvpacked_func(packed, cu, 3)
    ValueError: max_seqlen: expected an upper bound on the sequence lengths, got 3 with a sequence of 6
fa.flash_attn_varlen_kvpacked_func(packed[:, 0], packed[:, 1:].half(), cu, cu, 6, 6)
    TypeError: kv: expected the dtype of q, torch.float32, got torch.float16
fa.flash_attn_func(q, k, v, return_attn_probs=1)
    TypeError: return_attn_probs: expected a bool, got 1
fa.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=1)
    TypeError: return_attn_probs: expected a bool, got 1
fa3.flash_attn_varlen_func(*rows, cu, cu, 6, 6, return_attn_probs=1)
    TypeError: return_attn_probs: expected a bool, got 1
packed_attn.varlen_attn(*rows, cu, cu, 6, 6, is_causal=1)
    TypeError: is_causal: expected a bool, got 1
packed_attn.varlen_attn(*rows, cu, cu, 6, 6, return_aux=torch_varlen.AuxRequest(lse=1))
    TypeError: return_aux.lse: expected a bool, got 1
te.thd_attention(*rows, cu.long(), cu, cu, cu)
    TypeError: cu_seqlens_q: expected int32, got torch.int64
te.thd_attention(*rows, cu, cu.to("meta"), cu, cu)
    ValueError: cu_seqlens_kv: expected the device of query_layer, cpu, got meta
bert_padding.unpad_input(q, mask)
    TypeError: attention_mask: expected a torch.Tensor, got NoneType
""")
def test_refusals(call: str, error: str) -> None:
    assert_refused(call, error, globals() | arguments())
