"""Explanations of calls, without a GPU. ``test_cute_backend.py`` compares them with launches."""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cute import explain, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.cute.explained import PassPlan
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.registry import ARCHITECTURES
from tests.lib.checks import offsets
from tests.lib.refusals import assert_refused, refusals


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Nothing is compiled, and only tests that call attention run it."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("runs")

    monkeypatch.setattr(cache, "kernel", never)
    if "warned" not in request.fixturenames:
        for backend in (PortableBackend, CuteBackend):
            monkeypatch.setattr(backend, "forward", never)


def low(*shape: int, device: str = "cpu") -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def planned(*args: Any, **options: Any) -> tuple[PassPlan, PassPlan]:
    explained = explain(*args, gpu="sm90", **options)
    assert explained.forward is not None
    assert explained.backward is not None
    return explained.forward, explained.backward


def test_a_call_on_a_cpu() -> None:
    q = torch.randn(2, 5, 4, 40)
    explained = explain(q, q[:, :, :2], q[:, :, :2], causal=True, softcap=1.0)
    assert explained.backend == "portable"
    assert dict(explained.passed_over) == {"sm90": ("tensors on cpu", "torch.float32")}
    assert (explained.device, explained.num_sms, explained.forward, explained.backward) == ("cpu", None, None, None)
    lines = str(explained).splitlines()
    assert lines[:2] == ["backend portable on cpu", "  sm90 cannot: tensors on cpu; torch.float32"]
    assert lines[2] == "  float32; 4 heads on 2; d = 40; causal / window_size; softcap"
    with pytest.raises(FrozenInstanceError):
        explained.backend = "sm90"  # type: ignore[misc]
    with pytest.raises(TypeError):
        explained.passed_over["sm90"] = ()  # type: ignore[index]


def test_what_a_hopper_gpu_would_do() -> None:
    q = low(2, 4096, 16, 128)
    explained = explain(q, q, q, gpu="sm90")
    assert (explained.backend, dict(explained.passed_over), explained.num_sms) == ("sm90", {}, 132)
    forward, backward = planned(q, q, q)
    assert (explained.forward, explained.backward) == (forward, backward)
    config = forward.config
    assert config == ARCHITECTURES["sm90"].passes["forward"].configure("bfloat16", 128, 128, config.features)
    assert (forward.tile_m, forward.tile_n) == (config.tile_m, config.tile_n)
    assert (forward.persistent, forward.packed, forward.cluster) == (config.persistent, False, 1)
    assert backward.workspace_bytes > 0
    assert not backward.deterministic
    assert planned(q, q, q, deterministic=True)[1].deterministic
    invariant = str(explain(q, q, q, gpu="sm90", deterministic="invariant"))
    assert 'd = 128; deterministic="invariant"\n' in invariant
    assert invariant.count("deterministic, the same bits in any packing") == 2
    text = str(explained)
    assert text.startswith("backend sm90 on a supposed GPU of sm90\n  bfloat16; 16 heads; d = 128\n  132 SMs\n")
    assert (
        f"forward: tiles of {forward.tile_m} queries, blocks of {forward.tile_n} keys, {config.stages} stages" in text
    )
    assert f"a dense batch, not deterministic, {backward.workspace_bytes / 2**20:.1f} MiB of workspace\n" in text
    assert text.count("\n    features: none\n") == 2
    assert f"heads_in_cache = {backward.numbers.heads_in_cache}" in text


def test_kernels_that_have_to_be_asked_for() -> None:
    q = low(1, 5, 2, 64).zero_()
    explained = explain(q, q, q, gpu="sm100")
    assert (explained.backend, explained.on_request) == ("portable", ("sm100",))
    assert "sm100 serves it only with backend='sm100'" in str(explained)
    assert explain(q, q, q, gpu="sm100", backend="sm100").on_request == ()
    assert explain(q.float(), q.float(), q.float(), gpu="sm100").on_request == ()
    assert explain(q, q, q, gpu="sm90").on_request == ()


def test_clusters_and_determinism() -> None:
    q = low(2, 100, 4, 256)
    for deterministic in (False, True):
        _, backward = planned(q, q, q, deterministic=deterministic)
        assert (backward.cluster, backward.deterministic) == (2, deterministic)
    text = str(explain(q, q, q, gpu="sm90"))
    assert "a CTA a tile, not persistent, a dense batch, deterministic" in text
    assert "clusters of 2 CTAs, persistent, a dense batch, not deterministic" in text


