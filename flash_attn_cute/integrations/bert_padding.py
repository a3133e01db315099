"""The helpers of ``flash_attn.bert_padding``: from a padded batch to packed rows, and back.

``flash_attn_cute.padding.Packing`` does the same without making the host wait.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute import api
from flash_attn_cute.integrations import check_tensors


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The real rows of a padded batch, one behind another; differentiable. The host waits for the device.

    Args:
        hidden_states: (batch, seqlen, ...), of any dtype.
        attention_mask: (batch, seqlen), bool or integers, True or 1 = real; on the device of hidden_states.
        unused_mask: likewise, of rows that are kept though they are not real; none of them is real.

    Returns:
        The five values of flash-attn 2.7 and newer: the rows (total, ...); their indices (total,) int64 in the
        flattened batch; the offsets of the sequences (batch + 1,) int32; the length of the longest; and the number of
        real rows of each, (batch,) int32. Rows kept by unused_mask count in all of them but the last.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: a mask of another shape than (batch, seqlen), on another device, or with numbers below 0, as those
            have that are added to scores.
    """
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    _check_are_of_batch(hidden_states, **masks)
    for name, x in masks.items():
        if x.is_floating_point() and (x < 0).any():
            raise ValueError(f"{name}: expected 1 = real and 0 = padding, got numbers below 0")
    real = attention_mask.bool()
    kept = real if unused_mask is None else real | unused_mask.bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max().item()) if lengths.shape[0] else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, offsets, longest, real.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """A padded batch of packed rows, 0 in the padding; differentiable, the inverse of ``unpad_input``.

    Args:
        hidden_states: (total, ...), of any dtype.
        indices: (total,) int64 or int32, where each row is in the flattened batch; each index once.
        batch: the sequences, an int.
        seqlen: the rows of each, padding included, an int.

    Returns:
        (batch, seqlen, ...) of hidden_states' dtype.

    Raises:
        TypeError: hidden_states or indices is no tensor, indices of another dtype than int64 and int32, or batch or
            seqlen is no int.
        ValueError: a number below 0; indices of another shape than (total,), on another device, or out of range
            (``index_first_axis``).
    """
    check_tensors(hidden_states=hidden_states)
    batch, seqlen = _count("batch", batch), _count("seqlen", seqlen)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor; differentiable.

    Args:
        input: (rows, ...), of any dtype.
        indices: (total,) int64 or int32.

    Returns:
        (total, ...), row ``indices[i]`` of input as row i.

    Raises:
        TypeError: an argument that is no tensor, or indices of another dtype than int64 and int32.
        ValueError: indices of another shape than (total,), on another device, or out of range. The last are noticed on
            a CPU; a GPU ends in an assertion of PyTorch's, as for any index.
    """
    check_tensors(input=input, indices=indices)
    if input.ndim == 0:
        raise ValueError("input: expected shape (rows, ...), got shape ()")
    if indices.ndim != 1:
        raise ValueError(f"indices: expected shape (total,), got shape {tuple(indices.shape)}")
    _check_indices(indices, "input", input, input.shape[0])
    try:
        return input.index_select(0, indices)
    except IndexError as error:
        raise _out_of_range(indices, input.shape[0]) from error


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows of zeros but for some; differentiable, the inverse of ``index_first_axis``.

    Args:
        values: (total, ...), of any dtype.
        indices: (total,) int64 or int32, where each row is in the result; each index once.
        first_axis_dim: the rows of the result, an int.

    Returns:
        (first_axis_dim, ...), row i of values as row ``indices[i]``.

    Raises:
        TypeError: values or indices is no tensor, indices of another dtype than int64 and int32, or a number that is no
            int.
        ValueError: a number below 0; indices of another shape than (total,), on another device, or out of range
            (``index_first_axis``).
    """
    check_tensors(values=values, indices=indices)
    if values.ndim == 0 or indices.shape != values.shape[:1]:
        raise ValueError(f"indices: expected shape {tuple(values.shape[:1])}, got shape {tuple(indices.shape)}")
    first_axis_dim = _count("first_axis_dim", first_axis_dim)
    _check_indices(indices, "values", values, first_axis_dim)
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    try:
        return zeros.index_copy(0, indices.long(), values)
    except IndexError as error:
        raise _out_of_range(indices, first_axis_dim) from error


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a tensor, and the tensor itself, for a residual connection around them; differentiable.

    Args:
        input: (rows, ...), of any dtype.
        indices: (total,) int64 or int32.

    Returns:
        (total, ...), row ``indices[i]`` of input as row i; and input.

    Raises:
        TypeError: an argument that ``index_first_axis`` refuses.
        ValueError: likewise.
    """
    return index_first_axis(input, indices), input


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The real rows of a batch whose entries hold several sequences one behind another; differentiable.

    Padding is at the end of each entry. The host waits for the device.

    Args:
        hidden_states: (batch, seqlen, ...), of any dtype.
        attention_mask_in_length: (batch, seqlen), integers: the lengths of an entry's sequences first, then zeros.

    Returns:
        The four values of flash-attn 2: the rows (total, ...); their indices (total,) int64 in the flattened batch; the
        offsets of the sequences (sequences + 1,) int32; and the length of the longest.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: lengths of another shape than (batch, seqlen), on another device, below 0, or that sum up to more
            than seqlen.
    """
    lengths = attention_mask_in_length
    _check_are_of_batch(hidden_states, attention_mask_in_length=lengths)
    sums = lengths.sum(-1, keepdim=True)
    if ((lengths < 0).any() | (sums > lengths.shape[1]).any()).item():
        raise ValueError(
            f"attention_mask_in_length: expected lengths of 0 or more that sum up to {lengths.shape[1]} at the most in "
            f"each entry, got sums of up to {sums.max().item()}, and {lengths.min().item()}"
        )
    real = torch.arange(lengths.shape[1], device=lengths.device) < sums
    indices = real.flatten().nonzero().flatten()
    each = lengths[lengths > 0]  # entry by entry, as the rows are
    offsets = torch.nn.functional.pad(each.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(each.max().item()) if each.shape[0] else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest


def _check_are_of_batch(hidden_states: Tensor, **masks: Tensor) -> None:
    check_tensors(hidden_states=hidden_states, **masks)
    if hidden_states.ndim < 2:
        raise ValueError(f"hidden_states: expected shape (batch, seqlen, ...), got shape {tuple(hidden_states.shape)}")
    for name, x in masks.items():
        if x.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"{name}: expected the shape (batch, seqlen) of hidden_states, {tuple(hidden_states.shape[:2])}, "
                f"got shape {tuple(x.shape)}"
            )
        _check_device(name, x, "hidden_states", hidden_states)


