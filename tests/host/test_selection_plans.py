"""Plans of selections: heads of a tile, launches, and their workspace."""

import pytest

from flash_attn_cute.backends.cute import selection_plan
from flash_attn_cute.backends.cute.plan import Shapes
from flash_attn_cute.kernels.registry import ARCHITECTURES
from tests.lib.specs import spec_of

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
    assert 0 < planned.workspace_size - planned.tables_size <= selection_plan._WORKSPACE
    assert planned.tables_size < 3 * 4 * planned.numbers.num_rows * top * 4
    assert planned.numbers.num_rows * top * 4 < 2**31
    assert planned.numbers.num_rows == rows or planned.numbers.num_units == 1
    assert planned.numbers.item_picks % (planned.config.picks_a_tile * planned.config.num_mma_warpgroups) == 0
