"""Launches of both passes of a call, of which there are shapes alone, for people to read."""

import math
from dataclasses import fields
from typing import Any, NamedTuple

from flash_attn_cute.backends.cute import plan
from flash_attn_cute.backends.cute.layouts import with_a_key
from flash_attn_cute.backends.cute.score_layout import forward_shapes, num_sequences, runs_packed, score_layout
from flash_attn_cute.backends.cute.selection_plan import SelectionPlan, plan_selection, plan_selection_backward
from flash_attn_cute.backends.packing import (
    as_one_batch,
    as_packed,
    may_have_fully_masked,
    needs_intervals,
    over_scores,
)
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.registry import Architecture
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec


class PassPlan(NamedTuple):
    """A pass of a call as it is launched; see ``flash_attn_cute.explain``."""

    packed: bool  # whether the kernels get packed sequences; they may where the user has given a dense batch
    tile_m: int  # queries of a tile (forward), or of a block that is loaded at once (backward)
    tile_n: int  # keys of a block (forward), or of a tile (backward)
    stages: int | None  # blocks that are loaded ahead, where that is the configuration's to say
    cluster: int  # CTAs that work on a tile together
    persistent: bool  # whether a CTA works on many tiles
    deterministic: bool  # whether the same inputs give the same bits, asked for or not
    workspace_bytes: int
    config: Any  # all that is compiled into the kernels
    numbers: Any  # all that they are given besides tensors

    def describe(self, name: str, packing_invariant: bool) -> str:
        """Lines about what the pass of this name, forward or backward, launches."""
        if name == "forward":
            parts = [f"tiles of {self.tile_m} queries, blocks of {self.tile_n} keys"]
        else:
            parts = [f"tiles of {self.tile_n} keys, blocks of {self.tile_m} queries"]
        if self.stages is not None:
            parts.append(f"{self.stages} stages")
        parts.append("a CTA a tile" if self.cluster == 1 else f"clusters of {self.cluster} CTAs")
        parts.append("persistent" if self.persistent else "not persistent")
        parts.append("packed sequences" if self.packed else "a dense batch")
        parts.append("deterministic" if self.deterministic else "not deterministic")
        if packing_invariant:
            parts.append("the same bits in any packing")
        if self.workspace_bytes:
            parts.append(f"{self.workspace_bytes / 2**20:.1f} MiB of workspace")
        config = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        features = config.pop("features")
        flags = Features.format({field.name: getattr(features, field.name) for field in fields(features)})
        compiled = ", ".join(f"{field} = {value}" for field, value in config.items())
        given = {field: value for field, value in self.numbers._asdict().items() if value is not None}
        numbers = ", ".join(f"{field} = {value:.6g}" for field, value in given.items())
        lines = [", ".join(parts), f"compiled: {compiled}", f"features: {flags or 'none'}", f"given: {numbers}"]
        return "\n    ".join(lines)


Passes = tuple[PassPlan | None, PassPlan | None]  # forward and backward; None where nothing is launched


def planned(
    architecture: Architecture,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    num_sms: int,
    *,
    need_dbias: bool,
    blocks: Any = None,
    halves: int = 0,
) -> Passes:
    """The launches of a call.

    Inputs are on the meta device, where nothing is computed; offsets that are the same memory are the same tensor. A
    block mask is not among them: ``blocks`` are its batch entries and heads that differ, and those whose launch orders
    do, and ``halves`` the blocks of 64 x 64 that its half columns list, 0 if it has columns of 128 keys.
    """
    intervals = needs_intervals(spec)
    if intervals:
        spec, inputs, _ = as_one_batch(spec, inputs)
    bias, inputs = inputs.bias if need_dbias else None, over_scores(inputs)
    has_queries, has_keys = inputs.q.numel() > 0, inputs.k.numel() > 0
    forward = backward = None
    if has_queries and (has_keys or spec.packed or spec.has_seqused):
        given = with_a_key(as_packed(inputs) if spec.has_seqused and not spec.packed else inputs)
        layout = score_layout(given, blocks=blocks)._replace(intervals=intervals)
        forward = _for_people(plan.plan_forward(architecture, spec, forward_shapes(given, layout), num_sms))
    no_sequences = inputs.cu_seqlens_q is not None and inputs.cu_seqlens_q.shape[0] == 1
    if has_queries and has_keys and not no_sequences:
        repacked = runs_packed(spec, inputs) and not spec.packed
        layout = score_layout(inputs, bias, is_repacked=repacked, blocks=blocks)
        layout = layout._replace(intervals=intervals, half_entries=halves)
        given = as_packed(inputs) if repacked else inputs
        sequences = num_sequences(given) * (2 if may_have_fully_masked(given, spec.window_right) else 1)
        shapes = plan.Shapes(given.q.shape, given.k.shape, sequences, given.max_seqlen_q, False, layout)
        backward = _for_people(plan.plan_backward(architecture, spec, shapes, num_sms))
    return forward, backward


def planned_selection(
    architecture: Architecture, spec: AttentionSpec, inputs: AttentionInputs, num_sms: int, selected: tuple[int, ...]
) -> Passes:
    """The first launches of a call in which each query selects key blocks, of tensors as in ``planned``.

    ``selected`` is the shape of the selected blocks, (batch, heads, rows, top).
    """
    if not (inputs.q.numel() and inputs.k.numel()):
        return None, None
    if spec.has_seqused and not inputs.packed:
        inputs, selected = as_packed(inputs), (1, selected[1], math.prod(inputs.q.shape[:2]), selected[3])
    shapes = plan.Shapes(inputs.q.shape, inputs.k.shape, num_sequences(inputs), 0)
    forward = plan_selection(architecture, spec, shapes, selected, num_sms)
    backward = plan_selection_backward(architecture, spec, shapes, selected, num_sms)
    return _for_people(forward), _for_people(backward)


def _for_people(planned: plan.Plan | SelectionPlan) -> PassPlan:
    config = planned.config
    return PassPlan(
        packed=config.features.packed,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        stages=getattr(config, "stages", None),
        cluster=config.ctas_a_tile,
        persistent=plan.takes_tiles(config),
        deterministic=config.pass_name != "backward" or config.features.deterministic,
        workspace_bytes=planned.workspace_size,
        config=config,
        numbers=planned.numbers,
    )
