"""Plans of calls in which each query selects key blocks, for launches of some queries at a time."""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

from flash_attn_cute.backends.cute import plan
from flash_attn_cute.kernels.arguments import SelectionNumbers, workspace_bytes
from flash_attn_cute.kernels.registry import Architecture
from flash_attn_cute.kernels.selection import (
    TILE_ROWS,
    TableSizes,
    backward_workspace_parts,
    num_columns,
    num_parts,
    table_parts,
    workspace_parts,
)
from flash_attn_cute.problem.spec import AttentionSpec

_WORKSPACE = 3 << 30  # bytes of a launch at the most beside tables, unless one query takes more
_MAX_PICKS = 2**31 - 1  # of all sets of a launch
_MOST_PICKS_AN_ITEM = 2048
_FEWEST_TILES = 4  # of a warpgroup in an item, so that K and V are loaded for some work
_ITEMS_AN_SM = 4  # where there is enough work, so that none is idle for long at the end


class SelectionPlan(NamedTuple):
    """Plan of a pass. A launch is for the queries and units of ``numbers`` at the most."""

    config: Any
    numbers: SelectionNumbers  # of the first launch
    workspace_size: int  # bytes, with those of the tables
    tables_size: int  # bytes of the tables, which come first
    num_rows: int  # of queries, in all launches
    num_units: int


def _heads_of_a_tile(spec: AttentionSpec, selected: tuple[int, ...]) -> int:
    """Heads that are rows of one tile: of those that select together, as many as divide it."""
    alone = selected[1] == spec.nheads != spec.nheads_k
    return math.gcd(1 if alone else spec.nheads // spec.nheads_k, TILE_ROWS)


def plan_selection(
    architecture: Architecture,
    spec: AttentionSpec,
    shapes: plan.Shapes,
    selected: tuple[int, ...],
    num_sms: int,
    pass_name: Literal["selection", "selection_backward"] = "selection",
) -> SelectionPlan:
    """The plan of a call whose selected blocks are (batch, heads, rows, top), on a GPU of so many SMs."""
    config = architecture.passes[pass_name].configure(
        *plan.given(spec, shapes), group=_heads_of_a_tile(spec, selected), block=spec.selection_block
    )
    sets_batch, sets_heads, rows, top = selected
    tiles = num_parts(spec.selection_block, config.tile_n)
    top *= tiles

    def workspace(units: int, rows: int, items: int) -> int:
        if pass_name == "selection":
            return workspace_bytes(workspace_parts(config, units, rows * top))
        return workspace_bytes(backward_workspace_parts(config, units, rows, rows * top, items))

    units = spec.nheads // config.group * math.prod(shapes.q[:-3])
    bytes_a_row = workspace(1, 1, 0)
    launch_rows = max(1, min(rows, _WORKSPACE // bytes_a_row, _MAX_PICKS // (top * sets_batch * sets_heads)))
    launch_units = max(1, min(units, _WORKSPACE // (bytes_a_row * launch_rows)))
    step = config.picks_a_tile * config.num_mma_warpgroups
    steps = launch_rows * top * launch_units // (_ITEMS_AN_SM * num_sms * step)
    item_picks = step * max(_FEWEST_TILES, min(steps, _MOST_PICKS_AN_ITEM // step))
    of_scores = plan.numbers_of(spec, shapes)
    columns = num_columns(shapes.k[-3], config.tile_n, shapes.num_sequences)
    sizes = TableSizes.of(launch_rows * top, columns, item_picks)
    numbers = SelectionNumbers(
        **{name: of_scores[name] for name in SelectionNumbers._fields if name in of_scores},
        top=top,
        first_row=0,
        num_rows=launch_rows,
        first_unit=0,
        num_units=launch_units,
        sets_batch=sets_batch,
        sets_heads=sets_heads,
        columns=columns,
        parts=tiles,
        block=spec.selection_block if config.key_bits else None,
        item_picks=item_picks,
        num_items=sizes.items,
        num_chunks=sizes.chunks,
        chunk_picks=sizes.chunk_picks,
    )
    tables = workspace_bytes(table_parts(config, numbers))
    size = tables + workspace(launch_units, launch_rows, sizes.items)
    return SelectionPlan(config, numbers, size, tables, rows, units)


plan_selection_backward = partial(plan_selection, pass_name="selection_backward")
