"""Either pass, and both, on a Hopper GPU, over the sizes that peers publish: 32k tokens in bfloat16.

Dense batches of several lengths and head shapes, causal and full; those of published boards, which are two entries of
64 heads that share 8; and sixteen causal documents of uneven lengths. Either pass over one head shape and many lengths.
Against flash-attn-4 (its CuTe DSL kernels) and, for dense batches, PyTorch's cuDNN attention, where they are there.
Where there is a backward pass, the package and flash-attn-4 also take part with ``deterministic=True``; alone, forward
passes do with ``return_max_logits=True``.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Bar, Contender, NoPart, Suite, Unavailable
from benchmarks.suites.passes import Forward, PassCase, deterministic, run_passes
from benchmarks.work import Passes, Work, attention_flop, causal_area, gpu_backend
from flash_attn_cute import flash_attn_func, flash_attn_varlen_func

PACKAGE, FA4, CUDNN = "flash_attn_cute", "flash-attn-4", "cuDNN"
PACKAGE_MAX_LOGITS = f"{PACKAGE} max logits"
PACKAGE_DETERMINISTIC, FA4_DETERMINISTIC = (f"{name} deterministic" for name in (PACKAGE, FA4))
BACKEND = gpu_backend()
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
# The same, of two entries each.
BOARD_BATCH = 2
BOARD = tuple((64, 8, 128, length, causal) for length in (4096, 8192, 32_768) for causal in (True, False))
# Query heads, key heads, head dimension; of documents of these lengths.
PACKED = ((16, 16, 128), (32, 8, 128), (32, 32, 64))
DOCUMENTS = tuple(random.Random(i).randint(64, 4096) for i in range(16))
# 16 heads of 128, causal and full.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCase(PassCase):
    """Passes, and inputs, dense (batch, seqlen, heads, d) or packed (total, heads, d) with offsets."""

    causal: bool
    cu_seqlens: Tensor | None
    max_seqlen: int


# Standard normal numbers of a shape.
Normal: TypeAlias = Callable[..., Tensor]


def suite(passes: Passes, device: torch.device, dtype: torch.dtype) -> Suite[AttentionCase]:
    """The suite of either pass, or of both. Its bars are the least that the package has to reach on every row."""

    def cases() -> Iterator[AttentionCase]:
        normal = _normal(device, dtype)
        for row in DENSE:
            yield _dense(passes, *row, normal)
        for row in BOARD:
            yield _dense(passes, *row, normal, batch=BOARD_BATCH)
        for heads in PACKED:
            yield _packed(passes, *heads, normal)

    names = [_dense_name(*row) for row in (*DENSE, *BOARD)] + [_packed_name(*heads) for heads in PACKED]
    bars = [Bar(name, PACKAGE, FA4, 1 / _least(passes, name)) for name in names]
    bars += [Bar(_dense_name(*row), PACKAGE, CUDNN, 1.0) for row in (*DENSE, *BOARD)]
    return Suite(passes, cases, _contenders(), PACKAGE, bars, rounds=30, seconds=2.0)


def lengths(device: torch.device, dtype: torch.dtype) -> Suite[AttentionCase]:
    """The suite of either pass over the lengths. It has no bars."""

    def cases() -> Iterator[AttentionCase]:
        normal = _normal(device, dtype)
        each: tuple[Passes, ...] = ("forward", "backward")
        for passes, causal, length in product(each, (True, False), LENGTHS):
            case = _dense(passes, 16, 16, 128, length, causal, normal)
            panel = f"{passes}, {'causal' if causal else 'full'}"
            yield replace(case, name=f"{passes} {case.name}", panel=panel, length=length)

    return Suite("lengths", cases, _contenders(), PACKAGE, bars=(), rounds=10, seconds=1.0)


def _least(passes: Passes, name: str) -> float:
    """The speed over flash-attn-4 that a case has to reach."""
    if passes == "forward" or not ("x256" in name or "documents" in name):
        return 0.98
    return 1.35 if passes == "backward" and "x256" in name else 1.05


def _contenders() -> list[Contender[AttentionCase]]:
    return [
        Contender(PACKAGE, run_passes(_package)),
        Contender(FA4, run_passes(_flash_attn_4)),
        Contender(CUDNN, run_passes(_cudnn)),
        Contender(PACKAGE_MAX_LOGITS, run_passes(_with_max_logits)),
        Contender(PACKAGE_DETERMINISTIC, run_passes(deterministic(_package))),
        Contender(FA4_DETERMINISTIC, run_passes(deterministic(_flash_attn_4)), against=PACKAGE_DETERMINISTIC),
    ]


def _with_max_logits(case: AttentionCase) -> Forward:
    if case.passes != "forward":
        raise NoPart  # backward passes know nothing of them
    return _package(case, max_logits=True)


def _dense_name(nheads: int, nheads_k: int, d: int, seqlen: int, causal: bool) -> str:
    heads = nheads if nheads == nheads_k else f"{nheads}/{nheads_k}"
    length = seqlen if seqlen < 1024 else f"{seqlen // 1024}k"
    return f"{heads}x{d} {length} {'causal' if causal else 'full'}"


def _packed_name(nheads: int, nheads_k: int, d: int) -> str:
    return f"documents {nheads if nheads == nheads_k else f'{nheads}/{nheads_k}'}x{d} causal"


def _normal(device: torch.device, dtype: torch.dtype) -> Normal:
    draw = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=draw, device=device, dtype=dtype)


def _dense(
    passes: Passes,
    nheads: int,
    nheads_k: int,
    d: int,
    seqlen: int,
    causal: bool,
    normal: Normal,
    *,
    batch: int | None = None,
) -> AttentionCase:
    batch = TOKENS // seqlen if batch is None else batch
    q, k, v = (normal(batch, seqlen, heads, d) for heads in (nheads, nheads_k, nheads_k))
    name = _dense_name(nheads, nheads_k, d, seqlen, causal)
    area = batch * (causal_area([seqlen]) if causal else seqlen**2)
    return _case(name, passes, q, k, v, normal(*q.shape), area, causal=causal, cu_seqlens=None, max_seqlen=seqlen)


def _packed(passes: Passes, nheads: int, nheads_k: int, d: int, normal: Normal) -> AttentionCase:
    q, k, v = (normal(sum(DOCUMENTS), heads, d) for heads in (nheads, nheads_k, nheads_k))
    offsets = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32, device=q.device)
    packing: dict[str, Any] = {"cu_seqlens": offsets, "max_seqlen": max(DOCUMENTS)}
    name, area = _packed_name(nheads, nheads_k, d), causal_area(DOCUMENTS)
    return _case(name, passes, q, k, v, normal(*q.shape), area, causal=True, **packing)


def _case(
    name: str, passes: Passes, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, area: int, **mask: Any
) -> AttentionCase:
    reads_and_writes = {"forward": (2, 1), "backward": (4, 2), "both": (6, 3)}  # like q, and like k and like v
    like_q, like_k = reads_and_writes[passes]
    traffic = like_q * q.nbytes + like_k * (k.nbytes + v.nbytes)
    for x in (q, k, v):
        x.requires_grad_(passes != "forward")
    return AttentionCase(
        name=name,
        detail=f"q {tuple(q.shape)}, k and v {tuple(k.shape)}",
        device=q.device,
        dtype=q.dtype,
        work=Work(attention_flop(area, q.shape[-2], q.shape[-1], q.shape[-1], passes), traffic),
        passes=passes,
        q=q,
        k=k,
        v=v,
        dout=dout,
        **mask,
    )


def _package(case: AttentionCase, *, deterministic: bool = False, max_logits: bool = False) -> Forward:
    q, k, v, cu, longest = case.q, case.k, case.v, case.cu_seqlens, case.max_seqlen
    options: dict[str, Any] = {"causal": case.causal, "deterministic": deterministic, "backend": BACKEND}
    if max_logits:
        options["return_max_logits"] = True

    def run() -> Tensor:
        if cu is None:
            results: Any = flash_attn_func(q, k, v, **options)
        else:
            results = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)
        out: Tensor = results[0] if max_logits else results
        return out

    return run


def _flash_attn_4(case: AttentionCase, *, deterministic: bool = False) -> Forward:
    try:
        from flash_attn.cute import flash_attn_func as dense
        from flash_attn.cute import flash_attn_varlen_func as packed
    except ImportError as reason:
        raise Unavailable(str(reason)) from reason
    offsets = {"cu_seqlens_q": case.cu_seqlens, "cu_seqlens_k": case.cu_seqlens}
    bounds = {"max_seqlen_q": case.max_seqlen, "max_seqlen_k": case.max_seqlen}
    options = {"causal": case.causal, "deterministic": deterministic}

    def run() -> Tensor:
        if case.cu_seqlens is None:
            result = dense(case.q, case.k, case.v, **options)
        else:
            result = packed(case.q, case.k, case.v, **offsets, **bounds, **options)
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
