"""The way from a valid call to a backend: two custom operators, or the same code without them.

``flash_attn_cute::forward`` and ``flash_attn_cute::backward`` are opaque to torch.compile, which sees only the
fakes. Operator schemas know nothing but tensors and numbers, so a call crosses them flattened: the tensors of
``AttentionInputs`` in their order, those of its block mask, its bounds, the fields of ``Options``, the backend's name,
and the scale and the softcap once more, as 0-d tensors on the CPU. Those are None, unless a compiled program is to
serve any scale or softcap: floats that are no constants of it reach operators only as tensors. They then stand for the
numbers.

An operator takes the host longer than many a kernel takes the device. Where nobody is there to see it, as in all
plain eager code, the backend is called directly, and ``FlashAttention`` is what autograd records.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _any_requires_grad,
    _dispatch_keys,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_local_include_set,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
)
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flash_attn_cute import profiling, settings
from flash_attn_cute.backends.base import Backend, Gradients
from flash_attn_cute.block_tables import BlockTables
from flash_attn_cute.calls import dispatch, flops
from flash_attn_cute.lengths import read_sequences
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Options

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? learnable_sink, Tensor? mask, Tensor? bias, "
    # BlockTables.flat() and RealRows
    "Tensor? row_spans, Tensor? row_entries, Tensor? tiles, "
    "Tensor? column_spans, Tensor? column_entries, Tensor? contributors, Tensor? order, "
    "Tensor? real_q, Tensor? real_k"
)
# ``flat_options``
OPTIONS = (
    "float? softmax_scale, SymInt? window_left, SymInt? window_right, float softcap, bool deterministic, "
    "bool zero_padding, bool low_contention, bool has_m_block_order, {backend}, Tensor? any_scale, Tensor? any_softcap"
)
_NUMBERS = "SymInt max_seqlen_q, SymInt max_seqlen_k, " + OPTIONS.format(backend="str backend")
_FIELDS = AttentionInputs._fields
_NUM_PLAIN = _FIELDS.index("max_seqlen_q")  # tensors of ``AttentionInputs`` but for the block mask's
_NUM_TABLES = _NUM_PLAIN + 7  # and with its rows and columns
_NUM_TENSORS = _NUM_TABLES + 2  # and with all
_NUM_INPUTS = _NUM_TENSORS + 2  # and with both bounds
_SINK, _BIAS = _FIELDS.index("learnable_sink"), _FIELDS.index("bias")
_NUM_ANY = 2  # any_scale and any_softcap, which end a flattened call
_NUM_RESULTS = 6  # before the call come, in the backward operator, its results, their gradients and what is wanted
_NO_TANGENTS = "flash_attn_cute: forward-mode derivatives of attention are not implemented"
_AUTOCAST_FROM = (torch.float16, torch.bfloat16, torch.float32)

# What serves valid calls in a backend's place, given its name.
Replacement: TypeAlias = Callable[[AttentionInputs, Options, str], tuple[Tensor, Tensor]]
_replacement: Replacement | None = None

torch.library.define("flash_attn_cute::forward", f"({_TENSORS}, {_NUMBERS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flash_attn_cute::backward",
    # What is needed are ints for DTensor's sake, which tells calls apart by what comes from the first int on.
    f"(Tensor out, Tensor lse, Tensor dout, Tensor? dlse, int need_dbias, int need_dsink, "
    f"{_TENSORS}, {_NUMBERS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
)


def attention(
    inputs: AttentionInputs, options: Options, spec: AttentionSpec, backend: str, *, watched: bool
) -> tuple[Tensor, Tensor]:
    """Out and lse of one valid call by the named backend, differentiable.

    Raises:
        NotImplementedError: an input carries a tangent of forward-mode differentiation.
    """
    if _replacement is not None:
        return _replacement(inputs, options, backend)
    leaves = (inputs.q, inputs.k, inputs.v, inputs.learnable_sink, inputs.bias)
    # Not all that follows would refuse tangents; some would take them for zero.
    if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in leaves):
        raise NotImplementedError(_NO_TANGENTS)
    if watched:
        _tell_flop_counters()
        inputs = _shard(inputs)
        run = _TransformedForward.apply if _is_transformed() else torch.ops.flash_attn_cute.forward
        result: tuple[Tensor, Tensor] = run(*_flatten(inputs, options, backend))
        return result
    if torch.is_grad_enabled() and _any_requires_grad(*leaves) and not _below_autograd():
        return _record(*leaves, (inputs, options, spec, backend))
    return _run_forward(dispatch.BACKENDS[backend], spec, inputs)


def is_replaced() -> bool:
    """Whether another function serves all calls."""
    return _replacement is not None


@contextmanager
def replaced(by: Replacement) -> Iterator[None]:
    """Has another function serve all calls meanwhile, in every thread: autograd recomputes in threads of its own."""
    global _replacement
    before, _replacement = _replacement, by
    try:
        yield
    finally:
        _replacement = before


def autocast(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of a call, not yet checked, as autocast wants them: q, k, v and bias in its dtype, if it is on.

    The casts are operators of their own, and autograd gives every leaf a gradient of its own dtype. As in all of
    autocast float64 stays as it is. So does a learnable_sink in float32, which goes with any dtype.
    """
    q = tensors[0]
    if not _is_any_autocast_enabled() or not isinstance(q, Tensor) or q.dtype not in _AUTOCAST_FROM:
        return tensors
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype, cast = torch.get_autocast_dtype(kind), list(tensors)
    for i, x in enumerate(tensors):
        if isinstance(x, Tensor) and x.dtype in _AUTOCAST_FROM and (i != _SINK or x.dtype != torch.float32):
            cast[i] = x.to(dtype)
    return tuple(cast)


