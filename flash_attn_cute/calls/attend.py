"""A call from top to bottom: nested tensors and autocast, lowering, validation and a backend, operators.

Down to lowering a call is an ``AttentionCall``, as users write it; below it has ``AttentionInputs`` and a ``Plan``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from torch import Tensor

from flash_attn_cute.calls import lowering, nested, ops, validate
from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.calls.prepared_call import Plan, prepare, recalled, remember
from flash_attn_cute.calls.torch_modes import autocast, is_any_autocast_enabled, is_recorded, needs_dispatcher
from flash_attn_cute.problem.spec import AttentionInputs, Results

# ``out``, or a tuple of it and what else is asked for: lse, then max_logits.
Result: TypeAlias = Tensor | tuple[Tensor, ...]
# A function in the place of operators and backends. It is given a call, and what prepares it or raises what is wrong.
Replacement: TypeAlias = Callable[[AttentionCall, Callable[[], tuple[AttentionInputs, Plan]]], Results]
_replacement: Replacement | None = None


def attend(call: AttentionCall) -> Results:
    """Results of a call; out and lse are differentiable.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or no backend that can serve the call.
        NotImplementedError: an input carries a tangent of forward-mode differentiation.
    """
    if is_any_autocast_enabled():
        call = autocast(call)
    if _replacement is not None:
        return _replacement(call, partial(_prepared_for_replacement, call))
    known = recalled(call)
    if known is not None:
        inputs = AttentionInputs._make((*call[:NUM_TENSORS], *known.max_seqlens, None, None))
        return ops.attention(inputs, known, False)
    watched = needs_dispatcher(call[:NUM_TENSORS])
    if watched and nested.is_nested(call):
        packed, jagged = nested.as_packed(call)
        return jagged.wrap(attend(packed))
    lowered = None if call.block_mask is None else lowering.of(call)
    if lowered is not None:
        call = lowered.call
    backward = call.block_mask is not None and is_recorded(call[:NUM_TENSORS], watched)
    inputs, plan = prepare(call, backward, watched)
    if not watched and lowered is None:
        remember(call, plan)
    results = ops.attention(inputs, plan, watched)
    return results if lowered is None else lowered.unpacked(results)


def _prepared_for_replacement(call: AttentionCall) -> tuple[AttentionInputs, Plan]:
    """``prepare`` for a replacement."""
    watched = needs_dispatcher(call[:NUM_TENSORS])
    if watched and nested.is_nested(call):
        raise TypeError(
            "q: expected a dense tensor within context_parallel, got a nested one: give flash_attn_varlen_func the "
            "values of this rank's rows, and cu_seqlens of all rows"
        )
    return prepare(call, backward=False, watched=watched)


def check(call: AttentionCall) -> None:
    """Checks the tensors of a call ahead of it, for those who compute with them first; raises as ``attend`` does."""
    validate.check(autocast(call) if is_any_autocast_enabled() else call)


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
