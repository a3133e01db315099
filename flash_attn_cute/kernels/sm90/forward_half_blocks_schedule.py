"""The schedule of the forward kernel of half blocks (``forward_half_blocks``)."""

from flash_attn_cute.kernels.schedule import QUERY_TILE_FIELDS, Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig

MESSAGES = 8  # to a warpgroup, that it may not have read
MESSAGE_FIELDS = 4  # stage, phase, codes of two blocks

# Warpgroups are independent: which of them has the tensor cores is left to the hardware.
_TIMELINE = """
one warpgroup   tensor cores   O += P(n) V(n), S(n+1)                           O += P(n+1) V(n+1), S(n+2)
                other units                            P(n+1) = softmax(S(n+1))                            P(n+2) ...
the other       tensor cores                           O, S                                                O, S
                other units    softmax                                          softmax
"""


def half_blocks_schedule(config: ForwardConfig) -> Schedule:
    """The schedule of a configuration."""
    c, warpgroups = config, config.num_mma_warpgroups
    # Steps that are not released take a stage each, and two tiles that are not done have an end each.
    assert c.stages + c.tile_stages <= MESSAGES
    loading, computing = c.registers
    producer = Role("producer", range(1), loading, "chooses tiles, pairs half blocks; issues TMA: Q, K and V of a step")
    idle = Role("idle", range(1, 4), loading, "idle")
    does = f"{warpgroups} warpgroups of 64 rows, each with steps of its own and steps that all have"
    mma = Role("mma", range(4, 4 + 4 * warpgroups), computing, does)
    tiles = Buffer("tiles", (QUERY_TILE_FIELDS, c.tile_stages), "field, tile stage", "int32")
    fields = (MESSAGE_FIELDS, MESSAGES, warpgroups)
    messages = Buffer("messages", fields, "field, message, warpgroup", "int32", align=16)
    sQ = operand("sQ", (64, c.tile_d, warpgroups, 1), "row, d, warpgroup, stage")
    sK = operand("sK", (c.tile_n, c.tile_d, c.stages), "key, d, stage")
    sV = operand("sV", (c.tile_n, c.tile_dv, c.stages), "key, d_v, stage")
    q_bytes, filled, released = 2 * 64 * c.tile_d * warpgroups, (producer.once(),), (mma.per_warp(),)
    of_both = "messages0.full, messages1.full"
    return Schedule(
        kernel="kernels/sm90/forward_half_blocks.py:ForwardHalfBlocksSm90",
        work=f"{c.tile_m} queries of a head: one tile after the other",
        roles=(producer, idle, mma),
        pipelines=(
            Pipeline("tiles", c.tile_stages, "a tile's fields", filled, released),
            Pipeline("q", 1, "Q of a tile", filled, released, q_bytes),
            # A warpgroup releases the steps that it has, and the producer at once those that it does not have.
            Pipeline("k", c.stages, "K of a step, of all tiles", filled, released, sK.stage_bytes),
            Pipeline("v", c.stages, "V of a step, of all tiles", filled, released, sV.stage_bytes),
            # No warpgroup leaves one unread for long: K of its step is not released before.
            *(
                Pipeline(f"messages{w}", MESSAGES, f"a step of warpgroup {w}, or a tile's end", filled, ())
                for w in range(warpgroups)
            ),
        ),
        shared=(tiles, messages, sQ, sK, sV),
        steps=(
            Step("producer", "tiles.empty", "once a tile: publishes its fields", "tiles.full"),
            Step("producer", "q.empty", "once a tile: loads Q", "q.full"),
            Step("producer", "k.empty", "loads K of two half blocks", "k.full"),
            Step("producer", "v.full", "of the stage's last step: publishes this one", of_both),
            Step("producer", "v.empty", "loads V of them", "v.full"),
            Step("mma", "v.full", "issues O += P(n) V(n)"),
            Step("mma", of_both, "reads its next step; releases V(n) before it waits"),
            Step("mma", "k.full", "issues S(n+1) = Q K(n+1)'"),
            Step("mma", "O complete", "releases V(n)", "v.empty"),
            Step("mma", "S(n+1) complete", "releases K(n+1)", "k.empty"),
            Step("mma", "", "P(n+1) = softmax(S(n+1)), in registers; rescales O"),
            Step("mma", "tiles.full, q.full", "once a tile: takes the next one's Q into registers", "q.empty"),
            Step("mma", "", "once a tile: begins the next one's S, then stores O and lse", "tiles.empty"),
        ),
        timeline=_TIMELINE,
    )
