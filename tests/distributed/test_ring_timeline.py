"""Steps of a ring have the pairs of its calls, and ranks wait for their neighbours."""

import random
from itertools import accumulate

import pytest
import torch

from flash_attn_cute.distributed import Sharding
from flash_attn_cute.distributed.packed_calls import Part, parts_of
from flash_attn_cute.distributed.rank_layout import Layout, side_by_side
from flash_attn_cute.distributed.ring_timeline import Steps, finished
from flash_attn_cute.problem.band import Band


def area(part: Part) -> int:
    """Visible pairs of a sequence of a call."""
    num_q, num_k = part.q_stop - part.q_start, part.k_stop - part.k_start
    return Band.of(part.window, num_q, num_k).area(0, num_q, num_k)


@pytest.mark.parametrize("seed", range(40))
def test_steps_have_the_pairs_of_the_calls(seed: int) -> None:
    draw = random.Random(seed)
    documents, num_ranks = [draw.randint(0, 60) for _ in range(draw.randint(1, 6))], draw.randint(2, 6)
    window = draw.choice([(None, 0), (None, None), (5, 0), (3, 7), (None, 4)])
    make = draw.choice([Sharding.contiguous, lambda cu, n: Sharding.balanced(cu, n, window_size=window)])
    sharding = make([0, *accumulate(documents)], num_ranks)
    layout = Layout.of(sharding, sharding, tuple(documents), tuple(documents), window)
    steps, blocks = Steps.of(layout), [side_by_side(runs)[1] for runs in layout.travelling()]
    assert steps.pairs.sum() == sum(band.area(0, n, n) for band, n in zip(layout.bands, documents, strict=True))
    for rank in range(num_ranks):
        for t in range(steps.pairs.shape[1]):
            keys = layout.keys_of[(rank - t) % num_ranks]
            assert steps.pairs[rank, t] == sum(map(area, parts_of(layout.queries_of[rank], keys, layout.bands)))
            before = (rank - t - 1) % num_ranks
            assert steps.coming[rank, t] == (blocks[before] if t < layout.hops()[before] else 0)
        assert steps.home[rank].sum() == (blocks[rank] if layout.hops()[rank] else 0)


COMING = torch.tensor([[1, 1, 0]] * 3, dtype=torch.float64)  # to three ranks, whose keys travel to all others
HOME = torch.tensor([[0, 0, 1]] * 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("computing", "message", "expected"),
    [
        ([[1, 1, 1]] * 3, 0.5, 3.0),  # messages are hidden
        ([[1, 1, 1]] * 3, 2.0, 5.0),  # two that are not, and the last step
        ([[4, 0, 0], [0, 0, 4], [0, 0, 0]], 1.0, 9.0),  # the last message to the second rank waits for the first one
        ([[4, 0, 0], [0, 4, 0], [0, 0, 0]], 1.0, 5.0),  # which has its keys already
    ],
)
def test_ranks_wait_for_their_neighbours(computing: list[list[int]], message: float, expected: float) -> None:
    """In the forward pass."""
    assert finished(torch.tensor(computing, dtype=torch.float64), COMING * message) == expected


def test_sums_come_home_last() -> None:
    """Sums of a step are sent after it, and hide behind the next one, but for the last ones."""
    computing = torch.ones(3, 3, dtype=torch.float64)
    assert finished(computing, COMING * 0.25, (COMING * 0.5, HOME * 0.5)) == 3.5
    assert finished(computing, COMING * 0.25, (COMING, HOME)) == 4.25
