"""The schedules of the main kernels of selections: ``selection`` and ``backward.selection``."""

from flash_attn_cute.kernels.schedule import Buffer, Order, Pipeline, Role, Schedule, Step, operand
from flash_attn_cute.kernels.selection import TILE_ROWS
from flash_attn_cute.kernels.sm90.selection_config import SelectedConfig, SelectionBackwardConfig, SelectionConfig

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


def selection_schedule(config: SelectionConfig) -> Schedule:
    """The schedule of a configuration of the forward kernel."""
    c, (full, empty) = config, _barriers(config)
    sO = operand("sO", (TILE_ROWS, c.tile_dv, c.num_mma_warpgroups), "row, d_v, warpgroup")
    return _schedule(
        c,
        kernel="kernels/sm90/selection.py:SelectionSm90",
        loaded=(_rows(c, "sQ", c.tile_d, "d"),),
        others=(sO,),
        steps=(
            Step("mma", f"k.full, {full}", "issues S = Q K'"),
            Step("mma", "S complete", "releases Q", empty),
            Step("mma", "v.full", "P = softmax(S), in registers; issues O = P V"),
            Step("mma", "O complete", "writes O to sO; one of its warps stores each pick's rows"),
        ),
        timeline=_FORWARD,
    )


def selection_backward_schedule(config: SelectionBackwardConfig) -> Schedule:
    """The schedule of a configuration of the backward kernel."""
    c, (full, empty) = config, _barriers(config)
    modes = "row, key, warpgroup"
    sP, sdS = (operand(name, (TILE_ROWS, c.tile_n, c.num_mma_warpgroups), modes) for name in ("sP", "sdS"))
    return _schedule(
        c,
        kernel="kernels/sm90/backward/selection.py:SelectionBackwardSm90",
        loaded=(_rows(c, "sQ", c.tile_d, "d"), _rows(c, "sdO", c.tile_dv, "d_v")),
        others=(sP, sdS),
        sums="; sums of dK and dV in registers",
        steps=(
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
        timeline=_BACKWARD,
    )


def _barriers(config: SelectedConfig) -> tuple[str, str]:
    """Full and empty barriers of all warpgroups' tiles, by name."""
    full, empty = (", ".join(f"q{w}.{side}" for w in range(config.num_mma_warpgroups)) for side in ("full", "empty"))
    return full, empty


def _rows(config: SelectedConfig, name: str, columns: int, mode: str) -> Buffer:
    """The operand that holds the rows of each warpgroup's tiles."""
    shape = (TILE_ROWS, columns, config.stages, config.num_mma_warpgroups)
    return operand(name, shape, f"row, {mode}, stage, warpgroup")


def _schedule(
    config: SelectedConfig,
    *,
    kernel: str,
    loaded: tuple[Buffer, ...],
    others: tuple[Buffer, ...],
    steps: tuple[Step, ...],
    timeline: str,
    sums: str = "",
    orders: tuple[Order, ...] = (),
) -> Schedule:
    """The schedule of a kernel that keeps K and V of a block, and loads tiles of picks.

    Args:
        config: its configuration.
        kernel: module and class.
        loaded: operands of a tile of picks.
        others: the other operands of a tile.
        steps: of an mma warpgroup.
        timeline: a picture of them.
        sums: what an mma warpgroup keeps over all of its tiles.
        orders: of data between threads and tensor cores.
    """
    c, warpgroups = config, config.num_mma_warpgroups
    loading, computing = c.registers
    rows, (full, empty) = " and ".join(x.name.removeprefix("s") for x in loaded), _barriers(config)
    does = f"warp w issues TMA for warpgroup w: {rows} of its picks; warp 0 K and V, too"
    producer = Role("producer", range(warpgroups), loading, does)
    idle = Role("idle", range(warpgroups, 4), loading, "idle")
    does = f"{warpgroups} warpgroups, which have the item's tiles in turn{sums}"
    mma = Role("mma", range(4, 4 + 4 * warpgroups), computing, does)
    entries = Buffer("entries", (c.picks_a_tile, c.stages, warpgroups), "pick, stage, warpgroup", "int32")
    sK, sV = operand("sK", (c.tile_n, c.tile_d), "key, d"), operand("sV", (c.tile_n, c.tile_dv), "key, d_v")
    num_bytes = sum(2 * TILE_ROWS * x.shape[1] for x in loaded)
    once, released = (producer.once(),), (mma.per_warp_of_a_warpgroup(),)
    return Schedule(
        kernel=kernel,
        work="an item: some of the queries that select one block of keys, in tiles of 64 rows",
        roles=(producer, idle, mma),
        pipelines=(
            Pipeline("k", 1, "K of the block", once, (), sK.num_bytes, has_empty=False),
            Pipeline("v", 1, "V of the block", once, (), sV.num_bytes, has_empty=False),
            *(
                Pipeline(
                    f"q{w}", c.stages, f"{rows} of a tile of warpgroup {w}, with entries", once, released, num_bytes
                )
                for w in range(warpgroups)
            ),
        ),
        shared=(entries, sK, sV, *loaded, *others),
        steps=(
            Step("producer", "", "warp 0, once: loads K and V", "k.full, v.full"),
            Step("producer", empty, f"writes the entries of a tile, and loads {rows} of each", full),
            *steps,
        ),
        orders=orders,
        timeline=timeline,
    )
