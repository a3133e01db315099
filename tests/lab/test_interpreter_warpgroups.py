"""The interpreter of PTX (``lab.interpreter``): products of a warpgroup, and matrices of 8 x 8 in shared memory."""

import random
from typing import NamedTuple

import numpy as np
import pytest

from lab import interpreter
from lab.interpreter.state import SHARED, Array
from lab.interpreter.tma import swizzled

THREADS = 128
PLACE, PLACE_B, SIZE = 1024, 1 << 15, 1 << 16  # in shared memory, of which what is behind the first is loaded
OUT = SIZE + 4 * 4 * THREADS  # in global memory: behind shared memory's and A's registers
HEAD = """.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry kernel(.param .align 8 .b8 kernel_param_0[8])
.reqntid 128, 1, 1
{
.reg .pred %p<8>;
.reg .b32 %r<256>;
.reg .b64 %rd<16>;
mov.u32 %r1, %tid.x;
mov.b32 %r3, __dynamic_shmem__0;
setp.eq.b32 %p1, %r1, %r1;
ld.param.b64 %rd1, [kernel_param_0];
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd2, %rd1, %rd2;
"""
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
LOAD = f"""setp.eq.u32 %p2, %r1, 0;
@%p2 mbarrier.init.shared.b64 [%r3], 1;
bar.sync 0;
@%p2 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], {SIZE - PLACE};
@%p2 {COPY} [%r3+{PLACE}], [%rd1+{PLACE}], {SIZE - PLACE}, [%r3];
mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;
"""
FENCE, COMMIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n"
SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes of an operand's rows: what its descriptor says
KINDS = {"f16": 0, "bf16": 16}  # how far to the right are bits of a float32


def wait(groups: int = 0) -> str:
    return f"wgmma.wait_group.sync.aligned {groups};\n"


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def load_a() -> str:
    """A's registers, %r8 and on."""
    return "".join(f"ld.global.b32 %r{8 + i}, [%rd2+{SIZE + 4 * THREADS * i}];\n" for i in range(4))


def store(columns: int, first: int = 16) -> str:
    """A sum's registers to global memory."""
    return "".join(f"st.global.b32 [%rd2+{OUT + 4 * THREADS * i}], %r{first + i};\n" for i in range(columns // 2))


def product(columns: int, a: str, b: int, more: str, kind: str = "bf16", first: int = 16, scale: str = "%p1") -> str:
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
    return f"mov.b64 %rd6, {b};\n{name} {registers(first, columns // 2)}, {a}, %rd6, {scale}, {more};\n"


class Operand(NamedTuple):
    """Rows of 16 numbers in shared memory."""

    descriptor: int
    places: Array  # (rows, 16), of numbers of 16 bits


def operand(place: int, rows: int, row_bytes: int, *, is_transposed: bool) -> Operand:
    """Rows in atoms of 8, or of 8 columns."""
    row, k, first = np.arange(rows)[:, None], np.arange(16), SHARED + place
    leading, stride = 16 * row_bytes, 8 * row_bytes
    offsets = row * row_bytes + 2 * k
    if is_transposed:
        contiguous = row_bytes // 2
        offsets = row // contiguous * leading + k * row_bytes + row % contiguous * 2
    descriptor = first >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[row_bytes] << 62
    return Operand(descriptor, swizzled(first + offsets, row_bytes))


def bits_of(x: Array, kind: str) -> Array:
    return x.astype(np.float16).view(np.uint16) if kind == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16)


def execute(body: str, memory: Array, seed: int = 0, lagging: interpreter.Lagging | None = None) -> None:
    program = interpreter.Program(HEAD + body + "ret;\n}\n")
    params = [interpreter.address_of(0).to_bytes(8, "little")]
    launch = interpreter.Launch(params, (1, 1, 1), (THREADS, 1, 1), shared=SIZE)
    interpreter.run(program, launch, memory, random.Random(seed), lagging)


def global_memory() -> Array:
    return np.full(OUT + 64 * 256 * 4, 0xFF, np.uint8)


def found(memory: Array, columns: int) -> Array:
    """What threads have stored of a sum, (64, columns)."""
    values = memory[OUT:].view(np.float32)[: 64 * columns].reshape(columns // 2, THREADS)
    x = np.empty((64, columns), np.float32)
    for i in range(columns // 2):
        for thread in range(THREADS):
            row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
            x[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = values[i, thread]
    return x


def put_in_registers(memory: Array, a: Array) -> None:
    """Puts A where its registers are loaded from."""
    words = memory[SIZE:OUT].view(np.uint16).reshape(4, THREADS, 2)
    for i in range(4):
        for thread in range(THREADS):
            row, k = thread // 32 * 16 + thread % 32 // 4 + i % 2 * 8, thread % 4 * 2 + i // 2 * 8
            words[i, thread] = a[row, k : k + 2]


@pytest.mark.parametrize("columns", [32, 80, 256])
@pytest.mark.parametrize(("row_bytes_a", "row_bytes_b"), [(128, 64), (32, 128), (64, 32)])
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_products_from_shared_memory(columns: int, row_bytes_a: int, row_bytes_b: int, transposed: str) -> None:
    numbers, kind = np.random.default_rng(0), "f16" if transposed else "bf16"
    a, b = (numbers.integers(-4, 5, (n, 16)).astype(np.float32) for n in (64, columns))
    left = operand(PLACE, 64, row_bytes_a, is_transposed="a" in transposed)
    right = operand(PLACE_B, columns, row_bytes_b, is_transposed="b" in transposed)
    memory = global_memory()
    for x, each in ((a, left), (b, right)):
        memory[:SIZE].view(np.uint16)[each.places] = bits_of(x, kind)
    more = f"1, 1, {int('a' in transposed)}, {int('b' in transposed)}"
    begun, added = (
        product(columns, f"{left.descriptor}", right.descriptor, more, kind, scale=scale) for scale in ("0", "1")
    )
    execute(LOAD + FENCE + begun + added + COMMIT + wait() + store(columns), memory)
    assert np.array_equal(found(memory, columns), 2 * a @ b.T)


@pytest.mark.parametrize(("signs", "factor"), [("1, 1", 1), ("-1, 1", -1), ("1, -1", -1), ("-1, -1", 1)])
def test_products_from_registers(signs: str, factor: int) -> None:
    numbers = np.random.default_rng(0)
    a, b = (numbers.integers(-4, 5, (n, 16)).astype(np.float32) for n in (64, 64))
    right, memory = operand(PLACE_B, 64, 128, is_transposed=False), global_memory()
    memory[:SIZE].view(np.uint16)[right.places] = bits_of(b, "bf16")
    put_in_registers(memory, bits_of(a, "bf16"))
    issued = product(64, registers(8, 4), right.descriptor, f"{signs}, 0", scale="0")
    execute(LOAD + load_a() + FENCE + issued + COMMIT + wait() + store(64), memory)
    assert np.array_equal(found(memory, 64), factor * a @ b.T)
