"""The schedule of the backward kernels (``cta``, ``two_pass``, ``pair``, ``pair_two_pass``), but for its steps."""

from dataclasses import replace

from flash_attn_cute.kernels.schedule import (
    KEY_TILE_FIELDS,
    Arrivals,
    Buffer,
    Columns,
    Pipeline,
    Role,
    Schedule,
    operand,
)
from flash_attn_cute.kernels.sm100.backward.backward_config import DQ_STAGES, BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_steps import TIMELINES, orders_of, steps_of
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    CTAS,
    ENTRY_STAGES,
    MMA_WARP,
    O_COLUMNS,
    PART_ROWS,
    PRODUCER_WARP,
    SHARED_MEMORY,
    TILE_STAGES,
    WARPS,
)

STATS_STAGES = 2  # blocks whose lse and delta are in the shared memory of a CTA of a pair
COMPUTE_WARP, ADDING_WARP = 4, 14  # the first ones
ADDING_WARPS = WARPS - ADDING_WARP  # which take steps in turn
_TURN_NUMBERS = 2  # Int32 that the producer publishes: where dQ is added, and the turn

_KERNELS = {
    (1, 1): "cta.py:BackwardCtaSm100",
    (2, 1): "two_pass.py:BackwardTwoPassSm100",
    (1, 2): "pair.py:BackwardPairSm100",
    (2, 2): "pair_two_pass.py:BackwardPairTwoPassSm100",
}


def backward_schedule(config: BackwardConfig) -> Schedule:
    c, ctas, pair = config, config.ctas_a_tile, config.ctas_a_tile == CTAS
    of_drain, of_compute, of_others = _registers(c)
    rows = "a column of dQ" if c.transposes_dQ else "a query"
    keys = "; K to tensor memory" if c.holds_keys else ""
    roles = (
        Role("drain", range(COMPUTE_WARP), of_drain, f"{rows} a thread: dQ to shared memory; zeros into unseen keys"),
        Role(
            "compute",
            range(COMPUTE_WARP, MMA_WARP),
            of_compute,
            f"a key and half of a block's queries a thread: P, dS; then dV and dK{keys}; at last rounds dQ",
        ),
        Role(
            "mma", range(MMA_WARP, MMA_WARP + 1), of_others, "issues all products" + (", in the leader" if pair else "")
        ),
        Role("producer", range(PRODUCER_WARP, PRODUCER_WARP + 1), of_others, "chooses tiles; issues TMA"),
        Role(
            "adding", range(ADDING_WARP, WARPS), of_others, "every other step each: adds dQ to the workspace, in order"
        ),
    )
    schedule = Schedule(
        kernel="kernels/sm100/backward/" + _KERNELS[c.num_passes, ctas],
        work=f"{c.tile_n} keys of {'a pair of CTAs' if pair else 'a CTA'}, over blocks of {c.tile_m} queries, "
        + ("in two passes" if c.num_passes == 2 else "in one pass"),
        roles=roles,
        pipelines=_pipelines(c, *roles),
        shared=_buffers(c),
        steps=steps_of(c),
        timeline=TIMELINES[c.num_passes, ctas],
        tensor_memory=_columns(c),
        orders=orders_of(c),
    )
    assert schedule.num_bytes <= SHARED_MEMORY
    return schedule


def _registers(c: BackwardConfig) -> tuple[int, int, int]:
    """A thread's of drain warps, which hold a row of a product, of compute warps, and of others."""
    if c.tile_m < PART_ROWS:
        return 112, 160, 80
    if c.tile_d == 64:
        return 96, 168, 80
    return (96, 176, 64) if c.ctas_a_tile == CTAS else (152, 160, 40)


