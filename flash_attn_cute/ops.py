"""The two custom operators behind the API, their fakes, and the autograd formula between them.

``flash_attn_cute::forward`` and ``flash_attn_cute::backward`` are opaque to torch.compile, which sees only the
fakes, and compiles anew for a scale or softcap that it has not seen. Operator schemas know nothing but tensors and
numbers, so a call crosses them flattened: the fields of ``AttentionInputs`` in their order, those of ``Options`` in
theirs, and the backend's name.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute import dispatch, profiling, settings
from flash_attn_cute.backends.base import Backend
from flash_attn_cute.sequences import read_sequences
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Options

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? learnable_sink, Tensor? mask, Tensor? bias"
)
_NUMBERS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float? softmax_scale, SymInt? window_left, "
    "SymInt? window_right, float softcap, bool deterministic, bool zero_padding, str backend"
)
_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionInputs))
_NUM_TENSORS = _FIELDS.index("max_seqlen_q")
_SINK, _BIAS = _FIELDS.index("learnable_sink"), _FIELDS.index("bias")

torch.library.define("flash_attn_cute::forward", f"({_TENSORS}, {_NUMBERS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flash_attn_cute::backward",
    f"(Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool need_dbias, bool need_dsink, "
    f"{_TENSORS}, {_NUMBERS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
)


def attention(inputs: AttentionInputs, options: Options, backend: str) -> tuple[Tensor, Tensor]:
    """Out and lse of one valid call by the named backend, differentiable."""
    result: tuple[Tensor, Tensor] = torch.ops.flash_attn_cute.forward(
        *(getattr(inputs, name) for name in _FIELDS),
        *options,
        backend,
    )
    return result


def _unpack(call: tuple[Any, ...]) -> tuple[Backend, AttentionSpec, AttentionInputs]:
    inputs = AttentionInputs(*call[: len(_FIELDS)])
    *options, backend = call[len(_FIELDS) :]
    return dispatch.BACKENDS[backend], AttentionSpec.of(inputs, Options(*options)), inputs


@torch.library.impl("flash_attn_cute::forward", "default")
def _forward(*call: Any) -> tuple[Tensor, Tensor]:
    backend, spec, inputs = _unpack(call)
    if settings.check_data():
        read_sequences(inputs)
    run = backend.forward
    if settings.nvtx():
        run = profiling.marked(f"forward {backend.name}", run)
    return run(spec, inputs)


@torch.library.register_fake("flash_attn_cute::forward")
def _fake_forward(*call: Any) -> tuple[Tensor, Tensor]:
    _, spec, inputs = _unpack(call)
    out = inputs.q.new_empty(*inputs.q.shape[:-1], spec.head_dim_v)
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
    backend, spec, inputs = _unpack(call)
    run = backend.backward
    if settings.nvtx():
        run = profiling.marked(f"backward {backend.name}", run)
    *grads, dbias, dsink = run(spec, inputs, out, lse, dout, dlse, need_dbias=need_dbias, need_dsink=need_dsink)
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
    _, _, inputs = _unpack(call)
    dbias = inputs.bias if need_dbias and inputs.bias is not None else lse.new_empty(0)
    dsink = inputs.learnable_sink if need_dsink and inputs.learnable_sink is not None else lse.new_empty(0)
    return tuple(x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v, dbias, dsink))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output)
    ctx.numbers = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    need_dbias, need_dsink = ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINK]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias, dsink = torch.ops.flash_attn_cute.backward(
        out, lse, dout, dlse, need_dbias, need_dsink, *tensors, *ctx.numbers
    )
    grads: list[Tensor | None] = [None] * (_NUM_TENSORS + len(ctx.numbers))
    grads[:3] = dq, dk, dv
    grads[_BIAS] = dbias if need_dbias else None
    grads[_SINK] = dsink if need_dsink else None
    return tuple(grads)


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError("flash_attn_cute: second derivatives of attention are not implemented")


torch.library.register_autograd("flash_attn_cute::forward", _differentiate, setup_context=_save_for_backward)
torch.library.register_autograd("flash_attn_cute::backward", _refuse)
