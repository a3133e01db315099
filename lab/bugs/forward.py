"""Bugs of the forward kernel."""

import re

from lab.bugs.code import Code, Edit, arrivals, both, commits, find, waits
from lab.bugs.table import Bug, Bugs

# Products, of four steps each: A from shared memory, or from tensor memory. Those of O are also issued without those of
# S ahead of them.
_OF_S = find("mma", "tcgen05.mma", 8, having=r"^\S+\s+\[%r\d+\], %rd")
_OF_O = find("mma", "tcgen05.mma", 16, having=r"^\S+\s+\[%r\d+\], \[%r")
_LOADS = find("softmax", "tcgen05.ld", 18)
# What is stored of a row's P: what most of it ends with, and the rest.
_END_OF_MOST = find("softmax", "tcgen05.st", 3, having=r"\[%r\d+ \+ 32\]")
_OTHERS = find("softmax", "tcgen05.st", 2, having=r"\.x16\S+\s+\[%r\d+ \+ 0\]")
_LESSER = r"min\.s32\s+(%r\d+), %r\d+, (\d+)"
_MEETINGS = find("epilogue", "bar.sync", 2, having=r"\b1, 128")


def _signalled_early(c: Code) -> list[Edit]:
    """An arrival by a thread of a warp that has not been elected yet."""
    arrival = arrivals("softmax", "scores.empty")
    text = re.sub(r"%rd\d+, (\[.*\]), %r\d+", r"_, \1, 1", c.text_of(arrival.look(c)[0]))
    early = f"{{\n.reg .pred %early;\nelect.sync _|%early, -1;\n@%early {text}\n}}"
    return both(arrival.left_out(), _OTHERS.preceded_by(early), _END_OF_MOST[-1].preceded_by(early))(c)


