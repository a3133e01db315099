"""The schedule of the backward kernel up to d = 128 (``cta``): roles, pipelines, shared memory and steps."""

from typing import Any

from flash_attn_cute.kernels.schedule import KEY_TILE_FIELDS, Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardCtaConfig

_TILE_STAGES = 2
_ADDED_STAGES = 4  # additions of a storing warp that are not signalled yet
_STEP_STAGES = 4  # Q of four steps later waits for mma warps, and they until this step's dQ and dS have been stored

_SIDES = ("full", "empty")

# The tensor cores are one warpgroup's while the other computes.
_TIMELINE = """
one warpgroup   tensor cores   S(t), dP(t)           dV(t)              dQ(t-1), dK(t)           S(t+1) ...
                other units                  P(t)           dS(t)                       dQ(t-1)
the other       tensor cores   ... dK(t-1)           S(t), dP(t)        dV(t)                    dQ(t-1) ...
                other units                  dQ(t-2)               P(t)          dS(t)
"""


def cta_schedule(config: BackwardCtaConfig) -> Schedule:
    """The schedule of a configuration."""
    c, (loading, computing) = config, config.registers
    warpgroups, copies, tiled = c.num_mma_warpgroups, c.bias_pitch > 0, c.features.tiled_bias
    producer = Role("producer", range(1), loading, "chooses tiles; issues TMA: K and V once a tile, Q and dO by blocks")
    storing = Role("storing", range(1, 1 + warpgroups), loading, "one a warpgroup: adds its dQ, stores its dV and dK")
    fills = {
        "copies the bias": copies,
        "stores dS": c.tiles_dbias,
        "zeroes sums of dQ": c.zeroes_sums,
        "signals additions to dQ": c.signals_apart,
        "writes zeros to dV and dK of fully masked keys": c.features.may_mask_keys,
    }
    does = "; ".join(what for what, is_done in fills.items() if is_done) or "idle"
    filling = Role("filling", range(1 + warpgroups, 4), loading, does)
    mma = Role("mma", range(4, 4 + 4 * warpgroups), computing, "64 keys a warpgroup: P, dS, all products; rounds dQ")
    filled, done = (producer.once(),), (mma.per_warp(),)
    reads_tiles = copies or c.tiles_dbias or c.signals_apart
    all_done = (mma.per_warp(), storing.per_warp(), *((filling.per_warp(),) if reads_tiles else ()))
    wrote_dS = (*done, filling.per_warp()) if c.tiles_dbias else done
    keys, queries = 2 * c.tile_n * c.tile_d, 2 * c.tile_m * c.tile_d
    of_q = "Q and lse of a step" + (", units of dQ" if c.fixed_point else "")
    bias_stages = c.bias_stages if copies or tiled else 0
    bias: tuple[Any, ...] = (filled, done, 2 * c.tile_m * c.tile_n) if tiled else ((filling.per_thread(),), done)
    outs, added = (tuple(f"{name}_{w}" for w in range(1, 1 + warpgroups)) for name in ("out", "added"))
    added_stages = _ADDED_STAGES if c.signals_apart else 0
    return Schedule(
        kernel="kernels/sm90/backward/cta.py:BackwardCtaSm90",
        work=f"{c.tile_n} keys, over blocks of {c.tile_m} queries: one tile after the other",
        roles=(producer, storing, filling, mma),
        pipelines=(
            Pipeline("tiles", _TILE_STAGES, "a tile's fields", filled, all_done),
            Pipeline("k", c.k_stages, "K of a tile", filled, done, keys),
            Pipeline("v", 1, "V of a tile", filled, done, keys),
            Pipeline("q", c.stages, of_q, filled, done, queries + 4 * c.tile_m * (c.numbers_a_query - 1)),
            Pipeline("do", c.stages, "dO and delta of a step", filled, done, queries + 4 * c.tile_m),
            # An arrival also says that the warp, or TMA for it, does not read the other stage any more.
            Pipeline("ds", 2, "dS of a step", wrote_dS, (), has_empty=False),
            *(
                Pipeline(out, 1, "dQ of a step; dV or dK", (mma.per_warp_of_a_warpgroup(),), (storing.once(),))
                for out in outs
            ),
            Pipeline("bias", bias_stages, "bias of a step", *bias),
            Pipeline("steps", _STEP_STAGES, "a step's fields", filled, ()),
            *(
                Pipeline(name, added_stages, "a block that is added to", (storing.once(),), (filling.once(),))
                for name in added
            ),
        ),
        shared=_buffers(c, bias_stages, added_stages),
        steps=_steps(c, *(", ".join(f"{x}.{side}" for x in rings) for rings in (outs, added) for side in _SIDES)),
        timeline=_TIMELINE,
    )


