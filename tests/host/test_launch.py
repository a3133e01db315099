"""Turns and launch orders: the model against a simulation of its own, its search, and no deadlock under any order."""

import random
import time
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.calls import ops, prepared_call
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.problem.spec import Options
from flash_attn_cute.sparsity import column_tables
from flash_attn_cute.sparsity.dq_order import contention_model
from flash_attn_cute.sparsity.dq_order.turns import shortest_first
from tests.lib import checks
from tests.lib.masks import columns_spelled_out, launch_order, random_mask, tables_of
from tests.lib.turn_model import Addition, DeadlockError, Machine, backward, simulate, uneven
from tests.lib.turns import write_order


def last_first(visible: Tensor) -> Tensor:
    """(batch, heads, blocks_k)."""
    batch, heads, _, blocks_k = visible.shape
    return torch.arange(blocks_k - 1, -1, -1, dtype=torch.int32).expand(batch, heads, blocks_k)


def spt(visible: Tensor) -> Tensor:
    """Launch order of columns by length, the shortest first: (batch, heads, blocks_k)."""
    return shortest_first(visible.sum(2))


def simulated(visible: Tensor, order: Tensor, m_block_order: Tensor | None = None) -> float:
    """Makespan by the event-driven simulation, of as many heads as the model takes."""
    copies = max(1, 16 // (visible.shape[0] * visible.shape[1]))
    turns, order = (x.flatten(0, 1).repeat(copies, *[1] * (x.ndim - 2)) for x in (write_order(visible, order), order))
    by_head = None if m_block_order is None else m_block_order.flatten(0, 1).repeat(copies, 1, 1)
    return simulate(backward(turns, order, section=8, m_block_order=by_head), Machine(132)).makespan


def windowed(length: int, left: int | None, right: int | None) -> Tensor:
    mask = BlockMask.window(length, length, left=left, right=right)
    visible = torch.zeros(1, 1, length // 64, length // 128, dtype=torch.bool)
    for (b, h, n), entries in columns_spelled_out(tables_of(mask), 64).items():
        visible[b, h, [m for m, _, _ in entries], n] = True
    return visible


def scattered(blocks_q: int, blocks_k: int, share: float, seed: int) -> Tensor:
    """Random blocks of 128 queries and 128 keys for 16 heads, as a map of blocks of 64 queries."""
    visible = torch.rand(1, 16, blocks_q, blocks_k, generator=torch.Generator().manual_seed(seed)) < share
    return visible.repeat_interleave(2, 2)


MASKS = {
    "causal": windowed(8192, None, 0),
    "window": windowed(8192, 2047, 0),
    "both sides": windowed(8192, 1024, 1024),
    "scattered": scattered(64, 64, 0.125, 0),
}


def steps_of(visible: Tensor) -> Tensor:
    """Visible halves of each block of 128 queries."""
    return visible.unflatten(2, (-1, 2)).sum(3)


@pytest.mark.parametrize("visible", MASKS.values(), ids=MASKS)
def test_model_and_simulation_agree(visible: Tensor) -> None:
    """Two programs, one event by event and one ticket by ticket; also with steps of blocks of 128 queries."""
    for order in (last_first(visible), spt(visible), last_first(visible).flip(-1)):
        expected = simulated(visible, order)
        assert contention_model.Pass(visible).play(order).makespan == pytest.approx(expected, rel=0.05)
        assert contention_model.Pass(steps_of(visible)).play(order).makespan == pytest.approx(expected, rel=0.06)


def test_a_mask_is_played_as_for_a_batch() -> None:
    """Masks of few heads are repeated until there are enough heads."""
    visible = scattered(8, 10, 0.5, 0)
    for masks, heads in ((3, 18), (8, 16), (1, 16)):
        played = contention_model.Pass(visible[:, :masks]).play(last_first(visible[:, :masks]))
        assert played.head == sorted(played.head, key=lambda head: head // 8)
        assert len(played.n) == 10 * heads == 10 * len(set(played.head))


def test_orders_are_compared_side_by_side() -> None:
    """Several at a time as each on its own; and nearly as a long pass has it, which is played as a whole."""
    visible = scattered(64, 64, 0.2, 5)
    work = contention_model.Pass(steps_of(visible), machine=contention_model.machine_of(64 * 64))
    orders = [order_(visible) for order_ in (last_first, spt)]
    slowdowns = work.slowdowns(orders)
    assert slowdowns == [slowdown for order in orders for slowdown in work.slowdowns([order])]
    assert 1.0 < slowdowns[1] < 0.95 * slowdowns[0]

    long = contention_model.Pass(steps_of(visible).repeat(4, 1, 1, 1), machine=work.machine)

    def makespan(order: Tensor, **options: bool) -> float:
        return long.play(order.repeat(4, 1, 1), **options).makespan

    for order, slowdown in zip(orders, slowdowns, strict=True):
        unordered = makespan(order, ordered=False)
        assert slowdown == pytest.approx(makespan(order) / unordered, rel=0.04)
        assert long.pass_time(slowdown) - long.overhead() == pytest.approx(slowdown * unordered, rel=0.06)


def test_tiles_wait_less_in_the_m_block_order_that_is_found() -> None:
    """Also for heads that share a launch order; each tile has every block of its once."""
    visible = scattered(64, 64, 0.2, 3)
    machine = contention_model.machine_of(64 * 128, has_m_block_order=True)
    for group, most in ((1, 0.9), (4, 0.9), (16, 0.95)):
        order = shortest_first(visible.unflatten(1, (-1, group)).sum((2, 3)))
        work = contention_model.Pass(visible, group, machine)
        m_block_order, slowdown = work.find_m_block_order(order)
        assert m_block_order.shape == visible.shape
        for head, n in ((0, 0), (3, 63), (15, 7)):
            of_tile = visible[0, head, :, n]
            assert m_block_order[0, head, of_tile, n].sort().values.tolist() == list(range(int(of_tile.sum())))
        found = contention_model.Pass(visible, group, machine, m_block_order)
        assert found.play(order).makespan < most * work.play(order).makespan
        assert found.slowdowns([order]) == pytest.approx([slowdown])
        # All visible blocks are done, so no order is faster than none.
        assert found.play(order).makespan > found.play(order, ordered=False).makespan


def test_m_block_order_by_hand() -> None:
    """The first tile has two of three blocks; the second tile starts with the third, for which it need not wait."""
    visible = torch.ones(1, 2, 3, 2, dtype=torch.bool)
    visible[0, :, 2, 0] = False
    machine = contention_model.Machine(num_ctas=4, section=2, tile=1.0, step=2.0, signal=50.0)
    work = contention_model.Pass(visible, machine=machine)
    m_block_order, _ = work.find_m_block_order(torch.tensor([[[0, 1], [0, 1]]]))
    assert m_block_order[0, 0, :2, 0].tolist() == [0, 1]
    assert m_block_order[0, 0, :, 1].tolist() == [1, 2, 0]


def test_columns_have_the_m_block_order_that_they_are_given() -> None:
    """Columns in blocks of 64 and of 128 queries, of masks with partial and empty blocks."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(10):
        mask, _ = random_mask(rng.choice([130, 700]), rng.choice([100, 650]), rng, (rng.choice([1, 2]), 2))
        plain = tables_of(mask)
        shown = column_tables.steps(plain.rows, mask.sizes) > 0
        assert torch.equal(
            column_tables.m_block_order_of(plain, mask.sizes)[shown], (shown.cumsum(2, dtype=torch.int16) - 1)[shown]
        )
        places = torch.rand(shown.shape, generator=generator).argsort(2).to(torch.int16)
        found = plain._replace(columns=column_tables.columns(plain.rows, None, mask.sizes, places))
        read_back = column_tables.m_block_order_of(found, mask.sizes)
        for block_q in (64, 128):
            ascending, columns = columns_spelled_out(plain, block_q), columns_spelled_out(found, block_q)
            assert columns.keys() == ascending.keys()
            for (b, h, n), entries in columns.items():
                assert sorted(entries) == ascending[b, h, n]
                blocks = [m * block_q // 128 for m, _, _ in entries]
                assert blocks == sorted(blocks, key=lambda m: int(places[b, h, m, n]))
                assert blocks == sorted(blocks, key=lambda m: int(read_back[b, h, m, n]))


def test_timeline() -> None:
    """Two heads of two tiles on two CTAs, by hand."""
    visible = torch.ones(1, 2, 3, 2, dtype=torch.bool)
    visible[0, 0, 1, 1] = False
    machine = contention_model.Machine(num_ctas=2, section=2, tile=1.0, step=2.0, signal=5.0)
    timeline = contention_model.Pass(visible, machine=machine).play(torch.tensor([[[1, 0], [0, 1]]]))
    assert (timeline.head[:4], timeline.n[:4], timeline.cta[:4]) == ([0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 0, 1])
    # Head 0: two blocks, then three; the second tile waits for the first one's additions at 3 and 5, done at 8 and 10.
    # Head 1: additions at 3, 5 and 7.
    assert timeline.start[:4] == [0.0, 0.0, 5.0, 7.0]
    assert timeline.end[:4] == [5.0, 7.0, 12.0, 14.0]
    assert timeline.waited[:4] == [0.0, 0.0, 0.0, 0.0]
    slow = contention_model.Pass(visible, machine=machine._replace(signal=50.0)).play(torch.tensor([[[1, 0], [0, 1]]]))
    assert slow.end[2:4] == [55.0 + 2.0, 57.0]
    assert slow.waited[2:4] == [45.0, 43.0]
    with pytest.raises(ValueError, match="machine: expected at least a CTA for each head of a section"):
        contention_model.Pass(visible, machine=contention_model.Machine(num_ctas=7))


def test_steps() -> None:
    rng = random.Random(0)
    for _ in range(20):
        mask, shown = random_mask(rng.choice([1, 64, 130, 300]), rng.choice([1, 128, 290]), rng, (2, 2))
        rows = tables_of(mask).rows
        blocks_q, blocks_k = -(-mask.seqlen_q // 128), -(-mask.seqlen_k // 128)
        whole = torch.zeros(mask.batch, mask.heads, blocks_q * 128, blocks_k * 128, dtype=torch.bool)
        whole[:, :, : mask.seqlen_q, : mask.seqlen_k] = shown
        steps = whole.unflatten(3, (-1, 128)).unflatten(2, (-1, 2, 64)).any(6).any(4).sum(3)
        assert torch.equal(column_tables.steps(rows, mask.sizes), steps.to(torch.uint8))
        assert torch.equal(column_tables.column_lengths(rows, mask.sizes), steps.sum(2))


def order_of(visible: Tensor, name: str, group: int = 1) -> Tensor:
    """The launch order of a map of blocks of 64 queries and 128 keys."""
    mask = BlockMask.from_blocks(visible, (64, 128)).with_order(name, group=group)
    order = launch_order(mask)
    assert order.shape == (visible.shape[0], visible.shape[1] // group, visible.shape[3])
    assert torch.equal(order.sort(-1).values, torch.arange(visible.shape[3]).expand_as(order))
    return order


@pytest.mark.slow
def test_permutations_are_faster_where_masks_are_irregular() -> None:
    """By the model and the simulation: random blocks, an eighth of all, a mask for each head."""
    visible = scattered(128, 128, 0.125, 1)
    order = spt(visible)
    m_block_order, _ = contention_model.Pass(visible).find_m_block_order(order)
    assert (
        simulated(visible, order, m_block_order)
        < 0.95 * simulated(visible, order)
        < 0.95 * simulated(visible, last_first(visible))
    )
    makespan = contention_model.Pass(visible, m_block_order=m_block_order).play(order).makespan
    assert makespan == pytest.approx(simulated(visible, order, m_block_order), rel=0.05)


@pytest.mark.parametrize("visible", MASKS.values(), ids=MASKS)
def test_permutations_are_never_slower_in_the_model(visible: Tensor) -> None:
    mask = BlockMask.from_blocks(visible, (64, 128)).with_order("permutation")
    tables, steps = tables_of(mask), steps_of(visible)
    m_block_order = column_tables.m_block_order_of(tables, mask.sizes)
    machine = contention_model.machine_of(64 * visible.shape[2])
    work = contention_model.Pass(steps, machine=machine)
    found = contention_model.Pass(steps, machine=machine, m_block_order=m_block_order)
    if mask.has_m_block_order:
        found = found.on(contention_model.machine_of(64 * visible.shape[2], has_m_block_order=True))
    orders = [last_first(visible), spt(visible)]
    (slowdown,) = found.slowdowns([launch_order(mask).expand_as(orders[0])])
    assert found.pass_time(slowdown) <= 1.001 * work.pass_time(min(work.slowdowns(orders)))


def test_masks_know_whether_an_m_block_order_is_worth_it() -> None:
    """Calls with other masks have as many heads in flight as those without a search."""
    irregular = scattered(64, 64, 0.2, 5)
    q = torch.zeros(1, 64 * 128, irregular.shape[1], 8)
    options = Options(deterministic=True)
    for visible, worth in ((torch.ones_like(irregular), False), (irregular, True)):
        for order in ("auto", "permutation"):
            mask = BlockMask.from_blocks(visible, (64, 128)).with_order(order)
            assert mask.has_m_block_order
            assert not mask.low_contention
            for _ in range(2):
                call = AttentionCall(q, q, q, block_mask=mask, options=options)
                inputs, plan = prepared_call.prepare(call, backward=True)
                assert plan.spec.has_m_block_order == mask.has_m_block_order == worth
                assert plan.spec.low_contention == mask.low_contention == (order == "auto" and not worth)
                assert inputs.block_mask is mask.tables(q.device, backward=True)
        assert mask.with_order("permutation").has_m_block_order
        assert not mask.with_order("spt").has_m_block_order


def test_a_search_holds_for_its_own_call_and_all_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are visible, so no tile waits, which only the search can find out of a map of blocks."""
    made = Mock(wraps=ops.attention)
    monkeypatch.setattr(ops, "attention", made)
    mask = BlockMask.from_blocks(torch.ones(4, 4, dtype=torch.bool)).with_order("auto")
    q = torch.randn(1, 512, 1, 8, requires_grad=True)
    for _ in range(2):
        flash_attn_func(q, q, q, block_mask=mask)
    for call in made.call_args_list:
        _, plan, _ = call.args
        assert plan.spec.low_contention
        assert not plan.spec.has_m_block_order
    assert made.call_count == 2


def test_auto_takes_the_default_where_that_is_good() -> None:
    """It searches further where the default is not good."""
    for name in ("causal", "window", "both sides"):
        assert torch.equal(order_of(MASKS[name], "auto"), last_first(MASKS[name]))
        mask = BlockMask.from_blocks(MASKS[name], (64, 128)).with_order("auto")
        mask.build("cpu")
        assert mask.low_contention
        assert not mask.has_m_block_order
    visible = MASKS["scattered"]
    assert torch.equal(order_of(visible, "auto"), order_of(visible, "permutation"))


def test_auto_leaves_masks_of_low_contention_as_they_are() -> None:
    window = BlockMask.window(512, 512, left=200, right=0)
    assert window.low_contention
    assert window.with_order("auto").low_contention
    assert window.with_order("auto").order_sets == (1, 1)
    assert not window.with_order("spt").low_contention
    chosen = BlockMask.from_blocks(torch.ones(1, 4, 4, dtype=torch.bool))
    assert not chosen.with_order("auto").low_contention


def test_heads_of_a_group_share_an_order() -> None:
    visible = scattered(16, 16, 0.3, 2)
    assert torch.equal(order_of(visible, "spt", 4), spt(visible.unflatten(1, (4, 4)).sum(2)))
    order_of(visible, "permutation", 8)


def work_of(
    mask: BlockMask, tables_order: Tensor, block_q: int, group: int, section: int, seed: int
) -> list[list[Addition]]:
    """Tiles of a backward pass by the tables of a mask, launched in a given order."""
    tables = tables_of(mask)
    batch, heads, blocks_k = mask.batch, mask.heads, mask.sizes.blocks_k
    blocks_q = -(-mask.seqlen_q // block_q)
    turns = torch.full((batch, heads, blocks_q, blocks_k), -1)
    for (b, h, n), entries in columns_spelled_out(tables, block_q).items():
        for m, _, turn in entries:
            turns[b, h, m, n] = turn
    order = tables_order.repeat_interleave(heads // tables_order.shape[1], 1).expand(batch, heads, blocks_k)
    m_blocks = random.Random(seed).sample(range(blocks_q), blocks_q)
    return backward(turns.flatten(0, 1), order.flatten(0, 1), group=group, section=section, m_blocks=m_blocks)


def test_no_mask_and_order_deadlocks(fuzz_seconds: float) -> None:
    """Any mask, order, m_block order, number of CTAs and speed; launched in another order than the tables', many do."""
    start, cases, deadlocks = time.monotonic(), 0, 0
    first_seed = checks.fuzz_seed << 32
    while time.monotonic() < start + 2 * fuzz_seconds or cases < 40:
        seed = first_seed + cases
        rng = random.Random(seed)
        group = rng.choice([1, 2, 3])
        heads = group * rng.choice([1, 2])
        seqlen_q, seqlen_k = rng.choice([130, 300, 500]), rng.choice([200, 500, 640])
        mask, _ = random_mask(seqlen_q, seqlen_k, rng, (rng.choice([1, 2]), heads))
        own_group = group if mask.heads == heads else 1
        order: str | Tensor = rng.choice(["default", "spt", "tensor", "tensor"])
        if order == "tensor":
            generator = torch.Generator().manual_seed(seed)
            shape = (mask.batch, mask.heads // own_group, mask.sizes.blocks_k)
            order = torch.rand(shape, generator=generator).argsort(-1)
        mask = mask.with_order(order, group=own_group)
        launched = launch_order(mask).long()
        block_q, section = rng.choice([64, 128]), rng.randint(1, 8)
        machine = Machine(
            rng.randint(1, 9), tickets_ahead=rng.randint(0, 3), steps_ahead=rng.choice([1, 2, 9]), vary=uneven(rng)
        )
        work = work_of(mask, launched, block_q, own_group, section, seed)
        try:
            run = simulate(work, machine)
        except DeadlockError as error:
            raise AssertionError(f"seed {seed}: {mask} deadlocks on {machine}: {error}") from error
        for to, tickets in run.added.items():
            assert tickets == sorted(tickets), f"seed {seed}: {to} is added to in the order {tickets}"
        against = work_of(mask, launched.flip(-1), block_q, own_group, section, seed)
        try:
            simulate(against, machine)
        except DeadlockError:
            deadlocks += 1
        cases += 1
    print(f"{cases} cases from seed {first_seed}, {deadlocks} deadlocks against the order")
    assert deadlocks


def test_orders_by_length() -> None:
    visible = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert shortest_first(visible.sum(-2)).tolist() == [2, 3, 1, 0]
    causal = torch.ones(8, 8).tril().repeat_interleave(2, 1)
    descending = list(range(15, -1, -1))
    assert shortest_first(causal.sum(-2)).tolist() == descending  # two tiles at a time see as many blocks
    assert shortest_first(torch.ones(2, 16)).tolist() == [descending] * 2
