"""Bugs of the forward kernel of pairs of CTAs, where it is not as the other one."""

from lab.bugs.code import (
    FORWARD_WARPS,
    KIND,
    LEADING,
    MMA,
    PRODUCER,
    PUBLISHED,
    SECOND,
    STRIDE,
    TARGET,
    A,
    B,
    arrivals,
    both,
    commits,
    find,
    meetings,
)
from lab.bugs.table import (
    ARRIVALS_LAG,
    FIRST_LAGS,
    LOADS_LAG,
    PRODUCTS_LAG,
    SECOND_LAGS,
    Bug,
    Bugs,
    counted_short,
    no_bytes,
    no_fence_before,
    no_proxy_fence,
    no_wait,
    wrong_arrival,
    wrong_bytes,
    wrong_phase,
)

_SOFTMAX, _EPILOGUE = (FORWARD_WARPS[name][0] for name in ("softmax", "epilogue"))
_SECOND_SOFTMAX_LAGS, _SECOND_EPILOGUE_LAGS = (
    frozenset((1, first + i) for i in range(4)) for first in (_SOFTMAX, _EPILOGUE)
)

# Products, four steps each of scores; of O two and two, which are also issued without scores behind them.
_OF_S = find(MMA, "tcgen05.mma", 4, having=r"^\S+\s+\[%r\d+\], %rd")
_OF_O = find(MMA, "tcgen05.mma", 8, having=r"^\S+\s+\[%r\d+\], \[%r")
_LOADS_OF_V = find(PRODUCER, "cp.async.bulk.tensor", 2, "v.full")
_TILE_BYTES = 48  # of what is published of a tile


