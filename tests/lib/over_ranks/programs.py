"""Programs around a call: modules, compilers, operators; the example and the benchmark."""

import gc
import tempfile
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import over_ranks, work
from benchmarks.suites import context_parallel as suite
from examples import context_parallel as example_program
from flash_attn_cute import flash_attn_func
from flash_attn_cute.calls import flat_call
from flash_attn_cute.distributed import (
    Sharding,
    context_parallel,
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    gather,
)
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.process_groups import names_of
from flash_attn_cute.problem.spec import Options
from tests.lib.over_ranks.cases import PACKED, WAYS, Leaves


def second_derivatives() -> None:
    """Second derivatives are refused."""
    sharding = PACKED.sharding(dist.get_world_size())
    q, k, v = Leaves.of(PACKED).own(sharding)
    for way in WAYS:
        out = context_parallel_attn_varlen_func(q, k, v, sharding, causal=True, **way)
        (dq,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dq.sum().backward()


class Layer(nn.Module):
    """Attention over the ranks of a group, between two projections."""

    def __init__(self, group: Any, method: str, dense: bool, nheads_k: int) -> None:
        super().__init__()
        self.heads = 4, nheads_k, nheads_k
        self.inputs = nn.Linear(16, sum(self.heads) * 8, dtype=torch.float64)
        self.outputs = nn.Linear(4 * 8, 16, dtype=torch.float64)
        self.sink = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.group, self.method, self.dense = group, method, dense

    def forward(self, x: Tensor, sharding: Sharding) -> Tensor:
        """(rows, 16) or (batch, rows, 16)."""
        q, k, v = self.inputs(x).unflatten(-1, (-1, 8)).split(self.heads, -2)
        attend: Callable[..., Any] = context_parallel_attn_func if self.dense else context_parallel_attn_varlen_func
        given = {"causal": True, "softcap": 3.0, "learnable_sink": self.sink, "return_lse": True}
        out, lse = attend(q, k, v, sharding, group=self.group, method=self.method, **given)
        return self.outputs(out.flatten(-2)) + lse.sum(-2)[..., None]


def compiled() -> None:
    """In one graph and with the same bits, whatever the method; no batch is compiled for anew after the second one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ways: list[tuple[Any, str, bool, int]] = [
        (None, "all_gather", True, 2),
        (dist.group.WORLD, "ring", False, 4),
        (init_device_mesh("cpu", (size,)), "all_to_all", False, 1),
        (init_device_mesh("cpu", (size // 2, 2)), "auto", True, 2),
    ]
    for way in ways:
        torch._dynamo.reset()
        layer, counter = Layer(*way), CompileCounterWithBackend("aot_eager")
        step: Any = torch.compile(layer, backend=counter, fullgraph=True)
        for lengths in ([37, 0, 20], [50, 9], [30, 31, 1, 2], [77]):
            cu = [0, sum(lengths)] if way[2] else [0, *accumulate(lengths)]
            sharding = Sharding.balanced(cu, size, causal=True)
            x = torch.randn(*((2,) if way[2] else ()), sharding.num_rows(rank), 16, dtype=torch.float64)
            leaves = (x.requires_grad_(), *layer.parameters())
            found, expected = (
                (y.detach(), *torch.autograd.grad(y.sin().sum(), leaves))
                for y in (step(x, sharding), layer(x, sharding))
            )
            assert all(map(torch.equal, found, expected)), (way, lengths)
        assert counter.frame_count <= 2, way


def operators_are_sound() -> None:
    """Schemas, fakes and derivatives, by PyTorch's own checks."""
    sharding = Sharding.contiguous([0, 4, 9], 1)
    leaves = [torch.randn(9, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    options = flat_call.flat_options(Options(None, None, 0, 0.0, False, True), None)
    for sink, used in ((None, None), (torch.randn(4, dtype=torch.float64, requires_grad=True), torch.tensor([4, 3]))):
        flat = (*leaves, sink, sharding.handle, None, None, used, names_of(None), "ring", False, *options)
        torch.library.opcheck(torch.ops.flash_attn_cute.context_parallel, flat)
        out, lse, _ = torch.ops.flash_attn_cute.context_parallel(*flat)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in (out, lse, out.cos(), out[..., 0].T, *flat)]
        torch.library.opcheck(torch.ops.flash_attn_cute.context_parallel_backward, tuple(detached))


def compiled_without_a_sharding() -> None:
    """A compiled program keeps no sharding; it says so if the caller has not kept it."""
    x = torch.randn(10, 2, 8, requires_grad=True)
    step: Any = torch.compile(context_parallel_attn_varlen_func, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the first time compiling leaves cycles behind
        out = step(x, x, x, Sharding.contiguous([0, 10 * dist.get_world_size()], dist.get_world_size()))
        gc.collect()
    with pytest.raises(RuntimeError, match="Sharding of this compiled attention is gone"):
        out.sum().backward()


def compiled_in_context() -> None:
    """PyTorch's own attention, in a function that has been compiled outside before."""
    layer = nn.Linear(8, 24, dtype=torch.float64)

    def attend(x: Tensor) -> Tensor:
        q, k, v = layer(x).unflatten(-1, (3, 2, 4)).unbind(2)
        by_head = [y.transpose(1, 2) for y in (q, k, v)]
        inner = F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], is_causal=True).transpose(1, 2)
        return inner + flash_attn_func(q, k, v, causal=True, window_size=(7, None))

    torch._dynamo.reset()
    step: Any = torch.compile(attend, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 41, 8, dtype=torch.float64, requires_grad=True)
    expected = step(x)
    (grad,) = torch.autograd.grad(expected.sin().sum(), x)
    rows = x.detach().clone()
    with context_parallel(None, buffers=[rows], buffer_seq_dims=[1]) as sharding:
        mine = rows.requires_grad_()
        out = step(mine)
        (part,) = torch.autograd.grad(out.sin().sum(), mine)
        mine.requires_grad_(False)
    for got, whole in ((out, expected), (part, grad)):
        torch.testing.assert_close(gather(got, sharding, dim=1), whole, rtol=0, atol=1e-10)
    assert step(x).equal(expected)


def example() -> None:
    """Training on all ranks together, and on each alone."""
    chosen = example_program.options(["--steps", "3", "--tokens", "300", "--longest", "100"])
    torch.use_deterministic_algorithms(False)
    expected = None
    for rank in range(dist.get_world_size()):
        alone = dist.new_group([rank])
        if rank == dist.get_rank():
            expected = example_program.train(chosen, alone, torch.device("cpu"))
    together = example_program.train(chosen, None, torch.device("cpu"))
    assert together == pytest.approx(expected, rel=1e-4)
    assert len(set(together)) == 3


def benchmark() -> None:
    """The benchmark, which compares what contenders compute before it times them, on small inputs."""
    sizes = suite.Sizes((20,), 1, 48, 8, Shape(2, 2, 8, 8, 4))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setitem(work._GEMM_SIZE, "cpu", 64)
        patch.setitem(work._COPY_BYTES, "cpu", 1 << 16)
        ranks = dist.get_world_size()
        chosen = over_ranks.Chosen(ranks, sizes, 3, 0.1, "pack 0|full|window", Path(folder), None, on_gpu=False)
        reports = over_ranks.measure(chosen, torch.device("cpu"))
        assert [found.name.rpartition(", ")[2] for found in reports] == list(suite.PASSES) * 3
        for found in reports:
            assert set(found.times) >= {suite.ONE, suite.SHARE, *suite.METHODS}
            everyone: list[Any] = [None] * ranks
            dist.all_gather_object(everyone, found.times)
            assert all(times == found.times for times in everyone)


def backward_without_a_group() -> None:
    """A graph keeps no group; it says so if its own is gone."""
    sharding = PACKED.sharding(dist.get_world_size())
    q, k, v = Leaves.of(PACKED).own(sharding)
    for way in WAYS:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        gone = weakref.ref(group)
        out = context_parallel_attn_varlen_func(q, k, v, sharding, causal=True, group=group, **way)
        dist.destroy_process_group(group)
        del group
        assert gone() is None, way
        with pytest.raises(RuntimeError, match="process group of this attention has been destroyed"):
            out.sum().backward()