def is_recorded(tensors: tuple[Any, ...], watched: bool) -> bool:
    """Whether gradients of a call with these tensors (or None) may be wanted; who watches may want some anyway."""
    return torch.is_grad_enabled() and (watched or any(x is not None and x.requires_grad for x in tensors))


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


def _is_transformed() -> bool:
    """Whether the transform of torch.func that is to act next is one that takes an autograd.Function.

    Dynamo cannot trace ours: what it compiles has the operator, which vmap loops over and grad refuses.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    transform = peek_interpreter_stack()
    return transform is not None and transform.key() != TransformType.Functionalize


def _below_autograd() -> bool:
    """Whether the dispatcher would skip autograd, as it does within a ``__torch_dispatch__`` or another operator."""
    return _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)


def _key_bits(*keys: DispatchKey) -> int:
    bits = 0
    for key in keys:
        bits |= DispatchKeySet(key).raw_repr()
    return bits


_PLAIN_TYPES = frozenset({Tensor, Parameter})
# What the dispatcher would do for a plain tensor on these devices: run a kernel and, for our operators, autograd.
_PLAIN_KEYS = _key_bits(
    DispatchKey.CPU,
    DispatchKey.CUDA,
    DispatchKey.BackendSelect,
    DispatchKey.ADInplaceOrView,
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutocastCPU,
    DispatchKey.AutocastCUDA,
)


def needs_dispatcher(tensors: tuple[Any, ...]) -> bool:
    """Whether anything but autograd and a backend would act on an operator called with these tensors (or None).

    No single place in PyTorch knows of all that could, so several are asked:

    - Dynamo, which reads this Python code and has to find the operator in it, takes ``is_compiling`` for a constant.
    - Subclasses and modes with ``__torch_function__``. ``torch.set_default_device`` is such a mode.
    - The dispatcher, whose steps are in the dispatch keys of the tensors and of this thread. A mode with
      ``__torch_dispatch__`` (fake tensors, make_fx, export, selective checkpointing, FLOP counters), a transform of
      torch.func, functionalization and torch.jit.trace each put a key into the thread. Lazily negated tensors,
      wrappers that have outlived their transform, other layouts and other devices have keys of their own.

    What is no tensor counts as watched, too: validation comes later.
    """
    if torch.compiler.is_compiling() or _is_torch_function_mode_enabled():
        return True
    keys = _dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        if x is not None:
            if type(x) not in _PLAIN_TYPES:
                return True
            keys |= _dispatch_keys(x).raw_repr()
    return keys & ~_PLAIN_KEYS != 0


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same memory, and so equal; nothing is read.

    Autograd and checkpoints hand out views of a tensor, for which ``is`` is False.
    """
    return a is b or (not needs_dispatcher((a, b)) and a.dtype == b.dtype and a.is_set_to(b))


