"""PyTorch's modes, transforms, subclasses and autocast: what else than autograd and a backend acts on a call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_keys,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_local_include_set,
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import TransformType, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from flash_attn_cute.calls.attention_call import AttentionCall

_AUTOCAST_FROM = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN_TYPES = frozenset({Tensor, Parameter})

is_any_autocast_enabled = _is_any_autocast_enabled  # for some kind of device: to ask ahead of ``autocast``
# A default device makes each attribute of a tensor take a microsecond. Code of this package needs none, as it names the
# devices of all that it makes. Code of users (hooks of saved tensors, functions of block masks) does not run within.
# PyTorch itself runs backward passes without such modes.
without_default_device = torch._C.DisableTorchFunction


def _key_bits(*keys: DispatchKey) -> int:
    bits = 0
    for key in keys:
        bits |= DispatchKeySet(key).raw_repr()
    return bits


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


def needs_dispatcher(tensors: Sequence[Any]) -> bool:
    """Whether anything but autograd and a backend would act on an operator called with these tensors (or None).

    No single place in PyTorch knows of all that could, so several are asked:

    - Dynamo, which reads this Python code and has to find the operator in it, takes ``is_compiling`` for a constant.
    - Subclasses and modes with ``__torch_function__``. ``torch.set_default_device`` is such a mode, but acts on
      factories alone.
    - The dispatcher, whose steps are in the dispatch keys of the tensors and of this thread. A mode with
      ``__torch_dispatch__`` (fake tensors, make_fx, export, selective checkpointing, FLOP counters), a transform of
      torch.func, functionalization and torch.jit.trace each put a key into the thread. Lazily negated tensors,
      wrappers that have outlived their transform, other layouts and other devices have keys of their own.

    What is no tensor counts as watched, too: validation comes later.
    """
    if is_thread_watched():
        return True
    keys = _dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        if x is not None:
            if type(x) not in _PLAIN_TYPES:
                return True
            keys |= _dispatch_keys(x).raw_repr()
    return keys & ~_PLAIN_KEYS != 0


def is_thread_watched() -> bool:
    """Whether Dynamo, a mode or a transform of torch.func would act on a call.

    ``needs_dispatcher`` says why they are asked. Modes with ``__torch_dispatch__`` have a key in the thread, too, but
    guards overlook those that compiled programs do not see, as selective checkpointing. A transform also has one, but
    may wrap tensors without sizes, of which guards must not be asked.
    """
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or (_is_torch_function_mode_enabled() and not _is_default_device_alone())
        or peek_interpreter_stack() is not None
    )


def have_strides(tensors: Sequence[Any]) -> bool:
    """Whether all are plain tensors: none is sparse, nested, or a transform's wrapper, which may have outlived it.

    Asking takes half as long as ``needs_dispatcher``.
    """
    for x in tensors:
        if (
            type(x) not in _PLAIN_TYPES
            or x.layout is not torch.strided
            or x.is_nested
            or is_functorch_wrapped_tensor(x)
        ):
            return False
    return True


def looks_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says whether tensors look like these, none of which stands there twice.

    Equal are types, dispatch keys (those of the thread included), dtypes, devices, shapes, strides, and whether they
    require gradients. So where these do not need the dispatcher, no others that look like them do, unless the thread is
    watched. These are Dynamo's guards, which take a tenth of the time that reading the attributes takes. They hold no
    tensors, and say no where a tensor stands twice. They end the process at a tensor that does not ``have_strides``.
    """
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    return guards.check


def _is_default_device_alone() -> bool:
    return _len_torch_function_stack() == 1 and type(_get_function_stack_at(0)) is DeviceContext


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same memory, and so equal; nothing is read.

    Autograd and checkpoints hand out views of a tensor, for which ``is`` is False.
    """
    return a is b or (not needs_dispatcher((a, b)) and a.dtype == b.dtype and a.is_set_to(b))


def is_transformed() -> bool:
    """Whether the transform of torch.func that is to act next is one that takes an autograd.Function.

    Dynamo cannot trace ours: what it compiles has the operator, which has a rule for vmap, and which grad refuses.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    transform = peek_interpreter_stack()
    return transform is not None and transform.key() != TransformType.Functionalize


def is_below_autograd() -> bool:
    """Whether the dispatcher would skip autograd, as it does within a ``__torch_dispatch__`` or another operator."""
    return _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)


def is_recorded(tensors: tuple[Any, ...], watched: bool) -> bool:
    """Whether gradients of a call with these tensors (or None) may be wanted; a mode or a transform may want some."""
    return torch.is_grad_enabled() and (watched or any(x is not None and x.requires_grad for x in tensors))


def autocast(call: AttentionCall) -> AttentionCall:
    """The call with q, k, v and bias in autocast's dtype, if autocast is on for q's device.

    The casts are operators of their own, and autograd gives every leaf a gradient of its own dtype. As in all of
    autocast float64 stays as it is. So does a learnable_sink in float32, which goes with any dtype.
    """
    q = call.q
    if not isinstance(q, Tensor) or q.dtype not in _AUTOCAST_FROM:
        return call
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return call
    dtype, sink = torch.get_autocast_dtype(kind), call.learnable_sink
    names = ["q", "k", "v", "bias"]
    if isinstance(sink, Tensor) and sink.dtype != torch.float32:
        names.append("learnable_sink")
    given = {name: getattr(call, name) for name in names}
    cast = {
        name: x.to(dtype)
        for name, x in given.items()
        if isinstance(x, Tensor) and x.dtype != dtype and x.dtype in _AUTOCAST_FROM
    }
    return call.with_tensors(**cast) if cast else call
