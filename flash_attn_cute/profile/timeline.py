"""A picture of a timeline, by PyTorch's own profiler: what the host does, and what the GPU.

    python -m flash_attn_cute.profile timeline --heads 32 --heads-k 8 --seqlen 4096 --causal
    python -m flash_attn_cute.profile timeline --trace trace.json --start 20 --stop 35

Records attention alone in the shape that options choose, or draws a trace that a program has written by
torch.profiler's export_chrome_trace. Prints how long the GPU was busy, and with attention. Needs matplotlib and none of
NVIDIA's profilers. Exits with 2 where matplotlib, a GPU or the trace is missing, with 1 if there is nothing to draw.
"""

import argparse
import gzip
import json
import re
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_attn_cute.profile import workload
from flash_attn_cute.profile.machine import Unavailable, require_gpu
from flash_attn_cute.profile.workload import Workload
from flash_attn_cute.runtime.command_line import picture, run_command

_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
# Kernels of this package are named after their modules and classes; on the host there is its step of autograd.
_KERNEL = re.compile(r"flash_attn_cutekernels[a-z0-9_]*([A-Z]\w*?)_object_at")
_ATTENTION = re.compile(_KERNEL.pattern + r"|FlashAttention")
_COLOURS = {True: "C1", False: "C0"}
_LETTERS = 150  # fit into the width of the picture
_LEAST_LETTERS = 6  # of a name, to be worth its place


class Span(NamedTuple):
    """Something that took time: on which row of the picture, called what, from when to when in milliseconds."""

    row: str
    name: str
    start: float
    stop: float

    @property
    def attention(self) -> bool:
        """Whether it is this package's."""
        return _ATTENTION.search(self.name) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_cute.profile timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=picture, default=Path("build/profiles/timeline.png"), help="the picture's file (%(default)s)"
    )
    parser.add_argument("--trace", type=Path, help="draw this trace, and record nothing")
    parser.add_argument(
        "--start", type=float, default=0.0, metavar="MS", help="of the trace, what is drawn (%(default)s)"
    )
    parser.add_argument("--stop", type=float, default=float("inf"), metavar="MS", help="of the trace (its end)")
    workload.add_options(parser)
    workload.add_calls(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.set_defaults(direction="both")
    options = parser.parse_args(arguments)
    try:
        spans = _spans(options)
        _import_matplotlib()
    except Unavailable as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    except (ValueError, torch.OutOfMemoryError) as error:  # of a call that the package or the GPU cannot serve
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    shown = [span for span in spans if span.stop > options.start and span.start < options.stop]
    if not shown:
        print(f"{parser.prog}: nothing to draw between --start and --stop", file=sys.stderr)
        return 1
    text = summary(shown)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure(shown, text).savefig(options.out, dpi=100)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: --out: {error}", file=sys.stderr)
        return 1
    print(f"{text}\nwrote {options.out}")
    return 0


def record(chosen: Workload, calls: int, device: torch.device, path: Path) -> None:
    """Writes the trace of so many calls of attention alone, after a warm-up."""
    step = workload.step(chosen, device)
    for _ in range(workload.WARM_UP_CALLS):
        step()
    with torch.profiler.profile() as profiler:  # of all that there is: the CPU, and a GPU
        for _ in range(calls):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))


def read(path: Path) -> list[Span]:
    """Events of a trace: all on GPUs, and the outermost ones of the host; times count from the first event.

    Args:
        path: JSON as torch.profiler's export_chrome_trace writes it, or that in gzip's format, named ``.gz``.

    Raises:
        Unavailable: the file holds no such trace, or cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _spans_of([event for event in json.load(file)["traceEvents"] if event["ph"] == "X"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{path} is no trace of torch.profiler ({type(error).__name__}: {error})") from error


def _spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Spans of complete events, as ``read`` returns them."""
    spans = []
    host: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        begin, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        category, details = event.get("cat"), event.get("args", {})
        if category in _ON_GPU:
            spans.append(
                Span(f"GPU {details.get('device', 0)}, stream {details.get('stream', 0)}", event["name"], begin, end)
            )
        elif category == "cpu_op":
            host[event["tid"]].append((begin, -end, event["name"]))
    for number, thread in enumerate(sorted(host, key=lambda tid: min(host[tid])), 1):
        done = -float("inf")
        for begin, minus_end, name in sorted(host[thread]):
            if begin >= done:
                done = -minus_end
                spans.append(Span(f"host, thread {number}", name, begin, done))
    first = min((span.start for span in spans), default=0.0)
    return [span._replace(start=span.start - first, stop=span.stop - first) for span in spans]


def busy(spans: Iterable[Span]) -> float:
    """Milliseconds in which at least one of them goes on."""
    total, done = 0.0, -float("inf")
    for start, stop in sorted((span.start, span.stop) for span in spans):
        total += max(0.0, stop - max(start, done))
        done = max(done, stop)
    return total


def summary(spans: Sequence[Span]) -> str:
    """How long it took, and how much of that the GPU was busy, and with attention."""
    took = max(span.stop for span in spans) - min(span.start for span in spans)
    on_gpu = [span for span in spans if span.row.startswith("GPU")]
    if not on_gpu:
        return f"{took:.2f} ms, nothing on a GPU"
    attention = busy(span for span in on_gpu if span.attention)
    return f"{took:.2f} ms, the GPU busy {busy(on_gpu) / took:.0%}, with attention {attention / took:.0%}"


def figure(spans: Sequence[Span], title: str) -> Any:
    """A matplotlib figure with a row for each thread and stream."""
    from matplotlib.figure import Figure  # late, as the other tools do without

    # From the bottom: the last stream of the last GPU, and so on to the host's first thread.
    rows = sorted({span.row for span in spans}, key=_place, reverse=True)
    start, stop = min(span.start for span in spans), max(span.stop for span in spans)
    drawn = Figure(figsize=(14, 1.2 + 0.7 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    for at, row in enumerate(rows):
        here = [span for span in spans if span.row == row]
        for attention, colour in _COLOURS.items():
            bars = [(span.start, span.stop - span.start) for span in here if span.attention == attention]
            axes.broken_barh(bars, (at - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
        for span in here:
            letters = int((span.stop - span.start) / (stop - start) * _LETTERS)
            if letters >= _LEAST_LETTERS:
                middle = (span.start + span.stop) / 2
                axes.text(middle, at, _short(span.name)[:letters], ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlim(start, stop)
    axes.set_xlabel("milliseconds; orange: attention of this package, blue: everything else")
    axes.set_title(title)
    return drawn


def _spans(options: argparse.Namespace) -> list[Span]:
    if options.trace is not None:
        return read(options.trace)
    if options.device == "cuda":
        require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record(Workload.chosen(options), options.calls, torch.device(options.device), path)
        return read(path)


def _import_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"matplotlib is needed to draw ({error}): pip install matplotlib") from error


def _place(row: str) -> tuple[bool, list[int]]:
    """Rows of the host come first, then GPUs; each by their numbers."""
    return row.startswith("GPU"), [int(number) for number in re.findall(r"\d+", row)]


def _short(name: str) -> str:
    """Short name for a bar: a kernel's class, or an operator without its namespace."""
    kernel = _KERNEL.search(name)
    return kernel[1] if kernel else re.split(r"::| ", name)[-1]


if __name__ == "__main__":
    run_command(main)
