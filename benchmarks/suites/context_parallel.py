"""Context parallelism: both passes on several ranks against one GPU that does all of the work, and a model of many.

    torchrun --nproc-per-node 2 -m benchmarks.suites.context_parallel
    torchrun --nproc-per-node 2 -m benchmarks.suites.context_parallel --tokens 2048   # Gloo, on a CPU
    python -m benchmarks.suites.context_parallel --alone 2
    python -m benchmarks.suites.context_parallel --model benchmarks/results

Ranks take turns together; a turn takes as long as the slowest rank. Rank 0 prints, and writes
``context_parallel-DEVICE-DTYPE.json`` and ``.png``. With ``--alone`` one process does what each of so many ranks would,
one after the other, without messages: ratios are what ranks that never wait would gain, rates those of all together.
With ``--model`` nothing is run: balance, traffic and waiting of 8, 64 and 512 ranks follow from lengths, and from the
speeds that ``flash_attn_cute.distributed.cost_model`` supposes.
"""

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness, plot, report
from benchmarks.harness import Case, Contender, Results, Run, Suite, Unavailable
from benchmarks.work import Work, attention_flop, causal_area
from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.distributed import (
    Sharding,
    checked_call,
    context_parallel_attn_varlen_func,
    cost_model,
    method_plan,
)
from flash_attn_cute.distributed.call_passes import Context, Given
from flash_attn_cute.distributed.rank_layout import Layout
from flash_attn_cute.spec import Options

ONE, PYTORCH = "one GPU", "PyTorch, cuDNN"
REPEATED = f"{PYTORCH}, heads of k repeated"
METHODS = tuple(method for method in checked_call.METHODS if method != "auto")
HOST, MIX = 8, "all_to_all in hosts of 8, all_gather"
RANKS = (8, 64, 512)
HEADS, HEADS_K, D = 32, 8, 128
CAUSAL = Options(None, None, 0, 0.0, False, True)


def corpora(tokens: int) -> dict[str, tuple[int, ...]]:
    """Lengths of causal documents: one, and many of 1/256 to 1/4 of twice the tokens, log-uniform."""
    draw, lengths = random.Random(0), [0]
    while sum(lengths) < 2 * tokens:
        lengths.append(max(1, round(2 * tokens / 256 * 64 ** draw.random())))
    lengths[-1] -= sum(lengths) - 2 * tokens
    return {"one sequence": (tokens,), "documents": tuple(lengths[1:])}


@dataclass(frozen=True, kw_only=True, eq=False)
class RanksCase(Case):
    """All rows on every rank, and which of them are a rank's own."""

    lengths: tuple[int, ...]
    sharding: Sharding
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    rank: int

    def own(self, x: Tensor) -> Tensor:
        """Rows of this rank."""
        return self.sharding.shard(x, self.rank)


def suite(device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int, int]) -> Suite[RanksCase]:
    """The suite on the ranks that there are, of query heads, key heads and a head dimension."""

    def cases() -> Iterator[RanksCase]:
        for name, lengths in corpora(tokens).items():
            yield _case(name, lengths, device, dtype, dist.get_rank(), dist.get_world_size(), *heads)

    contenders = [Contender(ONE, _one), *(Contender(method, _method(method)) for method in METHODS)]
    for method in method_plan.KEY_METHODS:
        contenders.append(Contender(f"{method}, deterministic", _method(method, deterministic=True), against=method))
    contenders += [Contender(PYTORCH, _pytorch(grouped=True)), Contender(REPEATED, _pytorch(grouped=False))]
    return Suite("context_parallel", cases, contenders, ONE, bars=(), rounds=20, seconds=4.0)


def alone(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int, int], num_ranks: int
) -> Suite[RanksCase]:
    """Suite of what each of so many ranks computes, one after the other on this device, with random messages."""

    def cases() -> Iterator[RanksCase]:
        for name, lengths in corpora(tokens).items():
            yield _case(name, lengths, device, dtype, 0, num_ranks, *heads)

    contenders = [Contender(ONE, _one)]
    for name, rank in itertools.product(method_plan.KEY_METHODS, range(num_ranks)):
        contenders.append(Contender(f"{name}, rank {rank}", _alone(name, rank), compared=False))
    return Suite("context_parallel-alone", cases, contenders, ONE, bars=(), rounds=20, seconds=4.0)


