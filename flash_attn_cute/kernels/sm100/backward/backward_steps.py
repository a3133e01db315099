"""Steps of the backward kernels' schedules, in their steady state; pictures of them; and what orders proxies."""

from flash_attn_cute.kernels.schedule import Order, Step
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.config import CTAS, TILES_IN_ORDER

TIMELINES = {  # of the steady state, by passes and CTAs of a tile
    (1, 1): """
tensor cores   S0 dP0 | dV0 S1 dK0 | dQ0 dP1 | dV1 S2 dK1 | dQ1 dP2 ...
compute          P0     dS0      P1            dS1      P2
drain                                     dQ0                    dQ1
""",
    (2, 1): """
first pass     tensor cores   S0 S1 | dV0 S2 | dV1 S3 ...
               compute           P0     P1      P2
second pass    tensor cores   dP0 S0 |        | dK0 dP1 dQ0 S1 |        | dK1 dP2 dQ1 S2 ...
               compute                 P0 dS0                    P1 dS1
               drain                                         dQ0
""",
    (1, 2): """
tensor cores   S0 dP0 | dV0 S1 | dK0 dP1 dQ0 | dV1 S2 | dK1 dP2 dQ1 ...
compute          P0     dS0      P1            dS1      P2
drain                                       dQ0
""",
    (2, 2): """
first pass     tensor cores   S0 S1 | dV0 S2 | dV1 S3 ...
               compute           P0     P1      P2
second pass    tensor cores   S0 dP0 |    | dK0 S1 dP1 dQ0 |    | dK1 S2 dP2 dQ1 ...
               compute           P0    dS0           P1     dS1           P2
               drain                                             dQ0
""",
}

_READ = "tcgen05.ld, wait::ld"
_ORDERS = (
    Order("S, dP, dQ, dV, dK: tensor cores -> threads", f"commit -> wait, tcgen05.fence::after_thread_sync, {_READ}"),
    Order("P, dS: threads -> tensor cores", "tcgen05.st, wait::st, fence::before, arrival -> wait, fence::after"),
    Order("S, dQ, dV, dK: read -> overwritten", f"{_READ}, fence::before, arrival -> wait, fence::after"),
    Order("operands, stats: TMA -> all", "mbarrier; read -> overwritten: commits; proxy fence, arrivals -> wait, TMA"),
    Order("dS in shared memory -> tensor cores", "st.shared, proxy fence, arrival -> wait; then commit -> wait"),
    Order("pieces of dQ: threads -> TMA", "st.shared, fence.proxy.async, arrival -> wait, TMA; then bulk wait"),
    Order("dK, dV in shared memory: threads -> TMA", "st.shared, proxy fence, named barrier, TMA; then bulk wait"),
    Order("dQ in the workspace", "``common.semaphores``"),
)
_ORDERS_OF_PAIRS = (
    Order("dS that is sent: threads -> bulk copy", "st.shared, proxy fence, __syncwarp; then commit of dQ -> wait"),
    Order("dS of the other CTA -> tensor cores", "bulk copy, mbarrier -> wait by its mma warp, arrival -> wait"),
    TILES_IN_ORDER,
)
_ORDERS_OF_KEYS = (
    Order("K in shared memory -> threads", "mbarrier -> wait, ld.shared"),
    Order("K: threads -> tensor cores", "as P"),
    Order("K read -> dV written in its place", "arrival at keys -> wait, products -> commit of dV -> wait"),
)


def _out(what: str, ring: str, place: str) -> Step:
    """A result on its way out: from tensor memory, through the place of an operand."""
    return Step(
        "compute",
        f"{ring}.full",
        f"once a tile: stores {what} in the place of an operand",
        f"{ring}.empty, {place}.empty",
    )


def _released_once_a_tile(role: str) -> Step:
    return Step(
        role, "tiles.full", "once a tile: reads its fields, and releases them behind the last use", "tiles.empty"
    )


