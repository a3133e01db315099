"""The walls between the rooms: imports go down only, and importing the package is cheap."""

import ast
import json
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import flash_attn_cute

ROOT = Path(flash_attn_cute.__file__).parent
INSTRUMENTS = ROOT.parent / "lab"

# From the top down. A module may import from its own level and from those below it.
LEVELS = [
    {"distributed", "integrations", "profile", "demo"},
    {"api", "explanation", "padding", "score_statistics"},
    {"calls"},
    {"selfcheck"},
    {"backends"},
    {"jit", "kernels", "sparsity"},
    {"problem"},
    {"runtime"},
]
KNOW_KERNELS = {"selfcheck", "backends", "jit", "kernels"}
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}


def imported_modules(path: Path) -> set[str]:
    """Every module a file imports, absolutely named, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):  # prose: ok
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str:
    """The room that an import of the package leads to; what the package itself exports comes from the API."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] not in flash_attn_cute.__all__ else "api"


def room_of_file(inside: str) -> str:
    return inside.split("/")[0].removesuffix(".py")


# What assumes the tensor cores of one architecture, or the registers and the memory that they read and write.
OF_AN_ARCHITECTURE = (
    "cutlass.cute.nvgpu.warpgroup",
    "cutlass.cute.nvgpu.warp",
    "cutlass.cute.nvgpu.tcgen05",
    "cutlass.cute.nvgpu.OperandMajorMode",
    "cutlass.utils.hopper_helpers",
    "cutlass.utils.blackwell_helpers",
    "cutlass.tensor_utils",
)
ARCHITECTURES = ("sm90", "sm100")


def violations(modules: set[str], inside: str) -> list[str]:
    """Imports that a file must not have; ``inside`` is its path below the package."""
    wrong, room = [], room_of_file(inside)
    for module in modules:
        if inside.endswith(("__main__.py", "demo.py")) and module.startswith("flash_attn_cute.runtime.command_line."):
            continue  # how all commands read their arguments, and end
        top = module.split(".")[0]
        level = LEVEL["api" if room == "__init__" else room]
        if top == "flash_attn_cute" and LEVEL[room_of(module)] < level:
            wrong.append(module)
        if top == "cutlass" and room not in ("kernels", "jit"):
            wrong.append(module)
        of_users = ("api", "explanation", "padding", room)  # what users call
        if room in ("demo", "integrations") and top == "flash_attn_cute" and room_of(module) not in of_users:
            wrong.append(module)
        if room not in KNOW_KERNELS and top == "flash_attn_cute" and room_of(module) in ("jit", "kernels"):
            wrong.append(module)
        if inside.startswith("sparsity/dq_order/") and ".sparsity." in module and ".dq_order" not in module:
            wrong.append(module)
        if room == "kernels":
            wrong += [module] if violates_kernels(inside.split("/")[1], module) else []
        elif any(f"kernels.{a}" in module for a in ARCHITECTURES):  # all others ask the registry
            wrong.append(module)
    return wrong


# They take the default device of the thread that calls, which users may have set to any.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "frombuffer", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
}


def made_on_any_device(source: str) -> list[str]:
    """The calls of PyTorch's factories that name no device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]  # prose: ok
    names = {id(call): ast.unparse(call.func) for call in calls}
    of_torch = [call for call in calls if names[id(call)].removeprefix("torch.") in FACTORIES]
    of_torch = [call for call in of_torch if names[id(call)].startswith("torch.")]
    return [ast.unparse(call) for call in of_torch if not {"device", None} & {each.arg for each in call.keywords}]


def violates_kernels(area: str, module: str) -> bool:
    """Whether a part of the kernels must not import a module: a folder, or a file beside the folders."""
    top = module.split(".")[0]
    if top == "torch" or (top == "flash_attn_cute" and room_of(module) != "kernels"):  # others import torch in turn
        return True
    other = [a for a in ARCHITECTURES if a != area and area != "registry.py"]
    if any(f"kernels.{a}" in module for a in other):
        return True
    if area not in ("common", *ARCHITECTURES):  # what backends read, without a compiler
        return top == "cutlass"
    return area == "common" and module.startswith(OF_AN_ARCHITECTURE)


def test_imports_go_down_only() -> None:
    checked = 0
    for path in ROOT.rglob("*.py"):
        inside = path.relative_to(ROOT).as_posix()
        room = room_of_file(inside)
        assert room == "__init__" or room in LEVEL, f"{inside} belongs to no room"
        assert not violations(imported_modules(path), inside), inside
        checked += 1
    assert checked > 10


def import_graph(root: Path) -> dict[str, set[str]]:
    """Modules of a package, and for each the modules of the package that it imports, wherever in the file."""
    files = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }

    def module_of(name: str) -> str:
        while name not in files:
            name = name.rpartition(".")[0]
        return name

    ours = f"{root.name}."
    return {
        module: {module_of(name) for name in imported_modules(path) if name.startswith(ours)} - {module}
        for module, path in files.items()
    }


def test_imports_go_in_no_circle(tmp_path: Path) -> None:
    """Imports within functions count, too."""
    for root in (ROOT, INSTRUMENTS):
        graph = import_graph(root)
        assert len(graph) > 10
        TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle
    (tmp_path / "p").mkdir()
    for name, source in {
        "__init__": "",
        "a": "from p import b",
        "b": "def f():\n    from p.c import x",
        "c": "import p.a",
    }.items():
        (tmp_path / "p" / f"{name}.py").write_text(source)
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph(tmp_path / "p")).prepare()


def test_instruments_are_below_tests() -> None:
    for path in INSTRUMENTS.rglob("*.py"):
        assert not any(module.split(".")[0] == "tests" for module in imported_modules(path)), path


def test_tensors_are_made_on_devices_that_are_named() -> None:
    """Under a default device of the user's, too. The demo is a program of its own, which sets one."""
    for path in ROOT.rglob("*.py"):
        if path.name != "demo.py":
            assert not made_on_any_device(path.read_text()), path
    assert made_on_any_device("x = torch.zeros(2, dtype=torch.int32)") == ["torch.zeros(2, dtype=torch.int32)"]
    assert not made_on_any_device("x = torch.zeros(2, device=y.device)\nx.zeros(2)\ntorch.ones(1, **options)")