def _flatten(inputs: AttentionInputs, options: Options, backend: str) -> tuple[Any, ...]:
    *tensors, max_seqlen_q, max_seqlen_k, block_mask = inputs
    tables: tuple[Tensor | None, ...] = (None,) * (_NUM_TENSORS - _NUM_PLAIN)
    if block_mask is not None:
        tables = *block_mask.flat(), *(block_mask.real or (None, None))
    return *tensors, *tables, max_seqlen_q, max_seqlen_k, *flat_options(options, backend)


def flat_options(options: Options, backend: str | None) -> tuple[Any, ...]:
    """The numbers that end a flattened call, in the order of the schemas, without both bounds."""
    any_scale = any_softcap = None
    if torch.compiler.is_dynamo_compiling():
        any_scale, any_softcap = _if_any(options.softmax_scale), _if_any(options.softcap)
        if any_scale is not None:
            options = options._replace(softmax_scale=None)
        if any_softcap is not None:
            options = options._replace(softcap=0.0)
    return *options, backend, any_scale, any_softcap


def options_of(flat: tuple[Any, ...]) -> tuple[Options, str | None]:
    """The options that these numbers are, and the backend's name."""
    *numbers, backend, any_scale, any_softcap = flat
    options = Options(*numbers)
    if any_scale is not None:
        options = options._replace(softmax_scale=any_scale.item())
    if any_softcap is not None:
        options = options._replace(softcap=any_softcap.item())
    return options, backend


