"""Declarations of the project: it declares what it imports, and commits are checked as CI checks them."""

import argparse
import ast
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.lib import tiers

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flash_attn_cute"
# Files that need more than is declared for all of their kind, by the extra that brings it.
WITH_EXTRAS = {
    "demo": [PACKAGE / "demo.py"],
    "docs": [ROOT / "lab" / "site_links.py"],
    "plot": [PACKAGE / "sparsity" / "mask_plot.py", PACKAGE / "profile" / "timeline.py"],
    "profile": [PACKAGE / "profile" / "machine.py"],
    "transformers": [PACKAGE / "integrations" / name for name in ("transformers.py", "_transformers_masks.py")],
}
PYTEST_PLUGIN = ROOT / "lab" / "emulator" / "pytest_plugin.py"  # needs what tests need
OWN = {"flash_attn_cute", "tests", "benchmarks", "lab", "examples"}
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cuda": "cuda-bindings",
    "cutlass": "nvidia-cutlass-dsl",
}  # where they are named unlike their modules
PEERS = {"flash_attn", "fla", "cuequivariance_torch"}  # measured against where it happens to be installed
TYPES = {"typing_extensions"}  # for type checkers, which bring it
# What no file of ours imports, and why it is declared.
NOT_IMPORTED = {
    "apache-tvm-ffi": "the DSL imports it to make kernels callable",
    "mkdocs-material": "the theme in mkdocs.yml",
    "mkdocstrings": "a plugin in mkdocs.yml",
    "mypy": "a command",
    "pytest-xdist": "the option -n of pytest",
    "ruff": "a command",
    "setuptools": "builds a wheel in a test",
    "types-tqdm": "mypy reads it",
}
# Calls that take the name of a module, and cope if it is missing.
LOOKS_FOR = {"find_spec", "importorskip"}


@functools.cache  # tests read files more than once
def imports(source: str) -> tuple[set[str], set[str]]:
    """The distributions that a file imports, and those it looks for, wherever in the file."""
    imported: set[str] = set()
    looked_for: set[str] = set()
    for node in ast.walk(ast.parse(source)):  # prose: ok
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKS_FOR:
            looked_for |= {str(x.value) for x in node.args if isinstance(x, ast.Constant)}
    return distributions(imported), distributions(looked_for)


def distributions(modules: Iterable[str]) -> set[str]:
    """Distributions of others that modules come from."""
    tops = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - TYPES - {"tomllib"} - OWN - PEERS
    return {DISTRIBUTIONS.get(top, top) for top in tops}


def names(requirements: Iterable[str]) -> set[str]:
    """The distributions of requirements, but for the package itself."""
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements} - {"flash-attn-cute"}


def problems(
    paths: Iterable[Path], available: set[str], elsewhere: set[str], declared: set[str], written: str = ""
) -> list[str]:
    """Imports of files that are not available, look-ups that are nowhere declared, and declarations without a use."""
    found = [imports(path.read_text()) for path in paths] + [imports(written)]
    imported, looked_for = (set().union(*those) for those in zip(*found, strict=True))
    return [
        *(f"{name} is imported and not declared" for name in sorted(imported - available)),
        *(f"{name} is looked for and not declared" for name in sorted(looked_for - available - elsewhere)),
        *(f"{name} is declared and not imported" for name in sorted(declared - imported - looked_for)),
    ]


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11, which reads pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    package = names(project["dependencies"])
    extras = {extra: names(requirements) for extra, requirements in project["optional-dependencies"].items()}
    unexplained = set().union(package, *extras.values()) - NOT_IMPORTED.keys()

    parts = {PYTEST_PLUGIN, *itertools.chain(*WITH_EXTRAS.values())}

    def files(*folders: str) -> list[Path]:
        return [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path not in parts]

    below = files("flash_attn_cute")
    assert len(below) > 10
    for paths, extra, others in (
        (below, set(), set()),
        *((paths, extras[extra], set()) for extra, paths in WITH_EXTRAS.items()),
        ([*files("tests"), PYTEST_PLUGIN], extras["test"], extras["bench"] | extras["profile"]),
        (files("benchmarks", "lab"), extras["bench"], set()),
        (files("examples"), extras["examples"], set()),
    ):
        declared = (package if paths is below else extra) & unexplained
        wrong = problems(paths, package | extra, others, declared)
        assert not wrong, "\n".join(wrong)
        more = problems(paths, package | extra, others, declared | {"scipy"}, "import pandas")
        assert more == ["pandas is imported and not declared", "scipy is declared and not imported"]
    assert extras.keys() == {"cu13", "demo", "docs", "examples", "plot", "profile", "transformers", "test", "bench"}
    assert extras["cu13"] <= package  # another edition of it
    assert set(NOT_IMPORTED) <= set().union(package, *extras.values())


