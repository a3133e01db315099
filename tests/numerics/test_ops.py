"""The custom operators under tracing: opcheck, torch.compile without recompiles, fake tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.calls.prepared_call import KnownOfBlockMask
from flash_attn_cute.problem.block_tables import NUM_FLAT
from tests.lib.checks import (
    GRADS,
    Case,
    assert_alike,
    assert_compiles,
    bitwise_equal,
    compiled,
    offsets,
    packed_or_dense,
    random_call,
    run,
)
from tests.lib.oracle import Call

OPTIONS: dict[str, Case] = {
    "plain": {},
    "causal": {"causal": True, "seqused": True},
    "everything": {
        "sink": True,
        "bias": (1, 1),
        "mask": (1, 1, 1),
        "softcap": 2.0,
        "window_size": (4, 0),
        "head_dim_v": 8,
        "nheads_k": 1,
    },
}


def op_arguments(
    call: Call, any_scale: Tensor | None, any_softcap: Tensor | None, selected: Tensor | None = None
) -> tuple[Any, ...]:
    left, right = call.window_size
    longest = max(call.q.shape[-3], call.k.shape[-3])
    tensors = (*call.qkv, call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    tables = [None] * (NUM_FLAT + 2)  # of a block mask, and its real rows
    extra = (call.learnable_sink, call.mask, call.bias, *tables, selected)
    right = 0 if call.causal else right
    max_logits = any_scale is not None
    known = KnownOfBlockMask(False, False, False, False, 0 if selected is None else 4)
    flags = (True, True, any_scale is None, False, max_logits)
    numbers = (longest, longest, *known, call.softmax_scale, left, right, call.softcap, *flags)
    return *tensors, *extra, *numbers, "portable", any_scale, any_softcap


@packed_or_dense
@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name: str, packed: bool, device: str) -> None:
    """Schema, fakes, autograd registration and tracing with dynamic shapes, of both operators.

    Scale and softcap are numbers, or tensors: dense with everything, packed with less.
    """
    number = torch.tensor(0.5, dtype=torch.float64) if packed != (name == "everything") else None
    call = random_call([9, 6] if packed else [9, 9], packed=packed, device=device, **OPTIONS[name])
    check_operators(call, op_arguments(call, number, number))


@packed_or_dense
def test_opcheck_of_selected_blocks(packed: bool, device: str) -> None:
    call = random_call([9, 6] if packed else [9, 9], packed=packed, device=device, causal=True)
    blocks = torch.rand(*((1, 2, 15) if packed else (2, 2, 9)), 4).argsort(-1)[..., :2].sort(-1).values
    check_operators(call, op_arguments(call, None, None, blocks.int().to(device)))


def check_operators(call: Call, arguments: tuple[Any, ...]) -> None:
    with torch.no_grad():
        for x in call.qkv:
            x.nan_to_num_(0, 0, 0)
    torch.library.opcheck(torch.ops.flash_attn_cute.forward.default, arguments)
    out, lse, *_ = (x.detach() for x in torch.ops.flash_attn_cute.forward(*arguments))
    lse.masked_fill_(lse.isneginf(), 0)
    detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    backward = (out, lse, torch.randn_like(out), torch.randn_like(lse), None)
    for need in (True, False):
        need_dbias, need_dsink = need and call.bias is not None, need and call.learnable_sink is not None
        torch.library.opcheck(
            torch.ops.flash_attn_cute.backward.default, (*backward, need_dbias, need_dsink, *detached)
        )


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_trace(device: str) -> None:
    """A traced call serves other lengths and batches."""
    q, k, v = (torch.randn(2, 9, 2, 16, device=device) for _ in range(3))
    traced = torch.jit.trace(lambda q, k, v: flash_attn_func(q, k, v, causal=True), (q, k, v))
    for shape in ((2, 9, 2, 16), (3, 300, 2, 16), (1, 1, 2, 16)):
        leaves = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
        out, expected = traced(*leaves), flash_attn_func(*leaves, causal=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)))


def packed_step(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor) -> Tensor:
    out: Tensor = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True, deterministic=True
    )
    return out * 2


def qkv(*shape: int, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("bound", ["int", "tensor"])
def test_compile_with_changing_lengths(bound: str, device: str) -> None:
    """One tensor as both offsets, a new max_seqlen every step: one compile for fixed, one for changing sizes."""
    calls = []
    for i, total in enumerate((20, 31, 47, 64, 90, 128)):
        longest = total - total // 2 + i
        max_seqlen = longest if bound == "int" else torch.tensor(longest, device=device)
        calls.append(
            (*qkv(total, 4, 16, device=device), offsets([total - longest, longest], device=device), max_seqlen)
        )
    assert_compiles(packed_step, calls, 2)


def test_compile_with_fixed_sizes(device: str) -> None:
    """Offsets are data: a packed batch of one size never compiles twice, whatever its documents and bound."""
    cuts = (offsets([cut, 64 - cut], device=device) for cut in (1, 7, 30, 63))
    assert_compiles(packed_step, [(*qkv(64, 4, 16, device=device), cu_seqlens, 64) for cu_seqlens in cuts], 1)


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    call = (*qkv(40, 4, 16, device="cpu"), offsets([15, 25]), 25)
    assert_compiles(packed_step, [call], 1, "inductor", exact=False)


def test_compile_dense_with_everything(device: str) -> None:
    def function(*tensors: Tensor) -> Any:
        q, k, v, sink, bias, mask = tensors
        out, lse = flash_attn_func(
            q, k, v, window_size=(9, 1), softcap=2.0, learnable_sink=sink, bias=bias, mask=mask, return_lse=True
        )
        return torch.cat((out.flatten(), lse.clamp(min=-9).flatten()))

    calls = []
    for seqlen in (12, 19, 33, 40):
        leaves = qkv(2, seqlen, 4, 16, device=device)
        leaves += [torch.randn(4, device=device), torch.randn(4, 1, seqlen, device=device)]
        mask = torch.rand(seqlen, seqlen, device=device) < 0.8
        calls.append([*(x.detach().requires_grad_() for x in leaves), mask])
    assert_compiles(function, calls, 2)


def test_errors_survive_compilation() -> None:
    step, _ = compiled(packed_step)
    q, k, v = qkv(20, 4, 16, device="cpu")
    with pytest.raises(Exception, match="cu_seqlens_q: expected int32"):
        step(q, k, v, torch.tensor([0, 20]), 20)


def test_fake_tensors_need_no_data() -> None:
    with FakeTensorMode():
        q, k, v = qkv(20, 4, 16, device="cpu")
        out = packed_step(q, k, v, torch.zeros(4, dtype=torch.int32), 20)
        out.sum().backward()
        assert out.shape == q.shape
        assert q.grad is not None
        assert q.grad.shape == q.shape


def as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def with_mode(*args: Any) -> Any:
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            return function(*args)

    return with_mode


def compiled_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(function)[0]


@pytest.mark.parametrize("way", [as_is, watched, compiled_whole])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "bias": (1, 1), "sink": True}], ids=["fused", "blockwise"])
@packed_or_dense
def test_autocast(packed: bool, options: Case, way: Any, device: str) -> None:
    """Autocast equals casting by hand: the dtypes, and the precision inside. Leaves have gradients of their own dtypes.

    Rotary embeddings leave q and k in float32, linear layers give v in the lower precision.
    """
    call = random_call([20, 9] if packed else [9, 9], packed=packed, device=device, **options)
    call.v = call.v.detach().bfloat16().requires_grad_()
    names = [name for name in GRADS if getattr(call, name) is not None]
    leaves = [getattr(call, name) for name in names]
    others = {name: value for name, value in vars(call).items() if value is not None and name not in names}
    others |= {"max_seqlen_q": 20, "max_seqlen_k": 20} if packed else {}
    function: Any = flash_attn_varlen_func if packed else flash_attn_func

    def attend(*tensors: Tensor) -> Any:
        return function(**others, **dict(zip(names, tensors, strict=True)), return_lse=True)

    def attend_low(*tensors: Tensor) -> Any:
        low = [x if name == "learnable_sink" else x.bfloat16() for name, x in zip(names, tensors, strict=True)]
        return attend(*low)

    expected = attend_low(*leaves)
    with torch.autocast(device, torch.bfloat16):
        got = way(attend)(*leaves)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32]
    dout = [torch.randn_like(x) for x in expected]
    grads = [torch.autograd.grad(outputs, leaves, dout) for outputs in (got, expected)]
    for a, b in zip((*got, *grads[0]), (*expected, *grads[1]), strict=True):
        assert a.dtype == b.dtype
        assert bitwise_equal(a, b)


@pytest.mark.parametrize("way", [as_is, watched, compiled_whole])
def test_autocast_inside(way: Any, device: str) -> None:
    """Entered and left by the traced function itself, with a dtype that is not the default one."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.float16):
            low = flash_attn_func(x, x, x)
            with torch.autocast(device, enabled=False):
                full = flash_attn_func(x, x, x)
        return low, full, flash_attn_func(x, x, x)

    x = torch.randn(1, 9, 2, 16, device=device)
    assert [out.dtype for out in way(function)(x)] == [torch.float16, torch.float32, torch.float32]


