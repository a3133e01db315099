"""Dense calls with a block mask that other arguments say as well: they are made as calls without one."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, explain, flash_attn_func
from tests.lib.checks import (
    DEVICES,
    Case,
    assert_compiles,
    assert_matches_oracle,
    bitwise_equal,
    compiled,
    draws,
    each_of,
    needs_kernels,
    random_call,
)
from tests.lib.masks import KINDS, as_if_captured, attend, listed
from tests.lib.oracle import Call
from tests.lib.refusals import assert_refused, refusals


def documents(batch: int, length: int, rng: random.Random) -> tuple[BlockMask, Tensor]:
    """Documents that follow each other, perhaps with padding behind them, and what they show."""
    rows, row = [], torch.arange(length)
    for _ in range(batch):
        cuts = sorted(rng.randint(0, length) for _ in range(length // 600))
        ids = torch.bucketize(row, torch.tensor(cuts, dtype=torch.int64), right=True) * 3
        rows.append(ids.masked_fill(row >= length - rng.choice([0, 0, 77, length]), -1 - rng.randrange(2)))
    ids = torch.stack(rows)
    shown = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    return BlockMask.documents(ids), shown[:, None]


def moved(mask: BlockMask, device: str) -> BlockMask:
    """A copy of a mask on another device."""
    assert mask.plain is not None
    kept = mask.plain
    made = BlockMask.window(mask.seqlen_q, mask.seqlen_k, left=kept.left, right=kept.right)
    return made if kept.documents is None else made & BlockMask.documents(kept.documents.ids_q.to(device))


def drawn(rng: random.Random, device: str, **options: Any) -> Call:
    """A call with a window, documents, or both."""
    batch, seqlen_q, seqlen_k = rng.randint(1, 2), rng.choice([1, 100, 700]), rng.choice([100, 300, 700])
    with_documents = rng.random() < 0.7
    if with_documents:
        seqlen_q = seqlen_k = rng.choice([300, 700, 1030])
    else:
        options |= {"bias": (1, 0)} if rng.random() < 0.3 else {"mask": (1, 1, 1)} if rng.random() < 0.3 else {}
    call = random_call([seqlen_q] * batch, [seqlen_k] * batch, packed=False, device=device, **options)
    mask, shown = KINDS["window"](seqlen_q, seqlen_k, rng, (1, 1))
    if with_documents:
        of_documents, same = documents(batch, seqlen_q, rng)
        mask, shown = (of_documents & mask, shown & same) if rng.random() < 0.7 else (of_documents, same)
    return replace(call, block_mask=moved(mask, device), shown=shown.to(device))


CALLS: dict[str, Case] = {
    "plain": {},
    "grouped heads": {"nheads": 4, "nheads_k": 2, "head_dim_v": 8},
    "causal, sink": {"causal": True, "sink": True},
    "window, softcap": {"window_size": (90, 250), "softcap": 2.0},
}


@each_of("options", CALLS)
@pytest.mark.parametrize(
    ("backend", "dtypes", "shape"),
    [
        ("portable", [torch.float32, torch.float64], {}),
        *(
            pytest.param("sm90", [torch.bfloat16], {"head_dim": d, "head_dim_v": d}, marks=needs_kernels)
            for d in (64, 128, 256)
        ),
    ],
    ids=["portable", "sm90-64", "sm90-128", "sm90-256"],
)
def test_windows_and_documents(
    backend: str, dtypes: list[torch.dtype], shape: Case, options: Case, fuzz_seconds: float
) -> None:
    """Results are the oracle's, and nothing but padding beside a sink makes tables."""
    for count, rng in draws(f"{shape} {options}", fuzz_seconds / 2):
        torch.manual_seed(count)
        call = drawn(rng, DEVICES[backend], dtype=rng.choice(dtypes), **options | shape)
        asked: Case = {"through_lse": count % 2 == 0, "deterministic": count % 3 == 0, "backend": backend}
        assert_matches_oracle(call, **asked)
        offsets = call.block_mask.offsets
        is_listed = call.learnable_sink is not None and offsets is not None and offsets.seqused is not None
        assert bool(call.block_mask._rows) == is_listed


