"""Turns and launch orders, on the host. ``test_launch.py`` plays both in a model of the device that can deadlock."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn_cute.sparsity.dq_order.turns import longest_first, shortest_first
from tests.lib.turns import write_order


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
    causal = torch.ones(8, 8).tril().repeat_interleave(2, 1)
    last_first = list(range(15, -1, -1))
    assert shortest_first(causal.sum(-2)).tolist() == last_first  # two tiles at a time see as many blocks
    assert shortest_first(torch.ones(2, 16)).tolist() == [last_first] * 2