def test_autocast_leaves_alone(device: str) -> None:
    """Float64, with a bias that is wider or narrower, what is on other devices, and what is no tensor."""
    call = random_call([9], bias=(1, 1), dtype=torch.float64, bias_dtype=torch.float32, device=device)
    other = "meta" if device == "cpu" else "cpu"
    with torch.autocast(device, torch.bfloat16):
        assert run(call).dtype == torch.float64
        q = torch.randn(1, 5, 2, 8, device=other)
        assert flash_attn_func(q, q, q).dtype == torch.float32
        with pytest.raises(TypeError, match=r"q: expected a torch\.Tensor, got NoneType"):
            flash_attn_func(None, q, q)  # type: ignore[call-overload]
        q = torch.randn(1, 5, 2, 8, device=device)
        with pytest.raises(TypeError, match=r"v: expected the dtype of q, torch\.bfloat16, got torch\.float64"):
            flash_attn_func(q, q, q.double())


def test_autocast_of_low_precision(device: str) -> None:
    """A sink in another low precision comes along."""
    q, sink = torch.randn(1, 5, 2, 8, device=device, dtype=torch.float16), torch.zeros(2, device=device).half()
    with torch.autocast(device, torch.bfloat16):
        assert flash_attn_func(q, q, q, learnable_sink=sink).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scores", [False, True], ids=["plain", "bias"])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compile_with_a_bound_from_data(scores: bool, backend: str) -> None:
    """``.item()`` in the compiled region: nothing is asked of a number that tracing does not know."""

    def function(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, bias: Tensor | None) -> Tensor:
        longest: Any = cu_seqlens.diff().max().item()
        out: Tensor = flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True, bias=bias, window_size=(50, 0)
        )
        return out

    calls = []
    for total in (20, 31, 48):
        longest = total - total // 2
        bias = torch.randn(2, 1, longest) if scores else None
        calls.append((*qkv(total, 2, 16, device="cpu"), offsets([total // 2, longest]), bias))
    assert_compiles(function, calls, 2, backend, exact=False)


def documents_from_data(x: Tensor, ids: Tensor) -> Tensor:
    """Offsets of queries and of keys, which tracing does not know to be as many."""
    total = ids.new_full((1,), ids.shape[0])
    starts = (ids.diff(prepend=y).nonzero().flatten() for y in (ids[:1] - 1, ids[:1] - 2))
    cu_seqlens_q, cu_seqlens_k = (torch.cat((start, total)).int() for start in starts)
    out: Tensor = flash_attn_varlen_func(x, x, x, cu_seqlens_q, cu_seqlens_k, ids.shape[0], ids.shape[0], causal=True)
    return out


def rows_from_data(x: Tensor, ids: Tensor) -> Tensor:
    """Keys without those of the first document, and their values, which are as many if no id is negative."""
    k, v = x[ids > 0], x[ids != 0]
    ends = torch.tensor(ids.shape[0]), (ids > 0).sum()
    cu_seqlens_q, cu_seqlens_k = (torch.nn.functional.pad(end[None], (1, 0)).int() for end in ends)
    out: Tensor = flash_attn_varlen_func(x, k, v, cu_seqlens_q, cu_seqlens_k, ids.shape[0], ids.shape[0])
    return out


def entries_from_data(x: Tensor, ids: Tensor) -> Tensor:
    q, k = x[ids > 0][:, None], x[ids != 0][:, None]
    out: Tensor = flash_attn_func(q, k, k, seqused_k=ids[ids > 0].int().clamp(max=1))
    return out


def window_from_data(x: Tensor, ids: Tensor) -> Tensor:
    x = x[ids > 0][None]
    out: Tensor = flash_attn_func(x, x, x, block_mask=BlockMask.window(x.shape[1], x.shape[1], left=3))
    return out


@pytest.mark.parametrize("function", [documents_from_data, rows_from_data, entries_from_data, window_from_data])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compile_with_sizes_from_data(function: Callable[..., Tensor]) -> None:
    """``nonzero()`` in the compiled region: numbers of documents, of rows and of entries that tracing does not know."""
    calls = [(torch.randn(total, 2, 16, requires_grad=True), torch.arange(total) // 6) for total in (20, 31)]
    assert_compiles(function, calls, 2, "eager", exact=False)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_from_data_are_compared_by_the_program() -> None:
    step, _ = compiled(rows_from_data, "eager")
    x = torch.randn(9, 2, 16)
    step(x, torch.arange(9))
    with pytest.raises(RuntimeError, match="Runtime assertion failed for expression Eq"):
        step(x, torch.arange(9) - 1)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("capped", [0.0, 2.0], ids=["no softcap", "softcap"])
def test_compile_with_changing_scales(capped: float, backend: str, device: str) -> None:
    """Whatever scale and softcap come: one compile for fixed ones, one each for changing ones."""

    def function(x: Tensor, scale: float, softcap: float) -> Tensor:
        out: Tensor = flash_attn_func(x, x, x, softmax_scale=scale, softcap=softcap)
        return out

    step, counter = compiled(function, backend)
    x = torch.randn(1, 9, 2, 16, device=device, requires_grad=True)
    scales = [(scale, capped) for scale in (0.1, 0.2, 0.3, 1.5, -0.7)]
    softcaps = [(0.4, softcap) for softcap in (2.5, 5.0, 0.5)] if capped else []
    for calls, compiles in ((scales, 2), (softcaps, 3)):
        for scale, softcap in calls:
            assert_alike((step, function), (x, scale, softcap), [x], exact=False)
        assert counter.frame_count <= compiles


@pytest.mark.parametrize("scaled", [False, True], ids=["default scale", "scale"])
def test_compile_with_changing_head_dims(scaled: bool, device: str) -> None:
    """The scale that follows from the head dimension makes no constant of it."""

    def function(x: Tensor) -> Tensor:
        scale = 2 * x.shape[-1] ** -0.5 if scaled else None
        out: Tensor = flash_attn_func(x, x, x, softmax_scale=scale)
        return out

    assert_compiles(function, [[torch.randn(1, 9, 2, head_dim, device=device)] for head_dim in (8, 16, 24, 40)], 2)
