"""Mask functions of transformers; they give layers as ``attention_mask`` rows of sequences, or a mask in memory.

A class that supports flash attention hands its mask from the model to the layers without looking at it. It gets *rows*:
a tensor of four dimensions, (sequences + 1, 1 + number, longest, 4), uint32, which no mask in memory is.

- ``[i, 0, 0]`` holds the first row and the number of rows of sequence i in keys and values, then the same in queries.
  Rows are counted through all entries of the batch. The last i holds the number of all rows, and zeros.
- No i at all: every entry of the batch is one sequence, of which all rows are real.
- ``number`` is that of the ``Pattern`` of keys that a query sees within its sequence.
- ``longest`` is a bound on the queries of a sequence.

Number and longest are sizes and no values, because the host would have to wait for values.

Other classes change masks on their way to the layers. They get what they would get for "sdpa": a bool mask in memory,
(batch, 1, seqlen_q, seqlen_k), True = may attend.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

# Functions that transformers joins to masks and that a pattern stands for, and whether that is causal.
_LEFT, _BOTH = "sliding_window_overlay", "sliding_window_bidirectional_overlay"
_IS_CAUSAL = {
    frozenset({"causal_mask_function"}): True,
    frozenset({"causal_mask_function", _LEFT}): True,
    frozenset({"bidirectional_mask_function"}): False,
    frozenset({"bidirectional_mask_function", _BOTH}): False,
}


class Pattern(NamedTuple):
    """Which keys a query sees within its own sequence, aligned to the sequence's end."""

    is_causal: bool = False  # no key behind the query's own position
    window: int | None = None  # the distance of the farthest key, on each side; None: any
    has_padding: bool = False  # rows of padding belong to no sequence


# All patterns of this process. Rows hold a pattern's place in this list.
_PATTERNS = [Pattern()]


class Rows(NamedTuple):
    """Contents of a tensor of rows."""

    pattern: Pattern
    longest: int
    sequences: Tensor | None  # (sequences + 1, 4) int32; None: each entry of the batch is one, all of it real

    @classmethod
    def read(cls, mask: Tensor | None) -> "Rows | None":
        """The rows that a mask is; None if it is something else.

        Raises:
            ValueError: rows that a model has changed on their way to the layer.
        """
        if mask is None or mask.dtype != torch.uint32:
            return None
        if mask.ndim != 4 or mask.shape[3] != 4 or not 1 <= mask.shape[1] <= len(_PATTERNS):
            raise ValueError(
                "attention_mask: expected what the model's mask function returned, unchanged, got a part of it, "
                f"shape {tuple(mask.shape)}; attn_implementation='sdpa' serves a model that changes masks"
            )
        sequences = mask[:, 0, 0].view(torch.int32) if mask.shape[0] else None
        return cls(_PATTERNS[mask.shape[1] - 1], mask.shape[2], sequences)

    def write(self, device: torch.device | str) -> Tensor:
        """The tensor that says it."""
        if self.pattern not in _PATTERNS:
            _PATTERNS.append(self.pattern)
        sequences = torch.empty(0, 4, dtype=torch.int32, device=device) if self.sequences is None else self.sequences
        number = _PATTERNS.index(self.pattern)
        return sequences.view(torch.uint32)[:, None, None].expand(-1, 1 + number, self.longest, -1)


