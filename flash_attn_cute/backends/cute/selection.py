"""Calls in which each query selects key blocks, on a GPU: planned, and launched for some queries at a time."""

import math
from typing import Any, NamedTuple

import torch

from flash_attn_cute.backends.cute import plan
from flash_attn_cute.backends.cute.layouts import aligned, compact
from flash_attn_cute.backends.cute.selection_tables import num_columns, selection_tables
from flash_attn_cute.kernels.arguments import SelectionArguments, SelectionNumbers, workspace_bytes
from flash_attn_cute.kernels.registry import Architecture
from flash_attn_cute.kernels.selection import BLOCKS, HEAD_DIMS, TILE_ROWS, workspace_parts
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Results

_WORKSPACE = 3 << 30  # bytes of a launch at the most, unless one query takes more
_MAX_PICKS = 2**31 - 1  # of all sets of a launch
_MOST_PICKS_AN_ITEM = 2048
_FEWEST_TILES = 4  # of a warpgroup in an item, so that K and V are loaded for some work
_ITEMS_AN_SM = 4  # where there is enough work, so that none is idle for long at the end


class SelectionPlan(NamedTuple):
    """Plan of a forward call; a launch is for ``rows`` of queries and ``units`` at the most."""

    config: Any
    numbers: SelectionNumbers  # of the first launch
    workspace_size: int  # bytes
    num_rows: int  # of queries, in all launches
    num_units: int
    item_picks: int


def limits(spec: AttentionSpec) -> tuple[str, ...]:
    """Why kernels cannot serve a selection; empty if they can."""
    reasons = []
    beside = "beside BlockMask.from_selection"
    if spec.selection_block not in BLOCKS:
        reasons.append(f"blocks of {spec.selection_block} keys selected per query ({_either(BLOCKS)})")
    for name, d in (("d", spec.head_dim), ("d_v", spec.head_dim_v)):
        if d > HEAD_DIMS[-1]:
            reasons.append(f"{name} = {d} {beside} (up to {HEAD_DIMS[-1]})")
    refused = {
        "seqused_q / seqused_k": spec.has_seqused,
        "return_max_logits=True": spec.max_logits,
        "precise_gradients=True": spec.precise_gradients,
    }
    return (*reasons, *(f"{name} {beside}" for name, is_asked in refused.items() if is_asked))


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


def plan_selection(
    architecture: Architecture, spec: AttentionSpec, shapes: plan.Shapes, selected: tuple[int, ...], num_sms: int
) -> SelectionPlan:
    """The plan of a forward call whose selected blocks are (batch, heads, rows, top), on a GPU of so many SMs."""
    sets_batch, sets_heads, rows, top = selected
    heads_a_selection = 1 if sets_heads == spec.nheads != spec.nheads_k else spec.nheads // spec.nheads_k
    config = architecture.passes["selection"].configure(
        plan.DTYPES[spec.dtype],
        spec.head_dim,
        spec.head_dim_v,
        plan.features_of(spec, shapes),
        group=math.gcd(heads_a_selection, TILE_ROWS),
        block=spec.selection_block,
    )
    units = spec.nheads // config.group * math.prod(shapes.q[:-3])
    bytes_a_row = workspace_bytes(workspace_parts(config, 1, top))
    launch_rows = max(1, min(rows, _WORKSPACE // bytes_a_row, _MAX_PICKS // (top * sets_batch * sets_heads)))
    launch_units = max(1, min(units, _WORKSPACE // (bytes_a_row * launch_rows)))
    given = plan.numbers_of(spec, shapes)
    numbers = SelectionNumbers(
        **{name: given[name] for name in SelectionNumbers._fields if name in given},
        top=top,
        first_row=0,
        num_rows=launch_rows,
        first_unit=0,
        num_units=launch_units,
        sets_batch=sets_batch,
        sets_heads=sets_heads,
        columns=num_columns(shapes.k[-3], spec.selection_block, shapes.num_sequences),
    )
    step = config.picks_a_tile * config.num_mma_warpgroups
    steps = launch_rows * top * launch_units // (_ITEMS_AN_SM * num_sms * step)
    item_picks = step * max(_FEWEST_TILES, min(steps, _MOST_PICKS_AN_ITEM // step))
    size = workspace_bytes(workspace_parts(config, launch_units, launch_rows * top))
    return SelectionPlan(config, numbers, size, rows, units, item_picks)


def launch(kernel: Any, planned: SelectionPlan, spec: AttentionSpec, inputs: AttentionInputs, results: Results) -> None:
    """Fills out and lse of a call with at least a query and a key."""
    q, k, v = aligned(inputs.q), aligned(inputs.k), aligned(inputs.v)
    offsets_q, offsets_k = (None if x is None else compact(x) for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    sink = None if inputs.learnable_sink is None else compact(inputs.learnable_sink.float())
    workspace = torch.empty(planned.workspace_size, dtype=torch.uint8, device=inputs.q.device)
    n = planned.numbers
    for first in range(0, planned.num_rows, n.num_rows):
        stop = min(first + n.num_rows, planned.num_rows)
        tables = selection_tables(spec, inputs, (first, stop), planned.item_picks)
        for unit in range(0, planned.num_units, n.num_units):
            num_units = min(n.num_units, planned.num_units - unit)
            kernel(
                SelectionArguments(
                    mQ=q,
                    mK=k,
                    mV=v,
                    mO=results.out,
                    mLSE=results.lse,
                    mCuSeqlensQ=offsets_q,
                    mCuSeqlensK=offsets_k,
                    mSink=sink,
                    mColumns=tables.columns,
                    mEntries=tables.entries,
                    mItems=tables.items,
                    mWorkspace=workspace,
                    numbers=n._replace(first_row=first, num_rows=stop - first, first_unit=unit, num_units=num_units),
                )
            )
        if spec.has_sink and tables.real is not None:  # which is what lse holds of padding
            results.lse[:, first:stop].masked_fill_(~tables.real, -torch.inf)


def without_keys(inputs: AttentionInputs, results: Results) -> Results:
    """Fills out and lse where there is no key: zeros, and sinks of real rows."""
    results.out.zero_()
    results.lse.fill_(-torch.inf)
    sink = inputs.learnable_sink
    if sink is not None and not inputs.packed:
        results.lse.copy_(sink[:, None])
    return results
