"""Time that a call takes the host, and that a new process takes for its first calls, beside SDPA and flash-attn-4.

    python -m benchmarks.host calls    # microseconds, in each mode of PyTorch that a call may be made in
    python -m benchmarks.host first    # seconds, of processes that find no compiled kernels

Contenders take turns. What is not installed takes no part. On a CPU a call takes as long as it computes.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Each is "module:function", imported when its turn comes: importing is part of what is measured.
CONTENDERS = {
    "flash_attn_cute": "flash_attn_cute:flash_attn_func",
    "SDPA": "torch.nn.functional:scaled_dot_product_attention",
    "flash-attn-4": "flash_attn.cute:flash_attn_func",
}
MODES: dict[str, Callable[[torch.device], tuple[contextlib.AbstractContextManager[Any], ...]]] = {
    "recording": lambda device: (),
    "no_grad": lambda device: (torch.no_grad(),),
    "inference_mode": lambda device: (torch.inference_mode(),),
    "default device": lambda device: (device,),
    "no_grad, default device": lambda device: (torch.no_grad(), device),
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(name: str) -> Attend:
    """A contender's causal attention over (batch, seqlen, heads, d).

    Raises:
        ImportError: it is not installed.
    """
    module, function = CONTENDERS[name].split(":")
    attend = getattr(importlib.import_module(module), function)
    if name == "SDPA":
        return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attend(q, k, v, causal=True)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return run


def operands(device: torch.device, seqlen: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leaves q, k and v, and a gradient of out: (2, seqlen, 4, d), bfloat16."""
    q, k, v, dout = (torch.randn(2, seqlen, 4, d, dtype=torch.bfloat16, device=device) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def calls(device: torch.device, rounds: int, repetitions: int) -> dict[str, dict[str, float]]:
    """Microseconds of the host by row and contender: the median over rounds of the median over repetitions."""
    q, k, v, dout = operands(device, 64, 64)
    contenders = {}
    for name in CONTENDERS:
        with contextlib.suppress(ImportError):
            contenders[name] = attention(name)
    times: dict[str, dict[str, list[float]]] = {row: {name: [] for name in contenders} for row in (*MODES, "backward")}
    for _ in range(rounds + 1):  # the first one warms up
        for name, attend in contenders.items():
            for row, mode in MODES.items():
                with contextlib.ExitStack() as stack:
                    for context in mode(device):
                        stack.enter_context(context)
                    times[row][name].append(_median(lambda attend=attend: attend(q, k, v), repetitions))
            out = attend(q, k, v)
            times["backward"][name].append(
                _median(lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), repetitions)
            )
    return {row: {name: 1e6 * statistics.median(x[1:]) for name, x in each.items()} for row, each in times.items()}


def _median(call: Callable[..., object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    _synchronize()  # before another one's turn
    return statistics.median(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of new processes by row and contender: the median over rounds.

    They find the bytecode of all that they import, as processes do where Python keeps it.
    """
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
        subprocess.run([sys.executable, "-c", _IMPORT_EVERYTHING], capture_output=True, env=environment)
        for _ in range(rounds):
            for name in CONTENDERS:
                for row, seconds in _new_process(name, device, environment).items():
                    times.setdefault(row, {}).setdefault(name, []).append(seconds)
    return {row: {name: statistics.median(x) for name, x in each.items()} for row, each in times.items()}


_IMPORT_EVERYTHING = """
import contextlib, importlib
modules = "benchmarks.host", "flash_attn_cute", "flash_attn.cute", "cutlass.cute.runtime", "sympy"
for module in modules:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
"""


def _new_process(name: str, device: torch.device, environment: dict[str, str]) -> dict[str, float]:
    """Output of ``first_calls`` in a process that finds no kernels; nothing if the contender is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from benchmarks import host; host.first_calls({name!r}, {str(device)!r})"
        kernels = {"FLASH_ATTN_CUTE_CACHE_DIR": str(Path(folder, "kernels"))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment | kernels)
    if done.returncode:
        if "ImportError" not in done.stderr and "ModuleNotFoundError" not in done.stderr:
            raise RuntimeError(f"{name}: its first calls failed:\n{done.stderr}")
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_calls(name: str, device: str) -> None:
    """Prints, as JSON, the seconds that a contender's import, its first call and the backward pass of that take."""
    q, k, v, dout = operands(torch.device(device), 512, 128)
    # What PyTorch itself does once, ahead: its first gradients import sympy.
    torch.autograd.grad(q * 1, q, dout)
    _synchronize()
    times = [time.perf_counter()]
    attend = attention(name)
    times.append(time.perf_counter())
    out = attend(q, k, v)
    _synchronize()
    times.append(time.perf_counter())
    torch.autograd.grad(out, (q, k, v), dout)
    _synchronize()
    times.append(time.perf_counter())
    rows = ("import", "first forward", "first backward")
    print(json.dumps({row: b - a for row, a, b in zip(rows, times, times[1:], strict=False)}))


def table(times: dict[str, dict[str, float]], unit: str, digits: int) -> str:
    """Times as text, a row a line and a contender a column."""
    names = list(dict.fromkeys(name for each in times.values() for name in each))
    lines = [f"{unit:24}" + "".join(f"{name:>18}" for name in names)]
    for row, each in times.items():
        lines.append(f"{row:24}" + "".join(f"{each[name]:18.{digits}f}" for name in names))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table that the command line asks for."""
    # Not above: a new process imports this module, and then the package with the clock on.
    from flash_attn_cute.runtime.command_line import device, positive

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("calls", "first"))
    parser.add_argument("--device", type=device, default="cuda" if on_gpu else "cpu")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--repetitions", type=positive, default=200, help="calls in a row (default: 200)")
    chosen = parser.parse_args(arguments)
    on = chosen.device
    print(torch.cuda.get_device_name(on) if on.type == "cuda" else "CPU", "PyTorch", torch.__version__)
    if chosen.what == "calls":
        print(table(calls(on, chosen.rounds, chosen.repetitions), "us of the host", 1))
    else:
        print(table(first(on, chosen.rounds), "seconds", 2))


if __name__ == "__main__":
    main()