IDS = torch.tensor([2] * 400 + [5] * 300 + [-1] * 100)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of calls that reach backends from now on."""
    from flash_attn_cute.calls import ops

    seen, original = [], ops.attention

    def spy(inputs: Any, *others: Any) -> Any:
        seen.append("lists" if inputs.block_mask is not None else "packed" if inputs.packed else "dense")
        return original(inputs, *others)

    monkeypatch.setattr(ops, "attention", spy)
    return seen


def test_what_calls_become(monkeypatch: pytest.MonkeyPatch) -> None:
    n, seen = 800, spied(monkeypatch)
    q = torch.randn(1, n, 2, 16)
    used = torch.tensor([700], dtype=torch.int32)
    every = torch.ones(n, n, dtype=torch.bool)
    causal, of_ids = BlockMask.causal(n, n), BlockMask.documents(IDS)
    offsets = torch.tensor([0, 300, 640], dtype=torch.int32)
    cases: list[tuple[BlockMask, dict[str, Any], str]] = [
        (causal, {}, "dense"),
        (causal & BlockMask.window(n, n, left=9), {"mask": every, "bias": every.float()}, "dense"),
        (causal, {"seqused_q": used, "seqused_k": used}, "lists"),
        (causal.with_order("auto"), {}, "dense"),
        (causal.with_order("spt"), {}, "lists"),
        (causal | BlockMask.prefix(n, n, 3), {}, "lists"),
        (of_ids, {}, "packed"),
        (BlockMask.documents(cu_seqlens=offsets, seqlen_q=n) & causal, {}, "packed"),
        (of_ids & causal, {"mask": every}, "lists"),
        (of_ids & causal, {"bias": every.float()}, "lists"),
        (of_ids & of_ids, {}, "lists"),
        (BlockMask.documents(IDS, IDS.clone()), {}, "lists"),
        (BlockMask.documents(IDS.flip(0)), {}, "lists"),  # padding comes first
        (BlockMask.documents(IDS.masked_fill(IDS < 0, 2)), {}, "lists"),  # the first one goes on
        (BlockMask.documents(torch.arange(n) // 100), {}, "lists"),  # short
    ]
    for mask, options, expected in cases:
        flash_attn_func(q, q, q, block_mask=mask, **options)
        assert seen.pop() == expected, (mask, options)
    sink, pair, ids = torch.randn(2), torch.randn(2, n, 2, 16), IDS.expand(2, -1)
    apart = torch.randn(2, 2, n, 16).transpose(1, 2)  # rows of one entry do not follow those of the other in memory
    others: list[tuple[Tensor, BlockMask, dict[str, Any], str]] = [
        (pair, BlockMask.documents(ids), {}, "packed"),
        (apart, BlockMask.documents(ids), {}, "lists"),
        (pair, BlockMask.documents(IDS), {}, "lists"),  # ids for both
        (q, of_ids, {"learnable_sink": sink}, "lists"),  # and padding
        (q, BlockMask.documents(IDS.clamp(min=7)), {"learnable_sink": sink}, "packed"),
    ]
    for x, mask, options, expected in others:
        flash_attn_func(x, x, x, block_mask=mask, **options)
        assert seen.pop() == expected, (mask, options)


def test_sides_of_several_windows() -> None:
    """The narrowest counts, on either side, of the mask and of the call."""
    n = 300
    q, k, v = (torch.randn(2, n, 2, 16) for _ in range(3))
    mask = BlockMask.window(n, n, left=40) & BlockMask.window(n, n, left=90, right=7) & BlockMask.window(n, n, right=20)
    expected = flash_attn_func(q, k, v, window_size=(40, 7))
    assert bitwise_equal(flash_attn_func(q, k, v, block_mask=mask), expected)
    assert bitwise_equal(flash_attn_func(q, k, v, block_mask=mask, window_size=(60, 12)), expected)
    narrower = flash_attn_func(q, k, v, block_mask=mask, window_size=(30, None), causal=True)
    assert bitwise_equal(narrower, flash_attn_func(q, k, v, window_size=(30, 0)))


def test_padding_is_zero_without_zero_padding() -> None:
    """Rows of padding documents are queries that see nothing, and not padding of a call."""
    q = torch.randn(1, 800, 2, 16)
    out, lse = flash_attn_func(q, q, q, block_mask=BlockMask.documents(IDS), zero_padding=False, return_lse=True)
    assert (out[:, 700:] == 0).all()
    assert lse[..., 700:].isneginf().all()


@refusals("""
flash_attn_func(x, x[:, :, [0, 1, 1]], x, block_mask=BlockMask.documents(IDS))
    ValueError: v: expected ... (1, 800, 3), got shape (1, 800, 2, 16)
