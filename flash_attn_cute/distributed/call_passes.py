"""Both passes of one packed call on a block of keys, and the merging of their results.

Only this file and ``block_mask_method`` call backends. Their backward pass recomputes P from the lse that it is
given, and scores lose the delta of the out that it is given (FlashAttention, Dao et al., arXiv 2205.14135). With those
of all keys, its gradients are exact whatever part of the keys it sees: their sum over all parts is the gradient. That
is what ring attention (Liu et al., arXiv 2310.01889) rests on.

Out of several calls is merged in float32, and their dQ, dK and dV are summed so. Kernels write such parts in float32,
so that results are rounded once.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn_cute.backends.base import Backend, BackwardCall
from flash_attn_cute.calls import dispatch
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.prepared_call import prepare
from flash_attn_cute.distributed.packed_calls import Call
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options, Results, wide
from flash_attn_cute.sparsity.block_mask import BlockMask


class Context(NamedTuple):
    """Arguments that all packed calls and messages of one attention share. Each packed call has its own window."""

    options: Options
    backend: str | None
    group: ProcessGroup | None = None  # among whose ranks keys move; None: one rank, and no messages
    inner: ProcessGroup | None = None  # whose ranks trade rows for heads, likewise
    block_mask: BlockMask | None = None
    entries: int | None = None  # of a dense batch under a block mask; None: packed documents


class Given(NamedTuple):
    """Input of a backward pass, for the queries of a rank; out and lse are those of all keys."""

    q: Tensor  # (rows, nheads, d)
    out: Tensor  # (rows, nheads, d_v)
    lse: Tensor  # (nheads, rows)
    dout: Tensor
    dlse: Tensor | None


def check_backend(backend: str, options: Options, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    """Raises ValueError for a backend that cannot serve packed calls with such heads, or that there is not.

    That is said before messages are on their way: a rank without rows makes no calls, and would wait for the others.
    """
    heads = tuple(x.shape[-2:] for x in (q, k, v))
    _check_backend(backend, options, heads, q.dtype, q.device, sink is not None, (*dispatch.BACKENDS.values(),))


@functools.lru_cache(maxsize=256)  # every layer asks, and a call that is refused leaves nothing behind
def _check_backend(
    backend: str,
    options: Options,
    heads: tuple[torch.Size, ...],
    dtype: torch.dtype,
    device: torch.device,
    has_sink: bool,
    _backends: tuple[Backend, ...],
) -> None:
    q, k, v = (torch.empty(1, *shape, dtype=dtype, device=device) for shape in heads)
    sink, offsets = q.new_empty(1) if has_sink else None, q.new_empty(2, dtype=torch.int32)  # never read
    inputs = AttentionInputs(q, k, v, offsets, offsets, None, None, sink, None, None, 1, 1)
    dispatch.select(AttentionSpec.of(inputs, options), inputs, backend)


def forward(
    context: Context, call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, is_part: bool
) -> Results:
    """Out (q_stop - q_start, nheads, d_v), lse (nheads, q_stop - q_start) and max_logits of a call, of its keys alone.

    ``sink``: a learnable sink, if all keys are here. ``is_part``: out is not rounded, as it is to be merged with that
    of other keys.
    """
    backend, spec, inputs = prepared(context, call, q, k, v, sink)
    return backend.forward(spec._replace(wide=is_part), inputs)


def backward(
    context: Context, call: Call, given: Given, k: Tensor, v: Tensor, *, is_part: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The call's part of dq, dk and dv, of the rows it is on.

    ``is_part``: they are not rounded, as some of them are to be summed with those of other calls.
    """
    rows = slice(call.q_start, call.q_stop)
    backend, spec, inputs = prepared(context, call, given.q, k, v)
    dlse = None if given.dlse is None else given.dlse[:, rows]
    out, lse, dout = given.out[rows], given.lse[:, rows], given.dout[rows]
    grads = backend.backward(BackwardCall(spec._replace(wide=is_part), inputs, out, lse, dout, dlse))
    return grads.dq, grads.dk, grads.dv


