"""What a call comes to, found out once for all calls that look alike.

Whether tensors are valid, what they ask for and which backend serves them follows from how they look and from the
options; and a model makes the same call in layer after layer. To find out takes the host several times as long as to
look, so the plans of valid calls are kept. An invalid call leaves nothing behind.
"""

from typing import Any, NamedTuple, TypeAlias

import torch

from flash_attn_cute import kept
from flash_attn_cute.block_tables import BlockTables
from flash_attn_cute.calls import dispatch, validate
from flash_attn_cute.sparsity.block_mask import BlockMask
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Options

# The tensors of ``AttentionInputs`` but for the block mask, in their order, not yet checked.
Tensors: TypeAlias = tuple[Any, ...]
# (max_seqlen_q, max_seqlen_k) of a packed call, as ``validate.check_max_seqlen`` gives them; nothing for a dense one.
Bounds: TypeAlias = tuple[int | None, ...]

_KEPT_AT_MOST = 1024  # lengths may change with every call
_kept: dict[tuple[Any, ...], "Plan"] = {}


class Plan(NamedTuple):
    """Spec of a call, the name of the backend that serves it, and max_seqlen_q and max_seqlen_k.

    ``lasts``: whether calls that look alike get the same backend later.
    """

    spec: AttentionSpec
    backend: str
    max_seqlens: tuple[int, int]
    lasts: bool = True


def make(tensors: Tensors, bounds: Bounds, block_mask: BlockMask | None, options: Options, backend: str | None) -> Plan:
    """The plan of any call, found out.

    Raises:
        TypeError: a tensor of the wrong type or dtype.
        ValueError: a tensor of the wrong shape, strides or device, or no backend that can serve the call.
    """
    inputs = check(tensors, bounds, block_mask)
    spec = spec_of(inputs, options, block_mask)
    selection = dispatch.select(spec, inputs, backend)
    dispatch.warn_of_fallback(selection, inputs.q.device)
    return Plan(spec, selection.name, (inputs.max_seqlen_q, inputs.max_seqlen_k), selection.lasts)


def cached_plan(
    tensors: Tensors, bounds: Bounds, block_mask: BlockMask | None, options: Options, backend: str | None
) -> Plan:
    """The same from memory, if a call that looks alike has been here; for unwatched tensors (``ops.needs_dispatcher``).

    Those are strided and have numbers for sizes, so four properties are all that checks and backends can go by.
    """
    looks = tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
    sizes = None
    if block_mask is not None:
        sizes = (block_mask.sizes, block_mask.order_sets, block_mask.device)
    key = (looks, bounds, sizes, options, backend, *dispatch.BACKENDS.values())
    plan = _kept.get(key)
    if plan is None:
        plan = make(tensors, bounds, block_mask, options, backend)
        if len(_kept) >= _KEPT_AT_MOST:
            _kept.clear()
        if plan.lasts:
            _kept[key] = plan
    return plan


def with_tables(
    tensors: Tensors,
    bounds: Bounds,
    block_mask: BlockMask | None,
    options: Options,
    backend: str | None,
    *,
    backward: bool,
    watched: bool = False,
) -> tuple[Plan, Options, BlockTables | None]:
    """The plan of a call, with how its block mask's tiles add to dQ among its options, and the tables of that mask.

    Raises:
        TypeError: as ``make`` does, or another kind of mask.
        ValueError: as ``make`` does.
        RuntimeError: as ``BlockMask.tables`` does.
    """
    planned = make if watched else cached_plan
    options = with_turns(block_mask, options)
    plan = planned(tensors, bounds, block_mask, options, backend)
    if block_mask is None:
        return plan, options, None
    tables = block_mask.tables(tensors[0].device, backward=backward)
    if with_turns(block_mask, options) != options:  # a search has just found it
        options = with_turns(block_mask, options)
        plan = planned(tensors, bounds, block_mask, options, backend)
    return plan, options, kept.as_fakes(tables) if watched else tables


def with_turns(block_mask: BlockMask | None, options: Options) -> Options:
    """The options of a call, and how its block mask's tiles add to dQ.

    Raises:
        TypeError: another kind of mask.
    """
    if block_mask is None:
        return options
    validate.check_type_of_block_mask(block_mask)
    return options._replace(low_contention=block_mask.low_contention, has_m_block_order=block_mask.has_m_block_order)


def check(
    tensors: Tensors, bounds: Bounds, block_mask: BlockMask | None, device: torch.device | None = None
) -> AttentionInputs:
    """The tensors of a valid call, without the tables of its block mask; raises as ``make`` does.

    ``device`` is where the tensors of the call are, if these stand in for them.
    """
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, learnable_sink, mask, bias = tensors
    extras = {
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "learnable_sink": learnable_sink,
        "mask": mask,
        "bias": bias,
    }
    if bounds:
        inputs = validate.check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds, **extras)
    else:
        inputs = validate.check_dense(q, k, v, **extras)
    if block_mask is not None:
        validate.check_block_mask(block_mask, inputs, inputs.q.device if device is None else device)
    return inputs


def spec_of(inputs: AttentionInputs, options: Options, block_mask: BlockMask | None) -> AttentionSpec:
    """What a call asks for, before the tables of its block mask are made."""
    return AttentionSpec.of(inputs, options)._replace(has_block_mask=block_mask is not None)
