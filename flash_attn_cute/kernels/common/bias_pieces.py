"""Work of the bias-gradient kernel: tiles of the gradient, and the pieces that each is the sum of.

A CTA owns a tile of the gradient, in the bias's own shape. The tile is the sum of dS over everything that the bias was
broadcast over (batch entries, heads, queries or keys). The CTA goes through these as pieces; a piece is a tile of
scores. If a bias has fewer tiles than the GPU has SMs, the pieces of a tile are split between CTAs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import BLOCK, BiasGradientArguments
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.block_lists import EMPTY, Sharing, as_rows, code_in_list, num_blocks
from flash_attn_cute.kernels.common.blocks import Blocks, Window
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.mask_tiles import BlockTiles, MaskTiles
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.score_rows import RowsOfScores
from flash_attn_cute.kernels.common.score_tensors import entry_and_row, keys_of
from flash_attn_cute.kernels.common.tma import RowTiles
from flash_attn_cute.kernels.common.workspace import carved, packed_block
from flash_attn_cute.kernels.schedule import PIECE_FIELDS, PIECE_STAGES


@dataclass(frozen=True)
class Piece:
    """A tile of scores."""

    head: Int32
    batch: Int32 | int  # 0 if packed
    q: SeqRows
    k: SeqRows
    first_query: Int32
    first_key: Int32
    first_block: Int32  # of its sequence, in the workspace
    num_fully_masked: Int32  # so many first queries are not in the workspace: they are fully masked
    seen: Boolean  # by some query
    hides: Boolean  # some keys from some queries, or holds rows behind the sequence's end
    code: Int32  # under a mask: where the bits are that say what is hidden

    def write(self, fields: cute.Tensor) -> None:
        flags = Int32(self.seen) | Int32(self.hides) << 1
        where = self.head, Int32(self.batch), self.first_query, self.first_key, self.first_block, self.num_fully_masked
        rows = self.q.start, self.q.length, self.k.start, self.k.length
        for i, value in enumerate((flags, self.code, *where, *rows)):
            fields[i] = value

    @staticmethod
    def read(packed: bool, fields: cute.Tensor) -> "Piece":
        flags, code, head, batch, *where, q_start, q_length, k_start, k_length = (
            fields[i] for i in range(PIECE_FIELDS)
        )
        q, k = SeqRows(q_start, q_length), SeqRows(k_start, k_length)
        return Piece(head, 0 if packed else batch, q, k, *where, flags & 1 != 0, flags & 2 != 0, code)


@dataclass(frozen=True)
class Pieces:
    """All pieces of a CTA, published by warp 0 in batches of 32 and read by the other warps."""

    ring: Ring
    fields: cute.Tensor  # (field, piece of a stage, stage)
    packed: Constexpr

    @staticmethod
    def at(ring: Ring, memory: Any, packed: bool) -> "Pieces":
        """On the device: pieces guarded by a ring of ``PIECE_STAGES``, in memory of as many Int32."""
        layout = cute.make_layout((PIECE_FIELDS, 32, PIECE_STAGES), stride=(32, 1, 32 * PIECE_FIELDS))
        return Pieces(ring, memory.get_tensor(layout), packed)

    def publish(self, nth: Int32, piece: Piece) -> None:
        """Publishes the nth piece, by any lane of warp 0."""
        piece.write(self.fields[None, nth % 32, self.ring.stage(nth // 32)])

    @cute.jit
    def wait_for(self, nth: Int32) -> Piece:
        """Returns the nth piece, to a warp. For the first piece of a batch it waits for warp 0."""
        batch = nth // 32
        if nth % 32 == 0:
            self.ring.wait_full(batch)  # from warp 0
        return self.read(nth)

    def read(self, nth: Int32) -> Piece:
        """The nth piece, already published by warp 0."""
        return Piece.read(self.packed, self.fields[None, nth % 32, self.ring.stage(nth // 32)])

    @cute.jit
    def release(self, nth: Int32) -> None:
        """Releases the nth piece, by a warp. The last piece of a batch frees the batch's stage."""
        if nth % 32 == 31:
            self.ring.release(nth // 32)  # to warp 0


@dataclass(frozen=True)
class Owner:
    """A CTA's tile of the gradient, and its share of the tile's pieces."""

    entry: Int32
    block: Int32  # of queries
    head: Int32
    n_block: Int32
    first: Int32  # piece
    stop: Int32


class Tables(NamedTuple):
    """Tables of a mask (``common.block_lists``), for the bias-gradient kernel."""

    mBits: cute.Tensor  # (tile, warpgroup, thread, word)
    mCodes: cute.Tensor | None = None  # (row, block of keys)
    mLists: cute.Tensor | None = None  # or, of a block mask: (row, first entry and how many)
    mEntries: cute.Tensor | None = None  # (entry, block of keys and its code)


class PieceMap:
    """Map from CTAs to tiles of the gradient, and from tiles to pieces."""

    def __init__(self, config: Any):
        self.config = config

    @cute.jit
    def queries_of(self, a: BiasGradientArguments) -> tuple[Int32, Int32]:
        """Number of batch entries, and of query tiles of each. Packed sequences of the user are one entry."""
        entries, blocks = Int32(1), tiles.num_tiles(a.mQ, 1, a.mCuSeqlensQ, self.config.tile_m)
        if const_expr(not self.config.features.packed):
            entries = Int32(a.mQ.shape[0])
            blocks = blocks // entries
        elif a.numbers.entries > 0:
            entries = a.numbers.entries
            blocks = cute.ceil_div(a.numbers.rows_a_slot, self.config.tile_m)
        return entries, blocks

    @cute.jit
    def owners(self, a: BiasGradientArguments) -> tuple[Int32, Int32, Int32, Int32]:
        """Number of gradient tiles over batch, queries, heads and keys; a CTA, or one a split, has each."""
        c, n = self.config, a.numbers
        entries, blocks = self.queries_of(a)
        entries = Int32(1) if n.sums_batch > 0 else entries
        blocks = Int32(1) if n.sums_queries > 0 else blocks
        return entries, blocks, a.mdBias.shape[1], cute.ceil_div(a.mdBias.shape[3], c.tile_n)

    @cute.jit
    def owner(self, a: BiasGradientArguments) -> Owner:
        index, _, _ = cute.arch.block_idx()
        entries, blocks, heads, n_blocks = self.owners(a)
        n_block, index = index % n_blocks, index // n_blocks
        head, index = index % heads, index // heads
        block, index = index % blocks, index // blocks
        entry, split = index % entries, index // entries
        pieces, splits = Int64(self._num_pieces(a)), a.numbers.splits
        first, stop = (Int32(pieces * s // splits) for s in (split, split + 1))
        return Owner(entry, block, head, n_block, first, stop)

    @cute.jit
    def _num_pieces(self, a: BiasGradientArguments) -> Int32:
        """Number of pieces that a tile is the sum of."""
        n = a.numbers
        entries, blocks = self.queries_of(a)
        pieces = a.mQ.shape[-2] // a.mdBias.shape[1] * self._blocks_in(a)
        pieces *= entries if n.sums_batch > 0 else Int32(1)
        return pieces * (blocks if n.sums_queries > 0 else Int32(1))

    @cute.jit
    def _blocks_in(self, a: BiasGradientArguments) -> Int32:
        """Number of key blocks that a tile is the sum of: all that a sequence can have, or its own."""
        return cute.ceil_div(a.mBias.shape[3], self.config.tile_n) if a.numbers.sums_keys > 0 else Int32(1)

    @cute.jit
    def piece(self, a: BiasGradientArguments, tables: Tables | None, owner: Owner, i: Int32) -> Piece:
        """The i-th piece of this CTA's tile."""
        c, f, n = self.config, self.config.features, a.numbers
        heads_in, blocks_in = a.mQ.shape[-2] // a.mdBias.shape[1], self._blocks_in(a)
        n_block, head = owner.n_block + i % blocks_in, owner.head + i // blocks_in % heads_in
        nth = i // (blocks_in * heads_in)
        _, rows = self.queries_of(a)
        rows_in = rows if n.sums_queries > 0 else Int32(1)
        entry, block = owner.entry + nth // rows_in, owner.block + nth % rows_in
        batch, q, k, first_query, first_block, num_fully_masked = self.sequence(a, entry, block)
        window = Window.of(f, a, q.length, k.length)
        row = entry * rows + block if const_expr(f.packed) else block
        num_queries, code = cutlass.min(q.length - first_query, c.tile_m), Int32(EMPTY)
        if const_expr(f.listed):
            if const_expr(f.block_mask):
                if num_queries > 0:
                    code = self._code_in_list(tables, Sharing.of(n).number(batch, head, row), n_block)
            elif num_queries > 0 and n_block < tables.mCodes.shape[1]:
                code = tables.mCodes[Sharing.of(n).number(batch, head, row), n_block]
            seen, hides = code != EMPTY, num_queries < c.tile_m
        else:
            blocks = Blocks.of(first_query, num_queries, k.length, window, c.tile_n)
            seen = num_queries > 0 and n_block >= blocks.start and n_block < blocks.stop
            hides = num_queries < c.tile_m or blocks.crosses_left(n_block) or blocks.crosses_right(n_block)
        first_key = n_block * c.tile_n
        return Piece(head, batch, q, k, first_query, first_key, first_block, num_fully_masked, seen, hides, code)

    @cute.jit
    def load(
        self,
        a: BiasGradientArguments,
        tables: Tables | None,
        tma: tuple[RowTiles, ...],
        operands: list[cute.Tensor],
        rings: Any,
        pieces: Pieces,
    ) -> None:
        """Publishes this CTA's pieces and loads their operands, one piece after the other, by one warp.

        Operands are (rows, columns, stage), Q, K, dO and V, as their tiles in ``tma``. The ring ``qk`` has Q and K, and
        ``dov`` dO and V.
        """
        c = self.config
        group = a.mQ.shape[-2] // a.mK.shape[-2]
        step, owner = Int32(0), self.owner(a)
        for i in cutlass.range(owner.stop - owner.first, unroll=1):
            if i % 32 == 0:
                pieces.ring.wait_empty(i // 32)  # from all others
                if const_expr(c.features.packed):
                    # One after the other: to find out whose rows they are takes the whole warp.
                    for j in cutlass.range(cutlass.min(owner.stop - owner.first - i, 32), unroll=1):
                        pieces.publish(i + j, self.piece(a, tables, owner, owner.first + i + j))
                else:
                    # Behind the last one stands any.
                    j = cute.arch.lane_idx()
                    pieces.publish(
                        i + j, self.piece(a, tables, owner, cutlass.min(owner.first + i + j, owner.stop - 1))
                    )
                pieces.ring.arrive(i // 32)  # to all others
            p = pieces.read(i)
            if p.seen:
                for j, ring in enumerate((rings.qk, rings.dov)):
                    ring.acquire(step)  # from those who read what was there
                    stage = ring.stage(step)
                    for t, sX, head, rows, first in (
                        (tma[2 * j], operands[2 * j], p.head, p.q, p.first_query),
                        (tma[2 * j + 1], operands[2 * j + 1], p.head // group, p.k, p.first_key),
                    ):
                        stop = rows.start + cutlass.min(first + t.tile_rows, rows.length)
                        gX = t.at(rows.start + first, stop, head, p.batch)
                        t.load(gX, sX[None, None, stage], ring.full(step))
                step += 1

    @cute.jit
    def _code_in_list(self, tables: Tables, number: Int32, n_block: Int32) -> Int32:
        """Code of a block, which may be a part of a block of the mask."""
        parts = BLOCK // self.config.tile_n
        code = code_in_list(tables.mLists, tables.mEntries, number, n_block // parts)
        return code * parts + n_block % parts if code >= 0 else code

    @cute.jit
    def sequence(
        self, a: BiasGradientArguments, entry: Int32, block: Int32
    ) -> tuple[Int32 | int, SeqRows, SeqRows, Int32, Int32, Int32]:
        """Location of a query tile of an entry.

        Returns the batch index, queries, keys, first query, first block of the workspace, and the number of fully
        masked queries, which the workspace leaves out.
        """
        c, f, n = self.config, self.config.features, a.numbers
        first_query, first_block, num_fully_masked = block * c.tile_m, Int32(0), Int32(0)
        if const_expr(f.packed):
            batch = 0
            q, k = SeqRows(Int32(0), Int32(0), Int32(0)), SeqRows(Int32(0), Int32(0), Int32(0))
            if n.entries > 0:
                # The last of the entry's sequences has all keys, and the one before it the queries that see none.
                sequence = (entry + 1) * n.sequences_an_entry - 1
                last = rows_of(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, sequence)
                start = entry * n.rows_a_slot
                num_fully_masked = last.start - start
                q, k = SeqRows(start, num_fully_masked + last.length, n.rows_a_slot), keys_of(a, sequence)
                first_block = packed_block(last.start, sequence, c.stats_m)
            else:
                order = tiles.Order(last_first=False)
                work, rows_q = tiles.row_tile(block, a.mQ, 1, a.mCuSeqlensQ, a.mSeqUsedQ, c.tile_m, order)
                length = Int32(0)
                if work.batch >= 0:
                    k = keys_of(a, work.batch)
                    first_block = packed_block(rows_q.start, work.batch, c.stats_m)
                    length = rows_q.length
                q, first_query = SeqRows(rows_q.start, length, rows_q.slot), work.first_row
        else:
            batch = entry
            q, k = rows_of(a.mQ, None, None, batch), rows_of(a.mK, None, None, batch)
            first_block = batch * cute.ceil_div(q.length, c.stats_m)
        return batch, q, k, first_query, first_block, num_fully_masked

    @cute.jit
    def rows_of_bias(self, a: BiasGradientArguments, owner: Owner) -> RowsOfScores:
        """The tile's rows of the bias: all that its sequence owns."""
        batch, q, _, first_query, _, _ = self.sequence(a, owner.entry, owner.block)
        num_rows = cutlass.min(q.slot - first_query, self.config.tile_m)
        if a.numbers.sums_queries > 0:  # one for all queries, whatever sequence the first tile is of
            num_rows = Int32(1)
            if a.numbers.entries == 0:
                q, first_query = SeqRows(Int32(0), q.length, q.slot), Int32(0)
        return RowsOfScores(q, batch, owner.head, first_query, num_rows, 1)

    @cute.jit
    def rows_of_gradient(
        self, a: BiasGradientArguments, batch: Int32 | int, q: SeqRows, first_query: Int32
    ) -> tuple[Int32 | int, Int32, Int32]:
        """Place of a tile of ``sequence`` in the gradient: entry, first row, and the end of its sequence."""
        n, entry, first_row, last_row = a.numbers, batch, first_query, q.slot
        if const_expr(self.config.features.packed):
            entry, offset = entry_and_row(a, q, batch)
            first_row, last_row = first_row + offset, last_row + offset
        return entry if n.sums_batch == 0 else Int32(0), first_row, last_row


class PieceTiles(MaskTiles):
    """The mask's tiles of all pieces, numbered within an entry."""

    def __init__(self, config: Any, pieces: PieceMap):
        super().__init__(config)
        self.pieces = pieces

    def tiles_a_set(self, a: BiasGradientArguments) -> Int32:
        return Sharing.of(a.numbers).tiles

    @cute.jit
    def tile_of(self, a: BiasGradientArguments, tile: Int32, batch: Int32) -> tuple[SeqRows, SeqRows, Int32, Int32]:
        _, rows = self.pieces.queries_of(a)
        entry, block = (tile // rows, tile % rows) if const_expr(self.config.features.packed) else (batch, tile)
        _, q, k, first_query, _, _ = self.pieces.sequence(a, entry, block)
        return q, k, first_query, tile


class PieceTables:
    """Tables of a mask or a block mask, made by kernels that run before the bias-gradient kernel."""

    def __init__(self, config: Any, pieces: PieceMap):
        self.config = config
        self.mask_tiles, self.block_tiles = PieceTiles(config, pieces), BlockTiles(config)

    @cute.jit
    def __call__(self, a: BiasGradientArguments, stream) -> Tables | None:
        """Launches the kernels that make the tables. Returns None without a mask."""
        c, tables = self.config, None
        if const_expr(c.features.mask):
            rows, blocks = Sharing.of(a.numbers).total, num_blocks(a.mMask, c.tile_n)
            tables = Tables(**carved(a.mTables, c.mask_tile.parts(rows, blocks), Int32))
            self.mask_tiles(a, tables.mCodes, tables.mBits, stream)
        elif const_expr(c.features.block_mask):
            blocks = a.blocks
            mBits = self.block_tiles.bits(blocks, stream)
            tables = Tables(mBits, mLists=as_rows(blocks.mSpans, 2), mEntries=as_rows(blocks.mEntries, 2))
        return tables
