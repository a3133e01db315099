"""Block masks over several ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flash_attn_cute import BlockMask
from flash_attn_cute.distributed import Sharding, context_parallel_attn_func, context_parallel_attn_varlen_func
from tests.lib.over_ranks.cases import PACKED, Leaves
from tests.lib.refusals import assert_refused, pairs


def block_masks() -> None:
    """NaN in rows of no document reaches no rank; and what is refused, without a message."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    lengths = (40, 60)
    given: Any = tuple(Sharding.contiguous([0, n], num_ranks) for n in lengths)
    ids = [torch.arange(n) // 7 for n in lengths]
    for x in ids:
        x[x == 3] = -1
    whole = [torch.randn(2, lengths[i > 0], 4, 8).double() for i in range(3)]
    poisoned = [x.masked_fill((ids[i > 0] < 0)[:, None, None], torch.nan) for i, x in enumerate(whole)]
    own = [given[i > 0].shard(x, rank, 1).requires_grad_() for i, x in enumerate(poisoned)]
    attend: Callable[..., Any] = context_parallel_attn_func
    out_here = attend(*own, *given, block_mask=BlockMask.documents(*ids))
    padding = [given[i > 0].shard(ids[i > 0] < 0, rank, 0) for i in range(3)]
    dout = torch.ones_like(out_here).masked_fill(padding[0][:, None, None], torch.inf)
    for x, rows in zip((out_here, *torch.autograd.grad(out_here, own, dout)), (padding[0], *padding), strict=True):
        assert x.isfinite().all()
        assert (x[:, rows] == 0).all()

    total, sharding = sum(PACKED.lengths), PACKED.sharding(num_ranks)
    q, k, v = Leaves.of(PACKED).own(sharding, grad=False)
    mask = BlockMask.window(total, total, left=50)
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
        grid = init_device_mesh("cpu", (2, 2))
        refused += """
attend(q, k, v, sharding, block_mask=mask, group=grid)
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
attend(q, k, v, sharding, block_mask=ids)
    TypeError: ... block_mask: expected a flash_attn_cute.BlockMask
attend(q, k, v, sharding, block_mask=BlockMask.causal(9, 9))
    ValueError: ... block_mask: expected one over
attend(q, k, v, sharding, block_mask=mask, seqused_q=[99] * 5)
    ValueError: ... seqused_q: expected 0 to 70 rows of document 0
attend(*torch.zeros(3, later.num_rows(rank), 8, 8), later, block_mask=mask)
    ValueError: ... block_mask: expected None where rows before the first document
"""
