"""Rules over PTX: each finds the bug that it is about, in a small kernel and in real ones, which keep all of them."""

import re
from typing import Any

import pytest

from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardClusterConfig
from lab.lint import lint
from tests.lib.compiled import code_for
from tests.lib.configurations import (
    BACKWARD_EVERYTHING,
    DESCRIBED,
    LONG,
    backward,
    chosen,
    sm90_backward,
    sm90_bias_gradient,
)
from tests.lib.tiers import tiered

# 8 warps: 0 to 3 read S and write P and a copy of it in shared memory, 4 issues products, 5 loads, 6 adds in turn.
KERNEL = """
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry kernel(.param .align 64 .b8 map[128])
.reqntid 512, 1, 1
.minnctapersm 1
{
.reg .pred %p<20>; .reg .b32 %r<40>; .reg .b64 %rd<9>;
    mov.b32 %r1, __dynamic_shmem__0;
    mov.u32 %r2, %tid.x;
    shr.u32 %r3, %r2, 5;
    mov.b32 %r10, 1;
    setp.ne.b32 %p1, %r2, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], %r10;     // S: full
    mbarrier.init.shared.b64 [%r1+8], 4;      // P: full
    mbarrier.init.shared.b64 [%r1+16], 1;     // K: full, two stages
    mbarrier.init.shared.b64 [%r1+24], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    setp.gt.u32 %p2, %r3, 3;
    @%p2 bra OTHERS;
    setmaxnreg.inc.sync.aligned.u32 192;
WAIT_S:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0, 1000;
    @!%p3 bra WAIT_S;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r11, %r12}, [%r4];
    mov.b64 %rd1, {%r11, %r12};
    tcgen05.wait::ld.sync.aligned;
    mov.b64 {%r13, %r14}, %rd1;
    add.s32 %r13, %r13, %r12;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4+64], {%r13};
    tcgen05.wait::st.sync.aligned;
    shl.b32 %r15, %r2, 7;
    add.s32 %r16, %r1, %r15;
    st.shared.b32 [%r16+1024], %r13;
    fence.proxy.async.shared::cta;
    tcgen05.fence::before_thread_sync;
    bar.warp.sync -1;
    elect.sync _|%p4, -1;
    @!%p4 bra END;
    mbarrier.arrive.shared.b64 _, [%r1+8];
    bra END;
OTHERS:
    setmaxnreg.dec.sync.aligned.u32 56;
    setp.ne.u32 %p11, %r3, 4;
    @%p11 bra LOADS;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+32], 512;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    shr.u32 %r20, %r1, 4;
    add.s32 %r21, %r20, 64;
    mov.b64 %rd2, {%r21, %r22};
    elect.sync _|%p12, -1;
    @%p12 tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd3, %rd4, %r23, 0;
    @%p12 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
WAIT_P:
    mbarrier.try_wait.parity.shared.b64 %p13, [%r1+8], 0, 1000;
    @!%p13 bra WAIT_P;
    tcgen05.fence::after_thread_sync;
    @%p12 tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd2, %rd4, %r23, 1;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 512;
    bra END;
LOADS:
    setp.ne.u32 %p14, %r3, 5;
    @%p14 bra ADDS;
    elect.sync _|%p15, -1;
    @!%p15 bra END;
    mov.b32 %r30, 0;
LOOP:
    and.b32 %r31, %r30, 1;
    shl.b32 %r32, %r31, 3;
    add.s32 %r33, %r1, %r32;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r33+16], 16384;
    cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1+40960], [%rd5, {%r6}], [%r33+16];
    add.s32 %r30, %r30, 1;
    setp.lt.s32 %p16, %r30, %r8;
    @%p16 bra LOOP;
    bra END;
ADDS:
    setp.ne.u32 %p18, %r3, 6;
    @%p18 bra END;
WAIT_TURN:
    ld.acquire.gpu.global.b32 %r34, [%rd7];
    setp.lt.s32 %p19, %r34, %r8;
    @%p19 bra WAIT_TURN;
    fence.proxy.async.global;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd8], [%r1+57344], 16384;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    red.release.gpu.global.add.s32 [%rd7], 1;
END:
    ret;
}
"""


def rules(text: str) -> set[str]:
    return {finding.rule for finding in lint(text)}


def changed(text: str, pattern: str, replacement: str) -> str:
    new, count = re.subn(pattern, replacement, text)
    assert count == 1, f"{pattern}: {count} times"
    return new


def test_a_kernel_that_keeps_all_rules() -> None:
    assert lint(KERNEL) == []


_MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
_REMOTE = "mapa.shared::cluster.u32 %r35, %r1, 1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r35];"
PLANTED = {
    "no fence behind initialisation": ("init-fence", r"fence\.mbarrier_init[^;]*;", ""),
    "no barrier of the warp": ("warp", r"bar\.warp\.sync -1;", ""),
    "a store behind the barrier of the warp": (
        "warp",
        r"(st\.shared\.b32 \[%r16\+1024\], %r13;)((?:.*\n)*?.*bar\.warp\.sync -1;)",
        r"\2 \1 fence.proxy.async.shared::cta;",
    ),
    "no proxy fence": ("proxy", r"fence\.proxy\.async\.shared[^;]*;", ""),
    "proxy fence behind the arrival": (
        "proxy",
        r"fence\.proxy\.async\.shared::cta;((?:.*\n)*?.*\[%r1\+8\];\n    bra END)",
        r"\1; fence.proxy.async.shared::cta",
    ),
    "proxy fence on one of two paths": (
        "proxy",
        r"(fence\.proxy\.async\.shared[^;]*;)",
        r"setp.eq.u32 %p7, %r7, 0; @%p7 bra AROUND; \1 AROUND:",
    ),
    "no proxy fence behind a turn": ("turn", r"fence\.proxy\.async\.global;", ""),
    "a proxy fence of shared memory alone": ("turn", r"fence\.proxy\.async\.global;", "fence.proxy.async.shared::cta;"),
    "a turn passed on before the addition": ("turn", r"bulk\.wait_group 0;", "bulk.wait_group.read 0;"),
    "no wait for loads": ("load-wait", r"tcgen05\.wait::ld\.sync\.aligned;", ""),
    "register used before the wait": ("load-wait", r"(tcgen05\.wait::ld)", r"add.s32 %r14, %r11, 1; \1"),
    "copy used before the wait": ("load-wait", r"(tcgen05\.wait::ld)", r"add.s64 %rd6, %rd1, 1; \1"),
    "no wait for stores": ("store-wait", r"tcgen05\.wait::st\.sync\.aligned;", ""),
    "a load behind the fence": ("fence-before", r"(tcgen05\.fence::before_thread_sync;)(\s+bar)", r"\2"),
    "no fence behind a commit": ("fence-after", r"tcgen05\.fence::after_thread_sync;(\s+tcgen05\.ld)", r"\1"),
    "no fence before a product": ("fence-after", r"tcgen05\.fence::after_thread_sync;(\s+@%p12)", r"\1"),
    "products by a whole warp": ("election", r"@%p12 (tcgen05\.mma[^;]*%rd3)", r"\1"),
    "allocation by one thread": ("election", r"(tcgen05\.alloc)", r"elect.sync _|%p17, -1; @%p17 \1"),
    "two groups": ("group", r"tcgen05\.commit\.cta_group::1", "tcgen05.commit.cta_group::2"),
    "too many columns": ("columns", r"(alloc\.[^;]*\[%r1\+32\]), 512", r"\1, 1024"),
    "columns that stay": ("columns", r"(dealloc[^;]*), 512", r"\1, 256"),
    "never freed": ("columns", r"tcgen05\.dealloc[^;]*;", ""),
    "freed on one of two paths": (
        "columns",
        r"(tcgen05\.dealloc[^;]*;)",
        r"setp.eq.u32 %p7, %r7, 0; @%p7 bra END; \1",
    ),
    "too many registers": ("registers", r"(setmaxnreg\.inc[^;]*) 192", r"\1 264"),
    "fewer registers than at launch by inc": ("registers", r"(setmaxnreg)\.dec([^;]*) 56", r"\1.inc\2 56"),
    "more registers than at launch by dec": ("registers", r"(setmaxnreg)\.inc([^;]*) 192", r"\1.dec\2 192"),
    "registers given back behind a wait": (
        "registers",
        r"(setmaxnreg\.dec[^;]*;)",
        r"mbarrier.test_wait.parity.shared.b64 %p3, [%r1], 1; \1",
    ),
    "registers not in eights": ("registers", r"(setmaxnreg\.inc[^;]*) 192", r"\1 190"),
    "registers by warp": ("registers", r"(@%p11 bra LOADS;)", r"\1 setmaxnreg.dec.sync.aligned.u32 48;"),
    "registers that are left out": ("registers", r"\.minnctapersm 1", ""),
    "more registers together": (
        "registers",
        r"(setmaxnreg\.dec[^;]*) 56",
        r"\1 120",
    ),
    "a count too high": ("arrivals", r"(mbarrier\.init\.shared\.b64 \[%r1\+8\]), 4", r"\1, 5"),
    "no arrival": ("arrivals", r"mbarrier\.arrive\.shared\.b64 _, \[%r1\+8\];", ""),
    "an arrival by a whole warp": ("arrivals", r"(elect\.sync _\|%p4, -1;)\s+@!%p4 bra END;(\s+mbarrier)", r"\2"),
    "an arrival too many": ("arrivals", r"(@%p11 bra LOADS;)", r"\1 mbarrier.arrive.shared.b64 _, [%r1+8];"),
    "bytes that nobody expects": ("expected-bytes", r"arrive\.expect_tx([^;]*), 16384", r"arrive\1"),
    "a turn that is polled without acquiring": ("scope", r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
    "a turn that is acquired from the CTA alone": ("scope", r"ld\.acquire\.gpu", "ld.acquire.cta"),
    "a turn that is passed on without releasing": ("scope", r"red\.release\.gpu", "red.relaxed.gpu"),
    "a turn that is released to the CTA alone": ("scope", r"red\.release\.gpu", "red.release.cta"),
    "an addition behind the fence that releases": (
        "scope",
        r"red\.release\.gpu",
        "fence.acq_rel.gpu; red.global.add.f32 [%rd7+64], %r9; red.relaxed.gpu",
    ),
    "an offset in 32 bits": (
        "offset",
        r"(red\.release)",
        r"ld.param.u32 %r36, [map]; shl.b32 %r37, %r36, 14; mul.wide.s32 %rd6, %r37, 4; add.s64 %rd6, %rd8, %rd6; "
        r"st.global.b32 [%rd6], %r9; \1",
    ),
    "an arrival before CTAs meet": ("cluster", r"(@%p18 bra END;)", r"\1 " + _REMOTE + " " + _MEET),
    "an arrival behind the last meeting": ("cluster", r"(@%p18 bra END;)", r"\1 " + _MEET + " " + _REMOTE),
    "an end between arrival and wait": (
        "cluster",
        r"(@%p18 bra END;)",
        r"\1 " + _MEET + _REMOTE + _MEET.replace("barrier.cluster.wait;", ""),
    ),
    "an arrival of the CTA's scope": (
        "scope",
        r"(@%p18 bra END;)",
        r"\1 " + _MEET + _REMOTE.replace(".release.cluster", "") + _MEET,
    ),
    "bytes for another barrier": ("expected-bytes", r"(%r6\}\]), \[%r33\+16\]", r"\1, [%r1+8]"),
}


@pytest.mark.parametrize(("rule", "pattern", "replacement"), PLANTED.values(), ids=PLANTED)
def test_planted(rule: str, pattern: str, replacement: str) -> None:
    assert rule in rules(changed(KERNEL, pattern, replacement))


def test_most_planted_bugs_break_one_rule() -> None:
    """Each rule finds some bug that no other rule finds."""
    alone = {rule for rule, *change in PLANTED.values() if rules(changed(KERNEL, *change)) == {rule}}
    assert alone == {rule for rule, *_ in PLANTED.values()}


def test_what_is_released_and_wide_enough() -> None:
    """A fence ahead of several turns, a product in 64 bits, an arrival between two meetings."""
    assert rules(changed(KERNEL, r"red\.release\.gpu", "fence.acq_rel.gpu; red.relaxed.gpu")) == set()
    wide = "ld.param.u32 %r36, [map]; mul.wide.s32 %rd6, %r36, 65536; st.global.b32 [%rd6], %r9; "
    assert rules(changed(KERNEL, r"(red\.release)", wide + r"\1")) == set()
    assert rules(changed(KERNEL, r"(@%p18 bra END;)", r"\1 " + _MEET + _REMOTE + _MEET)) == set()


# Rows of 512 elements: as many as a size, if the remainder is known to be less than what it is of.
_REMAINDER = """{
    .reg .b32 %rx<9>;
    ld.param.u32 %rx0, [map];
    ld.param.u32 %rx1, [map+4];
    ld.param.u32 %rx2, [map+8];
    mul.lo.s32 %rx3, %rx0, %rx1;
    shl.b32 %rx4, %rx3, 3;
    div.s32 %rx5, %rx4, %rx1;
    mul.lo.s32 %rx6, %rx5, %rx1;
    sub.s32 %rx7, %rx4, %rx6;
    shl.b32 %rx8, %rx7, 9;
    mul.wide.s32 %rd6, %rx8, 4;
    add.s64 %rd6, %rd8, %rd6;
    st.global.b32 [%rd6], %r9;
    }
    """
NO_REMAINDERS = {
    "of another divisor": (r"(%rx6, %rx5), %rx1", r"\1, %rx2"),
    "of another dividend": (r"(%rx7), %rx4", r"\1, %rx3"),
    "of a dividend that is written behind the division": (r"(div[^;]*;)", r"\1 add.s32 %rx4, %rx4, %rx2;"),
    "of a divisor that is written behind the division": (r"(div[^;]*;)", r"\1 add.s32 %rx1, %rx1, %rx2;"),
    "of a divisor that the product is written to": (
        r"%rx6, %rx5, %rx1;(\s+)sub.s32 %rx7, %rx4, %rx6",
        r"%rx1, %rx5, %rx1;\1sub.s32 %rx7, %rx4, %rx1",
    ),
    "of a division that is left out at times": (r"(div\.s32)", r"@%p18 \1"),
    "of a division that is jumped over": (r"(div[^;]*;)", r"@%p18 bra OVER; \1 OVER:"),
}


def test_a_remainder_is_less_than_its_divisor() -> None:
    """Also where it is computed as ``a - a / b * b``, and only where that is what is computed."""
    assert rules(changed(KERNEL, r"(red\.release)", _REMAINDER + r"\1")) == set()
    for name, change in NO_REMAINDERS.items():
        wrong = re.sub(*change, _REMAINDER, count=1)
        assert wrong != _REMAINDER, name
        assert rules(changed(KERNEL, r"(red\.release)", wrong + r"\1")) == {"offset"}, name


def test_a_commit_publishes_stores() -> None:
    """Stores of the warp that commits are complete by then only behind ``tcgen05.wait::st``."""
    store, wait = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r24};", "tcgen05.wait::st.sync.aligned;"
    place = r"(elect\.sync _\|%p12, -1;)"
    assert rules(changed(KERNEL, place, rf"{store} {wait} tcgen05.fence::before_thread_sync; \1")) == set()
    text = changed(KERNEL, place, rf"{store} tcgen05.fence::before_thread_sync; \1")
    (finding,) = lint(text)
    assert finding.rule == "store-wait"
    assert "tcgen05.commit" in text.splitlines()[finding.line - 1]