def prepared(
    context: Context, call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None
) -> tuple[Backend, AttentionSpec, AttentionInputs]:
    """A call as backends take it, and the backend that serves it."""
    left, right = call.window
    options = context.options._replace(window_left=left, window_right=right)
    packed = AttentionCall(
        q=q[call.q_start : call.q_stop],
        k=k[call.k_start : call.k_stop],
        v=v[call.k_start : call.k_stop],
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seqused_q=call.seqused_q,
        seqused_k=call.seqused_k,
        learnable_sink=sink,
        bounds=(call.max_seqlen_q, call.max_seqlen_k),
        options=options,
        backend=context.backend,
    )
    inputs, plan = prepare(packed, backward=False)
    return dispatch.BACKENDS[plan.backend], plan.spec, inputs


class Merged:
    """Results for all queries of a rank, from those of parts of their keys, in the order in which they come."""

    def __init__(self, q: Tensor, d_v: int, *, shared: bool, max_logits: bool = False) -> None:
        """For queries like q, none of which is in two calls unless they are shared; with max_logits, or without."""
        self._q, self._d_v, self._shared, self._wants = q, d_v, shared, max_logits
        self._merged: Results | None = None

    def add(self, call: Call, results: Results) -> None:
        """One call's results; out and lse are 0 and -inf in rows that its sequences leave out."""
        if self._merged is None and (call.q_start, call.q_stop) == (0, self._q.shape[0]):
            self._merged = results
            return
        old_out, old_lse, old_max_logits, _ = self._so_far()
        out, lse, max_logits, _ = results
        if old_max_logits is not None and max_logits is not None:
            torch.maximum(old_max_logits, max_logits, out=old_max_logits)
        rows = slice(call.q_start, call.q_stop)
        old_out, old_lse = old_out[rows], old_lse[:, rows]
        if not self._shared:
            old_out += out
            torch.maximum(old_lse, lse, out=old_lse)
            return
        total = torch.logaddexp(old_lse, lse)
        old_out.mul_(_merge_factor(old_lse, total)).addcmul_(out, _merge_factor(lse, total))
        old_lse.copy_(total)

    def result(self, sink: Tensor | None, padding: Iterable[tuple[int, int]]) -> Results:
        """Out, rounded to the inputs' dtype, lse and max_logits; see ``with_sink``."""
        merged = self._so_far()
        out, lse = with_sink(merged.out, merged.lse, sink, padding)
        return Results(out.to(self._q.dtype), lse, merged.max_logits)

    def _so_far(self) -> Results:
        """The results of the calls that there have been; 0 and -inf before the first one."""
        if self._merged is None:
            q, sums = self._q, wide(self._q.dtype)
            out = q.new_zeros((*q.shape[:-1], self._d_v), dtype=sums if self._shared else q.dtype)
            lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=sums)
            self._merged = Results(out, lse, lse.new_full((q.shape[1],), -torch.inf) if self._wants else None)
        return self._merged


def with_sink(
    out: Tensor, lse: Tensor, sink: Tensor | None, padding: Iterable[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Out (rows, nheads, d_v) and lse (nheads, rows) with one more logit (nheads,) in each softmax, if there is a sink.

    ``padding``: ranges (start, stop) of rows that are no queries.
    """
    if sink is None:
        return out, lse
    total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    out = out * _merge_factor(lse, total)
    for start, stop in padding:
        total[:, start:stop] = -torch.inf
    return out, total


def _merge_factor(lse: Tensor, total: Tensor) -> Tensor:
    """(rows, nheads, 1): exp(lse - total), the factor of an out of some keys in the out of all; 0 if lse is -inf."""
    return (lse - total).exp().masked_fill(lse.isneginf(), 0).transpose(0, 1)[..., None]


def sink_gradient(sink: Tensor, given: Given) -> Tensor:
    """The gradient of a learnable sink (nheads,) from the queries of a rank."""
    delta = (given.out.to(given.lse.dtype) * given.dout).masked_fill(given.out == 0, 0).sum(-1).transpose(0, 1)
    if given.dlse is not None:
        delta = delta - given.dlse
    weight = (sink.to(given.lse.dtype)[:, None] - given.lse).exp()
    return -(weight * delta).masked_fill(given.lse.isneginf(), 0).sum(1).to(sink.dtype)
