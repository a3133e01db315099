"""``python -m lab.lint``: which rules the PTX of files breaks."""

import argparse
import sys
from collections.abc import Sequence

import lab.lint
from flash_attn_cute.runtime.command_line import existing_file
from lab.lint import lint


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is found in files; returns 1 if that is anything."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.lint", description=lab.lint.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=existing_file)
    count = 0
    for path in parser.parse_args(arguments).files:
        for finding in lint(path.read_text()):
            print(f"{path}: {finding}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
