"""Online softmax over blocks of keys (Milakov and Gimelshein, arXiv 1805.02867), in base 2.

Weights are exp2(score - reference). A row's reference need not be its maximum: any number near it gives the same
quotient. So a block is first weighed with the reference that earlier blocks have left, and no maximum is looked for.
Only where a sum then shows that some weight is too large, or none at all, is the block weighed again, by its true
maximum. Maxima are a fifth of a block's instructions, and those that all others wait for.
(FlashAttention-4 spares the rescaling of O while a maximum grows by little; this spares the maximum, too.)
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import pack
from flash_attn_cute.kernels.common.fragments import rows_and_columns

LOG2_E = math.log2(math.e)
_LN2 = math.log(2.0)

# A block is weighed again when the weights of a thread's part of a row sum to more. Equal scores must stay below (a
# thread holds at most 64 a row), and weights of this size must be no trouble in float16.
_MAX_SUM = 1024.0


def score_scales(softmax_scale: Float32, softcap: Float32, has_softcap: bool) -> tuple[Float32, Float32]:
    """What products are multiplied by before tanh (1 without a softcap), and after it or at all, for base 2."""
    if const_expr(has_softcap):
        return softmax_scale / softcap, softcap * LOG2_E
    return Float32(1.0), softmax_scale * LOG2_E


class OnlineSoftmax:
    """The running reference and sum of each of a thread's rows.

    ``reference`` is in base 2, of scaled scores, shared by the four neighbouring lanes that hold a row between them,
    and -inf until the row has seen a key; ``total`` is this thread's part of the sum of weights.
    """

    def __init__(self, num_rows: int, scale_log2: Float32):
        self.num_rows = num_rows
        self.scale_log2 = scale_log2
        self.reference = cute.make_rmem_tensor(num_rows, Float32)
        self.total = cute.make_rmem_tensor(num_rows, Float32)

    @property
    def hidden(self) -> Float32:
        """A score without weight: what becomes -inf when it is scaled."""
        return self.scale_log2 * -Float32.inf

    def reset(self) -> None:
        """Before the first block: nothing seen."""
        self.reference.fill(-Float32.inf)
        self.total.fill(0.0)

    @cute.jit
    def step(self, acc_S: cute.Tensor, rP: cute.Tensor, acc_O: cute.Tensor, is_first: cutlass.Constexpr) -> None:
        """Weighs a block of scores into rP, rounded, and brings O to the references if they have changed."""
        sums = cute.make_rmem_tensor(self.num_rows, Float32)
        if const_expr(is_first):
            self._refer_and_weigh(acc_S, rP, sums)
        else:
            # A row that has seen nothing, its reference being -inf, has no finite weights here.
            self._weigh(acc_S, rP, sums, self.reference)
            fits = sums[0] <= _MAX_SUM
            for r in cutlass.range_constexpr(1, self.num_rows):
                fits = fits and sums[r] <= _MAX_SUM
            if not cute.arch.vote_all_sync(fits):
                corrections = self._refer_and_weigh(acc_S, rP, sums)
                out = rows_and_columns(acc_O)
                for r in cutlass.range_constexpr(self.num_rows):
                    for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                        out[r, c] = out[r, c] * corrections[r]
        for r in cutlass.range_constexpr(self.num_rows):
            self.total[r] += sums[r]

    @cute.jit
    def _refer_and_weigh(self, acc_S: cute.Tensor, rP: cute.Tensor, sums: cute.Tensor) -> cute.Tensor:
        """Raises the references to the maxima first; returns what earlier weights must be multiplied by."""
        scores = rows_and_columns(acc_S)
        shifts = cute.make_rmem_tensor_like(self.reference)
        corrections = cute.make_rmem_tensor_like(self.reference)
        for r in cutlass.range_constexpr(self.num_rows):
            peak = scores[r, 0] * self.scale_log2
            for c in cutlass.range_constexpr(1, cute.size(scores, mode=[1])):
                peak = cute.arch.fmax(peak, scores[r, c] * self.scale_log2)
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
            reference = cute.arch.fmax(self.reference[r], peak)
            # A row that has still seen nothing gets weights of exp2(-inf - 0).
            shifts[r] = reference if reference != -Float32.inf else Float32(0.0)
            corrections[r] = cute.math.exp2(self.reference[r] - shifts[r], fastmath=True)
            self.reference[r] = reference
            self.total[r] *= corrections[r]
        self._weigh(acc_S, rP, sums, shifts)
        return corrections

    @cute.jit
    def _weigh(self, acc_S: cute.Tensor, rP: cute.Tensor, sums: cute.Tensor, shifts: cute.Tensor) -> None:
        """Weights exp2(score - shift) into rP and this thread's sums of them; the scores stay."""
        packed = cute.recast_tensor(rP, Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            r = i % self.num_rows  # pairs of columns of row 0 and of row 1 take turns
            low, high = (
                cute.math.exp2(acc_S[2 * i + j] * self.scale_log2 - shifts[r], fastmath=True) for j in range(2)
            )
            packed[i] = pack(low, high, rP.element_type)
            sums[r] = low + high if const_expr(i < self.num_rows) else sums[r] + (low + high)

    @cute.jit
    def finish(self, acc_O: cute.Tensor, lse: cute.Tensor, sinks: cute.Tensor | None) -> None:
        """Divides O by the sums, the weights of sinks (of each row, in base 2) included, and fills lse, natural.

        A row that saw nothing gives 0.
        """
        out = rows_and_columns(acc_O)
        for r in cutlass.range_constexpr(self.num_rows):
            total = self.total[r]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            peak = self.reference[r]
            numerator = Float32(1.0)
            if const_expr(sinks is not None):
                sink = sinks[r]
                merged = cute.arch.fmax(peak, sink)
                merged = merged if merged != -Float32.inf else Float32(0.0)
                numerator = cute.math.exp2(peak - merged, fastmath=True)
                total = total * numerator + cute.math.exp2(sink - merged, fastmath=True)
                peak = merged
            seen = total > 0.0
            lse[r] = (peak + cute.math.log2(total, fastmath=True)) * _LN2 if seen else -Float32.inf
            factor = numerator * cute.arch.rcp_approx(total) if seen else Float32(0.0)
            for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = out[r, c] * factor
