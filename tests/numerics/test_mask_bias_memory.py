"""Mask and bias tensors: where they lie, what surrounds a call that has them, and how much memory it takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import peak_extra_bytes
from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from tests.lib.checks import (
    Case,
    assert_matches_oracle,
    both_passes,
    call_on,
    compiled,
    each_of,
    each_on,
    gradients,
    hopper_alone,
    needs_kernels,
    on_each_backend,
    poisoned_dout,
    run,
    same_bits,
    with_gradients,
)
from tests.lib.oracle import Call
from tests.lib.waits import assert_captured, synchronisations

# --- Places in memory.


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@on_each_backend
def test_addresses(backend: str, bias_dtype: torch.dtype) -> None:
    """Whatever a tensor's first element and the length of its rows are divisible by."""
    for offset, width in ((0, 136), (8, 136), (4, 132), (2, 134), (1, 136), (0, 133), (3, 131), (16, 256)):
        options: Case = {"dtype": torch.bfloat16, "bias_dtype": bias_dtype, "head_dim": 128, "packed": False}
        call = call_on(backend, [70] * 2, [131] * 2, mask=(1, 1, 1, 1), bias=(1, 1, 1, 1), **options)
        for name, junk in (("mask", True), ("bias", torch.nan)):
            x: Tensor = getattr(call, name).detach()
            *outer, rows, keys = x.shape
            memory = torch.full((offset + width * rows * outer[0] * outer[1],), junk, dtype=x.dtype, device=x.device)
            view = memory[offset:].view(*outer, rows, width)[..., :keys].copy_(x)
            setattr(call, name, view.requires_grad_(name == "bias"))
        assert_matches_oracle(call, backend=backend)


@on_each_backend
def test_rows_that_overlap(backend: str) -> None:
    """Strides may be anything: here a row is the one before it from its second element on."""
    call = call_on(backend, [70] * 2, [131] * 2, packed=False, mask=(1, 1), bias=(1, 1), head_dim=128)
    for name in ("mask", "bias"):
        x = getattr(call, name).detach().flatten()[:200].contiguous()
        view = x.as_strided((70, 131), (1, 1))
        setattr(call, name, view.requires_grad_(name == "bias"))
    assert_matches_oracle(call, backend=backend)


