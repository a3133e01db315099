"""Workloads for profilers, and timelines of recorded traces: ``profile workload`` and ``profile timeline``."""

import argparse
import contextlib
import enum
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.profile import __main__, machine, timeline, workload

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("direction", workload.DIRECTIONS)
@pytest.mark.parametrize("shape", [["--batch", "2", "--seqlen", "17"], ["--documents", "5,1,20"]], ids=str)
def test_workload_runs(direction: str, shape: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes asked for, as often as asked for, after three times to warm up."""
    passes: list[str] = []

    class Counted(PortableBackend):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            passes.append("f")
            return super().forward(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            passes.append("b")
            return super().backward(*args, **kwargs)

    monkeypatch.setitem(dispatch.BACKENDS, "portable", Counted())
    arguments = [*shape, "--heads", "4", "--heads-k", "2", "--head-dim", "8", "--dtype", "float32", "--causal"]
    assert workload.main([*arguments, "--device", "cpu", "--direction", direction, "--calls", "2"]) == 0
    expected = {"forward": ["f"] * 5, "both": ["f", "b"] * 5, "backward": ["f", *(["b"] * 5)]}
    assert passes == expected[direction]


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    workload.add_options(parser)
    workload.add_calls(parser)
    return parser.parse_args(arguments)


def test_workload_survives_its_own_command_line() -> None:
    """A profiler is given the command that was asked for."""
    for arguments in (
        ["--documents", "5,1,20", "--heads", "4", "--heads-k", "2", "--direction", "both"],
        ["--batch", "3", "--seqlen", "33", "--head-dim", "64", "--causal", "--backend", "portable"],
        ["--dtype", "float16"],
    ):
        asked = workload.Workload.chosen(parsed(arguments))
        python, flag, module, tool, *rest = asked.command(calls=7)
        assert (python, flag, module, tool) == (sys.executable, "-m", "flash_attn_cute.profile", "workload")
        again = parsed(rest)
        assert workload.Workload.chosen(again) == asked
        assert again.calls == 7


class FakeDriver:
    """Stands in for cuda-python's bindings of the driver, and writes down what is called."""

    class CUresult(enum.Enum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_CONTEXT = 201

    def __init__(self, answer: str = "CUDA_SUCCESS") -> None:
        self.answer = self.CUresult[answer]
        self.calls: list[str] = []

    def __getattr__(self, function: str) -> Callable[[], tuple[enum.Enum]]:
        def call() -> tuple[enum.Enum]:
            self.calls.append(function)
            return (self.answer,)

        return call


@pytest.mark.parametrize("fails", [False, True])
def test_profiled_calls_are_between_start_and_stop(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing left to do for the device before it starts, and before it stops, which it does in any case."""
    driver, device = FakeDriver(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.calls.append("synchronize"))
    with contextlib.suppress(KeyError), workload._profiled(driver, device):
        driver.calls.append("profiled")
        if fails:
            raise KeyError
    finished = [] if fails else ["synchronize"]
    assert driver.calls == ["synchronize", "cuProfilerStart", "profiled", *finished, "cuProfilerStop"]
    refusing = FakeDriver("CUDA_ERROR_INVALID_CONTEXT")
    with pytest.raises(RuntimeError, match="cuProfilerStart: CUDA_ERROR_INVALID_CONTEXT"):
        workload._profiled(refusing, device).__enter__()


def test_the_bindings_have_what_is_called() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    assert machine.cuda_driver() is driver
    assert driver.cuProfilerStart
    assert driver.cuProfilerStop
    assert driver.CUresult.CUDA_SUCCESS == 0


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert workload.main([]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "python -m flash_attn_cute.profile workload: cuda-bindings is needed to start and stop the profiler ("
    )
    assert message.endswith("pip install cuda-bindings\n")


@pytest.mark.parametrize("tool", ["workload", "timeline"])
def test_a_workload_that_is_too_large_is_refused(tool: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(workload, "step", fail)
    assert __main__.main([tool, "--device", "cpu"]) == 1
    assert capsys.readouterr().err == f"python -m flash_attn_cute.profile {tool}: CUDA out of memory\n"


# What PyTorch's profiler records

KERNEL = "kernel_cutlass_kernel_flash_attn_cutekernelssm90forwardForwardSm90_object_at__0"
BACKWARD = KERNEL.replace("forwardForwardSm90", "backwardctaBackwardCtaSm90")


def event(category: str, name: str, start: int, stop: int, thread: int = 1, **arguments: int) -> dict[str, Any]:
    """Events as traces have them, in microseconds since anything."""
    times = {"ts": 1e9 + start, "dur": stop - start}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "args": arguments, **times}


EVENTS = [
    event("cpu_op", "aten::empty", 10, 15),  # within the next
    event("cpu_op", "FlashAttention", 0, 90),
    event("cpu_op", "aten::mm", 120, 150),
    event("cpu_op", "FlashAttentionBackward", 200, 280, thread=9),
    event("kernel", KERNEL, 50, 440, device=0, stream=7),
    event("kernel", "nvjet_hsh_128x256", 450, 600, device=0, stream=7),
    event("kernel", BACKWARD, 600, 1900, device=0, stream=7),
    event("gpu_memcpy", "Memcpy HtoD", 430, 500, device=0, stream=13),
    event("user_annotation", "ProfilerStep#1", 0, 2000),
    {"ph": "i", "name": "a mark", "ts": 1e9},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": EVENTS}))
    return path


def test_what_a_trace_holds(trace: Path) -> None:
    spans = timeline.read(trace)
    assert sorted((span.row, span.name, round(span.start, 3), round(span.stop, 3)) for span in spans) == [
        ("GPU 0, stream 13", "Memcpy HtoD", 0.43, 0.5),
        ("GPU 0, stream 7", BACKWARD, 0.6, 1.9),
        ("GPU 0, stream 7", KERNEL, 0.05, 0.44),
        ("GPU 0, stream 7", "nvjet_hsh_128x256", 0.45, 0.6),
        ("host, thread 1", "FlashAttention", 0.0, 0.09),
        ("host, thread 1", "aten::mm", 0.12, 0.15),
        ("host, thread 2", "FlashAttentionBackward", 0.2, 0.28),
    ]
    assert timeline.busy(spans[:0]) == 0
    assert timeline.summary(spans) == "1.90 ms, the GPU busy 97%, with attention 89%"
    assert timeline.summary([span for span in spans if span.row[0] == "h"]) == "0.28 ms, nothing on a GPU"


def test_traces_may_be_compressed_and_have_to_be_traces(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(trace.read_bytes()))
    assert timeline.read(tmp_path / "trace.json.gz") == timeline.read(trace)
    for name, content, why in (
        ("x", b"[1]", "TypeError"),
        ("y", b"{}", "KeyError"),
        ("z", b"no", "JSONDecodeError"),
        ("number", b'{"traceEvents": [1]}', "TypeError"),
        ("untimed", b'{"traceEvents": [{"ph": "X"}]}', "KeyError"),
        ("cut.gz", gzip.compress(trace.read_bytes())[:-20], "EOFError"),
    ):
        (tmp_path / name).write_bytes(content)
        assert timeline.main(["--trace", str(tmp_path / name)]) == 2
        assert f"{tmp_path / name} is no trace of torch.profiler ({why}: " in capsys.readouterr().err
    assert timeline.main(["--trace", str(tmp_path / "missing")]) == 2
    assert "missing is no trace of torch.profiler (FileNotFoundError: " in capsys.readouterr().err


def test_a_picture_of_a_trace(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    axes = timeline.figure(timeline.read(trace), "a title").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "GPU 0, stream 13",
        "GPU 0, stream 7",
        "host, thread 2",
        "host, thread 1",
    ]
    assert sum(len(bars.get_paths()) for bars in axes.collections) == 7
    assert {"ForwardSm90", "BackwardCtaSm90"} <= {text.get_text() for text in axes.texts}
    picture = tmp_path / "new" / "timeline.png"
    given = ["--trace", str(trace), "--out", str(picture)]
    assert timeline.main([*given, "--start", "0.5", "--stop", "0.7"]) == 0
    assert capsys.readouterr().out == f"1.45 ms, the GPU busy 100%, with attention 90%\nwrote {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert timeline.main([*given, "--start", "3"]) == 1
    assert "nothing to draw between --start and --stop" in capsys.readouterr().err


def test_attention_alone_is_recorded(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    shape = ["--device", "cpu", "--batch", "1", "--seqlen", "20", "--heads", "2", "--dtype", "float32", "--calls", "2"]
    assert __main__.main(["timeline", *shape, "--out", str(tmp_path / "x.png")]) == 0
    assert re.fullmatch(r"\d+\.\d\d ms, nothing on a GPU\nwrote .*x.png\n", capsys.readouterr().out)
    options = "--documents 3,4 --causal --heads 2 --head-dim 8 --dtype float32 --direction both"
    timeline.record(workload.Workload.chosen(parsed(options.split())), 2, torch.device("cpu"), tmp_path / "trace.json")
    steps = [span.name for span in timeline.read(tmp_path / "trace.json") if span.attention]
    assert len(steps) == 4, steps
    assert steps[0] == steps[2] == "FlashAttention"


def test_a_timeline_without_matplotlib(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert timeline.main(["--trace", str(trace)]) == 2
    assert capsys.readouterr().err.endswith("pip install matplotlib\n")
