"""The functions of flash-attn 2, with its arguments in its order; those of flash-attn 3 are keywords.

Replace ``from flash_attn import flash_attn_func`` by
``from flash_attn_cute.integrations.flash_attn import flash_attn_func``, and so for the others. The order of
flash-attn 3 is that of ``integrations.flash_attn_interface``.

All functions share these arguments:

- dropout_p: 0.0; there is no dropout.
- softmax_scale: the factor before softmax; None means 1 / sqrt(d).
- causal, window_size=(left, right): aligned to the bottom right; -1 (or None) means unbounded.
- softcap: bound on the scores' magnitude; 0.0 means none.
- alibi_slopes: (nheads,), or for a dense batch (batch, nheads): ``-slope * |i + seqlen_k - seqlen_q - j|`` is added to
  the score of query i and key j. Linear memory, differentiable; in float32, so that at a distance of n keys a score is
  rounded to slope * n * 6e-8. If keys behind a query are visible, the keys up to it and those behind it are two calls,
  whose results are merged.
- deterministic: the same inputs give the same bits; "invariant" as in ``flash_attn_cute.flash_attn_func``.
- return_attn_probs: return ``(out, softmax_lse, None)``. softmax_lse is the natural logarithm, float32, with the ALiBi
  bias as written above, -inf for a query that sees no key; the probabilities, None, exist with dropout only.
- num_splits, pack_gqa: hints of flash-attn 3 that change no result. Accepted and not used.
- qv, q_descale, k_descale, v_descale (None), attention_chunk, sm_margin (0), block_table (None): refused if given.

Errors are those of ``flash_attn_cute.flash_attn_func``: TypeError for a wrong type or dtype; ValueError for a wrong
shape, strides, device or value, and for what is refused. Messages name the argument.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from flash_attn_cute import api
from flash_attn_cute.integrations import check_tensors, check_zero

Window: TypeAlias = tuple[int | None, int | None]
# ``out``, or ``(out, softmax_lse, None)`` with return_attn_probs=True.
Result: TypeAlias = Any

_UNBOUNDED = (-1, -1)
_NAMES = {"return_lse": "return_attn_probs", "bias": "alibi_slopes"}
# Names of arguments that hold several others.
_KV = {"k": "kv", "v": "kv"}
QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
_PACKED_QKV = QKV | {f"{x}_{side}": x for x in ("cu_seqlens", "max_seqlen") for side in "qk"}
_WHY_NOT = {
    "block_table": "paged keys and values are not supported",
    "qv": "a second query is not supported",
    "q_descale": "FP8 is not supported",
    "k_descale": "FP8 is not supported",
    "v_descale": "FP8 is not supported",
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: api.Deterministic = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """Attention over a dense batch.

    Arguments that are not listed: see the module.

    Args:
        q: (batch, seqlen_q, nheads, d), float16, bfloat16, float32 or float64, the last dimension contiguous.
        k: (batch, seqlen_k, nheads_k, d), of q's dtype; nheads_k divides nheads.
        v: (batch, seqlen_k, nheads_k, d_v), of q's dtype.
        alibi_slopes: (nheads,) or (batch, nheads), floating point.

    Returns:
        out (batch, seqlen_q, nheads, d_v) of q's dtype; with return_attn_probs, (out, softmax_lse, None), softmax_lse
        being (batch, nheads, seqlen_q).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or one that is not supported.
    """
    _refuse(dropout_p, attention_chunk, sm_margin, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    attend = partial(
        api.call,
        api.flash_attn_func,
        _NAMES,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )  # and q, k, v, which autocast may change
    options: Any = {"causal": causal, "window_size": window_size, "return_lse": return_attn_probs}
    if alibi_slopes is None:
        result = attend(q, k, v, **options)
    else:
        api.call(api.check_arguments, _NAMES, q, k, v, **options)
        slopes = _check_slopes(alibi_slopes, q, batch=q.shape[0])
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        diagonal = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)
        fewer = torch.full((q.shape[0],), max(seqlen_q - 1, 0), dtype=torch.int32, device=q.device)
        result = _with_alibi(attend, (q, k, v), slopes, diagonal, seqlen_k, None, fewer, *options.values())
    return (*result, None) if return_attn_probs else result


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: api.Deterministic = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with k and v in one tensor, of which they are views.

    Results and errors are its own. Arguments that are not listed: see the module.

    Args:
        q: (batch, seqlen_q, nheads, d).
        kv: (batch, seqlen_k, 2, nheads_k, d), of q's dtype.
        alibi_slopes: (nheads,) or (batch, nheads).
    """
    _check_packed("kv", kv, "(batch, seqlen_k, 2, nheads_k, d)", 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(2)
    return api.call(flash_attn_func, _KV, q, k, v, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: api.Deterministic = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with q, k and v in one tensor, of which they are views.

    Results and errors are its own. Arguments that are not listed: see the module.

    Args:
        qkv: (batch, seqlen, 3, nheads, d).
        alibi_slopes: (nheads,) or (batch, nheads).
    """
    _check_packed("qkv", qkv, "(batch, seqlen, 3, nheads, d)", 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(2)
    return api.call(flash_attn_func, QKV, q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: api.Deterministic = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
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
        alibi_slopes: (nheads,), floating point, or (batch, nheads) if that is an expanded view of (nheads,).
        seqused_q: (batch,) int32, the real query rows of each sequence if fewer than it owns.
        seqused_k: (batch,) int32, likewise for the rows of k and v.

    Returns:
        out (total_q, nheads, d_v) of q's dtype; with return_attn_probs, (out, softmax_lse, None), softmax_lse being
        (nheads, total_q).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or one that is not supported.
    """
    _refuse(
        dropout_p,
        attention_chunk,
        sm_margin,
        block_table=block_table,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    attend = partial(
        api.call,
        api.flash_attn_varlen_func,
        _NAMES,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )  # and q, k, v, which autocast may change
    options: Any = {"causal": causal, "window_size": window_size, "return_lse": return_attn_probs}
    if alibi_slopes is None:
        result = attend(q, k, v, seqused_q=seqused_q, **options)
    else:
        check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        used: Any = {"seqused_q": seqused_q, "seqused_k": seqused_k}
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        api.call(api.check_arguments, _NAMES, q, k, v, *lengths, **used, **options)
        slopes = _check_slopes(alibi_slopes, q, batch=None)
        cu_seqlens_q, cu_seqlens_k = _whole(cu_seqlens_q), _whole(cu_seqlens_k)
        seqused_q, seqused_k = (None if x is None else _whole(x) for x in (seqused_q, seqused_k))
        lengths_q = cu_seqlens_q.diff() if seqused_q is None else seqused_q
        lengths_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        # Position 0 of a sequence's keys, counted in rows of q, so that a row less it is the key beside it.
        beside = torch.nn.functional.pad(cu_seqlens_q[:-1] + lengths_q - lengths_k, (0, 1))  # 0 behind the last
        rows = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
        diagonal = rows - beside[torch.bucketize(rows, cu_seqlens_q[1:], right=True)]
        fewer = (lengths_q - 1).clamp(min=0)
        columns = k.shape[0] if isinstance(max_seqlen_k, Tensor) else max_seqlen_k
        result = _with_alibi(attend, (q, k, v), slopes, diagonal, columns, seqused_q, fewer, *options.values())
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: api.Deterministic = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with k and v in one tensor, of which they are views.

    Results and errors are its own. Arguments that are not listed: see the module.

    Args:
        q: (total_q, nheads, d).
        kv: (total_k, 2, nheads_k, d), of q's dtype.
        cu_seqlens_q: (batch + 1,) int32.
        cu_seqlens_k: (batch + 1,) int32.
        max_seqlen_q: upper bound on the query rows of any sequence.
        max_seqlen_k: likewise for keys.
        alibi_slopes: see ``flash_attn_varlen_func``.
    """
    _check_packed("kv", kv, "(total_k, 2, nheads_k, d)", 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(1)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return api.call(flash_attn_varlen_func, _KV, q, k, v, *lengths, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: api.Deterministic = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with q, k and v in one tensor, of which they are views.

    Results and errors are its own. Arguments that are not listed: see the module.

    Args:
        qkv: (total, 3, nheads, d).
        cu_seqlens: (batch + 1,) int32.
        max_seqlen: upper bound on the rows of any sequence.
        alibi_slopes: see ``flash_attn_varlen_func``.
    """
    _check_packed("qkv", qkv, "(total, 3, nheads, d)", 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return api.call(flash_attn_varlen_func, _PACKED_QKV, q, k, v, *lengths, *options)


def _refuse(dropout_p: object, attention_chunk: object, sm_margin: object, **absent: Tensor | None) -> None:
    check_zero(
        "dropout_p",
        dropout_p,
        "0.0, dropout is not supported",
        " (flash-attn 3 has no dropout_p: its order of arguments is that of "
        "flash_attn_cute.integrations.flash_attn_interface)",
    )
    check_zero("attention_chunk", attention_chunk, "0, chunked attention is not supported")
    check_zero("sm_margin", sm_margin, "0, kernels leave no multiprocessors free")
    for name, value in absent.items():
        if value is not None:
            raise ValueError(f"{name}: expected None, {_WHY_NOT[name]}, got {type(value).__name__}")


def _check_packed(name: str, x: Tensor, shape: str, size: int) -> None:
    dims = shape.count(",") + 1
    check_tensors(**{name: x})
    if x.ndim != dims or x.shape[-3] != size:
        raise ValueError(f"{name}: expected shape {shape}, got shape {tuple(x.shape)}")


def _check_slopes(slopes: Tensor, q: Tensor, batch: int | None) -> Tensor:
    """The slopes as a checked tensor of one dimension (heads) or, in a dense batch, of one or two."""
    check_tensors(alibi_slopes=slopes)
    if not slopes.is_floating_point():
        raise TypeError(f"alibi_slopes: expected a floating-point dtype, got {slopes.dtype}")
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes: expected the device of q, {q.device}, got {slopes.device}")
    if batch is None and slopes.ndim == 2 and (slopes.shape[0] == 1 or slopes.stride(0) == 0) and slopes.shape[0]:
        slopes = slopes[0]
    # No text has a size in it before it is an error's: Dynamo would make that size a constant.
    if slopes.shape != q.shape[-2:-1] and (batch is None or slopes.shape != (batch, q.shape[-2])):
        other = " for packed sequences" if batch is None else f" or ({batch}, {q.shape[-2]})"
        raise ValueError(f"alibi_slopes: expected shape ({q.shape[-2]},){other}, got shape {tuple(slopes.shape)}")
    return _whole(slopes)


def _whole(x: Tensor) -> Tensor:
    """All of a DTensor, a plain tensor on every rank; any other tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _beside(lse: Tensor, x: Tensor) -> Tensor:
    """X, which is the same on every rank, as a DTensor if lse is one."""
    rules = api.rules_of_dtensors()
    return x if rules is None else cast(Tensor, rules.beside(x, lse))


def _with_alibi(
    attend: Callable[..., Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor,
    diagonal: Tensor,
    columns: int,
    seqused_q: Tensor | None,
    fewer: Tensor,
    causal: bool,
    window_size: Window,
    return_lse: bool,
) -> Any:
    """Attention with ``-slope * |diagonal - j|`` added to the scores, in memory linear in the rows.

    Among the keys up to its diagonal that is ``slope * j`` for every query, but for a number that is the same for all
    of a query's keys: it cancels in the softmax and is taken from lse. Behind the diagonal it is ``-slope * j``. Keys
    behind it are what a causal window turned round shows to all queries but the last, as if that one was not there.

    ``attend`` is the public function and all but what follows. ``diagonal``, (seqlen_q,) or (total_q,), has the
    position of each query among the keys of its sequence, of which there are ``columns`` at the most. ``fewer``,
    (batch,) int32, has the lengths of q, each less one. Returns out, or (out, lse).
    """
    q = qkv[0]
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # it would round the bias
        dtype = q.dtype if q.dtype == torch.float64 else torch.get_autocast_dtype(kind)
        qkv = (qkv[0].to(dtype), qkv[1].to(dtype), qkv[2].to(dtype))
        with torch.autocast(kind, enabled=False):
            settings = (causal, window_size, return_lse)
            return _with_alibi(attend, qkv, slopes, diagonal, columns, seqused_q, fewer, *settings)
    left, right = window_size[0], 0 if causal else window_size[1]
    slopes = slopes.to(torch.promote_types(q.dtype, torch.float32))
    bias = slopes[..., None, None] * torch.arange(columns, device=q.device)
    shift = slopes[..., None] * diagonal
    if right == 0:
        result = attend(*qkv, seqused_q=seqused_q, window_size=(left, 0), bias=bias, return_lse=return_lse)
        return (result[0], result[1] - _beside(result[1], shift)) if return_lse else result
    out_1, lse_1 = attend(*qkv, seqused_q=seqused_q, window_size=(left, 0), bias=bias, return_lse=True)
    shift = _beside(lse_1, shift)
    behind = (0, None if right is None or right < 0 else right - 1)
    out_2, lse_2 = attend(*qkv, seqused_q=fewer, window_size=behind, bias=-bias, return_lse=True)
    out, lse = _merge(out_1, lse_1 - shift, out_2, lse_2 + shift)
    return (out, lse) if return_lse else out


def _merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys from that to each; differentiable, also where a set is empty."""
    lowest = torch.finfo(lse_1.dtype).min / 4
    finite_1, finite_2 = lse_1.clamp(min=lowest), lse_2.clamp(min=lowest)
    share = torch.sigmoid(finite_1 - finite_2).transpose(-1, -2)[..., None]  # heads and rows to rows and heads
    out = torch.lerp(out_2.to(share.dtype), out_1.to(share.dtype), share).to(out_1.dtype)
    lse = torch.logaddexp(finite_1, finite_2)
    return out, lse.masked_fill(lse_1.isneginf() & lse_2.isneginf(), -torch.inf)
