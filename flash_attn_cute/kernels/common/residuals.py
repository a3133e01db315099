"""Residuals: eight of the bits that out loses by rounding, so that the backward pass has an exact delta.

delta = rowsum(dO * O) is what all gradients of a row's scores share. With O in 16 bits its error is that of the
rounding of O, and goes into a row of dQ as a multiple of the mean of K by P: where K and V have means that do not
vanish, it is most of dQ's error, and of one sign (Qiu and Yao, arXiv 2510.04212, on training that it makes diverge).
A residual is the difference of an element's bits in float32 before and after the rounding, as far as eight bits hold
it: with it O has 16 significant bits in bfloat16, and 19 in float16 (none more below float16's normal numbers).

Residuals are (rows, columns), with columns in multiples of 32. In each group of 32, that of column 8 p + 2 q + e lies
at 8 q + 2 p + e (p and q below 4, e below 2): the four threads that share a row of an accumulator have the columns of
one q each, and store eight bytes beside each other.
"""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32

GROUP = 32  # columns that are stored together


def _lost_bits(dtype: type) -> int:
    """Bits of a float32's mantissa that a 16-bit type does not have."""
    return 16 if dtype is cutlass.BFloat16 else 13


def _residual(x: Float32, dtype: type) -> Int32:
    """The eight bits of an element that is to be rounded to ``dtype``, in the lowest of 32; others are 0.

    They are the first of those that rounding drops, as a signed number: rounding to nearest subtracts it. Half a unit
    in the last place is rounded to even, and is 127 if it is dropped, -128 if it is made whole.
    """
    lost, bits = _lost_bits(dtype), x.bitcast(Int32)
    bits = bits + (bits >> lost & 1) - 1
    return bits >> lost - 8 & 0xFF


def residual_word(elements: Sequence[Float32], dtype: type) -> Int32:
    """Residuals of four elements that are to be rounded to ``dtype``, the first one in the lowest byte."""
    word, *others = (_residual(x, dtype) for x in elements)
    for i, byte in enumerate(others):
        word |= byte << 8 * (i + 1)
    return word


def restored(rounded: Float32, residual: Int32, dtype: type) -> Float32:
    """An element before it was rounded, to within 2^-9 of a unit in the last place.

    Of 0 it is no number of use: a fully masked row has residuals that may hold anything.
    """
    lost = _lost_bits(dtype)
    middle = 1 << lost - 9  # of the numbers that a residual stands for
    return (rounded.bitcast(Int32) + (residual << lost - 8) + middle).bitcast(Float32)


@cute.jit
def load_residuals(gR: cute.Tensor, vector: Int32) -> list[Int32]:
    """Residuals of columns 8 * vector .. 8 * vector + 7 of a row, signed."""
    pairs = cute.make_rmem_tensor(4, Int16)
    for q in cutlass.range_constexpr(4):
        source = cute.local_tile(gR, (2,), (vector // 4 * (GROUP // 2) + 4 * q + vector % 4,))
        cute.autovec_copy(cute.recast_tensor(source, Int16), cute.local_tile(pairs, (1,), (q,)))
    words = [pairs[q].to(Int32) for q in range(4)]
    return [x for word in words for x in (word << 24 >> 24, word >> 8)]
