"""Column sums on Hopper: the sum of each key's probabilities over the queries that attend to it.

``python -m flash_attn_cute.kernels describe sm90 column_sums --d 128`` prints its schedule (``column_sums_schedule``).

Keys are the rows of scores: a thread adds P of its rows to numbers in its registers, and four lanes exchange their sums
once a tile. Rows behind the last query have an lse of inf, and so have fully masked ones: their P is 0.

The bound is exp2, 16 a clock: 1024 clocks for 128 x 128 scores, where products take 1024 at d = 128 and 512 at d = 64.
So a warpgroup has two halves of 64 keys: products of one are in flight while it sums P of the other. K lies in
registers. So shared memory is read for Q alone, and K of the next tile is loaded to the one place that K has there.

Sums are float32, in the order of the blocks: they have the same bits in every run, and in any packing.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from flash_attn_cute.kernels.arguments import ColumnSumsArguments
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.assembly import fma, opaque, set_registers
from flash_attn_cute.kernels.common.blocks import Blocks, Edges, Window
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.main_kernels import MainKernel
from flash_attn_cute.kernels.common.rows import numbers_first
from flash_attn_cute.kernels.common.score import LOG2_E
from flash_attn_cute.kernels.common.score_rows import Place
from flash_attn_cute.kernels.common.tma import RowTiles, prefetch_descriptors
from flash_attn_cute.kernels.sm90.column_sums_config import ColumnSumsConfig
from flash_attn_cute.kernels.sm90.column_sums_schedule import HALVES, column_sums_schedule
from flash_attn_cute.kernels.sm90.mma import gemm, rows_and_columns, tiled_mma
from flash_attn_cute.kernels.sm90.scores import hide
from flash_attn_cute.kernels.sm90.shared import read_a, swizzled


class _Tiles(NamedTuple):
    """TMA tiles of the tensors that the kernel loads."""

    Q: RowTiles
    K: RowTiles


@dataclass(frozen=True)
class _Tile:
    """A tile of keys of one query head as the producer publishes it."""

    first_key: Int32  # -1: there are no more tiles
    head: Int32  # of queries
    batch: Int32  # index into tensors: 0 if packed
    q: SeqRows
    k: SeqRows
    blocks: Blocks  # of queries, from the first to the last

    @staticmethod
    @cute.jit
    def at(config: Constexpr, a: ColumnSumsArguments, index: Int32) -> "_Tile":
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
        return _Tile(work.first_row, work.head, batch, q, k, blocks)

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
    def read(fields: cute.Tensor) -> "_Tile":
        """Reads a tile from shared memory; unused fields are not loaded."""
        first_key, head, batch, *lengths = (fields[i] for i in range(7))
        q, k = SeqRows(*lengths[:2]), SeqRows(*lengths[2:])
        return _Tile(first_key, head, batch, q, k, Blocks(*(fields[i] for i in range(7, 11))))

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


class ColumnSumsSm90(MainKernel):
    """The kernel of one configuration."""

    def __init__(self, config: ColumnSumsConfig):
        super().__init__(config, column_sums_schedule(config), swizzled)

    @cute.jit
    def __call__(self, a: ColumnSumsArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel."""
        tma = _Tiles(Q=self.loaded_tiles("sQ", a.mQ), K=self.loaded_tiles("sK", a.mK))
        mLSE, mSums = (numbers_first(x, self.config.features.packed) for x in (a.mLSE, a.mSums))
        kernel = self.kernel(self.mmas(), tma, mLSE, mSums, a)
        self.launch(kernel, _Tile.num(self.config, a), stream, a.numbers.num_sms)

    def mmas(self) -> cute.TiledMma:
        return tiled_mma(self.dtype, self.config.tile_n, a_in_registers=True)

    @cute.kernel
    def kernel(
        self, mma: cute.TiledMma, tma: _Tiles, mLSE: cute.Tensor, mSums: cute.Tensor, a: ColumnSumsArguments
    ) -> None:
        """Sets up shared memory and barriers, then splits into roles."""
        schedule, memory = self.schedule, self.memory
        producer, mma_role = map(schedule.role, ("producer", "mma"))
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.memory.allocate()
        if warp_idx == 0:
            prefetch_descriptors(tma)
            with cute.arch.elect_one():
                memory.init(storage)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        shared = _Shared(**memory.tensors(storage, "tiles", "sLSE", "sK", "sQ"), rings=memory.rings(storage))
        if warp_idx < mma_role.warps.start:
            set_registers(producer.registers, schedule.threads)
            if warp_idx == 0:
                self.producer(a, tma, shared)
            elif warp_idx == 1:
                self.lse_producer(mLSE, shared)
        else:
            set_registers(mma_role.registers, schedule.threads)
            self.mma(self._work(a, mma, mSums, shared))

    @cute.jit
    def producer(self, a: ColumnSumsArguments, tma: _Tiles, shared: "_Shared") -> None:
        """Warp 0: chooses tiles that some query attends to, and loads their keys and all blocks of queries."""
        c = self.config
        heads_a_key_head = a.mQ.shape[-2] // a.mK.shape[-2]
        num_tiles, tile_idx, step = _Tile.num(c, a), Int32(0), Int32(0)
        index, _, _ = cute.arch.block_idx()
        while index < num_tiles:
            asked_before = tiles.ask_for_tile(a.mNextTile)
            tile = _Tile.at(c, a, index)
            if tile.blocks.num > 0:
                shared.publish(tile, tile_idx)
                shared.rings.k.acquire(tile_idx)  # from the mma warps
                for part in cutlass.range_constexpr(HALVES * c.num_mma_warpgroups):
                    # A part behind the sequence's end is an empty box: it arrives as zeros.
                    start = tile.first_key + 64 * part
                    stop = cutlass.max(cutlass.min(start + 64, tile.k.length), start)
                    gK = tma.K.at(tile.k.start + start, tile.k.start + stop, tile.head // heads_a_key_head, tile.batch)
                    tma.K.load(gK, shared.sK[None, None, part], shared.rings.k.full(tile_idx))
                for i in cutlass.range(tile.blocks.num, unroll=1):
                    start = tile.blocks.nth(i) * c.tile_n
                    stop = cutlass.min(start + c.tile_n, tile.q.length)
                    shared.rings.q.acquire(step)  # from the mma warps
                    gQ = tma.Q.at(tile.q.start + start, tile.q.start + stop, tile.head, tile.batch)
                    tma.Q.load(gQ, shared.sQ[None, None, shared.rings.q.stage(step)], shared.rings.q.full(step))
                    step += 1
                tile_idx += 1
            index = tiles.tile_taken(a.mNextTile, asked_before, num_tiles, cute.arch.grid_dim()[0])
        shared.publish(None, tile_idx)

    @cute.jit
    def lse_producer(self, mLSE: cute.Tensor, shared: "_Shared") -> None:
        """Warp 1: lse of each block in base 2, and inf where P is to be 0."""
        c, lane = self.config, cute.arch.lane_idx()
        tile_idx, step = Int32(0), Int32(0)
        shared.rings.tiles.wait_full(tile_idx)  # from warp 0
        tile = shared.tile(tile_idx)
        while tile.first_key >= 0:
            for i in cutlass.range(tile.blocks.num, unroll=1):
                first = tile.blocks.nth(i) * c.tile_n
                loaded = cute.make_rmem_tensor(c.tile_n // 32, Float32)
                for j in cutlass.range_constexpr(cute.size(loaded)):
                    row = first + 32 * j + lane
                    lse = mLSE[tile.q.start + cutlass.min(row, tile.q.length - 1), tile.head, tile.batch]
                    is_any = row < tile.q.length and lse != -Float32.inf
                    loaded[j] = lse * LOG2_E if is_any else Float32.inf
                shared.rings.lse.wait_empty(step)  # from the mma warps
                for j in cutlass.range_constexpr(cute.size(loaded)):
                    shared.sLSE[32 * j + lane, shared.rings.lse.stage(step)] = loaded[j]
                shared.rings.lse.arrive(step)
                step += 1
            shared.rings.tiles.release(tile_idx)  # to warp 0
            tile_idx += 1
            shared.rings.tiles.wait_full(tile_idx)  # from warp 0
            tile = shared.tile(tile_idx)

    def _work(self, a: ColumnSumsArguments, mma: cute.TiledMma, mSums: cute.Tensor, shared: "_Shared") -> "_Work":
        """Operands and accumulators of this mma warpgroup."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        own, whole = mma.get_slice(thread), mma.get_slice(0)
        acc_shape = own.partition_shape_C((64, c.tile_n))
        return _Work(
            arguments=a,
            warpgroup=cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1,
            thread=thread,
            mma=mma,
            rK=[cute.make_rmem_tensor(own.partition_shape_A((64, c.tile_d)), self.dtype) for _ in range(HALVES)],
            tSrQ=mma.make_fragment_B(whole.partition_B(shared.sQ)),
            acc_S=[cute.make_rmem_tensor(acc_shape, Float32) for _ in range(HALVES)],
            cS=own.partition_C(cute.make_identity_tensor((64, c.tile_n))),
            sums=[cute.make_rmem_tensor(2, Float32) for _ in range(HALVES)],
            scale_log2=a.numbers.softmax_scale * LOG2_E,
            shared=shared,
            mSums=mSums,
        )

    @cute.jit
    def mma(self, work: "_Work") -> None:
        """An mma warpgroup: 128 keys of every tile, from their first block of queries to their sums."""
        shared = work.shared
        tile_idx, step = Int32(0), Int32(0)
        shared.rings.tiles.wait_full(tile_idx)  # from warp 0
        working = shared.tile(tile_idx).first_key >= 0
        while working:
            shared.rings.k.wait_full(tile_idx)  # from warp 0
            for half in cutlass.range_constexpr(HALVES):
                # Not kept in registers around the mainloop: where a thread reads.
                thread = work.thread + opaque(Int32(0))
                read_a(work.mma, shared.sK[None, None, HALVES * work.warpgroup + half], work.rK[half], thread)
                work.sums[half].fill(0.0)
            shared.rings.k.release_read(tile_idx)  # to warp 0
            step = self._mainloop(work, tile_idx, step)
            self.epilogue(work, shared.tile(tile_idx))
            shared.rings.tiles.release(tile_idx)  # to warp 0
            tile_idx += 1
            shared.rings.tiles.wait_full(tile_idx)  # from warp 0
            working = shared.tile(tile_idx).first_key >= 0

    @cute.jit
    def _mainloop(self, work: "_Work", tile_idx: Int32, step: Int32) -> Int32:
        """All blocks of queries of a tile; returns the step behind them."""
        shared = work.shared
        blocks = shared.tile(tile_idx).blocks
        shared.rings.q.wait_full(step)  # from warp 0
        self._start_S(work, 0, step)
        warpgroup.wait_group(0)
        for i in cutlass.range(blocks.num - 1, unroll=1):
            self._start_S(work, 1, step)
            shared.rings.lse.wait_full(step)  # from warp 1
            self._add(work, 0, tile_idx, blocks.nth(i), step)
            warpgroup.wait_group(0)
            shared.rings.q.release(step)  # to warp 0
            shared.rings.q.wait_full(step + 1)  # from warp 0
            self._start_S(work, 0, step + 1)
            self._add(work, 1, tile_idx, blocks.nth(i), step)
            shared.rings.lse.release(step)  # to warp 1
            # In flight around the loop it would be serialised.
            warpgroup.wait_group(0)
            step += 1
        self._start_S(work, 1, step)
        shared.rings.lse.wait_full(step)  # from warp 1
        self._add(work, 0, tile_idx, blocks.stop - 1, step)
        warpgroup.wait_group(0)
        shared.rings.q.release(step)  # to warp 0
        self._add(work, 1, tile_idx, blocks.stop - 1, step)
        shared.rings.lse.release(step)  # to warp 1
        return step + 1

    def _start_S(self, work: "_Work", half: int, step: Int32) -> None:
        """S = K Q^T of a half of this warpgroup's keys; in flight on return."""
        tSrQ = work.tSrQ[None, None, None, work.shared.rings.q.stage(step)]
        gemm(work.mma, work.acc_S[half], work.rK[half], tSrQ, is_first=True)

    @cute.jit
    def _add(self, work: "_Work", half: Constexpr, tile_idx: Int32, block: Int32, step: Int32) -> None:
        """Masks S of a half where an edge of a window crosses it, and adds P to the sums of its keys."""
        f, acc_S = self.config.features, work.acc_S[half]
        if const_expr(f.left or f.right):
            tile = work.shared.tile(tile_idx)
            # Rows are keys, so that a right bound is a left edge.
            is_crossed = Boolean(False)
            if const_expr(f.right):
                is_crossed = is_crossed or tile.blocks.crosses_left(block)
            if const_expr(f.left):
                is_crossed = is_crossed or tile.blocks.crosses_right(block)
            if is_crossed:
                first_row = 64 * (HALVES * work.warpgroup + half)
                place = tile.place(self.config, work.arguments, first_row, block)
                hide(acc_S, work.cS, work.scale_log2, place, Edges(left=f.right, right=f.left))
        sLSE = work.shared.sLSE[None, work.shared.rings.lse.stage(step)]
        scores, first_column = rows_and_columns(acc_S), rows_and_columns(work.cS)[0, 0][1]
        pair = cute.make_rmem_tensor(2, Float32)
        total = [Float32(0.0)] * 2
        for c in cutlass.range_constexpr(0, cute.size(scores, mode=[1]), 2):
            cute.autovec_copy(cute.local_tile(sLSE, (2,), (first_column // 2 + 2 * c,)), pair)
            for r in cutlass.range_constexpr(2):
                low, high = (
                    cute.math.exp2(fma(scores[r, c + i], work.scale_log2, -pair[i]), fastmath=True) for i in range(2)
                )
                total[r] = total[r] + (low + high) if const_expr(c > 0) else low + high
        for r in cutlass.range_constexpr(2):
            work.sums[half][r] += total[r]

    @cute.jit
    def epilogue(self, work: "_Work", tile: _Tile) -> None:
        """Stores the sums of this warpgroup's keys, of which four lanes have a part each."""
        for half in cutlass.range_constexpr(HALVES):
            for r in cutlass.range_constexpr(2):
                total = work.sums[half][r]
                for lanes in cutlass.range_constexpr(1, 3):
                    total += cute.arch.shuffle_sync_bfly(total, lanes)
                row = 64 * (HALVES * work.warpgroup + half) + rows_and_columns(work.cS)[r, 0][0]
                key = tile.first_key + row
                if work.thread % 4 == 0 and key < tile.k.length:
                    work.mSums[tile.k.start + key, tile.head, tile.batch] = total


@dataclass(frozen=True)
class _Shared:
    """Shared memory and what guards it."""

    tiles: cute.Tensor
    sLSE: cute.Tensor
    sK: cute.Tensor
    sQ: cute.Tensor
    rings: Any  # by the pipelines' names

    def tile(self, tile_idx: Int32) -> _Tile:
        """The tile of a number, as published by the producer."""
        return _Tile.read(self.tiles[None, self.rings.tiles.stage(tile_idx)])

    @cute.jit
    def publish(self, tile: _Tile | None, tile_idx: Int32) -> None:
        """Publishes a tile, or that there is none, when all other roles have released the stage."""
        self.rings.tiles.wait_empty(tile_idx)  # from all other roles
        fields = self.tiles[None, self.rings.tiles.stage(tile_idx)]
        with cute.arch.elect_one():
            if const_expr(tile is None):
                fields[0] = Int32(-1)
            else:
                tile.write(fields)
        self.rings.tiles.arrive(tile_idx)


@dataclass(frozen=True)
class _Work:
    """An mma warpgroup's operands, accumulators and sums, and where these go. Lists are of its two halves of keys."""

    arguments: ColumnSumsArguments
    warpgroup: Int32
    thread: Int32  # of the warpgroup
    mma: cute.TiledMma
    rK: list[cute.Tensor]
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    acc_S: list[cute.Tensor]
    cS: cute.Tensor  # coordinates of acc_S
    sums: list[cute.Tensor]  # of this thread's two rows, over its columns
    scale_log2: Any
    shared: _Shared
    mSums: cute.Tensor  # (key, head, batch)
