"""Tensors of users as rows first, whether dense or packed, and zeros into rows of padding."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


def rows_first(x: cute.Tensor, packed: bool) -> cute.Tensor:
    """(batch, rows, heads, d), or packed (rows, heads, d), as (rows, d, heads, batch), a batch of one if packed."""
    if const_expr(packed):
        layout = cute.select(x.layout, mode=[0, 2, 1])
        layout = cute.make_layout((*layout.shape, 1), stride=(*layout.stride, 0))
    else:
        layout = cute.select(x.layout, mode=[1, 3, 2, 0])
    return cute.make_tensor(x.iterator, layout)


def numbers_first(x: cute.Tensor, packed: bool) -> cute.Tensor:
    """One number a row: (batch, heads, rows), or packed (heads, rows), as (rows, heads, batch)."""
    layout = cute.select(x.layout, mode=[1, 0] if packed else [2, 1, 0])
    if const_expr(packed):
        layout = cute.make_layout((*layout.shape, 1), stride=(*layout.stride, 0))
    return cute.make_tensor(x.iterator, layout)


@cute.jit
def zero_rows(mX: cute.Tensor, first: Int32, num_rows: Int32, thread: Int32, num_threads: cutlass.Constexpr) -> None:
    """Zeros in rows first .. first + num_rows of mX (rows, d), 16 bytes a thread at a time; none if num_rows < 0."""
    vectors = mX.shape[1] // 8
    zeros = cute.make_rmem_tensor(8, mX.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(thread, num_rows * vectors, num_threads, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(mX, (1, 8), (first + i // vectors, i % vectors))[0, None])
