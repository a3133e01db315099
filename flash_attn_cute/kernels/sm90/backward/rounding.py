"""Gradients from the float32 workspace: scaled, rounded to their dtype, and zero in the padding."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

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
    tile_d: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    num_threads: cutlass.Constexpr,
    at_once: cutlass.Constexpr,
    row_units: cute.Tensor | None = None,
    num_adding: Int32 | None = None,
    transposed: cutlass.Constexpr = False,
) -> None:
    """Scales and rounds a block of ``tile_d`` columns (see ``round_blocks``), eight of two rows a thread at a time.

    A part of it has so many ``columns``; a transposed one has 64 columns of the block for rows. Each of ``num_threads``
    reads ``at_once`` times before it writes: the product is a divisor of a sixteenth of the block's numbers.
    """
    for begin in cutlass.range(thread, cute.size(sums) // 16, at_once * num_threads, unroll=1):
        kind = _TransposedUnit if const_expr(transposed) else _Unit
        units = [kind.of(begin + i * num_threads, columns) for i in range(at_once)]
        found = [unit.read(sums, columns) for unit in units]
        for unit, both in zip(units, found, strict=True):
            row, vector = unit.place(tile_d, columns)
            if vector * 8 < gdX.shape[1]:
                for n, numbers in enumerate(both):
                    within = first_row + row + kind.rows_apart * n
                    if const_expr(row_units is not None):
                        numbers = from_fixed_point(numbers, row_units[row + kind.rows_apart * n], num_adding)
                    words = rounded(numbers, scale, gdX.element_type)
                    for j in cutlass.range_constexpr(cute.size(words)):
                        words[j] = cutlass.select_(within < rows.length, words[j], Int32(0))
                    if within < stop:
                        target = cute.local_tile(gdX, (1, 8), (rows.start + within, vector))[0, None]
                        cute.autovec_copy(cute.recast_tensor(words, gdX.element_type), target)


class _Unit(NamedTuple):
    """Eight columns of two rows of a block, eight apart: in which part, which row of it first, which columns of it.

    Threads that follow each other have vectors of columns that do, so that rows are written whole.
    """

    part: Int32
    row: Int32
    group: Int32

    rows_apart = 8

    @staticmethod
    def of(index: Int32, columns: int) -> "_Unit":
        """The unit of a thread, where parts have ``columns`` columns."""
        vectors = columns // 8
        row = index // vectors % 32
        return _Unit(index // vectors // 32, row // 8 * 16 + row % 8, index % vectors)

    def read(self, sums: cute.Tensor, columns: int) -> tuple[cute.Tensor, cute.Tensor]:
        """Loads the unit from the workspace into registers."""
        return read_rows(cute.local_tile(sums, (64 * columns,), (self.part,)), self.row, self.group)

    def place(self, tile_d: int, columns: int) -> tuple[Int32, Int32]:
        """The first row within the block, and which vector of its columns."""
        parts_a_row = tile_d // columns
        return self.part // parts_a_row * 64 + self.row, self.group + self.part % parts_a_row * (columns // 8)


class _TransposedUnit(NamedTuple):
    """Eight columns of two neighbouring rows of a block whose parts have its columns for rows, 64 each.

    Eight threads that follow each other have 64 columns, so that 128 bytes of a row are written at once.
    """

    part: Int32
    row: Int32  # of the block, even
    vector: Int32  # of eight columns of the part's

    rows_apart = 1

    @staticmethod
    def of(index: Int32, columns: int) -> "_TransposedUnit":
        """Unit ``index``; parts are of ``columns`` rows of the block."""
        pairs = columns // 2
        return _TransposedUnit(index // 8 // pairs, index // 8 % pairs * 2, index % 8)

    def read(self, sums: cute.Tensor, columns: int) -> tuple[cute.Tensor, cute.Tensor]:
        """From the workspace, into registers."""
        part = cute.local_tile(sums, (64 * columns,), (self.part,))
        return read_columns(part, self.row, self.vector)

    def place(self, tile_d: int, columns: int) -> tuple[Int32, Int32]:
        """The first row within the block, and which vector of its columns."""
        return self.row, self.part * 8 + self.vector
