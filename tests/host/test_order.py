"""Turns and launch orders: the formula against the table, and both in a model of the device that can deadlock."""

import itertools
import math
import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cute.sparsity.dq_order.turns import longest_first, shortest_first
from tests.lib.turn_model import Addition, Backward, DeadlockError, Machine, Run, backward, simulate, uneven
from tests.lib.turns import turns_of_window, write_order

LENGTH = st.one_of(st.integers(0, 9), st.integers(0, 200))
SIDE = st.one_of(st.none(), st.integers(0, 9), st.integers(0, 250))
TILE = st.sampled_from([1, 2, 3, 8, 16, 64])


def visible_blocks(
    seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, left: int | None = None, right: int | None = None
) -> Tensor:
    """Which blocks see each other, token by token."""
    blocks_q, blocks_k = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    tokens = torch.zeros(blocks_q * tile_m, blocks_k * tile_n, dtype=torch.bool)
    tokens[:seqlen_q, :seqlen_k] = True
    if left is not None:
        tokens[:seqlen_q, :seqlen_k] &= j >= i - left
    if right is not None:
        tokens[:seqlen_q, :seqlen_k] &= j <= i + right
    return tokens.view(blocks_q, tile_m, blocks_k, tile_n).any(3).any(1)


@settings(max_examples=300)
@given(seqlen_q=LENGTH, seqlen_k=LENGTH, tile_m=TILE, tile_n=TILE, left=SIDE, right=SIDE)
def test_formula_equals_table(
    seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, left: int | None, right: int | None
) -> None:
    visible = visible_blocks(seqlen_q, seqlen_k, tile_m, tile_n, left, right)
    turns = turns_of_window(seqlen_q, seqlen_k, tile_m, tile_n, left, right)
    assert turns.dtype == torch.int32
    assert torch.equal(turns, write_order(visible))
    first_first = turns_of_window(seqlen_q, seqlen_k, tile_m, tile_n, left, right, last_first=False)
    assert torch.equal(first_first, write_order(visible, torch.arange(visible.shape[1])))
    # A tile finds its query blocks by the formula with both sides exchanged: the pairs of blocks must be the same.
    visible_to_keys = turns_of_window(seqlen_k, seqlen_q, tile_n, tile_m, right, left).T >= 0
    assert torch.equal(visible_to_keys, turns >= 0)


