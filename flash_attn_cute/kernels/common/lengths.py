"""Rows of a sequence, of queries or of keys: the one place where offsets and real lengths are read.

The values are not checked. Offsets are clamped to the tensor and real lengths to the sequence's rows, so that wrong
values give wrong results, but no access outside of the tensors.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr


@dataclass(frozen=True)
class SeqRows:
    """The rows of one sequence. ``start`` counts from the start of the tensor if packed, else it is 0."""

    start: Int32
    length: Int32  # real rows; none if it is not positive
    slot: Int32 | None = None  # rows it owns; those behind ``length`` are padding


def offset(mCuSeqlens: cute.Tensor, i: Int32, total: Int32) -> Int32:
    """The i-th offset, clamped to a tensor of ``total`` rows."""
    return cutlass.max(cutlass.min(mCuSeqlens[i], total), 0)


@cute.jit
def real_rows(mSeqUsed: cute.Tensor | None, sequence: Int32, slot: Int32) -> Int32:
    """Number of real rows among the ``slot`` rows that a sequence owns."""
    length = slot
    if const_expr(mSeqUsed is not None):
        length = cutlass.min(mSeqUsed[sequence], slot)
    return length


@cute.jit
def rows_of(mX: cute.Tensor, mCuSeqlens: cute.Tensor | None, mSeqUsed: cute.Tensor | None, sequence: Int32) -> SeqRows:
    """Rows of a sequence in a user's tensor, dense (batch, rows, heads, d) or packed (rows, heads, d)."""
    if const_expr(mCuSeqlens is None):
        return SeqRows(Int32(0), mX.shape[1], mX.shape[1])
    else:
        total = mX.shape[0]
        start = offset(mCuSeqlens, sequence, total)
        slot = offset(mCuSeqlens, sequence + 1, total) - start
        return SeqRows(start, real_rows(mSeqUsed, sequence, slot), slot)


@cute.jit
def last_of(low: Int32, high: Int32, holds: Constexpr) -> Int32:
    """The last number of low .. high for which ``holds``, which it does up to some number, ``low`` at least."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
