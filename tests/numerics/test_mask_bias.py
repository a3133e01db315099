"""Mask and bias tensors: every broadcast shape, stride and length, on every backend that can, with dBias.

A kernel is compiled for each dtype, head dimension and set of features, so of these there are few; shapes, strides and
lengths vary a lot. Values of all of them meet in pairs (``in_pairs``); on a CPU there is a part of the cases, as
``test_random_specs`` draws such calls there.
"""

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.base import Gradients
from flash_attn_cute.calls import dispatch
from tests.lib import oracle
from tests.lib.checks import (
    LAYOUTS,
    Case,
    assert_close,
    assert_fully_masked_queries_reach_nothing,
    assert_matches_oracle,
    assert_padding_reaches_nothing,
    assert_results_close,
    both_passes,
    call_on,
    check_on,
    differing,
    each_on,
    gradients,
    on_each_backend,
    packed_or_dense,
    poisoned_dout,
    run,
    same_bits,
)


def in_pairs(axes: dict[str, Sequence[Any]], apart: Collection[frozenset[str]] = ()) -> list[Case]:
    """Cases in which each value of an axis meets each of every other one, but for axes that are kept apart."""
    values = [(name, index) for name, axis in axes.items() for index in range(len(axis))]
    missing = {
        frozenset((a, b)): None
        for a, b in itertools.combinations(values, 2)
        if a[0] != b[0] and frozenset((a[0], b[0])) not in apart
    }
    draw, cases = random.Random(0), []
    while missing:
        chosen = dict(sorted(next(iter(missing))))
        for name in draw.sample(list(axes), len(axes)):
            if name not in chosen:
                gains = [
                    sum(frozenset(((name, index), other)) in missing for other in chosen.items())
                    for index in range(len(axes[name]))
                ]
                best = [index for index, gain in enumerate(gains) if gain == max(gains)]
                chosen[name] = draw.choice(best)
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append({name: axes[name][chosen[name]] for name in axes})
    return cases


def test_pairs_are_complete() -> None:
    axes: dict[str, Sequence[Any]] = {"a": "xyz", "b": range(5), "c": range(4), "d": range(4)}
    cases = in_pairs(axes, apart=[frozenset("cd")])
    for one, other in itertools.combinations(axes, 2):
        met = {(case[one], case[other]) for case in cases}
        if {one, other} != {"c", "d"}:
            assert len(met) == len(axes[one]) * len(axes[other])
    assert len(cases) < 30


