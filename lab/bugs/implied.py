"""Waits of the schedules that no planted bug leaves out: another wait of the role implies them, so that nothing shows.

By the kernels of ``TABLES``, the role that waits, and the barrier: why.
"""

_PLENTY = "there are more stages than steps in flight"
_SCORES = "scores, which are waited for as well, are computed from the Q that lse comes with"
_DV = "what is waited for of a tile's first step, compute warps have stored behind the last result that lay there"

Waits = dict[tuple[str, str], str]

IMPLIED: dict[str, Waits] = {
    "masks": {
        ("mma", "entries.full"): "the producer publishes an entry ahead of the block's K, which has been waited for",
        ("producer", "entries.empty"): _PLENTY,
    },
    "backward": {
        ("mma", "dv.empty"): _DV,
        ("mma", "dk.empty"): _DV,
        ("compute", "q.full"): _SCORES,
        ("compute", "do.full"): "dP, which is waited for as well, is computed from the dO that delta comes with",
        ("producer", "v.empty"): "the places of V and of K are given back together, and that of K is waited for ahead",
    },
    "backward under masks": {("producer", "entries.empty"): _PLENTY, ("producer", "turns.empty"): _PLENTY},
    "pairs": {
        ("producer", "k_columns.empty"): "K is loaded ahead, behind dK, which is complete when the last dQ is",
        ("producer", "stats.empty"): "Q by columns of the step before is loaded ahead, behind dK of two steps before",
    },
    "bias": {
        ("mma", "scores.empty"): "dP of the step before is begun when compute warps have read dP of two steps before",
        ("producer", "pieces.empty"): "only a call of more than 64 pieces has a batch that waits",
    },
}
