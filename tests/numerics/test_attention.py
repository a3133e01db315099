"""Results and gradients against the oracle: every feature, their pairs, and lengths around block edges."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask
from flash_attn_cute.backends.portable import blockwise
from tests.lib.checks import (
    DEVICES,
    DTYPES,
    GRADS,
    Case,
    assert_matches_oracle,
    assert_results_close,
    assert_rows_reach_nothing,
    needs_kernels,
    offsets,
    on_each_backend,
    packed_or_dense,
    random_call,
    run,
    same_bits,
    with_gradients,
)
from tests.lib.oracle import Call

FEATURES: dict[str, Case] = {
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "left": {"window_size": (4, None)},
    "right": {"window_size": (-1, 2)},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "mask": {"mask": (1, 1, 1)},
    "bias": {"bias": (1, 1, 1)},
    "gqa": {"nheads": 4},
    "head_dim_v": {"head_dim_v": 24},
    "scale": {"softmax_scale": 0.5},
    "seqused": {"seqused": True},
    "lse": {"through_lse": True},
}
PAIRS = [*((name,) for name in FEATURES), *itertools.combinations(FEATURES, 2)]


def check(lengths_q: list[int], lengths_k: list[int] | None = None, **options: Any) -> None:
    through_lse = options.pop("through_lse", False)
    assert_matches_oracle(random_call(lengths_q, lengths_k, **options), through_lse=through_lse)


def combine(features: tuple[str, ...]) -> dict[str, Any]:
    options: Case = {}
    for feature in features:
        for key, value in FEATURES[feature].items():
            if key == "window_size" and key in options:
                left, right = options[key]
                value = (left if value[0] in (None, -1) else value[0], right if value[1] is None else value[1])
            options[key] = value
    return options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", PAIRS, ids="-".join)
def test_packed(features: tuple[str, ...], dtype: torch.dtype, device: str) -> None:
    check([13, 1, 0, 40, 7], [13, 9, 5, 21, 0], nheads_k=2, dtype=dtype, device=device, **combine(features))


@pytest.mark.parametrize("features", PAIRS, ids="-".join)
def test_dense(features: tuple[str, ...], device: str) -> None:
    lengths = ([11, 0, 26], [30, 4, 19]) if "seqused" in features else ([17, 17, 17], [23, 23, 23])
    check(*lengths, nheads_k=2, packed=False, device=device, **combine(features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@packed_or_dense
def test_everything_at_once(dtype: torch.dtype, packed: bool, device: str) -> None:
    check(
        [33, 2, 18],
        [20, 50, 18],
        nheads=6,
        nheads_k=3,
        head_dim_v=8,
        packed=packed,
        seqused=True,
        sink=True,
        mask=(1, 1, 1),
        bias=(1, 0, 1),
        softcap=2.0,
        causal=True,
        window_size=(15, None),
        softmax_scale=0.3,
        through_lse=True,
        dtype=dtype,
        device=device,
    )


EDGES = [0, 1, 31, 32, 127, 128, 129, 257]


@pytest.mark.parametrize("seqlen_k", EDGES)
@pytest.mark.parametrize("seqlen_q", EDGES)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_lengths_around_block_edges(mask: str, seqlen_q: int, seqlen_k: int, device: str) -> None:
    """Both paths: without a softcap PyTorch's fused attention serves what it can."""
    options: Case = {"causal": mask == "causal"}
    if mask == "window":
        options["window_size"] = (40, 7)
    check([seqlen_q], [seqlen_k], device=device, **options)
    check([seqlen_q], [seqlen_k], device=device, softcap=3.0, **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (200, 0), "sink": True}], ids=str)
def test_long_and_odd(options: Case, device: str) -> None:
    check([2047, 1, 997], nheads=1, device=device, **options)


