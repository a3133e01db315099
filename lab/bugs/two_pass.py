"""Bugs of the backward kernel of two passes, where it is not as the other one."""

from lab.bugs.code import (
    ACCUMULATES,
    BACKWARD_WARPS,
    LEADING,
    MMA,
    PARITY,
    PRODUCER,
    TARGET,
    A,
    arrivals,
    commits,
    find,
    waits,
)
from lab.bugs.table import (
    LOADS_LAG,
    PRODUCTS_LAG,
    STORES_LAG,
    Bug,
    Bugs,
    always_branches,
    drain_keeps_registers,
    no_arrival,
    no_branch,
    no_commit,
    no_proxy_fence,
    no_wait,
    wrong_phase,
)

_DRAIN, _COMPUTE = (BACKWARD_WARPS[name][0] for name in ("drain", "compute"))
_DRAIN_LAGS, _COMPUTE_LAGS = (frozenset(BACKWARD_WARPS[name]) for name in ("drain", "compute"))

# Products, four instructions each, of the first pass and of the second.
_PRODUCTS = find(MMA, "tcgen05.mma", 28)
_FIRST_OF_S, _OF_DV, _OF_DK = _PRODUCTS[:4], _PRODUCTS[4:8], _PRODUCTS[8:12]
_OF_DP, _OF_DQ, _LAST_OF_S = _PRODUCTS[12:16], _PRODUCTS[16:24], _PRODUCTS[24:]


TWO_PASS: Bugs = {
    "missing wait": (
        no_wait("dP is begun before V is there", MMA, "v.full", "one", LOADS_LAG),
        no_wait("V is loaded over dV that TMA still reads", PRODUCER, "v.empty", "one", STORES_LAG),
        Bug("dV is begun before P is stored", waits(MMA, "scores.empty", 2)[0].left_out(), "one", _COMPUTE_LAGS),
        Bug("dK is begun before dS is stored", waits(MMA, "scores.empty", 2)[1].left_out(), "one", _COMPUTE_LAGS),
        no_wait(
            "dQ overwrites the last step's, which drain warps have not read",
            MMA,
            "dq.empty",
            "steps",
            _DRAIN_LAGS,
            count=2,
        ),
        Bug(
            "Q is loaded over Q that products still read",
            waits(PRODUCER, "q.empty", 2)[1].left_out(),
            "d256",
            PRODUCTS_LAG,
        ),
        Bug(
            "dO is loaded over dO that dP still reads",
            waits(PRODUCER, "do.empty", 2)[1].left_out(),
            "d256",
            PRODUCTS_LAG,
        ),
        Bug(
            "the second pass reads scores that are not complete",
            waits(_COMPUTE, "scores.full", 3)[1].left_out(),
            "one",
            PRODUCTS_LAG,
        ),
        no_wait(
            "drain warps read the second part of dQ before it is complete", _DRAIN, "dq.full+1", "one", PRODUCTS_LAG
        ),
    ),
    "wrong phase": (
        Bug("the second pass is a phase late with scores", waits(_COMPUTE, "scores.full", 3)[1].flipped(PARITY), "one"),
        wrong_phase("the producer waits for the last tile's dV", PRODUCER, "v.empty", "one"),
    ),
    "wrong column": (
        Bug("scores of the second pass take the place of dP", _LAST_OF_S.flipped(TARGET, 320), "one"),
        Bug("dP takes the place of dQ", _OF_DP.flipped(TARGET, 320 ^ 384), "one"),
        Bug("the parts of dQ change places", _OF_DQ.flipped(TARGET, 384 ^ 448), "one"),
        Bug("dV takes P from the other place", _OF_DV.flipped(A, 320), "one"),
    ),
    "missing arrival": (
        Bug("the first pass does not give lse back", arrivals(_COMPUTE, "q.empty", 2)[0].left_out(), "one"),
        Bug("the second pass does not give lse and delta back", arrivals(_COMPUTE, "q.empty", 2)[1].left_out(), "d256"),
        no_arrival("dV does not give back the place of V", _COMPUTE, "v.empty", "one"),
        no_commit("complete dP is not signalled", "scores.full", "one", count=3, which=1),
        no_commit("scores of the first pass do not give Q back", "q.empty", "one", count=2, which=0),
    ),
    "wrong order": (
        Bug(
            "dQ is signalled ahead of its last product",
            _OF_DQ[7].moved_behind(commits(MMA, "dq.full+1")),
            "one",
            frozenset({MMA}),
        ),
    ),
    "dropped predicate": (
        Bug("the second pass's dK is added to dV", _OF_DK[0].flipped(ACCUMULATES), "one"),
        Bug("a tile's first dV is added to the last tile's dK", _OF_DV[0].flipped(ACCUMULATES), "tiles"),
    ),
    "list": (
        no_branch("turns are published in the first pass, too", waits(PRODUCER, "turns.empty"), "lists"),
        always_branches("the first pass does not hide scores", find(_COMPUTE, "tcgen05.ld", 13)[0], "lists"),
        Bug("the second pass does not give entries back", arrivals(_COMPUTE, "entries.empty", 2)[1].left_out(), "many"),
    ),
    "wrong descriptor": (
        Bug(
            "the second 64 columns of K are looked for at the place of the first, for dQ",
            _OF_DQ.flipped(A, 0x400 << LEADING),
            "one",
        ),
    ),
    "missing fence": (
        no_proxy_fence(
            "dS in shared memory is multiplied without fence.proxy.async",
            arrivals(_COMPUTE, "scores.empty", 3)[2].ahead("fence.proxy.async"),
            "one",
        ),
        Bug(
            "the first pass gives lse back while it is read",
            arrivals(_COMPUTE, "q.empty", 2)[0].ahead("fence.proxy.async").left_out(),
            "d256",
        ),
    ),
    "registers": (drain_keeps_registers("one"),),
}
