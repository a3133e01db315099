"""Transformer Engine's ``thd`` format: packed sequences with padding between them."""

from functools import partial

import torch
from torch import Tensor

from flash_attn_cute import api
from flash_attn_cute.integrations import check_tensors

# Of Transformer Engine's names for a mask: is it causal, and if so, aligned to the bottom right. In thd the lengths
# always count, so that a name says the same with "padding" and without.
_MASKS = {
    "no_mask": (False, True),
    "padding": (False, True),
    "causal": (True, False),
    "padding_causal": (True, False),
    "causal_padding": (True, False),
    "causal_bottom_right": (True, True),
    "padding_causal_bottom_right": (True, True),
}


def thd_attention(
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_kv: int | Tensor | None = None,
    attn_mask_type: str = "padding_causal",
    window_size: tuple[int, int] | None = None,
    *,
    softmax_scale: float | None = None,
    learnable_sink: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """What ``DotProductAttention`` computes with ``qkv_format="thd"`` and without dropout, names being those it has.

    Sequence b has ``cu_seqlens[b + 1] - cu_seqlens[b]`` rows, the first of which is ``cu_seqlens_padded[b]``. All other
    rows are padding: ignored whatever they hold, NaN included, and zero in out and gradients.

    Args:
        query_layer: (total_q, nheads, d), float16, bfloat16, float32 or float64, the last dimension contiguous.
        key_layer: (total_kv, nheads_kv, d), of query_layer's dtype; nheads_kv divides nheads.
        value_layer: (total_kv, nheads_kv, d_v), of query_layer's dtype.
        cu_seqlens_q: (batch + 1,) int32, sums of the true lengths in query_layer.
        cu_seqlens_kv: (batch + 1,) int32, of those in key_layer and value_layer. The same tensor, if lengths are equal,
            saves a call under masks that are aligned to the top left.
        cu_seqlens_q_padded: (batch + 1,) int32, offsets of the sequences in memory; None means no padding between them.
        cu_seqlens_kv_padded: likewise in key_layer and value_layer.
        max_seqlen_q: upper bound on the true lengths; None stands for total_q, which costs time on a GPU.
        max_seqlen_kv: likewise in key_layer and value_layer.
        attn_mask_type: "padding", or, with keys hidden that are behind a query, "padding_causal" (aligned to the top
            left of each sequence) or "padding_causal_bottom_right". The same without "padding_", and "no_mask", mean
            the same; "padding,causal" and "causal,padding" are other names of "padding_causal".
        window_size: (left, right), how many keys before and behind its own position a query sees; -1 means unbounded.
            Aligned as the mask, and to the bottom right if it is not causal. Under causal masks right is 0; without one
            (-1, 0) stands for (-1, -1), as in Transformer Engine.
        softmax_scale: the factor before softmax; None means 1 / sqrt(d).
        learnable_sink: (nheads,), float32 or query_layer's dtype, the offsets of softmax_type="learnable"; zeros make
            it "off-by-one".
        deterministic: the same inputs give the same bits.

    Returns:
        (total_q, nheads * d_v), of query_layer's dtype.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, another attn_mask_type, or a left side of
            window_size where a mask is aligned to the top left and cu_seqlens_kv is not cu_seqlens_q. Messages about
            tensors name the arguments of ``flash_attn_cute.flash_attn_varlen_func``.
    """
    name = attn_mask_type.replace(",", "_") if isinstance(attn_mask_type, str) else None
    if name not in _MASKS:
        raise ValueError(f"attn_mask_type: expected one of {', '.join(_MASKS)}, got {attn_mask_type!r}")
    causal, bottom_right = _MASKS[name]
    if window_size is not None and (not isinstance(window_size, (tuple, list)) or len(window_size) != 2):
        raise ValueError(f"window_size: expected None or a pair (left, right), got {window_size!r}")
    left, right = (-1, -1) if window_size is None else window_size
    if not causal and (left, right) == (-1, 0):
        right = -1
    check_tensors(query_layer=query_layer, key_layer=key_layer, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    attend = partial(
        api.flash_attn_varlen_func,
        query_layer,
        key_layer,
        value_layer,
        cu_seqlens_k=cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded,
        max_seqlen_q=query_layer.shape[0] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=key_layer.shape[0] if max_seqlen_kv is None else max_seqlen_kv,
        softmax_scale=softmax_scale,
        learnable_sink=learnable_sink,
        deterministic=deterministic,
    )
    memory_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    if bottom_right or cu_seqlens_kv is cu_seqlens_q:
        used_q = None if cu_seqlens_q_padded is None else cu_seqlens_q.diff()
        used_k = None if cu_seqlens_kv_padded is None else cu_seqlens_kv.diff()
        call = partial(attend, cu_seqlens_q=memory_q, seqused_q=used_q, seqused_k=used_k)
        return call(causal=causal, window_size=(left, right)).flatten(-2)
    if left >= 0:
        raise ValueError(
            f"window_size: expected no left side for attn_mask_type={attn_mask_type!r} where cu_seqlens_kv is not "
            f"cu_seqlens_q, got {window_size}"
        )
    # Query i sees the keys up to i. As many queries as there are keys are a square, and those behind see all keys.
    length_q, length_k = cu_seqlens_q.diff(), cu_seqlens_kv.diff()
    square = torch.minimum(length_q, length_k)
    out = attend(cu_seqlens_q=memory_q, seqused_q=square, seqused_k=square, causal=True)
    behind = memory_q + torch.nn.functional.pad(square, (0, 1))
    rest = attend(cu_seqlens_q=behind, seqused_q=length_q - square, seqused_k=length_k)
    return (out + rest).flatten(-2)
