"""From scores to weights and on to their gradients, in registers, as both backward kernels have it.

Rows are keys, columns are queries. A thread has its scores in groups of eight: two neighbouring queries of a key and of
another key, and again of the two queries that are eight further on. What belongs to the four queries of a group, lse or
delta, is asked for group by group.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import pack, unpack
from flash_attn_cute.kernels.common.mask import hide


@dataclass(frozen=True)
class Scores:
    """A warpgroup's scores of 64 keys and a block of queries, and what they become."""

    acc_S: cute.Tensor
    rP: cute.Tensor  # weights rounded, laid out as acc_S
    rW: cute.Tensor  # times the derivative of a softcap; rP, if there is none
    cS: cute.Tensor  # coordinates of acc_S
    score_scale: Float32  # into tanh, with a softcap
    scale_log2: Float32


@cute.jit
def weigh(
    config: cutlass.Constexpr,
    scores: Scores,
    m: Int32,
    hides: Boolean,
    keys: cutlass.Constexpr,
    lse: cutlass.Constexpr,
) -> None:
    """Scores to weights.

    Args:
        config: the kernel's.
        scores: of block m.
        m: the block's number within the sequence.
        hides: whether some of the queries do not see some of the keys.
        keys: tells the tile and the warpgroup's first key; asked only where keys are hidden.
        lse: tells a group's lse, in base 2.
    """
    c, acc_S, dtype = config, scores.acc_S, scores.rP.element_type
    if const_expr(c.has_softcap):
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            acc_S[i] = cute.math.tanh(acc_S[i] * scores.score_scale, fastmath=True)
    if hides:
        tile, first_key = keys()
        hide(
            acc_S,
            scores.scale_log2 * -Float32.inf,
            scores.cS,
            first_key,
            1,
            m * c.tile_m,
            tile.q.length,
            tile.window,
            c.has_left,
            c.has_right,
            tile.k.length,
        )
    packed_P, packed_W = cute.recast_tensor(scores.rP, Int32), cute.recast_tensor(scores.rW, Int32)
    for i in cutlass.range_constexpr(0, cute.size(acc_S), 8):
        four = lse(i // 8)
        for j in cutlass.range_constexpr(0, 8, 2):
            x, y = acc_S[i + j], acc_S[i + j + 1]
            low = cute.math.exp2(x * scores.scale_log2 - four[j // 4 * 2], fastmath=True)
            high = cute.math.exp2(y * scores.scale_log2 - four[j // 4 * 2 + 1], fastmath=True)
            packed_P[(i + j) // 2] = pack(low, high, dtype)
            if const_expr(c.has_softcap):  # x and y are infinite where the weights are 0
                low = low * (1.0 - x * x) if low != 0.0 else Float32(0.0)
                high = high * (1.0 - y * y) if high != 0.0 else Float32(0.0)
                packed_W[(i + j) // 2] = pack(low, high, dtype)


@cute.jit
def differentiate(acc_dP: cute.Tensor, weights: cutlass.Constexpr, delta: cutlass.Constexpr, rdS: cute.Tensor) -> None:
    """Gradients of the scores, but for their scale, rounded into rdS.

    Args:
        acc_dP: gradients of the weights.
        weights: tells a group's weights, times the derivative of a softcap, two a register.
        delta: tells a group's delta.
        rdS: laid out as acc_dP.
    """
    packed, dtype = cute.recast_tensor(rdS, Int32), rdS.element_type
    for i in cutlass.range_constexpr(0, cute.size(acc_dP), 8):
        four, pairs = delta(i // 8), weights(i // 8)
        for j in cutlass.range_constexpr(0, 8, 2):
            low, high = (unpack(pairs[j // 2], n, dtype) * (acc_dP[i + j + n] - four[j // 4 * 2 + n]) for n in range(2))
            packed[(i + j) // 2] = pack(low, high, dtype)
