"""Pages do what they say: Python blocks run, one after the other, and commands have the options that they are given.

The site has all pages and docstrings.
"""

import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_cute
from flash_attn_cute import distributed, integrations

ROOT = Path(__file__).parents[2]
TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]


def blocks(page: str) -> list[str]:
    found: list[str] = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == (ROOT / page).read_text().count("```python")
    return found


def names_of(paths: Iterable[Path]) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


# CONTRIBUTING.md's blocks need a folder to write to, and a compiler.
WITH_BLOCKS = [page for page in names_of([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]) if blocks(page)]
assert len(WITH_BLOCKS) >= 14


def run_blocks(page: str) -> dict[str, Any]:
    """The names that the blocks of a page define."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_run(page: str) -> None:
    run_blocks(page)


def test_buckets_are_those_of_t5() -> None:
    """Blocks of pages compare what they compute; these do not."""
    from transformers.models.t5.modeling_t5 import T5Attention  # whose import takes two seconds

    names = run_blocks("docs/masks-and-biases.md")
    expected = T5Attention._relative_position_bucket(names["distance"], True, names["buckets"], names["longest"])
    assert torch.equal(names["bucket"], expected)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Our commands in a page, without what stands behind ``--``, and their arguments."""
    found = re.findall(r"python -m ((?:flash_attn_cute|benchmarks|examples|lab|tests)\b[\w.]*)([^`#&\n]*)", text)
    return [(module.rstrip("."), arguments.partition(" -- ")[0].split()) for module, arguments in found]


def unknown(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[str]:
    """The options among a command's arguments that its help does not have."""
    options = [argument for argument in arguments if re.match("--[a-z]", argument)]
    if not options:
        return []
    tool = arguments[:1] if re.fullmatch("[a-z]+(-[a-z]+)*", arguments[0]) else []
    monkeypatch.setattr(sys, "argv", [module, *tool, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code in (0, None)
    helped = re.findall(r"--[\w-]+", capsys.readouterr().out)
    return [option for option in options if option not in helped]


IMPORTED_BEFORE = pytest.mark.filterwarnings("ignore:.* found in sys.modules after import of package:RuntimeWarning")


@IMPORTED_BEFORE
@pytest.mark.parametrize("page", names_of(TEXTS))
def test_commands_have_their_options(page: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for module, arguments in commands((ROOT / page).read_text()):
        assert unknown(module, arguments, monkeypatch, capsys) == [], (module, arguments)


@IMPORTED_BEFORE
def test_wrong_options_are_found(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    line = (
        "`python -m flash_attn_cute.sparsity plot window --seqlen 9 --sequence 9 -- --other` and `python -m benchmarks`"
    )
    (plot, arguments), (benchmarks, nothing) = commands(line)
    assert (plot, benchmarks, nothing) == ("flash_attn_cute.sparsity", "benchmarks", [])
    assert unknown(plot, arguments, monkeypatch, capsys) == ["--sequence"]


def test_rows_of_tables_have_the_cells_of_their_titles() -> None:
    """A row of another table in its place has another number of cells."""
    for page in TEXTS:
        titles = None
        for line in page.read_text().splitlines():
            cells = re.sub(r"`[^`]*`", "", line).count("|") if line.startswith("|") else None
            titles = cells if titles is None or cells is None else titles
            assert cells == titles, f"{page.relative_to(ROOT)}: {line}"


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """It builds without a warning, has every page in its navigation, and every public name in its reference."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # of the theme: what comes after this generation of mkdocs
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    listed = re.findall(r"^ +- (?:.*: )?([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
    assert {path.stem for path in tmp_path.glob("*.html")} == {*listed, "404"}
    assert list((tmp_path / "pictures").glob("*.png"))

    reference = re.findall(r'id="flash_attn_cute\.([\w.]+)"', (tmp_path / "reference.html").read_text())
    names = {name.split(".")[-1] for name in reference}
    assert {*flash_attn_cute.__all__, *distributed.__all__} <= names
    for module in pkgutil.iter_modules(integrations.__path__):
        is_public = not module.name.startswith("_")
        assert any(name.startswith(f"integrations.{module.name}.") for name in reference) == is_public, module.name
    assert {"padding.Packing.of", "padding.seqused_of", "integrations.flash_attn.flash_attn_func"} <= set(reference)
