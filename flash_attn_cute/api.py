"""The public functions: exact attention over dense batches and over packed sequences."""

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor

from flash_attn_cute.calls import ops, torch_modes, user_errors, validate
from flash_attn_cute.calls.attend import Result, attend, check, is_replaced
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.user_errors import says_where_to_look
from flash_attn_cute.problem import spec
from flash_attn_cute.problem.spec import Deterministic as Deterministic
from flash_attn_cute.problem.spec import Window
from flash_attn_cute.sparsity.block_mask import BlockMask

if TYPE_CHECKING:
    from typing_extensions import Unpack

# For integrations, which know nothing below this module.
is_same_memory = torch_modes.is_same_memory
needs_dispatcher = torch_modes.needs_dispatcher
is_over_ranks = is_replaced
rules_of_dtensors = ops.rules_of_dtensors
check_layout = spec.check_layout
call = user_errors.call
check_int = spec.check_int


class SharedKeywords(TypedDict, total=False):
    """Types of the keywords that all attention functions have: the overloads read them.

    Those are not among them that say what is returned, ``return_lse`` and ``return_max_logits``.
    """

    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    learnable_sink: Tensor | None
    block_mask: BlockMask | None
    deterministic: Deterministic
    zero_padding: bool
    backend: str | None
    dropout_p: float


class Keywords(SharedKeywords, total=False):
    """Types of the keywords of ``flash_attn_func`` and ``flash_attn_varlen_func``, likewise."""

    seqused_q: Tensor | None
    seqused_k: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    precise_gradients: bool


_OTHER_ARGUMENTS = (
    "flash_attn_cute.integrations has functions with the arguments of flash-attn, of PyTorch's "
    "scaled_dot_product_attention and varlen_attn, and of Transformer Engine"
)


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
    **options: "Unpack[Keywords]",
) -> Tensor: ...


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
    **options: "Unpack[Keywords]",
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    return_max_logits: Literal[True],
    **options: "Unpack[Keywords]",
) -> tuple[Tensor, ...]: ...


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    return_max_logits: bool = ...,
    **options: "Unpack[Keywords]",
) -> Tensor | tuple[Tensor, ...]: ...


