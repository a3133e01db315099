"""Bugs of Hopper's kernels: forward, backward up to d = 128, and backward by clusters above."""

from lab.bugs.code import arrivals, find, uncounted
from lab.bugs.table import Bug, Bugs

_FENCES, _WAITS = find("mma", "wgmma.fence", 7), find("mma", "wgmma.wait_group", 6)
_READ = find("storing", "cp.async.bulk.wait_group.read", 4)

HOPPER_FORWARD: Bugs = {
    "missing wait": (
        *Bug.no_waits(
            """
        mma k.full*3 | scores are begun before K is there
        mma v.full*2 | outputs are begun before V is there
        mma bias.full*2 in bias | a bias is read before it is there
        """
        ),
        Bug("scores are read while they are computed", _WAITS[0].left_out()),
        Bug("O is rescaled while a product adds to it", _WAITS[2].left_out()),
        Bug(
            "O's place is written before TMA has read it",
            find("mma", "cp.async.bulk.wait_group", 2)[0].left_out(),
            "tiles",
            "stores",
        ),
    ),
    "missing fence": (
        Bug("scores and P have no fence of registers", _FENCES[1].left_out()),
        Bug.no_proxy_fence(
            "O is stored in shared memory without a proxy fence", find("mma", "fence.proxy.async"), "tiles"
        ),
        Bug(
            "a bias is released while it is read",
            arrivals("mma", "bias.empty", 2).ahead("fence.proxy.async").left_out(),
            "bias",
        ),
    ),
    "wrong phase": Bug.wrong_phases("producer k.empty | K's producer waits for the other phase"),
    "wrong count": (Bug("a warp fewer releases K", uncounted("k.empty", 1)),),
    "wrong descriptor": (
        Bug(
            "groups of eight keys are further apart",
            find("mma", "wgmma.mma_async", 16, having=r"n128k16")[:4].flipped("b.stride", 1),
        ),
    ),
}

HOPPER_BACKWARD: Bugs = {
    "missing wait": (
        *Bug.no_waits(
            """
        mma q.full | scores are begun before Q is there
        mma do.full | dP is begun before dO is there
        mma ds.full*2, mma:4 lags | dQ is begun before all of dS is there
        filling added_1.full in turns, stores lag | a turn is passed on before the storing warp has said so
        storing added_1.empty*2 in many | a block to signal is written over one that is not signalled
        filling tiles.full in turns, loads lag | a tile is signalled before it is there
        """
        ),
        Bug("dP is read while it is computed", _WAITS[1].left_out()),
        Bug("dQ's place is written before it is read", (_READ[:1] + _READ[3:]).left_out(), lags="stores"),
        Bug(
            "a turn is passed on before dQ is added",
            find("storing", "cp.async.bulk.wait_group", 2, having=r"group\s").left_out(),
            "turns",
            "stores",
        ),
    ),
    "missing fence": (
        Bug.no_proxy_fence("dS is stored without a proxy fence", arrivals("mma", "ds.full").ahead("fence.proxy.async")),
    ),
    "wrong phase": Bug.wrong_phases("producer q.empty | Q's producer waits for the other phase"),
    "wrong count": (Bug("a warp fewer releases Q", uncounted("q.empty", 1), lags="warpgroups"),),
}

HOPPER_CLUSTER: Bugs = {
    "missing wait": (
        *Bug.no_waits(
            """
        sums ds.full | dQ is begun before the other CTA's dS is there
        gradients ds.empty | dS is sent where dQ still reads it
        gradients p.full | P is read before it is stored
        """
        ),
        Bug(
            "a CTA ends while the other one reaches it",
            find("sums", "barrier.cluster", 4)[2:].left_out(),
            lags="second gradients",
        ),
    ),
    "missing fence": (
        Bug.no_proxy_fence("dS is sent without a proxy fence", find("gradients", "fence.proxy.async", 2)[0]),
        Bug("lse is released while it is read", arrivals("scores", "q.empty").ahead("fence.proxy.async").left_out()),
    ),
    "wrong phase": Bug.wrong_phases("q_producer q.empty | Q's producer waits for the other phase"),
    "wrong count": (Bug("a warp fewer releases dO", uncounted("do.empty", 1, "q_producer"), lags="gradients:3"),),
}
