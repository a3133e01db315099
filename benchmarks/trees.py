"""Two checkouts of the package against each other, in turns on one GPU: what has a change cost?

    python -m benchmarks.trees OLD_CHECKOUT [NEW_CHECKOUT]     (default: this one)

A process for each checkout makes the same inputs and times single calls on request, while the other one waits;
which goes first changes from round to round. Between two calls a large write empties the L2 cache and keeps the device
busy until the call has been launched. Prints the median times and their ratio (new over old, less is better) of every
row of the forward and backward suites, ``deterministic=True`` included, and the geometric mean; writes them as JSON.
Only the package is a checkout's own: rows and inputs are those of this file. Compiled kernels stay in ``build/trees``.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks import report
from benchmarks.harness import cuda_seconds
from benchmarks.suites.attention import DENSE, DOCUMENTS, PACKED, TOKENS

ROOT = Path(__file__).parents[1]
# What a process runs: the package of a checkout, but this module.
_SERVE = """\
import sys
sys.path.insert(0, sys.argv[1])
import flash_attn_cute
sys.path[0] = sys.argv[2]
from benchmarks import trees
trees.serve()
"""
_JOBS = 6  # processes a checkout that compile at the same time
# Asks a process for the milliseconds of so many calls of a row.
Ask: TypeAlias = Callable[[str, int], list[float]]
# Query heads, key heads, d, d_v, length (none: the documents), causal.
Row: TypeAlias = tuple[int, int, int, int, int | None, bool]
# Beside the suites' rows: these have kernels of their own.
MORE: tuple[Row, ...] = (
    (16, 16, 96, 96, 8192, True),
    (16, 16, 192, 128, 8192, True),
    (64, 64, 64, 64, 512, False),
)


def rows() -> dict[str, tuple[str, Row]]:
    """Name -> (pass, row): the suites' rows, and those beside them."""
    dense: list[Row] = [(heads, heads_k, d, d, length, causal) for heads, heads_k, d, length, causal in DENSE]
    documents: list[Row] = [(*heads, heads[2], None, True) for heads in PACKED]
    return {
        f"{kind} {_name(row)}": (kind, row)
        for kind in ("forward", "backward", "deterministic")
        for row in (*dense, *MORE, *documents)
        if kind != "deterministic" or row[2] > 128  # all others are
    }


def _name(row: Row) -> str:
    heads, heads_k, d, d_v, length, causal = row
    shape = f"{heads if heads == heads_k else f'{heads}/{heads_k}'}x{d if d == d_v else f'({d}, {d_v})'}"
    return f"{shape} documents" if length is None else f"{shape} {length} {'causal' if causal else 'full'}"


def serve() -> None:
    """A process of one checkout: reads names and how often, and answers with milliseconds."""
    from flash_attn_cute import flash_attn_func, flash_attn_varlen_func

    device = torch.device("cuda")
    current: tuple[str, Callable[[], Any]] | None = None

    def prepare(kind: str, row: Row) -> Callable[[], Any]:
        heads, heads_k, d, d_v, length, causal = row
        draw = torch.Generator(device).manual_seed(0)
        total = sum(DOCUMENTS) if length is None else TOKENS
        shape = (total,) if length is None else (total // length, length)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*shape, *sizes, generator=draw, device=device, dtype=torch.bfloat16)

        leaves = [normal(heads, d), normal(heads_k, d), normal(heads_k, d_v)]
        dout = normal(heads, d_v)
        options: dict[str, Any] = {"causal": causal, "deterministic": kind == "deterministic", "backend": "sm90"}

        cu = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32, device=device)

        def forward() -> torch.Tensor:
            if length is not None:
                return flash_attn_func(*leaves, **options)
            q, k, v = leaves
            return flash_attn_varlen_func(q, k, v, cu, cu, max(DOCUMENTS), max(DOCUMENTS), **options)

        if kind == "forward":
            return forward
        for leaf in leaves:
            leaf.requires_grad_()
        out = forward()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    every = rows()
    for line in sys.stdin:
        name, times = json.loads(line)
        if current is None or current[0] != name:
            current = None
            run = prepare(*every[name])
            for _ in range(3):
                run()
            current = name, run
        print(json.dumps([1e3 * cuda_seconds(current[1]) for _ in range(times)]), flush=True)


@contextmanager
def _server(checkout: Path) -> Iterator[Ask]:
    environment = os.environ | {"FLASH_ATTN_CUTE_CACHE_DIR": str(checkout / "build" / "trees")}
    command = [sys.executable, "-c", _SERVE, str(checkout), str(ROOT)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(name: str, times: int) -> list[float]:
        assert process.stdin
        assert process.stdout
        answer = ""
        with suppress(BrokenPipeError):
            print(json.dumps([name, times]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{checkout}: its process has ended with {process.wait()}, asked for {name!r}")
        milliseconds: list[float] = json.loads(answer)
        return milliseconds

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def _compile(checkout: Path, names: list[str]) -> None:
    """Has the kernels of some rows on disk."""
    with _server(checkout) as ask:
        for name in names:
            ask(name, 1)


def compare(old: Path, new: Path, names: list[str], rounds: int, times: int) -> dict[str, dict[str, float]]:
    """The median milliseconds of every row in both checkouts, and new over old."""
    with ThreadPoolExecutor(2 * _JOBS) as pool:
        shares = [names[i::_JOBS] for i in range(_JOBS)]
        list(pool.map(_compile, [old] * _JOBS + [new] * _JOBS, shares * 2))
    found = {}
    with _server(old) as ask_old, _server(new) as ask_new:
        for name in names:
            milliseconds: tuple[list[float], list[float]] = [], []
            for i in range(rounds):
                both = [(ask_old, milliseconds[0]), (ask_new, milliseconds[1])]
                for ask, seen in both if i % 2 else both[::-1]:
                    seen += ask(name, times)
            medians = [statistics.median(seen) for seen in milliseconds]
            found[name] = {"old": medians[0], "new": medians[1], "ratio": medians[1] / medians[0]}
            print(f"{name:40} {medians[0]:8.4f} {medians[1]:8.4f} ms   {found[name]['ratio']:.4f}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    # Not above: the processes import this module with the package of their checkout, which may not have it.
    from flash_attn_cute.runtime.command_line import pattern, positive

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trees", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=_checkout)
    parser.add_argument("new", type=_checkout, nargs="?", default=ROOT)
    parser.add_argument("--cases", type=pattern, default="", metavar="REGEX", help="only rows whose names match")
    parser.add_argument("--rounds", type=positive, default=12, help="times that a checkout has its turn (default: 12)")
    parser.add_argument("--times", type=positive, default=4, help="calls a turn (default: 4)")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    chosen = parser.parse_args(arguments)
    names = [name for name in rows() if chosen.cases.search(name)]
    if not names:
        parser.error(f"argument --cases: no row matches {chosen.cases.pattern!r}")
    found = compare(chosen.old, chosen.new, names, chosen.rounds, chosen.times)
    ratios = [row["ratio"] for row in found.values()]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"geometric mean {mean:.4f}, worst {max(ratios):.4f} ({max(found, key=lambda name: found[name]['ratio'])})")
    if chosen.output:
        chosen.output.write_text(report.text({"geometric mean": mean, "rows": found}))


def _checkout(path: str) -> Path:
    if not Path(path, "flash_attn_cute", "__init__.py").is_file():  # or another one's package would be measured
        raise argparse.ArgumentTypeError(f"expected a folder that has the package, got {path!r}")
    return Path(path).resolve()


if __name__ == "__main__":
    main()