def test_imports_are_found_wherever_they_are() -> None:
    source = """
import json, torch.nn
from cutlass.cute import runtime
def f():
    from cuda.bindings import driver
    if importlib.util.find_spec("triton"):
        import flash_attn, flash_attn_cute
    pytest.importorskip("matplotlib.figure", reason="plots")
"""
    assert imports(source) == ({"torch", "nvidia-cutlass-dsl", "cuda-bindings"}, {"triton", "matplotlib"})
    assert names(["torch>=2.11", "a.b-c[x,y]<4; os_name == 'nt'", "flash-attn-cute[demo]"]) == {"torch", "a.b-c"}


def test_tests_share_by_way_of_their_library() -> None:
    folders = [path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))]
    assert len(folders) > 5
    borrows = re.compile(rf"^\s*(?:from|import) tests\.(?:{'|'.join(folders)})\b", re.MULTILINE)
    assert borrows.search("from tests.host.test_project import names")
    borrowing = [str(path) for path in (ROOT / "tests").rglob("*.py") if borrows.search(path.read_text())]
    assert not borrowing


def ci_checks(script: str) -> list[str]:
    """The commands of .ci/run that check the sources: all that it names itself and does not read from the README."""
    return re.findall(r"^\.venv/bin/(.*)$", script, re.MULTILINE)


def hook_checks(configuration: str) -> list[str]:
    return re.findall(r"^ +entry: (.*)$", configuration, re.MULTILINE)


def test_hooks_check_what_ci_checks() -> None:
    script, configuration = ((ROOT / name).read_text() for name in (".ci/run", ".pre-commit-config.yaml"))
    checks = ci_checks(script)
    assert len(checks) >= 3
    assert hook_checks(configuration) == checks
    # All of them are commands of the environment, given no names of files that CI would not give.
    assert re.findall(r"repo: (.*)", configuration) == ["local"]
    for line in ("- id: ", "language: system", "pass_filenames: false"):
        assert configuration.count(line) == len(checks), line


def commands_of(page: Path, section: str) -> list[str]:
    """The lines of the first block of shell commands in a section of a page."""
    _, _, text = page.read_text().partition(f"\n## {section}\n")
    return text.partition("```bash\n")[2].partition("```")[0].splitlines()


