"""Of a row's softmax what does not depend on how its scores lie in registers: scalar arithmetic, in base 2.

Weights are exp2(score - reference), where the reference is near the row's maximum so far. With a bias references are
natural, as the scores are, and differences are brought to base 2 when they are small.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_attn_cute.kernels.common.score import LN2, LOG2_E

# A block is weighed again when the weights of a thread's part of a row sum to more. Equal scores must stay below (a
# thread holds at most 128 a row), and weights of this size must be no trouble in float16.
MAX_SUM = 1024.0


def to_base_2(x: Float32, is_natural: bool) -> Float32:
    """A difference from a reference in base 2."""
    return x * LOG2_E if is_natural else x


@cute.jit
def finished(
    total: Float32, reference: Float32, sink: Float32 | None, is_natural: cutlass.Constexpr
) -> tuple[Float32, Float32]:
    """What O of a row is to be multiplied by, and its natural lse. A row that saw nothing has 0 and -inf.

    Args:
        total: the sum of its weights.
        reference: of them; -inf if it saw nothing.
        sink: one more logit in the denominator, natural.
        is_natural: whether the reference is.
    """
    numerator = Float32(1.0)
    if const_expr(sink is not None):
        sink = sink if const_expr(is_natural) else sink * LOG2_E
        merged = cute.arch.fmax(reference, sink)
        merged = merged if merged != -Float32.inf else Float32(0.0)
        numerator = cute.math.exp2(to_base_2(reference - merged, is_natural), fastmath=True)
        total = total * numerator + cute.math.exp2(to_base_2(sink - merged, is_natural), fastmath=True)
        reference = merged
    unseen = total == 0.0  # NaN is not: it stays visible
    log2_total = cute.math.log2(total, fastmath=True)
    lse = reference + log2_total * LN2 if const_expr(is_natural) else (reference + log2_total) * LN2
    lse = -Float32.inf if unseen else lse
    factor = Float32(0.0) if unseen else numerator * cute.arch.rcp_approx(total)
    return factor, lse
