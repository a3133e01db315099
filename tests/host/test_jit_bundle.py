"""Bundles of compiled kernels: whole or refused, and used ahead of the folder."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flash_attn_cute.jit import __main__ as command
from flash_attn_cute.jit import bundle, cache, key
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm100.forward_config import forward_config
from tests.conftest import NAME
from tests.lib.kernel_processes import CONFIG, PROCESS, Compiler, outcome, start

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")


@pytest.fixture
def bundled(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with the kernel of ``CONFIG``, named by the setting; memory and the folder have it no longer."""
    path = made_bundle(tmp_path, monkeypatch)
    monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", str(path))
    shutil.rmtree(tmp_path / "kernels")
    assert compiler.calls == 1
    return path


def made_bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache.kernel(CONFIG)
    monkeypatch.setattr(cache, "_kernels", {})
    assert command.main(["bundle", str(folder / "bundles")]) == 0
    (path,) = (folder / "bundles").iterdir()
    return path


def test_kernels_come_from_the_bundle(bundled: Path, compiler: Compiler, tmp_path: Path) -> None:
    """By anybody, as its name says what is in it: neither owner nor mode matter."""
    bundled.chmod(0o666)
    assert callable(cache.kernel(CONFIG))
    assert compiler.calls == 1
    assert not (tmp_path / "kernels").exists()


def test_a_bundle_has_many_kernels(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [CONFIG, *(forward_config("bfloat16", d, d, Features()) for d in (64, 128))]
    for config in configs:
        cache.kernel(config)
    monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", str(made_bundle(tmp_path, monkeypatch)))
    shutil.rmtree(tmp_path / "kernels")
    for config in configs:
        cache.kernel(config)
    assert compiler.calls == 3


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        bundle.write(tmp_path, [({}, NAME, b"code")])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_with_a_bundle_do_not_compile(
    warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do they need a folder."""
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(warm))
    assert command.main(["bundle", str(tmp_path)]) == 0
    path = capsys.readouterr().out.strip()
    found = outcome(start(PROCESS, tmp_path / "kernels", FLASH_ATTN_CUTE_BUNDLE=path))
    assert found.compiles == 0
    assert "bfloat16" in found.signature
    assert not (tmp_path / "kernels").exists()


def test_a_bundle_serves_the_architectures_that_it_was_made_for(bundled: Path, compiler: Compiler) -> None:
    with pytest.warns(cache.NotBundledWarning, match=r"has no kernel of ForwardConfig\(.*target='sm_100a'"):
        cache.kernel(forward_config("bfloat16", 64, 64, Features()))
    assert compiler.calls == 2


def test_the_same_kernels_give_the_same_bundle(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bundled.read_bytes()
    bundled.unlink()
    monkeypatch.delenv("FLASH_ATTN_CUTE_BUNDLE")
    capsys.readouterr()
    assert made_bundle(tmp_path, monkeypatch) == bundled
    assert bundled.read_bytes() == content
    assert capsys.readouterr().out == f"{bundled}\n"


@pytest.mark.parametrize("place", ["name", "index", "code", "end"])
def test_damaged_bundles_raise(place: str, bundled: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(bundled.read_bytes())
    if place == "name":
        bundled = bundled.with_name(f"{'0' * 64}.bundle")
        monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", str(bundled))
    elif place == "end":
        del content[-1]
    else:
        content[10 if place == "index" else content.index(b"\n") + 10] ^= 1
    bundled.write_bytes(content)
    with pytest.raises(bundle.DamagedBundleError, match=f"FLASH_ATTN_CUTE_BUNDLE: {bundled}.*Copy the bundle again"):
        cache.kernel(CONFIG)
    assert compiler.calls == 1


def test_what_a_bundle_lacks_is_compiled(bundled: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_SOURCES", "another")
    monkeypatch.setattr(key, "_hash_sources", lambda: "another")
    with pytest.warns(cache.NotBundledWarning, match="'sources': 'another'"):
        cache.kernel(CONFIG)
    assert compiler.calls == 2
    monkeypatch.setattr(cache, "_kernels", {})
    with pytest.warns(cache.NotBundledWarning):
        cache.kernel(CONFIG)
    assert compiler.calls == 2  # the folder has it


@pytest.mark.parametrize("has_folder", [True, False])
def test_only_kernels_that_can_be_used_are_bundled(
    has_folder: bool, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if has_folder:
        cache.kernel(CONFIG)
        (tmp_path / "kernels" / f"{NAME}.kernel").write_text("damaged")
        monkeypatch.setattr(key, "_SOURCES", "another")
    assert command.main(["bundle", str(tmp_path / "bundles")]) == 1
    said = f"{tmp_path / 'kernels'} has no kernels that this installation can use: python -m flash_attn_cute.jit warm"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "bundles").exists()


def test_a_bundle_that_cannot_be_opened(bundled: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none, or it goes after its index has been read."""
    named = "FLASH_ATTN_CUTE_BUNDLE: expected a bundle that can be read, .*: {!r}"
    there = bundle.Bundle(bundled)
    bundled.unlink()
    with pytest.raises(FileNotFoundError, match=named.format(str(bundled))):
        there.read(*there.index)
    with pytest.raises(FileNotFoundError, match=named.format(str(bundled))):
        cache.kernel(CONFIG)
    monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", str(bundled.parent))
    with pytest.raises(IsADirectoryError, match=named.format(str(bundled.parent))):
        cache.kernel(CONFIG)
    assert compiler.calls == 1


def test_a_bundle_is_an_absolute_path(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_BUNDLE", "here")
    with pytest.raises(ValueError, match="FLASH_ATTN_CUTE_BUNDLE: expected an absolute path, got 'here'"):
        cache.kernel(CONFIG)
