"""Column sums by a kernel of their own, where the backend that serves a call has one."""

from torch import Tensor

from flash_attn_cute import settings
from flash_attn_cute.calls import dispatch
from flash_attn_cute.calls.attend import is_replaced
from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.calls.prepared_call import prepare
from flash_attn_cute.calls.torch_modes import (
    autocast,
    is_any_autocast_enabled,
    needs_dispatcher,
    without_default_device,
)
from flash_attn_cute.lengths import read_sequences


def column_sums(call: AttentionCall, lse: Tensor) -> Tensor | None:
    """Sums of each key's probabilities; None if there is no kernel, or a mode or transform watches the call.

    Args:
        call: with windows and padding at the most.
        lse: of its scores.

    Raises:
        TypeError: as ``attend`` does.
        ValueError: likewise.
    """
    if is_replaced() or needs_dispatcher((*call[:NUM_TENSORS], lse)):
        return None
    if is_any_autocast_enabled():
        call = autocast(call)
    inputs, plan = prepare(call, backward=False)
    if (plan.spec.packed or plan.spec.has_seqused) and settings.check_data():
        read_sequences(inputs)
    with without_default_device():
        return dispatch.BACKENDS[plan.backend].column_sums(plan.spec, inputs, lse.float())
