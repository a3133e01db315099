"""The largest logit of each head, softmax_scale * q . k: tiles raise it in global memory, in any order.

A maximum does not depend on the order, so its bits are the same in every run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_attn_cute.kernels.common.assembly import raise_signed, reduce_unsigned


def largest_bits(largest: Int32, low: Float32, high: Float32) -> Int32:
    """The largest of three numbers, given one by its bits: right if it is not negative, else it is a negative one.

    Bits of float32 numbers are ordered like the numbers where the larger one is not negative. GPUs have one instruction
    for three integers, and Hopper none for three float32 numbers.
    """
    return cutlass.max(cutlass.max(largest, low.bitcast(Int32)), high.bitcast(Int32))


@cute.jit
def raise_max_logit(mMaxLogits: cute.Tensor, head: Int32, logit: Float32) -> None:
    """Raises a head's number to ``logit``, if that is larger, by one thread.

    Float32 numbers are ordered like signed integers where one of them is not negative. Negative ones are ordered the
    other way round, as unsigned integers.
    """
    address, bits = (mMaxLogits.iterator + head).toint(), logit.bitcast(Int32)
    if bits >= 0:
        raise_signed(address, bits)
    else:
        reduce_unsigned(address, bits)


@cute.jit
def raise_max_logit_by_warp(mMaxLogits: cute.Tensor, head: Int32, logit: Float32) -> None:
    """Raises a head's number to the largest ``logit`` of a converged warp."""
    largest = cute.arch.warp_reduction(logit, cute.arch.fmax)
    if cute.arch.lane_idx() == 0:
        raise_max_logit(mMaxLogits, head, largest)
