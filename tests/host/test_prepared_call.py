"""Plans are kept for calls that look alike, and for no others."""

from typing import Any

import pytest
import torch

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch, prepared_call
from flash_attn_cute.calls.attention_call import AttentionCall


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[prepared_call.Plan]:
    """Every plan made so far."""
    plans: list[prepared_call.Plan] = []
    original = prepared_call.make_plan

    def spy(call: AttentionCall) -> prepared_call.Plan:
        plans.append(original(call))
        return plans[-1]

    monkeypatch.setattr(prepared_call, "make_plan", spy)
    monkeypatch.setattr(prepared_call, "_kept", {})
    return plans


def dense(**changes: Any) -> dict[str, Any]:
    return {"q": torch.randn(2, 6, 4, 8), "k": torch.randn(2, 6, 2, 8), "v": torch.randn(2, 6, 2, 8)} | changes


def packed(**changes: Any) -> dict[str, Any]:
    cu = torch.tensor([0, 4, 6], dtype=torch.int32)
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4, "max_seqlen_k": 4}
    return call | changes


def test_a_plan_serves_again(made: list[prepared_call.Plan]) -> None:
    for _ in range(3):
        flash_attn_func(**dense(), causal=True)
        flash_attn_varlen_func(**packed(), softcap=2.0)
    assert len(made) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.randn(2, 5, 4, 8)},
        {"k": torch.randn(2, 5, 2, 8), "v": torch.randn(2, 5, 2, 8)},
        {"q": torch.randn(3, 6, 4, 8), "k": torch.randn(3, 6, 2, 8), "v": torch.randn(3, 6, 2, 8)},
        {"q": torch.randn(2, 4, 6, 8).transpose(1, 2)},
        {name: torch.randn(2, 6, 4 if name == "q" else 2, 8, dtype=torch.float64) for name in "qkv"},
        {"mask": torch.ones(6, dtype=torch.bool)},
        {"bias": torch.zeros(6)},
        {"learnable_sink": torch.zeros(4)},
        {"seqused_q": torch.tensor([1, 2], dtype=torch.int32)},
        {"seqused_k": torch.tensor([1, 2], dtype=torch.int32)},
        {"causal": True},
        {"window_size": (1, None)},
        {"window_size": (None, 1)},
        {"softcap": 1.0},
        {"softmax_scale": 1.0},
        {"deterministic": True},
        {"zero_padding": False},
        {"backend": "portable"},
    ],
    ids=",".join,
)
def test_another_look_is_another_plan(changes: dict[str, Any], made: list[prepared_call.Plan]) -> None:
    flash_attn_func(**dense())
    flash_attn_func(**dense(**changes))
    assert len(made) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_device_is_another_plan(made: list[prepared_call.Plan]) -> None:
    call = dense()
    flash_attn_func(**call)
    flash_attn_func(**{name: x.cuda() for name, x in call.items()})
    assert len(made) == 2
    with pytest.raises(ValueError, match="k: expected the device of q, cpu, got cuda"):
        flash_attn_func(**call | {"k": call["k"].cuda()})


def test_every_call_is_checked() -> None:
    """Arguments that equal valid ones without being valid are refused, also where the valid one has been served."""
    flash_attn_func(**dense(), causal=True, softcap=1.0, window_size=(1, 0))
    for wrong in ({"causal": 1}, {"softcap": True}, {"window_size": (True, 0)}, {"window_size": (1.0, 0)}):
        arguments: dict[str, Any] = {"causal": True, "softcap": 1.0, "window_size": (1, 0)} | wrong
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}: expected"):
            flash_attn_func(**dense(), **arguments)
    flash_attn_varlen_func(**packed())
    for bound in (4.0, True, None):
        with pytest.raises(TypeError, match="max_seqlen_k: expected an int"):
            flash_attn_varlen_func(**packed(max_seqlen_k=bound))
    # Without offsets it looks like a dense call, and is not one.
    rows: dict[str, Any] = {name: torch.randn(2, 6, 2, 8) for name in "qkv"}
    flash_attn_func(**rows)
    with pytest.raises(ValueError, match="q: expected shape"):
        flash_attn_varlen_func(**packed(**rows, cu_seqlens_q=None, cu_seqlens_k=None))


def test_an_invalid_call_leaves_nothing(made: list[prepared_call.Plan]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="k: expected the head dimension"):
            flash_attn_func(**dense(k=torch.randn(2, 6, 2, 7)))
    assert not prepared_call._kept
    assert not made


def test_new_backends_are_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Better(PortableBackend):
        def forward(self, spec: Any, inputs: Any) -> Any:
            raise AssertionError("chosen")

    flash_attn_func(**dense())
    monkeypatch.setattr(dispatch, "BACKENDS", {"better": Better(), **dispatch.BACKENDS})
    with pytest.raises(AssertionError, match="chosen"):
        flash_attn_func(**dense())


def test_not_all_plans_are_kept(made: list[prepared_call.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_call, "_KEPT_AT_MOST", 3)
    for rows in (1, 2, 3, 4, 5):
        flash_attn_func(**dense(q=torch.randn(2, rows, 4, 8)))
        assert len(prepared_call._kept) <= 3
    assert len(made) == 5
