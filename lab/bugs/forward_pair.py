"""Bugs of the forward kernel of pairs of CTAs, where it is not as the other one."""

from lab.bugs.code import (
    FORWARD_WARPS,
    KIND,
    LEADING,
    MMA,
    PARITY,
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
    uncounted,
    waits,
)
from lab.bugs.table import ARRIVALS_LAG, FIRST_LAGS, LOADS_LAG, PRODUCTS_LAG, SECOND_LAGS, Bug, Bugs, no_fence_before

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
        Bug(
            "the second CTA's producer reads a tile before it is there",
            waits(SECOND + PRODUCER, "tiles.full", 2).left_out(),
            "d256",
            frozenset({(0, PRODUCER)}),
        ),
        Bug("scores are begun before K of both is there", waits(MMA, "k.full").left_out(), "d256", LOADS_LAG),
        Bug("scores are begun before Q of both is there", waits(MMA, "q.full").left_out(), "tiles", LOADS_LAG),
        Bug("outputs are begun before V of both is there", waits(MMA, "v.full", 2).left_out(), "d256", LOADS_LAG),
        Bug(
            "outputs are begun before the second CTA's P is stored",
            waits(MMA, "p.full", 2).left_out(),
            "d256",
            _SECOND_SOFTMAX_LAGS,
        ),
        Bug(
            "outputs of the last keys are begun before the second CTA's P is stored",
            waits(MMA, "scores.empty", 2).left_out(),
            "blocks",
            _SECOND_SOFTMAX_LAGS,
        ),
        Bug(
            "a tile's first output overwrites O that the second CTA's epilogue has not read",
            waits(MMA, "outputs.empty", 2).left_out(),
            "tiles",
            _SECOND_EPILOGUE_LAGS,
        ),
        Bug(
            "softmax rescales O that the last product is still added to",
            waits(_SOFTMAX, "added.full").left_out(),
            "rising",
            PRODUCTS_LAG,
        ),
        Bug(
            "K is loaded over K that products still read", waits(PRODUCER, "k.empty").left_out(), "blocks", PRODUCTS_LAG
        ),
        Bug(
            "V is loaded over V that products still read",
            waits(PRODUCER, "v.empty", 2)[:1].left_out(),
            "blocks",
            PRODUCTS_LAG,
        ),
        Bug(
            "Q is loaded over Q that products still read", waits(PRODUCER, "q.empty").left_out(), "tiles", PRODUCTS_LAG
        ),
        Bug(
            "a tile is published in the place of one that the second CTA still works on",
            waits(PRODUCER, "tiles.empty", 4).left_out(),
            "tiles",
            _SECOND_EPILOGUE_LAGS,
        ),
    ),
    "leaving": (
        Bug(
            "the second CTA ends before the last commit arrives there",
            waits(SECOND + PRODUCER, "v.empty", 2)[-1:].left_out(),
            "d256",
            ARRIVALS_LAG,
        ),
    ),
    "wrong phase": (
        Bug("the mma warp is a phase late with P", waits(MMA, "p.full", 2).flipped(PARITY), "d256"),
        Bug("softmax waits for the next output to be added", waits(_SOFTMAX, "added.full").flipped(PARITY), "rising"),
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
        Bug(
            "P is said to be there when one CTA has stored it",
            uncounted("p.full", 4),
            "d256",
            _SECOND_SOFTMAX_LAGS,
            lint="arrivals",
        ),
        Bug(
            "O is said to be read when one CTA has read it",
            uncounted("outputs.empty", 4),
            "tiles",
            _SECOND_EPILOGUE_LAGS,
            lint="arrivals",
        ),
        Bug(
            "a tile's place is said to be free when one CTA has read it",
            uncounted("tiles.empty", 9),
            "tiles",
            _SECOND_EPILOGUE_LAGS,
            lint="arrivals",
        ),
        Bug(
            "a tile's place is said to be free when all but one warp have read it",
            uncounted("tiles.empty", 1),
            "tiles",
            _SECOND_EPILOGUE_LAGS,
            lint="arrivals",
        ),
    ),
    "wrong CTA": (
        Bug("complete scores are not signalled to the second CTA", commits(MMA, "scores.full").flipped(1, 2), "d256"),
        Bug("complete O is not signalled to the second CTA", commits(MMA, "outputs.full", 2).flipped(1, 2), "d256"),
        Bug("the second CTA's place of K is not given back", commits(MMA, "k.empty").flipped(1, 2), "blocks"),
        Bug("the second CTA's place of Q is not given back", commits(MMA, "q.empty").flipped(1, 2), "tiles"),
        Bug("added outputs are not signalled to the second CTA", commits(MMA, "added.full", 2).flipped(1, 2), "rising"),
        Bug(
            "P is signalled to the second CTA, not to the leader",
            arrivals(_SOFTMAX, "p.full", 3).ahead("mapa").rewritten(", 0;", ", 1;"),
            "d256",
            lint="arrivals",
        ),
        Bug(
            "the epilogue gives O back to the second CTA, not to the leader",
            arrivals(_EPILOGUE, "outputs.empty").ahead("mapa").rewritten(", 0;", ", 1;"),
            "tiles",
            lint="arrivals",
        ),
        Bug("tiles are not published to the second CTA", PUBLISHED.left_out(), "d256", lint="expected-bytes"),
    ),
    "wrong bytes": (
        Bug(
            "the bytes of one CTA's K are expected",
            arrivals(PRODUCER, "k.full").rewritten(r", %r\d+;", ", 32768;"),
            "d256",
        ),
        Bug(
            "what a tile is is not expected",
            arrivals(SECOND + PRODUCER, "tiles.full", 2).rewritten(r"\.expect_tx(.*), %r\d+;", r"\1, 1;"),
            "d256",
        ),
    ),
    "missing fence": (
        Bug(
            "what a tile is is sent without fence.proxy.async",
            PUBLISHED[:1].ahead("fence.proxy.async").left_out(),
            "d256",
            lint="proxy",
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
