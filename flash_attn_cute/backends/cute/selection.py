"""Calls in which each query selects key blocks, on a GPU: planned, and launched for some queries at a time."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute import plan
from flash_attn_cute.backends.cute.layouts import aligned, compact
from flash_attn_cute.backends.cute.selection_tables import SelectionTables, num_columns, num_items, selection_tables
from flash_attn_cute.kernels.arguments import (
    SelectionArguments,
    SelectionBackwardArguments,
    SelectionNumbers,
    workspace_bytes,
)
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.registry import Architecture
from flash_attn_cute.kernels.selection import BLOCKS, HEAD_DIMS, TILE_ROWS, backward_workspace_parts, workspace_parts
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Results

_LOG2_E = math.log2(math.e)
_BESIDE = "beside BlockMask.from_selection"
_WORKSPACE = 3 << 30  # bytes of a launch at the most, unless one query takes more
_MAX_PICKS = 2**31 - 1  # of all sets of a launch
_MOST_PICKS_AN_ITEM = 2048
_FEWEST_TILES = 4  # of a warpgroup in an item, so that K and V are loaded for some work
_ITEMS_AN_SM = 4  # where there is enough work, so that none is idle for long at the end


class SelectionPlan(NamedTuple):
    """Plan of a pass; a launch is for ``rows`` of queries and ``units`` at the most."""

    config: Any
    numbers: SelectionNumbers  # of the first launch
    workspace_size: int  # bytes
    num_rows: int  # of queries, in all launches
    num_units: int
    item_picks: int


def limits(spec: AttentionSpec) -> tuple[str, ...]:
    """Why kernels cannot serve a selection; empty if they can."""
    reasons = []
    if spec.selection_block not in BLOCKS:
        reasons.append(f"blocks of {spec.selection_block} keys selected per query ({_either(BLOCKS)})")
    for name, d in (("d", spec.head_dim), ("d_v", spec.head_dim_v)):
        if d > HEAD_DIMS[-1]:
            reasons.append(f"{name} = {d} {_BESIDE} (up to {HEAD_DIMS[-1]})")
    refused = {
        "seqused_q / seqused_k": spec.has_seqused,
        "return_max_logits=True": spec.max_logits,
        "precise_gradients=True": spec.precise_gradients,
    }
    return (*reasons, *(f"{name} {_BESIDE}" for name, is_asked in refused.items() if is_asked))


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


def plan_selection(
    architecture: Architecture, spec: AttentionSpec, shapes: plan.Shapes, selected: tuple[int, ...], num_sms: int
) -> SelectionPlan:
    """The plan of a forward call whose selected blocks are (batch, heads, rows, top), on a GPU of so many SMs."""
    config = architecture.passes["selection"].configure(
        *_given(spec, shapes), group=_heads_of_a_tile(spec, selected), block=spec.selection_block
    )

    def parts(units: int, rows: int, top: int, item_picks: int) -> dict[str, tuple[int, ...]]:
        del item_picks
        return workspace_parts(config, units, rows * top)

    return _plan(config, spec, shapes, selected, num_sms, parts)


def plan_selection_backward(
    architecture: Architecture, spec: AttentionSpec, shapes: plan.Shapes, selected: tuple[int, ...], num_sms: int
) -> SelectionPlan:
    """The plan of a backward call, likewise; selected blocks have 64 keys."""
    config = architecture.passes["selection_backward"].configure(
        *_given(spec, shapes), group=_heads_of_a_tile(spec, selected)
    )
    columns = num_columns(shapes.k[-3], config.tile_n, shapes.num_sequences)

    def parts(units: int, rows: int, top: int, item_picks: int) -> dict[str, tuple[int, ...]]:
        items = num_items(rows * top, columns, item_picks) if item_picks else 0
        return backward_workspace_parts(config, units, rows, rows * top, items)

    return _plan(config, spec, shapes, selected, num_sms, parts)


def _given(spec: AttentionSpec, shapes: plan.Shapes) -> tuple[str, int, int, Features]:
    return plan.DTYPES[spec.dtype], spec.head_dim, spec.head_dim_v, plan.features_of(spec, shapes)


def _heads_of_a_tile(spec: AttentionSpec, selected: tuple[int, ...]) -> int:
    """Heads that are rows of one tile: of those that select together, as many as divide it."""
    alone = selected[1] == spec.nheads != spec.nheads_k
    return math.gcd(1 if alone else spec.nheads // spec.nheads_k, TILE_ROWS)


def _plan(
    config: Any,
    spec: AttentionSpec,
    shapes: plan.Shapes,
    selected: tuple[int, ...],
    num_sms: int,
    parts: Callable[[int, int, int, int], dict[str, tuple[int, ...]]],
) -> SelectionPlan:
    """The plan of either pass.

    ``parts`` gives those of its workspace, of so many units, rows, top, and picks an item; of 0 picks without items.
    """
    sets_batch, sets_heads, rows, top = selected
    units = spec.nheads // config.group * math.prod(shapes.q[:-3])
    bytes_a_row = workspace_bytes(parts(1, 1, top, 0))
    launch_rows = max(1, min(rows, _WORKSPACE // bytes_a_row, _MAX_PICKS // (top * sets_batch * sets_heads)))
    launch_units = max(1, min(units, _WORKSPACE // (bytes_a_row * launch_rows)))
    step = config.picks_a_tile * config.num_mma_warpgroups
    steps = launch_rows * top * launch_units // (_ITEMS_AN_SM * num_sms * step)
    item_picks = step * max(_FEWEST_TILES, min(steps, _MOST_PICKS_AN_ITEM // step))
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
        columns=num_columns(shapes.k[-3], config.tile_n, shapes.num_sequences),
    )
    size = workspace_bytes(parts(launch_units, launch_rows, top, item_picks))
    return SelectionPlan(config, numbers, size, rows, units, item_picks)


def launch(kernel: Any, planned: SelectionPlan, spec: AttentionSpec, inputs: AttentionInputs, results: Results) -> None:
    """Fills out and lse of a call with at least a query and a key."""
    q, k, v = aligned(inputs.q), aligned(inputs.k), aligned(inputs.v)
    offsets_q, offsets_k = (None if x is None else compact(x) for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    sink = None if inputs.learnable_sink is None else compact(inputs.learnable_sink.float())
    workspace = torch.empty(planned.workspace_size, dtype=torch.uint8, device=q.device)
    for rows, tables in _tables_of_launches(spec, inputs, planned):
        for units in _units_of_launches(planned):
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
                    numbers=planned.numbers._replace(**rows, **units),
                )
            )
        if spec.has_sink and tables.real is not None:  # which is what lse holds of padding
            first = rows["first_row"]
            results.lse[:, first : first + rows["num_rows"]].masked_fill_(~tables.real, -torch.inf)


def launch_backward(kernel: Any, planned: SelectionPlan, call: BackwardCall, grads: Gradients) -> Tensor | None:
    """Fills dq, dk and dv of a call with at least a query and a key, whose selected blocks have 64 keys.

    Returns the gradient of a sink, if it is needed.
    """
    spec, inputs, n = call.spec, call.inputs, planned.numbers
    dk, dv = (torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) for x in grads[1:3])
    workspace = torch.empty(planned.workspace_size, dtype=torch.uint8, device=dk.device)
    offsets_q, offsets_k = (None if x is None else compact(x) for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    arguments = SelectionBackwardArguments(
        mQ=aligned(inputs.q),
        mK=aligned(inputs.k),
        mV=aligned(inputs.v),
        mO=aligned(call.out),
        mdO=aligned(call.dout),
        mLSE=call.lse,
        mdLSE=None if call.dlse is None else compact(call.dlse),
        mdQ=grads.dq,
        mdK=dk,
        mdV=dv,
        mCuSeqlensQ=offsets_q,
        mCuSeqlensK=offsets_k,
        mColumns=None,
        mEntries=None,
        mItems=None,
        mItemSpans=None,
        mWorkspace=workspace,
        numbers=n,
    )
    group, dsinks = planned.config.group, torch.zeros_like(call.lse[..., 0], dtype=torch.float32).view(-1)
    sinks = None
    if call.need_dsink and inputs.learnable_sink is not None:
        sinks = inputs.learnable_sink.float().expand(len(dsinks) // spec.nheads, -1).reshape(-1, group)
    for rows, tables in _tables_of_launches(spec, inputs, planned):
        for units in _units_of_launches(planned):
            numbers = n._replace(**rows, **units)
            kernel(
                arguments._replace(
                    mColumns=tables.columns,
                    mEntries=tables.entries,
                    mItems=tables.items,
                    mItemSpans=tables.item_spans,
                    numbers=numbers,
                )
            )
            if sinks is not None:
                _add_dsinks(dsinks.view(-1, group), sinks, workspace, numbers)
    grads.dk.copy_(dk)
    grads.dv.copy_(dv)
    if sinks is None or inputs.learnable_sink is None:
        return None
    return dsinks.view(-1, spec.nheads).sum(0).to(inputs.learnable_sink.dtype)


def _add_dsinks(dsinks: Tensor, sinks: Tensor, workspace: Tensor, numbers: SelectionNumbers) -> None:
    """Adds a launch's gradients of sinks, (units, heads of a group), from lse in base 2 and delta in its workspace."""
    shape = numbers.num_units, numbers.num_rows, sinks.shape[1]
    size = 4 * math.prod(shape)
    lse, delta = (
        workspace[start : start + size].view(torch.float32).view(shape) for start in (0, workspace_bytes({"": shape}))
    )
    units = slice(numbers.first_unit, numbers.first_unit + numbers.num_units)
    dsinks[units] -= (torch.exp2(sinks[units, None] * _LOG2_E - lse) * delta).sum(1)


def _tables_of_launches(
    spec: AttentionSpec, inputs: AttentionInputs, planned: SelectionPlan
) -> Iterator[tuple[dict[str, int], SelectionTables]]:
    """Rows of each launch, as its numbers, and their tables."""
    for first in range(0, planned.num_rows, planned.numbers.num_rows):
        stop = min(first + planned.numbers.num_rows, planned.num_rows)
        tables = selection_tables(spec, inputs, (first, stop), planned.item_picks)
        yield {"first_row": first, "num_rows": stop - first}, tables


def _units_of_launches(planned: SelectionPlan) -> Iterator[dict[str, int]]:
    """Units of each launch for some rows, as its numbers."""
    at_once = planned.numbers.num_units
    for first in range(0, planned.num_units, at_once):
        yield {"first_unit": first, "num_units": min(at_once, planned.num_units - first)}


def without_keys(inputs: AttentionInputs, results: Results) -> Results:
    """Fills out and lse where there is no key: zeros, and sinks of real rows."""
    results.out.zero_()
    results.lse.fill_(-torch.inf)
    sink = inputs.learnable_sink
    if sink is not None and not inputs.packed:
        results.lse.copy_(sink[:, None])
    return results
