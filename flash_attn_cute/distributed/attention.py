"""One attention over the ranks of a group, planned and differentiated: what the public functions share."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flash_attn_cute.calls import validate
from flash_attn_cute.distributed import call_passes, cost_model, head_trade
from flash_attn_cute.distributed.all_gather import AllGather
from flash_attn_cute.distributed.process_groups import Place, Ranks, connect, weakly
from flash_attn_cute.distributed.rank_layout import Layout
from flash_attn_cute.distributed.ring import Ring
from flash_attn_cute.distributed.sharding import Sharding, real_lengths
from flash_attn_cute.spec import Options

T = TypeVar("T")

# The methods by which queries come to see keys of other ranks; "all_to_all" leaves a single rank, and none to see.
KEY_METHODS: dict[str, type[AllGather | Ring]] = {"all_gather": AllGather, "ring": Ring}
METHODS = ("auto", *KEY_METHODS, "all_to_all")


class Method(Protocol):
    """A way in which queries of a rank come to see keys of others."""

    def forward(
        self, context: call_passes.Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Out and lse of the rank's queries."""
        ...

    def backward(
        self, context: call_passes.Context, given: call_passes.Given, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the rank's queries, keys and values."""
        ...


class Question(NamedTuple):
    """What a plan depends on beside the rank that asks; the same on all of them."""

    queries: Sharding
    keys: Sharding | None  # None: those of queries
    batch: int
    seqused_q: tuple[int, ...] | None
    seqused_k: tuple[int, ...] | None
    window: validate.Window
    method: str
    shape: cost_model.Shape


class Plan(NamedTuple):
    """How a rank attends: by which method, and what it trades for heads before and after, if anything."""

    method: Method
    trade: head_trade.Trade | None

    def groups(self, ranks: Ranks) -> Ranks:
        """Among whom keys are moved, and who trades rows for heads."""
        return Ranks(None, ranks.outer) if self.trade is not None and ranks.inner is None else ranks


def plan(question: Question, place: Place, device: torch.device) -> Plan:
    """The plan of this rank, which the sharding of the queries remembers: the next layer finds it made.

    Raises:
        ValueError: heads cannot be dealt over the ranks that are to exchange them, or a seqused does not fit.
    """
    make = partial(_new_plan, question, place, device)
    return question.queries.plan((question[1:], place, device), device, make)


def _new_plan(question: Question, place: Place, device: torch.device) -> Plan:
    queries, keys = question.queries, question.queries if question.keys is None else question.keys
    if question.batch != 1:
        queries, keys = of_both(queries, keys, lambda x: x.batched(question.batch))
    lengths_q = real_lengths("seqused_q", question.seqused_q, queries.cu_seqlens)
    lengths_k = real_lengths("seqused_k", question.seqused_k, keys.cu_seqlens)
    method, shape = question.method, question.shape
    if method == "auto" and place.inner_size == 1:
        layout = Layout.of(queries, keys, lengths_q, lengths_k, question.window)
        method = _best(layout, shape)
        if method == "all_to_all":
            place = Place(place.rank, 1, place.size)
    trade, size = None, place.inner_size
    if size > 1:
        refusal = head_trade.refusal(shape.nheads, shape.nheads_k, size)
        if refusal is not None:
            raise ValueError(f"method: expected one that exchanges no heads ({refusal}), got {question.method!r}")
        rows = of_both(queries, keys, lambda x: head_trade.Rows(x, x.merged(size), place.rank, device))
        trade = head_trade.Trade.of(*rows, shape.nheads_k)
        queries, keys = of_both(queries, keys, lambda x: x.merged(size))
        shape = shape._replace(nheads=shape.nheads // size, nheads_k=max(1, shape.nheads_k // size))
    layout = Layout.of(queries, keys, lengths_q, lengths_k, question.window)
    if method not in KEY_METHODS:
        method = _best(layout, shape, by_heads=False)
    shares_heads = trade is not None and trade.ranks_a_head > 1
    return Plan(KEY_METHODS[method](layout, place.rank // size, device, shares_heads=shares_heads), trade)


def of_both(queries: Sharding, keys: Sharding, change: Callable[[Sharding], T]) -> tuple[T, T]:
    """What becomes of both, which stay one object if they are."""
    changed = change(queries)
    return changed, changed if keys is queries else change(keys)


def _best(layout: Layout, shape: cost_model.Shape, *, by_heads: bool = True) -> str:
    """The method of "auto"; of one rank, any that moves nothing."""
    if layout.num_ranks == 1:
        return "ring"
    found = cost_model.estimates(layout, shape)
    if not by_heads:
        found.pop("all_to_all", None)
    return cost_model.best(found)


Result: TypeAlias = tuple[Tensor, Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    chosen: Plan,
    ranks: Ranks,
    options: Options,
    backend: str | None,
) -> Result:
    """Out (rows, nheads, d_v) and lse (nheads, rows) of this rank's rows, differentiable."""
    outer, inner = chosen.groups(ranks)
    connect(outer, q.device)
    return _Attention.apply(q, k, v, sink, chosen, call_passes.Context(options, backend, outer), inner)


class _Attention(torch.autograd.Function):
    """What autograd records: all of it, so that gradients of k and v are rounded at the end, when they are complete."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        chosen: Plan,
        context: call_passes.Context,
        inner: ProcessGroup | None,
    ) -> Result:
        """Out and lse of all keys."""
        trade = chosen.trade
        if trade is not None:
            q, k, v, sink = trade.split(q, k, v, sink, inner)
        out, lse = chosen.method.forward(context, q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = chosen, context._replace(group=None)
        ctx.groups = weakly(context.group), weakly(inner)
        return (out, lse) if trade is None else trade.join(out, lse, inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and sink."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        chosen, context = ctx.call
        outer, inner = (group() for group in ctx.groups)
        if chosen.trade is not None:
            dout = None if dout is None else chosen.trade.part_of(dout, inner)
            dlse = None if dlse is None else chosen.trade.part_of_lse(dlse, inner)
        given = call_passes.Given(q, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        sink = sink if ctx.needs_input_grad[3] else None
        return *_gradients(chosen, context._replace(group=outer), inner, given, k, v, sink), None, None, None


def gradients(
    given: call_passes.Given,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    chosen: Plan,
    ranks: Ranks,
    options: Options,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Those of q, k, v and the sink of an attention that autograd has not recorded, from what ``attend`` got and gave.

    What ranks traded for heads was not kept: they trade it once more.
    """
    outer, inner = chosen.groups(ranks)
    trade = chosen.trade
    if trade is not None:
        q, k, v, sink = trade.split(given.q, k, v, sink, inner)
        out, dout = (trade.part_of(x, inner) for x in (given.out, given.dout))
        lse = trade.part_of_lse(given.lse, inner)
        given = call_passes.Given(
            q, out, lse, dout, None if given.dlse is None else trade.part_of_lse(given.dlse, inner)
        )
    return _gradients(chosen, call_passes.Context(options, backend, outer), inner, given, k, v, sink)


def _gradients(
    chosen: Plan,
    context: call_passes.Context,
    inner: ProcessGroup | None,
    given: call_passes.Given,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Those of q, k, v and the sink of this rank's rows, from all that its heads got and gave."""
    dtype, trade = given.q.dtype, chosen.trade
    dq, dk, dv = chosen.method.backward(context, given, k, v)
    dsink = None if sink is None else call_passes.sink_gradient(sink, given)
    if trade is None:
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsink
    dsink = None if dsink is None else trade.join_sink_gradient(dsink)
    return *trade.join_gradients(dq, dk, dv, dtype, inner), dsink