@pytest.fixture
def ci_commands(tmp_path: Path) -> list[str]:
    """The commands that .ci/run executes: stubs write them down, in a copy of the files that the script reads."""
    for name in (".ci/run", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stub = 'printf "%s" "${0#"$PWD/"}" >> log; printf " %s" "$@" >> log; echo >> log; echo "$TESTS_CODE_DIR" >> folders'
    for name in ("path/python3", *(f".venv/bin/{name}" for name in ("pip", "python", "ruff", "mypy"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{stub}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/path:{os.environ['PATH']}"}
    subprocess.run([tmp_path / ".ci" / "run"], env=environment, check=True)
    log = (tmp_path / "log").read_text().replace("'", "").replace("path/python3", "python3")
    return [line.strip() for line in log.splitlines()]


def test_ci_runs_the_commands_of_the_readme_and_checks_between_them(ci_commands: list[str], tmp_path: Path) -> None:
    """Both runs of pytest are given one folder for code, so that nothing is compiled twice, which is then removed."""
    set_up, run_tests = commands_of(ROOT / "README.md", "Try it")
    checks = [f".venv/bin/{check}".strip() for check in ci_checks((ROOT / ".ci" / "run").read_text())]
    assert ci_commands == [
        *set_up.replace("'", "").split(" && "),
        *checks,
        run_tests,
        f"{run_tests} -m slow --dist worksteal",
    ]
    assert len(checks) >= 3
    folders = zip(ci_commands, (tmp_path / "folders").read_text().splitlines(), strict=True)
    first, second = (folder for command, folder in folders if "-m pytest" in command)
    assert first == second != ""
    assert not Path(first).exists()


def chosen_by(arguments: str) -> str:
    """The expression of markers by which a run of pytest chooses tests. Arguments that choose otherwise are refused."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("-m", "-n", "-r", "--dist"):
        parser.add_argument(option)
    for option in ("--strict-markers", "--strict-config"):
        parser.add_argument(option, action="store_true", required=True)
    return str(parser.parse_args(shlex.split(arguments)).m)


def test_ci_runs_each_test_once(request: pytest.FixtureRequest, ci_commands: list[str]) -> None:
    """Whatever a test's markers are, one of CI's two runs of pytest executes it, but for rare ones."""
    always = shlex.join(request.config.getini("addopts"))
    runs = [line.partition("-m pytest")[2] for line in ci_commands if "-m pytest" in line]
    expressions = [chosen_by(f"{always} {run}") for run in runs]
    assert len(expressions) == 2
    known = [line.partition(":")[0] for line in request.config.getini("markers")]
    for marked in itertools.product((False, True), repeat=len(known)):
        markers = dict(zip(known, marked, strict=True))
        executed = [eval(each, dict(markers)) for each in expressions]
        assert executed.count(True) == 1, markers


def test_all_files_of_tests_are_collected(request: pytest.FixtureRequest) -> None:
    """Below the files and folders that this run was asked for; in CI these are all."""
    here = request.config.invocation_params.dir
    asked = [here / argument.partition("::")[0] for argument in request.config.args]
    below = {path for each in asked for path in ([each] if each.is_file() else each.rglob("test_*.py"))}
    assert below == request.config.stash[tiers.COLLECTED]


def test_tests_are_where_pytest_looks_for_them(request: pytest.FixtureRequest) -> None:
    defines = re.compile(r"^ *def test_\w+\([^)]*\) -> None:", re.MULTILINE)
    searched = [ROOT / path for path in request.config.getini("testpaths")]
    folders = (path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "build")
    holding = [path for folder in folders for path in folder.rglob("*.py") if defines.search(path.read_text())]
    assert len(holding) > 70
    for path in holding:
        assert path.match("test_*.py"), path
        assert any(path.is_relative_to(folder) for folder in searched), path


def test_unknown_markers_are_refused() -> None:
    with pytest.raises(pytest.fail.Exception, match="'slwo' not found in `markers`"):
        _ = pytest.mark.slwo
    assert pytest.mark.slow.name == "slow"


def test_contributing_sets_up_what_the_readme_does() -> None:
    set_up, run_tests = commands_of(ROOT / "README.md", "Try it")
    make, install, check = commands_of(ROOT / "CONTRIBUTING.md", "Set-up and checks")
    assert [make, install] == [
        "python3 -m venv .venv && . .venv/bin/activate",
        set_up.split(" && ")[1].removeprefix(".venv/bin/"),
    ]
    checks = ci_checks((ROOT / ".ci" / "run").read_text())
    assert check.split(" && ") == [*checks, run_tests.removeprefix(".venv/bin/")]


def test_the_example_of_contributing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "build").mkdir()
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert (tmp_path / "build" / "kernel.cubin").read_bytes().startswith(b"\x7fELF")


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 9
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"


def commands_that_install(text: str) -> list[str]:
    """Commands that install the package by its name, which belongs to another project in the index."""
    return re.findall(r"pip install[^&\n]*?[ '\"]flash.attn.cute\S*", text)


def test_no_page_installs_it_by_name() -> None:
    assert len(commands_that_install("pip install -U 'flash-attn-cute[demo]'\n``pip install flash_attn_cute``")) == 2
    assert not commands_that_install("pip install torch '.[cu13]' dist/flash_attn_cute-0.1.0-py3-none-any.whl")
    folders = ("flash_attn_cute", "benchmarks", "docs", "examples", "lab")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    assert len(files) > 100
    for path in [*files, *ROOT.glob("*.md"), ROOT / "Containerfile"]:
        assert not commands_that_install(path.read_text()), path


def names_in(path: Path) -> set[str]:
    """The functions, classes and variables of a file, and what is in its classes, by itself and as ``Class.name``.

    Of a package also what it imports, to be found there.
    """
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{node.name}.")
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                new = {node.name}
            elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
                new = {alias.name for alias in node.names}
            else:
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                new = {target.id for target in targets if isinstance(target, ast.Name)}
                if "__all__" in new and isinstance(node, ast.Assign):
                    new |= set(ast.literal_eval(node.value))
            found.update(new, (prefix + name for name in new))

    collect(ast.parse(path.read_text()).body, "")
    return found


def expand(path: str) -> list[str]:
    """Every path that a shell makes of one with braces."""
    whole = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    return [path] if whole is None else [whole[1] + each + whole[3] for each in whole[2].split(",")]


def what_is_missing(page: str) -> list[str]:
    """Files, modules, and functions of files that a page names and that are not there; paths may be in the package."""
    wrong = []
    package = ROOT / "flash_attn_cute"
    rooms = "|".join(path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py")
    named = re.findall(r"([\w.{},-]*/[\w./{},-]*\.py|`\w+\.py)\b(?::([A-Za-z_][\w.]*))?", page)
    for written, name in named:
        for path in expand(written.removeprefix("`")):
            file = next((base / path for base in (ROOT, package) if (base / path).is_file()), None)
            if file is None or (name and name.rstrip(".") not in names_in(file)):
                wrong.append(f"{path}:{name}" if name else path)
    folders = re.findall(rf"`((?:flash_attn_cute|{rooms})(?:/\w+)*)/`", page)
    wrong += [folder for folder in folders if not any((base / folder).is_dir() for base in (ROOT, package))]
    for module in re.findall(
        rf"(?<![\w/-])(?:flash_attn_cute|tests|benchmarks|lab)(?:\.\w+)+|`(?:{rooms})(?:\.\w+)+`", page
    ):
        parts = module.strip("`").split(".")
        if parts[-1] in ("py", "md"):
            continue
        paths = [base.joinpath(*parts) for base in (ROOT, package)]
        is_module = any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
        holders = [path.parent.with_suffix(".py") for path in paths] + [path.parent / "__init__.py" for path in paths]
        if not is_module and not any(parts[-1] in names_in(holder) for holder in holders if holder.is_file()):
            wrong.append(".".join(parts))
    return wrong


# The model's names files of other projects, too, and the changelog names that are gone.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(x for x in (ROOT / "docs").glob("*.md") if x.name != "blackwell-model.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_what_pages_name_is_there(page: str) -> None:
    assert what_is_missing((ROOT / page).read_text()) == []


def test_what_docstrings_and_comments_name_is_there() -> None:
    """Modules of the rooms, and what is in them, by files of the package."""
    for path in PACKAGE.rglob("*.py"):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        prose = [x.string for x in tokens if x.type == tokenize.COMMENT or x.string.startswith('"""')]
        assert what_is_missing("\n".join(prose)) == [], path


def test_what_is_not_there_is_missed() -> None:
    page = """`api.py`, `apy.py`, jit/{cache,cash}.py, `jit/key.py:identity`, `jit/key.py:identify`, `kernels/sm90/`,
    `kernels/sm80/`, `kernels/common/query_tiles.py:QueryTile.read`, `kernels/common/query_tiles.py:QueryTile.rread`,
    `jit.cache`, `jit.cash`, `jit.cache.kernel`, `jit.cache.colonel`, python -m lab.prose, lab.poetry,
    `spec.AttentionSpec`, `backends/cute/backend.py:_MAX_PACKED_ROWS`. See flash_attn_cute.calls."""
    missing = (
        "apy.py jit/cash.py jit/key.py:identify kernels/common/query_tiles.py:QueryTile.rread kernels/sm80 jit.cash"
    )
    assert what_is_missing(page) == [*missing.split(), "jit.cache.colonel", "lab.poetry"]
