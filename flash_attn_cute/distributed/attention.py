"""One attention over the ranks of a group, planned and differentiated: what the public functions share."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flash_attn_cute import validate
from flash_attn_cute.distributed import heads, model, passes
from flash_attn_cute.distributed.all_gather import AllGather
from flash_attn_cute.distributed.groups import Place, Ranks, connect, weakly
from flash_attn_cute.distributed.layout import Layout
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
        self, context: passes.Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Out and lse of the rank's queries."""
        ...

    def backward(
        self, context: passes.Context, given: passes.Given, k: Tensor, v: Tensor
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
    shape: model.Shape


class Plan(NamedTuple):
    """How a rank attends: by which method, and which rows it trades for heads before and after, if any."""

    method: Method
    rows_q: heads.Rows | None
    rows_k: heads.Rows | None


def plan(question: Question, place: Place, device: torch.device) -> Plan:
    """The plan of this rank, which the sharding of the queries remembers: the next layer finds it made.

    Raises:
        ValueError: heads cannot be dealt over the ranks that are to exchange them, or a seqused does not fit.
    """
    key = (question[1:], place, device)
    known = question.queries.plans.get(key)
    if known is None:
        known = question.queries.plans[key] = _new_plan(question, place, device)
    return known


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
    rows_q = rows_k = None
    size = place.inner_size
    if size > 1:
        refusal = heads.refusal(shape.nheads, shape.nheads_k, size)
        if refusal is not None:
            raise ValueError(f"method: expected one that exchanges no heads ({refusal}), got {question.method!r}")
        rows_q, rows_k = of_both(queries, keys, lambda x: heads.Rows(x, x.merged(size), place.rank, device))
        queries, keys = of_both(queries, keys, lambda x: x.merged(size))
        shape = shape._replace(nheads=shape.nheads // size, nheads_k=max(1, shape.nheads_k // size))
    layout = Layout.of(queries, keys, lengths_q, lengths_k, question.window)
    if method not in KEY_METHODS:
        method = _best(layout, shape, by_heads=False)
    return Plan(KEY_METHODS[method](layout, place.rank // size, device), rows_q, rows_k)


def of_both(queries: Sharding, keys: Sharding, change: Callable[[Sharding], T]) -> tuple[T, T]:
    """What becomes of both, which stay one object if they are."""
    changed = change(queries)
    return changed, changed if keys is queries else change(keys)


def _best(layout: Layout, shape: model.Shape, *, by_heads: bool = True) -> str:
    """The method of "auto"; of one rank, any that moves nothing."""
    if layout.num_ranks == 1:
        return "ring"
    found = model.estimates(layout, shape)
    if not by_heads:
        found.pop("all_to_all", None)
    return model.best(found)


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
    rows_q, rows_k = chosen.rows_q, chosen.rows_k
    if rows_q is None or rows_k is None:
        connect(ranks.outer, q.device)
        return _Attention.apply(q, k, v, sink, chosen.method, passes.Context(options, backend, ranks.outer))
    outer, inner = (None, ranks.outer) if ranks.inner is None else ranks
    assert inner is not None
    connect(outer, q.device)
    q, k, v = heads.split_heads(q, k, v, rows_q, rows_k, inner)
    sink = None if sink is None else heads.own_heads(sink, rows_q)
    out, lse = _Attention.apply(q, k, v, sink, chosen.method, passes.Context(options, backend, outer))
    lse = heads.join_heads(lse.transpose(0, 1), rows_q, inner).transpose(0, 1)
    return heads.join_heads(out, rows_q, inner), lse


class _Attention(torch.autograd.Function):
    """What autograd records."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, method: Method, context: passes.Context
    ) -> Result:
        """Out and lse of all keys."""
        out, lse = method.forward(context, q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.group = (method, context._replace(group=None)), weakly(context.group)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and sink."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        method, context = ctx.call
        context = context._replace(group=ctx.group())
        given = passes.Given(q, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        dq, dk, dv = _gradients(method, context, given, k, v)
        dsink = None if sink is None or not ctx.needs_input_grad[3] else passes.sink_gradient(sink, given)
        return dq, dk, dv, dsink, None, None


def gradients(
    given: passes.Given,
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
    rows_q, rows_k = chosen.rows_q, chosen.rows_k
    if rows_q is None or rows_k is None:
        dsink = None if sink is None else passes.sink_gradient(sink, given)
        return *_gradients(chosen.method, passes.Context(options, backend, ranks.outer), given, k, v), dsink
    outer, inner = (None, ranks.outer) if ranks.inner is None else ranks
    assert inner is not None
    q_part, k_part, v_part = heads.split_heads(given.q, k, v, rows_q, rows_k, inner)
    out, dout = (heads.part_of(x, rows_q, inner) for x in (given.out, given.dout))
    lse = _lse_part(given.lse, rows_q, inner)
    dlse = None if given.dlse is None else _lse_part(given.dlse, rows_q, inner)
    part = passes.Given(q_part, out, lse, dout, dlse)
    grads = _gradients(chosen.method, passes.Context(options, backend, outer), part, k_part, v_part)
    dq, dk, dv = (heads.join_heads(x, rows, inner) for x, rows in zip(grads, (rows_q, rows_k, rows_k), strict=True))
    # Of a head that several ranks had.
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    dsink = None
    if sink is not None:
        dsink = torch.zeros_like(sink)
        heads.own_heads(dsink, rows_q).copy_(passes.sink_gradient(heads.own_heads(sink, rows_q), part))
    return dq, dk, dv, dsink


def _lse_part(lse: Tensor, rows: heads.Rows, group: ProcessGroup) -> Tensor:
    """(all heads, rows of this rank) to (heads of this rank, rows of the group), in memory as backends write it."""
    return heads.part_of(lse.transpose(0, 1)[..., None], rows, group)[..., 0].transpose(0, 1).contiguous()


def _gradients(
    method: Method, context: passes.Context, given: passes.Given, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = method.backward(context, given, k, v)
    return dq.to(given.q.dtype), dk.to(k.dtype), dv.to(v.dtype)
