"""The profiling tools: where they look, what they run, what they read. Fake profilers stand in for NVIDIA's."""

import argparse
import contextlib
import enum
import functools
import gzip
import json
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.profile import __main__, machine, ncu, ncu_report, nsys, timeline, workload
from tests.lib.checks import hopper_alone

MAIN = {"ncu": ncu.main, "nsys": nsys.main, "workload": workload.main}
KERNEL = "kernel_cutlass_kernel_flash_attn_cutekernelssm90forwardForwardSm90_object_at__0"
STALLED = "smsp__average_warps_issue_stalled_"

# As ncu prints them: a metric that was not collected is missing, one that failed is n/a, thousands have commas.
RAW = f"""\
==PROF== Disconnected
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","gpu__time_duration.sum","launch__registers_per_thread","lts__t_sector_hit_rate.pct",\
"sm__cycles_elapsed.max","sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",\
"{STALLED}gmma_per_issue_active.ratio","{STALLED}wait_per_issue_active.ratio",\
"{STALLED}long_scoreboard_per_issue_active.ratio","device__attribute_display_name"
"","","","","","","","","","","","byte","ns","register/thread","%","cycle","%","inst","inst","inst",""
"0","4242","python3.12","127.0.0.1","{KERNEL}","1","7","(384, 1, 1)","(4,096, 1, 1)","0","9.0",\
"201,326,592","1,234,500","168","n/a","2,098,650","79.125","3.0","1.0","4.0","NVIDIA H200"

"""
SOURCE = f"""\
"Kernel Name","{KERNEL}"
"#","Address","Source","Warp Stall Sampling (All Samples)","# Samples","Instructions Executed","stall_gmma",\
"stall_gmma_not_issued","stall_wait"
"0","0x100","      LDC R1, c[0x0][0x28] ","0","0","1,536","0","0","0"
"1","0x110","      WARPGROUP.DEPBAR.LE gsb0, 0x1 ","300","300","1,536","290","999","10"
"2","0x120","@P0   MUFU.EX2 R4, R4 ","1,100","1,100","9,216","100","0","1,000"
"3","0x130","      EXIT ","0","0","1,536","0","0","0"
"""
QUERY = f"""\
Device NVIDIA H200 (GH100)
-----------------------------
Metric Name                Metric Type  Metric Unit  Metric Description
dram__bytes_read           Counter      byte         # of bytes read from DRAM
gpu__time_duration         Counter      nsecond      incremental duration in nanoseconds
sm__cycles_elapsed         Counter      cycle        # of cycles elapsed on SM
{STALLED}gmma_per_issue_active  Ratio  inst  average # of warps
"""
RANGES = """\
Generating SQLite file

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
90.0,2500000000,1,2500000000.0,2500000000.0,2500000000,2500000000,0.0,PushPop,:flash_attn_cute compile forward d128/128
10.0,400000,8,50000.0,45500.0,40000,90000,100.0,PushPop,"flash_attn_cute forward sm90 b4 s8192 window 4,None"
"""
KERNELS = f"""\
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
100.0,9876000,8,1234500.0,1234000.0,1200000,1300000,10.0,{KERNEL}
"""