@says_where_to_look(_OTHER_ARGUMENTS)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: BlockMask | None = None,
    deterministic: Deterministic = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    zero_padding: bool = True,
    precise_gradients: bool = False,
    backend: str | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """Exact attention over a dense batch, differentiable in q, k, v, bias, learnable_sink and through lse.

    A score is ``s = softmax_scale * q . k``; with a softcap, ``s = softcap * tanh(s / softcap)``; then bias is
    added; then masks hide keys. Causal and windowed attention are aligned to the bottom right, as for a KV
    cache: query i sees key j when ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``.
    A query that sees no key gives out 0, lse -inf (with a sink: the sink's logit) and zero gradients. If it is the
    window that hides all keys from it, it and the gradient of its out may hold anything, NaN included.

    Under ``torch.autocast`` q, k, v and bias are first cast to its dtype, which out then has; float64 stays.

    q, k and v may also be jagged nested tensors (``torch.nested``, layout=torch.jagged) of the same dimensions, the
    second of them ragged, k and v with the same offsets. Then this is ``flash_attn_varlen_func`` of their values, to
    whose dimensions mask and bias broadcast, seqused is not allowed, and out and lse are nested, with q's offsets.
    Bounds on the lengths are the maxima that the tensors know, or else their rows; nothing waits for the device.

    Args:
        q: (batch, seqlen_q, nheads, d), float16, bfloat16, float32 or float64. Any strides with a contiguous
            last dimension, here and in k and v.
        k: (batch, seqlen_k, nheads_k, d), of q's dtype. nheads_k divides nheads (GQA, MQA): query head h reads
            key head ``h // (nheads // nheads_k)``.
        v: (batch, seqlen_k, nheads_k, d_v), of q's dtype.
        seqused_q: (batch,) int32. Only the first ``seqused_q[b]`` query rows of entry b are real, the rest is
            padding: ignored whatever it holds, NaN included, and zero in out and gradients (lse: -inf).
        seqused_k: (batch,) int32, likewise for the rows of k and v. Windows align to the real lengths.
        softmax_scale: the factor before softmax, up to 2**127 in magnitude; None means 1 / sqrt(d).
        causal: hide the keys behind a query's own position.
        window_size: (left, right), how many keys before and behind its own position a query sees; None or
            negative means unbounded. With causal, right is 0.
        softcap: bound on the scores' magnitude, 2**-126 to 2**127; 0 means none.
        learnable_sink: (nheads,), float32 or q's dtype. One more logit in each softmax's denominator, and in lse.
        mask: bool, broadcastable to (batch, nheads, seqlen_q, seqlen_k), True = may attend. Any strides, here and
            in bias; never expanded. It hides scores, not values: rows that hold NaN or Inf belong behind seqused.
            Two dimensions are (seqlen_q, seqlen_k); for a padding mask (batch, seqlen_k) give mask[:, None, None, :],
            or see ``flash_attn_cute.padding``, which skips what is hidden.
        bias: float32 or q's dtype, broadcastable to (batch, nheads, seqlen_q, seqlen_k), added to the scores.
            Its gradient has its own shape.
        block_mask: which keys each query sees, as a ``BlockMask`` over (seqlen_q, seqlen_k), so that the call costs
            what its visible blocks cost. Its batch is 1 or that of q, its heads are 1, nheads or nheads_k. Causal,
            window, mask and seqused hide more; positions of the block mask are rows, wherever the real ones end. Rows
            of no document are padding, ignored whatever they hold; other rows that it hides have to be finite. In what
            is compiled or captured it has to be built before (``BlockMask.build``). One of ``from_selection`` is over
            (seqlen_q, seqlen_k), too, and goes without mask and bias.
        deterministic: the same inputs give the same bits, whatever else the device runs. "invariant": a document also
            has the same bits whatever call it is part of, packed or as an entry of a dense batch; not under a
            block_mask, unless that is a window or documents (``docs/determinism.md`` says which).
        return_lse: also return the log-sum-exp of the scores.
        return_max_logits: also return the largest logit of each head, for QK-clip: the maximum of softmax_scale * q . k
            over all pairs that masks, windows and lengths leave visible, in all sequences. Softcap, bias and sink do
            not count, nor does a bias of -inf hide. No gradient goes through it.
        zero_padding: False leaves padding rows of the results and gradients unwritten.
        precise_gradients: keep eight more bits of out, a byte an element, for the backward pass. Gradients then do not
            suffer from the rounding of out, which is most of their error where keys and values have means that do not
            vanish; out is the same.
        backend: None picks the best that can serve the call; a name runs that one or raises.
        dropout_p: 0.0, for those who come from flash-attn; ``integrations.flash_attn`` takes all its arguments.

    Returns:
        out (batch, seqlen_q, nheads, d_v) of q's dtype; with return_lse, (out, lse), lse being natural
        logarithms, (batch, nheads, seqlen_q), float32 (float64 for float64 inputs). With return_max_logits the tuple
        ends with max_logits, (nheads,), of lse's dtype, -inf for a head that sees nothing.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or a backend that cannot serve the
            call. Either message names the argument, what was expected and what came.
    """
    options = validate.check_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        zero_padding=zero_padding,
        precise_gradients=precise_gradients,
        backend=backend,
        dropout_p=dropout_p,
    )
    call = AttentionCall(
        q, k, v, None, None, seqused_q, seqused_k, learnable_sink, mask, bias, None, block_mask, options, backend
    )
    return attend(call).asked(return_lse)


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
    **options: "Unpack[Keywords]",
) -> Tensor: ...


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
    **options: "Unpack[Keywords]",
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *,
    return_lse: bool = ...,
    return_max_logits: Literal[True],
    **options: "Unpack[Keywords]",
) -> tuple[Tensor, ...]: ...


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *,
    return_lse: bool = ...,
    return_max_logits: bool = ...,
    **options: "Unpack[Keywords]",
) -> Tensor | tuple[Tensor, ...]: ...


