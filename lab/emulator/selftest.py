"""Tries the emulator itself on a Hopper GPU: ``python -m lab.emulator.selftest``, about a minute.

Every case runs in a process of its own with a time limit, so that one that hangs or breaks CUDA costs no other. Most
compute products with small kernels (``kernels.py``) and compare them with PyTorch's, or plant a bug and look for the
report of it.
"""

import argparse
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

LIMIT_S = 180.0  # a process, of which importing, compiling and waiting for the GPU take most
_held: list[IO[str]] = []


def _prepare(name: str, *, change: Callable[[str], str] = str, **options: Any) -> tuple[Any, Any, Any]:
    """A kernel of ``kernels.Case``, emulated and loaded, the emulation's mailbox, and the kernel's case."""
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    from flash_attn_cute.jit.code import export, load
    from lab.emulator import build, hook, kernels
    from lab.emulator.mailbox import mailbox

    case = kernels.Case(name, **options)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kernel = kernels.compiled(case, cute.KeepPTX, DumpDir(folder))
        compiled = time.perf_counter()
        binary, translation = build.build(change(kernel.artifacts.PTX))
        hook.replace_binary(kernel, binary)
        loaded = load(export(kernel))
    _gpu_alone()
    print(f"  compiled in {compiled - start:.1f} s, built in {time.perf_counter() - compiled:.1f} s")
    print(f"  replaced: {translation.replaced}")
    mailbox().register()
    return loaded, mailbox(), case


def _gpu_alone() -> None:
    """Waits until no other case uses the GPU, and keeps it until this process ends."""
    lock = open(Path(tempfile.gettempdir()) / "lab_emulator_selftest.lock", "w")  # noqa: SIM115 (not closed before)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)


def _operands(case: Any) -> tuple[Any, Any, Any]:
    import torch

    from lab.emulator.kernels import DEPTH

    dtype = torch.bfloat16 if case.dtype == "BFloat16" else torch.float16
    a = torch.randn(case.m, DEPTH, device="cuda", dtype=dtype)
    b = torch.randn(case.n, DEPTH, device="cuda", dtype=dtype)
    return a, b, torch.full((case.m, case.n), float("nan"), device="cuda")


def _expected(case: Any, a: Any, b: Any) -> Any:
    product = a.double() @ b.double().T
    return (2 * product + 1).maximum(product).clamp(min=0) if case.finishes else product


def _wrong(d: Any, expected: Any) -> Any:
    """Where a result is wrong: sums of 64 products in float32 are not further off."""
    return ~((d.double() - expected).abs() <= 1e-5 * expected.abs().max())


def _launch(kernel: Any, *tensors: Any) -> float:
    """Milliseconds of a launch, the host's included."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    kernel(*tensors)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _check_product(kernel: Any, mailbox: Any, case: Any, repetitions: int = 3) -> None:
    for repetition in range(repetitions):
        a, b, d = _operands(case)
        expected = _expected(case, a, b)
        elapsed = _launch(kernel, a, b, d)
        print(f"  launch {repetition}: {elapsed:.2f} ms")
        faults = mailbox.take_reports()
        print("\n".join(f"  {fault}" for fault in faults))
        wrong = _wrong(d, expected)
        if wrong.any():
            rows, columns = ([i for i, x in enumerate(wrong.any(other).tolist()) if x] for other in (1, 0))
            print(f"  {int(wrong.sum())} wrong of {d.numel()}, rows {rows[:40]}, columns {columns[:40]}")
            row, column = rows[0], columns[0] // 8 * 8
            print(f"  row {row}, column {column}..: got {d[row, column : column + 8].tolist()}")
            print(f"  expected {expected[row, column : column + 8].tolist()}")
        assert not faults
        assert not wrong.any()
    print(f"  CTAs {mailbox.num_ctas}, products and commits {mailbox.num_entries}")
    assert mailbox.num_ctas >= repetitions
    assert mailbox.num_entries >= repetitions * 5


def product(name: str, **options: Any) -> None:
    """A product is PyTorch's, also with random delays."""
    kernel, mailbox, case = _prepare(name, **options)
    _check_product(kernel, mailbox, case)
    mailbox.configure(jitter_ns=300_000)
    a, b, d = _operands(case)
    elapsed = []
    for _ in range(20):
        elapsed.append(_launch(kernel, a, b, d.fill_(float("nan"))))
        assert not _wrong(d, _expected(case, a, b)).any()
    print(f"  with 300 us of jitter: {min(elapsed):.2f} to {max(elapsed):.2f} ms")


def without_waiting() -> None:
    """A kernel that reads the result before it is there reads what is not a number, or parts of it."""
    kernel, mailbox, case = _prepare("without_waiting", waits=False)
    for jitter in (0, 300_000):
        mailbox.configure(jitter_ns=jitter)
        count = 0
        for _ in range(20):
            a, b, d = _operands(case)
            _launch(kernel, a, b, d)
            count += bool(_wrong(d, _expected(case, a, b)).any())
        print(f"  jitter {jitter} ns: {count} of 20 launches wrong")
        assert count > 10


