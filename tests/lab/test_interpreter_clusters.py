"""The interpreter of PTX (``lab.interpreter``): clusters of two CTAs, products of both, and effects that come late."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from lab import interpreter
from lab.interpreter import tensor
from lab.interpreter.state import SHARED, Array, Barrier, Cluster, Commit, Cta, Product, nothing_known
from lab.interpreter.tma import swizzled

HEAD = """.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry kernel(.param .align 8 .b8 kernel_param_0[8])
.reqntid 32, 1, 1
{
.reg .pred %p<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<4>;
mov.u32 %r1, %cluster_ctarank;
mov.u32 %r2, %ctaid.x;
mov.b32 %r3, __dynamic_shmem__0;
elect.sync %r4|%p1, -1;
setp.eq.s32 %p2, %r1, 0;
ld.param.b64 %rd1, [kernel_param_0];
"""
MEET = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
INIT = "@%p1 mbarrier.init.shared.b64 [%r3], 2;\n" + MEET
# Both CTAs arrive at the first one's barrier.
ARRIVE = """mapa.shared::cluster.u32 %r5, %r3, 0;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5], 1;
"""
WAIT = "mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;\n"
# A CTA's number, plus one, where the other one's copy puts it, and from there to global memory.
SEND = """add.s32 %r6, %r2, 1;
@%p1 st.shared.b32 [%r3+16], %r6;
fence.proxy.async.shared::cta;
xor.b32 %r7, %r1, 1;
add.s32 %r8, %r3, 32;
mapa.shared::cluster.u32 %r9, %r8, %r7;
mapa.shared::cluster.u32 %r10, %r3, %r7;
mov.b32 %r12, 16;
@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r3], %r12;
add.s32 %r11, %r3, 16;
@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r11], %r12, [%r10];
"""
KEEP = """ld.shared.b32 %r13, [%r3+32];
mul.wide.u32 %rd2, %r2, 4;
add.s64 %rd3, %rd1, %rd2;
@%p1 st.global.b32 [%rd3], %r13;
"""


def run(body: str, seed: int = 0, num_ctas: int = 4, ctas_a_cluster: int = 2) -> list[int]:
    """Numbers that CTAs leave in global memory, one each."""
    memory = np.zeros(1024, np.uint8)
    params = [interpreter.address_of(0).to_bytes(8, "little")]
    program = interpreter.Program(HEAD + body + "ret;\n}\n")
    launch = interpreter.Launch(params, (num_ctas, 1, 1), (32, 1, 1), (ctas_a_cluster, 1, 1))
    interpreter.run(program, launch, memory, random.Random(seed))
    found: list[int] = memory.view(np.uint32)[:num_ctas].tolist()
    return found


@pytest.mark.parametrize("seed", range(10))
def test_copies_to_the_other_cta(seed: int) -> None:
    init = INIT.replace(", 2;", ", 1;")
    assert run(init + SEND + WAIT + KEEP + MEET, seed) == [2, 1, 4, 3]


def test_a_copy_that_is_not_waited_for() -> None:
    found = faults(INIT.replace(", 2;", ", 1;") + SEND + KEEP + WAIT + MEET)
    assert any("TMA writes what warp 0 has read" in fault for fault in found)


@pytest.mark.parametrize("seed", range(10))
def test_arrivals_from_the_other_cta(seed: int) -> None:
    waits = "@!%p2 bra $L1;\n" + WAIT + "$L1:\n"
    run(INIT + ARRIVE + waits + MEET, seed)


def faults(body: str) -> set[str]:
    """Faults that some runs end with."""

    def each() -> Iterator[str]:
        for seed in range(20):
            try:
                run(body, seed, num_ctas=2)
            except interpreter.FaultError as error:
                yield str(error)

    return set(each())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (INIT + ARRIVE + WAIT + MEET, "deadlock"),  # the second one's barrier, at which no thread arrives
        (INIT + "@%p2 bra $L1;\n" + ARRIVE + "$L1:\n", "a CTA that is over"),
        (INIT + ARRIVE + ARRIVE.replace("release.cluster.shared::cluster", "shared") + MEET, "of another CTA"),
        (INIT + "@%p2 bra $L1;\n" + MEET + "$L1:\n", "deadlock"),
        ("barrier.cluster.arrive;\n" * 2, "arrives twice"),
        ("barrier.cluster.wait;\n", "where it has not arrived"),
        (INIT + SEND.replace("%r10, %r3, %r7", "%r10, %r3, %r1") + MEET, "an mbarrier of another CTA"),
        ("@%p1 st.shared.b32 [%r3+16777216], %r1;\n", "st.shared.b32 at"),
        (INIT + "mapa.shared::cluster.u32 %r5, %r3, 2;\n" + ARRIVE.splitlines()[1] + MEET, "of no CTA"),
    ],
)
def test_faults(body: str, message: str) -> None:
    found = faults(body)
    assert found
    assert any(message in text for text in found), found


PLACE = 1024  # of an operand in shared memory
SWIZZLES = {128: 2, 64: 4}  # bytes of its rows: what its descriptor says


def pair() -> list[Cta]:
    cluster, draw = Cluster(), random.Random(0)
    for rank in range(2):
        memory, shared = np.zeros(16, np.uint8), np.zeros(1 << 17, np.uint8)
        cluster.ctas.append(Cta(cluster, rank, (rank, 0, 0), (2, 1, 1), [], memory, [], shared, draw, columns=512))
    return cluster.ctas


def put(cta: Cta, place: int, x: Array, row_bytes: int = 128) -> int:
    """Rows of 16 numbers into shared memory; returns their descriptor."""
    addresses = SHARED + place + np.arange(len(x))[:, None] * row_bytes + np.arange(16) * 2
    cta.shown.view("u2")[swizzled(addresses, row_bytes)] = x.astype(np.float16).view("u2")
    return (SHARED + place) >> 4 | 1 << 16 | (8 * row_bytes >> 4) << 32 | 1 << 46 | SWIZZLES[row_bytes] << 61


def put_columns(cta: Cta, place: int, x: Array, row_bytes: int) -> int:
    """Puts rows of 16 numbers into shared memory as columns, as many of them contiguous as a row has bytes for."""
    contiguous = row_bytes // 2
    row, k = np.arange(len(x))[:, None], np.arange(16)
    addresses = SHARED + place + row // contiguous * 16 * row_bytes + k * row_bytes + row % contiguous * 2
    cta.shown.view("u2")[swizzled(addresses, row_bytes)] = x.astype(np.float16).view("u2")
    leading, stride = 16 * row_bytes, 8 * row_bytes
    return (SHARED + place) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[row_bytes] << 61


@pytest.mark.parametrize("row_bytes", SWIZZLES)
def test_operands_by_columns(row_bytes: int) -> None:
    """Operands have 96 rows, as no more than 64 are contiguous."""
    random_numbers = np.random.default_rng(0)
    a, b = (random_numbers.integers(-4, 5, (n, 16)).astype(np.float32) for n in (128, 96))
    cta = pair()[0]
    of_a, of_b = put(cta, PLACE, a), put_columns(cta, 1 << 16, b, row_bytes)
    cta.products.append(Product(8, of_a, False, of_b, 128 // 16 << 24 | 96 // 8 << 17 | 1 << 16 | 1 << 4, False, False))
    tensor.advance(cta, 1)
    assert np.array_equal(cta.tensor_memory.view(np.float32)[:, 8 : 8 + 96], a @ b.T)


@pytest.mark.parametrize("row_bytes", SWIZZLES)
@pytest.mark.parametrize("rows", [128, 256])
def test_products_of_a_pair(rows: int, row_bytes: int) -> None:
    """Each CTA has half of the rows, and half of B's columns. Of 64 rows the columns' halves are in other lanes."""
    random_numbers = np.random.default_rng(0)
    a, b = (random_numbers.integers(-4, 5, (n, 16)).astype(np.float32) for n in (rows, 64))
    ctas = pair()
    for cta, left, right in zip(ctas, np.split(a, 2), np.split(b, 2), strict=True):
        of_a, of_b = put(cta, PLACE, left, row_bytes), put(cta, 1 << 16, right, row_bytes)
    kind = rows // 16 << 24 | 64 // 8 << 17 | 1 << 4
    ctas[0].products += [Product(8, of_a, False, of_b, kind, accumulates, True) for accumulates in (False, True)]
    tensor.advance(ctas[0], 2)
    for cta, expected in zip(ctas, np.split(2 * a @ b.T, 2), strict=True):
        found = cta.tensor_memory.view(np.float32)[:, 8:]
        if rows == 128:
            expected = np.concatenate(np.split(expected, 2, axis=1))
        assert np.array_equal(found[:, : expected.shape[1]], expected)


def test_what_a_pair_has_not_allocated() -> None:
    ctas = pair()
    ctas[1].columns = 32
    of_a, of_b = put(ctas[0], PLACE, np.zeros((128, 16))), put(ctas[0], 1 << 16, np.zeros((32, 16)))
    ctas[0].products.append(Product(0, of_a, False, of_b, 16 << 24 | 64 // 8 << 17 | 1 << 4, False, True))
    with pytest.raises(interpreter.FaultError, match=r"columns 0 \.\. 64 are not all allocated"):
        tensor.advance(ctas[0], 1)


ISSUE = """tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r3+8], 32;
mov.b64 %rd2, 0;
@%p1 tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd2, %rd2, %r1, {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1}, %p2;
"""


def test_only_the_first_one_issues_products() -> None:
    assert any("by the second CTA" in text for text in faults(ISSUE))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_commits_to_both(ranks: tuple[int, ...]) -> None:
    """At the same place in each."""
    ctas = pair()
    for cta in ctas:
        cta.barriers[cta.first_shared + 8] = Barrier(1, 1)
    ctas[0].products.append(Commit(SHARED + 8, ranks, nothing_known()))
    tensor.advance(ctas[0], 1)
    for _ in ranks:
        tensor.arrive(ctas[0])
    assert [cta.barrier(cta.first_shared + 8).phase for cta in ctas] == [1, int(1 in ranks)]


# The first CTA leaves 7 for the second one, which polls a counter, and stays until that has read it.
SIGNAL = """setp.ne.s32 %p3, %r2, 0;
@%p3 bra $POLL;
mov.b32 %r5, 7;
@%p1 st.global.b32 [%rd1+64], %r5;
mov.b32 %r6, 1;
@%p1 red.release.gpu.global.add.s32 [%rd1+128], %r6;
$STAY:
ld.acquire.gpu.global.b32 %r7, [%rd1+192];
setp.eq.s32 %p3, %r7, 0;
@%p3 bra $STAY;
bra $END;
$POLL:
ld.acquire.gpu.global.b32 %r7, [%rd1+128];
setp.eq.s32 %p3, %r7, 0;
@%p3 bra $POLL;
ld.global.b32 %r8, [%rd1+64];
@%p1 st.global.b32 [%rd1], %r8;
mov.b32 %r6, 1;
@%p1 red.relaxed.gpu.global.add.s32 [%rd1+192], %r6;
$END:
"""
TENSOR = """tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+8], 32;
mov.b32 %r5, 0;
mov.b32 %r6, 7;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r6};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r5];
tcgen05.wait::ld.sync.aligned;
@%p1 st.global.b32 [%rd1], %r7;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
"""
COPY = INIT.replace(", 2;", ", 1;") + SEND + WAIT + KEEP + MEET


@pytest.mark.parametrize(
    ("body", "ordered", "unordered", "ctas", "found"),
    [
        (SIGNAL, "red.release.gpu", "red.relaxed.gpu", (2, 1), 7),
        (SIGNAL, "red.release.gpu", "red.release.cluster", (2, 1), 7),
        (TENSOR, "tcgen05.wait::st.sync.aligned;", "", (1, 1), 7),
        (TENSOR, "tcgen05.wait::ld.sync.aligned;", "", (1, 1), 7),
        (COPY, "fence.proxy.async.shared::cta;", "", (2, 2), 2),
        (COPY, "fence.proxy.async.shared::cta;", "fence.proxy.async.global;", (2, 2), 2),
    ],
)
def test_what_orders(body: str, ordered: str, unordered: str, ctas: tuple[int, int], found: int) -> None:
    """With what orders them, effects are there under all schedules; without, they are missing under some."""
    assert ordered in body
    assert {run(body, seed, *ctas)[0] for seed in range(20)} == {found}
    assert {run(body.replace(ordered, unordered), seed, *ctas)[0] for seed in range(20)} > {found}
