"""Row entropies and column sums against those of all probabilities, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.portable.backend import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec
from flash_attn_cute.score_statistics import column_sums, row_entropy
from tests.lib import oracle
from tests.lib.checks import Case, needs_kernels, offsets, packed_or_dense, random_call
from tests.lib.refusals import assert_refused, refusals

KINDS: dict[str, Case] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 3)},
    "causal window": {"causal": True, "window_size": (30, None)},
    "scale": {"softmax_scale": 0.31, "causal": True},
    "negative scale": {"softmax_scale": -0.2, "window_size": (None, 7)},
}


def drawn(packed: bool, dtype: torch.dtype, device: str = "cpu", **options: Any) -> oracle.Call:
    """A call with padding, grouped heads, more queries than keys and fewer."""
    shape: Case = {"nheads": 4, "nheads_k": 2, "head_dim": 64, "packed": packed, "seqused": True}
    return random_call([60, 1, 50], [45, 0, 75], dtype=dtype, device=device, **shape, **options)


def arguments(call: oracle.Call, backend: str) -> Case:
    names = ["seqused_q", "seqused_k", "softmax_scale", "causal", "window_size"]
    names += ["cu_seqlens_q", "cu_seqlens_k"] if call.cu_seqlens_q is not None else []
    given = {name: getattr(call, name) for name in names} | {"backend": backend}
    return given | ({"max_seqlen_q": 70, "max_seqlen_k": 81} if call.cu_seqlens_q is not None else {})


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("portable", torch.float64),
        ("portable", torch.bfloat16),
        pytest.param("sm90", torch.bfloat16, marks=needs_kernels),
        pytest.param("sm90", torch.float16, marks=needs_kernels),
    ],
    ids=str,
)
@packed_or_dense
@pytest.mark.parametrize("kind", KINDS)
def test_statistics(kind: str, packed: bool, backend: str, dtype: torch.dtype) -> None:
    call = drawn(packed, dtype, "cpu" if backend == "portable" else "cuda", **KINDS[kind])
    given, true = arguments(call, backend), oracle.probabilities(call)
    attend = flash_attn_varlen_func if packed else flash_attn_func
    _, lse = attend(call.q, call.k, call.k, return_lse=True, **given)
    sums = column_sums(call.q, call.k, lse, **given)
    assert sums.dtype == lse.dtype
    close = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(sums.cpu().double(), true.sum(-2), rtol=close, atol=close)
    entropies = row_entropy(call.q, call.k, **given)
    assert entropies.dtype == lse.dtype
    # Scores reach about 5, and the mean of the keys is rounded.
    close = 1e-9 if dtype == torch.float64 else 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(entropies.cpu().double(), -torch.xlogy(true, true).sum(-1), rtol=0, atol=close)


class WithKernel(PortableBackend):
    """Has sums of 7 for each key, and notes whether the lse that comes is that of the scores that come with it."""

    has_column_sums = True

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def column_sums(self, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        self.asked.append(torch.equal(self.forward(spec, inputs).lse, lse))
        *batch, rows, _, _ = inputs.k.shape
        return torch.full((*batch, spec.nheads, rows), 7.0)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> WithKernel:
    """A backend with a kernel for column sums, in the portable one's place."""
    backend = WithKernel()
    monkeypatch.setitem(dispatch.BACKENDS, "portable", backend)
    return backend


@packed_or_dense
@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_with_a_kernel_is_asked(kind: str, packed: bool, with_kernel: WithKernel) -> None:
    """In eager code and in compiled programs, whose graph has one operator for it; fake tensors get the shape."""
    call = drawn(packed, torch.float32, **KINDS[kind])
    given, graphs = arguments(call, "portable"), []
    attend = flash_attn_varlen_func if packed else flash_attn_func
    _, lse = attend(call.q, call.k, call.k, return_lse=True, **given)
    sums = column_sums(call.q, call.k, lse, **given)
    assert (sums == 7).all()
    assert with_kernel.asked == [True]

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, lse: column_sums(q, k, lse, **given), backend=keep, fullgraph=True)
    assert torch.equal(compiled(call.q, call.k, lse), sums)
    assert with_kernel.asked == [True, True]
    (graph,) = graphs
    assert len(graph.find_nodes(op="call_function", target=torch.ops.flash_attn_cute.column_sums)) == 1
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = column_sums(call.q, call.k, lse, **given)
    assert (fake.shape, fake.dtype) == (sums.shape, sums.dtype)
    assert with_kernel.asked == [True, True]


