"""Gradients under masks and block masks in the Blackwell backward kernels, executed on the CPU from their PTX."""

import random
from dataclasses import replace

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.sparsity import column_tables
from flash_attn_cute.sparsity.dq_order import launch_orders
from tests.lib import oracle
from tests.lib.checks import bitwise_equal, drawn, poisoned_dout
from tests.lib.interpreted.backward import Interpreted, check, execute
from tests.lib.interpreted.common import dense, packed
from tests.lib.masks import with_block_mask
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

# Lengths of q and k, and options; packed sequences and windows are intervals of a mask over all rows.
BLOCK_MASKS = {
    "d128": dense([200], [200], head_dim=128, nheads=1),
    "d128-packed": packed([130, 0, 60], [100, 40, 130], head_dim=128, nheads=1, window_size=(None, 30)),
    "d64-grouped": dense([140, 140], [200, 200], nheads=4, nheads_k=1),
    "d64-everything": packed([130, 1, 90], [200, 129, 0], softcap=5.0, sink=True, seqused=True, causal=True),
    "d192-dv128-window": dense([150], [200], head_dim=192, head_dim_v=128, window_size=(90, 20)),
    "d192": dense([200], [140], head_dim=192, nheads=1, dtype=torch.float16),
    "d256-everything": packed([90, 60], [100, 130], head_dim=256, nheads_k=1, causal=True, softcap=5.0),
}


def with_order(call: Call, draw: random.Random) -> Call:
    """The call with an order in which blocks of keys are launched, for all, or for each set of the mask."""
    mask, (nheads, nheads_k) = call.block_mask, (x.shape[-2] for x in (call.q, call.k))
    assert mask is not None
    group = nheads // nheads_k if mask.heads == nheads else 1
    if draw.random() < 0.5:
        return replace(call, block_mask=mask.with_order(draw.choice(launch_orders.NAMES), group=group))
    sets = draw.choice([1, mask.batch]), draw.choice([1, mask.heads // group])
    orders = torch.stack([torch.randperm(mask.sizes.blocks_k) for _ in range(sets[0] * sets[1])])
    return replace(call, block_mask=mask.with_order(orders.view(*sets, -1).int(), group=group))


@pytest.mark.parametrize("case", tiered(BLOCK_MASKS, rare=["d128-packed", "d192", "d256-everything"]))
def test_block_masks(case: str, fuzz_seconds: float) -> None:
    """Any kind of mask, first one that shows something, and any order of launches: turns come from tables."""
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = BLOCK_MASKS[case]()
        call = with_block_mask(call, draw, least=0.0 if count else 0.1)
        check(with_order(call, draw), Interpreted(draw), through_lse=count % 2 == 1)


@pytest.mark.slow
def test_keys_and_queries_that_see_nothing() -> None:
    """Blocks of fully masked keys, of one head or of all; fully masked queries."""
    visible = torch.ones(2, 2, 3, dtype=torch.bool)
    visible[:, :, 1] = visible[1, :, 0] = visible[0, 1] = False
    call = dense([140], [300], nheads_k=1)()
    shown = visible.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :140, :300]
    mask = BlockMask.from_blocks(visible[None], (128, 128), seqlen_q=140, seqlen_k=300)
    got = check(replace(call, block_mask=mask, shown=shown[None]), Interpreted(random.Random(0)))
    assert not got["dk"][:, 128:256].any()
    assert not got["dv"][:, 128:256].any()
    assert not got["dq"][:, 128:, 0].any()


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "order"), [(64, "auto"), (256, "permutation")])
def test_block_orders_that_do_not_ascend(head_dim: int, order: str) -> None:
    """Tiles of keys take blocks of queries as others hand them over, whole ones, and halves above d = 128.

    Whichever CTA takes which tile, the bits are the same.
    """
    visible = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(9)) < 0.5
    shown = visible.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :522, :524]
    shown[..., ::3, 5::7] = False  # halves of a block of queries have bits of their own
    mask = BlockMask.from_dense(shown).with_order(order)
    tables = mask.tables(torch.device("cpu"), backward=True)
    steps = column_tables.steps(tables.rows, mask.sizes) > 0
    ascending = steps.cumsum(2, dtype=torch.int16) - 1
    assert (column_tables.m_block_order_of(tables, mask.sizes) != ascending)[steps].any()
    call = replace(dense([522], [524], head_dim=head_dim, nheads=1)(), block_mask=mask, shown=shown)
    results = []
    for num_ctas in (1, 3):
        torch.manual_seed(0)  # of the gradient of out
        results.append(check(call, Interpreted(random.Random(num_ctas), num_ctas)))
    first, other = results
    assert all(bitwise_equal(first[name], other[name]) for name in first)


MASKS = {
    "d128-causal": dense([200], [300], head_dim=128, causal=True, mask=(1, 1)),
    "d64-packed": packed([150, 0, 60], [200, 100, 40], nheads=2, nheads_k=1, mask=(1, 1, 1), window_size=(9, 60)),
    "d64-shared": dense([140, 140], [140, 140], nheads_k=1, mask=(1, 0, 0, 1)),
    "d192-dv128": dense([70], [140], head_dim=192, head_dim_v=128, nheads=1, mask=(1, 1)),
    "d256-everything": packed([70, 1], [140, 0], head_dim=256, mask=(1, 1), softcap=5.0, sink=True, seqused=True),
    "d192-grouped": dense([60, 90], [140, 80], head_dim=192, seqused=True, mask=(1, 1, 1, 1), nheads_k=1),
}


def with_blocks_of(call: Call, draw: random.Random) -> Call:
    """The call with a mask that hides all of some blocks, and nothing of others."""
    assert call.mask is not None
    for value in (False, True):
        rows, keys = draw.choice([0, 64, 128]), draw.choice([0, 128])
        call.mask[..., rows : rows + 128, keys : keys + draw.choice([100, 128])] = value
    return call


@pytest.mark.parametrize(
    "case", tiered(MASKS, "d64-shared", rare=["d128-causal", "d64-packed", "d192-dv128", "d256-everything"])
)
def test_masks(case: str, fuzz_seconds: float) -> None:
    """Some blocks are EMPTY, others FULL, beside windows and the ends of sequences."""
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = MASKS[case]()
        check(with_blocks_of(call, draw), Interpreted(draw), through_lse=count % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block_mask", pytest.param("mask", marks=pytest.mark.rare)])
def test_schedules_give_the_same_bits(kind: str) -> None:
    """Lists and turns of a tile do not depend on which CTA takes which tile, or on which role is late."""
    if kind == "mask":
        call = with_blocks_of(dense([20], [140], head_dim=192, nheads_k=1, mask=(1, 1))(), random.Random(0))
    else:
        call = with_block_mask(dense([100], [300], nheads_k=1)(), random.Random(0), "causal")
    out, lse = oracle.attention(call.to(torch.float64))
    dout = poisoned_dout(call, out.to(call.q.dtype))
    first, other = (execute(call, Interpreted(random.Random(n), n), lse.detach().float(), dout, None) for n in (1, 3))
    assert all(bitwise_equal(first[name], other[name]) for name in first)
