"""Turns of tiles of keys at the query blocks that they add to (``dq_order.turns``), on the host."""

import torch
from torch import Tensor

from flash_attn_cute.sparsity.dq_order.turns import last_first


def turns_of_window(
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
    left: int | None = None,
    right: int | None = None,
    *,
    last_first: bool = True,
) -> Tensor:
    """Turns of a dense mask, by the formula in kernels (``kernels.common.blocks``).

    They equal ``write_order`` of the mask's visible blocks, without a table.

    Args:
        seqlen_q: real queries of the sequence.
        seqlen_k: its real keys.
        tile_m: queries of a block.
        tile_n: keys of a tile.
        left: query i attends to keys from i + seqlen_k - seqlen_q - left on; at least 0, None is unbounded.
        right: query i attends to keys up to i + seqlen_k - seqlen_q + right; at least 0, None unbounded, causal is 0.
        last_first: whether the last keys are launched first, or the first ones.

    Returns:
        (blocks_q, blocks_k), int32: the turn of a tile of keys at a query block; -1 where no score is visible.
    """
    m, n = torch.arange(-(-seqlen_q // tile_m))[:, None], torch.arange(-(-seqlen_k // tile_n))
    shift = seqlen_k - seqlen_q
    start, visible_to_last = torch.zeros_like(m), torch.full_like(m, seqlen_k)
    if left is not None:
        start = (m * tile_m + shift - left).clamp(min=0) // tile_n
    if right is not None:
        # The last block may reach beyond the last query, but that one attends to the last key.
        visible_to_last = ((m + 1) * tile_m + shift + right).clamp(0, seqlen_k)
    stop = (visible_to_last + tile_n - 1) // tile_n
    return torch.where((start <= n) & (n < stop), stop - 1 - n if last_first else n - start, -1).int()


def write_order(visible: Tensor, launch: Tensor | None = None) -> Tensor:
    """Turns of any mask of blocks under any launch order.

    Args:
        visible: (..., blocks_q, blocks_k), bool: whether any query of the block attends to any key of the tile.
        launch: (..., blocks_k), int32 or int64: tiles of keys in the order of their tickets, a permutation of
            0 .. blocks_k - 1. None is last keys first. Leading dimensions broadcast with those of ``visible``.

    Returns:
        (..., blocks_q, blocks_k), int32: at every query block, the tiles that it attends to have the turns 0, 1, ...
        in launch order, the others -1.
    """
    if launch is None:
        launch = last_first(visible.shape[-1])[0, 0]
    leading = torch.broadcast_shapes(visible.shape[:-2], launch.shape[:-1])
    visible = visible.expand(*leading, -1, -1)
    launch = launch.long()[..., None, :].expand_as(visible)
    launched = visible.gather(-1, launch).cumsum(-1, dtype=torch.int32)
    turns = torch.empty_like(launched).scatter_(-1, launch, launched - 1)
    return turns.masked_fill_(~visible, -1)
