"""A tile's walk under a mask: over the lists of its parts at once, each block of keys that one of them has coming once.

Lists are of 128 queries (``common.block_lists``), which are a part of a tile. Neighbouring parts see much the same, so
that a block is loaded once for both; where they do not, who sees a block gets its products alone (``forward``).

One warp reads the lists, ascending, by windows of 32 blocks: of each list the entries whose blocks are in the window,
of which there are at most as many as lanes, and a word that says which blocks these are. How many blocks a tile has is
known by a first walk.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.block_lists import UNSEEN, BlockList, Sharing, Tables
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.common.query_tiles import QueryTiles
from flash_attn_cute.kernels.common.tiles import WorkTile
from flash_attn_cute.kernels.common.workspace import packed_block
from flash_attn_cute.kernels.sm100.config import PART_ROWS

_WINDOW = 32  # blocks
_BEHIND_ALL = 2**30  # the block of an entry that there is not


@dataclass(frozen=True)
class PartLists(BlockList):
    """The lists of a tile's parts. ``num`` counts blocks that any of them has; ``first`` is that of the first part."""

    firsts: tuple[Int32, ...] = ()
    ends: tuple[Int32, ...] = ()  # behind the last entry


class ListedTiles(QueryTiles):
    """Tiles of queries whose parts have lists of their own."""

    @cute.jit
    def listed(
        self, a: ForwardArguments, tables: Tables, work: WorkTile, q: SeqRows, batch: Int32, num_queries: Int32
    ) -> PartLists:
        """The lists of a tile, with how many blocks they have together; by one converged warp."""
        c = self.config
        row = work.first_row // PART_ROWS
        if const_expr(c.features.packed):
            row += packed_block(q.start, work.batch, PART_ROWS)
        firsts, ends = [], []
        for part in cutlass.range_constexpr(c.q_parts):
            first, num = Int32(0), Int32(0)
            if num_queries > PART_ROWS * part:
                number = Sharing.of(a.numbers).number(batch, work.head, row + part)
                first, num = tables.mLists[number, 0], tables.mLists[number, 1]
            firsts.append(first)
            ends.append(first + num)
        lists = PartLists(firsts[0], Int32(0), firsts=tuple(firsts), ends=tuple(ends))
        num = ends[0] - firsts[0]
        if const_expr(c.q_parts > 1):
            num = ListWalk.of(tables.mEntries, c.q_parts).count(lists)
        return PartLists(firsts[0], num, firsts=tuple(firsts), ends=tuple(ends))


@dataclass(frozen=True)
class ListWalk:
    """A walk over the lists of a tile's parts, by one converged warp, in registers."""

    mEntries: cute.Tensor  # (entry, block and its code)
    parts: cutlass.Constexpr
    places: cute.Tensor  # (part,): the next entry that no window has had
    ends: cute.Tensor  # (part,)
    # Of the window: its first block, bits of those to come, and what each list says of the block that is as far behind
    # the first as the lane is behind lane 0.
    window: cute.Tensor
    coming: cute.Tensor
    codes: cute.Tensor  # (part,)

    @staticmethod
    def of(mEntries: cute.Tensor, parts: int) -> "ListWalk":
        """One that is yet to begin."""
        return ListWalk(mEntries, parts, *(cute.make_rmem_tensor(n, Int32) for n in (parts, parts, 1, 1, parts)))

    def begin(self, lists: PartLists) -> None:
        """Before the first block of a tile."""
        for part in range(self.parts):
            self.places[part], self.ends[part] = lists.firsts[part], lists.ends[part]
        self.coming.fill(0)

    @cute.jit
    def count(self, lists: PartLists) -> Int32:
        """How many blocks there are."""
        self.begin(lists)
        num = Int32(0)
        while self._has_entries():
            self._read_window()
            num += cute.arch.popc(self.coming[0])
        return num

    @cute.jit
    def following(self) -> tuple[Int32, list[Int32]]:
        """The next block, of which there has to be one, and what the list of each part says of it."""
        if self.coming[0] == 0:
            self._read_window()
        coming = self.coming[0]
        place = cute.arch.popc(~coming & (coming - 1))  # of the lowest bit
        self.coming[0] = coming & (coming - 1)
        return self.window[0] + place, [cute.arch.shuffle_sync(self.codes[p], place) for p in range(self.parts)]

    def _has_entries(self) -> Boolean:
        left = Int32(0)
        for part in range(self.parts):
            left += self.ends[part] - self.places[part]
        return left > 0

    @cute.jit
    def _read_window(self) -> None:
        lane = cute.arch.lane_idx()
        blocks, codes, window = [], [], Int32(_BEHIND_ALL)
        for part in cutlass.range_constexpr(self.parts):
            block, code = Int32(_BEHIND_ALL), Int32(UNSEEN)
            if self.places[part] + lane < self.ends[part]:
                block = self.mEntries[self.places[part] + lane, 0]
                code = self.mEntries[self.places[part] + lane, 1]
            blocks.append(block)
            codes.append(code)
            window = cutlass.min(window, cute.arch.shuffle_sync(block, 0))
        coming = Int32(0)
        for part in cutlass.range_constexpr(self.parts):
            distance = blocks[part] - window
            bits = Int32(1) << distance if distance < _WINDOW else Int32(0)
            for i in cutlass.range_constexpr(_WINDOW.bit_length() - 1):
                bits = bits | cute.arch.shuffle_sync(bits, lane ^ (1 << i))
            # The lane's block is among the list's entries behind as many as have bits below its own.
            code = cute.arch.shuffle_sync(codes[part], cute.arch.popc(bits & ((1 << lane) - 1)))
            self.codes[part] = cutlass.select_((bits >> lane & 1) != 0, code, Int32(UNSEEN))
            self.places[part] = self.places[part] + cute.arch.popc(bits)
            coming = coming | bits
        self.window[0], self.coming[0] = window, coming
