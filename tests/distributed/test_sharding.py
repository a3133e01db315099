"""Layouts of documents over ranks: every row once, in balance, and back again."""

import pickle
import random
import time
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from flash_attn_cute.distributed import Segment, Sharding, gather
from flash_attn_cute.distributed.packed_calls import Run
from flash_attn_cute.distributed.rank_agreement import layout_of
from flash_attn_cute.distributed.rank_layout import Layout
from flash_attn_cute.distributed.sharding import of_handle
from tests.lib import oracle
from tests.lib.refusals import assert_refused, refusals

CAUSAL: dict[str, Any] = {"causal": True}


def offsets(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def documents(rows: int, shortest: int, longest: int) -> list[int]:
    """Log-uniform lengths of so many rows together, the last one cut off."""
    draw, lengths = random.Random(0), [0]
    while sum(lengths) < rows:
        lengths.append(round(shortest * (longest / shortest) ** draw.random()))
    lengths[-1] -= sum(lengths) - rows
    return lengths


HALVES = Sharding.contiguous([0, 4], 2)
FOUR = torch.zeros(4)
CORPORA = {
    "one sequence": [131_072],
    "long documents": documents(262_144, 1024, 65_536),
    "short documents": documents(262_144, 16, 8192),
    "a book and notes": [65_536, *[64] * 1024],
    "odd lengths": [100_003, 7, 50_021, 1, 0, 111_111],
}


MASKS: dict[str, dict[str, Any]] = {
    "causal": CAUSAL,
    "full": {},
    "causal window": {"causal": True, "window_size": (4096, None)},
    "window": {"window_size": (1000, 500)},
}
WINDOWS: dict[str, list[tuple[int | None, int | None]]] = {
    "window and causal": [(1023, 0), (None, 0)],
    "two windows and causal": [(None, 0), (127, 0), (8191, 0)],
    "window and full": [(500, 500), (None, None)],
    "window and full behind": [(1023, 0), (None, None)],
}


def pairwise_cases(masks: dict[str, Any], ranks: list[int]) -> list[Any]:
    """Each mask with each corpus and two numbers of ranks; each number of ranks with each mask and each corpus."""
    return [
        pytest.param(masks[mask], corpus, num_ranks, id=f"{mask}-{corpus}-{num_ranks}")
        for i, mask in enumerate(masks)
        for j, corpus in enumerate(CORPORA)
        for num_ranks in {ranks[(2 * i + j + k * (len(ranks) // 2)) % len(ranks)] for k in range(2)}
    ]


@pytest.mark.parametrize(("mask", "corpus", "num_ranks"), pairwise_cases(MASKS, [2, 3, 4, 7, 8, 64, 96, 512]))
def test_ranks_have_the_same_rows_and_the_same_area(corpus: str, mask: dict[str, Any], num_ranks: int) -> None:
    sharding = Sharding.balanced(offsets(CORPORA[corpus]), num_ranks, **mask)
    rows = [sharding.num_rows(rank) for rank in range(num_ranks)]
    assert sum(rows) == sharding.total
    assert max(rows) - min(rows) <= 1
    areas = [sharding.area(rank, **mask) for rank in range(num_ranks)]
    assert max(areas) < 1.03 * sum(areas) / num_ranks


@pytest.mark.parametrize(("windows", "corpus", "num_ranks"), pairwise_cases(WINDOWS, [2, 3, 4, 8, 64]))
def test_ranks_have_the_same_area_under_each_window(
    corpus: str, windows: list[tuple[int | None, int | None]], num_ranks: int
) -> None:
    """Tokens are dealt once for layers of several windows, in balance under each and under their sum."""
    sharding = Sharding.balanced(offsets(CORPORA[corpus]), num_ranks, window_sizes=windows)
    rows = [sharding.num_rows(rank) for rank in range(num_ranks)]
    assert max(rows) - min(rows) <= 1
    areas = [[sharding.area(rank, window_size=window) for rank in range(num_ranks)] for window in windows]
    for each in (*areas, [sum(of_rank) for of_rank in zip(*areas, strict=True)]):
        assert max(each) < 1.03 * sum(each) / num_ranks


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("used_q", "used_k"), [([100], [70_000]), ([100, 50, 9000], [70_000, 30_000, 2000]), ([0, 300], [70_000, 30_000])]
)
def test_rows_with_keys_alone_cost_nothing(used_q: list[int], used_k: list[int], mask: str) -> None:
    """Queries of a cache are such: many keys are real, and few rows have queries."""
    cu, given = (
        offsets([70_000, 30_000, 9000][: len(used_q)]),
        {**MASKS[mask], "seqused_q": used_q, "seqused_k": used_k},
    )
    sharding = Sharding.balanced(cu, 4, **given)
    rows, areas = [sharding.num_rows(rank) for rank in range(4)], [sharding.area(rank, **given) for rank in range(4)]
    assert max(rows) - min(rows) <= 1
    assert max(areas) < 1.03 * sum(areas) / 4
    assert (sharding.owned or tuple(b - a for a, b in pairwise(cu))) == tuple(map(max, used_q, used_k))


def test_one_window_of_several_is_not_enough() -> None:
    """In balance for full layers alone, ranks wait for each other in those with a window."""
    cu = offsets(CORPORA["short documents"])
    alone, both = (Sharding.balanced(cu, 8, **mask) for mask in (CAUSAL, {"window_sizes": [(1023, 0), (None, 0)]}))
    worst = [
        8 * max(each) / sum(each)
        for each in ([x.area(r, window_size=(1023, 0)) for r in range(8)] for x in (alone, both))
    ]
    assert worst[0] > 1.1
    assert worst[1] < 1.01


@pytest.mark.parametrize("seed", range(40))
def test_a_window_that_is_given_twice_changes_nothing(seed: int) -> None:
    """Nor does one window in a list, nor cuts of short documents, of which there may be fewer than ranks."""
    draw = random.Random(seed)
    cu = offsets([draw.choice([0, 1, 5, 17, 60]) for _ in range(6)])
    window, num_ranks = (draw.choice([None, 0, 9]), draw.choice([None, 0, 20])), draw.choice([1, 2, 3, 5, 8])
    used = [draw.randint(0, b - a) for a, b in pairwise(cu)]
    one, *others = (
        Sharding.balanced(cu, num_ranks, total=cu[-1] + 7, seqused_q=used, **given)
        for given in ({"window_size": window}, {"window_sizes": [window]}, {"window_sizes": [window] * 2})
    )
    assert all(other.segments == one.segments for other in others)


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_most_documents_stay_whole(num_ranks: int) -> None:
    lengths = CORPORA["short documents"]
    sharding = Sharding.balanced(offsets(lengths), num_ranks, **CAUSAL)
    ranks_of: dict[int, set[int]] = {}
    for rank, segments in enumerate(sharding.segments):
        for segment in segments:
            ranks_of.setdefault(segment.document, set()).add(rank)
    # As many more as there are cuts: one between ranks at either end of the line.
    assert sum(map(len, ranks_of.values())) <= len(ranks_of) + 2 * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_one_causal_sequence_is_an_early_and_a_late_chunk_a_rank(num_ranks: int) -> None:
    """PyTorch's load balancing shards alike."""
    length = 2 * num_ranks * 7
    sharding = Sharding.balanced([0, length], num_ranks, causal=True)
    chunks = torch.arange(length).view(2 * num_ranks, 7)
    for rank in range(num_ranks):
        assert sharding.index(rank).equal(torch.cat((chunks[rank], chunks[2 * num_ranks - 1 - rank])))


@pytest.mark.parametrize("seed", range(20))
def test_area_is_what_the_mask_shows(seed: int) -> None:
    draw = random.Random(seed)
    lengths_q = [draw.randint(0, 40) for _ in range(4)]
    lengths_k = [draw.randint(0, 40) for _ in range(4)]
    used_q, used_k = ([draw.randint(0, n) for n in lengths] for lengths in (lengths_q, lengths_k))
    left, right = (draw.choice([None, draw.randint(0, 20)]) for _ in range(2))
    mask: dict[str, Any] = {"causal": draw.random() < 0.5, "window_size": (left, right)}
    sharding = Sharding.balanced(
        offsets(lengths_q), 3, cu_seqlens_k=offsets(lengths_k), seqused_q=used_q, seqused_k=used_k, total=200, **mask
    )
    nothing = torch.empty(0)
    call = oracle.Call(nothing, nothing, nothing, **mask)
    rows = torch.zeros(200, dtype=torch.int64)
    for start, n_q, n_k in zip(offsets(lengths_q), used_q, used_k, strict=False):
        rows[start : start + n_q] = oracle.window(call, n_q, n_k).sum(1)
    for rank in range(3):
        used: dict[str, Any] = {"seqused_q": used_q, "seqused_k": used_k, "cu_seqlens_k": offsets(lengths_k)}
        assert sharding.area(rank, **used, **mask) == rows[sharding.index(rank)].sum()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["balanced", "contiguous"])
def test_every_row_has_one_rank_and_comes_back(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    lengths, num_ranks = [draw.choice([0, 1, 5, 17, 60]) for _ in range(6)], draw.choice([1, 2, 3, 5, 8])
    cu = [3 + x for x in offsets(lengths)]
    total = cu[-1] + draw.choice([0, 9])
    if kind == "balanced":
        used = [draw.randint(0, n) for n in lengths]
        sharding = Sharding.balanced(torch.tensor(cu), num_ranks, total=total, seqused_q=used, causal=True)
    else:
        sharding = Sharding.contiguous(torch.tensor(cu), num_ranks, total=total)
    assert sharding.num_ranks == num_ranks
    assert torch.cat([sharding.index(rank) for rank in range(num_ranks)]).sort()[0].equal(torch.arange(total))
    x = torch.randn(2, total, 3, requires_grad=True)
    shards = [sharding.shard(x, rank, dim=1) for rank in range(num_ranks)]
    assert all(shard.equal(x[:, sharding.index(rank)]) for rank, shard in enumerate(shards))
    back = sharding.unshard(shards, dim=1)
    assert back.equal(x)
    grad = torch.randn_like(x)
    assert torch.autograd.grad(back, x, grad)[0].equal(grad)
    positions = torch.zeros(total, dtype=torch.int64)
    for start, stop in pairwise(cu):
        positions[start:stop] = torch.arange(stop - start)
    for rank in range(num_ranks):
        owned = torch.tensor([s.document >= 0 for s in sharding.segments[rank] for _ in range(s.start, s.stop)])
        assert sharding.positions(rank)[owned].equal(positions[sharding.index(rank)][owned])
        assert (sharding.positions(rank)[~owned] == 0).all()


def test_a_rank_looks_at_its_own_documents_alone() -> None:
    """All documents for each of 500 ranks would take 6 seconds."""
    begin, lengths = time.process_time(), (1,) * 20_000
    sharding = Sharding.contiguous(range(20_001), 500)
    layout = Layout.of(sharding, sharding, lengths, lengths, (None, 0))
    assert sum(len(layout.whole_documents(rank)) for rank in range(500)) == 20_000
    assert time.process_time() - begin < 2


def test_merged_ranks_have_the_rows_of_their_parts() -> None:
    sharding = Sharding.balanced(offsets([50, 7, 30]), 6, causal=True)
    merged = sharding.merged(2)
    for rank in range(3):
        both = torch.cat([sharding.index(2 * rank), sharding.index(2 * rank + 1)])
        assert merged.index(rank).equal(both.sort()[0])


@pytest.mark.parametrize(
    ("window", "hops"), [((100, 0), 1), ((300, 0), 2), ((0, 0), 0), ((50, 50), 7), ((None, 0), 7), ((None, None), 7)]
)
def test_under_a_window_blocks_go_to_neighbours_alone(window: tuple[int | None, int | None], hops: int) -> None:
    """A ring goes one way: what the rank before needs has gone all around it."""
    sharding = Sharding.contiguous([0, 8 * 200], 8)
    layout = Layout.of(sharding, sharding, (1600,), (1600,), window)
    assert max(layout.hops()) == hops


def test_blocks_of_a_ring_are_what_other_ranks_need() -> None:
    """Documents that stay whole do not travel."""
    lengths = (10, 200, 30, 40)
    sharding = Sharding.contiguous(offsets(list(lengths)), 2)
    layout = Layout.of(sharding, sharding, lengths, lengths, (None, 0))
    assert layout.travelling() == [{1: [Run(0, 130, 10)]}, {}]
    assert layout.hops() == [1, 0]


def test_rows_of_keys_alone_are_no_padding() -> None:
    """Where keys are of the same rows, a document has those that either of them has."""
    given: dict[str, Any] = {"seqused_q": [5, 6], "seqused_k": [3, 8]}
    assert Sharding.balanced([0, 7, 15], 2, causal=True, **given).owned == (5, 8)
    assert Sharding.balanced([0, 7, 15], 2, cu_seqlens_k=[0, 7, 15], **given).owned == (5, 6)
    assert Sharding.balanced([0, 7, 15], 2, seqused_q=[7, 8]).owned is None
    assert Sharding.contiguous([1, 7, 15], 4, total=20).owned is None
    segments = Segment(0, 0, 2), Segment(1, 4, 5), Segment(-1, 2, 4), Segment(-1, 5, 9)
    assert Sharding((0, 4, 9), 9, (segments,)).owned == (2, 1)


def test_under_a_window_no_rank_needs_more_than_it_shows() -> None:
    sharding = Sharding.contiguous([0, 1600], 8)
    layout = Layout.of(sharding, sharding, (1600,), (1600,), (100, 0))
    assert layout.needed_by[3] == {0: [(500, 800)]}


REFUSED = """
Sharding((0, 4), 4, ((Segment(0, 0, 2),), (Segment(0, 3, 4),)))
    ValueError: segments: expected every row on one rank, got ... where row 2 is next
Sharding((0, 4), 4, ((Segment(0, 0, 2),), (Segment(0, 1, 4),)))
    ValueError: segments: expected every row on one rank, got ... where row 2 is next
Sharding((0, 4), 4, ((Segment(0, 0, 2), Segment(0, 2, 3)),))
    ValueError: segments: expected 4 rows on all ranks together, got 3
Sharding((0, 2, 4), 4, ((Segment(0, 0, 3), Segment(1, 3, 4)),))
    ValueError: segments: expected rows of one document
Sharding((0, 4), 4, ((Segment(1, 0, 4),),))
    ValueError: segments: expected rows of one document, or of none (-1), got Segment(document=1
Sharding((0, 4), 4, ((Segment(-2, 0, 4),),))
    ValueError: segments: expected rows of one document, or of none (-1), got Segment(document=-2
Sharding.balanced([0, 4], 2, total=4.5)
    TypeError: total: expected None or an int, got 4.5
Sharding((0, 2, 4), 4, ((Segment(1, 2, 4), Segment(0, 0, 2)),))
    ValueError: segments: expected those of rank 0 in order
Sharding((0, 5, 4), 4, ((Segment(0, 0, 4),),))
    ValueError: cu_seqlens: expected offsets from 0 to 4
Sharding((0, 4), 4, [(0, 0, 4)])
    TypeError: segments: expected (document, ... a sequence a rank, got 0
Sharding((0, 4), 4, [[(0, 4)]])
    TypeError: segments: expected ... got (0, 4)
Sharding((0, 4), 4, None)
    TypeError: segments: expected a sequence, got None
Sharding.balanced([0, 4], 2, window_sizes=5)
    TypeError: window_sizes: expected a sequence, got 5
Sharding((0, 4), 4, [[(0, 0, 4)]], None, [0.5])
    TypeError: seqused_k: expected ... of ints, ... [0.5]
HALVES.area(0, cu_seqlens_k=[4])
    ValueError: cu_seqlens_k: expected 2 offsets, got 1
Sharding.balanced([0, 4], 2, window_size=None, window_sizes=[(3, 0)])
    TypeError: window_size: expected a pair
Sharding.contiguous([0, 4], 0)
    ValueError: num_ranks: expected at least 1, got 0
Sharding.contiguous([0, 4], 2.5)
    TypeError: num_ranks: expected an int, got 2.5
Sharding.contiguous([0, 5, 4], 2)
    ValueError: cu_seqlens: expected offsets from 0 to 4
Sharding.balanced([0, 4], 2, total=3)
    ValueError: cu_seqlens: expected offsets from 0 to 3
Sharding.balanced([], 2)
    ValueError: cu_seqlens: expected the offset of each
Sharding.balanced(None, 2)
    TypeError: cu_seqlens: expected a sequence of ints, ... got None
Sharding.balanced([0, 20.5], 2)
    TypeError: cu_seqlens: expected a sequence of ints, ... 20.5
Sharding.balanced(torch.tensor([[0, 4]]), 2)
    TypeError: cu_seqlens: expected a sequence of ints, or a tensor (n,) of them, got torch.int64 of shape (1, 2)
Sharding.balanced([0, 4], 2, seqused_k=torch.ones(1))
    TypeError: seqused_k: ... of ints
gather(FOUR, Sharding.balanced([0, 4], 1))
    ValueError: group: expected one that this process is in, got none: torch.distributed.init_process_group comes first
Sharding.balanced([0, 4], 2, cu_seqlens_k=[0, 1, 2])
    ValueError: cu_seqlens_k: expected 2 offsets, got 3
Sharding.balanced([0, 4], 2, window_sizes=[])
    ValueError: window_sizes: expected at least one, ... got 0 and
Sharding.balanced([0, 4], 2, window_size=(3, 0), window_sizes=[(None, 0)])
    ValueError: window_sizes: expected ... no window_size beside them, got 1 and window_size (3, 0)
Sharding.balanced([0, 4], 2, seqused_q=[5])
    ValueError: seqused_q: expected 0 to 4 rows of document 0, got 5
Sharding.balanced([0, 4], 2, seqused_k=[1, 2])
    ValueError: seqused_k: expected 1 lengths, got 2
HALVES.shard(torch.zeros(5), 0)
    ValueError: x: expected 4 rows in dimension 0
HALVES.shard(FOUR, 2)
    ValueError: rank: expected 0 to 1, got 2
HALVES.positions(-1)
    ValueError: rank: expected 0 to 1, got -1
HALVES.unshard([torch.zeros(2)])
    ValueError: shards: expected 2, one a rank, got 1
HALVES.unshard([torch.zeros(2), torch.zeros(3)])
    ValueError: shards: expected 2 rows in dimension 0 of rank 1
HALVES.positions(None)
    TypeError: rank: expected an int, got None
HALVES.shard([0, 1, 2, 3], 0)
    TypeError: x: expected a tensor, got list
HALVES.shard(FOUR, 0, None)
    TypeError: x: expected an int as its dimension of rows, got None
HALVES.shard(FOUR, 0, 1)
    ValueError: x: expected a dimension 1 of rows, got shape (4,)
HALVES.unshard(None)
    TypeError: shards: expected a sequence of tensors, got NoneType
HALVES.unshard([FOUR[:2], None])
    TypeError: shards[1]: expected a tensor, got NoneType
HALVES.unshard(FOUR.split(2), -2)
    ValueError: shards[0]: expected a dimension -2 of rows
HALVES.unshard([FOUR[:2], FOUR[2:].double()])
    ValueError: shards: expected all to be alike ... (2,) of torch.float64 on cpu of rank 1, and ... torch.float32
HALVES.unshard([FOUR[:2], FOUR[2:].to("meta")])
    ValueError: shards: expected all to be alike
HALVES.unshard([FOUR[:2], FOUR[2:, None]])
    ValueError: shards: expected all to be alike
"""


@refusals(REFUSED)
def test_errors_say_what_was_expected(call: str, error: str) -> None:
    assert_refused(call, error, globals() | {"gather": gather})


def test_layouts_of_any_sequences() -> None:
    """Lists, tensors and NumPy's ints are what tuples of ints are, also to ranks that compare them."""
    one = Sharding((0, 4), 4, ((Segment(0, 0, 1),), (Segment(0, 1, 4),)), (3,))
    untyped: Any = Sharding
    other = untyped(torch.tensor([0, 4]), np.int64(4), [[[0, 0, 1]], [np.array([0, 1, 4])]], [np.int32(3)])
    assert (repr(other), layout_of(other)) == (repr(one), layout_of(one))


def test_copies_are_of_their_own() -> None:
    """Processes that load data make copies for the one that trains."""
    sharding = Sharding.balanced([0, 5, 12], 2, causal=True)
    sharding.plans["layer"] = "a plan"
    copy = pickle.loads(pickle.dumps(sharding))
    assert (copy.cu_seqlens, copy.total, copy.segments) == (sharding.cu_seqlens, sharding.total, sharding.segments)
    assert not copy.plans
    assert of_handle(copy.handle) is copy
    assert of_handle(sharding.handle) is sharding
