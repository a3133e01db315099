"""Other meshes beside that of context parallelism, and groups of which some have nothing to do."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.distributed import (
    Sharding,
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    gather,
    rank_of,
)
from flash_attn_cute.distributed.process_groups import Transfer
from tests.lib.over_ranks.cases import PACKED, WAYS, Case, Leaves, together


class Block(nn.Module):
    """Attention of packed rows (rows, 16) between projections that each have a layer, as parallel styles want them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, heads * 8, dtype=torch.float64) for heads in (4, 2, 2))
        self.outputs = nn.Linear(4 * 8, 16, dtype=torch.float64)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Rows of shape (rows, 16)."""
        q, k, v = (project(x).unflatten(1, (-1, 8)) for project in (self.q, self.k, self.v))
        return x + self.outputs(attend(q, k, v).flatten(1))


def other_meshes() -> None:
    """FSDP over the ranks of data and context together, and tensor parallelism beside context parallelism."""
    cu, longest = torch.tensor(PACKED.offsets, dtype=torch.int32), max(PACKED.lengths)
    batches = torch.randn(2, int(cu[-1]), 16, dtype=torch.float64)
    model, sharding = nn.Sequential(Block(), Block()), PACKED.sharding(2)

    def loss(blocks: Any, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        for block in blocks:
            x = block(x, attend)
        return x.square().sum() / batches.numel()

    def on_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

    expected = copy.deepcopy(model)
    for x in batches:
        loss(expected, x, on_one).backward()

    def over(mesh: DeviceMesh) -> tuple[Callable[..., Tensor], int]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return context_parallel_attn_varlen_func(q, k, v, sharding, causal=True, group=mesh["context"])

        return attend, mesh.get_local_rank("context")

    def assert_as_expected(found: nn.Module) -> None:
        for (name, x), y in zip(found.named_parameters(), expected.parameters(), strict=True):
            assert isinstance(x.grad, DTensor), name
            torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=0, atol=1e-10)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    everyone = mesh["data", "context"]._flatten("everyone")
    shards = copy.deepcopy(model)
    for module in (*shards, shards):
        fully_shard(module, mesh=everyone)
    attend, rank = over(mesh)
    x = sharding.shard(batches[mesh.get_local_rank("data")], rank)
    (loss(shards, x, attend) * everyone.size()).backward()  # of whose gradients FSDP takes the mean
    assert_as_expected(shards)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    parts = copy.deepcopy(model)
    styles = {**dict.fromkeys("qkv", ColwiseParallel()), "outputs": RowwiseParallel()}
    for block in parts:
        parallelize_module(block, mesh["tensor"], styles)
    attend, rank = over(mesh)
    for x in batches:
        loss(parts, sharding.shard(x, rank), attend).backward()
    for y in parts.parameters():
        assert isinstance(y.grad, DTensor)
        dist.all_reduce(y.grad.to_local(), group=mesh.get_group("context"))
    assert_as_expected(parts)

    # Their placements do not say which rows a rank has.
    q = DTensor.from_local(torch.zeros(sharding.num_rows(rank), 2, 8), mesh["tensor"], [Shard(1)])
    with pytest.raises(TypeError, match=r"k: expected a plain tensor .* placements \(Shard\(dim=1\),\); .* to_local"):
        attend(q.to_local(), q, q.to_local())


def rows_come_together() -> None:
    """Gathering from groups and meshes."""
    size = dist.get_world_size()
    sharding = Sharding.balanced([2, 30, 37], size, total=41, causal=True)
    x = torch.randn(3, 41, 2)
    for group in (None, init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))):
        mine = sharding.shard(x, rank_of(group), dim=1).requires_grad_()
        whole = gather(mine, sharding, group, dim=1)
        assert whole.equal(x)
        assert not whole.requires_grad
        for kind in (torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64):
            other = x.to(kind)
            whole = gather(sharding.shard(other, rank_of(group), dim=1), sharding, group, dim=1)
            assert whole.dtype == kind
            assert whole.contiguous().view(torch.uint8).equal(other.view(torch.uint8)), kind


def nothing_to_do() -> None:
    """No rows on some ranks, on any, in any entry of a batch, and no entries."""
    rank, size = dist.get_rank(), dist.get_world_size()
    attend: Callable[..., Any] = context_parallel_attn_varlen_func
    for cu in ([0], [0, 0], [0, 1]):
        sharding = Sharding.balanced(cu, size)
        for way in WAYS:
            x = torch.randn(sharding.num_rows(rank), 4, 8, requires_grad=True)
            out = attend(x, x, x, sharding, **way)
            assert out.equal(x)  # one key's value, if any
            # Scores have a gradient of nothing, but for rounding of what it is the difference of.
            torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))
    attend, sharding = context_parallel_attn_func, Sharding.balanced([0, 5 * size], size)
    for way, batch in product(WAYS, (0, 1)):
        x = torch.randn(batch, 5, 4, 8, requires_grad=True)
        out, lse = attend(x, x, x, sharding, return_lse=True, **way)
        assert (out.shape, lse.shape) == (x.shape, (batch, 4, 5))
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def neighbours() -> None:
    """Under a window no rank hears of any but those next to it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case = Case([40 * size], {"causal": True, "window_size": (30, None)})
    leaves, sharding = Leaves.of(case), Sharding.contiguous([0, 40 * size], size)
    peers: set[int] = set()

    class Recorded(Transfer):
        def __init__(self, group: Any, sends: Any, receives: Any) -> None:
            peers.update(peer for x, peer in (*sends, *receives) if x.numel())
            super().__init__(group, sends, receives)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "ring"):
            patch.setattr(f"flash_attn_cute.distributed.{name}.Transfer", Recorded)
        for way in WAYS[:2]:
            peers.clear()
            together(case, leaves, sharding, **way)
            assert peers == {rank - 1, rank + 1} & set(range(size)), way
