"""Views of users' tensors with rows first, dense or packed, and stores to their rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import fma, pack


def rows_first(x: cute.Tensor, packed: bool) -> cute.Tensor:
    """View of (batch, rows, heads, d) or packed (rows, heads, d) as (rows, d, heads, batch); batch is 1 if packed."""
    if const_expr(packed):
        layout = cute.select(x.layout, mode=[0, 2, 1])
        layout = cute.make_layout((*layout.shape, 1), stride=(*layout.stride, 0))
    else:
        layout = cute.select(x.layout, mode=[1, 3, 2, 0])
    return cute.make_tensor(x.iterator, layout)


def scores_first(x: cute.Tensor, joins_heads: bool = False) -> cute.Tensor:
    """View of (batch, heads, queries, keys) of 16-bit numbers as (queries, keys, heads, batch), as TMA can read it.

    The caller has seen to it that its address, and all strides but the last, are multiples of 16 bytes. With
    ``joins_heads`` heads of all entries follow each other, as those of a contiguous tensor can, in one entry.
    """
    (batch, heads, queries, keys), (batch_stride, head_stride, row_stride, _) = x.shape, x.stride
    strides = tuple(cute.assume(stride, divby=8) for stride in (row_stride, head_stride, batch_stride))
    if const_expr(joins_heads):
        heads, batch = heads * batch, 1
    layout = cute.make_layout((queries, keys, heads, batch), stride=(strides[0], 1, *strides[1:]))
    return cute.make_tensor(x.iterator.align(16), layout)


def numbers_first(x: cute.Tensor, packed: bool) -> cute.Tensor:
    """View of a tensor with one number a row, (batch, heads, rows) or packed (heads, rows), as (rows, heads, batch)."""
    layout = cute.select(x.layout, mode=[1, 0] if packed else [2, 1, 0])
    if const_expr(packed):
        layout = cute.make_layout((*layout.shape, 1), stride=(*layout.stride, 0))
    return cute.make_tensor(x.iterator, layout)


def scaled(x: Float32, scale: Float32) -> Float32:
    """A number times a scale. No zero is negative: what no score adds to has the bits of memory that is zeroed."""
    return fma(x, scale, Float32(0.0))


def rounded(numbers: list[Float32] | cute.Tensor, scale: Float32, dtype: type) -> cute.Tensor:
    """Eight numbers times a scale as a type has them, in registers of 32 bits: two in each, or, of float32, one."""
    if dtype is Float32:
        found = cute.make_rmem_tensor(8, Float32)
        for i in range(8):
            found[i] = scaled(numbers[i], scale)
        return cute.recast_tensor(found, Int32)
    words = cute.make_rmem_tensor(4, Int32)
    for i in range(4):
        words[i] = pack(scaled(numbers[2 * i], scale), scaled(numbers[2 * i + 1], scale), dtype)
    return words


@cute.jit
def zero_rows(mX: cute.Tensor, first: Int32, num_rows: Int32, thread: Int32, num_threads: Constexpr) -> None:
    """Zeros in rows first .. first + num_rows of mX (rows, d), 16 bytes a thread at a time; none if num_rows < 0."""
    vectors = mX.shape[1] // 8
    zeros = cute.make_rmem_tensor(8, mX.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(thread, num_rows * vectors, num_threads, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(mX, (1, 8), (first + i // vectors, i % vectors))[0, None])


@cute.jit
def store_columns(numbers: cute.Tensor, gX: cute.Tensor, first: Int32 | int, end: Int32) -> None:
    """Stores a thread's float32 numbers to columns of a row from ``first`` on, 16 bytes at a time.

    Their number, ``first`` and ``end`` are multiples of 4. Writing ends before column ``end``: 0 if the row is none.
    """
    for i in cutlass.range_constexpr(0, cute.size(numbers), 4):
        if first + i < end:
            target = cute.local_tile(gX, (4,), ((first + i) // 4,))
            cute.autovec_copy(cute.local_tile(numbers, (4,), (i // 4,)), target)
