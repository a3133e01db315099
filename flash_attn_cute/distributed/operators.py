"""A call as one operator, which is all that torch.compile sees of it: messages, plans and kernels are inside.

Operators take tensors and numbers. A sharding crosses as its handle, a group as the names of its dimensions, and host
lengths as tensors on the CPU, so that a program that has been compiled once serves every batch of its kind.
"""

from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.calls import ops
from flash_attn_cute.distributed import calls
from flash_attn_cute.distributed.call_passes import wide
from flash_attn_cute.distributed.calls import Call, Lengths
from flash_attn_cute.distributed.process_groups import named
from flash_attn_cute.distributed.sharding import of_handle
from flash_attn_cute.spec import Options

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, Tensor sharding, Tensor? sharding_k, "
    "Tensor? seqused_q, Tensor? seqused_k"
)
_OTHERS = "str[] groups, str method, bool dense, " + ops.OPTIONS.format(backend="str? backend")
_NUM_TENSORS = 8
_NUM_CALL = _NUM_TENSORS + 3  # then come the options, and two tensors at the end of them
_SINK = 3

torch.library.define("flash_attn_cute::context_parallel", f"({_TENSORS}, {_OTHERS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flash_attn_cute::context_parallel_backward",
    f"(Tensor out, Tensor lse, Tensor dout, Tensor? dlse, {_TENSORS}, {_OTHERS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
)


def attend(
    arguments: tuple[Any, ...], names: list[str], method: str, dense: bool, options: Options, backend: str | None
) -> tuple[Tensor, Tensor]:
    """Out and lse of this rank's rows, by the operator.

    Args:
        arguments: the fields of a ``Call`` up to its lengths.
        names: those of its groups.
        method: as in it.
        dense: as in it.
        options: of the call.
        backend: the name of one, or None.

    Raises:
        TypeError: a sharding that is none.
    """
    *tensors, sharding, sharding_k, seqused_q, seqused_k = arguments
    result: tuple[Tensor, Tensor] = torch.ops.flash_attn_cute.context_parallel(
        *tensors,
        _handle("sharding", sharding),
        None if sharding_k is None else _handle("sharding_k", sharding_k),
        _as_tensor(seqused_q),
        _as_tensor(seqused_k),
        names,
        method,
        dense,
        *ops.flat_options(options, backend),
    )
    return result


def _handle(name: str, sharding: Any) -> Tensor:
    calls.check_is_sharding(name, sharding)
    return sharding.handle


def _as_tensor(lengths: Lengths) -> Tensor | None:
    return lengths if lengths is None or isinstance(lengths, Tensor) else torch.tensor(lengths, device="cpu")


def _unpack(flat: tuple[Any, ...]) -> tuple[Call, Options, str | None]:
    q, k, v, sink, handle, handle_k, used_q, used_k, names, method, dense = flat[:_NUM_CALL]
    shardings = of_handle(handle), None if handle_k is None else of_handle(handle_k)
    call = Call(q, k, v, sink, *shardings, used_q, used_k, named(names), method, dense)
    return call, *ops.options_of(flat[_NUM_CALL:])


@torch.library.impl("flash_attn_cute::context_parallel", "default")
@torch.no_grad()
def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    call, options, backend = _unpack(flat)
    out, lse = calls.attend(call, lambda: options, backend)
    return out.contiguous(), lse.contiguous()


@torch.library.register_fake("flash_attn_cute::context_parallel")
def _fake_forward(*flat: Any) -> tuple[Tensor, Tensor]:
    q, v = flat[0], flat[2]
    *batch, rows, heads, _ = q.shape
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*batch, heads, rows, dtype=wide(q.dtype))


@torch.library.impl("flash_attn_cute::context_parallel_backward", "default")
@torch.no_grad()
def _backward(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    *grads, dsink = calls.gradients(*_unpack(flat), out, lse, dout, dlse)
    return *(x.contiguous() for x in grads), lse.new_empty(0) if dsink is None else dsink


@torch.library.register_fake("flash_attn_cute::context_parallel_backward")
def _fake_backward(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    q, k, v, sink = flat[: _SINK + 1]
    return *(x.new_empty(x.shape) for x in (q, k, v)), lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *inputs[-2:], *output)
    ctx.set_materialize_grads(False)
    ctx.others = inputs[_NUM_TENSORS:-2]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
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
