"""Types of command-line arguments that several commands have."""

import argparse
import re


def at_least(least: int, text: str) -> int:
    """A whole number that is not below a bound.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number, {least} or more, got {text!r}")
    return value


def positive(text: str) -> int:
    """A whole number that counts something, 1 or more. Raises as ``at_least`` does."""
    return at_least(1, text)


def natural(text: str) -> int:
    """A whole number, 0 or more. Raises as ``at_least`` does."""
    return at_least(0, text)


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error