def test_registers_of_all_warpgroups_together() -> None:
    """Values of 12 warps that are each allowed are too many together."""
    text = changed(KERNEL, r"\.reqntid 512", ".reqntid 384")
    text = changed(text, r"(setmaxnreg\.inc[^;]*) 192", r"\1 248")
    assert rules(changed(text, r"(setmaxnreg\.dec[^;]*) 56", r"\1 128")) == set()
    (finding,) = lint(changed(text, r"(setmaxnreg\.dec[^;]*) 56", r"\1 136"))
    assert finding.rule == "registers"
    assert "comes to 520 registers a thread of each warpgroup, of 504" in finding.text


def test_arrivals_without_waits_are_not_found() -> None:
    """A barrier of a warp, or of threads that use no tensor memory, publishes no loads and stores."""
    unrelated = "bar.warp.sync -1; mbarrier.arrive.shared.b64 _, [%r1+16];"  # for which no thread waits
    text = changed(KERNEL, r"(tcgen05\.wait::ld)", rf"{unrelated} \1")
    text = changed(text, r"(fence\.proxy\.async\.shared)", rf"{unrelated} \1")
    assert rules(text) == {"arrivals"}


def test_findings_say_where() -> None:
    text = changed(KERNEL, r"fence\.proxy\.async\.shared[^;]*;", "")
    (finding,) = lint(text)
    lines = text.splitlines()
    assert "mbarrier.arrive.shared.b64 _, [%r1+8]" in lines[finding.line - 1]
    origin = re.search(r"line (\d+)$", finding.text)
    assert origin is not None
    assert "st.shared" in lines[int(origin[1]) - 1]


