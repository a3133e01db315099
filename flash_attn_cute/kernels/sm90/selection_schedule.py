"""The schedules of the main kernels of selections: ``selection`` and ``backward.selection``."""

from flash_attn_cute.kernels.schedule import Buffer, Order, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.selection import KEY_WORDS, TILE_ROWS
from flash_attn_cute.kernels.sm90.selection_config import SelectedConfig, SelectionBackwardConfig

# Warpgroups are independent: which of them has the tensor cores is left to the hardware.
_FORWARD = """
warpgroup 0     tensor cores   S(n)              O(n)                            S(n+3)
                other units          softmax(n)        O(n) to shared memory             softmax(n+3)
warpgroup 1     tensor cores         S(n+1)            O(n+1)
                other units                softmax(n+1)      O(n+1) to shared memory
"""
_BACKWARD = """
warpgroup 0     tensor cores   S(n), dP(n)              dV, dK, dQ(n)                 S(n+2), dP(n+2)
                other units                P(n), dS(n)                  stores dQ(n)
warpgroup 1     tensor cores                S(n+1), dP(n+1)               dV, dK, dQ(n+1)
                other units                                P, dS(n+1)                     stores dQ(n+1)
"""
_IN_STEP = """
warpgroup 0     tensor cores   S, dP(n)              dV += P'dO of n and n+1   dQ(n)          S, dP(n+2)
                other units          P(n), dS(n)                                 stores dQ(n)
warpgroup 1     tensor cores   S, dP(n+1)            dK += dS'Q of n and n+1   dQ(n+1)        S, dP(n+3)
                other units          P, dS(n+1)                                  stores dQ(n+1)
"""


def selection_schedule(config: SelectedConfig) -> Schedule:
    """The schedule of a configuration of either kernel."""
    c, warpgroups, is_backward = config, config.num_mma_warpgroups, isinstance(config, SelectionBackwardConfig)
    loading, computing = c.registers
    rows, sums = ("Q and dO", "; sums of dK and dV in registers") if is_backward else ("Q", "")
    sums = "; the first has the sums of dV of all tiles, the second those of dK" if c.in_step else sums
    kernel = "backward/selection.py:SelectionBackwardSm90" if is_backward else "selection.py:SelectionSm90"
    does = f"warp w issues TMA for warpgroup w: {rows} of its picks; warp 0 K and V, too"
    producer = Role("producer", range(warpgroups), loading, does)
    idle = Role("idle", range(warpgroups, 4), loading, "idle")
    does = f"{warpgroups} warpgroups, which have the item's tiles in turn{sums}"
    mma = Role("mma", range(4, 4 + 4 * warpgroups), computing, does)
    once, released = (producer.once(),), (mma.per_warp() if c.in_step else mma.per_warp_of_a_warpgroup(),)
    tile_bytes = 2 * TILE_ROWS * (c.tile_d + is_backward * c.tile_dv)
    return Schedule(
        kernel=f"kernels/sm90/{kernel}",
        work="an item: some of the queries that select one block of keys, in tiles of 64 rows",
        roles=(producer, idle, mma),
        pipelines=(
            Pipeline("k", 1, "K of the block", once, (), 2 * c.tile_n * c.tile_d, has_empty=False),
            Pipeline("v", 1, "V of the block", once, (), 2 * c.tile_n * c.tile_dv, has_empty=False),
            *(
                Pipeline(
                    f"q{w}", c.stages, f"{rows} of a tile of warpgroup {w}, with entries", once, released, tile_bytes
                )
                for w in range(warpgroups)
            ),
        ),
        shared=_buffers(c, is_backward),
        steps=_steps(c, rows),
        orders=_orders(c) if isinstance(c, SelectionBackwardConfig) else (),
        timeline=(_IN_STEP if c.in_step else _BACKWARD) if is_backward else _FORWARD,
    )


