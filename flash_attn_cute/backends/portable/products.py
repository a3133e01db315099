"""Products and softmax of the portable backend, for batches of blocks of scores.

Scores, softmax and every sum are in float32 (float64 for float64 inputs). On a GPU the operands of the products
stay in half precision, for its matrix units; elsewhere they are widened too.
"""

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import wide


def operand(x: Tensor) -> Tensor:
    """X in the dtype in which it enters products."""
    return x if x.is_cuda else x.to(wide(x.dtype))


def product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Batched scale * a @ b, summed and returned in float32 or wider."""
    if a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32).mul_(scale)
    return torch.bmm(a if scale == 1.0 else a * scale, b)


def attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Out (n, rows, d_v) and lse (n, rows) of scores (n, rows, keys), which it overwrites, and v (n, keys, d_v).

    Masked scores are -inf; a row of them has an out of 0 and an lse of -inf.
    """
    peak = scores.amax(-1, keepdim=True)
    # From 0 instead of a peak of -inf, so that P is 0 and not NaN.
    weights = scores.sub_(peak.masked_fill(peak.isneginf(), 0)).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (peak + total.log()).squeeze(-1)
    return product(weights.to(v.dtype), v).div_(total.masked_fill_(total == 0, 1)), lse


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """P of scores (n, rows, keys), which it overwrites, and lse (n, rows).

    P is 0 where lse is -inf, or so far below 0 that neighbouring numbers are more than 1/8 apart: below -2^20 in
    float32. That is too coarse to count the keys of the sum, and P would be too large by their number.
    """
    lowest = -0.125 / torch.finfo(lse.dtype).eps
    return scores.sub_(lse.masked_fill(lse < lowest, torch.inf)[..., None]).exp_()


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores within a softcap, in their place."""
    return scores.div_(softcap).tanh_().mul_(softcap)


def uncap(dscores: Tensor, capped: Tensor | None, softcap: float) -> Tensor:
    """The gradient of scores before the softcap, in the place of that behind it; None: there was no softcap."""
    return dscores if capped is None else dscores.mul_(1 - (capped / softcap).square_())