def mask_in_memory(*, allow_is_causal_skip: bool = False, **given: Any) -> Tensor | None:
    """A mask for classes that look at masks; ``rows_of_mask`` has the arguments.

    Args:
        allow_is_causal_skip: not used: whether a layer is causal is for the mask to say, not for the layer.
        given: the arguments of transformers' mask functions.

    Returns:
        (batch, 1, q_length, kv_length) bool, True = may attend; None where nothing is hidden and the model allows it.
    """
    return masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)


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
    """Returns what ``attend`` needs to know of the mask of a forward pass.

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
        others: arguments of transformers for functions that make masks in memory.

    Returns:
        None if every query sees every key; or rows, as the module describes them; or a bool mask (batch, 1, q_length,
        kv_length), True = may attend.
    """
    make_mask = functools.partial(
        mask_in_memory,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **{**others, "allow_is_bidirectional_skip": False},
    )
    known = _recognised(mask_function)
    if known is None:
        return make_mask()
    pattern, sequences = known
    if sequences is not None:  # transformers looks for them where there is no cache and no attention_mask
        return _rows_of_packed(sequences, pattern)
    first = q_offset - kv_offset  # the first query's place among the keys
    stop = first + q_length if pattern.is_causal else kv_length  # the end of what the last query sees
    is_known = not isinstance(first, Tensor)  # static caches have it on the device
    is_square = is_known and first == 0 and q_length == kv_length
    if pattern.window is not None and not pattern.is_causal and not is_square:  # layers align windows to the end
        return make_mask()
    sees_all = pattern == Pattern(is_causal=q_length == 1 and pattern.is_causal)
    whole = None if sees_all else Rows(pattern, q_length, None).write(device)
    if attention_mask is None and is_known and stop == kv_length:
        return whole
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
    is_whole, are_runs = torch.stack([real.all(), fits & (is_run == real).all()]).tolist()
    if not are_runs:
        return make_mask()
    if is_whole:
        return whole
    if pattern.is_causal or pattern.window is not None:
        starts_q = (starts - first).clamp(min=0)
        lengths_q = (starts + lengths - first).clamp(min=0) - starts_q
    else:  # they could be a decoder's, and the keys an encoder's
        starts_q, lengths_q = torch.zeros_like(starts), torch.full_like(lengths, q_length)
    entries = torch.arange(batch_size, device=device)
    keys = (starts + entries * kv_length, lengths, batch_size * kv_length)
    queries = (starts_q + entries * q_length, lengths_q, batch_size * q_length)
    return Rows(pattern._replace(has_padding=True), q_length, _table(keys, queries)).write(device)


def _recognised(mask_function: Callable[..., Tensor]) -> tuple[Pattern, Tensor | None] | None:
    """Finds what a function of transformers stands for; None if it could be anything.

    Returns:
        The pattern; and for packed sequences (batch, rows), ascending: the number of the sequence of each row within
        its entry.
    """
    joined, parts, sequences, windows = [mask_function], set(), None, []
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
            if maker in (_LEFT, _BOTH):  # the former counts the query's own key
                windows.append(arguments["sliding_window"] - (maker == _LEFT))
    is_causal = _IS_CAUSAL.get(frozenset(parts))
    return None if is_causal is None else (Pattern(is_causal, min(windows, default=None)), sequences)


def _rows_of_packed(sequences: Tensor, pattern: Pattern) -> Tensor | None:
    """Rows of a batch whose entries hold sequences one behind another."""
    batch, length = sequences.shape
    is_first = torch.nn.functional.pad(sequences[:, 1:] != sequences[:, :-1], (1, 0), value=True)
    starts = is_first.flatten().nonzero()[:, 0]
    if starts.shape[0] == batch:
        return None if pattern == Pattern() else Rows(pattern, length, None).write(sequences.device)
    total = batch * length
    lengths = torch.diff(starts, append=starts.new_tensor([total]))
    table = _table((starts, lengths, total), (starts, lengths, total))
    return Rows(pattern, int(lengths.max().item()), table).write(sequences.device)


def _table(keys: tuple[Tensor, Tensor, int], queries: tuple[Tensor, Tensor, int]) -> Tensor:
    """Starts, lengths and numbers of all rows, as the module describes them."""
    columns = [
        torch.nn.functional.pad(x, (0, 1), value=end)
        for starts, lengths, total in (keys, queries)
        for x, end in ((starts, total), (lengths, 0))
    ]
    return torch.stack(columns, 1).to(torch.int32)