def test_the_operator(with_kernel: WithKernel) -> None:
    """PyTorch's own checks, one product a score for FLOP counters, vmap, and refused tangents."""
    q, k = torch.randn(2, 12, 4, 8), torch.randn(2, 20, 2, 8)
    _, lse = flash_attn_func(q, k, k, return_lse=True)
    calls: list[Any] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.flash_attn_cute.column_sums.default:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    with Noted():
        column_sums(q, k, lse)
    torch.library.opcheck(torch.ops.flash_attn_cute.column_sums.default, calls[0])
    with FlopCounterMode(display=False) as counter:
        column_sums(q, k, lse)
    assert counter.get_total_flops() == 2 * 2 * 4 * 12 * 20 * 8
    with_kernel.asked.clear()
    mapped = torch.vmap(column_sums, in_dims=(0, None, 0))(torch.stack([q, q]), k, torch.stack([lse, lse]))
    assert mapped.shape == (2, 2, 4, 20)
    assert with_kernel.asked == [True]
    with pytest.raises(NotImplementedError, match="forward-mode derivatives of attention are not implemented"):
        torch.func.jvp(lambda q: column_sums(q, k, lse), (q,), (q,))


def test_a_sink_and_a_block_mask() -> None:
    """Columns sum up to what a sink leaves; rows have the entropy of the blocks that they see."""
    q, k = torch.randn(3, 40, 4, 64, dtype=torch.float64), torch.randn(3, 40, 2, 64, dtype=torch.float64)
    sink = torch.randn(4, dtype=torch.float64)
    _, lse = flash_attn_func(q, k, k, causal=True, learnable_sink=sink, return_lse=True)
    left = (sink[:, None] - lse).exp()
    torch.testing.assert_close(column_sums(q, k, lse, causal=True).sum(-1), (1 - left).sum(-1))
    mask = BlockMask.from_dense(torch.eye(2, dtype=torch.bool).repeat_interleave(20, 0).repeat_interleave(20, 1))
    halves = [row_entropy(q[:, rows], k[:, rows]) for rows in (slice(0, 20), slice(20, 40))]
    torch.testing.assert_close(row_entropy(q, k, block_mask=mask), torch.cat(halves, -1))


@pytest.mark.parametrize("side", ["q", "k"])
def test_padding_of_one_side(side: str) -> None:
    """Lengths of queries say nothing of keys, nor the other way round."""
    call = drawn(False, torch.float64)
    q, k = (x.detach().nan_to_num(0.0, 0.0, 0.0) for x in (call.q, call.k))
    used: Any = {f"seqused_{side}": getattr(call, f"seqused_{side}")}
    _, lse = flash_attn_func(q, k, k, return_lse=True, **used)
    true = oracle.probabilities(oracle.Call(q, k, k, **used))
    torch.testing.assert_close(column_sums(q, k, lse, **used), true.sum(-2))
    torch.testing.assert_close(row_entropy(q, k, **used), -torch.xlogy(true, true).sum(-1))


def test_compiled() -> None:
    """Programs of torch.compile have column sums by attention from keys to queries, without a break of the graph."""
    torch._dynamo.reset()
    q, cu = torch.randn(9, 2, 8), offsets([4, 5])
    packed: Any = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5}
    for x, given in ((q[None], {}), (q, packed)):
        attend = flash_attn_varlen_func if given else flash_attn_func
        _, lse = attend(x, x, x, causal=True, return_lse=True, **given)
        for function, arguments in ((column_sums, (x, x, lse)), (row_entropy, (x, x))):
            compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
            got, expected = (f(*arguments, causal=True, **given) for f in (compiled, function))
            torch.testing.assert_close(got, expected)


LENGTHS: Case = {"cu_seqlens_k": offsets([5]), "max_seqlen_q": 5, "max_seqlen_k": 5}


