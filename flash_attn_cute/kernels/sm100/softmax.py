"""Online softmax of one row a thread (Milakov and Gimelshein, arXiv 1805.02867), in base 2.

Scores stay in tensor memory until their weights take their place, so they need not be kept in registers: a block is
weighed by the reference that earlier blocks have left, and only rows where the sum shows that some weight is too large,
or none at all, read their scores again and are weighed by their true maximum. No maximum is looked for in the common
case, and O is brought to a new reference by the row's own thread, as nobody else writes it then.
(FlashAttention-4 looks for every maximum, and spares the rescaling of O while it grows by little.)

Whether a row is weighed again follows from that row alone, so that its result has the same bits whatever its neighbours
hold.
"""

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_attn_cute.kernels.common.assembly import pack
from flash_attn_cute.kernels.common.weights import MAX_SUM
from flash_attn_cute.kernels.sm100.exponential import exp2_pair

_CHAINS = 4  # maxima that are looked for side by side

Scores = Callable[[], list[Float32]]


class RowSoftmax:
    """The running reference of a thread's row, -inf until it has seen a key, and the sum of its weights."""

    def __init__(self, scale_log2: Float32, polynomial_every: int):
        self.scale_log2 = scale_log2
        self.polynomial_every = polynomial_every  # as many pairs of weights; 0: none
        self.reference = cute.make_rmem_tensor(1, Float32)
        self.total = cute.make_rmem_tensor(1, Float32)

    def reset(self) -> None:
        """Before the first block: nothing seen."""
        self.reference.fill(-Float32.inf)
        self.total.fill(0.0)

    @cute.jit
    def step(
        self,
        scores: cutlass.Constexpr,
        store: cutlass.Constexpr,
        rescale: cutlass.Constexpr,
        dtype: cutlass.Constexpr,
    ) -> None:
        """Weighs a block of scores. All three functions are called by all of a warp.

        Args:
            scores: pieces of them, each a function that reads it, every time that it is called.
            store: takes pairs of weights, rounded; scores are not read behind it.
            rescale: multiplies the row's O by a number, which is 1 for rows that stay as they are. Not called before
                some row of the warp has seen a key: there may be no O yet.
            dtype: of weights.
        """
        has_seen = cute.arch.vote_any_sync(self.reference[0] != -Float32.inf)
        added, fits, is_done = Float32(0.0), Boolean(False), Boolean(False)
        if has_seen:
            # A row that has seen nothing, its reference being -inf, has no finite weights here.
            weights, added = self._weigh(scores, dtype, self.reference[0])
            fits = added <= MAX_SUM
            is_done = cute.arch.vote_all_sync(fits)
            if is_done:
                store(weights)
        if not is_done:
            earlier = self.reference[0]
            reference = cutlass.select_(fits, earlier, self._peak(scores, earlier))
            # A row that has still seen nothing gets weights of exp2(-inf - 0).
            shift = cutlass.select_(reference != -Float32.inf, reference, Float32(0.0))
            correction = cute.math.exp2(earlier - shift, fastmath=True)
            self._raise(reference, correction)
            weights, added = self._weigh(scores, dtype, shift)
            store(weights)
            if has_seen:
                rescale(correction)
        self.total[0] += added

    def _raise(self, reference: Float32, correction: Float32) -> None:
        self.reference[0] = reference
        self.total[0] *= correction

    def _peak(self, scores: list[Scores], peak: Float32) -> Float32:
        """The largest of the scores and another number."""
        peaks = [peak] * _CHAINS
        for read in scores:
            for i, score in enumerate(read()):
                peaks[i % _CHAINS] = cute.arch.fmax(peaks[i % _CHAINS], score * self.scale_log2)
        return functools.reduce(cute.arch.fmax, peaks)

    def _weigh(self, scores: list[Scores], dtype: type, shift: Float32) -> tuple[list[Int32], Float32]:
        """Weights exp2(score - shift), in pairs, and their sum: always by the same operations, so always the same."""
        scale, shift = (self.scale_log2, self.scale_log2), (-shift, -shift)
        weights, total = [], (Float32(0.0), Float32(0.0))
        for read in scores:
            some = read()
            for i in range(0, len(some), 2):
                exponents = cute.arch.fma_packed_f32x2((some[i], some[i + 1]), scale, shift)
                if self.polynomial_every and len(weights) % self.polynomial_every == self.polynomial_every - 1:
                    low, high = exp2_pair(exponents)
                else:
                    low, high = (cute.math.exp2(x, fastmath=True) for x in exponents)
                weights.append(pack(low, high, dtype))
                total = cute.arch.add_packed_f32x2(total, (low, high))
        return weights, total[0] + total[1]