def _buffers(c: SelectedConfig, is_backward: bool) -> tuple[Buffer, ...]:
    """Buffers of shared memory, in the order of their addresses."""
    warpgroups, of_tile, words = c.num_mma_warpgroups, (c.stages, c.num_mma_warpgroups), c.key_bits * KEY_WORDS
    results: tuple[Buffer, ...] = (operand("sO", (TILE_ROWS, c.tile_dv, warpgroups), "row, d_v, warpgroup"),)
    if is_backward:
        results = (
            operand("sdO", (TILE_ROWS, c.tile_dv, *of_tile), "row, d_v, stage, warpgroup"),
            operand("sP", (TILE_ROWS, c.tile_n, warpgroups), "row, key, warpgroup"),
            operand("sdS", (TILE_ROWS, c.tile_n, warpgroups), "row, key, warpgroup"),
        )
    return (
        Buffer("entries", (c.picks_a_tile, *of_tile), "pick, stage, warpgroup", "int32"),
        Buffer("key_bits", (words, c.picks_a_tile, *of_tile), "word, pick, stage, warpgroup", "int32", align=8),
        operand("sK", (c.tile_n, c.tile_d), "key, d"),
        operand("sV", (c.tile_n, c.tile_dv), "key, d_v"),
        operand("sQ", (TILE_ROWS, c.tile_d, *of_tile), "row, d, stage, warpgroup"),
        *results,
    )


def _orders(c: SelectionBackwardConfig) -> tuple[Order, ...]:
    """Orders of the backward kernel's data."""
    barrier = "both warpgroups' barrier" if c.in_step else "the warpgroup's barrier"
    written = Order("P, dS: threads, tensor cores", f"a proxy fence and {barrier}")
    if not c.has_scaled_dQ:
        return written, Order("P, dS: tensor cores, threads", f"{barrier} ahead of the next tile's P")
    return (
        written,
        Order("P, dS: tensor cores, dQ in their places", f"{barrier} behind dQ's first 64 columns"),
        Order("dQ: threads, TMA", "a proxy fence and the warpgroup's barrier"),
        Order("dQ: TMA, the next columns or P", f"the storing warp's wait, then the warpgroup's barrier, or {barrier}"),
    )


def _steps(c: SelectedConfig, rows: str) -> tuple[Step, ...]:
    """Steps of all roles."""
    warpgroups, is_scaled = c.num_mma_warpgroups, isinstance(c, SelectionBackwardConfig) and c.has_scaled_dQ
    full, empty = (", ".join(f"q{w}.{side}" for w in range(warpgroups)) for side in ("full", "empty"))
    sums = "dV += P' dO or dK += dS' Q of both warpgroups' tiles" if c.in_step else "dV += P' dO, dK += dS' Q"
    scaled = "writes it, scaled, to the place of P or dS; one warp stores each pick's rows"
    forward = (
        Step("mma", f"k.full, {full}", "issues S = Q K'"),
        Step("mma", "S complete", "releases Q", empty),
        Step("mma", "v.full", "P = softmax(S), in registers; issues O = P V"),
        Step("mma", "O complete", "writes O to sO; one of its warps stores each pick's rows"),
    )
    backward = (
        Step("mma", f"k.full, v.full, {full}", "issues S = Q K' and dP = dO V'"),
        Step("mma", "S complete", "P = exp2(S - lse), to sP"),
        Step("mma", "dP complete", "dS = P * (dP - delta), to sdS"),
        Step("mma", "", f"issues {sums}, and dQ = dS K by columns"),
        Step("mma", "dV, dK, and dQ of 64 columns complete", "releases Q and dO", empty),
        Step("mma", "dQ of 64 columns complete", scaled if is_scaled else "stores it from registers"),
    )
    return (
        Step("producer", "", "warp 0, once: loads K and V", "k.full, v.full"),
        Step("producer", empty, f"writes the entries of a tile, and loads {rows} of each", full),
        *(backward if isinstance(c, SelectionBackwardConfig) else forward),
    )
