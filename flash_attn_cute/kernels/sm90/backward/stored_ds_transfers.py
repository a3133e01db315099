"""Warpgroup 0 of the backward kernel that stores dS (``half_blocks_schedule``): that of ``half_blocks`` but for dS."""

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.backward import CELL_NUMBERS
from flash_attn_cute.kernels.common.assembly import store_from_shared
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.cta_shared import Shared
from flash_attn_cute.kernels.sm90.backward.half_blocks_transfers import HalfBlocksTransfers


class StoredDSTransfers(HalfBlocksTransfers):
    """Roles of warpgroup 0: producer, and the warp that stores results."""

    @cute.jit
    def _put_out_step(
        self, a: BackwardArguments, ws: Workspace, shared: Shared, tile_idx: Int32, step: Int32, piece: Int32
    ) -> None:
        """Stores a step's dS in its cell, and the block of keys beside it."""
        c, out = self.config, shared.out(Int32(0))
        shared.rings.steps.wait_full(step)  # from warp 0
        block, turn = shared.read_step(step)
        cells = cute.make_tensor(ws.mCells.iterator, cute.make_layout(cute.size(ws.mCells)))  # as blocks are counted
        cell = cells[block] + turn
        place = cute.domain_offset((cell, 0), ws.mdS).iterator.toint()
        out.wait_full(piece)  # from the mma warpgroup
        with cute.arch.elect_one():
            store_from_shared(place, shared.sums + CELL_NUMBERS * out.stage(piece), 4 * CELL_NUMBERS)
            ws.mCellKeys[cell] = shared.reload_tile(c, a, tile_idx).first_key // c.tile_n
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        out.release(piece)  # to the mma warpgroup
