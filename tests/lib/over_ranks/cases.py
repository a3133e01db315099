"""Packed calls that are spread over ranks, and what every rank should get of them."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.distributed import Sharding, context_parallel_attn_varlen_func, rank_of


@dataclass
class Case:
    """An attention over all rows of packed documents."""

    lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    nheads: int = 4
    nheads_k: int = 2
    d: int = 8
    sink: bool = False
    through_lse: bool = False
    padding: int = 0  # rows behind the last document

    @property
    def offsets(self) -> list[int]:
        """First rows of the documents, and the row behind the last one."""
        return [0, *accumulate(self.lengths)]

    def sharding(self, num_ranks: int) -> Sharding:
        """A layout in balance."""
        mask = {name: self.options[name] for name in ("causal", "window_size") if name in self.options}
        return Sharding.balanced(self.offsets, num_ranks, total=self.offsets[-1] + self.padding, **mask)


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
        """Random ones, NaN in rows of no document; the same in every process that has drawn as often."""
        end = case.offsets[-1]
        total = end + case.padding

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64).to(dtype)

        leaves = cls(
            q=normal(total, case.nheads, case.d),
            k=normal(total, case.nheads_k, case.d),
            v=normal(total, case.nheads_k, case.d),
            sink=normal(case.nheads).requires_grad_() if case.sink else None,
            dout=normal(total, case.nheads, case.d),
            dlse=torch.randn(case.nheads, total, dtype=torch.promote_types(dtype, torch.float32)),
        )
        for x in (leaves.q, leaves.k, leaves.v, leaves.dout, leaves.dlse.T):
            x[end:] = torch.nan
        for leaf in (leaves.q, leaves.k, leaves.v):
            leaf.requires_grad_()
        return leaves

    def own(self, sharding: Sharding, *, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of q, k and v in the group of all."""
        q, k, v = (sharding.shard(x.detach(), rank_of(None)).requires_grad_(grad) for x in (self.q, self.k, self.v))
        return q, k, v


def alone(case: Case, leaves: Leaves) -> dict[str, Tensor]:
    """Results of one process for all rows."""
    cu, longest = torch.tensor(case.offsets, dtype=torch.int32), max(case.lengths)
    given: dict[str, Any] = {"learnable_sink": leaves.sink, "return_lse": True, **case.options}
    out, lse = flash_attn_varlen_func(leaves.q, leaves.k, leaves.v, cu, cu, longest, longest, **given)
    return differentiated(case, leaves, out, lse)


def together(case: Case, leaves: Leaves, sharding: Sharding, **where: Any) -> dict[str, Tensor]:
    """Results of a group for this rank's rows; of the sink's gradient the sum over the ranks."""
    rank = rank_of(where.get("group"))
    q, k, v, dout = (sharding.shard(x.detach(), rank).clone() for x in (leaves.q, leaves.k, leaves.v, leaves.dout))
    sink = None if leaves.sink is None else leaves.sink.detach().clone().requires_grad_()
    dlse = sharding.shard(leaves.dlse, rank, -1)
    own = Leaves(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), sink, dout, dlse)
    given: dict[str, Any] = {"learnable_sink": sink, "return_lse": True, **case.options}
    out, lse = context_parallel_attn_varlen_func(q, k, v, sharding, **given, **where)
    results = differentiated(case, own, out, lse)
    if sink is not None:
        dist.all_reduce(results["dsink"])
    return results


def differentiated(case: Case, leaves: Leaves, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """Out and lse, and the gradients of the leaves."""
    named = {"dq": leaves.q, "dk": leaves.k, "dv": leaves.v, "dsink": leaves.sink}
    wanted = {name: x for name, x in named.items() if x is not None}
    given = [(out, leaves.dout), (lse, leaves.dlse)] if case.through_lse else [(out, leaves.dout)]
    grads = torch.autograd.grad([x for x, _ in given], list(wanted.values()), [grad for _, grad in given])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


def expected_here(expected: dict[str, Tensor], sharding: Sharding, rank: int) -> dict[str, Tensor]:
    """A rank's rows of what one process gives."""
    return {
        name: x if name == "dsink" else sharding.shard(x, rank, -1 if name == "lse" else 0)
        for name, x in expected.items()
    }


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    """Each result to 1e-10, infinities where they are expected."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].shape == x.shape, f"{name} of {what}: {tuple(got[name].shape)}, expected {tuple(x.shape)}"
        error = (got[name] - x).masked_fill(got[name] == x, 0).abs().max().item() if x.numel() else 0.0
        assert error <= 1e-10, f"{name} of {what}: off by {error}"  # NaN fails, too


PACKED = Case([70, 3, 41, 0, 14], {"causal": True})
WAYS: list[dict[str, Any]] = [{"method": "all_gather"}, {"method": "ring"}, {"method": "all_to_all"}]
