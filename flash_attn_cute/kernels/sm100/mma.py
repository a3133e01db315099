"""Products of Blackwell's tensor cores (UMMA), which one thread issues for the CTA, and how their operands lie."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from flash_attn_cute.kernels.common.assembly import opaque
from flash_attn_cute.kernels.sm100.config import PART_ROWS

_BOTH = 0b11  # CTAs of a pair
_STEP = 16  # of what is summed over, that an instruction takes
_AT_ONCE = 4  # steps whose products are issued one after the other, or 2 of other than a multiple of 4


def tiled_mma(
    dtype: type,
    major_b: OperandMajorMode,
    columns: int,
    source_a: tcgen05.OperandSource,
    *,
    ctas: int = 1,
    major_a: OperandMajorMode = OperandMajorMode.K,
    rows: int = 0,
) -> cute.TiledMma:
    """Products of some rows, by default 128 a CTA, summed in float32 in tensor memory, by a CTA or a pair of them.

    Of a pair each CTA has half of the rows of A and of the sum, and half of B's columns in its shared memory.
    """
    shape, group = (rows or ctas * PART_ROWS, columns), tcgen05.CtaGroup(ctas)
    return sm100.make_trivial_tiled_mma(dtype, dtype, major_a, major_b, Float32, group, shape, source_a)


def swizzled(dtype: type, columns: int, shape: tuple[int, ...]) -> cute.ComposedLayout:
    """(rows, columns, ...) in shared memory, for TMA, and as A or as B of products.

    Of a row 64 columns are contiguous, or 32 if ``columns``, all of them or a part, are not a multiple of 64.
    """
    kinds = tcgen05.SmemLayoutAtomKind
    atom = tcgen05.make_smem_layout_atom(kinds.K_SW64 if columns % 64 else kinds.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, tuple(range(len(shape))))


def transposed(x: cute.Tensor) -> cute.Tensor:
    """The tile with its first two modes exchanged."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, *range(2, cute.rank(x))]))


def operand(x: cute.Tensor) -> cute.Tensor:
    """A CTA's part of an operand in shared memory, by instructions: (MMA, 1, MMA_K, ...)."""
    return cute.tiled_divide(x, (cute.size(x, mode=[0]), _STEP))


def in_tensor_memory(mma: cute.TiledMma, place: cute.Pointer, columns: int) -> cute.Tensor:
    """A product's left operand in tensor memory, from an address on, of so many columns of 16 bits: (MMA, 1, MMA_K)."""
    layout = mma.make_fragment_A(mma.partition_shape_A((mma.op.shape_mnk[0], columns))).layout
    return cute.make_tensor(cute.recast_ptr(place, dtype=mma.op.a_dtype), layout)


@cute.jit
def write_row(numbers: cute.Tensor, sX: cute.Tensor, row: Int32, column: Int32 | int) -> None:
    """Numbers of 16 bits into a row of a swizzled tile of 64 or 32 columns, which begins at a multiple of 1024 bytes.

    Of a row of 128 bytes the swizzle exchanges vectors of 16, by an exclusive or with the row's last three bits, of one
    of 64 bytes with the two bits ahead of the last. The compiler, which does not know that, would keep an address for
    each vector, and does so if it can compute them ahead of time.
    """
    if const_expr(cute.size(sX, mode=[1]) == 32):
        first = opaque(row * 64 + row // 2 % 4 * 16)
    else:
        first = opaque(row * 128 + row % 8 * 16)
    for i in cutlass.range_constexpr(cute.size(numbers) // 8):
        cute.autovec_copy(cute.local_tile(numbers, (8,), (i,)), _vector(sX, first, column // 8 + i))


@cute.jit
def read_row(numbers: cute.Tensor, sX: cute.Tensor, row: Int32, column: Int32 | int) -> None:
    """Reads numbers of a row from a tile of 64 columns in shared memory into registers."""
    first = opaque(row * 128 + row % 8 * 16)
    for i in cutlass.range_constexpr(cute.size(numbers) // 8):
        cute.autovec_copy(_vector(sX, first, column // 8 + i), cute.local_tile(numbers, (8,), (i,)))


def _vector(sX: cute.Tensor, first: Int32, number: Int32 | int) -> cute.Tensor:
    """One of eight numbers of a row, whose vector 0 is at so many bytes from the tile's beginning."""
    address = sX.iterator.toint() + (first ^ (16 * number))
    place = cute.make_ptr(sX.element_type, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(place, cute.make_layout(8))


@cute.jit
def gemm(
    mma: cute.TiledMma,
    place: cute.Pointer,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulates: Boolean,
    steps: Constexpr = None,
) -> None:
    """Begins a product, or adds it to the sum at a place in tensor memory, by one converged warp; in flight on return.

    Products of a CTA are done one after the other, in the order in which its warp issues them. a and b are
    (MMA, 1, steps), of 16 of the columns that are summed over. ``steps`` are the first of them and the end, an even
    number of them; None: all.
    """
    acc = cute.make_tensor(place, mma.make_fragment_C(mma.partition_shape_C(mma.op.shape_mnk[:2])).layout)
    first_step, end = (0, cute.size(a, mode=[2])) if const_expr(steps is None) else steps
    at_once = _AT_ONCE if const_expr((end - first_step) % _AT_ONCE == 0) else 2
    # A loop at run time: unrolled, the compiler keeps the descriptors of all steps' operands in registers.
    for first in cutlass.range(first_step, end, at_once, unroll=1):
        for i in cutlass.range_constexpr(at_once):
            atom = cute.make_mma_atom(mma.op)
            atom.set(tcgen05.Field.ACCUMULATE, True if const_expr(i > 0) else accumulates or first > first_step)
            cute.gemm(atom, acc, a[None, None, first + i], b[None, None, first + i], acc)


@cute.jit
def commit(barrier: cute.Pointer) -> None:
    """Arrives once all products that this warp has issued are done, by one converged warp."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@cute.jit
def commit_to_both(barrier: cute.Pointer) -> None:
    """Makes the pair's products issued so far arrive at this barrier of both CTAs, when they are done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier, _BOTH, tcgen05.CtaGroup.TWO)
