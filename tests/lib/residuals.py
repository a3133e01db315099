"""Out as the backward pass restores it from residuals."""

import torch
from torch import Tensor


def restored(out: Tensor, residual: Tensor) -> Tensor:
    """Out in float32 before it was rounded: the order of ``kernels.common.residuals`` undone."""
    lost = 16 if out.dtype == torch.bfloat16 else 13
    in_order = residual.unflatten(-1, (-1, 4, 4, 2)).transpose(-3, -2).flatten(-4)[..., : out.shape[-1]]
    bits = out.float().view(torch.int32) + (in_order.int() << lost - 8) + (1 << lost - 9)
    return bits.view(torch.float32).where(out != 0, 0)


def assert_restored(out: Tensor, residual: Tensor, exact: Tensor, at_least: float = 1.0) -> None:
    """Out is restored to within 2^-8 of a unit in the last place, at least this share of it."""
    normal = exact.abs() > 2.0**-14  # float16's other numbers have fewer bits
    assert normal.float().mean() > 0.9
    unit = torch.exp2(torch.floor(torch.log2(exact.abs())) - (7 if out.dtype == torch.bfloat16 else 10))
    is_close = (restored(out, residual) - exact).abs() <= unit * 2.0**-8
    assert is_close[normal].float().mean() >= at_least
    assert ((out - exact).abs() <= unit * 2.0**-8)[normal].float().mean() < 0.1, "there was nothing to restore"
