"""Plain eager calls go past the custom operators, watched ones through them: same results, same rules.

The operators are the only users of ``flat_call.inputs_of`` here, which therefore shows where a call went.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import torch.utils.flop_counter
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flash_attn_cute import flash_attn_func
from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch, flat_call, ops
from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.calls.prepared_call import KnownOfBlockMask
from flash_attn_cute.problem.block_tables import NUM_FLAT
from flash_attn_cute.problem.spec import AttentionInputs, Options
from tests.lib.checks import GRADS, bitwise_equal, each_of, packed_or_dense, random_call, run, same_bits
from tests.lib.modes import Functions, Operators, Subclass


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each flattened call that has reached an operator, so far."""
    seen: list[int] = []
    original = flat_call.inputs_of

    def spy(call: tuple[Any, ...]) -> Any:
        seen.append(len(call))
        return original(call)

    monkeypatch.setattr(flat_call, "inputs_of", spy)
    return seen


def leaves() -> list[Tensor]:
    return [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3)]


def attend(*qkv: Tensor) -> Tensor:
    out: Tensor = flash_attn_func(*qkv, backend="portable")
    return out


def step(*qkv: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(*qkv).square().sum(), qkv)


@packed_or_dense
def test_plain_calls_go_past_the_operators(
    packed: bool, operators: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And past autograd, where it does not record."""
    call = random_call([5, 5], packed=packed, device=device)
    out, lse = run(call, return_lse=True)
    (out.sum() + lse.sum()).backward()
    run(call)  # and again, from memory
    with torch.autocast(device, torch.bfloat16):
        run(call).sum().backward()
    call.q = torch.nn.Parameter(call.q.detach())
    run(call).sum().backward()
    assert call.q.grad is not None
    monkeypatch.setattr(ops, "_record", None)
    for unrecorded in (torch.no_grad, torch.inference_mode):
        with unrecorded():
            run(call)
    assert not operators


@packed_or_dense
def test_a_default_device_is_no_watcher(packed: bool, operators: list[int], device: str) -> None:
    """Nothing is made on it, here that which has no numbers; and afterwards it is still the default."""
    call = random_call([5, 5], packed=packed, device=device)
    wanted = call.q, call.k, call.v
    dout = torch.randn_like(call.q)
    expected = run(call, return_lse=True)
    expected += torch.autograd.grad(expected[0], wanted, dout)
    with torch.device("meta"):
        found = run(call, return_lse=True)
        assert torch.empty(1).is_meta
        found += torch.autograd.grad(found[0], wanted, dout)
        assert torch.empty(1).is_meta
        with torch.no_grad():
            run(call)
    assert not operators
    assert same_bits(found, expected)


def test_hooks_of_saved_tensors_have_the_default_device() -> None:
    """Code of the user has it, though the package does without."""
    made: list[bool] = []

    def note(x: Tensor) -> Tensor:
        made.append(torch.empty(1).is_meta)
        return x

    qkv = leaves()
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(note, note):
        attend(*qkv)
    assert made == [True] * 5


def traced(function: Callable[..., Any]) -> Any:
    return make_fx(function, tracing_mode="symbolic")(*leaves())


def with_mode(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], Any]:
    def function() -> Any:
        with mode():
            return step(*leaves())

    return function


def escaped() -> Tensor:
    """A tensor still wrapped by a transform that is over."""
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    torch.func.grad(function)(torch.randn(1, 5, 2, 8))
    return kept[0]


@contextlib.contextmanager
def function_mode_on_a_default_device() -> Iterator[None]:
    with torch.device("cpu"), Functions():
        yield


WATCHED: dict[str, Callable[[], Any]] = {
    "torch.compile": lambda: torch.compile(attend, backend="eager", fullgraph=True)(*leaves()),
    "make_fx": lambda: traced(step),
    "export": lambda: torch.export.export(Module(), tuple(leaves()), strict=False),
    "jit.trace": lambda: torch.jit.trace(attend, tuple(leaves()), check_trace=False),
    "fake tensors": with_mode(FakeTensorMode),
    "dispatch mode": with_mode(Operators),
    "selective checkpointing": lambda: checkpoint(
        attend, *leaves(), use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts([])
    ),
    "FLOP counter": with_mode(lambda: torch.utils.flop_counter.FlopCounterMode(display=False)),
    "function mode": with_mode(Functions),
    "function mode on a default device": with_mode(function_mode_on_a_default_device),
    "subclass": lambda: step(*(x.as_subclass(Subclass) for x in leaves())),
    "vmap": lambda: torch.vmap(attend)(*(torch.randn(2, 1, 5, 2, 8) for _ in range(3))),
    "functionalize": lambda: torch.func.functionalize(attend)(*leaves()),
    "escaped wrapper": lambda: attend(escaped(), *leaves()[1:]),
    "negated": lambda: attend(torch._neg_view(torch.randn(1, 5, 2, 8)), *leaves()[1:]),
    "meta": lambda: attend(*(x.to("meta") for x in leaves())),
}


class Module(torch.nn.Module):
    """Attention as export wants it."""

    def forward(self, *qkv: Tensor) -> Tensor:
        """Calls ``attend`` with three tensors."""
        return attend(*qkv)


@each_of("watcher", WATCHED)
@pytest.mark.filterwarnings("ignore")
def test_watched_calls_are_operators(watcher: Callable[[], Any], operators: list[int]) -> None:
    torch._dynamo.reset()
    attend(*leaves())  # so that a plan is kept
    assert not operators
    watcher()
    assert operators


def test_exported_for_any_number_of_rows() -> None:
    """The limit of a backend that cannot serve the call anyway does not bound them."""

    class AnyBackend(Module):
        def forward(self, *qkv: Tensor) -> Tensor:
            return flash_attn_func(*qkv)

    sizes = ({1: torch.export.Dim("rows")},) * 3
    layer = torch.export.export(AnyBackend(), tuple(leaves()), dynamic_shapes=(sizes,)).module()
    qkv = torch.randn(3, 1, 9, 2, 8).unbind()
    torch.testing.assert_close(layer(*qkv), attend(*qkv))


def test_a_watcher_of_the_backward_pass_sees_it(operators: list[int]) -> None:
    qkv = leaves()
    out = attend(*qkv)
    with Operators() as mode:
        out.sum().backward()
    assert torch.ops.flash_attn_cute.backward.default in mode.seen
    assert operators


@packed_or_dense
def test_both_ways_lead_to_the_same(packed: bool) -> None:
    """All results and gradients, also those through lse alone and those that no input wants."""
    options: dict[str, Any] = {"sink": True, "bias": (1, 1), "softcap": 2.0, "window_size": (4, 0), "nheads_k": 1}
    call = random_call([9, 6] if packed else [9, 9], packed=packed, **options)
    wanted = [getattr(call, name) for name in GRADS]
    results: list[list[Tensor]] = []
    for mode in (contextlib.nullcontext(), Operators()):
        with mode:
            found: list[Tensor] = []
            for outputs in ((0, 1), (0,), (1,)):
                out_lse = run(call, return_lse=True)
                chosen = [out_lse[i] for i in outputs]
                dout = [torch.ones_like(x).transpose(0, 1).contiguous().transpose(0, 1) for x in chosen]
                found += [*out_lse, *torch.autograd.grad(chosen, wanted, dout)]
            results.append(found)
    assert same_bits(*results)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Operators])
def test_only_wanted_gradients(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[bool, bool]] = []

    class Asked(PortableBackend):
        def backward(self, call: BackwardCall) -> Gradients:
            wanted.append((call.need_dbias, call.need_dsink))
            return super().backward(call)

    monkeypatch.setitem(dispatch.BACKENDS, "portable", Asked())
    call = random_call([9], sink=True, bias=(1, 1))
    with mode():
        run(call).sum().backward()
        call.bias.requires_grad_(False)
        run(call).sum().backward()
        call.learnable_sink.requires_grad_(False)
        run(call).sum().backward()
    assert wanted == [(True, True), (False, True), (False, False)]


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Operators])
def test_second_derivatives_are_refused_either_way(mode: Any) -> None:
    qkv = leaves()
    with mode():
        grads = torch.autograd.grad(attend(*qkv).square().sum(), qkv, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"^flash_attn_cute: second derivatives of attention are not"):
            grads[0].sum().backward()


@pytest.mark.parametrize("recorded", [True, False])
def test_forward_mode_is_refused(recorded: bool) -> None:
    q, k, v = (x.requires_grad_(recorded) for x in leaves())
    tangents = pytest.raises(NotImplementedError, match="forward-mode derivatives of attention are not implemented")
    with forward_ad.dual_level():
        attend(q, k, v)
        with tangents:
            attend(q, forward_ad.make_dual(k, torch.ones_like(k)), v)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Operators])
def test_tangents_of_incoming_gradients_are_refused(mode: Any) -> None:
    qkv = leaves()
    with mode(), forward_ad.dual_level():
        out = flash_attn_func(*qkv, window_size=(3, 0))
        torch.autograd.grad(out, qkv, torch.ones_like(out), retain_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives of attention"):
            torch.autograd.grad(out, qkv, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_nothing_is_recorded_below_autograd() -> None:
    """Within __torch_dispatch__ the dispatcher skips autograd, and so does a call that goes past it."""
    inside: list[Tensor] = []

    class Replacing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mul.Tensor:
                inside.append(attend(*leaves()))
            return func(*args, **(kwargs or {}))

    with Replacing():
        torch.ones(2) * 2
    assert [x.requires_grad for x in inside] == [False]


def test_changed_inputs_are_noticed() -> None:
    for changed in range(4):
        qkv = leaves()
        tensors = [x * 1 for x in qkv]
        tensors.append(attend(*tensors))
        out = tensors[3].square()
        with torch.no_grad():
            tensors[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    call = random_call([5, 4])
    out = run(call)
    call.cu_seqlens_k.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensors_are_all_that_is_kept() -> None:
    """Hooks that pack them away release the inputs and get each of them back once."""
    packed: list[Tensor] = []
    unpacked: list[int] = []

    def unpack(index: int) -> Tensor:
        unpacked.append(index)
        return packed[index]

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    qkv = leaves()
    expected = step(*qkv)
    inputs = [x * 1 for x in qkv]
    alive = [weakref.ref(x) for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = attend(*inputs)
    del inputs
    assert [x() for x in alive] == [None] * 3
    grads = torch.autograd.grad(out.square().sum(), qkv)
    assert sorted(unpacked) == list(range(5))
    assert same_bits(grads, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_tensors_may_have_any_strides(dtype: torch.dtype) -> None:
    """Hooks that pack elements between others, as a hook may, change no gradient."""
    qkv = [x.detach().to(dtype).requires_grad_() for x in leaves()]
    expected = step(*qkv)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: torch.stack((x, x), -1)[..., 0], lambda x: x):
        out = attend(*qkv)
    assert same_bits(torch.autograd.grad(out.square().sum(), qkv), expected)


def test_backward_in_another_thread() -> None:
    qkv = leaves()
    expected = step(*qkv)
    out = attend(*qkv).square().sum()
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    for x, grad in zip(qkv, expected, strict=True):
        assert x.grad is not None
        assert bitwise_equal(x.grad, grad)


def test_reentrant_checkpoint() -> None:
    qkv = leaves()
    out = torch.utils.checkpoint.checkpoint(attend, *qkv, use_reentrant=True)
    out.square().sum().backward()
    for x, grad in zip(qkv, step(*qkv), strict=True):
        assert x.grad is not None
        assert bitwise_equal(x.grad, grad)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        q = torch.randn(1, 5, 2, 8)
        assert attend(q, q, q).is_inference()
    assert not attend(q, q, q).is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        attend(q, *leaves()[1:])


def test_profiles_name_the_call() -> None:
    with torch.profiler.profile() as profile:
        attend(*leaves()).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"FlashAttention", "FlashAttentionBackward"} <= names


def test_call_fields() -> None:
    """The order in which a call is flattened is the order of the fields, on which both ways rely."""
    names = [argument.name for argument in torch.ops.flash_attn_cute.forward.default._schema.arguments]
    *tensors, max_seqlen_q, max_seqlen_k, block_mask, selected = AttentionInputs._fields
    assert (block_mask, selected) == ("block_mask", "selected")
    assert tuple(tensors) == AttentionCall._fields[:NUM_TENSORS]
    tables = names[len(tensors) : len(tensors) + NUM_FLAT + 2]
    numbers = (max_seqlen_q, max_seqlen_k, *KnownOfBlockMask._fields, *Options._fields)
    assert tuple(names) == (*tensors, *tables, selected, *numbers, "backend", "any_scale", "any_softcap")
    names = [argument.name for argument in torch.ops.flash_attn_cute.backward.default._schema.arguments]
    assert tuple(names[: flat_call.NUM_RESULTS]) == BackwardCall._fields[2:]