def _alone(name: str, rank: int) -> Callable[[RanksCase], Run]:
    kind = method_plan.KEY_METHODS[name]

    def make(case: RanksCase) -> Run:
        q, k, v, dout = (case.sharding.shard(x, rank) for x in (case.q, case.k, case.v, case.dout))
        layout = Layout.of(case.sharding, case.sharding, case.lengths, case.lengths, (None, 0))
        method, context = kind(layout, rank, case.device), Context(CAUSAL, None, None)

        def run() -> Results:
            with mock.patch.object(sys.modules[kind.__module__], "Transfer", _NoTransfer):
                out, lse = method.forward(context, q, k, v, None)
                dq, dk, dv = method.backward(context, Given(q, out, lse, dout, None), k, v)
            return {"out": out, "dq": dq.to(q.dtype), "dk": dk.to(k.dtype), "dv": dv.to(v.dtype)}

        return run

    return make


class _NoTransfer:
    """In the place of ``Transfer``: what would arrive is made up."""

    def __init__(self, group: object, sends: object, receives: Sequence[tuple[Tensor, int]]) -> None:
        for x, _ in receives:
            x.normal_()

    def wait(self) -> None:
        """Nothing is on its way."""


def _case(
    name: str,
    lengths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    nheads: int,
    nheads_k: int,
    d: int,
) -> RanksCase:
    draw = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(sum(lengths), heads, d, generator=draw, device=device, dtype=dtype)
        for heads in (nheads, nheads_k, nheads_k, nheads)
    )
    return RanksCase(
        name=name,
        detail=f"{len(lengths)} causal documents of {min(lengths)}..{max(lengths)} tokens, {sum(lengths)} together, "
        f"heads {nheads}/{nheads_k} x {d}, ranks {num_ranks}, forward and backward",
        device=device,
        dtype=dtype,
        work=Work(attention_flop(causal_area(lengths), nheads, d, d, "both"), 6 * q.nbytes + 3 * (k.nbytes + v.nbytes)),
        lengths=lengths,
        sharding=Sharding.balanced([0, *accumulate(lengths)], num_ranks, causal=True),
        q=q,
        k=k,
        v=v,
        dout=dout,
        rank=rank,
    )


def _both_passes(attend: Callable[..., Tensor], leaves: Sequence[Tensor], dout: Tensor) -> Results:
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _one(case: RanksCase) -> Run:
    """Every rank does all of the work, and shows its own rows of the results."""
    cu = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=case.device)
    longest, leaves = max(case.lengths), [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

    return lambda: {name: case.own(x) for name, x in _both_passes(attend, leaves, case.dout).items()}


def _method(method: str, *, deterministic: bool = False) -> Callable[[RanksCase], Run]:
    def make(case: RanksCase) -> Run:
        leaves = [case.own(x).clone().requires_grad_() for x in (case.q, case.k, case.v)]
        dout = case.own(case.dout)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return context_parallel_attn_varlen_func(
                q, k, v, case.sharding, causal=True, method=method, deterministic=deterministic
            )

        return lambda: _both_passes(attend, leaves, dout)

    return make


def _pytorch(*, grouped: bool) -> Callable[[RanksCase], Run]:
    """PyTorch's own, of one causal sequence in early and late chunks, which is how ``Sharding`` deals it, too.

    ``grouped``: heads of k and v go round once, not once for each query head that reads them.
    """

    def make(case: RanksCase) -> Run:
        if case.device.type != "cuda" or len(case.lengths) > 1 or case.lengths[0] % (2 * dist.get_world_size()):
            raise Unavailable(
                "PyTorch's context parallelism is for dense batches on GPUs, of lengths that divide evenly"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mesh, total = init_device_mesh("cuda", (dist.get_world_size(),)), case.lengths[0]
        leaves = [case.own(x).clone().requires_grad_() for x in (case.q, case.k, case.v)]
        dout = case.own(case.dout)

        def attend(*rows: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in rows)
            if not grouped:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out[0].transpose(0, 1)

        def run() -> Results:
            # The context wants a buffer, from which it knows how many rows there are.
            rows = torch.empty(total, dtype=torch.uint8, device=case.device)
            sharded = context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0], no_restore_buffers={rows})
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), sharded:
                return _both_passes(attend, leaves, dout)

        return run

    return make


