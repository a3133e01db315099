"""Producer warp and epilogue of the forward kernel (see ``forward``), and the shared memory of all its roles."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.assembly import pack
from flash_attn_cute.kernels.common.block_lists import Tables
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.query_tiles import QueryTile, QueryTiles
from flash_attn_cute.kernels.common.residuals import GROUP, residual_word
from flash_attn_cute.kernels.common.ring import StepInfo
from flash_attn_cute.kernels.common.rows import rows_first, store_columns, zero_rows
from flash_attn_cute.kernels.common.softmax import finalize
from flash_attn_cute.kernels.common.tma import ForwardTiles, RowTiles
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.block_iterator import BlockIterator, ListedTiles
from flash_attn_cute.kernels.sm100.config import O_COLUMNS, PART_ROWS
from flash_attn_cute.kernels.sm100.forward_config import O_STAGES, ForwardConfig
from flash_attn_cute.kernels.sm100.frame import Held
from flash_attn_cute.kernels.sm100.mma import write_row

_BARRIER_EPILOGUE = 1  # named; 0 is the whole CTA's
_COLUMNS = 16  # of O that a thread of the epilogue has in registers


@dataclass(frozen=True)
class Shared(Held):
    """Shared memory and what guards it: ``forward_schedule`` describes all of it."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor | None  # None, if O leaves through the place of Q
    tiles: cute.Tensor
    entries: StepInfo | None  # a block, and its code for each part
    iterator: cute.Tensor | None
    stats: cute.Tensor

    def tile(self, config: ForwardConfig, step: Int32) -> QueryTile:
        """The tile of a step, as published; read where it is needed, to keep it out of registers."""
        return QueryTile.read(config, self.tiles[None, self.rings.tiles.stage(step)])

    @cute.jit
    def publish(self, tile: QueryTile | None, step: Int32) -> None:
        """Publishes a tile to the other roles, by the producer; None: the end of work, as a tile of no sequence."""
        ring = self.rings.tiles
        ring.wait_empty(step)  # from all other roles: they are done with the stage's last tile
        with cute.arch.elect_one():
            self._write(tile, step)

    def _write(self, tile: QueryTile | None, step: Int32) -> None:
        """Writes a tile, and signals that, by one thread."""
        stage = self.rings.tiles.stage(step)
        if tile is None:
            self.tiles[0, stage] = Int32(-1)
        else:
            tile.write(self.tiles[None, stage])
        cute.arch.mbarrier_arrive(self.rings.tiles.full(step))

    def piece_of_O(self, part: Int32, piece: int, number: Int32) -> cute.Tensor:
        """Where 64 columns of a part's O are put, (128, 64); ``number`` counts what has been put so far."""
        if self.sO is not None:
            return self.sO[None, None, number % O_STAGES]
        return cute.local_tile(self.sQ[None, None, part], (PART_ROWS, O_COLUMNS), (0, piece))


@dataclass(frozen=True)
class Producer:
    """One warp: chooses tiles, and loads all that they need in the order in which it is consumed."""

    config: ForwardConfig
    a: ForwardArguments
    tables: Tables | None
    tma: ForwardTiles
    shared: Shared

    @property
    def tiles(self) -> QueryTiles:
        """All tiles of the pass."""
        return ListedTiles(self.config) if self.config.features.listed else QueryTiles(self.config)

    @cute.jit
    def __call__(self) -> None:
        """All tiles of the CTA; one of no sequence ends the work of the others."""
        c, a, tma, shared = self.config, self.a, self.tma, self.shared
        heads_a_key_head = a.mQ.shape[-2] // a.mK.shape[-2]
        num_tiles = self.tiles.num(a)
        step, q_step, block_step = Int32(0), Int32(0), Int32(0)
        index, _, _ = cute.arch.block_idx()
        iterator = BlockIterator.of(c, self.tables, shared.iterator) if const_expr(c.features.listed) else None
        while index < num_tiles:
            tile = self.tiles.at(a, iterator, index)
            index = self.tiles.following(a, self.tiles.ask(a), num_tiles)
            if self.tiles.is_work(tile):
                shared.publish(tile, step)
                step += 1
                if const_expr(c.features.listed):
                    cute.arch.sync_warp()  # it is written
                k_start = tile.k.start
                for i in cutlass.range(tile.blocks.num, unroll=1):
                    block, tile_of_block = tile.blocks.nth(i), tile
                    if const_expr(c.features.listed):
                        block, codes = iterator.nth(i)
                        shared.entries.publish(block_step, (block, *codes))
                        # Reloaded: beside the block iterator registers are short.
                        tile_of_block = shared.tile(c, step - 1)
                    start = block * c.tile_n
                    stop = k_start + cutlass.min(start + c.tile_n, tile_of_block.k.length)
                    start += k_start
                    head_k = tile_of_block.head // heads_a_key_head
                    gK = tma.K.at(start, stop, head_k, tile_of_block.batch)
                    self._load("K", gK, block_step)
                    if i == 0:
                        self._load_Q(tile_of_block, q_step)
                        q_step += c.q_parts
                    gV = tma.V.at(start, stop, head_k, tile_of_block.batch)
                    self._load("V", gV, block_step)
                    block_step += 1
        shared.publish(None, step)

    @cute.jit
    def _load_Q(self, tile: QueryTile, step: Int32) -> None:
        for part in cutlass.range_constexpr(self.config.q_parts):
            # A part behind the sequence's end is an empty box: it arrives as zeros.
            start = tile.first_query + PART_ROWS * part
            stop = cutlass.max(cutlass.min(start + PART_ROWS, tile.q.length), start)
            gQ = self.tma.Q.at(tile.q.start + start, tile.q.start + stop, tile.head, tile.batch)
            self._load("Q", gQ, step + part)

    def _load(self, name: str, gX: cute.Tensor, step: Int32) -> None:
        """Loads a tile of Q, K or V to the stage of a step."""
        shared, tiles = self.shared, getattr(self.tma, name)
        sX, ring = getattr(shared, f"s{name}"), getattr(shared.rings, name.lower())
        ring.wait_empty(step)  # from the tensor cores: products with what was there are done
        shared.announce(ring, step)
        tiles.load(gX, sX[None, None, ring.stage(step)], ring.full(step))


