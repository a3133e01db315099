"""Hugging Face transformers: ``attn_implementation="flash_attn_cute"``.

``register()`` gives transformers two functions. ``rows_of_mask`` runs once a forward pass for each kind of layer. From
the mask that transformers describes it finds which rows of the batch each sequence owns; a mask in memory is made only
where that does not say it all. ``attend`` runs in every layer, with what ``rows_of_mask`` has returned.

Models pass on any tensor of four dimensions as it is, so the rows are such a tensor: int32, (sequences + 1, 1, longest,
4). ``[i, 0, 0]`` holds the first row and the number of rows of sequence i in keys and values, then the same in queries.
Rows are counted through all entries of the batch. The last i holds the number of all rows, and zeros. ``longest`` is a
bound on the queries of a sequence; it is a size and no value, because the host would have to wait for a value.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import masking_utils, modeling_utils

from flash_attn_cute import api
from flash_attn_cute.integrations import check_tensors

NAME = "flash_attn_cute"

# Of the functions that transformers joins to masks: those which layers know by themselves, from is_causal and
# sliding_window, and what each set of them says of these two.
_CAUSAL, _ALL = "causal_mask_function", "bidirectional_mask_function"
_LEFT, _BOTH = "sliding_window_overlay", "sliding_window_bidirectional_overlay"
_BANDS = {
    frozenset({_CAUSAL}): (True, False),
    frozenset({_CAUSAL, _LEFT}): (True, True),
    frozenset({_ALL}): (False, False),
    frozenset({_ALL, _BOTH}): (False, True),
}


def register() -> None:
    """Makes ``attn_implementation="flash_attn_cute"`` known to transformers, for models made from then on.

    It serves models that call transformers' attention interface: causal or not, with sliding windows, softcap, sinks
    (``s_aux``), grouped heads, padded batches, batches packed by ``position_ids`` or by ``cu_seq_lens_q`` and its kin,
    dynamic and static caches. Other masks are made in memory and used as they are. With
    ``torch.use_deterministic_algorithms`` the backward pass is deterministic. A second call changes nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    modeling_utils.AttentionInterface.register(NAME, attend)
    masking_utils.AttentionMaskInterface.register(NAME, rows_of_mask)
    check: Any = modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation
    if hasattr(check, "__wrapped__"):
        return

    # Given a name with "flash" in it, this method loads a package of that name, or takes one that the class lists.
    @functools.wraps(check)
    def check_others(model: Any, attn_implementation: str | None, *args: Any, **options: Any) -> Any:
        if attn_implementation != NAME:
            return check(model, attn_implementation, *args, **options)
        if not model._can_set_attn_implementation():  # its layers do not look for registered functions
            raise ValueError(
                f"attn_implementation: expected 'eager' or 'sdpa' for {type(model).__name__}, which does not use "
                f"transformers' attention interface, got {NAME!r}"
            )
        return NAME

    modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation = check_others


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
        attention_mask: None, what ``rows_of_mask`` has given, or (batch or 1, nheads or 1, seqlen_q, seqlen_k or more),
            bool (True = may attend) or floating point (added to the scores). The latter tell all that is hidden, causal
            layers or not.
        dropout: 0.0.
        scaling: the factor before softmax; None means 1 / sqrt(d).
        sliding_window: how many keys a query sees, its own included; on either side if the layer is not causal.
        softcap: bound on the scores' magnitude; None means none.
        is_causal: hide the keys behind a query's own position, aligned to the bottom right.
        s_aux: (nheads,), learnable sinks.
        position_bias: broadcastable to (batch, nheads, seqlen_q, seqlen_k), added to the scores. Not together with
            packed sequences.
        cache: None; transformers' paged caches are not supported.
        output_attentions: not True; the weights are never in memory.
        cu_seq_lens_q: (sequences + 1,), offsets of packed sequences in the rows of all entries of the batch. With the
            next three, it counts and attention_mask does not.
        cu_seq_lens_k: likewise of key and value.
        max_length_q: bound on the length of a sequence.
        max_length_k: likewise of key and value.
        others: what else models hand to their layers, like position_ids. Not used.

    Returns:
        (batch, seqlen_q, nheads, d_v) of query's dtype, and None for the weights.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value, or one that is not supported.
    """
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
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is None and causal and (attention_mask is None or attention_mask.dtype == torch.int32):
        _check_has_no_window(module)
    side = None if sliding_window is None else sliding_window - 1
    if s_aux is not None and s_aux.dtype not in (torch.float32, q.dtype):
        s_aux = s_aux.to(q.dtype)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": 0.0 if softcap is None else softcap,
        "learnable_sink": s_aux,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    band: dict[str, Any] = {"causal": causal, "window_size": (side, side)}
    offsets: tuple[Any, ...] = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    is_packed = any(x is not None for x in offsets)
    if is_packed:
        _check_offsets(*offsets)
    rows = None if is_packed or attention_mask is None or attention_mask.dtype != torch.int32 else attention_mask
    if rows is not None and position_bias is not None:
        attention_mask = _keys_of_rows(rows, q, k, causal)
    elif rows is not None or is_packed:
        if position_bias is not None:
            raise ValueError(
                f"position_bias: expected None for packed sequences, got shape {tuple(position_bias.shape)}"
            )
        where: dict[str, Any] = {}
        if rows is not None:
            starts_k, lengths_k, starts_q, lengths_q = rows[:, 0, 0].unbind(1)
            where = {"seqused_q": lengths_q[:-1], "seqused_k": lengths_k[:-1]}
            longest = rows.shape[2]
            offsets = (starts_q, starts_k, longest, longest if q.shape[1] == k.shape[1] else k.shape[1])
        where |= {"cu_seqlens_q": offsets[0].to(torch.int32), "cu_seqlens_k": offsets[1].to(torch.int32)}
        where |= {"max_seqlen_q": offsets[2], "max_seqlen_k": offsets[3]}
        given: dict[str, Any] = {**where, **options, **band}
        out = api.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **given)
        return out.unflatten(0, q.shape[:2]), None
    elif attention_mask is not None:
        band = {}
    return api.flash_attn_func(q, k, v, **_mask_and_bias(attention_mask, position_bias, q, k), **options, **band), None


@torch.compiler.disable(reason="rows_of_mask asks how many sequences there are, and how long they are")
def rows_of_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """What ``attend`` needs to know of the mask of a forward pass.

    The host waits for the device once if there is an attention_mask, and twice for packed sequences. In compiled
    functions it is a break of the graph.

    Args:
        batch_size: entries of the batch.
        q_length: rows of queries in each.
        kv_length: rows of keys in each.
        q_offset: the position of the first query.
        kv_offset: the position of the first key.
        mask_function: whether a query sees a key, by entry, head and positions.
        attention_mask: (batch, positions) bool, True = real; what is behind its end is not.
        device: where to make the result.
        others: what transformers tells those who make masks in memory.

    Returns:
        None if all rows are real and each entry is a sequence; or rows, as the module describes them; or a bool mask
        (batch, 1, q_length, kv_length), True = may attend.
    """
    make_mask = functools.partial(
        masking_utils.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **{**others, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    band = _recognised(mask_function)
    if band is None:
        return make_mask()
    if band.sequences is not None:  # transformers looks for them where there is no cache and no attention_mask
        return _rows_of_packed(band.sequences)
    first = q_offset - kv_offset  # the first query's place among the keys
    stop = first + q_length if band.is_causal else kv_length  # the end of what the last query sees
    is_known = not isinstance(first, Tensor)  # static caches have it on the device
    is_square = is_known and first == 0 and q_length == kv_length
    if band.has_window and not band.is_causal and not is_square:  # layers align windows to the end
        return make_mask()
    if attention_mask is None and is_known and stop == kv_length:
        return None
    if q_length == 1:  # the mask is a row, and keys stay where they are
        return make_mask()
    columns = torch.arange(kv_length, device=device)
    real = (columns < stop).expand(batch_size, -1)
    if attention_mask is not None:
        positions = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        real = real & positions[:, kv_offset : kv_offset + kv_length]
    starts, lengths = real.int().argmax(1), real.sum(1)
    is_run = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    fits = torch.as_tensor(stop <= kv_length, device=device)
    is_whole, can_be_told = torch.stack([real.all(), fits & (is_run == real).all()]).tolist()
    if not can_be_told:
        return make_mask()
    if is_whole:
        return None
    if band.is_causal or band.has_window:
        starts_q = (starts - first).clamp(min=0)
        lengths_q = (starts + lengths - first).clamp(min=0) - starts_q
    else:  # they could be a decoder's, and the keys an encoder's
        starts_q, lengths_q = torch.zeros_like(starts), torch.full_like(lengths, q_length)
    entries = torch.arange(batch_size, device=device)
    keys = (starts + entries * kv_length, lengths, batch_size * kv_length)
    queries = (starts_q + entries * q_length, lengths_q, batch_size * q_length)
    return _rows(keys, queries, q_length)


class _Band(NamedTuple):
    """A mask of keys about the query's own position, in its own sequence."""

    is_causal: bool
    has_window: bool
    sequences: Tensor | None  # (batch, rows), ascending: the number of the sequence of each row within its entry


