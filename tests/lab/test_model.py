"""The model of kernels' pipelines: its rules, what was measured and published, and its page."""

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest

from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_schedule import backward_schedule
from flash_attn_cute.kernels.sm100.config import COMPUTE_WARPGROUPS, SHARED_MEMORY, TARGETS
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward_schedule import forward_schedule
from lab.model import __main__ as command_line
from lab.model.blackwell import Backward, BackwardDesign, Forward, ForwardDesign
from lab.model.designs import DESIGNS, KERNELS, OPEN, PUBLISHED, Case, backward_design, forward_design, on
from lab.model.launch import Cost, Order, Shape, Tile, schedule, tiles_of
from lab.model.machine import B200, B200_BY_POWER, B300, H200, Machine
from lab.model.record import Row, hopper_pass, rows
from lab.model.simulation import DeadlockError, Needs, Products, Ring, Simulation, Unit
from lab.model.sm import Kernel, Maker, TileWork
from tests.lib import configurations
from tests.lib.tiers import tiered

COMMANDS = command_line.commands_of_page()
QUICK = ("record", "published")

SHAPES = {
    "forward": Shape(4, 8192, 16, 128, 128),
    "forward d = 64": Shape(4, 8192, 32, 64, 64, causal=True),
    "forward d = 256": Shape(4, 8192, 8, 256, 256),
    "backward": Shape(4, 8192, 16, 128, 128, backward=True),
    "backward d = 64": Shape(4, 8192, 32, 64, 64, causal=True, backward=True),
    "backward (192, 128)": Shape(4, 8192, 16, 192, 128, backward=True),
}
MAKERS = {
    **{f"hopper {name}": hopper_pass(shape).make for name, shape in SHAPES.items()},
    **{f"published {name}": case.make() for name, case in PUBLISHED.items()},
    **{name: Case(design, causal=False).make() for name, design in DESIGNS.items()},
}


def clocks_a_block(kernel: Kernel, blocks: int = 40) -> dict[str, float]:
    sm = kernel.run([TileWork(blocks)])
    return {unit.name: unit.clocks(0, sm.simulation.now) / blocks for unit in sm.units}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_units(make: Maker) -> None:
    """No unit does two things at a time, or more than there is time for; and every tile ends."""
    kernel = make()
    sm = kernel.run([TileWork(5, 2), TileWork(4)] if kernel.persistent else [TileWork(9, 2)])
    end = sm.simulation.now
    for unit in sm.units:
        assert all(before.end <= after.start for before, after in pairwise(unit.busy))
        assert unit.clocks(0, end) <= end
        assert not unit.busy or unit.busy[-1].end <= end
    assert sm.tensor.clocks(0, end) > 0.2 * end


@pytest.mark.parametrize(
    ("kernel", "clocks"),
    [
        (Forward(ForwardDesign(128, 128), B200), {"tensor cores": 2048, "exp2": 2048, "shared memory": 1536 + 512}),
        (Forward(ForwardDesign(64, 64), B200), {"tensor cores": 1024, "exp2": 2048, "shared memory": 768 + 256}),
        (Forward(ForwardDesign(128, 128, pair=True), B200), {"tensor cores": 2048, "shared memory": 1024 + 256}),
        (Forward(ForwardDesign(192, 128), B200), {"tensor cores": 2560, "shared memory": 2048 + 640}),
        (Backward(BackwardDesign(128, 128), B200), {"tensor cores": 2560, "exp2": 1024}),
        (Backward(BackwardDesign(192, 128), B200), {"tensor cores": 3328, "exp2": 1024}),
        (Backward(BackwardDesign(192, 128, queries=64, do_stages=2), B200), {"tensor cores": 1792, "exp2": 512}),
        (Backward(BackwardDesign(192, 128, True, queries=64), B200), {"tensor cores": 1792, "exp2": 512}),
    ],
)
def test_clocks_a_block(kernel: Kernel, clocks: dict[str, float]) -> None:
    """Clocks as counted by hand from rates: operands, and behind the plus what TMA writes."""
    found = clocks_a_block(kernel)
    of_a_tile = 4 * 2 * 128 * 192 / 128 / 40  # more than what Q and the results take
    for name, expected in clocks.items():
        assert found[name] == pytest.approx(expected, abs=of_a_tile)


def test_shared_memory_of_the_backward_pass() -> None:
    """Operands 2048, dS 256, dQ in and out 1024; TMA writes 512 and 8, lse and delta 256."""
    clocks = clocks_a_block(Backward(BackwardDesign(128, 128), B200))
    assert clocks["shared memory"] == pytest.approx(2048 + 256 + 1024 + 512 + 8 + 256, rel=0.02)


