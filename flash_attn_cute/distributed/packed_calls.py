"""Attention of some queries of documents to some of their keys, as packed calls of the plain functions.

A rank's queries and a block of keys consist of runs: consecutive positions of a document, in consecutive rows. The
visible pairs of two runs form a band, which a packed call with its own window computes: kernels align windows to the
bottom right of each sequence, wherever that is in the document. Runs without a visible pair, and rows outside of all
bands, are removed here, on the host.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.spec import Window


class Run(NamedTuple):
    """Positions of a document that follow each other, and where the first of them is among the rows of a tensor."""

    start: int
    stop: int
    row: int


class Part(NamedTuple):
    """One sequence of a packed call: rows of queries, rows of keys, and the window, aligned to the bottom right."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int | None
    right: int | None

    @property
    def window(self) -> Window:
        """Both sides; None on one that hides nothing."""
        return self.left, self.right


class Call(NamedTuple):
    """One packed call on rows ``q_start .. q_stop`` of the queries and ``k_start .. k_stop`` of the keys.

    The other fields are what the plain call takes, offsets counted from these rows. Rows of no sequence lie between
    them only if there is a seqused.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    window: Window
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None


def parts_of(
    queries: Mapping[int, Sequence[Run]], keys: Mapping[int, Sequence[Run]], bands: Sequence[Band]
) -> list[Part]:
    """The fewest parts that cover the visible pairs of all documents that have both queries and keys here.

    Runs of each document are in order and in adjacent rows.
    """
    parts: list[Part] = []
    for document, runs in queries.items():
        last: list[Part] = []
        for q in runs:
            found: list[Part] = []
            for k in keys.get(document, ()):
                part = _part(q, k, bands[document])
                if part is not None:
                    joined = _with_more_keys(found[-1], part) if found else None
                    found[-1:] = [joined] if joined else [*found[-1:], part]
            joined = _with_more_queries(last[0], found[0]) if len(last) == len(found) == 1 else None
            if joined:
                parts[-1:] = last = [joined]
            else:
                parts += found
                last = found
    return parts


def _part(q: Run, k: Run, band: Band) -> Part | None:
    """The visible pairs of two runs, without rows that are in no visible pair; None if there are no pairs."""
    num_q, num_k = q.stop - q.start, k.stop - k.start
    # Query i of the run sees the keys i + lower .. i + upper of the other one.
    shift = q.start - k.start
    lower = -num_q if band.lower is None else shift + band.lower
    upper = num_k if band.upper is None else shift + band.upper
    first, last = max(0, -upper), min(num_q, num_k - lower)
    if first >= last:
        return None
    first_key, last_key = max(0, first + lower), min(num_k, last + upper)
    num_q, num_k = last - first, last_key - first_key
    lower, upper = first + lower - first_key, first + upper - first_key
    return Part(
        q.row + first,
        q.row + last,
        k.row + first_key,
        k.row + last_key,
        None if num_q - 1 + lower <= 0 else num_k - num_q - lower,
        None if upper >= num_k - 1 else upper - (num_k - num_q),
    )


def _with_more_keys(a: Part, b: Part) -> Part | None:
    """Two parts of the same queries as one, if nothing is hidden where their keys meet."""
    if (a.q_start, a.q_stop, a.k_stop) != (b.q_start, b.q_stop, b.k_start) or a.right is not None or b.left is not None:
        return None
    left = None if a.left is None else a.left + b.k_stop - b.k_start
    return Part(a.q_start, a.q_stop, a.k_start, b.k_stop, left, b.right)


def _with_more_queries(a: Part, b: Part) -> Part | None:
    """Two parts of adjacent queries as one, if they see the same keys, or if each query sees a key more than the last.

    Causal masks go by order alone: an early and a late chunk of a document, one behind the other, see each other as if
    they were one.
    """
    if (a.q_stop, a.k_start, a.left, a.right) != (b.q_start, b.k_start, b.left, b.right) or a.left is not None:
        return None
    more_keys = 0 if a.right is None else b.q_stop - b.q_start
    if b.k_stop - a.k_stop != more_keys or a.right not in (None, 0):
        return None
    return Part(a.q_start, b.q_stop, a.k_start, b.k_stop, None, a.right)


def calls_of(parts: Iterable[Part], device: torch.device, num_q: int | None = None) -> tuple[Call, ...]:
    """The fewest packed calls that compute the parts. Parts of a call have one window and share no rows.

    With ``num_q``, the number of rows of queries, the first call is on all of them if it is on the first one. Its
    results are then a place for those of the others.
    """
    groups: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: (part.q_start, part.k_start)):
        for group in groups:
            last = group[-1]
            if last.window == part.window and last.q_stop <= part.q_start and last.k_stop <= part.k_start:
                group.append(part)
                break
        else:
            groups.append([part])
    widened = [num_q if i == 0 and group[0].q_start == 0 else None for i, group in enumerate(groups)]
    return tuple(_call(group, device, q_stop) for group, q_stop in zip(groups, widened, strict=True))


def call_of_all_rows(parts: Sequence[Part], num_q: int, num_k: int, device: torch.device) -> Call | None:
    """Parts of one window as a call on all rows of the tensors, of which those of no part are padding.

    Parts ascend, both of queries and of keys. Without any there is no call.
    """
    if not parts:
        return None
    # An empty sequence owns the rows before the first part.
    nothing = Part(0, 0, 0, 0, *parts[0].window)
    return _call([nothing, *parts] if parts[0].q_start or parts[0].k_start else parts, device, num_q, num_k)


def _call(parts: Sequence[Part], device: torch.device, q_stop: int | None = None, k_stop: int | None = None) -> Call:
    q_start, k_start = parts[0].q_start, parts[0].k_start
    q_stop, k_stop = parts[-1].q_stop if q_stop is None else q_stop, parts[-1].k_stop if k_stop is None else k_stop
    cu_q, used_q = _offsets([(part.q_start - q_start, part.q_stop - q_start) for part in parts], q_stop - q_start)
    cu_k, used_k = _offsets([(part.k_start - k_start, part.k_stop - k_start) for part in parts], k_stop - k_start)
    lengths_q, lengths_k = used_q or _differences(cu_q), used_k or _differences(cu_k)
    numbers = [cu_q, cu_k, used_q or (), used_k or ()]
    listed = [n for group in numbers for n in group]
    flat = torch.tensor(listed, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    tensors = flat.to(device, non_blocking=True).split([len(group) for group in numbers])
    # Where both are one tensor, backends know without looking that the lengths are equal.
    return Call(
        q_start,
        q_stop,
        k_start,
        k_stop,
        parts[0].window,
        max(lengths_q),
        max(lengths_k),
        tensors[0],
        tensors[0] if cu_q == cu_k else tensors[1],
        tensors[2] if used_q else None,
        None if not used_k else tensors[2] if used_q == used_k else tensors[3],
    )


def is_shared(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether any row is in two of the ranges (start, stop)."""
    ordered = sorted(ranges)
    return any(stop > start for (_, stop), (start, _) in itertools.pairwise(ordered))


def _offsets(ranges: Sequence[tuple[int, int]], end: int) -> tuple[list[int], list[int] | None]:
    """cu_seqlens of ranges (start, stop) and the end of all rows; their lengths if there are rows behind any."""
    cu = [start for start, _ in ranges] + [end]
    lengths = [stop - start for start, stop in ranges]
    return cu, None if lengths == _differences(cu) else lengths


def _differences(offsets: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(offsets)]
