"""Calls told in other packed sequences than the user's: same rows, same results, fewer things for kernels to know."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.spec import AttentionInputs, AttentionSpec


def as_packed(inputs: AttentionInputs) -> AttentionInputs:
    """A dense batch with padding is packed sequences whose slots are of one size."""
    q, k, v = inputs.q, inputs.k, inputs.v
    cu_q, cu_k = (torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device).mul_(x.shape[1]) for x in (q, k))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return inputs._replace(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def over_scores(inputs: AttentionInputs) -> AttentionInputs:
    """Mask and bias as views of (batch, heads, queries, keys), packed (1, heads, queries, keys): nothing is copied."""
    if inputs.mask is None and inputs.bias is None:
        return inputs
    return inputs._replace(mask=_expanded(inputs, inputs.mask), bias=_expanded(inputs, inputs.bias))


def _expanded(inputs: AttentionInputs, x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    *batch, rows, nheads, _ = inputs.q.shape
    # Of packed sequences it may have more keys than any, or any number if nobody knows a bound.
    keys = min(inputs.max_seqlen_k, inputs.k.shape[-3]) if not x.ndim or x.shape[-1] == 1 else x.shape[-1]
    return x.expand(batch[0] if batch else 1, nheads, rows, keys)


def dense_has_fully_masked(inputs: AttentionInputs, window_right: int | None) -> bool:
    """Whether some query of a dense batch without padding sees no key; see ``split_fully_masked``."""
    return window_right is not None and inputs.q.shape[1] - inputs.k.shape[1] > window_right


def may_have_fully_masked(inputs: AttentionInputs, window_right: int | None) -> bool:
    """Whether ``split_fully_masked`` makes two sequences of each."""
    cu_q, cu_k, used_q, used_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k
    if window_right is None or cu_q is None or cu_k is None:
        return False
    q, k = cu_q if used_q is None else used_q, cu_k if used_k is None else used_k
    return q is not k and (q.is_meta or not q.is_set_to(k))


def split_fully_masked(inputs: AttentionInputs, window_right: int | None) -> AttentionInputs:
    """The packed sequences, each in two: its queries that see no key, and no keys; and all else.

    Blind are the first seqlen_q - seqlen_k - right queries of a sequence under a window bounded to the right, and all
    that have no keys; no others. Kernels give them weights of zero. But a block of queries that holds both kinds is
    multiplied whole, and zero times what may stand in the blind ones' q, dout or dlse is NaN. No tile of keys ever
    comes to a sequence that has none.

    Lengths that are known to be equal, as they come from the same memory, leave no query blind: such sequences are
    left as they are. The host reads nothing else; what it cannot rule out costs it some small launches.
    """
    cu_q, cu_k, used_q, used_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k
    if window_right is None or cu_q is None or cu_k is None or not may_have_fully_masked(inputs, window_right):
        return inputs
    # No more than a sequence owns, or the offsets between its two parts would lie behind its end.
    lengths_q = cu_q.diff() if used_q is None else torch.minimum(used_q, cu_q.diff())
    lengths_k = cu_k.diff() if used_k is None else used_k
    right = min(window_right, inputs.q.shape[0])  # no sequence is longer, and the difference stays within 32 bits
    fully_masked = (lengths_q - lengths_k - right).clamp_(min=0)
    cu_q, cu_k = (_in_turn(cu, cu)[:-1] for cu in (cu_q, cu_k))
    cu_q[1::2] += fully_masked
    if used_q is not None:
        used_q = _in_turn(fully_masked, lengths_q - fully_masked)
    if used_k is not None:
        used_k = _in_turn(torch.zeros_like(used_k), used_k)
    return inputs._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k)


def _in_turn(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), 1).flatten()


def without_padding(inputs: AttentionInputs) -> AttentionInputs:
    """Zeros in the padding of a block mask, so that what stands in q, k and v there reaches nothing.

    Kernels hide the scores of padding. But a block that holds padding and other rows is multiplied whole, and zero
    times NaN is NaN.
    """
    real = None if inputs.block_mask is None else inputs.block_mask.real
    if real is None:
        return inputs
    q, k, v = zeroed(inputs.q, real.queries), zeroed(inputs.k, real.keys), zeroed(inputs.v, real.keys)
    return inputs._replace(q=q, k=k, v=v)


def without_padding_of_queries(x: Tensor, inputs: AttentionInputs) -> Tensor:
    """Zeros in the padding of a block mask in the gradient of out."""
    real = None if inputs.block_mask is None else inputs.block_mask.real
    return x if real is None else zeroed(x, real.queries)


class Seen(NamedTuple):
    """What rows of a dense batch see of each other beside a block mask: intervals, and which of them are real at all.

    ``keys`` (batch, seqlen_q, 2) int32 holds of each query the first key that it sees and the one behind the last,
    ``queries`` (batch, seqlen_k, 2) of each key the same of queries. ``real_q`` (batch, seqlen_q) and ``real_k`` are
    bool.
    """

    keys: Tensor
    queries: Tensor
    real_q: Tensor
    real_k: Tensor


def needs_intervals(spec: AttentionSpec) -> bool:
    """Whether a block mask is not all that says what queries see."""
    has_window = spec.window_left is not None or spec.window_right is not None
    return spec.has_block_mask and (spec.packed or spec.has_seqused or has_window)


def as_one_batch(spec: AttentionSpec, inputs: AttentionInputs) -> tuple[AttentionSpec, AttentionInputs, Seen]:
    """Sequences, lengths and windows beside a block mask as intervals: packed rows are one entry of a dense batch.

    A block mask is one of all rows, wherever sequences begin. As its blocks hold rows of several sequences, and
    padding, q, k and v come back with zeros in the padding, and q also where the window leaves nothing to see. The host
    waits for nothing.
    """
    q, k, v = (x[None] if spec.packed else x for x in (inputs.q, inputs.k, inputs.v))
    sequences_q = _sequences(q, inputs.cu_seqlens_q, inputs.seqused_q)
    sequences_k = _sequences(k, inputs.cu_seqlens_k, inputs.seqused_k)
    left, right = spec.window_left, spec.window_right
    keys, real_q = _intervals(q, sequences_q, sequences_k, spec.packed, left, right)
    queries, real_k = _intervals(k, sequences_k, sequences_q, spec.packed, right, left)
    tables = inputs.block_mask
    if tables is not None:
        if tables.real is not None:  # which is zeroed here, with all else that is
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
    return spec, dense, Seen(keys, queries, real_q, real_k)


def sees(intervals: Tensor) -> Tensor:
    """Which rows see anything; what others hold must reach nothing."""
    return intervals[..., 0] < intervals[..., 1]


def zeroed(x: Tensor, real: Tensor) -> Tensor:
    """The rows of (batch, rows, heads, d), or of packed (rows, heads, d), that are real, and zeros."""
    return torch.where((real if x.ndim == 4 else real[0])[..., None, None], x, 0)


class _Sequences(NamedTuple):
    """Where sequences begin among the rows of an entry, and how many real rows each has: (sequences,), int32."""

    start: Tensor
    length: Tensor


def _sequences(x: Tensor, offsets: Tensor | None, used: Tensor | None) -> _Sequences:
    """Those of x (batch, rows, heads, d): one an entry, or packed ones, behind which an empty one owns what is left."""
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
    """What rows of x see of the other side's, ``Seen.keys``, and which of them are real.

    A row sees others up to so many positions before its own, and behind it, if the last rows stand side by side.
    """
    batch, rows = x.shape[:2]
    row = torch.arange(rows, dtype=torch.int32, device=x.device)
    if packed:
        sequence = (torch.searchsorted(own.start, row, right=True) - 1).clamp(min=0)[None]
    else:
        sequence = torch.arange(batch, device=x.device)[:, None]
    position, length, others = row - own.start[sequence], own.length[sequence], other.length[sequence]
    real = (position >= 0) & (position < length)
    place, most = position + others - length, 2**30  # so wide a window shows all rows that there can be
    first = torch.zeros_like(place) if before is None else (place - min(before, most)).clamp(min=0)
    end = others if behind is None else torch.minimum(place + min(behind, most) + 1, others)
    seen = torch.stack((first, torch.maximum(first, end)), -1) + other.start[sequence][..., None]
    return torch.where(real[..., None], seen, 0), real
