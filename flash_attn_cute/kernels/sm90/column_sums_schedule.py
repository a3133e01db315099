"""The schedule of the kernel of column sums (``column_sums``): roles, pipelines, shared memory and steps."""

from flash_attn_cute.kernels.schedule import Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.column_sums_config import ColumnSumsConfig

TILE_FIELDS = 11  # Int32 that describe a tile of keys: that of ``column_sums``
TILE_STAGES = 2
LSE_STAGES = 4
HALVES = 2  # of a warpgroup's keys, each of 64

# A warpgroup has products of one half of its keys in flight while it sums P of the other half.
_TIMELINE = """
warpgroup 0     tensor cores   S1(n)               S0(n+1)              S1(n+1)
                other units    sums exp2 of S0(n)  sums exp2 of S1(n)   sums exp2 of S0(n+1) ...
warpgroup 1                    likewise
"""


def column_sums_schedule(config: ColumnSumsConfig) -> Schedule:
    """The schedule of a configuration."""
    c, warpgroups = config, config.num_mma_warpgroups
    loading, computing = c.registers
    producer = Role("producer", range(1), loading, "chooses tiles; issues TMA: K once a tile, Q block by block")
    lse = Role("lse", range(1, 2), loading, "loads lse of each block, in base 2")
    idle = Role("idle", range(2, 4), loading, "idle")
    does = f"{warpgroups} independent warpgroups, of two halves of 64 keys each; K and the sums are in registers"
    mma = Role("mma", range(4, 4 + 4 * warpgroups), computing, does)
    once, released = (producer.once(),), (mma.per_warp(),)
    sK = operand("sK", (64, c.tile_d, HALVES * warpgroups), "key, d, half of a warpgroup's keys")
    sQ = operand("sQ", (c.tile_n, c.tile_d, c.stages), "query, d, stage")
    return Schedule(
        kernel="kernels/sm90/column_sums.py:ColumnSumsSm90",
        work=f"{c.tile_m} keys of a query head, and all queries that attend to them: one tile after the other",
        roles=(producer, lse, idle, mma),
        pipelines=(
            Pipeline("tiles", TILE_STAGES, "a tile's fields", once, (mma.per_warp(), lse.per_warp())),
            Pipeline("k", 1, "K of a tile", once, released, 2 * c.tile_m * c.tile_d),
            Pipeline("q", c.stages, "Q of a block, of all tiles", once, released, sQ.stage_bytes),
            Pipeline("lse", LSE_STAGES, "lse of a block, of all tiles", (lse.per_warp(),), released),
        ),
        shared=(
            Buffer("tiles", (TILE_FIELDS, TILE_STAGES), "field, tile stage", "int32"),
            Buffer("sLSE", (c.tile_n, LSE_STAGES), "query, stage", "float32", align=16),
            sK,
            sQ,
        ),
        steps=(
            Step("producer", "tiles.empty", "once a tile: publishes its fields", "tiles.full"),
            Step("producer", "k.empty", "once a tile: loads K", "k.full"),
            Step("producer", "q.empty", "loads Q(n)", "q.full"),
            Step("lse", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
            Step("lse", "lse.empty", "writes lse(n), in base 2", "lse.full"),
            Step("mma", "tiles.full, k.full", "once a tile: reads K into registers", "k.empty"),
            Step("mma", "", "issues S1(n) = K1 Q(n)'"),
            Step("mma", "S0(n) complete, lse.full", "adds P0(n) = exp2(S0(n) - lse(n)) to the sums"),
            Step("mma", "q.full", "issues S0(n+1) = K0 Q(n+1)'"),
            Step("mma", "S1(n) complete", "releases Q(n)", "q.empty"),
            Step("mma", "", "adds P1(n) to the sums; releases lse(n)", "lse.empty"),
            Step("mma", "", "once a tile: stores the sums", "tiles.empty"),
        ),
        timeline=_TIMELINE,
    )
