"""Scores from products q . k, and gradients of products from gradients of scores: scalar arithmetic.

    s = softmax_scale * q . k                   scaled
    s = softcap * tanh(s / softcap)             capped, if there is a softcap
    s = s + bias                                if there is a bias
    s = -inf                                    masked, where a query does not attend to a key

Kernels work in base 2: P is one exp2 of a score times a factor (``ScoreScales``). Each architecture decides what its
registers hold. A new step of this chain has its arithmetic and its derivative here.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.blocks import Window

LOG2_E = math.log2(math.e)
LN2 = math.log(2.0)
# An lse below this is too coarse in float32 to count the keys of the sum: a query whose scores all have huge
# negative biases is taken for a fully masked one, and has no gradient.
LOWEST_LSE = -(2.0**20)


class ScoreScales(NamedTuple):
    """Factors of a score, step by step."""

    tanh: Float32  # products, before tanh; 1 without a softcap
    bias: Float32  # what is there then, before a bias is added; 1 without one
    log2: Float32  # at last, for base 2

    @staticmethod
    def of(features: Any, softmax_scale: Float32, softcap: Float32) -> "ScoreScales":
        tanh, rest = Float32(1.0), softmax_scale
        if const_expr(features.softcap):
            tanh, rest = softmax_scale / softcap, softcap
        if const_expr(features.bias):
            return ScoreScales(tanh, rest, Float32(LOG2_E))
        return ScoreScales(tanh, Float32(1.0), rest * LOG2_E)


def probability(score: Float32, lse: Float32, scales: ScoreScales, has_bias: bool) -> Float32:
    """P of a score that is not scaled yet, from its row's lse as the backward pass keeps it.

    Without a bias lse is in base 2. A bias can be so large that the rounding of its product with log2(e) alone makes P
    infinite, so with a bias lse is natural and is subtracted first.
    """
    if has_bias:
        return cute.math.exp2((score - lse) * scales.log2, fastmath=True)
    return cute.math.exp2(score * scales.log2 - lse, fastmath=True)


def capped(product: Float32, score_scale: Float32) -> Float32:
    """Tanh of a scaled product."""
    return cute.math.tanh(product * score_scale, fastmath=True)


def capped_slope(capped: Float32) -> Float32:
    """Derivative of ``capped``, from its result."""
    return 1.0 - capped * capped


def hidden(scale_log2: Float32) -> Float32:
    """A masked score: a number that scaling turns into -inf, whatever the scale's sign."""
    return scale_log2 * -Float32.inf


@cute.jit
def visible_columns(
    row: Int32, first_column: Int32, num_columns: Int32, window: Window, edges: Constexpr
) -> tuple[Int32, Int32]:
    """Columns start .. stop of a block that a row attends to, counted from the block's first.

    ``row`` and ``first_column`` are positions in their sequences; rows are keys if ``window`` is transposed. The other
    sequence has ``num_columns``. The bound of an edge that is not among ``edges`` is meaningless.
    """
    position = row + window.shift
    start, stop = Int32(0), num_columns - first_column
    if const_expr(edges.right and window.right is not None):
        stop = cutlass.min(stop, position + window.right + 1 - first_column)
    if const_expr(edges.left):
        start = position - window.left - first_column
    return start, stop
