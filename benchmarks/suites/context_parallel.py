"""Context parallelism: attention over ranks, either pass, against one GPU that has all rows, and against PyTorch's.

``benchmarks.over_ranks`` runs it, as ``python -m benchmarks context-parallel``.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import long_documents
from benchmarks.harness import Case, Contender, NoPart, Results, Run, Suite, Unavailable
from benchmarks.work import Passes, Work, attention_flop
from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.distributed import Sharding, checked_call, context_parallel_attn_varlen_func, method_plan
from flash_attn_cute.distributed.call_passes import Context, Given
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.rank_layout import Layout
from flash_attn_cute.problem.spec import Options, Window

ONE, SHARE, PYTORCH = "one GPU, all rows", "all_gather, no messages", "PyTorch, cuDNN"
METHODS = checked_call.METHODS
PASSES: tuple[Passes, ...] = ("forward", "backward")
CAUSAL: Window = (None, 0)


class Row(NamedTuple):
    """A call over all ranks: causal self-attention of documents, of a window that ends at the diagonal, or full.

    ``kind`` names rows that differ in lengths alone.
    """

    kind: str
    name: str
    lengths: tuple[int, ...]
    window: Window = CAUSAL

    def layout(self, num_ranks: int) -> Layout:
        """Who has which rows, in balance for the window."""
        sharding = self.sharding(num_ranks)
        return Layout.of(sharding, sharding, self.lengths, self.lengths, self.window)

    def sharding(self, num_ranks: int) -> Sharding:
        """The sharding over so many ranks, in balance."""
        return Sharding.balanced([0, *accumulate(self.lengths)], num_ranks, window_size=self.window)

    def flop(self, shape: Shape, passes: Passes) -> float:
        """FLOP of all ranks together, visible pairs only."""
        one = Sharding.contiguous([0, *accumulate(self.lengths)], 1)
        return attention_flop(one.area(0, window_size=self.window), shape.nheads, shape.d, shape.d_v, passes)


class Sizes(NamedTuple):
    """Sizes of the rows, on any number of ranks."""

    tokens_per_rank: tuple[int, ...]  # of documents
    packs: int  # of documents, for each number of tokens
    sequence: int  # tokens of the one sequence that all ranks share
    window: int  # keys that a query of it sees in the row with a window
    shape: Shape

    @functools.cache  # noqa: B019 - of a tuple
    def rows(self, num_ranks: int) -> list[Row]:
        """Rows of the suite, the most important ones first."""
        tokens, *more = self.tokens_per_rank
        longer = [row for count in more for row in self._documents(count, num_ranks)]
        return [
            *self._documents(tokens, num_ranks),
            *longer[: self.packs],
            Row("causal", f"causal, {thousands(self.sequence)}", (self.sequence,)),
            _along("causal", tokens, num_ranks, CAUSAL),
            _along("full", tokens, num_ranks, (None, None)),
            Row("window", f"window {self.window}", (self.sequence,), (self.window - 1, 0)),
            *longer[self.packs :],
        ]

    def _documents(self, tokens: int, num_ranks: int) -> list[Row]:
        kind = f"documents, {thousands(tokens)} a rank"
        packs = [long_documents.pack(tokens * num_ranks, seed) for seed in range(self.packs)]
        return [Row(kind, f"{kind}, pack {seed}", lengths) for seed, lengths in enumerate(packs)]


def _along(name: str, tokens: int, num_ranks: int, window: Window) -> Row:
    """One sequence that grows with the ranks."""
    kind = f"{name}, {thousands(tokens)} a rank"
    return Row(kind, kind, (tokens * num_ranks,), window)


def thousands(tokens: int) -> str:
    """8k of 8192, and 8000 of 8000."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class RanksCase(Case):
    """One pass of a row: all of its tensors on every rank, and this rank's part of them, in ``leaves`` and ``dout``."""

    row: Row
    passes: Passes
    sharding: Sharding
    rank: int
    everything: tuple[Tensor, Tensor, Tensor, Tensor]
    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor

    def own(self, x: Tensor) -> Tensor:
        """Rows of this rank."""
        return self.sharding.shard(x, self.rank)


def suite(device: torch.device, dtype: torch.dtype, sizes: Sizes, rounds: int, seconds: float) -> Suite[RanksCase]:
    """The suite on the ranks that there are."""
    contenders = [Contender(ONE, _one), Contender(SHARE, _share("all_gather"), compared=False)]
    contenders += [Contender(method, _method(method), against=SHARE) for method in METHODS]
    for method in METHODS:
        if method != "auto":
            contenders.append(Contender(f"{method}, deterministic", _deterministic(method), against=method))
    contenders.append(Contender(PYTORCH, _pytorch, against="auto"))
    cases = _cases(device, dtype, sizes, dist.get_rank(), dist.get_world_size())
    return Suite("context_parallel", cases, contenders, ONE, bars=(), rounds=rounds, seconds=seconds)


def alone(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, num_ranks: int, rounds: int, seconds: float
) -> Suite[RanksCase]:
    """The suite of what each of so many ranks computes, one after the other on this device, without messages."""
    contenders = [Contender(ONE, _one)]
    for method, rank in product(method_plan.KEY_METHODS, range(num_ranks)):
        contenders.append(Contender(f"{method}, rank {rank}", _share(method, rank), compared=False))
    cases = _cases(device, dtype, sizes, 0, num_ranks)
    return Suite("context_parallel-alone", cases, contenders, ONE, bars=(), rounds=rounds, seconds=seconds)


