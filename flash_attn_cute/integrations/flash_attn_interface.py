"""The functions of flash-attn 3, with its arguments in its order.

Replace ``from flash_attn_interface import flash_attn_func`` by
``from flash_attn_cute.integrations.flash_attn_interface import flash_attn_func``, and so for the others. Not for
``flash_attn.flash_attn_interface``, a module of flash-attn 2: its functions are those of ``integrations.flash_attn``.

All functions share these arguments:

- softmax_scale: the factor before softmax; None means 1 / sqrt(d).
- causal, window_size=(left, right): aligned to the bottom right; -1 (or None) means unbounded.
- softcap: bound on the scores' magnitude; 0.0 means none.
- deterministic: the same inputs give the same bits; "invariant" as in ``flash_attn_cute.flash_attn_func``.
- return_attn_probs: return ``(out, softmax_lse)``; the latter is the natural logarithm, float32, -inf for a query that
  sees no key.
- num_splits, pack_gqa: hints that change no result. Accepted and not used.
- qv, q_descale, k_descale, v_descale (None), attention_chunk, sm_margin (0): refused if given.

Errors are those of ``flash_attn_cute.flash_attn_func``: TypeError for a wrong type or dtype; ValueError for a wrong
shape, strides, device or value, and for what is refused. Messages name the argument.
"""

from numbers import Real
from typing import Any

from torch import Tensor

from flash_attn_cute import api
from flash_attn_cute.integrations import check_tensors, flash_attn
from flash_attn_cute.integrations.flash_attn import QKV, Result, Window

_UNBOUNDED = (-1, -1)
_OTHER_ORDER = (
    " (flash-attn 2 has dropout_p in this place: its order of arguments, also of its module flash_attn_interface, is "
    "that of flash_attn_cute.integrations.flash_attn)"
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = _UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: api.Deterministic = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a dense batch.

    Arguments that are not listed: see the module.

    Args:
        q: (batch, seqlen_q, nheads, d), float16, bfloat16, float32 or float64, the last dimension contiguous.
        k: (batch, seqlen_k, nheads_k, d), of q's dtype; nheads_k divides nheads.
        v: (batch, seqlen_k, nheads_k, d_v), of q's dtype.

    Returns:
        out (batch, seqlen_q, nheads, d_v) of q's dtype; with return_attn_probs, (out, softmax_lse), softmax_lse being
        (batch, nheads, seqlen_q).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or one that is not supported.
    """
    if isinstance(softmax_scale, (int, float)) and softmax_scale == 0:
        raise ValueError(f"softmax_scale: expected None or a number other than 0, got {softmax_scale}{_OTHER_ORDER}")
    refused: Any = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refused |= {"attention_chunk": attention_chunk, "sm_margin": sm_margin}
    options = (0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs)
    result = flash_attn.flash_attn_func(q, k, v, *options, **refused)
    return result[:2] if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = _UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: api.Deterministic = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with q, k and v in one tensor, of which they are views.

    Results and errors are its own. Arguments that are not listed: see the module.

    Args:
        qkv: (batch, seqlen, 3, nheads, d); or (batch, seqlen, nheads + 2 * nheads_k, d), the heads of q, k and v one
            behind another.
        num_heads_q: nheads, for a qkv of four dimensions.
    """
    check_tensors(qkv=qkv)
    heads_k = 0 if num_heads_q is None or qkv.ndim != 4 else (qkv.shape[2] - num_heads_q) // 2
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif num_heads_q and heads_k > 0 and num_heads_q + 2 * heads_k == qkv.shape[2] and num_heads_q % heads_k == 0:
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    else:
        raise ValueError(
            "qkv: expected shape (batch, seqlen, 3, nheads, d), or (batch, seqlen, num_heads_q + 2 * nheads_k, d), "
            f"got shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}, which nheads_k divides"
        )
    return api.call(
        flash_attn_func,
        QKV,
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = _UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: api.Deterministic = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over packed sequences. Rows that belong to none are ignored and come out as zeros.

    Arguments that are not listed: see the module.

    Args:
        q: (total_q, nheads, d), float16, bfloat16, float32 or float64, the last dimension contiguous.
        k: (total_k, nheads_k, d), of q's dtype; nheads_k divides nheads.
        v: (total_k, nheads_k, d_v), of q's dtype.
        cu_seqlens_q: (batch + 1,) int32, offsets of the sequences' query rows.
        cu_seqlens_k: (batch + 1,) int32, those of their rows in k and v.
        max_seqlen_q: upper bound on the query rows of any sequence.
        max_seqlen_k: likewise for keys.
        seqused_q: (batch,) int32, the real query rows of each sequence if fewer than it owns.
        seqused_k: (batch,) int32, likewise for the rows of k and v.

    Returns:
        out (total_q, nheads, d_v) of q's dtype; with return_attn_probs, (out, softmax_lse), softmax_lse being
        (nheads, total_q).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or one that is not supported.
    """
    if isinstance(seqused_q, Real):
        raise TypeError(f"seqused_q: expected a torch.Tensor or None, got {seqused_q}{_OTHER_ORDER}")
    refused: Any = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refused |= {"attention_chunk": attention_chunk, "sm_margin": sm_margin}
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (*lengths, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs)
    result = flash_attn.flash_attn_varlen_func(q, k, v, *options, seqused_q=seqused_q, seqused_k=seqused_k, **refused)
    return result[:2] if return_attn_probs else result