def executable(path: Path, script: str = "") -> Path:
    """A shell script that writes its arguments, one a line, to ``calls`` beside it, and then runs ``script``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" "=" >> "{path.parent}/calls"\n{script}\n')
    path.chmod(0o755)
    return path


def calls(folder: Path) -> list[list[str]]:
    """The arguments of every call of the executables in a folder."""
    return [call.split("\n")[1:] for call in (folder / "calls").read_text().split("\n=\n")[:-1]]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of executables, first on PATH, on a machine with a GPU."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return folder


def following(arguments: list[str], option: str) -> list[str]:
    """The words behind every occurrence of an option."""
    return [value for name, value in pairwise(arguments) if name == option]


# Finding


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ("ncu", "usr/local/cuda/bin"),
        ("ncu", "usr/local/cuda-13.0/nsight-compute-2025.3.1"),
        ("ncu", "opt/nvidia/nsight-compute/2025.3.1"),
        ("nsys", "usr/local/cuda-12.9/bin"),
        ("nsys", "opt/nvidia/nsight-systems/2025.5.2/bin"),
        ("nsys", "opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64"),
    ],
)
def test_finds_tools_outside_path(tool: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    expected = executable(tmp_path / place / tool)
    assert machine.find(tool, tmp_path) == expected


def test_path_comes_first_and_then_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    folder = tmp_path / "opt/nvidia/nsight-compute"
    for version in ("2025.3.1", "2025.10.0", "2024.1.0"):
        executable(folder / version / "ncu")
    (folder / "2026.1.0").mkdir()
    (folder / "2026.1.0" / "ncu").write_text("not executable")
    assert machine.find("ncu", tmp_path) == folder / "2025.10.0" / "ncu"
    expected = executable(tmp_path / "path" / "ncu")
    assert machine.find("ncu", tmp_path) == expected


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_a_missing_tool_is_named(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one message: what is missing, where it was looked for, where it comes from."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(f"flash_attn_cute.profile.{tool}.find", functools.partial(machine.find, root=tmp_path))
    assert MAIN[tool]([]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        f"python -m flash_attn_cute.profile {tool}: {tool} was not found, neither on PATH nor in {tmp_path}/usr"
    )
    assert f"{tmp_path}/opt/nvidia/nsight-compute/*" in message
    assert "https://developer.nvidia.com/nsight-" in message


@pytest.mark.parametrize("tool", MAIN)
def test_a_missing_gpu_is_named(
    tool: str, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    executable(path / "ncu")
    executable(path / "nsys")
    assert MAIN[tool]([]) == 2
    assert (
        f"flash_attn_cute.profile {tool}: An NVIDIA GPU is needed, and this PyTorch ({torch.__version__})"
        in capsys.readouterr().err
    )
    assert not (path / "calls").exists()


@pytest.mark.parametrize("tool", MAIN)
def test_help(tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = "flash_attn_cute.profile.__main__"
    monkeypatch.setattr(sys, "argv", [module, tool, "--help"])
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__")
    assert not stopped.value.code
    shown = capsys.readouterr()
    assert shown.err == ""
    for option in ("--heads-k", "--documents", "--causal", "--direction"):
        assert option in shown.out


def test_tools_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), ([], 2), (["vtune"], 2)):
        with pytest.raises(SystemExit) as stopped:
            __main__.main(arguments)
        assert stopped.value.code == code
    printed = capsys.readouterr()
    assert "profile ncu -- python train.py" in printed.out
    assert "invalid choice: 'vtune'" in printed.err


# The workload


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


def test_workload_survives_its_own_command_line() -> None:
    """A profiler is given the command that was asked for."""
    parser = argparse.ArgumentParser()
    workload.add_options(parser)
    workload.add_calls(parser)
    for arguments in (
        ["--documents", "5,1,20", "--heads", "4", "--heads-k", "2", "--direction", "both"],
        ["--batch", "3", "--seqlen", "33", "--head-dim", "64", "--causal", "--backend", "portable"],
        ["--dtype", "float16"],
    ):
        asked = workload.Workload.chosen(parser.parse_args(arguments))
        python, flag, module, tool, *rest = asked.command(calls=7)
        assert (python, flag, module, tool) == (sys.executable, "-m", "flash_attn_cute.profile", "workload")
        again = parser.parse_args(rest)
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


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert workload.main([]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "python -m flash_attn_cute.profile workload: cuda-bindings is needed to start and stop the profiler ("
    )
    assert message.endswith("pip install cuda-bindings\n")


@pytest.mark.parametrize("tool", ["workload", "timeline"])
def test_a_workload_that_is_too_large_is_refused(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(workload, "step", fail)
    assert __main__.main([tool, "--device", "cpu"]) == 1
    assert capsys.readouterr().err == f"python -m flash_attn_cute.profile {tool}: CUDA out of memory\n"


@pytest.mark.parametrize("arguments", [["--heads", "0"], ["--documents", "4,0"], ["--seqlen", "-3"]], ids=str)
def test_workload_refuses_what_is_not_positive(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        workload.main(arguments)
    assert stopped.value.code == 2
    assert "expected a number, 1 or more, got" in capsys.readouterr().err


# What PyTorch's profiler records

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


def test_traces_may_be_compressed_and_have_to_be_traces(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_picture_of_a_trace(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_attention_alone_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shape = ["--device", "cpu", "--batch", "1", "--seqlen", "20", "--heads", "2", "--dtype", "float32", "--calls", "2"]
    assert __main__.main(["timeline", *shape, "--out", str(tmp_path / "x.png")]) == 0
    assert re.fullmatch(r"\d+\.\d\d ms, nothing on a GPU\nwrote .*x.png\n", capsys.readouterr().out)
    options = argparse.Namespace(**{"heads_k": None, "documents": (3, 4), "causal": True, "backend": None})
    options.batch, options.seqlen, options.heads, options.head_dim = 1, 20, 2, 8
    options.dtype, options.direction = "float32", "both"
    timeline.record(workload.Workload.chosen(options), 2, torch.device("cpu"), tmp_path / "trace.json")
    steps = [span.name for span in timeline.read(tmp_path / "trace.json") if span.attention]
    assert len(steps) == 4, steps
    assert steps[0] == steps[2] == "FlashAttention"


def test_a_timeline_without_matplotlib(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert timeline.main(["--trace", str(trace)]) == 2
    assert capsys.readouterr().err.endswith("pip install matplotlib\n")


# What ncu prints


def test_raw_page() -> None:
    (kernel,) = ncu_report.parse_raw(RAW)
    assert (kernel.name, kernel.grid, kernel.block) == (KERNEL, "(4,096, 1, 1)", "(384, 1, 1)")
    assert kernel.metrics["gpu__time_duration.sum"] == 1234500.0
    assert kernel.metrics["dram__bytes_read.sum"] == 192 * 2**20
    assert "lts__t_sector_hit_rate.pct" not in kernel.metrics
    with pytest.raises(ValueError, match="expected a table"):
        ncu_report.parse_raw("==ERROR== nothing\n")


def test_summary() -> None:
    (kernel,) = ncu_report.parse_raw(RAW)
    lines = {line[:46].strip(): line[46:].strip() for line in ncu_report.summary(kernel).splitlines()}
    assert lines["duration"] == "1,234.50 us"
    assert lines["cycles"] == "2,098,650"
    assert lines["SM clock"] == "1.70 GHz"
    assert lines["tensor, 16-bit products (HMMA, HGMMA)"] == "79.1 %"
    assert lines["DRAM read"] == "192.0 MiB"
    assert lines["registers a thread at launch"] == "168"
    assert lines["L2 hit rate"] == "not available"  # it was n/a
    assert lines["ALU"] == "not available"  # it was not there
    assert (lines["gmma"], lines["wait"], lines["long scoreboard"]) == ("37.5 %", "12.5 %", "50.0 %")
    order = list(lines)
    assert order.index("long scoreboard") < order.index("gmma") < order.index("wait")


def test_summary_of_nothing() -> None:
    summary = ncu_report.summary(ncu_report.Kernel("k", "(1, 1, 1)", "(32, 1, 1)", {}))
    rows = [line for line in summary.splitlines()[2:] if line.startswith("  ")]
    assert len(rows) > 20
    assert all(line.endswith("not available") for line in rows)


def test_source_page() -> None:
    instructions = ncu_report.parse_source(SOURCE)
    assert [instruction.samples for instruction in instructions] == [0, 300, 1100, 0]
    assert instructions[2].text == "@P0 MUFU.EX2 R4, R4"
    lines = ncu_report.hot(instructions, 3).splitlines()
    assert lines[0] == "1,400 samples over 4 instructions"
    assert lines[2].split() == ["78.6", "%", "2", "wait", "91", "%", "@P0", "MUFU.EX2", "R4,", "R4"]
    assert lines[3].split()[:6] == ["21.4", "%", "1", "gmma", "97", "%"]
    assert len(lines) == 4  # nothing of those that no sample hit
    assert len(ncu_report.hot(instructions, 1).splitlines()) == 3
    with pytest.raises(ValueError, match="expected columns Source and"):
        ncu_report.parse_source('"Source","Address"\n"EXIT","0x0"\n')


def test_only_known_metrics_are_asked_for() -> None:
    known = ncu_report.parse_query(QUERY)
    assert known >= {"dram__bytes_read", "gpu__time_duration", "sm__cycles_elapsed"}
    assert ncu_report.wanted(known) == [
        "gpu__time_duration.sum",
        "sm__cycles_elapsed.max",
        "dram__bytes_read.sum",
        f"{STALLED}gmma_per_issue_active.ratio",
    ]
    quoted = '"Metric Name","Metric Type"\n"sm__cycles_elapsed","Counter"\n'
    assert ncu_report.parse_query(quoted) == {"sm__cycles_elapsed"}


# ncu


def fake_ncu(path: Path, profiling: str) -> Path:
    """An ncu that prints the canned pages, and runs the given lines when it is to profile."""
    for name, text in (("raw", RAW), ("source", SOURCE), ("query", QUERY)):
        path.mkdir(exist_ok=True)
        (path / name).write_text(text)
    script = f"""
