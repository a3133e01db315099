"""Tables of a selection for kernels that go over key blocks: which queries select each, and how they are worked on.

A pick is a query and a block that it selects, and has a number: ``top`` times the query's row, of those that the tables
are for, plus the block's rank. Columns are the key blocks of all sequences. Everything is computed on the device, and
sizes follow from shapes alone: the host waits for nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.spec import AttentionInputs, AttentionSpec

_BEHIND_INT16 = 1 << 15


class SelectionTables(NamedTuple):
    """Tables of some query rows, int32, flattened; sets are over the selections of the batch and heads.

    Attributes:
        columns: (set, pick): the pick's block, ``num_columns`` if it selects none or sees no key of it.
        entries: (set, pick): numbers of picks by columns, ascending in each, and behind them those of no column.
        items: (set, item, 4): first entry and that behind the last, sequence, and the first key of the block there.
        item_spans: (set, column, and one behind the last): the first item of each column.
        real: (row,): whether a row belongs to a sequence; None of dense calls, where all do.
    """

    columns: Tensor
    entries: Tensor
    items: Tensor
    item_spans: Tensor
    real: Tensor | None


def num_columns(k_rows: int, block: int, num_sequences: int) -> int:
    """Key blocks of all sequences, at the most; ``num_sequences`` is 0 of dense calls."""
    return k_rows // block + num_sequences if num_sequences else -(-k_rows // block)


def num_items(picks: int, columns: int, item_picks: int) -> int:
    """Items that a set has at the most."""
    return min(picks, picks // item_picks + columns)


def selection_tables(
    spec: AttentionSpec, inputs: AttentionInputs, rows: tuple[int, int], item_picks: int
) -> SelectionTables:
    """Tables of query rows first .. stop, of every batch entry; an item has ``item_picks`` picks at the most."""
    assert inputs.selected is not None
    selected, block = inputs.selected[:, :, rows[0] : rows[1]].flatten(0, 1), spec.selection_block
    num_sequences = 0 if inputs.cu_seqlens_k is None else len(inputs.cu_seqlens_k) - 1
    none = num_columns(inputs.k.shape[-3], block, num_sequences)
    keys = _visible_keys(spec, inputs, rows)
    # Of no visible key, the last block comes before the first.
    first_block = keys.first // block
    last_block = ((keys.stop - 1) // block).where(keys.stop > keys.first, -1)
    is_seen = (selected >= first_block[:, None]) & (selected <= last_block[:, None])
    columns = (selected + keys.first_column[:, None]).where(is_seen, none).int().flatten(1)
    # Radix sorts take half the passes over half the bits.
    by_column, order = (columns.short() if none < _BEHIND_INT16 else columns).sort(stable=True)
    items = _items(by_column, none, item_picks)
    sequence, of_sequence = _sequence_of_columns(inputs, items.column, block)
    fields = items.start, items.stop, sequence, of_sequence * block
    by_item = torch.stack(fields, -1)
    tables = (x.int().flatten() for x in (columns, order, by_item, items.spans))
    return SelectionTables._make((*tables, keys.is_real))


class _Keys(NamedTuple):
    """Keys that query rows attend to, first .. stop in their sequence, whose blocks begin at ``first_column``."""

    first: Tensor
    stop: Tensor
    first_column: Tensor
    is_real: Tensor | None


def _visible_keys(spec: AttentionSpec, inputs: AttentionInputs, rows: tuple[int, int]) -> _Keys:
    """The keys that rows see by their window."""
    row = torch.arange(*rows, device=inputs.q.device)
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        is_real, length = None, row * 0 + inputs.k.shape[1]
        first_column, position = row * 0, row + (inputs.k.shape[1] - inputs.q.shape[1])
    else:
        offsets_q, offsets_k = _offsets(inputs.cu_seqlens_q, inputs.q), _offsets(inputs.cu_seqlens_k, inputs.k)
        sequence = torch.searchsorted(offsets_q, row, right=True) - 1
        is_real = (sequence >= 0) & (sequence < len(offsets_q) - 1)
        sequence = sequence.clamp(0, max(0, len(offsets_q) - 2))
        following = (sequence + 1).clamp(max=len(offsets_q) - 1)
        starts = offsets_q[sequence], offsets_k[sequence]
        length = (offsets_k[following] - starts[1]).where(is_real, 0)
        first_column = starts[1] // spec.selection_block + sequence
        position = row - starts[0] + length - (offsets_q[following] - starts[0])
    first, stop = row * 0, length
    if spec.window_left is not None:
        first = (position - spec.window_left).clamp(min=0)
    if spec.window_right is not None:
        stop = torch.minimum(position + spec.window_right + 1, length)
    return _Keys(first, stop, first_column, is_real)


def _offsets(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """Offsets, which are not checked, clamped to the rows of x."""
    return cu_seqlens.long().clamp(0, len(x))


class _Items(NamedTuple):
    """Work items, (set, item): entries start .. stop of a column; those that there are not have no entries."""

    column: Tensor
    start: Tensor
    stop: Tensor
    spans: Tensor  # (set, column, and one behind the last): the first item of each column


def _items(by_column: Tensor, none: int, item_picks: int) -> _Items:
    """Cuts each column of the sorted picks (set, pick) into items."""
    sets, picks = by_column.shape
    edges = torch.arange(none + 1, dtype=by_column.dtype, device=by_column.device).expand(sets, -1)
    spans = torch.searchsorted(by_column, edges.contiguous())  # the first entry of each column
    until = ((spans.diff() + item_picks - 1) // item_picks).cumsum(-1)  # items up to each column
    number = torch.arange(num_items(picks, none, item_picks), device=by_column.device).expand(sets, -1)
    column = torch.searchsorted(until, number.contiguous(), right=True)
    item_spans = torch.nn.functional.pad(until, (1, 0))
    of_column = number - item_spans.gather(-1, column)
    stop = spans.gather(-1, (column + 1).clamp(max=none))
    start = torch.minimum(spans.gather(-1, column) + of_column * item_picks, stop)
    stop = torch.minimum(start + item_picks, stop)
    return _Items._make((*(x.where(column < none, 0) for x in (column, start, stop)), item_spans))


def in_halves(inputs: AttentionInputs) -> AttentionInputs:
    """A selection of blocks as one of their halves: twice as many of half the keys."""
    assert inputs.selected is not None
    first = inputs.selected * 2
    return inputs._replace(selected=torch.stack((first, first + 1), -1).flatten(-2))


def _sequence_of_columns(inputs: AttentionInputs, column: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Sequence of each column, and the block's number there."""
    if inputs.cu_seqlens_k is None:
        return column * 0, column
    first = _offsets(inputs.cu_seqlens_k, inputs.k)[:-1] // block
    first = first + torch.arange(len(first), device=first.device)
    sequence = (torch.searchsorted(first, column, right=True) - 1).clamp(min=0)
    return sequence, column - first[sequence]
