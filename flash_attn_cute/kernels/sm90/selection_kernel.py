"""Main kernels of selections: their host side, and how a CTA and its mma warpgroups go about an item."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.common.assembly import set_registers
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.main_kernels import MainKernel
from flash_attn_cute.kernels.common.rows import rows_first
from flash_attn_cute.kernels.common.score import ScoreScales, visible_columns
from flash_attn_cute.kernels.common.selection_tables import SelectedUnit, SelectionTableKernels, SelectionTables
from flash_attn_cute.kernels.common.tma import RowTiles, make_row_tiles, prefetch_descriptors
from flash_attn_cute.kernels.selection import LANES, TILE_ROWS
from flash_attn_cute.kernels.sm90.scores import mask_outside_bits, mask_outside_interval
from flash_attn_cute.kernels.sm90.selection_config import SelectedConfig
from flash_attn_cute.kernels.sm90.selection_schedule import selection_schedule
from flash_attn_cute.kernels.sm90.selection_transfers import COLUMNS, BlockShared, Item, SelectionTransfers, tiles_of
from flash_attn_cute.kernels.sm90.shared import swizzled


@dataclass(frozen=True)
class ItemWork:
    """An mma warpgroup's item, and its operands and accumulator of S. Subclasses add those of other products."""

    arguments: Any
    unit_idx: Int32  # of the launch
    number: Int32  # of the item, in its set
    item: Item
    warpgroup: Int32
    thread: Int32  # of the warpgroup
    mmas: Any
    tma: Any
    parts: Any  # of the workspace; forward lse of picks alone, in base 2, (unit, pick, head of the group)
    scales: ScoreScales
    shared: Any
    tSrQ: cute.Tensor  # (MMA, 1, MMA_K, PIPE)
    tSrK: cute.Tensor  # (MMA, 1, MMA_K)
    acc_S: cute.Tensor
    rP: cute.Tensor  # acc_S rounded, laid out alike
    cS: cute.Tensor  # coordinates of acc_S


