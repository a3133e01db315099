"""Calls told in other packed sequences than the user's: same rows, same results, fewer things for kernels to know."""

import torch
from torch import Tensor

from flash_attn_cute.spec import AttentionInputs


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


def dense_has_blind(inputs: AttentionInputs, window_right: int | None) -> bool:
    """Whether some query of a dense batch without padding sees no key; see ``with_blind_apart``."""
    return window_right is not None and inputs.q.shape[1] - inputs.k.shape[1] > window_right


def may_have_blind(inputs: AttentionInputs, window_right: int | None) -> bool:
    """Whether ``with_blind_apart`` makes two sequences of each."""
    cu_q, cu_k, used_q, used_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k
    if window_right is None or cu_q is None or cu_k is None:
        return False
    q, k = cu_q if used_q is None else used_q, cu_k if used_k is None else used_k
    return q is not k and (q.is_meta or not q.is_set_to(k))


def with_blind_apart(inputs: AttentionInputs, window_right: int | None) -> AttentionInputs:
    """The packed sequences, each in two: its queries that see no key, and no keys; and all else.

    Blind are the first seqlen_q - seqlen_k - right queries of a sequence under a window bounded to the right, and all
    that have no keys; no others. Kernels give them weights of zero. But a block of queries that holds both kinds is
    multiplied whole, and zero times what may stand in the blind ones' q, dout or dlse is NaN. No tile of keys ever
    comes to a sequence that has none.

    Lengths that are known to be equal, as they come from the same memory, leave no query blind: such sequences are
    left as they are. The host reads nothing else; what it cannot rule out costs it some small launches.
    """
    cu_q, cu_k, used_q, used_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k
    if window_right is None or cu_q is None or cu_k is None or not may_have_blind(inputs, window_right):
        return inputs
    # No more than a sequence owns, or the offsets between its two parts would lie behind its end.
    lengths_q = cu_q.diff() if used_q is None else torch.minimum(used_q, cu_q.diff())
    lengths_k = cu_k.diff() if used_k is None else used_k
    right = min(window_right, inputs.q.shape[0])  # no sequence is longer, and the difference stays within 32 bits
    blind = (lengths_q - lengths_k - right).clamp_(min=0)
    cu_q, cu_k = (_in_turn(cu, cu)[:-1] for cu in (cu_q, cu_k))
    cu_q[1::2] += blind
    if used_q is not None:
        used_q = _in_turn(blind, lengths_q - blind)
    if used_k is not None:
        used_k = _in_turn(torch.zeros_like(used_k), used_k)
    return inputs._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k)


def _in_turn(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), 1).flatten()
