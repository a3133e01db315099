"""Documents as a node of an expression: which document each query and key belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.runtime import kept
from flash_attn_cute.sparsity.bits import FULL, TILE
from flash_attn_cute.sparsity.nodes import Node, kinds_of
from flash_attn_cute.sparsity.score_blocks import Blocks, Sizes


class _BlockIds(NamedTuple):
    """Ids of the documents in each block of 128 rows, of queries or of keys: (batch, blocks), int64 each."""

    least: Tensor  # the smallest id
    most: Tensor  # the largest id
    # The first block of its run. Neighbouring blocks that lie in one document are a run; any other block is a run of
    # its own.
    run: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> _BlockIds:
        """Summary of ids (batch, rows)."""
        length = ids.shape[1]
        # The last block is filled up with its last id, which changes neither its smallest nor its largest id.
        filled = ids[:, torch.arange(-(-length // TILE) * TILE, device=ids.device).clamp(max=max(length, 1) - 1)]
        by_block = filled.unflatten(1, (-1, TILE)) if length else filled.new_empty(len(ids), 0, TILE)
        least, most = by_block.amin(-1), by_block.amax(-1)
        goes_on = (least == most)[:, 1:] & (least.diff(dim=1) == 0) & (most.diff(dim=1) == 0)
        places = torch.arange(least.shape[1], device=least.device)
        run = places.masked_fill(torch.nn.functional.pad(goes_on, (1, 0)), 0).cummax(1).values
        return cls(least, most, run)


@dataclass(eq=False, repr=False)
class Documents(Node):
    """Query i attends to key j where both are of one document; rows with negative ids are padding."""

    is_regular: ClassVar[bool] = True

    ids_q: Tensor  # (batch, seqlen_q), int64
    ids_k: Tensor  # (batch, seqlen_k), int64

    @property
    def batch(self) -> int:
        return self.ids_q.shape[0]

    @property
    def device(self) -> torch.device | None:
        return self.ids_q.device

    @property
    def padding(self) -> tuple[Tensor, Tensor]:
        """Rows of negative ids."""
        return self.ids_q < 0, self.ids_k < 0

    @property
    def _block_ids(self) -> tuple[_BlockIds, _BlockIds]:
        """Ids in blocks of queries and of keys."""
        return kept.made(
            self._kept, "block ids", self.ids_q.device, lambda: (_BlockIds.of(self.ids_q), _BlockIds.of(self.ids_k))
        )

    def block_range(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """The narrowest range where ids never decrease, a wider one elsewhere."""
        queries, keys = self._block_ids
        largest_before = keys.most.cummax(-1).values
        least_after = keys.least.flip(-1).cummin(-1).values.flip(-1)
        start = torch.searchsorted(largest_before, queries.least.clamp(min=0))
        stop = torch.searchsorted(least_after, queries.most, right=True)
        return start[:, None], stop[:, None]

    def kinds(self, blocks: Blocks) -> Tensor:
        b, _ = blocks.entry_and_head(self)
        (least_q, most_q), (least_k, most_k) = (
            (ids.least[b, block], ids.most[b, block])
            for ids, block in zip(self._block_ids, (blocks.m, blocks.n), strict=True)
        )
        is_empty = (most_q < least_k) | (most_k < least_q) | (most_q < 0) | (most_k < 0)
        is_full = (least_q == most_q) & (least_k == most_k) & (least_q == least_k)
        return kinds_of(is_empty, is_full)

    def patterns(self, blocks: Blocks) -> tuple[Tensor, int]:
        """One pattern for full blocks, and one for each pair of a run of queries and a run of keys."""
        b, _ = blocks.entry_and_head(self)
        blocks_q, blocks_k = blocks.sizes.blocks_q, blocks.sizes.blocks_k
        m, n = (ids.run[b, block] for ids, block in zip(self._block_ids, (blocks.m, blocks.n), strict=True))
        pattern = (b * blocks_q + m) * blocks_k + n + 1
        return pattern.masked_fill(self.kinds(blocks) == FULL, 0), self.batch * blocks_q * blocks_k + 1

    def elements(self, blocks: Blocks) -> Tensor:
        b, _ = blocks.entry_and_head(self)
        of_q, of_k = self.ids_q[b[:, None], blocks.queries], self.ids_k[b[:, None], blocks.keys]
        return (of_q[:, :, None] == of_k[:, None, :]) & (of_q >= 0)[:, :, None]
