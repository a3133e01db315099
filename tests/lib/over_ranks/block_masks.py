"""Block masks over several ranks."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.distributed import Sharding, context_parallel_attn_func, context_parallel_attn_varlen_func
from tests.lib.over_ranks.cases import DOCUMENTS, Case, Leaves, alone, assert_same, expected_here, shardings, together
from tests.lib.refusals import assert_refused, pairs


def block_masks() -> None:
    """Over all rows, packed and dense, with what else a call may have; without a message if a rank cannot serve it."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    draw, total = random.Random(0), sum(DOCUMENTS)
    rows = torch.arange(total) // 3 % 2 == 0
    mask = BlockMask.from_dense((rows[:, None] | rows)[None, None]) & BlockMask.window(total, total, left=50)
    used = [draw.randint(0, length) for length in DOCUMENTS]
    ways: list[dict[str, Any]] = [{"method": "auto"}, {"method": "all_to_all"}]
    ways += [{"group": init_device_mesh("cpu", (1, num_ranks))}, {"group": init_device_mesh("cpu", (num_ranks,))}]
    masked = {"block_mask": mask, "causal": True}
    for case in (
        Case(DOCUMENTS, DOCUMENTS, masked | {"return_max_logits": True}, sink=True, through_lse=True),
        Case(
            DOCUMENTS, DOCUMENTS, {"block_mask": mask, "deterministic": True}, used, used, d_v=16, nheads=8, nheads_k=8
        ),
    ):
        leaves = Leaves.of(case)
        expected = alone(case, leaves)
        assert not torch.equal(expected["out"], alone(replace(case, options={}), leaves)["out"])
        for layout, sharding, sharding_k in shardings(case, draw, num_ranks):
            for way in ways:
                got = together(case, leaves, sharding, sharding_k, **way)
                assert_same(got, expected_here(case, expected, sharding, sharding_k, rank), (case, layout, way))
    assert recalled(leaves, sharding, mask)

    # A batch with a mask for each entry, and keys of other rows.
    visible = torch.rand(2, 1, 40, 60) < 0.5
    batched, shared = BlockMask.from_dense(visible), [torch.randn(2, n, 4, 8).double() for n in (40, 60, 60)]
    whole = [x.clone().requires_grad_() for x in shared]
    out, lse = flash_attn_func(
        *whole, seqused_k=torch.tensor([60, 31], dtype=torch.int32), mask=visible, return_lse=True
    )
    given: Any = (Sharding.contiguous([0, 40], num_ranks), Sharding.contiguous([0, 60], num_ranks))
    own = [given[i > 0].shard(x, rank, 1).requires_grad_() for i, x in enumerate(shared)]
    attend: Callable[..., Any] = context_parallel_attn_func
    out_here, lse_here = attend(*own, *given, seqused_k=[60, 31], block_mask=batched, return_lse=True)
    for x, x_here, of, dim in ((out, out_here, given[0], 1), (lse, lse_here, given[0], 2)):
        torch.testing.assert_close(of.shard(x, rank, dim), x_here, rtol=0, atol=1e-10)
    grads, grads_here = (torch.autograd.grad(x.sin().sum(), y) for x, y in ((out, whole), (out_here, own)))
    for i, (x, x_here) in enumerate(zip(grads, grads_here, strict=True)):
        torch.testing.assert_close(given[i > 0].shard(x, rank, 1), x_here, rtol=0, atol=1e-10)

    # NaN in rows of no document reaches no rank.
    ids = [torch.arange(n) // 7 for n in (40, 60)]
    for x in ids:
        x[x == 3] = -1
    poisoned = [x.masked_fill((ids[i > 0] < 0)[:, None, None], torch.nan) for i, x in enumerate(shared)]
    own = [given[i > 0].shard(x, rank, 1).requires_grad_() for i, x in enumerate(poisoned)]
    out_here = attend(*own, *given, block_mask=BlockMask.documents(*ids))
    padding = [given[i > 0].shard(ids[i > 0] < 0, rank, 0) for i in range(3)]
    dout = torch.ones_like(out_here).masked_fill(padding[0][:, None, None], torch.inf)
    for x, rows in zip((out_here, *torch.autograd.grad(out_here, own, dout)), (padding[0], *padding), strict=True):
        assert x.isfinite().all()
        assert (x[:, rows] == 0).all()

    q, k, v = leaves.own(sharding, grad=False)
    later = Sharding.contiguous([5, total], num_ranks)
    heads = BlockMask.from_dense(torch.ones(1, 8, total, total, dtype=torch.bool))
    chosen = BlockMask.from_selection(torch.zeros(total, 1, 2, dtype=torch.int32), block=64, seqlen_k=total)
    refused = REFUSED
    if num_ranks > 1:
        refused += """
attend(q[:, :3], k[:, :1], v[:, :1], sharding, block_mask=mask)
    ValueError: ... block_mask: expected None where ranks cannot trade
"""
    if num_ranks == 4:
        refused += """
attend(q, k, v, sharding, block_mask=mask, group=init_device_mesh("cpu", (2, 2)))
    ValueError: ... group: expected one dimension ... 2 x 2 ranks
"""
    for call, error in pairs(refused):
        assert_refused(call, error, globals() | locals() | {"attend": context_parallel_attn_varlen_func})


REFUSED = """
attend(q, k, v, sharding, block_mask=mask, method="ring")
    ValueError: ... method: expected 'auto' or 'all_to_all' with a block_mask
attend(q, k, v, sharding, block_mask=heads)
    ValueError: ... block_mask: expected one for all heads, ... of 8 heads
attend(q, k, v, sharding, block_mask=chosen)
    ValueError: ... block_mask: expected one of blocks of queries over ranks, got key blocks selected per query
attend(q, k, v, sharding, block_mask=rows)
    TypeError: ... block_mask: expected a flash_attn_cute.BlockMask
attend(q, k, v, sharding, block_mask=BlockMask.causal(9, 9))
    ValueError: ... block_mask: expected one over
attend(q, k, v, sharding, block_mask=mask, seqused_q=[99] * 5)
    ValueError: ... seqused_q: expected 0 to 70 rows of document 0
attend(*torch.zeros(3, later.num_rows(rank), 8, 8), later, block_mask=mask)
    ValueError: ... block_mask: expected None where rows before the first document
"""


def recalled(leaves: Leaves, sharding: Sharding, mask: BlockMask) -> bool:
    """Whether gradients under a block mask stay as they are by checkpointing, and by compiling what is around it."""
    q, k, v = (x.nan_to_num().requires_grad_() for x in leaves.own(sharding, grad=False))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attn_varlen_func(q.sin(), k, v, sharding, block_mask=mask).cos()

    outs = (
        attend(q, k, v),
        checkpoint(attend, q, k, v, use_reentrant=False),
        torch.compile(attend, backend="aot_eager")(q, k, v),
    )
    expected, *found = (torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in outs)
    return all(map(torch.equal, [*expected] * len(found), itertools.chain.from_iterable(found)))
