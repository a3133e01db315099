"""Context parallelism on several ranks of this machine, each a process: on a GPU of its own, or on the CPU.

    python -m benchmarks context-parallel --ranks 4

A small one for a CPU, the work of each rank alone, a record, and the model:

    python -m benchmarks context-parallel --ranks 2 --tokens-per-rank 256 --sequence 1024 --heads 4 2 16
    python -m benchmarks context-parallel --ranks 4 --alone
    python -m benchmarks context-parallel --record build/benchmarks/context_parallel-4-cuda-bfloat16.json
    python -m benchmarks context-parallel --model

Ranks take turns together; a turn takes as long as the slowest rank. After each case rank 0 prints a table and writes
``context_parallel-RANKS-DEVICE-DTYPE.json``. Rates are a GPU's, of visible pairs. Beside what was measured stands what
``flash_attn_cute.distributed.cost_model`` predicts for these ranks, and for 8 and 64 with as many tokens each.

With ``--alone`` one process does what each of so many ranks would, one after the other, without messages. With
``--record`` nothing is run: the tables of a file are printed, with today's predictions. Nor is it with ``--model``:
a table of the traffic and the waiting of 8, 64 and 512 ranks is printed (``benchmarks.ranks_model``).
"""

import argparse
import functools
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks import harness, ranks_model, report
from benchmarks.harness import CaseReport
from benchmarks.suites import context_parallel
from benchmarks.suites.context_parallel import ONE, SHARE, Row, Sizes
from benchmarks.work import Passes
from flash_attn_cute.distributed import cost_model
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.process_groups import Transfer
from flash_attn_cute.runtime.command_line import at_least, make_folder, natural, pattern, positive

Messages: TypeAlias = Sequence[tuple[torch.Tensor, int]]

# Numbers of ranks that are predicted beside those measured.
PREDICTED = (8, 64)
_TERA = 1e12
_TIMEOUT = timedelta(seconds=300)
# Bytes that a rank receives from each other one where links are measured.
_MESSAGES = (1 << 20, 1 << 23, 1 << 26)
# Enough writing to memory that the host has launched a run before the GPU comes to it.
_BALLAST_ROUNDS = 6


class Chosen(NamedTuple):
    """The command line's choices."""

    num_ranks: int
    sizes: Sizes
    rounds: int
    seconds: float
    cases: str
    out: Path
    commit: str | None
    on_gpu: bool

    @property
    def device_type(self) -> str:
        """The device type of all ranks."""
        return "cuda" if self.on_gpu else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return torch.bfloat16 if self.on_gpu else torch.float32


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.model:
        print(*ranks_model.table(), sep="\n")
        return 0
    if given.record is not None:
        try:
            _print_record(given.record)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"argument --record: {given.record} is no record of ranks ({type(error).__name__}: {error})")
        return 0
    nheads, nheads_k, _ = given.heads
    if nheads % nheads_k:
        parser.error(f"argument --heads: expected a number that divides the {nheads} query heads, got {nheads_k}")
    chosen = _chosen(given)
    if not any(re.search(chosen.cases, name) for row in chosen.sizes.rows(chosen.num_ranks) for name in _names(row)):
        parser.error(f"argument --cases: no case matches {chosen.cases!r}")
    if chosen.on_gpu and not given.alone and torch.cuda.device_count() < chosen.num_ranks:
        parser.error(f"argument --ranks: expected at most {torch.cuda.device_count()}, the GPUs that there are")
    make_folder(parser, "--out", chosen.out)
    if given.alone:
        _alone(chosen)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (chosen, folder), chosen.num_ranks)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks context-parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=positive, default=max(1, torch.cuda.device_count()), metavar="N")
    parser.add_argument("--tokens-per-rank", type=positive, nargs="+", default=[8192, 16384], help="of documents")
    parser.add_argument("--packs", type=natural, default=3, help="of documents, for each number of tokens")
    parser.add_argument(
        "--sequence", type=positive, default=131_072, help="tokens of the one sequence that all ranks share"
    )
    parser.add_argument("--window", type=positive, default=1024, help="keys that a query of it sees in one row")
    parser.add_argument("--heads", type=positive, nargs=3, default=(64, 8, 128), metavar=("H", "H_K", "D"))
    parser.add_argument("--rounds", type=partial(at_least, 2), default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a contender in a case, after three rounds")
    parser.add_argument("--cases", type=pattern, default="", metavar="REGEX", help="only those whose names match")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--commit", help="as for other suites")
    parser.add_argument("--alone", action="store_true", help="each rank's work in turn, in one process")
    parser.add_argument("--record", type=Path, metavar="FILE", help="print the tables of a file, and run nothing")
    parser.add_argument("--model", action="store_true", help="print what it says of many ranks, and run nothing")
    return parser


def _chosen(given: argparse.Namespace) -> Chosen:
    on_gpu, (nheads, nheads_k, d) = torch.cuda.is_available(), given.heads
    shape = Shape(nheads, nheads_k, d, d, 2 if on_gpu else 4)
    sizes = Sizes(tuple(given.tokens_per_rank), given.packs, given.sequence, given.window, shape)
    cases = given.cases.pattern if given.cases else ""
    return Chosen(given.ranks, sizes, given.rounds, given.seconds, cases, given.out, given.commit, on_gpu)


def _rank(rank: int, chosen: Chosen, folder: str) -> None:
    """One process: measures every case together with the others."""
    device = torch.device("cuda", rank) if chosen.on_gpu else torch.device("cpu")
    if chosen.on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if chosen.on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=chosen.num_ranks,
        timeout=_TIMEOUT,
        device_id=device if chosen.on_gpu else None,
    )
    measure(chosen, device)
    dist.destroy_process_group()


