"""Tiles of queries, the work tiles of forward kernels, and their broadcast to the roles of a CTA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.block_lists import BlockList, Sharing, Tables
from flash_attn_cute.kernels.common.blocks import Blocks, Window
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.score_rows import RowsOfScores
from flash_attn_cute.kernels.common.score_tensors import keys_of


@dataclass(frozen=True)
class QueryTile:
    """A tile of queries as the producer publishes it. The keys' first row is left out: only the producer needs it."""

    first_query: Int32
    head: Int32  # of q, or of k where rows are the queries of a group of heads
    batch: Int32  # index into tensors: 0 if packed
    q: SeqRows
    k: SeqRows
    blocks: Blocks | BlockList  # of keys, from the last to the first

    def write(self, fields: cute.Tensor) -> None:
        values = self.first_query, self.head, self.batch, self.q.start, self.q.length, self.q.slot, self.k.length
        for i, value in enumerate((*values, *self.blocks.fields)):
            fields[i] = value

    @staticmethod
    def read(config: Any, fields: cute.Tensor) -> "QueryTile":
        """Reads a tile from shared memory.

        Unused fields are not loaded, so a role calls this where it needs the tile instead of keeping it in registers.
        """
        first_query, head, batch, start, length, slot, k_length, *blocks = (fields[i] for i in range(11))
        q, k = SeqRows(start, length, slot), SeqRows(None, k_length)
        visible = BlockList(*blocks[:2]) if config.features.listed else Blocks(*blocks, direction=-1)
        return QueryTile(first_query, head, batch, q, k, visible)

    def rows_of_bias(self, config: Any) -> RowsOfScores:
        num_rows = cutlass.min(self.q.length - self.first_query, config.tile_m // config.group)
        return RowsOfScores(self.q, self.batch, self.head, self.first_query, num_rows, config.group)


@dataclass(frozen=True)
class QueryTiles:
    """All tiles of a pass. ``config`` has tile_m, tile_n, group, features, persistent; under lists blocks_an_entry."""

    config: Any

    @property
    def queries(self) -> int:
        return self.config.tile_m // self.config.group

    def num(self, a: ForwardArguments) -> Int32:
        heads = a.mQ.shape[-2] // self.config.group
        return tiles.num_tiles(a.mQ, heads, a.mCuSeqlensQ, self.queries)

    @cute.jit
    def at(self, a: ForwardArguments, tables: Any, index: Int32) -> QueryTile:
        """The tile of an index. ``tables``: what ``listed`` needs of a mask, if there is one."""
        c, queries = self.config, self.queries
        packed = c.features.packed
        # Packed, all heads of a tile come together.
        order = tiles.Order(heads_in_cache=None if const_expr(packed) else a.numbers.heads_in_cache)
        heads = a.mQ.shape[-2] // c.group
        work, q = tiles.row_tile(index, a.mQ, heads, a.mCuSeqlensQ, a.mSeqUsedQ, queries, order)
        batch, k = work.batch, SeqRows(Int32(0), Int32(0), Int32(0))
        if const_expr(packed):
            batch = Int32(0)
            if work.batch >= 0:
                k = keys_of(a, work.batch)
        else:
            k = rows_of(a.mK, None, None, batch)
        num_queries = cutlass.min(q.length - work.first_row, queries)
        if const_expr(c.features.listed):
            blocks = self.listed(a, tables, work, q, batch, num_queries)
        else:
            window = Window.of(c.features, a, q.length, k.length)
            blocks = Blocks.of(work.first_row, num_queries, k.length, window, c.tile_n, direction=-1)
        return QueryTile(first_query=work.first_row, head=work.head, batch=batch, q=q, k=k, blocks=blocks)

    @cute.jit
    def listed(
        self, a: ForwardArguments, tables: Tables, work: tiles.WorkTile, q: SeqRows, batch: Int32, num_queries: Int32
    ) -> BlockList:
        """The list of a tile; empty if the tile has no queries."""
        first, num = Int32(0), Int32(0)
        if num_queries > 0:
            row = work.listed(self.config.features.packed, self.queries)
            number = Sharing.of(a.numbers).number(batch, work.head, row)
            first, num = tables.mLists[number, 0], tables.mLists[number, 1]
        return BlockList(first * self.config.blocks_an_entry, num * self.config.blocks_an_entry)

    def is_work(self, tile: QueryTile) -> Boolean:
        """Whether the tile has work: real rows, or padding rows that have to be zeroed."""
        stop = tile.q.slot if const_expr(self.config.features.zero_padding) else tile.q.length
        return tile.first_query < stop

    @cute.jit
    def ask(self, a: ForwardArguments) -> Int32:
        """Requests the next tile early, because the answer takes long; 0 if the CTA has one tile only."""
        if const_expr(self.config.persistent):
            return tiles.ask_for_tile(a.mNextTile)
        return Int32(0)

    @cute.jit
    def following(self, a: ForwardArguments, asked_before: Int32, num_tiles: Int32) -> Int32:
        """The next tile, from ``ask``'s answer. Indices from ``num_tiles`` on mean that none is left."""
        if const_expr(self.config.persistent):
            return tiles.tile_taken(a.mNextTile, asked_before, num_tiles, cute.arch.grid_dim()[0])
        return num_tiles
