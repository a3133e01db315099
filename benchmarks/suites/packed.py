"""Training on packed sequences: causal self-attention, forward and backward.

Everyone starts from the same packed leaves q, k, v (total, heads, d) and ends with their gradients. The peers are
what one writes without a packed kernel: a loop over the sequences, and padding to a dense batch.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Bar, Case, Contender, Results, Run, Suite
from benchmarks.work import Work, attention_flop, causal_area
from flash_attn_cute import flash_attn_varlen_func

PACKAGE, LOOP, PADDED = "flash_attn_cute", "sdpa loop", "sdpa padded"


class Shape(NamedTuple):
    """The lengths of a case's sequences, and its heads."""

    name: str
    lengths: tuple[int, ...]
    nheads: int
    nheads_k: int
    d: int


def documents(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Document lengths, log-uniform as in text corpora, the same every time."""
    draw = random.Random(0)
    return tuple(round(math.exp(draw.uniform(math.log(shortest), math.log(longest)))) for _ in range(count))


_DOCUMENTS = documents(16, 64, 1024)
SHAPES = (
    Shape("even", _DOCUMENTS, 8, 8, 64),
    Shape("gqa", _DOCUMENTS, 8, 2, 64),
    Shape("long", (4096,), 8, 8, 64),
    # Few heads: padding computes 32 dense sequences of 4096.
    Shape("skewed", (4096,) + (64,) * 31, 2, 2, 64),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCase(Case):
    """Leaves q, k and v, and the gradient that comes back to out."""

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def differentiate(self, out: Tensor) -> Results:
        """Out, and the gradients of the leaves."""
        dq, dk, dv = torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def suite(device: torch.device, dtype: torch.dtype, shapes: Sequence[Shape] = SHAPES) -> Suite[PackedCase]:
    """The suite. Its bars are set for float32 on a CPU; elsewhere it has none."""
    bars = []
    if device.type == "cpu" and dtype == torch.float32:
        bars = [Bar(shape.name, PACKAGE, LOOP, 1.15) for shape in shapes if shape.nheads == shape.nheads_k]
        bars += [Bar(shape.name, PACKAGE, PADDED, 1 / 3) for shape in shapes if shape.name == "skewed"]
    return Suite(
        name="packed",
        cases=lambda: (_case(shape, device, dtype) for shape in shapes),
        contenders=(Contender(LOOP, _loop), Contender(PACKAGE, _package), Contender(PADDED, _padded)),
        reference=LOOP,
        bars=bars,
        rounds=15,
        seconds=8.0,
    )


def _case(shape: Shape, device: torch.device, dtype: torch.dtype) -> PackedCase:
    lengths, nheads, nheads_k, d = shape.lengths, shape.nheads, shape.nheads_k, shape.d
    total = sum(lengths)
    draw = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(total, heads, d, generator=draw, device=device, dtype=dtype)

    q, k, v = (normal(heads).requires_grad_() for heads in (nheads, nheads_k, nheads_k))
    # Forward reads q, k, v and writes out and lse; backward reads those and dout and writes three gradients.
    traffic = 6 * q.nbytes + 3 * (k.nbytes + v.nbytes) + 2 * 4 * total * nheads
    return PackedCase(
        name=shape.name,
        detail=f"sequences: {len(lengths)} of {min(lengths)}..{max(lengths)}, tokens: {total}, "
        f"heads: {nheads}/{nheads_k}, d: {d}, causal, forward and backward",
        device=device,
        dtype=dtype,
        work=Work(attention_flop(causal_area(lengths), nheads, d, d, "both"), traffic),
        lengths=lengths,
        q=q,
        k=k,
        v=v,
        dout=normal(nheads),
    )


def _package(case: PackedCase) -> Run:
    offsets = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=case.device)
    longest = max(case.lengths)

    def run() -> Results:
        out = flash_attn_varlen_func(case.q, case.k, case.v, offsets, offsets, longest, longest, causal=True)
        return case.differentiate(out)

    return run


def _loop(case: PackedCase) -> Run:
    """One call a sequence. Split and cat, not slices: each slice's gradient would be as large as the batch."""
    gqa = case.q.shape[1] != case.k.shape[1]

    def run() -> Results:
        parts = zip(*(x.split(case.lengths) for x in (case.q, case.k, case.v)), strict=True)
        outs = []
        for part in parts:
            q, k, v = (x.transpose(0, 1)[None] for x in part)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
            outs.append(out[0].transpose(0, 1))
        return case.differentiate(torch.cat(outs))

    return run


def _padded(case: PackedCase) -> Run:
    """One call on a dense batch, the mask made once as for all layers of a model."""
    n, longest, gqa = len(case.lengths), max(case.lengths), case.q.shape[1] != case.k.shape[1]
    position = torch.arange(longest, device=case.device)
    real = position < torch.tensor(case.lengths, device=case.device)[:, None]
    rows = real.flatten().nonzero().squeeze(1)
    mask = (position <= position[:, None]) & real[:, None, None, :]

    def pad(x: Tensor) -> Tensor:
        dense = x.new_zeros(n * longest, *x.shape[1:]).index_copy(0, rows, x)
        return dense.unflatten(0, (n, longest)).transpose(1, 2)

    def run() -> Results:
        q, k, v = (pad(x) for x in (case.q, case.k, case.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        return case.differentiate(out.transpose(1, 2).flatten(0, 1).index_select(0, rows))

    return run
