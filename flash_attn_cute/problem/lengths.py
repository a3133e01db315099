"""Positions of each sequence's real rows, read on the host.

Kernels work from the offsets on the device and never come here. The portable backend iterates over the sequences
in Python and needs their numbers; ``FLASH_ATTN_CUTE_CHECK=1`` wants them verified for any backend.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import AttentionInputs


class Rows(NamedTuple):
    """The real rows of one sequence: within the packed rows, or within its own batch entry if dense."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The row behind the last real one."""
        return self.start + self.length


class Run(NamedTuple):
    """``n`` consecutive sequences, alike in both lengths, that one strided 4-d view can hold.

    ``first`` is the index of the first of them, ``q`` and ``k`` are its rows. Packed, the others follow it
    without a gap; dense, they are the next entries of the batch.
    """

    first: int
    n: int
    q: Rows
    k: Rows


def read_sequences(inputs: AttentionInputs) -> tuple[list[Rows], list[Rows]]:
    """The real rows of every sequence's queries and keys, in one transfer from the device.

    Returns:
        Two lists with an entry a sequence: the rows in q, and those in k and v.

    Raises:
        ValueError: offsets that decrease or leave the tensor, a seqused outside its slot, or a sequence longer
            than its max_seqlen or than the keys that mask or bias describe.
    """
    named = {
        name: tensor
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        if (tensor := getattr(inputs, name)) is not None
    }
    values = _transfer(named)
    rows_q = _rows("q", inputs.q, values, inputs.max_seqlen_q)
    rows_k = _rows("k", inputs.k, values, inputs.max_seqlen_k)
    longest_k = max((rows.length for rows in rows_k), default=0)
    for name, tensor in (("mask", inputs.mask), ("bias", inputs.bias)):
        if tensor is not None and tensor.ndim and tensor.shape[-1] != 1 and tensor.shape[-1] < longest_k:
            raise ValueError(
                f"{name}: expected a last dimension of at least {longest_k}, the longest sequence of keys, "
                f"got shape {tuple(tensor.shape)}"
            )
    return rows_q, rows_k


def _transfer(named: dict[str, Tensor]) -> dict[str, list[int]]:
    if not named:
        return {}
    parts = torch.cat(list(named.values())).cpu().split([x.numel() for x in named.values()])
    return {name: part.tolist() for name, part in zip(named, parts, strict=True)}


def _rows(side: str, x: Tensor, values: dict[str, list[int]], max_seqlen: int) -> list[Rows]:
    cu_name, used_name, max_name = f"cu_seqlens_{side}", f"seqused_{side}", f"max_seqlen_{side}"
    offsets, used = values.get(cu_name), values.get(used_name)
    if offsets is None:
        slots = [Rows(0, x.shape[1])] * x.shape[0]
    else:
        slots = [Rows(start, stop - start) for start, stop in itertools.pairwise(offsets)]
        for b, slot in enumerate(slots):
            if slot.length < 0:
                raise ValueError(f"{cu_name}: expected offsets that never decrease, got {offsets[b : b + 2]} at {b}")
        if offsets[0] < 0 or offsets[-1] > x.shape[0]:
            raise ValueError(
                f"{cu_name}: expected offsets within the {x.shape[0]} rows of {side}, "
                f"got a range from {offsets[0]} to {offsets[-1]}"
            )
    if used is not None:
        for b, (slot, length) in enumerate(zip(slots, used, strict=True)):
            if not 0 <= length <= slot.length:
                raise ValueError(f"{used_name}: expected 0 to {slot.length} rows for sequence {b}, got {length}")
        slots = [Rows(slot.start, length) for slot, length in zip(slots, used, strict=True)]
    longest = max((slot.length for slot in slots), default=0)
    if longest > max_seqlen:
        raise ValueError(
            f"{max_name}: expected an upper bound on the sequence lengths, got {max_seqlen} with a sequence "
            f"of {longest}"
        )
    return slots


def merge_runs(rows_q: Sequence[Rows], rows_k: Sequence[Rows], packed: bool) -> list[Run]:
    """Consecutive sequences of equal lengths, side by side, merged into runs that cover every real row."""
    runs: list[Run] = []
    for b, (q, k) in enumerate(zip(rows_q, rows_k, strict=True)):
        if runs:
            last = runs[-1]
            step_q, step_k = (last.n * last.q.length, last.n * last.k.length) if packed else (0, 0)
            next_q = Rows(last.q.start + step_q, last.q.length)
            next_k = Rows(last.k.start + step_k, last.k.length)
            if (q, k) == (next_q, next_k):
                runs[-1] = last._replace(n=last.n + 1)
                continue
        runs.append(Run(b, 1, q, k))
    return runs


def padding(rows: Sequence[Rows], x: Tensor, packed: bool) -> list[tuple[int | slice, ...]]:
    """Indices into the leading dimensions of x of everything that no sequence owns.

    x is (total, ...) if packed, else (batch, seqlen, ...); ``rows``, the real ones of each sequence, ascend.
    """
    if not packed:
        return [(b, slice(r.length, None)) for b, r in enumerate(rows) if r.length < x.shape[1]]
    gaps: list[tuple[int | slice, ...]] = []
    end = 0
    for r in [*rows, Rows(x.shape[0], 0)]:
        if r.start > end:
            gaps.append((slice(end, r.start),))
        end = max(end, r.stop)
    return gaps
