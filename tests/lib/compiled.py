"""Code of configurations: PTX and machine code, made once for all processes of a run, or of several runs."""

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flash_attn_cute.jit import disk
from lab.ptx import tree

# A folder that several runs may share, as entries are named by the sources that they are made from; else it lies beside
# the kernels that calls compile: workers share it, and it ends with the run.
FOLDER = Path(os.environ.get("TESTS_CODE_DIR") or Path(os.environ["FLASH_ATTN_CUTE_CACHE_DIR"]) / "texts")


class Code(NamedTuple):
    """The kernels of a configuration, and the code that launches them, with their cubin in it, as an object file."""

    ptx: str
    cubin: bytes
    host: bytes


@functools.cache
def code_for(config: Any) -> Code:
    """The code of a configuration; the test is skipped where there is no compiler."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from flash_attn_cute.jit import key

    identity = key.identity(config)
    name = key.name(identity)
    with disk.Folder(FOLDER) as folder, folder.lock(name):
        stored = folder.read(name)
        if stored is None:
            stored = _compile(config)
            folder.write(name, identity, stored)
    text, size, rest = stored.split(b"\0", 2)
    return Code(text.decode(), rest[: int(size)], rest[int(size) :])


def _compile(config: Any) -> bytes:
    """PTX, the number of bytes of the cubin, the cubin, and the object file; with a byte of 0 behind the first two."""
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    from flash_attn_cute.jit.code import export
    from flash_attn_cute.jit.compile import compile_kernel

    with tempfile.TemporaryDirectory() as folder:
        kernel = compile_kernel(config, cute.KeepCUBIN, cute.KeepPTX, DumpDir(folder))
        made, host = kernel.artifacts, export(kernel)
    return bytes(made.PTX.rstrip("\0").encode() + f"\0{len(made.CUBIN)}\0".encode() + made.CUBIN + host)


def machine_code(config: Any, folder: Path, spilled: int = 0) -> dict[str, list[str]]:
    """The disassembled kernels of a configuration, by the names of their classes.

    None may spill, or ``spilled`` bytes a thread at the most.
    """
    code = code_for(config)
    assert ".local" not in code.ptx
    tool = cuobjdump()
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(code.cubin)
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    for line in re.findall(r"REG:.*", usage):
        stack = re.search(r"STACK:(\d+) .*LOCAL:0", line)
        assert stack, usage
        assert int(stack[1]) <= spilled, usage
    at_launch = {name: int(count) for name, count in re.findall(r"Function (\S+):\s+REG:(\d+)", usage)}
    for parsed in tree.parse(code.ptx).functions:
        if any(x.is_a("setmaxnreg") for x in parsed.instructions):
            assert at_launch[parsed.name] == parsed.registers
    sass = subprocess.run([tool, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout
    functions = re.split(r"\bFunction : ", sass)[1:]
    assert len(functions) == len(re.findall("REG:", usage))
    found = defaultdict(list)
    for function in functions:
        found[class_name(function)].append(function)
    return found


def count(code: str, instruction: str) -> int:
    """How often an instruction stands in PTX or machine code; ``instruction`` is a regular expression."""
    return len(re.findall(rf"\b{instruction}\b", code))


def class_name(function: str) -> str:
    """Name of the kernel's class, from the disassembled kernel, which starts with the name of module and class."""
    found = re.search(r"[a-z\d_]([A-Z][A-Za-z]+?)(?:Sm90|Sm100)?_obj", function)
    assert found, function[:200]
    return found[1]


def check_before_and_after(kernels: dict[str, list[str]], *, zeroes: bool, num_after: int) -> None:
    """The kernels around the backward kernel move 16 bytes a thread at a time."""
    (before,), after = kernels["Preprocess"], kernels["Postprocess"]
    assert re.search(r"\bLDG\.E\.128", before)
    assert bool(re.search(r"\bSTG\.E\.128", before)) == zeroes
    assert len(after) == num_after
    for sass in after:
        assert re.search(r"\bLDG\.E\.128", sass)
        assert re.search(r"\bSTG\.E\.128", sass)


def cuobjdump() -> str:
    """The disassembler of a CUDA toolkit, or the one that triton brings."""
    found = shutil.which("cuobjdump")
    if found is None:
        triton = pytest.importorskip("triton", reason="the machine code needs cuobjdump, of a CUDA toolkit or triton")
        found = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    return found
