"""In which order tiles of keys are launched, and add to dQ where the backward pass is deterministic.

A tile of keys, ``n``, walks over the blocks of queries ``m`` that see it and adds its part to the dQ of each. For every
block a counter counts the additions made. The tile whose turn is t waits until it reads t, adds, and passes the turn
on, so that sums are rounded alike in every run; FlashAttention's deterministic backward pass does the same.

Write order is launch order: the turn of n at m is the number of tiles launched before n that m sees as well. "Launched"
is the order of tickets, which running CTAs draw from a counter, and work off in the order in which they drew them.

So there is no deadlock, whatever the mask, the launch order, the walk over the queries and the speed of the CTAs, even
if only one runs at a time: take the lowest ticket not yet worked off. Its holder runs and has worked off all that it
drew before, so this is the tile that it is at. Whatever that waits for is the part of a lower ticket, and those are
worked off. So it goes on to its end, and so does the next one, until none is left. This holds however many tickets a
CTA draws ahead. (Time is another matter: a ticket drawn long before it is begun holds up all behind it.) It would not
hold if a CTA owned a tile before it runs, by its number in the grid.

Heads share the counter, their tickets mixed in any way that keeps the order of each head. The query heads of a group
may add to one dK and dV by turns too, and the argument covers that if these turns follow the tickets: the number of the
head within its group will do where, for each n, the heads of the group have their tickets in ascending order, and
either all of them add or those that do not pass the turn on all the same.

Which launch order is fast depends on the mask. DASH (arXiv 2601.21824) models the additions as a directed acyclic graph
whose longest path is the time, and walks causal masks from the last query. Walking from the first one, last keys first
does as well (shortest processing time first, FlashAttention-3's order): every tile reaches a block of queries later
than the tile whose turn is before. How many heads draw their tickets in turn decides how far apart these two are: one
head's tiles follow each other so closely that those of a full mask wait, many heads' so far that the cache has lost
what they share. And shortest first leaves long tiles to the end, when some CTAs have none: the heads of a last section
start with their first keys and walk from the last query.

Irregular masks wait in any order. Their blocks have several sums, to which turns 0, 1, ... belong one after the other:
a tile waits for the last one that added to its own sum, and in the end the sums are added up, the first one first. The
argument above covers that, as a tile still waits for lower tickets alone. Or they have one sum, and walks that have
been found for them, in which a tile waits less than with two (``dq_order.contention_model``).
"""

import torch
from torch import Tensor

# Of a block of queries, under masks that are not known to be regular. Two make waits half as long; what more of them
# would take to and from memory is more than the waits they would spare.
SUMS = 2
# Of the L2 cache, for Q, dO and sums of dQ of the heads that draw their tickets in turn: little, as tiles that follow
# each other are far apart in what they read, and add to more than that. Walks that have been found win more by another
# head, the fourth of 8192 tokens, than they lose by what the cache has no room for.
BYTES_IN_FLIGHT, BYTES_IN_FLIGHT_OF_WALKS = 16_000_000, 34_000_000


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
    """The turns of a dense mask by the formula that kernels compute them with.

    Equal to ``write_order`` of the blocks that see each other, without a table.

    Args:
        seqlen_q: real queries of the sequence.
        seqlen_k: its real keys.
        tile_m: queries a block.
        tile_n: keys a tile.
        left: query i sees key j from i + seqlen_k - seqlen_q - left on; at least 0, None is unbounded.
        right: query i sees key j up to i + seqlen_k - seqlen_q + right; at least 0, None is unbounded; causal is 0.
        last_first: the last keys are launched first, or the first ones.

    Returns:
        (blocks_q, blocks_k), int32: the turn of a tile of keys at a block of queries; -1 where they do not meet.
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
        # The last block may reach behind the last query, but that one sees the last key.
        visible_to_last = ((m + 1) * tile_m + shift + right).clamp(0, seqlen_k)
    stop = (visible_to_last + tile_n - 1) // tile_n
    return torch.where((start <= n) & (n < stop), stop - 1 - n if last_first else n - start, -1).int()


def write_order(visible: Tensor, launch: Tensor | None = None) -> Tensor:
    """The turns of any mask of blocks under any launch order.

    Made once for a mask: it reads ``launch`` back to check it, as a wrong one would hang the device.

    Args:
        visible: (..., blocks_q, blocks_k), bool: whether some query of the block sees some key of the tile.
        launch: (..., blocks_k), int32 or int64: the tiles of keys in the order of their tickets, a permutation of
            0 .. blocks_k - 1. None is last keys first. Leading dimensions broadcast with those of ``visible``.

    Returns:
        (..., blocks_q, blocks_k), int32: at every block of queries, the tiles that it sees have the turns 0, 1, ... in
        the order of launch, the others -1.

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
    """The launch order in which the last keys come first.

    Args:
        blocks_k: tiles of keys.
        device: where the order is to be.

    Returns:
        (1, 1, blocks_k), int32: a launch order for ``write_order``, of all batch entries and heads.
    """
    return torch.arange(blocks_k - 1, -1, -1, dtype=torch.int32, device=device)[None, None]


def longest_first(lengths: Tensor) -> Tensor:
    """The launch order that ends evenly: tiles that more blocks of queries see before others, from the left on ties.

    For launches without an order of additions, and for tiles that walk from the last query.

    Args:
        lengths: (..., blocks_k), int: how many blocks of queries see each tile.

    Returns:
        (..., blocks_k), int32: a launch order for ``write_order``.
    """
    return lengths.argsort(dim=-1, descending=True, stable=True).int()


def shortest_first(lengths: Tensor) -> Tensor:
    """Shortest processing time first (SPT), from the right on ties: under a causal mask, last keys first.

    Args:
        lengths: (..., blocks_k), int: how many blocks of queries see each tile.

    Returns:
        (..., blocks_k), int32: a launch order for ``write_order``.
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
