"""How the float32 sums of gradients lie in the workspace (``common.workspace``), and what brings them from there.

A block of 128 rows has its columns by fours: (four, row, column of the four). So a warp whose threads have a row each
reads or writes 512 bytes at a time, in global memory as in shared, and TMA adds a piece of dQ as it is. Of dQ that a
pair of CTAs adds up, each has half of a block's rows. Its part lies as it does in tensor memory: lanes for rows, the
columns' second half in the lanes behind those of the first. A block of 64 queries, of which threads have a column each,
is transposed, in parts of 64 columns, or of those that a CTA of a pair adds: (part, four, column, query of the four).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import add_four
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.common.rows import rounded
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.config import PART_ROWS

TRANSPOSED = PART_ROWS // 2  # queries of a block that is transposed
_AT_ONCE = 4  # times eight columns of a row of dQ that a thread reads before it writes


def by_fours(sums: cute.Pointer, columns: int, rows: int = PART_ROWS) -> cute.Tensor:
    """Some columns of a block, or of a piece: (column of the four, row, four)."""
    return cute.make_tensor(sums, cute.make_layout((4, rows, columns // 4), stride=(1, 4, 4 * rows)))


def put(numbers: list[Float32], sums: cute.Tensor, row: Int32) -> None:
    """Writes a row of some columns."""
    four = cute.make_rmem_tensor(4, Float32)
    for i in range(len(numbers) // 4):
        for j in range(4):
            four[j] = numbers[4 * i + j]
        cute.autovec_copy(four, sums[None, row, i])


@cute.jit
def share(numbers: Constexpr, sums: cute.Tensor, row: Int32, is_first: Boolean) -> None:
    """Adds a row of some columns; the first to come writes."""
    if is_first:
        put(numbers, sums, row)
    else:
        for i in cutlass.range_constexpr(len(numbers) // 4):
            add_four(sums[None, row, i].iterator.toint(), *numbers[4 * i : 4 * i + 4])


@cute.jit
def take(acc: cute.Tensor, sums: cute.Tensor, row: Int32) -> None:
    """Adds a row of some columns to what is in registers."""
    four = cute.make_rmem_tensor(4, Float32)
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        cute.autovec_copy(sums[None, row, i], four)
        for j in cutlass.range_constexpr(4):
            acc[4 * i + j] = acc[4 * i + j] + four[j]


@cute.jit
def round_block(
    config: Constexpr,
    scale: Float32,
    sums: cute.Tensor,
    gdX: cute.Tensor,
    first_row: Int32,
    rows: SeqRows,
    stop: Int32,
    lane: Int32,
) -> None:
    """Scales and rounds a block (see ``round_blocks``), by a warp."""
    c = config
    if const_expr(c.transposes_dQ):
        # Four queries of eight columns a thread: the eight threads of a row write 128 bytes.
        for unit in cutlass.range(lane, TRANSPOSED // 4 * c.tile_d // 8, 32, unroll=1):
            four, vector = unit // 8 % (TRANSPOSED // 4), unit // (2 * TRANSPOSED) * 8 + unit % 8
            vectors = c.piece_lanes // 8
            part = cute.domain_offset((vector // vectors * c.piece_lanes * TRANSPOSED,), sums)
            columns = by_fours(part.iterator, TRANSPOSED, c.piece_lanes)
            found = cute.make_rmem_tensor((4, 8), Float32)
            for j in cutlass.range_constexpr(8):
                cute.autovec_copy(columns[None, vector % vectors * 8 + j, four], found[None, j])
            for i in cutlass.range_constexpr(4):
                words = rounded(found[i, None], scale, gdX.element_type)
                _write(gdX, words, first_row + 4 * four + i, vector, rows, stop)
    else:
        fours = by_fours(sums.iterator, c.tile_d)
        for begin in cutlass.range(lane, PART_ROWS * c.tile_d // 8, 32 * _AT_ONCE, unroll=1):
            found = [_read(c, fours, begin + 32 * i, scale, gdX.element_type) for i in range(_AT_ONCE)]
            for words, row, vector in found:
                _write(gdX, words, first_row + row, vector, rows, stop)


@cute.jit
def _write(gdX: cute.Tensor, words: cute.Tensor, within: Int32, vector: Int32, rows: SeqRows, stop: Int32) -> None:
    """Eight columns of a row within its sequence, if they are there; zeros in the padding."""
    if vector * 8 < gdX.shape[1] and within < stop:
        for j in cutlass.range_constexpr(cute.size(words)):
            words[j] = cutlass.select_(within < rows.length, words[j], Int32(0))
        target = cute.local_tile(gdX, (1, 8), (rows.start + within, vector))[0, None]
        cute.autovec_copy(cute.recast_tensor(words, gdX.element_type), target)


def _read(
    config: BackwardConfig, fours: cute.Tensor, unit: Int32, scale: Float32, dtype: type
) -> tuple[cute.Tensor, Int32, Int32]:
    """Eight columns of a row, rounded; which row, and which eight. Four neighbours have 32 columns of a row.

    Each CTA of a tile has added to rows of its own.
    """
    lane, eight = unit // 4 % PART_ROWS, unit % 4 + unit // (4 * PART_ROWS) * 4
    numbers = cute.make_rmem_tensor((4, 2), Float32)
    for i in range(2):
        cute.autovec_copy(fours[None, lane, 2 * eight + i], numbers[None, i])
    words = rounded(numbers, scale, dtype)
    if config.ctas_a_tile == 1:
        return words, lane, eight
    rows, eights = PART_ROWS // config.ctas_a_tile, config.tile_d // 8 // config.ctas_a_tile
    return words, eight // eights * rows + lane % rows, lane // rows * eights + eight % eights
