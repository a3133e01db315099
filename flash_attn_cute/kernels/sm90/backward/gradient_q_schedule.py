"""The schedule of the kernel of dQ (``gradient_q``): roles, pipelines, shared memory and steps."""

from flash_attn_cute.kernels.schedule import Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardStoredDSConfig

FIELDS = 4  # Int32 that describe a tile: ``gradient_q.GradientTile``
_TILE_STAGES = 2
_REGISTERS = 128  # a thread; those of its accumulator are half of them

_TIMELINE = """
tensor cores   dQ(t)   dQ(t+1)   dQ(t+2)   dQ(t+3) ...
TMA            dS, K(t+4)   dS, K(t+5) ...
"""


def gradient_q_schedule(config: BackwardStoredDSConfig) -> Schedule:
    """The schedule of a configuration."""
    c = config
    mma = Role("mma", range(4), _REGISTERS, f"{c.tile_m} queries: dQ")
    producer = Role("producer", range(4, 5), _REGISTERS, "chooses tiles; issues copies of dS and K")
    filled, done = (producer.once(),), (mma.per_warp(),)
    return Schedule(
        kernel="kernels/sm90/backward/gradient_q.py:GradientQSm90",
        work=f"{c.tile_m} queries, over their cells: one tile after the other; {c.ctas_of_dQ} CTAs an SM",
        roles=(mma, producer),
        pipelines=(
            Pipeline("tiles", _TILE_STAGES, "a tile's fields", filled, done),
            Pipeline("steps", c.stages_of_dQ, "dS and K of a step", filled, done, 2 * c.tile_n * (c.tile_m + c.tile_d)),
        ),
        shared=(
            Buffer("tile_fields", (FIELDS, _TILE_STAGES), "field, tile stage", "int32"),
            operand("sdS", (c.tile_n, c.tile_m, c.stages_of_dQ), "key, query, stage"),
            operand("sK", (c.tile_n, c.tile_d, c.stages_of_dQ), "key, d, stage"),
            operand("sOut", (c.tile_m, 0 if c.features.wide else c.tile_d), "query, d: dQ", swizzle=c.tile_d),
        ),
        steps=(
            Step("producer", "tiles.empty", "once a tile: publishes its fields", "tiles.full"),
            Step("producer", "steps.empty", "copies dS(t) from its cell; loads K(t)", "steps.full"),
            Step("mma", "tiles.full", "once a tile: reads its fields"),
            Step("mma", "steps.full", "issues dQ += dS(t) K(t)"),
            Step("mma", "dQ(t-1) complete", "releases the stage of step t - 1", "steps.empty"),
            Step("mma", "dQ complete", "once a tile: dQ to shared memory; one warp stores it", "tiles.empty"),
        ),
        timeline=_TIMELINE,
    )
