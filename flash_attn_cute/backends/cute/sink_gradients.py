"""Gradients of learnable sinks, which follow from what a backward pass leaves in its workspace."""

import math

import torch
from torch import Tensor

from flash_attn_cute.backends.cute.plan import Plan
from flash_attn_cute.backends.cute.score_layout import num_sequences
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec

_LOG2_E = math.log2(math.e)


def sink_gradient(
    spec: AttentionSpec, inputs: AttentionInputs, planned: Plan, workspace: Tensor, sink: Tensor
) -> Tensor:
    """The gradient of a sink (nheads,): minus the sum over queries of the sink's own P times delta.

    Inputs are as the kernels got them. The workspace of the backward pass begins with lse, in base 2 or with a bias
    natural, and delta.
    """
    tile_m = planned.config.tile_m
    shape = 2, spec.nheads, planned.numbers.num_m_blocks * tile_m
    lse, delta = workspace[: 4 * math.prod(shape)].view(torch.float32).view(shape)
    logits = sink.float()[:, None]
    weights = torch.exp(logits - lse) if spec.has_bias else torch.exp2(logits * _LOG2_E - lse)
    weights.mul_(delta)
    if not spec.packing_invariant:
        return _minus(weights.sum(1)).to(sink.dtype)
    if planned.config.permutes_rows:  # of sixteen: pairs of both groups of eight in turn
        weights = weights.view(len(weights), -1, 4, 2, 2).transpose(2, 3).flatten(1)
    offsets = inputs.cu_seqlens_q
    if offsets is None:
        batch, seqlen = inputs.q.shape[:2]
        first = _first_rows(batch, -(-seqlen // tile_m) * tile_m, sink.device)
    else:  # as ``kernels.common.workspace.packed_block`` has it
        first = offsets[:-1] // tile_m * tile_m + _first_rows(num_sequences(inputs), tile_m, sink.device)
    return _minus(sum_by_documents(weights, first)).to(sink.dtype)


def sink_gradient_without_keys(
    spec: AttentionSpec, inputs: AttentionInputs, sink: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor:
    """A sink that is all that real queries see is their lse; queries of padding have one of -inf."""
    if dlse is None:
        return torch.zeros_like(sink)
    by_head = dlse.where(lse != -torch.inf, 0).movedim(-2, 0).flatten(1)
    if not spec.packing_invariant:
        return by_head.sum(1).to(sink.dtype)
    offsets = inputs.cu_seqlens_q
    batch, seqlen = inputs.q.shape[:2]
    first = _first_rows(batch, seqlen, sink.device) if offsets is None else offsets[:-1]
    return sum_by_documents(by_head, first).to(sink.dtype)


def sum_by_documents(x: Tensor, first: Tensor) -> Tensor:
    """Sums of (nheads, rows) over all rows, (nheads,): each document by itself, then what comes of them.

    A document's rows are added in pairs that are counted from its first row: in each round a row gets the sum that is
    twice as far away as in the round before, if that is of the same document. So if all other rows are zeros, the
    result is the document's own sum, bit by bit, whatever else there is.

    Args:
        x: what is to be summed, 0 in padding.
        first: (documents,), the first row of each, int32, in ascending order. Rows before them are of none.
    """
    rows = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    document = torch.searchsorted(first, rows, right=True)
    distance = 1
    while distance < x.shape[1]:
        is_same = document[distance:] == document[:-distance]
        added = x[:, :-distance] + x[:, distance:].where(is_same, 0)
        x = torch.cat((added, x[:, -distance:]), 1)
        distance *= 2
    begins = torch.cat((document[:1] > -1, document[1:] != document[:-1]))
    return x.where(begins, 0).sum(1)


def _minus(x: Tensor) -> Tensor:
    """-x, where a zero is not negative: a document that sees nothing has the bits that it has alone."""
    return 0 - x


def _first_rows(num: int, rows: int, device: torch.device) -> Tensor:
    """The first row of each of so many sequences that have as many rows, int32."""
    return torch.arange(num, dtype=torch.int32, device=device).mul_(rows)