# What a call asks for beside mask and bias: what has kernels of its own, and what mask and bias must go together with.
DENSE: dict[str, Case] = {
    "d128": {"head_dim": 128},
    "d64": {"head_dim": 64, "bias_dtype": torch.float32},
    "d256": {"head_dim": 256},
    "d8": {"head_dim": 8, "bias_dtype": torch.float32},
    "float16": {"head_dim": 128, "dtype": torch.float16, "deterministic": True},
    "causal": {"head_dim": 128, "causal": True, "bias_dtype": torch.float32},
    "causal gqa": {"head_dim": 64, "causal": True, "nheads": 8, "nheads_k": 2},
    "gqa deterministic": {"head_dim": 256, "nheads": 6, "nheads_k": 2, "deterministic": True},
    "mqa": {"head_dim": 96, "nheads": 8, "nheads_k": 1, "sink": True, "bias_dtype": torch.float32},
    "window": {"head_dim": 40, "window_size": (50, 20)},
    "left": {"head_dim": 128, "window_size": (70, None), "nheads_k": 2},
    "softcap": {"head_dim": 128, "causal": True, "softcap": 3.0},
    "lse": {"head_dim": 64, "causal": True, "sink": True, "through_lse": True, "bias_dtype": torch.float32},
    "seqused": {"head_dim": 128, "causal": True, "seqused": True, "bias_dtype": torch.float32},
    "two head dims": {"head_dim": 192, "head_dim_v": 128, "causal": True},
}
PACKED: dict[str, Case] = {
    "d128": {"head_dim": 128},
    "causal": {"head_dim": 64, "causal": True, "bias_dtype": torch.float32},
    "window gqa": {"head_dim": 128, "window_size": (50, 20), "nheads_k": 2, "deterministic": True},
    "softcap": {"head_dim": 256, "softcap": 3.0, "bias_dtype": torch.float32},
    "lse": {"head_dim": 64, "causal": True, "sink": True, "through_lse": True},
    "seqused": {"head_dim": 128, "causal": True, "seqused": True, "nheads_k": 2, "bias_dtype": torch.float32},
    "mqa": {"head_dim": 96, "nheads": 8, "nheads_k": 1},
    "two head dims": {"head_dim": 192, "head_dim_v": 128, "dtype": torch.float16},
}
# (sequences, queries, keys); few queries let the heads of a group share a tile.
DENSE_LENGTHS = [
    (3, 128, 128),
    (2, 129, 127),
    (2, 127, 129),
    (3, 1, 128),
    (2, 129, 1),
    (1, 1, 1),
    (1, 257, 300),
    (2, 64, 129),
    (2, 17, 4095),
]
PACKED_LENGTHS: list[tuple[list[int], list[int]]] = [
    ([129, 0, 1, 127, 128], [128, 5, 0, 129, 1]),
    ([1, 17, 0, 64], [513, 40, 100, 1]),
    ([200, 0, 33], [200, 0, 33]),
    ([5, 1], [4095, 127]),
]
APART = [frozenset(pair) for pair in (("mask", "bias"), ("mask", "bias_layout"), ("bias", "mask_layout"))]


def scores_of(rank: int) -> list[Any]:
    """None, and 0 and 1 for each dimension: 0 broadcasts it."""
    return [None, *itertools.product((0, 1), repeat=rank)]


def matrix(rank: int, lengths: Sequence[Any], kernels: dict[str, Case]) -> dict[str, Case]:
    axes: dict[str, Sequence[Any]] = {
        "kernel": list(kernels),
        "mask": scores_of(rank),
        "bias": scores_of(rank),
        "mask_layout": LAYOUTS,
        "bias_layout": LAYOUTS,
        "lengths": lengths,
    }
    found = {}
    for count, case in enumerate(in_pairs(axes, APART)):
        if case["mask"] is None and case["bias"] is None:
            case["bias"] = (1,) * rank
        shown = ("".join(map(str, case[name])) if case[name] is not None else "no" for name in ("mask", "bias"))
        kernel = case.pop("kernel")
        name = f"{count} {kernel} {' '.join(shown)} {case['mask_layout']} {case['bias_layout']}"
        found[name] = kernels[kernel] | case
    return found


DENSE_CASES = matrix(4, DENSE_LENGTHS, DENSE)
PACKED_CASES = matrix(3, PACKED_LENGTHS, PACKED)


