"""Rows of no document under a block mask: exact zeros in every result, and whatever they hold reaches nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.backends.cute.backend import CuteBackend
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from tests.lib.checks import (
    DEVICES,
    DTYPES,
    Case,
    assert_rows_reach_nothing,
    compiled,
    each_of,
    needs_kernels,
    on_each_backend,
    packed_or_dense,
    random_call,
    run,
    same_bits,
    with_gradients,
)
from tests.lib.masks import attend, listed
from tests.lib.oracle import Call
from tests.lib.waits import assert_captured

BATCH, ROWS = 2, 300


class Masked(NamedTuple):
    """A mask, and which queries and keys are padding under it: (batch or 1, rows), bool."""

    mask: BlockMask
    queries: Tensor
    keys: Tensor


def ids(average: int, device: str, batch: int = BATCH, rows: int = ROWS) -> Tensor:
    """(batch, rows): documents of that many rows on average, with padding before, between and behind them."""
    documents = torch.arange(rows) // average
    found = torch.where(torch.rand(batch, rows // average + 1)[:, documents] < 0.3, -1, documents)
    found[:, :3], found[:, rows // 2 : rows // 2 + 9], found[:, -7:] = -1, -2, -3
    return found.to(device)


def of(ids_q: Tensor, ids_k: Tensor | None = None) -> Masked:
    """Documents, and their rows of negative ids."""
    queries, keys = (torch.atleast_2d(x) < 0 for x in (ids_q, ids_q if ids_k is None else ids_k))
    return Masked(BlockMask.documents(ids_q, ids_k), queries, keys)


def both(a: Masked, b: Masked) -> Masked:
    """Two masks of documents joined by ``|``: padding is what is padding to both."""
    return Masked(a.mask | b.mask, a.queries & b.queries, a.keys & b.keys)


def short(device: str) -> Masked:
    """Documents of 20 rows on average, too few for packed sequences to serve them."""
    return of(ids(20, device))


def long(device: str) -> Masked:
    """Documents of so many rows that packed sequences serve them."""
    return of(torch.tensor([[0] * 150 + [1] * 120 + [-1] * 30, [-1] * 300], device=device))


def offsets(device: str) -> Masked:
    """Documents by offsets that leave rows out at either end."""
    cu_seqlens = torch.tensor([20, 50, 50, 61, 250], dtype=torch.int32, device=device)
    padding = torch.ones(1, ROWS, dtype=torch.bool, device=device)
    padding[:, 20:250] = False
    return Masked(BlockMask.documents(cu_seqlens=cu_seqlens, seqlen_q=ROWS), padding, padding)


def narrowed(device: str, other: Callable[[int, int], BlockMask]) -> Masked:
    """Short documents and another mask."""
    made = short(device)
    return made._replace(mask=made.mask & other(ROWS, ROWS))


def whole_blocks(device: str) -> Masked:
    """Padding that fills a block, in one batch entry of two."""
    found = ids(20, device)
    found[0, 128:256] = -1
    return of(found)


def beside_heads(device: str) -> Masked:
    """Blocks that some heads see, and some of the documents in all of them."""
    made, shown = short(device), torch.rand(1, 2, 3, 3, device=device) < 0.6
    return made._replace(mask=made.mask & BlockMask.from_blocks(shown, seqlen_q=ROWS, seqlen_k=ROWS))


def in_another_order(device: str) -> Masked:
    """Short documents, their key blocks launched in another order."""
    made = short(device)
    return made._replace(mask=made.mask.with_order("spt"))


def hidden_blocks(device: str) -> Masked:
    """A mask without documents, of which whole blocks of queries and of keys are hidden."""
    shown = torch.ones(3, 3, dtype=torch.bool, device=device)
    shown[1], shown[:, 2] = False, False
    queries, keys = (torch.zeros(1, ROWS, dtype=torch.bool, device=device) for _ in range(2))
    queries[:, 128:256], keys[:, 256:] = True, True
    return Masked(BlockMask.from_blocks(shown, seqlen_q=ROWS, seqlen_k=ROWS), queries, keys)


def beside_prefix(device: str) -> Masked:
    """Every query sees the first 5 keys, also one of no document; the other keys of no document are padding."""
    made = short(device)
    keys = made.keys.clone()
    keys[:, :5] = False
    return Masked(made.mask | BlockMask.prefix(ROWS, ROWS, 5), torch.zeros_like(made.queries), keys)


MASKS: dict[str, Callable[[str], Masked]] = {
    "short": short,
    "long": long,
    "shared by the batch": lambda device: of(ids(20, device)[0]),
    "offsets": offsets,
    "causal": lambda device: narrowed(device, BlockMask.causal),
    "window": lambda device: narrowed(device, lambda q, k: BlockMask.window(q, k, left=40, right=3)),
    "order": in_another_order,
    "of keys": lambda device: of(ids(20, device), ids(15, device, rows=200)),
    "whole blocks": whole_blocks,
    "one or the other": lambda device: both(short(device), short(device)),
    "beside heads": beside_heads,
    "beside a prefix": beside_prefix,
    "hidden blocks": hidden_blocks,
}


def call_under(made: Masked, backend: str, **options: Any) -> tuple[Call, Tensor, Tensor]:
    """A random call under a mask, and its rows of padding."""
    given: Case = {"packed": False, "dtype": DTYPES[backend], "device": DEVICES[backend]} | options
    call = random_call([made.queries.shape[1]] * BATCH, [made.keys.shape[1]] * BATCH, **given)
    return replace(call, block_mask=made.mask), made.queries.expand(BATCH, -1), made.keys.expand(BATCH, -1)


@on_each_backend
@each_of("make", MASKS)
def test_masks(make: Callable[[str], Masked], backend: str) -> None:
    made = make(DEVICES[backend])
    call, queries, keys = call_under(made, backend)
    assert queries.any() or keys.any()
    assert_rows_reach_nothing(call, queries, keys, through_lse=True, deterministic=True, backend=backend)
    assert run(call, return_lse=True, backend=backend)[1].transpose(1, 2)[queries].isneginf().all()


OPTIONS: dict[str, Case] = {
    "gqa": {"nheads": 4, "nheads_k": 2, "head_dim_v": 8},
    "causal": {"causal": True},
    "window": {"window_size": (50, 20), "nheads": 4, "nheads_k": 2},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": True},
    "sink and causal": {"sink": True, "causal": True},
    "bias": {"bias": (1, 1, 1, 1)},
    "broadcast bias": {"bias": (1, 0, 1)},
    "mask": {"mask": (1, 1, 1)},
    "d128": {"head_dim": 128},
    "d192": {"head_dim": 192, "head_dim_v": 128},
    "d256": {"head_dim": 256, "causal": True},
}


@on_each_backend
@each_of("options", OPTIONS)
def test_options(options: Case, backend: str) -> None:
    call, queries, keys = call_under(short(DEVICES[backend]), backend, **options)
    if backend != "portable" and call.mask is not None:
        pytest.skip("no kernel has a mask beside a block mask")
    assert_rows_reach_nothing(call, queries, keys, deterministic=True, backend=backend)


@on_each_backend
@packed_or_dense
def test_beside_sequences_and_lengths(packed: bool, backend: str) -> None:
    """Rows of sequences that belong to no document."""
    device = DEVICES[backend]
    call = random_call(
        [130, 60, 70], packed=packed, seqused=True, causal=True, dtype=DTYPES[backend], device=device, head_dim=64
    )
    made = of(*(ids(20, device, *((1, x.shape[0]) if packed else x.shape[:2])) for x in (call.q, call.k)))
    queries, keys = (x[0] if packed else x for x in made[1:])
    call = replace(call, block_mask=made.mask)
    assert_rows_reach_nothing(call, queries, keys, through_lse=True, deterministic=True, backend=backend)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"seqused": True}, {"packed": True}], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kernels_get_zeros(name: str, options: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get zeros in the padding, in both passes. This needs no GPU."""
    kernels = CuteBackend(ARCHITECTURES[name])
    given: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> None:
        given.append(arguments)
        raise NotImplementedError

    monkeypatch.setattr(kernels, "_launch_forward", launch)
    monkeypatch.setattr(kernels, "_launch_backward", launch)
    shape: Case = {"dtype": torch.bfloat16, "nheads": 4, "nheads_k": 2, "packed": False}
    call = random_call([ROWS] * 2, **shape | options)
    is_packed = call.cu_seqlens_q is not None
    made = of(*(ids(20, "cpu", 1, x.shape[-3]) for x in (call.q, call.k)))
    queries, keys = (x[0] if is_packed else x.expand(BATCH, -1) for x in made[1:])
    q, k, v = (x.detach().clone() for x in call.qkv)
    q[queries], k[keys], v[keys] = torch.nan, torch.inf, -torch.inf
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
    inputs = AttentionInputs(q, k, v, *lengths, None, None, None, ROWS, ROWS, made.mask.tables(q.device, backward=True))
    spec = AttentionSpec.of(inputs, Options(None, None, 0 if call.causal else None, 0.0, False, True))
    with pytest.raises(NotImplementedError):
        kernels._forward(spec, inputs)
    with pytest.raises(NotImplementedError):
        kernels._backward(BackwardCall(spec, inputs, q, q[..., 0].mT, q))
    (_, forward, *_), (passed, *_) = given
    backward = passed.inputs
    for x, padding in (
        *((x, made.queries) for x in (forward.q, backward.q, passed.dout)),
        *((x, made.keys) for each in (forward, backward) for x in (each.k, each.v)),
    ):
        assert x.isfinite().all()
        assert (x[padding.expand(len(x), -1)] == 0).all()
        assert x.any()


