"""The kernels: how they are launched, on any machine, and what they compute, on a Hopper or Blackwell GPU."""

import statistics
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.backends.cute import counters as tile_counters
from flash_attn_cute.calls import dispatch
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.sm90.backward.backward_config import KEYS_IN_ORDER
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from tests.lib.checks import (
    Case,
    assert_matches_oracle,
    assert_results_close,
    bitwise_equal,
    both_passes,
    call_on,
    check_on,
    differing,
    each_of,
    hopper_alone,
    needs_kernels,
    packed_or_dense,
    poisoned_dout,
    run,
    same_bits,
    with_gradients,
)
from tests.lib.interpreted.common import as_given
from tests.lib.oracle import Call
from tests.lib.waits import assert_captured, captured

LENGTHS = ([300, 1, 0, 128, 517], [200, 5, 7, 0, 900])
CALLS: dict[str, Case] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 20)},
    "wide window": {"window_size": (300, 200)},
    "left": {"window_size": (70, None)},
    "widest": {"window_size": (2**31 - 2, 2**31 - 2)},
    "causal window": {"window_size": (150, 0), "causal": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "sink": {"sink": True, "causal": True},
    "seqused": {"seqused": True, "causal": True, "sink": True},
    "mqa": {"nheads_k": 1, "causal": True},
    "scale": {"softmax_scale": 0.02},
    "negative scale": {"softmax_scale": -0.3, "causal": True},
    "no scale": {"softmax_scale": 0.0, "window_size": (90, 20)},
    "negative scale, softcap": {"softmax_scale": -0.3, "softcap": 2.0, "causal": True},
}


call_here, check = partial(call_on, "sm90"), partial(check_on, "sm90")
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128, 256])
DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@needs_kernels
@packed_or_dense
@pytest.mark.parametrize(("lengths_q", "nheads"), [([300, 1, 0, 128], 2), ([7, 5, 3, 1], 4)])  # the latter in groups
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 72), (256, 256)])
def test_a_wide_out_is_what_is_rounded_else(
    packed: bool, lengths_q: list[int], nheads: int, head_dim: int, head_dim_v: int
) -> None:
    """``distributed`` asks for such parts and merges them."""
    shape: Case = {"packed": packed, "nheads": nheads, "nheads_k": 1, "head_dim": head_dim, "head_dim_v": head_dim_v}
    lengths_k = [200, 5, 7, 900]
    if not packed:
        lengths_q, lengths_k = [lengths_q[0]] * 2, [200] * 2
    inputs, spec = as_given(call_here(lengths_q, lengths_k, causal=True, **shape))
    inputs = inputs._replace(max_seqlen_q=max(lengths_q))
    backend = dispatch.BACKENDS["sm90"]
    both = (backend.forward(spec._replace(wide=is_wide), inputs)[:2] for is_wide in (False, True))
    (out, lse), (wide, lse_beside) = both
    assert wide.dtype == torch.float32
    assert (wide != out).any()
    assert bitwise_equal(wide.bfloat16(), out)
    assert bitwise_equal(lse_beside, lse)


