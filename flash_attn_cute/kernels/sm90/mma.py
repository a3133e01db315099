"""Products on Hopper's tensor cores (WGMMA), and views of their accumulators.

A thread's part of a 64-row accumulator is ((2, 2, n / 8), 1, 1): a pair of neighbouring columns, two rows eight
apart, and the groups of eight columns.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flash_attn_cute.kernels.common.assembly import pack
from flash_attn_cute.kernels.common.residuals import GROUP, residual_word


def tiled_mma(dtype: type, columns: int, mn_major: str = "", a_in_registers: bool = False) -> cute.TiledMma:
    """Products of 64 rows by one warpgroup, summed in float32.

    ``mn_major`` names the operands, "a", "b" or both, that are MN-major; others are K-major.
    """
    majors = (OperandMajorMode.MN if x in mn_major else OperandMajorMode.K for x in "ab")
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    return sm90.make_trivial_tiled_mma(dtype, dtype, *majors, Float32, (1, 1, 1), (64, columns), source)


@cute.jit
def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    is_first: Constexpr,
    is_last: Constexpr = True,
    part: Constexpr = (0, 1),
) -> None:
    """Adds a product to acc, or begins it. In flight on return: a group of its own, or up to the last one.

    ``part``: (i, n) takes the i-th of n equal parts of the summed dimension.
    """
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not is_first)
    warpgroup.fence()
    nth, parts = part
    size = cute.size(a, mode=[2]) // parts
    for k in cutlass.range_constexpr(nth * size, (nth + 1) * size):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        if const_expr(k == 0 and is_first):
            atom.set(warpgroup.Field.ACCUMULATE, True)
    if const_expr(is_last):
        warpgroup.commit_group()


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (rows, columns) of this thread."""
    (pair, row, group), m, n = acc.layout.shape
    (pair_stride, row_stride, group_stride), m_stride, n_stride = acc.layout.stride
    layout = cute.make_layout(
        ((row, m), (pair, group, n)), stride=((row_stride, m_stride), (pair_stride, group_stride, n_stride))
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator registers viewed as the A operand of the next product; no data moves."""
    (pair, row, group), m, n = acc.layout.shape
    (pair_stride, row_stride, group_stride), m_stride, n_stride = acc.layout.stride
    layout = cute.make_layout(
        ((pair, row, 2), m, (group // 2, n)),
        stride=((pair_stride, row_stride, group_stride), m_stride, (group_stride * 2, n_stride)),
    )
    return cute.make_tensor(acc.iterator, layout)


@cute.jit
def store_row(rX: cute.Tensor, r: Constexpr, gX: cute.Tensor, thread: Int32, first_column: Constexpr = 0) -> None:
    """Stores this thread's part of the r-th (0 or 1) of its accumulator rows, in pairs of columns.

    ``rX`` is in the dtype of ``gX``, the row's place in global memory, (columns,); columns behind it are left out.
    ``first_column`` is the accumulator's within the row.
    """
    own = rows_and_columns(rX)
    for c in cutlass.range_constexpr(0, cute.size(own, mode=[1]), 2):
        column = first_column + 4 * c + 2 * (thread % 4)
        if column < gX.shape[0]:
            cute.autovec_copy(cute.local_tile(own[r, None], (2,), (c // 2,)), cute.local_tile(gX, (2,), (column // 2,)))


@cute.jit
def store_rows(
    rX: cute.Tensor, gX: cute.Tensor, first: Int32, stop: Int32, thread: Int32, first_column: Constexpr = 0
) -> None:
    """Stores all rows of this thread to gX.

    The accumulator's row 0 goes to row ``first`` of gX; rows from ``stop`` on are dropped.
    """
    for r in cutlass.range_constexpr(2):
        row = first + thread // 32 * 16 + thread % 32 // 4 + 8 * r
        if row < stop:
            store_row(rX, r, gX[row, None], thread, first_column)


@cute.jit
def store_residuals(acc: cute.Tensor, r: Constexpr, gR: cute.Tensor, thread: Int32, dtype: type) -> None:
    """Stores what this thread's part of the r-th (0 or 1) of its accumulator rows will lose by rounding to ``dtype``.

    ``gR`` is the row's place among residuals, (columns,), a multiple of 32; columns behind it are left out.
    """
    own, bytes_of_group = rows_and_columns(acc), GROUP // 4
    words = cute.make_rmem_tensor(bytes_of_group // 4, Int32)
    for c in cutlass.range_constexpr(0, cute.size(own, mode=[1]), bytes_of_group):
        if 4 * c < gR.shape[0]:
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = residual_word([own[r, c + 4 * i + j] for j in range(4)], dtype)
            target = cute.local_tile(gR, (bytes_of_group,), (c // 2 + thread % 4,))
            cute.autovec_copy(words, cute.recast_tensor(target, Int32))


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds float32 registers to a 16-bit type."""
    packed = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(packed)):
        packed[i] = pack(source[2 * i], source[2 * i + 1], target.element_type)
