"""The schedule of the forward kernel of selections (``selection``)."""

from flash_attn_cute.kernels.schedule import Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.selection import TILE_ROWS
from flash_attn_cute.kernels.sm90.selection_config import SelectionConfig

# Warpgroups are independent: which of them has the tensor cores is left to the hardware.
_TIMELINE = """
warpgroup 0     tensor cores   S(n)              O(n)                            S(n+3)
                other units          softmax(n)        O(n) to shared memory             softmax(n+3)
warpgroup 1     tensor cores         S(n+1)            O(n+1)
                other units                softmax(n+1)      O(n+1) to shared memory
"""


def selection_schedule(config: SelectionConfig) -> Schedule:
    """The schedule of a configuration."""
    c, warpgroups = config, config.num_mma_warpgroups
    loading, computing = c.registers
    producer = Role(
        "producer", range(warpgroups), loading, "warp w issues TMA for warpgroup w: Q of its picks; warp 0 K and V, too"
    )
    idle = Role("idle", range(warpgroups, 4), loading, "idle")
    mma = Role(
        "mma",
        range(4, 4 + 4 * warpgroups),
        computing,
        f"{warpgroups} warpgroups, each with every {warpgroups}th tile of the item",
    )
    entries = Buffer("entries", (c.picks_a_tile, c.stages, warpgroups), "pick, stage, warpgroup", "int32")
    sK = operand("sK", (c.tile_n, c.tile_d), "key, d")
    sV = operand("sV", (c.tile_n, c.tile_dv), "key, d_v")
    sQ = operand("sQ", (TILE_ROWS, c.tile_d, c.stages, warpgroups), "row, d, stage, warpgroup")
    sO = operand("sO", (TILE_ROWS, c.tile_dv, warpgroups), "row, d_v, warpgroup")
    q_bytes = 2 * TILE_ROWS * c.tile_d
    rings = [f"q{w}" for w in range(warpgroups)]
    full, empty = (", ".join(f"{ring}.{side}" for ring in rings) for side in ("full", "empty"))
    return Schedule(
        kernel="kernels/sm90/selection.py:SelectionSm90",
        work="an item: some of the queries that select one block of keys, in tiles of 64 rows",
        roles=(producer, idle, mma),
        pipelines=(
            Pipeline("k", 1, "K of the block", (producer.once(),), (), 2 * c.tile_n * c.tile_d, has_empty=False),
            Pipeline("v", 1, "V of the block", (producer.once(),), (), 2 * c.tile_n * c.tile_dv, has_empty=False),
            *(
                Pipeline(
                    ring,
                    c.stages,
                    f"Q and entries of a tile of warpgroup {w}",
                    (producer.once(),),
                    (mma.per_warp_of_a_warpgroup(),),
                    q_bytes,
                )
                for w, ring in enumerate(rings)
            ),
        ),
        shared=(entries, sK, sV, sQ, sO),
        steps=(
            Step("producer", "", "warp 0, once: loads K and V", "k.full, v.full"),
            Step("producer", empty, "writes the entries of a tile, and loads Q of each", full),
            Step("mma", f"k.full, {full}", "issues S = Q K'"),
            Step("mma", "S complete", "releases Q", empty),
            Step("mma", "v.full", "P = softmax(S), in registers; issues O = P V"),
            Step("mma", "O complete", "writes O to sO; one of its warps stores each pick's rows"),
        ),
        timeline=_TIMELINE,
    )
