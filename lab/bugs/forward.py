"""Bugs of the forward kernel."""

import re

from lab.bugs.code import (
    ACCUMULATES,
    FORWARD_WARPS,
    KIND,
    LEADING,
    MMA,
    PRODUCER,
    STRIDE,
    SWIZZLE,
    TARGET,
    A,
    B,
    Code,
    Edit,
    arrivals,
    both,
    commits,
    find,
    waits,
)
from lab.bugs.table import (
    LAST_REGISTER,
    LOADS_LAG,
    PRODUCTS_LAG,
    STORES_LAG,
    Bug,
    Bugs,
    all_arrive,
    always_branches,
    columns_not_freed,
    counted_short,
    no_branch,
    no_bytes,
    no_commit,
    no_fence_after,
    no_fence_before,
    no_load_wait,
    no_proxy_fence,
    no_store_wait,
    no_wait,
    no_wait_for_tma,
    no_warp_sync,
    wrong_arrival,
    wrong_bytes,
    wrong_phase,
    wrong_registers,
)

_SOFTMAX, _EPILOGUE = (FORWARD_WARPS[name][0] for name in ("softmax", "epilogue"))
_SOFTMAX_LAGS, _EPILOGUE_LAGS = (frozenset(FORWARD_WARPS[name]) for name in ("softmax", "epilogue"))

# Products, of four steps each: A from shared memory, or from tensor memory. Those of O are also issued without those of
# S ahead of them.
_OF_S = find(MMA, "tcgen05.mma", 8, having=r"^\S+\s+\[%r\d+\], %rd")
_OF_O = find(MMA, "tcgen05.mma", 16, having=r"^\S+\s+\[%r\d+\], \[%r")
_LOADS = find(_SOFTMAX, "tcgen05.ld", 18)
# What is stored of a row's P: what most of it ends with, and the rest.
_END_OF_MOST = find(_SOFTMAX, "tcgen05.st", 3, having=r"\[%r\d+ \+ 32\]")
_OTHERS = find(_SOFTMAX, "tcgen05.st", 2, having=r"\.x16\S+\s+\[%r\d+ \+ 0\]")
_LESSER = r"min\.s32\s+(%r\d+), %r\d+, (\d+)"
_MEETINGS = find(_EPILOGUE, "bar.sync", 2, having=r"\b1, 128")


def _signalled_early(c: Code) -> list[Edit]:
    """An arrival by a thread of a warp that has not been elected yet."""
    arrival = arrivals(_SOFTMAX, "scores.empty")
    text = re.sub(r"%rd\d+, (\[.*\]), %r\d+", r"_, \1, 1", c.text_of(arrival.look(c)[0]))
    early = f"{{\n.reg .pred %early;\nelect.sync _|%early, -1;\n@%early {text}\n}}"
    return both(arrival.left_out(), _OTHERS.preceded_by(early), _END_OF_MOST[-1].preceded_by(early))(c)


