"""Attention forward on Hopper.

Roles (a CTA works on tiles of ``tile_m`` queries of one head, one after the other):
    warpgroup 0         producer. Its warp 0 chooses the tiles and issues TMA: Q once a tile, K and V block by block.
                        Warps 1 to 3 copy the elements of a bias that go with a block, unless these are strided.
    warpgroups 1 ..     mma: 64 queries each, independent but for the order in which they use the tensor cores.
Registers a thread: ``ForwardConfig.registers``.

Pipelines (producer -> consumers, stages, arrive counts):
    tiles  mbarriers, ``tile_stages`` deep: what the tile is, and its Q. Warp 0 -> one arrival an mma warp, when the
           tile is done, and one each of warps 1 to 3 that copy for it. A tile of no sequence ends the work.
    k, v   PipelineTmaAsync, ``stages`` deep, across tiles: warp 0 -> one arrival an mma warp. A warpgroup releases K
           when its scores are complete and V when O is.
    bias   ``Ring``, ``bias_stages`` deep, across tiles. An arrival of each of the 96 threads of warps 1 to 3 -> one
           arrival an mma warp, when its elements are in registers.

Steady state of an mma warpgroup (n counts down):
    tensor cores   S(n) = Q K(n)^T, O += P(n+1) V(n+1) |                      | S(n-1) ...
    other units                                        | P(n) = softmax(S(n)) |
so that the softmax of one warpgroup runs beside both products of the others, whose order a named barrier keeps (as in
FlashAttention-3, Shah et al., arXiv 2407.08608). At the end of a tile S(n) is the next tile's first, and O is stored
while the other warpgroups have the tensor cores. So only the first tile of a CTA waits for its loads. Where shared
memory has no room for the next tile's Q and for O, a CTA has but one tile.

Windows and sequence ends are looked at only in blocks that an edge can cross: the walk over the blocks is cut in parts
(``Blocks.parts``). Under a mask a tile walks over a list of blocks instead (``common.block_lists``), which kernels
before this one make of it; with K of a block warp 0 tells which one it is, and where the bits are that hide its scores.
Tiles of packed sequences load and store through ragged views (``common.tma``): rows behind a
sequence's end read as zeros, so NaN behind it cannot reach P V, and are not written. Padding rows of out and lse are
zeroed by the warpgroup whose tile they fall in. (A dense batch with padding is packed to this kernel: every slot of
equal size.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common import tiles
from flash_attn_cute.kernels.common.block_lists import BlockList, Sharing, bits_of, num_blocks
from flash_attn_cute.kernels.common.blocks import Blocks, Edges, Window
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.rows import numbers_first, rows_first, zero_rows
from flash_attn_cute.kernels.common.score import ScoreScales, hidden
from flash_attn_cute.kernels.common.score_rows import RowsOfScores, SharedBias
from flash_attn_cute.kernels.common.score_tensors import ScoreTensors, keys_of
from flash_attn_cute.kernels.common.tma import RowTiles, make_row_tiles
from flash_attn_cute.kernels.common.workspace import carved
from flash_attn_cute.kernels.sm90.config import ForwardConfig
from flash_attn_cute.kernels.sm90.mask_tiles import MaskTiles, RowLists
from flash_attn_cute.kernels.sm90.mma import as_operand_a, convert, rows_and_columns, tiled_mma
from flash_attn_cute.kernels.sm90.scores import Place, add_bias_rows, cap, hide, hide_by_bits
from flash_attn_cute.kernels.sm90.shared import swizzled, tma_pipeline, transposed, write
from flash_attn_cute.kernels.sm90.softmax import OnlineSoftmax

# Named barriers; 0 is the whole CTA's.
_BARRIER_TENSOR_CORES = 1  # one a warpgroup
_BARRIER_EPILOGUE = 4  # one a warpgroup

_LOADING_THREADS = 96  # of warps 1 to 3
_TILE_FIELDS = 12  # Int32 in shared memory that describe a tile: see ``_Tile``


class _Layouts(NamedTuple):
    sQ: cute.ComposedLayout  # (64, d, warpgroup, tile stage)
    sK: cute.ComposedLayout  # (tile_n, d, stage)
    sV: cute.ComposedLayout  # (tile_n, d_v, stage)
    sO: cute.ComposedLayout  # (64, d_v, warpgroup)


class _Tables(NamedTuple):
    """What a mask says (``common.block_lists``)."""

    mLists: cute.Tensor  # (list, first entry and how many)
    mEntries: cute.Tensor  # (entry, block of keys and its code)
    mCodes: cute.Tensor  # (list, block of keys)
    mBits: cute.Tensor  # (tile, warpgroup, thread, word)


class _Mmas(NamedTuple):
    """Products, called by their results."""

    S: cute.TiledMma
    O: cute.TiledMma  # noqa: E741 (the output's name)


class _Tma(NamedTuple):
    """Tiles of the tensors, by their names."""

    Q: RowTiles
    K: RowTiles
    V: RowTiles
    O: RowTiles  # noqa: E741


@dataclass(frozen=True)
class _Tile:
    """What the producer tells the others about a tile. The keys' rows matter to itself alone."""

    first_query: Int32
    head: Int32  # of q, or of k where rows are the queries of a group of heads
    batch: Int32  # index into tensors: 0 if packed
    q: SeqRows
    k: SeqRows
    blocks: Blocks | BlockList  # of keys, from the last to the first

    def write(self, fields: cute.Tensor) -> None:
        """Into shared memory."""
        values = self.first_query, self.head, self.batch, self.q.start, self.q.length, self.q.slot, self.k.length
        for i, value in enumerate((*values, *self.blocks.fields)):
            fields[i] = value

    @staticmethod
    def read(config: ForwardConfig, fields: cute.Tensor) -> "_Tile":
        """From shared memory. Fields that are not used cost nothing, so none need be kept from one use to the next."""
        first_query, head, batch, start, length, slot, k_length, *blocks = (fields[i] for i in range(11))
        q, k = SeqRows(start, length, slot), SeqRows(None, k_length)
        walk = BlockList(*blocks[:2]) if config.features.mask else Blocks(*blocks, direction=-1)
        return _Tile(first_query, head, batch, q, k, walk)


