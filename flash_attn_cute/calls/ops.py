"""The way from a valid call to a backend: custom operators, or the same code without them.

``flash_attn_cute::forward``, ``flash_attn_cute::backward`` and ``flash_attn_cute::column_sums`` are opaque to
torch.compile, which sees only the fakes. A call crosses them flat (``flat_call``).

An operator takes the host longer than many a kernel takes the device. Where no mode, transform or compiler is there to
see it, as in all plain eager code, the backend is called directly, and ``FlashAttention`` is what autograd records.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _any_requires_grad
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.calls import dispatch, flat_call, flops
from flash_attn_cute.calls.attention_call import NUM_TENSORS
from flash_attn_cute.calls.flat_call import BIAS, NUM_ALL_TENSORS, NUM_ANY, NUM_RESULTS, NUMBERS, SINK, TENSORS
from flash_attn_cute.calls.prepared_call import Plan
from flash_attn_cute.calls.torch_modes import (
    have_strides,
    is_below_autograd,
    is_thread_watched,
    is_transformed,
    looks_like,
    needs_dispatcher,
    without_default_device,
)
from flash_attn_cute.problem.lengths import read_sequences
from flash_attn_cute.problem.spec import AttentionInputs, Results, residual_columns
from flash_attn_cute.runtime import nvtx, settings

_NO_TANGENTS = "flash_attn_cute: forward-mode derivatives of attention are not implemented"
_NO_SECOND = "flash_attn_cute: second derivatives of attention are not implemented"

# Of max_logits and residuals that are not asked for there are none.
torch.library.define(
    "flash_attn_cute::forward",
    f"({TENSORS}, {NUMBERS}) -> (Tensor out, Tensor lse, Tensor max_logits, Tensor residual)",
)
torch.library.define(
    "flash_attn_cute::backward",
    # What is needed are ints for DTensor's sake, which compares calls by what comes from the first int on.
    f"(Tensor out, Tensor lse, Tensor dout, Tensor? dlse, Tensor? residual, int need_dbias, int need_dsink, "
    f"{TENSORS}, {NUMBERS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
)
# Without a gradient.
torch.library.define("flash_attn_cute::column_sums", f"(Tensor lse, {TENSORS}, {NUMBERS}) -> Tensor sums")


def attention(inputs: AttentionInputs, plan: Plan, watched: bool) -> Results:
    """Results of one valid call by the backend of its plan; out and lse are differentiable, and tangents refused."""
    leaves = (inputs.q, inputs.k, inputs.v, inputs.learnable_sink, inputs.bias)
    # Not all that follows would refuse tangents; some would take them for zero. Most calls are spared a function.
    if forward_ad._current_level >= 0 and _have_tangents(*leaves):
        raise NotImplementedError(_NO_TANGENTS)
    if watched:
        _register_flop_formulas()
        run = _TransformedForward.apply if is_transformed() else torch.ops.flash_attn_cute.forward
        out, lse, max_logits, _ = run(*flat_call.flatten(_shard(inputs), plan))
        return Results(out, lse, max_logits if plan.options.max_logits else None)
    if torch.is_grad_enabled() and _any_requires_grad(*leaves) and not is_below_autograd():
        return Results(*_record(*leaves, (inputs, plan)))
    if plan.spec.precise_gradients:  # of which there will be none
        plan = plan._replace(spec=plan.spec._replace(precise_gradients=False), passes=None)
    return _run_forward(inputs, plan)


def column_sums(inputs: AttentionInputs, plan: Plan, lse: Tensor, watched: bool) -> Tensor:
    """``Backend.column_sums`` of one valid call, by a backend that has it; tangents are refused."""
    if forward_ad._current_level >= 0 and _have_tangents(inputs.q, inputs.k, lse):
        raise NotImplementedError(_NO_TANGENTS)
    if not watched:
        return _run_column_sums(inputs, plan, lse)
    _register_flop_formulas()
    sums: Tensor = torch.ops.flash_attn_cute.column_sums(lse, *flat_call.flatten(_shard(inputs), plan))
    return sums


def _have_tangents(*tensors: Tensor | None) -> bool:
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _run_forward(inputs: AttentionInputs, plan: Plan) -> Results:
    spec, backend = plan.spec, dispatch.BACKENDS[plan.backend]
    if (spec.packed or spec.has_seqused) and settings.check_data():
        read_sequences(inputs)
    if settings.nvtx():
        with nvtx.span(f"forward {backend.name} {spec.describe(inputs)}"):
            return backend.forward(spec, inputs)
    with without_default_device():
        passes = plan.passes
        if passes is None or inputs.block_mask is not None or inputs.selected is not None:
            return backend.forward(spec, inputs)
        if passes.forward is None:
            passes.forward = backend.forward_for(spec, inputs)
        return passes.forward(inputs)


def _run_backward(call: BackwardCall, name: str, run: Callable[[BackwardCall], Gradients] | None = None) -> Gradients:
    """Gradients by a backend; ``run``, if there is one, is its ``backward`` for calls that look like this one."""
    backend = dispatch.BACKENDS[name]
    if settings.nvtx():
        with nvtx.span(f"backward {backend.name} {call.spec.describe(call.inputs)}"):
            return backend.backward(call)
    return (run or backend.backward)(call)


def _run_column_sums(inputs: AttentionInputs, plan: Plan, lse: Tensor) -> Tensor:
    spec, backend = plan.spec, dispatch.BACKENDS[plan.backend]
    if (spec.packed or spec.has_seqused) and settings.check_data():
        read_sequences(inputs)
    with without_default_device():
        return backend.column_sums(spec, inputs, lse.float())


@torch.library.impl("flash_attn_cute::forward", "default")
def _forward(*flat: Any) -> tuple[Tensor, ...]:
    out, lse, *others = _run_forward(*flat_call.unflatten(flat))
    return out, lse, *(lse.new_empty(0) if x is None else x for x in others)


@torch.library.register_fake("flash_attn_cute::forward")
def _fake_forward(*flat: Any) -> tuple[Tensor, ...]:
    inputs = flat_call.inputs_of(flat)
    out = inputs.q.new_empty(*inputs.q.shape[:-1], inputs.v.shape[-1])
    lse = inputs.q.new_empty(inputs.lse_shape, dtype=inputs.lse_dtype)
    max_logits = lse.new_empty(inputs.q.shape[-2] if flat_call.asks_max_logits(flat) else 0)
    if not flat_call.has_residual(flat):
        return out, lse, max_logits, lse.new_empty(0)
    columns = residual_columns(out.shape[-1])
    return out, lse, max_logits, out.new_empty(*out.shape[:-1], columns, dtype=torch.int8)


@torch.library.impl("flash_attn_cute::backward", "default")
def _backward(*flat: Any) -> tuple[Tensor, ...]:
    call, backend = flat_call.unflatten_backward(flat)
    *grads, dbias, dsink = _run_backward(call, backend)
    absent = call.lse.new_empty(0)
    return *grads, absent if dbias is None else dbias, absent.clone() if dsink is None else dsink


@torch.library.register_fake("flash_attn_cute::backward")
def _fake_backward(*flat: Any) -> tuple[Tensor, ...]:
    _, lse, _, _, _, need_dbias, need_dsink = flat[:NUM_RESULTS]
    inputs, absent = flat_call.inputs_of(flat[NUM_RESULTS:]), lse.new_empty(0)
    dbias = inputs.bias if need_dbias and inputs.bias is not None else absent
    dsink = inputs.learnable_sink if need_dsink and inputs.learnable_sink is not None else absent
    return tuple(x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v, dbias, dsink))


@torch.library.impl("flash_attn_cute::column_sums", "default")
def _column_sums(lse: Tensor, *flat: Any) -> Tensor:
    return _run_column_sums(*flat_call.unflatten(flat), lse)


@torch.library.register_fake("flash_attn_cute::column_sums")
def _fake_column_sums(lse: Tensor, *flat: Any) -> Tensor:
    inputs = flat_call.inputs_of(flat)
    *batch, rows, _, _ = inputs.k.shape
    return lse.new_empty(*batch, inputs.q.shape[-2], rows, dtype=torch.float32)


def _call_backward(*flat: Any) -> tuple[Tensor | None, ...]:
    """Gradients by the operator, None for those that are not needed."""
    _register_flop_formulas()
    run = _TransformedBackward.apply if is_transformed() else torch.ops.flash_attn_cute.backward
    dq, dk, dv, dbias, dsink = run(*flat)
    need_dbias, need_dsink = flat[NUM_RESULTS - 2 : NUM_RESULTS]
    return dq, dk, dv, dbias if need_dbias else None, dsink if need_dsink else None


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    out, lse, max_logits, residual = output
    ctx.save_for_backward(
        *inputs[:NUM_ALL_TENSORS], *inputs[-NUM_ANY:], out, lse, residual if flat_call.has_residual(inputs) else None
    )
    ctx.mark_non_differentiable(max_logits, residual)
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[NUM_ALL_TENSORS:-NUM_ANY]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if forward_ad._current_level >= 0:
        _refuse_tangents(dout, dlse)
    saved = ctx.saved_tensors
    tensors, anys, (out, lse, residual) = saved[:NUM_ALL_TENSORS], saved[NUM_ALL_TENSORS:-3], saved[-3:]
    call = *tensors, *ctx.numbers, *anys
    dout = torch.zeros_like(out) if dout is None else dout
    need_dbias, need_dsink = ctx.needs_input_grad[BIAS], ctx.needs_input_grad[SINK]
    grads: list[Tensor | None] = [None] * len(call)
    *grads[:3], grads[BIAS], grads[SINK] = _call_backward(out, lse, dout, dlse, residual, need_dbias, need_dsink, *call)
    return tuple(grads)


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(_NO_SECOND)


def _refuse_tangents(dout: Tensor | None, dlse: Tensor | None) -> None:
    """Refuses gradients that come in with tangents, which are second derivatives, too."""
    if _have_tangents(dout, dlse):
        raise NotImplementedError(_NO_SECOND)


torch.library.register_autograd("flash_attn_cute::forward", _differentiate, setup_context=_save_for_backward)
torch.library.register_autograd("flash_attn_cute::backward", _refuse)


def _shard(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs for operators that know how DTensors are sharded, if there could be DTensors."""
    rules = rules_of_dtensors()
    return inputs if rules is None else rules.alike(inputs)


