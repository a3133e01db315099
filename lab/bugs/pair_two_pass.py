"""Bugs of the backward kernel of pairs of CTAs in two passes, where it is not as those of one pass or one CTA."""

from lab.bugs.code import (
    ACCUMULATES,
    BACKWARD_WARPS,
    KIND,
    MMA,
    PARITY,
    PRODUCER,
    SECOND,
    TARGET,
    A,
    find,
    uncounted,
    waits,
)
from lab.bugs.table import (
    LOADS_LAG,
    PRODUCTS_LAG,
    STORES_LAG,
    Bug,
    Bugs,
    drain_keeps_registers,
    no_arrival,
    no_commit,
    no_wait,
    wrong_phase,
)

_DRAIN, _COMPUTE = (BACKWARD_WARPS[name][0] for name in ("drain", "compute"))
_DRAIN_LAGS, _COMPUTE_LAGS, _PRODUCER_LAGS = (
    frozenset(BACKWARD_WARPS[name]) for name in ("drain", "compute", "producer")
)

# Products, four instructions each, of the first pass and of the second.
_PRODUCTS = find(MMA, "tcgen05.mma", 24)
_FIRST_OF_S, _OF_DV, _OF_DK = _PRODUCTS[:4], _PRODUCTS[4:8], _PRODUCTS[8:12]
_LAST_OF_S, _OF_DP, _OF_DQ = _PRODUCTS[12:16], _PRODUCTS[16:20], _PRODUCTS[20:]


PAIR_TWO_PASS: Bugs = {
    "missing wait": (
        no_wait(
            "lse and delta are loaded over those that compute warps have not read",
            PRODUCER,
            "stats.empty",
            "steps",
            _COMPUTE_LAGS,
            count=2,
        ),
        no_wait("K is copied before it is there", _COMPUTE, "k.full", "one", LOADS_LAG),
        no_wait("scores are begun before K is in tensor memory", MMA, "keys.full", "one", _COMPUTE_LAGS),
        Bug("scores are begun before Q is there", waits(MMA, "q.full", 3)[0].left_out(), "one", LOADS_LAG),
        no_wait("dV is begun before dO by columns is there", MMA, "do_columns.full", "one", _PRODUCER_LAGS),
        Bug("scores are begun again before Q is there", waits(MMA, "q.full", 3)[2].left_out(), "one", LOADS_LAG),
        no_wait("dP is begun before dO is there", MMA, "do.full", "one", _PRODUCER_LAGS),
        Bug("dK is begun before Q by columns is there", waits(MMA, "q.full", 3)[1].left_out(), "one", _PRODUCER_LAGS),
        no_wait("dQ is begun before K by columns is there", MMA, "k_columns.full", "one", _PRODUCER_LAGS),
        no_wait("dQ is begun before the second CTA's dS has come", MMA, "exchange.full", "two", LOADS_LAG),
        no_wait(
            "dQ is begun before the leader's dS has come to the second CTA", MMA, "exchange.empty", "tiles", LOADS_LAG
        ),
        no_wait("the second CTA passes on dS that has not come", SECOND + MMA, "exchange.full", "one", LOADS_LAG),
        Bug(
            "Q is loaded over Q that the first pass still reads",
            waits(PRODUCER, "q.empty", 5)[0].left_out(),
            "steps",
            PRODUCTS_LAG,
        ),
        Bug(
            "Q by columns is loaded over Q that products still read",
            waits(PRODUCER, "q.empty", 5)[2].left_out(),
            "two",
            PRODUCTS_LAG,
        ),
        no_wait("K by columns is loaded over dV that TMA still reads", PRODUCER, "k_columns.empty", "one", STORES_LAG),
        no_wait("V is loaded over dK that TMA still reads", PRODUCER, "v.empty", "tiles", STORES_LAG),
        no_wait(
            "K is loaded over K by columns that dQ still reads",
            PRODUCER,
            "k.empty",
            "tiles",
            PRODUCTS_LAG,
            count=2,
            which=0,
        ),
        Bug(
            "dO by rows is loaded over dO by columns that dV still reads",
            waits(PRODUCER, "do_columns.empty", 4)[1].left_out(),
            "one",
            PRODUCTS_LAG,
        ),
        Bug("dV is begun before P is stored", waits(MMA, "scores.empty", 3)[0].left_out(), "one", _COMPUTE_LAGS),
        Bug("dK is begun before dS is stored", waits(MMA, "scores.empty", 3)[1].left_out(), "one", _COMPUTE_LAGS),
        Bug(
            "dQ overwrites scores that compute warps have not read",
            waits(MMA, "scores.empty", 3)[2].left_out(),
            "steps",
            _COMPUTE_LAGS,
        ),
        Bug(
            "scores overwrite the last step's dQ, which drain warps have not read",
            waits(MMA, "dq.empty", 2)[1:].left_out(),
            "steps",
            _DRAIN_LAGS,
        ),
        Bug(
            "scores overwrite the last tile's dQ, which drain warps have not read",
            waits(MMA, "dq.empty", 2)[:1].left_out(),
            "tiles",
            _DRAIN_LAGS,
        ),
        no_wait(
            "compute warps overwrite dS that the last step's dQ still reads", _COMPUTE, "dq.full", "steps", PRODUCTS_LAG
        ),
        Bug(
            "the second pass reads scores that are not complete",
            waits(_COMPUTE, "scores.full", 3)[1].left_out(),
            "one",
            PRODUCTS_LAG,
        ),
    ),
    "wrong phase": (
        Bug("the second pass is a phase late with scores", waits(_COMPUTE, "scores.full", 3)[1].flipped(PARITY), "one"),
        wrong_phase("the producer waits for the last tile's dV", PRODUCER, "k_columns.empty", "one"),
        wrong_phase("compute warps are a phase late with dQ", _COMPUTE, "dq.full", "one"),
    ),
    "wrong place": (
        Bug("K is taken from another place than it was copied to", _FIRST_OF_S.flipped(A, 384 ^ 448), "one"),
        Bug("scores of the second pass take the place of dP", _LAST_OF_S.flipped(TARGET, 320), "one"),
        Bug("dQ takes the place of dP", _OF_DQ.flipped(TARGET, 320), "one"),
        Bug("dV takes P from the other place", _OF_DV.flipped(A, 320), "one"),
        Bug("dK takes dS from the place of scores", _OF_DK.flipped(A, 320), "one"),
        Bug("products of dP are said to have the keys of one CTA", _OF_DP.flipped(KIND, (16 ^ 8) << 24), "one"),
    ),
    "missing arrival": (
        no_arrival("dV does not give back the place of K", _COMPUTE, "k_columns.empty", "one"),
        no_arrival("K in tensor memory is not signalled", _COMPUTE, "keys.full", "one"),
        no_commit("the last dQ does not give back the place of K", "k.empty", "tiles", lint="arrivals"),
        no_commit("dK does not give Q by columns back", "q.empty", "two", count=3, which=1),
    ),
    "wrong count": (
        Bug(
            "K is said to be in tensor memory when one CTA has copied it",
            uncounted("keys.full", 8),
            "one",
            frozenset((1, warp) for warp in range(4, 12)),
        ),
    ),
    "dropped predicate": (
        Bug("the second pass's dK is added to dV", _OF_DK[0].flipped(ACCUMULATES), "one"),
        Bug("a tile's first dV is added to the last tile's dK", _OF_DV[0].flipped(ACCUMULATES), "tiles"),
    ),
    "registers": (drain_keeps_registers("one"),),
}
