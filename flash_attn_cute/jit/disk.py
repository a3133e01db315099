"""The folder of compiled kernels; verdicts of the self-check have such a folder, too.

Compiled code is code: a user who can write to the folder can run code as its owner. So the folder is a real one (no
symbolic link), of mode 0700 when it is made here, and refused where another user owns it or can write to it. It is
opened once, checked, and then only reached through its descriptor, whatever happens to its path.

    <name>.kernel       an entry: the digest of its name and of all that follows, what it was made from (JSON), the code
    <name>.verdict      likewise, of the self-check
    <name>.lock         held by the process that compiles the entry
    <name>.<token>.tmp  an entry being written

Entries appear whole (``os.replace``) and are never changed. One that is damaged, or is not its user's, is as good as
none: it is made again. That also covers what a crash of the machine leaves, so nothing waits for the disk.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_locks: set[int] = set()  # descriptors of locks that this process holds or waits for
_OURS = re.compile(r"(?P<name>[0-9a-f]{64})\.(?P<kind>kernel|verdict|lock|[0-9a-f]{16}\.tmp)")


class UnsafeFolderError(RuntimeError):
    """A cache folder that others could have put code into."""


@dataclass(frozen=True)
class Entry:
    """An entry as a folder lists it."""

    name: str
    size: int  # bytes of its file
    modified: float  # seconds since the epoch
    identity: dict[str, Any] | None  # what it was made from; None if it is unusable


class Folder:
    """An open folder of compiled kernels, or of other entries; a context manager that closes it."""

    def __init__(self, path: Path, *, create: bool = True, kind: str = "kernel") -> None:
        """Opens the folder, which is made if there is none and ``create`` is True; ``kind`` ends its entries' names.

        Raises:
            UnsafeFolderError: it is a symbolic link, belongs to another user, or others can write to it.
            OSError: it cannot be made or opened.
        """
        if path.is_symlink():
            raise UnsafeFolderError(_refusal(path, "is a symbolic link"))
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._kind = kind
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        problem = _problem(os.fstat(self._descriptor))
        if problem:
            os.close(self._descriptor)
            raise UnsafeFolderError(_refusal(path, problem))

    def __enter__(self) -> "Folder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, name: str) -> bytes | None:
        """The code of an entry; None if there is no such entry, or an unusable one."""
        parsed = self._read(name)
        return None if parsed is None else parsed[1]

    def write(self, name: str, identity: dict[str, Any], code: bytes) -> None:
        """Puts an entry into the folder, in the place of any other of its name; raises OSError if it cannot."""
        body = json.dumps(identity).encode() + b"\n" + code
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        try:
            with open(self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(_digest(name, body) + b"\n" + body)
            os.replace(temporary, f"{name}.{self._kind}", src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._descriptor)
            raise

    @contextmanager
    def lock(self, name: str, *, waits: bool = True) -> Iterator[bool | None]:
        """Holds the entry's lock; it ends with the process at the latest. Gives whether it is held.

        Where another process has it, this one waits, unless ``waits`` is False. Where the file system has no locks, as
        some network file systems, the lock is one of this machine, in the folder for temporary files. If there is none
        either, it gives None, and nothing waits: processes may then make the same entry, and the last one's stays, as
        entries appear whole. Raises OSError if the lock's file cannot be made.
        """
        with ExitStack() as stack:
            is_held = stack.enter_context(self._locked(name, waits=waits))
            if is_held is None:
                with suppress(OSError, UnsafeFolderError):
                    machine = stack.enter_context(Folder(machine_folder()))
                    is_held = stack.enter_context(machine._locked(name, waits=waits))
            yield is_held

    @contextmanager
    def _locked(self, name: str, *, waits: bool) -> Iterator[bool | None]:
        """Gives whether the entry's lock is held; None if the file system has no locks."""
        import fcntl  # which Windows lacks: there only the portable backend serves, which keeps no entries

        descriptor = self._open(f"{name}.lock", os.O_RDWR | os.O_CREAT)
        _locks.add(descriptor)
        try:
            is_held: bool | None = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:  # another process has it
                is_held = False
            except OSError:
                is_held = None
            yield is_held
        finally:
            if descriptor in _locks:  # not in a child that was forked within
                # Closing does not unlock where a process that this one has forked has the file open, too.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                _locks.discard(descriptor)
                os.close(descriptor)

    def entries(self) -> list[Entry]:
        """All entries, the oldest first."""
        found = []
        for match in self._ours(self._kind):
            with suppress(FileNotFoundError):  # removed meanwhile
                status = os.stat(match[0], dir_fd=self._descriptor, follow_symlinks=False)
                parsed = self._read(match["name"])
                identity = None if parsed is None else json.loads(parsed[0])
                found.append(Entry(match["name"], status.st_size, status.st_mtime, identity))
        return sorted(found, key=lambda entry: entry.modified)

    def clear(self) -> int:
        """Removes everything that this class puts into a folder and nothing else; returns the number of entries.

        A process that compiles meanwhile is not disturbed; another one may then compile the same kernel.
        """
        kernels = 0
        for match in self._ours():
            with suppress(FileNotFoundError):  # removed, or renamed to an entry, meanwhile
                os.unlink(match[0], dir_fd=self._descriptor)
                kernels += match["kind"] == self._kind
        return kernels

    def _ours(self, kind: str | None = None) -> list[re.Match[str]]:
        matches = filter(None, map(_OURS.fullmatch, os.listdir(self._descriptor)))
        return [match for match in matches if kind in (None, match["kind"])]

    def _open(self, file: str, flags: int) -> int:
        return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor)

    def _read(self, name: str) -> tuple[bytes, bytes] | None:
        """(JSON, code) of an entry; None if it is missing, damaged, or a file that others could have written."""
        try:
            with open(self._open(f"{name}.{self._kind}", os.O_RDONLY), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or _problem(status):
                    return None
                digest, _, body = file.read().partition(b"\n")
        except OSError:
            return None  # whatever is the matter, the remedy is to make the entry anew, and that says what fails
        if digest != _digest(name, body):
            return None
        identity, _, code = body.partition(b"\n")
        return identity, code


def close_locks() -> None:
    """Closes the locks that a child of a fork has from its parent: it would hold them after the parent's end."""
    while _locks:
        os.close(_locks.pop())


def machine_folder() -> Path:
    """The user's folder of locks for file systems that have none: one a machine, in the folder for temporary files."""
    return Path(tempfile.gettempdir(), f"flash_attn_cute-{os.geteuid()}")


def _digest(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + body).hexdigest().encode()


def _problem(status: os.stat_result) -> str | None:
    """Why a file is not its user's alone."""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & 0o022:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _refusal(path: Path, problem: str) -> str:
    return (
        f"FLASH_ATTN_CUTE_CACHE_DIR: the cache folder {path} {problem}. Code is loaded from it, so it must be a real "
        "folder that belongs to you and that nobody else can write to. Remove it (it is then made anew), or set the "
        "variable to another folder, or to 0 for no cache on disk."
    )