class ForwardSm90:
    """The forward kernel of one configuration."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.warpgroups = config.num_mma_warpgroups
        self.threads = 128 * (self.warpgroups + 1)
        self.queries = 64 // config.group  # of a warpgroup
        self.loads_bias = config.bias_pitch > 0
        # Warp 0 tells of a block before it knows that its stage of K is released: that of the block before is, so the
        # scores of the one that comes ``stages`` before that have been read, and what was told of it.
        self.entry_stages = 2 * config.stages
        self.mask_tiles, self.row_lists = MaskTiles(config), RowLists()

    def _layouts(self) -> "_Layouts":
        """Swizzled layouts in shared memory, made anew on the host's and on the kernel's side."""
        c = self.config
        sO = swizzled(self.dtype, c.tile_dv, (64, c.tile_dv, self.warpgroups))
        if const_expr(not c.persistent):
            # No other tile follows, and a warpgroup's part of O takes the place of its own part of Q.
            places = cute.make_layout(self.warpgroups, stride=64 * c.tile_d)
            outer = cute.append(cute.select(sO.outer, mode=[0, 1]), places)
            sO = cute.make_composed_layout(sO.inner, sO.offset, outer)
        return _Layouts(
            sQ=swizzled(self.dtype, c.tile_d, (64, c.tile_d, self.warpgroups, c.tile_stages)),
            sK=swizzled(self.dtype, c.tile_d, (c.tile_n, c.tile_d, c.stages)),
            sV=swizzled(self.dtype, c.tile_dv, (c.tile_n, c.tile_dv, c.stages)),
            sO=sO,
        )

    def _shared_storage(self, layouts: "_Layouts") -> type:
        c, dtype = self.config, self.dtype
        assert c.tile_dv <= c.tile_d
        elements_O = cute.cosize(layouts.sO) if c.persistent else 0
        bytes_of_bias = c.bias_stages * c.bias_rows * c.bias_pitch

        @cute.struct
        class Storage:
            tile_barriers: cute.struct.MemRange[Int64, 2 * c.tile_stages]
            k_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * c.stages]
            bias_barriers: cute.struct.MemRange[Int64, 2 * c.bias_stages if self.loads_bias else 0]
            tiles: cute.struct.MemRange[Int32, _TILE_FIELDS * c.tile_stages]
            entries: cute.struct.MemRange[Int32, 2 * self.entry_stages if c.features.mask else 0]
            sO: cute.struct.Align[cute.struct.MemRange[dtype, elements_O], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
            bias: cute.struct.Align[cute.struct.MemRange[Uint8, bytes_of_bias], 128]

        return Storage

    @cute.jit
    def __call__(self, arguments: ForwardArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernel."""
        c, a, dtype = self.config, arguments, self.dtype
        mQ, mK, mV, mO = (rows_first(x, c.features.packed) for x in (a.mQ, a.mK, a.mV, a.mO))
        mLSE = numbers_first(a.mLSE, c.features.packed)
        if const_expr(c.group > 1):
            # The heads of a group in turn, then the next query. Nothing clips such rows where a sequence ends: rows
            # behind it give results that are not stored.
            (rows, d, heads, batch), (row, column, head, entry) = mQ.shape, mQ.stride
            layout = cute.make_layout(
                ((c.group, rows), d, heads // c.group, batch), stride=((head, row), column, head * c.group, entry)
            )
            mQ = cute.make_tensor(mQ.iterator, layout)
        layouts = self._layouts()
        self.Storage = self._shared_storage(layouts)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mmas = _Mmas(
            S=tiled_mma(dtype, k_major, k_major, c.tile_n, registers if const_expr(c.q_in_registers) else shared),
            O=tiled_mma(dtype, k_major, mn_major, c.tile_dv, registers),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sQ, sK, sV, sO = (cute.select(layout, mode=[0, 1]) for layout in layouts)  # of one warpgroup and stage
        packed = c.features.packed
        tma = _Tma(
            Q=make_row_tiles(load, mQ, sQ, (64, c.tile_d), packed and c.group == 1),
            K=make_row_tiles(load, mK, sK, (c.tile_n, c.tile_d), packed),
            V=make_row_tiles(load, mV, sV, (c.tile_n, c.tile_dv), packed),
            O=make_row_tiles(store, mO, sO, (64, c.tile_dv), packed),
        )
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        tables = None
        if const_expr(c.features.mask):
            blocks = num_blocks(a.mMask, c.tile_n)
            tables = _Tables(**carved(a.mWorkspace, c.parts(Sharing.of(a.numbers).total, blocks), Int32))
            self.mask_tiles(a, tables.mCodes, tables.mBits, stream)
            self.row_lists(tables.mCodes, tables.mLists, tables.mEntries, stream)
        ctas = self._num_tiles(a)
        if const_expr(c.persistent):
            ctas = cutlass.min(ctas, a.numbers.num_sms)
        self.kernel(mmas, tma, mO, mLSE, a, tables, scales).launch(
            grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    def _num_tiles(self, a: ForwardArguments) -> Int32:
        heads = a.mQ.shape[-2] // self.config.group
        return tiles.num_tiles(a.mQ, heads, a.mCuSeqlensQ, self.queries * self.warpgroups)

    @cute.kernel
    def kernel(
        self,
        mmas: _Mmas,
        tma: _Tma,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        arguments: ForwardArguments,
        tables: _Tables | None,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared memory and pipelines, then splits into roles."""
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for rows in tma:
                cpasync.prefetch_descriptor(rows.atom)
        layouts = self._layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        tile_full = storage.tile_barriers.data_ptr()
        tile_empty = tile_full + c.tile_stages
        mma_warps = 4 * self.warpgroups
        bias = Ring(storage.bias_barriers.data_ptr(), c.bias_stages)
        if warp_idx == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.tile_stages):
                    cute.arch.mbarrier_init(tile_full + i, 1)
                    cute.arch.mbarrier_init(tile_empty + i, mma_warps + (3 if self.loads_bias else 0))
                if const_expr(self.loads_bias):
                    bias.init(full=_LOADING_THREADS, empty=mma_warps)
        pipe_K, pipe_V = (
            tma_pipeline(barriers.data_ptr(), c.stages, mma_warps, 2 * c.tile_n * columns)
            for barriers, columns in ((storage.k_barriers, c.tile_d), (storage.v_barriers, c.tile_dv))
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        shared = _Shared(
            sQ=storage.sQ.get_tensor(layouts.sQ.outer, swizzle=layouts.sQ.inner),
            sK=storage.sK.get_tensor(layouts.sK.outer, swizzle=layouts.sK.inner),
            sV=storage.sV.get_tensor(layouts.sV.outer, swizzle=layouts.sV.inner),
            sO=(storage.sO if c.persistent else storage.sQ).get_tensor(layouts.sO.outer, swizzle=layouts.sO.inner),
            tiles=storage.tiles.get_tensor(cute.make_layout((_TILE_FIELDS, c.tile_stages))),
            tile_full=tile_full,
            tile_empty=tile_empty,
            pipe_K=pipe_K,
            pipe_V=pipe_V,
            entries=storage.entries.get_tensor(cute.make_layout((2, self.entry_stages))) if c.features.mask else None,
            bias=SharedBias(
                ScoreTensors.of(c.features, arguments),
                bias,
                storage.bias.data_ptr(),
                c.bias_rows,
                c.bias_pitch,
                _LOADING_THREADS,
                c.features.paired_bias,
                c.features.uniform_bias,
            ),
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp_idx == 0:
                self.producer(arguments, tables, tma, shared)
            if const_expr(self.loads_bias):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
                if warp_idx > 0:
                    self.bias_producer(tables, shared)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.mma(arguments, tables, mmas, tma.O, shared, mO, mLSE, scales)

    @cute.jit
    def _tile(self, a: ForwardArguments, tables: _Tables | None, index: Int32) -> _Tile:
        """What tile ``index`` is."""
        c, queries = self.config, self.queries * self.warpgroups
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
        if const_expr(c.features.mask):
            first, num = Int32(0), Int32(0)
            if num_queries > 0:
                # Packed tiles are numbered over all sequences, dense ones within a batch entry.
                block = work.block if const_expr(packed) else work.first_row // queries
                number = Sharing.of(a.numbers).number(batch, work.head, block)
                first, num = tables.mLists[number, 0], tables.mLists[number, 1]
            blocks = BlockList(first, num)
        else:
            window = Window.of(c.features, a, q.length, k.length)
            blocks = Blocks.of(work.first_row, num_queries, k.length, window, c.tile_n, direction=-1)
        return _Tile(first_query=work.first_row, head=work.head, batch=batch, q=q, k=k, blocks=blocks)

    @cute.jit
    def producer(self, a: ForwardArguments, tables: _Tables | None, tma: _Tma, shared: "_Shared") -> None:
        """Warp 0: chooses tiles, and loads all that they need in the order in which it is consumed."""
        c = self.config
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.tile_stages)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.stages)
        heads_a_key_head = a.mQ.shape[-2] // c.group // a.mK.shape[-2]
        num_tiles = self._num_tiles(a)
        index, _, _ = cute.arch.block_idx()
        while index < num_tiles:
            tile = self._tile(a, tables, index)
            index = self._next_tile(a, num_tiles)
            # Rows that only pad are somebody's work if they are to be zeroed.
            stop = tile.q.slot if const_expr(c.features.zero_padding) else tile.q.length
            if tile.first_query < stop:
                self._announce(tile, tma.Q, shared, tile_state)
                tile_state.advance()
                head_k = tile.head // heads_a_key_head
                for i in cutlass.range(tile.blocks.num, unroll=1):
                    block = tile.blocks.nth(i)
                    if const_expr(c.features.mask):
                        block = self._tell_of_entry(tables, block, shared, state.count)
                    start = block * c.tile_n
                    stop = tile.k.start + cutlass.min(start + c.tile_n, tile.k.length)
                    start += tile.k.start
                    shared.pipe_K.producer_acquire(state)  # from the mma warps: this stage's K is released
                    gK = tma.K.at(start, stop, head_k, tile.batch)
                    tma.K.load(gK, shared.sK[None, None, state.index], shared.pipe_K.producer_get_barrier(state))
                    shared.pipe_V.producer_acquire(state)  # and its V
                    gV = tma.V.at(start, stop, head_k, tile.batch)
                    tma.V.load(gV, shared.sV[None, None, state.index], shared.pipe_V.producer_get_barrier(state))
                    state.advance()
        cute.arch.mbarrier_wait(shared.tile_empty + tile_state.index, tile_state.phase)  # all are done with the stage
        with cute.arch.elect_one():
            shared.tiles[0, tile_state.index] = Int32(-1)
            cute.arch.mbarrier_arrive(shared.tile_full + tile_state.index)

    @cute.jit
    def _tell_of_entry(self, tables: _Tables, entry: Int32, shared: "_Shared", step: Int32) -> Int32:
        """Tells the mma warpgroups, before K of a step is there, which block it is, and where its bits are."""
        block, code = tables.mEntries[entry, 0], tables.mEntries[entry, 1]
        with cute.arch.elect_one():
            for i, value in enumerate((block, code)):
                shared.entries[i, step % self.entry_stages] = value
        return block

    @cute.jit
    def bias_producer(self, tables: _Tables | None, shared: "_Shared") -> None:
        """Warps 1 to 3: load the tiles of the bias that go with the blocks of keys."""
        c, thread = self.config, cute.arch.thread_idx()[0] - 32
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.tile_stages)
        step = Int32(0)
        working = Boolean(True)
        while working:
            cute.arch.mbarrier_wait(shared.tile_full + state.index, state.phase)  # from warp 0
            working = shared.tiles[0, state.index] >= 0
            if working:
                tile = _Tile.read(c, shared.tiles[None, state.index])
                rows = self._rows_of_scores(tile)
                for i in cutlass.range(tile.blocks.num, unroll=1):
                    block = tile.blocks.nth(i)
                    if const_expr(c.features.mask):
                        block = tables.mEntries[block, 0]
                    first_column = block * c.tile_n
                    num_columns = cutlass.min(tile.k.length - first_column, c.tile_n)
                    shared.bias.load(step, rows, first_column, num_columns, thread)
                    step += 1
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.tile_empty + state.index)
                state.advance()
                if const_expr(not c.persistent):
                    working = Boolean(False)

    def _rows_of_scores(self, tile: _Tile) -> RowsOfScores:
        """A tile's rows of the bias."""
        num_rows = cutlass.min(tile.q.length - tile.first_query, self.queries * self.warpgroups)
        return RowsOfScores(tile.q, tile.batch, tile.head, tile.first_query, num_rows, self.config.group)

    @cute.jit
    def _announce(self, tile: _Tile, tQ: RowTiles, shared: "_Shared", state: pipeline.PipelineState) -> None:
        """Tells the mma warpgroups of a tile, and loads its queries."""
        c = self.config
        full = shared.tile_full + state.index
        some_keys = tile.blocks.num > 0
        cute.arch.mbarrier_wait(shared.tile_empty + state.index, state.phase)  # all are done with the stage's last tile
        with cute.arch.elect_one():
            tile.write(shared.tiles[None, state.index])
            num_bytes = 2 * 64 * self.warpgroups * c.tile_d if some_keys else 0
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        if some_keys:
            for w in cutlass.range_constexpr(self.warpgroups):
                # A part behind the sequence's end is an empty box: it arrives as zeros.
                start = tile.first_query + self.queries * w
                stop = cutlass.max(cutlass.min(start + self.queries, tile.q.length), start)
                gQ = tQ.at((tile.q.start + start) * c.group, tile.q.start + stop, tile.head, tile.batch)
                tQ.load(gQ, shared.sQ[None, None, w, state.index], full)

    @cute.jit
    def _next_tile(self, a: ForwardArguments, num_tiles: Int32) -> Int32:
        """The index of the next tile to work on: the first that no CTA has taken. None is left from num_tiles on."""
        if const_expr(self.config.persistent):
            return tiles.take_tile(a.mNextTile, num_tiles, cute.arch.grid_dim()[0])
        return num_tiles

    @cute.jit
    def mma(
        self,
        a: ForwardArguments,
        tables: _Tables | None,
        mmas: _Mmas,
        tO: RowTiles,
        shared: "_Shared",
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scales: ScoreScales,
    ) -> None:
        """An mma warpgroup: 64 queries of every tile, from their first block of keys to out and lse."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % 128
        w = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        slice_S, slice_O = mmas.S.get_slice(thread), mmas.O.get_slice(thread)
        # Operands in shared memory are described once a warpgroup: by its first thread's slice.
        whole_S, whole_O = mmas.S.get_slice(0), mmas.O.get_slice(0)
        acc_S = cute.make_rmem_tensor(slice_S.partition_shape_C((64, c.tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(slice_O.partition_shape_C((64, c.tile_dv)), Float32)
        if const_expr(c.q_in_registers):
            tSrQ = cute.make_rmem_tensor(slice_S.partition_shape_A((64, c.tile_d)), self.dtype)
        else:
            tSrQ = mmas.S.make_fragment_A(whole_S.partition_A(shared.sQ[None, None, w, None]))
        work = _Work(
            arguments=a,
            tables=tables,
            warpgroup=w,
            thread=thread,
            mmas=mmas,
            tSrQ=tSrQ,
            tSrK=mmas.S.make_fragment_B(whole_S.partition_B(shared.sK)),
            tOrV=mmas.O.make_fragment_B(whole_O.partition_B(transposed(shared.sV))),
            acc_S=acc_S,
            acc_O=acc_O,
            rP=cute.make_rmem_tensor_like(acc_S, self.dtype),
            cS=slice_S.partition_C(cute.make_identity_tensor((64, c.tile_n))),
            softmax=OnlineSoftmax(2, scales.log2, is_natural=c.features.bias),
            scales=scales,
            shared=shared,
            tO=tO,
            mO=mO,
            mLSE=mLSE,
        )
        if w == self.warpgroups - 1:  # the tensor cores are warpgroup 0's first
            cute.arch.barrier_arrive(barrier_id=_BARRIER_TENSOR_CORES, number_of_threads=256)
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.tile_stages)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        cute.arch.mbarrier_wait(shared.tile_full, 0)  # from warp 0: the first tile
        working = shared.tiles[0, 0] >= 0
        num_blocks = _Tile.read(c, shared.tiles[None, 0]).blocks.num
        if working and num_blocks > 0:
            self._receive_Q(work, tile_state.index)
            shared.pipe_K.consumer_wait(k_state)
            self._start_S(work, tile_state.index, k_state)
            warpgroup.wait_group(0)
            shared.pipe_K.consumer_release(k_state)
            k_state.advance()
        while working:
            stage = tile_state.index
            acc_O.fill(0.0)
            work.softmax.reset()
            if num_blocks > 0:
                k_state, v_state = self._walk(work, stage, k_state, v_state)
            tile_state.advance()
            following = Int32(0)
            working = Boolean(False)
            if const_expr(c.persistent):
                cute.arch.mbarrier_wait(shared.tile_full + tile_state.index, tile_state.phase)  # the next tile
                working = shared.tiles[0, tile_state.index] >= 0
                following = _Tile.read(c, shared.tiles[None, tile_state.index]).blocks.num if working else Int32(0)
                if following > 0:
                    self._receive_Q(work, tile_state.index)
                    shared.pipe_K.consumer_wait(k_state)
            if num_blocks > 0:
                shared.pipe_V.consumer_wait(v_state)
                if following > 0:
                    self._acquire_tensor_cores(work)
                    self._start_S(work, tile_state.index, k_state)
                    self._start_O(work, v_state)
                    self._pass_tensor_cores(work)
                    warpgroup.wait_group(0)
                else:
                    self._start_O(work, v_state)
                    warpgroup.wait_group(0)
                shared.pipe_V.consumer_release(v_state)
                v_state.advance()
            elif following > 0:
                self._start_S(work, tile_state.index, k_state)
                warpgroup.wait_group(0)
            if following > 0:
                shared.pipe_K.consumer_release(k_state)
                k_state.advance()
            self.epilogue(work, stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.tile_empty + stage)
            num_blocks = following
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until it has been read

    @cute.jit
    def _receive_Q(self, work: "_Work", stage: Int32) -> None:
        """Q of a tile from shared memory into registers, where it belongs there."""
        if const_expr(self.config.q_in_registers):
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
            tiled_copy = cute.make_tiled_copy_A(atom, work.mmas.S)
            from_shared = tiled_copy.get_slice(work.thread)
            sQ = work.shared.sQ[None, None, work.warpgroup, stage]
            cute.copy(tiled_copy, from_shared.partition_S(sQ), from_shared.retile(work.tSrQ))

    @cute.jit
    def _walk(
        self, work: "_Work", stage: Int32, k_state: pipeline.PipelineState, v_state: pipeline.PipelineState
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """All blocks of keys of a tile but the first's scores and the last's output, which neighbours have a part in.

        Each part of the walk with the masks it needs.
        """
        f = self.config.features
        blocks = _Tile.read(self.config, work.shared.tiles[None, stage]).blocks
        if const_expr(f.mask):
            entry = self._told_of_entry(work, v_state.count)
            self._softmax_step(work, stage, entry, Edges(left=False, right=False), True, v_state.count)
            for _ in cutlass.range(1, blocks.num, unroll=1):
                self._step(work, stage, None, Edges(left=False, right=False), k_state, v_state)
                k_state.advance()
                v_state.advance()
        else:
            first = _Entry(blocks.nth(Int32(0)), None, None)
            self._softmax_step(work, stage, first, Edges(left=f.left, right=True), True, v_state.count)
            for part in blocks.parts(f.left, f.right):
                for i in cutlass.range(part.first, part.end, unroll=1):
                    self._step(work, stage, _Entry(blocks.nth(i), None, None), part.edges, k_state, v_state)
                    k_state.advance()
                    v_state.advance()
        return k_state, v_state

    @cute.jit
    def _told_of_entry(self, work: "_Work", step: Int32) -> "_Entry":
        """What warp 0 has told of a step's block, whose K is there; its bits are on their way."""
        entries, i = work.shared.entries, step % self.entry_stages
        block, code = entries[0, i], entries[1, i]
        return _Entry(block, code, bits_of(work.tables.mBits, code, work.warpgroup, work.thread))

    @cute.jit
    def _step(
        self,
        work: "_Work",
        stage: Int32,
        entry: "_Entry | None",
        edges: cutlass.Constexpr,
        k_state: pipeline.PipelineState,
        v_state: pipeline.PipelineState,
    ) -> None:
        """One block of the steady state: its scores, and the output of the block before it.

        No ``entry``: warp 0 has told of it.
        """
        shared = work.shared
        shared.pipe_K.consumer_wait(k_state)
        if const_expr(entry is None):
            entry = self._told_of_entry(work, v_state.count + 1)
        self._acquire_tensor_cores(work)
        self._start_S(work, stage, k_state)
        shared.pipe_V.consumer_wait(v_state)
        self._start_O(work, v_state)
        self._pass_tensor_cores(work)
        warpgroup.wait_group(1)
        shared.pipe_K.consumer_release(k_state)
        warpgroup.wait_group(0)
        shared.pipe_V.consumer_release(v_state)
        self._softmax_step(work, stage, entry, edges, False, v_state.count + 1)

    @cute.jit
    def _acquire_tensor_cores(self, work: "_Work") -> None:
        cute.arch.barrier(barrier_id=_BARRIER_TENSOR_CORES + work.warpgroup, number_of_threads=256)

    @cute.jit
    def _pass_tensor_cores(self, work: "_Work") -> None:
        following = work.warpgroup + 1 if work.warpgroup < self.warpgroups - 1 else Int32(0)
        cute.arch.barrier_arrive(barrier_id=_BARRIER_TENSOR_CORES + following, number_of_threads=256)

    @cute.jit
    def _start_S(self, work: "_Work", stage: Int32, state: pipeline.PipelineState) -> None:
        """S = Q K^T, in flight on return."""
        tSrQ = work.tSrQ if const_expr(self.config.q_in_registers) else work.tSrQ[None, None, None, stage]
        mma = cute.make_mma_atom(work.mmas.S.op)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
            cute.gemm(mma, work.acc_S, tSrQ[None, None, k], work.tSrK[None, None, k, state.index], work.acc_S)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _start_O(self, work: "_Work", state: pipeline.PipelineState) -> None:
        """O += P V, in flight on return."""
        mma = cute.make_mma_atom(work.mmas.O.op)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        tOrP = as_operand_a(work.rP)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            cute.gemm(mma, work.acc_O, tOrP[None, None, k], work.tOrV[None, None, k, state.index], work.acc_O)
        warpgroup.commit_group()

    @cute.jit
    def _softmax_step(
        self,
        work: "_Work",
        stage: Int32,
        entry: "_Entry",
        edges: cutlass.Constexpr,
        is_first: cutlass.Constexpr,
        step: Int32,
    ) -> None:
        """Scores to weights: softcap, bias, mask, edges, softmax. Steps are counted over all tiles of this CTA."""
        c, shared = self.config, work.shared
        if const_expr(c.features.softcap):
            cap(work.acc_S, work.scales.tanh)
        if const_expr(edges.left or edges.right or c.features.bias):
            tile = _Tile.read(c, shared.tiles[None, stage])
            place = Place(
                rows=tile.q,
                columns=tile.k,
                head=tile.head,
                batch=tile.batch,
                first_row=tile.first_query + self.queries * work.warpgroup,
                first_column=entry.block * c.tile_n,
                window=Window.of(c.features, work.arguments, tile.q.length, tile.k.length),
            )
            if const_expr(c.features.bias):
                rows, first_row = self._rows_of_scores(tile), 64 * work.warpgroup
                clips = edges.right or c.features.mask
                add_bias_rows(work.acc_S, work.cS, work.scales, shared.bias, step, rows, place, first_row, clips)
            if const_expr(edges.left or edges.right):
                hide(work.acc_S, work.cS, work.scales.log2, place, edges, heads_a_row=c.group)
        if const_expr(c.features.mask):  # noqa: SIM102 (the DSL evaluates both sides of an "and")
            if entry.code >= 0:
                hide_by_bits(work.acc_S, entry.words, hidden(work.scales.log2))
        work.softmax.step(work.acc_S, work.rP, work.acc_O, is_first)

    @cute.jit
    def epilogue(self, work: "_Work", stage: Int32) -> None:
        """Out through shared memory and TMA, lse from registers, zeros and -inf into the padding."""
        c, mO, mLSE, thread = self.config, work.mO, work.mLSE, work.thread
        tile = _Tile.read(c, work.shared.tiles[None, stage])
        first_query = tile.first_query + self.queries * work.warpgroup
        stop = cutlass.min(first_query + self.queries, tile.q.length)
        coordinates = rows_and_columns(work.cS)
        rows = [first_query + coordinates[r, 0][0] // c.group for r in range(2)]
        heads = [tile.head * c.group + coordinates[r, 0][0] % c.group for r in range(2)]
        lse = cute.make_rmem_tensor(2, Float32)
        sinks = None
        if const_expr(work.arguments.mSink is not None):
            sinks = cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                sinks[r] = work.arguments.mSink[heads[r]].to(Float32)
        work.softmax.finish(work.acc_O, lse, sinks)
        rO = cute.make_rmem_tensor_like(work.acc_O, self.dtype)
        convert(work.acc_O, rO)
        if const_expr(c.group == 1):
            self._store_tile(work, tile, rO, first_query, stop)
        for r in cutlass.range_constexpr(2):
            if rows[r] < stop:
                if thread % 4 == 0:
                    mLSE[tile.q.start + rows[r], heads[r], tile.batch] = lse[r]
                if const_expr(c.group > 1):
                    self._store_row(rO, r, mO[tile.q.start + rows[r], None, heads[r], tile.batch], thread)
        if const_expr(c.features.packed and c.features.zero_padding):
            first = cutlass.max(first_query, tile.q.length)
            padding = cutlass.min(first_query + self.queries, tile.q.slot) - first
            for g in cutlass.range(c.group, unroll=1):
                head = tile.head * c.group + g
                zero_rows(mO[None, None, head, tile.batch], tile.q.start + first, padding, thread, 128)
                for i in cutlass.range(thread, padding, 128, unroll=1):
                    mLSE[tile.q.start + first + i, head, tile.batch] = -Float32.inf

    @cute.jit
    def _store_tile(self, work: "_Work", tile: _Tile, rO: cute.Tensor, start: Int32, stop: Int32) -> None:
        """Rows start .. stop of out through shared memory and TMA."""
        sO = work.shared.sO[None, None, work.warpgroup]
        stores = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
        together = {"barrier_id": _BARRIER_EPILOGUE + work.warpgroup, "number_of_threads": 128}
        if const_expr(self.config.persistent):
            if stores:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(**together)  # the last tile's O has left shared memory
        # Else in the place of this part of Q, which only this warpgroup reads, and has read.
        write(rO, work.mmas.O, sO, work.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(**together)
        if stores and start < stop:
            gO = work.tO.at(tile.q.start + start, tile.q.start + stop, tile.head, tile.batch)
            work.tO.store(sO, gO)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_row(self, rO: cute.Tensor, r: cutlass.Constexpr, gO: cute.Tensor, thread: Int32) -> None:
        """This thread's part of one row of out, from registers: pairs of columns, eight columns apart."""
        out = rows_and_columns(rO)
        for c in cutlass.range_constexpr(0, cute.size(out, mode=[1]), 2):
            column = 4 * c + 2 * (thread % 4)
            if column < gO.shape[0]:
                cute.autovec_copy(
                    cute.local_tile(out[r, None], (2,), (c // 2,)), cute.local_tile(gO, (2,), (column // 2,))
                )


@dataclass(frozen=True)
class _Entry:
    """A block of keys, and under a mask what hides some of it."""

    block: Int32
    code: Int32 | None  # whether there are bits: if not negative
    words: cute.Tensor | None


@dataclass(frozen=True)
class _Shared:
    """Shared memory and what guards it."""

    sQ: cute.Tensor  # (64, d, warpgroup, tile stage)
    sK: cute.Tensor  # (tile_n, d, stage)
    sV: cute.Tensor  # (tile_n, d_v, stage)
    sO: cute.Tensor  # (64, d_v, warpgroup)
    tiles: cute.Tensor  # (field, tile stage)
    tile_full: cute.Pointer
    tile_empty: cute.Pointer
    pipe_K: pipeline.PipelineTmaAsync
    pipe_V: pipeline.PipelineTmaAsync
    entries: cute.Tensor | None  # (block and code, stage), under a mask
    bias: SharedBias


@dataclass(frozen=True)
class _Work:
    """An mma warpgroup's operands, accumulators and state, and where results go."""

    arguments: ForwardArguments
    tables: _Tables | None
    warpgroup: Int32
    thread: Int32  # of the warpgroup
    mmas: _Mmas
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K) in registers, or (MMA, 1, MMA_K, tile stage)
    tSrK: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tOrV: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    rP: cute.Tensor  # acc_S rounded, laid out alike
    cS: cute.Tensor  # coordinates of acc_S
    softmax: OnlineSoftmax
    scales: ScoreScales
    shared: _Shared
    tO: RowTiles
    mO: cute.Tensor
    mLSE: cute.Tensor