# A file, and a module that it must not import.
WRONG = """
problem/spec.py flash_attn_cute.calls.ops
runtime/kept.py flash_attn_cute.problem.spec
backends/x.py flash_attn_cute.calls.validate
calls/dispatch.py flash_attn_cute.flash_attn_func
calls/dispatch.py flash_attn_cute.kernels.registry
calls/dispatch.py cutlass.cute
api.py flash_attn_cute.integrations.sdpa
__init__.py flash_attn_cute.integrations.sdpa
integrations/sdpa.py flash_attn_cute.calls.validate
demo.py flash_attn_cute.calls.dispatch
sparsity/nodes.py flash_attn_cute.kernels.sm90.config
sparsity/dq_order/turns.py flash_attn_cute.sparsity.nodes
backends/cute/plan.py flash_attn_cute.kernels.sm90.config
jit/__main__.py flash_attn_cute.kernels.sm90.config.HEAD_DIMS
backends/cute/backend.py cutlass
kernels/sm90/forward.py torch
kernels/features.py flash_attn_cute.problem.spec
kernels/arguments.py cutlass.cute
kernels/common/score.py flash_attn_cute.kernels.sm90.forward
kernels/sm100/forward.py flash_attn_cute.kernels.sm90.forward
kernels/common/score.py cutlass.cute.nvgpu.warpgroup
kernels/common/score.py cutlass.utils.hopper_helpers
"""
RIGHT = """
sparsity/dq_order/launch_orders.py flash_attn_cute.sparsity.dq_order.turns
integrations/sdpa.py flash_attn_cute.api
kernels/sm90/forward.py cutlass.cute.nvgpu.warpgroup
kernels/common/tma.py cutlass.cute.nvgpu.cpasync
kernels/sm90/forward.py flash_attn_cute.kernels.common.score
"""


def test_the_rule_can_fail() -> None:
    for table, is_wrong in ((WRONG, True), (RIGHT, False)):
        for inside, module in (line.split() for line in table.strip().splitlines()):
            assert bool(violations({module}, inside)) == is_wrong, (inside, module)


# A call as on Windows, which lacks these modules and functions.
ON_WINDOWS = """
import os, sys, torch
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getuid", "register_at_fork"):
    delattr(os, name)
from flash_attn_cute import BlockMask, flash_attn_func
q = torch.randn(1, 8, 2, 8, requires_grad=True)
flash_attn_func(q, q, q, block_mask=BlockMask.prefix_lm(8, 8, 3)).sum().backward()
"""


def test_calls_need_nothing_that_windows_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", ON_WINDOWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Imports modules one after the other, and prints what each import takes by a measure, as a share of the first one's.
IMPORTS = """
import json, sys, time
def calls(module):  # of functions, in Python and in C
    count = 0
    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")
    sys.setprofile(note)
    __import__(module)
    sys.setprofile(None)
    return count
def seconds(module):
    start = time.process_time()
    __import__(module)
    return time.process_time() - start
costs = list(map({measure}, ("torch.library", "flash_attn_cute", "sympy")))
assert not any(name.split('.')[0] == 'cutlass' for name in sys.modules)
assert not any(name.startswith('flash_attn_cute.integrations') for name in sys.modules)
assert not sys.modules["torch"].cuda.is_initialized()
print(json.dumps([cost / costs[0] for cost in costs]))
"""


def shares(measure: str) -> tuple[float, float]:
    """Costs of importing the package, and sympy, as shares of torch's. Bytecode is kept where it is."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", IMPORTS.replace("{measure}", measure)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    _, ours, of_sympy = json.loads(done.stdout)
    return ours, of_sympy


@pytest.mark.slow
def test_import_is_cheap() -> None:
    """Neither cutlass nor CUDA is touched, and functions are called a twentieth as often as importing torch calls them.

    Processor time depends on what other processes leave in the caches; the number of calls does not. Time has twice the
    room that it needs, and shows what is slow within one call.
    """
    ours, of_sympy = shares("calls")
    assert ours < 0.06 < of_sympy  # which costs too much
    assert any(shares("seconds")[0] < 0.1 for _ in range(3))