SHAPES = [*itertools.product((0, 1), repeat=3), (1, 1), (1,), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@packed_or_dense
def test_broadcast_shapes_of_mask_and_bias(shape: tuple[int, ...], packed: bool, device: str) -> None:
    """Any broadcast shape, gradients of the bias's own shape."""
    lengths: tuple[list[int], list[int]] = ([19, 3, 130], [19, 40, 31]) if packed else ([30] * 3, [21] * 3)
    check(*lengths, packed=packed, nheads=4, nheads_k=2, mask=shape, device=device)
    check(*lengths, packed=packed, nheads=4, nheads_k=2, bias=shape, device=device)


@pytest.mark.parametrize("batch", [0, 1])
def test_dense_bias_over_the_batch(batch: int, device: str) -> None:
    shape = (batch, 1, 1, 1)
    check([30] * 3, packed=False, mask=shape, bias=shape, device=device)


@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("hidden_by", ["mask", "bias"])
def test_gradients_of_a_query_that_sees_nothing_may_be_nan(hidden_by: str, sink: bool, device: str) -> None:
    """Merging two lse of -inf makes such gradients. They reach the sink's gradient alone, a part of which is lse's.

    ``test_padding.py`` has those of causal calls.
    """
    shape: Case = {hidden_by: (1, 1, 1)}
    call = random_call([12], sink=sink, device=device, **shape)
    with torch.no_grad():
        if hidden_by == "mask":
            call.mask[:, :, 0] = True
        getattr(call, hidden_by)[:, 5] = False if hidden_by == "mask" else -torch.inf
    leaves = [getattr(call, name) for name in GRADS if getattr(call, name) is not None]
    out, lse = run(call, return_lse=True)
    dout, dlse, results = torch.randn_like(out), torch.randn_like(lse), []
    for fill in (0.0, torch.nan):
        dout[5], dlse[:, 5] = fill, 0.0 if sink else fill
        results.append(torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True))
    assert same_bits(*results)
    assert (results[1][0][5] == 0).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("hidden_by", ["mask", "block_mask"])
def test_a_query_that_sees_nothing_may_be_nan(hidden_by: str, softcap: float, device: str) -> None:
    """GPU kernels promise this of blocks of queries alone: they multiply its P of 0 by what the query holds."""
    call = random_call([40], packed=False, softcap=softcap, device=device)
    queries = torch.arange(40, device=device)[None] == 5
    shown = ~queries.mT.expand(40, 40)
    hidden: Case = {hidden_by: shown if hidden_by == "mask" else BlockMask.from_dense(shown)}
    call = replace(call, **hidden)
    assert_rows_reach_nothing(call, queries, torch.zeros_like(queries), through_lse=True, backend="portable")


@packed_or_dense
def test_many_equal_sequences(packed: bool, device: str) -> None:
    """Equal neighbours are served together; in the middle of others they stay apart."""
    lengths = [5, 9, 9, 9, 9, 4, 9] if packed else [9] * 7
    check(lengths, packed=packed, causal=True, device=device)
    check(lengths, packed=packed, softcap=2.0, bias=(1, 1, 1), mask=(1, 1, 1), device=device)


