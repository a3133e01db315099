"""Main kernels of selections: their host side, and how a CTA and its mma warpgroups go about an item."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.common.main_kernels import MainKernel
from flash_attn_cute.kernels.common.rows import rows_first
from flash_attn_cute.kernels.common.selection_tables import SelectionTableKernels
from flash_attn_cute.kernels.common.tma import RowTiles, make_row_tiles, prefetch_descriptors
from flash_attn_cute.kernels.sm90.selection_config import SelectedConfig
from flash_attn_cute.kernels.sm90.selection_schedule import selection_schedule
from flash_attn_cute.kernels.sm90.selection_transfers import COLUMNS, SelectionTransfers, box_of_heads, tiles_of
from flash_attn_cute.kernels.sm90.shared import swizzled


class ItemKernel(MainKernel):
    """A kernel of one configuration, a CTA an item. Subclasses have products, the device side and ``tile``."""

    def __init__(self, config: SelectedConfig):
        super().__init__(config, selection_schedule(config), swizzled)
        self.transfers = SelectionTransfers(config)
        self.tables = SelectionTableKernels(config)

    def block_tiles(self, name: str, mX: cute.Tensor) -> RowTiles:
        """TMA tiles of k or v: loads of a block of keys into the buffer of that name."""
        packed = self.config.features.packed
        return self.memory.row_tiles(cpasync.CopyBulkTensorTileG2SOp(), name, rows_first(mX, packed), packed)

    def head_tiles(self, operation: Any, mX: cute.Tensor) -> RowTiles:
        """TMA tiles of a tensor (heads, d, row, batch): some columns of a group's heads, of one row."""
        group = self.config.group
        return make_row_tiles(operation, mX, box_of_heads(self.dtype, group), (group, COLUMNS), ragged=False)

    def loads_of_heads(self, mX: cute.Tensor) -> RowTiles:
        """TMA tiles of q or dO, for loads."""
        mX = rows_first(mX, self.config.features.packed)
        heads_first = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[2, 1, 0, 3]))
        return self.head_tiles(cpasync.CopyBulkTensorTileG2SOp(), heads_first)

    @cute.jit
    def set_up(self, kind: cutlass.Constexpr, tma: cutlass.Constexpr, warp_idx: Int32) -> Any:
        """Initialises a CTA's barriers, and returns its shared memory as a ``BlockShared`` of some kind."""
        memory = self.memory
        if warp_idx == 0:
            prefetch_descriptors(tma)
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp_idx == 0:
            with cute.arch.elect_one():
                memory.init(storage)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        buffers = memory.tensors(storage, *(buffer.name for buffer in self.schedule.shared))
        rings = {f"{name}_ring": memory.ring(storage, name) for name in ("k", "v")}
        return kind(**buffers, **rings, first_q_ring=memory.ring(storage, "q0"))

    @cute.jit
    def mainloop(self, work: cutlass.Constexpr) -> None:
        """An mma warpgroup's tiles of an item: every so many."""
        c, item, step = self.config, work.item, Int32(0)
        begin, end, tiles = tiles_of(c, item, work.warpgroup)
        for first in cutlass.range(begin, end, tiles, unroll=1):
            self.tile(work, cutlass.min(item.stop - first, c.picks_a_tile), step)
            step += 1

    def tile(self, work: Any, num_picks: Int32, step: Int32) -> None:
        """A tile of so many picks, of an mma warpgroup's ``work``; of none if not positive."""
        raise NotImplementedError