@each_on(DENSE_CASES, one_in=20)
def test_dense(backend: str, case: Case) -> None:
    options = dict(case)
    batch, *sizes = options.pop("lengths")
    lengths_q, lengths_k = ([size] * batch for size in sizes)
    if options.get("seqused"):
        lengths_q, lengths_k = ([size, size // 2, max(0, size - 1)][:batch] for size in sizes)
    check_on(backend, lengths_q, lengths_k, packed=False, **options)


@each_on(PACKED_CASES, one_in=10)
def test_packed(backend: str, case: Case) -> None:
    options = dict(case)
    check_on(backend, *options.pop("lengths"), **options)


@on_each_backend
@pytest.mark.parametrize("shape", [{"bias": (1, 1, 1, 1)}, {"mask": (1, 1), "bias": (1, 0, 0, 1)}], ids=str)
def test_long_rows(shape: Case, backend: str) -> None:
    """Rows of many tiles of keys, and no length that a vector or a line of memory divides."""
    check_on(backend, [4095] if backend == "sm90" else [130], [4095], packed=False, nheads=1, **shape)


# --- Padding.

PADDED: dict[str, Case] = {
    "full": {"mask": (1, 1, 1), "bias": (1, 1, 1), "causal": True},
    "keys": {"mask": (1,), "bias": (1, 0, 1), "bias_dtype": torch.float32, "nheads_k": 2},
    "queries": {"mask": (1, 0), "bias": (1, 0), "sink": True},
    "window": {"bias": (1, 1), "window_size": (40, 9), "head_dim": 128},
    "d256": {"mask": (1, 0, 1), "bias": (1, 1, 0), "head_dim": 256, "bias_dtype": torch.float32},
}


@packed_or_dense
@each_on(PADDED)
def test_padding_reaches_nothing(backend: str, case: Case, packed: bool) -> None:
    """Padding of a bias, too, and any bytes in that of a mask."""
    call = call_on(backend, [150, 3, 0, 40], [144, 9, 5, 130], packed=packed, seqused=True, **case)
    assert_padding_reaches_nothing(call, backend=backend, deterministic=True)


@pytest.mark.parametrize("through_lse", [False, True], ids=["out", "lse"])
@packed_or_dense
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (30, 3)}], ids=str)
@on_each_backend
def test_queries_that_the_window_lets_see_no_key(backend: str, options: Case, packed: bool, through_lse: bool) -> None:
    """They and their gradients may be NaN, and so may their bias."""
    lengths = ([150, 40, 3, 20], [60, 5, 0, 30]) if packed else ([150] * 2, [60] * 2)
    kept = (1, 1, 1) if packed else (1, 1, 1, 1)
    call = call_on(backend, *lengths, packed=packed, mask=kept, bias=kept, **options)
    fully_masked = call.fully_masked_rows().to(call.bias.device)
    by_row = call.bias.detach().movedim(-3, -2)  # batch, queries, heads, keys
    by_row[fully_masked] = torch.nan
    assert_matches_oracle(call, through_lse=through_lse, backend=backend)
    assert_fully_masked_queries_reach_nothing(call, through_lse=through_lse, backend=backend)


# --- What is hidden, and what sees nothing.


@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["", "float32"])
@packed_or_dense
@pytest.mark.parametrize("options", [{}, {"causal": True, "sink": True}, {"head_dim": 256, "nheads_k": 2}], ids=str)
@on_each_backend
def test_minus_infinity_hides(backend: str, options: Case, packed: bool, bias_dtype: torch.dtype | None) -> None:
    """Single keys, the first or last tiles of them, and all keys of a query or of a whole tile of queries."""
    lengths = ([290, 12], [400, 30]) if packed else ([290] * 2, [400] * 2)
    call = call_on(backend, *lengths, packed=packed, bias=(1, 1, 1), bias_dtype=bias_dtype, **options)
    with torch.no_grad():
        call.bias[..., ::3, ::2] = -torch.inf
        call.bias[..., 7:90, :300] = -torch.inf
        call.bias[..., 100:120, 130:] = -torch.inf
        call.bias[..., 5, :] = -torch.inf
        call.bias[..., 128:, :] = -torch.inf
    assert_matches_oracle(call, backend=backend)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@packed_or_dense
@pytest.mark.parametrize("kept", [(), (1,), (1, 0), (1, 1, 1)], ids=str)
@on_each_backend
def test_mask_that_hides_everything(backend: str, kept: tuple[int, ...], packed: bool, sink: bool) -> None:
    """Out 0, lse -inf or the sink's logit, and no gradients but the sink's."""
    lengths = ([150, 0, 1], [130, 7, 0]) if packed else ([150] * 2, [130] * 2)
    call = call_on(backend, *lengths, packed=packed, mask=kept, bias=(1, 1, 1), sink=sink, causal=sink)
    call.mask.fill_(False)
    assert_matches_oracle(call, through_lse=sink, backend=backend)
    out = run(call, backend=backend)
    assert not torch.autograd.grad(out, call.bias, torch.ones_like(out))[0].any()


TILES: dict[str, Case] = {
    "causal": {"causal": True},
    "d128": {"head_dim": 128},
    "d256": {"head_dim": 256, "nheads_k": 2},
}


