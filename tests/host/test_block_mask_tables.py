"""Costs of tables of block masks: equal tiles are stored once, and few blocks are looked at, by few operators."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.sparsity import bits, row_tables
from tests.lib.masks import TILE, are_equal, random_mask, spelled_out, tables_of
from tests.lib.modes import Operators


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


def test_functions_are_not_asked_about_nothing() -> None:
    def never(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise AssertionError("no block is partial")

    mask = BlockMask.from_blocks(torch.zeros(2, 3, dtype=torch.bool)) & BlockMask.from_function(never, 256, 384)
    assert mask.sparsity == 1.0


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


def launches(mode: Operators) -> int:
    """How many operators launch something: all but views and empty tensors."""
    count = 0
    for func in mode.seen:
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        count += not is_view and not str(func).startswith(("aten.empty", "aten._unsafe_view", "aten.detach"))
    return count


@pytest.mark.usefixtures("made_in_modes")
def test_few_operators() -> None:
    """Each is a launch, which a layer that selects blocks in every step has to pay."""
    for block, most in ((128, 107), (64, 111)):
        with Operators() as rows_and_columns:
            tables_of(BlockMask.from_indices(torch.rand(1, 4, 8, 8).argsort(-1), block=block, seqlen_k=8 * block))
        assert launches(rows_and_columns) <= most
    counts = []
    for length in (2048, 8192):
        with Operators() as built:
            tables_of(BlockMask.window(length, length, left=500, right=0))
        counts.append(launches(built))
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


META = torch.device("meta")
ON_META: dict[str, Callable[[], BlockMask]] = {
    "window": lambda: BlockMask.window(200, 300, left=40),
    "prefix": lambda: BlockMask.prefix_lm(200, 300, 70),
    "documents": lambda: BlockMask.documents(torch.zeros(2, 200, dtype=torch.int32, device=META)),
    "heads": lambda: BlockMask.from_dense(torch.ones(2, 4, 200, 300, dtype=torch.bool, device=META)),
    "function": lambda: BlockMask.from_function(lambda _b, _h, i, j: j <= i, 200, 300, device=META),
    "searched": lambda: BlockMask.prefix_lm(200, 300, 70).with_order("permutation"),
    "ordered": lambda: BlockMask.from_dense(torch.ones(200, 300, dtype=torch.bool, device=META)).with_order(
        torch.zeros(3, dtype=torch.int32, device=META)
    ),
}


@pytest.mark.parametrize("name", ON_META)
@pytest.mark.parametrize("built", [False, True], ids=["call", "build"])
def test_meta_tensors(name: str, built: bool) -> None:
    """Results and gradients have their shapes, and tables that do for any mask of the sizes."""
    mask = ON_META[name]()
    if built:
        assert mask.build(META, tables=True) is mask
        tables = mask.tables(META, backward=True)
        assert all(x is None or x.is_meta for x in tables.flat())
        assert len(tables.rows.entries) == mask.batch * mask.heads * mask.sizes.blocks_q * mask.sizes.blocks_k
    q = torch.empty(2, mask.seqlen_q, 4, 16, device=META, requires_grad=True)
    k, v = (torch.empty(2, mask.seqlen_k, 4, 16, device=META, requires_grad=True) for _ in range(2))
    out = flash_attn_func(q, k, v, block_mask=mask)
    assert (out.shape, out.device) == (q.shape, META)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert "no tables" in repr(mask)


def test_tables_on_meta_leave_those_elsewhere_alone() -> None:
    """Statistics and the search read tables that have numbers."""
    mask, expected = (BlockMask.prefix_lm(512, 512, 100).with_order("permutation") for _ in range(2))
    mask.build("meta")
    assert mask.statistics == expected.statistics
    assert mask.has_m_block_order
    assert are_equal(tables_of(mask), tables_of(expected))
    assert (mask.low_contention, mask.has_m_block_order) == (expected.low_contention, expected.has_m_block_order)


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
