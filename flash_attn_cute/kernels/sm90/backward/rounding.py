"""Gradients from the float32 workspace: scaled, rounded, and zero in the padding."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_attn_cute.kernels.common.assembly import pack
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.sm90.backward.workspace import read_rows


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
) -> None:
    """A block that has been added to, eight columns of two rows a thread at a time.

    Args:
        sums: the block's.
        gdX: (rows, d), the gradient of a head.
        first_row: the block's, within its sequence.
        rows: the sequence's; behind its length zeros are written.
        stop: the row of the sequence before which writing ends.
        thread: which one this is.
        scale: what sums are multiplied by.
        tile_d: columns of the block.
        columns: of a part of it.
        num_threads: how many there are; times ``at_once`` a divisor of a sixteenth of the block's numbers.
        at_once: how often a thread reads before it writes.
    """
    for begin in cutlass.range(thread, cute.size(sums) // 16, at_once * num_threads, unroll=1):
        found = [_read(sums, begin + i * num_threads, scale, gdX.element_type, tile_d, columns) for i in range(at_once)]
        for both, row, vector in found:
            if vector * 8 < gdX.shape[1]:
                for n, rounded in enumerate(both):
                    within = first_row + row + 8 * n
                    for j in cutlass.range_constexpr(4):
                        rounded[j] = cutlass.select_(within < rows.length, rounded[j], Int32(0))
                    if within < stop:
                        target = cute.local_tile(gdX, (1, 8), (rows.start + within, vector))[0, None]
                        cute.autovec_copy(cute.recast_tensor(rounded, gdX.element_type), target)


def _read(
    sums: cute.Tensor, unit: Int32, scale: Float32, dtype: type, tile_d: int, columns: int
) -> tuple[list[cute.Tensor], Int32, Int32]:
    """Eight columns of two rows of a block, eight apart, rounded; the first row, and which columns.

    Threads that follow each other have vectors of columns that do, so that rows are written whole.
    """
    vectors, parts_a_row = columns // 8, tile_d // columns
    group, row, part = unit % vectors, unit // vectors % 32, unit // vectors // 32
    row = row // 8 * 16 + row % 8
    both = []
    for numbers in read_rows(cute.local_tile(sums, (64 * columns,), (part,)), row, group):
        rounded = cute.make_rmem_tensor(4, Int32)
        for j in range(4):
            rounded[j] = pack(numbers[2 * j] * scale, numbers[2 * j + 1] * scale, dtype)
        both.append(rounded)
    return both, part // parts_a_row * 64 + row, group + part % parts_a_row * vectors
