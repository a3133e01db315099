"""Block masks in the kernels: against the oracle, in every launch order, bit by bit."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, explain
from tests.lib.checks import (
    Case,
    assert_matches_oracle,
    assert_results_close,
    bitwise_equal,
    both_passes,
    call_on,
    differing,
    draws,
    each_of,
    needs_kernels,
    packed_or_dense,
    run,
    same_bits,
)
from tests.lib.masks import assert_masks_are_captured, listed, masked, spread
from tests.lib.oracle import Call

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 192, 257, 300, 385, 520)


def of_lengths(rng: random.Random, options: Case, most: int = 3, *longer: int) -> Call:
    """A dense call of up to so many entries."""
    batch, seqlen_q, seqlen_k = rng.randint(1, most), rng.choice(LENGTHS), rng.choice((*LENGTHS, *longer))
    return call_on("sm90", [seqlen_q] * batch, [seqlen_k] * batch, **{"packed": False, "nheads": 2} | options)


HALF_BLOCKS: dict[str, Case] = {
    "d128": {"head_dim": 128},
    "d64 gqa": {"head_dim": 64, "nheads": 4, "nheads_k": 2},
    "d96 softcap": {"head_dim": 80, "softcap": 3.0},
    "d128 gqa sink": {"head_dim": 128, "nheads": 6, "nheads_k": 2, "sink": True},
    "two head dims": {"head_dim": 128, "head_dim_v": 64, "dtype": torch.float16},
    "bias": {"head_dim": 64, "bias": (1, 0, 1)},
    "d192": {"head_dim": 192},
    "causal": {"head_dim": 128, "causal": True},
}


def half_blocks(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> tuple[BlockMask, Tensor]:
    """A mask of random blocks of 64 queries or keys, from a map or from indices, and element by element."""
    block_q, block_k = rng.choice([(64, 64), (64, 64), (64, 128), (128, 64), (64, 192)])
    shape = (*sets, -(-seqlen_q // block_q), -(-seqlen_k // block_k))
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))) < rng.choice(
        [0.05, 0.25, 0.6, 1]
    )
    shown = spread(visible, block_q, block_k, seqlen_q, seqlen_k).cuda()
    visible = visible.cuda()
    if block_k != 192 and rng.random() < 0.5:
        indices, counts = visible.int().argsort(dim=-1, descending=True, stable=True), visible.sum(-1)
        given: Case = {"block": (block_q, block_k), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        mask = BlockMask.from_indices(indices, counts, **given)
    else:
        mask = BlockMask.from_blocks(visible, (block_q, block_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    if rng.random() < 0.5:
        mask = mask & BlockMask.causal(seqlen_q, seqlen_k)
        shown = shown & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda").tril(seqlen_k - seqlen_q)
    assert mask.half_blocks
    return mask, shown


@needs_kernels
@each_of("options", HALF_BLOCKS)
def test_blocks_of_64(options: Case, fuzz_seconds: float) -> None:
    """Warpgroups and CTAs go over half blocks of their own, also where some kernel takes whole blocks instead."""
    for count, rng in draws(f"half blocks {options}", 4 * fuzz_seconds):
        torch.manual_seed(count)
        call = of_lengths(rng, options, 2, 1100)
        sets = rng.choice([1, len(call.q)]), rng.choice([1, call.q.shape[2], call.k.shape[2]])
        call = masked(call, *half_blocks(call.q.shape[1], call.k.shape[1], rng, sets))
        assert_matches_oracle(call, through_lse=count % 3 == 0, deterministic=count % 2 == 0, backend="sm90")


@needs_kernels
def test_64_keys_without_queries() -> None:
    """Their dK and dV are zero, and what stands in them reaches nothing, though others of their 128 keys are seen."""
    visible = torch.rand(1, 2, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[..., 4], visible[..., 7], visible[:, :, 3] = False, False, False
    mask = BlockMask.from_blocks(visible.cuda(), 64, seqlen_q=560, seqlen_k=530)
    call = replace(call_on("sm90", [560], [530], packed=False, nheads=2, head_dim=128), block_mask=mask)
    for x in (call.k, call.v):
        x.data[:, 256:320] = torch.nan
        x.data[:, 448:512] = torch.inf
    for deterministic in (False, True):
        out = run(call, deterministic=deterministic, backend="sm90")
        dout = torch.randn_like(out)
        dout[:, 192:256] = torch.nan
        dq, dk, dv = torch.autograd.grad(out, call.qkv, dout)
        assert all(x.isfinite().all() for x in (dq, dk, dv))
        assert (dq[:, 192:256] == 0).all()
        assert all((x[:, keys] == 0).all() for x in (dk, dv) for keys in (slice(256, 320), slice(448, 512)))


@needs_kernels
def test_blocks_of_64_with_outliers() -> None:
    """Heads with outliers are summed in float32, in turns, which halves of a block of keys take one after the other."""
    visible = torch.rand(1, 4, 20, 20, generator=torch.Generator().manual_seed(2)) < 0.3
    mask = BlockMask.from_blocks(visible.cuda(), 64)
    call = call_on("sm90", [1280], packed=False, head_dim=128)
    call.k.data[:, ::97, :2, 5] *= 1e4  # of two heads
    call.v.data[:, ::89, :2, 3] *= 1e4
    call.q.data[..., 5] = 0
    call = masked(call, mask, spread(visible, 64, 64, 1280, 1280))
    assert_matches_oracle(call, deterministic=True, backend="sm90")


def test_which_kernel_blocks_of_64_get() -> None:
    """The constructors of a mask decide, not its tables, which are on the device."""
    q, visible = torch.randn(1, 512, 2, 128, dtype=torch.bfloat16), torch.rand(1, 2, 8, 8) < 0.5
    indices = visible.int().argsort(-1)[..., :3]
    of_64, of_128 = BlockMask.from_blocks(visible, 64), BlockMask.from_blocks(visible[..., :4, :4], 128)
    bias = torch.zeros(512, 512, dtype=torch.bfloat16)
    cases: list[tuple[BlockMask, dict[str, Any], bool, bool]] = [
        (of_64, {}, True, True),
        (of_64, {"deterministic": True}, True, True),
        (of_64 & BlockMask.causal(512, 512), {"softcap": 2.0}, True, True),
        (BlockMask.from_indices(indices, block=64, seqlen_k=512), {}, True, True),
        (BlockMask.from_indices(visible.int().argsort(-1)[..., :5], block=64, seqlen_k=512), {}, True, False),
        (BlockMask.from_indices(indices[:, :, :4], block=(128, 64), seqlen_k=512), {}, True, True),
        (BlockMask.from_indices(indices[..., :2] // 2, block=(64, 128), seqlen_k=512), {}, True, False),
        (of_64, {"bias": bias}, False, False),
        (of_64, {"causal": True}, False, False),
        (of_128, {}, False, False),
        (BlockMask.from_indices(indices[:, :, :4, :1], seqlen_k=512), {}, False, False),
        (BlockMask.from_indices(indices[:, :, :4, :1], seqlen_k=512), {"deterministic": True}, False, True),
        (BlockMask.from_blocks(visible[..., :5, :5], 100, seqlen_q=500, seqlen_k=500), {}, False, False),
    ]
    for mask, options, forward, backward in cases:
        x = q[:, : mask.seqlen_q]
        explained = explain(x, x, x, block_mask=mask, gpu="sm90", **options)
        assert explained.forward is not None
        assert explained.backward is not None
        assert explained.forward.config.features.half_blocks == forward
        assert explained.backward.config.features.half_columns == backward
        assert (explained.backward.config.tile_n == 64) == backward


def irregular(heads: int, blocks: int) -> BlockMask:
    visible = torch.rand(1, heads, blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.3
    return BlockMask.from_blocks(visible.cuda())


@needs_kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("order", ["default", "spt", "permutation", "random"])
def test_same_bits_in_every_order(order: str, head_dim: int, repetitions: int) -> None:
    """Tiles wait for their turns, whatever the order and however they are delayed by what else the GPU does."""
    heads, blocks = 4, 12
    mask = irregular(heads, blocks)
    if order == "random":
        mask = mask.with_order(torch.stack([torch.randperm(blocks) for _ in range(heads)])[None].cuda())
    else:
        mask = mask.with_order(order)
    call = replace(call_on("sm90", [blocks * 128] * 2, packed=False, head_dim=head_dim), block_mask=mask)
    both = both_passes(call, torch.randn_like(call.q), deterministic=True, backend="sm90")
    expected = both()
    assert not differing(expected, both, repetitions)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    with torch.cuda.stream(other):
        for _ in range(repetitions):
            noise = (noise @ noise).clamp(-1, 1)
    assert not differing(expected, both, repetitions)


@needs_kernels
def test_one_mask_by_two_constructors() -> None:
    """Masks from two constructors give the same bits, as their lists are equal, if no order is asked for.

    With ``deterministic=True`` they do, too, but for dQ, which is summed in fixed point under masks that are not known
    to be regular.
    """
    length = 1000
    masks = (
        listed(BlockMask.causal(length, length)),
        BlockMask.from_function(lambda b, h, q, k: k <= q, length, length, device="cuda"),
        BlockMask.from_dense(torch.ones(length, length, dtype=torch.bool, device="cuda").tril()),
    )
    call = call_on("sm90", [length] * 2, packed=False, nheads=2, head_dim=128)
    dout = torch.randn_like(call.q)
    first, *others = (
        both_passes(replace(call, block_mask=mask), dout, deterministic=True, backend="sm90")() for mask in masks
    )
    for other in others:
        assert same_bits(*([each[name] for name in ("out", "lse", "dk", "dv")] for each in (first, other)))
        assert_results_close(replace(call, causal=True), {"dq": other["dq"]}, dout)
    assert bitwise_equal(*(other["dq"] for other in others))


@needs_kernels
@pytest.mark.parametrize("from_indices", [False, True], ids=["built", "from indices"])
def test_the_host_never_waits(from_indices: bool) -> None:
    """In a call with a mask that has been used, or in one whose blocks are chosen anew. Graphs capture both."""
    chosen = torch.rand(1, 2, 4, 4, device="cuda").argsort(-1)[..., :2].contiguous()
    kept = listed(BlockMask.window(512, 512, left=100, right=0))

    def make() -> BlockMask:
        return BlockMask.from_indices(chosen, seqlen_k=512) if from_indices else kept

    def change() -> None:
        chosen.copy_(torch.rand(1, 2, 4, 4, device="cuda").argsort(-1)[..., :2])

    assert_masks_are_captured("sm90", make, change)


def test_calls_that_kernels_do_not_serve() -> None:
    """The reason is named on any machine; without a request for these kernels another backend serves the call."""
    mask = listed(BlockMask.causal(300, 300))
    q = torch.randn(1, 300, 2, 64, dtype=torch.bfloat16)
    used, bias = torch.tensor([200], dtype=torch.int32), torch.randn(300, 300)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mask": torch.ones(300, 300, dtype=torch.bool)}, "block_mask beside mask"),
        ({"seqused_q": used, "bias": bias}, "block_mask and bias beside cu_seqlens, seqused or a window of these"),
    ]
    for options, reason in cases:
        explained = explain(q, q, q, block_mask=mask, gpu="sm90", **options)
        assert explained.backend == "portable"
        assert reason in explained.passed_over["sm90"]


@pytest.mark.parametrize("options", [{}, {"seqused_k": torch.tensor([200], dtype=torch.int32)}, {"causal": True}])
@packed_or_dense
def test_sequences_beside_a_mask_are_intervals(packed: bool, options: Case) -> None:
    q = torch.randn(1, 300, 2, 64, dtype=torch.bfloat16)
    offsets: dict[str, Any] = {}
    if packed:
        cu = torch.tensor([0, 300], dtype=torch.int32)
        q, offsets = q[0], {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300}
    explained = explain(q, q, q, block_mask=listed(BlockMask.causal(300, 300)), gpu="sm90", **offsets, **options)
    assert explained.backend == "sm90"
    for planned in (explained.forward, explained.backward):
        assert planned is not None
        assert not planned.packed
        assert planned.config.features.intervals == (packed or bool(options))


def test_additions_are_ordered_under_low_contention() -> None:
    """Under regular masks that is faster, so that additions are ordered even if determinism is not asked for."""
    q = torch.randn(1, 512, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    blocks = torch.ones(4, 4, dtype=torch.bool)
    for mask, ordered in (
        (listed(BlockMask.window(512, 512, left=100)), True),
        (listed(BlockMask.causal(512, 512) & BlockMask.documents(torch.arange(512) // 100)), True),
        (BlockMask.prefix_lm(512, 512, 100), True),
        (BlockMask.prefix_lm(512, 512, 100).with_order("spt"), False),
        (BlockMask.from_blocks(blocks), False),
        (BlockMask.causal(512, 512) & BlockMask.from_blocks(blocks), False),
    ):
        for deterministic in (False, True):
            explained = explain(q, q, q, block_mask=mask, deterministic=deterministic, gpu="sm90")
            assert explained.backward is not None
            assert explained.backward.deterministic == (ordered or deterministic)