def planted(name: str, pattern: str, replacement: str, expected: str, **options: Any) -> None:
    """A change to a kernel's PTX is reported as a fault."""

    def change(text: str) -> str:
        new, count = re.subn(pattern, replacement, text)
        assert count == 1, f"{pattern}: {count} times in the kernel"
        return new

    kernel, mailbox, case = _prepare(name, change=change, **options)
    mailbox.configure(limit_ms=500)
    try:
        for _ in range(200):  # the kernel may be given another multiprocessor each time
            _launch(kernel, *_operands(case))
    except Exception as error:
        print(f"  {type(error).__name__}: {str(error).splitlines()[0]}")
    faults = mailbox.take_reports()
    print("\n".join(f"  {fault}" for fault in faults[:4]))
    assert any(expected in fault for fault in faults), f"no fault says {expected!r}"


def onto_nothing() -> None:
    """A product that adds to a result which nothing was written to is not a number."""
    kernel, _, case = _prepare("onto_nothing", change=lambda text: re.sub(r"(mov\.pred\s+%p\d+), 0;", r"\1, -1;", text))
    a, b, d = _operands(case)
    _launch(kernel, a, b, d.zero_())
    assert d.isnan().all()


def attention() -> None:
    """``backend="sm100"`` computes what the portable backend does, where the package has such kernels."""
    import torch

    from flash_attn_cute import flash_attn_func
    from flash_attn_cute.kernels import registry

    if "sm100" not in registry.ARCHITECTURES:
        print("  flash_attn_cute has no kernels for SM100")
        return
    from lab.emulator import hook

    _gpu_alone()
    mailbox = hook.install()
    for seqlen, jitter in ((200, 0), (200, 300_000), (700, 0)):
        mailbox.configure(jitter_ns=jitter)
        q, k, v = (torch.randn(1, seqlen, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        start = time.perf_counter()
        out = flash_attn_func(q, k, v, causal=True, backend="sm100")
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        expected = flash_attn_func(q.float(), k.float(), v.float(), causal=True, backend="portable")
        error = (out.float() - expected).abs().nan_to_num(float("inf")).max()
        print(f"  {seqlen} queries, jitter {jitter} ns: {elapsed:.2f} s, largest error {error:.2e}")
        faults = mailbox.take_reports()
        print("\n".join(f"  {fault}" for fault in faults))
        assert not faults
        assert error < 2e-2


CASES: dict[str, Callable[[], None]] = {
    "ss": lambda: product("ss"),
    "ts": lambda: product("ts", a_in_tensor_memory=True),
    "mn_major": lambda: product("mn_major", a_mn_major=True, b_mn_major=True),
    "k_by_mn": lambda: product("k_by_mn", b_mn_major=True, n=64),
    "narrow": lambda: product("narrow", n=32),
    "float16_n256": lambda: product("float16_n256", dtype="Float16", n=256),
    "arithmetic": lambda: product("arithmetic", finishes=True),
    "pair": lambda: product("pair", pair=True),
    "pair_mn_major": lambda: product("pair_mn_major", pair=True, a_mn_major=True, b_mn_major=True, n=256),
    "tma": lambda: product("tma", by_tma=True),
    "pair_tma": lambda: product("pair_tma", pair=True, by_tma=True),
    "without_waiting": without_waiting,
    "onto_nothing": onto_nothing,
    "wrong_lanes": lambda: planted(
        "wrong_lanes", r"(and\.b32\s+%r\d+, %r\d+), 6291456;", r"\1, 2097152;", "lanes of address"
    ),
    "never_freed": lambda: planted("never_freed", r"tcgen05\.dealloc[^;]*;", "", "never got them"),
    "too_few": lambda: planted(
        "too_few", r"512(;\s+tcgen05\.alloc)", r"256\1", "are not allocated", a_in_tensor_memory=True
    ),
    "no_commit": lambda: planted("no_commit", r"tcgen05\.commit[^;]*;", "", "does not end"),
    "unseen": lambda: planted("unseen", r"tcgen05\.commit[^;]*;", "", "no tcgen05.commit", waits=False),
    "attention": attention,
}


def _run_apart(name: str) -> tuple[bool, str, float]:
    """Whether a case succeeds in a process of its own, what it says, and seconds."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "lab.emulator.selftest", "--here", name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S)
        output, ok = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, ok = f"{(error.stdout or b'').decode()}\nno end after {LIMIT_S:.0f} s", False
    return ok, output, time.perf_counter() - start


def _machine() -> str:
    """The GPU, its driver, and the assembler."""
    found = []
    for command in (["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], ["nvcc", "--version"]):
        try:
            found += subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[-1:]
        except OSError as error:
            found.append(str(error))
    return "; ".join(found)


def run(names: Sequence[str]) -> int:
    """Runs cases, each in a process, compiling at the same time and using the GPU in turn; returns how many failed."""
    print(_machine(), flush=True)
    failed = []
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        for name, (ok, output, seconds) in zip(names, pool.map(_run_apart, names), strict=True):
            print(f"{'ok    ' if ok else 'FAILED'} {name} ({seconds:.1f} s)\n{output[-4000:]}", flush=True)
            failed += [] if ok else [name]
    print(f"{len(names) - len(failed)} of {len(names)} ok" + (f"; failed: {' '.join(failed)}" if failed else ""))
    return len(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.emulator.selftest", description=__doc__)
    parser.add_argument("--here", action="store_true", help="run the cases in this process")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case", help=f"out of {', '.join(CASES)}")
    chosen = parser.parse_args(arguments)
    if not chosen.here:
        return 1 if run(chosen.cases) else 0
    from lab.emulator.mailbox import mailbox

    for name in chosen.cases:
        try:
            CASES[name]()
        finally:  # also where a kernel has ended with an error
            for fault in mailbox().take_reports():
                print(f"  {fault}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
