"""Calls with all that operators and backends need to know, found out once for all calls that look alike.

Whether tensors are valid, what they ask for and which backend serves them follows from how they look and from the
options; and a model makes the same call in layer after layer. To find out takes the host several times as long as to
look, so the plans of valid calls are kept. An invalid call leaves nothing behind.

Plans are found in two ways. ``recalled`` compares tensors with those of the last calls that had the same options, by
guards of PyTorch's. ``cached_plan`` reads how they look, which takes longer, serves any call, and any number of looks.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.calls import dispatch, validate
from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.calls.torch_modes import have_strides, is_thread_watched, looks_like, without_default_device
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options, Results, check_plain
from flash_attn_cute.runtime import kept
from flash_attn_cute.sparsity.block_mask import BlockMask

_KEPT_AT_MOST = 1024  # lengths may change with every call
_LOOKS_AT_MOST: Final = 8  # of calls with the same options, to compare with one after the other
# Plans by looks and options; and by options alone the last ones, each behind the guard of its looks.
_kept: dict[tuple[Any, ...], Any] = {}


class KnownOfBlockMask(NamedTuple):
    """Facts about a block mask that are not in its tables and that plans depend on, so far as they are known.

    They are fields of ``AttentionSpec``.
    """

    low_contention: bool
    has_m_block_order: bool
    half_blocks: bool
    most_halves: int
    selection_block: int


class Passes:
    """Passes of calls that look alike, prepared by their backend when the first of them runs.

    Attributes:
        forward: see ``Backend.forward_for``.
        backward: see ``Backend.backward_for``; by what is wanted, each behind the guard of its tensors.
    """

    __slots__ = ("backward", "forward")

    def __init__(self) -> None:
        """Leaves each pass to the first call that needs it."""
        self.forward: Callable[[AttentionInputs], Results] | None = None
        self.backward: dict[tuple[bool, ...], tuple[Callable[..., bool], Callable[[BackwardCall], Gradients]]] = {}


class Plan(NamedTuple):
    """All that calls which look alike share; ``backend`` is the name of the one that serves them.

    ``most_listed``: see ``Backend.most_listed``. ``lasts``: whether calls that look alike get the same backend later.
    ``passes`` is None where calls have no looks, as they need the dispatcher.
    """

    options: Options
    spec: AttentionSpec
    backend: str
    max_seqlens: tuple[int, int]
    most_listed: int = 0
    lasts: bool = True
    passes: Passes | None = None


def prepare(call: AttentionCall, backward: bool, watched: bool = False) -> tuple[AttentionInputs, Plan]:
    """A call, checked but for its options, with a backend and the tables of its block mask.

    ``backward``: gradients may be wanted, so that the tables have columns. ``watched``:
    ``torch_modes.needs_dispatcher`` is true of its tensors.

    Raises:
        TypeError: a tensor of the wrong type or dtype, or another kind of mask.
        ValueError: a tensor of the wrong shape, strides or device, or no backend that can serve the call.
        RuntimeError: as ``BlockMask.tables`` does.
    """
    planned = make_plan if watched else cached_plan
    plan, tables, selected, block_mask = planned(call), None, None, call.block_mask
    if block_mask is not None and block_mask.selection_block:
        selected = block_mask.selected()
        if watched:
            selected = kept.as_fakes(selected)
        else:
            check_plain("block_mask", selected, ", as q is one")
    elif block_mask is not None:
        tables = block_mask.tables(call.q.device, backward=backward, most_listed=plan.most_listed)
        if _known_of_waits(block_mask) != _known_of_waits(plan.spec):  # a search has found it just now
            plan = planned(call)
            tables = block_mask.tables(call.q.device, backward=backward, most_listed=plan.most_listed)
        if watched:
            tables = kept.as_fakes(tables)
    others = *plan.max_seqlens, tables, selected
    return AttentionInputs._make(call[:NUM_TENSORS] + others), plan


def recalled(call: AttentionCall) -> Plan | None:
    """The plan of a call that looks like one of the last with its options, and so does not need the dispatcher.

    None if there is none, or a mode is on. Calls with a mask, bias or block mask are not found.
    """
    if call.block_mask is not None or call.mask is not None or call.bias is not None or is_thread_watched():
        return None
    tensors, key = _given(call)
    if not have_strides(tensors):
        return None
    for looks_alike, plan in _kept.get(key, ()):
        if looks_alike(*tensors):
            found: Plan = plan
            return found
    return None


def remember(call: AttentionCall, plan: Plan) -> None:
    """Has ``recalled`` find a plan for calls that look like this one, which does not need the dispatcher."""
    if call.block_mask is not None or call.mask is not None or call.bias is not None or not plan.lasts:
        return
    tensors, key = _given(call)
    if len(set(map(id, tensors))) == len(tensors):  # guards would not find it
        _keep(key, ((looks_like(tensors), plan), *_kept.get(key, ())[: _LOOKS_AT_MOST - 1]))


def _given(call: AttentionCall) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The tensors of a call, offsets once if queries and keys share them, and all else that its plan follows from."""
    q, k, v, cu_q, cu_k, used_q, used_k, sink, *_ = call
    is_shared = cu_q is cu_k
    others = [x for x in (cu_q, None if is_shared else cu_k, used_q, used_k, sink) if x is not None]
    are_absent = cu_q is None, cu_k is None, is_shared, used_q is None, used_k is None, sink is None
    return [q, k, v, *others], (are_absent, call.bounds, call.options, call.backend, *dispatch.BACKENDS.values())