@packed_or_dense
@each_on(TILES, one_in=3)
def test_fully_masked_tiles(backend: str, case: Case, packed: bool) -> None:
    """Any of them: the first or the last of a row, or all of a row or column. And some that hide nothing."""
    length = 700
    lengths = [length, 300] if packed else [length]
    shape: Case = {"packed": packed, "nheads": 2, "nheads_k": 1, "mask": (1, 1), "bias": (1, 1)}
    call = call_on(backend, lengths, **shape | case)
    mask = call.mask
    for tile, seed in ((128, 1), (64, 2), (100, 3)):
        draw = torch.Generator().manual_seed(seed)
        kinds = torch.randint(3, (-(-mask.shape[-2] // tile), -(-mask.shape[-1] // tile)), generator=draw)
        kinds[1], kinds[:, 2] = 0, 0  # fully masked rows and columns of tiles
        kinds[2], kinds[2, -1] = 0, 2  # only the last
        kinds = kinds.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[: mask.shape[-2], : mask.shape[-1]]
        some = torch.rand(mask.shape[-2:], generator=draw) < 0.9
        mask.copy_(((kinds == 2) | ((kinds == 1) & some)).to(mask.device))
        assert_matches_oracle(call, backend=backend)


@packed_or_dense
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (40, 9), "nheads_k": 2},
        {"mask": (1, 1, 1), "head_dim": 128},
        {"mask": (1, 1, 1), "causal": True, "softcap": 2.0},
    ],
    ids=str,
)
@on_each_backend
def test_hidden_bias_may_hold_anything(backend: str, options: Case, packed: bool) -> None:
    """Hidden scores are replaced, not multiplied: neither out nor any gradient sees NaN or infinities there."""
    lengths = ([200, 129], [150, 300]) if packed else ([200] * 2, [150] * 2)
    kept = (1, 1, 1) if packed else (1, 1, 1, 1)
    masked: Case = {"mask": kept} if options.get("mask") else {}
    call = call_on(backend, *lengths, packed=packed, bias=kept, **options | masked)
    hidden = torch.zeros_like(call.bias, dtype=torch.bool)
    for b, rows_q, rows_k in call.sequences():
        seqlen_q, seqlen_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        place = hidden[..., rows_q, :seqlen_k] if b is None else hidden[b, :, rows_q, :seqlen_k]
        place |= ~oracle.window(call, seqlen_q, seqlen_k).to(hidden.device)
    if call.mask is not None:
        hidden |= ~call.mask
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])
    with torch.no_grad():
        call.bias[hidden] = junk[torch.randint(4, (int(hidden.sum()),))].to(call.bias)
    assert_matches_oracle(call, backend=backend)


# --- Large numbers.


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@on_each_backend
def test_large_biases(backend: str, bias_dtype: torch.dtype) -> None:
    """A number added to all scores of a query changes nothing but its lse; the lowest one hides."""
    call = call_on(
        backend, [150] * 2, [260] * 2, packed=False, mask=(1, 1), bias=(1, 1, 1), dtype=torch.bfloat16,
        bias_dtype=bias_dtype, head_dim=128,
    )  # fmt: skip
    bias, visible = call.bias, call.mask
    visible[:, 0] = True
    # Whole numbers, and still so beside those that are added: of bfloat16 the largest is 256.
    small = torch.randint(-4, 4, bias.shape, generator=torch.Generator().manual_seed(1)).to(bias)
    most = 128.0 if bias_dtype == torch.bfloat16 else 1024.0
    shift = torch.tensor([0.0, most, -most]).repeat(50)[:, None].to(bias)
    plain = replace(call, bias=small.clone().requires_grad_())
    shifted = (small + shift).masked_fill(~visible, torch.finfo(bias_dtype).min)
    assert torch.equal((shifted - shift)[..., 0], small[..., 0])
    large = replace(call, bias=shifted.requires_grad_(), mask=None)

    dout = torch.randn(call.q.shape, dtype=torch.float64).to(call.q)
    out, lse = run(large, return_lse=True, backend=backend)
    results = {"out": out, "lse": lse - shift[:, 0], **gradients(large, out, lse, dout, None)}
    assert_results_close(plain, results, dout)


