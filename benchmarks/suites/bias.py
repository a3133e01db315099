"""Masks and biases on a Hopper GPU, either pass: random, of keys, of tiles, shared or not, dense and packed.

Most rows are 4 batch entries of 4096 tokens in 16 heads of 128. Triangle attention has as many batch entries as tokens,
which share a bias and have a key mask each. Against PyTorch's cuDNN and memory-efficient attention, FlexAttention and,
for triangle attention, cuEquivariance, where they are there. The package also takes part with what a row's speed is
held against: the same call without its tensors, with a mask that hides nothing, at the next even length, or dense.

All pairs count that a mask does not hide by whole tiles. cuDNN has no gradient of a bias: it gets one that is constant.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness import Bar, Contender, NoPart, Run, Suite, Unavailable
from benchmarks.suites.passes import EACH, Forward, PassCase, deterministic, run_passes
from benchmarks.work import Passes, Work, attention_flop, causal_area, gpu_backend
from flash_attn_cute import flash_attn_func, flash_attn_varlen_func

PACKAGE, CUDNN, EFFICIENT = "flash_attn_cute", "cuDNN (no dBias)", "memory-efficient"
FLEX, CUEQUIVARIANCE = "FlexAttention", "cuEquivariance"
PACKAGE_DETERMINISTIC = f"{PACKAGE} deterministic"
# What the package also computes, which is not what the row asks for.
WITHOUT, ALL_TRUE, EVEN, SAME_AREA = (
    f"{PACKAGE} {what}" for what in ("without", "all true", "even length", "dense, same area")
)
BACKEND = gpu_backend()
KERNELS = {CUDNN: SDPBackend.CUDNN_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
TILE = 128


@dataclass(frozen=True)
class Row:
    """A call: a dense batch of ``batch`` entries of ``seqlen`` tokens, or packed ``documents``.

    ``bias`` has a 0 for each dimension that is broadcast; of packed sequences it always has the scores' shape. It gets
    a gradient unless it is ALiBi's. The bars are the least speed over others, (forward, backward).
    """

    name: str
    batch: int
    seqlen: int
    nheads: int
    d: int
    mask: Literal["random", "keys", "tiles"] | None = None
    bias: tuple[int, ...] | None = None
    alibi: bool = False
    causal: bool = False
    triangle: bool = False
    documents: tuple[int, ...] | None = None
    bars: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)


def _triangle(tokens: int, nheads: int, d: int) -> Row:
    bars = {EFFICIENT: (3.0 if d == 32 else 2.5, 3.0)}
    name = f"triangle {nheads}x{d} {tokens}"
    return Row(name, tokens, tokens, nheads, d, mask="keys", bias=(0, 1, 1, 1), triangle=True, bars=bars)


_NAME, _SHAPE = "16x128 4096", (4, 4096, 16, 128)
_ODD = (4, 4095, 16, 128)
DOCUMENTS = tuple(random.Random(i).randint(64, 4096) for i in range(8))
ROWS = (
    Row(f"{_NAME} plain", *_SHAPE),
    Row(f"{_NAME} mask", *_SHAPE, mask="random", bars={CUDNN: (1.35, 1.4)}),
    Row(f"{_NAME} bias", *_SHAPE, bias=(0, 1, 1, 1), bars={CUDNN: (1.35, 1.4), EFFICIENT: (None, 3.8)}),
    Row(f"{_NAME} bias each", *_SHAPE, bias=(1, 1, 1, 1), bars={CUDNN: (1.2, 1.15)}),
    Row("16x128 4095 mask", *_ODD, mask="random", bars={EVEN: (0.97, 0.97)}),
    Row("16x128 4095 bias", *_ODD, bias=(0, 1, 1, 1), bars={EVEN: (0.97, 0.97)}),
    Row(f"{_NAME} key padding", *_SHAPE, mask="keys", bars={WITHOUT: (0.93, 0.93)}),
    Row(f"{_NAME} ALiBi", *_SHAPE, bias=(1, 0, 1), alibi=True, bars={WITHOUT: (0.93, 0.93)}),
    Row(f"{_NAME} ALiBi causal", *_SHAPE, bias=(1, 0, 1), alibi=True, causal=True, bars={WITHOUT: (0.93, 0.93)}),
    Row(f"{_NAME} tiles", *_SHAPE, mask="tiles", bars={ALL_TRUE: (2.8, 2.8)}),
    _triangle(512, 4, 32),
    _triangle(512, 4, 64),
    _triangle(512, 8, 128),
    _triangle(1024, 4, 64),
    _triangle(1024, 4, 128),
    Row("documents 16x128 bias", *_SHAPE, bias=(1, 1, 1), documents=DOCUMENTS, bars={SAME_AREA: (1 / 1.1, 1 / 1.1)}),
)
# 16k tokens in 16 heads of 128, bias of the scores' shape but for the batch.
LENGTHS = (512, 1023, 1024, 2047, 2048, 4095, 4096, 8192)
TOKENS = 16_384


@dataclass(frozen=True, kw_only=True, eq=False)
class BiasCase(PassCase):
    """Passes and inputs, dense (batch, seqlen, heads, d) or packed (total, heads, d) with offsets.

    ``others`` are the calls that this one's speed is held against, by contender.
    """

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    triangle: bool
    cu_seqlens: Tensor | None
    max_seqlen: int
    others: Mapping[str, "BiasCase"]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Leaves of the case, by the names of their gradients."""
        found = super().leaves
        return found if self.bias is None or not self.bias.requires_grad else found | {"dbias": self.bias}


