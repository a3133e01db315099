"""Powers of two without the unit that is made for them, which has 16 results a clock on a B200 and is what binds.

FlashAttention-4 takes a share of P from polynomials on the multiply-add units; so does this.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

Pair = tuple[Float32, Float32]

# 2^x on 0 .. 1 is 1 + x (c1 + x (c2 + x c3)) within 8.6e-5 of itself: weighted least squares, reweighted until all
# extremes of the error are equal.
_COEFFICIENTS = (0.69511663, 0.22764568, 0.07706641)
_LIMIT = 127.0  # of exponents: P of 2^127 is as good as infinite, as its row will be computed again
_SHIFT = 1.5 * 2.0**23  # added to a number it leaves a whole one in the last bits


def exp2_pair(x: Pair) -> Pair:
    """2^x of two numbers. Below -127 it is 0, above 127 it is 2^127; of NaN it is NaN."""
    low, high = (cute.arch.fmin(cute.arch.fmax(each, -_LIMIT, nan=True), _LIMIT, nan=True) for each in x)
    shifted = cute.arch.add_packed_f32x2((low, high), _twice(_SHIFT), rnd="rm")
    whole = cute.arch.add_packed_f32x2(shifted, _twice(-_SHIFT))
    rest = cute.arch.fma_packed_f32x2(whole, _twice(-1.0), (low, high))
    c1, c2, c3 = (_twice(c) for c in _COEFFICIENTS)
    power = cute.arch.fma_packed_f32x2(rest, c3, c2)
    power = cute.arch.fma_packed_f32x2(power, rest, c1)
    power = cute.arch.fma_packed_f32x2(power, rest, _twice(1.0))
    # 2^whole, by its bits; a product keeps NaN, which an addition to the exponent would not.
    low, high = (((each.bitcast(Int32) << 23) + (127 << 23)).bitcast(Float32) for each in shifted)
    return cute.arch.mul_packed_f32x2(power, (low, high))


def _twice(x: float) -> Pair:
    return Float32(x), Float32(x)
