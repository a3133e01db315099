"""Work tiles of the kernel of column sums: some keys, and the blocks of queries that attend to them."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from flash_attn_cute.kernels.arguments import ColumnSumsArguments
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.blocks import Blocks, Window
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.score_rows import Place


@dataclass(frozen=True)
class ColumnSumsTile:
    """A tile of keys of one query head as the producer publishes it."""

    first_key: Int32  # -1: there are no more tiles
    head: Int32  # of queries
    batch: Int32  # index into tensors: 0 if packed
    q: SeqRows
    k: SeqRows
    blocks: Blocks  # of queries, from the first to the last

    @staticmethod
    @cute.jit
    def at(config: Constexpr, a: ColumnSumsArguments, index: Int32) -> "ColumnSumsTile":
        """The tile of an index: under a causal mask the first keys come first, as most queries attend to them."""
        packed = config.features.packed
        # Packed, all heads of a tile come together.
        in_cache = None if const_expr(packed) else a.numbers.heads_in_cache
        order = tiles.Order(heads_in_cache=in_cache, last_first=False)
        heads = a.mQ.shape[-2]
        work, k = tiles.row_tile(index, a.mK, heads, a.mCuSeqlensK, a.mSeqUsedK, config.tile_m, order)
        if const_expr(packed):
            batch, q = Int32(0), SeqRows(Int32(0), Int32(0), Int32(0))
            if work.batch >= 0:
                q = rows_of(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, work.batch)
        else:
            batch, q = work.batch, rows_of(a.mQ, None, None, work.batch)
        num_keys = cutlass.min(k.length - work.first_row, config.tile_m)
        window = Window.of(config.features, a, q.length, k.length).transposed
        blocks = Blocks.of(work.first_row, num_keys, q.length, window, config.tile_n)
        return ColumnSumsTile(work.first_row, work.head, batch, q, k, blocks)

    @staticmethod
    def num(config: Any, a: ColumnSumsArguments) -> Int32:
        """Number of tiles of all heads and sequences."""
        return tiles.num_tiles(a.mK, a.mQ.shape[-2], a.mCuSeqlensK, config.tile_m)

    def write(self, fields: cute.Tensor) -> None:
        """Writes the tile to shared memory."""
        lengths = self.q.start, self.q.length, self.k.start, self.k.length
        for i, value in enumerate((self.first_key, self.head, self.batch, *lengths, *self.blocks.fields)):
            fields[i] = value

    @staticmethod
    def read(fields: cute.Tensor) -> "ColumnSumsTile":
        """Reads a tile from shared memory; unused fields are not loaded."""
        first_key, head, batch, *lengths = (fields[i] for i in range(7))
        q, k = SeqRows(*lengths[:2]), SeqRows(*lengths[2:])
        return ColumnSumsTile(first_key, head, batch, q, k, Blocks(*(fields[i] for i in range(7, 11))))

    def place(self, config: Any, a: ColumnSumsArguments, first_row: Int32, block: Int32) -> Place:
        """Location of the scores of 64 keys of the tile, from ``first_row`` on, and a block of queries."""
        return Place(
            rows=self.k,
            columns=self.q,
            head=self.head,
            batch=self.batch,
            first_row=self.first_key + first_row,
            first_column=block * config.tile_n,
            window=Window.of(config.features, a, self.q.length, self.k.length).transposed,
        )