@on_each_backend
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [-1e4, -1e9, -1e10, -1e20, -1e30, -3e38])
def test_keys_that_a_finite_bias_hides(value: float, dtype: torch.dtype, bias_dtype: torch.dtype, backend: str) -> None:
    """Key padding as many write it: the last keys, whose blocks may come first, or some of all, give way to others."""
    if bias_dtype != torch.float32:
        bias_dtype = dtype
    value = max(value, torch.finfo(bias_dtype).min)
    call = call_on(backend, [70], [512], packed=False, bias=(1, 0, 0, 1), bias_dtype=bias_dtype, dtype=dtype)
    with torch.no_grad():
        call.bias[..., 310:] = value
        call.bias[..., 3:40:5] = value
    assert_matches_oracle(call, backend=backend)


@on_each_backend
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e30], ids=str)
def test_queries_whose_biases_are_all_the_lowest_number(value: float, backend: str) -> None:
    """In float32 nothing is left of their scores, which are all the same: out is the mean of the values.

    So models write masks, and queries of padding have such rows. Lse has lost the number of their keys, so they have no
    gradients: those of the others are as if nothing was visible to them.
    """
    call = call_on(backend, [140], [200], packed=False, bias=(1, 1), bias_dtype=torch.float32, dtype=torch.bfloat16)
    rows = slice(30, 135)
    with torch.no_grad():
        call.bias[..., rows, :] = value
    out, lse = run(call, return_lse=True, backend=backend)
    true, low = (oracle.attention(call.to(dtype))[0] for dtype in (torch.float64, torch.bfloat16))
    assert_close("out", out, true, low, 2.0, 1.0)
    assert lse.isfinite().all()
    dout = torch.randn_like(out)
    hidden = call.to(torch.bfloat16)
    with torch.no_grad():
        hidden.bias = call.bias.masked_fill(call.bias == value, -torch.inf).requires_grad_()
    both = []
    for each in (call, hidden):
        out, lse = run(each, return_lse=True, backend=backend, deterministic=True)
        both.append(gradients(each, out, lse, dout, None))
    assert all(torch.equal(x, both[1][name]) for name, x in both[0].items())
    assert (both[0]["dq"][:, rows] == 0).all()
    dout[:, rows] = 0
    out, lse = run(call, return_lse=True, backend=backend)
    assert_results_close(call, gradients(call, out, lse, dout, None), dout)


# --- The gradient of a bias.


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[Gradients]:
    """Gradients that backends return: autograd would cast and sum what has another dtype or shape."""
    found: list[Gradients] = []
    for backend in set(dispatch.BACKENDS.values()):  # some may have two names

        def recording(*arguments: Any, original: Any = backend.backward, **options: Any) -> Gradients:
            found.append(original(*arguments, **options))
            return found[-1]

        monkeypatch.setattr(backend, "backward", recording)
    return found


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@packed_or_dense
@pytest.mark.parametrize("kept", [(), (1,), (1, 0), (1, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)], ids=str)
@on_each_backend
def test_shape_and_dtype_of_its_gradient(
    backend: str, kept: tuple[int, ...], packed: bool, bias_dtype: torch.dtype, given_back: list[Gradients]
) -> None:
    call = call_on(backend, [30] * 2, packed=packed, bias=kept, dtype=torch.bfloat16, bias_dtype=bias_dtype)
    out = run(call, backend=backend)
    out.sum().backward()
    (grads,) = given_back
    assert grads.dbias is not None
    assert (grads.dbias.dtype, grads.dbias.shape) == (bias_dtype, call.bias.shape)
    assert call.bias.grad is not None
    assert (call.bias.grad.dtype, call.bias.grad.shape) == (bias_dtype, call.bias.shape)


