"""The profilers' commands: where they look, what they run, what they read. Fake profilers stand in for NVIDIA's."""

import functools
import re
import runpy
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flash_attn_cute.profile import __main__, machine, ncu, ncu_report, nsys, workload
from tests.lib.checks import hopper_alone

Capture = pytest.CaptureFixture[str]
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
def test_a_missing_tool_is_named(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
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
def test_a_missing_gpu_is_named(tool: str, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
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
def test_help(tool: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
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


def test_tools_are_listed(capsys: Capture) -> None:
    for arguments, code in ((["--help"], 0), ([], 2), (["vtune"], 2)):
        with pytest.raises(SystemExit) as stopped:
            __main__.main(arguments)
        assert stopped.value.code == code
    printed = capsys.readouterr()
    assert "profile ncu -- python train.py" in printed.out
    assert "invalid choice: 'vtune'" in printed.err


# What ncu prints


def test_summary() -> None:
    (kernel,) = ncu_report.parse_raw(RAW)
    assert (kernel.name, kernel.grid, kernel.block) == (KERNEL, "(4,096, 1, 1)", "(384, 1, 1)")
    lines = {line[:46].strip(): line[46:].strip() for line in ncu_report.summary(kernel).splitlines()}
    assert (
        lines.items()
        >= {
            "duration": "1,234.50 us",
            "cycles": "2,098,650",
            "SM clock": "1.70 GHz",
            "tensor, 16-bit products (HMMA, HGMMA)": "79.1 %",
            "DRAM read": "192.0 MiB",
            "registers a thread at launch": "168",
            "L2 hit rate": "not available",  # it was n/a
            "ALU": "not available",  # it was not there
        }.items()
    )
    stalls = {"long scoreboard": "50.0 %", "gmma": "37.5 %", "wait": "12.5 %"}
    assert [(name, share) for name, share in lines.items() if name in stalls] == [*stalls.items()]
    with pytest.raises(ValueError, match="expected a table"):
        ncu_report.parse_raw("==ERROR== nothing\n")


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


def test_ncu(path: Path, tmp_path: Path, capsys: Capture) -> None:
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
    for option, value in {
        "--export": str(report),
        "--kernel-name": "regex:(Forward|Backward|BiasGradient)[A-Za-z0-9]*_object_at",
        "--launch-count": "1",
        "--profile-from-start": "off",
        "--clock-control": "none",
        "--metrics": ",".join(ncu_report.wanted(ncu_report.parse_query(QUERY))),
    }.items():
        assert following(options, option) == [value]
    assert {"WarpStateStats", "MemoryWorkloadAnalysis", "SourceCounters"} <= set(following(options, "--section"))
    assert "--set" not in options
    assert command[1:4] == ["-m", "flash_attn_cute.profile", "workload"]
    assert (following(command, "--heads"), following(command, "--calls")) == (["8"], ["1"])
    assert "--causal" in command


def test_ncu_options(path: Path, tmp_path: Path, capsys: Capture) -> None:
    fake_ncu(path, 'touch "$3"')
    assert ncu.main(["--out", str(tmp_path / "k.ncu-rep"), "--kernel", "flash_.*", "--set", "full"]) == 0
    _, profiling, _ = calls(path)
    assert following(profiling, "--kernel-name") == ["regex:flash_.*"]
    assert following(profiling, "--set") == ["full"]
    assert "SourceCounters" not in profiling
    assert "MUFU" not in capsys.readouterr().out


def test_ncu_of_a_command(path: Path, tmp_path: Path, capsys: Capture) -> None:
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
    profiling: str, message: str, path: Path, tmp_path: Path, capsys: Capture
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
    assert second.endswith(f" {entries[1].name}")
    assert nsys.table("kernel", [entries[0]._replace(name="k" * 91)]).endswith(f" {'k' * 87}...")
    assert nsys.table("kernel", []).splitlines()[1].strip() == "none"


def test_nsys(path: Path, tmp_path: Path, capsys: Capture) -> None:
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
    where: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
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


def test_nsys_without_statistics(path: Path, tmp_path: Path, capsys: Capture) -> None:
    fake_nsys(path, 'touch "$out.nsys-rep"', stats="echo no sqlite exporter >&2; exit 1")
    assert nsys.main(["--out", str(tmp_path / "t")]) == 0
    said = f"wrote {tmp_path}/t.nsys-rep\nno table: `nsys stats` failed, the report is whole.\nno sqlite exporter"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("code", [0, 7])
def test_nsys_that_captures_nothing(
    code: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for earlier in ("t.nsys-rep", "t.qdstrm"):
        (tmp_path / earlier).touch()
    fake_nsys(path, f"exit {code}")
    assert nsys.main(["--out", str(tmp_path / "t")]) == (code or 1)
    assert f"nsys (exit code {code}) captured nothing" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_reports_are_named_as_they_are_asked_for(tool: str, path: Path, tmp_path: Path, capsys: Capture) -> None:
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
    try:
        return machine.find(tool)
    except machine.Unavailable as reason:
        pytest.skip(str(reason))


@hopper_alone("the profiled process gets its kernels alone")
def test_real_ncu(tmp_path: Path, capsys: Capture) -> None:
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
def test_real_nsys(tmp_path: Path, capfd: Capture) -> None:
    """A report, or where the installation cannot make one, a capture."""
    needs("nsys")
    assert nsys.main([*TINY, "--out", str(tmp_path / "t.nsys-rep"), "--calls", "2"]) == 0
    printed = capfd.readouterr().out
    assert f"wrote {tmp_path}/t.nsys-rep" in printed or re.search(r"captured \S+\.qdstrm", printed), printed
    if "calls   total ms" in printed:
        for name in ("compile forward", "forward sm90", "backward sm90", "profiled calls"):
            assert f"flash_attn_cute {name}" in printed
