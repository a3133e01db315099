"""Bugs of the backward kernel of pairs of CTAs, where it is not as the other one."""

from lab.bugs.code import PUBLISHED, commits, find, meetings
from lab.bugs.table import Bug, Bugs

# Products, four steps each: of dQ in the loop over steps, and behind it.
_PRODUCTS = find("mma", "tcgen05.mma", 28)
_OF_DQ = _PRODUCTS[12:16] + _PRODUCTS[24:]
_SENT = find("second compute", "cp.async.bulk.shared::cluster", barrier="exchange.full")


PAIR: Bugs = {
    "missing wait": Bug.no_waits(
        """
        second producer tiles.full, first producer lags | the second CTA's producer reads a tile before it is there
        mma k.full in d128 | scores are begun before K is there
        mma q.full | scores are begun before Q is there
        mma v.full in d128 | dP is begun before V is there
        mma do.full in steps | dP is begun before dO is there
        mma do_columns.full*2 in d128 | dV is begun before dO by columns is there
        mma q_columns.full*2 in d128 | dK is begun before Q by columns is there
        mma k_columns.full*2, producer lags | dQ is begun before K by columns is there
        mma p.full*2 | dV is begun before P is stored
        mma dp.empty*2 | dK is begun before dS is stored
        mma exchange.full*2 | dQ is begun before the second CTA's dS has come
        mma exchange.empty*2, loads lag | dQ is begun before the leader's dS has come to the second CTA
        second mma exchange.full | the second CTA passes on dS that has not come
        mma scores.empty in steps | dQ overwrites scores that compute warps have not read
        mma dq.empty*2[0] in steps | scores overwrite the last step's dQ, which drain warps have not read
        mma dq.empty*2[1] in steps | a tile's last dQ overwrites that before it, which drain warps have not read
        compute dq.full in steps | compute warps overwrite dS that the last step's dQ still reads
        compute stats.full in steps | compute warps read lse before it is there
        producer q.empty*2[0] in steps | Q is loaded over Q that scores still read
        producer do.empty*2[0] in steps | dO is loaded over dO that dP still reads
        producer do_columns.empty*2[0] in steps | dO by columns is loaded over that which dV still reads
        producer q_columns.empty*2[0] in steps | Q by columns is loaded over that which dK still reads
        producer tiles.empty*4 in tiles, adding lags | a tile is published in the place of one that is still worked on
        """
    ),
    "wrong phase": Bug.wrong_phases(
        "mma exchange.full*2 | the mma warp waits for the phase of the exchange that is over"
    ),
    "wrong place": (
        Bug("dS is sent to the next warp's place", _SENT.further(0, 4096)),
        Bug("dS is sent to the CTA that it comes from", _SENT.ahead("mapa").ahead("mapa").flipped("rank")),
        Bug(
            "keys of the second CTA, by columns, are put where those of the first are",
            find("producer", "cp.async.bulk.tensor", 2, "k_columns.full")[1].further(0, -16384),
        ),
        Bug("products of dQ are said to have the queries of one CTA", _OF_DQ.flipped("rows", 16 ^ 8)),
    ),
    "wrong count": (
        Bug.counted_short("P is said to be there when one CTA has stored it", "p.full", 8, lags="second compute"),
    ),
    "wrong CTA": (
        Bug("complete scores are not signalled to the second CTA", commits("scores.full").flipped("ctas", 2)),
        Bug.no_arrival("the leader gets no signal that scores are read", "compute", "scores.empty", "steps"),
        Bug.no_arrival(
            "the second CTA's mma warp does not signal to the leader that dS has come", "second mma", "exchange.empty"
        ),
        Bug("tiles are not published to the second CTA", PUBLISHED.left_out(), lint="expected-bytes"),
    ),
    "wrong bytes": (
        Bug.wrong_bytes("the bytes of one CTA's Q are expected", "q.full", 16384),
        Bug("half of a warp's dS is sent", _SENT.rewritten(r", %r\d+, \[barrier\]", ", 2048, [barrier]")),
        Bug.no_bytes("what a tile is is not expected", "second producer", "tiles.full", count=2),
    ),
    "missing fence": (Bug.no_proxy_fence("dS is sent without fence.proxy.async", _SENT.ahead("fence.proxy.async")),),
    "missing barrier": (
        Bug.no_warp_sync("a thread sends its warp's dS without waiting for the warp", _SENT),
        Bug(
            "the CTAs do not meet before the one arrives at the other's barriers",
            meetings("drain")[:2].left_out(),
            lags="second",
        ),
    ),
    "memory order": (
        Bug(
            "compute warps arrive at the leader's barriers at the scope of the CTA",
            find("second compute", "mbarrier.arrive.release.cluster", 6)[:1].rewritten(r"\.release\.cluster", ""),
            lint="scope",
            shows=False,
        ),
    ),
    "leaving": (
        Bug(
            "a warp arrives at the other CTA's barrier behind the last meeting",
            find("drain", "mbarrier.arrive.release.cluster", 2)[1].moved_behind(meetings("drain")[3]),
            lint="cluster",
            shows=False,
        ),
    ),
}