case "$*" in
  *"--query-metrics"*) cat "{path}/query";;
  *"--page raw"*) cat "{path}/raw"; echo "==WARNING== beside the table" >&2;;
  *"--page source"*) cat "{path}/source";;
  *) {profiling};;
esac"""
    return executable(path / "ncu", script)


def test_ncu(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out" / "k.ncu-rep"
    fake_ncu(path, 'touch "$3"')
    assert ncu.main(["--out", str(tmp_path / "out" / "k"), "--causal", "--heads", "8", "--hot", "2"]) == 0
    printed = capsys.readouterr().out
    assert "1.70 GHz" in printed
    assert "MUFU.EX2" in printed
    assert f"wrote {report}" in printed
    query, profiling, raw, source = calls(path)
    assert query == ["--query-metrics"]
    assert raw == ["--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    assert source == ["--import", str(report), "--csv", "--page", "source"]
    start = profiling.index(sys.executable)
    options, command = profiling[:start], profiling[start:]
    assert following(options, "--export") == [str(report)]
    assert following(options, "--kernel-name") == ["regex:(Forward|Backward|BiasGradient)[A-Za-z0-9]*_object_at"]
    assert following(options, "--launch-count") == ["1"]
    assert following(options, "--profile-from-start") == ["off"]
    assert following(options, "--clock-control") == ["none"]
    assert following(options, "--metrics") == [",".join(ncu_report.wanted(ncu_report.parse_query(QUERY)))]
    assert {"WarpStateStats", "MemoryWorkloadAnalysis", "SourceCounters"} <= set(following(options, "--section"))
    assert "--set" not in options
    assert command[1:4] == ["-m", "flash_attn_cute.profile", "workload"]
    assert following(command, "--heads") == ["8"]
    assert following(command, "--calls") == ["1"]
    assert "--causal" in command


def test_ncu_options(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_ncu(path, 'touch "$3"')
    assert ncu.main(["--out", str(tmp_path / "k.ncu-rep"), "--kernel", "flash_.*", "--set", "full"]) == 0
    _, profiling, _ = calls(path)
    assert following(profiling, "--kernel-name") == ["regex:flash_.*"]
    assert following(profiling, "--set") == ["full"]
    assert "SourceCounters" not in profiling
    assert "MUFU" not in capsys.readouterr().out


def test_ncu_of_a_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One launch of it, whichever process makes it; what it prints is shown."""
    fake_ncu(path, 'echo step 1; echo step 2 >&2; printf "\\377\n"; touch "$3"')
    out = ["--out", str(tmp_path / "k.ncu-rep"), "--skip", "0"]
    assert __main__.main(["ncu", *out, "--", "train.sh", "--heads", "3", "--", "x"]) == 0
    assert "step 1\nstep 2\n\ufffd\n" in capsys.readouterr().out
    _, profiling, _ = calls(path)
    assert profiling[-5:] == ["train.sh", "--heads", "3", "--", "x"]
    assert following(profiling, "--launch-skip") == ["0"]
    assert following(profiling, "--target-processes") == ["all"]
    assert "--profile-from-start" not in profiling


