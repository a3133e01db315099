"""Views of a warpgroup's accumulator, and its conversion to an operand.

A thread's part of a 64-row accumulator is ((2, 2, n / 8), 1, 1): a pair of neighbouring columns, two rows eight
apart, and the groups of eight columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


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


@dsl_user_op
def pack(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Int32:  # type: ignore[no-untyped-def]
    """Two float32 numbers rounded to a 16-bit type, in one register.

    In assembly, because a conversion that the compiler can see and that is carried around a loop is carried in
    float32 and done late: twice the registers, and spills.
    """
    instruction = "cvt.rn.bf16x2.f32" if dtype is cutlass.BFloat16 else "cvt.rn.f16x2.f32"
    packed = llvm.inline_asm(
        T.i32(),
        [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
        f"{instruction} $0, $1, $2;",
        "=r,f,f",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(packed)


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds float32 registers to a 16-bit type."""
    packed = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(packed)):
        packed[i] = pack(source[2 * i], source[2 * i + 1], target.element_type)


@dsl_user_op
def opaque(x: Int32, *, loc=None, ip=None) -> Int32:  # type: ignore[no-untyped-def]
    """X itself, of which the compiler knows nothing: it has to keep it, as it cannot compute it again."""
    same = llvm.inline_asm(
        T.i32(),
        [x.ir_value(loc=loc, ip=ip)],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(same)
