"""Bugs of the kernel that computes a bias's gradient."""

from lab.bugs.code import ACCUMULATES, BIAS_WARPS, MMA, PRODUCER, TARGET, arrivals, find, waits
from lab.bugs.table import (
    LOADS_LAG,
    PRODUCTS_LAG,
    Bug,
    Bugs,
    no_arrival,
    no_commit,
    no_wait,
    wrong_phase,
    wrong_registers,
)

_COMPUTE = BIAS_WARPS["compute"][0]  # the first warp
_COMPUTE_LAGS, _HALF_LAGS = frozenset(BIAS_WARPS["compute"]), frozenset(BIAS_WARPS["compute"][4:])

# Products, four instructions each.
_PRODUCTS = find(MMA, "tcgen05.mma", 8)
_OF_S, _OF_DP = _PRODUCTS[:4], _PRODUCTS[4:]
_MEETINGS = find(_COMPUTE, "bar.sync", 4)[1:3]  # of warps that compute

BIAS: Bugs = {
    "missing wait": (
        no_wait("scores are begun before Q and K are there", MMA, "qk.full", "one", LOADS_LAG),
        no_wait("dP is begun before dO and V are there", MMA, "dov.full", "one", LOADS_LAG),
        no_wait("dP overwrites that which compute warps have not read", MMA, "dp.empty", "several", _COMPUTE_LAGS),
        no_wait("compute warps read scores that are not complete", _COMPUTE, "scores.full", "one", PRODUCTS_LAG),
        no_wait("compute warps read dP that is not complete", _COMPUTE, "dp.full", "one", PRODUCTS_LAG),
        no_wait("Q and K are loaded over those that scores still read", PRODUCER, "qk.empty", "several", PRODUCTS_LAG),
        no_wait("dO and V are loaded over those that dP still reads", PRODUCER, "dov.empty", "several", PRODUCTS_LAG),
        no_wait(
            "compute warps do not wait for published pieces", _COMPUTE, "pieces.full", "one", frozenset({PRODUCER})
        ),
        no_wait("the mma warp does not wait for published pieces", MMA, "pieces.full", "unseen", frozenset({PRODUCER})),
    ),
    "wrong phase": (
        wrong_phase("compute warps are a phase late with dP", _COMPUTE, "dp.full", "one"),
        wrong_phase("the mma warp waits for the phase of operands that is over", MMA, "qk.full", "one"),
    ),
    "wrong column": (
        Bug("dP takes the place of the bias", _OF_DP.flipped(TARGET, 256 ^ 384), "one"),
        Bug("scores take each other's place", _OF_S.flipped(TARGET, 128), "one"),
    ),
    "missing arrival": (
        no_arrival("compute warps do not give scores back", _COMPUTE, "scores.empty", "several"),
        no_commit("complete dP is not signalled", "dp.full", "one", lint="arrivals"),
        no_commit("scores do not give Q and K back", "qk.empty", "several"),
    ),
    "missing barrier": (
        Bug(
            "rows are written before all of their sums are in shared memory", _MEETINGS[0].left_out(), "one", _HALF_LAGS
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
        wrong_registers("compute warps take more registers than others have given", _COMPUTE, 208, 216, "one"),
    ),
}
