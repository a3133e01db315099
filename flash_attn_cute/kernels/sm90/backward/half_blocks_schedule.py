"""The schedule of the backward kernels of blocks of 64: ``half_blocks``, and ``stored_ds``, which stores dS."""

from flash_attn_cute.kernels.schedule import KEY_TILE_FIELDS, Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardHalfBlocksConfig

_TILE_STAGES = 2

# An SM has two CTAs. Which of them has the tensor cores is left to the hardware.
_HALF_BLOCKS = """
one CTA    tensor cores   S(t), dP(t)           dV(t), dK(t)           dQ(t)           S(t+1) ...
           other units                  P(t)           dS(t)                    dQ(t)
the other  tensor cores   dQ(t)         S(t+1), dP(t+1)                dV, dK ...
           other units             dQ(t)                       P(t+1)
"""
_STORED_DS = """
one CTA    tensor cores   S(t), dP(t)          dV(t)       dK(t)   S(t+1) ...
           other units                 P(t)         dS(t)                    P(t+1)
the other  tensor cores   dV(t)         dK(t)  S(t+1), dP(t+1)         dV(t+1) ...
           other units          dS(t)                           P(t+1)
"""


def _step_stages(c: BackwardHalfBlocksConfig) -> int:
    """Stages of steps' fields, a power of two that is more than loading may be ahead of storing.

    The mma warpgroup goes on until there is no room for what a step puts out. Q of that step is released by then,
    unless dS is what it puts out, and the producer publishes a step before it loads its Q.
    """
    ahead = c.stages + c.out_stages // c.pieces_dQ - c.stores_dS
    return 4 if ahead < 4 else 8


def half_blocks_schedule(config: BackwardHalfBlocksConfig) -> Schedule:
    """The schedule of a configuration of either kernel."""
    c, (loading, computing), stores_dS = config, config.registers, config.stores_dS
    kernel = "stored_ds.py:BackwardStoredDSSm90" if stores_dS else "half_blocks.py:BackwardHalfBlocksSm90"
    producer = Role("producer", range(1), loading, "chooses tiles; issues TMA: K and V once a tile, Q and dO by blocks")
    leaves = "stores dS, dV and dK" if stores_dS else "adds dQ, stores dV and dK"
    storing = Role("storing", range(1, 2), loading, leaves)
    idle = Role("idle", range(2, 3), loading, "idle")
    filling = Role("filling", range(3, 4), loading, "writes zeros to dV and dK of fully masked keys")
    products = "and the products but dQ" if stores_dS else "all products; rounds dQ"
    mma = Role("mma", range(4, 8), computing, f"{c.tile_n} keys: P, dS, {products}")
    filled, done = (producer.once(),), (mma.per_warp(),)
    all_done = (mma.per_warp(), storing.per_warp())
    keys, queries = 2 * c.tile_n * c.tile_d, 2 * c.tile_m * c.tile_d
    of_q = "Q and lse of a step" + (", units of dQ" if c.fixed_point else "")
    out = "dS of a step; 64 columns of dV or dK" if stores_dS else "a piece of dQ of a step; dV or dK"
    return Schedule(
        kernel=f"kernels/sm90/backward/{kernel}",
        work=f"{c.tile_n} keys, over blocks of {c.tile_m} queries: one tile after the other; two CTAs an SM",
        roles=(producer, storing, idle, filling, mma),
        pipelines=(
            Pipeline("tiles", _TILE_STAGES, "a tile's fields", filled, all_done),
            Pipeline("k", 1, "K of a tile", filled, done, keys),
            Pipeline("v", 1, "V of a tile", filled, done, keys),
            Pipeline("q", c.stages, of_q, filled, done, queries + 4 * c.tile_m * (c.numbers_a_query - 1)),
            Pipeline("do", c.do_stages, "dO and delta of a step", filled, done, queries + 4 * c.tile_m),
            Pipeline("out_1", c.out_stages, out, done, (storing.once(),)),
            Pipeline("bias", 0, "", (), ()),
            Pipeline("steps", _step_stages(c), "a step's fields", filled, ()),
        ),
        shared=_buffers(c),
        steps=_steps(stores_dS),
        timeline=_STORED_DS if stores_dS else _HALF_BLOCKS,
    )


