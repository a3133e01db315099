"""Tables of the blocks that a tile attends to: lists of blocks, and bits for partial blocks.

A list names the blocks that one tile attends to, in ascending order: blocks of keys for a tile of queries, blocks of
queries for a tile of keys. Batch entries, heads and tiles with equal masks share lists. An entry of a list names its
block and carries a code: ``FULL``, or the index of the block's tile of bits. An empty block is in no list.

Bits lie in the order in which a warpgroup's registers hold scores, so that a thread loads its own word or two from one
place. A tile of bits is stored one warpgroup after the other, 128 threads each.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

FULL, EMPTY = -1, -2  # in the place of where a block's bits are


class Tables(NamedTuple):
    """Tables of a mask, for a forward kernel."""

    mLists: cute.Tensor  # (list, first entry and how many)
    mEntries: cute.Tensor  # (entry, block of keys and its code), of its configuration's ``blocks_an_entry``
    mCodes: cute.Tensor | None  # (list, block of keys); a block mask has none
    mBits: cute.Tensor  # (tile, warpgroup, thread, word)
    mKinds: cute.Tensor | None = None  # (tile of a block mask,), see ``mask_tiles.kinds_of_quarters``; of half blocks


class Sharing(NamedTuple):
    """Number of distinct lists (or rows of codes) over the batch, heads and tiles; 1 where all share one.

    ``group`` consecutive heads share a list.
    """

    batch: Int32
    heads: Int32
    tiles: Int32
    group: Int32 | int = 1

    @staticmethod
    def of(numbers: Any) -> "Sharing":
        group = 1 if numbers.lists_group is None else numbers.lists_group
        return Sharing(numbers.lists_batch, numbers.lists_heads, numbers.lists_tiles, group)

    @property
    def total(self) -> Int32:
        """Number of lists over batch, heads and tiles."""
        return self.sets * self.tiles

    @property
    def sets(self) -> Int32:
        """Number of (batch entry, head) pairs whose lists differ."""
        return self.batch * self.heads

    def set_of(self, batch: Int32 | int, head: Int32) -> Int32:
        return batch % self.batch * self.heads + head // self.group % self.heads

    def number(self, batch: Int32 | int, head: Int32, tile: Int32) -> Int32:
        return self.set_of(batch, head) * self.tiles + tile % self.tiles


@dataclass(frozen=True)
class BlockList:
    """A list of blocks; ``nth`` goes from the last entry to the first, or from the first to the last."""

    first: Int32
    num: Int32
    direction: Constexpr = -1

    @property
    def fields(self) -> tuple[Int32, ...]:
        """Fields that roles without the tile need, in the constructor's order."""
        return self.first, self.num

    def nth(self, i: Int32) -> Int32:
        """Index of the i-th entry, in this list's direction."""
        return self.first + (i if self.direction > 0 else self.num - 1 - i)


def as_rows(mX: cute.Tensor, columns: int) -> cute.Tensor:
    """A flattened table as rows of ``columns`` numbers."""
    return cute.make_tensor(mX.iterator, cute.make_layout((mX.shape[0] // columns, columns), stride=(columns, 1)))


@cute.jit
def code_in_list(mLists: cute.Tensor, mEntries: cute.Tensor, number: Int32, block: Int32) -> Int32:
    """Code of a block in a list: ``EMPTY`` if the block is not among its entries."""
    low, end = mLists[number, 0], mLists[number, 0] + mLists[number, 1]
    high, code = end, Int32(EMPTY)
    while low < high:
        middle = (low + high) // 2
        if mEntries[middle, 0] < block:
            low = middle + 1
        else:
            high = middle
    if low < end:
        if mEntries[low, 0] == block:
            code = mEntries[low, 1]
    return code


def num_blocks(mMask: cute.Tensor, keys: int) -> Int32:
    """Number of blocks of ``keys`` keys that a query can attend to; 1 if the mask has no keys."""
    return cute.ceil_div(cutlass.max(mMask.shape[3], 1), keys)


@cute.jit
def bits_of(mBits: cute.Tensor, code: Int32, warpgroup: Int32, thread: Int32, asks: Constexpr = False) -> cute.Tensor:
    """A thread's words of a tile of bits, from (tile, warpgroup, thread, word).

    For a full block the words are arbitrary: they are loaded from the first tile, unless ``asks``, which branches on
    the code to spare the load.
    """
    words = cute.make_rmem_tensor(mBits.shape[3], Int32)
    if const_expr(not asks):
        cute.autovec_copy(mBits[Int64(cutlass.max(code, 0)), warpgroup, thread, None], words)
    elif code >= 0:
        cute.autovec_copy(mBits[Int64(code), warpgroup, thread, None], words)
    return words