def suite(device: torch.device, dtype: torch.dtype) -> Suite[BiasCase]:
    """The suite of all rows. Its bars are the least that the package has to reach."""

    def cases() -> Iterator[BiasCase]:
        for row in ROWS:
            for passes in EACH:
                yield _case(row, passes, device, dtype)

    bars = [
        Bar(f"{passes} {row.name}", PACKAGE, against, 1 / least)
        for row in ROWS
        for against, both in row.bars.items()
        for passes, least in zip(EACH, both, strict=True)
        if least is not None
    ]
    return Suite("bias", cases, _contenders(), PACKAGE, bars, rounds=20, seconds=2.0)


def lengths(device: torch.device, dtype: torch.dtype) -> Suite[BiasCase]:
    """The suite of a bias that the batch shares over the lengths, and of a mask. It has no bars."""

    def cases() -> Iterator[BiasCase]:
        for passes in EACH:
            for kind in ("bias", "mask"):
                for length in LENGTHS:
                    batch = max(1, round(TOKENS / length))
                    tensors: dict[str, Any] = {"bias": (0, 1, 1, 1)} if kind == "bias" else {"mask": "random"}
                    row = Row(f"16x128 {length} {kind}", batch, length, 16, 128, **tensors)
                    yield replace(_case(row, passes, device, dtype), panel=f"{passes}, {kind}", length=length)

    return Suite("bias-lengths", cases, _contenders(), PACKAGE, bars=(), rounds=10, seconds=1.0)


def _contenders() -> list[Contender[BiasCase]]:
    return [
        Contender(PACKAGE, run_passes(_package)),
        Contender(PACKAGE_DETERMINISTIC, run_passes(deterministic(_package))),
        *(Contender(name, _other(name), compared=False) for name in (WITHOUT, ALL_TRUE, EVEN, SAME_AREA)),
        Contender(CUDNN, run_passes(_sdpa(CUDNN), without=("dbias",)), omits=frozenset({"dbias"})),
        Contender(EFFICIENT, run_passes(_sdpa(EFFICIENT))),
        Contender(FLEX, run_passes(_flex)),
        Contender(CUEQUIVARIANCE, run_passes(_cuequivariance)),
    ]


def _other(name: str) -> Callable[[BiasCase], Run]:
    def of(case: BiasCase) -> Run:
        if name not in case.others:
            raise NoPart
        return run_passes(_package)(case.others[name])

    return of


