"""Bugs of the backward kernel of pairs of CTAs, where it is not as the other one."""

from lab.bugs.code import (
    BACKWARD_WARPS,
    KIND,
    MMA,
    PRODUCER,
    PUBLISHED,
    SECOND,
    STRIDE,
    TARGET,
    A,
    B,
    commits,
    find,
    meetings,
    waits,
)
from lab.bugs.table import (
    FIRST_LAGS,
    LOADS_LAG,
    PRODUCTS_LAG,
    SECOND_LAGS,
    Bug,
    Bugs,
    counted_short,
    drain_keeps_registers,
    no_arrival,
    no_bytes,
    no_proxy_fence,
    no_wait,
    no_warp_sync,
    wrong_arrival,
    wrong_bytes,
    wrong_phase,
)

_DRAIN, _COMPUTE = (BACKWARD_WARPS[name][0] for name in ("drain", "compute"))
_SENDS = SECOND + _COMPUTE  # a warp of the second CTA that has queries of the leader
_PRODUCER_LAGS, _DRAIN_LAGS, _ADDING_LAGS, _COMPUTE_LAGS = (
    frozenset(BACKWARD_WARPS[name]) for name in ("producer", "drain", "adding", "compute")
)

# Products, four steps each: of dK and dQ in the loop over steps, and behind it.
_PRODUCTS = find(MMA, "tcgen05.mma", 28)
_OF_S, _OF_DV = _PRODUCTS[:4], _PRODUCTS[16:20]
_OF_DK, _OF_DQ = _PRODUCTS[4:8] + _PRODUCTS[20:24], _PRODUCTS[12:16] + _PRODUCTS[24:]
_SENT = find(_SENDS, "cp.async.bulk.shared::cluster", barrier="exchange.full")


