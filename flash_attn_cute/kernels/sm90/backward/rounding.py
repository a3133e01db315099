"""Gradients from the float32 workspace: scaled, rounded to their dtype, and zero in the padding."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.fixed_point import from_fixed_point
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.common.rows import rounded
from flash_attn_cute.kernels.sm90.backward.workspace import read_columns, read_rows


@cute.jit
def round_block(
    sums: cute.Tensor,
    gdX: cute.Tensor,
    first_row: Int32,
    rows: SeqRows,
    stop: Int32,
    thread: Int32,
    *,
    scale: Float32,
    tile_d: Constexpr,
    columns: Constexpr,
    num_threads: Constexpr,
    at_once: Constexpr,
    row_units: cute.Tensor | None = None,
    num_adding: Int32 | None = None,
    transposed: Constexpr = False,
) -> None:
    """Scales and rounds a block of ``tile_d`` columns (see ``round_blocks``), eight of two rows a thread at a time.

    A part of it has so many ``columns``; a transposed one has 64 columns of the block for rows, and ``columns`` rows.
    Each of ``num_threads`` reads ``at_once`` times before it writes: the product is a divisor of a sixteenth of the
    block's numbers.
    """
    rows_apart = 1 if const_expr(transposed) else 8
    for begin in cutlass.range(thread, cute.size(sums) // 16, at_once * num_threads, unroll=1):
        units = [_Unit.of(begin + i * num_threads, columns, transposed) for i in range(at_once)]
        found = [unit.read(sums, columns, transposed) for unit in units]
        for unit, both in zip(units, found, strict=True):
            row, vector = unit.place(tile_d, columns, transposed)
            if vector * 8 < gdX.shape[1]:
                for n, numbers in enumerate(both):
                    within = first_row + row + rows_apart * n
                    if const_expr(row_units is not None):
                        numbers = from_fixed_point(numbers, row_units[row + rows_apart * n], num_adding)
                    words = rounded(numbers, scale, gdX.element_type)
                    for j in cutlass.range_constexpr(cute.size(words)):
                        words[j] = cutlass.select_(within < rows.length, words[j], Int32(0))
                    if within < stop:
                        target = cute.local_tile(gdX, (1, 8), (rows.start + within, vector))[0, None]
                        cute.autovec_copy(cute.recast_tensor(words, gdX.element_type), target)


class _Unit(NamedTuple):
    """Eight columns of two rows of a block: in which part, which row of it first, which vector of its columns.

    The rows are eight apart, of transposed parts neighbours. Threads that follow each other have vectors that do: those
    of whole rows, of transposed parts those of 64 columns, so that 128 bytes of a row are written at once.
    """

    part: Int32
    row: Int32
    vector: Int32

    @staticmethod
    def of(index: Int32, columns: int, transposed: bool) -> "_Unit":
        """The unit of a thread."""
        if transposed:
            pairs = columns // 2
            return _Unit(index // 8 // pairs, index // 8 % pairs * 2, index % 8)
        vectors = columns // 8
        row = index // vectors % 32
        return _Unit(index // vectors // 32, row // 8 * 16 + row % 8, index % vectors)

    def read(self, sums: cute.Tensor, columns: int, transposed: bool) -> tuple[cute.Tensor, cute.Tensor]:
        """Loads the unit from the workspace into registers."""
        read = read_columns if transposed else read_rows
        return read(cute.local_tile(sums, (64 * columns,), (self.part,)), self.row, self.vector)

    def place(self, tile_d: int, columns: int, transposed: bool) -> tuple[Int32, Int32]:
        """The first row within the block, and which vector of its columns."""
        if transposed:
            return self.row, self.part * 8 + self.vector
        parts_a_row = tile_d // columns
        return self.part // parts_a_row * 64 + self.row, self.vector + self.part % parts_a_row * (columns // 8)