_ONE_PASS = (
    Step("producer", "k.empty", "once a tile: loads K", "k.full"),
    Step("producer", "q.empty", "loads Q(t) and lse", "q.full"),
    Step("producer", "v.empty", "once a tile, behind its first Q: loads V", "v.full"),
    Step("producer", "do.empty", "loads dO(t) and delta", "do.full"),
    Step("mma", "k.full, q.full", "issues S(t+1)", "scores.full"),
    Step("mma", "dp.empty, dk.empty once a tile", "issues dK(t)", "q.empty"),
    Step("mma", "dq.empty", "issues dQ(t)", "dq.full"),
    Step("mma", "v.full, do.full", "issues dP(t+1)", "dp.full"),
    Step("mma", "scores.empty, dv.empty once a tile", "issues dV(t+1)", "do.empty"),
    Step("mma", "", "commits behind a tile's last dV, and its last dQ", "dv.full, dk.full"),
    Step("compute", "scores.full, q.full", "P(t) in the place of S(t)", "scores.empty, q.empty"),
    Step("compute", "dp.full, do.full", "dS(t) in the place of dP(t), and in shared memory", "dp.empty, do.empty"),
    _out("dV", "dv", "v"),
    _out("dK", "dk", "k"),
)
_TWO_PASSES = (
    Step("producer", "k.empty", "once a tile: loads K", "k.full"),
    Step("producer", "q.empty", "loads Q(t), lse and delta", "q.full"),
    Step("producer", "do.empty", "loads dO(t)", "do.full"),
    Step("producer", "v.empty", "once a tile, behind the first pass: loads V", "v.full"),
    Step("mma", "k.full, q.full", "first pass: issues S(t+1)", "scores.full, q.empty"),
    Step("mma", "do.full, scores.empty, dk.empty once a tile", "first pass: issues dV(t)", "do.empty"),
    Step("mma", "scores.empty, dv.empty once a tile", "second pass: issues dK(t)", "q.empty"),
    Step("mma", "v.full, do.full", "second pass: issues dP(t+1)", "scores.full, do.empty"),
    Step("mma", "dq.empty", "second pass: issues dQ(t)", "dq.full"),
    Step("mma", "q.full", "second pass: issues S(t+1)", "scores.full"),
    Step("mma", "", "commits behind the last dV, and the last S", "dv.full, dk.full"),
    Step("compute", "q.full, scores.full", "first pass: P(t) in the place of S(t)", "scores.empty, q.empty"),
    _out("dV", "dv", "v"),
    Step("compute", "q.full, scores.full", "second pass: loads S(t), P(t)", "scores.empty"),
    Step("compute", "scores.full", "second pass: dS(t) in the place of dP(t)", "scores.empty, q.empty"),
    _out("dK", "dk", "k"),
)


def orders_of(c: BackwardConfig) -> tuple[Order, ...]:
    """Orders between proxies, threads and CTAs in a configuration."""
    pair = _ORDERS_OF_PAIRS if c.ctas_a_tile == CTAS else ()
    return (*_ORDERS, *(_ORDERS_OF_KEYS if c.holds_keys else ()), *pair)


def steps_of(c: BackwardConfig) -> tuple[Step, ...]:
    """Steps of a tile, and of each block t of its queries, of every role."""
    if c.ctas_a_tile == CTAS:
        steps = _pair_in_two_passes(c) if c.num_passes == 2 else _pair(c)
    else:
        steps = _TWO_PASSES if c.num_passes == 2 else _ONE_PASS
    entries = (
        Step("producer", "entries.empty", "publishes where the block is, and its code", "entries.full"),
        Step("producer", "turns.empty", "publishes where its dQ is added, and when", "turns.full"),
        Step("compute", "entries.full", "reads the entry", "entries.empty"),
        Step("adding", "turns.full", "reads the turn", "turns.empty"),
    )
    return (
        Step("producer", "tiles.empty", "once a tile: publishes its fields", "tiles.full"),
        *((_released_once_a_tile("producer"),) if c.ctas_a_tile == CTAS else ()),
        *(entries if c.features.listed else ()),
        *steps,
        *map(_released_once_a_tile, ("mma", "compute", "drain", "adding")),
        Step("drain", "dq.full", "loads dQ(t)", "dq.empty"),
        Step(
            "drain",
            "pieces_even.empty, pieces_odd.empty",
            f"stores dQ(t) in pieces, by {'columns' if c.transposes_dQ else 'rows'}",
            "pieces_even.full, pieces_odd.full",
        ),
        Step(
            "adding",
            "pieces_even.full, pieces_odd.full, the block's turn",
            "adds a piece by TMA; at the last one, signals the next turn",
            "pieces_even.empty, pieces_odd.empty",
        ),
    )


