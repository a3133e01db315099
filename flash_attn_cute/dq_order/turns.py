"""Turns: the order in which tiles of keys add to dQ where the backward pass is ordered.

A tile of keys ``n`` goes over the query blocks ``m`` that attend to it and adds its part to the dQ of each. A semaphore
for every query block counts the additions made. The tile with turn t waits until the semaphore reads t, adds, and
signals t + 1. So sums are rounded alike in every run, as in FlashAttention's deterministic backward pass.

Turns follow the launch order: the turn of n at m is the number of tiles launched before n that m attends to as well. A
tile is launched when a running CTA draws its ticket from a counter. A CTA works its tickets off in the order in which
it drew them.

No deadlock is possible, whatever the mask, the launch order, the m_block order and the speed of CTAs, even if only one
CTA runs at a time. Proof: take the lowest ticket that is not yet worked off. Its holder runs, and has worked off all
that it drew before, so it is at this tile. The tile waits only for additions of lower tickets, which are worked off. So
it runs to its end, and the next ticket is the lowest. The proof holds however many tickets a CTA draws ahead. (Speed is
another matter: a ticket that is drawn long before it is begun delays all behind it.) It would not hold if a CTA owned a
tile before it runs, by its number in the grid.

Heads share the counter. Their tickets may be mixed in any way that keeps the order of each head. Query heads of a group
may add to one dK and dV by turns as well. The proof covers that if these turns follow the tickets. The number of a head
within its group is such a turn on two conditions: for each n, the heads of the group have ascending tickets; and either
all of them add, or those that do not add signal all the same.

Which launch order is fast depends on the mask. DASH (arXiv 2601.21824) models the additions as a directed acyclic
graph, whose longest path is the time, and starts causal tiles at the last query. If tiles start at their first query,
last keys first is as good (shortest processing time first, FlashAttention-3's order): every tile reaches a query block
later than the tile whose turn is before.

The number of heads that draw tickets together decides how far apart two such tiles are. Tiles of one head follow each
other so closely that those of a full mask wait. Tiles of many heads are so far apart that the cache has lost what they
share. Shortest first also leaves long tiles to the end, when some CTAs have none left. So heads of a last section start
with their first keys, and their tiles with the last query.

Irregular masks wait in any launch order, and less in an m_block order that has been found for the mask
(``dq_order.contention_model``).
"""

import torch
from torch import Tensor

# Bytes of Q, dO and sums of dQ, for all heads of a section: the L2 cache has room for more, but tiles that follow each
# other are far apart in what they read, and add to more than that. With an m_block order another head, the fourth of
# 8192 tokens, spares more waits than it costs misses.
BYTES_IN_FLIGHT, BYTES_IN_FLIGHT_WITH_M_BLOCK_ORDER = 16_000_000, 34_000_000


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
    """Turns of a dense mask, by the formula in kernels.

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
    m, n = (
        torch.arange(-(-seqlen_q // tile_m), device="cpu")[:, None],
        torch.arange(-(-seqlen_k // tile_n), device="cpu"),
    )
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

    Reads ``launch`` back to check it, as a wrong one would hang the device.

    Args:
        visible: (..., blocks_q, blocks_k), bool: whether any query of the block attends to any key of the tile.
        launch: (..., blocks_k), int32 or int64: tiles of keys in the order of their tickets, a permutation of
            0 .. blocks_k - 1. None is last keys first. Leading dimensions broadcast with those of ``visible``.

    Returns:
        (..., blocks_q, blocks_k), int32: at every query block, the tiles that it attends to have the turns 0, 1, ...
        in launch order, the others -1.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, or a launch order that is no permutation.
    """
    if visible.dtype != torch.bool:
        raise TypeError(f"visible: expected dtype torch.bool, got {visible.dtype}")
    if visible.ndim < 2:
        raise ValueError(f"visible: expected shape (..., blocks_q, blocks_k), got {tuple(visible.shape)}")
    tiles = torch.arange(visible.shape[-1], device=visible.device)
    if launch is None:
        launch = last_first(len(tiles), tiles.device)[0, 0]
    _check_launch(launch, visible, tiles)
    leading = torch.broadcast_shapes(visible.shape[:-2], launch.shape[:-1])
    visible = visible.expand(*leading, -1, -1)
    launch = launch.long()[..., None, :].expand_as(visible)
    launched = visible.gather(-1, launch).cumsum(-1, dtype=torch.int32)
    turns = torch.empty_like(launched).scatter_(-1, launch, launched - 1)
    return turns.masked_fill_(~visible, -1)


def last_first(blocks_k: int, device: torch.device | None = None) -> Tensor:
    """Launch order in which the last keys come first.

    Args:
        blocks_k: number of key tiles.
        device: of the order.

    Returns:
        (1, 1, blocks_k), int32: a launch order for all batch entries and heads.
    """
    return torch.arange(blocks_k - 1, -1, -1, dtype=torch.int32, device=device)[None, None]


def longest_first(lengths: Tensor) -> Tensor:
    """Launch order that ends evenly: tiles with more query blocks first, from the left on ties.

    It serves launches without an order of additions, and tiles that start with their last query.

    Args:
        lengths: (..., blocks_k), int: how many query blocks attend to each tile.

    Returns:
        (..., blocks_k), int32: a launch order.
    """
    return lengths.argsort(dim=-1, descending=True, stable=True).int()


def shortest_first(lengths: Tensor) -> Tensor:
    """Shortest processing time first (SPT), from the right on ties: under a causal mask, last keys first.

    Args:
        lengths: (..., blocks_k), int: how many query blocks attend to each tile.

    Returns:
        (..., blocks_k), int32: a launch order.
    """
    return longest_first(lengths).flip(-1)


def _check_launch(launch: Tensor, visible: Tensor, tiles: Tensor) -> None:
    if launch.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"launch: expected dtype torch.int32 or torch.int64, got {launch.dtype}")
    *leading, _, blocks_k = visible.shape
    pairs = zip(reversed(leading), reversed(launch.shape[:-1]), strict=False)
    if launch.shape[-1:] != (blocks_k,) or any(a != b and 1 not in (a, b) for a, b in pairs):
        expected = f"a shape (..., {blocks_k}) that broadcasts with {tuple(leading)}"
        raise ValueError(f"launch: expected {expected}, got {tuple(launch.shape)}")
    if (launch.sort(-1).values != tiles).any():
        raise ValueError(f"launch: expected permutations of 0 .. {blocks_k - 1}, got {launch.tolist()}")
