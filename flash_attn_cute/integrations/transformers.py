"""Hugging Face transformers: ``attn_implementation="flash_attn_cute"``.

``register()`` gives transformers two functions. A mask function (``_transformers_masks``) runs once a forward pass for
each kind of layer: from the mask that transformers describes it finds which rows of the batch each sequence owns.
``attend`` runs in every layer, with what the mask function has returned. What the mask says and what the layer says are
compared, and the stricter holds. What ``attend`` does not know is refused by name.
"""

import functools
import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils, modeling_utils

from flash_attn_cute import api
from flash_attn_cute.integrations import check_tensors
from flash_attn_cute.integrations._transformers_masks import Pattern, Rows, mask_in_memory, rows_of_mask

NAME = "flash_attn_cute"
# What the implementation is called in models that look at masks, which get them in memory. Without "flash" in it, a
# name for which models take ways that they do not support.
MASKED_NAME = "attn_cute_with_masks"

# Names here of the arguments of attention.
_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scaling", "learnable_sink": "s_aux"}
_NAMES |= {"cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k", "mask": "attention_mask"}
_NAMES |= {"max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k", "bias": "attention_mask"}

# Keyword arguments that models hand on to their layers, and why attention does not depend on them.
NOT_USED = {
    "position_ids": "the mask and the rotated queries and keys hold them, or else they are refused",
    "cache_position": "the mask holds it",
    "seq_idx": "for recurrent layers; masks or offsets say it to attention",
    "use_cache": "the model has made the cache",
    "num_items_in_batch": "for the loss",
    "logits_to_keep": "for the model's head",
    "return_dict": "what the model returns",
    "output_hidden_states": "what the model returns",
    "output_router_logits": "what the model returns",
}

# Whether positions restart at 0, and how often they had been written to by then.
_restarts: Any = WeakTensorKeyDictionary()


