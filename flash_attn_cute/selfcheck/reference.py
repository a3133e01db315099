"""Attention by the definition, one sequence at a time with all of its scores, for the self-check to compare with.

In float64 it is the truth. In the kernels' own dtype it is what plain PyTorch makes of the same call, whose error is
the yardstick for theirs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.problem.lengths import read_sequences
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec


class Results(NamedTuple):
    """Results of both passes, with zeros and an lse of -inf in padding; None where the call has no such input."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None
    max_logits: Tensor | None = None  # of both passes, those of the first


class Sequence(NamedTuple):
    """Where a sequence's real rows are: its batch entry, None if packed, and slices of rows."""

    entry: int | None
    rows_q: slice
    rows_k: slice

    def of(self, x: Tensor, rows: slice) -> Tensor:
        """The rows of a tensor of (batch, rows, ...) or (total, ...)."""
        return x[rows] if self.entry is None else x[self.entry, rows]


def sequences(inputs: AttentionInputs) -> Iterator[Sequence]:
    """The sequences of a call; reads offsets and lengths from the device."""
    for b, (q, k) in enumerate(zip(*read_sequences(inputs), strict=True)):
        yield Sequence(None if inputs.packed else b, slice(q.start, q.stop), slice(k.start, k.stop))


def attention(
    spec: AttentionSpec,
    inputs: AttentionInputs,
    shown: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    dtype: torch.dtype,
) -> Results:
    """Both passes of a call, every operation in one dtype.

    ``shown`` is what its block mask shows, (batch or 1, 1, seqlen_q, seqlen_k), bool.
    """
    given = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.learnable_sink
    q, k, v, bias, sink = (None if x is None else x.detach().to(dtype).requires_grad_() for x in given)
    assert q is not None
    assert k is not None
    assert v is not None
    out = q.new_zeros(*q.shape[:-1], spec.head_dim_v)
    lse = q.new_full(inputs.lse_shape, -torch.inf)
    max_logits = q.new_full((q.shape[-2],), -torch.inf) if spec.max_logits else None
    losses = []
    for one in sequences(inputs):
        parts = one.of(q, one.rows_q), one.of(k, one.rows_k), one.of(v, one.rows_k)
        one_q, one_k, one_v = (x.transpose(0, 1) for x in parts)
        scores = one_q.shape[0], one_q.shape[1], one_k.shape[1]
        visible = _visible(spec, inputs, shown, one, scores)
        if max_logits is not None and visible.numel():
            products = _products(spec, one_q, one_k).detach()
            max_logits = torch.maximum(max_logits, torch.where(visible, products, -torch.inf).amax((1, 2)))
        added = None if bias is None else _of_scores(bias, inputs, one, scores)
        one_out, one_lse = _sequence(spec, one_q, one_k, one_v, visible, added, sink)
        (out if one.entry is None else out[one.entry])[one.rows_q] = one_out.detach().transpose(0, 1)
        (lse if one.entry is None else lse[one.entry])[:, one.rows_q] = one_lse.detach()
        losses.append((one_out.transpose(0, 1) * one.of(dout, one.rows_q).to(dtype)).sum())
        if dlse is not None:
            by_row = dlse[:, one.rows_q] if one.entry is None else dlse[one.entry, :, one.rows_q]
            losses.append((torch.where(one_lse.isinf(), 0, one_lse) * by_row.to(dtype)).sum())
    leaves = [x for x in (q, k, v, bias, sink) if x is not None]
    found = iter(torch.autograd.grad(torch.stack(losses).sum(), leaves, materialize_grads=True))
    dq, dk, dv, dbias, dsink = (None if x is None else next(found) for x in (q, k, v, bias, sink))
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return Results(out, lse, dq, dk, dv, dbias, dsink, max_logits)


def _of_scores(x: Tensor, inputs: AttentionInputs, one: Sequence, scores: tuple[int, int, int]) -> Tensor:
    """A mask's or bias's elements of a sequence, (heads, queries, keys)."""
    heads, _, keys = scores
    if one.entry is None:
        columns = max(keys, x.shape[-1])
        return x.expand(heads, inputs.q.shape[0], columns)[:, one.rows_q, :keys]
    full = x.expand(inputs.q.shape[0], heads, inputs.q.shape[1], inputs.k.shape[1])
    return full[one.entry, :, one.rows_q, :keys]


def _visible(
    spec: AttentionSpec, inputs: AttentionInputs, shown: Tensor | None, one: Sequence, scores: tuple[int, int, int]
) -> Tensor:
    """Which keys each query sees, (heads, queries, keys), bool."""
    _, queries, keys = scores
    device = inputs.q.device
    i = torch.arange(queries, device=device)[:, None] + keys - queries
    j = torch.arange(keys, device=device)[None]
    visible = torch.ones(scores, dtype=torch.bool, device=device)
    if spec.window_left is not None:
        visible &= j >= i - spec.window_left
    if spec.window_right is not None:
        visible &= j <= i + spec.window_right
    if inputs.mask is not None:
        visible &= _of_scores(inputs.mask, inputs, one, scores)
    if shown is not None:
        assert one.entry is not None
        visible &= shown[one.entry if shown.shape[0] > 1 else 0, :, one.rows_q, one.rows_k]
    return visible


def _products(spec: AttentionSpec, q: Tensor, k: Tensor) -> Tensor:
    """Scaled products of a sequence, (heads, queries, keys)."""
    k = k[:, None].expand(-1, q.shape[0] // k.shape[0], -1, -1).flatten(0, 1)
    return spec.softmax_scale * (q @ k.mT)


def _sequence(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out and lse of a sequence: q (heads, queries, d), k and v (heads_k, keys, d or d_v)."""
    v = v[:, None].expand(-1, q.shape[0] // k.shape[0], -1, -1).flatten(0, 1)
    scores = _products(spec, q, k)
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if bias is not None:
        # Selected, not multiplied: what stands where nothing is seen may be NaN.
        scores = scores + torch.where(visible, bias, 0)
        visible = visible & ~scores.detach().isneginf()
    scores = torch.where(visible, scores, -torch.inf)
    if sink is not None:
        scores = torch.cat([sink[:, None, None].expand(*scores.shape[:2], 1), scores], -1)
    if not scores.shape[-1]:
        return q @ k.new_zeros(q.shape[0], q.shape[2], v.shape[2]), q.new_full(q.shape[:2], -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    P = (scores - peak).exp()
    row_sum = P.sum(-1, keepdim=True)
    sees = row_sum > 0
    safe = torch.where(sees, row_sum, 1)
    lse = torch.where(sees, peak + safe.log(), -torch.inf)
    P = P[..., P.shape[-1] - k.shape[1] :]
    return (P / safe) @ v, lse.squeeze(-1)
