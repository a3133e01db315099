"""Dense calls with a block mask that other arguments say as well, as calls without one.

A mask that is a window becomes ``window_size``, and documents that follow each other become packed sequences: views of
q, k and v, whose kernels are faster and read no tables. Masks beside padding stay, as windows would align to the real
lengths; so do documents beside mask or bias, which packed calls count in another way, and padding beside a sink.
Documents stay, too, where lists are faster: if they are short, or if q, k and v had to be copied. Calls with
``deterministic="invariant"`` have them packed nevertheless, as lists cannot keep that promise.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.problem.spec import Options, Results, statically_true
from flash_attn_cute.sparsity.block_mask import BlockMask
from flash_attn_cute.sparsity.plain import Offsets


class Lowered(NamedTuple):
    """A call without a block mask: ``shape`` is (batch, seqlen) of a call that has become packed."""

    call: AttentionCall
    shape: tuple[int, int] | None = None

    def unpacked(self, results: Results) -> Results:
        """The results as the dense call has them."""
        if self.shape is None:
            return results
        out, lse, max_logits, _ = results
        return Results(out.unflatten(0, self.shape), lse.unflatten(1, self.shape).transpose(0, 1), max_logits)


def of(call: AttentionCall) -> Lowered:
    """The call without its block mask, or as it is if that has to stay.

    It stays in any call that is not valid, too: that says what is wrong in the words of what was called. Waits for the
    device at the first call with documents.

    Raises:
        RuntimeError: documents have not been looked at, and torch.compile or a CUDA graph is recording.
    """
    block_mask = call.block_mask
    if not isinstance(block_mask, BlockMask) or call.bounds is not None:
        return Lowered(call)
    plain = block_mask.plain
    has_padding = call.seqused_q is not None or call.seqused_k is not None
    if plain is None or has_padding or not _fits(block_mask, call):
        return Lowered(call)
    options = call.options._replace(
        window_left=_narrower(call.options.window_left, plain.left),
        window_right=_narrower(call.options.window_right, plain.right),
    )
    if plain.documents is None:
        return Lowered(AttentionCall(*call[:NUM_TENSORS], None, None, options, call.backend))
    if call.mask is not None or call.bias is not None or not _has_documents_rows(call, block_mask):
        return Lowered(call)
    offsets, is_needed = block_mask.offsets, options.packing_invariant
    # With a sink lse is its logit where a query sees nothing, but -inf where it is padding.
    if offsets is None or (offsets.seqused is not None and call.learnable_sink is not None):
        return Lowered(call)
    if not is_needed and (offsets.are_short or not _is_packed_already(call)):
        return Lowered(call)
    return _packed(call, offsets, options)


def _fits(block_mask: BlockMask, call: AttentionCall) -> bool:
    """Whether q, k and v have the dimensions and lengths that the mask is for."""
    for x in call[:3]:
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 4:
            return False
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    return statically_true(seqlen_q == block_mask.seqlen_q) and statically_true(seqlen_k == block_mask.seqlen_k)


def _has_documents_rows(call: AttentionCall, block_mask: BlockMask) -> bool:
    """Whether q, k and v are plain tensors of the (batch, seqlen) rows that a mask of documents is for."""
    q, k, v = qkv = call[:3]
    return (
        all(type(x) in (Tensor, Parameter) and x.device == block_mask.device for x in qkv)
        and k.shape[:3] == v.shape[:3]
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and statically_true(q.shape[0] == block_mask.batch)
    )


def _is_packed_already(call: AttentionCall) -> bool:
    """Whether the rows of all batch entries follow each other in memory."""
    return call.q.shape[0] == 1 or all(x.stride(0) == x.shape[1] * x.stride(1) for x in call[:3])


def _packed(call: AttentionCall, offsets: Offsets, options: Options) -> Lowered:
    cu, used, longest = offsets.cu_seqlens, offsets.seqused, offsets.longest
    if used is not None:  # rows that see nothing are zero, and no padding in a dense call
        options = options._replace(zero_padding=True)
    q, k, v = (x.flatten(0, 1) for x in call[:3])
    tensors = (q, k, v, cu, cu, used, used, call.learnable_sink, None, None)
    batch, seqlen = call.q.shape[:2]
    return Lowered(AttentionCall(*tensors, (longest, longest), None, options, call.backend), (batch, seqlen))


def _narrower(a: int | None, b: int | None) -> int | None:
    """The narrower of two sides of windows, of which None shows all."""
    return b if a is None else a if b is None else min(a, b)