FORWARD: Bugs = {
    "missing wait": (
        *Bug.no_waits(
            """
        mma tiles.full*2 | the mma warp reads a tile before it is there
        softmax tiles.full*2 | softmax reads a tile before it is there
        epilogue tiles.full*2 | the epilogue reads a tile before it is there
        mma k.full | scores are begun before K is there
        mma v.full*2 | outputs are begun before V is there
        mma q.full*2 | scores are begun before Q is there
        mma p.full*4 | outputs are begun before most of P is stored
        mma scores.empty*4 in long | outputs of the last keys are begun before their P is stored
        mma outputs.empty*4 | a tile's first output overwrites O that the epilogue has not read
        mma v.empty | the mma warp frees tensor memory before its last products are done
        softmax scores.full | softmax reads scores that are not complete
        softmax stats.empty in short | softmax overwrites sums that the epilogue has not read
        softmax added.full*4[1] in d256 | softmax rescales O that the last product is still added to (one part)
        softmax added.full*4[0] in d256 |
            softmax rescales O by a phase that it may take for the one two before (one part)
        epilogue stats.full | the epilogue reads sums before they are there
        epilogue outputs.full | the epilogue stores O before it is complete
        producer k.empty in long | K is loaded over K that products still read
        producer v.empty in long | V is loaded over V that products still read
        producer q.empty*2 | Q is loaded over Q that products still read
        producer tiles.empty*2 in short, epilogue lags | a tile is published in the place of one that is still worked on
        """
        ),
        Bug(
            "the epilogue overwrites a piece of O in shared memory that TMA still reads",
            find("epilogue", "cp.async.bulk.wait_group", having=r"\b1;").left_out(),
            lags="stores",
        ),
        Bug(
            "the CTA ends while TMA still reads its shared memory",
            find("epilogue", "cp.async.bulk.wait_group", having=r"\b0;").left_out(),
            lags="stores",
        ),
        Bug(
            "the place of Q is given back while TMA still reads O from it",
            find("epilogue", "cp.async.bulk.wait_group", 2)[:1].left_out(),
            "d192",
            "stores",
        ),
    ),
    "wrong phase": Bug.wrong_phases(
        """
        mma v.full*2 | the mma warp waits for the phase of V that is over
        softmax scores.full | softmax is a phase late with scores
        """
    ),
    "wrong stage": (
        Bug(
            "K is put a stage further than products read it",
            find("producer", "cp.async.bulk.tensor", barrier="k.full").further(0, 16384),
        ),
        Bug(
            "outputs that are begun give back a stage of K instead of V",
            commits("v.empty", 2).at_other_barrier(0, "v.empty", "k.empty"),
        ),
    ),
    "wrong descriptor": (
        Bug("groups of 8 rows of K are looked for at half their distance", _OF_S.flipped("b.stride", 0x60), "one"),
        Bug(
            "the second 64 columns of V are looked for at the place of the first",
            _OF_O.flipped("b.leading", 0x400),
            "d128",
        ),
        Bug("Q is said to be swizzled in 64 bytes", _OF_S.flipped("a.swizzle", 6), "one"),
        Bug("a step multiplies the 16 columns of Q that are the next one's", _OF_S.flipped("a", 2), "one"),
        Bug("V is said to have keys contiguous", _OF_O.flipped("transposes_b"), "one"),
        Bug("P is said to be float16", _OF_O.flipped("type_a"), "one"),
        Bug("K is negated", _OF_S.flipped("negates_b"), "one"),
        Bug("products of scores are said to have half the keys", _OF_S.flipped("columns", 16 ^ 8), "one"),
    ),
    "wrong column": (
        Bug("scores take the place of the other part's", _OF_S.flipped("target", 128), "one"),
        Bug("the end of most of P is stored a column further", _END_OF_MOST.rewritten(r"\+ 32", "+ 33"), "one"),
        Bug(
            "warps of softmax reach for lanes of others",
            find("softmax", "and.b32", having="6291456").rewritten("6291456", "4194304"),
            "one",
        ),
    ),
    "wrong count": (
        Bug.counted_short("P is said to be stored when three of four warps have stored it", "scores.empty", 1),
        Bug.counted_short("the place of Q is said to be free before O has left it", "q.empty", 1, "d192", "stores"),
        Bug.all_arrive("all threads of a warp arrive for it", "softmax", "scores.empty"),
        Bug("an arrival counts twice", arrivals("epilogue", "outputs.empty").ending_with(2), lint="arrivals"),
    ),
    "missing arrival": (
        Bug("softmax does not say that its sums are there", arrivals("softmax", "stats.full").left_out()),
        Bug.no_commit("the producer gets no signal that products are done with K", "k.empty", "long"),
    ),
    "wrong order": (
        Bug("P is handed over before it is stored", _signalled_early, "long", "softmax", lint="store-wait"),
        Bug(
            "a commit stands ahead of the last product that it is about",
            _OF_S[3].moved_behind(commits("scores.full+0")),
            lags="products",
        ),
        Bug(
            "Q is given back behind the first block of keys, not the last",
            commits("q.empty", 2).ahead("bra").ahead("bra").left_out(),
        ),
        Bug(
            "tensor memory is freed while others may still read it",
            find("mma", "tcgen05.dealloc").ahead("bar.sync").left_out(),
            lags="epilogue",
        ),
    ),
    "wrong bytes": (
        Bug.wrong_bytes("half the bytes of K are expected", "k.full", 8192, lags="loads"),
        Bug.no_bytes("no bytes of V are expected", "producer", "v.full", lags="loads", lint="expected-bytes"),
        Bug(
            "Q signals the barrier of K",
            find("producer", "cp.async.bulk.tensor", 2, "q.full").at_other_barrier(2, "q.full", "k.full"),
            lint="expected-bytes",
        ),
    ),
    "missing fence": (
        Bug.no_proxy_fence(
            "O in shared memory is stored by TMA without fence.proxy.async",
            find("epilogue", "fence.proxy.async"),
            "one",
        ),
        Bug(
            "mbarriers are not made known to TMA and tensor cores",
            find("producer", "fence.mbarrier_init").left_out(),
            "one",
            lint="init-fence",
            shows=False,
        ),
        Bug.no_fence_before("the stores of P and their arrival", arrivals("softmax", "scores.empty"), "one"),
        Bug.no_fence_after("the arrival of P and its product", waits("mma", "outputs.empty", 4)[0], "one"),
        Bug.no_fence_after("a commit and O that is rescaled (one part)", waits("softmax", "added.full", 4)[1], "d256"),
    ),
    "missing tcgen05.wait": (
        Bug.no_load_wait("scores are computed with before they are in registers", _LOADS[0], "one"),
        Bug.no_store_wait("P is handed over before it is in tensor memory", _END_OF_MOST[0], "long", "softmax"),
    ),
    "missing barrier": (
        Bug.no_warp_sync(
            "a thread signals its warp's sums without waiting for the warp", arrivals("softmax", "stats.full")
        ),
        Bug("a warp of the epilogue stores O that others have not written", _MEETINGS[1:].left_out()),
        Bug(
            "warps of the epilogue write to where the first one's TMA still reads",
            _MEETINGS[:1].left_out(),
            lags="stores",
        ),
        Bug("the epilogue's barrier waits for three of its four warps", _MEETINGS.rewritten("128", "96")),
    ),
    "columns": Bug.columns_not_freed("one"),
    "registers": (
        Bug.wrong_registers("softmax takes more registers than others have given", "softmax", 200, 208, "one"),
        Bug(
            "one warp of a warpgroup asks for other registers than the rest",
            waits("mma", "tiles.full", 2)[0].preceded_by("setmaxnreg.dec.sync.aligned.u32 48;"),
            "one",
            lint="registers",
        ),
    ),
    "missing store": (
        Bug(
            "P is computed of scores as they were before a bias was added",
            find("softmax", "tcgen05.st", 18)[:4].left_out(),
            "bias",
        ),
    ),
    "dropped predicate": (
        Bug(
            "a bias is read behind its last key",
            find("softmax", "ld.global.b32", 17).ahead("min.s32").rewritten(_LESSER, r"mov.b32 \1, \2"),
            "bias",
        ),
        Bug(
            "lse is written for rows behind a sequence's end",
            find("epilogue", "st.global.b32", 2)[:1].ahead("bra").left_out(),
            "packed",
        ),
        Bug.always_branches("keys behind a sequence's end are not hidden", _LOADS[0], "packed"),
        Bug(
            "a tile's first output is added to the last tile's, and later ones overwrite",
            _OF_O[::4].flipped("accumulates"),
        ),
        Bug.always_branches("O is not rescaled when row_max rises", _LOADS[-2]),
    ),
}
