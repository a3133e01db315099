"""The largest logit of each head, softmax_scale * q . k: tiles raise it in global memory, in any order.

A maximum does not depend on the order, so its bits are the same in every run. Within a row it follows from the largest
P, which a kernel computes anyway: ``row_max + log2(P)``. That is exact to the rounding of exp2 and log2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_attn_cute.kernels.common.assembly import replace_by_extremum
from flash_attn_cute.kernels.common.score import LN2


def larger_P(largest: Int32, low: Float32, high: Float32) -> Int32:
    """The bits of the largest of three numbers that are not negative, and so ordered like their bits.

    Hopper has one instruction for three integers, and none for three float32 numbers.
    """
    return cutlass.max(cutlass.max(largest, low.bitcast(Int32)), high.bitcast(Int32))


def logit_of(largest_P: Float32, row_max: Float32) -> Float32:
    """The natural logit whose P is that, computed with ``row_max``, in base 2; -inf of a P of zero."""
    return (row_max + cute.math.log2(largest_P, fastmath=True)) * LN2


@cute.jit
def raise_max_logit(mMaxLogits: cute.Tensor, head: Int32, logit: Float32) -> None:
    """Raises a head's number to ``logit``, if that is larger, by one thread.

    Float32 numbers are ordered like signed integers where one of them is not negative. Negative ones are ordered the
    other way round, as unsigned integers.
    """
    address, bits = (mMaxLogits.iterator + head).toint(), logit.bitcast(Int32)
    if bits >= 0:
        replace_by_extremum("max.s32", address, bits)
    else:
        replace_by_extremum("min.u32", address, bits)


@cute.jit
def raise_max_logit_by_warp(mMaxLogits: cute.Tensor, head: Int32, logit: Float32) -> None:
    """Raises a head's number to the largest ``logit`` of a converged warp."""
    largest = cute.arch.warp_reduction(logit, cute.arch.fmax)
    if cute.arch.lane_idx() == 0:
        raise_max_logit(mMaxLogits, head, largest)
