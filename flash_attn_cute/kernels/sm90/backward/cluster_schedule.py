"""The schedule of the backward kernel above d = 128 (``cluster``): roles, pipelines, shared memory and steps."""

from flash_attn_cute.kernels.schedule import Arrivals, Buffer, Order, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardClusterConfig

STAGES = 2  # of Q, of dO, or as many of its halves, and of dS
_ORDER_STAGES = 4  # turns that have come and are not signalled yet

# The tensor cores are one warpgroup's while the others compute, wait or add.
_TIMELINE = """
scores      S(t) | P(t)  | dV(t)           | S(t+1) | P(t+1)  | dV(t+1) ...
gradients          dP(t)         | dS(t)   | dK(t)  | dP(t+1)           ...
sums                               dQ(t-1) | add             | dQ(t)    ...
"""
_ORDERS = (
    Order("operands: TMA -> tensor cores", "mbarrier; read -> overwritten: arrival in both CTAs -> wait, TMA"),
    Order("dS: threads -> tensor cores, TMA", "stmatrix, fence.proxy.async, bar.warp.sync, expect_tx -> wait"),
    Order("dS: CTA -> the other CTA", "cp.async.bulk of each warp's 16 keys -> bytes at the other CTA's ds.full"),
    Order("dV, dK: threads -> TMA", "stmatrix, fence.proxy.async, named barrier, TMA"),
)


def _in_both(*roles: Role) -> tuple[Arrivals, ...]:
    """One arrival by each warp of the roles, of this CTA and of the other one."""
    return tuple(Arrivals(role.name, "each warp, in both CTAs, of", 2 * len(role.warps)) for role in roles)


def cluster_schedule(config: BackwardClusterConfig) -> Schedule:
    """The schedule of a configuration."""
    c, ordered, registers = config, config.features.deterministic, config.registers
    roles = q_producer, do_producer, waiting, signalling, scores, gradients, sums = (
        Role("q_producer", range(1), registers[0], "issues TMA: K, then Q, lse and delta; in rank 0, Q of both CTAs"),
        Role("do_producer", range(1, 2), registers[0], "issues TMA: V, then dO; in rank 1, dO of both CTAs"),
        Role("waiting", range(2, 3), registers[0], "waits at semaphores of dQ" if ordered else "idle"),
        Role("signalling", range(3, 4), registers[0], "signals at semaphores of dQ" if ordered else "idle"),
        Role("scores", range(4, 8), registers[1], "P; dV" + ("; reads the bias" if c.features.bias else "")),
        Role("gradients", range(8, 12), registers[2], "dS, for both CTAs; dK"),
        Role("sums", range(12, 16), registers[3], f"{c.columns_dQ} columns of dQ, over the keys of both CTAs"),
    )
    order_stages = _ORDER_STAGES if ordered else 0
    half = ", or half of it" if c.parts_dO > 1 else ""
    by_q, by_do, read = (q_producer.once(),), (do_producer.once(),), _in_both(scores, gradients)
    pipelines = (
        Pipeline("k", 1, "K; some of the other CTA's", by_q, (), 2 * 64 * (c.tile_d + c.columns_dQ), has_empty=False),
        Pipeline("v", 1, "V", by_do, (), 2 * 64 * c.tile_dv, has_empty=False),
        Pipeline("q", STAGES, "Q, lse and delta of a step", by_q, read, 64 * (2 * c.tile_d + 4 * 2)),
        Pipeline("do", STAGES, f"dO of a step{half}", by_do, read, 2 * 64 * c.columns_dO),
        Pipeline("p", 1, "P of a step", (scores.per_warp(),), (gradients.per_warp(),)),
        # The bytes come from the other CTA.
        Pipeline("ds", STAGES, "dS of a step", (gradients.per_warp(),), _in_both(sums), 2 * 64 * 64),
        Pipeline("order", order_stages, "the turn of a step", (waiting.once(),), (signalling.once(),)),
        Pipeline("added", order_stages, "dQ of a step, added", (sums.per_warp(),), (), has_empty=False),
    )
    return Schedule(
        kernel="kernels/sm90/backward/cluster.py:BackwardClusterSm90",
        work=f"{c.tile_n} keys of a cluster, 64 a CTA, over blocks of {c.tile_m} queries: one tile",
        roles=roles,
        pipelines=pipelines,
        shared=_buffers(c, order_stages),
        steps=_steps(c),
        timeline=_TIMELINE,
        orders=_ORDERS,
    )


def _buffers(c: BackwardClusterConfig, order_stages: int) -> tuple[Buffer, ...]:
    """Buffers of shared memory, in the order of their addresses."""
    return (
        Buffer("turns", (order_stages,), "order stage", "int32"),
        Buffer("tile", (1,), "index", "int32"),
        Buffer("stats", (64, 2, STAGES), "query, lse and delta, stage", "float32", align=128),
        # Pairs of P, or with a softcap of its derivative's factor, as a thread has them in registers.
        Buffer("sP", (4, 128, 4), "pair, thread, group of sixteen queries", "int32", align=128),
        # No swizzled atom of K may hold columns of both halves of dQ.
        operand("sK", (64, c.tile_d), "its key, d", c.columns_dQ),
        operand("sK_peer", (64, c.columns_dQ), "the other CTA's key, d of its columns of dQ"),
        operand("sV", (64, c.tile_dv), "its key, d_v"),
        operand("sQ", (64, c.tile_d, STAGES), "query, d, stage; then dK"),
        operand("sdO", (64, c.columns_dO, STAGES), "query, d_v, stage; then dV"),
        operand("sdS", (64, 64, 2, STAGES), "key, query, own and the other CTA's, stage"),
    )


def _steps(c: BackwardClusterConfig) -> tuple[Step, ...]:
    """Steps of all roles."""
    ordered = c.features.deterministic
    turns = (
        Step("waiting", "order.empty, its turn at the semaphore", "passes the turn of step t on", "order.full"),
        Step("signalling", "added.full", "signals at the semaphore, at times for two steps", "order.empty"),
    )
    return (
        Step("q_producer", "once", "loads K", "k.full"),
        Step("q_producer", "q.empty", "loads Q(t), lse and delta", "q.full"),
        Step("do_producer", "once", "loads V", "v.full"),
        Step("do_producer", "do.empty", "loads dO(t)", "do.full"),
        *(turns if ordered else ()),
        Step("scores", "k.full once, q.full", "S(t)' = K Q(t)'"),
        Step("scores", "S(t) complete", "P(t)' = exp2(S(t)' - lse); releases Q(t)", "q.empty"),
        Step("scores", "p.empty", "P(t) to the gradients' threads, through shared memory", "p.full"),
        Step("scores", "do.full", "dV += P(t)' dO(t)", "do.empty"),
        Step("gradients", "v.full once, do.full", "dP(t)' = V dO(t)'", "do.empty"),
        Step("gradients", "q.full, p.full", "dS(t)' = P(t)' (dP(t)' - delta)", "p.empty"),
        Step("gradients", "", "issues dK += dS(t)' Q(t)"),
        Step("gradients", "ds.empty", "dS(t) to shared memory of both CTAs", "ds.full"),
        Step("gradients", "dK complete", "releases Q(t)", "q.empty"),
        Step("sums", "k.full once, ds.full", "dQ(t) = dS(t) K", "ds.empty"),
        Step("sums", "order.full" if ordered else "", "adds dQ(t) to the workspace", "added.full" if ordered else ""),
    )