def _recognised(mask_function: Callable[..., Tensor]) -> _Band | None:
    """What a function of transformers stands for; None if it could be anything."""
    joined, parts, sequences = [mask_function], set(), None
    while joined:
        function = joined.pop()
        if getattr(function, "__module__", None) != masking_utils.__name__:
            return None
        # One that was made by another function is named after it, and holds its arguments.
        maker, arguments = function.__qualname__.partition(".")[0], inspect.getclosurevars(function).nonlocals
        if maker == "and_masks":
            joined += arguments["mask_functions"]
        elif maker == "remap_positions_for_packed_sequence":  # within a sequence positions are as far apart as rows
            joined.append(arguments["mask_function"])
        elif maker == "packed_sequence_mask_function" and sequences is None:
            sequences = arguments["packed_sequence_mask"]
        else:
            parts.add(maker)
    known = _BANDS.get(frozenset(parts))
    return None if known is None else _Band(*known, sequences)


def _rows_of_packed(sequences: Tensor) -> Tensor | None:
    """Rows of a batch whose entries hold sequences one behind another; None if there is one in each."""
    batch, length = sequences.shape
    is_first = torch.nn.functional.pad(sequences[:, 1:] != sequences[:, :-1], (1, 0), value=True)
    starts = is_first.flatten().nonzero()[:, 0]
    if starts.shape[0] == batch:
        return None
    total = batch * length
    lengths = torch.diff(starts, append=starts.new_tensor([total]))
    return _rows((starts, lengths, total), (starts, lengths, total), int(lengths.max().item()))


