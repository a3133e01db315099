"""Online softmax over blocks of keys (``common.softmax``), of scores in a warpgroup's registers.

Maxima would be a fifth of a block's instructions, and all others would wait for them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import fma, pack
from flash_attn_cute.kernels.common.max_logits import larger_P
from flash_attn_cute.kernels.common.score import LN2, LOG2_E
from flash_attn_cute.kernels.common.softmax import LARGE, MAX_SUM, SoftmaxState, finalize, to_base_2
from flash_attn_cute.kernels.sm90.mma import rows_and_columns


class _Block(NamedTuple):
    """A thread's scores of a block, and what becomes of them. With a ``reference`` see ``OnlineSoftmax.step``."""

    scores: list[Float32]  # in the order of ``acc_S``: pairs of columns of row 0 and of row 1 take turns
    rP: cute.Tensor
    sums: cute.Tensor  # of P of each row
    max_P: cute.Tensor | None  # if wanted, what is largest of P of each row, and of that of the blocks before
    reference: Float32 | None


class OnlineSoftmax(SoftmaxState):
    """The state of a thread's rows, each of which four neighbouring lanes share.

    They have the same ``row_max``. ``row_sum`` and ``max_P`` are of this thread's part of a row.
    """

    @cute.jit
    def step(
        self,
        acc_S: cute.Tensor,
        rP: cute.Tensor,
        acc_O: cute.Tensor,
        is_first: Constexpr,
        reference: Float32 | None = None,
    ) -> None:
        """Computes P of a block, rounded into rP, and rescales O where row_max has changed.

        With a ``reference`` natural scores are that, added to the products of ``acc_S`` times the scale.
        """
        sums = cute.make_rmem_tensor(self.num_rows, Float32)
        max_P = cute.make_rmem_tensor(self.num_rows, Float32) if const_expr(self.max_P is not None) else None
        # In variables: every access to a tensor of registers is two operations, which take time to compile.
        block = _Block([acc_S[i] for i in range(cute.size(acc_S))], rP, sums, max_P, reference)
        if const_expr(is_first):
            self._raise_max_and_compute_P(block, None)
        else:
            # A row without a visible key so far, its maximum being -inf, has no finite P here.
            self._compute_P(block, self.row_max, in_advance=True)
            fits = sums[0] <= MAX_SUM
            for r in cutlass.range_constexpr(1, self.num_rows):
                fits = fits and sums[r] <= MAX_SUM
            if not cute.arch.vote_all_sync(fits):
                first_sums = [sums[r] for r in range(self.num_rows)]
                corrections = self._raise_max_and_compute_P(block, first_sums)
                out = rows_and_columns(acc_O)
                for r in cutlass.range_constexpr(self.num_rows):
                    correction = corrections[r]
                    for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                        out[r, c] = out[r, c] * correction
        for r in cutlass.range_constexpr(self.num_rows):
            self.row_sum[r] += sums[r]
            if const_expr(self.max_P is not None):
                self.max_P[r] = max_P[r]

    @cute.jit
    def _raise_max_and_compute_P(self, block: _Block, first_sums: list[Float32] | None) -> cute.Tensor:
        """Raises row_max, of all rows or of rows whose first sums in this block do not fit, and computes P.

        Returns the factors that O must be multiplied by: 1 where row_max stays, and then P stays as well.
        """
        shifts = cute.make_rmem_tensor_like(self.row_max)
        corrections = cute.make_rmem_tensor_like(self.row_max)
        for r in cutlass.range_constexpr(self.num_rows):
            fits = False
            if const_expr(first_sums is not None):
                fits = self._of_row(first_sums[r] <= MAX_SUM)
            factor = Float32(1.0) if const_expr(self.is_natural) else self.scale_log2
            if const_expr(block.reference is not None):
                factor = self.scale_log2 * LN2
            own = [x for i, x in enumerate(block.scores) if i // 2 % self.num_rows == r]
            peak = own[0] * factor
            for x in own[1:]:
                peak = cute.arch.fmax(peak, x * factor)
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
            if const_expr(block.reference is not None):
                peak += block.reference
            row_max = cute.arch.fmax(self.row_max[r], peak)
            row_max = self.row_max[r] if fits else row_max
            # A row that still has no visible key gets P = exp2(-inf - 0).
            shifts[r] = row_max if row_max != -Float32.inf else Float32(0.0)
            corrections[r] = cute.math.exp2(to_base_2(self.row_max[r] - shifts[r], self.is_natural), fastmath=True)
            self.row_max[r] = row_max
            self.row_sum[r] *= corrections[r]
            if const_expr(self.max_P is not None):
                self.max_P[r] *= corrections[r]
        self._compute_P(block, shifts, in_advance=False)
        return corrections

    def _of_row(self, fits: Boolean) -> Boolean:
        """Whether a condition holds for all four lanes of a row."""
        lanes = cute.arch.vote_ballot_sync(fits) >> (cute.arch.lane_idx() // 4 * 4)
        return lanes & 0b1111 == 0b1111

    @cute.jit
    def _compute_P(self, block: _Block, shifts: cute.Tensor, in_advance: Constexpr) -> None:
        """Computes exp2(score - shift) into rP, and this thread's sums of it; the scores stay.

        The additions are explicitly fused: P of a row has the same bits however often it is computed with the same
        shift.
        """
        scores, rP, sums, max_P, reference = block
        packed = cute.recast_tensor(rP, Int32)
        shift = [shifts[r] for r in range(self.num_rows)]
        first = [Float32(0.0)] * self.num_rows  # what is subtracted before the rest
        before, scale = None, [self.scale_log2] * self.num_rows  # factors of products before that, and before the rest
        if const_expr(self.is_natural):
            is_large = [cute.arch.fmax(x, -x) > LARGE for x in shift]
            if const_expr(in_advance):  # NaN: no sum that fits
                rest = [cutlass.select_(is_large[r], Float32.nan, shift[r]) for r in range(self.num_rows)]
            else:
                first = [cutlass.select_(is_large[r], shift[r], first[r]) for r in range(self.num_rows)]
                rest = [cutlass.select_(is_large[r], Float32(0.0), shift[r]) for r in range(self.num_rows)]
            if const_expr(reference is not None):
                rest = [x - reference for x in rest]
            if const_expr(reference is not None and not in_advance):  # it is a score that is large, not a product
                zero, one = Float32(0.0), Float32(1.0)
                first = [cutlass.select_(is_large[r], reference - first[r], zero) for r in range(self.num_rows)]
                rest = [cutlass.select_(is_large[r], zero, rest[r]) for r in range(self.num_rows)]
                before = [cutlass.select_(large, self.scale_log2 * LN2, one) for large in is_large]
                scale = [cutlass.select_(large, Float32(LOG2_E), self.scale_log2) for large in is_large]
            shift = [x * LOG2_E for x in rest]
        shift = [-x for x in shift]
        subtracts = self.is_natural and not in_advance
        if const_expr(max_P is not None):
            largest = [self.max_P[r].bitcast(Int32) for r in range(self.num_rows)]
        total = [Float32(0.0)] * self.num_rows
        for i in cutlass.range_constexpr(cute.size(packed)):
            r = i % self.num_rows
            pair = []
            for x in scores[2 * i : 2 * i + 2]:
                if const_expr(before is not None):  # rounded as row_max was: what the two share has to cancel
                    x = fma(x, before[r], Float32(0.0)) + first[r]
                elif const_expr(subtracts):
                    x = x - first[r]
                pair.append(cute.math.exp2(fma(x, scale[r], shift[r]), fastmath=True))
            low, high = pair
            packed[i] = pack(low, high, rP.element_type)
            total[r] = low + high if const_expr(i < self.num_rows) else total[r] + (low + high)
            if const_expr(max_P is not None):
                largest[r] = larger_P(largest[r], low, high)
        for r in cutlass.range_constexpr(self.num_rows):
            sums[r] = total[r]
            if const_expr(max_P is not None):
                max_P[r] = largest[r].bitcast(Float32)

    @cute.jit
    def finish(self, acc_O: cute.Tensor, lse: cute.Tensor, sinks: cute.Tensor | None) -> None:
        """Divides O by the row sums, sinks (of each row, natural) included, and fills lse, natural.

        O of a fully masked row is 0.
        """
        out = rows_and_columns(acc_O)
        for r in cutlass.range_constexpr(self.num_rows):
            total = self.row_sum[r]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            sink = sinks[r] if const_expr(sinks is not None) else None
            factor, lse[r] = finalize(total, self.row_max[r], sink, self.is_natural)
            for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = out[r, c] * factor
