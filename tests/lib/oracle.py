"""Naive attention, independent of every backend: the whole score matrix, one sequence at a time.

In float64 it is the truth that results are compared with; at a low precision it is what plain PyTorch makes of
the same computation, whose error is the yardstick. Gradients come from autograd.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

# A tensor, or None: which of both, a test knows.
MaybeTensor: TypeAlias = Any


@dataclass
class Call:
    """One attention call: the tensors, and the keyword arguments of the public functions.

    Of a block mask the oracle knows only ``shown``, the same element by element: (batch or 1, heads, query rows, key
    rows), bool, with 1, nheads_k or nheads heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: MaybeTensor = None
    cu_seqlens_k: MaybeTensor = None
    seqused_q: MaybeTensor = None
    seqused_k: MaybeTensor = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    learnable_sink: MaybeTensor = None
    mask: MaybeTensor = None
    bias: MaybeTensor = None
    block_mask: Any = None  # or a BlockMask
    shown: MaybeTensor = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.q, self.k, self.v

    def to(self, dtype: torch.dtype) -> "Call":
        """Copy of the call, its floating-point tensors as fresh leaves of another dtype."""
        changed = {}
        for name in ("q", "k", "v", "learnable_sink", "bias"):
            x = getattr(self, name)
            if x is not None:
                changed[name] = x.detach().to(dtype).requires_grad_()
        return replace(self, **changed)

    def sequences(self) -> list[tuple[int | None, slice, slice]]:
        """Batch entry (None if packed) and real rows in q and in k, of each sequence."""
        used_q = None if self.seqused_q is None else self.seqused_q.tolist()
        used_k = None if self.seqused_k is None else self.seqused_k.tolist()
        found: list[tuple[int | None, slice, slice]] = []
        if self.cu_seqlens_q is None:
            for b in range(self.q.shape[0]):
                stop_q = self.q.shape[1] if used_q is None else used_q[b]
                stop_k = self.k.shape[1] if used_k is None else used_k[b]
                found.append((b, slice(0, stop_q), slice(0, stop_k)))
            return found
        offsets_q, offsets_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for b in range(len(offsets_q) - 1):
            start_q, stop_q = offsets_q[b : b + 2]
            start_k, stop_k = offsets_k[b : b + 2]
            stop_q = stop_q if used_q is None else start_q + used_q[b]
            stop_k = stop_k if used_k is None else start_k + used_k[b]
            found.append((None, slice(start_q, stop_q), slice(start_k, stop_k)))
        return found

    def real_rows(self) -> tuple[Tensor, Tensor]:
        """Boolean maps over the leading dimensions of q and of k: which rows some sequence owns."""
        packed = self.cu_seqlens_q is not None
        real_q, real_k = (torch.zeros(x.shape[: 1 if packed else 2], dtype=torch.bool) for x in (self.q, self.k))
        for b, rows_q, rows_k in self.sequences():
            (real_q if b is None else real_q[b])[rows_q] = True
            (real_k if b is None else real_k[b])[rows_k] = True
        return real_q, real_k

    def score_padding(self, x: Tensor) -> Tensor:
        """A boolean map of a mask or bias: its entries that stand for no real query and key of any sequence."""
        packed = self.cu_seqlens_q is not None
        longest = max((rows.stop - rows.start for _, _, rows in self.sequences()), default=0)
        if packed:
            real = torch.zeros(1, self.q.shape[0], x.shape[-1] if x.ndim and x.shape[-1] > 1 else longest)
        else:
            real = torch.zeros(self.q.shape[0], 1, self.q.shape[1], self.k.shape[1])
        for b, rows_q, rows_k in self.sequences():
            real[0 if b is None else b, ..., rows_q, : rows_k.stop - rows_k.start] = 1
        shape = (1,) * (real.ndim - x.ndim) + x.shape
        for dim, size in enumerate(shape):
            if size == 1 != real.shape[dim]:
                real = real.sum(dim, keepdim=True)
        return (real == 0).expand(shape).reshape(x.shape)

    def fully_masked_rows(self) -> Tensor:
        """A boolean map over the leading dimensions of q: real queries that the window lets see no key."""
        fully_masked = torch.zeros(self.q.shape[: 1 if self.cu_seqlens_q is not None else 2], dtype=torch.bool)
        for b, rows_q, rows_k in self.sequences():
            visible = window(self, rows_q.stop - rows_q.start, rows_k.stop - rows_k.start)
            (fully_masked if b is None else fully_masked[b])[rows_q] = ~visible.any(1)
        return fully_masked


