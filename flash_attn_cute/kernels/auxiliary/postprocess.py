"""Gradients from the float32 workspace: scaled, rounded, and zero in the padding."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_cute.kernels.common import schedule, workspace
from flash_attn_cute.kernels.common.rows import rows_first, zero_rows

_THREADS = 256


class PostprocessArguments(NamedTuple):
    """The launch arguments, in their order."""

    mdX: cute.Tensor  # dQ, or dK or dV of grouped heads
    mdXaccum: cute.Tensor  # (heads, blocks, tile_m * tile_d)
    mCuSeqlens: cute.Tensor | None
    mSeqUsed: cute.Tensor | None
    scale: Float32
    mTurns: cute.Tensor | None  # (parts, heads, blocks): 0 if nobody has added to mdXaccum, which was not zero then


class Postprocess:
    """One CTA a block of ``tile_m`` rows of one head, in parts of so many columns.

    A thread takes eight columns of two rows at a time.
    """

    def __init__(self, tile_m: int, tile_d: int, columns: int, packed: bool, zero_padding: bool):
        self.tile_m, self.tile_d, self.columns = tile_m, tile_d, columns
        self.packed, self.zero_padding = packed, zero_padding

    @cute.jit
    def __call__(self, a: PostprocessArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel."""
        heads, blocks, _ = a.mdXaccum.shape
        self.kernel(a).launch(grid=[blocks * heads, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: PostprocessArguments) -> None:
        """One block."""
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mdX = rows_first(a.mdX, self.packed)
        work, start, length, slot = schedule.row_block(index, a.mdX, self.packed, a.mCuSeqlens, a.mSeqUsed, self.tile_m)
        gdX = mdX[None, None, work.head, Int32(0) if const_expr(self.packed) else work.batch]
        stop = slot if const_expr(self.zero_padding) else length
        if const_expr(a.mTurns is not None):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
            if a.mTurns[0, work.head, work.block] == 0:
                length = Int32(0)
        if work.first_row < length:
            self._convert(a, gdX, work, start, length, stop, thread)
        else:  # the workspace may hold nothing
            num_rows = cutlass.min(stop - work.first_row, self.tile_m)
            zero_rows(gdX, start + work.first_row, num_rows, thread, _THREADS)

    @cute.jit
    def _convert(
        self,
        a: PostprocessArguments,
        gdX: cute.Tensor,
        work: schedule.WorkTile,
        start: Int32,
        length: Int32,
        stop: Int32,
        thread: Int32,
    ) -> None:
        """A block that has been added to; zeros behind the sequence's length."""
        vectors, parts_a_row = self.columns // 8, self.tile_d // self.columns
        units = self.tile_m * self.tile_d // 16
        for i in cutlass.range_constexpr(-(-units // _THREADS)):
            unit = i * _THREADS + thread
            group, row, part = unit % vectors, unit // vectors % 32, unit // vectors // 32
            row = row // 8 * 16 + row % 8
            numbers = cute.local_tile(a.mdXaccum[work.head, work.block, None], (64 * self.columns,), (part,))
            first = work.first_row + part // parts_a_row * 64 + row
            vector = group + part % parts_a_row * vectors
            if unit < units and vector * 8 < gdX.shape[1] and first < stop:
                for n, source in enumerate(workspace.read_rows(numbers, row, group)):
                    within = first + 8 * n
                    rounded = cute.make_rmem_tensor(8, gdX.element_type)
                    for j in cutlass.range_constexpr(8):
                        value = source[j] * a.scale if within < length else Float32(0.0)
                        rounded[j] = value.to(gdX.element_type)
                    if within < stop:
                        cute.autovec_copy(rounded, cute.local_tile(gdX, (1, 8), (start + within, vector))[0, None])
