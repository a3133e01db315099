"""Runs a suite of benchmarks: contenders against each other in one process, taking turns.

    python -m benchmarks packed
    python -m benchmarks forward     # or backward, or both of them; need a Hopper GPU
    python -m benchmarks lengths     # forward and backward from 512 to 32k; needs one, too
    python -m benchmarks bias        # masks and biases, forward and backward; so does bias-lengths
    python -m benchmarks sparse      # block masks, forward and backward; so does sparse-lengths, up to 128k
    python -m benchmarks sparse-tables  # what making a block mask costs
    python -m benchmarks selected    # key blocks that each query selects, both passes
    python -m benchmarks context-parallel --ranks 4  # options: benchmarks/over_ranks.py
    python -m benchmarks backward --cases '8k|documents'
    python -m benchmarks packed --device cpu --dtype bfloat16 --out build/benchmarks

Prints a table a case, means over all of them and a line a bar or limit, writes ``SUITE-DEVICE-DTYPE.json`` (after every
case) and ``.png`` to the output folder, and exits with 1 if a bar or limit fails. The plot needs matplotlib
(``pip install matplotlib``).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, over_ranks, plot, report
from benchmarks.suites import attention, bias, packed, selected, sparse
from flash_attn_cute.runtime.command_line import make_folder, pattern

SUITES: dict[str, Callable[[torch.device, torch.dtype], harness.Suite[Any]]] = {
    "forward": partial(attention.suite, "forward"),
    "backward": partial(attention.suite, "backward"),
    "both": partial(attention.suite, "both"),
    "lengths": attention.lengths,
    "packed": packed.suite,
    "bias": bias.suite,
    "bias-lengths": bias.lengths,
    "sparse": sparse.suite,
    "sparse-lengths": sparse.lengths,
    "sparse-tables": sparse.tables,
    "selected": selected.suite,
}

# Suites whose cases are small enough.
_ON_CPU = ("packed", "sparse-tables")

# Not a suite of one process; it has options of its own.
_OVER_RANKS = "context-parallel"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == [_OVER_RANKS]:
        return over_ranks.main(given[1:])
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda, where there is one")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--cases", type=pattern, default="", metavar="REGEX", help="only those whose names match")
    parser.add_argument(
        "--commit", help="where there is no git: what `git describe --always --abbrev=40 --dirty` prints"
    )
    chosen = parser.parse_args(given)
    if chosen.device == "cuda" and not on_gpu:
        parser.error("argument --device: expected cpu, as PyTorch sees no GPU, got cuda")
    if chosen.device is None and not on_gpu and chosen.suite not in _ON_CPU:
        sizes = f"the cases of {chosen.suite} have the size of one: --device cpu takes hours"
        parser.error(f"argument suite: expected {' or '.join(_ON_CPU)}, as PyTorch sees no GPU; {sizes}")
    chosen.device = chosen.device or ("cuda" if on_gpu else "cpu")
    device = torch.device(chosen.device)
    dtype_name = chosen.dtype or ("bfloat16" if chosen.device == "cuda" else "float32")
    dtype: torch.dtype = getattr(torch, dtype_name)

    suite = SUITES[chosen.suite](device, dtype)
    bars = [bar for bar in suite.bars if chosen.cases.search(bar.case)]
    limits = [limit for limit in suite.limits if chosen.cases.search(limit.case)]
    environment = report.environment(device, dtype, chosen.commit)
    path = chosen.out / f"{suite.name}-{chosen.device}-{dtype_name}.json"
    make_folder(parser, "--out", chosen.out)
    reports: list[harness.CaseReport] = []
    for case in suite.cases():
        if chosen.cases.search(case.name):
            reports.append(harness.measure(suite, case))
            print(report.table(reports[-1]), flush=True)
            report.write_json(path, environment, reports)
    if not reports:
        parser.error(f"argument --cases: no case of {suite.name} matches {chosen.cases.pattern!r}")
    for mean in harness.means(reports):
        print(report.mean_line(mean))
    verdicts, rulings = harness.judge(bars, reports), harness.rule(limits, reports)
    for verdict in verdicts:
        print(report.verdict_line(verdict))
    for ruling in rulings:
        print(report.ruling_line(ruling))
    print(f"wrote {path}")
    try:
        plot.write_plot(path.with_suffix(".png"), path.stem, reports)
        print(f"wrote {path.with_suffix('.png')}")
    except ImportError:
        print("no plot: matplotlib is missing (pip install matplotlib)")
    return 0 if all(verdict.passed for verdict in verdicts) and all(ruling.passed for ruling in rulings) else 1


if __name__ == "__main__":
    sys.exit(main())
