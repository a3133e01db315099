"""Columns of block masks: entries, turns and orders of launches, against lists of all visible blocks."""

import random

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask
from flash_attn_cute.problem.block_tables import ANY_NUMBER
from flash_attn_cute.sparsity.bits import HALF
from tests.lib.masks import LENGTHS, TILE, Made, bits_of, columns_spelled_out, random_mask, spread, tables_of
from tests.lib.turns import write_order

Columns = dict[tuple[int, int, int], list[tuple[int, int, int]]]


def columns_of(made: Made, launch: Tensor, block_q: int, block_k: int) -> Columns:
    """Expected entries of columns, from all scores: query block, 1 if it is full, and turn."""
    shown = made.shown
    batch, heads, seqlen_q, seqlen_k = shown.shape
    blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    whole = torch.zeros(batch, heads, blocks_q * block_q, blocks_k * block_k, dtype=torch.bool)
    whole[:, :, :seqlen_q, :seqlen_k] = shown
    blocks = whole.unflatten(3, (blocks_k, block_k)).unflatten(2, (blocks_q, block_q))
    visible, full = blocks.any(5).any(3), blocks.all(5).all(3)
    turns = write_order(visible, launch)
    expected: Columns = {}
    for b, h, n in torch.cartesian_prod(*map(torch.arange, (batch, heads, blocks_k))).tolist():
        attending = visible[b, h, :, n].nonzero().flatten().tolist()
        expected[b, h, n] = [(m, int(full[b, h, m, n]), int(turns[b, h, m, n])) for m in attending]
    return expected


def check_columns(
    found: Columns, made: Made, launch: Tensor, blocks: tuple[int, int], tiles: Tensor, adding: Tensor
) -> None:
    """Compares entries and their bits with all scores; ``adding`` counts the tiles that add to each query block."""
    block_q, block_k = blocks
    counted = torch.zeros_like(adding)
    expected = columns_of(made, launch, block_q, block_k)
    assert found.keys() == expected.keys()
    for (b, h, n), entries in found.items():
        assert [(m, int(code == -1), turn) for m, code, turn in entries] == expected[b, h, n]
        for m, code, _ in entries:
            counted[b, h, m] += 1
            rows, columns = (slice(x * block, (x + 1) * block) for x, block in ((m, block_q), (n, block_k)))
            real = made.shown[b, h, rows, columns]
            bits = torch.ones(TILE, TILE, dtype=torch.bool) if code == -1 else bits_of(tiles[code])
            part = bits[rows.start % TILE :, columns.start % TILE :][: real.shape[0], : real.shape[1]]
            assert torch.equal(part, real)
    assert torch.equal(adding, counted)


@pytest.mark.parametrize("seed", range(60))
def test_columns_and_turns(seed: int) -> None:
    """Blocks of 64 and of 128 queries, any order, orders that heads of a group share."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sets = rng.choice([(1, 1), (2, 1), (1, 4), (2, 4)])
    made = random_mask(rng.choice(LENGTHS), rng.choice(LENGTHS), rng, sets)
    mask, shown = made
    blocks_k = mask.sizes.blocks_k
    order = rng.choice(["default", "tensor", "tensor"])
    launch = torch.arange(blocks_k - 1, -1, -1)
    if order == "tensor":
        group = rng.choice([1, mask.heads])
        own = (rng.choice([1, mask.batch]), rng.choice([1, mask.heads // group]))
        launch = torch.rand(*own, blocks_k).argsort(-1)
        mask = mask.with_order(launch.int(), group=group)
        launch = launch.repeat_interleave(mask.heads // own[1], 1)
    tables = tables_of(mask)
    assert tables.columns is not None
    assert {x.dtype for x in tables.columns} == {torch.int32}
    assert all(x.is_contiguous() for x in (*tables.rows, *tables.columns))
    if tables.real is not None:  # nothing that is shown is padding
        for real, sees in zip(tables.real, (shown.any(3), shown.any(2)), strict=True):
            assert real.shape == (mask.batch, sees.shape[2])
            assert not (sees.any(1) & ~real).any()
    for block_q, adding in ((64, tables.columns.contributors), (128, tables.rows.spans[..., 1])):
        check_columns(columns_spelled_out(tables, block_q), made, launch, (block_q, TILE), tables.rows.tiles, adding)


@pytest.mark.parametrize("seed", range(12))
def test_columns_of_half_blocks(seed: int) -> None:
    """Blocks of 64 keys; of a block of 128 the second half is launched first."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads = rng.choice([(1, 1), (2, 1), (1, 4), (2, 4)])
    seqlen_q, seqlen_k, share = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice([0.1, 0.4, 1.0])
    blocks_q, blocks_k = -(-seqlen_q // HALF), -(-seqlen_k // HALF)
    visible = torch.rand(batch, heads, blocks_q, blocks_k) < share
    mask = BlockMask.from_blocks(visible, HALF, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    shown = spread(visible, HALF, HALF, seqlen_q, seqlen_k)
    if seed % 2:
        mask = mask & BlockMask.causal(seqlen_q, seqlen_k)
        shown = shown & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    launch = torch.arange(mask.sizes.blocks_k - 1, -1, -1)
    if seed % 3 == 0:
        launch = torch.rand(1, heads, mask.sizes.blocks_k).argsort(-1)
        mask = mask.with_order(launch.int())
    launch = torch.stack((2 * launch + 1, 2 * launch), -1).flatten(-2)
    kept = launch[launch < blocks_k].view(*launch.shape[:-1], blocks_k)
    tables = tables_of(mask, most_listed=ANY_NUMBER)
    halves = tables.columns
    assert halves is not None
    assert tables.has_half_columns
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in halves)
    assert torch.equal(halves.order.expand(1, heads, -1), kept.int().expand(1, heads, -1))
    found: Columns = {}
    for b, h, n in torch.cartesian_prod(*map(torch.arange, (batch, heads, blocks_k))).tolist():
        start, count = halves.spans[0, b, h, n].tolist()
        found[b, h, n] = [(m, code, turn) for m, code, turn in halves.entries[start : start + count].tolist()]
    check_columns(found, Made(mask, shown), kept, (HALF, HALF), tables.rows.tiles, halves.contributors)
    assert len(halves.entries) == halves.contributors.sum()


@pytest.mark.parametrize("order", ["default", "spt"])
def test_half_columns_of_larger_blocks(order: str) -> None:
    """A mask has those of the same mask made of blocks of 64, and only if it lists few enough blocks."""
    visible = torch.rand(2, 3, 4, 5) < 0.4
    indices = torch.where(visible, torch.arange(5), -1)
    quarters = visible.repeat_interleave(2, -2).repeat_interleave(2, -1)
    of_64 = BlockMask.from_blocks(quarters, 64).with_order(order)
    expected = tables_of(of_64, most_listed=ANY_NUMBER).columns
    assert expected is not None
    for mask in (BlockMask.from_blocks(visible), BlockMask.from_indices(indices, seqlen_k=640)):
        ordered = mask.with_order(order)
        listed = len(tables_of(ordered).rows.entries)
        chosen = [tables_of(ordered, most_listed=most) for most in (0, listed - 1, listed)]
        assert [tables.has_half_columns for tables in chosen] == [False, False, True]
        assert chosen[0].columns is chosen[1].columns
        halves = chosen[2].columns
        assert halves is not None
        assert all(torch.equal(x, y) for x, y in zip(halves, expected, strict=True) if x is not halves.entries)
        assert torch.equal(halves.entries[: len(expected.entries)], expected.entries)
        assert len(halves.entries) <= 6 * mask.most_halves