@needs_kernels
@packed_or_dense
@pytest.mark.parametrize("nheads_k", [1, 2])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 72), (192, 128), (256, 200)])
def test_wide_gradients_are_what_is_rounded_else(packed: bool, nheads_k: int, head_dim: int, head_dim_v: int) -> None:
    """``distributed`` asks for such parts and sums them."""
    lengths_q, lengths_k = ([300, 1, 0, 128], [200, 5, 7, 900]) if packed else ([300, 300], [200, 200])
    shape: Case = {"nheads": 2, "nheads_k": nheads_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
    call = call_here(lengths_q, lengths_k, causal=True, packed=packed, seqused=packed, **shape)
    out, lse = run(call, return_lse=True)
    inputs, spec = as_given(call, backward=True)
    inputs = inputs._replace(max_seqlen_q=max(lengths_q))
    given = inputs, out.detach(), lse.detach(), poisoned_dout(call, out)
    backend = dispatch.BACKENDS["sm90"]
    rounded, wide = (
        backend.backward(BackwardCall(spec._replace(wide=is_wide, deterministic=True), *given))
        for is_wide in (False, True)
    )
    for name in ("dq", "dk", "dv"):
        x, expected = getattr(wide, name), getattr(rounded, name)
        assert x.dtype == torch.float32
        assert (x != expected).any()
        assert bitwise_equal(x.bfloat16(), expected)


@needs_kernels
@each_of("options", CALLS)
@DTYPE
@HEAD_DIM
def test_packed(options: Case, dtype: torch.dtype, head_dim: int) -> None:
    shape: Case = {"nheads_k": 2, "head_dim": head_dim, "dtype": dtype}
    check(*LENGTHS, **shape | options)


@needs_kernels
@each_of("options", CALLS)
@pytest.mark.parametrize("head_dim", [64, 128, 136, 200])
def test_dense(options: Case, head_dim: int) -> None:
    lengths = ([300, 1, 200], [200, 5, 400]) if "seqused" in options else ([333] * 3, [450] * 3)
    shape: Case = {"nheads_k": 2, "head_dim": head_dim, "packed": False}
    check(*lengths, **shape | options)


@needs_kernels
@pytest.mark.parametrize("shape", [{"packed": True}, {"packed": False}, {"packed": False, "seqused": True}], ids=str)
@HEAD_DIM
def test_gradients_through_lse(shape: Case, head_dim: int) -> None:
    check([300] * 3, [450] * 3, nheads_k=2, head_dim=head_dim, causal=True, sink=True, through_lse=True, **shape)


@needs_kernels
@pytest.mark.parametrize(
    "head_dims", [(8, 8), (40, 40), (72, 80), (96, 96), (104, 56), (192, 128), (64, 256), (248, 8)]
)
def test_head_dims(head_dims: tuple[int, int]) -> None:
    check(*LENGTHS, causal=True, nheads_k=2, head_dim=head_dims[0], head_dim_v=head_dims[1])


FEW_QUERIES: list[Case] = [{}, {"causal": True, "sink": True}, {"window_size": (70, 3)}]


@needs_kernels
@packed_or_dense
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (6, 2), (4, 4), (64, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [40, 128, 256])
def test_few_queries(packed: bool, heads: tuple[int, int], head_dim: int) -> None:
    """Decoding, with and without grouping: few queries on many keys, and on none."""
    shape: Case = {"nheads": heads[0], "nheads_k": heads[1], "head_dim": head_dim, "packed": packed}
    for lengths in ([1, 1, 1, 1], [5, 0, 17, 1], [64, 64, 63, 33]):
        for options in FEW_QUERIES:
            check(lengths, [513, 40, 1000, 1], seqused=True, **shape, **options)
    check([1] * 3, [129] * 3, causal=True, **shape)


EDGES = [0, 1, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193, 257]


@needs_kernels
@pytest.mark.parametrize("seqlen_k", EDGES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths_around_tile_edges(causal: bool, seqlen_k: int) -> None:
    for head_dim in (64, 128, 256):
        shape: Case = {"nheads": 2, "head_dim": head_dim, "causal": causal}
        check(EDGES, [seqlen_k] * len(EDGES), **shape)
        for seqlen_q in (1, 129):
            check([seqlen_q], [seqlen_k], packed=False, **shape)


def _profiles(seqlen: int) -> dict[str, Tensor]:
    """Scores of the keys of a sequence, which the kernel reads from its end, before noise is added."""
    distance = torch.arange(seqlen, 0, -1, dtype=torch.float32)
    return {
        "rising": distance / 4,
        "rising slowly": distance / 64,
        "falling": -distance / 4,
        "equal": torch.zeros(seqlen),
        "far below zero": torch.full((seqlen,), -1000.0),
        "leap": torch.where(distance > seqlen / 2, 300.0, -300.0),
        "one key": torch.where(distance == seqlen - 5, 100.0, 0.0),
        "one group of lanes": torch.where((distance == seqlen // 2) | (distance % 8 == 3), 12.0, 0.0),
    }


@needs_kernels
@pytest.mark.parametrize("profile", _profiles(1))
@DTYPE
@HEAD_DIM
def test_uneven_scores(profile: str, dtype: torch.dtype, head_dim: int) -> None:
    """Maxima that grow from block to block, by little and by more than float32's exponents, and rows without any."""
    for options in ({}, {"causal": True}, {"window_size": (300, 200)}, {"causal": True, "nheads_k": 1, "sink": True}):
        shape: Case = {"nheads": 2, "head_dim": head_dim, "dtype": dtype, "softmax_scale": 1.0}
        call = call_here([700, 300, 129], [900, 300, 50], **shape, **options)
        with torch.no_grad():
            call.q.mul_(0.25)
            call.q[..., 0] = 4.0
            for _, _, rows in call.sequences():
                scores = _profiles(rows.stop - rows.start)[profile]
                call.k[rows, :, 0] = (scores / 4).to("cuda", dtype)[:, None]
        # Forward alone: with keys this large, gradients are differences of large terms.
        out, lse = run(call, return_lse=True, backend="sm90")
        assert_results_close(call, {"out": out, "lse": lse})


@needs_kernels
def test_many_sequences() -> None:
    """More than one round of the search for a tile's sequence, more tiles than CTAs, and many of nothing."""
    for lengths in ([*range(80)], [i % 7 for i in range(1500)]):
        check(lengths, causal=True, seqused=True, nheads=2, head_dim=16)


@needs_kernels
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles(head_dim: int) -> None:
    """CTAs that have several tiles to work on, and kernels that find the counter of tiles as others have left it."""
    call = call_here([700] * 5, [1000] * 5, causal=True, nheads=16, nheads_k=8, head_dim=head_dim, packed=False)
    for _ in range(2):
        assert_matches_oracle(call, backend="sm90")


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("packed", "nheads_k"), [(True, 8), (True, 2), (False, 8), (False, 4), (False, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_sums_in_no_order(head_dim: int, packed: bool, nheads_k: int, options: Case) -> None:
    """The kernel zeroes sums of dQ while its first tiles are under way. There are more tiles than CTAs."""
    lengths = [1300, 0, 79, 1, 3100, 2033] if packed else [1033] * 3
    assert sum(lengths) > KEYS_IN_ORDER * 2 * len(lengths) or not packed  # causal ones are planned as twice as many
    check(lengths, nheads=8, nheads_k=nheads_k, head_dim=head_dim, packed=packed, **options)


@needs_kernels
@pytest.mark.parametrize("queries", [1, 79, 80, 81, 1000])
@pytest.mark.parametrize(("head_dim", "nheads", "nheads_k"), [(128, 2, 2), (128, 4, 1), (64, 2, 2)])
@DTYPE
def test_long_full_masks(dtype: torch.dtype, head_dim: int, nheads: int, nheads_k: int, queries: int) -> None:
    """Blocks of 80 queries at d = 128, dV by halves of a block at d = 64. There are more tiles than CTAs."""
    shape: Case = {"nheads": nheads, "nheads_k": nheads_k, "head_dim": head_dim, "dtype": dtype}
    check([queries] * 2, [8200] * 2, packed=False, **shape)


@needs_kernels
def test_more_sums_than_32_bits_count() -> None:
    """Sums of the last head's dQ lie 2^31 numbers behind the first head's: 8 GB. It gets what it gets alone."""
    q, k, v, dout = torch.randn(4, 1, 2**19 + 4096, 64, 8, device="cuda", dtype=torch.bfloat16)

    def gradients_of(heads: slice) -> tuple[Tensor, ...]:
        leaves = [x[:, :, heads].detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, window_size=(16, 0), backend="sm90")
        return torch.autograd.grad(out, leaves, dout[:, :, heads])

    last = slice(63, None)
    for among_all, alone in zip(gradients_of(slice(None)), gradients_of(last), strict=True):
        assert torch.equal(among_all[:, :, last], alone)


@needs_kernels
def test_tensors_alone_in_memory() -> None:
    """Nothing is mapped before or behind the tensors: no address outside them may be touched."""
    torch.cuda.empty_cache()
    q, k, v = (torch.randn(4096, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 5, 1000, 4095], dtype=torch.int32, device="cuda")
    out = flash_attn_varlen_func(q, k, v, cu, cu, 3095, 3095, causal=True, backend="sm90")
    torch.cuda.synchronize()
    assert (out[4095:] == 0).all()


@needs_kernels
def test_more_than_2_to_the_31_elements() -> None:
    q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2**25 + 128, 1, 64, device="cuda", dtype=torch.bfloat16)
    window: dict[str, Any] = {"window_size": (100, 0), "backend": "sm90"}
    q.requires_grad_()
    k.requires_grad_()
    got = flash_attn_func(q, k, k, **window)
    dq, dk = torch.autograd.grad(got, (q, k), torch.ones_like(got))
    last = k[:, -256:].detach().clone().requires_grad_()
    expected = flash_attn_func(q, last, last, **window)
    expected_dq, expected_dk = torch.autograd.grad(expected, (q, last), torch.ones_like(expected))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(dq, expected_dq)
    torch.testing.assert_close(dk[:, -256:], expected_dk)
    assert not dk[:, :-256].any()


@needs_kernels
@pytest.mark.parametrize(
    ("lengths_k", "kept"),
    [(None, slice(None)), ([200, 90], slice(None)), (None, slice(1))],
    ids=["same", "other", "no sequences"],
)
def test_graph_capture(lengths_k: list[int] | None, kept: slice) -> None:
    """No synchronisation in either pass, and replays see new data."""
    call = call_here([300, 40], lengths_k, causal=True, nheads=2)
    cu_q, cu_k = call.cu_seqlens_q[kept], call.cu_seqlens_k[kept]
    if lengths_k is None:
        cu_k = cu_q
    dout = torch.randn_like(call.q)

    def attend() -> tuple[Tensor, ...]:
        out = flash_attn_varlen_func(*call.qkv, cu_q, cu_k, 300, 300, causal=True, backend="sm90")
        return with_gradients(out, call.qkv, dout)

    assert_captured(attend, lambda: call.q.detach().normal_())


@hopper_alone("the limit is of calls of its kernels")
@packed_or_dense
def test_host_time(packed: bool) -> None:
    """Host time of either pass, autograd recording: some 40 us on a quiet machine, with a margin for others."""
    torch.use_deterministic_algorithms(False)  # which would have PyTorch fill new memory
    shape = (128, 4, 64) if packed else (2, 64, 4, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 50, 128], dtype=torch.int32, device="cuda")

    def attend() -> Tensor:
        if packed:
            out: Tensor = flash_attn_varlen_func(q, k, v, cu, cu, 78, 78, causal=True, backend="sm90")
        else:
            out = flash_attn_func(q, k, v, causal=True, backend="sm90")
        return out

    out = attend()
    assert out.requires_grad
    lse = torch.zeros((4, 128) if packed else (2, 4, 64), device="cuda")
    of = cu if packed else None
    inputs = AttentionInputs(q.detach(), k.detach(), v.detach(), of, of, None, None, None, None, None, 78, 78)
    spec = AttentionSpec.of(inputs, Options(None, None, 0, 0.0, False, True))
    given = BackwardCall(spec, inputs, out, lse, q)
    for name, call in (("forward", attend), ("backward", lambda: dispatch.BACKENDS["sm90"].backward(given))):
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        median = 1e6 * statistics.median(times)
        print(f"{name}: {median:.1f} us")
        assert median < 100


@needs_kernels
@packed_or_dense
def test_repeated_calls_in_unfilled_memory(packed: bool) -> None:
    """Memory is filled in all other tests, by another allocator: the same bits, in a graph too."""
    call = call_here([200, 70] if packed else [135] * 2, packed=packed, causal=True)
    both = both_passes(call, torch.ones_like(call.q), deterministic=True, backend="sm90")
    expected = both()
    torch.use_deterministic_algorithms(False)
    assert not differing(expected, both, 3)
    graph, found = captured(both)
    graph.replay()
    assert not differing(expected, lambda: found, 1)


@needs_kernels
def test_concurrent_streams() -> None:
    calls = [call_here([500, 70 + i], causal=True, nheads=2, head_dim=128) for i in range(4)]

    def both(call: Call) -> tuple[Tensor, ...]:
        return with_gradients(run(call, backend="sm90"), call.qkv)

    expected = [both(call) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        results = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(both(call))
        torch.cuda.synchronize()
        assert all(map(same_bits, results, expected))


def two_layers(q: Tensor, k: Tensor, v: Tensor, backend: str = "sm90") -> Tensor:
    hidden = flash_attn_func(q, k, v, causal=True, deterministic=True, backend=backend)
    out: Tensor = flash_attn_func(hidden, k, v, causal=True, deterministic=True, backend=backend)
    return out


def assert_steps_agree(function: Any, plain: Any, device: str) -> None:
    """Training steps of two functions on fresh tensors, of two shapes, each of more tiles than there are CTAs.

    What is allocated in between holds no zeros, should it get the memory of a counter of tiles.
    """
    for seqlen in (500, 700):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            q, k, v, dout = (torch.randn(4, seqlen, 16, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            results = []
            for each in (function, plain):
                results.append(with_gradients(each(*leaves), leaves, dout))
                others = [torch.full((size,), 7, dtype=torch.int32, device=device) for size in (1, 1, 100, 10_000)]
                del others
            assert same_bits(*results)


@needs_kernels
def test_compiled_with_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernels on a stream run while PyTorch warms up for a graph, with memory that others get later."""
    monkeypatch.setattr(tile_counters._counters, "kept", {})
    torch.compiler.reset()
    before = counters["inductor"].copy()
    compiled = torch.compile(two_layers, mode="reduce-overhead", fullgraph=True, dynamic=False)
    assert_steps_agree(compiled, two_layers, "cuda")
    new = counters["inductor"] - before
    assert new["cudagraph_skips"] == 0
    assert new["cudagraph_recorded_non_static_inputs"] > 0


@needs_kernels
def test_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernels on a stream run with memory from a pool of the user's: nothing of it is kept."""
    monkeypatch.setattr(tile_counters._counters, "kept", {})
    pool = torch.cuda.MemPool()

    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.cuda.use_mem_pool(pool):
            return two_layers(q, k, v)

    with torch.cuda.stream(torch.cuda.Stream()):
        assert_steps_agree(pooled, two_layers, "cuda")
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks
    assert all(block["state"] == "inactive" for block in blocks)


@needs_kernels
def test_lengths_do_not_recompile() -> None:
    run(call_here([100, 20], nheads=2, causal=True), backend="sm90").sum().backward()
    run(call_here([10, 20], nheads_k=1, causal=True), backend="sm90")  # few queries
    before = cache.compile_count()
    for lengths in ([7], [300, 2, 2], [64] * 9):
        run(call_here(lengths, nheads_k=1, softmax_scale=0.3, causal=True), backend="sm90").sum().backward()
        run(call_here(lengths, nheads=2, window_size=(0, 0), head_dim=40, causal=True), backend="portable")
    assert cache.compile_count() == before