@packed_or_dense
@on_each_backend
def test_bias_and_others_without_each_others_gradients(backend: str, packed: bool, given_back: list[Gradients]) -> None:
    call = call_on(backend, [140] * 2, packed=packed, mask=(1, 1), bias=(1, 1))
    constant = replace(call, bias=call.bias.detach())
    alone = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
    dout, results = torch.randn_like(call.q), []
    for each, leaves in ((call, [*call.qkv, call.bias]), (constant, call.qkv), (alone, [call.bias])):
        out = run(each, backend=backend, deterministic=True)
        results.append(torch.autograd.grad(out, leaves, dout))
    assert [grads.dbias is None for grads in given_back] == [False, True, False]
    torch.testing.assert_close(results[0][:3], results[1])
    assert same_bits(results[0][3:], results[2])


@pytest.mark.parametrize("seqlen", [260, 264])
@pytest.mark.parametrize("kept", [(0, 1, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)], ids=str)
@on_each_backend
def test_sums_are_in_float32(backend: str, kept: tuple[int, ...], seqlen: int) -> None:
    """And rounded once: the gradient of a bias that many share is the sum of what they would have alone.

    Hopper's backward kernel rounds what it stores or sums, each score's by itself: their errors add up as squares do.
    """
    call = call_on(backend, [seqlen] * 24, packed=False, nheads=2, bias=kept, dtype=torch.bfloat16)
    alone = call.bias.detach().float().expand(24, 2, seqlen, seqlen).contiguous().requires_grad_()
    dout = torch.randn_like(call.q)
    (got,) = torch.autograd.grad(run(call, backend=backend), call.bias, dout)
    (each,) = torch.autograd.grad(run(replace(call, bias=alone), backend=backend), alone, dout)
    shape = (1,) * (4 - len(kept)) + call.bias.shape
    exact, size, squares = (x.double().sum_to_size(shape).view_as(got) for x in (each, each.abs(), each.square()))
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    room = half_ulp * exact.abs() + 64 * torch.finfo(torch.float32).eps * size
    if backend == "sm90" and (seqlen % 8 == 0 or not kept[2]):
        room += 3 * half_ulp * squares.sqrt()
    assert ((got.double() - exact).abs() <= room).all()


SHARED: dict[str, Case] = {
    "one for all": {"bias": (0, 0, 1, 1), "mask": (1, 0, 1, 1)},
    "each head": {"bias": (0, 1, 1, 1), "causal": True, "nheads_k": 2},
    "each": {"bias": (1, 1, 1, 1), "head_dim": 128, "nheads_k": 1},
    "keys": {"bias": (0, 1, 0, 1), "head_dim": 256, "bias_dtype": torch.float32},
    "queries": {"bias": (1, 0, 1, 0), "head_dim": 128, "window_size": (100, 30)},
    "head": {"bias": (0, 1, 0, 0), "mask": (1, 0, 0, 1)},
    "number": {"bias": (), "head_dim": 256, "nheads_k": 2},
    "packed each": {"bias": (1, 1, 1), "packed": True, "causal": True},
    "packed one for all": {"bias": (0, 1, 1), "packed": True, "head_dim": 128},
    "packed keys": {"bias": (1, 0, 1), "packed": True, "head_dim": 256, "bias_dtype": torch.float32},
    "packed queries": {"bias": (0, 1, 0), "packed": True, "causal": True, "nheads_k": 2},
}


@each_on(SHARED, one_in=4)
def test_repetitions(backend: str, case: Case, repetitions: int) -> None:
    """``deterministic=True``: the same bits as often as --repetitions says, however the bias is shared."""
    scale = 9 if backend == "sm90" else 1  # more tiles than a GPU has SMs
    options: Case = {"packed": False, "nheads": 8} | case
    lengths = [137, 0, 37, 64] if options["packed"] else [119] * 3
    call = call_on(backend, [scale * length for length in lengths], **options)
    function = both_passes(call, poisoned_dout(call, call.q), deterministic=True, backend=backend)
    assert not differing(function(), function, repetitions)
