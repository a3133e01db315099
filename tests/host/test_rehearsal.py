"""A rehearsal notes the kernels that functions launch."""

from types import SimpleNamespace

import pytest
import torch

from flash_attn_cute import flash_attn_func
from flash_attn_cute.backends.cute import counters
from flash_attn_cute.calls import dispatch
from flash_attn_cute.jit import cache
from tests.lib import checks, rehearsal


def test_a_rehearsal_notes_kernels_and_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each configuration is there once, none is compiled, and this machine's backends are as before."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(counters, "next_tile", lambda *_: torch.zeros(3, dtype=torch.int32))
    before, compiled = dict(dispatch.BACKENDS), cache.compile_count()

    def call() -> None:
        x = torch.randn(1, 300, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        out = flash_attn_func(x, x, x, backend="sm90")
        out.sum().backward()
        checks.assert_close("out", out, torch.zeros(1), torch.zeros(1), 1.0, 1.0)
        assert checks.differing({"out": out}, lambda: {"out": out + 1}, 1) == []

    passes = [config.pass_name for config in rehearsal.needed_by([call, call], dispatch.supposing("sm90"))]
    assert passes == ["forward", "backward"]
    assert before == dispatch.BACKENDS
    assert cache.compile_count() == compiled
    with pytest.raises(AssertionError, match="out: shape"):
        checks.assert_close("out", torch.zeros(2), torch.zeros(1), torch.zeros(1), 1.0, 1.0)
