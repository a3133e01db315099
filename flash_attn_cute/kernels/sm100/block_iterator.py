"""Iterator over the key blocks of a tile under a mask: the union of its parts' lists, each block once.

A list is of 128 queries (``common.block_lists``), a part of a tile. Neighbouring parts attend to almost the same
blocks, so a block is loaded once for both. Where only one part attends to a block, only that part gets its products
(``forward``).

One warp reads the lists, ascending, by windows of 32 blocks. For each list it keeps the codes of the blocks in the
window, at most one a lane, and a word of bits that says which blocks these are. The number of blocks of a tile is
counted beforehand.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.block_lists import EMPTY, BlockList, Sharing, Tables
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.common.query_tiles import QueryTiles
from flash_attn_cute.kernels.common.tiles import WorkTile
from flash_attn_cute.kernels.common.workspace import packed_block
from flash_attn_cute.kernels.sm100.config import PART_ROWS
from flash_attn_cute.kernels.sm100.forward_config import WINDOW, ForwardConfig

_BEHIND_ALL = 2**30  # the block of an entry that there is not


@dataclass(frozen=True)
class BlockIterator:
    """Iterator over the lists of a tile's parts, by one converged warp.

    State that registers have no room for is in shared memory, for each part: the next entry that no window has had, the
    end of its list, and the codes of the window's 32 blocks.
    """

    tables: Tables
    fields: cute.Tensor  # (field, part), in shared memory
    parts: Constexpr  # of a tile
    blocks_an_entry: Constexpr
    # In registers: the first block of the window, bits of those of it that are to come, and the present entry.
    window: cute.Tensor
    coming: cute.Tensor
    entry: cute.Tensor  # its block, and the code of each part

    @staticmethod
    def of(config: ForwardConfig, tables: Tables, fields: cute.Tensor) -> "BlockIterator":
        """An iterator that has not begun."""
        numbers = (cute.make_rmem_tensor(n, Int32) for n in (1, 1, 1 + config.q_parts))
        return BlockIterator(tables, fields, config.q_parts, config.blocks_an_entry, *numbers)

    def begin(self, lists: list[tuple[Int32, Int32]]) -> None:
        """Begins at the list of each part: its first entry, and how many there are."""
        for part, (first, num) in enumerate(lists):
            end = first + num
            cute.arch.sync_warp()  # all lanes have read the old fields
            self.fields[0, part], self.fields[1, part] = first, end
            self.coming.fill(0)
        cute.arch.sync_warp()

    @cute.jit
    def count(self) -> Int32:
        """Goes to the end; returns the number of blocks in the union of the lists."""
        num = Int32(0)
        while self._has_entries():
            self._read_window()
            num += cute.arch.popc(self.coming[0])
        return num

    @cute.jit
    def nth(self, i: Int32) -> tuple[Int32, list[Int32]]:
        """The i-th block, with each part's code; called for i in ascending order."""
        if i % self.blocks_an_entry == 0:
            self._take_entry()
        block, *codes = (self.entry[j] for j in range(1 + self.parts))
        if const_expr(self.blocks_an_entry > 1):
            part = i % self.blocks_an_entry
            block = block * self.blocks_an_entry + part
            codes = [x * self.blocks_an_entry + part if x >= 0 else x for x in codes]
        return block, codes

    @cute.jit
    def _take_entry(self) -> None:
        if self.coming[0] == 0:
            self._read_window()
        coming = self.coming[0]
        place = cute.arch.popc(~coming & (coming - 1))  # of the lowest bit
        self.coming[0] = coming & (coming - 1)
        self.entry[0] = self.window[0] + place
        for part in cutlass.range_constexpr(self.parts):
            self.entry[1 + part] = self.fields[2 + place, part]

    def _has_entries(self) -> Boolean:
        left = Int32(0)
        for part in range(self.parts):
            left += self.fields[1, part] - self.fields[0, part]
        return left > 0

    @cute.jit
    def _read_window(self) -> None:
        lane = cute.arch.lane_idx()
        blocks, codes, window = [], [], Int32(_BEHIND_ALL)
        for part in cutlass.range_constexpr(self.parts):
            i = self.fields[0, part] + lane
            block, code = Int32(_BEHIND_ALL), Int32(EMPTY)
            if i < self.fields[1, part]:
                block, code = self.tables.mEntries[i, 0], self.tables.mEntries[i, 1]
            blocks.append(block)
            codes.append(code)
            window = cutlass.min(window, cute.arch.shuffle_sync(block, 0))
        cute.arch.sync_warp()  # all have read what is to be overwritten
        coming = Int32(0)
        for part in cutlass.range_constexpr(self.parts):
            distance = blocks[part] - window
            bits = Int32(1) << distance if distance < WINDOW else Int32(0)
            for i in cutlass.range_constexpr(WINDOW.bit_length() - 1):
                bits = bits | cute.arch.shuffle_sync(bits, lane ^ (1 << i))
            # The lane's block is among the list's entries behind as many as have bits below its own.
            code = cute.arch.shuffle_sync(codes[part], cute.arch.popc(bits & ((1 << lane) - 1)))
            self.fields[2 + lane, part] = cutlass.select_((bits >> lane & 1) != 0, code, Int32(EMPTY))
            if lane == 0:
                self.fields[0, part] = self.fields[0, part] + cute.arch.popc(bits)
            coming = coming | bits
        cute.arch.sync_warp()
        self.window[0], self.coming[0] = window, coming


class ListedTiles(QueryTiles):
    """Tiles of queries whose parts have lists of their own."""

    @cute.jit
    def listed(
        self, a: ForwardArguments, iterator: BlockIterator, work: WorkTile, q: SeqRows, batch: Int32, num_queries: Int32
    ) -> BlockList:
        """Begins the iterator at a tile, by one converged warp. Returns the number of blocks of its lists' union."""
        c = self.config
        row = work.first_row // PART_ROWS
        if const_expr(c.features.packed):
            row += packed_block(q.start, work.batch, PART_ROWS)
        lists = []
        for part in cutlass.range_constexpr(c.q_parts):
            first, num = Int32(0), Int32(0)
            if num_queries > PART_ROWS * part:
                number = Sharing.of(a.numbers).number(batch, work.head, row + part)
                first, num = iterator.tables.mLists[number, 0], iterator.tables.mLists[number, 1]
            lists.append((first, num))
        iterator.begin(lists)
        num = lists[0][1]
        if const_expr(c.q_parts > 1):
            num = iterator.count()
            iterator.begin(lists)
        return BlockList(lists[0][0], num * c.blocks_an_entry)