def _rows(keys: tuple[Tensor, Tensor, int], queries: tuple[Tensor, Tensor, int], longest: int) -> Tensor:
    """Starts, lengths and numbers of all rows, as the module describes them."""
    columns = [
        torch.nn.functional.pad(x, (0, 1), value=end)
        for starts, lengths, total in (keys, queries)
        for x, end in ((starts, total), (lengths, 0))
    ]
    rows = torch.stack(columns, 1).to(torch.int32)
    return rows[:, None, None].expand(-1, 1, longest, -1)


def _check_offsets(*offsets: object) -> None:
    """Checks what batches are packed by.

    Raises:
        TypeError: offsets that are no tensor.
        ValueError: not all four of the arguments, without which sequences would see each other.
    """
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    for name, x in zip(names, offsets, strict=True):
        if x is None:
            raise ValueError(f"{name}: expected all of {', '.join(names)} or none, got None")
    check_tensors(**dict(zip(names[:2], offsets, strict=False)))


def _check_has_no_window(module: nn.Module) -> None:
    """Refuses layers that leave their window to the mask alone: rows do not tell it.

    Raises:
        ValueError: the model's config says that this layer has a window.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and index is not None and index < len(kinds) and kinds[index] == "sliding_attention":
        raise ValueError(
            f"sliding_window: expected the window of layer {index}, a layer of sliding_attention, got None; "
            f"{type(module).__name__} hands on none, so that this model needs 'eager' or 'sdpa' for its windows"
        )


def _keys_of_rows(rows: Tensor, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """A padding mask of keys, (batch, 1, 1, seqlen_k), from rows with a sequence for each entry of the batch.

    Raises:
        ValueError: there are other sequences, or causal layers would align queries to padding.
    """
    batch, seqlen_k = k.shape[:2]
    if rows.shape[0] != batch + 1 or (causal and q.shape[1] != seqlen_k):
        raise ValueError(
            "position_bias: expected None for packed sequences and for causal layers with other keys than queries, got "
            f"one with {rows.shape[0] - 1} sequences in a batch of {batch}, {q.shape[1]} queries and {seqlen_k} keys"
        )
    starts, lengths = rows[:-1, :, :1, :2].split(1, -1)
    places = torch.arange(batch * seqlen_k, device=rows.device).view(batch, 1, 1, seqlen_k)
    return (places >= starts) & (places < starts + lengths)


def _mask_and_bias(attention_mask: Tensor | None, position_bias: Tensor | None, q: Tensor, k: Tensor) -> dict[str, Any]:
    """What is given for all scores, as arguments of ours.

    Raises:
        ValueError: an attention_mask that has not four dimensions.
    """
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
        else:
            bias = attention_mask if bias is None else attention_mask + bias
    if bias is not None and bias.dtype not in (torch.float32, q.dtype):
        bias = bias.to(q.dtype)
    return {"mask": mask, "bias": bias}
