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


def last_first(blocks_k: int, device: torch.device | None = None) -> Tensor:
    """Launch order of all batch entries and heads in which the last keys come first: (1, 1, blocks_k), int32."""
    return torch.arange(blocks_k - 1, -1, -1, dtype=torch.int32, device=device)[None, None]


def shortest_first(lengths: Tensor) -> Tensor:
    """Shortest processing time first (SPT), from the right on ties: under a causal mask, last keys first.

    ``lengths``, (..., blocks_k), int: how many query blocks attend to each tile. The launch order has their shape,
    int32.
    """
    return lengths.argsort(dim=-1, descending=True, stable=True).int().flip(-1)
