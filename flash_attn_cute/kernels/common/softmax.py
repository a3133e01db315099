"""Online softmax of rows (Milakov and Gimelshein, arXiv 1805.02867), in base 2: a row's state, and its end.

P = exp2(score - row_max). ``row_max`` need not be the row's maximum: any number near it gives the same quotient. So P
of a block is first computed with the ``row_max`` of the blocks before, and no maximum is searched. P is computed again,
with the true maximum, only for rows whose sum shows that some element is too large, or that are fully masked so far.
(FlashAttention-4 spares the rescaling of O while a maximum grows by little; this spares the maximum, too.)

Whether a row is computed again follows from that row alone, so that its result has the same bits whatever its
neighbours hold.

A bias can be so large (-1e9, or the lowest number of a dtype, which is often used for -inf) that its product with
log2(e), or the rounding of it, is too large for an exponent. So with a bias ``row_max`` is natural, as the scores are,
and a large one is subtracted first. That takes one more instruction, so P of such rows is not computed in advance.
"""

import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

from flash_attn_cute.kernels.common.max_logits import logit_of
from flash_attn_cute.kernels.common.score import LN2, LOG2_E

LARGE = 2.0**16  # of a row_max: up to it the rounding of its product with log2(e) is below 1 %, and cancels
# P of a block is computed again when a thread's part of a row sums to more. A thread holds at most 128 elements of a
# row, which may all be 1, so the bound has to be larger; and P of this size must be accurate in float16.
MAX_SUM = 1024.0


def to_base_2(x: Float32, is_natural: bool) -> Float32:
    """A difference of scores in base 2."""
    return x * LOG2_E if is_natural else x


class SoftmaxState:
    """The running row_max and row_sum of each of a thread's rows.

    ``row_max`` is in base 2, of scaled scores, or natural with ``is_natural``; -inf while the row has no visible key.
    ``max_P``, if asked for, is a row's largest P, as if all had been computed with ``row_max``.
    """

    def __init__(self, num_rows: int, scale_log2: Float32, is_natural: bool, keeps_max_P: bool = False):
        self.num_rows = num_rows
        self.scale_log2 = scale_log2
        self.is_natural = is_natural
        self.row_max = cute.make_rmem_tensor(num_rows, Float32)
        self.row_sum = cute.make_rmem_tensor(num_rows, Float32)
        self.max_P = cute.make_rmem_tensor(num_rows, Float32) if keeps_max_P else None

    def reset(self) -> None:
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)
        if self.max_P is not None:
            self.max_P.fill(0.0)

    def max_logit(self, r: int) -> Float32:
        """The largest logit of a row, natural; -inf if no key of it is visible."""
        return logit_of(self.max_P[r], self.row_max[r])


@cute.jit
def finalize(
    row_sum: Float32, row_max: Float32, sink: Float32 | None, is_natural: Constexpr
) -> tuple[Float32, Float32]:
    """Factor that the row's O is multiplied by, and the row's natural LSE: 0 and -inf for a fully masked row.

    ``row_max`` is what P was computed with, -inf for a fully masked row, and natural or not. ``sink`` is one more logit
    in the denominator, natural.
    """
    numerator = Float32(1.0)
    if const_expr(sink is not None):
        sink = sink if const_expr(is_natural) else sink * LOG2_E
        merged = cute.arch.fmax(row_max, sink)
        merged = merged if merged != -Float32.inf else Float32(0.0)
        numerator = cute.math.exp2(to_base_2(row_max - merged, is_natural), fastmath=True)
        row_sum = row_sum * numerator + cute.math.exp2(to_base_2(sink - merged, is_natural), fastmath=True)
        row_max = merged
    fully_masked = row_sum == 0.0  # a NaN is not, and stays visible
    log2_sum = cute.math.log2(row_sum, fastmath=True)
    lse = row_max + log2_sum * LN2 if const_expr(is_natural) else (row_max + log2_sum) * LN2
    lse = -Float32.inf if fully_masked else lse
    factor = Float32(0.0) if fully_masked else numerator * cute.arch.rcp_approx(row_sum)
    return factor, lse