def _check_device(name: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.device != y.device:
        raise ValueError(f"{name}: expected a tensor on the device of {other}, {y.device}, got one on {x.device}")


def _check_indices(indices: Tensor, name: str, x: Tensor, rows: int) -> None:
    """Checks what can be checked of indices of rows without reading them; ``name`` is that of ``x``, beside them."""
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices: expected int64 or int32, got {indices.dtype}")
    _check_device("indices", indices, name, x)
    if type(rows) is int and rows == 0 and indices.shape[0]:
        raise ValueError(f"indices: expected none, as there are no rows, got {indices.shape[0]}")


def _count(name: str, value: int) -> int:
    """A number of rows or of sequences; symbolic ones of a compiled program are not asked."""
    number = api.check_int(name, value)
    if type(number) is int and number < 0:
        raise ValueError(f"{name}: expected at least 0, got {number}")
    return number


def _out_of_range(indices: Tensor, rows: int) -> ValueError:
    """The error about indices of rows, which PyTorch has refused and so are on the host."""
    return ValueError(f"indices: expected 0 to {rows - 1}, got {int(indices.min())} to {int(indices.max())}")


def rearrange(tensor: Any, pattern: str, **axes_lengths: int) -> Any:
    """``einops.rearrange``, which flash-attn's module has by import, and callers take from there.

    Args:
        tensor: what einops takes.
        pattern: likewise.
        axes_lengths: likewise.

    Returns:
        What einops returns.

    Raises:
        ImportError: einops is not installed.
    """
    try:
        einops = importlib.import_module("einops")
    except ImportError as error:
        raise ImportError("rearrange: expected einops to be installed (pip install einops)") from error
    return einops.rearrange(tensor, pattern, **axes_lengths)
