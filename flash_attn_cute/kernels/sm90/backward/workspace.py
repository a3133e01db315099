"""How the float32 sums of gradients lie in the workspace (``common.workspace``), and the numbers of every query.

A block of dQ is in parts, one for every mma warpgroup that computes some of it: first along its rows, 64 a part, then
along its columns. Within a part numbers lie as the warpgroup's accumulator holds them, four a thread in turn. So a warp
adds 512 bytes at a time, or writes them into shared memory, from where TMA adds the part as it is. The numbers of a
block's queries are permuted, so that a thread finds those of the queries that are its columns four at a time. Where the
rows of a block are no multiple of 64, parts are of its transpose: 64 columns each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import add_four


def permuted(row: Int32) -> Int32:
    """Where the numbers of a block's row are: those of the threads' pairs of columns in two groups of eight in turn."""
    return row // 16 * 16 + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2


def load_four(stats: cute.Tensor, quad: Int32, i: int) -> cute.Tensor:
    """Loads lse or delta of a thread's four queries in the i-th group of sixteen; ``quad`` is its lane modulo 4."""
    four = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(cute.local_tile(stats, (4,), (4 * i + quad,)), four)
    return four


@cute.jit
def add(acc: cute.Tensor, part: cute.Tensor, thread: Int32, is_first: Boolean | None) -> None:
    """Adds a warpgroup's accumulator to its part of a block in the workspace.

    ``is_first``: no tile has added to the part before, so what is there is overwritten. None: that is not known, and
    the workspace was zero to begin with.
    """
    if const_expr(is_first is None):
        _add(acc, part, thread)
    elif is_first:
        put(acc, part, thread)
    else:
        _add(acc, part, thread)


def put(acc: cute.Tensor, part: cute.Tensor, thread: Int32) -> None:
    """Writes a warpgroup's accumulator to a part of the workspace, or of shared memory that will be copied there."""
    fours, target = _fours(acc, part)
    for i in range(cute.size(fours, mode=[1])):
        cute.autovec_copy(fours[None, i], target[None, thread, i])


def _add(acc: cute.Tensor, part: cute.Tensor, thread: Int32) -> None:
    fours, target = _fours(acc, part)
    for i in range(cute.size(fours, mode=[1])):
        add_four(target[None, thread, i].iterator.toint(), *(fours[j, i] for j in range(4)))


def take(acc: cute.Tensor, part: cute.Tensor, thread: Int32) -> None:
    """Adds a part of the workspace to a warpgroup's accumulator."""
    fours, source = _fours(acc, part)
    numbers = cute.make_rmem_tensor_like(fours)
    for i in range(cute.size(fours, mode=[1])):
        cute.autovec_copy(source[None, thread, i], numbers[None, i])
    for i in range(cute.size(fours)):
        fours[i] = fours[i] + numbers[i]


def _fours(acc: cute.Tensor, part: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Four numbers at a time: of an accumulator, and where they belong, (number, thread, four)."""
    n = cute.size(acc) // 4
    target = cute.make_tensor(part.iterator, cute.make_layout((4, 128, n), stride=(1, 4, 512)))
    return cute.make_tensor(acc.iterator, cute.make_layout((4, n))), target


@cute.jit
def read_rows(part: cute.Tensor, row: Int32, group: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """Eight columns from 8 * group on of rows ``row`` and ``row`` + 8 of a part; bit 3 of row is 0.

    The four threads that hold them have them side by side: 16 numbers, a pair of the one row and a pair of the other
    in turn.
    """
    warp, within = row // 16, row % 16
    source = cute.make_tensor(part.iterator, cute.make_layout((16, 32, cute.size(part) // 512), stride=(1, 16, 512)))
    numbers = cute.make_rmem_tensor(16, Float32)
    cute.autovec_copy(source[None, warp * 8 + within, group], numbers)
    pairs = cute.make_tensor(numbers.iterator, cute.make_layout((2, 4, 2), stride=(1, 4, 2)))
    return pairs[None, None, 0], pairs[None, None, 1]


@cute.jit
def read_columns(part: cute.Tensor, column: Int32, vector: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """Rows 8 * vector .. 8 * vector + 8 of columns ``column``, which is even, and the next one of a part.

    Eight threads hold them, a pair each: of two vectors in turn.
    """
    warp, half = vector // 2, vector % 2
    first = column // 8 * 512 + warp * 128 + column % 8 // 2 * 4 + half * 2
    numbers = cute.make_rmem_tensor((2, 8), Float32)
    for i in cutlass.range_constexpr(8):
        cute.autovec_copy(cute.local_tile(part, (2,), (first // 2 + 8 * i,)), numbers[None, i])
    return numbers[0, None], numbers[1, None]
