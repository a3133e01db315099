"""Blocks of queries of a cluster's tile (see ``cluster``); every role reads them by itself."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.key_lists import list_of
from flash_attn_cute.kernels.common.key_tiles import KeyTile, key_tile
from flash_attn_cute.kernels.common.workspace import Workspace


@dataclass(frozen=True)
class BlockIterator:
    """Blocks of queries of a tile, step by step: an interval, or under a mask a list."""

    tile: KeyTile
    first_entry: Int32  # of the list

    def m_block(self, config: cutlass.Constexpr, ws: Workspace, step: Int32) -> Int32:
        """The block of queries of a step."""
        return ws.mEntries[self.first_entry + step, 0] if config.features.listed else self.tile.blocks.nth(step)

    def turn(self, config: cutlass.Constexpr, ws: Workspace, step: Int32, m_block: Int32) -> Int32:
        """Turn of the tile at dQ of that block."""
        return ws.mEntries[self.first_entry + step, 2] if config.features.listed else self.tile.turn(config, m_block)


@cute.jit
def blocks_of_tile(config: cutlass.Constexpr, a: BackwardArguments, ws: Workspace, index: Int32) -> BlockIterator:
    """Blocks of the tile of an index."""
    tile, first_entry = key_tile(config, a, ws, index), Int32(0)
    if const_expr(config.features.listed):
        if tile.blocks.num > 0:
            first_entry, _ = list_of(config, a, ws, tile.batch, tile.head, tile.block)
    return BlockIterator(tile, first_entry)