def _if_any(number: float | None) -> Tensor | None:
    """A number as a tensor, if it is no constant of the program that is being compiled."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if number is None or has_static_value(number):
        return None
    # A sum, for PyTorch compiles no other way to make a tensor of a number without making that a constant.
    return torch.zeros((), dtype=torch.float64, device="cpu") + number


def _inputs_of(call: tuple[Any, ...]) -> AttentionInputs:
    tables = BlockTables.of_flat(call[_NUM_PLAIN:_NUM_TABLES], call[_NUM_TABLES:_NUM_TENSORS])
    inputs = AttentionInputs(*(*call[:_NUM_PLAIN], *call[_NUM_TENSORS:_NUM_INPUTS], tables))
    if inputs.packed:
        return inputs
    # torch.jit.trace makes constants of numbers, and its programs serve other lengths.
    return inputs._replace(max_seqlen_q=inputs.q.shape[1], max_seqlen_k=inputs.k.shape[1])


def _unpack(call: tuple[Any, ...]) -> tuple[Backend, AttentionSpec, AttentionInputs]:
    inputs = _inputs_of(call)
    options, backend = options_of(call[_NUM_INPUTS:])
    assert backend is not None
    return dispatch.BACKENDS[backend], AttentionSpec.of(inputs, options), inputs


def _run_forward(backend: Backend, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    if (spec.packed or spec.has_seqused) and settings.check_data():
        read_sequences(inputs)
    run = backend.forward
    if settings.nvtx():
        run = profiling.marked(f"forward {backend.name}", run)
    return run(spec, inputs)


def _run_backward(
    backend: Backend,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    need_dbias: bool,
    need_dsink: bool,
) -> Gradients:
    run = backend.backward
    if settings.nvtx():
        run = profiling.marked(f"backward {backend.name}", run)
    return run(spec, inputs, out, lse, dout, dlse, need_dbias=need_dbias, need_dsink=need_dsink)


@torch.library.impl("flash_attn_cute::forward", "default")
def _forward(*call: Any) -> tuple[Tensor, Tensor]:
    return _run_forward(*_unpack(call))


@torch.library.register_fake("flash_attn_cute::forward")
def _fake_forward(*call: Any) -> tuple[Tensor, Tensor]:
    inputs = _inputs_of(call)
    out = inputs.q.new_empty(*inputs.q.shape[:-1], inputs.v.shape[-1])
    return out, inputs.q.new_empty(inputs.lse_shape, dtype=inputs.lse_dtype)


@torch.library.impl("flash_attn_cute::backward", "default")
def _backward(
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    need_dbias: bool,
    need_dsink: bool,
    *call: Any,
) -> tuple[Tensor, ...]:
    needs = bool(need_dbias), bool(need_dsink)
    *grads, dbias, dsink = _run_backward(*_unpack(call), out, lse, dout, dlse, *needs)
    absent = lse.new_empty(0)
    return *grads, absent if dbias is None else dbias, absent.clone() if dsink is None else dsink


@torch.library.register_fake("flash_attn_cute::backward")
def _fake_backward(
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    need_dbias: bool,
    need_dsink: bool,
    *call: Any,
) -> tuple[Tensor, ...]:
    inputs = _inputs_of(call)
    dbias = inputs.bias if need_dbias and inputs.bias is not None else lse.new_empty(0)
    dsink = inputs.learnable_sink if need_dsink and inputs.learnable_sink is not None else lse.new_empty(0)
    return tuple(x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v, dbias, dsink))


def _call_backward(
    call: tuple[Any, ...],
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    need_dbias: bool,
    need_dsink: bool,
) -> tuple[Tensor | None, ...]:
    _tell_flop_counters()
    run = _TransformedBackward.apply if _is_transformed() else torch.ops.flash_attn_cute.backward
    dq, dk, dv, dbias, dsink = run(out, lse, dout, dlse, need_dbias, need_dsink, *call)
    return dq, dk, dv, dbias if need_dbias else None, dsink if need_dsink else None


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *inputs[-_NUM_ANY:], *output)
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[_NUM_TENSORS:-_NUM_ANY]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    tensors, anys, (out, lse) = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:-2], saved[-2:]
    call = *tensors, *ctx.numbers, *anys
    dout = torch.zeros_like(out) if dout is None else dout
    need_dbias, need_dsink = ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINK]
    grads: list[Tensor | None] = [None] * len(call)
    *grads[:3], grads[_BIAS], grads[_SINK] = _call_backward(call, out, lse, dout, dlse, need_dbias, need_dsink)
    return tuple(grads)


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError("flash_attn_cute: second derivatives of attention are not implemented")


torch.library.register_autograd("flash_attn_cute::forward", _differentiate, setup_context=_save_for_backward)
torch.library.register_autograd("flash_attn_cute::backward", _refuse)


def _shard(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs for operators that know how DTensors are sharded, if there could be DTensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return inputs
    from flash_attn_cute.calls import dtensor  # which takes long to import

    return dtensor.alike(inputs)


def _tell_flop_counters() -> None:
    """Has ``torch.utils.flop_counter`` know the operators, and a counter that is already counting.

    Not when this is imported: to import the counters takes longer than all of this package.
    """
    counters = sys.modules.get("torch.utils.flop_counter")
    if counters is None or torch.compiler.is_compiling():
        return
    if torch.ops.flash_attn_cute.forward not in counters.flop_registry:
        counters.register_flop_formula(torch.ops.flash_attn_cute.forward, get_raw=True)(_forward_flop)
        counters.register_flop_formula(torch.ops.flash_attn_cute.backward, get_raw=True)(_backward_flop)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counters._FlopCounterMode):
            mode.counter.flop_registry.setdefault(torch.ops.flash_attn_cute.forward, _forward_flop)
            mode.counter.flop_registry.setdefault(torch.ops.flash_attn_cute.backward, _backward_flop)


def _forward_flop(*call: Any, out_val: Any) -> int:
    return flops.forward(*_unpack(call)[1:])


def _backward_flop(*arguments: Any, out_val: Any) -> int:
    return flops.backward(*_unpack(arguments[_NUM_RESULTS:])[1:])


class _TransformedForward(torch.autograd.Function):
    """The forward operator for ``torch.func.grad`` and ``vmap``, which know derivatives of functions, not of operators.

    They come back here until none of them is left, and only then is the operator called.
    """

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        """Out and lse of a flattened call."""
        result: tuple[Tensor, Tensor] = torch.ops.flash_attn_cute.forward(*call)
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
        call = arguments[_NUM_RESULTS:]
        return _map(_TransformedBackward.apply, info.batch_size, in_dims, arguments, call)


def _map(
    run: Callable[..., tuple[Tensor, ...]],
    size: int,
    in_dims: tuple[int | None, ...],
    arguments: tuple[Any, ...],
    call: tuple[Any, ...],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Runs a function of a flattened call on each slice of its tensors, all at once if they are dense batches alone."""
    inputs = _inputs_of(call)
    unmerged = (inputs.cu_seqlens_q, inputs.learnable_sink, inputs.mask, inputs.bias, inputs.block_mask)
    if size and all(x is None for x in unmerged):
        merged = [_merge(x, dim, size) for x, dim in zip(arguments, in_dims, strict=True)]
        results = tuple(x.unflatten(0, (size, -1)) for x in run(*merged))
    else:
        slices = [
            run(*[_select(x, dim, i) for x, dim in zip(arguments, in_dims, strict=True)]) for i in range(size or 1)
        ]
        results = tuple(torch.stack(parts)[:size] for parts in zip(*slices, strict=True))
    return results, (0,) * len(results)


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


