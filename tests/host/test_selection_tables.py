"""Tables of selections for kernels that go over key blocks, against loops over queries; and how launches are cut."""

import itertools
import random
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.cute import selection_plan
from flash_attn_cute.backends.cute.plan import Shapes
from flash_attn_cute.backends.cute.selection_tables import SelectionTables, num_columns, selection_tables
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.kernels.selection import ITEM_FIELDS
from flash_attn_cute.spec import AttentionInputs, AttentionSpec
from tests.lib.checks import packed_or_dense, random_call
from tests.lib.interpreted.common import as_given
from tests.lib.masks import random_selection
from tests.lib.specs import spec_of

LENGTHS = (0, 1, 15, 16, 17, 40, 100)


def visible_picks(
    spec: AttentionSpec, inputs: AttentionInputs, sequences: list[Any], entry: int, head: int
) -> set[tuple[int, int, int, int]]:
    """Row, rank, sequence, and first key of the block, of all picks with a visible key."""
    assert inputs.selected is not None
    found = set()
    for number, (_, rows_q, rows_k) in enumerate(sequences):
        keys = rows_k.stop - rows_k.start
        shift = keys - (rows_q.stop - rows_q.start)
        for row in range(rows_q.start, rows_q.stop):
            position = row - rows_q.start + shift
            first = 0 if spec.window_left is None else max(0, position - spec.window_left)
            stop = keys if spec.window_right is None else min(keys, position + spec.window_right + 1)
            for rank, block in enumerate(inputs.selected[entry, head, row].tolist()):
                start = block * spec.selection_block
                if max(start, first) < min(start + spec.selection_block, stop):
                    found.add((row, rank, number if inputs.packed else 0, start))
    return found


def listed_picks(
    tables: SelectionTables, sets: int, which: int, top: int, first_row: int, item_picks: int
) -> list[tuple[int, int, int, int]]:
    """Picks of a set's items, likewise; each item has picks of one column, ascending."""
    found = []
    entries, items = tables.entries.view(sets, -1)[which], tables.items.view(sets, -1, ITEM_FIELDS)[which]
    spans = tables.item_spans.view(sets, -1)[which].tolist()
    assert all((items[a:b, 3] == items[a, 3]).all() for a, b in itertools.pairwise(spans) if a < b)
    assert spans[0] == 0
    assert (items[spans[-1] :, 1] == 0).all()
    for start, stop, sequence, first_key in items.tolist():
        own = entries[start:stop].tolist()
        assert len(own) <= item_picks
        assert own == sorted(own)
        found += [(first_row + pick // top, pick % top, sequence, first_key) for pick in own]
    return found


@packed_or_dense
@pytest.mark.parametrize("seed", range(12))
def test_tables(packed: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pick with a visible key is in one item, of its sequence and block, and no other; so are parts of rows."""
    rng = random.Random(seed)
    monkeypatch.setattr("flash_attn_cute.backends.cute.selection_tables._BEHIND_INT16", rng.choice([1, 1 << 15]))
    lengths = [(rng.choice(LENGTHS), rng.choice(LENGTHS)) for _ in range(3)]
    lengths = lengths if packed else lengths[:1] * 2
    window = rng.choice([None, 0, 30]), rng.choice([None, 0, 20])
    options: dict[str, Any] = {"nheads": 4, "nheads_k": 2, "packed": packed, "window_size": window}
    call = random_selection(random_call(*map(list, zip(*lengths, strict=True)), **options), rng, 16, 4)
    inputs, spec = as_given(call)
    assert inputs.selected is not None
    batch, heads, rows, top = inputs.selected.shape
    middle = rng.randint(0, rows)
    sequences = call.sequences()
    for first, stop in {(0, rows), (0, middle), (middle, rows)}:
        item_picks = rng.choice([1, 3, 7, 1000])
        tables = selection_tables(spec, inputs, (first, stop), item_picks)
        none = num_columns(inputs.k.shape[-3], 16, len(lengths) if packed else 0)
        columns = tables.columns.view(batch * heads, stop - first, top)
        for which in range(batch * heads):
            of_entry = sequences if packed else sequences[which // heads : which // heads + 1]
            expected = visible_picks(spec, inputs, of_entry, which // heads, which % heads)
            expected = {pick for pick in expected if first <= pick[0] < stop}
            found = listed_picks(tables, batch * heads, which, top, first, item_picks)
            assert len(found) == len(set(found))
            assert set(found) == expected
            seen = {(row - first, rank) for row, rank, *_ in expected}
            assert {(i, j) for i, j in (columns[which] < none).nonzero().tolist()} == seen
        if packed:
            real = call.real_rows()[0][first:stop]
            assert tables.real is not None
            assert torch.equal(tables.real, real)


HEADS = [(16, 1, 1, 16), (16, 4, 4, 4), (16, 4, 16, 1), (16, 4, 1, 4)]
HEADS += [(12, 1, 1, 4), (6, 2, 2, 1), (8, 8, 8, 1), (128, 1, 1, 64)]


@pytest.mark.parametrize(("nheads", "nheads_k", "selects", "group"), HEADS)
def test_heads_of_a_tile(nheads: int, nheads_k: int, selects: int, group: int) -> None:
    """Heads that select together are rows of one tile, as many as divide it."""
    shapes = Shapes((2, 300, nheads, 128), (2, 400, nheads_k, 128), 0, 300)
    spec = spec_of(nheads=nheads, nheads_k=nheads_k, selection_block=64)
    planned = selection_plan.plan_selection(ARCHITECTURES["sm90"], spec, shapes, (2, selects, 300, 4), 132)
    assert planned.config.group == group
    assert planned.num_units == 2 * nheads // group


@pytest.mark.parametrize(
    ("rows", "top", "nheads"), [(1000, 4, 4), (32768, 16, 64), (131072, 64, 64), (1 << 20, 512, 16)]
)
def test_the_workspace_is_bounded(rows: int, top: int, nheads: int) -> None:
    """Launches cover all rows and units, with no more than a bound, and no more picks than 32 bits count."""
    shapes = Shapes((1, rows, nheads, 128), (1, rows, 4, 128), 0, rows)
    spec = spec_of(nheads=nheads, nheads_k=4, selection_block=64)
    planned = selection_plan.plan_selection(ARCHITECTURES["sm90"], spec, shapes, (1, 4, rows, top), 132)
    assert 0 < planned.workspace_size <= selection_plan._WORKSPACE
    assert planned.numbers.num_rows * top * 4 < 2**31
    assert planned.numbers.num_rows == rows or planned.numbers.num_units == 1
    assert planned.item_picks % (planned.config.picks_a_tile * planned.config.num_mma_warpgroups) == 0
