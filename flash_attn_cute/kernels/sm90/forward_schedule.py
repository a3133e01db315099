"""The schedule of the forward kernel (``forward``): roles, pipelines, shared memory and steps of a configuration."""

from flash_attn_cute.kernels.schedule import QUERY_TILE_FIELDS, Buffer, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward_half_blocks_schedule import half_blocks_schedule

# The softmax of one warpgroup runs beside both products of the others, as in FlashAttention-3.
_TIMELINE = """
one warpgroup   tensor cores   S(n), O += P(n+1) V(n+1)                        S(n-1), O += P(n) V(n)
                other units                              P(n) = softmax(S(n))                          P(n-1) ...
the others      tensor cores                             S, O                                          S, O
                other units    softmax                                         softmax
"""


def forward_schedule(config: ForwardConfig) -> Schedule:
    """The schedule of a configuration."""
    if config.features.half_blocks:
        return half_blocks_schedule(config)
    c, warpgroups, has_bias = config, config.num_mma_warpgroups, config.bias_pitch > 0
    assert c.tile_dv <= c.tile_d  # O fits the place of Q

    loading, computing = c.registers
    by_block = "K, V and a bias" if c.features.tiled_bias else "K and V"
    loads_tiles = f"chooses tiles; issues TMA: Q once a tile, {by_block} block by block"
    producer = Role("producer", range(1), loading, loads_tiles)
    loads = "the bias row of each block, as float32" if c.has_bias_row else "the bias of each block"
    bias = Role("bias", range(1, 4), loading, f"loads {loads}" if has_bias else "idle")
    mma = Role(
        "mma",
        range(4, 4 + 4 * warpgroups),
        computing,
        f"{warpgroups} warpgroups of 64 rows each, independent but for the order in which they use the tensor cores",
    )

    # Entries: the producer publishes a block before it knows that the block's stage of K is released. The stage of the
    # block before is released, so the scores of the block ``stages`` before that are computed, and its entry read.
    num_entries = 2 * c.stages if c.features.listed else 0
    bias_stages = c.bias_stages if has_bias else 0
    tiles = Buffer("tiles", (QUERY_TILE_FIELDS, c.tile_stages), "field, tile stage", "int32")
    entries = Buffer("entries", (2, num_entries), "block and code, entry", "int32")
    # Where a CTA has one tile, a warpgroup's part of O lies in the place of its own part of Q.
    in_Q = {} if c.persistent else {"place_of": "sQ", "apart": 64 * c.tile_d}
    sO = operand("sO", (64, c.tile_dv, warpgroups), "row, d_v, warpgroup", **in_Q)
    sQ = operand("sQ", (64, c.tile_d, warpgroups, c.tile_stages), "row, d, warpgroup, tile stage")
    sK = operand("sK", (c.tile_n, c.tile_d, c.stages), "key, d, stage")
    sV = operand("sV", (c.tile_n, c.tile_dv, c.stages), "key, d_v, stage")
    sBias = Buffer("sBias", (c.bias_pitch, c.bias_rows, bias_stages), "byte, row, bias stage", "uint8", align=128)
    filled, read = (producer.once(),), (mma.per_warp(),)
    bias_pipeline = Pipeline("bias", bias_stages, "bias of a block", (bias.per_thread(),), read)
    bias_tiles: tuple[Buffer, ...] = ()
    if c.features.tiled_bias:
        tile = operand("sBiasTile", (64, c.tile_n, c.bias_stages * warpgroups), "query, key, stage of a warpgroup")
        what, read_by_one = "bias of a block and a warpgroup", (mma.per_warp_of_a_warpgroup(),)
        bias_pipeline = Pipeline("bias", tile.shape[2], what, filled, read_by_one, tile.stage_bytes)
        bias_tiles = (tile,)

    of_bias = (
        Step("bias", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
        Step("bias", "bias.empty", "loads the bias of block n", "bias.full"),
    )
    # A row of a bias is few registers: it is read while the tensor cores are others', ahead of the scores.
    becomes = "+=" if c.adds_to_bias else "="
    place = "the accumulators of S(n)" if c.adds_to_bias else "registers"
    read_row = [Step("mma", "bias.full", f"reads the bias row of block n into {place}", "bias.empty")]
    add_bias = [Step("mma", "bias.full", "adds the bias to S(n)", "bias.empty")]
    add_row = [] if c.adds_to_bias else [Step("mma", "", "adds the bias row to S(n)")]
    load_tile = [Step("producer", "bias.empty", "loads the bias of block n, each warpgroup's rows", "bias.full")]
    read_tile = [Step("mma", "bias.full", "reads the bias of block n into registers", "bias.empty")]
    early, late = (read_row, add_row) if c.has_bias_row else ([], add_bias if has_bias else [])
    # TMA's tiles are read while products are in flight, if registers suffice.
    beside = read_tile if c.features.tiled_bias and not c.reads_bias_late else []
    if c.features.tiled_bias:
        late = [*(read_tile if c.reads_bias_late else []), Step("mma", "", "adds the bias to S(n)")]
    done = (*read, bias.per_warp()) if has_bias else read
    return Schedule(
        kernel="kernels/sm90/forward.py:ForwardSm90",
        work=f"{c.tile_m} queries of {'a head' if c.group == 1 else f'{c.group} heads'}: "
        + ("one tile after the other" if c.persistent else "one tile"),
        roles=(producer, bias, mma),
        pipelines=(
            Pipeline("tiles", c.tile_stages, "a tile's fields and its Q", filled, done, sQ.stage_bytes),
            Pipeline("k", c.stages, "K of a block, of all tiles", filled, read, sK.stage_bytes),
            Pipeline("v", c.stages, "V of a block, of all tiles", filled, read, sV.stage_bytes),
            bias_pipeline,
        ),
        shared=(tiles, entries, sO, sQ, sK, sV, sBias, *bias_tiles),
        steps=(
            Step("producer", "tiles.empty", "once a tile: publishes its fields, loads Q", "tiles.full"),
            Step("producer", "k.empty", "loads K(n)", "k.full"),
            Step("producer", "v.empty", "loads V(n)", "v.full"),
            *(of_bias if has_bias else ()),
            *(load_tile if c.features.tiled_bias else ()),
            *early,
            Step("mma", "k.full, its turn at the tensor cores", f"issues S(n) {becomes} Q K(n)'"),
            Step("mma", "v.full", "issues O += P(n+1) V(n+1)", "the next warpgroup's turn"),
            *beside,
            Step("mma", "S(n) complete", "releases K(n)", "k.empty"),
            Step("mma", "O complete", "releases V(n+1)", "v.empty"),
            *late,
            Step("mma", "", "P(n) = softmax(S(n)), in registers; rescales O"),
            Step("mma", "tiles.full", "once a tile: begins the next tile's S, then stores O and lse", "tiles.empty"),
        ),
        timeline=_TIMELINE,
    )
