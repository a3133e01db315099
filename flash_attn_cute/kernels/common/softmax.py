"""Online softmax over blocks of keys (Milakov and Gimelshein, arXiv 1805.02867), in base 2."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_attn_cute.kernels.common.fragments import rows_and_columns

_LN2 = math.log(2.0)

# Lazily, a maximum is replaced only when it is exceeded by a factor of 2^8 in weights: until then weights above 1 do
# no harm, in float32 sums and 16-bit products alike, and O need not be rescaled. (The idea is FlashAttention-4's.)
_MAX_GROWTH_LOG2 = 8.0


class OnlineSoftmax:
    """The running maximum and sum of each of a thread's rows.

    ``maximum`` is of raw scores, shared by the four neighbouring lanes that hold a row between them, and may be
    smaller than the largest by a bounded factor if ``lazy``; ``total`` is this thread's part of the sum of
    exp2(scale_log2 * (score - maximum)).
    """

    def __init__(self, num_rows: int, scale_log2: Float32, lazy: bool):
        self.num_rows = num_rows
        self.lazy = lazy
        self.scale_log2 = scale_log2
        self.maximum = cute.make_rmem_tensor(num_rows, Float32)
        self.total = cute.make_rmem_tensor(num_rows, Float32)
        self.correction = cute.make_rmem_tensor(num_rows, Float32)

    def reset(self) -> None:
        """Before the first block: nothing seen."""
        self.maximum.fill(-Float32.inf)
        self.total.fill(0.0)

    @cute.jit
    def step(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr) -> None:
        """Turns a block of scores into weights, in place, and leaves what O must be multiplied by in correction."""
        scores = rows_and_columns(acc_S)
        num_columns = cute.size(scores, mode=[1])
        for r in cutlass.range_constexpr(self.num_rows):
            peak = scores[r, 0]
            for c in cutlass.range_constexpr(1, num_columns):
                peak = cute.arch.fmax(peak, scores[r, c])
            if const_expr(not (is_first or self.lazy)):
                peak = cute.arch.fmax(peak, self.maximum[r])
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
            if const_expr(self.lazy and not is_first):
                grown = (peak - self.maximum[r]) * self.scale_log2 > _MAX_GROWTH_LOG2
                peak = peak if grown else self.maximum[r]
            # A row that has seen nothing keeps weights of 0 instead of exp2(-inf + inf).
            shift = peak * self.scale_log2 if peak != -Float32.inf else Float32(0.0)
            if const_expr(not is_first):
                self.correction[r] = cute.math.exp2(self.maximum[r] * self.scale_log2 - shift, fastmath=True)
            self.maximum[r] = peak
            total = Float32(0.0)
            for c in cutlass.range_constexpr(num_columns):
                weight = cute.math.exp2(scores[r, c] * self.scale_log2 - shift, fastmath=True)
                scores[r, c] = weight
                total += weight
            self.total[r] = total if const_expr(is_first) else self.total[r] * self.correction[r] + total

    @cute.jit
    def rescale(self, acc_O: cute.Tensor) -> None:
        """Brings O to the current maximum; lazily, if that has changed for any row of the warp."""
        if const_expr(self.lazy):
            changed = self.correction[0] != 1.0
            for r in cutlass.range_constexpr(1, self.num_rows):
                changed = changed or self.correction[r] != 1.0
            if cute.arch.vote_any_sync(changed):
                self._multiply(acc_O)
        else:
            self._multiply(acc_O)

    @cute.jit
    def _multiply(self, acc_O: cute.Tensor) -> None:
        out = rows_and_columns(acc_O)
        for r in cutlass.range_constexpr(self.num_rows):
            for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                out[r, c] = out[r, c] * self.correction[r]

    @cute.jit
    def finish(self, acc_O: cute.Tensor, lse: cute.Tensor, sink: Float32 | None) -> None:
        """Divides O by the sums (and the sink's weight) and fills lse, natural; a row that saw nothing gives 0."""
        out = rows_and_columns(acc_O)
        for r in cutlass.range_constexpr(self.num_rows):
            total = self.total[r]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            peak = self.maximum[r] * self.scale_log2
            numerator = Float32(1.0)
            if const_expr(sink is not None):
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