def test_padding_means_packed_sequences() -> None:
    q, used = low(2, 100, 4, 64), torch.tensor([3, 100], dtype=torch.int32)
    for given, packed in ((None, False), (used, True)):
        passes = planned(q, q, q, causal=True, seqused_q=given, seqused_k=given)
        assert [each.packed for each in passes] == [packed, packed]
    text = str(explain(q, q, q, seqused_k=used, gpu="sm90"))
    assert text.count(", packed sequences, ") == text.count("\n    features: packed seqused_k") == 2
    # Queries that see no key are sequences of their own in the backward pass.
    passes = planned(q, q[:, :50], q[:, :50], causal=True)
    assert [each.packed for each in passes] == [False, True]


@pytest.mark.parametrize("kind", ["cpu", "meta", "fake", "in a mode"])
def test_any_tensors_get_the_same_explanation(kind: str) -> None:
    def given(device: str) -> tuple[Tensor, ...]:
        cu, mask = (torch.ones(shape, dtype=torch.int32, device=device) for shape in (4, (140, 50)))
        return low(140, 8, 64, device=device), cu, mask.bool(), low(8, 1, 50, device=device).requires_grad_()

    def explained(q: Tensor, cu: Tensor, mask: Tensor, bias: Tensor) -> str:
        return str(explain(q, q, q, cu, cu, 50, 50, causal=True, mask=mask, bias=bias, gpu="sm90"))

    expected = explained(*given("cpu"))
    if kind == "in a mode":
        with FakeTensorMode():
            assert explained(*given("cuda")) == expected
    elif kind == "fake":
        assert explained(*map(FakeTensorMode().from_tensor, given("cpu"))) == expected
    else:
        assert explained(*given(kind)) == expected


def test_equal_offsets_are_seen() -> None:
    """Two names of one memory: no query is fully masked, and no sequence is split."""
    q, cu = low(140, 8, 64), offsets([70, 70])
    same, view, other = (
        explain(q, q, q, cu, x, 70, 70, causal=True, gpu="sm90").backward for x in (cu, cu[:], cu.clone())
    )
    assert same == view
    assert same != other


def test_nested_tensors() -> None:
    q = torch.nested.nested_tensor([low(3, 4, 64), low(8, 4, 64)], layout=torch.jagged)
    assert planned(q, q, q)[0].packed
    assert explain(q, q, q, gpu="sm90").backend == "sm90"


def test_autocast() -> None:
    q = torch.randn(1, 5, 2, 64)
    assert explain(q, q, q, gpu="sm90").backend == "portable"
    with torch.autocast("cpu", torch.bfloat16):
        explained = explain(q, q, q, gpu="sm90")
    assert (explained.backend, explained.spec.dtype) == ("sm90", torch.bfloat16)


@pytest.mark.parametrize("shape_k", [(2, 0, 4, 64), (0, 5, 4, 64)])
def test_nothing_to_launch(shape_k: tuple[int, ...]) -> None:
    q, k = low(shape_k[0], 5, 4, 64), low(*shape_k)
    explained = explain(q, k, k, gpu="sm90")
    assert (explained.forward, explained.backward) == (None, None)
    assert str(explained).endswith("forward: nothing is launched\n  backward: nothing is launched")


def test_the_keywords_are_those_of_the_calls() -> None:
    explained = inspect.signature(explain).parameters
    for function in (flash_attn_func, flash_attn_varlen_func):
        parameters = inspect.signature(function).parameters
        assert parameters.keys() <= explained.keys()
        for name, parameter in parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert explained[name] == parameter
    assert explained.keys() - inspect.signature(flash_attn_varlen_func).parameters.keys() == {"gpu"}


Q, CU = low(2, 5, 4, 64), offsets([5, 5])
FLAT = Q.flatten(0, 1)
REFUSED = """
explain(Q, Q, None)
    TypeError: v: expected a torch.Tensor, got NoneType
explain(None, Q, Q)
    TypeError: q: expected a torch.Tensor, got NoneType
explain(Q, Q, Q, causal=1)
    TypeError: causal: expected a bool, got 1
explain(Q, Q, Q, backend="none")
    ValueError: backend: expected None or one of
explain(Q, Q, Q, backend="sm90")
    ValueError: ... which cannot: tensors on cpu
explain(FLAT, FLAT, FLAT, CU, CU, 5)
    TypeError: max_seqlen_k: expected an int or a 0-d tensor, got None
explain(FLAT, FLAT, FLAT, CU, None, 5, 5)
    TypeError: cu_seqlens_k: expected a torch.Tensor, got NoneType
explain(Q, Q, Q, gpu="sm10")
    ValueError: gpu: expected None or one of ['sm90', 'sm100'], got 'sm10'
explain(Q, Q, Q, gpu=["sm90"])
    ValueError: gpu: expected None or one of ['sm90', 'sm100'], got ['sm90']
"""


