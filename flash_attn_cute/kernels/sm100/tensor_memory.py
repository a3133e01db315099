"""Tensor memory: 128 lanes of 512 columns of 32 bits, where the tensor cores keep what they sum.

A warp reaches the 32 lanes that its place in its warpgroup says, so that a thread of a warpgroup has one row of a
product. An address is a lane in the upper half of a word and a column in the lower one.

What other threads, or the tensor cores, are to see or to overwrite needs ``before_sync`` ahead of the arrival, and on
their side ``after_sync`` behind the wait.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from flash_attn_cute.kernels.common.assembly import assembly

_AT_ONCE = 32  # columns of an instruction, at most


def row_address(memory: cute.Pointer, thread: Int32) -> Int32:
    """The address of column 0 in the row of a thread of a warpgroup."""
    return memory.toint() + (thread // 32 * 32 << 16)


def load(address: Int32, columns: int) -> list[Float32]:
    """This thread's numbers in some columns, 16 or a multiple of 32, by all of a warp; they are there on return.

    The wait is part of the same assembly: as a statement of its own the compiler would use registers ahead of it.
    """
    step = min(columns, _AT_ONCE)
    text = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {_registers(i, step)}, [${columns} + {i}];\n"
        for i in range(0, columns, step)
    )
    numbers = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * columns)})>")
    constraints = "=f," * columns + "r,~{memory}"
    loaded = assembly(numbers, [Int32(address)], text + "tcgen05.wait::ld.sync.aligned;", constraints, True)
    return [Float32(llvm.extractvalue(T.f32(), loaded, [i])) for i in range(columns)]


def store(address: Int32, numbers: list[Int32 | Float32]) -> None:
    """Numbers into this thread's row of as many columns, a multiple of 16, by all of a warp; there on return."""
    text = ""
    for i in range(0, len(numbers), _AT_ONCE):
        columns = min(len(numbers) - i, _AT_ONCE)
        text += f"tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [$0 + {i}], {_registers(i + 1, columns)};\n"
    kind = "f" if isinstance(numbers[0], Float32) else "r"
    operands = [Int32(address), *numbers]
    constraints = "r," + f"{kind}," * len(numbers) + "~{memory}"
    assembly(None, operands, text + "tcgen05.wait::st.sync.aligned;", constraints, True)


def before_sync() -> None:
    """Orders this thread's accesses to tensor memory before its next arrival."""
    assembly(None, [], "tcgen05.fence::before_thread_sync;", "~{memory}", True)


def after_sync() -> None:
    """Orders this thread's following accesses to tensor memory after what it has waited for."""
    assembly(None, [], "tcgen05.fence::after_thread_sync;", "~{memory}", True)


def _registers(first: int, num: int) -> str:
    return "{" + ", ".join(f"${i}" for i in range(first, first + num)) + "}"
