"""dQ on Hopper from dS in global memory: dQ = dS K, by blocks of 64 queries, behind ``stored_ds``.

A tile is a block of 64 queries of a head. Its cells (``common.ds_cells``) follow each other, and have dS of each block
of keys that it attends to as it lay in shared memory. A step copies a cell and loads the K that belongs to it, and
multiplies the two (``gradient_q_schedule``). The order of a tile's cells is that of its sum, so that the sum has the
same bits in every run. What limits the kernel is how fast dS and K come, 24 KB a step at d = 128: hence four steps in
flight, and two CTAs or more an SM.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.backward import CELL_NUMBERS
from flash_attn_cute.kernels.common.ds_cells import TileHeads
from flash_attn_cute.kernels.common.key_lists import num_adding_of
from flash_attn_cute.kernels.common.key_tiles import heads_a_tile
from flash_attn_cute.kernels.common.main_kernels import MainKernel
from flash_attn_cute.kernels.common.rows import rows_first, scaled
from flash_attn_cute.kernels.common.tiles import ask_for_tile, take_tile, tile_taken
from flash_attn_cute.kernels.common.tma import RowTiles, prefetch_descriptors
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardStoredDSConfig
from flash_attn_cute.kernels.sm90.backward.gradient_q_schedule import FIELDS, gradient_q_schedule
from flash_attn_cute.kernels.sm90.mma import convert, gemm, store_rows, tiled_mma
from flash_attn_cute.kernels.sm90.shared import swizzled, transposed, write

_END = -1  # in the place of a tile's number of cells: there is no tile
_BARRIER_MMA = 1  # a named barrier of the mma warpgroup


class _Tiles(NamedTuple):
    """Tiles of 64 rows that TMA loads and stores."""

    K: RowTiles
    dQ: RowTiles | None  # None: it leaves from registers


class GradientTile(NamedTuple):
    """A block of queries, as the producer publishes it."""

    num: Int32  # cells
    first_query: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class _Shared:
    """Shared memory and what guards it."""

    sdS: cute.Tensor
    sK: cute.Tensor
    sOut: cute.Tensor | None
    cells: cute.Pointer  # the place of sdS, in words
    tile_fields: cute.Tensor
    rings: Any

    @cute.jit
    def publish(self, tile: GradientTile, tile_idx: Int32) -> None:
        """Publishes a tile, by the producer."""
        self.rings.tiles.wait_empty(tile_idx)  # from the mma warps
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(FIELDS):
                self.tile_fields[i, self.rings.tiles.stage(tile_idx)] = tile[i]
            cute.arch.mbarrier_arrive(self.rings.tiles.full(tile_idx))  # to the mma warps

    def tile(self, tile_idx: Int32) -> GradientTile:
        """The tile of a number."""
        return GradientTile(*(self.tile_fields[i, self.rings.tiles.stage(tile_idx)] for i in range(FIELDS)))

    @cute.jit
    def has_tile(self, tile_idx: Int32) -> Boolean:
        """Waits for the producer. Returns whether it published a tile, and not the end."""
        self.rings.tiles.wait_full(tile_idx)  # from the producer
        return self.tile(tile_idx).num != _END


class GradientQSm90(MainKernel):
    """The kernel of one configuration: persistent CTAs."""

    def __init__(self, config: BackwardStoredDSConfig):
        super().__init__(config, gradient_q_schedule(config), swizzled)

    def mmas(self) -> cute.TiledMma:
        """dQ = dS K, of operands that lie with queries and columns of K next to each other."""
        return tiled_mma(self.dtype, self.config.tile_d, mn_major="ab")

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel for a chunk of heads, with as many CTAs as SMs have room for."""
        c, n = self.config, a.numbers
        mdQ = rows_first(a.mdQ, packed=False)
        store = cpasync.CopyBulkTensorTileS2GOp()
        dQ = None if c.features.wide else self.memory.row_tiles(store, "sOut", mdQ, ragged=False)
        tma = _Tiles(K=self.loaded_tiles("sK", a.mK), dQ=dQ)
        kernel = self.kernel(self.mmas(), tma, mdQ, a, ws)
        self.launch(kernel, n.num_m_blocks * a.mQ.shape[2], stream, n.num_sms, c.ctas_of_dQ)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, tma: _Tiles, mdQ: cute.Tensor, a: BackwardArguments, ws: Workspace) -> None:
        """Sets up shared memory and pipelines, then splits into roles."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.memory.allocate()
        if warp_idx == 0:
            prefetch_descriptors(tma)
            with cute.arch.elect_one():
                self.memory.init(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        shared = _Shared(
            **self.memory.tensors(storage, "sdS", "sK", "sOut", "tile_fields"),
            cells=cute.recast_ptr(storage.sdS.data_ptr(), dtype=Int32),
            rings=self.memory.rings(storage),
        )
        if warp_idx < self.schedule.role("producer").warps.start:
            self.mma(a, mma, tma, mdQ, shared)
        else:
            self.producer(a, ws, tma, shared)

    @cute.jit
    def producer(self, a: BackwardArguments, ws: Workspace, tma: _Tiles, shared: _Shared) -> None:
        """Warp 4: chooses tiles, and copies what their steps multiply."""
        blocks = cute.ceil_div(a.mQ.shape[1], self.config.tile_m)
        heads = heads_a_tile(self.config, a)
        first_of_launch = ws.mChunks[0] * heads * blocks
        num_tiles = ws.mChunks[1] * heads * blocks - first_of_launch
        counter = cute.domain_offset((1,), a.mNextTile)
        num_questions = num_tiles + cute.arch.grid_dim()[0]  # every CTA asks until it gets none
        index, tile_idx, step = take_tile(counter, num_questions), Int32(0), Int32(0)
        while index < num_tiles:
            asked_before = ask_for_tile(counter)  # early, because the answer takes long
            head_idx, m_block = (first_of_launch + index) // blocks, index % blocks
            tile_heads = TileHeads.of(self.config, a, head_idx // heads)
            head, batch = tile_heads.head + head_idx % heads, tile_heads.batch
            num = num_adding_of(a, ws, batch, head, m_block)
            shared.publish(GradientTile(num, m_block * self.config.tile_m, head, batch), tile_idx)
            cell = ws.mCells[head, batch * blocks + m_block]
            step = self._load(ws, tma, shared, tile_heads, cell, num, step)
            tile_idx += 1
            index = tile_taken(counter, asked_before, num_questions)
        shared.publish(GradientTile(Int32(_END), Int32(0), Int32(0), Int32(0)), tile_idx)

    @cute.jit
    def _load(
        self, ws: Workspace, tma: _Tiles, shared: _Shared, tile_heads: TileHeads, cell: Int32, num: Int32, step: Int32
    ) -> Int32:
        """Copies the cells of a tile, and loads their K; returns the next step."""
        ring, lane = shared.rings.steps, cute.arch.lane_idx()
        words = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
        blocks = Int32(0)
        for i in cutlass.range(num, unroll=1):
            if i % 32 == 0:  # the next ones, a lane each
                if i + lane < num:
                    blocks = ws.mCellKeys[cell + i + lane]
            first_key = cute.arch.shuffle_sync(blocks, i % 32) * self.config.tile_n
            full, stage = ring.full(step), ring.stage(step)
            ring.wait_empty(step)  # from the mma warps
            with cute.arch.elect_one():
                ring.announce(step)
                place = cute.make_tensor(shared.cells + CELL_NUMBERS * stage, cute.make_layout(CELL_NUMBERS))
                cute.copy(words, ws.mdS[cell + i, None], place, mbar_ptr=full)
            g = tma.K.at(first_key, first_key, tile_heads.head_k, tile_heads.batch)
            tma.K.load(g, shared.sK[None, None, stage], full)
            step += 1
        return step

    @cute.jit
    def mma(self, a: BackwardArguments, mma: cute.TiledMma, tma: _Tiles, mdQ: cute.Tensor, shared: _Shared) -> None:
        """The mma warpgroup: the products of every tile, and its dQ, scaled."""
        thread, _, _ = cute.arch.thread_idx()
        whole, rings = mma.get_slice(0), shared.rings
        tA = mma.make_fragment_A(whole.partition_A(transposed(shared.sdS)))
        tB = mma.make_fragment_B(whole.partition_B(transposed(shared.sK)))
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((64, self.config.tile_d)), Float32)
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            acc.fill(0.0)
            for i in cutlass.range(shared.tile(tile_idx).num, unroll=1):
                stage = rings.steps.stage(step)
                rings.steps.wait_full(step)  # from the producer
                gemm(mma, acc, tA[None, None, None, stage], tB[None, None, None, stage], False)
                warpgroup.wait_group(1)  # the product before is there
                if i > 0:
                    rings.steps.release(step - 1)  # to the producer
                step += 1
            warpgroup.wait_group(0)
            if shared.tile(tile_idx).num > 0:
                rings.steps.release(step - 1)  # to the producer
            tile = shared.tile(tile_idx)
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = scaled(acc[i], a.numbers.softmax_scale)
            if const_expr(self.config.features.wide):
                store_rows(acc, mdQ[None, None, tile.head, tile.batch], tile.first_query, a.mQ.shape[1], thread)
            else:
                is_storing = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
                rounded = cute.make_rmem_tensor_like(acc, self.dtype)
                convert(acc, rounded)
                if is_storing:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)  # the tile before has left
                cute.arch.barrier(barrier_id=_BARRIER_MMA, number_of_threads=128)
                write(rounded, mma, shared.sOut, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=_BARRIER_MMA, number_of_threads=128)  # all of dQ is there
                if is_storing:
                    g = tma.dQ.at(tile.first_query, tile.first_query, tile.head, tile.batch)
                    tma.dQ.store(shared.sOut, g)
                    cute.arch.cp_async_bulk_commit_group()
            rings.tiles.release(tile_idx)  # to the producer
            tile_idx += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)
