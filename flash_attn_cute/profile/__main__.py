"""Command that profiles attention with NVIDIA's profilers or PyTorch's.

    python -m flash_attn_cute.profile nsys -- python train.py   a timeline of a command, with ranges around every pass
    python -m flash_attn_cute.profile ncu -- python train.py    one launch of a kernel in it: pipes, stalls, memory
    python -m flash_attn_cute.profile nsys --causal             a timeline of attention alone
    python -m flash_attn_cute.profile ncu --causal --hot 20     one launch of attention alone
    python -m flash_attn_cute.profile timeline --causal         a picture of it by PyTorch's profiler, or of a trace
    python -m flash_attn_cute.profile workload --causal         attention alone, without a profiler

Options choose the shape of attention alone; nsys --help and so on list the options.
"""

import argparse
import sys
from collections.abc import Sequence

from flash_attn_cute.profile import ncu, nsys, timeline, workload
from flash_attn_cute.runtime.command_line import run_command

_TOOLS = {"nsys": nsys.main, "ncu": ncu.main, "timeline": timeline.main, "workload": workload.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool that is named first; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_cute.profile",
        usage="%(prog)s TOOL [options] [-- command ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tool", choices=_TOOLS)
    return _TOOLS[parser.parse_args(given[:1]).tool](given[1:])


if __name__ == "__main__":
    run_command(main)