@refusals(REFUSED)
def test_errors_are_those_of_the_call(call: str, error: str) -> None:
    assert_refused(call, error, globals())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_has_to_be_named() -> None:
    with FakeTensorMode():
        q = low(2, 5, 4, 64, device="cuda")
        with pytest.raises(ValueError, match=r"q: expected gpu= to say which GPU is meant, as PyTorch finds none"):
            explain(q, q, q)


# The warning.


class OnHopper(PortableBackend):
    """The portable backend in the place of Hopper's, which takes the CPU for such a GPU."""

    def __init__(self) -> None:
        self.real = CuteBackend(ARCHITECTURES["sm90"], is_supposed=True)

    def limits(self, spec: Any, inputs: Any) -> tuple[str, ...]:
        return self.real.limits(spec, inputs)

    def is_made_for(self, device: torch.device) -> bool:
        return self.real.is_made_for(device)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings so far, in a process that has made no call yet, on a CPU that passes for a Hopper GPU."""
    messages: list[str] = []

    def noted(message: str) -> None:
        if "flash_attn_cute" in message:
            messages.append(message)

    for name in ("_has_warned", "_has_warned_of_refusal"):
        monkeypatch.setattr(dispatch, name, False)
    monkeypatch.setattr(dispatch, "BACKENDS", {"sm90": OnHopper(), "portable": PortableBackend()})
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "warn", lambda message, **options: noted(str(message)))
        yield messages


def test_falling_back_on_a_gpu_with_kernels_warns_once(warned: list[str]) -> None:
    good, q, odd = low(1, 5, 2, 64).zero_(), torch.randn(1, 5, 2, 64), low(1, 5, 2, 20).zero_()
    flash_attn_func(good, good, good)
    explain(q, q, q)
    assert not warned
    flash_attn_func(q, q, q)
    assert warned == [
        "flash_attn_cute: a call on cpu goes to the backend 'portable', which is slower than 'sm90', which cannot "
        "serve it: torch.float32. backend='portable' says that this is meant. Calls after this one are not told of; "
        "flash_attn_cute.explain tells of any"
    ]
    flash_attn_func(odd, odd, odd)
    flash_attn_func(q.double(), q.double(), q.double())
    assert len(warned) == 1


def test_head_dimensions_are_named(warned: list[str]) -> None:
    odd = low(1, 5, 2, 20).zero_()
    flash_attn_func(odd, odd, odd)
    assert "d = 20 (multiples of 8 up to 256); d_v = 20" in warned[0]


def test_a_gpu_whose_kernels_are_checked_first(monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    asked_for = CuteBackend(ARCHITECTURES["sm100"], is_supposed=True)
    backends = {"sm90": CuteBackend(ARCHITECTURES["sm90"]), "portable": PortableBackend(), "sm100": asked_for}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    q, wide = low(1, 5, 2, 64).zero_(), torch.randn(1, 5, 2, 64)
    flash_attn_func(q, q, q, backend="portable")
    assert not warned
    for _ in range(2):
        flash_attn_func(wide, wide, wide)
        flash_attn_func(q, q, q)
    assert len(warned) == 2
    assert "slower than 'sm100', which cannot serve it: torch.float32" in warned[0]
    assert "slower than 'sm100', which serves calls with backend='sm100' alone, as its self-check has not" in warned[1]


def test_no_warning_where_it_is_meant_or_there_is_no_such_gpu(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(1, 5, 2, 64)
    flash_attn_func(q, q, q, backend="portable")
    torch.compile(lambda: flash_attn_func(q, q, q), backend="eager", fullgraph=True)()
    backends = {"sm90": CuteBackend(ARCHITECTURES["sm90"]), "portable": PortableBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    flash_attn_func(q, q, q)
    assert not warned


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_gpus_that_a_backend_is_made_for(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    backend = CuteBackend(ARCHITECTURES["sm90"])
    assert backend.is_made_for(torch.device("cuda")) == expected
    assert not backend.is_made_for(torch.device("cpu"))
    assert backend.num_sms(torch.device("cuda")) == 114
