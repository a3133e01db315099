"""The schedule of the bias-gradient kernel (``bias_gradient``): roles, pipelines, memory and steps."""

from flash_attn_cute.kernels.schedule import (
    PIECE_BATCH,
    PIECE_FIELDS,
    PIECE_OPERANDS,
    PIECE_STAGES,
    Buffer,
    Columns,
    Order,
    Pipeline,
    Role,
    Schedule,
    Step,
    operand,
)
from flash_attn_cute.kernels.sm100.backward.bias_gradient_config import BiasGradientConfig
from flash_attn_cute.kernels.sm100.config import COMPUTE_WARPGROUPS, MMA_WARP, PRODUCER_WARP, SHARED_MEMORY, WARPS

_STEPS = (
    Step("producer", "pieces.empty", "publishes 32 pieces, a lane each", "pieces.full"),
    Step("producer", "qk.empty", "loads Q(t) and K(t)", "qk.full"),
    Step("producer", "dov.empty", "loads dO(t) and V(t)", "dov.full"),
    Step("mma", "pieces.full", "reads the piece", "pieces.empty"),
    Step("mma", "qk.full, scores.empty", "issues S(t)", "qk.empty, scores.full"),
    Step("mma", "dov.full, dp.empty", "issues dP(t)", "dov.empty, dp.full"),
    Step("compute", "pieces.full", "reads the piece", "pieces.empty"),
    Step("compute", "scores.full", "P(t), in registers", "scores.empty"),
    Step("compute", "dp.full", "adds P(t) (dP(t) - delta) to the sums", "dp.empty"),
)
_TIMELINE = """
tensor cores   S0 dP0 S1 | dP1 S2 | dP2 S3 ...
compute           P0       P1       P2
"""
_ORDERS = (
    Order("S, dP: tensor cores -> threads", "commit -> wait, tcgen05.fence::after_thread_sync, tcgen05.ld, wait::ld"),
    Order("S, dP: read -> overwritten", "tcgen05.ld, wait::ld, fence::before, arrival -> wait, fence::after"),
    Order("operands: TMA -> tensor cores", "mbarrier; read -> overwritten: commit -> wait, TMA"),
    Order("sums in the place of operands", "the last commit -> wait, st.shared, named barrier"),
)


def bias_gradient_schedule(config: BiasGradientConfig) -> Schedule:
    c, registers, others = config, 208, 48  # a thread's of compute warps, and of others
    computing = range(4 * COMPUTE_WARPGROUPS)
    compute = Role("compute", computing, registers, "a query and half of the keys a thread: P, dS, and their sum")
    mma = Role("mma", range(MMA_WARP, MMA_WARP + 1), others, "issues all products")
    producer = Role("producer", range(PRODUCER_WARP, PRODUCER_WARP + 1), others, "finds pieces; issues TMA")

    def loaded(name: str, what: str, columns: int) -> Pipeline:
        return Pipeline(name, c.stages, what, (producer.once(),), (mma.commit(),), 2 * (c.tile_m + c.tile_n) * columns)

    schedule = Schedule(
        kernel="kernels/sm100/backward/bias_gradient.py:BiasGradientSm100",
        work=f"{c.tile_m} x {c.tile_n} elements of the gradient, over the scores that they are added to",
        roles=(
            compute,
            Role("spare", range(computing.stop, MMA_WARP), others, "idle"),
            mma,
            producer,
            Role("idle", range(PRODUCER_WARP + 1, WARPS), others, "idle"),
        ),
        pipelines=(
            Pipeline("pieces", PIECE_STAGES, "32 pieces", (producer.once(),), (compute.per_warp(), mma.per_warp())),
            loaded("qk", "Q and K of a piece", c.tile_d),
            loaded("dov", "dO and V of a piece", c.tile_dv),
            Pipeline("scores", c.score_stages, "S of a piece", (mma.commit(),), (compute.per_warp(),)),
            Pipeline("dp", 1, "dP of a piece", (mma.commit(),), (compute.per_warp(),)),
        ),
        shared=(
            Buffer("holder", (1,), "address of tensor memory", "int32"),
            Buffer("pieces", (PIECE_FIELDS, PIECE_BATCH, PIECE_STAGES), "field, piece, stage", "int32"),
            *(
                operand(name, (*shape, c.stages), "row, column, stage")
                for name, shape in zip(PIECE_OPERANDS, c.operands, strict=True)
            ),
        ),
        steps=_STEPS,
        timeline=_TIMELINE,
        tensor_memory=(
            Columns("S", c.first_S(0), c.score_stages * c.tile_n, "scores of two pieces"),
            Columns("dP", c.first_dP, c.tile_n, "dP"),
            Columns("bias", c.first_bias, c.tile_n, "the tile's bias, in float32"),
        ),
        orders=_ORDERS,
    )
    assert schedule.num_bytes <= SHARED_MEMORY
    return schedule
