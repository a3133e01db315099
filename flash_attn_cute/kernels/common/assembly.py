"""Instructions that the DSL has no word for, or that the compiler is not to see through; and the sums of a warp."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import Pointer
from cutlass.cutlass_dsl import T

_REGISTERS = 64 * 1024  # of an SM


def set_registers(count: int, threads: int) -> None:
    """Sets how many registers, a multiple of 8, each thread of a warpgroup has from here on, by all of its warps.

    ``threads`` are those of all CTAs that an SM is to have at a time (``min_blocks_per_mp``). The assembler shares out
    all registers of an SM to them. The direction is that from this count at launch: ``setmaxnreg.inc`` waits for
    registers and never gives any back, so with a lower count its warps would keep what they have, and others would wait
    for ever.
    """
    at_launch = _REGISTERS // threads // 8 * 8
    change = cute.arch.setmaxregister_decrease if count < at_launch else cute.arch.setmaxregister_increase
    change(count)


def assembly(result: Any, operands: list[Any], text: str, constraints: str, has_side_effects: bool) -> Any:
    """Issues PTX. With side effects the compiler neither drops nor merges it, and keeps its order among such."""
    return llvm.inline_asm(
        result,
        [operand.ir_value() for operand in operands],
        text,
        constraints,
        has_side_effects=has_side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def pack(low: Float32, high: Float32, dtype: type) -> Int32:
    """Two float32 numbers rounded to a 16-bit type, in one register.

    A conversion that the compiler can see and that is carried around a loop is carried in float32 and done late: twice
    the registers, and spills.
    """
    instruction = "cvt.rn.bf16x2.f32" if dtype is BFloat16 else "cvt.rn.f16x2.f32"
    operands = [Float32(high), Float32(low)]
    return Int32(assembly(T.i32(), operands, f"{instruction} $0, $1, $2;", "=r,f,f", False))


def unpack(pair: Int32, which: int, dtype: type) -> Float32:
    """The lower or the upper (0 or 1) of two numbers of a 16-bit type in one register, in float32.

    One instruction, where the compiler takes two for an upper one in bfloat16.
    """
    if dtype is BFloat16:
        text = ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;")[which]
    else:
        half = ("low", "high")[which]
        text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {half}; }}"
    return Float32(assembly(T.f32(), [pair], text, "=f,r", False))


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """Fused multiply-add a * b + c, rounded once whatever the compiler makes of the code around it."""
    a, b, c = (x.ir_value() for x in (Float32(a), Float32(b), Float32(c)))
    return Float32(llvm.intr_fma(a, b, c))


def opaque(x: Int32) -> Int32:
    """The number itself, hidden from the compiler: it has to be kept in a register, because it cannot be recomputed."""
    return Int32(assembly(T.i32(), [x], "mov.b32 $0, $1;", "=r,r", True))


def copied(x: Float32) -> Float32:
    """The number in another register, from here on: the compiler would copy it where the copy is used."""
    return Float32(assembly(T.f32(), [x], "mov.b32 $0, $1;", "=f,f", True))


def bit_mask(start: Int32, count: Int32) -> Int32:
    """Word with bits start .. start + count set, clipped to 32 bits. Neither argument is negative."""
    operands = [Int32(start), Int32(count)]
    return Int32(assembly(T.i32(), operands, "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", False))


def shifted_right(low: Int32, high: Int32, count: Int32) -> Int32:
    """Lower word of the 64-bit number (high, low) shifted right by ``count`` bits, fewer than 32."""
    operands = [Int32(x) for x in (low, high, count)]
    return Int32(assembly(T.i32(), operands, "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", False))


def as_bits(x: Float32) -> Int32:
    return Int32(assembly(T.i32(), [x], "mov.b32 $0, $1;", "=r,f", False))


def as_float(x: Int32) -> Float32:
    return Float32(assembly(T.f32(), [x], "mov.b32 $0, $1;", "=f,r", False))


def largest_magnitude(a: Float32, b: Float32) -> Float32:
    """The larger one of a and the magnitude of b, in one instruction; NaN counts as nothing."""
    text = "{ .reg .f32 m; abs.f32 m, $2; max.f32 $0, $1, m; }"
    return Float32(assembly(T.f32(), [a, b], text, "=f,f,f", False))


def to_integer(x: Float32) -> Int32:
    """The nearest integer, the lowest or highest one of 32 bits if it is beyond these, 0 for NaN."""
    return Int32(assembly(T.i32(), [x], "cvt.rni.s32.f32 $0, $1;", "=r,f", False))


def sleep(nanoseconds: int) -> None:
    """Suspends the warp for about ``nanoseconds``, so that other warps run."""
    assembly(None, [], f"nanosleep.u32 {nanoseconds};", "~{memory}", True)


def add_four(address: Int64, a: Float32, b: Float32, c: Float32, d: Float32) -> None:
    """Adds to four numbers in global memory, each addition by itself atomic."""
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    assembly(None, [address, a, b, c, d], text, "l,f,f,f,f", True)


def replace_by_extremum(operation: str, address: Int64, x: Int32) -> None:
    """Makes an integer in global memory its "max.s32" or "min.u32" with another one, atomically."""
    assembly(None, [address, x], f"red.relaxed.gpu.global.{operation} [$0], $1;", "l,r", True)


def add_from_shared(address: Int64, source: Pointer, num_bytes: int) -> None:
    """Adds float32 numbers in shared memory to those in global memory, each by itself atomic, by one thread."""
    _bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", address, source, num_bytes)


def add_integers_from_shared(address: Int64, source: Pointer, num_bytes: int) -> None:
    """Adds int32 numbers in shared memory to those in global memory, each by itself atomic, by one thread."""
    _bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32", address, source, num_bytes)


def store_from_shared(address: Int64, source: Pointer, num_bytes: int) -> None:
    """Stores shared memory in global memory, by one thread."""
    _bulk("cp.async.bulk.global.shared::cta.bulk_group", address, source, num_bytes)


def _bulk(instruction: str, address: Int64, source: Pointer, num_bytes: int) -> None:
    """Issues a bulk copy, which is in flight on return and belongs to the thread's next bulk group."""
    operands = [address, Int32(source.toint()), Int32(num_bytes)]
    assembly(None, operands, f"{instruction} [$0], [$1], $2;", "l,r,r,~{memory}", True)


def copy_vector(target: Int32, source: Int64) -> None:
    """Copies 16 bytes of global memory to an address in shared memory, past the registers; in flight on return."""
    assembly(None, [target, source], "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", True)


def copy_to_cta(rank: Int32, target: Pointer, source: Pointer, num_bytes: Int32 | int, mbarrier: Pointer) -> None:
    """Copies shared memory to another CTA of the cluster, by one thread; the bytes arrive on that CTA's barrier.

    ``target`` and ``mbarrier`` are addresses in the own shared memory: the copy goes to the places that correspond to
    them in the CTA of rank ``rank``.
    """
    text = """{
        .reg .b32 there, barrier;
        mapa.shared::cluster.u32 there, $0, $4;
        mapa.shared::cluster.u32 barrier, $3, $4;
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [$1], $2, [barrier];
    }"""
    pointers = [Int32(x.toint()) for x in (target, source, mbarrier)]
    operands = [pointers[0], pointers[1], Int32(num_bytes), pointers[2], Int32(rank)]
    assembly(None, operands, text, "r,r,r,r,r,~{memory}", True)


@cute.jit
def sum_up_to_lane(x: Int32) -> Int32:
    """Sum of the numbers of a warp's lanes up to this one."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync(x, lane - (1 << i))
        x += before if lane >= 1 << i else Int32(0)
    return x
