"""Bugs of the backward kernel."""

from lab.bugs.code import (
    ACCUMULATES,
    BACKWARD_WARPS,
    KIND,
    LEADING,
    MMA,
    PRODUCER,
    STRIDE,
    SWIZZLE,
    TARGET,
    A,
    B,
    arrivals,
    both,
    commits,
    find,
    waits,
)
from lab.bugs.table import (
    LAST_REGISTER,
    LOADS_LAG,
    PRODUCTS_LAG,
    STORES_LAG,
    Bug,
    Bugs,
    all_arrive,
    always_branches,
    columns_not_freed,
    counted_short,
    drain_keeps_registers,
    no_arrival,
    no_bytes,
    no_commit,
    no_fence_after,
    no_fence_before,
    no_load_wait,
    no_proxy_fence,
    no_store_wait,
    no_wait,
    no_wait_for_tma,
    no_warp_sync,
    wrong_arrival,
    wrong_bytes,
    wrong_phase,
    wrong_registers,
)

_DRAIN, _COMPUTE, _ADD = (BACKWARD_WARPS[name][0] for name in ("drain", "compute", "adding"))
_OTHER_COMPUTE = _COMPUTE + 4  # a warp of the other warpgroup that computes, which has dK at d = 64
_DRAIN_LAGS, _COMPUTE_LAGS, _ADDING_LAGS = (frozenset(BACKWARD_WARPS[name]) for name in ("drain", "compute", "adding"))

# Products at d = 64, four steps each: of dK and dQ in the loop over steps, and behind it.
_PRODUCTS = find(MMA, "tcgen05.mma", 28)
_OF_S, _OF_DP, _OF_DV = _PRODUCTS[:4], _PRODUCTS[12:16], _PRODUCTS[16:20]
_OF_DK, _OF_DQ = _PRODUCTS[4:8] + _PRODUCTS[20:24], _PRODUCTS[8:12] + _PRODUCTS[24:]
_P_STORED = find(_COMPUTE, "tcgen05.st", 6)[2:4]
_LESSER = r"min\.s32\s+(%r\d+), (%r\d+), %r\d+"
_POLL = find(_ADD, "ld.acquire")