def together(clock: harness.Clock, device: torch.device) -> harness.Clock:
    """A clock that begins when all ranks are there, and gives all of them the time of the slowest."""

    def seconds(run: Callable[[], object]) -> float:
        dist.barrier()
        slowest = torch.tensor(clock(run), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return seconds


def modelled(tokens: int, heads: tuple[int, int, int]) -> list[dict[str, Any]]:
    """A row for each corpus, number of ranks and method that can serve it."""
    rows = []
    nheads, nheads_k, d = heads
    shape = checked_call.Shape(nheads, nheads_k, d, d, 2)
    for (name, lengths), ranks in ((corpus, ranks) for corpus in corpora(tokens).items() for ranks in RANKS):
        sharding = Sharding.balanced([0, *accumulate(lengths)], ranks, causal=True)
        areas = [sharding.area(rank, causal=True) for rank in range(ranks)]
        layout = Layout.of(sharding, sharding, lengths, lengths, (None, 0))
        computing = cost_model.computing(layout, shape)
        found = cost_model.estimates(layout, shape)
        if ranks > HOST:
            found[MIX] = _mixed(layout, shape)
        for method, estimate in found.items():
            rows.append(
                {
                    "corpus": name,
                    "tokens": sum(lengths),
                    "documents": len(lengths),
                    "ranks": ranks,
                    "method": method,
                    "imbalance": ranks * max(areas) / sum(areas) - 1,
                    "segments of a rank, at most": max(map(len, sharding.segments)),
                    "computing, seconds": computing,
                    "waiting, seconds": estimate.waiting,
                    "received, bytes": estimate.received,
                    "buffers, bytes": estimate.buffers,
                }
            )
    return rows


def _mixed(layout: Layout, shape: checked_call.Shape) -> cost_model.Estimate:
    """Rows for heads within a host, then keys from other hosts."""
    hosts = layout.queries.merged(HOST)
    beyond = Layout.of(hosts, hosts, layout.lengths_q, layout.lengths_k, (None, 0))
    part = shape._replace(nheads=shape.nheads // HOST, nheads_k=max(1, shape.nheads_k // HOST))
    both = zip(cost_model.trading(layout, shape, HOST), cost_model.estimates(beyond, part)["all_gather"], strict=True)
    return cost_model.Estimate(*(within + between for within, between in both))


def draw_model(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Traffic and efficiency over ranks, a column a corpus."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["corpus"] for row in rows))
    figure = Figure(figsize=(5 * len(names), 7), layout="constrained")
    above, below = figure.subplots(2, len(names), sharex=True, sharey="row", squeeze=False)
    for traffic, efficiency, name in zip(above, below, names, strict=True):
        for method in (*METHODS, MIX):
            those = [row for row in rows if (row["corpus"], row["method"]) == (name, method)]
            ranks = [row["ranks"] for row in those]
            traffic.plot(ranks, [row["received, bytes"] / 1e6 for row in those], marker="o", label=method)
            share = [row["computing, seconds"] / (row["computing, seconds"] + row["waiting, seconds"]) for row in those]
            efficiency.plot(ranks, share, marker="o", label=method)
        tokens = next(row["tokens"] for row in rows if row["corpus"] == name)
        worst = max(row["imbalance"] for row in rows if row["corpus"] == name)
        traffic.set_title(f"{name}, {tokens // 1024}k tokens, imbalance up to {worst:.1%}")
        efficiency.set_xscale("log", base=2)
        efficiency.set_xticks(RANKS, RANKS)
        efficiency.set_xlabel("ranks")
    above[0].set_ylabel("MB received by a rank, both passes")
    above[0].set_yscale("log")
    below[0].set_ylabel("part of the time in which a rank computes")
    below[0].set_ylim(0, 1)
    below[0].legend()
    figure.suptitle(f"a model, not measured: {HEADS}/{HEADS_K} heads of {D}, {cost_model.LINK / 1e9:.0f} GB/s a rank")
    plot.save(path, figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="of the one sequence; documents have twice as many")
    parser.add_argument("--heads", type=int, nargs=3, default=(HEADS, HEADS_K, D), metavar=("H", "H_K", "D"))
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--commit", help="as for python -m benchmarks")
    parser.add_argument("--alone", type=int, metavar="RANKS", help="what each of so many computes, in one process")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="write the model there, and run nothing")
    chosen = parser.parse_args(arguments)
    heads = tuple(chosen.heads)
    if chosen.model is not None:
        rows = modelled(chosen.tokens, heads)
        chosen.model.mkdir(parents=True, exist_ok=True)
        (chosen.model / "context_parallel-model.json").write_text(json.dumps(rows, indent=1) + "\n")
        draw_model(chosen.model / "context_parallel-model.png", rows)
        return 0

    on_gpu, is_alone = torch.cuda.is_available(), chosen.alone is not None
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if is_alone:
        measured = alone(device, dtype, chosen.tokens, heads, chosen.alone)
        clock, prints = harness.clock_of(device), True
    else:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        measured, clock = suite(device, dtype, chosen.tokens, heads), together(harness.clock_of(device), device)
        prints = dist.get_rank() == 0
    name = f"{measured.name}-{device.type}-{str(dtype).removeprefix('torch.')}"
    path = chosen.out / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment, reports = report.environment(device, dtype, chosen.commit), []
    for case in measured.cases():
        reports.append(harness.measure(measured, case, clock))
        if prints:
            print(report.table(reports[-1]), flush=True)
            report.write_json(path, environment, reports, ())
    if prints:
        plot.write_plot(path.with_suffix(".png"), name, reports)
        print(f"wrote {path} and .png")
    if not is_alone:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