class FlashAttention(torch.autograd.Function):
    """What autograd records of an unwatched call, and the name that a profile shows."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Runs the call, the last argument; before it come its leaves, for autograd to see."""
        inputs, options, spec, backend = arguments[-1]
        output = _run_forward(dispatch.BACKENDS[backend], spec, inputs)
        # The tables of a block mask belong to it: nobody changes them, and many calls share them.
        ctx.save_for_backward(*inputs[:_NUM_PLAIN], *output)
        ctx.set_materialize_grads(False)
        ctx.call = inputs[_NUM_PLAIN:], options, spec, backend
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the leaves: q, k, v, learnable_sink and bias."""
        saved = ctx.saved_tensors
        others, options, spec, backend = ctx.call
        *tensors, out, lse = saved
        inputs = AttentionInputs(*tensors, *others)
        dout = torch.zeros_like(out) if dout is None else dout
        need_dsink, need_dbias = ctx.needs_input_grad[3:5]
        grads: tuple[Tensor | None, ...]
        # Gradients that may be differentiated again come from the operator, which knows how to refuse.
        if torch.is_grad_enabled() or needs_dispatcher((*saved, dout, dlse)):
            call = _flatten(inputs, options, backend)
            grads = _call_backward(call, out, lse, dout, dlse, need_dbias, need_dsink)
        else:
            grads = _run_backward(
                dispatch.BACKENDS[backend], spec, inputs, out, lse, dout, dlse, need_dbias, need_dsink
            )
        dq, dk, dv, dbias, dsink = grads
        return dq, dk, dv, dsink, dbias, None


# All that ``Function.apply`` adds to this is care for torch.func's transforms, which ``needs_dispatcher`` has ruled
# out.
_record = super(torch.autograd.Function, FlashAttention).apply
