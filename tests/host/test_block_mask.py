"""Block masks against the same masks element by element, however they are constructed and composed."""

import random
from unittest import mock

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.sparsity.dq_order import launch_orders
from tests.lib.masks import (
    KINDS,
    LENGTHS,
    TILE,
    Made,
    columns_spelled_out,
    equal_tables,
    launch_order,
    positions,
    random_mask,
    spelled_out,
    spread,
    tables_of,
)

CPU = torch.device("cpu")


def check(made: Made) -> None:
    mask, shown = made
    assert (mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k) == shown.shape
    assert torch.equal(spelled_out(tables_of(mask), mask.seqlen_q, mask.seqlen_k), shown)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_constructors(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    check(KINDS[kind](rng.choice(LENGTHS), rng.choice(LENGTHS), rng, rng.choice([(1, 1), (2, 1), (1, 3), (2, 3)])))


@pytest.mark.parametrize("seed", range(60))
def test_compositions(seed: int) -> None:
    rng = random.Random(seed)
    check(random_mask(rng.choice(LENGTHS), rng.choice(LENGTHS), rng, rng.choice([(1, 1), (2, 1), (1, 3), (2, 3)])))


@pytest.mark.parametrize("side", [0, 1, 126, 127, 128, 129, 254, 255, 256, 257])
def test_edges_of_windows(side: int) -> None:
    """Where a block has one element that is visible, or one that is hidden."""
    for seqlen_q, seqlen_k in ((384, 384), (300, 384), (384, 257)):
        i, j = positions(seqlen_q, seqlen_k)
        i = i + seqlen_k - seqlen_q
        check(Made(BlockMask.window(seqlen_q, seqlen_k, left=side), (j >= i - side)[None, None]))
        check(Made(BlockMask.window(seqlen_q, seqlen_k, right=side), (j <= i + side)[None, None]))


@pytest.mark.parametrize("size", [1, 17, 33, 63, 64, 96, 100, 127, 128, 129, 192, 200, 256])
def test_blocks_of_any_size(size: int) -> None:
    """However many of them a block of 128 lies in."""
    blocks = -(-640 // size)
    for share in (0.03, 0.5, 0.95):
        visible = torch.rand(1, 1, blocks, blocks, generator=torch.Generator().manual_seed(size)) < share
        shown = spread(visible, size, size, 640, 640)
        check(Made(BlockMask.from_blocks(visible, size, seqlen_q=640, seqlen_k=640), shown))


@pytest.mark.parametrize("block_k", [64, 128, 256])
@pytest.mark.parametrize("block_q", [64, 128, 256])
def test_indices_of_blocks_of_any_size(block_q: int, block_k: int) -> None:
    """Whole and cut last blocks; halves and quarters of blocks of 128 that are visible alone."""
    generator = torch.Generator().manual_seed(block_q + block_k)
    for seqlen_q, seqlen_k in ((512, 512), (500, 400), (65, 700)):
        blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
        indices = torch.rand(2, 3, blocks_q, blocks_k, generator=generator).argsort(-1)[..., : max(1, blocks_k // 3)]
        visible = torch.zeros(2, 3, blocks_q, blocks_k, dtype=torch.bool).scatter_(-1, indices, True)
        mask = BlockMask.from_indices(indices, block=(block_q, block_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        check(Made(mask, spread(visible, block_q, block_k, seqlen_q, seqlen_k)))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 0), (0, 200), (200, 0)])
def test_nothing_to_see(seqlen_q: int, seqlen_k: int) -> None:
    for mask in (
        BlockMask.causal(seqlen_q, seqlen_k),
        BlockMask.documents(torch.zeros(seqlen_q, dtype=torch.int64), torch.zeros(seqlen_k, dtype=torch.int64)),
        BlockMask.from_dense(torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)),
        BlockMask.from_function(lambda b, h, q, k: q >= k, seqlen_q, seqlen_k),
        BlockMask.from_indices(
            torch.zeros(1, 2, -(-seqlen_q // TILE), 3, dtype=torch.int64), seqlen_q=seqlen_q, seqlen_k=seqlen_k
        ),
    ):
        tables = tables_of(mask)
        assert not spelled_out(tables, seqlen_q, seqlen_k).numel()
        assert not any(columns_spelled_out(tables, 64).values())
        assert mask.sparsity == 0.0
        assert mask.statistics.visible_share == 1.0
        assert "0 of 0 blocks (100.0%)" in repr(mask)
        for order in ("auto", "permutation", "spt"):
            assert launch_order(mask.with_order(order)).shape[2] == mask.sizes.blocks_k


def test_batch_of_nothing() -> None:
    mask = BlockMask.documents(torch.zeros(0, 200, dtype=torch.int64)) & BlockMask.causal(200, 200)
    assert mask.batch == 0
    assert spelled_out(tables_of(mask), 200, 200).shape == (0, 1, 200, 200)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (256, 640), (515, 200)])
def test_constructors_of_one_mask_give_the_same_tables(seqlen_q: int, seqlen_k: int) -> None:
    i, j = positions(seqlen_q, seqlen_k)
    shift = seqlen_k - seqlen_q
    dense = (j <= i + shift) & (j >= i + shift - 140)
    assert equal_tables(
        BlockMask.window(seqlen_q, seqlen_k, left=140, right=0),
        BlockMask.causal(seqlen_q, seqlen_k) & BlockMask.window(seqlen_q, seqlen_k, left=140),
        BlockMask.dilated(seqlen_q, seqlen_k, 1, left=140, right=0),
        BlockMask.from_dense(dense),
        BlockMask.from_function(lambda b, h, q, k: (k <= q + shift) & (k >= q + shift - 140), seqlen_q, seqlen_k),
    )
    cu = torch.tensor([0, 130, 131, 200])
    ids = (torch.arange(max(seqlen_q, seqlen_k))[:, None] >= cu[1:]).sum(1)
    ids[ids == 3] = -1
    of_blocks = spread(torch.eye(2, dtype=torch.bool), 100, 100, 200, 200)
    of_blocks = torch.nn.functional.pad(of_blocks, (0, 56, 0, 56))
    assert equal_tables(
        BlockMask.documents(ids[:seqlen_q], ids[:seqlen_k]),
        BlockMask.documents(cu_seqlens=cu, seqlen_q=seqlen_q, seqlen_k=seqlen_k),
    )
    assert equal_tables(
        BlockMask.from_blocks(torch.eye(2, dtype=torch.bool), 100), BlockMask.from_dense(of_blocks[:200, :200])
    )


def test_numbers_out_of_range_stand_for_no_block() -> None:
    """Indices alone and joined with another mask show the same, whatever else is in their place."""
    indices = torch.tensor([[[[0, 3, -1], [2, 10**6, 1], [-(10**6), 7, 2]]]])
    everything = BlockMask.causal(384, 384) | BlockMask.window(384, 384)
    mask = BlockMask.from_indices(indices, seqlen_k=384)
    expected = BlockMask.from_indices(indices.where(indices < 3, -1), seqlen_k=384)
    for found in (mask, mask & everything, mask | mask, everything & mask):
        assert torch.equal(spelled_out(tables_of(found), 384, 384), spelled_out(tables_of(expected), 384, 384))


def test_repr_and_statistics() -> None:
    mask = BlockMask.causal(300, 300)
    assert repr(mask) == "BlockMask(300 x 300, no tables, order default)"
    assert mask.sparsity == pytest.approx(1 / 3)
    assert repr(mask) == "BlockMask(300 x 300, 6 of 9 blocks (66.7%), 5 partial (3 distinct), order default)"
    assert mask.statistics == (9, 1, 5, 3)
    per_head = BlockMask.from_blocks(torch.ones(2, 3, 1, 1, dtype=torch.bool)).with_order(torch.zeros(1).int())
    assert repr(per_head) == "BlockMask(128 x 128 of 2 batch entries x 3 heads, no tables, order of its own)"
    indices = BlockMask.from_indices(torch.tensor([[[[0, -1], [1, 0]]]]), seqlen_k=256)
    assert indices.statistics == (4, 3, 0, 0)


def test_tables_are_kept() -> None:
    mask = BlockMask.causal(300, 300)
    first = mask.tables(CPU, backward=False)
    assert first.columns is None
    assert mask.build("cpu", tables=True) is mask
    assert mask.tables(CPU, backward=False).rows is first.rows
    second = mask.tables(CPU, backward=True)
    assert second.rows is first.rows
    spt = mask.with_order("spt")
    assert spt.tables(CPU, backward=False).rows is first.rows
    assert mask.tables(CPU, backward=True).columns is second.columns
    with pytest.raises(AttributeError):
        mask.seqlen_q = 3  # type: ignore[misc]


def test_orders_are_found_once_and_for_backward_passes_alone() -> None:
    mask = BlockMask.from_blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool)).with_order("permutation")
    with mock.patch.object(launch_orders, "search", wraps=launch_orders.search) as found:
        assert mask.sparsity == 0.0
        mask.tables(CPU, backward=False)
        assert found.call_count == 0
        for _ in range(2):
            mask.build("cpu")
        assert found.call_count == 1
