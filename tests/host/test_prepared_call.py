"""Plans are kept for calls that look alike, and for no others."""

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import flash_attn_cute
from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import attend, dispatch, ops, prepared_call
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.kernels.registry import ARCHITECTURES
from tests.lib.launches import Launched
from tests.lib.modes import Functions, Operators, Subclass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[prepared_call.Plan]:
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


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


OFFSETS = [torch.tensor([0, 4, 6], dtype=torch.int32) for _ in range(2)]
attend_dense: Callable[..., Any] = flash_attn_func
attend_packed: Callable[..., Any] = flash_attn_varlen_func
REPEATED: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "dense": ([(2, 6, 4, 8)] * 3, lambda *qkv: attend_dense(*qkv, causal=True)),
    "through lse": ([(2, 6, 4, 8)] * 3, lambda *qkv: sum(x.sum() for x in attend_dense(*qkv, return_lse=True))),
    "packed": ([(6, 2, 8)] * 3, lambda *qkv: attend_packed(*qkv, *OFFSETS, 4, 4, causal=True)),
    "shared offsets": ([(6, 2, 8)] * 3, lambda *qkv: attend_packed(*qkv, *OFFSETS[:1] * 2, 4, 4)),
    "padded": ([(2, 6, 4, 8)] * 3, lambda *qkv: attend_dense(*qkv, seqused_q=OFFSETS[0][1:], seqused_k=OFFSETS[1][1:])),
    "sink": ([(2, 6, 4, 8)] * 3 + [(4,)], lambda *qkv: attend_dense(*qkv[:3], learnable_sink=qkv[3])),
}
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("shapes", "attend_"), REPEATED.values(), ids=REPEATED)
def test_repeated_calls_are_not_looked_at_again(
    shapes: list[tuple[int, ...]],
    attend_: Callable[..., Tensor],
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A guard says that they look like an earlier call, in both passes; results are those of a first call."""
    given, others = leaves(*shapes), leaves(*shapes)
    monkeypatch.setattr(prepared_call, "_kept", {})

    def both(given: list[Tensor]) -> list[Tensor]:
        with mode():
            out = attend_(*given)
        return [out, *(torch.autograd.grad(out.sum(), given) if out.requires_grad else ())]

    expected = both(others)
    monkeypatch.setattr(prepared_call, "_kept", {})
    both(given)
    for module, name in ((prepared_call, "cached_plan"), (attend, "needs_dispatcher"), (ops, "looks_like")):
        monkeypatch.setattr(module, name, None)
    assert all(torch.equal(x, y) for x, y in zip(both(others), expected, strict=True))


@pytest.mark.parametrize("name", ["mask", "bias", "block_mask"])
def test_a_call_with_scores_of_its_own_is_none_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards look at no mask and no bias, so such a call is not kept for others of the same q, k and v."""
    qkv, mask = leaves(*[(2, 6, 4, 8)] * 3), torch.ones(6, 6, dtype=torch.bool).tril()
    given = {"mask": mask, "bias": mask.bfloat16(), "block_mask": BlockMask.causal(6, 6)}[name]
    expected = attend_dense(*qkv)
    monkeypatch.setattr(prepared_call, "_kept", {})
    attend_dense(*qkv, **{name: given})
    assert torch.equal(attend_dense(*qkv), expected)


def test_offsets_may_be_shared_or_not() -> None:
    """Guards see a tensor once; in both passes, under the same options, in any order."""
    qkv = leaves(*[(6, 2, 8)] * 3)

    def both(cu_k: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend_packed(*qkv, OFFSETS[0], cu_k, 4, 4).sum(), qkv)

    expected = both(OFFSETS[1])
    for cu_k in (OFFSETS[0], OFFSETS[1], OFFSETS[0], OFFSETS[0], OFFSETS[1], OFFSETS[1]):
        assert all(torch.equal(x, y) for x, y in zip(both(cu_k), expected, strict=True))
    x = qkv[0]
    for _ in range(3):  # a tensor that is all of q, k and v
        assert torch.equal(
            attend_packed(x, x, x, *OFFSETS, 4, 4), attend_packed(x, x.clone(), x.clone(), *OFFSETS, 4, 4)
        )


class OperatorsOfEager(Operators):
    """Is none of the compiled programs' modes, as that of selective checkpointing: guards overlook it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def test_calls_that_are_watched_look_like_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes that come later, other types, and lazily negated tensors, in both passes."""
    seen: list[bool] = []
    original = ops.attention

    def noted(inputs: Any, plan: Any, watched: bool) -> Any:
        seen.append(watched)
        return original(inputs, plan, watched)

    monkeypatch.setattr(ops, "attention", noted)
    qkv = leaves(*[(2, 6, 4, 8)] * 3)
    attend_dense(*qkv).sum().backward()
    out, dout = attend_dense(*qkv), torch.ones(2, 6, 4, 8, dtype=torch.bfloat16)
    by_operator = Mock(wraps=ops._call_backward)
    monkeypatch.setattr(ops, "_call_backward", by_operator)
    torch.autograd.grad(out, qkv, dout, retain_graph=True)
    assert (seen, by_operator.call_count) == ([False, False], 0)
    for mode in (Functions(), Operators(), OperatorsOfEager()):
        with mode:
            attend_dense(*qkv)
            torch.autograd.grad(out, qkv, dout, retain_graph=True)
    # Autograd runs without function modes, but in the dispatch mode of its caller.
    assert (seen[2:], by_operator.call_count) == ([True] * 3, 2)
    attend_dense(qkv[0].as_subclass(Subclass), *qkv[1:])
    attend_dense(torch._neg_view(qkv[0]), *qkv[1:])
    torch.autograd.grad(out, qkv, torch._neg_view(dout), retain_graph=True)
    torch.autograd.grad(out, qkv, dout, create_graph=True)
    assert (seen[5:], by_operator.call_count) == ([True, True], 4)
    attend_dense(*qkv)
    assert seen[-1] is False


def test_the_last_looks_are_compared_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_call, "_kept", {})
    for rows in range(1, 20):
        attend_dense(*leaves(*[(1, rows, 1, 8)] * 3))
    (last,) = (found for found in prepared_call._kept.values() if type(found) is tuple)
    assert [plan.max_seqlens[0] for _, plan in last] == list(range(19, 11, -1))