def window(call: Call, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(seqlen_q, seqlen_k), bool: which keys the window of a call shows to which query of a sequence."""
    # Query and key positions on one axis, the last query beside the last key.
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    left, right = call.window_size
    if left is not None and left >= 0:
        visible &= j >= i - left
    if right is not None and right >= 0:
        visible &= j <= i + right
    if call.causal:
        visible &= j <= i
    return visible


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Out and lse, every operation in the dtype of ``call.q``, zero and -inf in the padding."""
    packed = call.cu_seqlens_q is not None
    nheads, d_v = call.q.shape[-2], call.v.shape[-1]
    outs, lses, places = [], [], []
    for b, rows_q, q, k, v, mask, bias in _sequences(call):
        out, lse = _one_sequence(call, q, k, v, mask, bias)
        outs.append(out)
        lses.append(lse)
        places.append((b, rows_q))
    out = call.q.new_zeros(*call.q.shape[:-1], d_v)
    lse_shape = (nheads, call.q.shape[0]) if packed else (call.q.shape[0], nheads, call.q.shape[1])
    lse = call.q.new_full(lse_shape, -torch.inf)
    for (b, rows), one_out, one_lse in zip(places, outs, lses, strict=True):
        one_out = rearrange(one_out, "heads rows d_v -> rows heads d_v")
        if b is None:
            out[rows], lse[:, rows] = one_out, one_lse
        else:
            out[b, rows], lse[b, :, rows] = one_out, one_lse
    return out, lse


def max_logits(call: Call) -> Tensor:
    """The largest scaled product of each head over all visible pairs, (nheads,); -inf if there are none."""
    found = [call.q.new_full((call.q.shape[-2], 1), -torch.inf)]
    for _, _, q, k, _, mask, _ in _sequences(call):
        scores, visible = _products(call, q, k, mask)
        found.append(torch.where(visible, scores, torch.full_like(scores, -torch.inf)).flatten(1))
    return torch.cat(found, 1).amax(1)


def _sequences(call: Call) -> Iterator[tuple[int | None, slice, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Each sequence: its batch entry and query rows; q, k and v (heads, rows, d); mask and bias of its scores."""
    nheads = call.q.shape[-2]
    for b, rows_q, rows_k in call.sequences():
        q, k, v = (
            rearrange((x if b is None else x[b])[rows], "rows heads d -> heads rows d")
            for x, rows in ((call.q, rows_q), (call.k, rows_k), (call.v, rows_k))
        )
        entries: list[Tensor | None] = []
        for x in (call.mask, call.bias):
            if x is None:
                entries.append(None)
                continue
            if b is None:
                shape = (nheads, call.q.shape[0], x.shape[-1] if x.ndim and x.shape[-1] > 1 else k.shape[1])
                full = x.expand(shape)
            else:
                full = x.expand(call.q.shape[0], nheads, call.q.shape[1], call.k.shape[1])[b]
            entries.append(full[:, rows_q, : k.shape[1]])
        mask, bias = entries
        if call.shown is not None:
            shown = call.shown[b if b is not None and call.shown.shape[0] > 1 else 0, :, rows_q, rows_k]
            shown = repeat(shown, "h queries keys -> (h group) queries keys", group=nheads // shown.shape[0])
            mask = shown if mask is None else mask & shown
        yield b, rows_q, q, k, v, mask, bias


def _products(call: Call, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scaled products of one sequence, and which pairs window and mask show, (nheads, seqlen_q, seqlen_k)."""
    k = repeat(k, "heads_k rows d -> (heads_k group) rows d", group=q.shape[0] // k.shape[0])
    scale = call.softmax_scale if call.softmax_scale is not None else q.shape[-1] ** -0.5
    scores = scale * einsum(q, k, "heads queries d, heads keys d -> heads queries keys")
    visible = window(call, q.shape[1], k.shape[1]).to(q.device).expand(scores.shape)
    return scores, visible if mask is None else visible & mask


def _one_sequence(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: q (nheads, seqlen_q, d), k and v (nheads_k, seqlen_k, d or d_v)."""
    v = repeat(v, "heads_k rows d -> (heads_k group) rows d", group=q.shape[0] // k.shape[0])
    seqlen_q = q.shape[1]
    scores, visible = _products(call, q, k, mask)
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        scores = scores + torch.where(visible, bias, torch.zeros_like(bias))
        visible = visible & ~scores.detach().isneginf()
    scores = torch.where(visible, scores, torch.zeros_like(scores))
    peak = torch.where(visible, scores, torch.full_like(scores, -torch.inf)).detach()
    sink = None
    if call.learnable_sink is not None:
        sink = rearrange(call.learnable_sink.to(scores.dtype), "heads -> heads 1 1")
        peak = torch.cat([peak, sink.detach().expand(-1, seqlen_q, 1)], -1)
    if peak.shape[-1]:
        peak = peak.amax(-1, keepdim=True)
        peak = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    else:
        peak = peak.new_zeros(*peak.shape[:-1], 1)
    weights = torch.where(visible, (scores - peak).exp(), torch.zeros_like(scores))
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - peak).exp()
    seen = total > 0
    safe = torch.where(seen, total, torch.ones_like(total))
    lse = torch.where(seen, peak + safe.log(), torch.full_like(total, -torch.inf))
    out = einsum(weights / safe, v, "heads queries keys, heads keys d_v -> heads queries d_v")
    return out, rearrange(lse, "heads queries 1 -> heads queries")


def probabilities(call: Call) -> Tensor:
    """(..., nheads, queries, keys): what attention returns of values that are rows of the identity."""
    zeroed = [x.cpu().double().nan_to_num() for x in (call.q, call.k)]
    size = call.k.shape[-3]
    v = torch.eye(size, dtype=torch.float64)[:, None].expand(*call.k.shape[:-1], size)
    offsets: dict[str, Any] = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        x = getattr(call, name)
        offsets[name] = None if x is None else x.cpu()
    out, _ = attention(replace(call, q=zeroed[0], k=zeroed[1], v=v, **offsets))
    return out.detach().transpose(-2, -3)
