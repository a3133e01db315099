"""PyTorch's own fused attention, for the runs that need nothing it lacks.

The operators behind ``scaled_dot_product_attention`` are called directly because they return the log-sum-exp,
and because their backward pass recomputes the probabilities from it: given an lse and an out that include a
sink, it gives the right gradients for that too.
"""

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Gradients
from flash_attn_cute.backends.portable.tile import Tile

_aten = torch.ops.aten


def serves(tile: Tile) -> bool:
    """Whether ``forward`` can serve a tile.

    PyTorch's causal mask is aligned to the top left, so it fits where the window's own diagonal is there (as it
    is for equal lengths). Some of its kernels put the mask's -inf in before they multiply by the scale, which must
    not make it +inf or NaN.
    """
    spec, band = tile.spec, tile.band
    if spec.wide and spec.dtype not in (torch.float32, torch.float64):  # it rounds
        return False
    if spec.softcap or spec.has_mask or spec.has_bias or spec.has_block_mask or spec.selection_block:
        return False
    if spec.head_dim != spec.head_dim_v:
        return False
    if band.lower is not None or band.upper not in (None, 0) or spec.softmax_scale <= 0:
        return False
    if not tile.q.is_cuda:
        return tile.q.device.type == "cpu"
    if spec.dtype == torch.float64 or spec.head_dim % 8 or spec.head_dim > 256:
        return False
    square = tile.q.shape[2] == tile.k.shape[2]
    return (square or band.upper is None) and (spec.dtype != torch.float32 or spec.nheads == spec.nheads_k)


def serves_backward(tile: Tile) -> bool:
    """Whether ``backward`` can serve a tile.

    On a GPU PyTorch's fused gradients are not reproducible, and on a CPU dK and dV are summed in the dtype of k: in
    half precision their error grows with the number of queries.
    """
    return serves(tile) and tile.q.device.type == "cpu" and tile.spec.dtype in (torch.float32, torch.float64)


def forward(tile: Tile, out: Tensor, lse: Tensor) -> None:
    """Fills out and lse, the sink left aside; shapes as in ``blockwise.forward``."""
    qkv, causal, scale = (tile.q, tile.k, tile.v), tile.band.upper == 0, tile.spec.softmax_scale
    result: tuple[Tensor, ...]
    if not tile.q.is_cuda:
        result = _aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal, scale=scale)
    elif tile.spec.dtype != torch.float32:
        result = _aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, scale=scale)
    else:
        result = _aten._scaled_dot_product_efficient_attention(*qkv, None, True, 0.0, causal, scale=scale)
    out.copy_(result[0])
    lse.copy_(result[1][..., : lse.shape[2]])  # the last of the three pads it to a multiple of 32 rows


def backward(tile: Tile, out: Tensor, lse: Tensor, dout: Tensor, grads: Gradients) -> None:
    """Fills dq, dk and dv; shapes as in ``blockwise.backward``, out and lse with the sink included."""
    # Hooks of saved tensors may return them in any strides, and the operator takes their last dimension for contiguous.
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, tile.q, tile.k, tile.v, out))
    found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *rows, lse, 0.0, tile.band.upper == 0, scale=tile.spec.softmax_scale
    )
    for target, grad in zip(grads[:3], found, strict=True):
        target.copy_(grad)
