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

from lab.emulator import hook


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    top = argparse.ArgumentParser(
        "python -m lab.emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in hook.OPTIONS.items():
        top.add_argument(f"--{name}", dest=name, **option)
    top.add_argument("command", nargs="+", help="pytest, a file or -m and a module, and their arguments")
    chosen = vars(top.parse_args(arguments))
    command = chosen.pop("command")
    first, *rest = command
    if first == "-m" and not rest:
        top.error("argument command: expected a module behind -m")
    if not torch.cuda.is_available():
        top.error("expected a Hopper GPU, and PyTorch sees none")
    if first == "pytest":  # its plugin does what is done here, in every worker
        options = []
        for name, value in chosen.items():
            if value is not None and value is not False:
                values = value if isinstance(value, list) else [value] * (value is not True)
                options += [f"--sm100-{name}", *map(str, values)]
        sys.argv = ["pytest", "-p", "lab.emulator.pytest_plugin", *options, *rest]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)

    mailbox = hook.start(chosen)
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(first, run_name="__main__")
    finally:
        reports = mailbox.take_reports()
        print(*reports, sep="\n", end="\n" * bool(reports), file=sys.stderr)
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