@pytest.mark.parametrize(
    ("profiling", "message"),
    [
        ('echo "==WARNING== No kernels were profiled."', r"no launch was profiled with .* regex:\(Forward.* .*No kern"),
        ('echo "==ERROR== LibraryNotLoaded" >&2; exit 9', r"ncu failed \(exit code 9\).*LibraryNotLoaded"),
        ('echo "==ERROR== ERR_NVGPUCTRPERM"; touch "$3"', r"may not read the GPU's counters: run as root"),
    ],
)
def test_ncu_says_why_nothing_was_profiled(
    profiling: str, message: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and a report of an earlier run is not taken for this one's."""
    fake_ncu(path, profiling)
    report = tmp_path / "k.ncu-rep"
    report.touch()
    assert ncu.main(["--out", str(report)]) == 1
    printed = capsys.readouterr()
    assert "wrote" not in printed.out
    assert re.search(message, printed.err, re.DOTALL), printed.err
    assert len(calls(path)) == 2


# nsys


def fake_nsys(path: Path, profiling: str, stats: str = "") -> Path:
    """An nsys that prints the canned summaries, and runs ``script`` when it is to profile; ``$out`` is its output."""
    path.mkdir(exist_ok=True)
    (path / "ranges").write_text(RANGES)
    (path / "kernels").write_text(KERNELS)
    script = f"""
out=$(printf "%s\\n" "$@" | sed -n s/--output=//p)
case "$*" in
  *"nvtx_sum"*) {stats or f'cat "{path}/ranges"'};;
  *"cuda_gpu_kern_sum"*) cat "{path}/kernels";;
  *) echo "$FLASH_ATTN_CUTE_NVTX $PWD" > "{path}/environment"; {profiling};;
esac"""
    return executable(path / "nsys", script)


def test_nsys_summaries() -> None:
    entries = nsys.parse_summary(RANGES)
    assert entries == [
        nsys.Entry("flash_attn_cute compile forward d128/128", 1, 2.5e9, 2.5e9),
        nsys.Entry("flash_attn_cute forward sm90 b4 s8192 window 4,None", 8, 4e5, 45500.0),
    ]
    assert nsys.parse_summary(KERNELS) == [nsys.Entry(KERNEL, 8, 9876000.0, 1234000.0)]
    assert nsys.parse_summary("SKIPPED: report.sqlite does not contain CUDA kernel data.\n") == []
    header, first, second = nsys.table("range", list(reversed(entries))).splitlines()
    assert header.split() == ["calls", "total", "ms", "median", "us", "range"]
    assert first.split()[:3] == ["1", "2500.000", "2500000.0"]
    assert second.split()[:3] == ["8", "0.400", "45.5"]
    assert nsys.table("kernel", []).splitlines()[1].strip() == "none"


def test_nsys(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out" / "t.nsys-rep"
    fake_nsys(path, 'touch "$out.nsys-rep"')
    assert nsys.main(["--out", str(tmp_path / "out" / "t"), "--seqlen", "512", "--calls", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {report}" in printed
    assert "flash_attn_cute compile forward d128/128" in printed
    assert "ForwardSm90" in printed
    profiling, *stats = calls(path)
    start = profiling.index(sys.executable)
    options, command = profiling[:start], profiling[start:]
    assert options[0] == "profile"
    assert "--trace=cuda,nvtx" in options
    assert f"--output={report.with_suffix('')}" in options
    assert following(command, "--seqlen") == ["512"]
    assert following(command, "--direction") == ["both"]
    assert following(command, "--calls") == ["2"]
    assert [following(arguments, "--report") for arguments in stats] == [["nvtx_sum"], ["cuda_gpu_kern_sum"]]
    assert all(arguments[-1] == str(report) for arguments in stats)
    assert (path / "environment").read_text().split() == ["1", str(Path.cwd())]


@pytest.mark.parametrize("code", [0, 3])
def test_nsys_of_a_command(code: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where the user stands, whatever options it has, and its exit code is passed on."""
    monkeypatch.chdir(tmp_path)
    fake_nsys(path, f'touch "$out.nsys-rep"; exit {code}')
    assert __main__.main(["nsys", "--out", "t.nsys-rep", "--", "train.sh", "--heads", "3", "--", "x"]) == code
    assert calls(path)[0][-6:] == [f"--output={tmp_path}/t", "train.sh", "--heads", "3", "--", "x"]
    assert (path / "environment").read_text().split() == ["1", str(tmp_path)]
    assert (tmp_path / "t.nsys-rep").exists()


@pytest.mark.parametrize("where", ["out", "temporary", "temporary/nvidia/nsight_systems/session"])
def test_nsys_without_an_importer(
    where: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The capture is what counts: it is found, and the exit code is 0."""
    folder = tmp_path / where
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (folder / "older.qdstrm").touch()
    fake_nsys(path, f'touch "{folder}/new.qdstrm"; exit 1')
    assert nsys.main(["--out", str(tmp_path / "out" / "t")]) == 0
    printed = capsys.readouterr().out
    assert f"captured {folder}/new.qdstrm, of which this nsys (exit code 1) could make no report" in printed
    assert "QdstrmImporter" in printed
    assert len(calls(path)) == 1


def test_nsys_without_statistics(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_nsys(path, 'touch "$out.nsys-rep"', stats="echo no sqlite exporter >&2; exit 1")
    assert nsys.main(["--out", str(tmp_path / "t")]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {tmp_path}/t.nsys-rep" in printed
    assert "no table: `nsys stats` failed, the report is whole.\nno sqlite exporter" in printed


@pytest.mark.parametrize("code", [0, 7])
def test_nsys_that_captures_nothing(
    code: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for earlier in ("t.nsys-rep", "t.qdstrm"):
        (tmp_path / earlier).touch()
    fake_nsys(path, f"exit {code}")
    assert nsys.main(["--out", str(tmp_path / "t")]) == (code or 1)
    assert f"nsys (exit code {code}) captured nothing" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_reports_are_named_as_they_are_asked_for(
    tool: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers behind points are not suffixes, which would be replaced; a folder that cannot be made is refused."""
    fake_ncu(path, 'touch "$3"')
    fake_nsys(path, 'touch "$out.nsys-rep"')
    assert __main__.main([tool, "--out", str(tmp_path / "lr-0.001")]) == 0
    assert f"wrote {tmp_path}/lr-0.001.{tool}-rep\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        __main__.main([tool, "--out", "/dev/null/folder/report"])
    assert "argument --out: expected a folder, got '/dev/null/folder'" in capsys.readouterr().err


# The real ones, where they are

TINY = ("--batch", "1", "--seqlen", "512", "--heads", "2", "--head-dim", "64", "--causal")


def needs(tool: str) -> Path:
    """The real tool, or the test is skipped."""
    try:
        return machine.find(tool)
    except machine.Unavailable as reason:
        pytest.skip(str(reason))


@hopper_alone("the profiled process gets its kernels alone")
def test_real_ncu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forward kernel, every line of the summary filled, and its hottest instructions."""
    needs("ncu")
    code = ncu.main([*TINY, "--out", str(tmp_path / "k.ncu-rep"), "--hot", "5"])
    printed = capsys.readouterr()
    if "may not read the GPU's counters" in printed.err:
        pytest.skip("needs the right to read the GPU's counters")
    assert code == 0, printed.err
    assert "ForwardSm90" in printed.out
    assert "not available" not in printed.out
    assert re.search(r"samples over \d", printed.out)
    assert (tmp_path / "k.ncu-rep").exists()


@hopper_alone("the profiled process gets its kernels alone")
def test_real_nsys(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A report, or where the installation cannot make one, a capture."""
    needs("nsys")
    assert nsys.main([*TINY, "--out", str(tmp_path / "t.nsys-rep"), "--calls", "2"]) == 0
    printed = capfd.readouterr().out
    assert f"wrote {tmp_path}/t.nsys-rep" in printed or re.search(r"captured \S+\.qdstrm", printed), printed
    if "calls   total ms" in printed:
        for name in ("compile forward", "forward sm90", "backward sm90", "profiled calls"):
            assert f"flash_attn_cute {name}" in printed
