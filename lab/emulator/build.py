"""From PTX for SM100 to a binary for Hopper GPUs, by nvcc and ptxas of a CUDA toolkit 13."""

import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from lab.emulator.translate import Translation, translate

_HERE = Path(__file__).parent
SOURCES = [_HERE / name for name in ("machine.h", "product.h", "runtime.cu", "translate.py", "build.py")]
SOURCES.append(_HERE.parent / "ptx" / "tree.py")


class BuildError(RuntimeError):
    """nvcc or ptxas is missing or failed."""


def _run(tool: str, *arguments: object) -> None:
    path = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
    if path is None:
        raise BuildError(f"{tool} of a CUDA toolkit 13 is not on PATH")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{tool} {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}"[:8000])


@functools.cache
def runtime() -> str:
    """``runtime.cu`` as PTX, its head included.

    Raises:
        BuildError: nvcc is missing or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runtime.ptx"
        _run("nvcc", "-rdc=true", "-arch=compute_90a", "-ptx", "-o", out, _HERE / "runtime.cu")
        return out.read_text()


def assemble(text: str, *options: str) -> bytes:
    """A binary for sm_90a from PTX.

    Raises:
        BuildError: ptxas is missing or failed: the message has its words, and the PTX's path, which is kept then.
    """
    folder = Path(tempfile.mkdtemp(prefix="lab_emulator_"))
    (folder / "kernel.ptx").write_text(text)
    _run("ptxas", "-arch=sm_90a", *options, "-o", folder / "kernel.cubin", folder / "kernel.ptx")
    binary = (folder / "kernel.cubin").read_bytes()
    shutil.rmtree(folder)
    return binary


def build(text: str) -> tuple[bytes, Translation]:
    """A binary for a Hopper GPU from PTX for an SM100 GPU, and what was replaced.

    Raises:
        RefusedError: something in it is not emulated.
        BuildError: nvcc or ptxas is missing or failed.
    """
    translation = translate(text)
    return assemble(runtime() + translation.body), translation


def identity() -> str:
    """Digest of the sources: binaries of another version of the emulator have another one."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()
