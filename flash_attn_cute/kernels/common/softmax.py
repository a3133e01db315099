"""End of a row's softmax, independent of how scores lie in registers: scalar arithmetic in base 2.

P = exp2(score - row_max), where ``row_max`` is a number near the row's maximum so far. With a bias ``row_max`` is
natural, as the scores are, and differences are converted to base 2 when they are small.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_attn_cute.kernels.common.score import LN2, LOG2_E

# P of a block is computed again when a thread's part of a row sums to more. A thread holds at most 128 elements of a
# row, which may all be 1, so the bound has to be larger; and P of this size must be accurate in float16.
MAX_SUM = 1024.0


def to_base_2(x: Float32, is_natural: bool) -> Float32:
    """A difference of scores in base 2."""
    return x * LOG2_E if is_natural else x


@cute.jit
def finalize(
    row_sum: Float32, row_max: Float32, sink: Float32 | None, is_natural: cutlass.Constexpr
) -> tuple[Float32, Float32]:
    """Factor that the row's O is multiplied by, and the row's natural LSE: 0 and -inf for a fully masked row.

    Args:
        row_sum: the sum of the row's P.
        row_max: what P was computed with; -inf for a fully masked row.
        sink: one more logit in the denominator, natural.
        is_natural: whether ``row_max`` is natural.
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
