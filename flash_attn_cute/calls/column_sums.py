"""Column sums by a kernel of their own, where the backend that serves a call has one."""

from torch import Tensor

from flash_attn_cute.calls import dispatch, ops
from flash_attn_cute.calls.attend import is_replaced
from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.calls.prepared_call import prepare
from flash_attn_cute.calls.torch_modes import needs_dispatcher


def column_sums(call: AttentionCall, lse: Tensor) -> Tensor | None:
    """Sums of each key's probabilities; None if there is no kernel, or ``context_parallel`` takes the calls.

    The call has windows and padding at the most; autocast has been applied. ``lse`` is of its scores, a floating-point
    tensor. Raises as ``attend`` does, TypeError if one of q and lse alone is a DTensor, and ValueError for an lse of
    another shape or device.
    """
    watched = needs_dispatcher((*call[:NUM_TENSORS], lse))
    inputs, plan = prepare(call, backward=False, watched=watched)
    if lse.shape != inputs.lse_shape or lse.device != inputs.q.device:
        expected = f"(..., nheads, queries) of q, {tuple(inputs.q.shape)} on {inputs.q.device}"
        raise ValueError(f"lse: expected {expected}, got {tuple(lse.shape)} on {lse.device}")
    rules = ops.rules_of_dtensors() if watched else None
    if rules is not None:
        rules.check_beside("lse", lse, inputs.q)
    if is_replaced() or not dispatch.BACKENDS[plan.backend].has_column_sums:
        return None
    return ops.column_sums(inputs, plan, lse, watched)
