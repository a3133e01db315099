"""Padded batches and nested tensors, as packed sequences or by seqused: against the oracle, and without waiting."""

from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_attn_cute.runtime.settings
from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.calls import nested
from flash_attn_cute.padding import Packing, seqused_of
from tests.lib import oracle
from tests.lib.checks import (
    Case,
    assert_close,
    assert_compiles,
    assert_results_close,
    bitwise_equal,
    each_of,
    gradients,
    offsets,
    same_bits,
    with_gradients,
)
from tests.lib.oracle import Call
from tests.lib.refusals import assert_refused, refusals
from tests.lib.waits import NeverWaiting, Waits


def mask_of(text: str) -> Tensor:
    """A padding mask, drawn: a word an entry, x for real rows."""
    return torch.tensor([[c == "x" for c in entry] for entry in text.split()])


MASKS = {
    "right": mask_of("xxxxx.. xx..... xxxxxxx x......"),
    "left": mask_of("..xxxxx .....xx xxxxxxx ......x"),
    "holes": mask_of("x.x.xx. .xx.x.x xx...xx xxxxxx."),
    "empty entries": mask_of("....... xx..x.. ....... ..xxxx."),
    "all padding": mask_of("..... ....."),
    "no padding": mask_of("xxxx xxxx"),
    "one row": mask_of("x . x"),
}
OPTIONS: dict[str, Case] = {
    "full": {},
    "causal": {"causal": True},
    "window and sink": {
        "window_size": (2, 1),
        "learnable_sink": torch.randn(4, dtype=torch.float64, requires_grad=True),
    },
}


def leaves(mask: Tensor, mask_k: Tensor | None = None) -> list[Tensor]:
    """Random q, k, v of a padded batch, in float64, NaN and infinities in the padding."""
    made = []
    for heads, real in ((4, mask), (2, mask if mask_k is None else mask_k), (2, mask if mask_k is None else mask_k)):
        x = torch.randn(*real.shape, heads, 8, dtype=torch.float64)
        x[~real] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0] * 2, dtype=torch.float64)
        made.append(x.requires_grad_())
    return made


def expected_results(qkv: list[Tensor], mask: Tensor, dout: Tensor, mask_k: Tensor, **options: Any) -> list[Tensor]:
    """The oracle's out and gradients of real rows that indexing has picked; 0 in the padding."""
    rows = [x.detach()[real].requires_grad_() for x, real in zip(qkv, (mask, mask_k, mask_k), strict=True)]
    cu_q, cu_k = (offsets(real.sum(1).tolist()) for real in (mask, mask_k))
    q, k, v = rows
    call = Call(q, k, v, cu_q, cu_k, **options)
    out, lse = oracle.attention(call)
    grads = gradients(call, out, lse, dout[mask], None)
    results = []
    for packed, real in ((out, mask), (grads["dq"], mask), (grads["dk"], mask_k), (grads["dv"], mask_k)):
        padded = packed.new_zeros(*real.shape, *packed.shape[1:])
        padded[real] = packed.detach()
        results.append(padded)
    return results