@dataclass(frozen=True)
class Epilogue:
    """A warpgroup: brings O from tensor memory to global memory, with lse, and zeros into the padding."""

    config: ForwardConfig
    a: ForwardArguments
    tO: RowTiles | None
    shared: Shared
    mO: cute.Tensor
    mLSE: cute.Tensor
    thread: Int32  # of the warpgroup

    @cute.jit
    def __call__(self) -> None:
        """All tiles of the CTA. A thread has a row of each part."""
        c, shared, rings = self.config, self.shared, self.shared.rings
        step, o_step = Int32(0), Int32(0)
        rings.tiles.wait_full(step)  # from the producer
        while shared.tiles[0, rings.tiles.stage(step)] >= 0:
            has_keys = shared.tile(c, step).blocks.num > 0
            for part in cutlass.range(c.q_parts, unroll=1):
                self._part(step, part, has_keys, o_step + part)
            if has_keys:
                o_step += c.q_parts
            rings.tiles.release_fields(step)  # to the producer
            step += 1
            rings.tiles.wait_full(step)
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until it has been read

    @cute.jit
    def _part(self, step: Int32, part: Int32, has_keys: Boolean, o_step: Int32) -> None:
        """A part of a tile: O, if it has keys, lse, and zeros into the padding."""
        c, a, shared, mO, mLSE, thread = self.config, self.a, self.shared, self.mO, self.mLSE, self.thread
        rings, tile = shared.rings, shared.tile(c, step)
        first_row = tile.first_query + PART_ROWS * part
        stop = cutlass.min(first_row + PART_ROWS, tile.q.length)
        row_sum, row_max = Float32(0.0), -Float32.inf
        if has_keys:
            rings.stats.wait_full(o_step)  # from the part's softmax warps
            row_sum, row_max = shared.stats[thread, 0, part], shared.stats[thread, 1, part]
            rings.stats.release(o_step)  # to them
        sink = None
        if const_expr(a.mSink is not None):
            sink = a.mSink[tile.head].to(Float32)
        factor, lse = finalize(row_sum, row_max, sink, is_natural=c.features.bias)
        if first_row + thread < stop:
            mLSE[tile.q.start + first_row + thread, tile.head, tile.batch] = lse
        if has_keys:
            if const_expr(c.features.wide):
                self._store_rows(step, part, o_step, factor)
            else:
                self._store(step, part, o_step, factor)
        else:
            gO = mO[None, None, tile.head, tile.batch]
            zero_rows(gO, tile.q.start + first_row, stop - first_row, thread, PART_ROWS)
        if const_expr(c.features.packed and c.features.zero_padding):
            first = cutlass.max(first_row, tile.q.length)
            padding = cutlass.min(first_row + PART_ROWS, tile.q.slot) - first
            zero_rows(mO[None, None, tile.head, tile.batch], tile.q.start + first, padding, thread, PART_ROWS)
            for i in cutlass.range(thread, padding, PART_ROWS, unroll=1):
                mLSE[tile.q.start + first + i, tile.head, tile.batch] = -Float32.inf

    @cute.jit
    def _store(self, step: Int32, part: Int32, o_step: Int32, factor: Float32) -> None:
        """A part of O, each row times a factor, through shared memory and TMA."""
        c, shared, rings, thread, tO = self.config, self.shared, self.shared.rings, self.thread, self.tO
        dtype = DTYPES[c.dtype]
        address = tensor_memory.row_address(shared.tensor_memory, thread) + c.first_O(part)
        together = {"barrier_id": _BARRIER_EPILOGUE, "number_of_threads": PART_ROWS}
        pieces = c.tile_dv // O_COLUMNS
        residuals = cute.make_rmem_tensor(GROUP // 4, Int32) if const_expr(c.features.residual) else None
        rings.outputs.wait_full(o_step)  # from the tensor cores: O is complete, and Q not needed any more
        tensor_memory.after_sync()
        for piece in cutlass.range_constexpr(pieces):
            sO = shared.piece_of_O(part, piece, o_step * pieces + piece)
            if const_expr(not c.o_in_q):
                if thread < 32:
                    cute.arch.cp_async_bulk_wait_group(O_STAGES - 1, read=True)
                cute.arch.barrier(**together)  # what was there has left shared memory
            for first in cutlass.range_constexpr(0, O_COLUMNS, _COLUMNS):
                some = tensor_memory.load(address + (piece * O_COLUMNS + first), _COLUMNS)
                rO = cute.make_rmem_tensor(_COLUMNS, dtype)
                packed = cute.recast_tensor(rO, Int32)
                for i in cutlass.range_constexpr(_COLUMNS // 2):
                    pair = (self._scaled(x, factor) for x in some[2 * i : 2 * i + 2])
                    packed[i] = pack(*pair, dtype)
                write_row(rO, sO, thread, first)
                if const_expr(c.features.residual):
                    half = first % GROUP // _COLUMNS
                    for q in cutlass.range_constexpr(4):
                        own = (self._scaled(some[8 * p + 2 * q + e], factor) for p in range(2) for e in range(2))
                        residuals[2 * q + half] = residual_word(list(own), dtype)
                    if const_expr(half == 1):
                        group = (piece * O_COLUMNS + first) // GROUP
                        self._store_residuals(shared.tile(c, step), part, group, residuals)
            cute.arch.fence_proxy("async.shared", space="cta")
            if const_expr(piece == pieces - 1):
                tensor_memory.before_sync()
                rings.outputs.release(o_step)  # to the mma warp: O may be overwritten
            cute.arch.barrier(**together)
            if thread < 32:
                tile = shared.tile(c, step)
                start = tile.first_query + PART_ROWS * part
                stop = cutlass.min(start + PART_ROWS, tile.q.length)
                if start < stop:
                    gO = tO.at(tile.q.start + start, tile.q.start + stop, tile.head, tile.batch, piece)
                    tO.store(sO, gO)
                cute.arch.cp_async_bulk_commit_group()
        if const_expr(c.o_in_q):
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                rings.q.release(o_step)  # to the producer: the place of Q is free

    @cute.jit
    def _store_residuals(self, tile: QueryTile, part: Int32, group: Constexpr, words: cute.Tensor) -> None:
        """Residuals of a group of columns of this thread's row, if there are such a row and such columns."""
        mResidual = rows_first(self.a.mResidual, self.config.features.packed)
        row = tile.first_query + PART_ROWS * part + self.thread
        if row < tile.q.length and group * GROUP < mResidual.shape[1]:
            gR = mResidual[tile.q.start + row, None, tile.head, tile.batch]
            cute.autovec_copy(words, cute.recast_tensor(cute.local_tile(gR, (GROUP,), (group,)), Int32))

    @cute.jit
    def _store_rows(self, step: Int32, part: Int32, o_step: Int32, factor: Float32) -> None:
        """A part of O in float32, each row times a factor, by the threads that have the rows."""
        c, shared, rings, thread, mO = self.config, self.shared, self.shared.rings, self.thread, self.mO
        tile = shared.tile(c, step)
        address = tensor_memory.row_address(shared.tensor_memory, thread) + c.first_O(part)
        row = tile.first_query + PART_ROWS * part + thread
        gO = mO[tile.q.start + row, None, tile.head, tile.batch]
        end = Int32(0)
        if row < tile.q.length:
            end = Int32(gO.shape[0])
        rings.outputs.wait_full(o_step)  # from the tensor cores: O is complete
        tensor_memory.after_sync()
        for first in cutlass.range_constexpr(0, c.tile_dv, _COLUMNS):
            some = tensor_memory.load(address + first, _COLUMNS)
            rO = cute.make_rmem_tensor(_COLUMNS, Float32)
            for i in cutlass.range_constexpr(_COLUMNS):
                rO[i] = self._scaled(some[i], factor)
            store_columns(rO, gO, first, end)
        tensor_memory.before_sync()
        rings.outputs.release(o_step)  # to the mma warp: O may be overwritten
        if const_expr(c.o_in_q):
            if thread < 32:
                rings.q.release(o_step)  # to the producer

    def _scaled(self, x: Float32, factor: Float32) -> Float32:
        """An element of O, times the factor of its row."""
        if self.config.leaves_out:  # nothing may have been multiplied: anything may stand there
            x = cutlass.select_(factor != 0.0, x, Float32(0.0))
        return x * factor
