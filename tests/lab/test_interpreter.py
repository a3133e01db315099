"""The interpreter of PTX (``lab.interpreter``): deadlocks and faults of small kernels, a CTA of two warps."""

import random

import numpy as np
import pytest
import torch

from lab import interpreter
from lab.interpreter.host import Memory
from lab.interpreter.state import Array
from lab.interpreter.tma import TensorMap

HEAD = """.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry kernel(.param .align 8 .b8 kernel_param_0[8])
.reqntid 64, 1, 1
.maxnreg 128
{
.reg .pred %p<4>;
.reg .b16 %rs<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<4>;
mov.u32 %r1, %tid.x;
mov.b32 %r3, __dynamic_shmem__0;
setp.ge.u32 %p1, %r1, 32;
@%p1 bra SECOND;
"""


def run(first: str, second: str, seed: int, memory: Array | None = None) -> None:
    """Two warps, each with code of its own; ``memory``: global memory, bytes."""
    memory = np.zeros(1024, np.uint8) if memory is None else memory
    program = interpreter.Program(f"{HEAD}{first}\nret;\nSECOND:\n{second}\nret;\n}}\n")
    launch = interpreter.Launch([interpreter.address_of(0).to_bytes(8, "little")], (1, 1, 1), (64, 1, 1))
    interpreter.run(program, launch, memory, random.Random(seed))


def registers(direction: str, count: int) -> str:
    return f"setmaxnreg.{direction}.sync.aligned.u32 {count};"


ELECT = "elect.sync %r4|%p2, -1;\n@%p2 mbarrier.init.shared.b64 [%r3], 3;\n"
EXPECT = "@%p2 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], 600000;\n"


def test_bytes_that_an_mbarrier_counts() -> None:
    """A phase counts fewer than 2^20 bytes."""
    run(ELECT + EXPECT, "", 0)
    with pytest.raises(interpreter.FaultError, match="that 1200000 bytes are to come to"):
        run(ELECT + 2 * EXPECT, "", 0)


def test_what_is_written_between_tensors() -> None:
    """Tensors come back with what is in memory; a byte that belongs to none of them is a fault."""
    given = {"one": torch.zeros(3), "other": torch.zeros(2)}
    memory = Memory(given)
    memory.bytes[memory.tensors[0]] = np.array([1, 2, 3], np.float32).view(np.uint8)
    memory.read()
    assert given["one"].tolist() == [1.0, 2.0, 3.0]
    memory.bytes[memory.tensors[0].stop] = 0
    with pytest.raises(interpreter.FaultError, match="1 bytes are written that belong to no tensor"):
        memory.read()


def test_boxes_begin_at_multiples_of_16_bytes() -> None:
    """TMA takes no other coordinate of the innermost dimension, and any of the others."""
    tensor = TensorMap(address=0, sizes=(128, 100), strides=(2, 256), box=(64, 8), swizzle=128)
    addresses, inside = tensor.elements([8, 3])
    assert addresses[0, 0] == 3 * 256 + 16
    assert inside.all()
    for column in (3, 4, -1):
        with pytest.raises(interpreter.FaultError, match=f"a box from column {column}"):
            tensor.elements([column, 3])


def test_halves_that_a_move_joins() -> None:
    """Two registers of 16 bits become one of 32, and two of 32 bits one of 64, the first one's bits as the lower."""
    words = np.random.default_rng(0).integers(1 << 32, size=256, dtype=np.uint32)
    memory = words.view(np.uint8).copy()
    place = "ld.param.b64 %rd1, [kernel_param_0];\nmul.wide.u32 %rd2, %r1, 8;\nadd.s64 %rd1, %rd1, %rd2;\n"
    swap = "ld.global.b32 %r4, [%rd1];\nmov.b32 {%rs1, %rs2}, %r4;\nmov.b32 %r5, {%rs2, %rs1};\n"
    run(f"{place}{swap}mov.b64 %rd3, {{%r4, %r5}};\nst.global.b64 [%rd1+256], %rd3;", "", 0, memory)
    given = words[:64:2]
    stored = memory.view(np.uint32)[64:128].reshape(32, 2)
    assert np.array_equal(stored[:, 0], given)
    assert np.array_equal(stored[:, 1], given << 16 | given >> 16)


ELECTED = "elect.sync %r4|%p2, -1;\n"
THREE = "".join(f"@%p2 mbarrier.init.shared.b64 [%r3+{8 * i}], 1;\n" for i in range(3))


def arrive(number: int) -> str:
    """At one of three mbarriers."""
    return f"@%p2 mbarrier.arrive.shared.b64 _, [%r3+{8 * number}], 1;\n"


def wait(number: int, parity: int) -> str:
    return f"mbarrier.try_wait.parity.shared.b64 %p3, [%r3+{8 * number}], {parity};\n"


