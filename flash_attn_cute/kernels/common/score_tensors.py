"""Tensors with an element for every score, mask and bias: where those of a sequence are.

Kernels get views of what the user has, (batch, heads, seqlen_q, seqlen_k), expanded by strides of 0; of packed
sequences (1, heads, total_q, max_seqlen_k), keys counted from the start of their own. A dense batch that the kernels
get packed keeps its views: a slot of so many rows is an entry of the batch.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of


@dataclass(frozen=True)
class ScoreTensors:
    """Mask and bias, each None if there is none."""

    mask: cute.Tensor | None
    bias: cute.Tensor | None
    rows_a_slot: Int32
    packed: cutlass.Constexpr

    @staticmethod
    def of(features: Any, arguments: Any) -> "ScoreTensors | None":
        """Those of the arguments of any pass; None without any."""
        if not (features.mask or features.bias):
            return None
        return ScoreTensors(arguments.mMask, arguments.mBias, arguments.numbers.rows_a_slot, features.packed)

    def of_sequence(self, mX: cute.Tensor, q: SeqRows, batch: Int32 | int) -> cute.Tensor:
        """One of them, of a sequence alone: (heads, queries, keys)."""
        if const_expr(self.packed):
            entry = q.start // self.rows_a_slot
            return cute.domain_offset((0, q.start - entry * self.rows_a_slot, 0), mX[entry, None, None, None])
        return mX[batch, None, None, None]


def keys_of(arguments: Any, sequence: Int32) -> SeqRows:
    """The keys of a packed sequence, ``known_keys``."""
    a = arguments
    return known_keys(a, rows_of(a.mK, a.mCuSeqlensK, a.mSeqUsedK, sequence))


def known_keys(arguments: Any, k: SeqRows) -> SeqRows:
    """The keys of a sequence, as far as mask and bias go: a wrong bound lets nobody read behind them."""
    length = k.length
    for mX in (arguments.mMask, arguments.mBias):
        if mX is not None:
            length = cutlass.min(length, mX.shape[3])
    return SeqRows(k.start, length, k.slot)