def register() -> None:
    """Makes ``attn_implementation="flash_attn_cute"`` known to transformers, for models made from then on.

    It serves models that call transformers' attention interface: causal or not, with sliding windows, softcap, sinks
    (``s_aux``), grouped heads, padded batches, batches packed by ``position_ids`` or by ``cu_seq_lens_q`` and its kin,
    dynamic and static caches. Other masks are made in memory and used as they are. Models that support "sdpa", but no
    flash attention, get all their masks in memory, and "attn_cute_with_masks" as ``config._attn_implementation``. With
    ``torch.use_deterministic_algorithms`` the backward pass is deterministic. A second call changes nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    for name, mask_function in ((NAME, rows_of_mask), (MASKED_NAME, mask_in_memory)):
        modeling_utils.AttentionInterface.register(name, attend)
        masking_utils.AttentionMaskInterface.register(name, mask_function)
    # A model asks the first when it is made, and the second for models in it. Given a name with "flash" in it, the
    # first loads a package of that name, or takes one that the class lists.
    for method in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        check: Any = getattr(modeling_utils.PreTrainedModel, method)
        if not hasattr(check, "__wrapped__"):
            setattr(modeling_utils.PreTrainedModel, method, _beside(check))


def _beside(check: Any) -> Any:
    """A method of models that names the implementation to use: ours, or what ``check`` says of others."""

    @functools.wraps(check)
    def name_of(model: Any, implementation: str | None, *args: Any, **options: Any) -> Any:
        if implementation in (NAME, MASKED_NAME):
            return _name_for(type(model))
        return check(model, implementation, *args, **options)

    return name_of


def _name_for(model: Any) -> str:
    """The name of our implementation in models of a class."""
    sources = [_source(base) for base in model.__mro__ if issubclass(base, nn.Module)]
    asks_by_name = any(re.search(r"_CLASSES\[(self\.)?config\._attn_implementation\]", x) for x in sources)
    if asks_by_name or not model._can_set_attn_implementation():
        raise ValueError(
            f"attn_implementation: expected 'eager' or 'sdpa' for {model.__name__}, which does not use transformers' "
            f"attention interface, got {NAME!r}"
        )
    if model._supports_flash_attn:
        return NAME
    if model._supports_sdpa:
        return MASKED_NAME
    is_theirs = model.__module__.startswith("transformers.models.")
    if is_theirs and not any("ALL_ATTENTION_FUNCTIONS" in x for x in sources):  # none of its layers attends
        return NAME
    raise ValueError(
        f"attn_implementation: expected 'eager' for {model.__name__}, which supports neither 'sdpa' nor flash "
        f"attention, got {NAME!r}"
    )


def _source(model: type) -> str:
    """The file that defines a class of models; empty for those of others, and where there is no file."""
    if model.__module__ in (modeling_utils.__name__, nn.Module.__module__):
        return ""
    try:
        return inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):  # classes of a terminal
        return ""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    deterministic: api.Deterministic | None = None,
    cache: object = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers calls it.

    Args:
        module: the layer; its ``is_causal`` counts where the argument is None.
        query: (batch, nheads, seqlen_q, d), float16, bfloat16, float32 or float64.
        key: (batch, nheads_k, seqlen_k, d), of query's dtype; nheads_k divides nheads.
        value: (batch, nheads_k, seqlen_k, d_v), of query's dtype.
        attention_mask: what the mask function has returned; or (batch or 1, nheads or 1, seqlen_q, seqlen_k or more),
            bool (True = may attend) or floating point (added to the scores), which is all that is hidden, causal
            layers or not; or None: nothing is hidden but what the layer says.
        dropout: 0.0.
        scaling: the factor before softmax; None means 1 / sqrt(d).
        sliding_window: how many keys a query sees, its own included; on either side if the layer is not causal.
        softcap: bound on the scores' magnitude; None means none.
        is_causal: hide the keys behind a query's own position, aligned to the bottom right.
        s_aux: (nheads,), learnable sinks.
        position_bias: broadcastable to (batch, nheads, seqlen_q, seqlen_k), added to the scores. Not together with
            packed sequences and padding, but for masks in memory.
        indices: (batch, seqlen_q, selected), numbers of the keys that each query sees, if the mask shows them.
        block_indices: (batch, groups of heads, seqlen_q, selected), likewise of blocks of ``module.indexer.block_size``
            keys; -1 is none.
        deterministic: make the backward pass deterministic, as with ``torch.use_deterministic_algorithms``; or
            "invariant", as in ``flash_attn_func``.
        cache: None; transformers' paged caches are not supported.
        output_attentions: not True; the weights are never in memory.
        cu_seq_lens_q: (sequences + 1,), offsets of packed sequences in the rows of all entries of the batch. With the
            next three, it counts and attention_mask does not.
        cu_seq_lens_k: likewise of key and value.
        max_length_q: bound on the length of a sequence.
        max_length_k: likewise of key and value.
        others: those of ``NOT_USED``, and None.

    Returns:
        (batch, seqlen_q, nheads, d_v) of query's dtype, and None for the weights.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value, or one that is not supported.
    """
    _refuse(dropout=dropout, cache=cache, output_attentions=output_attentions, **others)
    optional = {"attention_mask": attention_mask, "s_aux": s_aux, "position_bias": position_bias}
    optional |= {"indices": indices, "block_indices": block_indices}
    qkv = {"query": query, "key": key, "value": value}
    check_tensors(**qkv, **{name: x for name, x in optional.items() if x is not None})
    _check_shapes(qkv)
    batch = max(query.shape[0], key.shape[0])
    q, k, v = (_rows_first(x, batch) for x in (query, key, value))
    rows = Rows.read(attention_mask)
    pattern = Pattern() if rows is None else rows.pattern
    causal = _is_causal(module, is_causal, q, k, attention_mask)
    if s_aux is not None and s_aux.dtype not in (torch.float32, q.dtype):
        s_aux = s_aux.to(q.dtype)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": 0.0 if softcap is None else softcap,
        "learnable_sink": s_aux,
        "deterministic": deterministic or torch.are_deterministic_algorithms_enabled(),
    }
    side = _side(sliding_window, pattern)
    band: dict[str, Any] = {"causal": causal or pattern.is_causal, "window_size": (side, side)}
    offsets: tuple[Any, ...] = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    where: dict[str, Any] = {}
    names = _NAMES
    if any(x is not None for x in offsets):
        _check_offsets(*offsets, attention_mask=attention_mask)
    elif rows is not None and rows.sequences is not None:
        starts_k, lengths_k, starts_q, lengths_q = rows.sequences.unbind(1)
        names = names | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "position_ids or attention_mask")
        where = {"seqused_q": lengths_q[:-1], "seqused_k": lengths_k[:-1]}
        offsets = (starts_q, starts_k, rows.longest, rows.longest if q.shape[1] == k.shape[1] else k.shape[1])
    elif (rows is not None or attention_mask is None) and q.shape[1] == k.shape[1]:
        _check_positions(others.get("position_ids"), q.shape[1])
    if offsets[0] is not None:
        in_memory = {"position_bias": position_bias, "indices": indices, "block_indices": block_indices}
        for name, x in in_memory.items():
            if x is not None:
                raise ValueError(
                    f"{name}: expected None for packed sequences and padding, got shape {tuple(x.shape)}; "
                    "attn_implementation='sdpa' serves it"
                )
        where |= {"cu_seqlens_q": _as_int32(offsets[0]), "cu_seqlens_k": _as_int32(offsets[1])}
        where |= {"max_seqlen_q": offsets[2], "max_seqlen_k": offsets[3]}
        given: dict[str, Any] = {**where, **options, **band}
        packed = (x.flatten(0, 1) for x in (q, k, v))
        out = api.call(api.flash_attn_varlen_func, names, *packed, **given)
        return out.unflatten(0, q.shape[:2]), None
    if rows is None and attention_mask is not None:
        band = {}  # a mask in memory is all that hides keys
    mask, bias = _mask_and_bias(None if rows else attention_mask, position_bias, q, k)
    selected = _selected(module, indices, block_indices, q, k)
    if selected is not None:
        mask = selected if mask is None else mask & selected
    names = names if position_bias is None else names | {"bias": "position_bias"}
    return api.call(api.flash_attn_func, names, q, k, v, mask=mask, bias=bias, **options, **band), None