@pytest.mark.parametrize(("pair", "operands", "dS", "dQ"), [(False, 2048, 128, 768), (True, 1600, 128 + 128, 384)])
def test_shared_memory_of_blocks_of_64_queries(pair: bool, operands: int, dS: int, dQ: int) -> None:
    """A pair sends dS, too. TMA writes 320 and 4, lse and delta 128."""
    design = BackwardDesign(192, 128, pair, queries=64, q_stages=1 if pair else 2, do_stages=1 if pair else 2)
    clocks = clocks_a_block(Backward(design, B200))
    assert clocks["shared memory"] == pytest.approx(operands + dS + dQ + 320 + 4 + 128, rel=0.02)


@pytest.mark.parametrize(
    ("name", "tensor", "shared"),
    [
        ("d = 192 1-CTA", 768 + 1664, 768 + 2112 + 448 + 640 + 768),
        ("d = 192 2-CTA", 768 + 1664, 192 + 1312 + 260 + 420 + 256 + 384),
        ("d = 256 1-CTA", 1024 + 2048, 1024 + 2560 + 576 + 768 + 1024),
        ("d = 256 2-CTA", 1024 + 2048, 256 + 1536 + 324 + 516 + 256 + 512),
    ],
)
def test_clocks_of_two_passes(name: str, tensor: int, shared: int) -> None:
    """Clocks as counted in the kernels' sources: operands, loads and stats, dS, dQ."""
    clocks = clocks_a_block(MAKERS[f"backward {name}"](), blocks=160)
    assert clocks["tensor cores"] == pytest.approx(tensor)
    assert clocks["shared memory"] == pytest.approx(shared, rel=0.01)


def test_pieces_share_a_unit() -> None:
    """Two that work at the same time take as long as both one after the other, and end together."""
    simulation, unit, ends = Simulation(), Unit("any"), []

    def works(who: str) -> Needs:
        yield from simulation.work(who, "work", {unit: 640.0})
        ends.append(simulation.now)

    for who in ("a", "b"):
        simulation.start(who, works(who))
    assert simulation.run() == 1280
    assert ends == [1280 - 64, 1280]


def test_products_are_computed_in_order_of_issue_and_their_operands_are_read_ahead() -> None:
    simulation, tensor, shared, ends = Simulation(), Unit("tensor"), Unit("shared"), []
    products = Products(simulation, tensor, shared, latency=7.0)

    def issues() -> Needs:
        first, second = products.issue("a", "A", 128, 128), products.issue("b", "B", 128, 64)
        for done in (first, second):
            yield done
            ends.append(simulation.now)

    simulation.start("issuer", issues())
    simulation.run()
    assert ends == [64 + 128 + 7, 64 + 256 + 7]
    assert [i.what for i in tensor.busy] == ["A", "B"]


def test_a_barrier_without_arrivals() -> None:
    """The control of all other tests that end: the error says which role waits, and where."""
    simulation = Simulation()
    ring = Ring(simulation, "tiles", 2, full=2)

    def waits() -> Needs:
        ring.arrive(0)
        yield ring.wait_full(0)

    simulation.start("consumer", waits())
    with pytest.raises(DeadlockError, match="consumer at tiles full"):
        simulation.run()


@pytest.mark.parametrize(
    "kernel",
    [
        # S of the next block comes before dK of this one, which has Q.
        Backward(BackwardDesign(128, 128, q_stages=1), B200),
        # S of the next block comes before the other tile's product with V, which has the stage.
        Forward(ForwardDesign(128, 128, stages=1), B200),
    ],
)
def test_kernels_with_a_stage_too_few(kernel: Kernel) -> None:
    with pytest.raises(DeadlockError, match=r"mma at (Q|KV) full"):
        kernel.run([TileWork(4)])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles(backward: bool, causal: bool) -> None:
    """Every visible pair of a block of rows and one of columns once."""
    shape = Shape(2, 1000, 3, 64, 64, causal, backward)
    order = Order(4, last_first=True, sections=1, reverses_last=backward)
    tiles = list(tiles_of(shape, 128, 64, order))
    assert len(tiles) == 8 * 6
    met = {(tile.head, block) for tile in tiles for block in tile.blocks}
    assert met == {(head, block) for head in range(6) for block in range(16)}
    num = sum(len(tile.blocks) for tile in tiles)
    assert num == (6 * (16 + 14 + 12 + 10 + 8 + 6 + 4 + 2) if causal else 6 * 8 * 16)
    assert {tile.masked for tile in tiles} == ({2} if causal else {0})