def test_control() -> None:
    """Rows of documents do reach others."""
    call, queries, keys = call_under(short("cpu"), "portable")
    with pytest.raises(AssertionError, match="depends on rows"):
        assert_rows_reach_nothing(call, ~queries, ~keys)


def test_nothing_is_done_without_padding() -> None:
    """Masks whose rows all belong to documents, or are shown by another mask, know of none."""
    found = ids(20, "cpu")
    padded = BlockMask.documents(found)
    everything = BlockMask.from_blocks(torch.ones(3, 3, dtype=torch.bool), seqlen_q=ROWS, seqlen_k=ROWS)
    for mask, is_padded in (
        (padded, True),
        (padded & everything, True),
        (BlockMask.documents(found.clamp(min=0)), False),
        (padded | everything, False),
        (BlockMask.causal(ROWS, ROWS), False),
        (BlockMask.prefix(ROWS, ROWS, 5), False),
    ):
        assert (mask.tables(torch.device("cpu"), backward=False).real is not None) == is_padded


def test_compiled() -> None:
    """Padding differs from mask to mask: one program serves all that have some, another one those without."""
    step, counter = compiled(attend)
    for seed, has_padding in enumerate((True, True, False, True, False)):
        torch.manual_seed(seed)
        found = ids(20, "cpu") if has_padding else ids(20, "cpu").clamp(min=0)
        mask, padding = listed(BlockMask.documents(found)).build("cpu"), found < 0
        q, k, v = (torch.randn(BATCH, ROWS, 2, 16) for _ in range(3))
        for x in (q, k, v):
            x[padding] = torch.nan
            x.requires_grad_()
        out = step(q, k, v, mask)
        grads = torch.autograd.grad(
            out, (q, k, v), torch.ones_like(out).masked_fill(padding[..., None, None], torch.inf)
        )
        for x in (out, *grads):
            assert x.isfinite().all()
            assert (x[padding] == 0).all()
    assert counter.frame_count == 2


@needs_kernels
def test_captured() -> None:
    """A graph zeroes padding in every replay, whatever has been written to it."""
    made = short("cuda")
    mask = made.mask.build()
    q, k, v = (torch.randn(BATCH, ROWS, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def both_passes() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, block_mask=mask, deterministic=True, backend="sm90")
        return with_gradients(out, leaves, q)

    expected = both_passes()

    def poison() -> None:
        for x in (q, k, v):
            x[made.queries] = torch.nan

    assert_captured(both_passes, poison)
    assert same_bits(both_passes(), expected)
