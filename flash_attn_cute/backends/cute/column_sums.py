"""Sums of each key's probabilities on a GPU, by a kernel of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.cute import counters
from flash_attn_cute.backends.cute.layouts import compact, operands_of
from flash_attn_cute.backends.cute.plan import Plan, Shapes, plan_column_sums
from flash_attn_cute.backends.cute.score_layout import num_sequences
from flash_attn_cute.backends.packing import as_packed
from flash_attn_cute.kernels.arguments import ColumnSumsArguments
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec

LaunchOf = Callable[..., tuple[Any, Plan, bool]]  # ``CuteBackend.launch_of``


def column_sums(launch_of: LaunchOf, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """See ``Backend.column_sums``; a dense batch with padding is packed."""
    *batch, seqlen_k, _, _ = inputs.k.shape
    if spec.has_seqused and not inputs.packed:
        sums = column_sums(launch_of, spec, as_packed(inputs), lse.transpose(0, 1).flatten(1))
        return sums.unflatten(1, (*batch, seqlen_k)).transpose(0, 1)
    sums = torch.zeros(*batch, spec.nheads, seqlen_k, dtype=torch.float32, device=lse.device)
    if not (sums.numel() and lse.numel()) or (inputs.packed and not num_sequences(inputs)):
        return sums
    shapes = Shapes(inputs.q.shape, inputs.k.shape, num_sequences(inputs), inputs.max_seqlen_q)
    kernel, planned, _ = launch_of(plan_column_sums, lse.device, spec, shapes)
    arguments = ColumnSumsArguments(
        **operands_of(inputs, "QK"),
        mLSE=compact(lse),
        mSums=sums,
        mNextTile=counters.next_tile(lse.device.index),
        numbers=planned.numbers,
    )
    kernel(arguments)
    return sums
