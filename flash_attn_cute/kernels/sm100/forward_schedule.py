"""The schedule of the forward kernels (``forward``, ``forward_pair``): roles, pipelines, memory and steps."""

from flash_attn_cute.kernels.schedule import QUERY_TILE_FIELDS, Buffer, Columns, Order, Pipeline, Role, Schedule, Step
from flash_attn_cute.kernels.sm100.config import (
    CTAS,
    ENTRY_STAGES,
    MMA_WARP,
    O_COLUMNS,
    PART_ROWS,
    PRODUCER_WARP,
    SCORE_COLUMNS,
    SHARED_MEMORY,
    TILE_STAGES,
    TILES_IN_ORDER,
    WARPS,
)
from flash_attn_cute.kernels.sm100.forward_config import ITERATOR_FIELDS, O_STAGES, ForwardConfig

_TIMELINE = {
    2: """
tensor cores   S0 S1 | O0 S2 | O1 S3 | O2 S4 ...          (units)
softmax 0            P0 from S0     | P2 from S2 ...
softmax 1                 P1 from S1     | P3 from S3 ...
""",
    1: """
tensor cores   S0 S1 | O0 S2 | O1 S3 | O2 S4 ...          (units)
softmax              P0      P1      P2 ...
""",
}

_ORDERS = (
    Order("S, O: tensor cores -> threads", "commit -> wait, tcgen05.fence::after_thread_sync, tcgen05.ld, wait::ld"),
    Order("P, O: threads -> tensor cores", "tcgen05.st, wait::st, fence::before, arrival -> wait, fence::after"),
    Order("S, O: read -> overwritten", "tcgen05.ld, wait::ld, fence::before, arrival -> wait, fence::after"),
    Order("Q, K, V: TMA -> tensor cores", "mbarrier; read -> overwritten: commit -> wait, TMA"),
    Order("O in shared memory: threads -> TMA", "st.shared, fence.proxy.async, named barrier, TMA; then bulk wait"),
)


# A thread's of softmax warps, the epilogue and others, by parts and CTAs of a tile. Producers of a pair also keep the
# published fields, and their own share of each block.
_REGISTERS = {(1, 1): (232, 120, 120), (1, 2): (232, 120, 120), (2, 1): (200, 72, 40), (2, 2): (192, 72, 56)}
SPARE_REGISTERS = 40  # of the second softmax warpgroup, where a tile has one part


def forward_schedule(config: ForwardConfig) -> Schedule:
    c, parts, ctas = config, config.q_parts, config.ctas_a_tile
    pair, listed = ctas == CTAS, config.features.listed

    of_softmax, of_epilogue, of_others = _REGISTERS[parts, ctas]
    softmax = Role("softmax", range(4 * parts), of_softmax, "a warpgroup a part, a row a thread: P from S")
    spare = Role("spare", range(4 * parts, 8), SPARE_REGISTERS, "idle")
    epilogue = Role("epilogue", range(8, MMA_WARP), of_epilogue, "a row a thread: O / row_sum to out; lse")
    of_both = ", of both CTAs, in the leader" if pair else ""
    mma = Role("mma", range(MMA_WARP, MMA_WARP + 1), of_others, f"issues all products{of_both}")
    choosing = "the leader's chooses tiles; each loads Q, K and V" if pair else "chooses tiles; loads Q, K and V"
    producer = Role("producer", range(PRODUCER_WARP, PRODUCER_WARP + 1), of_others, choosing)
    idle = Role("idle", range(PRODUCER_WARP + 1, WARPS), of_others, "idle")

    tiles = Buffer("tiles", (QUERY_TILE_FIELDS, TILE_STAGES), "field, tile stage", "int32", align=16)
    sent = TILE_STAGES if pair else 0
    tiles_sent = Buffer("tiles_sent", (QUERY_TILE_FIELDS, sent), "field, tile stage of the second CTA", "int32", 16)
    num_entries = ENTRY_STAGES if listed else 0
    entries = Buffer("entries", (1 + parts, num_entries), "block and its code for each part, entry", "int32")
    iterator = Buffer("iterator", (ITERATOR_FIELDS, parts if listed else 0), "field of the producer's, part", "int32")
    stats = Buffer("stats", (PART_ROWS, 2, parts), "row, row_sum and row_max, part", "float32")
    modes = "row, d, part; then O" if c.o_in_q else "row, d, part"
    sQ = Buffer("sQ", (PART_ROWS, c.tile_d, parts), modes, align=1024, swizzle=c.tile_d)
    sK = Buffer("sK", (c.keys_shared, c.tile_d, c.k_stages), "key, d, stage", align=1024, swizzle=c.tile_d)
    columns_V = c.tile_dv // ctas
    sV = Buffer("sV", (c.tile_n, columns_V, c.v_stages), "key, d_v, stage", align=1024, swizzle=columns_V)
    o_stages = 0 if c.o_in_q else O_STAGES
    sO = Buffer("sO", (PART_ROWS, O_COLUMNS, o_stages), "row, columns of a piece, stage", align=1024, swizzle=O_COLUMNS)

    once, done, part_of_softmax = (producer.once(),), (mma.commit(),), softmax.per_warp_of_a_warpgroup(ctas)
    tiles_read = (softmax.per_warp(ctas), epilogue.per_warp(ctas), mma.per_warp())
    tiles_sent_bytes = 0
    if pair:
        tiles_read, tiles_sent_bytes = (*tiles_read, producer.per_warp(ctas)), tiles.stage_bytes
    entries_read = (softmax.per_warp(), mma.per_warp()) if c.leaves_out else (softmax.per_warp(),)
    q_empty = (*done, epilogue.once()) if c.o_in_q else done
    pipelines = (
        Pipeline("tiles", TILE_STAGES, "a tile's fields", once, tiles_read, tiles_sent_bytes),
        Pipeline("q", parts, "a part of Q", once, q_empty, ctas * sQ.stage_bytes),
        Pipeline("k", c.k_stages, "K of a block", once, done, ctas * sK.stage_bytes),
        Pipeline("v", c.v_stages, "V of a block", once, done, ctas * sV.stage_bytes),
        Pipeline("scores", 2, "S of a unit, then its P", done, (part_of_softmax,)),
        Pipeline("p", 2, "P of a unit but for its last 32 keys", (part_of_softmax,), ()),
        Pipeline("outputs", parts, "O of a part", done, (epilogue.per_warp(ctas),)),
        Pipeline("stats", parts, "sums of a part", (softmax.per_warp_of_a_warpgroup(),), (epilogue.per_warp(),)),
        Pipeline("added", 2 * int(parts == 1), "O of a unit", done, ()),
        Pipeline("entries", num_entries, "a block and its codes", once, entries_read),
    )
    schedule = Schedule(
        kernel="kernels/sm100/" + ("forward_pair.py:ForwardPairSm100" if pair else "forward.py:ForwardSm100"),
        work=f"{c.queries} queries of a head, in parts of {PART_ROWS}, and one such tile after the other"
        + ("; a pair of CTAs has tiles of twice as many" if pair else ""),
        roles=tuple(role for role in (softmax, spare, epilogue, mma, producer, idle) if role.warps),
        pipelines=pipelines,
        shared=(
            Buffer("holder", (1,), "address of tensor memory", "int32"),
            *(entries, iterator, stats, tiles, tiles_sent, sQ, sK, sV, sO),
        ),
        steps=_steps(c),
        timeline=_TIMELINE[parts],
        tensor_memory=(
            Columns("S", c.first_S(0), 2 * SCORE_COLUMNS, "scores of two units; P in the first half of its S"),
            Columns("O", c.first_O(0), parts * c.tile_dv, "O of each part"),
        ),
        orders=(*_ORDERS, TILES_IN_ORDER) if pair else _ORDERS,
    )
    assert schedule.num_bytes <= SHARED_MEMORY
    return schedule