def _refuse(dropout: float, cache: object, output_attentions: bool | None, **others: object) -> None:
    """Refuses what is not supported, and what is not known."""
    if dropout:
        raise ValueError(
            f"dropout: expected 0.0, dropout of attention weights is not supported, got {dropout}; in the model's "
            "config it is attention_dropout or a name like it"
        )
    if cache is not None:
        raise ValueError(f"cache: expected None, paged caches are not supported, got {type(cache).__name__}")
    if output_attentions:
        raise ValueError(
            "output_attentions: expected False, as attention weights are never in memory, got True; "
            "attn_implementation='eager' returns them"
        )
    for name, x in others.items():
        if x is not None and name not in NOT_USED:
            raise ValueError(
                f"{name}: expected no such argument, as its meaning for attention is not known here, got "
                f"{type(x).__name__}; attn_implementation='eager' knows the model's own arguments"
            )


def _check_shapes(qkv: dict[str, Tensor]) -> None:
    """Checks the dimensions of query, key and value, and that a batch is one entry or that of the others."""
    for name, x in qkv.items():
        if x.ndim != 4:
            raise ValueError(f"{name}: expected shape (batch, heads, rows, d), got shape {tuple(x.shape)}")
    batch = max(qkv["query"].shape[0], qkv["key"].shape[0])
    for name, x in qkv.items():
        if x.shape[0] != 1 and x.shape[0] != batch:
            raise ValueError(f"{name}: expected a batch of 1 or {batch}, got shape {tuple(x.shape)}")


def _rows_first(x: Tensor, batch: int) -> Tensor:
    """(batch, heads, rows, d) as (batch, rows, heads, d), the last dimension contiguous; one entry stands for all."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    return x.expand(batch, -1, -1, -1).transpose(1, 2)


def _is_causal(module: nn.Module, is_causal: bool | None, q: Tensor, k: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether the layer says that queries do not see the keys behind their own position."""
    said = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if attention_mask is None and q.shape[1] > 1 and said is None:
        raise ValueError(
            f"is_causal: expected True or False where there is no mask, got None, and {type(module).__name__} has no "
            "is_causal of its own"
        )
    return bool(said)


def _side(sliding_window: int | None, pattern: Pattern) -> int | None:
    """How far a query sees at most by what the layer says, and by what its mask says."""
    if sliding_window is None:
        return pattern.window
    sliding_window = api.check_int("sliding_window", sliding_window, "None or an int")
    if sliding_window < 1:
        raise ValueError(f"sliding_window: expected None or at least 1, got {sliding_window}")
    side = sliding_window - 1
    if pattern.window is None:
        return side
    # Masks that are not causal do not count the query's own key. Some layers hand on their number, some one more.
    return pattern.window if not pattern.is_causal and sliding_window == pattern.window else min(side, pattern.window)


def _check_positions(position_ids: object, rows: int) -> None:
    """Refuses positions that restart at 0 where the mask has one sequence a row: the next one would see the last one.

    transformers looks for them only where there is neither a cache nor an attention_mask. They are read once for all
    layers, but not in what is compiled or captured.
    """
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2 or rows < 2 or position_ids.shape[1] != rows:
        return
    if api.needs_dispatcher((position_ids,)) or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    writes = 0 if position_ids.is_inference() else position_ids._version
    known = _restarts.get(position_ids)
    if known is None or known[0] != writes:
        jumps = position_ids.diff() != 1
        restarts = jumps.any() & (~jumps | (position_ids[:, 1:] == 0)).all()
        known = _restarts[position_ids] = writes, bool(restarts)
    if known[1]:
        raise ValueError(
            "position_ids: expected one sequence in each row, as in the mask (transformers looks for several only if "
            "there is neither a cache nor an attention_mask), got positions that restart at 0; use_cache=False, or "
            "cu_seq_lens_q and its kin, keep packed sequences apart"
        )


