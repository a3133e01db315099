"""Bugs of the kernel that computes a bias's gradient."""

from lab.bugs.code import arrivals, find, waits
from lab.bugs.table import Bug, Bugs

# Products, four instructions each.
_PRODUCTS = find("mma", "tcgen05.mma", 8)
_OF_S, _OF_DP = _PRODUCTS[:4], _PRODUCTS[4:]
_MEETINGS = find("compute", "bar.sync", 4)[1:3]  # of warps that compute

BIAS: Bugs = {
    "missing wait": Bug.no_waits(
        """
        mma qk.full | scores are begun before Q and K are there
        mma dov.full | dP is begun before dO and V are there
        mma dp.empty in several | dP overwrites that which compute warps have not read
        compute scores.full | compute warps read scores that are not complete
        compute dp.full | compute warps read dP that is not complete
        producer qk.empty in several | Q and K are loaded over those that scores still read
        producer dov.empty in several | dO and V are loaded over those that dP still reads
        compute pieces.full | compute warps do not wait for published pieces
        mma pieces.full in unseen | the mma warp does not wait for published pieces
        """
    ),
    "wrong phase": Bug.wrong_phases("compute dp.full | compute warps are a phase late with dP"),
    "wrong column": (Bug("dP takes the place of the bias", _OF_DP.flipped("target", 256 ^ 384)),),
    "missing arrival": (
        Bug.no_arrival("compute warps do not give scores back", "compute", "scores.empty", "several"),
        Bug.no_commit("scores do not give Q and K back", "qk.empty", "several"),
    ),
    "missing barrier": (
        Bug(
            "rows are written before all of their sums are in shared memory", _MEETINGS[0].left_out(), lags="compute:4"
        ),
        Bug("sums over keys are added up before they are all there", _MEETINGS[1].left_out(), "number", "compute:1:4"),
    ),
    "dropped predicate": (Bug("scores are added to those of two steps before", _OF_S[0].flipped("accumulates")),),
    "missing fence": (
        Bug(
            "dP is given back without tcgen05.fence::before_thread_sync",
            arrivals("compute", "dp.empty").ahead("tcgen05.fence").left_out(),
            lint="fence-before",
            shows=False,
        ),
        Bug(
            "scores are read without tcgen05.fence::after_thread_sync",
            waits("compute", "scores.full").behind("tcgen05.fence").left_out(),
            lint="fence-after",
            shows=False,
        ),
    ),
    "registers": (
        Bug.wrong_registers("compute warps take more registers than others have given", "compute", 208, 216),
    ),
}
