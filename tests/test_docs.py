"""Pages do what they say: the Python blocks of each run, one after the other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/block-masks.md", "docs/masks-and-biases.md", "docs/migrating.md", "docs/padding.md"]


def blocks(page: str) -> list[str]:
    found: list[str] = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str) -> None:
    found = blocks(page)
    assert found
    names: dict[str, object] = {}
    for block in found:
        exec(compile(block, page, "exec"), names)


def test_every_page_with_blocks_is_run() -> None:
    """Those of CONTRIBUTING.md need a folder to write to, and a compiler."""
    with_blocks = [path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    assert sorted(str(path) for path in with_blocks if blocks(str(path))) == sorted(PAGES)
