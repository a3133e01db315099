"""The interpreter of PTX (``lab.interpreter``): products of a warpgroup, and matrices of 8 x 8 in shared memory."""

import itertools
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
    """A sum as threads have stored it, (64, columns)."""
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


ZERO = operand(PLACE_B, 64, 128, is_transposed=False).descriptor
ISSUED = product(64, registers(8, 4), ZERO, "1, 1, 0", scale="0")
OTHER = product(64, registers(8, 4), ZERO, "1, 1, 0", scale="0", first=64)
READ, WRITE, WRITE_A = "mov.b32 %r200, %r20;\n", "mov.b32 %r20, 0;\n", "mov.b32 %r8, 0;\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (FENCE + ISSUED + COMMIT + READ + wait(), "%r20"),
        (FENCE + ISSUED + READ + COMMIT + wait(), "%r20"),
        (FENCE + ISSUED + COMMIT + wait(1) + READ, "%r20"),  # which waits for none
        (FENCE + ISSUED + wait() + READ, "%r20"),  # a wait for groups alone
        (FENCE + ISSUED + COMMIT + OTHER + COMMIT + wait(1) + "mov.b32 %r200, %r70;\n", "%r70"),
        (FENCE + ISSUED + COMMIT + WRITE + wait(), "written while a product adds to it"),
        (FENCE + ISSUED + COMMIT + WRITE_A + wait(), "written while a product reads it"),
        (ISSUED + COMMIT + wait(), "behind the last wgmma.fence"),
        (FENCE + WRITE_A + ISSUED + COMMIT + wait(), "%r8.* is written behind the last wgmma.fence"),
        (FENCE + ISSUED + COMMIT + wait() + ISSUED + COMMIT + wait(), "behind the last wgmma.fence"),
        (FENCE + ISSUED + product(32, registers(8, 4), ZERO, "1, 1, 0"), "accumulators of another product"),
        ("setp.lt.u32 %p2, %r1, 32;\n@%p2 bra END;\n" + FENCE + ISSUED + COMMIT + wait() + "END:\n", "a part of"),
        (
            "setp.lt.u32 %p2, %r1, 32;\nselp.b64 %rd8, 1, 0, %p2;\n" + FENCE + ISSUED.replace(", %rd6", ", %rd8"),
            "layout",
        ),
        (FENCE + ISSUED + COMMIT, "while copies are under way"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_faults_of_products(body: str, message: str, seed: int) -> None:
    with pytest.raises(interpreter.FaultError, match=message):
        execute(load_a() + body, global_memory(), seed)


def test_products_that_are_waited_for() -> None:
    """Groups in flight, a sum that several of them add to, and registers that are written once they may be."""
    once = FENCE + ISSUED + COMMIT + OTHER + COMMIT + wait(1) + READ + WRITE + wait()
    execute(load_a() + once + FENCE + ISSUED + COMMIT + ISSUED + COMMIT + wait() + READ + WRITE_A, global_memory())


def test_shared_memory_is_read_late() -> None:
    """Writes behind the issue may be read; those ahead of it without a proxy fence may be not."""
    ones = "mov.b32 %r201, 1065369472;\n" + "".join(
        f"add.u32 %r202, %r204, {512 * i};\nst.shared.b32 [%r202+{PLACE_B}], %r201;\n" for i in range(16)
    )
    address = "shl.b32 %r204, %r1, 2;\nadd.s32 %r204, %r204, %r3;\n"
    fence, meet = "fence.proxy.async.shared::cta;\n", "bar.sync 0;\n"
    issued = FENCE + ISSUED + COMMIT
    put = np.ones((64, 16), np.float32)

    def sums(body: str, seed: int) -> Array:
        memory = global_memory()
        put_in_registers(memory, bits_of(put, "bf16"))
        execute(load_a() + address + body + wait() + store(64), memory, seed)
        return found(memory, 64)

    ahead, unfenced, behind, unmet = (
        [(sums(body, seed) == 16).all() for seed in range(8)]
        for body in (ones + fence + meet + issued, ones + meet + issued, issued + ones + fence, ones + fence + issued)
    )
    assert all(ahead)
    for some in (unfenced, behind, unmet):
        assert not all(some)


def test_matrices() -> None:
    """Loads of what has been stored, in both orders of rows and columns."""
    numbers = np.random.default_rng(0).integers(0, 1 << 16, (64, 16), np.uint16)
    rows = "and.b32 %r204, %r1, 31;\nshr.u32 %r205, %r1, 5;\nshl.b32 %r205, %r205, 9;\nshl.b32 %r204, %r204, 4;\n"
    rows += f"add.s32 %r204, %r204, %r205;\nadd.s32 %r204, %r204, %r3;\nadd.s32 %r204, %r204, {PLACE};\n"
    for stored, loaded in itertools.product(("", ".trans"), repeat=2):
        body = f"stmatrix.sync.aligned.m8n8.x4{stored}.shared.b16 [%r204], {registers(8, 4)};\n"
        body += f"ldmatrix.sync.aligned.m8n8.x4{loaded}.shared.b16 {registers(16, 4)}, [%r204];\n"
        memory = global_memory()
        put_in_registers(memory, numbers)
        execute(load_a() + rows + body + store(8), memory)
        words = memory[OUT:].view(np.uint16)[: 4 * THREADS * 2].reshape(4, 4, 8, 4, 2)  # (matrix, warp, row, ...)
        given = memory[SIZE:OUT].view(np.uint16).reshape(4, 4, 8, 8)
        expected = given if stored == loaded else given.swapaxes(2, 3)
        assert np.array_equal(words.reshape(4, 4, 8, 8), expected)


def test_lines() -> None:
    """Each thread copies 16 bytes and arrives; another one may read them behind the mbarrier."""
    numbers = np.random.default_rng(0).integers(0, 256, 16 * THREADS, np.uint8)
    init = f"setp.eq.u32 %p2, %r1, 0;\n@%p2 mbarrier.init.shared.b64 [%r3], {THREADS};\nbar.sync 0;\n"
    places = "mul.wide.u32 %rd7, %r1, 16;\nadd.s64 %rd7, %rd7, %rd1;\nshl.b32 %r204, %r1, 4;\n"
    copied = f"add.s32 %r204, %r204, %r3;\ncp.async.cg.shared.global [%r204+{PLACE}], [%rd7+{PLACE}], 16;\n"
    arrives = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];\n"
    waits = "mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;\n"
    read = f"shl.b32 %r205, %r1, 2;\nadd.s32 %r205, %r205, %r3;\nld.shared.b32 %r16, [%r205+{PLACE}];\n"

    def is_right(body: str, seed: int) -> bool:
        memory = global_memory()
        memory[PLACE : PLACE + len(numbers)] = numbers
        execute(init + places + copied + body + read + store(2), memory, seed)
        return np.array_equal(memory[OUT : OUT + 4 * THREADS], numbers[: 4 * THREADS])

    assert all(is_right(arrives + waits, seed) for seed in range(8))
    with pytest.raises((interpreter.FaultError, AssertionError)):
        assert all(is_right(arrives, seed) for seed in range(8))
    with pytest.raises(interpreter.FaultError, match="deadlock"):
        is_right("setp.gt.u32 %p4, %r1, 0;\n@%p4 " + arrives + waits, 0)