FORWARD: Bugs = {
    "missing wait": (
        no_wait(
            "the mma warp reads a tile before it is there", MMA, "tiles.full", "d64", frozenset({PRODUCER}), count=2
        ),
        no_wait(
            "softmax reads a tile before it is there", _SOFTMAX, "tiles.full", "d64", frozenset({PRODUCER}), count=2
        ),
        no_wait(
            "the epilogue reads a tile before it is there",
            _EPILOGUE,
            "tiles.full",
            "d64",
            frozenset({PRODUCER}),
            count=2,
        ),
        no_wait("scores are begun before K is there", MMA, "k.full", "d64", LOADS_LAG),
        no_wait("outputs are begun before V is there", MMA, "v.full", "d64", LOADS_LAG, count=2),
        no_wait("scores are begun before Q is there", MMA, "q.full", "d64", LOADS_LAG, count=2),
        no_wait("outputs are begun before most of P is stored", MMA, "p.full", "d64", _SOFTMAX_LAGS, count=4),
        no_wait(
            "outputs of the last keys are begun before their P is stored",
            MMA,
            "scores.empty",
            "long",
            _SOFTMAX_LAGS,
            count=4,
        ),
        no_wait(
            "a tile's first output overwrites O that the epilogue has not read",
            MMA,
            "outputs.empty",
            "d64",
            _EPILOGUE_LAGS,
            count=4,
        ),
        no_wait(
            "the mma warp frees tensor memory before its last products are done", MMA, "v.empty", "d64", PRODUCTS_LAG
        ),
        no_wait("softmax reads scores that are not complete", _SOFTMAX, "scores.full", "d64", PRODUCTS_LAG),
        no_wait(
            "softmax overwrites sums that the epilogue has not read", _SOFTMAX, "stats.empty", "short", _EPILOGUE_LAGS
        ),
        no_wait(
            "softmax rescales O that the last product is still added to (one part)",
            _SOFTMAX,
            "added.full",
            "d256",
            PRODUCTS_LAG,
            count=4,
            which=1,
        ),
        no_wait(
            "softmax rescales O by a phase that it may take for the one two before (one part)",
            _SOFTMAX,
            "added.full",
            "d256",
            count=4,
            which=0,
        ),
        no_wait("the epilogue reads sums before they are there", _EPILOGUE, "stats.full", "d64", _SOFTMAX_LAGS),
        no_wait("the epilogue stores O before it is complete", _EPILOGUE, "outputs.full", "d64", PRODUCTS_LAG),
        no_wait_for_tma(
            "the epilogue overwrites a piece of O in shared memory that TMA still reads",
            find(_EPILOGUE, "cp.async.bulk.wait_group", having=r"\b1;"),
            "d64",
        ),
        no_wait_for_tma(
            "the CTA ends while TMA still reads its shared memory",
            find(_EPILOGUE, "cp.async.bulk.wait_group", having=r"\b0;"),
            "d64",
        ),
        no_wait_for_tma(
            "the place of Q is given back while TMA still reads O from it",
            find(_EPILOGUE, "cp.async.bulk.wait_group", 2)[:1],
            "d192",
        ),
        no_wait("K is loaded over K that products still read", PRODUCER, "k.empty", "long", PRODUCTS_LAG),
        no_wait("V is loaded over V that products still read", PRODUCER, "v.empty", "long", PRODUCTS_LAG),
        no_wait("Q is loaded over Q that products still read", PRODUCER, "q.empty", "d64", PRODUCTS_LAG, count=2),
        no_wait(
            "a tile is published in the place of one that is still worked on",
            PRODUCER,
            "tiles.empty",
            "short",
            _EPILOGUE_LAGS,
            count=2,
        ),
    ),
    "wrong phase": (
        wrong_phase("the mma warp waits for the phase of V that is over", MMA, "v.full", "d64", count=2),
        wrong_phase("the producer waits for K as if stages began full", PRODUCER, "k.empty", "d64"),
        wrong_phase("softmax is a phase late with scores", _SOFTMAX, "scores.full", "d64"),
        wrong_phase("the epilogue is a phase late with O", _EPILOGUE, "outputs.full", "d64"),
    ),
    "wrong stage": (
        Bug(
            "K is put a stage further than products read it",
            find(PRODUCER, "cp.async.bulk.tensor", barrier="k.full").further(0, 16384),
            "d64",
        ),
        Bug("products read V of the neighbouring stage", _OF_O.flipped(B, 16384 >> 4), "d64"),
        Bug("scores of the first part are signalled to the second", commits(MMA, "scores.full+0").further(0, 8), "d64"),
        Bug(
            "outputs that are begun give back a stage of K instead of V",
            commits(MMA, "v.empty", 2).at_other_barrier(0, "v.empty", "k.empty"),
            "d64",
        ),
    ),
    "wrong descriptor": (
        Bug("groups of 8 rows of K are looked for at half their distance", _OF_S.flipped(B, 0x60 << STRIDE), "one"),
        Bug("groups of 8 keys of V are looked for at half their distance", _OF_O.flipped(B, 0x60 << STRIDE), "one"),
        Bug(
            "the second 64 columns of V are looked for at the place of the first",
            _OF_O.flipped(B, 0x400 << LEADING),
            "d128",
        ),
        Bug("Q is said to be swizzled in 64 bytes", _OF_S.flipped(A, 6 << SWIZZLE), "one"),
        Bug("a step multiplies the 16 columns of Q that are the next one's", _OF_S.flipped(A, 2), "one"),
        Bug("V is said to have keys contiguous", _OF_O.flipped(KIND, 1 << 16), "one"),
        Bug("P is said to be float16", _OF_O.flipped(KIND, 1 << 7), "one"),
        Bug("K is negated", _OF_S.flipped(KIND, 1 << 14), "one"),
        Bug("sums are saturated", _OF_O.flipped(KIND, 1 << 3), "one"),
        Bug("V is said to have two of four numbers", _OF_O.flipped(KIND, 1 << 2), "one"),
        Bug("products of scores are said to have half the keys", _OF_S.flipped(KIND, (16 ^ 8) << 17), "one"),
    ),
    "wrong column": (
        Bug("scores take the place of the other part's", _OF_S.flipped(TARGET, 128), "one"),
        Bug("products read P where there are scores", _OF_O.flipped(A, 64), "one"),
        Bug("the parts' outputs change places", _OF_O.flipped(TARGET, 64), "one"),
        Bug("the end of most of P is stored a column further", _END_OF_MOST.rewritten(r"\+ 32", "+ 33"), "one"),
        Bug(
            "warps of softmax reach for lanes of others",
            find(_SOFTMAX, "and.b32", having="6291456").rewritten("6291456", "4194304"),
            "one",
        ),
    ),
    "wrong count": (
        counted_short("P is said to be stored when three of four warps have stored it", "scores.empty", 1, "d64"),
        counted_short(
            "a tile's place is said to be free when all but one warp have read it",
            "tiles.empty",
            1,
            "short",
            _EPILOGUE_LAGS,
        ),
        counted_short("the place of Q is said to be free before O has left it", "q.empty", 1, "d192", STORES_LAG),
        all_arrive("all threads of a warp arrive for it", _SOFTMAX, "scores.empty", "d64"),
        wrong_arrival(
            "an arrival counts twice", arrivals(_EPILOGUE, "outputs.empty").rewritten(LAST_REGISTER, ", 2;"), "d64"
        ),
    ),
    "missing arrival": (
        Bug("softmax does not say that its sums are there", arrivals(_SOFTMAX, "stats.full").left_out(), "d64"),
        no_commit("complete scores are not signalled", "scores.full", "d64", count=2),
        no_commit("the producer gets no signal that products are done with K", "k.empty", "long"),
    ),
    "wrong order": (
        Bug("P is handed over before it is stored", _signalled_early, "long", _SOFTMAX_LAGS, lint="store-wait"),
        Bug(
            "a commit stands ahead of the last product that it is about",
            _OF_S[3].moved_behind(commits(MMA, "scores.full+0")),
            "d64",
            PRODUCTS_LAG,
        ),
        no_branch(
            "Q is given back behind the first block of keys, not the last",
            commits(MMA, "q.empty", 2).ahead("bra"),
            "d64",
        ),
        Bug(
            "tensor memory is freed while others may still read it",
            find(MMA, "tcgen05.dealloc").ahead("bar.sync").left_out(),
            "d64",
            _EPILOGUE_LAGS,
        ),
    ),
    "wrong bytes": (
        wrong_bytes("half the bytes of K are expected", "k.full", 8192, "d64", LOADS_LAG),
        no_bytes("no bytes of V are expected", PRODUCER, "v.full", "d64", LOADS_LAG, lint="expected-bytes"),
        Bug(
            "Q signals the barrier of K",
            find(PRODUCER, "cp.async.bulk.tensor", 2, "q.full").at_other_barrier(2, "q.full", "k.full"),
            "d64",
            lint="expected-bytes",
        ),
    ),
    "missing fence": (
        no_proxy_fence(
            "O in shared memory is stored by TMA without fence.proxy.async", find(_EPILOGUE, "fence.proxy.async"), "one"
        ),
        Bug(
            "mbarriers are not made known to TMA and tensor cores",
            find(PRODUCER, "fence.mbarrier_init").left_out(),
            "one",
            lint="init-fence",
            shows=False,
        ),
        no_fence_before("the stores of P and their arrival", arrivals(_SOFTMAX, "scores.empty"), "one"),
        no_fence_before("reading O and giving it back", arrivals(_EPILOGUE, "outputs.empty"), "one"),
        no_fence_after("the arrival of P and its product", waits(MMA, "outputs.empty", 4)[0], "one"),
        no_fence_after("a commit and scores that are read", waits(_SOFTMAX, "scores.full"), "one"),
        no_fence_after("a commit and O that is stored", waits(_EPILOGUE, "outputs.full"), "one"),
        no_fence_after("a commit and O that is rescaled (one part)", waits(_SOFTMAX, "added.full", 4)[1], "d256"),
    ),
    "missing tcgen05.wait": (
        no_load_wait("scores are computed with before they are in registers", _LOADS[0], "one"),
        no_load_wait("O is computed with before it is in registers", find(_EPILOGUE, "tcgen05.ld", 4)[-1], "one"),
        no_store_wait("P is handed over before it is in tensor memory", _END_OF_MOST[0], "long", _SOFTMAX_LAGS),
        no_store_wait(
            "O that has been rescaled is handed over before it is in tensor memory",
            find(_SOFTMAX, "tcgen05.st", 14)[-3],
            "d64",
        ),
    ),
    "missing barrier": (
        no_warp_sync(
            "a thread signals its warp's sums without waiting for the warp", arrivals(_SOFTMAX, "stats.full"), "d64"
        ),
        Bug("a warp of the epilogue stores O that others have not written", _MEETINGS[1:].left_out(), "d64"),
        Bug(
            "warps of the epilogue write to where the first one's TMA still reads",
            _MEETINGS[:1].left_out(),
            "d64",
            STORES_LAG,
        ),
        Bug("the epilogue takes the CTA's barrier for its own", _MEETINGS.rewritten(r"\b1,", "0,"), "d64"),
        Bug("the epilogue's barrier waits for three of its four warps", _MEETINGS.rewritten("128", "96"), "d64"),
    ),
    "columns": columns_not_freed("one"),
    "registers": (
        wrong_registers("softmax takes more registers than others have given", _SOFTMAX, 200, 208, "one"),
        Bug(
            "one warp of a warpgroup asks for other registers than the rest",
            waits(MMA, "tiles.full", 2)[0].preceded_by("setmaxnreg.dec.sync.aligned.u32 48;"),
            "one",
            lint="registers",
        ),
    ),
    "missing store": (
        Bug(
            "P is computed of scores as they were before a bias was added",
            find(_SOFTMAX, "tcgen05.st", 18)[:4].left_out(),
            "bias",
        ),
    ),
    "dropped predicate": (
        Bug(
            "a bias is read behind its last key",
            find(_SOFTMAX, "ld.global.b32", 17).ahead("min.s32").rewritten(_LESSER, r"mov.b32 \1, \2"),
            "bias",
        ),
        no_branch("lse is written for rows behind a sequence's end", find(_EPILOGUE, "st.global.b32", 2)[:1], "packed"),
        always_branches("keys behind a sequence's end are not hidden", _LOADS[0], "packed"),
        Bug(
            "a tile's first output is added to the last tile's, and later ones overwrite",
            _OF_O[::4].flipped(ACCUMULATES),
            "d64",
        ),
        always_branches("O is not rescaled when row_max rises", _LOADS[-2], "d64"),
        no_branch("O is rescaled when there is none yet", _LOADS[-2], "d64"),
    ),
}
