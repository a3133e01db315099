"""Bugs of the forward kernel of pairs of CTAs, where it is not as the other one."""

from lab.bugs.code import PUBLISHED, arrivals, both, commits, find, meetings
from lab.bugs.table import Bug, Bugs

# Products of scores, four steps each.
_OF_S = find("mma", "tcgen05.mma", 4, having=r"^\S+\s+\[%r\d+\], %rd")
_LOADS_OF_V = find("producer", "cp.async.bulk.tensor", 2, "v.full")
_TILE_BYTES = 48  # of what is published of a tile


FORWARD_PAIR: Bugs = {
    "missing wait": Bug.no_waits(
        """
        second producer tiles.full*2, first producer lags | the second CTA's producer reads a tile before it is there
        mma k.full | scores are begun before K of both is there
        mma q.full in tiles | scores are begun before Q of both is there
        mma v.full*2 | outputs are begun before V of both is there
        mma p.full*2, second softmax lags | outputs are begun before the second CTA's P is stored
        mma scores.empty*2 in blocks, second softmax lags |
            outputs of the last keys are begun before the second CTA's P is stored
        mma outputs.empty*2 in tiles, second epilogue lags |
            a tile's first output overwrites O that the second CTA's epilogue has not read
        softmax added.full*4[1] in rising | softmax rescales O that the last product is still added to
        softmax added.full*4[0] in rising | softmax rescales O by a phase that it may take for the one two before
        producer k.empty*3[0] in blocks | K is loaded over K that products still read
        producer v.empty*3[0] in blocks | V is loaded over V that products still read
        producer q.empty*2[0] in tiles | Q is loaded over Q that products still read
        producer tiles.empty*4 in tiles, second epilogue lags |
            a tile is published in the place of one that the second CTA still works on
        """
    ),
    "leaving": Bug.no_waits(
        """
        second producer v.empty*3[1:3], arrivals lag | the second CTA ends before the commit of the last V arrives there
        second softmax added.full*4[2:4], arrivals lag |
            the second CTA ends before the commit of the last O that is added arrives there
        """
    ),
    "wrong phase": Bug.wrong_phases("mma p.full*2 | the mma warp is a phase late with P"),
    "wrong place": (
        Bug("the leader's queries are published to the second CTA", PUBLISHED.further(1, -2 * _TILE_BYTES)),
        Bug(
            "both CTAs load the first columns of V",
            both(_LOADS_OF_V[:1].rewritten(r"\{%r\d+", "{0"), _LOADS_OF_V[1:].rewritten(r"\{%r\d+", "{64")),
        ),
        Bug("products of scores are said to have the keys of one CTA", _OF_S.flipped("columns", 16 ^ 8)),
    ),
    "wrong count": (
        Bug.counted_short("P is said to be there when one CTA has stored it", "p.full", 4, lags="second softmax"),
        Bug.counted_short(
            "a tile's place is said to be free when one CTA has read it", "tiles.empty", 9, "tiles", "second epilogue"
        ),
    ),
    "wrong CTA": (
        Bug("complete scores are not signalled to the second CTA", commits("scores.full").flipped("ctas", 2)),
        Bug("the second CTA's place of K is not given back", commits("k.empty").flipped("ctas", 2), "blocks"),
        Bug(
            "P is signalled to the second CTA, not to the leader",
            arrivals("softmax", "p.full", 3).ahead("mapa").rewritten(", 0;", ", 1;"),
            lint="arrivals",
        ),
        Bug("tiles are not published to the second CTA", PUBLISHED.left_out(), lint="expected-bytes"),
    ),
    "wrong bytes": (Bug.wrong_bytes("the bytes of one CTA's K are expected", "k.full", 32768),),
    "missing fence": (
        Bug.no_proxy_fence(
            "what a tile is is sent without fence.proxy.async", PUBLISHED[:1].ahead("fence.proxy.async")
        ),
        Bug(
            "a tile's fields are given back while they are read",
            arrivals("second softmax", "tiles.empty").ahead("fence.proxy.async").left_out(),
            "tiles",
        ),
        Bug.no_fence_before("the stores of P and their arrival in the other CTA", arrivals("softmax", "scores.empty")),
    ),
    "missing barrier": (
        Bug(
            "a CTA ends, and frees tensor memory, while the other still works",
            meetings("softmax")[2:].left_out(),
            lags="first",
        ),
    ),
}
