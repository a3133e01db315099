"""Turns of tiles of keys at the query blocks that they add to."""

from torch import Tensor


def write_order(visible: Tensor, launch: Tensor) -> Tensor:
    """Turns of any mask of blocks under any launch order.

    Args:
        visible: (..., blocks_q, blocks_k), bool: whether any query of the block attends to any key of the tile.
        launch: (..., blocks_k), int32 or int64: tiles of keys in the order of their tickets, a permutation of
            0 .. blocks_k - 1. Leading dimensions broadcast with those of ``visible``.

    Returns:
        (..., blocks_q, blocks_k), int64: how many tiles that are launched before add to a query block, or -1 where the
        tile does not add to it.
    """
    ticket = launch.argsort(-1)
    is_before = ticket[..., None, None, :] < ticket[..., None, :, None]
    return (visible[..., None, :] & is_before).sum(-1).where(visible, -1)
