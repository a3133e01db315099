"""Views of a warpgroup's accumulator, and its conversion to an operand.

A thread's part of a 64-row accumulator is ((2, 2, n / 8), 1, 1): a pair of neighbouring columns, two rows eight
apart, and the groups of eight columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.assembly import pack


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (rows, columns) of this thread."""
    (pair, row, group), m, n = acc.layout.shape
    (pair_stride, row_stride, group_stride), m_stride, n_stride = acc.layout.stride
    layout = cute.make_layout(
        ((row, m), (pair, group, n)), stride=((row_stride, m_stride), (pair_stride, group_stride, n_stride))
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """Registers laid out as an accumulator, seen as the A operand of the next product: no data moves."""
    (pair, row, group), m, n = acc.layout.shape
    (pair_stride, row_stride, group_stride), m_stride, n_stride = acc.layout.stride
    layout = cute.make_layout(
        ((pair, row, 2), m, (group // 2, n)),
        stride=((pair_stride, row_stride, group_stride), m_stride, (group_stride * 2, n_stride)),
    )
    return cute.make_tensor(acc.iterator, layout)


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds float32 registers to a 16-bit type."""
    packed = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(packed)):
        packed[i] = pack(source[2 * i], source[2 * i + 1], target.element_type)