@pytest.mark.parametrize(
    ("signals", "sees", "is_seen"),
    [
        ("", "", False),
        (wait(1, 1), wait(0, 1) + arrive(1), True),
        (arrive(2) + wait(1, 1), wait(2, 0) + arrive(1), True),  # the first warp's arrivals are in order
    ],
    ids=["unseen", "seen", "implied"],
)
def test_phases_that_go_by(signals: str, sees: str, is_seen: bool) -> None:
    """The second warp waits for the first phase of mbarrier 0 and the third one, whose parity is the same.

    Unless it knows that the second phase is over, it may take the first one for the third.
    """
    first = f"{ELECTED}{THREE}bar.sync 0;\n{arrive(0)}{wait(1, 0)}{arrive(0)}{signals}{arrive(0)}"
    second = f"{ELECTED}bar.sync 0;\n{wait(0, 0)}{arrive(1)}{sees}{wait(0, 0)}"
    found = []
    for seed in range(12):
        try:
            run(first, second, seed)
        except interpreter.FaultError as error:
            found.append(str(error))
    assert bool(found) != is_seen
    assert all("warp 1 of CTA 0, the mbarrier at byte 0: waits for phase 2, and may be two" in x for x in found)


FENCE = "fence.proxy.async.shared::cta;\n"
TWO = "".join(f"@%p2 mbarrier.init.shared.b64 [%r3+{8 * i}], 1;\n" for i in range(2))
LOAD = (
    "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;\n"
    "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+128], [%rd1], 128, [%r3];\n"
)


@pytest.mark.parametrize(
    ("reads", "fault"),
    [
        ("ld.shared.b32 %r6, [%r5+128];\n" + arrive(1), True),
        ("ld.shared.b32 %r6, [%r5+128];\n" + FENCE + arrive(1), False),
        (FENCE + "ld.shared.b32 %r6, [%r5+128];\n" + arrive(1), True),
        ("ld.shared.b32 %r6, [%r5+128];\n" + arrive(1) + FENCE, True),  # the arrival says nothing of the fence
        ("ld.shared.b32 %r6, [%r5+256];\n" + arrive(1), False),  # TMA does not write there
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r7+128];\n" + arrive(1), True),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r7+128];\n" + FENCE + arrive(1), False),
    ],
    ids=["none", "fence", "ahead", "behind", "elsewhere", "matrix", "matrix-fence"],
)
def test_reads_that_tma_overtakes(reads: str, fault: bool) -> None:
    """The second warp reads what TMA has loaded, and releases the place, into which the first one loads again."""
    first = f"ld.param.b64 %rd1, [kernel_param_0];\n{ELECTED}{TWO}bar.sync 0;\n{LOAD}{wait(1, 0)}{LOAD}{wait(0, 1)}"
    places = "and.b32 %r4, %r1, 31;\nshl.b32 %r5, %r4, 2;\nshl.b32 %r7, %r4, 4;\nadd.u32 %r5, %r5, %r3;\n"
    matrix_row = "and.b32 %r7, %r7, 112;\nadd.u32 %r7, %r7, %r3;\n"
    second = f"{places}{matrix_row}{ELECTED}bar.sync 0;\n{wait(0, 0)}{reads}"
    for seed in range(4):
        if fault:
            with pytest.raises(interpreter.FaultError, match="TMA writes what warp 1 has read"):
                run(first, second, seed)
        else:
            run(first, second, seed)


def test_any_lane_is_elected() -> None:
    """Code that takes the first one for the elected one is refused."""
    only_first = "elect.sync %r4|%p2, -1;\nsetp.eq.s32 %p3, %r1, 0;\nand.pred %p2, %p2, %p3;\n"
    with pytest.raises(interpreter.FaultError, match="no mbarrier"):
        run(
            only_first + "@%p2 mbarrier.init.shared.b64 [%r3], 1;\nmbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;",
            "",
            0,
        )


@pytest.mark.parametrize(
    "instruction", ["elect.sync %r4|%p2, -1;", "vote.sync.any.pred %p2, %p3, -1;", "match.any.sync.b32 %r4, %r1, -1;"]
)
def test_lanes_come_by_a_longer_way(instruction: str) -> None:
    """A whole warp's instructions wait for lanes whose way is further down; if some never come, that is a fault."""
    apart = "setp.lt.u32 %p3, %r1, 16;\n@%p3 bra LONGER;\nMEET:\n"
    longer = "ret;\nLONGER:\nadd.u32 %r4, %r1, 1;\n"
    run(f"{apart}{instruction}\n{longer}bra MEET;", "", 0)
    with pytest.raises(interpreter.FaultError, match="wait at different places"):
        run(f"{apart}{instruction}\n{longer}", "", 0)


@pytest.mark.parametrize("seed", range(4))
def test_registers_that_others_give_back(seed: int) -> None:
    run(registers("inc", 200), registers("dec", 56), seed)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (registers("inc", 208), registers("dec", 56), "deadlock"),
        (registers("inc", 200), registers("inc", 56), "deadlock"),  # which gives none back
        (registers("inc", 200), "", "deadlock"),  # nor does the end of a warp
        (registers("inc", 200) + "bar.sync 0;", "bar.sync 0;" + registers("dec", 56), "deadlock"),
        ("", registers("dec", 136), "down to 136 of 128"),
    ],
)
def test_registers_that_are_not_given_back(first: str, second: str, message: str) -> None:
    for seed in range(4):
        with pytest.raises(interpreter.FaultError, match=message):
            run(first, second, seed)
