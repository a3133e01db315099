"""Calls rewritten as other packed sequences or batches: same rows, same results, fewer cases for kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec


def as_packed(inputs: AttentionInputs) -> AttentionInputs:
    """Rewrites a dense batch with padding as packed sequences whose slots have one size; selected blocks are copied."""
    q, k, v = inputs.q, inputs.k, inputs.v
    cu_q, cu_k = (torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device).mul_(x.shape[1]) for x in (q, k))
    selected = inputs.selected
    if selected is not None:
        selected = selected.expand(q.shape[0], -1, -1, -1).transpose(0, 1).flatten(1, 2)[None]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return inputs._replace(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, selected=selected)


def over_scores(inputs: AttentionInputs) -> AttentionInputs:
    """Mask and bias as views of (batch, heads, queries, keys), packed (1, heads, queries, keys): nothing is copied."""
    if inputs.mask is None and inputs.bias is None:
        return inputs
    return inputs._replace(mask=_expanded(inputs, inputs.mask), bias=_expanded(inputs, inputs.bias))


def _expanded(inputs: AttentionInputs, x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    *batch, rows, nheads, _ = inputs.q.shape
    # Packed, it may have more keys than any sequence, or any number of keys if no bound is known.
    keys = min(inputs.max_seqlen_k, inputs.k.shape[-3]) if not x.ndim or x.shape[-1] == 1 else x.shape[-1]
    return x.expand(batch[0] if batch else 1, nheads, rows, keys)


def dense_has_fully_masked(inputs: AttentionInputs, window_right: int | None) -> bool:
    """Whether a dense batch without padding has fully masked queries; see ``split_fully_masked``."""
    return window_right is not None and inputs.q.shape[1] - inputs.k.shape[1] > window_right


def may_have_fully_masked(inputs: AttentionInputs, window_right: int | None) -> bool:
    """Whether ``split_fully_masked`` splits the sequences."""
    cu_q, cu_k, used_q, used_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k
    if window_right is None or cu_q is None or cu_k is None:
        return False
    q, k = cu_q if used_q is None else used_q, cu_k if used_k is None else used_k
    return q is not k and (q.is_meta or not q.is_set_to(k))


def split_fully_masked(inputs: AttentionInputs, window_right: int | None) -> AttentionInputs:
    """Splits each packed sequence in two: its fully masked queries, with no keys; and all other rows.

    Under a window bounded to the right, the first seqlen_q - seqlen_k - right queries of a sequence are fully masked,
    and all queries if it has no keys. Kernels give them a P of zero. But products take a whole block of queries, and
    zero times NaN or Inf in q, dout or dlse of a fully masked query is NaN. No tile of keys adds to a sequence that has
    no keys.

    Sequences whose lengths of queries and keys are equal, as they lie in the same memory, have no such queries and are
    not split. The host reads nothing from the device; where it cannot rule such queries out, it launches some small
    operators.
    """
    cu_q, cu_k, used_q, used_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k
    if window_right is None or cu_q is None or cu_k is None or not may_have_fully_masked(inputs, window_right):
        return inputs
    # No more than a sequence owns, or the offsets between its two parts would lie behind its end.
    lengths_q = cu_q.diff() if used_q is None else torch.minimum(used_q, cu_q.diff())
    lengths_k = cu_k.diff() if used_k is None else used_k
    right = min(window_right, inputs.q.shape[0])  # no sequence is longer, and the difference stays within 32 bits
    fully_masked = (lengths_q - lengths_k - right).clamp_(min=0)
    cu_q, cu_k = (_interleaved(cu, cu)[:-1] for cu in (cu_q, cu_k))
    cu_q[1::2] += fully_masked
    if used_q is not None:
        used_q = _interleaved(fully_masked, lengths_q - fully_masked)
    if used_k is not None:
        used_k = _interleaved(torch.zeros_like(used_k), used_k)
    return inputs._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k)


def _interleaved(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), 1).flatten()


def without_padding(inputs: AttentionInputs) -> AttentionInputs:
    """Puts zeros into q, k and v where a block mask has padding, so that their contents reach nothing.

    Kernels mask the scores of padding. But products take whole blocks, which may hold padding and other rows, and zero
    times NaN is NaN.
    """
    real = None if inputs.block_mask is None else inputs.block_mask.real
    if real is None:
        return inputs
    q, k, v = zeroed(inputs.q, real.queries), zeroed(inputs.k, real.keys), zeroed(inputs.v, real.keys)
    return inputs._replace(q=q, k=k, v=v)


def without_padding_of_queries(x: Tensor, inputs: AttentionInputs) -> Tensor:
    """Puts zeros into the gradient of out where a block mask has padding."""
    real = None if inputs.block_mask is None else inputs.block_mask.real
    return x if real is None else zeroed(x, real.queries)


class Intervals(NamedTuple):
    """Intervals that rows of a dense batch attend to beside a block mask, and which rows are real."""

    keys: Tensor  # (batch, seqlen_q, 2), int32: the first visible key of each query, and the one behind the last
    queries: Tensor  # (batch, seqlen_k, 2), int32: likewise the queries of each key
    real_q: Tensor  # (batch, seqlen_q), bool: queries that are no padding
    real_k: Tensor  # (batch, seqlen_k), bool: keys that are no padding


def needs_intervals(spec: AttentionSpec) -> bool:
    """Whether lengths or a window restrict a call beside its block mask."""
    has_window = spec.window_left is not None or spec.window_right is not None
    return spec.has_block_mask and (spec.packed or spec.has_seqused or has_window)


def as_one_batch(spec: AttentionSpec, inputs: AttentionInputs) -> tuple[AttentionSpec, AttentionInputs, Intervals]:
    """Rewrites sequences, lengths and windows beside a block mask as intervals; packed rows become one batch entry.

    A block mask is one of all rows, wherever sequences begin. Its blocks may hold rows of several sequences, and
    padding. So q, k and v come back with zeros in the padding, and q also in fully masked rows. The host waits for
    nothing.
    """
    q, k, v = (x[None] if spec.packed else x for x in (inputs.q, inputs.k, inputs.v))
    sequences_q = _sequences(q, inputs.cu_seqlens_q, inputs.seqused_q)
    sequences_k = _sequences(k, inputs.cu_seqlens_k, inputs.seqused_k)
    left, right = spec.window_left, spec.window_right
    keys, real_q = _intervals(q, sequences_q, sequences_k, spec.packed, left, right)
    queries, real_k = _intervals(k, sequences_k, sequences_q, spec.packed, right, left)
    tables = inputs.block_mask
    if tables is not None:
        if tables.real is not None:  # zeroed here, like all other padding
            keys, real_k = torch.where(tables.real.queries[..., None], keys, 0), real_k & tables.real.keys
        tables = tables._replace(real=None, intervals=(keys, queries))
    dense = inputs._replace(
        block_mask=tables,
        q=zeroed(q, sees(keys)),
        k=zeroed(k, real_k),
        v=zeroed(v, real_k),
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
    )
    spec = spec._replace(packed=False, has_seqused_q=False, has_seqused_k=False, window_left=None, window_right=None)
    return spec, dense, Intervals(keys, queries, real_q, real_k)


def sees(intervals: Tensor) -> Tensor:
    """Rows whose intervals are not empty, bool; the contents of other rows must reach nothing."""
    return intervals[..., 0] < intervals[..., 1]


def zeroed(x: Tensor, real: Tensor) -> Tensor:
    """Puts zeros into the rows of (batch, rows, heads, d), or of packed (rows, heads, d), that are not real."""
    return torch.where((real if x.ndim == 4 else real[0])[..., None, None], x, 0)


class _Sequences(NamedTuple):
    """First rows of sequences within their batch entry, and their real lengths: (sequences,), int32 each."""

    start: Tensor
    length: Tensor


def _sequences(x: Tensor, offsets: Tensor | None, used: Tensor | None) -> _Sequences:
    """Sequences of x (batch, rows, heads, d): one a batch entry; or packed, with an empty one behind them."""
    batch, rows = x.shape[:2]
    if offsets is None:
        start = torch.zeros(batch, dtype=torch.int32, device=x.device)
        return _Sequences(start, torch.full_like(start, rows) if used is None else used)
    length = torch.cat((offsets, offsets[-1:])).diff()
    if used is not None:
        length = torch.minimum(length, torch.cat((used, used.new_zeros(1))))
    return _Sequences(offsets, length)


def _intervals(
    x: Tensor, own: _Sequences, other: _Sequences, packed: bool, before: int | None, behind: int | None
) -> tuple[Tensor, Tensor]:
    """Intervals of the other side's rows that rows of x attend to, as ``Intervals.keys``, and which rows are real.

    Args:
        x: (batch, rows, heads, d).
        own: sequences of x.
        other: sequences of the other side.
        packed: whether sequences are packed in one batch entry.
        before: positions before its own that a row attends to, where the last rows stand side by side; None: all.
        behind: positions behind its own, likewise.
    """
    batch, rows = x.shape[:2]
    row = torch.arange(rows, dtype=torch.int32, device=x.device)
    if packed:
        sequence = (torch.searchsorted(own.start, row, right=True) - 1).clamp(min=0)[None]
    else:
        sequence = torch.arange(batch, device=x.device)[:, None]
    position, length, others = row - own.start[sequence], own.length[sequence], other.length[sequence]
    real = (position >= 0) & (position < length)
    place, most = position + others - length, 2**30  # so wide a window masks no row
    first = torch.zeros_like(place) if before is None else (place - min(before, most)).clamp(min=0)
    end = others if behind is None else torch.minimum(place + min(behind, most) + 1, others)
    visible = torch.stack((first, torch.maximum(first, end)), -1) + other.start[sequence][..., None]
    return torch.where(real[..., None], visible, 0), real