def _cases(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, rank: int, num_ranks: int
) -> Callable[[], Iterator[RanksCase]]:
    def cases() -> Iterator[RanksCase]:
        for row in sizes.rows(num_ranks):
            yield from _either_pass(row, device, dtype, sizes.shape, rank, num_ranks)

    return cases


def _either_pass(
    row: Row, device: torch.device, dtype: torch.dtype, shape: Shape, rank: int, num_ranks: int
) -> Iterator[RanksCase]:
    draw, rows = torch.Generator(device).manual_seed(0), sum(row.lengths)
    q, k, v, dout = (
        torch.randn(rows, heads, shape.d, generator=draw, device=device, dtype=dtype)
        for heads in (shape.nheads, shape.nheads_k, shape.nheads_k, shape.nheads)
    )
    sharding = row.sharding(num_ranks)
    own_q, own_k, own_v = (sharding.shard(x, rank).requires_grad_() for x in (q, k, v))
    for passes in PASSES:
        traffic = (2 if passes == "forward" else 4) * (q.nbytes + k.nbytes)
        yield RanksCase(
            name=f"{row.name}, {passes}",
            panel=f"{row.kind}, {passes}",
            detail=f"{len(row.lengths)} documents of {min(row.lengths)}..{max(row.lengths)} tokens, {rows} together, "
            f"heads {shape.nheads}/{shape.nheads_k} x {shape.d}, ranks {num_ranks}",
            device=device,
            dtype=dtype,
            work=Work(row.flop(shape, passes), traffic),
            row=row,
            passes=passes,
            sharding=sharding,
            rank=rank,
            everything=(q, k, v, dout),
            leaves=(own_q, own_k, own_v),
            dout=sharding.shard(dout, rank),
        )


def _run(passes: Passes, attend: Callable[..., Tensor], leaves: Sequence[Tensor], dout: Tensor) -> Run:
    """Runs one pass, in training; of a backward pass the forward one is run here, once."""
    if passes == "forward":
        return lambda: {"out": attend(*leaves).detach()}
    out = attend(*leaves)

    def backward() -> Results:
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return backward


def _one(case: RanksCase) -> Run:
    """Every rank does all of the work, and shows its own rows of the results."""
    lengths, (*qkv, dout) = case.row.lengths, case.everything
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=case.device)
    window, longest = case.row.window, max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, window_size=window)

    run = _run(case.passes, attend, [x.detach().requires_grad_() for x in qkv], dout)
    return lambda: {name: case.own(x) for name, x in run().items()}


def _method(method: str, *, deterministic: bool = False) -> Callable[[RanksCase], Run]:
    def make(case: RanksCase) -> Run:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return context_parallel_attn_varlen_func(
                q, k, v, case.sharding, window_size=case.row.window, method=method, deterministic=deterministic
            )

        return _run(case.passes, attend, case.leaves, case.dout)

    return make


def _deterministic(method: str) -> Callable[[RanksCase], Run]:
    def make(case: RanksCase) -> Run:
        if case.passes == "forward":
            raise NoPart  # forward passes are deterministic without it, too
        return _method(method, deterministic=True)(case)

    return make


def _share(name: str, rank: int | None = None) -> Callable[[RanksCase], Run]:
    """Runs a rank's part of a method, with random messages; None: the rank of the case."""
    kind = method_plan.KEY_METHODS[name]

    def make(case: RanksCase) -> Run:
        number, row = case.rank if rank is None else rank, case.row
        q, k, v, dout = (case.sharding.shard(x, number) for x in case.everything)
        layout = Layout.of(case.sharding, case.sharding, row.lengths, row.lengths, row.window)
        method, context = kind(layout, number, case.device), Context(Options(None, *row.window, 0.0, False, True), None)

        def forward() -> tuple[Tensor, Tensor]:
            with mock.patch.object(sys.modules[kind.__module__], "Transfer", _NoTransfer):
                return method.forward(context, q, k, v, None)[:2]

        if case.passes == "forward":
            return lambda: {"out": forward()[0]}
        out, lse = forward()

        def backward() -> Results:
            with mock.patch.object(sys.modules[kind.__module__], "Transfer", _NoTransfer):
                grads = method.backward(context, Given(q, out, lse, dout, None), k, v)
            return {name: x.to(q.dtype) for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}

        return backward

    return make


class _NoTransfer:
    """In the place of ``Transfer``: what would arrive is made up."""

    def __init__(self, group: object, sends: object, receives: Sequence[tuple[Tensor, int]]) -> None:
        for x, _ in receives:
            x.normal_()

    def wait(self) -> None:
        """Nothing is on its way."""


def _pytorch(case: RanksCase) -> Run:
    """PyTorch's own, of one causal sequence in early and late chunks, which is how ``Sharding`` deals it, too."""
    lengths = case.row.lengths
    if case.row.window != CAUSAL or len(lengths) > 1:
        raise NoPart  # it is for dense batches, and in balance if they are causal
    if case.device.type != "cuda" or lengths[0] % (2 * dist.get_world_size()):
        raise Unavailable("PyTorch's context parallelism is for GPUs, and for lengths that divide evenly")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    @contextmanager
    def over_ranks() -> Iterator[None]:
        # The context wants a buffer, from which it knows how many rows there are.
        rows = torch.empty(lengths[0], dtype=torch.uint8, device=case.device)
        sharded = context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0], no_restore_buffers={rows})
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), sharded:
            yield

    def attend(*rows: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in rows)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with over_ranks():
        run = _run(case.passes, attend, case.leaves, case.dout)

    def run_over_ranks() -> Results:
        with over_ranks():
            return run()

    return run_over_ranks
