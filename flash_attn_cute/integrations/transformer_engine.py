"""Transformer Engine's ``thd`` format: packed sequences with padding between them."""

from typing import NamedTuple

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
    deterministic: api.Deterministic = False,
) -> Tensor:
    """Computes what ``DotProductAttention`` does with ``qkv_format="thd"`` and without dropout, by its argument names.

    Sequence b has ``cu_seqlens[b + 1] - cu_seqlens[b]`` rows, the first of which is ``cu_seqlens_padded[b]``. All other
    rows are padding: ignored whatever they hold, NaN included, and zero in out and gradients.

    Args:
        query_layer: (total_q, nheads, d), float16, bfloat16, float32 or float64, the last dimension contiguous.
        key_layer: (total_kv, nheads_kv, d), of query_layer's dtype; nheads_kv divides nheads.
        value_layer: (total_kv, nheads_kv, d_v), of query_layer's dtype.
        cu_seqlens_q: (batch + 1,) int32, sums of the true lengths in query_layer.
        cu_seqlens_kv: (batch + 1,) int32, of those in key_layer and value_layer. The same tensor, or a view of the
            same memory, where lengths are equal: under masks that are aligned to the top left rows are else copied in
            reverse order.
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
        deterministic: the same inputs give the same bits; "invariant" as in ``flash_attn_varlen_func``.

    Returns:
        (total_q, nheads * d_v), of query_layer's dtype.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, another attn_mask_type, or, within
            ``distributed.context_parallel``, lengths of keys that differ from those of queries under a mask aligned to
            the top left.
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
    offsets = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded,
    }
    check_tensors(query_layer=query_layer, key_layer=key_layer, value_layer=value_layer, **offsets)
    for name, x in (("query_layer", query_layer), ("key_layer", key_layer), ("value_layer", value_layer)):
        if x.ndim != 3:
            raise ValueError(f"{name}: expected shape (rows, heads, d), got shape {tuple(x.shape)}")
    for name, x in offsets.items():
        if x.ndim != 1 or x.shape != cu_seqlens_q.shape or x.shape[0] == 0:
            raise ValueError(f"{name}: expected shape (batch + 1,), that of cu_seqlens_q, got shape {tuple(x.shape)}")
    queries, keys = (
        _Sequences(
            offsets[f"cu_seqlens_{side}_padded"], None if padded is None else offsets[f"cu_seqlens_{side}"].diff()
        )
        for side, padded in (("q", cu_seqlens_q_padded), ("kv", cu_seqlens_kv_padded))
    )
    names = {"q": "query_layer", "k": "key_layer", "v": "value_layer", "max_seqlen_k": "max_seqlen_kv"}
    names |= {"seqused_q": "cu_seqlens_q", "seqused_k": "cu_seqlens_kv"}
    names["cu_seqlens_q"] = "cu_seqlens_q" if cu_seqlens_q_padded is None else "cu_seqlens_q_padded"
    names["cu_seqlens_k"] = "cu_seqlens_kv" if cu_seqlens_kv_padded is None else "cu_seqlens_kv_padded"
    is_reversed = False
    if not bottom_right and not api.is_same_memory(cu_seqlens_q, cu_seqlens_kv):
        is_reversed = not api.is_over_ranks()
        if not is_reversed:
            queries, keys = _of_equal_lengths(queries, keys)
    if is_reversed:
        lengths = (queries.offsets, keys.offsets, 0, 0)  # the bounds are checked with the call
        used = {"seqused_q": queries.lengths, "seqused_k": keys.lengths}
        api.call(api.check_arguments, names, query_layer, key_layer, value_layer, *lengths, **used)
        # From their last rows on, sequences that are aligned to the top left are aligned to the bottom right.
        query_layer, key_layer, value_layer = (x.flip(0) for x in (query_layer, key_layer, value_layer))
        queries, keys = queries.reversed(query_layer.shape[0]), keys.reversed(key_layer.shape[0])
        causal, left, right = False, 0, left
    out: Tensor = api.call(
        api.flash_attn_varlen_func,
        names,
        query_layer,
        key_layer,
        value_layer,
        queries.offsets,
        keys.offsets,
        query_layer.shape[0] if max_seqlen_q is None else max_seqlen_q,
        key_layer.shape[0] if max_seqlen_kv is None else max_seqlen_kv,
        seqused_q=queries.lengths,
        seqused_k=keys.lengths,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(left, right),
        learnable_sink=learnable_sink,
        deterministic=deterministic,
    )
    return (out.flip(0) if is_reversed else out).flatten(-2)


class _Sequences(NamedTuple):
    """Offsets of sequences in memory, (batch + 1,), and their lengths, (batch,), if there is padding between them."""

    offsets: Tensor
    lengths: Tensor | None

    def reversed(self, total: int) -> "_Sequences":
        """The sequences of as many rows in reverse order: each begins at its last real row."""
        if self.lengths is None:
            return _Sequences((total - self.offsets).flip(0), None)
        stops = self.offsets[:-1] + self.lengths
        return _Sequences(torch.cat(((total - stops).flip(0), total - self.offsets[:1])), self.lengths.flip(0))


def _of_equal_lengths(queries: _Sequences, keys: _Sequences) -> tuple[_Sequences, _Sequences]:
    """Queries and keys over ranks, where offsets are those of the sharding and so the same, with the same lengths.

    Both get one tensor, by which a sharding that keeps other lengths of keys than of queries is refused.
    """
    if queries.lengths is None and keys.lengths is None:
        return queries, keys
    length_q, length_k = (x.offsets.diff() if x.lengths is None else x.lengths for x in (queries, keys))
    if not torch.compiler.is_compiling() and length_q.device.type == "cpu" and not torch.equal(length_q, length_k):
        raise ValueError(
            "cu_seqlens_kv: expected the lengths of cu_seqlens_q within context_parallel under a mask aligned to the "
            f"top left, {length_q.tolist()}, got {length_k.tolist()}; 'padding_causal_bottom_right' takes any"
        )
    return queries._replace(lengths=length_q), keys._replace(lengths=length_q)
