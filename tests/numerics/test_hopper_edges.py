"""Edges of the kernels: odd strides, no keys, NaN, unchecked lengths, several GPUs."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from tests.lib.checks import (
    GPU_ARCHITECTURE,
    Case,
    assert_close,
    assert_matches_oracle,
    assert_padding_reaches_nothing,
    bitwise_equal,
    both_passes,
    call_on,
    gradients,
    needs_kernels,
    packed_or_dense,
    run,
    same_bits,
    with_gradients,
)
from tests.lib.oracle import Call, attention
from tests.lib.waits import synchronisations

pytestmark = needs_kernels
needs_two = pytest.mark.skipif(
    GPU_ARCHITECTURE is None or torch.cuda.device_count() < 2, reason="needs two Hopper or Blackwell GPUs"
)


call_of = partial(call_on, "sm90")


def results_of(call: Call, dout: Tensor) -> dict[str, Tensor]:
    return both_passes(call, dout, backend="sm90")()


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("through_lse", [False, True])
def test_one_query_of_a_padded_batch(head_dim: int, through_lse: bool) -> None:
    """A dimension of one row may have any stride, where sequences of a batch follow each other."""
    call = call_of([1, 1, 0], [70, 3, 130], packed=False, seqused=True, head_dim=head_dim, sink=True)
    one = call.q[:, :1].detach().requires_grad_()
    assert_matches_oracle(replace(call, q=one), through_lse=through_lse, backend="sm90")


@pytest.mark.parametrize("head_dims", [(192, 128), (256, 64), (192, 64)], ids=str)
def test_out_does_not_take_the_place_of_queries(head_dims: tuple[int, int]) -> None:
    """Where out has fewer columns than q and there is one block of keys, one warpgroup is done while another begins."""
    d, d_v = head_dims
    call = call_of([4000] * 4, [40] * 4, packed=False, head_dim=d, head_dim_v=d_v, nheads=16)
    first = run(call, backend="sm90")
    expected, low = (attention(call.to(dtype))[0] for dtype in (torch.float64, torch.bfloat16))
    assert_close("out", first, expected, low, factor=2.0, size=1.0)
    for _ in range(50):
        assert bitwise_equal(run(call, backend="sm90"), first)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("nheads", [(4, 4), (6, 2)], ids=["alone", "grouped"])
@pytest.mark.parametrize("head_dims", [(192, 128), (160, 72), (192, 64), (128, 192), (256, 128), (64, 128)], ids=str)
def test_values_of_another_head_dimension(
    head_dims: tuple[int, int], nheads: tuple[int, int], deterministic: bool
) -> None:
    (d, d_v), (heads, heads_k) = head_dims, nheads
    for options in ({"causal": True, "softcap": 5.0}, {"window_size": (100, 30), "seqused": True}):
        call = call_of(
            [200, 0, 77], [333, 40, 1], nheads=heads, nheads_k=heads_k, head_dim=d, head_dim_v=d_v, **options
        )
        assert_matches_oracle(call, through_lse=True, deterministic=deterministic, backend="sm90")
    call = call_of([150] * 2, [260] * 2, packed=False, nheads=heads, nheads_k=heads_k, head_dim=d, head_dim_v=d_v)
    assert_matches_oracle(call, deterministic=deterministic, backend="sm90")


def test_rows_do_not_depend_on_padding_that_shares_their_tile() -> None:
    """Few queries: the heads of a group, and rows behind a sequence, share a tile."""
    for seed in range(10):
        torch.manual_seed(seed)
        call = call_of([5, 3], [513, 513], packed=False, seqused=True, nheads=8, nheads_k=2)
        with torch.no_grad():
            call.q *= 4
        assert_padding_reaches_nothing(call, deterministic=True, backend="sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_do_not_depend_on_their_neighbours(head_dim: int) -> None:
    """The largest scores come late, and in other rows at other times."""
    q, k, v = (torch.randn(1, 700, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    k *= torch.linspace(4, 0.1, 700, device="cuda")[:, None, None].to(k)
    expected = flash_attn_func(q, k, v, backend="sm90")
    other = q.clone()
    other[:, 1::2] *= 3
    assert bitwise_equal(flash_attn_func(other, k, v, backend="sm90")[:, ::2], expected[:, ::2])


@pytest.mark.parametrize("sink", [True, False])
def test_no_keys_at_all(sink: bool) -> None:
    """Packed sequences of queries alone: both passes never wait for the device, so they can be captured."""
    call = call_of([5, 0, 70], [0, 0, 0], seqused=True, sink=sink)
    empty = {name: getattr(call, name)[:0].detach().requires_grad_() for name in ("k", "v")}
    zeros = torch.zeros(4, dtype=torch.int32, device="cuda")
    call = replace(call, cu_seqlens_k=zeros, seqused_k=zeros[1:], causal=True, **empty)
    assert_matches_oracle(call, through_lse=True, backend="sm90")
    given: Case = {name: value for name, value in vars(call).items() if value is not None}

    def passes() -> None:
        out, lse = flash_attn_varlen_func(**given, max_seqlen_q=70, max_seqlen_k=0, return_lse=True, backend="sm90")
        leaves = [x for x in (*call.qkv, call.learnable_sink) if x is not None]
        torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])

    passes()
    assert synchronisations(passes) == 0


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("sink", [True, False])
def test_nan_stays_visible(where: str, sink: bool) -> None:
    """In a real row: in out, in lse unless it is v's, and in the gradients that it reaches."""
    call = call_of([100], [90], packed=False, sink=sink)
    with torch.no_grad():
        getattr(call, where)[0, 37, 1] = torch.nan
    out, lse = run(call, return_lse=True, backend="sm90")
    reached = torch.zeros_like(lse, dtype=torch.bool)
    reached[0, 1, 37 if where == "q" else slice(None)] = True
    assert torch.equal(out.isnan().all(-1).transpose(1, 2), reached)
    assert torch.equal(lse.isnan(), reached & (where != "v"))
    grads = gradients(call, out, lse, torch.randn_like(out), None)
    truth = call.to(torch.float64)
    expected = gradients(truth, *attention(truth), torch.randn_like(out), None)
    for name in ("dq", "dk", "dv"):
        missing = expected[name].isnan() & ~grads[name].isnan()
        assert not missing.any(), f"{name} hides NaN"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("side", ["q", "k"])