# As many as there are.
WITHOUT_STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x[0, 0].to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}


@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
@pytest.mark.parametrize("name", ["q", "v"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_tensors_without_strides_after_others(kind: str, name: str) -> None:
    """They are refused as in a first call: guards, which read strides, would end the process."""
    call = dense()
    flash_attn_func(**call)
    with pytest.raises(TypeError, match="expected a"):
        flash_attn_func(**call | {name: WITHOUT_STRIDES[kind](call[name])})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transform_over_nested_tensors_after_others() -> None:
    """A wrapper of vmap over them has no sizes; it is refused as in a first call, and does not end the process."""
    call = dense()
    flash_attn_func(**call)
    nested = torch.nested.nested_tensor([call["q"], call["q"][:, :5]])
    with pytest.raises(RuntimeError, match="not supported for batched nested"):
        torch.vmap(lambda q: flash_attn_func(**call | {"q": q}))(nested)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_wrapper_that_has_outlived_its_transform_after_others() -> None:
    """It is refused as in a first call, in both passes, though no transform watches the thread any longer."""
    call = {name: x.requires_grad_() for name, x in dense().items()}
    out = flash_attn_func(**call)
    out.backward(torch.ones_like(out))
    escaped: list[torch.Tensor] = []

    def escape(x: torch.Tensor) -> torch.Tensor:
        escaped.append(x)
        return x

    torch.vmap(escape)(torch.nested.nested_tensor([out.detach(), out.detach()[:, :5]]))
    with pytest.raises(RuntimeError, match="not supported for batched nested"):
        flash_attn_func(**call | {"v": escaped[0]})
    with pytest.raises(RuntimeError, match="not supported for batched nested"):
        flash_attn_func(**call).backward(escaped[0])


def test_a_gradient_without_strides_after_others() -> None:
    call = {name: x.requires_grad_() for name, x in dense().items()}
    flash_attn_func(**call).backward(torch.ones(2, 6, 4, 8))
    with pytest.raises(NotImplementedError, match="Sparse"):
        flash_attn_func(**call).backward(torch.ones(2, 6, 4, 8).to_sparse())


@pytest.fixture
def hopper(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Launches of Hopper's backend, which takes the CPU for such a GPU."""
    monkeypatch.setitem(dispatch.BACKENDS, "sm90", CuteBackend(ARCHITECTURES["sm90"], is_supposed=True))
    return launches


def reached_from(*given: object) -> list[object]:
    """All that objects hold, directly or not, but for what is in modules and classes."""
    found: dict[int, object] = {}
    waiting: list[object] = [*given]
    while waiting:
        x = waiting.pop()
        if id(x) not in found and not isinstance(x, (ModuleType, type)):
            found[id(x)] = x
            waiting += (x.__closure__, x.__defaults__) if isinstance(x, FunctionType) else gc.get_referents(x)
    return [*found.values()]


@pytest.mark.parametrize("backend", ["portable", "sm90"])
def test_nothing_that_is_kept_holds_tensors(
    backend: str, made: list[prepared_call.Plan], hopper: list[Launched]
) -> None:
    """Plans, guards and prepared passes of both directions."""
    for block_mask in (None, BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool).tril())):
        qkv = leaves(*[(2, 64, 4, 64)] * 3)
        out = attend_dense(*qkv, block_mask=block_mask, backend=backend)
        out.backward(torch.randn_like(out))
    made.clear()
    hopper.clear()
    held = reached_from(prepared_call._kept)
    assert any(isinstance(x, prepared_call.Plan) for x in held)
    assert not any(isinstance(x, Tensor) for x in held)


MOST_FUNCTIONS = {"no_grad": 14, "recording": 16, "backward": 7}


@pytest.mark.usefixtures("hopper")
def test_host_work_of_a_call() -> None:
    """Functions of this package that a repeated call enters: a noise-free measure of its time on the host."""
    torch.use_deterministic_algorithms(False)  # which would have new memory filled
    package = str(Path(flash_attn_cute.__file__).parent)

    def functions(call: Callable[[], Any]) -> list[str]:
        entered: list[str] = []

        def note(frame: FrameType, event: str, _: Any) -> None:
            # A comprehension is a frame in some versions of Python, and the methods of named tuples are in no file.
            if event == "call" and frame.f_code.co_filename.startswith(package) and "<" not in frame.f_code.co_name:
                entered.append(frame.f_code.co_name)

        call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return entered

    qkv, dout = leaves(*[(2, 64, 4, 64)] * 3), torch.randn(2, 64, 4, 64, dtype=torch.bfloat16)
    out = attend_dense(*qkv, backend="sm90")
    entered = {"recording": functions(lambda: attend_dense(*qkv, backend="sm90"))}
    with torch.no_grad():
        entered["no_grad"] = functions(lambda: attend_dense(*qkv, backend="sm90"))
    entered["backward"] = functions(lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True))
    for name, most in MOST_FUNCTIONS.items():
        assert 0 < len(entered[name]) <= most, f"{name}: {len(entered[name])} functions: {entered[name]}"