# The kinds of Hopper kernels, how many fences make their stores seen by TMA and tensor cores, and how many end reads.
HOPPER = {
    "sm90-forward-causal": (1, 0),
    "sm90-forward-tiled-bias": (1, 2),
    "sm90-backward": (6, 0),
    "sm90-backward-cluster": (3, 1),
    "sm90-selection": (1, 0),
    "sm90-selection-backward": (2, 0),
    "sm90-column-sums": (0, 1),
    "sm90-selection-backward-wide": (1, 0),
}


@pytest.mark.parametrize("name", tiered(HOPPER, "sm90-forward-causal"))
def test_hopper_kernels(name: str) -> None:
    """They keep all rules, and would not without any one of their stores' fences, or with other counts or registers.

    That reads are ended the interpreter sees, not the lint.
    """
    config, (num_of_stores, num_of_reads) = DESCRIBED[name], HOPPER[name]
    text = code_for(config).ptx
    assert lint(text) == []
    fences = list(re.finditer(r"fence\.proxy\.async\.shared::cta;", text))
    without = [rules(text[: fence.start()] + text[fence.end() :]) for fence in fences]
    assert sorted(without, key=len) == [set()] * num_of_reads + [{"proxy"}] * num_of_stores
    changes = {"registers": (r"(setmaxnreg\.dec\.\S+\s+)\d+", r"\g<1>160")}
    if not isinstance(config, BackwardClusterConfig):  # the CTAs of a cluster arrive at each other's barriers
        changes["arrivals"] = (r"(mbarrier\.init\.shared\.b64\s+\[%r\d+\+16\]), %r\d+", r"\1, 13")
        changes["expected-bytes"] = (r"(mbarrier\.arrive)\.expect_tx(\.shared\.b64 \S+ \S+), %r\d+", r"\1\2, 1")
    for change in changes.values():
        text = re.sub(*change, text, count=1)
    assert rules(text) == changes.keys()


