"""Plans of selections: heads of a tile, launches, and their workspace."""

import itertools

import pytest

from flash_attn_cute.backends.cute import selection_plan
from flash_attn_cute.backends.cute.plan import Shapes
from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.kernels.selection import HEAD_DIMS
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


@pytest.mark.parametrize(("d", "d_v", "keys"), [(128, 128, 128), (192, 128, 128), (256, 192, 128), (256, 256, 64)])
def test_blocks_have_room_in_shared_memory(d: int, d_v: int, keys: int) -> None:
    """Blocks of 128 are cut in two where Q and O have no room beside K and V."""
    shapes = Shapes((1, 300, 16, d), (1, 400, 4, d), 0, 300)
    spec = spec_of(nheads=16, nheads_k=4, head_dim=d, head_dim_v=d_v, selection_block=128)
    planned = selection_plan.plan_selection(ARCHITECTURES["sm90"], spec, shapes, (1, 4, 300, 4), 132)
    assert planned.config.tile_n == keys
    assert planned.numbers.top == 4 * 128 // keys


@pytest.mark.parametrize("name", ["selection", "selection_backward"])
def test_all_head_dimensions_fit(name: PassName) -> None:
    """Schedules of all head dimensions and groups fit a CTA's shared memory and an SM's registers."""
    passes = ARCHITECTURES["sm90"].passes[name]
    for d, d_v, group, block in itertools.product(HEAD_DIMS, HEAD_DIMS, (1, 16), (16, 64, 128)):
        schedule = passes.schedule(passes.configure("bfloat16", d, d_v, Features(), group=group, block=block))
        assert schedule.num_bytes <= 227 * 1024, (d, d_v, group, block)
        warpgroups = {role.warps[0] // 4: role.registers for role in schedule.roles}
        loading, computing = warpgroups.values()
        assert 128 * (loading + computing * (schedule.threads // 128 - 1)) <= 64 * 1024
