"""Workload of the profilers: attention of a chosen shape on random inputs, warmed up, then profiled.

    python -m flash_attn_cute.profile workload --heads 32 --heads-k 8 --seqlen 8192 --causal --direction both
    python -m flash_attn_cute.profile workload --documents 64,4096,1000 --causal

The warm-up compiles whatever has to be compiled. On a GPU, the profiled calls stand between cuProfilerStart and
cuProfilerStop.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.profile import machine
from flash_attn_cute.profile.machine import Unavailable, require_gpu
from flash_attn_cute.runtime import nvtx
from flash_attn_cute.runtime.command_line import positive, run_command

DTYPES = ("bfloat16", "float16", "float32")
DIRECTIONS = ("forward", "backward", "both")
WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Workload:
    """The calls. ``documents`` are the lengths of packed sequences, and take the place of batch and seqlen."""

    batch: int
    seqlen: int
    documents: tuple[int, ...]
    heads: int
    heads_k: int
    head_dim: int
    causal: bool
    dtype: str
    direction: str
    backend: str | None

    @classmethod
    def chosen(cls, options: argparse.Namespace) -> "Workload":
        """The workload that the options of ``add_options`` ask for."""
        chosen = {field.name: getattr(options, field.name) for field in fields(cls)}
        return cls(**chosen | {"heads_k": options.heads_k or options.heads})

    def command(self, calls: int) -> list[str]:
        """The command line that runs it on a GPU with so many profiled calls."""
        shape = ["--batch", str(self.batch), "--seqlen", str(self.seqlen)]
        if self.documents:
            shape = ["--documents", ",".join(map(str, self.documents))]
        return [
            *(sys.executable, "-m", "flash_attn_cute.profile", "workload", *shape),
            *("--heads", str(self.heads), "--heads-k", str(self.heads_k), "--head-dim", str(self.head_dim)),
            *("--dtype", self.dtype, "--direction", self.direction, "--calls", str(calls)),
            *(["--causal"] if self.causal else []),
            *(["--backend", self.backend] if self.backend else []),
        ]


def split(arguments: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Arguments before and behind ``--``: a tool's own, and a command; those of this process if there are none."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    return given[:end], given[end + 1 :]


def report_at(path: Path, suffix: str) -> Path:
    """The absolute path of a report, with its suffix behind whatever the name has: it may be ``lr-0.001``."""
    return path.absolute().with_name(path.name.removesuffix(suffix) + suffix)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose a workload."""
    group = parser.add_argument_group("workload")
    group.add_argument("--batch", type=positive, default=4, help="sequences of a dense batch (%(default)s)")
    group.add_argument("--seqlen", type=positive, default=8192, help="their length (%(default)s)")
    group.add_argument(
        "--documents", type=_lengths, default=(), metavar="A,B,..", help="lengths of packed sequences, instead"
    )
    group.add_argument("--heads", type=positive, default=16, help="query heads (%(default)s)")
    group.add_argument("--heads-k", type=positive, help="key heads, if not the same")
    group.add_argument("--head-dim", type=positive, default=128, help="of queries, keys and values (%(default)s)")
    group.add_argument("--causal", action="store_true")
    group.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    group.add_argument("--direction", choices=DIRECTIONS, default=DIRECTIONS[0], help="what is profiled (%(default)s)")
    group.add_argument("--backend", help="the package's choice, if not given")


def add_calls(parser: argparse.ArgumentParser) -> None:
    """The option of how many calls to profile."""
    parser.add_argument("--calls", type=positive, default=5, help="profiled calls, after the warm-up (%(default)s)")


def run(workload: Workload, calls: int, device: torch.device) -> None:
    """Warms up, and runs so many profiled calls, on random normal inputs.

    Raises:
        Unavailable: this machine has no CUDA driver to start a profiler by.
        ValueError: what the package says of arguments that it does not serve.
    """
    driver = None if device.type == "cpu" else machine.cuda_driver()
    call = step(workload, device)
    with nvtx.span("warm-up"):
        for _ in range(WARM_UP_CALLS):
            call()
    with _profiled(driver, device), nvtx.span("profiled calls"):
        for _ in range(calls):
            call()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for.

    Returns:
        The exit code: 1 for a call that the package does not serve or that the GPU has no memory for, 2 where the
        machine lacks what it takes.
    """
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_cute.profile workload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    add_calls(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    try:
        if options.device == "cuda":
            require_gpu()
        run(Workload.chosen(options), options.calls, torch.device(options.device))
    except Unavailable as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    except (ValueError, torch.OutOfMemoryError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def step(workload: Workload, device: torch.device) -> Callable[[], object]:
    """One call of a workload, in its direction, on random normal inputs."""
    forward_only = workload.direction == "forward"
    rows = (sum(workload.documents),) if workload.documents else (workload.batch, workload.seqlen)

    def normal(heads: int) -> Tensor:
        x = torch.randn(*rows, heads, workload.head_dim, dtype=getattr(torch, workload.dtype), device=device)
        return x.requires_grad_(not forward_only)

    q, k, v = normal(workload.heads), normal(workload.heads_k), normal(workload.heads_k)
    cu_seqlens = torch.tensor([0, *accumulate(workload.documents)], dtype=torch.int32, device=device)
    longest = max(workload.documents, default=0)

    def forward() -> Tensor:
        if workload.documents:
            out = flash_attn_varlen_func(
                *(q, k, v, cu_seqlens, cu_seqlens, longest, longest), causal=workload.causal, backend=workload.backend
            )
        else:
            out = flash_attn_func(q, k, v, causal=workload.causal, backend=workload.backend)
        assert isinstance(out, Tensor)
        return out

    if forward_only:
        return forward
    dout = torch.randn_like(q)
    if workload.direction == "both":
        return lambda: torch.autograd.grad(forward(), (q, k, v), dout)
    out = forward()
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


@contextmanager
def _profiled(driver: Any, device: torch.device) -> Iterator[None]:
    """Profilers that wait to be started see what the device does within, and nothing else; without a driver, nothing.

    Raises:
        RuntimeError: the driver refuses.
    """
    if driver is None:
        yield
        return
    torch.cuda.synchronize(device)
    _call(driver, "cuProfilerStart")
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        _call(driver, "cuProfilerStop")


def _call(driver: Any, function: str) -> None:
    (result,) = getattr(driver, function)()
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function}: {result.name}")


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(positive(length) for length in text.split(","))


if __name__ == "__main__":
    run_command(main)
