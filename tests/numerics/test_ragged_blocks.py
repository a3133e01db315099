"""Selected blocks of which only the first rows are real (``BlockMask.from_indices(..., block_lengths=...)``)."""

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, explain, flash_attn_func
from flash_attn_cute.sparsity.indices import Indices
from tests.lib.checks import (
    Case,
    assert_compiles,
    assert_matches_oracle,
    assert_rows_reach_nothing,
    bitwise_equal,
    call_on,
    on_each_backend,
)
from tests.lib.masks import spread
from tests.lib.oracle import Call
from tests.lib.refusals import assert_refused, refusals


def real_rows(lengths: list[int], block: int) -> Tensor:
    return torch.cat([torch.arange(block) < length for length in lengths])


def drawn(rng: random.Random, block: int, backend: str, *, combined: bool) -> tuple[Call, Tensor]:
    """A call whose queries and keys have ragged blocks, and its real rows."""
    blocks = rng.randint(1, 640 // block)
    lengths = [rng.choice([0, 1, block // 2 + 3, block, block]) for _ in range(blocks)]
    real, rows = real_rows(lengths, block), blocks * block
    options: Case = {"nheads_k": 2, "causal": rng.random() < 0.3, "sink": rng.random() < 0.3}
    call = call_on(backend, [rows] * 2, packed=False, **options)
    device = call.q.device
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    sets = rng.choice([1, 2]), rng.choice([1, 2, 4])
    visible = torch.rand(*sets, blocks, blocks, generator=generator) < 0.4
    indices = torch.where(visible, torch.arange(blocks), -1)
    given: Any = torch.tensor(lengths) if rng.random() < 0.5 else lengths
    mask = BlockMask.from_indices(indices.to(device), block=block, seqlen_k=rows, block_lengths=given)
    shown = spread(visible, block, block, rows, rows) & real[:, None] & real
    if combined:
        mask &= BlockMask.window(rows, rows, left=200)
        shown &= torch.arange(rows)[:, None] - torch.arange(rows) <= 200
    return replace(call, block_mask=mask, shown=shown.to(device)), real.to(device)


@pytest.mark.parametrize("combined", [False, True], ids=["alone", "combined"])
@pytest.mark.parametrize("block", [64, 128, 256])
@on_each_backend
def test_ragged_blocks(backend: str, block: int, combined: bool) -> None:
    """Contents of padding reach nothing, and nothing is written there."""
    rng = random.Random(f"{block} {combined}")
    for _ in range(2):
        call, real = drawn(rng, block, backend, combined=combined)
        asked: Case = {"through_lse": call.learnable_sink is None, "backend": backend, "deterministic": True}
        assert_matches_oracle(call, **asked)
        if not real.all() and real.any():
            padding = ~real.expand(2, -1)
            assert_rows_reach_nothing(call, padding, padding, **asked)


def test_whole_blocks() -> None:
    """Lengths that leave nothing out change no bit."""
    q, k, v = torch.randn(3, 1, 320, 2, 8)
    indices = torch.rand(1, 2, 5, 5).argsort(-1)[..., :2]
    outs = [
        flash_attn_func(
            q, k, v, block_mask=BlockMask.from_indices(indices, block=64, seqlen_k=320, block_lengths=lengths)
        )
        for lengths in (None, [64] * 5)
    ]
    assert bitwise_equal(*outs)


def test_copies() -> None:
    """A pickle and a copy on another device have the lengths."""
    q, k, v = torch.randn(3, 1, 256, 2, 8)
    indices = torch.rand(1, 2, 4, 4).argsort(-1)[..., :2]
    mask = BlockMask.from_indices(indices, block=64, seqlen_k=256, block_lengths=[64, 48, 64, 16])
    out = flash_attn_func(q, k, v, block_mask=mask)
    assert (out[0, 112:128] == 0).all()
    assert bitwise_equal(flash_attn_func(q, k, v, block_mask=pickle.loads(pickle.dumps(mask))), out)
    moved = mask.to("meta")._node
    assert isinstance(moved, Indices)
    assert moved.lengths is not None
    assert moved.lengths.is_meta


def test_compiled() -> None:
    """New indices, and the same lengths, compile nothing anew."""
    q, k, v = torch.randn(3, 1, 256, 2, 8)

    def step(indices: Tensor) -> Tensor:
        mask = BlockMask.from_indices(indices, block=64, seqlen_k=256, block_lengths=[64, 48, 64, 16])
        return flash_attn_func(q, k, v, block_mask=mask)

    assert_compiles(step, [[torch.rand(1, 2, 4, 4).argsort(-1)[..., :2]] for _ in range(3)], 1, "eager")


def test_hopper_serves_them() -> None:
    """By the kernels of all block masks, as those of blocks of 64 read whole ones."""
    q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="meta")
    indices = torch.zeros(1, 1, 4, 1, dtype=torch.int32, device="meta")
    masks = [
        BlockMask.from_indices(indices, block=64, seqlen_k=256, block_lengths=lengths)
        for lengths in (None, [64, 9] * 2)
    ]
    assert [mask.half_blocks for mask in masks] == [True, False]
    assert [explain(q, q, q, block_mask=mask, gpu="sm90").backend for mask in masks] == ["sm90", "sm90"]


def made(lengths: Any, **options: Any) -> BlockMask:
    given: Case = {"block": 64, "seqlen_k": 192}
    return BlockMask.from_indices(torch.zeros(1, 1, 3, 1).long(), block_lengths=lengths, **given | options)


@refusals("""
made("abc")
    TypeError: block_lengths: expected ints or a tensor of them, got 'abc'
made([64.0, 1, 1])
    TypeError: block_lengths: expected ints or a tensor of them, got [64.0, 1, 1]
made(torch.ones(3))
    TypeError: block_lengths: expected int32 or int64, got torch.float32
made(torch.ones(3, 1).long())
    ValueError: block_lengths: expected shape (blocks,), got shape (3, 1)
made(torch.ones(3).long().to("meta"))
    ValueError: ... expected lengths on the host, got a tensor on meta
made([64, 1])
    ValueError: ... expected a length for each block, of queries and keys alike, got 2 of 64 x
made([64, 1, 9], seqlen_k=191)
    ValueError: ... got 3 of 64 x 64 for 192 queries and 191 keys
made([64, 1, 65])
    ValueError: block_lengths: expected 0 to 64, got 1 to 65
made([64, -1, 1])
    ValueError: block_lengths: expected 0 to 64, got -1 to 64
BlockMask.from_indices(torch.zeros(1, 1, 66, 1).long(), block=64, seqlen_k=66 * 64, block_lengths=[*range(64), 0, 0])
    ValueError: block_lengths: expected at most 32 different lengths in blocks of 128 rows, got 33
""")
def test_errors(call: str, error: str) -> None:
    assert_refused(call, error, globals())
