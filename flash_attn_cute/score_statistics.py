"""Statistics of attention's probabilities: the entropy of each query's, and the sum of each key's.

Losses for indexers and routers, and logs of attention that collapses, want them.

- A query's mean score is its product with the mean of the keys that it attends to, which is attention with v = k.
- A key's sum over the queries is ``sum_i exp(s_ij - lse_i)``. On Hopper a kernel of its own computes it. Elsewhere it
  is exp of the log-sum-exp of attention from keys to queries: ``-lse`` comes as three more columns of q, its parts of
  q's dtype, beside a power of two in those of k.

Neither takes memory that grows with the number of pairs, or has a gradient.
"""

import math
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from flash_attn_cute.calls import column_sums as own_kernel
from flash_attn_cute.calls import user_errors, validate
from flash_attn_cute.calls.attend import attend
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.torch_modes import autocast, is_any_autocast_enabled
from flash_attn_cute.problem.spec import Window
from flash_attn_cute.sparsity.block_mask import BlockMask

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Pairs", "column_sums", "row_entropy"]


class Pairs(TypedDict, total=False):
    """Which pairs of a query and a key there are, and what makes a score of them: arguments of ``flash_attn_func``.

    With the first four, which go together, sequences are packed, and arguments those of ``flash_attn_varlen_func``.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor
    max_seqlen_k: int | Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: Window
    backend: str | None


_OF_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# The argument that says of keys what each says of queries, or the other way round.
_OF_OTHER_SIDE = {
    f"{stem}{a}": f"{stem}{b}" for stem in ("", "cu_seqlens_", "max_seqlen_", "seqused_") for a, b in ("qk", "kq")
}


@torch.no_grad()
def row_entropy(
    q: Tensor, k: Tensor, *, mask: Tensor | None = None, block_mask: BlockMask | None = None, **pairs: "Unpack[Pairs]"
) -> Tensor:
    """Entropy of each query's probabilities over the keys that it sees, ``-sum_j p_ij log p_ij`` in nats.

    A softcap, a bias and a sink are not part of them. A row's mean score is rounded to q's dtype, so its entropy is
    off by up to 1/128 of its largest score in bfloat16, and may be that much below 0.

    Args:
        q: (batch, seqlen_q, nheads, d), or packed (total_q, nheads, d).
        k: (batch, seqlen_k, nheads_k, d), or packed (total_k, nheads_k, d).
        mask: see ``flash_attn_func``.
        block_mask: likewise.
        pairs: see ``Pairs``.

    Returns:
        (batch, nheads, seqlen_q), or packed (nheads, total_q), float32, float64 for float64 inputs. 0 for a query that
        sees no key, and for padding.

    Raises:
        TypeError: an argument that is not of ``Pairs``; else as ``flash_attn_func`` does.
        ValueError: as ``flash_attn_func`` does.
    """
    _refuse_unknown(pairs)
    given = _call(q, k, pairs)
    mean_k, lse, *_ = attend(given._replace(mask=mask, block_mask=block_mask))
    q = given.q
    # As products of float16 can be too large for it, and those of bfloat16 cannot.
    products = q * mean_k if q.dtype == torch.bfloat16 else q.to(lse.dtype) * mean_k
    means = products.sum(-1, dtype=lse.dtype).transpose(-1, -2)
    return (lse - _scale(given) * means).where(lse > -math.inf, 0.0)


@torch.no_grad()
def column_sums(q: Tensor, k: Tensor, lse: Tensor, **pairs: "Unpack[Pairs]") -> Tensor:
    """Sum of each key's probabilities over the queries that see it, ``sum_i exp(s_ij - lse_i)``, for each query head.

    They are exact to the rounding of float32. d is 248 at the most where kernels other than Hopper's serve a call, as
    they are given 8 columns more.

    Args:
        q: (batch, seqlen_q, nheads, d), or packed (total_q, nheads, d).
        k: (batch, seqlen_k, nheads_k, d), or packed (total_k, nheads_k, d).
        lse: what ``return_lse=True`` returns of the same pairs, (batch, nheads, seqlen_q) or packed (nheads, total_q).
            If it is of attention with a sink, probabilities are those beside the sink.
        pairs: see ``Pairs``.

    Returns:
        (batch, nheads, seqlen_k), or packed (nheads, total_k), float32, float64 for float64 inputs. 0 for a key that no
        query sees, and for padding.

    Raises:
        TypeError: an argument that is not of ``Pairs``; else as ``flash_attn_func`` does.
        ValueError: lse of another shape or device; a softmax_scale of 0, or, where kernels other than Hopper's serve a
            call, one whose inverse is not in the range of q's dtype; else as ``flash_attn_func`` does.
    """
    _refuse_unknown(pairs)
    given = _call(q, k, pairs)
    if not isinstance(lse, Tensor) or not lse.is_floating_point():
        got = lse.dtype if isinstance(lse, Tensor) else type(lse).__name__
        raise TypeError(f"lse: expected a floating-point tensor, got {got}")
    if given.options.softmax_scale == 0:
        raise ValueError("softmax_scale: expected a number other than 0, got 0")
    sums = own_kernel.column_sums(given, lse)
    return _sums_of_turned(given, lse) if sums is None else sums


def _sums_of_turned(given: AttentionCall, lse: Tensor) -> Tensor:
    """Column sums by attention from keys to queries."""
    q, k, scale, rows = given.q, given.k, _scale(given), lse.transpose(-1, -2)[..., None]
    hidden = rows == -math.inf
    factor = _inverse_of(scale, q.dtype)
    # Eight columns more: lse in three numbers, and the factor that it is divided by.
    parts = _parts((rows / -(scale * factor)).masked_fill(hidden, -3e4), q.dtype)
    longer_q = torch.cat((q.masked_fill(hidden, 0.0), torch.nn.functional.pad(parts, (0, 5))), -1)
    by_group = k[..., None, :].expand(*k.shape[:-1], q.shape[-2] // k.shape[-2], -1)
    factors, zeros = (torch.full_like(by_group[..., :1], x) for x in (factor, 0.0))
    longer_k = torch.cat((by_group, *[factors] * 3, *[zeros] * 5), -1).flatten(-3, -2)
    left, right = given.options.window_left, given.options.window_right
    turned = AttentionCall(
        longer_k,
        longer_q,
        longer_q[..., :8],
        given.cu_seqlens_k,
        given.cu_seqlens_q,
        given.seqused_k,
        given.seqused_q,
        bounds=None if given.bounds is None else given.bounds[::-1],
        options=given.options._replace(softmax_scale=scale, window_left=right, window_right=left),
        backend=given.backend,
    )
    _, log_sums, *_ = user_errors.call(attend, _OF_OTHER_SIDE, turned)
    sums: Tensor = log_sums.exp()
    return sums


def _inverse_of(scale: float, dtype: torch.dtype) -> float:
    """A power of two near 1 / scale, so that no part of lse is larger than lse."""
    numbers = torch.finfo(dtype)
    factor = 2.0 ** math.ceil(-math.log2(abs(scale)))
    if not numbers.smallest_normal <= factor <= numbers.max:
        least, most = 2.0 ** -math.floor(math.log2(numbers.max)), 1 / numbers.smallest_normal
        raise ValueError(
            f"softmax_scale: expected a magnitude from {least:.3g} to {most:.3g}, as column sums of {dtype} need "
            f"without a kernel of their own, got {scale}"
        )
    return math.copysign(factor, scale)


def _call(q: Tensor, k: Tensor, pairs: Pairs) -> AttentionCall:
    """The call whose scores the pairs have, with k for v, and q and k in autocast's dtype."""
    names = "softmax_scale", "causal", "window_size", "backend"
    options: Any = {name: x for name, x in pairs.items() if name in names}
    lengths: Any = {name: pairs.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
    bounds = validate.check_bounds(pairs["max_seqlen_q"], pairs["max_seqlen_k"]) if "cu_seqlens_q" in pairs else None
    checked = validate.check_options(**options)
    given = AttentionCall(q, k, k, **lengths, bounds=bounds, options=checked, backend=pairs.get("backend"))
    return autocast(given) if is_any_autocast_enabled() else given


def _refuse_unknown(pairs: Pairs) -> None:
    """Raises TypeError for an argument that is not of ``Pairs``, or some of the first four without the others."""
    unknown = pairs.keys() - Pairs.__annotations__.keys()
    if unknown:
        raise TypeError(f"{', '.join(sorted(unknown))}: not among the arguments of score statistics")
    missing = [name for name in _OF_PACKED if name not in pairs]
    if 0 < len(missing) < len(_OF_PACKED):
        raise TypeError(f"{', '.join(missing)}: expected, as {', '.join(_OF_PACKED)} go together, got no such argument")


def _scale(given: AttentionCall) -> float:
    scale = given.options.softmax_scale
    return float(given.q.shape[-1] ** -0.5) if scale is None else scale


def _parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Three numbers of a dtype that sum up to x, (..., 1), each the rounding of what those before it leave."""
    parts: list[Tensor] = []
    for _ in range(3):
        parts.append(x.to(dtype))
        x = x - parts[-1]
    return torch.cat(parts, -1)
