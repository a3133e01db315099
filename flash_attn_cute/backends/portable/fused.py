"""PyTorch's own fused attention, for the runs that need nothing it lacks.

The operators behind ``scaled_dot_product_attention`` are called directly because they return the log-sum-exp,
and because their backward pass recomputes the probabilities from it: given an lse and an out that include a
sink, it gives the right gradients for that too.
"""

import torch
from torch import Tensor

from flash_attn_cute.backends.portable.tile import Tile

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def serves(tile: Tile) -> bool:
    """Whether ``forward`` can serve a tile.

    PyTorch's causal mask is aligned to the top left, so it fits where the window's own diagonal is there (as it
    is for equal lengths). Some of its kernels put the mask's -inf in before they multiply by the scale, which must
    not make it +inf or NaN.
    """
    spec, band = tile.spec, tile.band
    if spec.softcap or spec.has_mask or spec.has_bias or spec.head_dim != spec.head_dim_v:
        return False
    if spec.softmax_scale <= 0:
        return False
    if band.lower is not None or band.upper not in (None, 0):
        return False
    if tile.q.is_cuda:
        square = band.upper is None or tile.q.shape[2] == tile.k.shape[2]
        return square and spec.head_dim % 8 == 0 and spec.head_dim <= 256 and spec.dtype != torch.float64
    return tile.q.device.type == "cpu"


def serves_backward(tile: Tile) -> bool:
    """Whether ``backward`` can serve a tile: on a GPU PyTorch's fused gradients are not reproducible."""
    return serves(tile) and not tile.q.is_cuda


def forward(tile: Tile, out: Tensor, lse: Tensor) -> None:
    """Fills out and lse, the sink left aside; shapes as in ``blockwise.forward``."""
    for g in range(tile.group):
        head = slice(g, None, tile.group)
        out[:, head], lse[:, head] = _forward(
            tile.q[:, head], tile.k, tile.v, tile.band.upper == 0, tile.spec.softmax_scale
        )


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, ...]
    if not q.is_cuda:
        result = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif q.dtype in _HALF:
        result = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        result = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    # One of them pads its lse to a multiple of 32 rows.
    return result[0], result[1][..., : q.shape[2]]


def backward(tile: Tile, out: Tensor, lse: Tensor, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Fills dq, dk and dv; shapes as in ``blockwise.backward``, out and lse with the sink included."""
    totals: list[Tensor] = []
    for g in range(tile.group):
        head = slice(g, None, tile.group)
        dq[:, head], *parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout[:, head],
            tile.q[:, head],
            tile.k,
            tile.v,
            out[:, head],
            lse[:, head],
            0.0,
            tile.band.upper == 0,
            scale=tile.spec.softmax_scale,
        )
        if totals:
            for total, part in zip(totals, parts, strict=True):
                total += part
        else:
            totals = parts if tile.group == 1 else [part.to(lse.dtype) for part in parts]
    dk.copy_(totals[0])
    dv.copy_(totals[1])
