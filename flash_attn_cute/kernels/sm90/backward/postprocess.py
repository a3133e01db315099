"""Gradients from the float32 workspace (``rounding``), by a kernel behind the backward kernel."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.common.rows import rows_first, zero_rows
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.backward.rounding import round_block

_THREADS = 256


class PostprocessArguments(NamedTuple):
    """The launch arguments, in their order."""

    mdX: cute.Tensor  # dQ, or dK or dV of grouped heads
    mdXaccum: cute.Tensor  # (heads, blocks, tile_m * tile_d)
    mCuSeqlens: cute.Tensor | None
    mSeqUsed: cute.Tensor | None
    scale: Float32
    mSemaphores: cute.Tensor | None  # (parts, heads, blocks): 0 where nothing is added, and mdXaccum uninitialised


class Postprocess:
    """One CTA a block of ``tile_m`` rows of one head, in parts of so many columns."""

    def __init__(self, features: Features, tile_m: int, tile_d: int, columns: int):
        self.tile_m, self.tile_d, self.columns = tile_m, tile_d, columns
        self.packed, self.zero_padding = features.packed, features.zero_padding

    @cute.jit
    def __call__(self, a: PostprocessArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel, one CTA a block."""
        heads, blocks, _ = a.mdXaccum.shape
        num_tiles = tiles.num_row_tiles(heads, blocks, self.packed)
        self.kernel(a).launch(grid=[num_tiles, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: PostprocessArguments) -> None:
        """Scales and rounds one block."""
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mdX = rows_first(a.mdX, self.packed)
        work, rows = tiles.row_tile(index, a.mdX, a.mdX.shape[-2], a.mCuSeqlens, a.mSeqUsed, self.tile_m, tiles.Order())
        gdX = mdX[None, None, work.head, Int32(0) if const_expr(self.packed) else work.batch]
        length, stop = rows.length, rows.slot if const_expr(self.zero_padding) else rows.length
        if const_expr(a.mSemaphores is not None):
            if work.first_row < length:
                if a.mSemaphores[0, work.head, work.block] == 0:
                    length = Int32(0)
        if work.first_row < length:
            at_once = self.tile_m * self.tile_d // 16 // _THREADS
            at_once = at_once // 2 if const_expr(at_once > 4) else at_once  # more registers, fewer CTAs
            sums, real = a.mdXaccum[work.head, Int64(work.block), None], SeqRows(rows.start, length)
            sizes = {"tile_d": self.tile_d, "columns": self.columns, "num_threads": _THREADS, "at_once": at_once}
            round_block(sums, gdX, work.first_row, real, stop, thread, scale=a.scale, **sizes)
        else:  # the workspace may hold nothing
            num_rows = cutlass.min(stop - work.first_row, self.tile_m)
            zero_rows(gdX, rows.start + work.first_row, num_rows, thread, _THREADS)