def _pair(c: BackwardConfig) -> tuple[Step, ...]:
    S_read, releases_S = (", scores.empty", "scores.empty") if c.dQ_over_S else ("", "")
    return (
        Step("producer", "k.empty", "once a tile: loads K", "k.full"),
        Step("producer", "q.empty", "loads Q(t) by rows", "q.full"),
        Step("producer", "stats.empty", "loads lse and delta", "stats.full"),
        Step("producer", "v.empty", "once a tile, behind its first Q: loads V", "v.full"),
        Step("producer", "do.empty", "loads dO(t) by rows", "do.full"),
        Step("producer", "do_columns.empty", "loads dO(t) by columns", "do_columns.full"),
        Step("producer", "q_columns.empty", "loads Q(t) by columns", "q_columns.full"),
        Step("producer", "k_columns.empty", "once a tile, behind its first step: loads K by columns", "k_columns.full"),
        Step("mma", "k.full, q.full", "issues S(t+1)", "scores.full, q.empty"),
        Step("mma", "dp.empty, q_columns.full, dk.empty once a tile", "issues dK(t)", "q_columns.empty"),
        Step("mma", "v.full, do.full", "issues dP(t+1)", "dp.full, do.empty"),
        Step("mma", "exchange.full", "in the second CTA: dS(t) has come there", "exchange.empty"),
        Step("mma", "dq.empty, exchange.full, exchange.empty, k_columns.full" + S_read, "issues dQ(t)", "dq.full"),
        Step("mma", "p.full, do_columns.full, dv.empty once a tile", "issues dV(t+1)", "do_columns.empty"),
        Step("mma", "", "commits behind a tile's last dV, and its last dQ", "dv.full, k_columns.empty, dk.full"),
        Step("compute", "stats.full, scores.full", "loads S(t)", releases_S),
        Step("compute", "", "P(t) in the place of S(t)", "p.full"),
        Step("compute", "dp.full", "dS(t) in the place of dP(t)", "dp.empty, stats.empty"),
        Step("compute", "dq.full", "dS(t) in shared memory, or sent to the other CTA", "exchange.full"),
        _out("dV", "dv", "v"),
        _out("dK", "dk", "k"),
    )


def _pair_in_two_passes(c: BackwardConfig) -> tuple[Step, ...]:
    S_read = ", scores.empty" if c.dQ_over_S else ""
    return (
        Step("producer", "k.empty", "once a tile: loads K", "k.full"),
        Step("producer", "q.empty", "loads Q(t) by rows; in the second pass by columns, too", "q.full"),
        Step("producer", "stats.empty", "loads lse and delta", "stats.full"),
        Step("producer", "do_columns.empty", "first pass: loads dO(t) by columns", "do_columns.full"),
        Step("producer", "v.empty", "once a tile, behind its first Q: loads V", "v.full"),
        Step("producer", "do.empty", "second pass: loads dO(t) by rows", "do.full"),
        Step("producer", "k_columns.empty", "once a tile, behind dV: loads K by columns", "k_columns.full"),
        Step("compute", "k.full", "once a tile: K to tensor memory", "keys.full"),
        Step("mma", "keys.full, q.full", "first pass: issues S(t+1)", "scores.full, q.empty"),
        Step(
            "mma", "do_columns.full, scores.empty, dk.empty once a tile", "first pass: issues dV(t)", "do_columns.empty"
        ),
        Step("mma", "scores.empty, q.full, dv.empty once a tile", "second pass: issues dK(t)", "q.empty"),
        Step("mma", "dq.empty, q.full", "second pass: issues S(t+1)", "scores.full, q.empty"),
        Step("mma", "v.full, do.full", "second pass: issues dP(t+1)", "scores.full, do.empty"),
        Step("mma", "exchange.full", "in the second CTA: dS(t) has come there", "exchange.empty"),
        Step("mma", "exchange.full, exchange.empty, k_columns.full" + S_read, "second pass: issues dQ(t)", "dq.full"),
        Step("mma", "", "commits behind the last dV, and the last dQ", "dv.full, k.empty, dk.full"),
        Step(
            "compute", "stats.full, scores.full", "first pass: P(t) in the place of S(t)", "scores.empty, stats.empty"
        ),
        _out("dV", "dv", "k_columns"),
        Step("compute", "stats.full, scores.full", "second pass: loads S(t), P(t)", "scores.empty"),
        Step("compute", "scores.full", "second pass: dS(t) in the place of dP(t)", "scores.empty, stats.empty"),
        Step("compute", "dq.full", "second pass: dS(t) in shared memory, or sent to the other CTA", "exchange.full"),
        _out("dK", "dk", "v"),
    )