@pytest.mark.parametrize("elements", [1, 1 << 12])
def test_small_blocks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences and many heads are cut along rows, heads and batch; small budgets show every cut."""
    monkeypatch.setitem(blockwise._BLOCK_SIZES, "cpu", blockwise.BlockSize(elements, 32, 128))
    options: Case = {"softcap": 2.0, "mask": (1, 1, 1), "bias": (1, 1, 1), "nheads": 6, "nheads_k": 3}
    check([70] * 3, [50] * 3, packed=False, causal=True, **options)
    check([70, 20, 20], [50, 90, 90], window_size=(9, 4), **options)


@packed_or_dense
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_nothing_to_do(packed: bool, batch: int, device: str) -> None:
    """Empty batches, totals of 0 and sequences without queries or keys."""
    for lengths_q, lengths_k in (([0] * batch, [0] * batch), ([0] * batch, [4] * batch), ([4] * batch, [0] * batch)):
        check(lengths_q, lengths_k, packed=packed, sink=True, bias=(1, 1, 1), device=device)
        check(lengths_q, lengths_k, packed=packed, causal=True, device=device)


@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["fused", "blockwise"])
@packed_or_dense
@on_each_backend
def test_strides(backend: str, packed: bool, softcap: float) -> None:
    """Slices of a fused projection, expanded keys and rows that TMA cannot read give the same bits as copies.

    So do gradients; that of out is expanded, too.
    """
    options: Case = {"device": DEVICES[backend], "dtype": DTYPES[backend]}
    shape = (600,) if packed else (2, 300)
    fused = torch.randn(*shape, 3, 4, 64, **options).unbind(-3)
    odd = torch.randn(*shape, 4, 67, **options)[..., 3:]
    swapped = torch.randn(4, *shape, 64, **options).movedim(0, -2)
    expanded = torch.randn(*shape, 1, 64, **options).expand(*shape, 4, 64)
    cu = offsets([250, 350], device=DEVICES[backend]) if packed else None
    for rows in (fused, (odd,) * 3, (expanded,) * 3, (odd, expanded, fused[0]), (swapped, expanded, swapped)):
        found = []
        for xs in (rows, [x.contiguous() for x in rows]):
            q, k, v = leaves = [x.detach().requires_grad_() for x in xs]
            out = run(Call(q, k, v, cu, cu, causal=True, softcap=softcap), deterministic=True, backend=backend)
            found.append(with_gradients(out, leaves, torch.ones_like(out[..., :1]).expand_as(out)))
        assert same_bits(*found)


def every_other(x: Tensor) -> Tensor:
    """A view of equal numbers, with others between them."""
    return torch.stack((x, x + 7), dim=1)[:, 0]


def expanded(x: Tensor) -> Tensor:
    """The first number in every place."""
    return x[:1].expand(x.shape)


@pytest.mark.parametrize(
    ("where", "backend"),
    [
        ("cpu", "portable"),
        pytest.param("cuda", "portable", marks=needs_kernels),
        pytest.param("cuda", "sm90", marks=needs_kernels),
    ],
)
@pytest.mark.parametrize(
    ("packed", "name", "view"),
    [
        *((True, name, every_other) for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *itertools.product((True, False), ("seqused_q", "seqused_k", "learnable_sink"), (every_other, expanded)),
    ],
)
def test_strides_of_small_tensors(packed: bool, name: str, view: Any, where: str, backend: str) -> None:
    """Offsets, lengths and sinks may have any strides, and give the same bits as copies."""
    shape: Case = {"packed": packed, "head_dim": 64, "dtype": torch.bfloat16, "device": where}
    call = random_call(
        [12, 30, 50], [25, 40, 50], seqused=True, sink=True, causal=True, bias_dtype=torch.float32, **shape
    )
    strided = view(getattr(call, name).detach())
    results = []
    for x in (strided, strided.contiguous()):
        x = x.detach().requires_grad_(x.is_floating_point())
        changed = replace(call, **{name: x})
        out, lse = run(changed, return_lse=True, deterministic=True, backend=backend)
        leaves: Any = (changed.q, changed.k, changed.v, changed.learnable_sink)
        douts = [torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y) for y in (out, lse)]
        results.append((out, lse, *torch.autograd.grad((out, lse), leaves, douts)))
    assert not strided.is_contiguous()
    assert same_bits(*results)


@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["fused", "blockwise"])
def test_strides_of_the_gradient(softcap: float, device: str) -> None:
    """The gradient of out may come transposed, or as one number expanded, as from a sum."""
    call = random_call([30, 12], causal=True, softcap=softcap, device=device)
    out = run(call)
    for dout in (torch.randn(42, 16, 2, device=device).mT, torch.full((), 1.5, device=device).expand(out.shape)):
        got = torch.autograd.grad(out, call.qkv, dout, retain_graph=True)
        expected = torch.autograd.grad(out, call.qkv, dout.contiguous(), retain_graph=True)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("side", ["q", "k"])
def test_equal_sequences_with_a_gap_on_one_side(side: str, device: str) -> None:
    """They are not neighbours, and must not be served as if they were."""
    call = random_call([6, 6, 6], causal=True, device=device)
    gap = torch.tensor([0, 6, 15, 21], dtype=torch.int32, device=device)
    used = torch.tensor([6, 6, 6], dtype=torch.int32, device=device)
    for name in "q" if side == "q" else "kv":
        x = torch.randn(23, 2, 16, device=device)
        setattr(call, name, x.requires_grad_())
    setattr(call, f"cu_seqlens_{side}", gap)
    setattr(call, f"seqused_{side}", used)
    assert_matches_oracle(call)


def test_each_gradient_alone(device: str) -> None:
    """Wanting the gradient of one input gives the same as wanting all of them."""
    call = random_call([20, 9], bias=(1, 1, 1), sink=True, device=device)
    leaves = {name: getattr(call, name) for name in GRADS}
    everything = torch.autograd.grad(run(call).square().sum(), list(leaves.values()))
    for (name, leaf), expected in zip(leaves.items(), everything, strict=True):
        for other in leaves.values():
            other.requires_grad_(other is leaf)
        (alone,) = torch.autograd.grad(run(call).square().sum(), leaf)
        assert torch.equal(alone, expected), name


@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["fused", "blockwise"])
def test_only_lse_is_used(softcap: float, device: str) -> None:
    call = random_call([20, 9], softcap=softcap, device=device)
    out, lse = run(call, return_lse=True)
    dlse, nothing = torch.randn_like(lse), torch.zeros_like(out)
    dq, dk = torch.autograd.grad(lse, (call.q, call.k), dlse)
    assert_results_close(call, {"dq": dq, "dk": dk}, nothing, dlse)
