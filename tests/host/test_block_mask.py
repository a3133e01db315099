"""Block masks against the same masks element by element: constructors, tables, columns and turns, conversions."""

import random
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from flash_attn_cute import BlockMask
from flash_attn_cute.block_tables import ANY_NUMBER, BlockTables
from flash_attn_cute.dq_order import launch_orders
from flash_attn_cute.sparsity import bits, row_tables
from flash_attn_cute.sparsity.bits import HALF
from tests.lib.masks import (
    KINDS,
    TILE,
    Made,
    bits_of,
    columns_spelled_out,
    launch_order,
    positions,
    random_mask,
    spelled_out,
    spread,
    tables_of,
)
from tests.lib.turns import write_order

CPU = torch.device("cpu")
LENGTHS = [1, 64, 127, 128, 129, 200, 256, 300, 511]


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
            torch.zeros(1, 2, -(-seqlen_q // TILE), 0, dtype=torch.int64), seqlen_q=seqlen_q, seqlen_k=seqlen_k
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


def columns_of(
    made: Made, launch: Tensor, block_q: int, block_k: int = TILE
) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
    """Expected entries of columns, from all scores: query block, 1 if it is full, and turn."""
    shown = made.shown
    batch, heads, seqlen_q, seqlen_k = shown.shape
    blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    whole = torch.zeros(batch, heads, blocks_q * block_q, blocks_k * block_k, dtype=torch.bool)
    whole[:, :, :seqlen_q, :seqlen_k] = shown
    blocks = whole.unflatten(3, (blocks_k, block_k)).unflatten(2, (blocks_q, block_q))
    visible, full = blocks.any(5).any(3), blocks.all(5).all(3)
    turns = write_order(visible, launch)
    expected: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for b, h, n in torch.cartesian_prod(*map(torch.arange, (batch, heads, blocks_k))).tolist():
        attending = visible[b, h, :, n].nonzero().flatten().tolist()
        expected[b, h, n] = [(m, int(full[b, h, m, n]), int(turns[b, h, m, n])) for m in attending]
    return expected


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
    for block_q in (64, 128):
        expected = columns_of(made, launch, block_q)
        found = columns_spelled_out(tables, block_q)
        assert found.keys() == expected.keys()
        for (b, h, n), entries in found.items():
            for m, tile, _ in entries:
                part = torch.ones(block_q, TILE, dtype=torch.bool)
                if tile >= 0:
                    first = m * block_q % TILE
                    part = bits_of(tables.rows.tiles[tile])[first : first + block_q]
                real = shown[b, h, m * block_q : (m + 1) * block_q, n * TILE : (n + 1) * TILE]
                assert torch.equal(part[: real.shape[0], : real.shape[1]], real)
            assert [(m, int(tile == -1), turn) for m, tile, turn in entries] == expected[b, h, n]
    rows = tables.rows.spans[..., 1]
    adding = torch.zeros_like(tables.columns.contributors)
    for (b, h, _), entries in columns_spelled_out(tables, 64).items():
        for m, _, _ in entries:
            adding[b, h, m] += 1
    assert torch.equal(tables.columns.contributors, adding)
    adding = torch.zeros_like(rows)
    for (b, h, _), entries in columns_spelled_out(tables, 128).items():
        for m, _, _ in entries:
            adding[b, h, m] += 1
    assert torch.equal(rows, adding)


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
    adding = torch.zeros_like(halves.contributors)
    for (b, h, n), expected in columns_of(Made(mask, shown), kept, HALF, HALF).items():
        start, count = halves.spans[0, b, h, n].tolist()
        found = halves.entries[start : start + count].tolist()
        assert [(m, int(code == -1), turn) for m, code, turn in found] == expected
        for m, code, _ in found:
            adding[b, h, m] += 1
            if code >= 0:
                first = m * HALF % TILE, n * HALF % TILE
                part = bits_of(tables.rows.tiles[code])[first[0] : first[0] + HALF, first[1] : first[1] + HALF]
                real = shown[b, h, m * HALF : (m + 1) * HALF, n * HALF : (n + 1) * HALF]
                assert torch.equal(part[: real.shape[0], : real.shape[1]], real)
    assert torch.equal(halves.contributors, adding)
    assert len(halves.entries) == adding.sum()


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


def equal_tables(*masks: BlockMask) -> bool:
    """Whether rows and columns are equal."""
    first, *others = map(tables_of, masks)
    return all(are_equal(first, other) for other in others)


def are_equal(one: BlockTables, other: BlockTables) -> bool:
    """Whether all tables are equal, and the same ones are there."""
    pairs = zip(one.flat(), other.flat(), strict=True)
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


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
        BlockMask.from_blocks(torch.eye(2, dtype=torch.bool), 100),
        BlockMask.from_dense(of_blocks[:200, :200]),
    )


def test_equal_tiles_are_stored_once() -> None:
    """However long the mask is."""
    assert BlockMask.causal(128 * 40, 128 * 40).statistics == (1600, 780, 40, 1)
    assert BlockMask.window(128 * 40, 128 * 40, left=200, right=0).statistics.tiles == 3
    per_head = torch.eye(TILE, dtype=torch.bool).expand(1, 5, TILE, TILE)
    assert len(tables_of(BlockMask.from_dense(per_head)).rows.tiles) == 1


def test_tiles_of_equal_hashes_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = torch.randint(0, 3, (50, TILE, 4), dtype=torch.int32)[torch.randint(0, 50, (200,))]
    expected = bits.distinct(tiles)
    assert torch.equal(expected[0][expected[1]], tiles)
    assert expected[1].unique().numel() == len(expected[0]) < 51
    monkeypatch.setattr(bits, "_factors", lambda count, device: torch.zeros(count, dtype=torch.int64))
    collided = bits.distinct(tiles)
    assert all(torch.equal(a, b) for a, b in zip(expected, collided, strict=True))


def test_bits() -> None:
    elements = torch.rand(3, TILE, TILE) < 0.5
    tiles = bits.pack(elements.transpose(1, 2))
    assert all(torch.equal(bits_of(tile), x.T) for tile, x in zip(tiles, elements, strict=True))
    assert torch.equal(bits.unpack(tiles), elements.transpose(1, 2))


@pytest.mark.usefixtures("made_in_modes")
def test_functions_see_only_what_is_partial() -> None:
    """And what is not ruled out; a full block of one side of an "or" is not asked about either."""
    asked = set()

    def diagonal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.ge.Tensor:
                asked.add(tuple(torch.broadcast_shapes(args[0].shape, args[1].shape)))
            return func(*args, **(kwargs or {}))

    mask = BlockMask.window(128 * 20, 128 * 20, left=127, right=0) & BlockMask.from_function(diagonal, 2560, 2560)
    with Spy():
        mask.build("cpu")
    assert (39, 128, 128) in asked  # two blocks a row
    assert all(len(shape) < 3 or shape[0] <= 39 for shape in asked)


def test_numbers_out_of_range_stand_for_no_block() -> None:
    """Indices alone and joined with another mask show the same, whatever else is in their place."""
    indices = torch.tensor([[[[0, 3, -1], [2, 10**6, 1], [-(10**6), 7, 2]]]])
    everything = BlockMask.causal(384, 384) | BlockMask.window(384, 384)
    mask = BlockMask.from_indices(indices, seqlen_k=384)
    expected = BlockMask.from_indices(indices.where(indices < 3, -1), seqlen_k=384)
    for found in (mask, mask & everything, mask | mask, everything & mask):
        assert torch.equal(spelled_out(tables_of(found), 384, 384), spelled_out(tables_of(expected), 384, 384))


@pytest.mark.parametrize("at_once", [1, 3, 17])
def test_built_in_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(at_once)
    masks = [random_mask(511, 300, rng, (2, 3)).mask for _ in range(4)]
    whole = [tables_of(mask) for mask in masks]
    monkeypatch.setattr(row_tables, "_BLOCKS_AT_ONCE", at_once)
    monkeypatch.setattr(row_tables, "_TILES_AT_ONCE", max(1, at_once // 2))
    for mask, tables in zip(masks, whole, strict=True):
        mask._rows.clear()
        mask._tables.clear()
        assert are_equal(tables, tables_of(mask))


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what launches something: all but views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        self.count += not is_view and not str(func).startswith(("aten.empty", "aten._unsafe_view", "aten.detach"))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("made_in_modes")
def test_few_operators() -> None:
    """Each is a launch, which a layer that selects blocks in every step has to pay."""
    for block, most in ((128, 107), (64, 111)):
        with Operators() as rows_and_columns:
            tables_of(BlockMask.from_indices(torch.rand(1, 4, 8, 8).argsort(-1), block=block, seqlen_k=8 * block))
        assert rows_and_columns.count <= most
    counts = []
    for length in (2048, 8192):
        with Operators() as built:
            tables_of(BlockMask.window(length, length, left=500, right=0))
        counts.append(built.count)
    assert counts[0] == counts[1] <= 225


def test_of_blocks_that_are_alike_one_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the mask is; ends of sequences are cut apart."""
    looked_at = []
    cut = bits.kinds
    monkeypatch.setattr(bits, "kinds", lambda tiles: looked_at.append(len(tiles)) or cut(tiles))  # type: ignore[func-returns-value]
    for mask, most in (
        (BlockMask.window(8192, 8192, left=500, right=0), 3),
        (BlockMask.window(8190, 8190, left=500, right=0), 3 + 5),
        (BlockMask.dilated(8192, 8192, 3, left=1000), 64 + 8),
        (BlockMask.prefix_lm(8192, 8192, 1000), 2 + 64),
        (BlockMask.from_blocks(torch.rand(3, 128, 128) < 0.5, 64), 14),
        (BlockMask.documents(torch.arange(8192) // 4096) & BlockMask.causal(8192, 8192), 1),
        # Documents that end within blocks: as many as there are distinct ones.
        (BlockMask.documents(torch.arange(8192) // 1000) & BlockMask.causal(8192, 8192), 32),
        (BlockMask.documents(torch.arange(8192) // 1000), 54),
    ):
        tables_of(mask)
        assert sum(looked_at) <= most
        looked_at.clear()


def memory(mask: BlockMask) -> int:
    return sum(x.numel() * x.element_size() for x in tables_of(mask).flat() if x is not None)


def test_metadata_is_small() -> None:
    """A window at a million tokens: a few MB, nothing of (seqlen_q, seqlen_k) on the way."""
    assert memory(BlockMask.window(1 << 20, 1 << 20, left=2047, right=0)) < 7e6
    assert memory(BlockMask.window(1 << 15, 1 << 15, left=2047, right=0)) < 0.3e6
    ids = torch.arange(1 << 15) // 3000
    assert memory(BlockMask.documents(ids) & BlockMask.causal(1 << 15, 1 << 15)) < 0.3e6


def test_blocks_that_turn_out_to_be_full_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are looked at in chunks, and none of them is partial."""
    monkeypatch.setattr(row_tables, "_TILES_AT_ONCE", 1)
    mask = BlockMask.from_dense(torch.ones(2 * TILE, 3 * TILE, dtype=torch.bool))
    assert mask.statistics == (6, 6, 0, 0)
    assert spelled_out(tables_of(mask), 2 * TILE, 3 * TILE).all()


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
    assert equal_content(BlockMask.from_flex(flex), made)
    assert flex.seq_lengths == tuple(made.shown.shape[2:])
    # Its columns, too, which it has made of the rows.
    assert flex.q_num_blocks is not None
    assert flex.full_q_num_blocks is not None
    tables = tables_of(made.mask)
    assert tables.columns is not None
    assert torch.equal(flex.q_num_blocks + flex.full_q_num_blocks, tables.columns.spans[1, ..., 1])


def equal_content(mask: BlockMask, made: Made) -> bool:
    return torch.equal(spelled_out(tables_of(mask), mask.seqlen_q, mask.seqlen_k), made.shown)


INDICES = torch.zeros(1, 1, 2, 1, dtype=torch.int64)
IDS = torch.zeros(5, dtype=torch.int32)
MAP = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BlockMask.causal(2.0, 3), TypeError, "seqlen_q: expected an int, got 2.0"),  # type: ignore[arg-type]
        (lambda: BlockMask.causal(2, -3), ValueError, "seqlen_k: expected 0 to 2147483647, got -3"),
        (lambda: BlockMask.window(2, 3, left=1.5), TypeError, "left: expected None or an int, got 1.5"),  # type: ignore[arg-type]
        (lambda: BlockMask.documents(), ValueError, "ids: expected either ids or cu_seqlens, got neither"),
        (lambda: BlockMask.documents(IDS, cu_seqlens=IDS), ValueError, "either ids or cu_seqlens, got both"),
        (lambda: BlockMask.documents(IDS.float()), TypeError, "ids: expected int32 or int64, got torch.float32"),
        (lambda: BlockMask.documents([1]), TypeError, "ids: expected a torch.Tensor, got list"),  # type: ignore[arg-type]
        (
            lambda: BlockMask.documents(IDS[None, None]),
            ValueError,
            "ids: expected shape (seqlen_q,) or (batch, seqlen_q)",
        ),
        (
            lambda: BlockMask.documents(IDS[None], IDS.expand(2, 5)),
            ValueError,
            "ids_k: expected the batch size of ids, 1",
        ),
        (lambda: BlockMask.documents(IDS, IDS.to("meta")), ValueError, "ids_k: expected the device cpu, got meta"),
        (
            lambda: BlockMask.documents(cu_seqlens=IDS),
            TypeError,
            "seqlen_q: expected an int beside cu_seqlens, got None",
        ),
        (
            lambda: BlockMask.documents(cu_seqlens=IDS[:0], seqlen_q=1),
            ValueError,
            "cu_seqlens: expected shape (documents",
        ),
        (
            lambda: BlockMask.documents(cu_seqlens=IDS, cu_seqlens_k=IDS[1:], seqlen_q=1),
            ValueError,
            "cu_seqlens_k: expected shape (5,), got (4,)",
        ),
        (lambda: BlockMask.prefix_lm(3, 3, 1.0), TypeError, "length: expected an int or a tensor, got 1.0"),  # type: ignore[arg-type]
        (lambda: BlockMask.prefix_lm(3, 3, IDS[None]), ValueError, "length: expected shape (batch,), got shape (1, 5)"),
        (lambda: BlockMask.dilated(3, 3, 2.0), TypeError, "step: expected an int, got 2.0"),  # type: ignore[arg-type]
        (lambda: BlockMask.dilated(3, 3, 0), ValueError, "step: expected at least 1, got 0"),
        (lambda: BlockMask.from_blocks(MAP.int()), TypeError, "visible: expected a bool tensor, got torch.int32"),
        (
            lambda: BlockMask.from_blocks(MAP[0]),
            ValueError,
            "visible: expected shape ([[batch,] heads,] blocks_q, blocks_k)",
        ),
        (lambda: BlockMask.from_blocks(MAP, (1, 2, 3)), TypeError, "block: expected an int or a pair of them"),  # type: ignore[arg-type]
        (lambda: BlockMask.from_blocks(MAP, 0), ValueError, "block: expected at least 1, got 0"),
        (lambda: BlockMask.from_blocks(MAP, seqlen_k=-1), ValueError, "seqlen_k: expected 0 to 2147483647, got -1"),
        (
            lambda: BlockMask.from_blocks(MAP, (1, 2**30)),
            ValueError,
            f"seqlen_k: expected 0 to 2147483647, got {3 * 2**30}",
        ),
        (
            lambda: BlockMask.from_blocks(MAP, seqlen_k=256),
            ValueError,
            "seqlen_k: expected a length of 3 blocks of 128, got 256",
        ),
        (
            lambda: BlockMask.from_indices(MAP, seqlen_k=9),
            TypeError,
            "indices: expected int32 or int64, got torch.bool",
        ),
        (
            lambda: BlockMask.from_indices(INDICES[0], seqlen_k=9),
            ValueError,
            "indices: expected shape (batch, heads, blocks_q, width)",
        ),
        (
            lambda: BlockMask.from_indices(INDICES, block=96, seqlen_k=9),
            ValueError,
            "block: expected 64 or multiples of 128",
        ),
        (
            lambda: BlockMask.from_indices(INDICES, INDICES[..., 0, 0], seqlen_k=9),
            ValueError,
            "counts: expected shape (batch, heads",
        ),
        (
            lambda: BlockMask.from_indices(INDICES, INDICES[:, :, :1, 0], seqlen_k=9),
            ValueError,
            "counts: expected shape (1, 1, 2)",
        ),
        (lambda: BlockMask.from_function(3, 3, 3), TypeError, "mask_mod: expected a function of"),  # type: ignore[arg-type]
        (
            lambda: BlockMask.from_function(per_head, 3, 3, heads=0),
            ValueError,
            "heads: expected None or at least 1, got 0",
        ),
        (
            lambda: BlockMask.from_function(per_head, 3, 3, batch=1.0),  # type: ignore[arg-type]
            TypeError,
            "batch: expected None or an int, got 1.0",
        ),
        (
            lambda: BlockMask.from_function(lambda b, h, q, k: q - k, 3, 3).build(),
            TypeError,
            "mask_mod: expected a function that gives a bool, got torch.int64",
        ),
        (lambda: BlockMask.from_dense(MAP.float()), TypeError, "mask: expected a bool tensor, got torch.float32"),
        (
            lambda: BlockMask.from_dense(MAP[0]),
            ValueError,
            "mask: expected shape ([[batch,] heads,] seqlen_q, seqlen_k)",
        ),
        (
            lambda: BlockMask.from_flex(MAP),  # type: ignore[arg-type]
            TypeError,
            "mask: expected FlexAttention's BlockMask, got Tensor",
        ),
        (
            lambda: BlockMask.causal(3, 4) & BlockMask.causal(3, 5),
            ValueError,
            "&: expected masks of sizes that fit, 3 x 4, got 3 x 5",
        ),
        (
            lambda: BlockMask.from_dense(MAP.expand(2, 1, 2, 3)) | BlockMask.from_dense(MAP.expand(3, 1, 2, 3)),
            ValueError,
            "|: expected masks of sizes that fit, 2 x 3 of 2 batch entries, got 2 x 3 of 3 batch entries",
        ),
        (
            lambda: BlockMask.from_dense(MAP) & BlockMask.from_dense(MAP.to("meta")),
            ValueError,
            "&: expected masks of one device, cpu, got meta",
        ),
        (
            lambda: BlockMask.causal(3, 3).build(),
            ValueError,
            "device: expected one, as the mask has no tensors, got None",
        ),
        (
            lambda: BlockMask.from_dense(MAP).build("meta"),
            ValueError,
            "device: expected that of the mask, cpu, got meta",
        ),
        (
            lambda: BlockMask.causal(3, 3).with_order("fast"),
            ValueError,
            "order: expected one of ['auto', 'default', 'spt'",
        ),
        (lambda: BlockMask.causal(3, 3).with_order(3), TypeError, "order: expected one of"),  # type: ignore[arg-type]
        (
            lambda: BlockMask.causal(3, 3).with_order(torch.zeros(1)),
            TypeError,
            "order: expected dtype torch.int32 or torch.int64",
        ),
        (
            lambda: BlockMask.causal(3, 3).with_order(torch.tensor([1])),
            ValueError,
            "order: expected permutations of 0 .. 0, got [1]",
        ),
        (
            lambda: BlockMask.causal(3, 300).with_order(torch.tensor([1, 1, 2])),
            ValueError,
            "order: expected permutations of 0 .. 2",
        ),
        (
            lambda: BlockMask.causal(3, 3).with_order(torch.zeros(2, 1).int()),
            ValueError,
            "order: expected a shape that broadcasts to (1, 1, 1), got (2, 1)",
        ),
        (
            lambda: BlockMask.causal(3, 3).with_order(torch.tensor(0)),
            ValueError,
            "order: expected a shape that broadcasts",
        ),
        (
            lambda: BlockMask.causal(3, 3).with_order("spt", group=2),
            ValueError,
            "group: expected a divisor of the mask's 1 heads",
        ),
        (lambda: BlockMask.causal(3, 3).with_order("spt", group=1.0), TypeError, "group: expected an int, got 1.0"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_only_masks_combine() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        BlockMask.causal(3, 3) & MAP  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        BlockMask.causal(3, 3) | 1  # type: ignore[operator]


def test_functions_are_not_asked_about_nothing() -> None:
    def never(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise AssertionError("no block is partial")

    mask = BlockMask.from_blocks(torch.zeros(2, 3, dtype=torch.bool)) & BlockMask.from_function(never, 256, 384)
    assert mask.sparsity == 1.0
