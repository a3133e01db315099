"""The schedule of the backward kernel of selections (``selection``)."""

from flash_attn_cute.kernels.schedule import Buffer, Order, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.selection import TILE_ROWS
from flash_attn_cute.kernels.sm90.selection_config import SelectionBackwardConfig

# Warpgroups are independent: which of them has the tensor cores is left to the hardware.
_TIMELINE = """
warpgroup 0     tensor cores   S(n), dP(n)              dV, dK, dQ(n)                 S(n+2), dP(n+2)
                other units                P(n), dS(n)                  stores dQ(n)
warpgroup 1     tensor cores                S(n+1), dP(n+1)               dV, dK, dQ(n+1)
                other units                                P, dS(n+1)                     stores dQ(n+1)
"""


def selection_backward_schedule(config: SelectionBackwardConfig) -> Schedule:
    """The schedule of a configuration."""
    c, warpgroups = config, config.num_mma_warpgroups
    loading, computing = c.registers
    producer = Role(
        "producer",
        range(warpgroups),
        loading,
        "warp w issues TMA for warpgroup w: Q and dO of its picks; warp 0 K and V, too",
    )
    idle = Role("idle", range(warpgroups, 4), loading, "idle")
    mma = Role(
        "mma",
        range(4, 4 + 4 * warpgroups),
        computing,
        f"{warpgroups} warpgroups, each with every {warpgroups}nd tile of the item, and sums of dK and dV",
    )
    entries = Buffer("entries", (c.picks_a_tile, c.stages, warpgroups), "pick, stage, warpgroup", "int32")
    sK = operand("sK", (c.tile_n, c.tile_d), "key, d")
    sV = operand("sV", (c.tile_n, c.tile_dv), "key, d_v")
    sQ = operand("sQ", (TILE_ROWS, c.tile_d, c.stages, warpgroups), "row, d, stage, warpgroup")
    sdO = operand("sdO", (TILE_ROWS, c.tile_dv, c.stages, warpgroups), "row, d_v, stage, warpgroup")
    sP, sdS = (operand(name, (TILE_ROWS, c.tile_n, warpgroups), "row, key, warpgroup") for name in ("sP", "sdS"))
    rings = [f"q{w}" for w in range(warpgroups)]
    full, empty = (", ".join(f"{ring}.{side}" for ring in rings) for side in ("full", "empty"))
    return Schedule(
        kernel="kernels/sm90/backward/selection.py:SelectionBackwardSm90",
        work="an item: some of the queries that select one block of keys, in tiles of 64 rows",
        roles=(producer, idle, mma),
        pipelines=(
            Pipeline("k", 1, "K of the block", (producer.once(),), (), 2 * c.tile_n * c.tile_d, has_empty=False),
            Pipeline("v", 1, "V of the block", (producer.once(),), (), 2 * c.tile_n * c.tile_dv, has_empty=False),
            *(
                Pipeline(
                    ring,
                    c.stages,
                    f"Q, dO and entries of a tile of warpgroup {w}",
                    (producer.once(),),
                    (mma.per_warp_of_a_warpgroup(),),
                    2 * TILE_ROWS * (c.tile_d + c.tile_dv),
                )
                for w, ring in enumerate(rings)
            ),
        ),
        shared=(entries, sK, sV, sQ, sdO, sP, sdS),
        steps=(
            Step("producer", "", "warp 0, once: loads K and V", "k.full, v.full"),
            Step("producer", empty, "writes the entries of a tile, and loads Q and dO of each", full),
            Step("mma", f"k.full, v.full, {full}", "issues S = Q K' and dP = dO V'"),
            Step("mma", "S complete", "P = exp2(S - lse), to sP"),
            Step("mma", "dP complete", "dS = P * (dP - delta), to sdS"),
            Step("mma", "", "issues dV += P' dO, dK += dS' Q, and dQ = dS K by columns"),
            Step("mma", "dV, dK, dQ complete", "releases Q and dO; stores dQ from registers", empty),
        ),
        orders=(
            Order("P, dS: threads, tensor cores", "a proxy fence and the warpgroup's barrier"),
            Order("P, dS: tensor cores, threads", "the warpgroup's barrier ahead of the next tile's P"),
        ),
        timeline=_TIMELINE,
    )
