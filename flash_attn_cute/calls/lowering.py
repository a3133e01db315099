"""Dense calls with a block mask that other arguments say as well, as calls without one.

A mask that is a window becomes ``window_size``, and documents that follow each other become packed sequences: views of
q, k and v, whose kernels are faster and read no tables. Masks beside padding stay, as windows would align to the real
lengths; so do documents beside mask or bias, which packed calls count in another way, and padding beside a sink.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from flash_attn_cute.calls import ops, prepared_call
from flash_attn_cute.sparsity.block_mask import BlockMask
from flash_attn_cute.sparsity.plain import Offsets
from flash_attn_cute.spec import Options, statically_true


class Lowered(NamedTuple):
    """A call without a block mask: ``shape`` is (batch, seqlen) of a call that has become packed."""

    tensors: prepared_call.Tensors
    bounds: prepared_call.Bounds
    options: Options
    shape: tuple[int, int] | None

    def unpacked(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The results as the dense call has them."""
        if self.shape is None:
            return out, lse
        return out.unflatten(0, self.shape), lse.unflatten(1, self.shape).transpose(0, 1)


def of(
    tensors: prepared_call.Tensors, bounds: prepared_call.Bounds, block_mask: BlockMask | None, options: Options
) -> Lowered | None:
    """A call, of which only the options have been checked, without its block mask; None if it has to stay.

    It stays in any call that is not valid, too: that says what is wrong in the words of what was called. Waits for the
    device at the first call with documents.

    Raises:
        RuntimeError: documents have not been looked at, and torch.compile or a CUDA graph is recording.
    """
    q, k, v, _, _, seqused_q, seqused_k, learnable_sink, mask, bias = tensors
    if bounds or not isinstance(block_mask, BlockMask) or seqused_q is not None or seqused_k is not None:
        return None
    plain = block_mask.plain
    if plain is None or ops.is_replaced() or not _fits(block_mask, q, k, v):
        return None
    options = options._replace(
        window_left=_narrower(options.window_left, plain.left),
        window_right=_narrower(options.window_right, plain.right),
    )
    if plain.documents is None:
        return Lowered(tensors, (), options, None)
    if mask is not None or bias is not None or not _is_packed_already(block_mask, q, k, v):
        return None
    offsets = block_mask.offsets
    # With a sink lse is its logit where a query sees nothing, but -inf where it is padding.
    if offsets is None or (offsets.seqused is not None and learnable_sink is not None):
        return None
    return _packed((q, k, v), learnable_sink, offsets, options)


def _fits(block_mask: BlockMask, q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v have the dimensions and lengths that the mask is for."""
    if not all(isinstance(x, Tensor) and not x.is_nested and x.ndim == 4 for x in (q, k, v)):
        return False
    return statically_true(q.shape[1] == block_mask.seqlen_q) and statically_true(k.shape[1] == block_mask.seqlen_k)


def _is_packed_already(block_mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the rows of all batch entries follow each other in memory; they are (batch, seqlen) of the mask."""
    batch = q.shape[0]
    return (
        all(type(x) in (Tensor, Parameter) and x.device == block_mask.device for x in (q, k, v))
        and k.shape[:3] == v.shape[:3]
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and statically_true(batch == block_mask.batch)
        and (batch == 1 or all(x.stride(0) == x.shape[1] * x.stride(1) for x in (q, k, v)))
    )


def _packed(qkv: tuple[Tensor, ...], learnable_sink: Tensor | None, offsets: Offsets, options: Options) -> Lowered:
    cu, used = offsets.cu_seqlens, offsets.seqused
    if used is not None:  # rows that see nothing are zero, and no padding in a dense call
        options = options._replace(zero_padding=True)
    tensors = (*(x.flatten(0, 1) for x in qkv), cu, cu, used, used, learnable_sink, None, None)
    batch, seqlen = qkv[0].shape[:2]
    return Lowered(tensors, (offsets.longest, offsets.longest), options, (batch, seqlen))


def _narrower(a: int | None, b: int | None) -> int | None:
    """Of two sides of windows, of which None shows all."""
    return b if a is None else a if b is None else min(a, b)
