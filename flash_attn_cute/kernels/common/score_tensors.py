"""Mask and bias, tensors with an element for every score (``kernels.arguments``): how a sequence's part is found."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of


def part_of(arguments: Any, mX: cute.Tensor, q: SeqRows, batch: Int32 | int) -> cute.Tensor:
    """The part of a mask, a bias or its gradient that belongs to a sequence: (heads, queries, keys)."""
    entry, first = entry_and_row(arguments, q, batch)
    return cute.domain_offset((0, first, 0), mX[entry, None, None, None])


def entry_and_row(arguments: Any, q: SeqRows, batch: Int32 | int) -> tuple[Int32 | int, Int32 | int]:
    """Entry of mask and bias that a sequence's queries are in, and the row of the first of them there."""
    if arguments.mCuSeqlensQ is None:
        return batch, 0
    rows_a_slot = arguments.numbers.rows_a_slot
    entry = q.start // rows_a_slot
    return entry, q.start - entry * rows_a_slot


def keys_of(arguments: Any, sequence: Int32) -> SeqRows:
    """Keys of a packed sequence, clipped by ``known_keys``."""
    a = arguments
    return known_keys(a, rows_of(a.mK, a.mCuSeqlensK, a.mSeqUsedK, sequence))


def known_keys(arguments: Any, k: SeqRows) -> SeqRows:
    """Keys of a sequence, clipped to the mask and the bias: a wrong length reads nothing behind them."""
    length = k.length
    for mX in (arguments.mMask, arguments.mBias):
        if mX is not None:
            length = cutlass.min(length, mX.shape[3])
    return SeqRows(k.start, length, k.slot)
