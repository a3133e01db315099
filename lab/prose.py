"""Checks the prose of docstrings, comments, names and pages against the project's rules for words.

    python -m lab.prose            places a room, beside what is allowed
    python -m lab.prose PATH ...   every place in these files

The exit code is 1 if a room has more places than are allowed, or if the files have any.

Rules:
    opening   a docstring begins with a word that points elsewhere ("Of", "Those", "The same", ...)
    jargon    a word that the project has replaced by the field's (``docs/architecture.md``, "Glossary")
    long      a sentence of a docstring or comment has more than 35 words
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_OPENINGS = ("as", "likewise", "of", "such", "that", "the same", "those", "what", "whose")
_OPENING = re.compile(rf"\s*({'|'.join(_OPENINGS)})\b", re.IGNORECASE)
_STEMS = r"walk(?:s|ed|ing)?|told|tells?|weigh(?:s|ed|ing)?|blind|unseen|nobody|somebody|whoever|surely"
_NAMES = r"in_turn|pass_on|waits_little|tile_again|hide_unseen|read_seen"
_JARGON = re.compile(rf"(?<![A-Za-z])(?:{_STEMS}|{_NAMES})(?![A-Za-z])", re.IGNORECASE)
# also at a row of a table: an indented line with a gap between columns
_SENTENCE_END = re.compile(r"(?<=[.:;!?])\s+|\n\s*\n|\n\s*(?=[-*|])|\n\s+(?=\S.*\S  +\S)")
_MOST_WORDS = 35


class Place(NamedTuple):
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str


def check(path: Path) -> list[Place]:
    """Places of a Python file or a page that break a rule, at most one for each rule and line."""
    text = path.read_text()
    found: dict[tuple[int, str], Place] = {}
    lines = text.splitlines()
    for line, rule, what in _page(lines) if path.suffix == ".md" else _source(text):
        if "prose: ok" not in lines[line - 1]:
            found.setdefault((line, rule), Place(path, line, rule, " ".join(what.split())[:100]))
    return [found[key] for key in sorted(found)]


def _page(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    in_code = False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code and _JARGON.search(line):
            yield number, "jargon", line


def _source(text: str) -> Iterator[tuple[int, str, str]]:
    for number, docstring in _docstrings(text):
        if _OPENING.match(docstring):
            yield number, "opening", docstring
        yield from _long(number, docstring)
        for offset, line in enumerate(docstring.splitlines()):
            if _JARGON.search(line):
                yield number + offset, "jargon", line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NAME) and _JARGON.search(token.string):
            yield token.start[0], "jargon", token.string
        if token.type == tokenize.COMMENT:
            yield from _long(token.start[0], token.string)


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring."""
    for node in ast.walk(ast.parse(text)):  # prose: ok
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                yield node.body[0].lineno, docstring


def _long(number: int, text: str) -> Iterator[tuple[int, str, str]]:
    for sentence in _SENTENCE_END.split(text):
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) > _MOST_WORDS:
            yield number, "long", sentence


def room_of(path: Path) -> str:
    """Room of a tracked file: the folder below the package or the root, ``flash_attn_cute`` for the package's files."""
    parts = path.parts[:-1]
    return "/".join(parts[: 3 if parts[:2] == ("flash_attn_cute", "kernels") else 2]) or "."


def tracked() -> list[Path]:
    """Tracked Python files and pages, relative to the root. The changelog keeps the words of its time."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split() if name != "CHANGELOG.md"]


def count() -> dict[str, int]:
    """Number of places in each room."""
    counts: dict[str, int] = {}
    for path in tracked():
        counts[room_of(path)] = counts.get(room_of(path), 0) + len(check(ROOT / path))
    return counts


# Places that are left in each room; a room that is not named has none. Lower a number when places are gone.
ALLOWED: dict[str, int] = {}


def too_many(counts: dict[str, int]) -> dict[str, int]:
    """Rooms with more places than are allowed, and how many they have."""
    return {room: places for room, places in counts.items() if places > ALLOWED.get(room, 0)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the places of the files that are named, or the counts of all rooms. Returns the exit code."""
    from flash_attn_cute.runtime.command_line import existing_file  # imports PyTorch, without which the rest of it does

    parser = argparse.ArgumentParser("python -m lab.prose", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "paths", nargs="*", type=existing_file, metavar="PATH", help="files to check, instead of all rooms"
    )
    paths = parser.parse_args(arguments).paths
    if paths:
        places = [place for path in paths for place in check(path)]
        for place in places:
            print(f"{place.path}:{place.line}: {place.rule}: {place.text}")
        return int(bool(places))
    counts = count()
    for room, number in sorted(counts.items()):
        print(f"{number:5d} of {ALLOWED.get(room, 0):5d}  {room}")
    return int(bool(too_many(counts)))


if __name__ == "__main__":
    sys.exit(main())