def rules_of_dtensors() -> Any:
    """``calls.dtensor``, which takes long to import; None if there are no DTensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from flash_attn_cute.calls import dtensor

    return dtensor


def _register_flop_formulas() -> None:
    """Registers FLOP of the operators with ``torch.utils.flop_counter``, and with a counter that is already counting.

    Not when this is imported: to import the counters takes longer than all of this package.
    """
    counters = sys.modules.get("torch.utils.flop_counter")
    if counters is None or torch.compiler.is_compiling():
        return
    counting = [x for x in _get_current_dispatch_mode_stack() if isinstance(x, counters._FlopCounterMode)]
    for name, formula in (("forward", _forward_flop), ("backward", _backward_flop), ("column_sums", _column_sums_flop)):
        operator = getattr(torch.ops.flash_attn_cute, name)
        if operator not in counters.flop_registry:
            counters.register_flop_formula(operator, get_raw=True)(formula)
        for mode in counting:
            mode.counter.flop_registry.setdefault(operator, formula)


def _forward_flop(*flat: Any, out_val: Any) -> int:
    inputs, plan = flat_call.unflatten(flat)
    return flops.forward(plan.spec, inputs)


def _backward_flop(*flat: Any, out_val: Any) -> int:
    call, _ = flat_call.unflatten_backward(flat)
    return flops.backward(call.spec, call.inputs)


def _column_sums_flop(_: Tensor, *flat: Any, out_val: Any) -> int:
    inputs, plan = flat_call.unflatten(flat)
    return flops.column_sums(plan.spec, inputs)


class _TransformedForward(torch.autograd.Function):
    """The forward operator for ``torch.func.grad`` and ``vmap``, which know derivatives of functions, not of operators.

    They come back here until none of them is left, and only then is the operator called.
    """

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Results of a flattened call."""
        result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.flash_attn_cute.forward(*call)
        return result

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        """Tangents below another transform, which ``attention`` cannot see."""
        raise NotImplementedError(_NO_TANGENTS)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *call: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """See ``_map``."""
        return _map(_TransformedForward.apply, info.batch_size, in_dims, call, call)


