"""The autograd function of attention over ranks, recorded as a whole."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_attn_cute.distributed import call_passes, rank_agreement
from flash_attn_cute.distributed.call_passes import Context, Given
from flash_attn_cute.distributed.head_trade import Trade
from flash_attn_cute.distributed.process_groups import Ranks, connect, maximum, weakly
from flash_attn_cute.problem.spec import Results


class Method(Protocol):
    """A way to let the queries of a rank attend to keys of other ranks."""

    def forward(self, context: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Results:
        """Results for the rank's queries, max_logits of them alone."""
        ...

    def backward(self, context: Context, given: Given, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the rank's queries, keys and values."""
        ...


class Plan(NamedTuple):
    """The method of a rank, and the trade of rows for heads before and after it, if there is one."""

    method: Method
    trade: Trade | None

    def groups(self, ranks: Ranks) -> Ranks:
        """The groups among which keys move and rows are traded for heads."""
        return Ranks(None, ranks.outer) if self.trade is not None and ranks.inner is None else ranks


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, chosen: Plan, context: Context) -> Results:
    """Out (rows, nheads, d_v) and lse (nheads, rows) of this rank's rows, differentiable; max_logits of all ranks'."""
    connect(context.group, q.device)
    return Results(*_Attention.apply(q, k, v, sink, chosen, context))


class _Attention(torch.autograd.Function):
    """One node for the whole attention, so that gradients of k and v are rounded once, when they are complete."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, chosen: Plan, context: Context
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Out and lse of all keys, and max_logits of all ranks."""
        trade, inner = chosen.trade, context.inner
        if trade is not None:
            q, k, v, sink = trade.split(q, k, v, sink, inner)
        out, lse, max_logits, _ = chosen.method.forward(context, q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = chosen, context._replace(group=None, inner=None)
        ctx.groups = weakly(context.group), weakly(inner)
        if max_logits is not None:
            if trade is not None:
                max_logits = trade.among_all_heads(max_logits, -torch.inf)
            max_logits = maximum(max_logits, (inner, context.group))
            ctx.mark_non_differentiable(max_logits)
        if trade is not None:
            out, lse = trade.join(out, lse, inner)
        return out, lse, max_logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and sink."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        chosen, context = ctx.call
        outer, inner = (group() for group in ctx.groups)
        if chosen.trade is not None:
            _check_is_shared(Ranks(outer, inner), dout, dlse)
            dout = None if dout is None else chosen.trade.part_of(dout, inner)
            dlse = None if dlse is None else chosen.trade.part_of_lse(dlse, inner)
        given = Given(q, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        sink = sink if ctx.needs_input_grad[3] else None
        return *_gradients(chosen, context._replace(group=outer, inner=inner), given, k, v, sink), None, None


def gradients(
    given: Given, k: Tensor, v: Tensor, sink: Tensor | None, chosen: Plan, context: Context
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sink of an ``attend`` that autograd has not recorded.

    Tensors that ranks traded for heads were not saved, so ranks trade once more.
    """
    trade, inner = chosen.trade, context.inner
    if trade is not None:
        _check_is_shared(Ranks(context.group, inner), given.dout, given.dlse)
        q, k, v, sink = trade.split(given.q, k, v, sink, inner)
        out, dout = (trade.part_of(x, inner) for x in (given.out, given.dout))
        lse = trade.part_of_lse(given.lse, inner)
        given = Given(q, out, lse, dout, None if given.dlse is None else trade.part_of_lse(given.dlse, inner))
    return _gradients(chosen, context, given, k, v, sink)


def _check_is_shared(ranks: Ranks, dout: Tensor | None, dlse: Tensor | None) -> None:
    """Compares, if asked, which results have gradients on each rank, as all of them trade each gradient for heads."""

    def stated() -> dict[str, str]:
        names = [name for name, x in (("out", dout), ("lse", dlse)) if x is not None]
        return {"results that have gradients": ", ".join(names) or "none"}

    rank_agreement.check_if_asked(ranks, stated)


def _gradients(
    chosen: Plan, context: Context, given: Given, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sink of this rank's rows; ``given`` is of the rows and heads after the trade."""
    dtype, trade = given.q.dtype, chosen.trade
    dq, dk, dv = chosen.method.backward(context, given, k, v)
    dsink = None if sink is None else call_passes.sink_gradient(sink, given)
    if trade is None:
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsink
    # Zero in heads of other ranks, because users sum the gradients of ranks.
    dsink = None if dsink is None else trade.among_all_heads(dsink, 0.0)
    return *trade.join_gradients(dq, dk, dv, dtype, context.inner), dsink