def measure(chosen: Chosen, device: torch.device) -> list[CaseReport]:
    """Measures every case on the ranks of the default group; rank 0 prints and writes."""
    clock = together(device)
    devices: list[Any] = [None] * chosen.num_ranks
    name = torch.cuda.get_device_name(device) if chosen.on_gpu else "cpu"
    dist.all_gather_object(devices, name)
    links = measure_links(clock, device) if chosen.num_ranks > 1 else []
    suite = context_parallel.suite(device, chosen.dtype, chosen.sizes, chosen.rounds, chosen.seconds)
    prints = dist.get_rank() == 0
    output = _Output(chosen, suite.name, {"devices": devices, "links": links}) if prints else None
    if output:
        print(f"{chosen.num_ranks} ranks on {', '.join(sorted(set(devices)))}", *map(_link_line, links), sep="\n")
    reports = []
    for case in suite.cases():
        if re.search(chosen.cases, case.name):
            reports.append(harness.measure(suite, case, clock))
            if output:
                output.add(case.row, reports[-1])
    if output:
        output.end()
    return reports


def _alone(chosen: Chosen) -> None:
    device = torch.device(chosen.device_type)
    suite = context_parallel.alone(device, chosen.dtype, chosen.sizes, chosen.num_ranks, chosen.rounds, chosen.seconds)
    output = _Output(chosen, suite.name, {})
    for case in suite.cases():
        if re.search(chosen.cases, case.name):
            output.add(case.row, harness.measure(suite, case))
    output.end()


