"""The schedule of the backward kernel that stores dS (``stored_ds``): roles, pipelines, shared memory and steps."""

from flash_attn_cute.kernels.schedule import KEY_TILE_FIELDS, Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.config import BackwardStoredDSConfig

_TILE_STAGES = 2
_STEP_STAGES = 4  # Q of four steps later waits for dS of two steps later, and that for this step's to have left

# An SM has two CTAs. Which of them has the tensor cores is left to the hardware.
_TIMELINE = """
one CTA    tensor cores   S(t), dP(t)          dV(t)       dK(t)   S(t+1) ...
           other units                 P(t)         dS(t)                    P(t+1)
the other  tensor cores   dV(t)         dK(t)  S(t+1), dP(t+1)         dV(t+1) ...
           other units          dS(t)                           P(t+1)
"""


def stored_ds_schedule(config: BackwardStoredDSConfig) -> Schedule:
    """The schedule of a configuration."""
    c, (loading, computing) = config, config.registers
    producer = Role("producer", range(1), loading, "chooses tiles; issues TMA: K and V once a tile, Q and dO by blocks")
    storing = Role("storing", range(1, 2), loading, "stores dS, dV and dK")
    idle = Role("idle", range(2, 3), loading, "idle")
    filling = Role("filling", range(3, 4), loading, "writes zeros to dV and dK of fully masked keys")
    mma = Role("mma", range(4, 8), computing, f"{c.tile_n} keys: P, dS, and the products but dQ")
    filled, done = (producer.once(),), (mma.per_warp(),)
    all_done = (mma.per_warp(), storing.per_warp())
    keys, queries = 2 * c.tile_n * c.tile_d, 2 * c.tile_m * c.tile_d
    return Schedule(
        kernel="kernels/sm90/backward/stored_ds.py:BackwardStoredDSSm90",
        work=f"{c.tile_n} keys, over blocks of {c.tile_m} queries: one tile after the other; two CTAs an SM",
        roles=(producer, storing, idle, filling, mma),
        pipelines=(
            Pipeline("tiles", _TILE_STAGES, "a tile's fields", filled, all_done),
            Pipeline("k", 1, "K of a tile", filled, done, keys),
            Pipeline("v", 1, "V of a tile", filled, done, keys),
            Pipeline("q", c.stages, "Q and lse of a step", filled, done, queries + 4 * c.tile_m),
            Pipeline("do", c.do_stages, "dO and delta of a step", filled, done, queries + 4 * c.tile_m),
            Pipeline("out_1", c.out_stages, "dS of a step; 64 columns of dV or dK", done, (storing.once(),)),
            Pipeline("bias", 0, "", (), ()),
            Pipeline("steps", _STEP_STAGES, "a step's fields", filled, ()),
        ),
        shared=_buffers(c),
        steps=_STEPS,
        timeline=_TIMELINE,
    )


def _buffers(c: BackwardStoredDSConfig) -> tuple[Buffer, ...]:
    """Buffers of shared memory, in the order of their addresses."""
    return (
        Buffer("tile_fields", (KEY_TILE_FIELDS, _TILE_STAGES), "field, tile stage", "int32"),
        Buffer("step_fields", (5, _STEP_STAGES), "field, step", "int32"),
        Buffer("sBias", (0, 0, 0), "byte, row, bias stage", "uint8", align=16),
        Buffer("stats", (c.tile_m, 2, c.stages), "query, lse or delta, stage", "float32", align=128),
        operand("sK", (c.tile_n, c.tile_d, 1, 1), "key, d, warpgroup, stage"),
        operand("sV", (c.tile_n, c.tile_d, 1), "key, d, warpgroup"),
        operand("sQ", (c.tile_m, c.tile_d, c.stages), "query, d, stage"),
        operand("sdO", (c.tile_m, c.tile_d, c.do_stages), "query, d, stage"),
        operand("sOut", (c.tile_n, 64, c.out_stages), "key, query or column, stage: dS, dV or dK"),
        operand("sdS", (c.tile_n, c.tile_m, 1, c.out_stages), "key, query, warpgroup, stage", place_of="sOut"),
    )


_STEPS = (
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
    Step("mma", "out_1.empty", "writes dS(t) to shared memory", "out_1.full"),
    Step("mma", "dV complete", "releases dO(t)", "do.empty"),
    Step("mma", "dK complete", "releases Q(t)", "q.empty"),
    Step(
        "mma",
        "out_1.empty",
        "once a tile: releases K; dV and dK to shared memory, in pieces",
        "k.empty, out_1.full, tiles.empty",
    ),
    Step("storing", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
    Step("storing", "steps.full", "finds the cell of a step"),
    Step("storing", "out_1.full", "stores dS(t) in its cell; once a tile: stores dV and dK", "out_1.empty"),
)
