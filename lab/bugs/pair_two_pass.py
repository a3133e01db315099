"""Bugs of the backward kernel of pairs of CTAs in two passes, where it is not as those of one pass or one CTA."""

from lab.bugs.code import find, uncounted
from lab.bugs.table import Bug, Bugs

# Products, four instructions each, of the first pass and of the second.
_PRODUCTS = find("mma", "tcgen05.mma", 24)
_FIRST_OF_S, _OF_DV, _OF_DK = _PRODUCTS[:4], _PRODUCTS[4:8], _PRODUCTS[8:12]
_LAST_OF_S, _OF_DP, _OF_DQ = _PRODUCTS[12:16], _PRODUCTS[16:20], _PRODUCTS[20:]


PAIR_TWO_PASS: Bugs = {
    "missing wait": (
        Bug.no_wait(
            "lse and delta are loaded over those that compute warps have not read",
            "producer",
            "stats.empty",
            "steps",
            count=2,
        ),
        Bug.no_wait("K is copied before it is there", "compute", "k.full"),
        Bug.no_wait("scores are begun before K is in tensor memory", "mma", "keys.full"),
        Bug.no_wait("scores are begun before Q is there", "mma", "q.full", count=3, which=0),
        Bug.no_wait("dV is begun before dO by columns is there", "mma", "do_columns.full", lags="producer"),
        Bug.no_wait("scores are begun again before Q is there", "mma", "q.full", count=3, which=2),
        Bug.no_wait("dP is begun before dO is there", "mma", "do.full", lags="producer"),
        Bug.no_wait("dK is begun before Q by columns is there", "mma", "q.full", lags="producer", count=3, which=1),
        Bug.no_wait("dQ is begun before K by columns is there", "mma", "k_columns.full", lags="producer"),
        Bug.no_wait("dQ is begun before the second CTA's dS has come", "mma", "exchange.full", "two"),
        Bug.no_wait(
            "dQ is begun before the leader's dS has come to the second CTA", "mma", "exchange.empty", "tiles", "loads"
        ),
        Bug.no_wait("the second CTA passes on dS that has not come", "second mma", "exchange.full"),
        Bug.no_wait(
            "Q is loaded over Q that the first pass still reads", "producer", "q.empty", "steps", count=5, which=0
        ),
        Bug.no_wait(
            "Q by columns is loaded over Q that products still read", "producer", "q.empty", "two", count=5, which=2
        ),
        Bug.no_wait(
            "K by columns is loaded over dV that TMA still reads", "producer", "k_columns.empty", lags="stores"
        ),
        Bug.no_wait("V is loaded over dK that TMA still reads", "producer", "v.empty", "tiles", "stores"),
        Bug.no_wait(
            "K is loaded over K by columns that dQ still reads", "producer", "k.empty", "tiles", count=2, which=0
        ),
        Bug.no_wait(
            "dO by rows is loaded over dO by columns that dV still reads",
            "producer",
            "do_columns.empty",
            count=4,
            which=1,
        ),
        Bug.no_wait("dV is begun before P is stored", "mma", "scores.empty", count=3, which=0),
        Bug.no_wait("dK is begun before dS is stored", "mma", "scores.empty", count=3, which=1),
        Bug.no_wait(
            "dQ overwrites scores that compute warps have not read", "mma", "scores.empty", "steps", count=3, which=2
        ),
        Bug.no_wait(
            "scores overwrite the last step's dQ, which drain warps have not read",
            "mma",
            "dq.empty",
            "steps",
            count=2,
            which=1,
        ),
        Bug.no_wait(
            "scores overwrite the last tile's dQ, which drain warps have not read",
            "mma",
            "dq.empty",
            "tiles",
            count=2,
            which=0,
        ),
        Bug.no_wait("compute warps overwrite dS that the last step's dQ still reads", "compute", "dq.full", "steps"),
        Bug.no_wait("the second pass reads scores that are not complete", "compute", "scores.full", count=3, which=1),
    ),
    "wrong phase": (
        Bug.wrong_phase("the second pass is a phase late with scores", "compute", "scores.full", count=3, which=1),
        Bug.wrong_phase("the producer waits for the last tile's dV", "producer", "k_columns.empty"),
        Bug.wrong_phase("compute warps are a phase late with dQ", "compute", "dq.full"),
    ),
    "wrong place": (
        Bug("K is taken from another place than it was copied to", _FIRST_OF_S.flipped("a", 384 ^ 448)),
        Bug("scores of the second pass take the place of dP", _LAST_OF_S.flipped("target", 320)),
        Bug("dQ takes the place of dP", _OF_DQ.flipped("target", 320)),
        Bug("dV takes P from the other place", _OF_DV.flipped("a", 320)),
        Bug("dK takes dS from the place of scores", _OF_DK.flipped("a", 320)),
        Bug("products of dP are said to have the keys of one CTA", _OF_DP.flipped("rows", 16 ^ 8)),
    ),
    "missing arrival": (
        Bug.no_arrival("dV does not give back the place of K", "compute", "k_columns.empty"),
        Bug.no_arrival("K in tensor memory is not signalled", "compute", "keys.full"),
        Bug.no_commit("the last dQ does not give back the place of K", "k.empty", "tiles", lint="arrivals"),
        Bug.no_commit("dK does not give Q by columns back", "q.empty", "two", count=3, which=1),
    ),
    "wrong count": (
        Bug(
            "K is said to be in tensor memory when one CTA has copied it",
            uncounted("keys.full", 8),
            lags="second compute",
        ),
    ),
    "dropped predicate": (
        Bug("the second pass's dK is added to dV", _OF_DK[0].flipped("accumulates")),
        Bug("a tile's first dV is added to the last tile's dK", _OF_DV[0].flipped("accumulates"), "tiles"),
    ),
}
