"""Checks that this machine's GPU computes with the package's kernels what it should, and keeps the verdict.

    python -m flash_attn_cute.selfcheck             # a minute or two
    python -m flash_attn_cute.selfcheck --all       # every step, each repeated more often
    python -m flash_attn_cute.selfcheck --families 'd128|together'
    python -m flash_attn_cute.selfcheck --report FOLDER

Calls that name no backend get the families of Blackwell's kernels that have passed. The first such call runs the check
by itself. This command runs it ahead of time, again, or on a Hopper GPU, whose kernels do not wait for it. With
--families nothing is kept. The exit code is 0 if all families passed, 1 if one did not, 2 if none could be checked.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from flash_attn_cute.jit.disk import UnsafeFolderError
from flash_attn_cute.jit.key import NoCompilerError
from flash_attn_cute.kernels.registry import ARCHITECTURES, architecture_for
from flash_attn_cute.runtime import settings
from flash_attn_cute.runtime.command_line import natural, pattern, run_command
from flash_attn_cute.selfcheck import report, verdict
from flash_attn_cute.selfcheck.verdict import Check, Gpu, Verdict


def gpu_of(index: int) -> Gpu:
    """The GPU of a number; raises ValueError if there is none, or it has no kernels."""
    count = torch.cuda.device_count()
    if index >= count:
        numbers = "a GPU, but PyTorch sees none" if not count else f"a GPU's number, 0 to {count - 1}"
        raise ValueError(f"--device: expected {numbers}, got {index}")
    capability = torch.cuda.get_device_capability(index)
    name = architecture_for(capability)
    if name is None:
        known = sorted(target for each in ARCHITECTURES.values() for target in each.targets)
        raise ValueError(f"--device: expected a GPU of compute capability {known}, got {capability}")
    return Gpu.of(name, index)


def checked(gpu: Gpu, check: Check, *, is_kept: bool) -> Verdict:
    """The verdict of a check that is run now, and kept on disk or not."""
    if is_kept and settings.cache_dir() is not None:
        found = verdict.made(gpu, since=math.inf, say=print, check=check)
        if isinstance(found, str):
            raise ValueError(found)
        return found
    path = Path(tempfile.mkdtemp(prefix="flash_attn_cute-selfcheck-"), "selfcheck.log")
    with path.open("wb", buffering=0) as log:
        return verdict.verdict_of(gpu, check, log, str(path))


def in_words(found: Verdict) -> str:
    """Words for a verdict, a family a line."""
    lines = [
        f"{'passed' if why is None else 'FAILED'}  {name}{f': {why}' if why else ''}"
        for name, why in found.families.items()
    ]
    lines += [f"left out  {name}: {why}" for name, why in found.left_out.items()]
    return "\n".join([*lines, f"{found.seconds:.0f} seconds; the log is {found.log}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m flash_attn_cute.selfcheck", description=__doc__, formatter_class=style)
    parser.add_argument("--all", action="store_true", help="every step, with 200 repetitions")
    parser.add_argument("--device", type=natural, default=0, metavar="N", help="which GPU (default: %(default)s)")
    parser.add_argument("--families", type=pattern, metavar="REGEX", help="only those whose names match")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="with --all; then tests and benchmarks, in a clone; and an archive",
    )
    chosen = parser.parse_args(arguments)
    try:
        gpu = gpu_of(chosen.device)
        check = partial(verdict.checked, everything=chosen.all or chosen.report is not None, say=print)
        if chosen.families is not None:
            check.keywords["chosen"] = lambda family: chosen.families.search(family) is not None
        if chosen.report is not None:
            report.begin(chosen.report)
        found = checked(gpu, check, is_kept=chosen.families is None)
    except BrokenPipeError:  # of the output: ``run_command`` ends it
        raise
    except (OSError, ValueError, UnsafeFolderError, NoCompilerError) as error:
        print(error, file=sys.stderr)
        return 2
    print(in_words(found))
    if chosen.report is not None:
        print(f"send back {report.write(chosen.report, gpu, found, in_words(found))}")
    return 0 if all(why is None for why in found.families.values()) else 1


if __name__ == "__main__":
    run_command(main)