@needs_kernels
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_strides_beyond_32_bits(dim: int) -> None:
    """The last element of a dimension lies 2^31 elements behind its first, or further."""
    shape = (2, 2, 129, 131)
    stride, step = [0] * 4, 1
    for other in (i for i in reversed(range(4)) if i != dim):
        stride[other], step = step, step * shape[other]
    stride[dim] = -(-(2**31) // (shape[dim] - 1))
    assert stride[dim] > step  # or elements would overlap
    kept: Case = {"mask": (1, 1, 1, 1), "bias": (1, 1, 1, 1)}
    call = call_on("sm90", [129] * 2, [131] * 2, packed=False, nheads=2, **kept)
    for name in kept:
        x = getattr(call, name).detach()
        view = x.new_empty(stride[dim] * (shape[dim] - 1) + step).as_strided(shape, stride)
        setattr(call, name, view.copy_(x).requires_grad_(name == "bias"))
    assert_matches_oracle(call, backend="sm90")


@needs_kernels
def test_more_elements_than_32_bits_count() -> None:
    """A bias, and its gradient, of 2^31 elements and more: the last head gets what it gets alone."""
    length = 32776
    q, k, v, dout = torch.randn(4, 1, length, 2, 64, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1, 2, length, length, device="cuda", dtype=torch.bfloat16)
    assert bias.numel() > 2**31

    def gradients_of(heads: slice) -> tuple[Tensor, ...]:
        leaves = [x[:, :, heads].detach().requires_grad_() for x in (q, k, v)]
        own = bias[:, heads].detach().requires_grad_()
        out = flash_attn_func(*leaves, bias=own, window_size=(200, 100), deterministic=True, backend="sm90")
        return (*torch.autograd.grad(out, (*leaves, own), dout[:, :, heads]),)

    *all_rows, all_scores = gradients_of(slice(None))
    *rows, scores = gradients_of(slice(1, None))
    for among_all, alone in zip(all_rows, rows, strict=True):
        assert torch.equal(among_all[:, :, 1:], alone)
    assert torch.equal(all_scores[:, 1:], scores)


# --- What is around a call: the host, graphs, compilers, memory.

AROUND: dict[str, Case] = {
    "packed": {"packed": True, "mask": (1, 1), "bias": (1, 1, 1), "causal": True},
    "packed seqused": {"packed": True, "seqused": True, "mask": (1, 1, 1), "bias": (1, 0, 1), "nheads_k": 2},
    "dense": {"packed": False, "mask": (1, 0, 0, 1), "bias": (1, 1, 1)},
    "dense seqused": {"packed": False, "seqused": True, "mask": (1, 1), "bias": (1, 1, 1, 1), "causal": True},
    "d256": {"packed": False, "mask": (1, 1), "bias": (0, 1, 1, 1), "head_dim": 256},
}


def around(backend: str, case: Case) -> tuple[Call, Tensor]:
    call = call_on(backend, [140] * 3, [130] * 3, **case)
    return call, poisoned_dout(call, call.q)


@needs_kernels
@each_of("case", AROUND)
def test_graph_capture(case: Case) -> None:
    """The host never waits, and replays see what stands in mask and bias then."""
    call, dout = around("sm90", case)
    by_default, function = (both_passes(call, dout, deterministic=x, backend="sm90") for x in (False, True))
    by_default()
    assert synchronisations(by_default) == 0

    @torch.no_grad()
    def change() -> None:
        call.bias.normal_()
        call.mask.copy_(torch.rand(call.mask.shape, device="cuda") < 0.5)
        call.q.normal_()

    assert_captured(lambda: function().values(), change)


@each_on(AROUND, one_in=2)
def test_compiled(backend: str, case: Case) -> None:
    """One graph gives the bits of the eager call."""
    call, dout = around(backend, case)
    tensors = {name: x for name, x in vars(call).items() if isinstance(x, Tensor)}
    leaves = [x for x in tensors.values() if x.requires_grad]
    bounds: Case = {"max_seqlen_q": 144, "max_seqlen_k": 130} if call.cu_seqlens_q is not None else {}

    def attend(given: dict[str, Tensor]) -> Tensor:
        function: Any = flash_attn_varlen_func if bounds else flash_attn_func
        out: Tensor = function(**given, **bounds, causal=call.causal, deterministic=True, backend=backend)
        return out

    step, _ = compiled(attend, "inductor" if backend == "sm90" else "aot_eager")
    assert same_bits(*(with_gradients(function(tensors), leaves, dout) for function in (attend, step)))


@needs_kernels
@pytest.mark.parametrize("nheads_k", [2, 4])
def test_what_shared_memory_held_before(nheads_k: int) -> None:
    """Rows behind the last query have no bias there, but what a call before has left: NaN, which reaches nothing."""

    def call(queries: int, bias: float) -> list[Tensor]:
        q, k, v = (
            torch.randn(2, rows, heads, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for rows, heads in ((queries, 4), (300, nheads_k), (300, nheads_k))
        )
        added = torch.full((4, queries, 300), bias, dtype=torch.bfloat16, device="cuda")
        mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")
        out = flash_attn_func(q, k, v, mask=mask, bias=added, backend="sm90")
        return list(torch.autograd.grad(out, (q, k, v), torch.randn_like(out)))

    for _ in range(4):
        call(128, torch.nan)
        assert all(x.isfinite().all() for x in call(100, 0.5))


# How many float32 sums a backward pass may keep for an element of a bias, beyond its gradient.
FLOAT32_SUMS = 1
# Each tensor of a call begins a block of 512 bytes, and counters of tiles are small.
ROUNDING = 1 << 16
REMEMBERED: dict[str, Case] = {
    "mask": {"mask": (1, 1)},
    "expanded mask": {"mask": (0, 0, 1, 1), "mask_layout": "expanded"},
    "odd mask": {"mask": (1, 1), "mask_layout": "sliced"},
    "bias": {"bias": (1, 1, 1, 1)},
    "float32 bias": {"bias": (0, 1, 1, 1), "bias_dtype": torch.float32},
    "shared bias": {"bias": (0, 1, 1, 1)},
    "odd bias": {"bias": (0, 1, 1, 1), "bias_layout": "sliced"},
    "transposed bias": {"bias": (0, 1, 1, 1), "bias_layout": "transposed"},
    "keys": {"mask": (1, 0, 0, 1), "bias": (0, 1, 0, 1)},
    "queries": {"mask": (1, 0, 1, 0), "bias": (0, 1, 1, 0)},
    "number": {"bias": ()},
    "seqused": {"bias": (0, 1, 1, 1), "mask": (1, 1), "seqused": True},
}


def mask_bytes(call: Call) -> int:
    """Bytes that either pass may make of a mask: bits, by whole tiles; if padded, as if it had all queries."""
    if call.mask is None:
        return 0
    sizes, strides = (
        [fill] * (4 - call.mask.ndim) + list(x) for fill, x in ((1, call.mask.shape), (0, call.mask.stride()))
    )
    batch, heads, rows, _ = (n if step else 1 for n, step in zip(sizes, strides, strict=True))
    if call.seqused_q is not None:
        batch, rows = 1, call.q.shape[0] * (call.q.shape[1] + 192)
    return batch * heads * (rows + 192) * (call.k.shape[1] + 128) // 4


def dbias_bytes(bias: Tensor | None) -> int:
    """Bytes that a backward pass may take for the gradient of a bias: itself, and float32 sums of its own shape.

    Or of tiles of 128 x 128, if there are fewer of them than two an SM. Never anything of the shape it broadcasts to,
    as no dS is stored of rows that are no multiple of 16 bytes.
    """
    if bias is None:
        return 0
    return bias.nbytes + max(4 * FLOAT32_SUMS * bias.numel(), 2 * 132 * 128 * 128 * 4)


@hopper_alone("the bounds are of its tiles and SMs")
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@each_of("case", REMEMBERED)
def test_peak_memory(case: Case, deterministic: bool) -> None:
    """Scores take 132 MB, inputs 4 MB each: beyond results and workspace there is what two functions above say."""
    call = call_on("sm90", [2000] * 4, [2060] * 4, packed=False, **case)
    asked: Case = {"return_lse": True, "deterministic": deterministic, "backend": "sm90"}
    device, dout = torch.device("cuda"), torch.randn_like(call.q)
    peaks = []
    for each in (call, replace(call, mask=None, bias=None)):
        out, lse = run(each, **asked)
        gradients(each, out, lse, dout, None)
        out, lse = run(each, **asked)
        forward = peak_extra_bytes(lambda each=each: run(each, **asked), device)  # type: ignore[misc]
        assert forward is not None
        # With padding lse has another order first.
        results = out.nbytes + lse.nbytes * (1 if each.seqused_q is None else 2)
        assert forward <= results + mask_bytes(each) + ROUNDING
        leaves = [x for x in (each.q, each.k, each.v, each.bias) if x is not None]
        backward = peak_extra_bytes(
            lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, dout, retain_graph=True),  # type: ignore[misc]
            device,
        )
        assert backward is not None
        peaks.append(backward)
        del out, lse
    print(f"{peaks[0] / 1e6:.1f} MB, without mask and bias {peaks[1] / 1e6:.1f} MB")
    # The mask's tables of the backward pass are there while those of the bias's gradient are.
    assert peaks[0] <= peaks[1] + 2 * mask_bytes(call) + dbias_bytes(call.bias) + ROUNDING
