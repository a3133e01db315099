"""Identity of a compiled kernel, everything it depends on, and the name that follows from it."""

import dataclasses
import functools
import hashlib
import json
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from flash_attn_cute.runtime import settings


class NoCompilerError(ImportError):
    """The compiler of kernels is not installed, or cannot be imported."""


_PACKAGE = Path(__file__).parents[1]
_COMPILERS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)


def identity(config: Any) -> dict[str, Any]:
    """Everything that the code of a kernel follows from, as JSON: its configuration, the sources, the compiler.

    The configuration is a frozen dataclass of numbers, strings and booleans. Imports cutlass, or raises
    NoCompilerError.
    """
    return {
        "kind": f"{type(config).__module__}.{type(config).__qualname__}",
        "config": dataclasses.asdict(config),
        "target": config.target,
        **surroundings(),
    }


def surroundings() -> dict[str, Any]:
    """The part of an identity that all kernels share which this installation finds again. Imports cutlass."""
    return {
        "sources": _SOURCES,
        "compiler": _compiler(),
        "compiler settings": settings.compiler_environment(),
        "host": _host(),
    }


def name(identity: dict[str, Any]) -> str:
    """A kernel's name: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def sources_unchanged() -> bool:
    """Whether the files from which kernels are compiled are still those that the process started with."""
    try:
        return _hash_sources() == _SOURCES
    except OSError:  # some are gone: the package is being replaced
        return False


def hash_of(files: Iterable[Path]) -> str:
    """A digest of files of the package: their paths within it and what is in them."""
    total = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        total.update(f"{path.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return total.hexdigest()


def files_below(room: str) -> list[Path]:
    """The Python files of a folder of the package, without editors' locks, which are links to no file."""
    return [path for path in (_PACKAGE / room).rglob("*.py") if path.is_file()]


def _hash_sources() -> str:
    parts = (_PACKAGE / "jit" / f"{part}.py" for part in ("compile", "code"))
    return hash_of([*files_below("kernels"), *parts])


# Taken when the package is imported: what is edited later is not what the modules in memory were made from.
_SOURCES = _hash_sources()


@functools.cache
def _compiler() -> dict[str, str]:
    # The DSL brings a compiler for each major version of CUDA and takes the one that suits the driver.
    try:
        import cutlass
    except ImportError as error:
        problem = f"kernels are compiled by nvidia-cutlass-dsl, which cannot be imported: {error}"
        raise NoCompilerError(problem) from error

    versions = {"CUDA": f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}"}
    for distribution in _COMPILERS:
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:  # not every installation has them all
            versions[distribution] = "absent"
    return versions


@functools.cache
def _host() -> dict[str, str]:
    """The launching code is compiled for the processor at hand, and the folder may be shared with other machines."""
    return {
        "machine": platform.machine(),
        "processor": hashlib.sha256(_processor_features().encode()).hexdigest()[:16],
        "python": str(sys.implementation.cache_tag),
    }


def _processor_features() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