FORWARD_PAIR: Bugs = {
    "missing wait": (
        no_wait(
            "the second CTA's producer reads a tile before it is there",
            SECOND + PRODUCER,
            "tiles.full",
            "d256",
            frozenset({(0, PRODUCER)}),
            count=2,
        ),
        no_wait("scores are begun before K of both is there", MMA, "k.full", "d256", LOADS_LAG),
        no_wait("scores are begun before Q of both is there", MMA, "q.full", "tiles", LOADS_LAG),
        no_wait("outputs are begun before V of both is there", MMA, "v.full", "d256", LOADS_LAG, count=2),
        no_wait(
            "outputs are begun before the second CTA's P is stored",
            MMA,
            "p.full",
            "d256",
            _SECOND_SOFTMAX_LAGS,
            count=2,
        ),
        no_wait(
            "outputs of the last keys are begun before the second CTA's P is stored",
            MMA,
            "scores.empty",
            "blocks",
            _SECOND_SOFTMAX_LAGS,
            count=2,
        ),
        no_wait(
            "a tile's first output overwrites O that the second CTA's epilogue has not read",
            MMA,
            "outputs.empty",
            "tiles",
            _SECOND_EPILOGUE_LAGS,
            count=2,
        ),
        no_wait(
            "softmax rescales O that the last product is still added to",
            _SOFTMAX,
            "added.full",
            "rising",
            PRODUCTS_LAG,
            count=4,
            which=1,
        ),
        no_wait(
            "softmax rescales O by a phase that it may take for the one two before",
            _SOFTMAX,
            "added.full",
            "rising",
            count=4,
            which=0,
        ),
        no_wait(
            "K is loaded over K that products still read", PRODUCER, "k.empty", "blocks", PRODUCTS_LAG, count=3, which=0
        ),
        no_wait(
            "V is loaded over V that products still read", PRODUCER, "v.empty", "blocks", PRODUCTS_LAG, count=3, which=0
        ),
        no_wait(
            "Q is loaded over Q that products still read", PRODUCER, "q.empty", "tiles", PRODUCTS_LAG, count=2, which=0
        ),
        no_wait(
            "a tile is published in the place of one that the second CTA still works on",
            PRODUCER,
            "tiles.empty",
            "tiles",
            _SECOND_EPILOGUE_LAGS,
            count=4,
        ),
    ),
    "leaving": (
        no_wait(
            "the second CTA ends before the commit of the last V arrives there",
            SECOND + PRODUCER,
            "v.empty",
            "d256",
            ARRIVALS_LAG,
            count=3,
            which=slice(1, 3),
        ),
        no_wait(
            "the second CTA ends before the commit of the last O that is added arrives there",
            SECOND + _SOFTMAX,
            "added.full",
            "d256",
            ARRIVALS_LAG,
            count=4,
            which=slice(2, 4),
        ),
    ),
    "wrong phase": (
        wrong_phase("the mma warp is a phase late with P", MMA, "p.full", "d256", count=2),
        wrong_phase(
            "softmax waits for the next output to be added", _SOFTMAX, "added.full", "rising", count=4, which=1
        ),
    ),
    "wrong place": (
        Bug("the leader's queries are published to the second CTA", PUBLISHED.further(1, -2 * _TILE_BYTES), "d256"),
        Bug(
            "both CTAs load the first columns of V",
            both(_LOADS_OF_V[:1].rewritten(r"\{%r\d+", "{0"), _LOADS_OF_V[1:].rewritten(r"\{%r\d+", "{64")),
            "d256",
        ),
        Bug("groups of 8 keys of K are looked for at half their distance", _OF_S.flipped(B, 0x60 << STRIDE), "d256"),
        Bug(
            "the second 64 of a CTA's columns of V are looked for at the place of the first",
            _OF_O.flipped(B, 0x400 << LEADING),
            "d256",
        ),
        Bug("products of scores are said to have the keys of one CTA", _OF_S.flipped(KIND, (16 ^ 8) << 17), "d256"),
        Bug("products of outputs are said to have the queries of one CTA", _OF_O.flipped(KIND, (16 ^ 8) << 24), "d256"),
        Bug("scores take the place of the other block's", _OF_S.flipped(TARGET, 128), "d256"),
        Bug("products read P where there are scores", _OF_O.flipped(A, 64), "d256"),
    ),
    "wrong count": (
        counted_short("P is said to be there when one CTA has stored it", "p.full", 4, "d256", _SECOND_SOFTMAX_LAGS),
        counted_short(
            "O is said to be read when one CTA has read it", "outputs.empty", 4, "tiles", _SECOND_EPILOGUE_LAGS
        ),
        counted_short(
            "a tile's place is said to be free when one CTA has read it",
            "tiles.empty",
            9,
            "tiles",
            _SECOND_EPILOGUE_LAGS,
        ),
        counted_short(
            "a tile's place is said to be free when all but one warp have read it",
            "tiles.empty",
            1,
            "tiles",
            _SECOND_EPILOGUE_LAGS,
        ),
    ),
    "wrong CTA": (
        Bug("complete scores are not signalled to the second CTA", commits(MMA, "scores.full").flipped(1, 2), "d256"),
        Bug("complete O is not signalled to the second CTA", commits(MMA, "outputs.full", 2).flipped(1, 2), "d256"),
        Bug("the second CTA's place of K is not given back", commits(MMA, "k.empty").flipped(1, 2), "blocks"),
        Bug("the second CTA's place of Q is not given back", commits(MMA, "q.empty").flipped(1, 2), "tiles"),
        Bug("added outputs are not signalled to the second CTA", commits(MMA, "added.full", 2).flipped(1, 2), "rising"),
        wrong_arrival(
            "P is signalled to the second CTA, not to the leader",
            arrivals(_SOFTMAX, "p.full", 3).ahead("mapa").rewritten(", 0;", ", 1;"),
            "d256",
        ),
        wrong_arrival(
            "the epilogue gives O back to the second CTA, not to the leader",
            arrivals(_EPILOGUE, "outputs.empty").ahead("mapa").rewritten(", 0;", ", 1;"),
            "tiles",
        ),
        Bug("tiles are not published to the second CTA", PUBLISHED.left_out(), "d256", lint="expected-bytes"),
    ),
    "wrong bytes": (
        wrong_bytes("the bytes of one CTA's K are expected", "k.full", 32768, "d256"),
        no_bytes("what a tile is is not expected", SECOND + PRODUCER, "tiles.full", "d256", count=2),
    ),
    "missing fence": (
        no_proxy_fence(
            "what a tile is is sent without fence.proxy.async", PUBLISHED[:1].ahead("fence.proxy.async"), "d256"
        ),
        Bug(
            "a tile's fields are given back while they are read",
            arrivals(SECOND + _SOFTMAX, "tiles.empty").ahead("fence.proxy.async").left_out(),
            "tiles",
        ),
        no_fence_before(
            "the stores of P and their arrival in the other CTA", arrivals(_SOFTMAX, "scores.empty"), "d256"
        ),
    ),
    "missing barrier": (
        Bug(
            "the CTAs do not meet before the one arrives at the other's barriers",
            meetings(_SOFTMAX)[:2].left_out(),
            "d256",
            SECOND_LAGS,
        ),
        Bug(
            "a CTA ends, and frees tensor memory, while the other still works",
            meetings(_SOFTMAX)[2:].left_out(),
            "d256",
            FIRST_LAGS,
        ),
    ),
}
