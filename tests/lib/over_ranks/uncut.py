"""Documents that are not cut over ranks: the bits of a call of one process, if invariant."""

import random
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.distributed import Segment, Sharding, context_parallel_attn_varlen_func
from tests.lib.checks import bitwise_equal

OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window_size": (20, 5), "learnable_sink": torch.linspace(-1, 1, 8)},
    {"causal": True, "softcap": 2.0},
]
NAMES = ("out", "lse", "dq", "dk", "dv")


def uncut_documents() -> None:
    """Documents on any rank, beside others and beside one that is cut, by each method."""
    rank = dist.get_rank()
    for number in range(3):
        draw = random.Random(number)
        torch.manual_seed(number)  # all ranks draw the same
        cu = [0, *accumulate(draw.choice([1, 5, 40, 70, 130]) for _ in range(draw.randint(3, 6)))]
        tensors = [torch.randn(cu[-1], 8, 16) for _ in range(4)]  # q, k, v and the gradient of out
        sharding, cut = _drawn(cu, draw)
        for options in OPTIONS:
            expected = {}
            for segment in sharding.segments[rank]:
                if segment.document != cut:
                    alone = [x[segment.start : segment.stop] for x in tensors]
                    n = segment.stop - segment.start
                    offsets = torch.tensor([0, n], dtype=torch.int32)
                    expected[segment] = _results(flash_attn_varlen_func, alone, offsets, offsets, n, n, **options)
            for method in ("all_gather", "all_to_all", "auto"):
                own, attend = [sharding.shard(x, rank) for x in tensors], context_parallel_attn_varlen_func
                got = _results(attend, own, sharding, method=method, **options)
                for segment, row in zip(sharding.segments[rank], sharding.offsets(rank), strict=False):
                    rows = slice(row, row + segment.stop - segment.start)
                    for name, x, y in zip(NAMES, got, expected.get(segment, got), strict=True):
                        same = segment not in expected or bitwise_equal(x[rows].contiguous(), y.contiguous())
                        assert same, f"{name} of document {segment.document}, {method}, {options}"


def _drawn(cu: list[int], draw: random.Random) -> tuple[Sharding, int]:
    """Each document on a rank, and perhaps one on two; its number, or -1."""
    segments: list[list[Segment]] = [[] for _ in range(dist.get_world_size())]
    cut = draw.choice([-1, draw.randrange(len(cu) - 1)])
    for document, (start, stop) in enumerate(pairwise(cu)):
        middle = (start + stop) // 2
        if document == cut and middle > start:
            segments[0].append(Segment(document, start, middle))
            segments[-1].append(Segment(document, middle, stop))
        else:
            draw.choice(segments).append(Segment(document, start, stop))
    return Sharding(tuple(cu), cu[-1], tuple(map(tuple, segments))), cut


def _results(attend: Any, tensors: list[Tensor], *where: Any, **options: Any) -> tuple[Tensor, ...]:
    """Out, lse (rows, nheads), dq, dk and dv."""
    *leaves, dout = (x.detach().clone().requires_grad_() for x in tensors)
    out, lse = attend(*leaves, *where, **options, deterministic="invariant", return_lse=True)
    return out.detach(), lse.detach().T, *torch.autograd.grad(out, leaves, dout.detach())