@says_where_to_look(_OTHER_ARGUMENTS)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: BlockMask | None = None,
    deterministic: Deterministic = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    zero_padding: bool = True,
    precise_gradients: bool = False,
    backend: str | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """Exact attention over packed sequences of different lengths; semantics as ``flash_attn_func``.

    Sequence b owns rows ``cu_seqlens[b] .. cu_seqlens[b + 1]``, of which with seqused only the first
    ``seqused[b]`` are real. Every other row, between sequences, before the first and behind the last, is padding:
    ignored whatever it holds, NaN included, and zero in out and gradients (lse: -inf).

    Args:
        q: (total_q, nheads, d), float16, bfloat16, float32 or float64. Any strides with a contiguous last
            dimension, here and in k and v.
        k: (total_k, nheads_k, d), of q's dtype; nheads_k divides nheads.
        v: (total_k, nheads_k, d_v), of q's dtype.
        cu_seqlens_q: (batch + 1,) int32, non-decreasing offsets of the sequences' query rows.
        cu_seqlens_k: (batch + 1,) int32, those of their rows in k and v. May be the same tensor, and should be where
            the lengths are equal: under causal masks that saves the backward pass some work.
        max_seqlen_q: upper bound on the real query rows of any sequence, an int or a 0-d integer tensor (which is
            never read, so it cannot make the host wait).
        max_seqlen_k: likewise for keys.
        seqused_q: (batch,) int32, the real query rows of each sequence if fewer than it owns.
        seqused_k: (batch,) int32, likewise for the rows of k and v. Windows align to the real lengths.
        softmax_scale: the factor before softmax, up to 2**127 in magnitude; None means 1 / sqrt(d).
        causal: hide the keys behind a query's own position.
        window_size: (left, right), see ``flash_attn_func``.
        softcap: bound on the scores' magnitude, 2**-126 to 2**127; 0 means none.
        learnable_sink: (nheads,), see ``flash_attn_func``.
        mask: bool, broadcastable to (nheads, total_q, max_seqlen_k), keys counted from the start of their own
            sequence; True = may attend.
        bias: float32 or q's dtype, broadcastable to (nheads, total_q, max_seqlen_k), likewise. Entries that
            belong to padding are ignored and have a gradient of zero.
        block_mask: a ``BlockMask`` over (total_q, total_k), rows and not positions within sequences, see
            ``flash_attn_func``; its batch is 1. Of what it shows a query sees the keys of its own sequence. Blocks of
            ``from_selection`` are counted from the start of that.
        deterministic: False, True or "invariant", see ``flash_attn_func``.
        return_lse: also return the log-sum-exp of the scores.
        return_max_logits: also return the largest logit of each head in all sequences, see ``flash_attn_func``.
        zero_padding: False leaves padding rows of the results and gradients unwritten.
        precise_gradients: keep eight more bits of out for the backward pass, see ``flash_attn_func``.
        backend: None picks the best that can serve the call; a name runs that one or raises.
        dropout_p: 0.0, for those who come from flash-attn; ``integrations.flash_attn`` takes all its arguments.

    Returns:
        out (total_q, nheads, d_v) of q's dtype; with return_lse, (out, lse), lse being natural logarithms,
        (nheads, total_q), float32 (float64 for float64 inputs). With return_max_logits the tuple ends with max_logits,
        (nheads,), of lse's dtype, -inf for a head that sees nothing.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value, or a backend that cannot serve the
            call. Either message names the argument, what was expected and what came.
    """
    options = validate.check_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        zero_padding=zero_padding,
        precise_gradients=precise_gradients,
        backend=backend,
        dropout_p=dropout_p,
    )
    bounds = validate.check_bounds(max_seqlen_q, max_seqlen_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    call = AttentionCall(q, k, v, *lengths, learnable_sink, mask, bias, bounds, block_mask, options, backend)
    return attend(call).asked(return_lse)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor = 0,
    max_seqlen_k: int | Tensor = 0,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> None:
    """Checks arguments of a dense call, or with cu_seqlens of a packed one, for integrations that compute with them.

    Raises:
        TypeError: as both functions do.
        ValueError: likewise.
    """
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    bounds = validate.check_bounds(max_seqlen_q, max_seqlen_k) if is_packed else None
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    check(AttentionCall(q, k, v, *lengths, bounds=bounds, options=validate.check_options(**options)))
