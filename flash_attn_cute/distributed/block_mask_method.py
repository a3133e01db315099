"""Attention with a block mask over ranks: each has all rows of its part of the heads, and makes one call of them.

A block mask is a rule about all rows in their order. So ranks trade rows for heads (``heads``), whatever rows each of
them had, and nothing has to be known of the mask here.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Backend
from flash_attn_cute.calls import dispatch, lowering, prepared_call
from flash_attn_cute.distributed import attention, call_passes, head_trade
from flash_attn_cute.distributed.attention import Question, of_both
from flash_attn_cute.distributed.process_groups import Place
from flash_attn_cute.distributed.sharding import Sharding, real_lengths
from flash_attn_cute.sparsity.block_mask import BlockMask
from flash_attn_cute.spec import AttentionInputs, AttentionSpec


def plan(question: Question, place: Place, device: torch.device) -> "Whole":
    """This rank's part, which the sharding of the queries remembers: the next layer finds it made.

    Raises:
        ValueError: a method or ranks that cannot serve it, or a seqused that does not fit.
    """
    make = partial(_new_plan, question, place, device)
    return question.queries.plan(("block_mask", question[1:], place, device), device, make)


def _new_plan(question: Question, place: Place, device: torch.device) -> "Whole":
    if question.method not in ("auto", "all_to_all"):
        raise ValueError(
            f"method: expected 'auto' or 'all_to_all' with a block_mask, as ranks trade rows for heads, "
            f"got {question.method!r}"
        )
    if place.outer_size > 1:
        raise ValueError(
            f"group: expected one dimension with a block_mask, along which ranks trade rows for heads, "
            f"got {place.outer_size} x {place.inner_size} ranks"
        )
    refusal = head_trade.refusal(question.shape.nheads, question.shape.nheads_k, place.size)
    if refusal is not None:
        raise ValueError(f"block_mask: expected None where ranks cannot trade rows for heads ({refusal})")
    queries, keys = question.queries, question.queries if question.keys is None else question.keys
    rows_q, rows_k = of_both(queries, keys, lambda x: Rows.of(x, device))
    if question.batch != 1:
        queries, keys = of_both(queries, keys, lambda x: x.batched(question.batch))
    used_q, used_k = (
        None if used is None else _int32(real_lengths(name, used, sharding.cu_seqlens), device)
        for name, used, sharding in (
            ("seqused_q", question.seqused_q, queries),
            ("seqused_k", question.seqused_k, keys),
        )
    )
    traded = of_both(queries, keys, lambda x: head_trade.Rows(x, _in_order(x), place.rank, device))
    return Whole(rows_q, rows_k, used_q, used_k, head_trade.Trade.of(*traded, question.shape.nheads_k))


def _in_order(sharding: Sharding) -> Sharding:
    """The same rows on one rank, in their order."""
    return Sharding.contiguous(sharding.cu_seqlens, 1, total=sharding.total)


class Rows(NamedTuple):
    """All rows of queries or of keys, as the plain functions want to be told of them."""

    cu_seqlens: Tensor  # of packed documents
    longest: int  # rows of a document; of a dense batch, rows of each entry

    @classmethod
    def of(cls, sharding: Sharding, device: torch.device) -> "Rows":
        """Those of a sharding; of a dense batch, of an entry.

        Raises:
            ValueError: there are rows before the first document.
        """
        cu_seqlens = sharding.cu_seqlens
        if cu_seqlens[0] != 0:
            raise ValueError(
                f"block_mask: expected None where rows before the first document are padding, as block masks count "
                f"rows; got cu_seqlens from {cu_seqlens[0]} on"
            )
        lengths = (stop - start for start, stop in itertools.pairwise(cu_seqlens))
        return cls(_int32(cu_seqlens, device), max(lengths, default=0))


class Whole(NamedTuple):
    """A rank's part in attention over all rows, worked out once for all layers."""

    queries: Rows
    keys: Rows
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    trade: head_trade.Trade

    def under(self, mask: BlockMask, entries: int | None) -> attention.Plan:
        """Attention under a mask over all rows: of ``entries`` of a dense batch, or, None, of packed documents."""
        return attention.Plan(_Masked(self, mask, entries), self.trade)


class _Masked(NamedTuple):
    """A call of some heads and all rows: an ``attention.Method`` whose keys are all at hand."""

    whole: Whole
    mask: BlockMask
    entries: int | None

    def forward(
        self, context: call_passes.Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Out (rows, heads, d_v) and lse (heads, rows).

        Raises:
            ValueError: a mask that does not fit the rows, or what backends refuse.
        """
        backend, spec, inputs = self._prepared(context, q, k, v, sink, backward=False)
        out, lse = backend.forward(spec, inputs)
        return (out, lse) if inputs.packed else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))

    def backward(
        self, context: call_passes.Context, given: call_passes.Given, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; not rounded if ranks share heads of k and v, and so have parts of theirs."""
        backend, spec, inputs = self._prepared(context, given.q, k, v, None, backward=True)
        out, lse, dout, dlse = given.out, given.lse, given.dout, given.dlse
        if not inputs.packed:
            out, dout = (x.unflatten(0, inputs.q.shape[:2]) for x in (out, dout))
            lse, dlse = _by_entry(lse, inputs), None if dlse is None else _by_entry(dlse, inputs)
        spec = spec._replace(wide=self.whole.trade.ranks_a_head > 1)
        grads = backend.backward(spec, inputs, out, lse, dout, dlse, need_dbias=False, need_dsink=False)
        dq, dk, dv = (x if inputs.packed else x.flatten(0, 1) for x in (grads.dq, grads.dk, grads.dv))
        return dq, dk, dv

    def _prepared(
        self, context: call_passes.Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *, backward: bool
    ) -> tuple[Backend, AttentionSpec, AttentionInputs]:
        """As ``call_passes.prepared`` for calls without a mask."""
        queries, keys, *used, _ = self.whole
        offsets: tuple[Tensor | None, ...] = (None, None)
        bounds: prepared_call.Bounds = ()
        if self.entries is None:
            offsets, bounds = (queries.cu_seqlens, keys.cu_seqlens), (queries.longest, keys.longest)
        else:
            q, k, v = (x.unflatten(0, (self.entries, -1)) for x in (q, k, v))
        tensors: prepared_call.Tensors = (q, k, v, *offsets, *used, sink, None, None)
        mask: BlockMask | None = self.mask
        options = context.options
        lowered = lowering.of(tensors, bounds, mask, options)
        if lowered is not None:
            tensors, bounds, options, _ = lowered
            mask = None
        chosen, _, tables = prepared_call.with_tables(
            tensors, bounds, mask, options, context.backend, backward=backward
        )
        inputs = AttentionInputs(*(*tensors, *chosen.max_seqlens, tables))
        return dispatch.BACKENDS[chosen.backend], chosen.spec, inputs


def _by_entry(x: Tensor, inputs: AttentionInputs) -> Tensor:
    """Lse or its gradient (heads, rows) as (batch, heads, seqlen), in memory as backends write it."""
    return x.unflatten(1, inputs.q.shape[:2]).transpose(0, 1).contiguous()


def _int32(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
