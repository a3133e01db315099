"""Helpers that tests of integrations share: their signatures, and their calls against the oracle."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import api
from flash_attn_cute.integrations import (
    bert_padding,
    flash_attn,
    flash_attn_interface,
    sdpa,
    transformer_engine,
    varlen,
)
from tests.lib.checks import assert_right
from tests.lib.oracle import Call

# For calls by position from tuples, and for wrong ones, which no type checker would let pass.
fa: Any = flash_attn
fa3: Any = flash_attn_interface
dot: Any = sdpa
packed_attn: Any = varlen
te: Any = transformer_engine


def assert_served(call: Call, found: Any, truth: Call | None = None, *, through_lse: bool = False) -> None:
    """Compares out, or out and lse, that an integration has given, and gradients, with the oracle's of ``truth``.

    That is the call as the oracle knows it.
    """
    out, lse = found if isinstance(found, tuple) else (found, None)
    assert_right(call, out, lse, through_lse=through_lse, truth=truth)


def recorded(monkeypatch: pytest.MonkeyPatch, name: str, owner: Any = api) -> list[dict[str, Any]]:
    """The arguments of every call of a function, of the API by default, from now on."""
    calls: list[dict[str, Any]] = []
    function = getattr(owner, name)

    def record(*args: Any, **options: Any) -> Any:
        calls.append(inspect.signature(function).bind(*args, **options).arguments)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, record)
    return calls


FA2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)


FA3 = (
    "qv=None, q_descale=None, k_descale=None, v_descale=None, attention_chunk=0, num_splits=1, pack_gqa=None, "
    "sm_margin=0"
)


DESCALE = "q_descale=None, k_descale=None, v_descale=None"
OWN_FA3 = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)


PACKED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES: list[tuple[Any, str]] = [
    (fa.flash_attn_func, f"q, k, v, {FA2}, *, {FA3}"),
    (fa.flash_attn_kvpacked_func, f"q, kv, {FA2}"),
    (fa.flash_attn_qkvpacked_func, f"qkv, {FA2}"),
    (
        fa.flash_attn_varlen_func,
        f"q, k, v, {PACKED}, {FA2}, block_table=None, *, seqused_q=None, seqused_k=None, {FA3}",
    ),
    (fa.flash_attn_varlen_kvpacked_func, f"q, kv, {PACKED}, {FA2}"),
    (fa.flash_attn_varlen_qkvpacked_func, f"qkv, cu_seqlens, max_seqlen, {FA2}"),
    (fa3.flash_attn_func, f"q, k, v, {OWN_FA3}"),
    (
        fa3.flash_attn_qkvpacked_func,
        f"qkv, softmax_scale=None, causal=False, {DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    ),
    (fa3.flash_attn_varlen_func, f"q, k, v, {PACKED}, seqused_q=None, seqused_k=None, {OWN_FA3}"),
    (
        dot.scaled_dot_product_attention,
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False",
    ),
    (
        packed_attn.varlen_attn,
        "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, *, return_aux=None, scale=None, "
        "window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None",
    ),
    (
        te.thd_attention,
        "query_layer, key_layer, value_layer, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded=None, "
        "cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type='padding_causal', "
        "window_size=None, *, softmax_scale=None, learnable_sink=None, deterministic=False",
    ),
]
PADDING_SIGNATURES: list[tuple[Any, str]] = [
    (bert_padding.unpad_input, "hidden_states, attention_mask, unused_mask=None"),
    (bert_padding.pad_input, "hidden_states, indices, batch, seqlen"),
    (bert_padding.index_first_axis, "input, indices"),
]


def top_left(call: Call, left: int | None = None) -> Call:
    """A packed call under a causal mask aligned to the top left of each sequence, all of it in memory."""
    mask = torch.zeros(1, call.q.shape[0], max(rows.stop - rows.start for _, _, rows in call.sequences()))
    for _, rows_q, rows_k in call.sequences():
        ones = torch.ones(rows_q.stop - rows_q.start, rows_k.stop - rows_k.start)
        mask[0, rows_q, : ones.shape[1]] = ones.tril() if left is None else ones.tril().triu(-left)
    return replace(call, mask=mask.bool(), causal=False, window_size=(None, None))


def alibi_truth(call: Call, slopes: Tensor) -> Call:
    """A call with all of ``-slope * |i + seqlen_k - seqlen_q - j|`` as its bias."""
    packed = call.cu_seqlens_q is not None
    longest = max(rows.stop - rows.start for _, _, rows in call.sequences())
    nheads, rows = call.q.shape[-2], call.q.shape[-3]
    shape = (nheads, rows, longest) if packed else (call.q.shape[0], nheads, rows, call.k.shape[1])
    bias = torch.zeros(shape, dtype=torch.float64)
    for b, rows_q, rows_k in call.sequences():
        seqlen_q, seqlen_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        distance = (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)).abs()
        of_heads = slopes if slopes.ndim == 1 else slopes[b]
        (bias if b is None else bias[b])[:, rows_q, :seqlen_k] = -of_heads.detach().double()[:, None, None] * distance
    return replace(call, bias=bias.to(call.q.dtype))
