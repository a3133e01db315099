"""One call over ranks: eagerly, or as one operator of a compiled program, which hides messages, plans and kernels.

Operators take tensors and numbers. A sharding crosses as its handle, a group as the names of its dimensions, and host
lengths as tensors on the CPU, so that a program that has been compiled once serves every batch of its kind.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.calls import flat_call
from flash_attn_cute.distributed import autograd, method_plan, rank_agreement
from flash_attn_cute.distributed.call_passes import Context, Given, check_backend
from flash_attn_cute.distributed.checked_call import Lengths, PlanRequest, RankCall, check_is_sharding, plan_request
from flash_attn_cute.distributed.process_groups import Ranks, named
from flash_attn_cute.distributed.sharding import of_handle
from flash_attn_cute.problem.spec import Options, Results, wide

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, Tensor sharding, Tensor? sharding_k, "
    "Tensor? seqused_q, Tensor? seqused_k"
)
_OTHERS = "str[] groups, str method, bool dense, " + flat_call.OPTIONS.format(backend="str? backend")
_NUM_TENSORS = 8
_NUM_CALL = _NUM_TENSORS + 3  # then come the options, and two tensors at the end of them
_SINK = 3

torch.library.define(
    "flash_attn_cute::context_parallel", f"({_TENSORS}, {_OTHERS}) -> (Tensor out, Tensor lse, Tensor max_logits)"
)
torch.library.define(
    "flash_attn_cute::context_parallel_backward",
    f"(Tensor out, Tensor lse, Tensor dout, Tensor? dlse, {_TENSORS}, {_OTHERS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
)


def attend_eagerly(call: RankCall, checked: Callable[[], Options], backend: str | None) -> Results:
    """Results of this rank's rows, max_logits of all ranks'; out and lse are differentiable.

    ``checked`` gives the options, or raises what is wrong with the rest of the arguments. Raises TypeError and
    ValueError for wrong arguments; if ranks are to be compared, for those of any rank, and where they disagree.
    """
    ranks = call.ranks

    def planned() -> tuple[Options, PlanRequest, autograd.Plan]:
        options = checked()
        request = plan_request(call, options, ranks.place)
        if backend is not None:
            check_backend(backend, options, call.q, call.k, call.v, call.sink)
        return options, request, method_plan.plan(request, ranks.place, call.q.device)

    def stated(found: tuple[Options, PlanRequest, autograd.Plan]) -> dict[str, str]:
        options, request, _ = found
        return rank_agreement.statement_of(call, request, options, backend)

    # Methods see other grids of the ranks, which compare themselves over the same one.
    options, _, plan = rank_agreement.on_all_ranks(Ranks.over(call.groups), planned, stated)
    entries = call.q.shape[0] if call.dense and call.block_mask is not None else None
    context = Context(options, backend, *plan.groups(ranks), call.block_mask, entries)
    results = autograd.attend(*call.packed, call.sink, plan, context)
    if not call.dense:
        return results
    out, lse, max_logits, _ = results
    rows = call.q.shape[:2]
    return Results(out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1).contiguous(), max_logits)


def _gradients(
    call: RankCall, options: Options, backend: str | None, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sink, of a call that autograd has not recorded."""
    ranks = call.ranks
    plan = method_plan.plan(plan_request(call, options, ranks.place), ranks.place, call.q.device)
    q, k, v = call.packed
    if call.dense:
        out, dout = out.flatten(0, 1), dout.flatten(0, 1)
        lse = lse.transpose(0, 1).flatten(1)
        dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
    given = Given(q, out, lse, dout, dlse)
    context = Context(options, backend, *plan.groups(ranks))
    dq, dk, dv, dsink = autograd.gradients(given, k, v, call.sink, plan, context)
    return dq.view(call.q.shape), dk.view(call.k.shape), dv.view(call.v.shape), dsink


def attend_compiled(
    arguments: tuple[Any, ...], names: list[str], method: str, dense: bool, options: Options, backend: str | None
) -> Results:
    """``attend_eagerly``, by the operator, of a ``RankCall``'s fields up to its lengths and the names of its groups."""
    *tensors, sharding, sharding_k, seqused_q, seqused_k = arguments
    out, lse, max_logits = torch.ops.flash_attn_cute.context_parallel(
        *tensors,
        _handle("sharding", sharding),
        None if sharding_k is None else _handle("sharding_k", sharding_k),
        _as_tensor(seqused_q),
        _as_tensor(seqused_k),
        names,
        method,
        dense,
        *flat_call.flat_options(options, backend),
    )
    return Results(out, lse, max_logits if options.max_logits else None)


def _handle(name: str, sharding: Any) -> Tensor:
    check_is_sharding(name, sharding)
    return sharding.handle


def _as_tensor(lengths: Lengths) -> Tensor | None:
    return lengths if lengths is None or isinstance(lengths, Tensor) else torch.tensor(lengths, device="cpu")


def _unpack(flat: tuple[Any, ...]) -> tuple[RankCall, Options, str | None]:
    q, k, v, sink, handle, handle_k, used_q, used_k, names, method, dense = flat[:_NUM_CALL]
    shardings = of_handle(handle), None if handle_k is None else of_handle(handle_k)
    call = RankCall(q, k, v, sink, *shardings, used_q, used_k, named(names), method, dense)
    return call, *flat_call.options_of(flat[_NUM_CALL:])


@torch.library.impl("flash_attn_cute::context_parallel", "default")
@torch.no_grad()
def _forward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, options, backend = _unpack(flat)
    out, lse, max_logits, _ = attend_eagerly(call, lambda: options, backend)
    return out.contiguous(), lse.contiguous(), lse.new_empty(0) if max_logits is None else max_logits


@torch.library.register_fake("flash_attn_cute::context_parallel")
def _fake_forward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, v = flat[0], flat[2]
    *batch, rows, heads, _ = q.shape
    lse = q.new_empty(*batch, heads, rows, dtype=wide(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, lse.new_empty(heads if flat_call.asks_max_logits(flat) else 0)


@torch.library.impl("flash_attn_cute::context_parallel_backward", "default")
@torch.no_grad()
def _backward(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    *grads, dsink = _gradients(*_unpack(flat), out, lse, dout, dlse)
    return *(x.contiguous() for x in grads), lse.new_empty(0) if dsink is None else dsink


@torch.library.register_fake("flash_attn_cute::context_parallel_backward")
def _fake_backward(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    q, k, v, sink = flat[: _SINK + 1]
    return *(x.new_empty(x.shape) for x in (q, k, v)), lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, max_logits = output
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *inputs[-2:], out, lse)
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)
    ctx.others = inputs[_NUM_TENSORS:-2]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *tensors, any_scale, any_softcap, out, lse = ctx.saved_tensors
    flat = *tensors, *ctx.others, any_scale, any_softcap
    dout = torch.zeros_like(out) if dout is None else dout
    *grads, dsink = torch.ops.flash_attn_cute.context_parallel_backward(out, lse, dout, dlse, *flat)
    grads.append(dsink if ctx.needs_input_grad[_SINK] else None)
    return *grads, *[None] * (len(flat) - len(grads))


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError("flash_attn_cute: second derivatives of attention are not implemented")


torch.library.register_autograd("flash_attn_cute::context_parallel", _differentiate, setup_context=_save_for_backward)
torch.library.register_autograd("flash_attn_cute::context_parallel_backward", _refuse)