flash_attn_func(x, x[:, 100:], x[:, 100:], block_mask=BlockMask.documents(IDS))
    ValueError: block_mask: expected one over (seqlen_q, seqlen_k)
flash_attn_func(x, x[..., 8:], x, block_mask=BlockMask.documents(IDS))
    ValueError: k: expected the head dimension of q, 16, got shape (1, 800, 2, 8)
""")
def test_wrong_calls_raise_as_dense_ones(call: str, error: str) -> None:
    assert_refused(call, error, globals() | {"x": torch.randn(1, 800, 2, 16)})


def test_explained() -> None:
    q = torch.randn(1, 800, 2, 64, dtype=torch.bfloat16)
    explained = explain(q, q, q, block_mask=BlockMask.documents(IDS) & BlockMask.causal(800, 800), gpu="sm90")
    assert explained.spec.packed
    assert explained.spec.window_right == 0
    assert not explained.spec.has_block_mask


def test_compiled() -> None:
    ids = [(torch.arange(800) >= at).long() for at in (300, 512, 700, 100, 640)]
    masks = [(BlockMask.documents(x) & BlockMask.causal(800, 800)).build() for x in ids]
    assert_compiles(attend, [(*torch.randn(3, 1, 800, 2, 16).requires_grad_().unbind(), mask) for mask in masks], 2)
    assert not any(mask._rows for mask in masks)


class Layer(torch.nn.Module):
    """Has its mask as an attribute, of which Dynamo takes numbers for constants."""

    mask: BlockMask

    def forward(self, x: Tensor) -> Tensor:
        """Attends as the mask says."""
        return attend(x, x, x, self.mask)


def test_documents_of_other_lengths_in_a_module() -> None:
    """Neither their number nor the bound on their lengths compiles anew, once both have changed."""
    layer = Layer()
    step, counter = compiled(layer, "eager")
    for rows in (512, 256, 128, 200, 1024):
        layer.mask = BlockMask.documents(torch.arange(1024)[None] // rows).build()
        x = torch.randn(1, 1024, 1, 8)
        torch.testing.assert_close(step(x), layer(x), rtol=0, atol=0)
    assert counter.frame_count == 2


def test_windows_are_made_in_compiled_functions() -> None:
    """They need nothing of what has to be built before."""

    def window(q: Tensor) -> Tensor:
        length = q.shape[1]
        return attend(q, q, q, BlockMask.causal(length, length) & BlockMask.window(length, length, left=5))

    assert_compiles(window, [[torch.randn(1, length, 2, 8)] for length in (20, 30, 40)], 2)


def test_graphs_want_what_has_been_built() -> None:
    """Windows need nothing, documents their offsets, and calls that read lists ask for these."""
    q, bias = torch.randn(1, 800, 2, 16), torch.zeros(800)
    of_ids, causal = BlockMask.documents(IDS), BlockMask.causal(800, 800)
    expected = flash_attn_func(q, q, q, block_mask=of_ids)
    fresh = BlockMask.documents(IDS)
    with as_if_captured():
        flash_attn_func(q, q, q, block_mask=causal)
        with pytest.raises(RuntimeError, match=r"expected one that has been built, .* call its build\(\) before"):
            flash_attn_func(q, q, q, block_mask=fresh)
    fresh.build()
    with as_if_captured():
        assert bitwise_equal(flash_attn_func(q, q, q, block_mask=fresh), expected)
        with pytest.raises(RuntimeError, match=r"built with its tables, .* call its build\(tables=True\) before"):
            flash_attn_func(q, q, q, block_mask=fresh, bias=bias)
    fresh.build(tables=True)
    with as_if_captured():
        flash_attn_func(q, q, q, block_mask=fresh, bias=bias)


def test_transformed() -> None:
    """torch.func's grad and vmap, whose slices have the mask in common."""
    mask = BlockMask.documents(IDS)
    q, k, v = (torch.randn(3, 1, 800, 2, 8, dtype=torch.float64) for _ in range(3))

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return flash_attn_func(q, k, v, block_mask=mask).square().sum()

    run = torch.vmap(torch.func.grad(loss), in_dims=(0, 0, 0, None))
    torch.testing.assert_close(run(q, k, v, mask), run(q, k, v, listed(mask)))
