"""Warpgroup 0 of the forward kernel: which tiles there are, and what they need; and its shared memory.

``forward_schedule`` describes both.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr, pipeline

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.block_lists import Tables
from flash_attn_cute.kernels.common.blocks import Edges
from flash_attn_cute.kernels.common.query_tiles import QueryTile, QueryTiles
from flash_attn_cute.kernels.common.score_rows import SharedBias
from flash_attn_cute.kernels.common.score_tensors import entry_and_row
from flash_attn_cute.kernels.common.tma import ForwardTiles
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward_schedule import forward_schedule

NO_EDGES = Edges(left=False, right=False)


@dataclass(frozen=True)
class Entry:
    """A block of keys, and what hides some of it: edges, or under a mask bits."""

    block: Int32
    edges: Constexpr = NO_EDGES
    code: Int32 | None = None  # whether there are bits: if not negative
    words: cute.Tensor | None = None


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor
    tiles: cute.Tensor
    tile_full: cute.Pointer
    tile_empty: cute.Pointer
    pipe_K: pipeline.PipelineTmaAsync
    pipe_V: pipeline.PipelineTmaAsync
    entries: cute.Tensor | None  # under a mask
    bias: SharedBias
    sBiasTile: cute.Tensor | None  # of a bias that TMA loads: stages of warpgroup 0, then those of the next


@dataclass(frozen=True)
class Transfers:
    """Roles of warpgroup 0: the producer, and the warps that copy a bias."""

    config: ForwardConfig
    a: ForwardArguments
    tables: Tables | None
    tma: ForwardTiles
    shared: Shared

    @cute.jit
    def producer(self) -> None:
        """Warp 0: chooses tiles, and loads all that they need in the order in which it is consumed."""
        c, a, tma, shared, tiles = self.config, self.a, self.tma, self.shared, QueryTiles(self.config)
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.tile_stages)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.stages)
        heads_a_key_head = a.mQ.shape[-2] // c.group // a.mK.shape[-2]
        num_tiles = tiles.num(a)
        index, _, _ = cute.arch.block_idx()
        listed_block, listed_code = Int32(0), Int32(0)  # of 32 entries of a list, a lane's
        while index < num_tiles:
            tile, asked_before = tiles.at(a, self.tables, index), tiles.ask(a)
            if tiles.is_work(tile):
                self._announce(tile, tile_state)
                tile_state.advance()
                head_k = tile.head // heads_a_key_head
                for i in cutlass.range(tile.blocks.num, unroll=1):
                    block = tile.blocks.nth(i)
                    if const_expr(c.features.listed):
                        if i % 32 == 0:
                            lane = cutlass.min(i + cute.arch.lane_idx(), tile.blocks.num - 1)
                            listed_block, listed_code = self._entry(tile.blocks.nth(lane))
                        block, code = (cute.arch.shuffle_sync(x, i % 32) for x in (listed_block, listed_code))
                        with cute.arch.elect_one():  # before K of the step arrives
                            for field, value in enumerate((block, code)):
                                shared.entries[field, state.count % shared.entries.shape[1]] = value
                    start = block * c.tile_n
                    stop = tile.k.start + cutlass.min(start + c.tile_n, tile.k.length)
                    start += tile.k.start
                    shared.pipe_K.producer_acquire(state)  # from the mma warps: this stage's K is released
                    gK = tma.K.at(start, stop, head_k, tile.batch)
                    tma.K.load(gK, shared.sK[None, None, state.index], shared.pipe_K.producer_get_barrier(state))
                    shared.pipe_V.producer_acquire(state)  # and its V
                    gV = tma.V.at(start, stop, head_k, tile.batch)
                    tma.V.load(gV, shared.sV[None, None, state.index], shared.pipe_V.producer_get_barrier(state))
                    if const_expr(c.features.tiled_bias):
                        self._load_bias(tile, block, state.count)
                    state.advance()
            index = tiles.following(a, asked_before, num_tiles)
        cute.arch.mbarrier_wait(shared.tile_empty + tile_state.index, tile_state.phase)  # all are done with the stage
        with cute.arch.elect_one():
            shared.tiles[0, tile_state.index] = Int32(-1)
            cute.arch.mbarrier_arrive(shared.tile_full + tile_state.index)

    @cute.jit
    def _load_bias(self, tile: QueryTile, block: Int32, step: Int32) -> None:
        """Loads the bias of a block, each warpgroup's rows when it has released its own stage."""
        bias, shared, warpgroups = self.tma.bias, self.shared, self.config.num_mma_warpgroups
        entry, first_row = entry_and_row(self.a, tile.q, tile.batch)
        for w in cutlass.range_constexpr(warpgroups):
            ring = shared.bias.ring.part(w, warpgroups)
            ring.acquire(step)  # from the warps of the warpgroup
            # Rows behind the sequence belong to queries that nothing is stored of.
            first = first_row + tile.first_query + 64 * w
            gX = bias.at(first, first + 64, tile.head, entry, block)
            bias.load(gX, shared.sBiasTile[None, None, w * ring.stages + ring.stage(step)], ring.full(step))

    @cute.jit
    def _entry(self, i: Int32) -> tuple[Int32, Int32]:
        """The block and the code of an entry of a list, or of a part of one that is of several blocks."""
        tables, parts = self.tables, self.config.blocks_an_entry
        entry, part = (i, Int32(0)) if const_expr(parts == 1) else (i // parts, i % parts)
        block, code = tables.mEntries[entry, 0], tables.mEntries[entry, 1]
        if const_expr(parts > 1):
            block, code = block * parts + part, code * parts + part if code >= 0 else code
        return block, code

    @cute.jit
    def bias_producer(self) -> None:
        """Warps 1 to 3: load the tiles of the bias that go with the blocks of keys."""
        c, a, shared, thread = self.config, self.a, self.shared, cute.arch.thread_idx()[0] - 32
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.tile_stages)
        step = Int32(0)
        working = Boolean(True)
        while working:
            cute.arch.mbarrier_wait(shared.tile_full + state.index, state.phase)  # from warp 0
            working = shared.tiles[0, state.index] >= 0
            if working:
                tile = QueryTile.read(c, shared.tiles[None, state.index])
                rows = tile.rows_of_bias(c)
                for i in cutlass.range(tile.blocks.num, unroll=1):
                    block = tile.blocks.nth(i)
                    if const_expr(c.features.listed):
                        block, _ = self._entry(block)
                    first_column = block * c.tile_n
                    num_columns = cutlass.min(tile.k.length - first_column, c.tile_n)
                    if const_expr(c.blocks_an_entry > 1):  # a part may have none: not a vector is copied
                        num_columns = num_columns if num_columns > 0 else Int32(-c.tile_n)
                    if const_expr(c.has_bias_row):
                        scale = a.numbers.softmax_scale if const_expr(c.adds_to_bias) else None
                        shared.bias.load_row(step, rows, first_column, num_columns, scale, thread)
                    else:
                        shared.bias.load(step, rows, first_column, num_columns, thread)
                    step += 1
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.tile_empty + state.index)
                state.advance()
                if const_expr(not c.persistent):
                    working = Boolean(False)

    @cute.jit
    def _announce(self, tile: QueryTile, state: pipeline.PipelineState) -> None:
        """Publishes a tile to the mma warpgroups, and loads its queries."""
        c, tQ, shared, queries = self.config, self.tma.Q, self.shared, 64 // self.config.group  # of a warpgroup
        full = shared.tile_full + state.index
        some_keys = tile.blocks.num > 0
        cute.arch.mbarrier_wait(shared.tile_empty + state.index, state.phase)  # all are done with the stage's last tile
        with cute.arch.elect_one():
            tile.write(shared.tiles[None, state.index])
            num_bytes = forward_schedule(c).pipeline("tiles").num_bytes if some_keys else 0
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        if some_keys:
            for w in cutlass.range_constexpr(c.num_mma_warpgroups):
                # A part behind the sequence's end is an empty box: it arrives as zeros.
                start = tile.first_query + queries * w
                stop = cutlass.max(cutlass.min(start + queries, tile.q.length), start)
                gQ = tQ.at((tile.q.start + start) * c.group, tile.q.start + stop, tile.head, tile.batch)
                tQ.load(gQ, shared.sQ[None, None, w, state.index], full)