HOPPER_LISTS = {name: DESCRIBED[name] for name in ("sm90-forward-bias-block-mask", "sm90-backward-fixed-point")}
HOPPER_LISTS["gradient of a bias"] = sm90_bias_gradient(64, "mask", split=True)


@pytest.mark.slow
@pytest.mark.parametrize("config", HOPPER_LISTS.values(), ids=HOPPER_LISTS)
def test_hopper_kernels_under_masks(config: Any) -> None:
    """They keep all rules, those that make tables included, and would not with a count too high."""
    text = code_for(config).ptx
    assert lint(text) == []
    counts = re.compile(r"(mbarrier\.init\.shared\.b64\s+\[%r\d+\+48\]), %r\d+")
    assert rules(counts.sub(r"\1, 13", text, count=1)) == {"arrivals"}


@pytest.mark.slow
def test_hopper_offsets_have_64_bits() -> None:
    """Also those in sums of more than 2^31 numbers."""
    assert lint(code_for(sm90_backward(256, f"{BACKWARD_EVERYTHING} -deterministic")).ptx) == []


BLACKWELL = {
    "proxy": r"fence\.proxy\.async[^;]*;",
    "load-wait": r"tcgen05\.wait::ld[^;]*;",
    "store-wait": r"tcgen05\.wait::st[^;]*;",
    "fence-before": r"tcgen05\.fence::before_thread_sync;",
    "fence-after": r"tcgen05\.fence::after_thread_sync;",
    "columns": r"tcgen05\.dealloc[^;]*;",
    "arrivals": r"tcgen05\.commit[^;]*;",
}


def test_blackwell_kernels() -> None:
    """A kernel keeps all rules, and breaks each without what they ask for; ``test_bugs`` asks about all kernels."""
    text = code_for(chosen(128, "right")).ptx
    assert lint(text) == []
    assert rules(re.sub("|".join(BLACKWELL.values()), "", text)) == BLACKWELL.keys()


# Of a warp that sends what all its threads have stored, and of arrivals from the other CTA.
PAIRS = {
    "a copy ahead of other threads' stores": (
        "warp",
        r"bar\.warp\.sync\s+-1;(?=[^@]*@[^@]*mbarrier\.arrive\.expect_tx)",
        "",
    ),
    "a commit for the first one alone": ("arrivals", r"(mov\.b16\s+%rs\d+), 3;", r"\1, 1;"),
    "an arrival at the second one": ("arrivals", r"(mapa\.shared::cluster\.u32\s+%r\d+, %r\d+), 0;", r"\1, 1;"),
    "a count for one alone": ("arrivals", r"(mov\.b32\s+%r\d+), 16;(?=[^@]*mbarrier\.init)", r"\1, 8;"),
}


@pytest.mark.slow
def test_pairs_of_ctas() -> None:
    """Arrivals from the other CTA are counted, and publish what they publish within a CTA."""
    text = code_for(backward(128, keys=LONG)).ptx
    assert lint(text) == []
    start = text.index(".entry", text.index("BackwardPair"))
    for rule, pattern, replacement in PAIRS.values():
        assert rule in rules(text[:start] + re.sub(pattern, replacement, text[start:], count=1)), pattern
