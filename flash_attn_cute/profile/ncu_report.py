"""Reader of Nsight Compute's CSV, and a summary in a few lines.

Metric names are those of Hopper (``ncu --query-metrics --chips gh100``). One that is missing from a report is shown as
"not available".
"""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ABSENT = "not available"
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
_STALLS_SHOWN = 8
# Older and newer names of the column of samples.
_SAMPLES = ("Warp Stall Sampling (All Samples)", "Warp Stall Sampling (All Cycles)", "# Samples")


@dataclass(frozen=True)
class Kernel:
    """One profiled launch; metrics in base units: nanoseconds, bytes, percent, counts."""

    name: str
    grid: str
    block: str
    metrics: Mapping[str, float]


class Instruction(NamedTuple):
    """One SASS instruction: its number in the kernel, and how often a warp was found at it, in all and by reason."""

    number: int
    text: str
    samples: int
    reasons: Mapping[str, int]


class _Row(NamedTuple):
    label: str
    metric: str
    show: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _decimal(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _microseconds(value: float) -> str:
    return f"{value / 1e3:,.2f} us"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"


_ACTIVE = "avg.pct_of_peak_sustained_active"
_ELAPSED = "avg.pct_of_peak_sustained_elapsed"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_DURATION, _CYCLES = "gpu__time_duration.sum", "sm__cycles_elapsed.max"

_SECTIONS: dict[str, tuple[_Row, ...]] = {
    "time": (
        _Row("duration", _DURATION, _microseconds),
        _Row("cycles", _CYCLES, _count),
        _Row("SMs active, of those cycles", f"sm__cycles_active.{_ELAPSED}", _percent),
    ),
    "pipes, of their peak while the SM is active": (
        _Row("tensor", f"sm__pipe_tensor_cycles_active.{_ACTIVE}", _percent),
        _Row("tensor, 16-bit products (HMMA, HGMMA)", f"sm__pipe_tensor_op_hmma_cycles_active.{_ACTIVE}", _percent),
        _Row("exp2 and conversions (XU)", f"sm__inst_executed_pipe_xu.{_ACTIVE}", _percent),
        _Row("FMA", f"sm__pipe_fma_cycles_active.{_ACTIVE}", _percent),
        _Row("ALU", f"sm__pipe_alu_cycles_active.{_ACTIVE}", _percent),
        _Row("load and store (LSU)", f"sm__inst_executed_pipe_lsu.{_ACTIVE}", _percent),
    ),
    "issue": (
        _Row("issue slots used", f"smsp__issue_active.{_ACTIVE}", _percent),
        _Row("instructions", "smsp__inst_executed.sum", _count),
        _Row("eligible warps a cycle and scheduler", "smsp__warps_eligible.avg.per_cycle_active", _decimal),
    ),
    "memory": (
        _Row("L2 traffic", "lts__t_bytes.sum", _bytes),
        _Row("L2 hit rate", "lts__t_sector_hit_rate.pct", _percent),
        _Row("L2 throughput, of peak", f"lts__throughput.{_ELAPSED}", _percent),
        _Row("DRAM read", "dram__bytes_read.sum", _bytes),
        _Row("DRAM written", "dram__bytes_write.sum", _bytes),
        _Row("DRAM throughput, of peak", f"dram__throughput.{_ELAPSED}", _percent),
        _Row("TMA loads", "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum", _bytes),
        _Row("loads from local memory (spills)", "smsp__inst_executed_op_local_ld.sum", _count),
        _Row("stores to local memory (spills)", "smsp__inst_executed_op_local_st.sum", _count),
    ),
    "shared memory": (
        _Row("throughput, of peak", f"{_WAVEFRONTS}.{_ELAPSED}", _percent),
        _Row("wavefronts", f"{_WAVEFRONTS}.sum", _count),
        _Row("wavefronts of HGMMA", f"{_WAVEFRONTS}_op_gmma.sum", _count),
        _Row("bank conflicts", f"{_CONFLICTS}.sum", _count),
        _Row("bank conflicts of HGMMA", f"{_CONFLICTS}_op_gmma.sum", _count),
    ),
    "launch": (
        _Row("registers a thread at launch", "launch__registers_per_thread", _count),
        _Row("shared memory a block", "launch__shared_mem_per_block", _bytes),
        _Row("blocks an SM can hold (registers)", "launch__occupancy_limit_registers", _count),
        _Row("blocks an SM can hold (shared memory)", "launch__occupancy_limit_shared_mem", _count),
        _Row("occupancy", f"sm__warps_active.{_ACTIVE}", _percent),
        _Row("waves", "launch__waves_per_multiprocessor", _decimal),
    ),
}


def wanted(known: frozenset[str]) -> list[str]:
    """The metrics to collect of those that ncu knows (base names): the summary's, and all reasons to stall."""
    rows = [row.metric for rows in _SECTIONS.values() for row in rows]
    stalls = [f"{name}.ratio" for name in sorted(known) if _STALL.fullmatch(name)]
    return [metric for metric in rows if metric.split(".")[0] in known] + stalls


def parse_query(text: str) -> frozenset[str]:
    """The base names of metrics in the output of ``ncu --query-metrics``."""
    return frozenset(re.findall(r'^"?([a-z]\w*__\w+)', text, re.MULTILINE))


def parse_raw(text: str) -> list[Kernel]:
    """The kernels in the output of ``ncu --csv --page raw --print-units base``, whatever stands before the table.

    Raises:
        ValueError: there is no table.
    """
    lines = text.splitlines()
    header = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise ValueError(f"expected a table that begins with the column ID, got: {text[:500]!r}")
    names, _units, *rows = csv.reader(lines[header:])
    kernels = []
    for row in filter(None, rows):
        fields = dict(zip(names, row, strict=True))
        metrics = {name: _number(value) for name, value in fields.items() if "__" in name}
        kernels.append(
            Kernel(
                name=fields["Kernel Name"],
                grid=fields["Grid Size"],
                block=fields["Block Size"],
                metrics={name: value for name, value in metrics.items() if value is not None},
            )
        )
    return kernels


def parse_source(text: str) -> list[Instruction]:
    """The instructions in the output of ``ncu --csv --page source`` for one kernel.

    Raises:
        ValueError: there is no table of instructions, or none of its columns counts samples.
    """
    rows = list(csv.reader(text.splitlines()))
    header = next((number for number, row in enumerate(rows) if "Source" in row), None)
    column = None if header is None else next((name for name in _SAMPLES if name in rows[header]), None)
    if header is None or column is None:
        raise ValueError(f"expected columns Source and {' or '.join(_SAMPLES)}, got: {text[:500]!r}")
    names = rows[header]
    reasons = {name.removeprefix("stall_"): names.index(name) for name in names if name.startswith("stall_")}
    return [
        Instruction(
            number=number,
            text=" ".join(row[names.index("Source")].split()),
            samples=_samples(row[names.index(column)]),
            reasons={reason: _samples(row[index]) for reason, index in reasons.items() if "not_issued" not in reason},
        )
        for number, row in enumerate(rows[header + 1 :])
        if len(row) == len(names)
    ]


def summary(kernel: Kernel) -> str:
    """Summary of a kernel's time, as text."""
    lines = [kernel.name, f"grid {kernel.grid}, block {kernel.block}"]
    for title, rows in _SECTIONS.items():
        lines += ["", title]
        lines += [_line(row.label, _shown(kernel, row)) for row in rows]
        if title == "time":
            lines.append(_line("SM clock", _clock(kernel)))
        if title == "issue":
            lines += ["", "where warps stand, of the cycles of all warps", *_stall_lines(kernel)]
    return "\n".join(lines)


def hot(instructions: Sequence[Instruction], count: int) -> str:
    """The instructions at which warps were found most often, as text."""
    total = sum(instruction.samples for instruction in instructions)
    lines = [f"{total:,} samples over {len(instructions):,} instructions", "  share  number  reason and its share"]
    for instruction in sorted(instructions, key=lambda instruction: -instruction.samples)[:count]:
        if not instruction.samples:
            break
        reason = max(instruction.reasons, key=lambda name: instruction.reasons[name], default=_ABSENT)
        part = 100 * instruction.reasons.get(reason, 0) / instruction.samples
        share = 100 * instruction.samples / total
        lines.append(f"{share:5.1f} %  {instruction.number:6}  {f'{reason} {part:.0f} %':25}  {instruction.text}")
    return "\n".join(lines)


def _line(label: str, value: str) -> str:
    return f"  {label:46}{value:>16}"


def _shown(kernel: Kernel, row: _Row) -> str:
    value = kernel.metrics.get(row.metric)
    return _ABSENT if value is None else row.show(value)


def _clock(kernel: Kernel) -> str:
    cycles, nanoseconds = kernel.metrics.get(_CYCLES), kernel.metrics.get(_DURATION)
    return f"{cycles / nanoseconds:.2f} GHz" if cycles and nanoseconds else _ABSENT


def _stall_lines(kernel: Kernel) -> list[str]:
    cycles = {
        match[1]: value
        for name, value in kernel.metrics.items()
        if (match := _STALL.fullmatch(name.removesuffix(".ratio")))
    }
    total = sum(cycles.values())
    if not total:
        return [_line("stall reasons", _ABSENT)]
    longest = sorted(cycles.items(), key=lambda item: -item[1])[:_STALLS_SHOWN]
    return [_line(reason.replace("_", " "), _percent(100 * value / total)) for reason, value in longest]


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # "n/a", or a metric that is no number
        return None


def _samples(text: str) -> int:
    return int(_number(text) or 0)
