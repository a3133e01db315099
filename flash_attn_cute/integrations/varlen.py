"""``torch.nn.attention.varlen.varlen_attn`` as PyTorch writes it and torchtitan calls it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from flash_attn_cute import api
from flash_attn_cute.integrations import check_flags, check_tensors

_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}
_NAMES |= {"cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k", "max_seqlen_q": "max_q", "max_seqlen_k": "max_k"}
_NAMES |= {"causal": "is_causal", "return_lse": "return_aux.lse"}


class AuxRequest(Protocol):
    """A request for results beside out; PyTorch's ``torch.nn.attention.varlen.AuxRequest`` is one."""

    @property
    def lse(self) -> bool:
        """Whether to return the log-sum-exp of the scores."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int | Tensor,
    max_k: int | Tensor,
    is_causal: bool = False,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Attention over packed sequences. Rows that belong to none are ignored and come out as zeros.

    Differentiable, seqused_k included. The backward pass is deterministic if ``torch.use_deterministic_algorithms`` is
    on, or with ``num_splits=1``.

    Args:
        query: (total_q, nheads, d), float16, bfloat16, float32 or float64, the last dimension contiguous.
        key: (total_k, nheads, d), of query's dtype; with enable_gqa, its heads divide those of query.
        value: (total_k, nheads, d_v), likewise.
        cu_seq_q: (batch + 1,) int32, offsets of the sequences' query rows.
        cu_seq_k: (batch + 1,) int32, those of their rows in key and value.
        max_q: upper bound on the query rows of any sequence.
        max_k: likewise for keys.
        is_causal: as window_size=(left, 0); an argument up to PyTorch 2.10 and in torchtitan then.
        return_aux: an object with a bool ``lse``: whether to return lse, too.
        scale: the factor before softmax; None means 1 / sqrt(d).
        window_size: (left, right), aligned to the bottom right; -1 means unbounded, so (-1, 0) is causal.
        enable_gqa: allow fewer heads in key and value than in query.
        seqused_k: (batch,) int32, the real keys of each sequence if fewer than it owns.
        block_table: None; paged keys and values are not supported.
        num_splits: 1: a sequence has the same bits in whatever batch it is, as deterministic="invariant" in
            ``flash_attn_varlen_func``. Other numbers are a hint that is not used.

    Returns:
        out (total_q, nheads, d_v) of query's dtype; with return_aux.lse, (out, lse), lse being natural logarithms,
        (nheads, total_q), float32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or one that is not supported.
    """
    if block_table is not None:
        raise ValueError(
            f"block_table: expected None, paged keys and values are not supported, got {type(block_table).__name__}"
        )
    if num_splits is not None:
        api.check_int("num_splits", num_splits, "None or an int")
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise TypeError(f"return_aux: expected None or an object with a bool lse, got {return_aux!r}")
    check_tensors(query=query, key=key)
    check_flags(enable_gqa=enable_gqa)
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 3:
            raise ValueError(f"{name}: expected shape (rows, heads, d), got shape {tuple(x.shape)}")
    if not enable_gqa and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"key: expected the {query.shape[-2]} heads of query (fewer need enable_gqa=True), got {key.shape[-2]}"
        )
    return api.call(
        api.flash_attn_varlen_func,
        _NAMES,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        seqused_k=seqused_k,
        softmax_scale=scale,
        causal=is_causal,
        window_size=window_size,
        deterministic="invariant" if num_splits == 1 else torch.are_deterministic_algorithms_enabled(),
        return_lse=return_aux is not None and return_aux.lse,
    )
