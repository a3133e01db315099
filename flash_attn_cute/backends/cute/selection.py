"""Calls in which each query selects key blocks, on a GPU, launched for some queries at a time."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute.layouts import aligned, compact, operands_of, with_a_key
from flash_attn_cute.backends.cute.plan import Shapes
from flash_attn_cute.backends.cute.score_layout import num_sequences
from flash_attn_cute.backends.cute.selection_plan import SelectionPlan, plan_selection, plan_selection_backward
from flash_attn_cute.kernels.arguments import (
    SelectionArguments,
    SelectionBackwardArguments,
    SelectionNumbers,
    workspace_bytes,
)
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Results

_LOG2_E = math.log2(math.e)
LaunchOf = Callable[..., tuple[Any, SelectionPlan, bool]]  # ``CuteBackend.launch_of``


def forward(launch_of: LaunchOf, spec: AttentionSpec, inputs: AttentionInputs, results: Results) -> None:
    """Fills out and lse of a call with at least a query, and raises its largest logits; one with padding is packed."""
    if inputs.packed and not num_sequences(inputs):
        results.out.zero_()
        results.lse.fill_(-torch.inf)
        return
    inputs = with_a_key(inputs)
    kernel, planned, _ = launch_of(plan_selection, inputs.q.device, spec, *_shapes(inputs))
    sink = None if inputs.learnable_sink is None else compact(inputs.learnable_sink.float())
    tables, workspace = _workspace(planned, inputs.q)
    arguments = SelectionArguments(
        **operands_of(inputs),
        mO=results.out,
        mLSE=results.lse,
        mMaxLogits=results.max_logits,
        mSink=sink,
        mSelected=inputs.selected,
        mTables=tables,
        mWorkspace=workspace,
        numbers=planned.numbers,
    )
    for numbers in _launches(planned):
        kernel(arguments._replace(numbers=numbers))


def _workspace(planned: SelectionPlan, x: Tensor) -> list[Tensor]:
    """Room for tables and for what else a launch leaves, on the device of x."""
    room = torch.empty(planned.workspace_size, dtype=torch.uint8, device=x.device)
    return [room[: planned.tables_size], room[planned.tables_size :]]


def _shapes(inputs: AttentionInputs, *, has_dlse: bool = False) -> tuple[Shapes, torch.Size]:
    """Shapes that a plan follows from: of the call, and of the selected blocks."""
    assert inputs.selected is not None
    return Shapes(inputs.q.shape, inputs.k.shape, num_sequences(inputs), 0, has_dlse), inputs.selected.shape


def backward(launch_of: LaunchOf, call: BackwardCall, grads: Gradients, sink: Tensor | None) -> Tensor | None:
    """Fills dq, dk and dv of a call with at least a query and a key; one with padding is packed.

    Returns the gradient of a sink, if one is given.
    """
    spec, inputs = call.spec, call.inputs
    shapes = _shapes(inputs, has_dlse=call.dlse is not None)
    kernel, planned, _ = launch_of(plan_selection_backward, inputs.q.device, spec, *shapes)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) for x in grads[1:3])
    tables, workspace = _workspace(planned, dk)
    arguments = SelectionBackwardArguments(
        **operands_of(inputs),
        mO=aligned(call.out),
        mdO=aligned(call.dout),
        mLSE=call.lse,
        mdLSE=None if call.dlse is None else compact(call.dlse),
        mdQ=grads.dq,
        mdK=dk,
        mdV=dv,
        mSelected=inputs.selected,
        mTables=tables,
        mWorkspace=workspace,
        numbers=planned.numbers,
    )
    group, sets = planned.config.group, math.prod(call.lse.shape[:-1])
    dsinks = torch.zeros(sets, dtype=torch.float32, device=dk.device)
    sinks = None
    if sink is not None:
        sinks = sink.float().expand(len(dsinks) // spec.nheads, -1).reshape(-1, group)
    for numbers in _launches(planned):
        kernel(arguments._replace(numbers=numbers))
        if sinks is not None:
            _add_dsinks(dsinks.view(-1, group), sinks, workspace, numbers)
    grads.dk.copy_(dk)
    grads.dv.copy_(dv)
    return None if sink is None else dsinks.view(-1, spec.nheads).sum(0).to(sink.dtype)


def _add_dsinks(dsinks: Tensor, sinks: Tensor, workspace: Tensor, numbers: SelectionNumbers) -> None:
    """Adds a launch's gradients of sinks, (units, heads of a group), from lse in base 2 and delta in its workspace."""
    shape = numbers.num_units, numbers.num_rows, sinks.shape[1]
    size = 4 * math.prod(shape)
    lse, delta = (
        workspace[start : start + size].view(torch.float32).view(shape) for start in (0, workspace_bytes({"": shape}))
    )
    units = slice(numbers.first_unit, numbers.first_unit + numbers.num_units)
    dsinks[units] -= (torch.exp2(sinks[units, None] * _LOG2_E - lse) * delta).sum(1)


def _launches(planned: SelectionPlan) -> Iterator[SelectionNumbers]:
    """Numbers of each launch. Those for the same rows follow each other: the first makes tables for all of them."""
    n = planned.numbers
    for first in range(0, planned.num_rows, n.num_rows):
        num_rows = min(n.num_rows, planned.num_rows - first)
        for unit in range(0, planned.num_units, n.num_units):
            num_units = min(n.num_units, planned.num_units - unit)
            yield n._replace(first_row=first, num_rows=num_rows, first_unit=unit, num_units=num_units)
