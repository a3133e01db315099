"""``torch.nn.functional.scaled_dot_product_attention`` as PyTorch writes it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from flash_attn_cute import api
from flash_attn_cute.integrations import check_flags, check_tensors, check_zero

_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "mask": "attn_mask", "bias": "attn_mask"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in the layout of PyTorch: heads before rows. Nothing is copied but what is said below.

    ``is_causal`` is aligned to the top left, as in PyTorch: query i sees the keys up to i, whatever the lengths. What a
    query gets that sees no key is zero. With ``torch.use_deterministic_algorithms`` the backward pass is deterministic.

    Args:
        query: (..., nheads, seqlen_q, d), at least three dimensions, float16, bfloat16, float32 or float64. Strides are
            free, but for a contiguous last dimension, here and in key and value. More than one batch dimension is
            flattened to one, with a copy where strides do not allow a view.
        key: (..., nheads, seqlen_k, d), of query's dtype; with enable_gqa, its heads divide those of query. Batch
            dimensions broadcast.
        value: (..., nheads, seqlen_k, d_v), likewise.
        attn_mask: bool (True = may attend), or float32 or query's dtype (added to the scores), broadcastable to (...,
            nheads, seqlen_q, seqlen_k); never expanded. With more than one batch dimension it must be the same for all
            of them, or is expanded over these. Or ``torch.nn.attention.bias``'s causal_upper_left or causal_lower_right
            of these lengths, for which no mask is in memory.
        dropout_p: 0.0.
        is_causal: hide the keys behind a query's own position. Not together with attn_mask.
        scale: the factor before softmax; None means 1 / sqrt(d).
        enable_gqa: allow fewer heads in key and value than in query.

    Returns:
        (..., nheads, seqlen_q, d_v), of query's dtype; its rows follow each other as (batch, seqlen_q, nheads, d_v).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value. Shapes in messages have heads behind
            rows.
    """
    check_zero("dropout_p", dropout_p, "0.0, dropout is not supported")
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask: expected None or a torch.Tensor, got {type(attn_mask).__name__}")
        check_tensors(attn_mask=attn_mask)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask: expected bool (True = may attend) or a floating-point dtype, got {attn_mask.dtype}"
            )
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask: expected None with is_causal=True, got both")
    check_tensors(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name}: expected shape (..., nheads, rows, d), got shape {tuple(x.shape)}")
        if not enable_gqa and x.shape[-3] != query.shape[-3]:
            raise ValueError(
                f"{name}: expected the {query.shape[-3]} heads of query (fewer need enable_gqa=True), got {x.shape[-3]}"
            )
    lower_right = False
    if isinstance(attn_mask, CausalBias):
        is_causal, lower_right = _causal_of(attn_mask, query, key)
        attn_mask = None
    batch = _batch(query, key, value)
    q, k, v = (_one_batch(x, batch).transpose(1, 2) for x in (query, key, value))
    window: tuple[int | None, int | None] = (None, None)
    if is_causal:
        seqlen_q = q.shape[1]
        if seqlen_q < k.shape[1]:  # no query sees the others
            k, v = k[:, :seqlen_q], v[:, :seqlen_q]
        window = (None, seqlen_q - k.shape[1])
    elif lower_right:
        window = (None, 0)
    if attn_mask is not None and attn_mask.ndim > 3 and len(batch) != 1:
        same = all(size == 1 for size in attn_mask.shape[:-3])
        attn_mask = attn_mask.reshape(attn_mask.shape[-3:]) if same else _mask_of_one_batch(attn_mask, batch)
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    out: Tensor = api.call(
        api.flash_attn_func,
        _NAMES,
        q,
        k,
        v,
        softmax_scale=scale,
        window_size=window,
        mask=None if additive else attn_mask,
        bias=attn_mask if additive else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out = out.transpose(1, 2)
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def _causal_of(bias: CausalBias, query: Tensor, key: Tensor) -> tuple[bool, bool]:
    """Whether a causal bias is aligned to the top left, and whether to the bottom right."""
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    if lengths != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"attn_mask: expected a CausalBias of ({query.shape[-2]}, {key.shape[-2]}) rows of query and key, got one "
            f"of {lengths}"
        )
    return bias.variant == CausalVariant.UPPER_LEFT, bias.variant == CausalVariant.LOWER_RIGHT


def _batch(query: Tensor, key: Tensor, value: Tensor) -> Sequence[int]:
    """The batch dimensions of all three, broadcast."""
    batch = query.shape[:-3]
    if key.shape[:-3] == batch and value.shape[:-3] == batch:
        return batch
    try:
        return torch.broadcast_shapes(batch, key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"key, value: expected batch dimensions that broadcast with query's, got {shapes}") from None


def _mask_of_one_batch(attn_mask: Tensor, batch: Sequence[int]) -> Tensor:
    """A mask that differs between batch entries, expanded over those dimensions, as one."""
    of_mask = attn_mask.shape[:-3]
    sizes = (1,) * (len(batch) - len(of_mask)) + of_mask
    # Dynamo finds no number among symbols, so that `in` would not do.
    if len(sizes) != len(batch) or any(x != 1 and x != y for x, y in zip(sizes, batch, strict=True)):
        raise ValueError(
            f"attn_mask: expected batch dimensions that broadcast to {tuple(batch)}, got shape {tuple(attn_mask.shape)}"
        )
    return _one_batch(attn_mask, batch)


def _one_batch(x: Tensor, batch: Sequence[int]) -> Tensor:
    """X with those batch dimensions as one."""
    if x.shape[:-3] != batch:
        x = x.expand(*batch, *x.shape[-3:])
    return x if len(batch) == 1 else x.reshape(math.prod(batch), *x.shape[-3:])
