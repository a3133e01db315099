"""The project's prose keeps its rules: the number of places that break one only goes down, room by room."""

from pathlib import Path

import pytest

from lab import prose


def test_places_only_go_down() -> None:
    """Too many: ``python -m lab.prose PATH`` shows them. Fewer: lower ``ALLOWED``."""
    counts = prose.count()
    assert not prose.too_many(counts), "places that break the rules of prose, and how many are allowed"
    assert not prose.ALLOWED.keys() - counts.keys(), "rooms that are no more"


@pytest.mark.parametrize(("text", "code"), [('"""Adds two numbers."""\n', 0), ('"""Those of a sum."""\n', 1)])
def test_the_exit_code_says_whether_files_have_places(text: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert prose.main([str(path)]) == code


@pytest.mark.parametrize(("allowed", "code"), [(1, 1), (2, 0)])
def test_the_exit_code_says_whether_a_room_has_too_many(
    allowed: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "count", lambda: {"lab": 2})
    monkeypatch.setattr(prose, "ALLOWED", {"lab": allowed})
    assert prose.main([]) == code


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('"""Adds two numbers."""\n', []),
        ('"""Those of a sum."""\n', ["opening"]),
        ('"""Adds, as it was told."""\n', ["jargon"]),  # prose: ok
        ("def f(has_walks): ...\n", ["jargon"]),  # prose: ok
        ("x = 1  # nobody reads it\n", ["jargon"]),  # prose: ok
        ("x = 1  # nobody reads it, prose: ok\n", []),  # prose: ok
        (f'"""{"Many words " * 18}stand here."""\n', ["long"]),
        (f'"""{"Many words. " * 18}"""\n', []),
    ],
)
def test_rules(text: str, rules: list[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert [place.rule for place in prose.check(path)] == rules


def test_pages_are_checked_but_for_their_code(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("A tile walks.\n```\nwalk()\n```\n")  # prose: ok
    assert [(place.rule, place.line) for place in prose.check(path)] == [("jargon", 1)]


def test_rooms() -> None:
    assert prose.room_of(Path("flash_attn_cute/kernels/sm90/backward/cta.py")) == "flash_attn_cute/kernels/sm90"
    assert prose.room_of(Path("flash_attn_cute/api.py")) == "flash_attn_cute"
    assert prose.room_of(Path("README.md")) == "."
