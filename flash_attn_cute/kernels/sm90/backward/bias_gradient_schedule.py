"""The schedule of the bias-gradient kernel (``bias_gradient``): roles, pipelines, shared memory and steps."""

from flash_attn_cute.kernels.schedule import (
    PIECE_BATCH,
    PIECE_FIELDS,
    PIECE_OPERANDS,
    PIECE_STAGES,
    Buffer,
    Pipeline,
    Role,
    Schedule,
    Step,
    operand,
)
from flash_attn_cute.kernels.sm90.backward.bias_gradient_config import BiasGradientConfig

_LOADING, _COMPUTING = 40, 232  # registers a thread

_TIMELINE = """
one warpgroup   tensor cores   S(t) dP(t)        S(t+1) dP(t+1)
                other units          P(t), dS(t)          P(t+1), dS(t+1) ...
the other                      likewise
"""


def bias_gradient_schedule(config: BiasGradientConfig) -> Schedule:
    """The schedule of a configuration."""
    c, copies = config, config.bias_pitch > 0
    producer = Role("producer", range(1), _LOADING, "finds pieces; issues TMA")
    bias = Role("bias", range(1, 4), _LOADING, "copies the tile's bias" if copies else "idle")
    mma = Role("mma", range(4, 4 + c.tile_m // 16), _COMPUTING, "64 queries a warpgroup: S, dP, and the sum of dS")
    filled, done = (producer.once(),), (mma.per_warp(),)

    def loaded(name: str, what: str, columns: int) -> Pipeline:
        return Pipeline(name, c.stages, what, filled, done, 2 * (c.tile_m + c.tile_n) * columns)

    return Schedule(
        kernel="kernels/sm90/backward/bias_gradient.py:BiasGradientSm90",
        work=f"{c.tile_m} x {c.tile_n} elements of the gradient, over the scores that they are added to",
        roles=(producer, bias, mma),
        pipelines=(
            loaded("qk", "Q and K of a piece", c.tile_d),
            loaded("dov", "dO and V of a piece", c.tile_dv),
            Pipeline("bias", int(copies), "the tile's bias, once", (bias.per_thread(),), ()),
            Pipeline("pieces", PIECE_STAGES, f"{PIECE_BATCH} pieces", filled, done),
        ),
        shared=(
            Buffer("pieces", (PIECE_FIELDS, PIECE_BATCH, PIECE_STAGES), "field, piece, stage", "int32"),
            Buffer("sums", (c.tile_n, len(mma.warps)), "key, warp", "float32"),
            *(
                operand(name, (*shape, c.stages), "row, column, stage")
                for name, shape in zip(PIECE_OPERANDS, c.operands, strict=True)
            ),
            Buffer("sBias", (c.bias_pitch, c.bias_rows, int(copies)), "byte, row, stage", "uint8", align=128),
        ),
        steps=(
            Step("producer", "pieces.empty", f"publishes {PIECE_BATCH} pieces, a lane each", "pieces.full"),
            Step("producer", "qk.empty", "loads Q(t) and K(t)", "qk.full"),
            Step("producer", "dov.empty", "loads dO(t) and V(t)", "dov.full"),
            *([Step("bias", "", "once: copies the tile's bias", "bias.full")] if copies else ()),
            Step("mma", "pieces.full" + (", bias.full once" if copies else ""), "reads the piece", "pieces.empty"),
            Step("mma", "qk.full", "issues S(t) = Q(t) K(t)'"),
            Step("mma", "dov.full", "issues dP(t) = dO(t) V(t)'"),
            Step("mma", "S(t) complete", "P(t) = exp2(S(t) - lse), in registers", "qk.empty"),
            Step("mma", "dP(t) complete", "adds P(t) (dP(t) - delta) to the sums", "dov.empty"),
        ),
        timeline=_TIMELINE,
    )
