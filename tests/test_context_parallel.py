"""Attention over several ranks gives what one process gives."""

import copy
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from benchmarks import harness, work
from benchmarks.suites import context_parallel as suite
from examples import context_parallel as example_program
from flash_attn_cute import BlockMask, dispatch, flash_attn_func, flash_attn_varlen_func, ops
from flash_attn_cute.distributed import (
    Segment,
    Sharding,
    attention,
    context_parallel,
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    gather,
    model,
    rank_of,
)
from flash_attn_cute.distributed.groups import Place, Transfer, names_of
from flash_attn_cute.distributed.key_values import KeyValues
from flash_attn_cute.distributed.layout import Layout, side_by_side
from flash_attn_cute.distributed.parts import Call, Run, calls_of, is_shared, parts_of
from flash_attn_cute.distributed.passes import Context, prepared
from flash_attn_cute.distributed.sharding import Band
from flash_attn_cute.spec import Options
from tests import checks, oracle, ranks


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


def _real(lengths: list[int], used: list[int] | None, total: int) -> Tensor:
    real = torch.zeros(total, dtype=torch.bool)
    start = 0
    for length, count in zip(lengths, lengths if used is None else used, strict=True):
        real[start : start + count] = True
        start += length
    return real


def alone(case: Case, leaves: Leaves) -> dict[str, Tensor]:
    """What one process gives for all rows."""
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (case.lengths_q, case.lengths_k)
    )
    used: dict[str, Any] = {
        name: None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        for name, lengths in (("seqused_q", case.used_q), ("seqused_k", case.used_k))
    }
    longest = max(case.lengths_q, default=0), max(case.lengths_k, default=0)
    given: dict[str, Any] = {"learnable_sink": leaves.sink, "return_lse": True, **used, **case.options}
    out, lse = flash_attn_varlen_func(leaves.q, leaves.k, leaves.v, cu_q, cu_k, *longest, **given)
    return differentiated(case, leaves, out, lse)


def together(
    case: Case, leaves: Leaves, sharding: Sharding, sharding_k: Sharding | None, **where: Any
) -> dict[str, Tensor]:
    """What a group gives for this rank's rows; of the sink's gradient the sum over the ranks."""
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
    out, lse = attend(q, k, v, sharding, sharding_k, learnable_sink=sink, **given, **where)
    results = differentiated(case, own, out, lse)
    if sink is not None:
        dist.all_reduce(results["dsink"])
    return results