def test_schedule() -> None:
    """Tiles go to who is free; additions to a block have the order of tiles."""
    tiles = [Tile(0, range(4), 0)] * 3
    cost = Cost(start=0.0, tile=10.0, step=100.0)
    assert schedule(tiles, 1, cost).end == 3 * 410
    assert schedule(tiles, 2, cost).end == 2 * 410
    assert schedule(tiles, 3, cost).end == 410
    ordered = schedule(tiles, 3, cost, hand_over=30.0)
    assert ordered.end == 410 + 2 * 30
    assert ordered.waited * 3 == pytest.approx(30 + 60)
    going_back = [Tile(0, range(4), 0), Tile(0, range(4)[::-1], 0)]
    assert schedule(going_back, 2, cost, hand_over=0.0).end == 410 + 3 * 100


RECORD = [row for suite in ("forward", "backward", "lengths", "bias") for row in rows(suite)]
TOO_SHORT = "backward 16x128 512 causal"  # tiles of at most eight steps, and by the model 15 % too fast


@pytest.mark.parametrize("row", RECORD, ids=lambda row: f"{row.suite} {row.name}")
def test_hopper_as_measured(row: Row) -> None:
    """Within 10 % of the time."""
    error = row.error(hopper_pass(row.shape).predict())
    assert abs(error) < (0.2 if row.name == TOO_SHORT else 0.1)


def test_the_record_has_rows_of_all_kinds() -> None:
    assert len(RECORD) >= 40
    kinds = {(row.shape.d, row.shape.causal, row.shape.backward) for row in RECORD}
    assert kinds == {
        (d, causal, backward) for d in (64, 128, 256) for causal in (False, True) for backward in (False, True)
    }


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        (Shape(4, 8192, 16, 128, 128), 0.97),
        (Shape(4, 8192, 16, 128, 128, causal=True), 0.89),
        (Shape(16, 2048, 16, 128, 128, causal=True), 0.77),
        (Shape(4, 8192, 32, 64, 64), 0.71),
        (Shape(4, 8192, 8, 256, 256), 0.96),
    ],
)
def test_tensor_cores_as_the_profiler_saw_them(shape: Shape, share: float) -> None:
    """Active for so much of the clocks (benchmarks/notes/forward.md): whatever the clock was."""
    assert hopper_pass(shape).predict().tensor == pytest.approx(share, rel=0.1)


def test_clocks_of_a_step_in_clusters() -> None:
    """3900 to 4200, by stamps (benchmarks/notes/backward-cluster.md)."""
    assert 3900 < hopper_pass(Shape(4, 8192, 8, 256, 256, backward=True)).predict().step < 4200


READINGS = pytest.mark.parametrize("machine", [B200, B200_BY_POWER], ids=lambda machine: machine.name)


@READINGS
@pytest.mark.parametrize("name", [name for name, case in PUBLISHED.items() if case.design.d == 128])
def test_flash_attn_4_as_published(name: str, machine: Machine) -> None:
    """Within 10 %, at d = 128, its best figure as well."""
    case = PUBLISHED[name]
    assert case.published is not None
    assert case.rate(machine) == pytest.approx(case.published, rel=0.1)


def test_clock() -> None:
    """It is a gemm's for who keeps the tensor cores as busy, more for who does not, and at most the GPU's."""
    assert H200.clock(0.915, 495e12) == pytest.approx(1.0, rel=0.01)
    assert H200.clock(0.6, 495e12) > H200.clock(0.9, 495e12)
    assert B200_BY_POWER.clock(0.01) == B200.ghz
    assert H200.clock(0.9) == H200.ghz  # of no gemm is anything known


@pytest.mark.parametrize("command", tiered(dict.fromkeys(COMMANDS), *QUICK))
def test_the_page_has_what_the_command_prints(command: str) -> None:
    """After a new record ``python -m lab.model page`` writes it."""
    printed = command_line.printed(command)
    assert len(printed.splitlines()) > 8
    page = command_line.PAGE.read_text()
    assert [line for line in printed.splitlines() if line not in page.splitlines()] == []
    assert f"\n\n{printed}\n" in page, "other rows, or in another order"


def test_the_page_shows_every_table() -> None:
    assert {command.split()[0] for command in COMMANDS} == {
        "record",
        "published",
        "designs",
        "open",
    }