def attend_packed(mask: Tensor, total: int | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention over the real rows of a padded batch, in its shape."""
    rows = Packing.of(mask, total)
    cu, longest = rows.cu_seqlens, rows.max_seqlen
    out = flash_attn_varlen_func(rows.pack(q), rows.pack(k), rows.pack(v), cu, cu, longest, longest, **options)
    return rows.unpack(out)


def assert_same(got: Sequence[Tensor], expected: list[Tensor], mask: Tensor, mask_k: Tensor) -> None:
    named = zip(("out", "dq", "dk", "dv"), (mask, mask, mask_k, mask_k), got, expected, strict=True)
    for name, real, x, truth in named:
        assert_close(name, x, truth, truth, 2.0, max(1.0, truth.abs().max().item() if truth.numel() else 0.0))
        assert (x[~real] == 0).all(), f"{name}: padding is not zero"


@each_of("options", OPTIONS)
@pytest.mark.parametrize("slack", [None, 0, 3])
@each_of("mask", MASKS)
def test_packed_rows_match_the_oracle(mask: Tensor, slack: int | None, options: Case) -> None:
    qkv, dout = leaves(mask), torch.randn(*mask.shape, 4, 8, dtype=torch.float64)
    dout[~mask] = torch.nan
    total = None if slack is None else int(mask.sum()) + slack
    out = attend_packed(mask, total, *qkv, **options)
    assert_same(with_gradients(out, qkv, dout), expected_results(qkv, mask, dout, mask, **options), mask, mask)


@each_of("options", OPTIONS)
@pytest.mark.parametrize("form", ["mask", "lengths"])
def test_seqused_matches_the_oracle(form: str, options: Case) -> None:
    """Right padding of queries and of keys, which differ."""
    mask, mask_k = MASKS["right"], mask_of("xx. ... xxx x..")
    qkv, dout = leaves(mask, mask_k), torch.randn(*mask.shape, 4, 8, dtype=torch.float64)
    dout[~mask] = torch.nan
    used_q, used_k = (seqused_of(real if form == "mask" else real.sum(1)) for real in (mask, mask_k))
    assert used_q.dtype == torch.int32
    out = flash_attn_func(*qkv, seqused_q=used_q, seqused_k=used_k, **options)
    assert_same(with_gradients(out, qkv, dout), expected_results(qkv, mask, dout, mask_k, **options), mask, mask_k)


def test_queries_and_keys_of_two_masks() -> None:
    mask, mask_k = MASKS["left"], mask_of("x.x ... xxx .x.")
    qkv, dout = leaves(mask, mask_k), torch.randn(*mask.shape, 4, 8, dtype=torch.float64)
    rows, keys = Packing.of(mask, 20), Packing.of(mask_k, 7)
    packed = rows.pack(qkv[0]), keys.pack(qkv[1]), keys.pack(qkv[2])
    out = flash_attn_varlen_func(*packed, rows.cu_seqlens, keys.cu_seqlens, rows.max_seqlen, keys.max_seqlen)
    out = rows.unpack(out)
    assert_same(with_gradients(out, qkv, dout), expected_results(qkv, mask, dout, mask_k), mask, mask_k)


@pytest.mark.parametrize("slack", [None, 3])
def test_padding_reaches_nothing(slack: int | None) -> None:
    """Equal bits, whatever stands in the padding of the batch, behind its packed rows, and in their gradients."""
    mask = MASKS["holes"]
    total = None if slack is None else int(mask.sum()) + slack
    rows, clean, results = Packing.of(mask, total), torch.randn(*mask.shape, 3), []
    weight, packed_fill = torch.randn(3, 3), mask.sum()
    for fill in (0.0, torch.nan):
        x, w = clean.clone(), weight.clone().requires_grad_()
        x[~mask] = fill
        x.requires_grad_()
        hidden = rows.pack(x) @ w
        behind = torch.arange(hidden.shape[0]) >= packed_fill
        out = rows.unpack(hidden.masked_fill(behind[:, None], fill))
        dout = torch.ones_like(out).masked_fill(~mask[..., None], fill)
        results.append(with_gradients(out, (x, w), dout))
    assert same_bits(*results)
    assert all(x.isfinite().all() for x in results[0])


masks = st.integers(0, 4).flatmap(
    lambda batch: st.integers(0, 9).flatmap(
        lambda rows: st.lists(st.booleans(), min_size=batch * rows, max_size=batch * rows).map(
            lambda bits: torch.tensor(bits, dtype=torch.bool).view(batch, rows)
        )
    )
)


@given(masks, st.none() | st.integers(0, 5), st.lists(st.integers(0, 3), max_size=2))
@settings(max_examples=100)
def test_any_shape(mask: Tensor, slack: int | None, rest: list[int]) -> None:
    """Packing, by indexing of real rows."""
    count = int(mask.sum())
    rows = Packing.of(mask, None if slack is None else count + slack)
    assert rows.cu_seqlens.dtype == torch.int32
    assert rows.cu_seqlens.tolist() == offsets(mask.sum(1).tolist()).tolist()
    assert rows.max_seqlen == mask.shape[1]
    x = torch.randn(*mask.shape, *rest).requires_grad_()
    packed = rows.pack(x)
    assert packed.shape == (count + (slack or 0), *rest)
    assert bitwise_equal(packed[:count], x[mask])
    assert (packed[count:] == 0).all()
    y = rows.unpack(packed)
    assert bitwise_equal(y, x.where(mask.view(*mask.shape, *[1] * len(rest)), 0.0))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, mask.view(*mask.shape, *[1] * len(rest)).expand_as(x).to(x.dtype))


def test_any_dtype_and_strides() -> None:
    mask = MASKS["holes"]
    rows = Packing.of(mask.repeat(1, 2)[:, ::2].contiguous()[:, :4], 20)
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        x = torch.randn(7, 8, 3).mul(9).to(dtype).transpose(0, 1)[::2, :4]
        assert torch.equal(rows.unpack(rows.pack(x)), x.masked_fill(rows.places.ge(20)[..., None], 0))
    assert torch.equal(Packing.of(mask, numpy.int64(20)).sources, Packing.of(mask, 20).sources)
    positions = torch.arange(7).expand(4, 7)
    assert Packing.of(mask).pack(positions).tolist() == mask.nonzero()[:, 1].tolist()
    assert Packing.of(mask.t().contiguous().t()).places.equal(Packing.of(mask).places)


def test_derivatives() -> None:
    rows = Packing.of(MASKS["holes"], 20)

    def square(x: Tensor) -> Tensor:
        return rows.unpack(rows.pack(x) ** 2)

    x = torch.randn(4, 7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(square, x)
    assert torch.autograd.gradgradcheck(square, x)
    many = torch.randn(3, 4, 7, 2)
    expected = torch.stack([square(one) for one in many])
    assert torch.equal(torch.vmap(square)(many), expected)
    assert torch.equal(torch.func.grad(lambda x: square(x).sum())(many[0]), 2 * rows.unpack(rows.pack(many[0])))


def test_nothing_is_read_where_a_bound_is_given() -> None:
    mask = MASKS["holes"]
    qkv = leaves(mask)
    expected = attend_packed(mask, 20, *qkv, causal=True)
    with NeverWaiting():
        out = attend_packed(mask, 20, *qkv, causal=True)
        out.sum().backward()
        seqused_of(MASKS["right"])
        with pytest.raises(Waits, match="_local_scalar_dense"):
            Packing.of(mask)
    assert bitwise_equal(out, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    def attend(mask: Tensor, *qkv: Tensor) -> Tensor:
        return attend_packed(mask, 20, *qkv, causal=True)

    def attend_right(mask: Tensor, *qkv: Tensor) -> Tensor:
        return flash_attn_func(*qkv, seqused_q=seqused_of(mask), seqused_k=seqused_of(mask), causal=True)

    for function, mask in ((attend, MASKS["holes"]), (attend_right, MASKS["right"])):
        assert_compiles(function, [(mask, *leaves(mask))], 1, backend)


def test_compiled_for_other_shapes_and_without_a_bound() -> None:
    torch._dynamo.reset()
    options: Case = {"backend": "aot_eager", "fullgraph": True}
    bounded = torch.compile(lambda m, x: Packing.of(m, x.shape[1] * 2).pack(x), dynamic=True, **options)
    for rows in (7, 9, 12):
        mask, x = torch.rand(3, rows) < 0.5, torch.randn(3, rows, 2)
        assert torch.equal(bounded(mask, x), Packing.of(mask, rows * 3).pack(x)[: rows * 2])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        exact = torch.compile(lambda m, x: Packing.of(m).pack(x), **options)
        for name in ("holes", "left"):
            x = torch.randn(4, 7, 2)
            assert torch.equal(exact(MASKS[name], x), x[MASKS[name]])


RIGHT = MASKS["right"]


@refusals("""
Packing.of([[True]])
    TypeError: mask: expected a torch.Tensor, got list
Packing.of(RIGHT.long())
    TypeError: ... torch.int64; mask.bool() is True where it is not 0
Packing.of(RIGHT[0])
    ValueError: mask: expected shape (batch, rows), got shape (7,)
Packing.of(RIGHT, 3.0)
    TypeError: total: expected None or an int, got 3.0
Packing.of(RIGHT, True)
    TypeError: total: expected None or an int, got True
Packing.of(RIGHT, -1)
    ValueError: total: expected at least 0, got -1
Packing.of(RIGHT, 14)
    ValueError: total: expected at least the 15 real rows of mask, got 14
Packing.of(RIGHT).pack(torch.randn(4, 6, 2))
    ValueError: x: expected shape (batch, rows, ...) with (batch, rows) = (4, 7), got shape (4, 6, 2)
Packing.of(RIGHT).unpack(torch.randn(14))
    ValueError: x: expected shape (total, ...) with (total) = (15,), got shape (14,)
Packing.of(RIGHT).pack(None)
    TypeError: x: expected a torch.Tensor, got None
Packing.of(RIGHT.to_sparse())
    TypeError: mask: expected a strided tensor, got torch.sparse_coo
Packing.of(RIGHT).pack(torch.randn(4, 7).to_sparse())
    TypeError: x: expected a strided tensor, got torch.sparse_coo
Packing.of(RIGHT).pack(torch.nested.nested_tensor([torch.randn(7)] * 4, layout=torch.jagged))
    TypeError: x: expected a strided tensor, got torch.jagged
Packing.of(RIGHT).unpack(torch.randn(15, device="meta"))
    ValueError: x: expected the device of the mask, cpu, got meta
seqused_of(RIGHT.to_sparse())
    TypeError: real: expected a strided tensor, got torch.sparse_coo
seqused_of(torch.tensor([3, 2]).to_sparse())
    TypeError: real: expected a strided tensor, got torch.sparse_coo
seqused_of(MASKS["left"])
    ValueError: real: expected padding on the right alone
seqused_of(torch.ones(3))
    TypeError: real: expected a bool mask or integer lengths
seqused_of(RIGHT.long())
    TypeError: real: expected bool (True = real), got torch.int64
seqused_of(RIGHT[0])
    ValueError: real: expected shape (batch, rows), got shape (7,)
seqused_of([3])
    TypeError: real: expected a torch.Tensor, got list
flash_attn_func(x, x, x, mask=torch.ones(3, 7).bool())
    ValueError: ... mask[:, None, None, :] hides keys, and flash_attn_cute.padding makes what skips them
flash_attn_func(x, x, x, mask=torch.ones(3, 7).long())
    TypeError: ... mask.bool() is True where it is not 0; of a padding mask (batch, seqlen_k), mask[:, None, None, :]
    hides
flash_attn_func(x, x, x, mask=torch.ones(3, 7))
    TypeError: ... an additive mask goes into bias; of a padding mask (batch, seqlen_k)
flash_attn_varlen_func(*[x.flatten(0, 1)] * 3, cu, cu, 7, 7, mask=torch.ones(3, 7).bool())
    ValueError: ... packed calls know padding by cu_seqlens and seqused, which
flash_attn_func(strided, q, q)
    TypeError: q: expected a nested tensor of layout=torch.jagged, got torch.strided
flash_attn_func(q, q, strided)
    TypeError: v: expected a nested tensor of layout=torch.jagged, got torch.strided
flash_attn_func(x.double(), q, q)
    TypeError: q: expected a jagged nested tensor, as another of q, k and v is one
flash_attn_func(q, None, q)
    TypeError: k: expected a torch.Tensor, got NoneType
flash_attn_func(q, q, jagged([5, 1, 8]))
    ValueError: v: expected the offsets of k, the same tensor
flash_attn_func(q, fewer, fewer)
    ValueError: k: expected the batch size of q, 3, got 2
flash_attn_func(q.transpose(1, 2), q, q)
    ValueError: q: expected a nested tensor of shape (batch, rows of
flash_attn_func(q.flatten(2), q, q)
    ValueError: q: expected a nested tensor of shape (batch, rows of
flash_attn_func(q, q, q, seqused_k=torch.ones(3))
    ValueError: seqused_k: expected None, as nested tensors know their
flash_attn_func(q, q, q, mask=q > 0)
    TypeError: mask: expected a strided tensor, got torch.jagged nested tensor
flash_attn_varlen_func(q, q, q, cu, cu, 8, 8)
    TypeError: q: expected a strided tensor, got torch.jagged nested tensor, which
""")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_arguments(call: str, error: str) -> None:
    q, fewer = jagged([5, 1, 8]), jagged([5, 9])
    strided = torch.nested.nested_tensor([torch.randn(2, 4, 8, dtype=torch.float64)] * 3)
    given = {"q": q, "fewer": fewer, "strided": strided, "x": torch.randn(3, 7, 2, 8), "cu": offsets([7, 7, 7])}
    assert_refused(call, error, globals() | given)


def test_lengths_beyond_int32_are_no_other_lengths() -> None:
    q = torch.randn(2, 7, 2, 8)
    lengths = seqused_of(torch.tensor([3, 2**32 + 3]))
    assert lengths.tolist() == [3, 2**31 - 1]
    with pytest.raises(ValueError, match="seqused_q: expected 0 to 7 rows for sequence 1, got 2147483647"):
        flash_attn_func(q, q, q, seqused_q=lengths)
    assert seqused_of(torch.tensor([3, -(2**32) + 3])).tolist() == [3, -1]
    for beyond, dtype in ((2**31 + 3, torch.uint32), (2**32 + 3, torch.uint64)):
        assert seqused_of(torch.tensor([3, beyond], dtype=dtype)).tolist() == [3, 2**31 - 1]


@pytest.mark.usefixtures("_settings_reread")
def test_values_are_checked_on_other_devices_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule alone, as there may be no other device here."""
    from flash_attn_cute import padding
    from flash_attn_cute.calls import torch_modes

    elsewhere: Any = type("Elsewhere", (), {"device": torch.device("cuda")})()
    monkeypatch.setattr(torch_modes, "needs_dispatcher", lambda tensors: False)
    assert not padding._is_read(elsewhere)
    monkeypatch.setenv("FLASH_ATTN_CUTE_CHECK", "1")
    flash_attn_cute.runtime.settings.check_data.cache_clear()
    assert padding._is_read(elsewhere)


def test_too_small_a_total_loses_rows_and_nothing_else() -> None:
    """Data is not read on the host: the last rows count as padding."""
    mask, x = MASKS["no padding"], torch.randn(2, 4, 3)
    with NeverWaiting():
        rows = Packing.of(mask, 5)
        packed = rows.pack(x)
        back = rows.unpack(packed)
    assert torch.equal(packed, x.flatten(0, 1)[:5])
    assert torch.equal(back.flatten(0, 1), torch.cat([packed, torch.zeros(3, 3)]))


def test_masks_that_look_like_no_padding_get_no_advice() -> None:
    q = torch.randn(3, 7, 2, 8)
    with pytest.raises(ValueError, match=r"got shape \(4, 5\)$"):
        flash_attn_func(q, q, q, mask=torch.ones(4, 5, dtype=torch.bool))


def test_the_advice_for_masks_is_right() -> None:
    mask = MASKS["right"]
    q = torch.randn(4, 7, 2, 8, dtype=torch.float64)
    hidden = flash_attn_func(q, q, q, mask=mask[:, None, None, :])
    torch.testing.assert_close(hidden[mask], flash_attn_func(q, q, q, seqused_k=seqused_of(mask))[mask])


# Nested tensors.


def jagged(lengths: list[int], *, heads: int = 4, d: int = 8, like: Any = None, known: bool = False) -> Any:
    """A random jagged tensor in float64, of new offsets or those of another one, whose longest sequence is known."""
    values = torch.randn(sum(lengths), heads, d, dtype=torch.float64)
    cu = torch.tensor([0, *lengths]).cumsum(0) if like is None else like.offsets()
    bounds: Case = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)} if known else {}
    return torch.nested.nested_tensor_from_jagged(values, cu, **bounds).requires_grad_()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("lengths_k", [None, [4, 0, 9]], ids=["self", "cross"])
@each_of("options", OPTIONS)
def test_nested_tensors_match_the_oracle(
    options: Case, lengths_k: list[int] | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [5, 1, 8]
    q = jagged(lengths, known=known)
    k = jagged(lengths_k or lengths, heads=2, like=None if lengths_k else q, known=known)
    v = jagged(lengths_k or lengths, heads=2, like=k, d=16, known=known)
    attend: Any = flash_attn_func
    with NeverWaiting():
        out, lse = attend(q, k, v, return_lse=True, **options)
        dout, dlse = torch.randn(14, 4, 16, dtype=torch.float64), torch.randn(4, 14, dtype=torch.float64)
        grads = torch.autograd.grad((out.values(), lse.values()), (q, k, v), (dout, dlse))
    assert out.offsets() is q.offsets()
    assert out.shape == (*q.shape[:-1], 16)
    assert lse.shape == (3, 4, q.shape[1])
    assert (out._maybe_max_seqlen, out._maybe_min_seqlen) == ((8, 1) if known else (None, None))
    assert (out + out).shape == out.shape
    cu, cu_k = offsets(lengths), offsets(lengths_k or lengths)
    rows = [x.values().detach().requires_grad_() for x in (q, k, v)]
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    call = Call(rows[0], rows[1], rows[2], cu, cu_k, **options)
    assert_results_close(call, {name: x.values().detach() for name, x in found.items()}, dout, dlse)


def test_nested_tensors_with_gaps() -> None:
    """Lengths beside the offsets: what is behind a sequence is padding."""
    whole = torch.randn(12, 2, 8, dtype=torch.float64)
    whole[[3, 4, 11]] = torch.nan
    cu, lengths = torch.tensor([0, 5, 8, 12]), torch.tensor([3, 3, 3])
    x: Any = torch.nested.nested_tensor_from_jagged(whole, cu, lengths).requires_grad_()
    for wrong in ((cu.clone(), lengths), (cu, lengths.clone()), (cu, None)):
        with pytest.raises(ValueError, match="v: expected the offsets of k, the same tensor"):
            flash_attn_func(x, x, torch.nested.nested_tensor_from_jagged(whole, *wrong))
    out: Any = flash_attn_func(x, x, x, causal=True)
    assert out.lengths() is x.lengths()
    assert flash_attn_func(x, x, x, return_lse=True)[1].shape == (3, 2, x.shape[1])
    assert (out.values()[[3, 4, 11]] == 0).all()
    (dx,) = torch.autograd.grad(out.values().sum(), x)
    assert (dx.values()[[3, 4, 11]] == 0).all()
    for got, start in zip(out.unbind(), (0, 5, 8), strict=True):
        part = whole[None, start : start + 3].clone().requires_grad_()
        expected = flash_attn_func(part, part, part, causal=True)
        torch.testing.assert_close(got[None], expected, rtol=0, atol=1e-12)
        (dpart,) = torch.autograd.grad(expected.sum(), part)
        torch.testing.assert_close(dx.values()[None, start : start + 3], dpart, rtol=0, atol=1e-12)


def test_nested_tensors_take_mask_and_bias_of_packed_rows() -> None:
    x = jagged([5, 1, 8])
    mask, bias = torch.rand(14, 8) < 0.7, torch.randn(4, 1, 8, dtype=torch.float64, requires_grad=True)
    out: Any = flash_attn_func(x, x, x, mask=mask, bias=bias)
    cu, rows = offsets([5, 1, 8]), x.values()
    expected = flash_attn_varlen_func(rows, rows, rows, cu, cu, 8, 8, mask=mask, bias=bias)
    assert torch.equal(out.values(), expected)
    for dbias in (torch.autograd.grad(result.sum(), bias)[0] for result in (out.values(), expected)):
        assert dbias.any()


def test_nested_tensors_compiled() -> None:
    torch._dynamo.reset()
    backend = "aot_eager"  # which takes what "eager" takes, and traces the operators, too

    def attend(x: Any) -> Any:
        return flash_attn_func(x, x, x, causal=True) + x

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for lengths in ([5, 1, 8], [2, 9, 9]):
        x = jagged(lengths, known=True)
        results = []
        for run in (attend, compiled):
            out = run(x)
            results.append([out.values(), torch.autograd.grad(out.values().square().sum(), x)[0].values()])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    attend_to = torch.compile(lambda q, k, v: flash_attn_func(q, k, v), backend=backend, fullgraph=True)
    q, k = jagged([5, 1, 8], known=True), jagged([2, 0, 3], known=True)
    v = jagged([2, 0, 3], like=k, known=True)
    expected: Any = flash_attn_func(q, k, v)
    assert torch.equal(attend_to(q, k, v).values(), expected.values())


def test_nested_tensors_under_autocast() -> None:
    x = jagged([5, 1, 8]).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out: Any = flash_attn_func(x, x, x)
    assert out.dtype == torch.bfloat16
    (dx,) = torch.autograd.grad(out.values().sum(), x)
    assert dx.dtype == torch.float32


def test_ordinary_calls_do_not_ask_for_nested_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(call: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(nested, "is_nested", asked)
    q = torch.randn(2, 5, 2, 8)
    flash_attn_func(q, q, q)
    with pytest.raises(AssertionError):
        flash_attn_func(jagged([5]), q, q)