def own_rows(case: Case, x: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """A rank's rows of (total, ...), of a dense batch (batch, rows, ...)."""
    return sharding.shard(x.unflatten(0, (len(case.lengths_q), -1)), rank, 1) if case.dense else sharding.shard(x, rank)


def differentiated(case: Case, leaves: Leaves, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """Out and lse, and the gradients of the leaves."""
    named = {"dq": leaves.q, "dk": leaves.k, "dv": leaves.v, "dsink": leaves.sink}
    wanted = {name: x for name, x in named.items() if x is not None}
    given = [(out, leaves.dout), (lse, leaves.dlse)] if case.through_lse else [(out, leaves.dout)]
    grads = torch.autograd.grad([x for x, _ in given], list(wanted.values()), [grad for _, grad in given])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


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
            found[name] = x if name == "dsink" else own_rows(case, x, of, rank)
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
    for document, start, stop in [*spans, (-1, cu[-1], total)]:
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
    yield Case(documents, documents, {"causal": True}, padding=5)
    yield Case(documents, longer, {"causal": True}, through_lse=True)
    yield Case(longer, documents, {"causal": True}, sink=True, d_v=16)
    yield Case(longer, documents, {"softcap": 2.0, "softmax_scale": 0.7}, through_lse=True)
    yield Case(longer, longer, {"causal": True, "window_size": (draw.randint(0, 40), None)}, sink=True)
    yield Case(longer, longer, {"window_size": (draw.randint(0, 30), draw.randint(0, 30))}, nheads=8, nheads_k=1)
    yield Case(longer, documents, {"window_size": (None, draw.randint(0, 10))}, nheads=8, nheads_k=8, through_lse=True)
    yield Case(documents, longer, {"window_size": (draw.randint(0, 10), None), "deterministic": True})
    used_q, used_k = ([draw.randint(0, length) for length in lengths] for lengths in (documents, longer))
    yield Case(documents, longer, {"causal": True}, used_q, used_k, sink=True, through_lse=True, padding=3)
    yield Case([50] * 3, [50] * 3, {"causal": True}, dense=True, sink=True, through_lse=True)
    yield Case([40] * 2, [60] * 2, {"window_size": (9, 3)}, [31, 0], [60, 22], dense=True)
    yield Case([], [], {"causal": True}, padding=4)
    yield Case([0, 3], [0, 3], {"causal": True})


def every_case() -> None:
    """All cases, layouts and methods, on the ranks that there are."""
    num_ranks = dist.get_world_size()
    draw = random.Random(num_ranks)
    meshes = [init_device_mesh("cpu", (n, num_ranks // n)) for n in range(2, num_ranks) if num_ranks % n == 0]
    checked = 0
    for case in cases(draw):
        torch.manual_seed(num_ranks)
        leaves = Leaves.of(case)
        everything = alone(case, leaves)
        for layout, sharding, sharding_k in shardings(case, draw, num_ranks):
            ways: list[dict[str, Any]] = [{"method": "all_gather"}, {"method": "ring"}]
            if layout == "balanced":
                ways += [{"method": "auto"}, *({"method": "auto", "group": mesh} for mesh in meshes)]
            if layout == "random":
                ways += [{"method": "all_to_all"}, *({**way, "group": mesh} for way in ways[:2] for mesh in meshes)]
            for way in ways:
                if not refusal(case, num_ranks, way):
                    got = together(case, leaves, sharding, sharding_k, **way)
                    expected = expected_here(case, everything, sharding, sharding_k, rank_of(way.get("group")))
                    assert_same(got, expected, (case, layout, way))
                    checked += 1
    assert checked > 100


def refusal(case: Case, num_ranks: int, way: dict[str, Any]) -> bool:
    """Whether ranks cannot trade rows for heads."""
    size = num_ranks if way["method"] == "all_to_all" else way["group"].size(1) if "group" in way else 1
    return case.nheads % size != 0 or (case.nheads_k % size != 0 and size % case.nheads_k != 0)


DOCUMENTS = [70, 3, 41, 0, 14]
PACKED = Case(DOCUMENTS, DOCUMENTS, {"causal": True})
WAYS: list[dict[str, Any]] = [{"method": "all_gather"}, {"method": "ring"}, {"method": "all_to_all"}]


def balanced(num_ranks: int) -> Sharding:
    return Sharding.balanced([0, *accumulate(DOCUMENTS)], num_ranks, causal=True)


def block_masks() -> None:
    """Over all rows, packed and dense, with what else a call may have; without a message if a rank cannot serve it."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    draw, total = random.Random(0), sum(DOCUMENTS)
    rows = torch.arange(total) // 3 % 2 == 0
    mask = BlockMask.from_dense((rows[:, None] | rows)[None, None]) & BlockMask.window(total, total, left=50)
    used = [draw.randint(0, length) for length in DOCUMENTS]
    ways: list[dict[str, Any]] = [{"method": "auto"}, {"method": "all_to_all"}]
    ways += [{"group": init_device_mesh("cpu", (1, num_ranks))}, {"group": init_device_mesh("cpu", (num_ranks,))}]
    for case in (
        Case(DOCUMENTS, DOCUMENTS, {"block_mask": mask, "causal": True}, sink=True, through_lse=True),
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

    q, k, v = (sharding.shard(x.detach(), rank) for x in (leaves.q, leaves.k, leaves.v))
    later = Sharding.contiguous([5, total], num_ranks)
    heads = BlockMask.from_dense(torch.ones(1, 8, total, total, dtype=torch.bool))
    refused: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (
            (q, k, v, sharding),
            {"method": "ring"},
            ValueError,
            "method: expected 'auto' or 'all_to_all' with a block_mask",
        ),
        (
            (q, k, v, sharding),
            {"block_mask": heads},
            ValueError,
            "block_mask: expected one for all heads, .* of 8 heads",
        ),
        ((q, k, v, sharding), {"block_mask": rows}, TypeError, "block_mask: expected a flash_attn_cute.BlockMask"),
        ((q, k, v, sharding), {"block_mask": BlockMask.causal(9, 9)}, ValueError, "block_mask: expected one over"),
        (
            (q[:, :3], k[:, :1], v[:, :1], sharding),
            {},
            ValueError,
            "block_mask: expected None where ranks cannot trade",
        ),
        ((q, k, v, sharding), {"seqused_q": [99] * 5}, ValueError, "seqused_q: expected 0 to 70 rows of document 0"),
        (
            (*(torch.zeros(later.num_rows(rank), 8, 8) for _ in range(3)), later),
            {},
            ValueError,
            "block_mask: expected None where rows before the first document",
        ),
    ]
    if num_ranks == 1:
        refused = [x for x in refused if "cannot trade" not in x[-1]]
    if num_ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        refused.append(
            ((q, k, v, sharding), {"group": mesh}, ValueError, "group: expected one dimension .* 2 x 2 ranks")
        )
    for arguments, options, error, message in refused:
        with pytest.raises(error, match=message):
            context_parallel_attn_varlen_func(*arguments, **{"block_mask": mask, **options})


def recalled(leaves: Leaves, sharding: Sharding, mask: BlockMask) -> bool:
    """Whether gradients under a block mask stay as they are by checkpointing, and by compiling what is around it."""
    q, k, v = (
        sharding.shard(x.detach(), dist.get_rank()).nan_to_num().requires_grad_()
        for x in (leaves.q, leaves.k, leaves.v)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attn_varlen_func(q.sin(), k, v, sharding, block_mask=mask).cos()

    outs = (
        attend(q, k, v),
        checkpoint(attend, q, k, v, use_reentrant=False),
        torch.compile(attend, backend="aot_eager")(q, k, v),
    )
    expected, *found = (torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in outs)
    return all(map(torch.equal, [*expected] * len(found), itertools.chain.from_iterable(found)))


def low_precision() -> None:
    """Errors are those of low precision, and the same bits come out every time."""
    case = Case(DOCUMENTS, DOCUMENTS, {"causal": True, "deterministic": True}, sink=True, through_lse=True)
    for dtype in (torch.bfloat16, torch.float32):
        assert_precise_and_repeated(case, Leaves.of(case, dtype), repetitions=3)


def messages_of_two_dtypes() -> None:
    """Of a key's gradient some ranks have several parts, which they sum in float32, and others one, in bfloat16."""
    documents = [70, 230, 1, 211]
    options = {"causal": True, "window_size": (64, None), "deterministic": True}
    case = Case(documents, documents, options, sink=True, through_lse=True)
    sharding = next(sharding for _, sharding, _ in shardings(case, random.Random(0), dist.get_world_size()))
    layout = Layout.of(sharding, sharding, tuple(documents), tuple(documents), (64, 0))
    assert len({shares_keys(layout, rank) for rank in range(sharding.num_ranks)}) == 2
    assert_precise_and_repeated(case, Leaves.of(case, torch.bfloat16), repetitions=1)


def shares_keys(layout: Layout, rank: int) -> bool:
    """Whether several sequences of a rank's calls see the same key."""
    keys, _ = side_by_side(layout.needed_by(rank))
    return is_shared((part.k_start, part.k_stop) for part in parts_of(layout.queries_of(rank), keys, layout.bands))


def on_gpus() -> None:
    """The same with kernels and NCCL."""
    documents, device = [1800, 3, 700, 0, 1025], torch.device("cuda", dist.get_rank())
    for d, options in ((64, {}), (128, {"window_size": (300, None)}), (256, {"softcap": 20.0})):
        given: dict[str, Any] = {"causal": True, "deterministic": True, **options}
        case = Case(documents, documents, given, d=d, d_v=d, sink=True, through_lse=True, padding=70)
        leaves = Leaves.of(case, torch.bfloat16)
        for name, x in vars(leaves).items():
            setattr(leaves, name, x.detach().to(device).requires_grad_(x.requires_grad))
        assert_precise_and_repeated(case, leaves, repetitions=200)


def assert_precise_and_repeated(case: Case, leaves: Leaves, repetitions: int) -> None:
    """Errors are within the rule of all tests, and repetitions have the same bits."""
    truth, low = (by_oracle(case, leaves, to) for to in (torch.float64, leaves.q.dtype))
    sharding = next(sharding for _, sharding, _ in shardings(case, random.Random(0), dist.get_world_size()))
    for way in WAYS:
        got = together(case, leaves, sharding, None, **way)
        true, rough = (expected_here(case, x, sharding, None, dist.get_rank()) for x in (truth, low))
        for name, x in got.items():
            factor = 3.0 if "softcap" in case.options else 2.0
            checks.assert_close(f"{name} of {case}, {way}", x, true[name], rough[name], factor, 1.0)
        for _ in range(repetitions):
            again = together(case, leaves, sharding, None, **way)
            assert all(checks.bitwise_equal(again[name], x) for name, x in got.items() if name != "dsink")


def by_oracle(case: Case, leaves: Leaves, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same attention by the naive one, in a dtype of its own."""
    cu = torch.tensor([0, *accumulate(case.lengths_q)], dtype=torch.int32)
    options = {name: x for name, x in case.options.items() if name != "deterministic"}
    call = oracle.Call(leaves.q, leaves.k, leaves.v, cu, cu, learnable_sink=leaves.sink, **options).to(dtype)
    out, lse = oracle.attention(call)
    grads = checks.gradients(call, out, lse, leaves.dout, leaves.dlse)
    grads["dsink"] = grads.pop("dlearnable_sink")
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def surroundings() -> None:
    """What is around attention in training: checkpointing, torch.compile, autocast; and a loss of lse alone."""
    sharding, rank = balanced(dist.get_world_size()), dist.get_rank()
    leaves = Leaves.of(PACKED)
    q, k, v = (sharding.shard(x.detach(), rank).requires_grad_() for x in (leaves.q, leaves.k, leaves.v))

    attend: Callable[..., Any] = context_parallel_attn_varlen_func

    def block(q: Tensor, k: Tensor, v: Tensor, method: str) -> Tensor:
        return context_parallel_attn_varlen_func(q.sin(), k, v, sharding, causal=True, method=method).cos()

    for way in WAYS:
        expected = torch.autograd.grad(block(q, k, v, **way).sum(), (q, k, v))
        kept = checkpoint(block, q, k, v, way["method"], use_reentrant=False)
        compiled = torch.compile(block, backend="eager")(q, k, v, **way)
        for out in (kept, compiled):
            assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), expected))
        with torch.autocast("cpu", torch.bfloat16):
            half = [x.float() for x in (q, k, v)]
            assert block(half[0], half[1], half[2], **way).dtype == torch.bfloat16
            sink = torch.full((4,), 0.1)  # stays as it is, and is all that a query sees where there are no keys
            options = {"learnable_sink": sink, "seqused_k": [0] * len(DOCUMENTS), "return_lse": True, **way}
            _, lse = attend(*half, sharding, **options)
            assert (lse == sink[:, None]).all()
        _, lse = attend(q, k, v, sharding, causal=True, return_lse=True, **way)
        (dk,) = torch.autograd.grad(lse.sum(), k)
        assert dk.isfinite().all()
        assert dk.any()
        (dq,) = torch.autograd.grad(block(q, k, v, **way).sum(), q, create_graph=True)
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
    options = ops.flat_options(Options(None, None, 0, 0.0, False, True), None)
    for sink, used in ((None, None), (torch.randn(4, dtype=torch.float64, requires_grad=True), torch.tensor([4, 3]))):
        flat = (*leaves, sink, sharding.handle, None, None, used, names_of(None), "ring", False, *options)
        torch.library.opcheck(torch.ops.flash_attn_cute.context_parallel, flat)
        out, lse = torch.ops.flash_attn_cute.context_parallel(*flat)
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
    torch.manual_seed(0)
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


class Block(nn.Module):
    """Attention of packed rows (rows, 16) between projections that each have a layer, as parallel styles want them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, heads * 8, dtype=torch.float64) for heads in (4, 2, 2))
        self.outputs = nn.Linear(4 * 8, 16, dtype=torch.float64)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """(rows, 16)."""
        q, k, v = (project(x).unflatten(1, (-1, 8)) for project in (self.q, self.k, self.v))
        return x + self.outputs(attend(q, k, v).flatten(1))


def other_meshes() -> None:
    """FSDP over the ranks of data and context together, and tensor parallelism beside context parallelism."""
    torch.manual_seed(0)
    cu = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32)
    batches = torch.randn(2, int(cu[-1]), 16, dtype=torch.float64)
    model, sharding = nn.Sequential(Block(), Block()), balanced(2)

    def loss(blocks: Any, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        for block in blocks:
            x = block(x, attend)
        return x.square().sum() / batches.numel()

    def on_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu, cu, max(DOCUMENTS), max(DOCUMENTS), causal=True)

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
    with pytest.raises(TypeError, match=r"k: expected a plain tensor .* placements \(Shard\(dim=1\),\); .* k.to_local"):
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
            assert torch.autograd.grad(out.sum(), x)[0].equal(torch.ones_like(x))
    attend, sharding = context_parallel_attn_func, Sharding.balanced([0, 5 * size], size)
    for way, batch in product(WAYS, (0, 1)):
        x = torch.randn(batch, 5, 4, 8, requires_grad=True)
        out, lse = attend(x, x, x, sharding, return_lse=True, **way)
        assert (out.shape, lse.shape) == (x.shape, (batch, 4, 5))
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def neighbours() -> None:
    """Under a window no rank hears of any but those next to it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case = Case([40 * size], [40 * size], {"causal": True, "window_size": (30, None)})
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
            together(case, leaves, sharding, None, **way)
            assert peers == {rank - 1, rank + 1} & set(range(size)), way


def disagreements() -> None:
    """One clear error on every rank, and none where ranks agree."""
    size, rank = dist.get_world_size(), dist.get_rank()
    sharding = balanced(size)
    leaves = Leaves.of(PACKED)
    q, k, v = (sharding.shard(x, rank) for x in (leaves.q, leaves.k, leaves.v))
    agreed: dict[str, Any] = {"sharding": sharding, "causal": True, "q": q, "k": k, "v": v, "method": "ring"}
    agreed |= {"sharding_k": Sharding(sharding.cu_seqlens, sharding.total, sharding.segments)}
    sink = torch.zeros(4, dtype=torch.float64)
    # What rank 1 has of its own, and what all ranks are then told.
    different: list[tuple[dict[str, Any], str]] = [
        # options
        ({"causal": False}, "window_right: {} 0 on ranks 0, 2; None on rank 1$"),
        ({"window_size": (5, None)}, "window_left: {} None on ranks 0, 2; 5 on rank 1$"),
        ({"softcap": 2.0}, "softcap: {} 0.0 on ranks 0, 2; 2.0 on rank 1$"),
        ({"softmax_scale": 0.5}, "softmax_scale: {} None on ranks 0, 2; 0.5 on rank 1$"),
        ({"deterministic": True}, "deterministic: {} False on ranks 0, 2; True on rank 1$"),
        ({"zero_padding": False}, "zero_padding: {} True on ranks 0, 2; False on rank 1$"),
        ({"backend": "portable"}, "backend: {} None on ranks 0, 2; portable on rank 1$"),
        # methods; of these all_to_all sees the ranks as another grid
        ({"method": "all_gather"}, "method: {} ring on ranks 0, 2; all_gather on rank 1$"),
        ({"method": "auto"}, "method: {} ring on ranks 0, 2; auto on rank 1$"),
        ({"method": "all_to_all"}, "rank 1 of the group: method: expected one that exchanges no heads"),
        # shapes and dtypes
        ({"q": q[:, :2]}, r"heads, d and d_v: {} \(4, 2, 8, 8\) on ranks 0, 2; \(2, 2, 8, 8\) on rank 1$"),
        ({"k": k[:, :1], "v": v[:, :1]}, r"heads, d and d_v: {} \(4, 2, 8, 8\) .* \(4, 1, 8, 8\) on rank 1$"),
        ({"v": v[..., :4]}, r"heads, d and d_v: {} \(4, 2, 8, 8\) .* \(4, 2, 8, 4\) on rank 1$"),
        ({"q": q.float(), "k": k.float(), "v": v.float()}, "dtype: {} .*64 on ranks 0, 2; torch.float32 on rank 1$"),
        ({"learnable_sink": sink}, "sink: {} None on ranks 0, 2; torch.float64 on rank 1$"),
        ({"k": k.detach()}, "inputs that require gradients: {} q, k, v on ranks 0, 2; q, v on rank 1$"),
        # offsets, and who has which rows
        ({"sharding": Sharding.contiguous([0, 68, 73, 114, 114, 128], size)}, "sharding: {} layout .* on rank 1$"),
        ({"sharding_k": Sharding.contiguous([0, 70, 73, 113, 114, 128], size)}, "sharding_k: {} layout .* on rank 1$"),
        (
            {"sharding": Sharding(sharding.cu_seqlens, 128, sharding.segments[::-1])},
            "sharding: {} layout .* on rank 1$",
        ),
        ({"seqused_q": [1, 1, 1, 0, 1]}, r"seqused_q: {} None on ranks 0, 2; \(1, 1, 1, 0, 1\) on rank 1$"),
        ({"seqused_k": [1, 1, 1, 0, 1]}, r"seqused_k: {} None on ranks 0, 2; \(1, 1, 1, 0, 1\) on rank 1$"),
        # what is wrong on one rank alone
        ({"q": q[1:]}, "rank 1 of the group: q: expected the .* rows of rank 1 of its sharding, got shape"),
        ({"sharding": balanced(2)}, "rank 1 of the group: sharding: expected one over the 3 ranks of group, got 2"),
        ({"mask": torch.ones(1, dtype=torch.bool)}, "rank 1 of the group: mask: expected None"),
        ({"bias": torch.ones(1)}, "rank 1 of the group: bias: expected None"),
        ({"block_mask": BlockMask.causal(128, 128)}, "rank 1 of the group: method: expected 'auto' or 'all_to_all'"),
        ({"softcap": -1.0}, "rank 1 of the group: softcap: expected 0"),
        ({"method": "ulysses"}, "rank 1 of the group: method: expected one of"),
        (
            {"seqused_k": [99, 1, 1, 0, 1]},
            "rank 1 of the group: seqused_k: expected 0 to 70 rows of document 0, got 99",
        ),
    ]
    for changes, message in different:
        given = {**agreed, **(changes if rank == 1 else {})}
        with pytest.raises(ValueError, match=message.format("expected the same on all ranks of the group, got")):
            context_parallel_attn_varlen_func(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    compiled: Any = torch.compile(context_parallel_attn_varlen_func, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"window_right: .* 0 on ranks 0, 2; None on rank 1$"):
        compiled(q, k, v, sharding, causal=rank != 1)
    batch = torch.zeros(2 if rank == 1 else 1, 5, 6, 8)
    with pytest.raises(ValueError, match=r"batch: expected the same .* 1 on ranks 0, 2; 2 on rank 1$"):
        context_parallel_attn_func(batch, batch, batch, Sharding.balanced([0, 15], 3), method="ring")
    # The number of ranks divides these heads: rank 1 could do what it asks for.
    method = "all_to_all" if rank == 1 else "ring"
    with pytest.raises(ValueError, match=r"method: expected the same .* ring on ranks 0, 2; all_to_all on rank 1$"):
        context_parallel_attn_func(batch[:1], batch[:1], batch[:1], Sharding.balanced([0, 15], 3), method=method)
    # Of which one call has a mask: the number of ranks divides these heads.
    given = {"block_mask": BlockMask.causal(15, 15)} if rank == 1 else {}
    with pytest.raises(
        ValueError, match=r"block_mask: expected the same .* None on ranks 0, 2; \(.*15, 15\) on rank 1$"
    ):
        context_parallel_attn_func(batch[:1], batch[:1], batch[:1], Sharding.balanced([0, 15], 3), **given)
    rows = torch.zeros(1, 33 if rank == 1 else 30, 2, 8)
    with (
        context_parallel(None, buffers=[rows], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match=r"sharding: expected the same .* layout .* on rank 1$"),
    ):
        flash_attn_func(rows, rows, rows, causal=True)
    for way in WAYS[:2]:
        assert_same(
            together(PACKED, leaves, sharding, None, **way),
            expected_here(PACKED, alone(PACKED, leaves), sharding, None, rank),
            way,
        )
    mesh = init_device_mesh("cpu", (size, 1))
    with pytest.raises(ValueError, match="rank 0 of the group: method: expected 'auto', 'all_gather' or 'ring'"):
        together(PACKED, leaves, sharding, None, group=mesh, method="all_to_all")
    assert together(PACKED, leaves, sharding, None, group=mesh)["out"].isfinite().all()


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(work._GEMM_SIZE, "cpu", 64)
        patch.setitem(work._COPY_BYTES, "cpu", 1 << 16)
        device = torch.device("cpu")
        measured = suite.suite(device, torch.float32, 64, (2, 2, 8))
        for case in measured.cases():
            clock = suite.together(harness.clock_of(device), device)
            found = harness.measure(replace(measured, rounds=3), case, clock)
            assert set(found.times) >= {suite.ONE, *suite.METHODS}
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found.times)
            assert all(times == found.times for times in everyone)


def backward_without_a_group() -> None:
    """A graph keeps no group; it says so if its own is gone."""
    sharding, leaves = balanced(dist.get_world_size()), Leaves.of(PACKED)
    q, k, v = (sharding.shard(x.detach(), dist.get_rank()).requires_grad_() for x in (leaves.q, leaves.k, leaves.v))
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


# What ranks are started for takes less time than to start them.
ON_RANKS = {
    1: [every_case, block_masks, operators_are_sound],
    2: [
        every_case,
        block_masks,
        low_precision,
        surroundings,
        compiled,
        compiled_in_context,
        backward_without_a_group,
        example,
        benchmark,
    ],
    3: [every_case],
    4: [every_case, messages_of_two_dtypes, block_masks, rows_come_together, other_meshes, nothing_to_do, neighbours],
    8: [every_case],
}


@pytest.mark.parametrize("num_ranks", ON_RANKS)
def test_ranks_give_what_one_process_gives(num_ranks: int, tmp_path: Path) -> None:
    ranks.run(ON_RANKS[num_ranks], num_ranks, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    ranks.run([on_gpus], 2, tmp_path, backend="nccl")


def test_ranks_that_disagree_get_the_same_error(tmp_path: Path) -> None:
    ranks.run([disagreements], 3, tmp_path, FLASH_ATTN_CUTE_CHECK="1")


def random_runs(draw: random.Random, length: int) -> list[Run]:
    """Some positions, in adjacent rows."""
    runs, row, position = [], draw.randint(0, 3), 0
    while position < length:
        stop = min(length, position + draw.randint(1, 12))
        if draw.random() < 0.6:
            runs.append(Run(position, stop, row))
            row += stop - position
        position = stop
    return runs


@pytest.mark.parametrize("seed", range(300))
def test_parts_are_what_the_mask_shows(seed: int) -> None:
    """Each visible pair in one part, as that part's window shows it, and no other pair in any."""
    draw = random.Random(seed)
    length_q, length_k = draw.randint(1, 40), draw.randint(1, 40)
    window = (draw.choice([None, 0, 3, 15]), draw.choice([None, 0, 0, 3, 15]))
    queries, keys = random_runs(draw, length_q), random_runs(draw, length_k)
    parts = parts_of({7: queries}, {7: keys}, {7: Band.of(window, length_q, length_k)})  # type: ignore[arg-type]
    nothing = torch.empty(0)
    visible = oracle.window(oracle.Call(nothing, nothing, nothing, window_size=window), length_q, length_k)
    expected = torch.zeros(60, 60, dtype=torch.int64)
    for q in queries:
        for k in keys:
            seen = visible[q.start : q.stop, k.start : k.stop]
            expected[q.row : q.row + q.stop - q.start, k.row : k.row + k.stop - k.start] = seen
    got = torch.zeros_like(expected)
    for call in calls_of(parts, torch.device("cpu")):
        for q_rows, k_rows in zip(sequences(call, "q"), sequences(call, "k"), strict=True):
            shown = oracle.Call(nothing, nothing, nothing, window_size=call.window)
            got[slice(*q_rows), slice(*k_rows)] += oracle.window(shown, q_rows[1] - q_rows[0], k_rows[1] - k_rows[0])
    assert got.equal(expected)


def sequences(call: Call, side: str) -> list[tuple[int, int]]:
    """The rows (start, stop) of each sequence of a call, which is checked to be a valid one."""
    start, stop = (getattr(call, f"{side}_{end}") for end in ("start", "stop"))
    cu, used = getattr(call, f"cu_seqlens_{side}").tolist(), getattr(call, f"seqused_{side}")
    slots = [b - a for a, b in pairwise(cu)]
    lengths = slots if used is None else used.tolist()
    assert cu[0] == 0
    assert start + cu[-1] == stop
    assert all(0 < length <= slot for length, slot in zip(lengths, slots, strict=True))
    assert max(lengths) == getattr(call, f"max_seqlen_{side}")
    return [(start + a, start + a + length) for a, length in zip(cu, lengths, strict=False)]


@pytest.mark.parametrize("documents", [[4096], [4096, 1000, 3000]])
def test_a_step_of_a_causal_ring_is_one_call(documents: list[int]) -> None:
    """An early and a late chunk of a document need no more launches than one would."""
    sharding = Sharding.balanced([0, *accumulate(documents)], 4, causal=True)
    layout = Layout.of(sharding, sharding, tuple(documents), tuple(documents), (None, 0))
    for rank, other in product(range(4), range(4)):
        parts = parts_of(layout.queries_of(rank), layout.keys_of(other), layout.bands)
        assert len(parts) == len({d for d in layout.queries_of(rank) if d in layout.keys_of(other)})
        assert len(calls_of(parts, torch.device("cpu"))) <= 1
        assert {part.window for part in parts} <= ({(None, 0)} if rank == other else {(None, None)})


@pytest.mark.parametrize("window", [(None, 0), (100, 0), (None, None)])
@pytest.mark.parametrize("other", [None, 0, 1])
def test_hopper_kernels_serve_the_calls(other: int | None, window: tuple[int | None, int | None]) -> None:
    """Those on keys of another rank, on a rank's own keys, and on collected ones."""
    sharding = Sharding.balanced([0, 700, 710, 2000], 2, causal=True)
    layout = Layout.of(sharding, sharding, (700, 10, 1290), (700, 10, 1290), window)
    everything = {d: [Run(0, n, start)] for d, (n, start) in enumerate(((700, 0), (10, 700), (1290, 710)))}
    keys = everything if other is None else layout.keys_of(other)
    calls = calls_of(parts_of(layout.queries_of(1), keys, layout.bands), torch.device("cpu"))
    assert calls
    q, kv = torch.empty(1000, 4, 64, dtype=torch.float16), torch.empty(2000, 2 * (64 + 128), dtype=torch.float16)
    rows = KeyValues(kv, 2, 64)
    options = Options(None, None, None, 0.0, True, True)
    for call in calls:
        _, spec, inputs = prepared(Context(options, None, None), call, q, rows.k, rows.v)
        assert dispatch.select(spec, inputs, "sm90", dispatch.supposing("sm90")).name == "sm90"
        assert all(x.stride(-1) == 1 and x.stride(0) % 8 == 0 for x in (inputs.q, inputs.k, inputs.v))


SHAPE = model.Shape(32, 8, 128, 128, 2)


@pytest.mark.parametrize(
    ("documents", "num_ranks", "by_heads", "expected"),
    [
        ([131_072], 2, True, "all_gather"),  # nothing is merged, and heads in groups make K and V small
        ([131_072], 8, True, "all_to_all"),  # trading heads moves less the more ranks there are
        ([1000] * 128, 8, True, "all_gather"),  # next to nothing is moved
        ([4_194_304], 64, True, "ring"),  # 64 ranks have no part of 8 heads, and all keys are too many for one
        ([131_072], 8, False, "all_gather"),
    ],
)
def test_auto_chooses_what_waits_least(documents: list[int], num_ranks: int, by_heads: bool, expected: str) -> None:
    sharding = Sharding.balanced([0, *accumulate(documents)], num_ranks, causal=True)
    layout = Layout.of(sharding, sharding, tuple(documents), tuple(documents), (None, 0))
    found = model.estimates(layout, SHAPE)
    if not by_heads:
        found.pop("all_to_all")
    assert model.best(found) == expected


def test_a_plan_is_made_once_for_all_layers() -> None:
    sharding = Sharding.contiguous([0, 8], 2)
    question = attention.Question(sharding, None, 1, None, None, (None, 0), "ring", SHAPE)
    found = attention.plan(question, Place(0, 2, 1), torch.device("cpu"))
    assert attention.plan(question._replace(), Place(0, 2, 1), torch.device("cpu")) is found
    assert attention.plan(question, Place(1, 2, 1), torch.device("cpu")) is not found
    plans, gone = weakref.ref(found.method), weakref.ref(sharding)
    del found, question, sharding
    assert gone() is None, "something keeps the layout"
    assert plans() is None


def test_the_model_of_the_benchmark() -> None:
    rows = suite.modelled(16_384, (32, 8, 128))
    assert {(row["corpus"], row["ranks"]) for row in rows} == set(product(suite.corpora(64), suite.RANKS))
    assert all(row["imbalance"] < 0.03 for row in rows if row["ranks"] < 512)
    for row in rows:
        assert 0 < row["received, bytes"] < 1e12
        assert 0 < row["buffers, bytes"] < 1e12
    of = {(row["corpus"], row["ranks"], row["method"]): row["received, bytes"] for row in rows}
    assert of["one sequence", 8, "all_gather"] == of["one sequence", 8, "ring"]
    assert of["documents", 64, "all_gather"] < of["documents", 64, "ring"] / 3