def _keep(key: tuple[Any, ...], value: Any) -> None:
    if len(_kept) >= _KEPT_AT_MOST:
        _kept.clear()
    _kept[key] = value


def make_plan(call: AttentionCall) -> Plan:
    """The plan of any call; raises as ``prepare`` does."""
    inputs = validate.check(call)
    spec = spec_of(call, inputs)
    selection = dispatch.select(spec, inputs, call.backend)
    dispatch.warn_of_fallback(selection, inputs.q.device)
    most = 0
    if call.block_mask is not None:
        most = dispatch.BACKENDS[selection.name].most_listed(spec, inputs, call.block_mask)
    return Plan(call.options, spec, selection.name, (inputs.max_seqlen_q, inputs.max_seqlen_k), most, selection.lasts)


def cached_plan(call: AttentionCall) -> Plan:
    """``make_plan``, memoised on shapes, strides, dtypes, devices and options.

    Tensors that need no dispatcher are strided and have numbers for sizes: nothing else is there to go by.
    """
    with without_default_device():
        looks = tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call[:NUM_TENSORS]])
    mask, block_mask = None, call.block_mask
    if block_mask is not None:
        validate.check_type_of_block_mask(block_mask)
        known = known_of_block_mask(block_mask), block_mask.half_columns > 0
        mask = block_mask.sizes, block_mask.order_sets, block_mask.device, known
    key = (looks, call.bounds, mask, call.options, call.backend, *dispatch.BACKENDS.values())
    plan: Plan | None = _kept.get(key)
    if plan is None:
        plan = make_plan(call)._replace(passes=Passes())
        if plan.lasts:
            _keep(key, plan)
    return plan


def spec_of(call: AttentionCall, inputs: AttentionInputs) -> AttentionSpec:
    """The spec of a call, of which ``inputs`` are checked, before the tables of its block mask are made."""
    spec = AttentionSpec.of(inputs, call.options)
    if call.block_mask is None:
        return spec
    known = known_of_block_mask(call.block_mask)
    return spec._replace(has_block_mask=not known.selection_block, **known._asdict())


def _known_of_waits(x: BlockMask | AttentionSpec) -> tuple[bool, bool]:
    """Facts about a block mask that a search for its order may find."""
    return x.low_contention, x.has_m_block_order


def known_of_block_mask(x: BlockMask | AttentionSpec) -> KnownOfBlockMask:
    """Facts about a block mask, or of the spec of a call with one."""
    return KnownOfBlockMask(x.low_contention, x.has_m_block_order, x.half_blocks, x.most_halves, x.selection_block)