def _pipelines(
    c: BackwardConfig, drain: Role, compute: Role, mma: Role, producer: Role, adding: Role
) -> tuple[Pipeline, ...]:
    """Pipelines, in the order of their barriers. A step is a block of either pass."""
    ctas, pair, one_pass, listed = c.ctas_a_tile, c.ctas_a_tile == CTAS, c.num_passes == 1, c.features.listed
    stats_bytes = 4 * c.tile_m

    def loaded(name: str, stages: int, what: str, shape: tuple[int, int], *empty: Arrivals, more: int = 0) -> Pipeline:
        """A pipeline that TMA fills; TMA of a pair brings the bytes of both CTAs to the leader's barrier."""
        return Pipeline(name, stages, what, once, empty, 2 * shape[0] * shape[1] * ctas + more)

    def left(columns: int) -> Arrivals:
        """Arrivals when a result that takes the place of an operand has left shared memory, in pieces."""
        number = min(columns // O_COLUMNS, COMPUTE_WARPGROUPS)
        return Arrivals(compute.name, "a warp of each warpgroup with pieces of", number)

    def read(columns: int) -> Arrivals:
        """Arrivals when a result in tensor memory has been read."""
        number = 4 * min(columns // O_COLUMNS, COMPUTE_WARPGROUPS) * ctas
        return Arrivals(compute.name, "each warp of warpgroups with pieces of", number, "both CTAs" if pair else "")

    once, done, computed, all_computed = (producer.once(),), mma.commit(), compute.per_warp(), compute.per_warp(ctas)
    tiles_read = tuple(x.per_warp(ctas) for x in (drain, compute, mma, adding, *((producer,) if pair else ())))
    K, V = (PART_ROWS, c.tile_d), (PART_ROWS, c.tile_dv)
    Q, dO = (c.queries_shared, c.tile_d), (c.queries_shared, c.tile_dv)
    K_columns = (c.tile_n, c.columns_of_keys)
    Q_columns, dO_columns = (c.tile_m, c.tile_d // CTAS), (c.tile_m, c.tile_dv // CTAS)
    # A result leaves through the place of an operand, which is loaded behind it.
    k_empty, v_empty, k_columns_empty = left(c.tile_d), left(c.tile_dv), done
    if c.holds_keys:
        k_empty, v_empty, k_columns_empty = done, left(c.tile_d), left(c.tile_dv)
    q_more, do_more = (0, 0) if pair else (stats_bytes, stats_bytes) if one_pass else (2 * stats_bytes, 0)
    k = loaded("k", c.kv_stages, "K of a tile", K, k_empty)
    if c.holds_keys:  # which counts in its own CTA
        k = Pipeline("k", c.kv_stages, "K of a tile", once, (k_empty,), 2 * K[0] * K[1])
    # In one pass of a pair P has a pipeline of its own. That S is read matters where dQ takes its place.
    scores_empty = () if pair and one_pass and not c.dQ_over_S else (all_computed,)
    tiles_sent = 4 * KEY_TILE_FIELDS if pair else 0  # bytes, to the second CTA
    exchanged = 2 * PART_ROWS * c.queries_shared  # bytes
    info_stages = ENTRY_STAGES if listed else 0
    dS_sent, dS_read = compute.per_warp_of_a_warpgroup(), Arrivals(mma.name, "", 1, "the second CTA")
    return (
        Pipeline("tiles", TILE_STAGES, "a tile's fields", once, tiles_read, tiles_sent),
        k,
        loaded("v", c.kv_stages, "V of a tile", V, v_empty),
        loaded("q", c.q_stages, "Q of a step", Q, done, *(() if pair else (computed,)), more=q_more),
        loaded("do", c.do_stages, "dO of a step", dO, done, *((computed,) if do_more else ()), more=do_more),
        Pipeline("scores", c.num_passes, "S of a step" if one_pass else "S or dP", (done,), scores_empty),
        Pipeline("dp", 2 - c.num_passes, "dP of a step", (done,), (all_computed,)),
        Pipeline("dq", c.parts_dQ, "dQ of a step, or a part of it", (done,), (drain.per_warp(ctas),)),
        *(
            Pipeline(name, DQ_STAGES, "a piece of dQ", (drain.per_warp(),), (adding.once(),))
            for name in ("pieces_even", "pieces_odd")  # of even and of odd steps: an adding warp has its own
        ),
        Pipeline("dv", 1, "dV of a tile", (done,), (read(c.tile_dv),)),
        Pipeline("dk", 1, "dK of a tile", (done,), (read(c.tile_d),)),
        Pipeline("entries", info_stages, "an entry of a list", once, (computed,)),
        Pipeline("turns", info_stages, "a turn", once, (adding.per_warp(),)),
        loaded("k_columns", int(pair), "K of a tile, by columns", K_columns, k_columns_empty),
        loaded("q_columns", int(pair and one_pass), "Q of a step, by columns", Q_columns, done),
        loaded("do_columns", c.num_passes if pair else 0, "dO of a step, by columns", dO_columns, done),
        Pipeline("p", int(pair and one_pass), "P of a step", (all_computed,), ()),
        Pipeline("exchange", int(pair), "dS of a step, from the other CTA", (dS_sent,), (dS_read,), exchanged),
        Pipeline("stats", STATS_STAGES if pair else 0, "lse and delta of a step", once, (computed,), 2 * stats_bytes),
        Pipeline("keys", int(c.holds_keys), "K of a tile, in tensor memory", (all_computed,), ()),
    )


def _buffers(c: BackwardConfig) -> tuple[Buffer, ...]:
    """Buffers of shared memory, in the order of their addresses."""
    pair, listed = c.ctas_a_tile == CTAS, c.features.listed
    info_stages = ENTRY_STAGES if listed else 0
    # Of a CTA alone lse comes with Q, and delta with dO, or in two passes with Q.
    q_stats, do_stats = (c.q_stages, c.q_stages if c.num_passes == 2 else c.do_stages)
    if pair:
        q_stats = do_stats = STATS_STAGES
    return (
        Buffer("holder", (1,), "address of tensor memory", "int32"),
        Buffer("tile_fields", (KEY_TILE_FIELDS, TILE_STAGES), "field, tile stage", "int32", align=16 if pair else 4),
        Buffer("entries", (3 if c.features.bias else 2, info_stages), "block, code and head, entry", "int32"),
        Buffer("turns", (_TURN_NUMBERS, info_stages), "block of dQ and turn, entry", "int32"),
        Buffer("lse", (c.tile_m, q_stats), "query, stage", "float32", align=128),
        Buffer("delta", (c.tile_m, do_stats), "query, stage", "float32", align=128),
        *(_places_of_two_passes(c) if c.holds_keys else _operands_of_a_pair(c) if pair else _operands(c)),
        Buffer("dQ", (c.piece_numbers, DQ_STAGES), "element of a piece, stage", "float32", align=1024),
    )


def _operands(c: BackwardConfig) -> tuple[Buffer, ...]:
    """Operands of a CTA alone."""
    return (
        operand("sK", (c.tile_n, c.tile_d, c.kv_stages), "key, d, stage; then dK"),
        operand("sV", (c.tile_n, c.tile_dv, c.kv_stages), "key, d_v, stage; then dV"),
        operand("sQ", (c.tile_m, c.tile_d, c.q_stages), "query, d, stage"),
        operand("sdO", (c.tile_m, c.tile_dv, c.do_stages), "query, d_v, stage"),
        operand("sdS", (c.tile_n, c.tile_m), "key, query"),
    )


def _operands_of_a_pair(c: BackwardConfig) -> tuple[Buffer, ...]:
    """Operands of a CTA of a pair: its own keys, and half of what is split among both."""
    return (
        operand("sK", (PART_ROWS, c.tile_d, 1), "its key, d, stage; then dK"),
        operand("sK_columns", (c.tile_n, c.columns_of_keys), "key, its d"),
        operand("sV", (PART_ROWS, c.tile_dv, 1), "its key, d_v, stage; then dV"),
        operand("sQ", (c.queries_shared, c.tile_d), "its query, d"),
        operand("sQ_columns", (c.tile_m, c.tile_d // CTAS), "query, its d"),
        operand("sdO", (c.queries_shared, c.tile_dv), "its query, d_v"),
        operand("sdO_columns", (c.tile_m, c.tile_dv // CTAS), "query, its d_v"),
        operand("sdS", (PART_ROWS, c.queries_shared, CTAS + 1), "key, its query, CTA of the keys and what is sent"),
    )


def _places_of_two_passes(c: BackwardConfig) -> tuple[Buffer, ...]:
    """Operands of a CTA of a pair in two passes, which share places: one after the other is there."""
    sdO = operand("sdO", (c.queries_shared, c.tile_dv), "its query, d_v")
    places = {
        "keys": (
            operand("sK", (PART_ROWS, c.tile_d, 1), "its key, d, stage"),
            operand("sdV", (PART_ROWS, c.tile_dv, 1), "its key, d_v, stage"),
            operand("sK_columns", (c.tile_n, c.columns_of_keys), "key, its d"),
        ),
        "values": (operand("sV", (PART_ROWS, c.tile_dv, 1), "its key, d_v, stage; then dK"),),
        "queries": (
            operand("sQ", (c.queries_shared, c.tile_d, c.q_stages), "its query, d, stage"),
            operand("sQ_columns", (c.tile_m, c.tile_d // CTAS, c.q_stages), "query, its d, stage"),
        ),
        "gradients": (
            operand("sdO_columns", (c.tile_m, c.tile_dv // CTAS, c.num_passes), "query, its d_v, stage"),
            sdO,
            operand(
                "sdS",
                (PART_ROWS, c.queries_shared, CTAS + 1),
                "key, its query, CTA of the keys and what is sent",
                offset=sdO.extent,
            ),
        ),
    }
    return tuple(
        buffer
        for place, operands in places.items()
        for buffer in (
            Buffer(place, (max(x.offset + x.extent for x in operands),), "element", align=1024),
            *(replace(x, place_of=place) for x in operands),
        )
    )


def _columns(c: BackwardConfig) -> tuple[Columns, ...]:
    dQ = tuple(Columns("dQ", c.first_dQ(part), c.columns_dQ, "dQ, or a part of it") for part in range(c.parts_dQ))
    keys = (Columns("K", c.first_K, c.tile_d // 2, "K, 16 bits"),) if c.holds_keys else ()
    if c.num_passes == 2:
        return (
            Columns("scores 0", c.first_S, c.tile_m, "S or dP; P or dS in its place"),
            Columns("dV, dK", c.first_dV, max(c.tile_d, c.tile_dv), "dV in the first pass, then dK"),
            Columns("scores 1", c.first_dP, c.tile_m, "S or dP; P or dS in its place"),
            *keys,
            *dQ,
        )
    return (
        Columns("S", c.first_S, c.tile_m, "S; P in its place"),
        Columns("dV", c.first_dV, c.tile_dv, "dV"),
        Columns("dP", c.first_dP, c.tile_m, "dP; dS in its place"),
        Columns("dK", c.first_dK, c.tile_d, "dK"),
        *dQ,
    )
