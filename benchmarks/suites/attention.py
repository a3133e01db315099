"""Either pass, and both, on a Hopper GPU, over the sizes that peers publish: 32k tokens in bfloat16.

Dense batches of several lengths and head shapes, causal and full, and sixteen causal documents of uneven lengths.
Against flash-attn-4 (its CuTe DSL kernels) and, for dense batches, PyTorch's cuDNN attention, where they are there.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Bar, Case, Contender, Results, Run, Suite, Unavailable
from benchmarks.work import Passes, Work, attention_flop, causal_area
from flash_attn_cute import flash_attn_func, flash_attn_varlen_func

PACKAGE, FA4, CUDNN = "flash_attn_cute", "flash-attn-4", "cuDNN"
TOKENS = 32_768

# Query heads, key heads, head dimension, length, causal.
DENSE = (
    (16, 16, 128, 2048, True),
    (16, 16, 128, 8192, True),
    (16, 16, 128, 16384, True),
    (16, 16, 128, 2048, False),
    (16, 16, 128, 8192, False),
    (32, 8, 128, 8192, True),
    (32, 32, 64, 8192, True),
    (32, 32, 64, 8192, False),
    (8, 8, 256, 8192, True),
    (8, 8, 256, 8192, False),
)
PACKED = ((16, 16, 128), (32, 8, 128), (32, 32, 64))


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCase(Case):
    """Inputs, dense (batch, seqlen, heads, d) or packed (total, heads, d) with offsets."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    cu_seqlens: Tensor | None
    max_seqlen: int


# Computes out; its inputs require gradients if a backward pass follows.
Forward: TypeAlias = Callable[[], Tensor]


def suite(passes: Passes, device: torch.device, dtype: torch.dtype) -> Suite[AttentionCase]:
    """The suite of either pass, or of both. Its bars are the least that the package has to reach on every row."""
    names = [_dense_name(*row) for row in DENSE] + [_packed_name(*row) for row in PACKED]
    bars = [Bar(name, PACKAGE, FA4, 1 / _least(passes, name)) for name in names]
    bars += [Bar(_dense_name(*row), PACKAGE, CUDNN, 1.0) for row in DENSE]
    makers = ((PACKAGE, _package), (FA4, _flash_attn_4), (CUDNN, _cudnn))
    return Suite(
        name=passes,
        cases=lambda: _cases(passes, device, dtype),
        contenders=[Contender(name, _passes(passes, make)) for name, make in makers],
        reference=PACKAGE,
        bars=bars,
        rounds=30,
        seconds=2.0,
    )


def _least(passes: Passes, name: str) -> float:
    """The speed over flash-attn-4 that a case has to reach."""
    if passes == "forward" or not ("x256" in name or "documents" in name):
        return 0.98
    return 1.35 if passes == "backward" and "x256" in name else 1.05


def _passes(passes: Passes, make: Callable[[AttentionCase], Forward]) -> Callable[[AttentionCase], Run]:
    """Makes what runs these passes of a contender."""

    def of(case: AttentionCase) -> Run:
        forward = make(case)
        if passes == "forward":
            return lambda: {"out": forward()}
        once = forward() if passes == "backward" else None

        def run() -> Results:
            out = forward() if once is None else once
            grads = torch.autograd.grad(out, (case.q, case.k, case.v), case.dout, retain_graph=once is not None)
            return dict(zip(("dq", "dk", "dv"), grads, strict=True))

        return run

    return of


def _dense_name(nheads: int, nheads_k: int, d: int, seqlen: int, causal: bool) -> str:
    heads = nheads if nheads == nheads_k else f"{nheads}/{nheads_k}"
    return f"{heads}x{d} {seqlen // 1024}k {'causal' if causal else 'full'}"


def _packed_name(nheads: int, nheads_k: int, d: int) -> str:
    return f"documents {nheads if nheads == nheads_k else f'{nheads}/{nheads_k}'}x{d} causal"


def _cases(passes: Passes, device: torch.device, dtype: torch.dtype) -> Iterator[AttentionCase]:
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=dtype)

    def case(name: str, q: Tensor, k: Tensor, v: Tensor, area: int, causal: bool, **packing: Any) -> AttentionCase:
        reads_and_writes = {"forward": (2, 1), "backward": (4, 2), "both": (6, 3)}  # like q, and like k and like v
        like_q, like_k = reads_and_writes[passes]
        traffic = like_q * q.nbytes + like_k * (k.nbytes + v.nbytes)
        work = Work(attention_flop(area, q.shape[-2], q.shape[-1], q.shape[-1], passes), traffic)
        detail = f"q {tuple(q.shape)}, k and v {tuple(k.shape)}"
        dout = normal(*q.shape)
        for x in (q, k, v):
            x.requires_grad_(passes != "forward")
        inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "dout": dout, "causal": causal, **packing}
        return AttentionCase(name=name, detail=detail, device=device, dtype=dtype, work=work, **inputs)

    for row in DENSE:
        nheads, nheads_k, d, seqlen, causal = row
        batch = TOKENS // seqlen
        q, k, v = (normal(batch, seqlen, heads, d) for heads in (nheads, nheads_k, nheads_k))
        area = batch * (causal_area([seqlen]) if causal else seqlen**2)
        yield case(_dense_name(*row), q, k, v, area, causal, cu_seqlens=None, max_seqlen=seqlen)
    lengths = [random.Random(i).randint(64, 4096) for i in range(16)]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    for nheads, nheads_k, d in PACKED:
        q, k, v = (normal(sum(lengths), heads, d) for heads in (nheads, nheads_k, nheads_k))
        packing: dict[str, Any] = {"cu_seqlens": offsets, "max_seqlen": max(lengths)}
        yield case(_packed_name(nheads, nheads_k, d), q, k, v, causal_area(lengths), True, **packing)


def _package(case: AttentionCase) -> Forward:
    cu, longest = case.cu_seqlens, case.max_seqlen

    def run() -> Tensor:
        if cu is None:
            out: Tensor = flash_attn_func(case.q, case.k, case.v, causal=case.causal, backend="sm90")
        else:
            out = flash_attn_varlen_func(
                case.q, case.k, case.v, cu, cu, longest, longest, causal=case.causal, backend="sm90"
            )
        return out

    return run


def _flash_attn_4(case: AttentionCase) -> Forward:
    try:
        from flash_attn.cute import flash_attn_func as dense
        from flash_attn.cute import flash_attn_varlen_func as packed
    except ImportError as reason:
        raise Unavailable(str(reason)) from reason
    offsets = {"cu_seqlens_q": case.cu_seqlens, "cu_seqlens_k": case.cu_seqlens}
    bounds = {"max_seqlen_q": case.max_seqlen, "max_seqlen_k": case.max_seqlen}

    def run() -> Tensor:
        if case.cu_seqlens is None:
            result = dense(case.q, case.k, case.v, causal=case.causal)
        else:
            result = packed(case.q, case.k, case.v, **offsets, **bounds, causal=case.causal)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return run


def _cudnn(case: AttentionCase) -> Forward:
    if case.cu_seqlens is not None:
        raise Unavailable("PyTorch offers cuDNN's attention for dense batches only")

    def run() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return run