PAIR: Bugs = {
    "missing wait": (
        no_wait(
            "the second CTA's producer reads a tile before it is there",
            SECOND + PRODUCER,
            "tiles.full",
            "one",
            frozenset({(0, PRODUCER)}),
        ),
        no_wait("scores are begun before K is there", MMA, "k.full", "d128", LOADS_LAG),
        no_wait("scores are begun before Q is there", MMA, "q.full", "one", LOADS_LAG),
        no_wait("dP is begun before V is there", MMA, "v.full", "d128", LOADS_LAG),
        no_wait("dP is begun before dO is there", MMA, "do.full", "steps", LOADS_LAG),
        no_wait("dV is begun before dO by columns is there", MMA, "do_columns.full", "d128", LOADS_LAG, count=2),
        no_wait("dK is begun before Q by columns is there", MMA, "q_columns.full", "d128", LOADS_LAG, count=2),
        no_wait("dQ is begun before K by columns is there", MMA, "k_columns.full", "one", _PRODUCER_LAGS, count=2),
        no_wait("dV is begun before P is stored", MMA, "p.full", "one", _COMPUTE_LAGS, count=2),
        no_wait("dK is begun before dS is stored", MMA, "dp.empty", "one", _COMPUTE_LAGS, count=2),
        no_wait("dQ is begun before the second CTA's dS has come", MMA, "exchange.full", "one", LOADS_LAG, count=2),
        no_wait(
            "dQ is begun before the leader's dS has come to the second CTA",
            MMA,
            "exchange.empty",
            "one",
            LOADS_LAG,
            count=2,
        ),
        no_wait("the second CTA passes on dS that has not come", SECOND + MMA, "exchange.full", "one", LOADS_LAG),
        no_wait("dQ overwrites scores that compute warps have not read", MMA, "scores.empty", "steps", _COMPUTE_LAGS),
        Bug(
            "scores overwrite the last step's dQ, which drain warps have not read",
            waits(MMA, "dq.empty", 2)[:1].left_out(),
            "steps",
            _DRAIN_LAGS,
        ),
        Bug(
            "a tile's last dQ overwrites that before it, which drain warps have not read",
            waits(MMA, "dq.empty", 2)[1:].left_out(),
            "steps",
            _DRAIN_LAGS,
        ),
        no_wait(
            "compute warps overwrite dS that the last step's dQ still reads", _COMPUTE, "dq.full", "steps", PRODUCTS_LAG
        ),
        no_wait("compute warps read lse before it is there", _COMPUTE, "stats.full", "steps", LOADS_LAG),
        no_wait(
            "Q is loaded over Q that scores still read", PRODUCER, "q.empty", "steps", PRODUCTS_LAG, count=2, which=0
        ),
        no_wait(
            "dO is loaded over dO that dP still reads", PRODUCER, "do.empty", "steps", PRODUCTS_LAG, count=2, which=0
        ),
        no_wait(
            "dO by columns is loaded over that which dV still reads",
            PRODUCER,
            "do_columns.empty",
            "steps",
            PRODUCTS_LAG,
            count=2,
            which=0,
        ),
        no_wait(
            "Q by columns is loaded over that which dK still reads",
            PRODUCER,
            "q_columns.empty",
            "steps",
            PRODUCTS_LAG,
            count=2,
            which=0,
        ),
        no_wait(
            "a tile is published in the place of one that is still worked on",
            PRODUCER,
            "tiles.empty",
            "tiles",
            _ADDING_LAGS,
            count=4,
        ),
    ),
    "wrong phase": (
        wrong_phase(
            "the mma warp waits for the phase of the exchange that is over", MMA, "exchange.full", "one", count=2
        ),
        wrong_phase("the second CTA passes on the last step's dS", SECOND + MMA, "exchange.full", "d128"),
        wrong_phase("compute warps are a phase late with dQ", _COMPUTE, "dq.full", "one"),
    ),
    "wrong place": (
        Bug("dS is sent to the next warp's place", _SENT.further(0, 4096), "one"),
        Bug("dS is sent to the CTA that it comes from", _SENT.ahead("mapa").ahead("mapa").flipped(2), "one"),
        Bug(
            "keys of the second CTA, by columns, are put where those of the first are",
            find(PRODUCER, "cp.async.bulk.tensor", 2, "k_columns.full")[1].further(0, -16384),
            "one",
        ),
        Bug(
            "both CTAs load the first columns of dO",
            find(PRODUCER, "cp.async.bulk.tensor", barrier="do_columns.full").rewritten(r"\{%r\d+", "{0"),
            "one",
        ),
        Bug(
            "a descriptor of Q by columns has half the distance of groups of 8 rows",
            _OF_DK.flipped(B, 0x60 << STRIDE),
            "one",
        ),
        Bug("products of dQ are said to have the queries of one CTA", _OF_DQ.flipped(KIND, (16 ^ 8) << 24), "one"),
        Bug("scores take the place of dV", _OF_S.flipped(TARGET, 128), "one"),
        Bug("dV takes the second half of P from behind the first", _OF_DV[2:].flipped(A, 64), "one"),
    ),
    "wrong count": (
        counted_short(
            "P is said to be there when one CTA has stored it",
            "p.full",
            8,
            "one",
            frozenset((1, i) for i in range(4, 12)),
        ),
        counted_short(
            "a tile's place is said to be free when one CTA has read it", "tiles.empty", 16, "tiles", _ADDING_LAGS
        ),
        counted_short("dS is said to have come when three of four warps have sent it", "exchange.full", 1, "d128"),
    ),
    "wrong CTA": (
        Bug("complete scores are not signalled to the second CTA", commits(MMA, "scores.full").flipped(1, 2), "one"),
        Bug("the second CTA's place of Q is not given back", commits(MMA, "q.empty").flipped(1, 2), "steps"),
        no_arrival("the leader gets no signal that scores are read", _COMPUTE, "scores.empty", "steps"),
        no_arrival(
            "the second CTA's mma warp does not signal to the leader that dS has come",
            SECOND + MMA,
            "exchange.empty",
            "one",
        ),
        wrong_arrival(
            "the second CTA's mma warp signals to itself",
            find(SECOND + MMA, "mapa", 2)[0].rewritten(", 0;", ", 1;"),
            "one",
        ),
        Bug("tiles are not published to the second CTA", PUBLISHED.left_out(), "one", lint="expected-bytes"),
    ),
    "wrong bytes": (
        wrong_bytes("the bytes of one CTA's Q are expected", "q.full", 16384, "one"),
        Bug("half of a warp's dS is sent", _SENT.rewritten(r", %r\d+, \[barrier\]", ", 2048, [barrier]"), "one"),
        no_bytes("what a tile is is not expected", SECOND + PRODUCER, "tiles.full", "one", count=2),
    ),
    "missing fence": (
        no_proxy_fence("dS is sent without fence.proxy.async", _SENT.ahead("fence.proxy.async"), "one"),
        no_proxy_fence(
            "what a tile is is sent without fence.proxy.async", PUBLISHED[:1].ahead("fence.proxy.async"), "one"
        ),
    ),
    "missing barrier": (
        no_warp_sync("a thread sends its warp's dS without waiting for the warp", _SENT, "one"),
        Bug(
            "the CTAs do not meet before the one arrives at the other's barriers",
            meetings(_DRAIN)[:2].left_out(),
            "one",
            SECOND_LAGS,
        ),
        Bug("a CTA ends while the other still writes to it", meetings(_DRAIN)[2:].left_out(), "one", FIRST_LAGS),
    ),
    "memory order": (
        Bug(
            "compute warps arrive at the leader's barriers at the scope of the CTA",
            find(_SENDS, "mbarrier.arrive.release.cluster", 6)[:1].rewritten(r"\.release\.cluster", ""),
            "one",
            lint="scope",
            shows=False,
        ),
    ),
    "leaving": (
        Bug(
            "a warp arrives at the other CTA's barrier behind the last meeting",
            find(_DRAIN, "mbarrier.arrive.release.cluster", 2)[1].moved_behind(meetings(_DRAIN)[3]),
            "one",
            lint="cluster",
            shows=False,
        ),
        Bug(
            "a warp arrives at the other CTA's barrier ahead of the first meeting",
            meetings(_DRAIN)[1].moved_behind(meetings(_DRAIN)[2]),
            "one",
            lint="cluster",
            shows=False,
        ),
    ),
    "registers": (drain_keeps_registers("one"),),
}
