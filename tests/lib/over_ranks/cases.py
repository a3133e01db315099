"""Calls that are spread over ranks, what every rank should get of them, and ways to lay rows out."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.distributed import (
    Segment,
    Sharding,
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    rank_of,
)


@dataclass
class Case:
    """An attention over all rows."""

    lengths_q: list[int]
    lengths_k: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    used_q: list[int] | None = None
    used_k: list[int] | None = None
    nheads: int = 4
    nheads_k: int = 2
    d: int = 8
    d_v: int = 8
    sink: bool = False
    through_lse: bool = False
    dense: bool = False  # then all lengths are the same
    padding: int = 0  # rows behind the last document


@dataclass
class Leaves:
    """All rows of a case, and the gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype = torch.float64) -> "Leaves":
        """Random ones, packed, NaN in rows of no document; the same in every process that has drawn as often."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64).to(dtype)

        total_q, total_k = sum(case.lengths_q) + case.padding, sum(case.lengths_k) + case.padding
        leaves = cls(
            q=normal(total_q, case.nheads, case.d),
            k=normal(total_k, case.nheads_k, case.d),
            v=normal(total_k, case.nheads_k, case.d_v),
            sink=normal(case.nheads) if case.sink else None,
            dout=normal(total_q, case.nheads, case.d_v),
            dlse=torch.randn(case.nheads, total_q, dtype=torch.promote_types(dtype, torch.float32)),
        )
        real_q, real_k = (
            _real(lengths, used, x.shape[0])
            for lengths, used, x in (
                (case.lengths_q, case.used_q, leaves.q),
                (case.lengths_k, case.used_k, leaves.k),
            )
        )
        for x, real in ((leaves.q, real_q), (leaves.k, real_k), (leaves.v, real_k), (leaves.dout, real_q)):
            x[~real] = torch.nan
        leaves.dlse[:, ~real_q] = torch.nan
        for leaf in (leaves.q, leaves.k, leaves.v, leaves.sink):
            if leaf is not None:
                leaf.requires_grad_()
        return leaves

    def own(self, sharding: Sharding, *, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of q, k and v, packed, in the group of all."""
        rank = rank_of(None)
        q, k, v = (sharding.shard(x.detach(), rank).requires_grad_(grad) for x in (self.q, self.k, self.v))
        return q, k, v


def _real(lengths: list[int], used: list[int] | None, total: int) -> Tensor:
    real = torch.zeros(total, dtype=torch.bool)
    start = 0
    for length, count in zip(lengths, lengths if used is None else used, strict=True):
        real[start : start + count] = True
        start += length
    return real


def alone(case: Case, leaves: Leaves) -> dict[str, Tensor]:
    """Results of one process for all rows."""
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (case.lengths_q, case.lengths_k)
    )
    used: dict[str, Any] = {
        name: None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        for name, lengths in (("seqused_q", case.used_q), ("seqused_k", case.used_k))
    }
    longest = max(case.lengths_q, default=0), max(case.lengths_k, default=0)
    given: dict[str, Any] = {"learnable_sink": leaves.sink, "return_lse": True, **used, **case.options}
    results = flash_attn_varlen_func(leaves.q, leaves.k, leaves.v, cu_q, cu_k, *longest, **given)
    return differentiated(case, leaves, *results)


def together(
    case: Case, leaves: Leaves, sharding: Sharding, sharding_k: Sharding | None, **where: Any
) -> dict[str, Tensor]:
    """Results of a group for this rank's rows; of the sink's gradient the sum over the ranks."""
    keys = sharding if sharding_k is None else sharding_k
    rank = rank_of(where.get("group"))
    q, k, v, dout = (
        own_rows(case, x.detach(), of, rank).clone()
        for x, of in ((leaves.q, sharding), (leaves.k, keys), (leaves.v, keys), (leaves.dout, sharding))
    )
    dlse = sharding.shard(leaves.dlse.unflatten(1, (len(case.lengths_q), -1)) if case.dense else leaves.dlse, rank, -1)
    dlse = dlse.transpose(0, 1) if case.dense else dlse
    sink = None if leaves.sink is None else leaves.sink.detach().clone().requires_grad_()
    own = Leaves(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), sink, dout, dlse)
    attend: Callable[..., Any] = context_parallel_attn_func if case.dense else context_parallel_attn_varlen_func
    given: dict[str, Any] = {"seqused_q": case.used_q, "seqused_k": case.used_k, "return_lse": True, **case.options}
    results = differentiated(case, own, *attend(q, k, v, sharding, sharding_k, learnable_sink=sink, **given, **where))
    if sink is not None:
        dist.all_reduce(results["dsink"])
    return results


