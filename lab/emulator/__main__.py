"""Runs a command in which SM100 kernels run on a Hopper GPU.

    python -m lab.emulator [options] -- pytest ...
    python -m lab.emulator [options] -- FILE.py ...
    python -m lab.emulator [options] -- -m MODULE ...

Calls of ``backend="sm100"`` go to it. At the end it says what kernels did that they must not do.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence

import torch


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m lab.emulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--jitter-us", type=float, default=0.0, help="longest random delay (default: none)")
    top.add_argument("--limit-s", type=float, default=20.0, help="how long a CTA may take (default: %(default)s)")
    top.add_argument("--b300", action="store_true", help="the kernels of a B300 (default: those of a B200)")
    top.add_argument("--instead-of", metavar="BACKEND", help="another backend whose calls go to sm100's kernels")
    top.add_argument("--plant", nargs=2, metavar=("REGEX", "TEXT"), help="a bug: what is replaced in the kernels' PTX")
    top.add_argument("command", nargs="+", help="pytest, a file or -m and a module, and their arguments")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    top = parser()
    chosen = top.parse_args(arguments)
    first, *rest = chosen.command
    if first == "-m" and not rest:
        top.error("argument command: expected a module behind -m")
    if not torch.cuda.is_available():
        top.error("expected a Hopper GPU, and PyTorch sees none")
    if first == "pytest":  # its plugin does what is done here, in every worker
        options = [f"--sm100-jitter-us={chosen.jitter_us}", f"--sm100-limit-s={chosen.limit_s}"]
        options += ["--sm100-b300"] if chosen.b300 else []
        if chosen.instead_of:
            options.append(f"--sm100-instead-of={chosen.instead_of}")
        if chosen.plant:
            options += ["--sm100-plant", *chosen.plant]
        sys.argv = ["pytest", "-p", "lab.emulator.pytest_plugin", *options, *rest]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)

    from lab.emulator import hook

    plant = tuple(chosen.plant) if chosen.plant else None
    mailbox = hook.install(gpu=(10, 3 * chosen.b300), instead_of=chosen.instead_of, plant=plant)
    mailbox.configure(jitter_ns=round(1e3 * chosen.jitter_us), limit_ms=round(1e3 * chosen.limit_s))
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = chosen.command
            runpy.run_path(first, run_name="__main__")
    finally:
        faults = mailbox.take_faults()
        for fault in dict.fromkeys(map(str, faults)):
            print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
