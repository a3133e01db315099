"""Bugs of the kernel that computes a bias's gradient."""

from lab.bugs.code import ACCUMULATES, BIAS_WARPS, MMA, PARITY, PRODUCER, TARGET, arrivals, commits, find, waits
from lab.bugs.table import LOADS_LAG, PRODUCTS_LAG, Bug, Bugs

_COMPUTE = BIAS_WARPS["compute"][0]  # the first warp
_COMPUTE_LAGS, _HALF_LAGS = frozenset(BIAS_WARPS["compute"]), frozenset(BIAS_WARPS["compute"][4:])

# Products, four instructions each.
_PRODUCTS = find(MMA, "tcgen05.mma", 8)
_OF_S, _OF_DP = _PRODUCTS[:4], _PRODUCTS[4:]
_MEETINGS = find(_COMPUTE, "bar.sync", 4)[1:3]  # of warps that compute

BIAS: Bugs = {
    "missing wait": (
        Bug("scores are begun before Q and K are there", waits(MMA, "qk.full").left_out(), "one", LOADS_LAG),
        Bug("dP is begun before dO and V are there", waits(MMA, "dov.full").left_out(), "one", LOADS_LAG),
        Bug(
            "dP overwrites that which compute warps have not read",
            waits(MMA, "dp.empty").left_out(),
            "several",
            _COMPUTE_LAGS,
        ),
        Bug(
            "compute warps read scores that are not complete",
            waits(_COMPUTE, "scores.full").left_out(),
            "one",
            PRODUCTS_LAG,
        ),
        Bug("compute warps read dP that is not complete", waits(_COMPUTE, "dp.full").left_out(), "one", PRODUCTS_LAG),
        Bug(
            "Q and K are loaded over those that scores still read",
            waits(PRODUCER, "qk.empty").left_out(),
            "several",
            PRODUCTS_LAG,
        ),
        Bug(
            "dO and V are loaded over those that dP still reads",
            waits(PRODUCER, "dov.empty").left_out(),
            "several",
            PRODUCTS_LAG,
        ),
        Bug(
            "compute warps do not wait for published pieces",
            waits(_COMPUTE, "pieces.full").left_out(),
            "one",
            frozenset({PRODUCER}),
        ),
        Bug(
            "the mma warp does not wait for published pieces",
            waits(MMA, "pieces.full").left_out(),
            "unseen",
            frozenset({PRODUCER}),
        ),
    ),
    "wrong phase": (
        Bug("compute warps are a phase late with dP", waits(_COMPUTE, "dp.full").flipped(PARITY), "one"),
        Bug("the mma warp waits for the phase of operands that is over", waits(MMA, "qk.full").flipped(PARITY), "one"),
    ),
    "wrong column": (
        Bug("dP takes the place of the bias", _OF_DP.flipped(TARGET, 256 ^ 384), "one"),
        Bug("scores take each other's place", _OF_S.flipped(TARGET, 128), "one"),
    ),
    "missing arrival": (
        Bug(
            "compute warps do not give scores back",
            arrivals(_COMPUTE, "scores.empty").left_out(),
            "several",
            lint="arrivals",
        ),
        Bug(
            "complete dP is not signalled: there is no commit",
            commits(MMA, "dp.full").left_out(),
            "one",
            lint="arrivals",
        ),
        Bug("scores do not give Q and K back: there is no commit", commits(MMA, "qk.empty").left_out(), "several"),
    ),
    "missing barrier": (
        Bug(
            "rows are written before all of their sums are in shared memory",
            _MEETINGS[0].left_out(),
            "one",
            _HALF_LAGS,
        ),
        Bug(
            "sums over keys are added up before they are all there",
            _MEETINGS[1].left_out(),
            "number",
            frozenset(range(1, 4)),
        ),
    ),
    "dropped predicate": (
        Bug("scores are added to those of two steps before", _OF_S[0].flipped(ACCUMULATES), "one"),
        Bug("dP is added to that of the step before", _OF_DP[0].flipped(ACCUMULATES), "one"),
    ),
    "missing fence": (
        Bug(
            "dP is given back without tcgen05.fence::before_thread_sync",
            arrivals(_COMPUTE, "dp.empty").ahead("tcgen05.fence").left_out(),
            "one",
            lint="fence-before",
            shows=False,
        ),
        Bug(
            "scores are read without tcgen05.fence::after_thread_sync",
            waits(_COMPUTE, "scores.full").behind("tcgen05.fence").left_out(),
            "one",
            lint="fence-after",
            shows=False,
        ),
    ),
    "registers": (
        Bug(
            "compute warps take more registers than others have given",
            find(_COMPUTE, "setmaxnreg").rewritten("208", "216"),
            "one",
            lint="registers",
        ),
    ),
}
