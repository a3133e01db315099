"""Bugs of Hopper's kernels: forward, backward up to d = 128, and backward by clusters above."""

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.backward.backward_config import backward_config
from flash_attn_cute.kernels.sm90.backward.backward_schedule import backward_schedule
from lab.bugs.code import STRIDE, B, arrivals, find, uncounted, warps_of
from lab.bugs.table import (
    LOADS_LAG,
    STORES_LAG,
    WARPGROUPS_LAG,
    Bug,
    Bugs,
    no_proxy_fence,
    no_wait,
    no_wait_for_tma,
    wrong_phase,
)

# Up to d = 128, where the forward kernel has the same warps for producer and mma; and above, of a cluster's CTAs.
_OF_CTA, _OF_CLUSTER = (warps_of(backward_schedule(backward_config("bfloat16", d, d, Features()))) for d in (128, 256))
_PRODUCER, _STORING, _FILLING, _MMA = (_OF_CTA[name][0] for name in ("producer", "storing", "filling", "mma"))
_SCORES, _GRADIENTS, _SUMS = (_OF_CLUSTER[name][0] for name in ("scores", "gradients", "sums"))
_SIGNALS_LAG = frozenset(_OF_CTA["filling"])
_SECOND_LAGS = frozenset(_OF_CTA["mma"][4:])  # the second warpgroup
_LAST_LAGS = frozenset(_OF_CLUSTER["gradients"][-1:])
_SCORES_LAG, _SUMS_LAG = (frozenset(_OF_CLUSTER[name]) for name in ("scores", "sums"))
_OTHER_CTA_LAGS = frozenset((1, warp) for warp in _OF_CLUSTER["gradients"])

_FENCES, _WAITS = find(_MMA, "wgmma.fence", 7), find(_MMA, "wgmma.wait_group", 6)
_OF_BACKWARD = find(_MMA, "wgmma.wait_group", 6)
_READ = find(_STORING, "cp.async.bulk.wait_group.read", 4)

HOPPER_FORWARD: Bugs = {
    "missing wait": (
        no_wait("scores are begun before K is there", _MMA, "k.full", "long", LOADS_LAG, count=3),
        no_wait("outputs are begun before V is there", _MMA, "v.full", "long", LOADS_LAG, count=2),
        no_wait("a bias is read before it is there", _MMA, "bias.full", "bias", LOADS_LAG, count=2),
        Bug("scores are read while they are computed", _WAITS[0].left_out(), "long"),
        Bug("O is rescaled while a product adds to it", _WAITS[2].left_out(), "long"),
        no_wait_for_tma(
            "O's place is written before TMA has read it", find(_MMA, "cp.async.bulk.wait_group", 2)[0], "tiles"
        ),
    ),
    "missing fence": (
        Bug("scores and P have no fence of registers", _FENCES[1].left_out(), "long"),
        no_proxy_fence("O is stored in shared memory without a proxy fence", find(_MMA, "fence.proxy.async"), "tiles"),
        Bug(
            "a bias is released while it is read",
            arrivals(_MMA, "bias.empty", 2).ahead("fence.proxy.async").left_out(),
            "bias",
        ),
    ),
    "wrong phase": (
        wrong_phase("K's producer waits for the other phase", _PRODUCER, "k.empty", "long"),
        wrong_phase("V is awaited in the other phase", _MMA, "v.full", "long", count=2),
    ),
    "wrong count": (
        Bug("a warp fewer releases K", uncounted("k.empty", 1, _PRODUCER), "long"),
        Bug("a warp fewer releases a bias", uncounted("bias.empty", 1, _PRODUCER), "bias"),
    ),
    "wrong descriptor": (
        Bug(
            "groups of eight keys are further apart",
            find(_MMA, "wgmma.mma_async", 16, having=r"n128k16")[:4].flipped(B, 1 << STRIDE),
            "long",
        ),
    ),
}

HOPPER_BACKWARD: Bugs = {
    "missing wait": (
        no_wait("scores are begun before Q is there", _MMA, "q.full", "steps", LOADS_LAG),
        no_wait("dP is begun before dO is there", _MMA, "do.full", "steps", LOADS_LAG),
        no_wait("dQ is begun before all of dS is there", _MMA, "ds.full", "steps", _SECOND_LAGS, count=2),
        Bug("dP is read while it is computed", _OF_BACKWARD[1].left_out(), "steps"),
        no_wait_for_tma("dQ's place is written before it is read", _READ[:1] + _READ[3:], "steps"),
        no_wait_for_tma(
            "a turn is passed on before dQ is added",
            find(_STORING, "cp.async.bulk.wait_group", 2, having=r"group\s"),
            "turns",
        ),
        no_wait(
            "a turn is passed on before the storing warp has said so", _FILLING, "added_1.full", "turns", STORES_LAG
        ),
        no_wait(
            "a block to signal is written over one that is not signalled",
            _STORING,
            "added_1.empty",
            "many",
            _SIGNALS_LAG,
            count=2,
        ),
        no_wait("a tile is signalled before it is there", _FILLING, "tiles.full", "turns", LOADS_LAG),
    ),
    "missing fence": (
        no_proxy_fence(
            "dS is stored without a proxy fence", arrivals(_MMA, "ds.full").ahead("fence.proxy.async"), "steps"
        ),
    ),
    "wrong phase": (wrong_phase("Q's producer waits for the other phase", _PRODUCER, "q.empty", "steps"),),
    "wrong count": (Bug("a warp fewer releases Q", uncounted("q.empty", 1, _PRODUCER), "steps", WARPGROUPS_LAG),),
}

HOPPER_CLUSTER: Bugs = {
    "missing wait": (
        no_wait("dQ is begun before the other CTA's dS is there", _SUMS, "ds.full", "steps", LOADS_LAG),
        no_wait("dS is sent where dQ still reads it", _GRADIENTS, "ds.empty", "steps", _SUMS_LAG),
        no_wait("P is read before it is stored", _GRADIENTS, "p.full", "steps", _SCORES_LAG),
        Bug(
            "a CTA ends while the other one reaches it",
            find(_SUMS, "barrier.cluster", 4)[2:].left_out(),
            "steps",
            _OTHER_CTA_LAGS,
        ),
    ),
    "missing fence": (
        no_proxy_fence("dS is sent without a proxy fence", find(_GRADIENTS, "fence.proxy.async", 2)[0], "steps"),
        Bug(
            "lse is released while it is read",
            arrivals(_SCORES, "q.empty").ahead("fence.proxy.async").left_out(),
            "steps",
        ),
    ),
    "wrong phase": (wrong_phase("Q's producer waits for the other phase", _PRODUCER, "q.empty", "steps"),),
    "wrong count": (Bug("a warp fewer releases dO", uncounted("do.empty", 1, _PRODUCER), "steps", _LAST_LAGS),),
}
