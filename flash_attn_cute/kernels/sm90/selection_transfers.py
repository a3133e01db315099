"""Parts of both kernels of selections: items, what rows see, and loads by the producer warps."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_cute.kernels.arguments import SelectionArguments
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.score import visible_columns
from flash_attn_cute.kernels.common.selection_tables import SelectionTables
from flash_attn_cute.kernels.common.tma import RowTiles
from flash_attn_cute.kernels.selection import ITEM_FIELDS, TILE_ROWS
from flash_attn_cute.kernels.sm90.shared import swizzled

COLUMNS = 64  # of a box of Q or out: a row of a swizzled atom
_LANES = 32


@dataclass(frozen=True)
class BlockShared:
    """Shared memory of a block of keys and of tiles of picks, and what guards it: as the schedules describe it."""

    entries: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    k_ring: Ring
    v_ring: Ring
    first_q_ring: Ring  # the first warpgroup's, which the others' follow

    def q_ring(self, warpgroup: Int32) -> Ring:
        """Ring of a warpgroup's tiles."""
        first = self.first_q_ring
        return Ring(first.barriers + 2 * first.stages * warpgroup, first.stages, first.num_bytes)


@dataclass(frozen=True)
class Item:
    """Work of a CTA: entries ``start .. stop`` of its set, whose queries select one block of keys; perhaps none."""

    start: Int32
    stop: Int32
    first_key: Int32  # of the block, in its sequence
    q: SeqRows
    k: SeqRows

    @staticmethod
    @cute.jit
    def of(a: SelectionArguments, tables: SelectionTables, unit: cutlass.Constexpr, number: Int32) -> "Item":
        """Reads an item of a unit's set."""
        fields = cute.make_rmem_tensor(ITEM_FIELDS, Int32)
        cute.autovec_copy(tables.mItems[unit.set, number, None], fields)
        q = rows_of(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, fields[2])
        k = rows_of(a.mK, a.mCuSeqlensK, a.mSeqUsedK, fields[2])
        return Item(fields[0], fields[1], fields[3], q, k)


@cute.jit
def visible_keys(
    config: cutlass.Constexpr, a: SelectionArguments, item: cutlass.Constexpr, picks: cutlass.Constexpr
) -> cute.Tensor:
    """Keys that the queries of some picks attend to, as (first and behind the last, pick)."""
    f, n, q, k = config.features, a.numbers, item.q, item.k
    window, edges = Window.of(f, a, q.length, k.length), Edges(left=f.left, right=True)
    found = cute.make_rmem_tensor((2, len(picks)), Int32)
    for r in cutlass.range_constexpr(len(picks)):
        row = n.first_row + picks[r] // n.top - q.start
        found[0, r], found[1, r] = visible_columns(row, Int32(0), k.length, window, edges)
    return found


def box_of_heads(dtype: type, group: int) -> cute.ComposedLayout:
    """Layout of a group's heads by ``COLUMNS`` columns within a swizzled tile."""
    whole = swizzled(dtype, COLUMNS, (TILE_ROWS, COLUMNS))
    return cute.make_composed_layout(whole.inner, 0, cute.make_layout((group, COLUMNS), stride=(COLUMNS, 1)))


class SelectionTransfers:
    """Loads of the producer warps."""

    def __init__(self, config: Any):
        self.config = config

    @cute.jit
    def load_block(
        self,
        a: SelectionArguments,
        unit: cutlass.Constexpr,
        item: cutlass.Constexpr,
        tK: RowTiles,
        tV: RowTiles,
        shared: BlockShared,
    ) -> None:
        """Warp 0: loads K and V of the item's block; rows behind the sequence's end arrive as zeros."""
        head = unit.number * self.config.group // (a.mQ.shape[-2] // a.mK.shape[-2])
        batch = Int32(0) if const_expr(self.config.features.packed) else unit.batch
        start = item.k.start + item.first_key
        stop = cutlass.min(start + self.config.tile_n, item.k.start + item.k.length)
        for ring, tX, sX in ((shared.k_ring, tK, shared.sK), (shared.v_ring, tV, shared.sV)):
            with cute.arch.elect_one():
                ring.announce(Int32(0))
            tX.load(tX.at(start, stop, head, batch), sX, ring.full(Int32(0)))

    @cute.jit
    def load_picks(
        self,
        a: SelectionArguments,
        mEntries: cute.Tensor,
        unit: cutlass.Constexpr,
        item: cutlass.Constexpr,
        loads: cutlass.Constexpr,
        shared: BlockShared,
        warpgroup: Int32,
    ) -> None:
        """Loads rows of a warpgroup's tiles, each pick's from where they are.

        A last tile that lacks picks has the last one in their place.

        Args:
            a: of the launch.
            mEntries: (set, pick), see ``SelectionTables``.
            unit: whose heads.
            item: whose picks.
            loads: TMA tiles over (heads, d, row, batch), and where they go: (row, column, stage, warpgroup).
            shared: the CTA's.
            warpgroup: of those that compute.
        """
        c, top, lane = self.config, a.numbers.top, cute.arch.lane_idx()
        batch = Int32(0) if const_expr(c.features.packed) else unit.batch
        ring, picks, first_head = shared.q_ring(warpgroup), c.picks_a_tile, unit.number * c.group
        entries = mEntries[unit.set, None]
        step = Int32(0)
        for first in cutlass.range(item.start + warpgroup * picks, item.stop, c.num_mma_warpgroups * picks, unroll=1):
            own = [entries[cutlass.min(first + i + lane, item.stop - 1)] for i in range(0, picks, _LANES)]
            rows = [a.numbers.first_row + entry // top for entry in own]
            ring.wait_empty(step)  # from the warpgroup: the tile that had this stage before is done
            stage = ring.stage(step)
            for i in cutlass.range_constexpr(len(own)):
                if i * _LANES + lane < picks:
                    shared.entries[i * _LANES + lane, stage, warpgroup] = own[i]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ring.announce(step)
            for i in cutlass.range_constexpr(len(own)):
                for p in cutlass.range(min(picks, _LANES), unroll=4):
                    row = cute.arch.shuffle_sync(rows[i], p)
                    for tX, sX in loads:
                        for column in cutlass.range_constexpr(cute.size(sX, mode=[1]) // COLUMNS):
                            tile = cute.local_tile(
                                sX[None, None, stage, warpgroup], (c.group, COLUMNS), (i * _LANES + p, column)
                            )
                            gX = tX.at(first_head, first_head + c.group, row, batch, column)
                            tX.load(gX, tile, ring.full(step))
            step += 1
