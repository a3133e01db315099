"""Bugs of the backward kernel."""

from lab.bugs.code import arrivals, commits, find, waits
from lab.bugs.table import Bug, Bugs

# Products at d = 64, four steps each: of dQ in the loop over steps, and behind it.
_PRODUCTS = find("mma", "tcgen05.mma", 28)
_OF_S, _OF_DV, _OF_DQ = _PRODUCTS[:4], _PRODUCTS[16:20], _PRODUCTS[8:12] + _PRODUCTS[24:]
_P_STORED = find("compute", "tcgen05.st", 6)[2:4]
_LESSER = r"min\.s32\s+(%r\d+), (%r\d+), %r\d+"
_POLL = find("adding", "ld.acquire")


BACKWARD: Bugs = {
    "missing wait": (
        *Bug.no_waits(
            """
        mma tiles.full | mma warps read a tile before it is there
        compute tiles.full | compute warps read a tile before it is there
        drain tiles.full | drain warps read a tile before it is there
        adding tiles.full | adding warps read a tile before it is there
        mma k.full | scores are begun before K is there
        mma q.full | scores are begun before Q is there
        mma v.full | dP is begun before V is there
        mma do.full | dP is begun before dO is there
        mma scores.empty | dV is begun before P is stored
        mma dp.empty*2 | dK and dQ are begun before dS is stored
        mma dq.empty*2 in steps | dQ overwrites the last step's, which drain warps have not read
        mma dq.empty in d128 | dP overwrites the last step's dQ, which drain warps have not read
        compute scores.full | compute warps read scores that are not complete
        compute dp.full | compute warps read dP that is not complete
        compute dv.full | compute warps read dV that is not complete
        compute:4 dk.full | compute warps read dK that is not complete
        drain dq.full | drain warps read dQ that is not complete
        drain pieces_even.empty*2 | drain warps overwrite a piece of dQ that has not been added
        adding pieces_even.full*2 | a piece of dQ is added before it is there
        producer q.empty in steps, products lag | Q is loaded over Q that products still read
        producer do.empty in d128, products lag | dO is loaded over dO that products still read
        producer k.empty in d128-tiles, stores lag | K is loaded over dK that TMA still reads
        producer tiles.empty*2 in tiles, adding lags | a tile is published in the place of one that is still worked on
        """
        ),
        Bug(
            "the place of a piece of dQ is given back while TMA still reads it",
            find("adding", "cp.async.bulk.wait_group.read", 2).left_out(),
            lags="stores",
        ),
        Bug(
            "the CTA ends while TMA still reads dV and dK",
            find("compute", "cp.async.bulk.wait_group.read").left_out(),
            "d128-tiles",
            "stores",
        ),
    ),
    "wrong phase": Bug.wrong_phases(
        """
        mma v.full | the mma warp waits for the phase of V that is over
        drain dq.full | drain warps are a phase late with dQ
        """
    ),
    "wrong stage": (
        Bug(
            "Q is put a stage further than products read it",
            find("producer", "cp.async.bulk.tensor", barrier="q.full").further(0, 16384),
        ),
        Bug(
            "lse is put a stage further than it is read",
            find("producer", "cp.async.bulk.shared::cluster", barrier="q.full").further(0, 512),
        ),
        Bug(
            "dK that is begun gives back a stage of dO instead of Q",
            commits("q.empty", 2).at_other_barrier(0, "q.empty", "do.empty"),
            "steps",
            lint="arrivals",
        ),
        Bug(
            "the second piece of dQ is added from the place of the first",
            find("adding", "cp.reduce.async.bulk", 2)[1].further(1, -16384),
            "tiles",
        ),
    ),
    "wrong descriptor": (
        Bug("groups of 8 rows of K are looked for at half their distance, for scores", _OF_S.flipped("a.stride", 0x60)),
        Bug(
            "the second 64 queries of dS are looked for at the place of the first, for dQ",
            _OF_DQ.flipped("a.leading", 0x400),
        ),
        Bug("dS is said to have keys contiguous, for dQ", _OF_DQ.flipped("transposes_a")),
    ),
    "wrong column": (
        Bug("scores take the place of dV", _OF_S.flipped("target", 128)),
        Bug("dV takes P where there are scores", _OF_DV.flipped("a", 32)),
    ),
    "wrong count": (
        Bug.counted_short("dS is said to be there when half the warps have stored it", "dp.empty", 4, lags="compute"),
        Bug.all_arrive("all threads of a warp arrive for it", "drain", "dq.empty"),
    ),
    "missing arrival": (
        Bug.no_commit("complete dP is not signalled", "dp.full", lint="arrivals"),
        Bug.no_arrival("drain warps do not say that they have read dQ", "drain", "dq.empty", "steps"),
        Bug("dV does not give back the place of V", arrivals("compute", "v.empty").left_out(), "tiles"),
    ),
    "wrong order": (
        Bug(
            "a commit stands ahead of the last product that it is about",
            _OF_S[3].moved_behind(commits("scores.full")),
            lags="products",
        ),
    ),
    "wrong bytes": (
        Bug.wrong_bytes("the bytes of lse are not expected", "q.full", 16384),
        Bug.no_bytes("no bytes of V are expected", "producer", "v.full", lags="loads", lint="expected-bytes"),
        Bug("half a piece of dQ is added", find("adding", "cp.reduce.async.bulk", 2).ending_with(8192), "tiles"),
    ),
    "missing fence": (
        Bug.no_proxy_fence(
            "dS in shared memory is multiplied without fence.proxy.async",
            arrivals("compute", "dp.empty").ahead("fence.proxy.async"),
        ),
        Bug.no_proxy_fence(
            "dV in shared memory is stored by TMA without fence.proxy.async",
            arrivals("compute", "dv.empty").ahead("fence.proxy.async"),
        ),
        Bug(
            "dQ is added by TMA to what other proxies have stored, without fence.proxy.async.global",
            find("adding", "fence.proxy.async").left_out(),
            lint="turn",
            shows=False,
        ),
        Bug(
            "mbarriers are not made known to TMA and tensor cores",
            find("producer", "fence.mbarrier_init").left_out(),
            lint="init-fence",
            shows=False,
        ),
        Bug.no_fence_before("the stores of P and their arrival", arrivals("compute", "scores.empty")),
        Bug.no_fence_before("reading dQ and giving it back", arrivals("drain", "dq.empty")),
        Bug.no_fence_after("dS's arrival and its products", waits("mma", "dp.empty", 2)[0]),
        Bug.no_fence_after("a commit and dQ that is read", waits("drain", "dq.full")),
    ),
    "missing tcgen05.wait": (
        Bug.no_load_wait("dP is computed with before it is in registers", waits("compute", "dp.full")),
        Bug.no_load_wait("dQ is given back before it is in registers", waits("drain", "dq.full")),
        Bug.no_store_wait("P is handed over before it is in tensor memory", _P_STORED[1], "steps"),
    ),
    "missing barrier": (
        Bug.no_warp_sync(
            "a thread signals its warp's piece of dQ without waiting for the warp",
            arrivals("drain", "pieces_even.full", 2)[:1],
        ),
        Bug("a warp stores dV that others have not written", find("compute", "bar.sync", having=r", 128").left_out()),
    ),
    "turns": (
        Bug.always_branches("dQ is added before its turn has come", _POLL, "turns"),
        Bug(
            "the turn is passed on before TMA has added",
            find("adding", "cp.async.bulk.wait_group", 3)[2].left_out(),
            "turns",
            "stores",
            lint="turn",
        ),
        Bug("the turn is not counted", find("adding", "red").left_out(), "turns"),
        Bug("a turn is counted for the next block", find("adding", "red").further(0, 4), "turns"),
        Bug.always_branches(
            "dQ is rounded before all tiles have added to it", find("compute", "ld.acquire", 2)[0], "turns"
        ),
    ),
    "workspace": (
        Bug(
            "the first tile adds to dQ, and later ones store",
            find("adding", "cp.reduce.async.bulk", 2).ahead("setp").rewritten("setp.ne", "setp.eq"),
        ),
        Bug(
            "the second piece of dQ is put where the first one is",
            find("adding", "cp.async.bulk.global", 2)[1].further(0, -16384),
        ),
        Bug(
            "delta is read where lse is",
            find("producer", "cp.async.bulk.shared::cluster", barrier="do.full")
            .ahead("add.s64")
            .rewritten(r", %rd\d+;", ", 0;"),
        ),
    ),
    "columns": Bug.columns_not_freed(),
    "memory order": (
        Bug(
            "a turn is polled without acquiring",
            _POLL.rewritten("acquire", "relaxed"),
            "turns",
            lint="scope",
            shows=False,
        ),
        Bug(
            "a turn is passed on without releasing",
            find("adding", "red.release").rewritten("release", "relaxed"),
            "turns",
            lint="scope",
        ),
    ),
    "offset": (
        Bug(
            "the offset of a block of dQ is computed in 32 bits",
            find("adding", "mul.wide", having=", 32768;").rewritten(
                r"mul\.wide\.s32\s+(%rd\d+), (%r\d+), 32768;",
                r"{ .reg .b32 t; mul.lo.s32 t, \2, 32768; cvt.s64.s32 \1, t; }",
            ),
            lint="offset",
            shows=False,
        ),
    ),
    "registers": (
        Bug.wrong_registers("compute warps take more registers than others have given", "compute", 168, 184),
        Bug(
            "drain warps keep the registers that they ask to lose",
            find("drain", "setmaxnreg.dec").rewritten("dec", "inc"),
            lint="registers",
        ),
        Bug.wrong_registers("the mma warps take registers by .dec", "mma", 80, 136),
        Bug(
            "adding warps give registers back when a tile is there",
            find("adding", "setmaxnreg").moved_behind(waits("adding", "tiles.full")),
            lint="registers",
        ),
    ),
    "missing store": (
        Bug(
            "P is computed of scores as they were before a bias was added",
            find("compute", "tcgen05.st", 8)[:2].left_out(),
            "bias",
        ),
        Bug("gradients of a bias are not stored", find("compute", "st.global.b16", 64)[:1].left_out(), "bias"),
    ),
    "dropped predicate": (
        Bug(
            "a bias is read behind its last query",
            find("compute", "ld.global.s16", 64).ahead("min.s32").rewritten(_LESSER, r"mov.b32 \1, \2"),
            "bias",
        ),
        Bug("a tile's first dV is added to the last tile's", _OF_DV[0].flipped("accumulates"), "tiles"),
        Bug.always_branches("keys behind an end are not hidden", find("compute", "tcgen05.ld", 8)[0], "causal"),
    ),
}
