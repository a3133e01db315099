"""Bugs of the backward kernel of pairs of CTAs in two passes, where it is not as those of one pass or one CTA."""

from lab.bugs.code import find, uncounted
from lab.bugs.table import Bug, Bugs

# Products, four instructions each, of the first pass and of the second.
_PRODUCTS = find("mma", "tcgen05.mma", 24)
_FIRST_OF_S, _OF_DK, _OF_DQ = _PRODUCTS[:4], _PRODUCTS[8:12], _PRODUCTS[20:]


PAIR_TWO_PASS: Bugs = {
    "missing wait": Bug.no_waits(
        """
        producer stats.empty*2 in steps | lse and delta are loaded over those that compute warps have not read
        compute k.full | K is copied before it is there
        mma keys.full | scores are begun before K is in tensor memory
        mma q.full*3[0] | scores are begun before Q is there
        mma do_columns.full, producer lags | dV is begun before dO by columns is there
        mma q.full*3[2] | scores are begun again before Q is there
        mma do.full, producer lags | dP is begun before dO is there
        mma q.full*3[1], producer lags | dK is begun before Q by columns is there
        mma k_columns.full, producer lags | dQ is begun before K by columns is there
        mma exchange.full in two | dQ is begun before the second CTA's dS has come
        mma exchange.empty in tiles, loads lag | dQ is begun before the leader's dS has come to the second CTA
        second mma exchange.full | the second CTA passes on dS that has not come
        producer q.empty*5[0] in steps | Q is loaded over Q that the first pass still reads
        producer q.empty*5[2] in two | Q by columns is loaded over Q that products still read
        producer k_columns.empty, stores lag | K by columns is loaded over dV that TMA still reads
        producer v.empty in tiles, stores lag | V is loaded over dK that TMA still reads
        producer k.empty*2[0] in tiles | K is loaded over K by columns that dQ still reads
        producer do_columns.empty*4[1] | dO by rows is loaded over dO by columns that dV still reads
        mma scores.empty*3[0] | dV is begun before P is stored
        mma scores.empty*3[1] | dK is begun before dS is stored
        mma scores.empty*3[2] in steps | dQ overwrites scores that compute warps have not read
        mma dq.empty*2[1] in steps | scores overwrite the last step's dQ, which drain warps have not read
        mma dq.empty*2[0] in tiles | scores overwrite the last tile's dQ, which drain warps have not read
        compute dq.full in steps | compute warps overwrite dS that the last step's dQ still reads
        compute scores.full*3[1] | the second pass reads scores that are not complete
        """
    ),
    "wrong phase": Bug.wrong_phases("producer k_columns.empty | the producer waits for the last tile's dV"),
    "wrong place": (
        Bug("K is taken from another place than it was copied to", _FIRST_OF_S.flipped("a", 384 ^ 448)),
        Bug("dQ takes the place of dP", _OF_DQ.flipped("target", 320)),
        Bug("dK takes dS from the place of scores", _OF_DK.flipped("a", 320)),
    ),
    "missing arrival": (
        Bug.no_arrival("dV does not give back the place of K", "compute", "k_columns.empty"),
        Bug.no_commit("dK does not give Q by columns back", "q.empty", "two", count=3, which=1),
    ),
    "wrong count": (
        Bug(
            "K is said to be in tensor memory when one CTA has copied it",
            uncounted("keys.full", 8),
            lags="second compute",
        ),
    ),
}