class _TransformedBackward(torch.autograd.Function):
    """The backward operator, likewise."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """The gradients of q, k, v, bias and learnable_sink."""
        result: tuple[Tensor, ...] = torch.ops.flash_attn_cute.backward(*arguments)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps nothing, for nothing comes after it."""

    backward = staticmethod(_refuse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        """See ``_refuse``."""
        _refuse(ctx)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """See ``_map``."""
        call = arguments[NUM_RESULTS:]
        return _map(_TransformedBackward.apply, info.batch_size, in_dims, arguments, call)


def _map(
    run: Callable[..., tuple[Tensor, ...]],
    size: int,
    in_dims: tuple[int | None, ...],
    arguments: tuple[Any, ...],
    call: tuple[Any, ...],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Runs a function of a flattened call on each slice of its tensors, all at once if they are dense batches alone."""
    inputs = flat_call.inputs_of(call)
    unmerged = (inputs.cu_seqlens_q, inputs.learnable_sink, inputs.mask, inputs.bias)
    has_block_mask = inputs.block_mask is not None or inputs.selected is not None
    if size and all(x is None for x in unmerged) and not has_block_mask and not flat_call.asks_max_logits(call):
        merged = [_merge(x, dim, size) for x, dim in zip(arguments, in_dims, strict=True)]
        results = tuple(x.unflatten(0, (size, -1)) for x in run(*merged))
    else:
        slices = [
            run(*[_select(x, dim, i) for x, dim in zip(arguments, in_dims, strict=True)]) for i in range(size or 1)
        ]
        results = tuple(torch.stack(parts)[:size] for parts in zip(*slices, strict=True))
    return results, (0,) * len(results)


@torch.library.register_vmap("flash_attn_cute::forward")
def _map_forward(info: Any, in_dims: tuple[int | None, ...], *call: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule of ``vmap`` where Dynamo has read the call, and so found the operator."""
    return _map(torch.ops.flash_attn_cute.forward, info.batch_size, in_dims, call, call)


@torch.library.register_vmap("flash_attn_cute::column_sums")
def _map_column_sums(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    """The rule of ``vmap`` in any mode: column sums have no gradient."""

    def run(*given: Any) -> tuple[Tensor]:
        return (torch.ops.flash_attn_cute.column_sums(*given),)

    (sums,), (dim,) = _map(run, info.batch_size, in_dims, arguments, arguments[1:])
    return sums, dim


def _select(x: Any, dim: int | None, i: int) -> Any:
    """A slice of a tensor along the dimension that is mapped over; where there is none, zeros of a slice's shape."""
    if dim is None:
        return x
    return x.select(dim, i) if x.shape[dim] else x.sum(dim, dtype=x.dtype)  # which autograd records


def _merge(x: Any, dim: int | None, size: int) -> Any:
    """A tensor with the dimension that is mapped over, or ``size`` copies of one without, made part of the batch."""
    if not isinstance(x, Tensor):
        return x
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _backward_of(call: BackwardCall, plan: Plan) -> Callable[[BackwardCall], Gradients] | None:
    """The backend's backward pass for calls that look like this one; None if the call needs the dispatcher."""
    _, inputs, out, lse, dout, dlse, residual, need_dbias, need_dsink = call
    q, k, v, cu_q, cu_k, *others = inputs[:NUM_TENSORS]
    is_shared = cu_q is cu_k
    given = (q, k, v, cu_q, None if is_shared else cu_k, *others, out, lse, dout, dlse, residual)
    tensors = [x for x in given if x is not None]
    passes, backend = plan.passes, dispatch.BACKENDS[plan.backend]
    if passes is None or inputs.block_mask is not None or inputs.selected is not None:
        return None if needs_dispatcher(tensors) else backend.backward
    key = is_shared, dlse is not None, need_dbias, need_dsink
    known = passes.backward.get(key)
    if known is not None and not is_thread_watched() and have_strides(tensors) and known[0](*tensors):
        return known[1]
    if needs_dispatcher(tensors):
        return None
    run = backend.backward_for(call)
    if len(set(map(id, tensors))) == len(tensors):
        passes.backward[key] = looks_like(tensors), run
    return run


class FlashAttention(torch.autograd.Function):
    """Autograd's record of a call that needs no dispatcher, under the name that a profile shows."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """Runs the call, the last argument; before it come its leaves, for autograd to see."""
        inputs, plan = arguments[-1]
        out, lse, max_logits, residual = _run_forward(inputs, plan)
        # The tables of a block mask belong to it: they never change, and many calls share them.
        ctx.save_for_backward(*inputs[:NUM_TENSORS], out, lse, residual)
        ctx.set_materialize_grads(False)
        ctx.others = inputs[NUM_TENSORS:], plan
        if max_logits is None:  # each result takes autograd time, one that is None too
            return out, lse
        ctx.mark_non_differentiable(max_logits)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None = None) -> tuple[Tensor | None, ...]:
        """The gradients of the leaves: q, k, v, learnable_sink and bias."""
        if forward_ad._current_level >= 0:
            _refuse_tangents(dout, dlse)
        *tensors, out, lse, residual = ctx.saved_tensors
        others, plan = ctx.others
        inputs = AttentionInputs(*tensors, *others)
        dout = torch.zeros_like(out) if dout is None else dout
        need_dsink, need_dbias = ctx.needs_input_grad[3:5]
        call = BackwardCall(plan.spec, inputs, out, lse, dout, dlse, residual, need_dbias, need_dsink)
        # Gradients that may be differentiated again come from the operator, which knows how to refuse.
        run = None if torch.is_grad_enabled() else _backward_of(call, plan)
        grads: tuple[Tensor | None, ...]
        if run is None:
            grads = _call_backward(*call[2:], *flat_call.flatten(inputs, plan))
        else:
            grads = _run_backward(call, plan.backend, run)
        dq, dk, dv, dbias, dsink = grads
        return dq, dk, dv, dsink, dbias, None


# All that ``Function.apply`` adds to this is care for torch.func's transforms, which ``needs_dispatcher`` has ruled
# out.
_record = super(torch.autograd.Function, FlashAttention).apply