def test_timelines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sm100_model", "timeline", "our backward 2-CTA"])
    command_line.main()
    lanes = capsys.readouterr().out.splitlines()
    assert {line.split("|")[0].strip() for line in lanes[:-1]} >= {"tensor cores", "compute 0", "compute 1", "drain"}
    for line in lanes[:-1]:
        _, drawn, share = line.split("|")
        assert len(drawn) == 120
        assert 0 <= int(share.strip(" %")) <= 100
        assert set(drawn) - {" "}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [256, 512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize(
    ("d", "d_v", "name"),
    [(128, 128, ""), (192, 128, "(192, 128) "), (192, 192, "d = 192 "), (256, 256, "d = 256 ")],
)
def test_pairs_are_chosen_where_they_pay(d: int, d_v: int, name: str, keys: int, causal: bool) -> None:
    """Where they gain more than a sequence loses by them that is longer by one key."""
    cases = (Case(DESIGNS[f"backward {name}{n}-CTA"], causal, seqlen=keys) for n in (1, 2))
    alone, pair = (case.rate() for case in cases)
    lost = (keys + 2 * 128) / (keys + 128)
    chosen = configurations.backward((d, d_v), "right" if causal else "", keys=keys)
    assert (chosen.ctas_a_tile == 2) == (pair / alone > lost)
    mirrored = configurations.backward((d, d_v), "left", keys=keys)
    assert not causal or mirrored.ctas_a_tile == chosen.ctas_a_tile, "a left bound alone is a right one, mirrored"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [256, 512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize(("d", "d_v", "name"), [(256, 256, "d = 256"), (192, 128, "(192, 128)")])
def test_pairs_are_chosen_forward_where_they_pay(d: int, d_v: int, name: str, queries: int, causal: bool) -> None:
    """Pairs are chosen by the number of queries."""
    cases = (Case(DESIGNS[f"forward {name}{n}"], causal, seqlen=queries) for n in ("", " 2-CTA"))
    alone, pair = (case.rate() for case in cases)
    words = "right" if causal else ""
    of_one, chosen = (configurations.chosen((d, d_v), words, queries=n) for n in (0, queries))
    lost = (queries + 2 * of_one.tile_m) / (queries + of_one.tile_m)
    assert (chosen.ctas_a_tile == 2) == (pair / alone > lost)


@pytest.mark.slow  # plain runs ask what is planned: test_pairs_are_planned_for_wide_windows
@pytest.mark.parametrize("window", [64, 128, 256, 512, 640, 768, 1024, 2048])
@pytest.mark.parametrize(
    ("name", "d", "d_v"),
    [
        ("backward {}-CTA", 128, 128),
        ("backward (192, 128) {}-CTA", 192, 128),
        ("backward d = 192 {}-CTA", 192, 192),
        ("backward d = 256 {}-CTA", 256, 256),
        ("forward (192, 128)", 192, 128),
    ],
)
def test_pairs_are_chosen_under_windows_where_they_pay(name: str, d: int, d_v: int, window: int) -> None:
    """Where they gain more, in both readings, than a sequence of 8k loses by them that is longer by one row."""
    names = [name.format(n) for n in (1, 2)] if "{}" in name else [name, f"{name} 2-CTA"]
    rows = 8192
    if name.startswith("backward"):
        config: Any = partial(configurations.backward, (d, d_v), "left right", keys=rows)
        of_one = config(window=0).tile_n
    else:
        config = partial(configurations.chosen, (d, d_v), "left right", queries=rows)
        of_one = config(window=0).tile_m
    cases = [Case(DESIGNS[name], causal=True, window=window) for name in names]
    gains = []
    for machine in (B200, B200_BY_POWER):
        alone, pair = (case.rate(machine) for case in cases)
        gains.append(pair / alone)
    lost = (rows + 2 * of_one) / (rows + of_one)
    assert (config(window=window).ctas_a_tile == 2) == (min(gains) > lost), gains


def test_turns_that_are_waited_for_cost_more() -> None:
    """A warp of their own has them cost little; who drains dQ and waits itself loses more."""
    apart, alone = DESIGNS["backward 1-CTA"], DESIGNS["backward 1-CTA, no order"]
    assert isinstance(apart, BackwardDesign)
    took = [Case(design, causal=False).predict().clocks for design in (alone, apart, replace(apart, turns_ahead=False))]
    assert took[1] < 1.03 * took[0]
    assert took[2] > 1.08 * took[1]


@READINGS
@pytest.mark.parametrize(
    ("name", "full", "causal"), [("forward", 1600, 1480), ("backward 2-CTA", 1360, 1210)], ids=["forward", "backward"]
)
def test_goals(name: str, full: float, causal: float, machine: Machine) -> None:
    """TFLOP/s at d = 128, 8k tokens, that a B200 is to reach."""
    for is_causal, goal in ((False, full), (True, causal)):
        case = Case(DESIGNS[name], is_causal)
        assert case.rate(machine) >= goal


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [n for n in DESIGNS if n.startswith("backward") and not n.endswith("no order")])
def test_an_order_of_additions_costs_little(name: str, causal: bool) -> None:
    """At most 5 %, zeros that the other has to write included."""
    design = DESIGNS[name]
    assert isinstance(design, BackwardDesign)
    assert design.ordered
    without = replace(design, ordered=False, turns_ahead=False, overwrites=False)
    ordered, free = (case.rate() for case in (Case(design, causal), Case(without, causal)))
    assert ordered > 0.95 * free


@pytest.mark.parametrize("name", ["backward d = 64", "backward 2-CTA", "backward d = 192 2-CTA"])
def test_backward_on_a_b300(name: str) -> None:
    """Times are those of a B200, within 4 %: exp2 does not bind."""
    case = Case(DESIGNS[name], causal=True)
    assert case.rate(B300) == pytest.approx(case.rate(), rel=0.04)


@pytest.mark.parametrize("name", KERNELS)
def test_designs_are_the_kernels(name: str) -> None:
    """The model and a kernel's configuration agree in sizes that each of them derives, and about a B300."""
    design, config = DESIGNS[name], KERNELS[name]
    if isinstance(design, ForwardDesign):
        assert isinstance(config, ForwardConfig)
        assert on("B300", design) == forward_design(replace(config, target=TARGETS[10, 3]))
        forward = Forward(design)
        assert (forward.rows, forward.columns, forward.ctas) == (config.tile_m, config.tile_n, config.ctas_a_tile)
    else:
        assert isinstance(config, BackwardConfig)
        assert on("B300", design) == design
        backward = Case(design, causal=False).make()()
        assert isinstance(backward, Backward)
        assert (backward.rows, backward.columns, backward.ctas) == (config.tile_n, config.tile_m, config.ctas_a_tile)
        assert (backward.piece, backward.pieces) == (4 * config.piece_numbers, config.pieces_dQ)
        assert COMPUTE_WARPGROUPS == 2


def test_all_kernels_have_a_design() -> None:
    """Designs beyond them are none of a kernel, and said to be so on the page."""
    of_none = {"forward 2-CTA", "backward 1-CTA, no order", "backward 2-CTA, no order"}
    assert DESIGNS.keys() - KERNELS.keys() == of_none
    chosen: set[Any] = {KERNELS["forward, a bias"]}
    for size, length in product((64, 128, (192, 128), 192, 256), (0, 8192)):
        chosen |= {configurations.chosen(size, queries=length), configurations.backward(size, keys=length)}
    assert chosen == set(KERNELS.values())


@pytest.mark.parametrize("name", OPEN)
def test_open_changes(name: str) -> None:
    """They begin at a kernel that is there, and shared memory has room for them, counted as the kernels count it."""
    before, after = OPEN[name].before, OPEN[name].after
    of_kernels = {DESIGNS[kernel]: config for kernel, config in KERNELS.items()}
    config = of_kernels[before]
    sizes: dict[str, Any] = {"tile_d": after.d, "tile_dv": after.d_v, "ctas_a_tile": 2 if after.pair else 1}
    if isinstance(after, ForwardDesign):
        sizes |= {"k_stages": after.stages // 2, "v_stages": after.stages // 2, "tile_n": after.keys}
        sizes |= {"o_in_q": after.o_over_q}
        assert isinstance(config, ForwardConfig)
        assert forward_schedule(replace(config, **sizes)).num_bytes <= SHARED_MEMORY
    else:
        sizes |= {"kv_stages": after.kv_stages, "q_stages": after.q_stages, "do_stages": after.do_stages}
        assert isinstance(config, BackwardConfig)
        assert after == backward_design(replace(config, **sizes))
        assert backward_schedule(replace(config, **sizes)).num_bytes <= SHARED_MEMORY


def test_windows() -> None:
    """Every block of queries with a visible pair is met, and no other; and pairs are counted."""
    shape = Shape(1, 1000, 1, 64, 64, causal=True, window=100)
    visible = {(q, k) for q in range(1000) for k in range(max(0, q - 99), q + 1)}
    assert shape.flop == 2 * len(visible) * 128
    for backward in (False, True):
        tiles = tiles_of(replace(shape, backward=backward), 128, 64, Order(1, last_first=False))
        met = {(n, block) for n, tile in enumerate(tiles) for block in tile.blocks}
        assert met == {(k // 128, q // 64) if backward else (q // 128, k // 64) for q, k in visible}
    assert replace(shape, window=2000).flop == replace(shape, window=None).flop