def _check_offsets(*offsets: object, attention_mask: Tensor | None) -> None:
    """Checks what batches are packed by."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    for name, x in zip(names, offsets, strict=True):
        if x is None:
            raise ValueError(f"{name}: expected all of {', '.join(names)} or none, got None")
    check_tensors(**dict(zip(names[:2], offsets, strict=False)))
    rows = Rows.read(attention_mask)
    if rows is None and attention_mask is not None:
        raise ValueError(
            f"cu_seq_lens_q: expected None beside a mask in memory, which may hide other keys, got one, and "
            f"attention_mask of shape {tuple(attention_mask.shape)}"
        )
    if rows is not None and rows.pattern.has_padding:
        raise ValueError("cu_seq_lens_q: expected None beside an attention_mask with padding, got both")


def _as_int32(offsets: Tensor) -> Tensor:
    """Offsets of int64 as int32; others as they are, of which calls say what is wrong."""
    return offsets.to(torch.int32) if offsets.dtype == torch.int64 else offsets


def _mask_and_bias(
    attention_mask: Tensor | None, position_bias: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Turns tensors over all scores into arguments of ours."""
    bias, mask = position_bias, None
    if attention_mask is not None:
        if attention_mask.ndim != 4:
            raise ValueError(
                "attention_mask: expected None or four dimensions (a padding mask of two is for the model, which makes "
                f"of it what layers need), got shape {tuple(attention_mask.shape)}"
            )
        attention_mask = attention_mask[..., : k.shape[1]]  # those of static caches may have more
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        elif attention_mask.is_floating_point():
            bias = attention_mask if bias is None else attention_mask + bias
        else:
            raise TypeError(
                "attention_mask: expected bool (True = may attend) or a floating-point dtype (added to the scores) for "
                f"four dimensions, got {attention_mask.dtype}"
            )
    if bias is not None and bias.dtype not in (torch.float32, q.dtype):
        bias = bias.to(torch.float32)
    return mask, bias


def _selected(
    module: nn.Module, indices: Tensor | None, block_indices: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """Which keys a layer has selected, as a mask; None if it does not select."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    if indices is not None and (indices.ndim != 3 or indices.shape[:2] != (batch, seqlen_q)):
        raise ValueError(f"indices: expected shape ({batch}, {seqlen_q}, selected), got shape {tuple(indices.shape)}")
    if block_indices is None:
        if indices is None:
            return None
        keys = torch.zeros(batch, seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
        return _marked("indices", keys, indices)[:, None]
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int) or indices is not None:
        raise ValueError(
            "block_indices: expected None where the layer has no indexer.block_size, or indices, too, got shape "
            f"{tuple(block_indices.shape)} from {type(module).__name__}"
        )
    shape, heads = tuple(block_indices.shape), q.shape[2]
    if len(shape) != 4 or (shape[0], shape[2]) != (batch, seqlen_q) or not shape[1] or heads % shape[1]:
        raise ValueError(
            f"block_indices: expected shape ({batch}, groups of {heads} heads, {seqlen_q}, selected), got shape {shape}"
        )
    groups, num_blocks = shape[1], -(-seqlen_k // size)
    blocks = torch.zeros(batch, groups, seqlen_q, num_blocks + 1, dtype=torch.bool, device=q.device)
    blocks = _marked("block_indices", blocks, block_indices.masked_fill(block_indices < 0, num_blocks))
    of_groups = blocks[..., :-1].repeat_interleave(size, -1)[..., :seqlen_k]
    return of_groups.repeat_interleave(heads // groups, 1)


def _marked(name: str, x: Tensor, numbers: Tensor) -> Tensor:
    """True in those columns of False."""
    try:
        return x.scatter(-1, numbers.long(), value=True)
    except RuntimeError as error:
        if not numbers.numel() or (numbers.min() >= 0 and numbers.max() < x.shape[-1]):  # such as no memory
            raise
        raise ValueError(
            f"{name}: expected numbers below {x.shape[-1]}, got {int(numbers.min())} to {int(numbers.max())}"
        ) from error
