"""dQ from the float32 workspace: scaled, rounded, and zero in the padding."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_cute.kernels.auxiliary.config import PostprocessConfig
from flash_attn_cute.kernels.common import schedule, workspace
from flash_attn_cute.kernels.common.rows import rows_first

_THREADS = 256


class PostprocessArguments(NamedTuple):
    """The launch arguments, in their order."""

    mdQ: cute.Tensor
    mdQaccum: cute.Tensor
    mCuSeqlensQ: cute.Tensor | None
    mSeqUsedQ: cute.Tensor | None
    softmax_scale: Float32


class Postprocess:
    """One CTA a block of queries of one head; a thread takes eight columns of two rows at a time."""

    def __init__(self, config: PostprocessConfig):
        self.tile_m, self.tile_d, self.columns = config.tile_m, config.tile_d, config.columns
        self.packed, self.zero_padding = config.packed, config.zero_padding

    @cute.jit
    def __call__(self, a: PostprocessArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel."""
        heads, blocks, _ = a.mdQaccum.shape
        self.kernel(a).launch(grid=[blocks * heads, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: PostprocessArguments) -> None:
        """One block."""
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mdQ = rows_first(a.mdQ, self.packed)
        work, start, length, slot = schedule.query_block(
            index, a.mdQ, self.packed, a.mCuSeqlensQ, a.mSeqUsedQ, self.tile_m
        )
        gdQ = mdQ[None, None, work.head, Int32(0) if const_expr(self.packed) else work.batch]
        stop = slot if const_expr(self.zero_padding) else length
        vectors, parts_a_row = self.columns // 8, self.tile_d // self.columns
        units = self.tile_m * self.tile_d // 16
        for i in cutlass.range_constexpr(-(-units // _THREADS)):
            unit = i * _THREADS + thread
            group, row, part = unit % vectors, unit // vectors % 32, unit // vectors // 32
            row = row // 8 * 16 + row % 8
            numbers = cute.local_tile(a.mdQaccum[work.head, work.block, None], (64 * self.columns,), (part,))
            first = work.first_row + part // parts_a_row * 64 + row
            vector = group + part % parts_a_row * vectors
            if unit < units and vector * 8 < gdQ.shape[1] and first < stop:
                for n, source in enumerate(workspace.read_rows(numbers, row, group)):
                    query = first + 8 * n
                    rounded = cute.make_rmem_tensor(8, gdQ.element_type)
                    for j in cutlass.range_constexpr(8):
                        value = source[j] * a.softmax_scale if query < length else Float32(0.0)
                        rounded[j] = value.to(gdQ.element_type)
                    if query < stop:
                        cute.autovec_copy(rounded, cute.local_tile(gdQ, (1, 8), (start + query, vector))[0, None])