def together(device: torch.device) -> harness.Clock:
    """A clock that starts when all ranks are there, and gives all of them the seconds of the slowest."""
    here = torch.zeros(1, device=device)

    def seconds(run: Callable[[], object]) -> float:
        if device.type == "cuda":
            took = harness.cuda_seconds(run, before=lambda: dist.all_reduce(here), ballast_rounds=_BALLAST_ROUNDS)
        else:
            dist.barrier()
            took = harness.clock_of(device)(run)
        slowest = torch.tensor(took, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return seconds


def measure_links(clock: harness.Clock, device: torch.device) -> list[dict[str, Any]]:
    """Seconds of an exchange with all other ranks, and with neighbours alone, by the bytes that a rank receives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group()
    others = [peer for peer in range(size) if peer != rank]
    kinds = {"all ranks": (others, others), "a ring": ([(rank + 1) % size], [(rank - 1) % size])}
    found = []
    for (kind, (targets, sources)), message in ((item, n) for item in kinds.items() for n in _MESSAGES):
        if device.type == "cpu":
            message >>= 10
        sent = torch.ones(message, dtype=torch.uint8, device=device)
        received = [torch.empty_like(sent) for _ in sources]

        sends, receives = [(sent, peer) for peer in targets], list(zip(received, sources, strict=True))
        exchange = partial(_exchange, group, sends, receives)
        exchange()
        times = [clock(exchange) for _ in range(5)]
        found.append({"with": kind, "bytes": message * len(sources), "seconds": statistics.median(times)})
    return found


def _exchange(group: Any, sends: Messages, receives: Messages) -> None:
    Transfer(group, sends, receives).wait()


def _link_line(link: dict[str, Any]) -> str:
    size, seconds = link["bytes"], link["seconds"]
    rate = size / seconds / 1e9
    return f"  {size / 1e6:.1f} MB received from {link['with']}: {seconds * 1e6:.0f} us, {rate:.0f} GB/s"


class _Output:
    """Tables on the terminal and the file, after each case."""

    def __init__(self, chosen: Chosen, name: str, more: dict[str, Any]) -> None:
        dtype = str(chosen.dtype).removeprefix("torch.")
        self._path = chosen.out / f"{name}-{chosen.num_ranks}-{chosen.device_type}-{dtype}.json"
        self._chosen = chosen
        sizes = chosen.sizes._asdict() | {"shape": chosen.sizes.shape._asdict()}
        environment = report.environment(torch.device(chosen.device_type), chosen.dtype, chosen.commit)
        self._environment = environment | {"ranks": chosen.num_ranks, "sizes": sizes} | more
        self._reports: list[CaseReport] = []

    def add(self, row: Row, found: CaseReport) -> None:
        """Prints and writes another case."""
        self._reports.append(found)
        print(table(row, found, self._chosen.num_ranks, self._chosen.sizes), flush=True)
        report.write_json(self._path, self._environment, self._reports)

    def end(self) -> None:
        """Prints the means over rows that differ in lengths alone, and where the record is."""
        print(*mean_lines(self._reports, self._chosen.num_ranks), f"wrote {self._path}", sep="\n")


def _print_record(path: Path) -> None:
    environment, reports = json.loads(path.read_text())["environment"], report.read_json(path)
    given = environment["sizes"]
    sizes = Sizes(
        tuple(given["tokens_per_rank"]), given["packs"], given["sequence"], given["window"], Shape(**given["shape"])
    )
    ranks = environment["ranks"]
    rows = {name: row for row in sizes.rows(ranks) for name in _names(row)}
    for found in reports:
        print(table(rows[found.name], found, ranks, sizes))
    print(*mean_lines(reports, ranks), sep="\n")


def _names(row: Row) -> list[str]:
    return [f"{row.name}, {passes}" for passes in context_parallel.PASSES]


@functools.cache
def predicted(row: Row, num_ranks: int, shape: Shape) -> dict[str, tuple[float, float]]:
    """Seconds of either pass by each method on so many ranks; what "auto" chooses is under its name, too."""
    layout = row.layout(num_ranks)
    forward, backward = cost_model.computing(layout, shape)
    found = cost_model.estimates(layout, shape)
    seconds = {name: (forward + e.forward, backward + e.backward) for name, e in found.items()}
    return seconds | {"auto": seconds[cost_model.best(found)], SHARE: (forward, backward)}


def table(row: Row, found: CaseReport, num_ranks: int, sizes: Sizes) -> str:
    """One case: a line a contender, what the model predicts, and rates that it predicts for more ranks."""
    passes: Any = found.name.rpartition(", ")[2]
    which, here = context_parallel.PASSES.index(passes), predicted(row, num_ranks, sizes.shape)
    elsewhere = [_predicted_rates(row, ranks, sizes, passes) for ranks in PREDICTED]
    headers = "", "ms", "p10..p90", "TFLOP/s a GPU", "of gemm", "ratio", "to", "model ms", "off", "MB"
    rows: list[tuple[str, ...]] = [(*headers, *(f"model at {ranks}" for ranks in PREDICTED))]
    for name, time in found.times.items():
        peak, against = found.peak_bytes[name], found.against.get(name)
        rate, base = _rate(found, name, num_ranks), name.removesuffix(", deterministic")
        model = here[base][which] if base in here else None
        rows.append(
            (
                name,
                f"{time.median * 1e3:.3f}",
                f"{time.p10 * 1e3:.3f}..{time.p90 * 1e3:.3f}",
                f"{rate / _TERA:.3g}",
                f"{rate / found.flop_rate.median:.0%}",
                "" if against is None else f"{found.ratios[name, against].median:.3f}",
                against or "",
                "" if model is None else f"{model * 1e3:.3f}",
                "" if model is None else f"{model / time.median - 1:+.0%}",
                "unknown" if peak is None else f"{peak / 1e6:.0f}",
                *("" if base not in rates else f"{rates[base] / _TERA:.0f}" for rates in elsewhere),
            )
        )
    return "\n".join([f"{found.name}: {found.detail}", *report.aligned(rows), *report.unavailable(found)])


def _predicted_rates(row: Row, num_ranks: int, sizes: Sizes, passes: Passes) -> dict[str, float]:
    """FLOP/s of a GPU by each method in the row of that name on so many ranks."""
    other = next(other for other in sizes.rows(num_ranks) if other.name == row.name)
    flop, which = other.flop(sizes.shape, passes) / num_ranks, context_parallel.PASSES.index(passes)
    return {name: flop / seconds[which] for name, seconds in predicted(other, num_ranks, sizes.shape).items()}


def _rate(found: CaseReport, name: str, num_ranks: int) -> float:
    """FLOP/s of one GPU."""
    # With --alone, too, a contender but the reference does one rank's part.
    return found.work.flop / found.times[name].median / (1 if name == ONE else num_ranks)


def mean_lines(reports: Sequence[CaseReport], num_ranks: int) -> list[str]:
    """Means of rates over rows that differ in lengths alone: of either pass, and of both one after the other."""
    rates: dict[tuple[str, str], dict[str, list[float]]] = {}
    for found in reports:
        kind, _, passes = found.panel.rpartition(", ")
        for name in found.times:
            rates.setdefault((kind, name), {}).setdefault(passes, []).append(_rate(found, name, num_ranks) / _TERA)
    lines = ["means, TFLOP/s a GPU"]
    for (kind, name), of in rates.items():
        means = {passes: statistics.fmean(each) for passes, each in of.items()}
        if len(means) == 2:
            means["both"] = 3.5 / (1 / means["forward"] + 2.5 / means["backward"])
        said = ", ".join(f"{passes} {mean:.3g}" for passes, mean in means.items())
        lines.append(f"  {kind}: {name}: {said}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
