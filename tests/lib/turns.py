"""Turns of tiles of keys at the query blocks that they add to (``sparsity.dq_order.turns``), on the host."""

import torch
from torch import Tensor

from flash_attn_cute.sparsity.dq_order.turns import last_first


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