BACKWARD: Bugs = {
    "missing wait": (
        *(
            no_wait(
                f"{role} warps read a tile before it is there",
                BACKWARD_WARPS[role][0],
                "tiles.full",
                "d64",
                frozenset({PRODUCER}),
            )
            for role in ("mma", "compute", "drain", "adding")
        ),
        no_wait("scores are begun before K is there", MMA, "k.full", "d64", LOADS_LAG),
        no_wait("scores are begun before Q is there", MMA, "q.full", "d64", LOADS_LAG),
        no_wait("dP is begun before V is there", MMA, "v.full", "d64", LOADS_LAG),
        no_wait("dP is begun before dO is there", MMA, "do.full", "d64", LOADS_LAG),
        no_wait("dV is begun before P is stored", MMA, "scores.empty", "d64", _COMPUTE_LAGS),
        no_wait("dK and dQ are begun before dS is stored", MMA, "dp.empty", "d64", _COMPUTE_LAGS, count=2),
        no_wait(
            "dQ overwrites the last step's, which drain warps have not read",
            MMA,
            "dq.empty",
            "steps",
            _DRAIN_LAGS,
            count=2,
        ),
        no_wait(
            "dP overwrites the last step's dQ, which drain warps have not read", MMA, "dq.empty", "d128", _DRAIN_LAGS
        ),
        no_wait("compute warps read scores that are not complete", _COMPUTE, "scores.full", "d64", PRODUCTS_LAG),
        no_wait("compute warps read dP that is not complete", _COMPUTE, "dp.full", "d64", PRODUCTS_LAG),
        no_wait("compute warps read dV that is not complete", _COMPUTE, "dv.full", "d64", PRODUCTS_LAG),
        no_wait("compute warps read dK that is not complete", _OTHER_COMPUTE, "dk.full", "d64", PRODUCTS_LAG),
        no_wait("drain warps read dQ that is not complete", _DRAIN, "dq.full", "d64", PRODUCTS_LAG),
        no_wait(
            "drain warps overwrite a piece of dQ that has not been added",
            _DRAIN,
            "pieces_even.empty",
            "d64",
            _ADDING_LAGS,
            count=2,
        ),
        no_wait("a piece of dQ is added before it is there", _ADD, "pieces_even.full", "d64", _DRAIN_LAGS, count=2),
        no_wait_for_tma(
            "the place of a piece of dQ is given back while TMA still reads it",
            find(_ADD, "cp.async.bulk.wait_group.read", 2),
            "d64",
        ),
        no_wait("Q is loaded over Q that products still read", PRODUCER, "q.empty", "steps", PRODUCTS_LAG),
        no_wait("dO is loaded over dO that products still read", PRODUCER, "do.empty", "d128", PRODUCTS_LAG),
        no_wait("K is loaded over dK that TMA still reads", PRODUCER, "k.empty", "d128-tiles", STORES_LAG),
        no_wait(
            "a tile is published in the place of one that is still worked on",
            PRODUCER,
            "tiles.empty",
            "tiles",
            _ADDING_LAGS,
            count=2,
        ),
        no_wait_for_tma(
            "the CTA ends while TMA still reads dV and dK",
            find(_COMPUTE, "cp.async.bulk.wait_group.read"),
            "d128-tiles",
        ),
    ),
    "wrong phase": (
        wrong_phase("the mma warp waits for the phase of V that is over", MMA, "v.full", "d64"),
        wrong_phase("the mma warp is a phase late with dS", MMA, "dp.empty", "d64", count=2),
        wrong_phase("the producer waits for K as if stages began full", PRODUCER, "k.empty", "d64"),
        wrong_phase("compute warps are a phase late with scores", _COMPUTE, "scores.full", "d64"),
        wrong_phase("drain warps are a phase late with dQ", _DRAIN, "dq.full", "d64"),
        wrong_phase("adding warps wait for the phase of pieces that is over", _ADD, "pieces_even.full", "d64", count=2),
    ),
    "wrong stage": (
        Bug(
            "Q is put a stage further than products read it",
            find(PRODUCER, "cp.async.bulk.tensor", barrier="q.full").further(0, 16384),
            "d64",
        ),
        Bug(
            "lse is put a stage further than it is read",
            find(PRODUCER, "cp.async.bulk.shared::cluster", barrier="q.full").further(0, 512),
            "d64",
        ),
        Bug("dV takes dO of the neighbouring stage", _OF_DV.flipped(B, 16384 >> 4), "d64"),
        wrong_arrival(
            "dK that is begun gives back a stage of dO instead of Q",
            commits(MMA, "q.empty", 2).at_other_barrier(0, "q.empty", "do.empty"),
            "steps",
        ),
        wrong_arrival(
            "complete scores are signalled at the barrier of dP",
            commits(MMA, "scores.full").at_other_barrier(0, "scores.full", "dp.full"),
            "d64",
        ),
        Bug(
            "the second piece of dQ is added from the place of the first",
            find(_ADD, "cp.reduce.async.bulk", 2)[1].further(1, -16384),
            "tiles",
        ),
    ),
    "wrong descriptor": (
        Bug(
            "groups of 8 rows of K are looked for at half their distance, for scores",
            _OF_S.flipped(A, 0x60 << STRIDE),
            "d64",
        ),
        Bug(
            "groups of 8 rows of dO are looked for at half their distance, for dV",
            _OF_DV.flipped(B, 0x60 << STRIDE),
            "d64",
        ),
        Bug(
            "the second 64 queries of dS are looked for at the place of the first, for dQ",
            _OF_DQ.flipped(A, 0x400 << LEADING),
            "d64",
        ),
        Bug("V is said to be swizzled in 64 bytes", _OF_DP.flipped(A, 6 << SWIZZLE), "d64"),
        Bug("dS is said to have keys contiguous, for dQ", _OF_DQ.flipped(KIND, 1 << 15), "d64"),
        Bug("dO is said to have queries contiguous, for dV", _OF_DV.flipped(KIND, 1 << 16), "d64"),
        Bug("dS is said to be float16, for dK", _OF_DK.flipped(KIND, 1 << 7), "d64"),
        Bug("products of dP are said to have half the queries", _OF_DP.flipped(KIND, (16 ^ 8) << 17), "d64"),
    ),
    "wrong column": (
        Bug("scores take the place of dV", _OF_S.flipped(TARGET, 128), "d64"),
        Bug(
            "dV and dK change places", both(_OF_DV.flipped(TARGET, 128 ^ 320), _OF_DK.flipped(TARGET, 128 ^ 320)), "d64"
        ),
        Bug("dV takes P where there are scores", _OF_DV.flipped(A, 32), "d64"),
        Bug("P is stored a column further", _P_STORED.rewritten(r"\+ 0\]", "+ 1]"), "d64"),
    ),
    "wrong count": (
        counted_short("dS is said to be there when half the warps have stored it", "dp.empty", 4, "d64", _COMPUTE_LAGS),
        counted_short("Q is said to be read when lse is, but for a warp's", "q.empty", 1, "steps", PRODUCTS_LAG),
        counted_short(
            "a piece of dQ is said to be there when three of four warps have written it", "pieces_even.full", 1, "d64"
        ),
        all_arrive("all threads of a warp arrive for it", _DRAIN, "dq.empty", "d64"),
        wrong_arrival(
            "an arrival counts twice", arrivals(_COMPUTE, "dp.empty").rewritten(LAST_REGISTER, ", 2;"), "d64"
        ),
    ),
    "missing arrival": (
        no_commit("complete dP is not signalled", "dp.full", "d64", lint="arrivals"),
        no_arrival("drain warps do not say that they have read dQ", _DRAIN, "dq.empty", "steps"),
        no_arrival("adding warps do not give places of pieces back", _ADD, "pieces_even.empty", "steps", count=2),
        no_arrival("compute warps do not say that they have read lse", _COMPUTE, "q.empty", "steps"),
        Bug("dV does not give back the place of V", arrivals(_COMPUTE, "v.empty").left_out(), "tiles"),
    ),
    "wrong order": (
        Bug(
            "a commit stands ahead of the last product that it is about",
            _OF_S[3].moved_behind(commits(MMA, "scores.full")),
            "d64",
            PRODUCTS_LAG,
        ),
        Bug(
            "tensor memory is freed while others may still read it",
            find(MMA, "tcgen05.dealloc").ahead("bar.sync").left_out(),
            "d64",
            _COMPUTE_LAGS,
        ),
    ),
    "wrong bytes": (
        wrong_bytes("the bytes of lse are not expected", "q.full", 16384, "d64"),
        no_bytes("no bytes of V are expected", PRODUCER, "v.full", "d64", LOADS_LAG, lint="expected-bytes"),
        Bug(
            "delta signals the barrier of Q",
            find(PRODUCER, "cp.async.bulk.shared::cluster", barrier="do.full").at_other_barrier(3, "do.full", "q.full"),
            "d64",
        ),
        Bug(
            "half a piece of dQ is added",
            find(_ADD, "cp.reduce.async.bulk", 2).rewritten(LAST_REGISTER, ", 8192;"),
            "tiles",
        ),
    ),
    "missing fence": (
        no_proxy_fence(
            "dS in shared memory is multiplied without fence.proxy.async",
            arrivals(_COMPUTE, "dp.empty").ahead("fence.proxy.async"),
            "d64",
        ),
        no_proxy_fence(
            "a piece of dQ is added by TMA without fence.proxy.async",
            arrivals(_DRAIN, "pieces_even.full", 2)[:1].ahead("fence.proxy.async"),
            "d64",
        ),
        no_proxy_fence(
            "dV in shared memory is stored by TMA without fence.proxy.async",
            arrivals(_COMPUTE, "dv.empty").ahead("fence.proxy.async"),
            "d64",
        ),
        Bug(
            "dQ is added by TMA to what other proxies have stored, without fence.proxy.async.global",
            find(_ADD, "fence.proxy.async").left_out(),
            "d64",
            lint="turn",
            shows=False,
        ),
        Bug(
            "mbarriers are not made known to TMA and tensor cores",
            find(PRODUCER, "fence.mbarrier_init").left_out(),
            "d64",
            lint="init-fence",
            shows=False,
        ),
        no_fence_before("the stores of P and their arrival", arrivals(_COMPUTE, "scores.empty"), "d64"),
        no_fence_before("dS and its arrival", arrivals(_COMPUTE, "dp.empty"), "d64"),
        no_fence_before("reading dQ and giving it back", arrivals(_DRAIN, "dq.empty"), "d64"),
        no_fence_before("reading dV and giving it back", arrivals(_COMPUTE, "dv.empty"), "d64"),
        no_fence_after("dS's arrival and its products", waits(MMA, "dp.empty", 2)[0], "d64"),
        no_fence_after("the arrival of P and its product", waits(MMA, "scores.empty"), "d64"),
        no_fence_after("a commit and scores that are read", waits(_COMPUTE, "scores.full"), "d64"),
        no_fence_after("a commit and dP that is read", waits(_COMPUTE, "dp.full"), "d64"),
        no_fence_after("a commit and dQ that is read", waits(_DRAIN, "dq.full"), "d64"),
        no_fence_after("a commit and dV that is read", waits(_COMPUTE, "dv.full"), "d64"),
    ),
    "missing tcgen05.wait": (
        no_load_wait("dP is computed with before it is in registers", waits(_COMPUTE, "dp.full"), "d64"),
        no_load_wait("dQ is given back before it is in registers", waits(_DRAIN, "dq.full"), "d64"),
        no_store_wait("P is handed over before it is in tensor memory", _P_STORED[1], "steps"),
    ),
    "missing barrier": (
        no_warp_sync(
            "a thread signals its warp's piece of dQ without waiting for the warp",
            arrivals(_DRAIN, "pieces_even.full", 2)[:1],
            "d64",
        ),
        Bug(
            "a warp stores dV that others have not written",
            find(_COMPUTE, "bar.sync", having=r", 128").left_out(),
            "d64",
        ),
        Bug(
            "a warpgroup's barrier waits for three of its four warps",
            find(_COMPUTE, "bar.sync", having=r", 128").rewritten("128", "96"),
            "d64",
        ),
    ),
    "turns": (
        always_branches("dQ is added before its turn has come", _POLL, "turns"),
        Bug(
            "the turn is passed on before TMA has added",
            find(_ADD, "cp.async.bulk.wait_group", 3)[2].left_out(),
            "turns",
            STORES_LAG,
            lint="turn",
        ),
        Bug("the turn is not counted", find(_ADD, "red").left_out(), "turns"),
        Bug("the turn is counted twice", find(_ADD, "red").rewritten(LAST_REGISTER, ", 2;"), "turns"),
        Bug("a turn is counted for the next block", find(_ADD, "red").further(0, 4), "turns"),
        always_branches("dQ is rounded before all tiles have added to it", find(_COMPUTE, "ld.acquire", 2)[0], "turns"),
    ),
    "workspace": (
        Bug(
            "the first tile adds to dQ, and later ones store",
            find(_ADD, "cp.reduce.async.bulk", 2).ahead("setp").rewritten("setp.ne", "setp.eq"),
            "d64",
        ),
        Bug(
            "the second piece of dQ is put where the first one is",
            find(_ADD, "cp.async.bulk.global", 2)[1].further(0, -16384),
            "d64",
        ),
        Bug(
            "delta is read where lse is",
            find(PRODUCER, "cp.async.bulk.shared::cluster", barrier="do.full")
            .ahead("add.s64")
            .rewritten(r", %rd\d+;", ", 0;"),
            "d64",
        ),
    ),
    "columns": columns_not_freed("d64"),
    "memory order": (
        Bug(
            "a turn is polled without acquiring",
            _POLL.rewritten("acquire", "relaxed"),
            "turns",
            lint="scope",
            shows=False,
        ),
        Bug(
            "compute warps poll for all turns at the scope of the CTA",
            find(_COMPUTE, "ld.acquire", 2).rewritten("gpu", "cta"),
            "turns",
            lint="scope",
            shows=False,
        ),
        Bug(
            "a turn is passed on without releasing",
            find(_ADD, "red.release").rewritten("release", "relaxed"),
            "turns",
            lint="scope",
        ),
        Bug(
            "a turn is passed on at the scope of the CTA",
            find(_ADD, "red.release").rewritten("gpu", "cta"),
            "turns",
            lint="scope",
        ),
    ),
    "offset": (
        Bug(
            "the offset of a block of dQ is computed in 32 bits",
            find(_ADD, "mul.wide", having=", 32768;").rewritten(
                r"mul\.wide\.s32\s+(%rd\d+), (%r\d+), 32768;",
                r"{ .reg .b32 t; mul.lo.s32 t, \2, 32768; cvt.s64.s32 \1, t; }",
            ),
            "d64",
            lint="offset",
            shows=False,
        ),
    ),
    "registers": (
        wrong_registers("compute warps take more registers than others have given", _COMPUTE, 168, 184, "d64"),
        drain_keeps_registers("d64"),
        wrong_registers("the mma warps take registers by .dec", MMA, 80, 136, "d64"),
        Bug(
            "adding warps give registers back when a tile is there",
            find(_ADD, "setmaxnreg").moved_behind(waits(_ADD, "tiles.full")),
            "d64",
            lint="registers",
        ),
    ),
    "missing store": (
        Bug(
            "P is computed of scores as they were before a bias was added",
            find(_COMPUTE, "tcgen05.st", 8)[:2].left_out(),
            "bias",
        ),
        Bug("gradients of a bias are not stored", find(_COMPUTE, "st.global.b16", 64)[:1].left_out(), "bias"),
    ),
    "dropped predicate": (
        Bug(
            "a bias is read behind its last query",
            find(_COMPUTE, "ld.global.s16", 64).ahead("min.s32").rewritten(_LESSER, r"mov.b32 \1, \2"),
            "bias",
        ),
        Bug("a tile's first dV is added to the last tile's", _OF_DV[0].flipped(ACCUMULATES), "tiles"),
        Bug("a tile's first dK is added to the last tile's", _OF_DK[::4].flipped(ACCUMULATES), "tiles"),
        always_branches("keys behind an end are not hidden", find(_COMPUTE, "tcgen05.ld", 8)[0], "causal"),
    ),
}