def own_rows(case: Case, x: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """A rank's rows of (total, ...), of a dense batch (batch, rows, ...)."""
    return sharding.shard(x.unflatten(0, (len(case.lengths_q), -1)), rank, 1) if case.dense else sharding.shard(x, rank)


def differentiated(
    case: Case, leaves: Leaves, out: Tensor, lse: Tensor, max_logits: Tensor | None = None
) -> dict[str, Tensor]:
    """Out, lse and max_logits, if there are any, and the gradients of the leaves."""
    named = {"dq": leaves.q, "dk": leaves.k, "dv": leaves.v, "dsink": leaves.sink}
    wanted = {name: x for name, x in named.items() if x is not None}
    given = [(out, leaves.dout), (lse, leaves.dlse)] if case.through_lse else [(out, leaves.dout)]
    grads = torch.autograd.grad([x for x, _ in given], list(wanted.values()), [grad for _, grad in given])
    results = {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}
    if max_logits is not None:
        assert not max_logits.requires_grad
        results["max_logits"] = max_logits
    return results


def expected_here(
    case: Case, expected: dict[str, Tensor], sharding: Sharding, sharding_k: Sharding | None, rank: int
) -> dict[str, Tensor]:
    """A rank's rows of what one process gives."""
    found = {}
    for name, x in expected.items():
        of = sharding_k if name in ("dk", "dv") and sharding_k is not None else sharding
        if name == "lse":
            found[name] = own_rows(case, x.transpose(0, 1), of, rank).transpose(-1, -2)
        else:
            found[name] = x if name in ("dsink", "max_logits") else own_rows(case, x, of, rank)
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    """Each result to 1e-10, infinities where they are expected."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].shape == x.shape, f"{name} of {what}: {tuple(got[name].shape)}, expected {tuple(x.shape)}"
        error = (got[name] - x).masked_fill(got[name] == x, 0).abs().max().item() if x.numel() else 0.0
        assert error <= 1e-10, f"{name} of {what}: off by {error}"  # NaN fails, too


def shardings(case: Case, draw: random.Random, num_ranks: int) -> Iterator[tuple[str, Sharding, Sharding | None]]:
    """Layouts of queries and of keys, if theirs is another."""
    lengths_q, lengths_k = (case.lengths_q[:1], case.lengths_k[:1]) if case.dense else (case.lengths_q, case.lengths_k)
    cu_q, cu_k = [0, *accumulate(lengths_q)], [0, *accumulate(lengths_k)]
    total_q, total_k = cu_q[-1] + case.padding, cu_k[-1] + case.padding
    mask = {name: case.options[name] for name in ("causal", "window_size") if name in case.options}
    used: dict[str, Any] = {} if case.dense else {"seqused_q": case.used_q, "seqused_k": case.used_k}
    balanced = Sharding.balanced(cu_q, num_ranks, cu_seqlens_k=cu_k, total=total_q, **used, **mask)
    along = None if cu_q == cu_k else Sharding.contiguous(cu_k, num_ranks, total=total_k)
    yield "balanced", balanced, along
    yield "contiguous", Sharding.contiguous(cu_q, num_ranks, total=total_q), along
    yield "random", scattered(cu_q, total_q, num_ranks, draw), scattered(cu_k, total_k, num_ranks, draw)


def scattered(cu: list[int], total: int, num_ranks: int, draw: random.Random) -> Sharding:
    """Runs of any length on any ranks; some ranks have no rows."""
    segments: list[list[Segment]] = [[] for _ in range(num_ranks)]
    allowed = draw.sample(range(num_ranks), draw.randint(1, num_ranks))
    spans = [(document, start, stop) for document, (start, stop) in enumerate(pairwise(cu))]
    for document, start, stop in [*spans, (-1, 0, cu[0]), (-1, cu[-1], total)]:
        while start < stop:
            end = min(stop, start + draw.choice([1, 5, 20, 100]))
            segments[draw.choice(allowed)].append(Segment(document, start, end))
            start = end
    return Sharding(tuple(cu), total, tuple(map(tuple, segments)))


def cases(draw: random.Random) -> Iterator[Case]:
    """Every feature in turn, on documents of random lengths."""
    documents = [draw.choice([0, 1, 3, draw.randint(1, 40), draw.randint(20, 90)]) for _ in range(6)]
    longer = [length + draw.randint(0, 30) for length in documents]
    yield Case([97], [97], {"causal": True})
    yield Case([64], [64], {})
    yield Case(documents, documents, {"causal": True, "return_max_logits": True}, padding=5)
    yield Case(documents, longer, {"causal": True}, through_lse=True)
    yield Case(longer, documents, {"causal": True}, sink=True, d_v=16)
    softcap = {"softcap": 2.0, "softmax_scale": 0.7, "return_max_logits": True}
    yield Case(longer, documents, softcap, through_lse=True)
    yield Case(longer, longer, {"causal": True, "window_size": (draw.randint(0, 40), None)}, sink=True)
    window = {"window_size": (draw.randint(0, 30), draw.randint(0, 30)), "return_max_logits": True}
    yield Case(longer, longer, window, nheads=8, nheads_k=1)
    yield Case(longer, documents, {"window_size": (None, draw.randint(0, 10))}, nheads=8, nheads_k=8, through_lse=True)
    yield Case(documents, longer, {"window_size": (draw.randint(0, 10), None), "deterministic": True})
    used_q, used_k = ([draw.randint(0, length) for length in lengths] for lengths in (documents, longer))
    yield Case(
        documents,
        longer,
        {"causal": True, "return_max_logits": True},
        used_q,
        used_k,
        sink=True,
        through_lse=True,
        padding=3,
    )
    yield Case([50] * 3, [50] * 3, {"causal": True}, dense=True, sink=True, through_lse=True)
    yield Case([40] * 2, [60] * 2, {"window_size": (9, 3), "return_max_logits": True}, [31, 0], [60, 22], dense=True)
    yield Case([], [], {"causal": True, "return_max_logits": True}, padding=4)
    yield Case([0, 3], [0, 3], {"causal": True})


DOCUMENTS = [70, 3, 41, 0, 14]
PACKED = Case(DOCUMENTS, DOCUMENTS, {"causal": True})
WAYS: list[dict[str, Any]] = [{"method": "all_gather"}, {"method": "ring"}, {"method": "all_to_all"}]


def balanced(num_ranks: int) -> Sharding:
    return Sharding.balanced([0, *accumulate(DOCUMENTS)], num_ranks, causal=True)
