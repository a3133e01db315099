"""Online softmax (``common.softmax``) of one row a thread, of scores in tensor memory.

Scores stay there until P takes their place, so they need not be kept in registers: what is computed again, or has
its maximum searched, is read again. The row's own thread rescales O, because no other thread writes it then. Where the
first three quarters of a block's P sum to little, and no exponent of the last quarter is large, the tensor cores
multiply the former while the latter is computed.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32

from flash_attn_cute.kernels.common.assembly import pack
from flash_attn_cute.kernels.common.max_logits import larger_P
from flash_attn_cute.kernels.common.score import LOG2_E
from flash_attn_cute.kernels.common.softmax import LARGE, MAX_SUM, SoftmaxState, to_base_2

_CHAINS = 4  # maxima that are looked for side by side
_MAX_EXPONENT = 5.0  # of P of the last quarter: it sums to no more than MAX_SUM either

Scores = Callable[[], list[Float32]]
Pair = tuple[Float32, Float32]

# 2^x on 0 .. 1 is 1 + x (c1 + x (c2 + x c3)) within 8.6e-5 of itself: weighted least squares, reweighted until all
# extremes of the error are equal.
_COEFFICIENTS = (0.69511663, 0.22764568, 0.07706641)
_LIMIT = 127.0  # of exponents: P of 2^127 is as good as infinite, as its row will be computed again
_SHIFT = 1.5 * 2.0**23  # added to a number it leaves a whole one in the last bits


class RowSoftmax(SoftmaxState):
    """The state of a thread's row."""

    def __init__(self, scale_log2: Float32, polynomial_every: int, is_natural: bool, keeps_max_P: bool = False):
        super().__init__(1, scale_log2, is_natural, keeps_max_P)
        self.polynomial_every = polynomial_every  # of so many pairs of P; 0: none

    @cute.jit
    def step(
        self, scores: Constexpr, store: Constexpr, rescale: Constexpr, hand_over: Constexpr, dtype: Constexpr
    ) -> None:
        """Computes P of a block, packed in pairs. All functions are called by all threads of a warp.

        ``scores`` are pieces of the block, each a function that loads the piece whenever it is called. ``store`` takes
        the index of the first piece, and P from that piece on. ``rescale`` multiplies the row's O by a factor, which is
        1 for rows that stay; it is not called before some row of the warp has had a visible key, because there may be
        no O yet. ``hand_over`` is called when P of all pieces but the last is stored, and O is rescaled.
        """
        *most, last = scores
        has_keys = cute.arch.vote_any_sync(self.row_max[0] != -Float32.inf)
        added, fits, is_done = Float32(0.0), Boolean(False), Boolean(False)
        if has_keys:
            # A row without a visible key so far, its row_max being -inf, has no finite P here.
            P, added, largest = self._compute_P(self._exponents(most, self.row_max[0], in_advance=True), dtype)
            exponents = list(self._exponents([last], self.row_max[0], in_advance=True))
            fits = added <= MAX_SUM and _largest(x for pair in exponents for x in pair) <= _MAX_EXPONENT
            is_done = cute.arch.vote_all_sync(fits)
            if is_done:
                store(0, P)
                hand_over()
                others, added_last, largest = self._compute_P(exponents, dtype, largest)
                store(len(most), others)
                added += added_last
                self._keep(largest)
        if not is_done:
            last_max = self.row_max[0]
            row_max = cutlass.select_(fits, last_max, self._peak(scores, last_max))
            # A row that still has no visible key gets P = exp2(-inf - 0).
            shift = cutlass.select_(row_max != -Float32.inf, row_max, Float32(0.0))
            correction = cute.math.exp2(to_base_2(last_max - shift, self.is_natural), fastmath=True)
            self._raise_max(row_max, correction)
            P, added, largest = self._compute_P(self._exponents(most, shift), dtype)
            store(0, P)
            others, added_last, largest = self._compute_P(self._exponents([last], shift), dtype, largest)
            store(len(most), others)
            self._keep(largest)
            if has_keys:
                rescale(correction)
            hand_over()
            added += added_last
        self.row_sum[0] += added

    def _raise_max(self, row_max: Float32, correction: Float32) -> None:
        self.row_max[0] = row_max
        self.row_sum[0] *= correction
        if self.max_P is not None:
            self.max_P[0] *= correction

    def _keep(self, largest: Int32 | None) -> None:
        if self.max_P is not None and largest is not None:
            self.max_P[0] = largest.bitcast(Float32)

    def _peak(self, scores: list[Scores], peak: Float32) -> Float32:
        """The largest of the scores and another number."""
        factor = Float32(1.0) if self.is_natural else self.scale_log2
        return cute.arch.fmax(peak, _largest(score * factor for read in scores for score in read()))

    def _exponents(self, scores: list[Scores], shift: Float32, in_advance: bool = False) -> Iterator[Pair]:
        """Scores, scaled, less a shift; each piece is read when it is its turn."""
        first = None  # what is subtracted before the rest
        if self.is_natural:
            is_large = cute.arch.fmax(shift, -shift) > LARGE
            if in_advance:  # NaN: no sum that fits
                shift = cutlass.select_(is_large, Float32.nan, shift) * LOG2_E
            else:
                first = cutlass.select_(is_large, -shift, Float32(0.0))
                shift = cutlass.select_(is_large, Float32(0.0), shift) * LOG2_E
        for read in scores:
            some = read()
            for i in range(0, len(some), 2):
                pair, scale = (some[i], some[i + 1]), (self.scale_log2, self.scale_log2)
                if first is not None:
                    pair = cute.arch.add_packed_f32x2(pair, (first, first))
                yield cute.arch.fma_packed_f32x2(pair, scale, (-shift, -shift))

    def _compute_P(
        self, exponents: Iterable[Pair], dtype: type, largest: Int32 | None = None
    ) -> tuple[list[Int32], Float32, Int32 | None]:
        """P, in packed pairs, and its sum, always by the same operations, so that the bits are the same.

        The third result is None, or the bits of the largest of P and ``largest``, which by default is ``max_P``.
        """
        P, row_sum = [], (Float32(0.0), Float32(0.0))
        if self.max_P is not None and largest is None:
            largest = self.max_P[0].bitcast(Int32)
        for pair in exponents:
            if self.polynomial_every and len(P) % self.polynomial_every == self.polynomial_every - 1:
                low, high = exp2_pair(pair)
            else:
                low, high = (cute.math.exp2(x, fastmath=True) for x in pair)
            P.append(pack(low, high, dtype))
            row_sum = cute.arch.add_packed_f32x2(row_sum, (low, high))
            if largest is not None:
                largest = larger_P(largest, low, high)
        return P, row_sum[0] + row_sum[1], largest


def _largest(numbers: Iterable[Float32]) -> Float32:
    peaks = [-Float32.inf] * _CHAINS
    for i, x in enumerate(numbers):
        peaks[i % _CHAINS] = cute.arch.fmax(peaks[i % _CHAINS], x)
    return functools.reduce(cute.arch.fmax, peaks)


def exp2_pair(x: Pair) -> Pair:
    """2^x of two numbers, by a polynomial. Below -127 it is 0, above 127 it is 2^127; of NaN it is NaN.

    The unit that is made for powers of two has 16 results a clock on a B200, and is what binds. FlashAttention-4 takes
    a share of P from the multiply-add units; so does this.
    """
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