def _steps(c: ForwardConfig) -> tuple[Step, ...]:
    """Steps of a tile, and of each of its units u."""
    pair, one_part, listed = c.ctas_a_tile == CTAS, c.q_parts == 1, c.features.listed
    next_S = f"issues S(u + {c.blocks_ahead * c.q_parts}) = Q K'"
    reads_tile = (Step("producer", "tiles.full", "once a tile, in each CTA: reads its fields", "tiles.empty"),)
    publishes = (Step("producer", "entries.empty", "publishes a block and its codes", "entries.full"),)
    rescales = (Step("softmax", "added.full", "rescales O, if row_max has grown much"),)
    seen = ", added.full" if one_part else ""  # of O(u - 2), so that no phase is skipped
    mma_waits, mma_signals = (", entries.full", ", entries.empty") if c.leaves_out else ("", "")
    return (
        Step("producer", "tiles.empty", "once a tile: publishes its fields", "tiles.full"),
        *(reads_tile if pair else ()),
        *(publishes if listed else ()),
        Step("producer", "k.empty", "loads K of a block", "k.full"),
        Step("producer", "q.empty", "once a tile: loads Q, part by part", "q.full"),
        Step("producer", "v.empty", "loads V of a block", "v.full"),
        Step("mma", "tiles.full", "once a tile: reads how many blocks it has", "tiles.empty"),
        Step("mma", "outputs.empty", "once a tile: may overwrite O"),
        Step("mma", "v.full, p.full", "issues O(u) += P(u) V but for the last 32 keys"),
        Step(
            "mma",
            "scores.empty",
            "issues O(u) += P(u) V of the last 32 keys",
            "v.empty, outputs.full" + (", added.full" if one_part else ""),
        ),
        Step("mma", "k.full, q.full" + mma_waits, next_S, "scores.full, k.empty, q.empty" + mma_signals),
        Step("softmax", "tiles.full", "once a tile: reads its fields, and at its end releases them", "tiles.empty"),
        Step("softmax", "scores.full" + seen, "loads S(u); masks it; compares its row_max"),
        *((Step("softmax", "entries.full", "reads the block and its code", "entries.empty"),) if listed else ()),
        *(rescales if one_part else ()),
        Step("softmax", "", "stores P(u) but for the last 32 keys" + ("" if one_part else "; rescales O"), "p.full"),
        Step("softmax", "", "stores P(u) of the last 32 keys", "scores.empty"),
        Step("softmax", "stats.empty", "once a tile: stores row_sum and row_max", "stats.full"),
        Step("epilogue", "tiles.full, stats.full", "once a tile: loads row_sum and row_max; stores lse", "stats.empty"),
        Step(
            "epilogue",
            "outputs.full",
            "once a tile: loads O; stores O / row_sum",
            "outputs.empty, tiles.empty" + (", q.empty" if c.o_in_q else ""),
        ),
    )