def _case(row: Row, passes: Passes, device: torch.device, dtype: torch.dtype) -> BiasCase:
    case = _call(row, passes, device, dtype)
    others = {}
    if WITHOUT in row.bars or row.mask or row.bias:
        others[WITHOUT] = replace(case, mask=None, bias=None)
    if ALL_TRUE in row.bars and case.mask is not None:
        others[ALL_TRUE] = replace(case, mask=torch.ones_like(case.mask))
    if EVEN in row.bars:
        others[EVEN] = _call(replace(row, seqlen=row.seqlen + 1), passes, device, dtype)
    if SAME_AREA in row.bars and row.documents is not None:
        batch = max(1, sum(row.documents) // max(row.documents))
        seqlen = 8 * max(1, round(math.sqrt(_area(row) / batch) / 8))
        dense = replace(row, batch=batch, seqlen=seqlen, documents=None, bias=(1, 1, 1, 1))
        others[SAME_AREA] = _call(dense, passes, device, dtype)
    return replace(case, others=others)


def _area(row: Row) -> int:
    """Pairs of a row, a head, that count."""
    lengths = row.documents or (row.seqlen,) * row.batch
    if row.causal:
        return causal_area(lengths)
    if row.mask == "tiles":
        return row.batch * int(_visible_tiles(row.seqlen).sum())
    return sum(length**2 for length in lengths)


def _visible_tiles(seqlen: int) -> Tensor:
    """(seqlen, seqlen), on the CPU: one tile in four at random, and those on the diagonal, so that no row is empty."""
    num = -(-seqlen // TILE)
    tiles = torch.rand(num, num, generator=torch.Generator().manual_seed(0))
    tiles.fill_diagonal_(0)
    visible = torch.zeros(num * num, dtype=torch.bool)
    visible[tiles.flatten().argsort()[: max(num, num * num // 4)]] = True
    return visible.view(num, num).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:seqlen, :seqlen]


def _call(row: Row, passes: Passes, device: torch.device, dtype: torch.dtype) -> BiasCase:
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=dtype)

    cu, longest = None, row.seqlen
    shape: tuple[int, ...] = (row.batch, row.seqlen)
    scores: tuple[int, ...] = (row.batch, row.nheads, row.seqlen, row.seqlen)
    if row.documents is not None:
        longest = -(-max(row.documents) // 8) * 8  # a bound, so that rows of the bias begin at multiples of 16 bytes
        shape, scores = (sum(row.documents),), (row.nheads, sum(row.documents), longest)
        cu = torch.tensor([0, *accumulate(row.documents)], dtype=torch.int32, device=device)
    q, k, v, dout = (normal(*shape, row.nheads, row.d) for _ in range(4))
    bias, mask = None, None
    if row.bias is not None:
        sizes = [size if keep else 1 for size, keep in zip(scores[-len(row.bias) :], row.bias, strict=True)]
        bias = normal(*sizes)
    if row.alibi:
        slopes = 2.0 ** (-8 * torch.arange(1, row.nheads + 1, device=device) / row.nheads)
        bias = (slopes[:, None] * torch.arange(1 - longest, 1, device=device))[:, None]
    if row.mask == "random":
        mask = torch.rand(1, 1, row.seqlen, row.seqlen, generator=draw, device=device) < 0.9
    elif row.mask == "keys":
        # Nearly all keys: that some are hidden shall not make a call faster.
        mask = torch.rand(row.batch, 1, 1, row.seqlen, generator=draw, device=device) < 0.98
    elif row.mask == "tiles":
        mask = _visible_tiles(row.seqlen).to(device)[None, None]
    reads_and_writes = 4 if passes == "forward" else 7
    traffic = reads_and_writes * q.nbytes + (0 if mask is None else mask.nbytes)
    if bias is not None:
        traffic += bias.nbytes * (1 if passes == "forward" or row.alibi else 2)
        bias.requires_grad_(passes != "forward" and not row.alibi)
    for x in (q, k, v):
        x.requires_grad_(passes != "forward")
    details = (f"{what} {tuple(x.shape)}" for what, x in (("mask", mask), ("bias", bias)) if x is not None)
    return BiasCase(
        name=f"{passes} {row.name}",
        detail=", ".join((f"q, k and v {tuple(q.shape)}", *details)),
        panel=passes,
        device=device,
        dtype=dtype,
        work=Work(attention_flop(_area(row), row.nheads, row.d, row.d, passes), traffic),
        passes=passes,
        q=q,
        k=k,
        v=v,
        dout=dout,
        causal=row.causal,
        triangle=row.triangle,
        cu_seqlens=cu,
        max_seqlen=longest,
        mask=mask,
        bias=bias,
        others={},
    )


def _package(case: BiasCase, *, deterministic: bool = False) -> Forward:
    q, k, v, cu, longest = case.q, case.k, case.v, case.cu_seqlens, case.max_seqlen
    options: dict[str, Any] = {"mask": case.mask, "bias": case.bias, "causal": case.causal, "backend": BACKEND}

    def run() -> Tensor:
        if cu is None:
            out: Tensor = flash_attn_func(q, k, v, deterministic=deterministic, **options)
        else:
            out = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, deterministic=deterministic, **options)
        return out

    return run


def _sdpa(name: str) -> Callable[[BiasCase], Forward]:
    """PyTorch's attention by one of its kernels, which take one tensor: a mask is written into the bias."""

    def of(case: BiasCase) -> Forward:
        if case.cu_seqlens is not None:
            raise Unavailable("it takes dense batches only")
        if case.causal:
            raise Unavailable("it takes no tensor beside causal masks")
        tensor, bias = case.mask, case.bias
        if bias is not None:
            # Both in one tensor, once: the clock does not see it, though who trains with a bias pays for it every time.
            tensor = (bias.detach() if name == CUDNN else bias).to(case.q.dtype)
            tensor = tensor if case.mask is None else tensor.masked_fill(~case.mask, -torch.inf)

        def run() -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
            with sdpa_kernel(KERNELS[name]):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=tensor)
            return out.transpose(1, 2)

        return run

    return of


def _flex(case: BiasCase) -> Forward:
    """FlexAttention: the bias captured, the mask made into one of blocks once."""
    if case.cu_seqlens is not None:
        raise Unavailable("documents are not passed to it here")
    mask, bias, causal = case.mask, case.bias, case.causal
    batch, seqlen = case.q.shape[:2]
    shown = None
    if mask is not None or causal:
        by_entry = mask is not None and mask.shape[0] > 1

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = i >= j if causal else i >= 0
            if mask is not None:
                seen = seen & (mask[b, 0, 0, j] if mask.shape[2] == 1 else mask[0, 0, i, j])
            return seen

        shown = create_block_mask(visible, batch if by_entry else None, None, seqlen, seqlen, device=case.device)

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert bias is not None
        if bias.ndim == 3:
            return score + bias[h, 0, j]
        return score + bias[b if bias.shape[0] > 1 else 0, h, i, j]

    torch.compiler.reset()  # or after eight rows it would be compiled no more
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))

    def run() -> Tensor:
        out: Tensor = compiled(q, k, v, score_mod=None if bias is None else add, block_mask=shown)
        return out.transpose(1, 2)

    return run


def _cuequivariance(case: BiasCase) -> Forward:
    if not case.triangle or case.bias is None or case.mask is None:
        raise NoPart  # it has triangle attention only
    try:
        from cuequivariance_torch import triangle_attention
    except ImportError as reason:
        raise Unavailable(str(reason)) from reason
    bias, mask = case.bias[None], case.mask[None]

    def run() -> Tensor:
        q, k, v = (x.transpose(1, 2)[None] for x in (case.q, case.k, case.v))
        out: Tensor = triangle_attention(q, k, v, bias, mask)
        return out[0].transpose(1, 2)

    return run