def test_real_rows_end_with_what_a_sequence_owns(side: str, head_dim: int) -> None:
    """A seqused beyond it breaks the contract; it counts for as much as there is, and no other rows are overwritten."""
    call = call_of([70, 40, 3], [60, 130, 9], head_dim=head_dim, causal=True)
    slots = getattr(call, f"cu_seqlens_{side}").diff()
    dout = torch.randn_like(call.q)
    expected = results_of(replace(call, **{f"seqused_{side}": slots}), dout)
    for name, x in results_of(replace(call, **{f"seqused_{side}": slots + 57}), dout).items():
        assert bitwise_equal(x, expected[name]), name


def test_threads_share_no_counters() -> None:
    """Default streams of threads can have one handle."""
    from flash_attn_cute.backends.cute.counters import next_tile

    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(next_tile())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({x.data_ptr() for x in (*found, next_tile())}) == 3
    assert next_tile().data_ptr() == next_tile().data_ptr()


# Several GPUs


def on_device(device: int, packed: bool) -> Callable[[], list[Tensor]]:
    """Both passes with tensors of one GPU, whichever is current."""
    g = torch.Generator(f"cuda:{device}").manual_seed(0)
    inputs = [torch.randn(3, 200, 4, 64, generator=g, device=f"cuda:{device}", dtype=torch.bfloat16) for _ in range(3)]
    cu = torch.arange(0, 601, 200, dtype=torch.int32, device=f"cuda:{device}")

    def passes() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]  # of the stream on which they are used
        if packed:
            q, k, v = (x.flatten(0, 1) for x in leaves)
            out = flash_attn_varlen_func(q, k, v, cu, cu, 200, 200, causal=True, backend="sm90")
        else:
            out = flash_attn_func(*leaves, causal=True, backend="sm90")
        return [*with_gradients(out, leaves)]

    return passes


@needs_two
@packed_or_dense
def test_tensors_of_another_gpu(packed: bool) -> None:
    torch.cuda.set_device(0)
    results = [[x.cpu() for x in on_device(device, packed)()] for device in (1, 0)]
    assert torch.cuda.current_device() == 0
    assert same_bits(*results)


@needs_two
def test_capture_on_another_gpu() -> None:
    """The stream that captures is not the current device's when the call is made."""
    passes = on_device(1, packed=True)
    expected = [x.cpu() for x in passes()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            passes()
            torch.cuda.synchronize()
            graph.capture_begin()
            with torch.cuda.device(0):
                found = passes()
            graph.capture_end()
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
    assert same_bits([x.cpu() for x in found], expected)


@needs_two
def test_threads_of_two_gpus() -> None:
    expected = [[x.cpu() for x in on_device(device, packed=False)()] for device in range(2)]
    results: list[list[Tensor]] = [[], []]

    def work(device: int) -> None:
        for _ in range(20):
            results[device] = on_device(device, packed=False)()

    threads = [threading.Thread(target=work, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(results, expected, strict=True):
        assert same_bits([x.cpu() for x in got], wanted)