def _buffers(c: BackwardHalfBlocksConfig) -> tuple[Buffer, ...]:
    """Buffers of shared memory, in the order of their addresses."""
    modes, piece = (
        "key, query, warpgroup, stage",
        2 * c.tile_m * c.tile_d // c.pieces_dQ,
    )  # of dQ, in operands' elements
    results = (
        operand("sdS", (c.tile_n, c.tile_m, 1, 1), modes),
        operand("sOut", (c.tile_n, c.tile_d, c.out_stages), "key, d, stage: dV, dK or a piece of dQ", apart=piece),
    )
    if c.stores_dS:
        results = (
            operand("sOut", (c.tile_n, 64, c.out_stages), "key, query or column, stage: dS, dV or dK"),
            operand("sdS", (c.tile_n, c.tile_m, 1, c.out_stages), modes, place_of="sOut"),
        )
    return (
        Buffer("tile_fields", (KEY_TILE_FIELDS, _TILE_STAGES), "field, tile stage", "int32"),
        Buffer("step_fields", (5, _step_stages(c)), "field, step", "int32"),
        Buffer("sBias", (0, 0, 0), "byte, row, bias stage", "uint8", align=16),
        Buffer("stats", (c.tile_m, c.numbers_a_query, c.stages), "query, number, stage", "float32", align=128),
        operand("sK", (c.tile_n, c.tile_d, 1, 1), "key, d, warpgroup, stage"),
        operand("sV", (c.tile_n, c.tile_d, 1), "key, d, warpgroup"),
        operand("sQ", (c.tile_m, c.tile_d, c.stages), "query, d, stage"),
        operand("sdO", (c.tile_m, c.tile_d, c.do_stages), "query, d, stage"),
        *results,
    )


def _steps(stores_dS: bool) -> tuple[Step, ...]:
    """Steps of all roles; those of dQ, or of dS where the kernel stores that."""
    dS = Step("mma", "", "writes dS(t) to shared memory, between barriers of the warpgroup; issues dQ(t) = dS(t) K")
    dQ = (Step("mma", "dQ(t) complete, out_1.empty", "writes dQ(t) to shared memory, in pieces", "out_1.full"),)
    finds, stores = "reads which block of dQ a step adds to", "adds dQ(t) to the workspace"
    if stores_dS:
        dS, dQ = Step("mma", "out_1.empty", "writes dS(t) to shared memory", "out_1.full"), ()
        finds, stores = "finds the cell of a step", "stores dS(t) in its cell"
    results = "dV and dK to shared memory" + (", in pieces" if stores_dS else "")
    return (
        Step("producer", "tiles.empty", "once a tile: publishes its fields", "tiles.full"),
        Step("producer", "k.empty", "once a tile: loads K", "k.full"),
        Step("producer", "q.empty", "publishes the fields of step t; loads Q(t)", "steps.full, q.full"),
        Step("producer", "do.empty", "loads dO(t)", "do.full"),
        Step("producer", "v.empty", "once a tile, behind its first step: loads V", "v.full"),
        Step("mma", "tiles.full, k.full", "once a tile: reads its fields; some columns of K to registers"),
        Step("mma", "q.full", "issues S(t)' = K Q(t)'"),
        Step("mma", "do.full, v.full once a tile", "issues dP(t)' = V dO(t)'"),
        Step("mma", "S(t) complete", "P(t)' = exp2(S(t)' - lse), in registers"),
        Step("mma", "", "issues dV += P(t)' dO(t)"),
        Step("mma", "dP(t) complete", "once a tile, in its last step: releases V", "v.empty"),
        Step("mma", "", "dS(t)' = P(t)' (dP(t)' - delta), into registers; issues dK += dS(t)' Q(t)"),
        dS,
        Step("mma", "dV complete", "releases dO(t)", "do.empty"),
        Step("mma", "dK complete", "releases Q(t)", "q.empty"),
        *dQ,
        Step("mma", "out_1.empty", f"once a tile: releases K; {results}", "k.empty, out_1.full, tiles.empty"),
        Step("storing", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
        Step("storing", "steps.full", finds),
        Step("storing", "out_1.full", f"{stores}; once a tile: stores dV and dK", "out_1.empty"),
    )
