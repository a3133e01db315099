"""The package's NVTX ranges: what they enclose, that they close, and that they cost nothing while they are off."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig, forward_config
from flash_attn_cute.runtime import nvtx
from tests.lib.checks import random_call, run

CONFIG = forward_config("bfloat16", 192, 128, Features())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, _settings_reread: None) -> Iterator[list[str]]:
    """Ranges are on; what was pushed (+ and its name) and popped (-). In the end nothing may be left open."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"+{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("-"))
    monkeypatch.setenv("FLASH_ATTN_CUTE_NVTX", "1")
    yield seen
    depth = 0
    for event in seen:
        depth += 1 if event.startswith("+") else -1
        assert depth >= 0, seen
    assert depth == 0, seen


class Watched(PortableBackend):
    """Writes into a list when it works, and then raises if ``fail`` is set."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.fail = False

    def _work(self, name: str) -> None:
        self.events.append(f"+{name}")
        self.events.append("-")
        if self.fail:
            raise ArithmeticError(name)

    def forward(self, *given: Any) -> Any:
        self._work("forward works")
        return super().forward(*given)

    def backward(self, *given: Any) -> Any:
        self._work("backward works")
        return super().backward(*given)


@pytest.fixture
def watched(events: list[str], monkeypatch: pytest.MonkeyPatch) -> Watched:
    backend = Watched(events)
    monkeypatch.setitem(dispatch.BACKENDS, "portable", backend)
    return backend


def test_ranges_enclose_both_passes(events: list[str], watched: Watched) -> None:
    out = run(random_call([9, 9], nheads=4, nheads_k=2, packed=False, causal=True))
    shape = "portable b2 s9 h4/2 d16 float32 causal"
    assert events == [f"+flash_attn_cute forward {shape}", "+forward works", "-", "-"]
    events.clear()
    out.sum().backward()
    assert events == [f"+flash_attn_cute backward {shape}", "+backward works", "-", "-"]


def test_ranges_close_when_a_pass_raises(events: list[str], watched: Watched) -> None:
    call = random_call([5])
    out = run(call)
    watched.fail = True
    for name, body in (("forward", lambda: run(call)), ("backward", lambda: out.sum().backward())):
        events.clear()
        with pytest.raises(ArithmeticError):
            body()
        assert len(events) == 4
        assert events[0].startswith(f"+flash_attn_cute {name} ")
        assert events[-1] == "-"


@pytest.mark.parametrize(
    ("lengths", "options", "shape"),
    [
        # Packed: the lengths change from step to step, the name does not.
        ([3, 8], {"head_dim_v": 8}, "packed h2 d16/8 float32"),
        ([3, 8, 1], {"head_dim_v": 8}, "packed h2 d16/8 float32"),
        ([7], {"packed": False, "window_size": (4, 2)}, "b1 s7 h2 d16 float32 window 4,2"),
        ([7], {"packed": False, "lengths_k": [9], "dtype": torch.bfloat16}, "b1 s7/9 h2 d16 bfloat16"),
    ],
)
def test_names(events: list[str], lengths: list[int], options: dict[str, Any], shape: str) -> None:
    run(random_call(lengths, **options))
    assert events == [f"+flash_attn_cute forward portable {shape}", "-"]


@pytest.mark.parametrize("fail", [False, True])
def test_range_encloses_compiling(events: list[str], monkeypatch: pytest.MonkeyPatch, fail: bool) -> None:
    def compile_kernel(config: ForwardConfig) -> str:
        events.append("+compiles")
        events.append("-")
        if fail:
            raise ArithmeticError
        return "compiled"

    monkeypatch.setitem(sys.modules, "flash_attn_cute.jit.compile", SimpleNamespace(compile_kernel=compile_kernel))
    as_it_is = SimpleNamespace(export=lambda kernel: kernel, load=lambda code: code)
    monkeypatch.setitem(sys.modules, "flash_attn_cute.jit.code", as_it_is)
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", "0")
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setattr(cache, "_compiles", 0)
    if fail:
        with pytest.raises(ArithmeticError):
            cache.kernel(CONFIG)
    else:
        cache.kernel(CONFIG)
        cache.kernel(CONFIG)
    assert events == ["+flash_attn_cute compile forward d192", "+compiles", "-", "-"]


@pytest.mark.usefixtures("_settings_reread")
def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is pushed, and every block gets the one object that does nothing."""

    def fail(*args: Any) -> None:
        raise AssertionError("a range")

    monkeypatch.delenv("FLASH_ATTN_CUTE_NVTX", raising=False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", fail)
    run(random_call([5])).sum().backward()
    assert nvtx.span("a") is nvtx.span("b")


def has_nvtx() -> bool:
    try:
        torch.cuda.nvtx.mark("test")
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not has_nvtx(), reason="this PyTorch has no NVTX")
@pytest.mark.usefixtures("_settings_reread")
def test_real_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own functions take the names, and close what they opened."""
    monkeypatch.setenv("FLASH_ATTN_CUTE_NVTX", "1")
    depth = torch.cuda.nvtx.range_push("test")
    run(random_call([5])).sum().backward()
    assert torch.cuda.nvtx.range_pop() == depth