@given(
    blocks_q=st.integers(0, 6),
    blocks_k=st.integers(0, 6),
    leading=st.sampled_from([((), ()), ((2, 3), (2, 3)), ((2, 1), (3,)), ((), (2,)), ((3,), ())]),
    order=st.sampled_from(["any", "shortest", "longest", "last"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_turns_count_tiles_launched_before(
    blocks_q: int, blocks_k: int, leading: tuple[tuple[int, ...], tuple[int, ...]], order: str, seed: int
) -> None:
    torch.manual_seed(seed)
    visible = torch.rand(*leading[0], blocks_q, blocks_k) < torch.rand(())
    launch = {
        "any": lambda: torch.rand(*leading[1], blocks_k).argsort(-1),
        "shortest": lambda: shortest_first(visible.sum(-2)),
        "longest": lambda: longest_first(visible.sum(-2)),
        "last": lambda: None,
    }[order]()
    turns = write_order(visible, launch)
    assert turns.dtype == torch.int32
    if launch is None:
        launch = torch.arange(blocks_k - 1, -1, -1)
    heads = torch.broadcast_shapes(visible.shape[:-2], launch.shape[:-1])
    assert turns.shape == (*heads, blocks_q, blocks_k)
    visible, launch = visible.expand(turns.shape), launch.expand(*heads, blocks_k)
    for head in itertools.product(*map(range, heads)):
        for m in range(blocks_q):
            contributors = [n for n in launch[head].tolist() if visible[head][m, n]]
            expected = [contributors.index(n) if n in contributors else -1 for n in range(blocks_k)]
            assert turns[head][m].tolist() == expected


def test_launch_orders() -> None:
    visible = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert longest_first(visible.sum(-2)).tolist() == [0, 1, 3, 2]
    assert shortest_first(visible.sum(-2)).tolist() == [2, 3, 1, 0]
    causal = visible_blocks(1024, 1024, 128, 64, right=0)
    last_first = list(range(15, -1, -1))
    assert shortest_first(causal.sum(-2)).tolist() == last_first  # two tiles at a time see as many blocks
    assert shortest_first(torch.ones(2, 16)).tolist() == [last_first] * 2


def order_of_additions(run: Run, work: Backward) -> dict[Hashable, list[tuple[int, int]]]:
    return {to: [work.tickets[ticket] for ticket in tickets] for to, tickets in run.added.items()}


@settings(max_examples=150)
@given(
    group=st.integers(1, 3),
    heads_k=st.integers(1, 3),
    blocks_q=st.integers(1, 6),
    blocks_k=st.integers(1, 6),
    density=st.sampled_from([0.2, 0.7, 1.0]),
    section=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_every_launch_order_ends_and_adds_in_its_order(
    group: int,
    heads_k: int,
    blocks_q: int,
    blocks_k: int,
    density: float,
    section: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Any mask, any permutation of tiles, any m_block order, and any number of CTAs of any speed."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    heads = group * heads_k
    visible = torch.rand(heads, blocks_q, blocks_k) < density
    # Alike in a group, so that its heads come in ascending order for every tile of keys.
    launch = torch.rand(heads_k, blocks_k).argsort(-1).repeat_interleave(group, 0)
    m_blocks = rng.sample(range(blocks_q), blocks_q)
    work = backward(write_order(visible, launch), launch, group=group, section=section, m_blocks=m_blocks)
    expected: dict[Hashable, list[tuple[int, int]]] = {}
    for head, m in itertools.product(range(heads), range(blocks_q)):
        contributors = [(head, n) for n in launch[head].tolist() if visible[head, m, n]]
        if contributors:
            expected["dQ", head, m] = contributors
    if group > 1:
        for head, n in itertools.product(range(heads), range(blocks_k)):
            expected.setdefault(("dKV", head // group, n), []).append((head, n))
    for num_ctas in (1, data.draw(st.integers(2, 8), label="num_ctas"), heads * blocks_k + 2):
        machine = Machine(
            num_ctas,
            resident=data.draw(st.integers(1, num_ctas), label="resident"),
            tickets_ahead=data.draw(st.integers(0, 3), label="tickets_ahead"),
            steps_ahead=data.draw(st.sampled_from([1, 2, math.inf]), label="steps_ahead"),
            arrival=20.0,
            vary=uneven(rng),
        )
        assert order_of_additions(simulate(work.tiles, machine), work) == expected


def test_additions_without_turns_differ() -> None:
    """The check above can fail: the model does not order additions by itself."""
    launch = torch.arange(8)[None]
    work = backward(torch.zeros(1, 8, 8), launch, ordered=False)
    seen = [
        order_of_additions(simulate(work.tiles, Machine(4, vary=uneven(random.Random(seed)))), work)
        for seed in range(2)
    ]
    assert seen[0] != seen[1]


def test_launch_against_the_turns_deadlocks() -> None:
    last_first = torch.arange(5, -1, -1)[None]
    turns = write_order(torch.ones(1, 4, 6, dtype=torch.bool), last_first)
    assert simulate(backward(turns, last_first).tiles, Machine(1))
    work = backward(turns, last_first.flip(-1))
    assert simulate(work.tiles, Machine(6, tickets_ahead=0))
    with pytest.raises(DeadlockError, match=r"0 of 6 tiles finished; \('dQ', 0, 0\): turn 5 at 0"):
        simulate(work.tiles, Machine(1))


def test_shifted_order_deadlocks_with_fewer_ctas_than_tiles() -> None:
    """Each tile begins at a block of its own: no tile waits if all run, and all wait for the one that does not."""
    num_tiles = 8
    tiles = [[Addition((n + step) % num_tiles, step) for step in range(num_tiles)] for n in range(num_tiles)]
    machine = Machine(num_tiles, signal=0.0)
    assert simulate(tiles, machine).makespan == pytest.approx(machine.tile + num_tiles * machine.step)
    for num_ctas in range(1, num_tiles):
        with pytest.raises(DeadlockError, match=f"0 of {num_tiles} tiles finished"):
            simulate(tiles, Machine(num_ctas))


def test_heads_of_a_group_in_another_order_deadlock() -> None:
    """Turns by the number of the head need its tickets behind those of the heads before it, for every tile of keys."""
    launch = torch.tensor([[0, 1], [1, 0]])
    turns = write_order(torch.ones(2, 3, 2, dtype=torch.bool), launch)
    assert simulate(backward(turns, launch, group=2, section=1).tiles, Machine(1))
    with pytest.raises(DeadlockError, match=r"\('dKV', 0, 1\): turn 1 at 0"):
        simulate(backward(turns, launch, group=2, section=2).tiles, Machine(1))


def test_turns_of_keys_without_tiles_deadlock() -> None:
    """A length beyond what its sequence owns counts tiles that no CTA takes: kernels end it where the rows end."""
    tiles, launch = 3, torch.arange(2, -1, -1)[None]
    for seqlen_k, ends in ((tiles * 128, True), (tiles * 128 + 1, False), (1000, False)):
        work = backward(turns_of_window(200, seqlen_k, 64, 128)[None, :, :tiles], launch)
        if ends:
            assert simulate(work.tiles, Machine(4))
        else:
            with pytest.raises(DeadlockError, match="0 of 3 tiles finished"):
                simulate(work.tiles, Machine(4))


def test_tiles_owned_before_running_deadlock() -> None:
    """No CTA draws a first tile that goes by a CTA's number: all that run may wait for one that cannot start."""
    launch = torch.arange(8)[None]
    work = backward(write_order(torch.ones(1, 3, 8, dtype=torch.bool), launch), launch)
    assert simulate(work.tiles, Machine(4, resident=3))
    assert simulate(work.tiles, Machine(4, resident=4, owns_first=True))
    with pytest.raises(DeadlockError, match="3 of 8 tiles finished"):
        simulate(work.tiles, Machine(4, resident=3, owns_first=True))


@pytest.mark.slow
def test_cost_of_an_order() -> None:
    """The case of the notes on determinism: 16 causal sequences of 2048, 16 heads, 132 CTAs, signals take 2 us."""
    visible = visible_blocks(2048, 2048, 64, 128, right=0)
    last_first, from_last = torch.arange(15, -1, -1), range(31, -1, -1)
    first_first = last_first.flip(0)

    def makespan(launch: Tensor, steps_ahead: float = 2, **options: Any) -> float:
        turns, launch = (x.expand(256, *x.shape) for x in (write_order(visible, launch), launch))
        work = backward(turns, launch, section=19, **options)
        return simulate(work.tiles, Machine(132, steps_ahead=steps_ahead)).makespan

    unordered = makespan(first_first, ordered=False)
    assert makespan(last_first) < 1.05 * unordered
    assert makespan(first_first) > 1.2 * unordered
    assert makespan(first_first, m_blocks=from_last) < 1.05 * unordered
    assert makespan(last_first, steps_ahead=math.inf) > 1.5 * unordered  # a tile drawn at the start of the one before


@pytest.mark.slow
def test_last_section_the_other_way_round() -> None:
    """64 causal heads of 8192: the long tiles of shortest first are not what the kernel ends with."""
    visible = visible_blocks(8192, 8192, 64, 128, right=0)
    first_first = torch.arange(64)

    def tiles(heads: int, launch: Tensor, **options: Any) -> list[list[Addition]]:
        turns = write_order(visible, launch).expand(heads, -1, -1)
        return backward(turns, launch.expand(heads, -1), **options).tiles

    def makespan(heads_of_last: int) -> float:
        last = (
            tiles(heads_of_last, first_first, section=heads_of_last, m_blocks=range(127, -1, -1))
            if heads_of_last
            else []
        )
        last = [[Addition(("last", to), turn) for to, turn in tile] for tile in last]
        return simulate([*tiles(64 - heads_of_last, first_first.flip(0)), *last], Machine(132)).makespan

    assert makespan(3) < 0.99 * makespan(0)
