"""A block mask as the blockwise path asks for it: which keys some queries see, and which of their scores are hidden."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_attn_cute.problem.block_tables import FULL_CODE, BlockTables
from flash_attn_cute.sparsity import bits
from flash_attn_cute.sparsity.bits import TILE

# Keys of a tile, by their positions in it. Where they follow each other a slice, which reads without copying.
Keys = slice | Tensor


@dataclass(eq=False, repr=False)
class Lists:
    """The rows of a block mask, read by the host once a pass, from a tile's first query and key on."""

    spans: Tensor  # (batch, heads, blocks_q, 2), on the CPU
    entries: Tensor  # (n, 2), likewise
    tiles: Tensor
    first: int = 0  # the batch entry, query and key of the mask that the tile begins with
    query: int = 0
    key: int = 0

    @classmethod
    def of(cls, tables: BlockTables) -> Lists:
        """Reads a call's tables."""
        rows = tables.rows
        return cls(rows.spans.cpu(), rows.entries.cpu(), rows.tiles)

    def at(self, first: int, query: int, key: int) -> Lists:
        """A copy for a tile that begins there."""
        return replace(self, first=first, query=query, key=key)

    @property
    def batch(self) -> int:
        """Batch entries that differ."""
        return self.spans.shape[0]

    @property
    def heads(self) -> int:
        """Heads that differ."""
        return self.spans.shape[1]

    def stop_of_rows(self, start: int, stop: int) -> int:
        """How far rows of a tile that begin at ``start`` may go, ``stop`` at most, to be in one block of the mask."""
        return min(stop, ((self.query + start) // TILE + 1) * TILE - self.query)

    def of_block(self, batch: int, heads: slice, rows: slice, keys: slice) -> tuple[Keys, Tensor | None]:
        """Finds keys of a tile that its rows see, and their hidden scores.

        Args:
            batch: an entry of the tile, one of those that share its rows of the mask.
            heads: of the mask; their keys are merged.
            rows: of the tile, in one block of the mask.
            keys: of the tile; no others are looked at.

        Returns:
            The keys that some of the heads see some of, in whole blocks; and for each of the heads (heads, rows, keys),
            bool, which scores are hidden, or None if none is.
        """
        b = self.first + batch if self.batch > 1 else 0
        m = (self.query + rows.start) // TILE
        lists = []
        for start, count in self.spans[b, heads, m].tolist():
            lists.append(self.entries[start : start + count].long())
        merged = torch.cat(lists)[:, 0].unique()
        low, high = self.key + keys.start, self.key + keys.stop
        merged = merged[(merged * TILE < high) & ((merged + 1) * TILE > low)]
        if not len(merged):
            return slice(0, 0), None
        positions = (merged[:, None] * TILE + torch.arange(TILE, device="cpu")).flatten()
        # Ascending, so that only the first and the last block can stick out.
        clip = slice(max(0, low - int(positions[0])), len(positions) - max(0, int(positions[-1]) + 1 - high))
        positions = positions[clip] - self.key
        is_run = int(positions[-1]) - int(positions[0]) + 1 == len(positions)
        device = self.tiles.device
        found: Keys = slice(int(positions[0]), int(positions[-1]) + 1) if is_run else positions.to(device)
        hidden = self._hidden(lists, merged, rows)
        return found, None if hidden is None else hidden.flatten(2)[..., clip]

    def _hidden(self, lists: list[Tensor], merged: Tensor, rows: slice) -> Tensor | None:
        """(heads, rows, blocks, 128) of merged blocks; None if no score is hidden."""
        device, inside = self.tiles.device, (self.query + rows.start) % TILE
        num_rows = rows.stop - rows.start
        visible = torch.zeros(len(lists), num_rows, len(merged), TILE, dtype=torch.bool, device=device)
        for i, entries in enumerate(lists):
            blocks, tiles = entries[torch.isin(entries[:, 0], merged)].unbind(1)
            is_full = tiles == FULL_CODE
            if len(lists) == 1 and bool(is_full.all()):
                return None
            place = torch.searchsorted(merged, blocks.contiguous())
            visible[i, :, place[is_full].to(device)] = True
            words = self.tiles[tiles[~is_full].to(device), inside : inside + num_rows]
            visible[i, :, place[~is_full].to(device)] = bits.unpack(words).transpose(0, 1)
        return ~visible