@refusals("""
row_entropy(q, q, softcap=2.0)
    TypeError: softcap: not among the arguments of score statistics
column_sums(q, q, lse, softmax_scale=0.0)
    ValueError: softmax_scale: expected a number other than 0, got 0
column_sums(q, q, lse.mT)
    ValueError: lse: expected (..., nheads, queries) of q, (1, 5, 2, 8) on cpu, got (1, 5, 2) on cpu
column_sums(q, q, lse.to("meta"))
    ValueError: lse: expected (..., nheads, queries) of q, (1, 5, 2, 8) on cpu, got (1, 2, 5) on meta
row_entropy(q[0], q[0], cu_seqlens_q=offsets([5]))
    TypeError: cu_seqlens_k, max_seqlen_q, max_seqlen_k: expected, as cu_seqlens_q,
column_sums(q[0], q[0], lse[0], cu_seqlens_q=offsets([5]))
    TypeError: cu_seqlens_k, max_seqlen_q, max_seqlen_k: expected, as cu_seqlens_q,
column_sums(q[0], q[0], lse[0], cu_seqlens_q=offsets([6]), **LENGTHS)
    ValueError: cu_seqlens_q: expected offsets within the 5 rows of q, got a
column_sums(q, q, [1.0])
    TypeError: lse: expected a floating-point tensor, got list
column_sums(q, q, lse.int())
    TypeError: lse: expected a floating-point tensor, got torch.int32
column_sums(q[0, 0], q, lse)
    ValueError: q: expected shape (batch, seqlen_q, nheads, d), got shape (2, 8)
""")
def test_what_is_refused(call: str, error: str) -> None:
    assert_refused(call, error, globals() | {"q": torch.randn(1, 5, 2, 8), "lse": torch.randn(1, 2, 5)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_q_and_k_alone(dtype: torch.dtype) -> None:
    """The columns that hold lse are parts of the dtype that scores have."""
    q, k = torch.randn(2, 1, 50, 2, 16)
    low = q.to(dtype), k.to(dtype)
    _, lse = flash_attn_func(*low, low[1], return_lse=True, softmax_scale=0.7)
    with torch.autocast("cpu", dtype):
        got = column_sums(q, k, lse, softmax_scale=0.7), row_entropy(q, k, softmax_scale=0.7)
    assert torch.equal(got[0], column_sums(*low, lse, softmax_scale=0.7))
    assert torch.equal(got[1], row_entropy(*low, softmax_scale=0.7))


def test_scores_of_any_size() -> None:
    """Rows whose softmax has saturated, and log-sum-exps of thousands."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k = (60 * torch.randn(1, 50, 2, 64, generator=generator).to(dtype) for _ in range(2))
        _, lse = flash_attn_func(q, k, k, causal=True, return_lse=True)
        assert lse.max() > 5000
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8
        true = scores.masked_fill(torch.ones(50, 50).triu(1).bool(), -torch.inf).softmax(-1).sum(-2)
        torch.testing.assert_close(column_sums(q, k, lse, causal=True).double(), true, rtol=0, atol=1e-2)
    assert row_entropy(q, k, softmax_scale=-(2**70)).isfinite().all()  # a scale that is no int of 64 bits


@pytest.mark.parametrize("scale", [2.0**-15, -(2.0**14), 1e-6, 1e5], ids=str)
def test_scales_at_the_ends_of_float16(scale: float) -> None:
    """The inverse of the scale stands in a column of k: one that float16 has not is refused, not summed up to NaN."""
    q, k = (torch.randn(1, 40, 2, 8).div(max(abs(scale), 1) ** 0.5).half() for _ in range(2))
    _, lse = flash_attn_func(q, k, k, softmax_scale=scale, return_lse=True)
    true = (scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())).softmax(-1).sum(-2)
    if not 2.0**-15 <= abs(scale) <= 2.0**14:
        with pytest.raises(
            ValueError, match=r"softmax_scale: expected a magnitude from 3.05e-05 to 1.64e\+04, as column"
        ):
            column_sums(q, k, lse, softmax_scale=scale)
        q, k, lse = q.double(), k.double(), lse.double()
    sums = column_sums(q, k, lse, softmax_scale=scale)
    torch.testing.assert_close(sums.double(), true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0)], ids=["q", "k", "lse"])
def test_maps_over_one_argument(mapped: tuple[int | None, ...]) -> None:
    q, k = torch.randn(2, 1, 9, 2, 8)
    _, lse = flash_attn_func(q, k, k, return_lse=True)
    given = [x if dim is None else torch.stack([x, x + 1]) for x, dim in zip((q, k, lse), mapped, strict=True)]
    got = torch.vmap(column_sums, mapped)(*given)
    for i, sums in enumerate(got):
        one = [x if dim is None else x[i] for x, dim in zip(given, mapped, strict=True)]
        torch.testing.assert_close(sums, column_sums(*one))