def _buffers(c: BackwardCtaConfig, bias_stages: int, added_stages: int) -> tuple[Buffer, ...]:
    """Buffers of shared memory, in the order of their addresses."""
    warpgroups, tiled = c.num_mma_warpgroups, c.features.tiled_bias
    copied_stages = 0 if tiled else bias_stages
    part_of_K = 64 if c.transposes_dQ else c.columns_dQ
    dS, dS_modes = ((c.tile_m, 64), "query, key") if c.dS_by_queries else ((64, c.tile_m), "key, query")
    return (
        Buffer("tile_fields", (KEY_TILE_FIELDS, _TILE_STAGES), "field, tile stage", "int32"),
        Buffer("step_fields", (5 if c.features.listed else 2, _STEP_STAGES), "field, step", "int32"),
        Buffer("added_blocks", (warpgroups, added_stages), "warpgroup, added stage", "int32"),
        Buffer("sBias", (c.bias_pitch, c.bias_rows, copied_stages), "byte, row, bias stage", "uint8", align=16),
        Buffer("stats", (c.tile_m, c.numbers_a_query, c.stages), "query, number, stage", "float32", align=128),
        # No swizzled atom of K may hold columns of two parts of dQ.
        operand("sK", (64, c.tile_d, warpgroups, c.k_stages), "key, d, warpgroup, stage", part_of_K),
        operand("sV", (64, c.tile_d, warpgroups), "key, d, warpgroup"),
        operand("sQ", (c.tile_m, c.tile_d, c.stages), "query, d, stage"),
        operand("sdO", (c.tile_m, c.tile_d, c.stages), "query, d, stage"),
        operand("sdS", (*dS, warpgroups, 2), f"{dS_modes}, warpgroup, stage"),
        operand("sOut", (64, c.tile_d, warpgroups), "key, d, warpgroup: dV, dK or dQ", apart=128 * c.columns_dQ),
        *([operand("sBiasTile", (c.tile_m, c.tile_n, bias_stages), "query, key, stage")] if tiled else ()),
    )


def _steps(c: BackwardCtaConfig, out_full: str, out_empty: str, added_full: str, added_empty: str) -> tuple[Step, ...]:
    """Steps of all roles; t counts the blocks of all tiles of the CTA."""
    copies, tiled, one_k = c.bias_pitch > 0, c.features.tiled_bias, c.k_stages == 1
    dQ, product_dQ = ("dQ(t-1)'", "K' dS(t-1)'") if c.transposes_dQ else ("dQ(t-1)", "dS(t-1) K")
    waits = "waits for its turn; adds" if c.in_order else "adds"
    of_bias = (
        Step("filling", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
        Step("filling", "bias.empty", "copies the bias of step t", "bias.full"),
    )
    of_dS = (
        Step("filling", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
        Step("filling", "dS(t-1) read", "dS(t+1) may take its place", "ds.full"),
        Step("filling", "ds.full", "stores dS(t) as the gradient of the bias"),
    )
    of_signals = (
        Step("storing", added_empty, "dQ(t-1) is added: says to which block", added_full),
        Step("filling", "tiles.full", "once a tile: reads its number of steps, and releases its fields", "tiles.empty"),
        Step("filling", added_full, "signals at the blocks that dQ(t-1) is added to", added_empty),
    )
    return (
        Step("producer", "tiles.empty", "once a tile: publishes its fields", "tiles.full"),
        Step("producer", "k.empty", "once a tile: loads K", "k.full"),
        Step("producer", "q.empty", "publishes the fields of step t; loads Q(t)", "steps.full, q.full"),
        Step("producer", "do.empty", "loads dO(t)", "do.full"),
        Step("producer", "v.empty", "once a tile, behind its first step: loads V", "v.full"),
        *([Step("producer", "bias.empty", "loads the bias of step t", "bias.full")] if tiled else ()),
        *(of_bias if copies else ()),
        Step("mma", "tiles.full, k.full", "once a tile: reads its fields; some columns of K to registers"),
        Step("mma", "q.full", "issues S(t)' = K Q(t)'"),
        *([Step("mma", "", "dQ(t-2) is complete in shared memory", out_full)] if c.hands_out_late else []),
        Step("mma", "do.full, v.full once a tile", "issues dP(t)' = V dO(t)'"),
        *([Step("mma", "bias.full", "reads the bias of step t into registers", "bias.empty")] if tiled else ()),
        Step(
            "mma",
            "S(t) complete" + (", bias.full" if copies else ""),
            "P(t)' = exp2(S(t)' - lse), in registers"
            + ("; half-way issues dV of the first half of the queries" if c.halves_dV else ""),
            "bias.empty" if copies else "",
        ),
        Step("mma", "", "issues dV += P(t)' dO(t)" + (" of the second half" if c.halves_dV else "")),
        Step("mma", "dP(t) complete", "once a tile, in its last step: releases V", "v.empty"),
        Step("mma", "", "dS(t)' = P(t)' (dP(t)' - delta), into registers"),
        Step("mma", "ds.full of step t-1", "writes dS(t) to shared memory"),
        Step("mma", "dV complete", f"releases dO(t); issues {dQ} = {product_dQ} and dK += dS(t)' Q(t)", "do.empty"),
        Step(
            "mma",
            f"{dQ} complete",
            "dS(t) is complete" + ("" if one_k else "; once a tile: releases the last tile's K"),
            "ds.full" if one_k else "ds.full, k.empty",
        ),
        Step("mma", out_empty, f"writes {dQ} to shared memory", "" if c.hands_out_late else out_full),
        Step("mma", "dK complete", "releases Q(t)", "q.empty"),
        Step(
            "mma",
            out_empty,
            "once a tile: " + ("its last dQ; " if one_k else "") + "dV and dK to shared memory",
            f"{'k.empty, ' if one_k else ''}{out_full}, tiles.empty",
        ),
        *(of_dS if c.tiles_dbias else ()),
        Step("storing", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
        Step("storing", "steps.full", "reads which block of dQ a step adds to, and its turn"),
        Step("storing", out_full, f"{waits} dQ(t-1) to the workspace; once a tile: stores dV and dK", out_empty),
        *(of_signals if c.signals_apart else ()),
    )
