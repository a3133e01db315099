"""The folder of compiled kernels: private, whole entries or none, locks that end with their process."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flash_attn_cute.jit import disk
from flash_attn_cute.runtime import settings
from tests.conftest import IDENTITY, NAME

# Makes the entries that are not there, on a file system without locks. Imports no torch, to be quick.
MAKER = """
import errno, fcntl, hashlib, importlib.util, os, sys
from pathlib import Path

source, folder, *names = sys.argv[1:]
spec = importlib.util.spec_from_file_location("disk", source)
disk = sys.modules["disk"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(disk)
plain = fcntl.flock

def flock(descriptor, operation):
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
        raise OSError(errno.ENOLCK, "No locks available")
    plain(descriptor, operation)

fcntl.flock = flock
print("ready", flush=True)
sys.stdin.readline()
for name in names:
    with disk.Folder(Path(folder)) as opened, opened.lock(name):
        if opened.read(name) is None:
            print(name)
            opened.write(name, {}, hashlib.sha256(bytes(4_000_000)).digest())
"""


def read(path: Path, name: str = NAME) -> bytes | None:
    with disk.Folder(path) as opened:
        return opened.read(name)


# Locks


def test_the_lock_ends_with_its_process(folder: Path) -> None:
    code = f"""
import fcntl, time
lock = open({str(folder / f"{NAME}.lock")!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(300)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    acquired = threading.Event()

    def wait() -> None:
        with disk.Folder(folder) as opened, opened.lock(NAME):
            acquired.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not acquired.wait(0.3)
    holder.kill()
    assert acquired.wait(10)
    waiter.join()
    holder.communicate()


def test_the_lock_is_let_go(folder: Path) -> None:
    """Another process may still have its file, one that was forked without Python's knowledge."""
    with disk.Folder(folder) as opened:
        with pytest.raises(ZeroDivisionError), opened.lock(NAME):
            1 / 0  # noqa: B018
        with opened.lock(NAME, waits=False) as is_held:
            assert is_held
            other = os.dup(*disk._locks)
        with open(folder / f"{NAME}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    assert not disk._locks, "a child of a fork closes these, whatever file they are by then"


def test_where_the_file_system_has_no_locks_the_machine_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder.parent / "temporary"))
    plain = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
            raise OSError(errno.ENOLCK, "No locks available")
        plain(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", flock)
    with disk.Folder(folder) as opened, opened.lock(NAME):
        (lock,) = disk.machine_folder().iterdir()
        with open(lock) as other, pytest.raises(BlockingIOError):
            flock(other.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(lock) as other:
        flock(other.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_locks_many_processes_make_each_entry_once(folder: Path) -> None:
    names = [f"{i:064x}" for i in range(10)]
    command = [sys.executable, "-c", MAKER, disk.__file__, str(folder), *names]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"TMPDIR": str(folder.parent)}
    makers: list[Any] = [subprocess.Popen(command, env=environment, **pipes) for _ in range(6)]
    for maker in makers:
        assert maker.stdout.readline() == "ready\n"
    for maker in makers:
        maker.stdin.write("go\n")
        maker.stdin.flush()
    made = [line for maker in makers for line in maker.stdout.read().split()]
    for maker in makers:
        maker.communicate()
    assert [maker.returncode for maker in makers] == [0] * len(makers)
    assert sorted(made) == names


def test_a_lock_that_is_tried_is_held_or_not(folder: Path) -> None:
    with disk.Folder(folder) as opened, disk.Folder(folder) as other:
        with opened.lock(NAME, waits=False) as is_held, other.lock(NAME, waits=False) as is_held_twice:
            assert (is_held, is_held_twice) == (True, False)
        with other.lock(NAME, waits=False) as is_held:
            assert is_held


# Entries


def test_round_trip(folder: Path) -> None:
    code = os.urandom(1000) + b"\n\n" + bytes(256)
    with disk.Folder(folder) as opened:
        opened.write(NAME[::-1], IDENTITY, code)
        assert opened.read(NAME[::-1]) == code
        assert opened.read(NAME) == b"code"
        assert opened.read("f" * 64) is None
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {path.suffix for path in folder.iterdir()} == {".kernel"}


def test_damaged_entries_are_unusable(folder: Path) -> None:
    entry = folder / f"{NAME}.kernel"
    whole = entry.read_bytes()
    for i in range(len(whole)):
        entry.write_bytes(whole[:i])
        assert read(folder) is None
        entry.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        assert read(folder) is None
    entry.write_bytes(whole + b"\0")
    assert read(folder) is None
    entry.write_bytes(whole)
    assert read(folder) == b"code"
    shutil.copy(entry, folder / f"{'f' * 64}.kernel")  # under another name
    assert read(folder, "f" * 64) is None


def test_entries_that_others_own_or_can_write_are_unusable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk.Folder(folder) as opened:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert opened.read(NAME) is None
        monkeypatch.undo()
        assert opened.read(NAME) == b"code"
    for mode in (0o620, 0o602):
        (folder / f"{NAME}.kernel").chmod(mode)
        assert read(folder) is None


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_entries_that_are_no_files_are_replaced(folder: Path, kind: str) -> None:
    entry = folder / f"{NAME}.kernel"
    elsewhere = entry.rename(entry.with_suffix(".elsewhere"))
    if kind == "link":
        entry.symlink_to(elsewhere)
    else:
        os.mkfifo(entry, 0o600)
    with disk.Folder(folder) as opened:
        assert opened.read(NAME) is None
        opened.write(NAME, IDENTITY, b"new")
        assert opened.read(NAME) == b"new"
    assert stat.S_ISREG(entry.lstat().st_mode)


def test_failed_writes_leave_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with disk.Folder(folder) as opened, pytest.raises(OSError, match="No space"):
        opened.write("f" * 64, IDENTITY, b"code")
    assert [path.name for path in folder.iterdir()] == [f"{NAME}.kernel"]


def test_entries_appear_whole(folder: Path) -> None:
    """Whatever a reader meets while an entry is written again and again, it is one of the versions."""
    versions = [bytes([i]) * 1_000_000 for i in range(2)]
    done = threading.Event()

    def rewrite() -> None:
        try:
            with disk.Folder(folder) as opened:
                for _ in range(20):
                    for version in versions:
                        opened.write(NAME, IDENTITY, version)
        finally:
            done.set()

    writer = threading.Thread(target=rewrite)
    with disk.Folder(folder) as opened:
        writer.start()
        seen = []
        while not done.is_set():
            seen.append(opened.read(NAME))
        writer.join()
        assert opened.read(NAME) == versions[-1]
    assert len(seen) > 1
    assert set(seen) <= {b"code", *versions}


def test_files_that_vanish_are_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing of the folder and the look at them: another process clears it, too."""
    plain = os.listdir
    monkeypatch.setattr(os, "listdir", lambda place: [f"{'f' * 64}.kernel", *plain(place)])
    with disk.Folder(folder) as opened:
        assert [entry.name for entry in opened.entries()] == [NAME]
        assert opened.clear() == 1
    monkeypatch.undo()
    assert not any(folder.iterdir())


# The folder


def test_folders_are_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        disk.Folder(tmp_path / "new" / "kernels").__exit__(None, None, None)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "kernels").stat().st_mode) == 0o700


def test_nothing_stays_open(folder: Path) -> None:
    before = {*os.listdir("/proc/self/fd")}
    with disk.Folder(folder) as opened, opened.lock(NAME):
        opened.write(NAME, IDENTITY, b"code")
    folder.chmod(0o777)
    with pytest.raises(disk.UnsafeFolderError):
        disk.Folder(folder)
    assert {*os.listdir("/proc/self/fd")} <= before


def test_unsafe_folders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others can write to them, or own them, or they are links, to folders or to nowhere."""
    for mode in (0o770, 0o707, 0o1777):
        folder.chmod(mode)
        with pytest.raises(disk.UnsafeFolderError, match=rf"{folder} can be written by others \(mode {mode:04o}\)"):
            disk.Folder(folder)
    folder.chmod(0o755)
    assert read(folder) == b"code"
    for name in ("kernels", "nowhere"):
        link = folder.with_name(f"link to {name}")
        link.symlink_to(folder.with_name(name))
        with pytest.raises(disk.UnsafeFolderError, match=f"{link} is a symbolic link"):
            disk.Folder(link)
    assert not folder.with_name("nowhere").exists()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(disk.UnsafeFolderError, match=f"belongs to user {os.getuid()}, not to 12345"):
        disk.Folder(folder)


def test_the_folder_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def variables(**values: str) -> None:
        for name in ("FLASH_ATTN_CUTE_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    variables(FLASH_ATTN_CUTE_CACHE_DIR=str(tmp_path), XDG_CACHE_HOME="/xdg")
    assert settings.cache_dir() == tmp_path
    variables(FLASH_ATTN_CUTE_CACHE_DIR="0")
    assert settings.cache_dir() is None
    for wrong in ("", "relative", "~/kernels"):
        variables(FLASH_ATTN_CUTE_CACHE_DIR=wrong)
        with pytest.raises(ValueError, match=f"expected an absolute path or 0, got '{wrong}'"):
            settings.cache_dir()
    variables(XDG_CACHE_HOME="/xdg", HOME="/home/me")
    assert settings.cache_dir() == Path("/xdg/flash_attn_cute")
    for ignored in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        variables(HOME="/home/me", **ignored)
        assert settings.cache_dir() == Path("/home/me/.cache/flash_attn_cute")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does where there is no home
    with pytest.raises(FileNotFoundError, match="no home folder"):
        settings.cache_dir()
