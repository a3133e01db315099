"""Parts of both kernels of selections: items, what rows see, and loads by the producer warps."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from flash_attn_cute.kernels.arguments import SelectionArguments
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.selection_tables import SelectedUnit, SelectionTables
from flash_attn_cute.kernels.common.tma import RowTiles
from flash_attn_cute.kernels.selection import ITEM_FIELDS, KEY_WORDS, LANES
from flash_attn_cute.kernels.sm90.selection_config import SelectedConfig

COLUMNS = 64  # of a box of Q or out: a row of a swizzled atom


@dataclass(frozen=True)
class BlockShared:
    """Shared memory of a block of keys and of tiles of picks, and what guards it: as the schedules describe it."""

    entries: cute.Tensor
    key_bits: cute.Tensor | None
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
    def of(a: SelectionArguments, tables: SelectionTables, unit: Constexpr, number: Int32) -> "Item":
        """Reads an item of a unit's set."""
        fields = cute.make_rmem_tensor(ITEM_FIELDS, Int32)
        cute.autovec_copy(tables.mItems[unit.set, number, None], fields)
        q = rows_of(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, fields[2])
        k = rows_of(a.mK, a.mCuSeqlensK, a.mSeqUsedK, fields[2])
        return Item(fields[0], fields[1], fields[3], q, k)


def tiles_of(config: Any, item: Any, warpgroup: Int32) -> tuple[Int32, Int32, int]:
    """Range of the first entries of a warpgroup's tiles. In step, those of a last tile may be behind the item's."""
    c, before = config, warpgroup * config.picks_a_tile
    stop = item.stop + before if c.in_step else item.stop
    return item.start + before, stop, c.num_mma_warpgroups * c.picks_a_tile


@dataclass(frozen=True)
class SelectionTransfers:
    """Loads of the producer warps, for an item."""

    config: SelectedConfig
    a: SelectionArguments
    tables: SelectionTables  # of the launch's rows
    unit: SelectedUnit  # whose heads
    item: Item
    shared: BlockShared

    @cute.jit
    def load_block(self, tK: RowTiles, tV: RowTiles) -> None:
        """Warp 0: loads K and V of the item's block; rows behind the sequence's end arrive as zeros."""
        a, unit, item, shared = self.a, self.unit, self.item, self.shared
        head = unit.number * self.config.group // (a.mQ.shape[-2] // a.mK.shape[-2])
        batch = Int32(0) if const_expr(self.config.features.packed) else unit.batch
        start = item.k.start + item.first_key
        stop = cutlass.min(start + self.config.tile_n, item.k.start + item.k.length)
        for ring, tX, sX in ((shared.k_ring, tK, shared.sK), (shared.v_ring, tV, shared.sV)):
            with cute.arch.elect_one():
                ring.announce(Int32(0))
            tX.load(tX.at(start, stop, head, batch), sX, ring.full(Int32(0)))

    @cute.jit
    def load_picks(self, loads: Constexpr, warpgroup: Int32) -> None:
        """Loads rows of a warpgroup's tiles, each pick's from where they are.

        ``loads`` are TMA tiles over (heads, d, row, batch), and where they go: (row, column, stage, warpgroup). A last
        tile that lacks picks, or has none, has the item's last one in their place.
        """
        a, unit, item, shared = self.a, self.unit, self.item, self.shared
        c, top, lane = self.config, a.numbers.top, cute.arch.lane_idx()
        batch = Int32(0) if const_expr(c.features.packed) else unit.batch
        ring, picks, first_head = shared.q_ring(warpgroup), c.picks_a_tile, unit.number * c.group
        entries = self.tables.mEntries[unit.set, None]
        step = Int32(0)
        begin, end, tiles = tiles_of(c, item, warpgroup)
        for first in cutlass.range(begin, end, tiles, unroll=1):
            own = [entries[cutlass.min(first + i + lane, item.stop - 1)] for i in range(0, picks, LANES)]
            rows = [a.numbers.first_row + entry // top for entry in own]
            bits = self._load_key_bits(own)
            ring.wait_empty(step)  # from the warpgroup: the tile that had this stage before is done
            stage = ring.stage(step)
            for i in cutlass.range_constexpr(len(own)):
                if i * LANES + lane < picks:
                    shared.entries[i * LANES + lane, stage, warpgroup] = own[i]
                    if const_expr(c.key_bits):
                        cute.autovec_copy(bits[i], shared.key_bits[None, i * LANES + lane, stage, warpgroup])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ring.announce(step)
            for i in cutlass.range_constexpr(len(own)):
                for p in cutlass.range(min(picks, LANES), unroll=4):
                    row = cute.arch.shuffle_sync(rows[i], p)
                    for tX, sX in loads:
                        for column in cutlass.range_constexpr(cute.size(sX, mode=[1]) // COLUMNS):
                            tile = cute.local_tile(
                                sX[None, None, stage, warpgroup], (c.group, COLUMNS), (i * LANES + p, column)
                            )
                            gX = tX.at(first_head, first_head + c.group, row, batch, column)
                            tX.load(gX, tile, ring.full(step))
            step += 1

    @cute.jit
    def _load_key_bits(self, picks: Constexpr) -> list[cute.Tensor]:
        """Words of each of some picks; none without ``config.key_bits``."""
        found = []
        if const_expr(self.config.key_bits):
            for pick in picks:
                words = cute.make_rmem_tensor(KEY_WORDS, Int32)
                cute.autovec_copy(self.tables.mKeyBits[self.unit.set, pick, None], words)
                found.append(words)
        return found
