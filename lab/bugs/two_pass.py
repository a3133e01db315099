"""Bugs of the backward kernel of two passes, where it is not as the other one."""

from lab.bugs.code import arrivals, find, waits
from lab.bugs.table import Bug, Bugs

# Products, four instructions each, of the first pass and of the second.
_PRODUCTS = find("mma", "tcgen05.mma", 28)
_OF_DV, _OF_DK, _LAST_OF_S = _PRODUCTS[4:8], _PRODUCTS[8:12], _PRODUCTS[24:]


TWO_PASS: Bugs = {
    "missing wait": Bug.no_waits(
        """
        mma v.full | dP is begun before V is there
        producer v.empty, stores lag | V is loaded over dV that TMA still reads
        mma scores.empty*2[0] | dV is begun before P is stored
        mma scores.empty*2[1] | dK is begun before dS is stored
        mma dq.empty*2 in steps | dQ overwrites the last step's, which drain warps have not read
        producer q.empty*2[1] in d256, products lag | Q is loaded over Q that products still read
        producer do.empty*2[1] in d256 | dO is loaded over dO that dP still reads
        compute scores.full*3[1] | the second pass reads scores that are not complete
        drain dq.full+1 | drain warps read the second part of dQ before it is complete
        """
    ),
    "wrong phase": Bug.wrong_phases("compute scores.full*3[1] | the second pass is a phase late with scores"),
    "wrong column": (
        Bug("scores of the second pass take the place of dP", _LAST_OF_S.flipped("target", 320)),
        Bug("dV takes P from the other place", _OF_DV.flipped("a", 320)),
    ),
    "missing arrival": (
        Bug("the first pass does not give lse back", arrivals("compute", "q.empty", 2)[0].left_out()),
        Bug.no_commit("complete dP is not signalled", "scores.full", count=3, which=1),
    ),
    "dropped predicate": (
        Bug("the second pass's dK is added to dV", _OF_DK[0].flipped("accumulates")),
        Bug("a tile's first dV is added to the last tile's dK", _OF_DV[0].flipped("accumulates"), "tiles"),
    ),
    "list": (
        Bug(
            "turns are published in the first pass, too",
            waits("producer", "turns.empty").ahead("bra").left_out(),
            "lists",
        ),
        Bug.always_branches("the first pass does not hide scores", find("compute", "tcgen05.ld", 13)[0], "lists"),
    ),
    "missing fence": (
        Bug(
            "the first pass gives lse back while it is read",
            arrivals("compute", "q.empty", 2)[0].ahead("fence.proxy.async").left_out(),
            "d256",
        ),
    ),
}
