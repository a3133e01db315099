"""A bundle: many compiled kernels in one file that any number of processes read.

    <digest>.bundle     the index, one line of JSON; the kernels' code behind it

The index has, by a kernel's name, what the kernel was made from, where its code is, and the code's digest. The file is
named by the digest (SHA-256) of the index. So the path that ``FLASH_ATTN_CUTE_BUNDLE`` holds says what every byte of
the file must be, and neither the file's owner nor its folder has to be trusted.
"""

import functools
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO


class DamagedBundleError(RuntimeError):
    """A bundle whose bytes are not those that its name stands for."""


class Bundle:
    """An opened bundle. Its index has been read and verified; code is, when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Reads the index; raises DamagedBundleError if it is not what the file's name says, or OSError."""
        self.path = path
        with _opened_file(path) as file:
            index = file.readline()
            self._codes = len(index)
        if path.name != _file_name(index):
            raise DamagedBundleError(_damage(path, "its index has another digest than its name says"))
        self.index: dict[str, dict[str, Any]] = json.loads(index)

    def read(self, name: str) -> bytes | None:
        """The code of a kernel, or None; raises DamagedBundleError if it is not what the index says, or OSError."""
        entry = self.index.get(name)
        if entry is None:
            return None
        with _opened_file(self.path) as file:
            file.seek(self._codes + entry["start"])
            code = file.read(entry["size"])
        if hashlib.sha256(code).hexdigest() != entry["sha256"]:
            raise DamagedBundleError(_damage(self.path, f"the code of kernel {name[:12]} is damaged"))
        return code


@functools.cache
def opened(path: Path) -> Bundle:
    """The bundle at a path, opened once a process. Raises as ``Bundle`` does."""
    return Bundle(path)


def write(folder: Path, kernels: Iterable[tuple[dict[str, Any], str, bytes]]) -> Path:
    """Writes a bundle, whole or not at all, and returns its path. The same kernels give the same bytes.

    Kernels are what each was made from, its name, and its code. The folder is made if there is none.
    """
    index, codes = {}, []
    start = 0
    for identity, name, code in sorted(kernels, key=lambda kernel: kernel[1]):
        digest = hashlib.sha256(code).hexdigest()
        index[name] = {"identity": identity, "start": start, "size": len(code), "sha256": digest}
        codes.append(code)
        start += len(code)
    line = json.dumps(index, sort_keys=True).encode() + b"\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(line)
    temporary = folder / f"{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        temporary.write_bytes(line + b"".join(codes))
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    return path


def _opened_file(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        problem = f"FLASH_ATTN_CUTE_BUNDLE: expected a bundle that can be read, got an error ({error.strerror})"
        raise OSError(error.errno, problem, str(path)) from error


def _file_name(index: bytes) -> str:
    return f"{hashlib.sha256(index).hexdigest()}.bundle"


def _damage(path: Path, problem: str) -> str:
    return (
        f"FLASH_ATTN_CUTE_BUNDLE: {path}: {problem}. Copy the bundle again, under the name that "
        "`python -m flash_attn_cute.jit bundle` gave it, or unset the variable to compile instead."
    )