class ItemKernel(MainKernel):
    """A kernel of one configuration, a CTA an item. Subclasses have products, loads of picks, ``mma`` and ``tile``."""

    def __init__(self, config: SelectedConfig, shared: type[BlockShared]):
        super().__init__(config, selection_schedule(config), swizzled)
        self.kind_of_shared = shared
        self.tables = SelectionTableKernels(config)

    def head_tiles(self, operation: Any, mX: cute.Tensor) -> RowTiles:
        """TMA tiles of a tensor (heads, d, row, batch): some columns of a group's heads, of one row."""
        tile, box = swizzled(self.dtype, COLUMNS, (TILE_ROWS, COLUMNS)), (self.config.group, COLUMNS)
        in_tile = cute.make_composed_layout(tile.inner, 0, cute.make_layout(box, stride=(COLUMNS, 1)))
        return make_row_tiles(operation, mX, in_tile, box, ragged=False)

    def loads_of_heads(self, mX: cute.Tensor) -> RowTiles:
        """TMA tiles of q or dO, for loads."""
        mX = rows_first(mX, self.config.features.packed)
        heads_first = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[2, 1, 0, 3]))
        return self.head_tiles(cpasync.CopyBulkTensorTileG2SOp(), heads_first)

    def stores_of_picks(self, mX: cute.Tensor, columns: int) -> RowTiles:
        """TMA tiles of what each pick leaves, (units, picks, numbers of 4 bytes): so many columns for each head."""
        (units, picks, _), (unit, pick, _) = mX.shape, mX.stride
        layout = cute.make_layout((self.config.group, columns, picks, units), stride=(columns, 1, pick * 2, unit * 2))
        pointer = cute.make_ptr(self.dtype, mX.iterator.toint(), cute.AddressSpace.gmem, assumed_align=128)
        return self.head_tiles(cpasync.CopyBulkTensorTileS2GOp(), cute.make_tensor(pointer, layout))

    def entries_of_lanes(self, entries: cute.Tensor, lane: Int32) -> list[Int32]:
        """Entries of a tile's picks by lanes: of a lane's number, and of that plus 32, if there are so many."""
        picks = self.config.picks_a_tile
        return [entries[(i + lane) % picks] for i in range(0, picks, LANES)]

    @cute.jit
    def entry_of(self, entries: Constexpr, number: Int32) -> Int32:
        """The entry of a number, which lanes of a warp may choose by themselves, by ``entries_of_lanes``."""
        found = cute.arch.shuffle_sync(entries[0], number % LANES)
        for i in cutlass.range_constexpr(1, len(entries)):
            other = cute.arch.shuffle_sync(entries[i], number % LANES)
            found = other if number >= i * LANES else found
        return found

    @cute.jit
    def store_picks(
        self, tX: RowTiles, sX: cute.Tensor, column: Int32 | int, unit_idx: Int32, entries: Constexpr, num_picks: Int32
    ) -> None:
        """A warp stores a tile's rows in shared memory to where its picks' are.

        ``tX`` is of ``stores_of_picks``, ``entries`` of ``entries_of_lanes``. ``sX`` has (row, a multiple of 64
        columns), from ``column`` on, which counts 64 columns. The tile has ``num_picks`` at the most.
        """
        group = self.config.group
        for i in cutlass.range_constexpr(len(entries)):
            for p in cutlass.range(cutlass.min(num_picks - i * LANES, LANES), unroll=1):
                pick = cute.arch.shuffle_sync(entries[i], p)
                for j in cutlass.range_constexpr(cute.size(sX, mode=[1]) // COLUMNS):
                    gX = tX.at(Int32(0), group, pick, unit_idx, column + j)
                    tX.store(cute.local_tile(sX, (group, COLUMNS), (i * LANES + p, j)), gX)

    @cute.kernel
    def kernel(self, mmas: Any, tma: Any, a: Any, tables: SelectionTables, parts: Any, scales: ScoreScales) -> None:
        """Sets up shared memory, then splits into roles."""
        schedule = self.schedule
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index, _, _ = cute.arch.block_idx()
        unit_idx, number = index // a.numbers.num_items, index % a.numbers.num_items
        if warp_idx == 0:
            prefetch_descriptors(tma)
        storage = self.memory.allocate()
        if warp_idx == 0:
            with cute.arch.elect_one():
                self.memory.init(storage)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        buffers = self.memory.tensors(storage, *(buffer.name for buffer in schedule.shared))
        k, v, q = (self.memory.ring(storage, name) for name in ("k", "v", "q0"))
        shared = self.kind_of_shared(**buffers, k_ring=k, v_ring=v, first_q_ring=q)
        unit = SelectedUnit.of(self.config, a, unit_idx)
        item = Item.of(a, tables, unit, number)
        if warp_idx < 4:
            set_registers(schedule.role("producer").registers, schedule.threads)
            if item.start < item.stop:
                transfers = SelectionTransfers(self.config, a, tables, unit, item, shared)
                if warp_idx == 0:
                    transfers.load_block(tma.K, tma.V)
                if warp_idx < self.config.num_mma_warpgroups:
                    transfers.load_picks(self.loads(tma, shared), warp_idx)
        else:
            set_registers(schedule.role("mma").registers, schedule.threads)
            if item.start < item.stop:
                given = {"arguments": a, "mmas": mmas, "tma": tma, "parts": parts, "scales": scales, "shared": shared}
                self.mma(self._item_work(**given, unit_idx=unit_idx, number=number, item=item))

    def _item_work(self, mmas: Any, shared: Any, **given: Any) -> ItemWork:
        """Makes this mma warpgroup's ``ItemWork``, of which some fields are given."""
        thread = cute.arch.thread_idx()[0] % 128
        w = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        own, whole = mmas.S.get_slice(thread), mmas.S.get_slice(0)  # operands are described by the first thread's
        shape = TILE_ROWS, self.config.tile_n
        acc_S = cute.make_rmem_tensor(own.partition_shape_C(shape), Float32)
        return ItemWork(
            **given,
            mmas=mmas,
            shared=shared,
            warpgroup=w,
            thread=thread,
            tSrQ=mmas.S.make_fragment_A(whole.partition_A(shared.sQ[None, None, None, w])),
            tSrK=mmas.S.make_fragment_B(whole.partition_B(shared.sK)),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor_like(acc_S, self.dtype),
            cS=own.partition_C(cute.make_identity_tensor(shape)),
        )

    @cute.jit
    def visible_keys(self, work: Constexpr, rows: Constexpr, picks: Constexpr, stage: Int32) -> cute.Tensor:
        """Keys that the queries of some rows of a tile attend to, as (first and behind the last, row).

        ``picks`` has each row's pick. With ``config.key_bits`` as (word, row), a bit for each key of the item's block.
        """
        c, f, n, q, k = self.config, self.config.features, work.arguments.numbers, work.item.q, work.item.k
        window, edges = Window.of(f, work.arguments, q.length, k.length), Edges(left=f.left, right=True)
        found = cute.make_rmem_tensor((2, len(rows)), Int32)
        for r in cutlass.range_constexpr(len(rows)):
            if const_expr(c.key_bits):
                cute.autovec_copy(work.shared.key_bits[None, rows[r] // c.group, stage, work.warpgroup], found[None, r])
            else:
                query = n.first_row + picks[r] // n.top - q.start
                found[0, r], found[1, r] = visible_columns(query, Int32(0), k.length, window, edges)
        return found

    @cute.jit
    def mask_hidden(self, work: Constexpr, visible: cute.Tensor, nothing: Float32) -> None:
        """Masks scores of keys that are not ``visible_keys``: they become ``nothing``."""
        if const_expr(self.config.key_bits):
            mask_outside_bits(work.acc_S, work.cS, visible, nothing)
        else:
            mask_outside_interval(work.acc_S, work.cS, visible, work.item.first_key, self.config.tile_n, nothing)

    @cute.jit
    def mainloop(self, work: Constexpr) -> None:
        """An mma warpgroup's tiles of an item: every so many."""
        c, item, step = self.config, work.item, Int32(0)
        begin, end, tiles = tiles_of(c, item, work.warpgroup)
        for first in cutlass.range(begin, end, tiles, unroll=1):
            self.tile(work, cutlass.min(item.stop - first, c.picks_a_tile), step)
            step += 1

    def tile(self, work: Any, num_picks: Int32, step: Int32) -> None:
        """A tile of so many picks, of an mma warpgroup's ``work``; of none if not positive."""
        raise NotImplementedError

    def loads(self, tma: Any, shared: Any) -> tuple[tuple[RowTiles, cute.Tensor], ...]:
        """TMA tiles of what picks need, and the buffers that they go to."""
        raise NotImplementedError

    def mma(self, work: ItemWork) -> None:
        """An mma warpgroup: its tiles of the item, and what it stores behind them."""
        raise NotImplementedError
