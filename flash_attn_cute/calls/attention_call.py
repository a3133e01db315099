"""A call of attention by the names of its arguments."""

from typing import Any, Final, NamedTuple, TypeAlias

from flash_attn_cute.problem.spec import Options
from flash_attn_cute.sparsity.block_mask import BlockMask

# (max_seqlen_q, max_seqlen_k) of a packed call, None where no host knows one.
Bounds: TypeAlias = tuple[int | None, int | None]

NUM_TENSORS: Final = 10  # that come first in ``AttentionCall`` and in ``AttentionInputs``


class AttentionCall(NamedTuple):
    """Arguments of one call: options and the types of bounds are checked, everything else is not.

    The tensors come first, as in ``AttentionInputs``. ``bounds`` is None for a dense call. ``backend`` is the user's.
    """

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    learnable_sink: Any = None
    mask: Any = None
    bias: Any = None
    bounds: Bounds | None = None
    block_mask: BlockMask | None = None
    options: Options = Options()
    backend: str | None = None

    def with_tensors(self, **tensors: Any) -> "AttentionCall":
        """Replaces tensors by name."""
        return self._replace(**tensors)
