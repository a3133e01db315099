"""Mask and bias, tensors with an element for every score: how a sequence's part is found.

Kernels get views of the user's tensors: (batch, heads, seqlen_q, seqlen_k), expanded by strides of 0, or for packed
sequences (1, heads, total_q, max_seqlen_k) with keys counted from the start of each sequence. A dense batch that the
kernels get packed keeps its views: a slot of ``rows_a_slot`` rows is an entry of the batch.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of


@dataclass(frozen=True)
class ScoreTensors:
    """Mask and bias of a pass, each None if absent."""

    mask: cute.Tensor | None
    bias: cute.Tensor | None
    rows_a_slot: Int32
    packed: Constexpr

    @staticmethod
    def of(features: Any, arguments: Any) -> "ScoreTensors | None":
        """Mask and bias of the arguments of any pass; None without either."""
        if not (features.mask or features.bias):
            return None
        return ScoreTensors(arguments.mMask, arguments.mBias, arguments.numbers.rows_a_slot, features.packed)

    def of_sequence(self, mX: cute.Tensor, q: SeqRows, batch: Int32 | int) -> cute.Tensor:
        """The part of one of them that belongs to a sequence: (heads, queries, keys)."""
        entry, first = scores_of(self.packed, self.rows_a_slot, q, batch)
        return cute.domain_offset((0, first, 0), mX[entry, None, None, None])


def scores_of(packed: Constexpr, rows_a_slot: Int32, q: SeqRows, batch: Int32 | int) -> tuple[Int32 | int, Int32 | int]:
    """Entry of mask and bias that a sequence's queries are in, and the row of the first of them there."""
    if const_expr(packed):
        entry = q.start // rows_a_slot
        return entry, q.start - entry * rows_a_slot
    return batch, 0


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
