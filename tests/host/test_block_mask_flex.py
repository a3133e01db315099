"""Block masks from FlexAttention's, and back."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from flash_attn_cute import BlockMask
from tests.lib.masks import LENGTHS, equal_tables, positions, random_mask, spelled_out, spread, tables_of


def document_causal(ids: Tensor) -> Any:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    return mask_mod


def per_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ((q - k).abs() < 100 * (h + 1)) | (b * k < 40)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "block"),
    [
        (512, 512, 128),
        (300, 500, 128),
        (300, 500, 256),
        (513, 257, 256),
        (513, 257, (128, 256)),
        (512, 512, 64),
        (513, 257, 64),
    ],
)
def test_from_flex(seqlen_q: int, seqlen_k: int, block: Any) -> None:
    ids = torch.arange(600) // 170
    for mod, batch, heads in ((document_causal(ids), None, None), (per_head, 2, 3)):
        flex = create_block_mask(mod, batch, heads, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=block)
        expected = create_mask(mod, batch, heads, seqlen_q, seqlen_k, device="cpu")
        made = BlockMask.from_flex(flex)
        assert torch.equal(spelled_out(tables_of(made), seqlen_q, seqlen_k), expected)
        same = BlockMask.from_function(mod, seqlen_q, seqlen_k, batch=batch, heads=heads)
        assert equal_tables(made, same, BlockMask.from_dense(expected))


def test_from_flex_with_garbage_behind_the_counts() -> None:
    """And without full blocks."""
    counts = torch.tensor([[[2, 1, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 77], [1, 1, -5], [0, 1, 2]]]], dtype=torch.int32)
    flex = FlexBlockMask.from_kv_blocks(counts, indices.clamp(0, 2), mask_mod=lambda b, h, q, k: q < k + 300)
    flex.kv_indices = indices
    shown = spelled_out(tables_of(BlockMask.from_flex(flex)), 384, 384)[0, 0]
    i, j = positions(384, 384)
    visible = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    assert torch.equal(shown, spread(visible, 128, 128, 384, 384) & (i < j + 300))


@pytest.mark.parametrize("seed", range(8))
def test_to_flex(seed: int) -> None:
    rng = random.Random(seed)
    made = random_mask(rng.choice(LENGTHS), rng.choice(LENGTHS), rng, rng.choice([(1, 1), (2, 3)]))
    flex = made.mask.to_flex()
    shown = create_mask(flex.mask_mod, *made.mask.sizes, device="cpu")
    assert torch.equal(shown, made.shown)
    assert torch.equal(spelled_out(tables_of(BlockMask.from_flex(flex)), *made.shown.shape[2:]), made.shown)
    assert flex.seq_lengths == tuple(made.shown.shape[2:])
    # Its columns, too, which it has made of the rows.
    assert flex.q_num_blocks is not None
    assert flex.full_q_num_blocks is not None
    tables = tables_of(made.mask)
    assert tables.columns is not None
    assert torch.equal(flex.q_num_blocks + flex.full_q_num_blocks, tables.columns.spans[1, ..., 1])
