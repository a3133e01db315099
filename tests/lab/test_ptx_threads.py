"""Threads as their PTX shows them: where each goes, and the numbers and addresses in its registers."""

import pytest

from lab.ptx import tree
from lab.ptx.threads import Program, Thread, Value

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry kernel(.param .u32 n)
.reqntid 128, 1, 1
{
.reg .pred %p<20>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
    mov.b32 %r1, __dynamic_shmem__0;
    mov.u32 %r2, %tid.x;
    ld.param.b32 %r3, [n];
"""


def thread(number: int, body: str) -> Thread:
    (function,) = tree.parse(f"{HEAD}{body}\nret;\n}}").functions
    return Thread(Program(function), number)


def value(number: int, body: str, register: str) -> Value | None:
    """Value of a register of the kernel's own scope."""
    found = thread(number, body)
    return found.values.get(f"{register}@0")


@pytest.mark.parametrize(
    ("body", "register", "expected"),
    [
        ("shr.u32 %r4, %r2, 5; shfl.sync.idx.b32 %r5, %r4, 0, 31, -1;", "%r5", Value(2)),
        ("and.b32 %r4, %r2, 31; shl.b32 %r6, %r4, 2; add.s32 %r5, %r1, %r6;", "%r5", Value(12, is_shared=True)),
        ("mad.lo.s32 %r4, %r2, 128, %r1; xor.b32 %r5, %r4, 16;", "%r5", Value(67 * 128 + 16, is_shared=True)),
        ("shl.b32 %r4, %r3, 3; add.s32 %r5, %r1, %r4; add.s32 %r6, %r5, 64;", "%r6", Value(64, False, True)),
        ("selp.b32 %r4, 24, 16, %p9; add.s32 %r5, %r1, %r4;", "%r5", Value(16, False, True)),
        ("add.s32 %r4, %r2, -70; setp.lt.u32 %p1, %r4, 8; selp.b32 %r5, 1, 2, %p1;", "%r5", Value(2)),
        ("add.s32 %r4, %r2, -70; setp.lt.s32 %p1, %r4, 8; selp.b32 %r5, 1, 2, %p1;", "%r5", Value(1)),
        ("setp.eq.s32 %p1, %r3, 0; setp.ne.and.b32 %p2, %r2, 67, %p1; selp.b32 %r5, 1, 2, %p2;", "%r5", Value(2)),
        (
            "setp.eq.s32 %p1, %r3, 0; not.pred %p2, %p1; or.pred %p3, %p2, %p1; selp.b32 %r5, 1, 2, %p3;",
            "%r5",
            Value(1, False),
        ),
        (
            "add.s32 %r4, %r1, 2048; shr.u32 %r5, %r4, 4; mov.b64 %rd1, {%r5, %r6}; add.s64 %rd2, %rd1, 2; "
            "mov.b64 {%r7, %r8}, %rd2;",
            "%r7",
            Value(130, is_shared=True),
        ),
        ("elect.sync %r4|%p1, -1; selp.b32 %r5, 1, 2, %p1;", "%r5", Value(2)),
        (
            "mov.b32 %r5, 5; LOOP: add.s32 %r5, %r5, 1; setp.lt.s32 %p1, %r5, %r3; @%p1 bra LOOP;",
            "%r5",
            Value(5, False),
        ),
        ("mov.b32 %r5, 90; LOOP: sub.s32 %r5, %r5, 1; setp.gt.s32 %p1, %r5, %r3; @%p1 bra LOOP;", "%r5", None),
        ("ld.shared.b32 %r5, [%r1];", "%r5", None),
        ("cvt.rzi.s32.f32 %r5, %f1;", "%r5", None),
    ],
)
def test_values_of_the_fourth_thread_of_a_warp(body: str, register: str, expected: Value | None) -> None:
    assert value(67, body, register) == expected


ROLES = """
    shr.u32 %r4, %r2, 5;
    setp.gt.s32 %p1, %r4, 1;
    @%p1 bra UPPER;
    elect.sync _|%p2, -1;
    @%p2 bar.sync 1;
    @!%p2 bra END;
    bar.sync 2;
    bra.uni END;
UPPER:
    setp.eq.s32 %p3, %r3, 7;
    @%p3 bra END;
    bar.sync 3;
END:
"""


@pytest.mark.parametrize(("number", "barriers"), [(0, {1, 2}), (33, set()), (32, {1, 2}), (64, {3}), (127, {3})])
def test_where_threads_go(number: int, barriers: set[int]) -> None:
    found = thread(number, ROLES)
    executed = [found.program.instructions[x] for x in found.executed]
    assert {x.operands[0].number for x in executed if x.is_a("bar")} == barriers


def test_first_and_second_threads_stand_for_warps() -> None:
    (function,) = tree.parse(f"{HEAD}{ROLES}ret;\n}}").functions
    assert [(a.number, b.number) for a, b in Program(function).warps] == [(0, 1), (32, 33), (64, 65), (96, 97)]


def test_registers_of_inline_assembly_are_distinct() -> None:
    """A register that an inner scope declares is not the register of that name outside of it."""
    found = value(0, "mov.b32 %r5, 1; { .reg .b32 %r5; mov.b32 %r5, 2; }", "%r5")
    assert found == Value(1)
