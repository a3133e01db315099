"""Calls as the arguments of custom operators, whose schemas know nothing but tensors and numbers.

A flat call has, in this order: the tensors of ``AttentionInputs``, those of its block mask, its bounds, what is known
about its block mask, and what ``flat_options`` gives.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.calls import dispatch
from flash_attn_cute.calls.attention_call import NUM_TENSORS
from flash_attn_cute.calls.prepared_call import KnownOfBlockMask, Plan, known_of_block_mask
from flash_attn_cute.problem.block_tables import NUM_FLAT, BlockTables
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? learnable_sink, Tensor? mask, Tensor? bias, "
    # BlockTables.flat() and RealRows
    "Tensor? row_spans, Tensor? row_entries, Tensor? tiles, "
    "Tensor? column_spans, Tensor? column_entries, Tensor? contributors, Tensor? order, "
    "Tensor? real_q, Tensor? real_k, Tensor? selected"
)
# ``flat_options``
OPTIONS = (
    "float? softmax_scale, SymInt? window_left, SymInt? window_right, float softcap, bool deterministic, "
    "bool zero_padding, bool packing_invariant, bool precise_gradients, bool max_logits, {backend}, "
    "Tensor? any_scale, Tensor? any_softcap"
)
NUMBERS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool low_contention, bool has_m_block_order, bool half_blocks, "
    "SymInt most_halves, SymInt selection_block, " + OPTIONS.format(backend="str backend")
)
_NUM_TABLES = NUM_TENSORS + NUM_FLAT  # and with a block mask's rows and columns
_NUM_REAL = _NUM_TABLES + 2  # and with its real rows
NUM_ALL_TENSORS = _NUM_REAL + 1  # and with selected blocks
_NUM_INPUTS = NUM_ALL_TENSORS + 2  # and with both bounds
_NUM_KNOWN = _NUM_INPUTS + len(KnownOfBlockMask._fields)  # and with what is known about the block mask
SINK, BIAS = AttentionInputs._fields.index("learnable_sink"), AttentionInputs._fields.index("bias")
NUM_ANY = 2  # any_scale and any_softcap, which end a flat call
_BACKEND = -NUM_ANY - 1  # behind the fields of ``Options``, of which these two are the last ones
_PRECISE_GRADIENTS, _MAX_LOGITS = _BACKEND - 2, _BACKEND - 1
NUM_RESULTS = 7  # the fields of ``BackwardCall`` from out on, which come before a flat call in the backward operator


def flatten(inputs: AttentionInputs, plan: Plan) -> tuple[Any, ...]:
    """A call as the forward operator takes it."""
    *tensors, max_seqlen_q, max_seqlen_k, block_mask, selected = inputs
    tables: tuple[Tensor | None, ...] = (None,) * (_NUM_REAL - NUM_TENSORS)
    if block_mask is not None:
        tables = *block_mask.flat(), *(block_mask.real or (None, None))
    known = known_of_block_mask(plan.spec)
    return *tensors, *tables, selected, max_seqlen_q, max_seqlen_k, *known, *flat_options(plan.options, plan.backend)


def unflatten(flat: tuple[Any, ...]) -> tuple[AttentionInputs, Plan]:
    """The inverse of ``flatten``."""
    inputs = inputs_of(flat)
    known = KnownOfBlockMask._make(flat[_NUM_INPUTS:_NUM_KNOWN])
    options, backend = options_of(flat[_NUM_KNOWN:])
    spec = AttentionSpec.of(inputs, options)._replace(**known._asdict())
    assert backend is not None
    return inputs, Plan(options, spec, backend, (inputs.max_seqlen_q, inputs.max_seqlen_k))


def unflatten_backward(flat: tuple[Any, ...]) -> tuple[BackwardCall, str]:
    """The call of a backward pass from the arguments of the backward operator, and the backend's name."""
    inputs, plan = unflatten(flat[NUM_RESULTS:])
    out, lse, dout, dlse, residual, need_dbias, need_dsink = flat[:NUM_RESULTS]
    call = BackwardCall(plan.spec, inputs, out, lse, dout, dlse, residual, bool(need_dbias), bool(need_dsink))
    return call, plan.backend


def inputs_of(flat: tuple[Any, ...]) -> AttentionInputs:
    """The tensors and bounds of a flat call."""
    tables = BlockTables.of_flat(flat[NUM_TENSORS:_NUM_TABLES], flat[_NUM_TABLES:_NUM_REAL])
    bounds, selected = flat[NUM_ALL_TENSORS:_NUM_INPUTS], flat[_NUM_REAL]
    inputs = AttentionInputs._make((*flat[:NUM_TENSORS], *bounds, tables, selected))
    if inputs.packed:
        return inputs
    # torch.jit.trace makes constants of numbers, and its programs serve other lengths.
    return inputs._replace(max_seqlen_q=inputs.q.shape[1], max_seqlen_k=inputs.k.shape[1])


def asks_max_logits(flat: tuple[Any, ...]) -> bool:
    """Whether a flat call is to have ``Results.max_logits``."""
    asked: bool = flat[_MAX_LOGITS]
    return asked


def has_residual(flat: tuple[Any, ...]) -> bool:
    """Whether a flat call has ``Results.residual``."""
    asked: bool = flat[_PRECISE_GRADIENTS]
    return asked and dispatch.BACKENDS[flat[_BACKEND]].has_residual


def flat_options(options: Options, backend: str | None) -> tuple[Any, ...]:
    """The end of a flat call: the fields of ``Options``, the backend's name, and two 0-d tensors on the CPU.

    The tensors stand for softmax_scale and softcap where a compiled program is to serve any number: floats that are no
    constants of it reach operators only so. Else they are None.
    """
    any_scale = any_softcap = None
    if torch.compiler.is_dynamo_compiling():
        any_scale, any_softcap = _if_any(options.softmax_scale), _if_any(options.softcap)
        if any_scale is not None:
            options = options._replace(softmax_scale=None)
        if any_softcap is not None:
            options = options._replace(softcap=0.0)
    return *options, backend, any_scale, any_softcap


def options_of(flat: Sequence[Any]) -> tuple[Options, str | None]:
    """The inverse of ``flat_options``."""
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
