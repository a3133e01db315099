"""The types of arguments that several commands have, and how a command ends.

Types raise argparse.ArgumentTypeError for texts that are none.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch


def at_least(least: int, text: str) -> int:
    """A whole number that is not below a bound."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number, {least} or more, got {text!r}")
    return value


def positive(text: str) -> int:
    """A whole number that counts something, 1 or more."""
    return at_least(1, text)


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    return at_least(0, text)


def multiple_of(unit: int, text: str) -> int:
    """A whole number of units, at least one of them."""
    value = positive(text)
    if value % unit:
        raise argparse.ArgumentTypeError(f"expected a multiple of {unit}, got {value}")
    return value


def existing_file(text: str) -> Path:
    """The path of a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    return Path(text)


def picture(text: str) -> Path:
    """The path of a picture, whose suffix names its format: PNG if there is none."""
    path = Path(text)
    return path if path.suffix else path.with_name(f"{path.name}.png")


def make_folder(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Makes a folder for results, if there is none; ends the command, by the option's name, if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument {option}: expected a folder, got {str(path)!r}: {error.strerror}")


def device(text: str) -> torch.device:
    """The CPU, or a GPU that PyTorch sees."""
    try:
        found = torch.device(text)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {text!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"expected one of {torch.cuda.device_count()} GPUs or cpu, got {text!r}")
    return found


def pattern(text: str) -> re.Pattern[str]:
    """A command-line regular expression, compiled."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs a command's ``main`` and ends the process with its exit code.

    If the reader of its output has gone, as behind ``| head``, the code is that of a command which SIGPIPE has ended.
    """
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)
