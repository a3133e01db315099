"""Blocks that a tile attends to, in order, with the masks they need and their turns.

A tile of queries iterates over blocks of keys (forward), a tile of keys over blocks of queries (backward). Producers
and consumers of both passes use the same ``Blocks``: the number of blocks, the i-th block, the masks that it needs,
and how many tiles add to something before this one does.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr


@dataclass(frozen=True)
class Window:
    """A window, bottom-right aligned: query i attends to key j if i + shift - left <= j <= i + shift + right.

    A side of None is unbounded. ``shift``, the causal offset, is seqlen_k - seqlen_q.
    """

    left: Int32 | None
    right: Int32 | None
    shift: Int32

    @staticmethod
    def of(features: Any, arguments: Any, q_length: Int32, k_length: Int32) -> "Window":
        """The window of one sequence, from a configuration's features and the arguments of either pass."""
        left = arguments.numbers.window_left if features.left else None
        return Window(left, arguments.numbers.window_right if features.right else None, k_length - q_length)

    @property
    def transposed(self) -> "Window":
        """The window with queries and keys exchanged: which queries attend to a key."""
        return Window(self.right, self.left, -self.shift)


class Edges(NamedTuple):
    """Edges that may cross a block, known at compile time: the window's, and on the right also the sequence's end."""

    left: bool
    right: bool


class Part(NamedTuple):
    """Steps ``first .. end`` of a tile's loop, over blocks that need the same masks."""

    edges: Edges
    first: Int32
    end: Int32


@dataclass(frozen=True)
class Blocks:
    """An interval of blocks, ``start .. stop``, that a tile attends to.

    The right edge (the window's or the sequence's end) crosses blocks from ``full_stop`` on; the left edge crosses
    blocks below ``full_start``. Blocks in between are full and need no mask.
    """

    start: Int32
    full_start: Int32
    full_stop: Int32
    stop: Int32
    # 1: from the first block to the last, -1: from the last to the first. An int is known at compile time.
    direction: Int32 | int = 1

    @staticmethod
    @cute.jit
    def of(
        first_row: Int32, num_rows: Int32, seqlen: Int32, window: Window, tile: Constexpr, direction: Int32 | int = 1
    ) -> "Blocks":
        """The blocks of ``tile`` columns that a range of rows attends to, out of ``seqlen`` columns.

        The rows are first_row .. first_row + num_rows. There are no blocks if ``num_rows`` is not positive.
        """
        start, full_start = Int32(0), Int32(0)
        visible_to_first, visible_to_last = seqlen, seqlen
        if const_expr(window.right is not None):
            behind_first = first_row + window.shift + window.right + 1
            visible_to_first = cutlass.max(cutlass.min(seqlen, behind_first), 0)
            visible_to_last = cutlass.max(cutlass.min(seqlen, behind_first + num_rows - 1), 0)
        if const_expr(window.left is not None):
            hidden_from_first = cutlass.max(first_row + window.shift - window.left, 0)
            hidden_from_last = cutlass.max(first_row + num_rows - 1 + window.shift - window.left, 0)
            start = hidden_from_first // tile
            full_start = cute.ceil_div(hidden_from_last, tile)
        stop = cute.ceil_div(visible_to_last, tile) if num_rows > 0 else start
        return Blocks(start, full_start, visible_to_first // tile, stop, direction)

    @property
    def fields(self) -> tuple[Int32, ...]:
        """Fields that roles without the tile need, in the constructor's order."""
        return self.start, self.full_start, self.full_stop, self.stop

    @property
    def num(self) -> Int32:
        """Number of blocks; not positive if there are none."""
        return self.stop - self.start

    @cute.jit
    def nth(self, i: Int32) -> Int32:
        """The i-th block, in this direction."""
        return self.start + i if self.direction > 0 else self.stop - 1 - i

    @cute.jit
    def num_before(self, block: Int32) -> Int32:
        """Number of blocks that come before ``block`` in this direction: its turn, where turns follow it."""
        return block - self.start if self.direction > 0 else self.stop - 1 - block

    def parts(self, has_left: bool, has_right: bool) -> list[Part]:
        """The loop from the last block to the first, without its first step, cut into parts that need the same masks.

        The first part applies both edges, because under a narrow window they meet in one block.
        """
        middle = cutlass.max(cutlass.min(self.full_stop, self.stop - 1), self.start)
        last = cutlass.min(cutlass.max(self.full_start, self.start), middle) if has_left else self.start
        parts = [Part(Edges(left=False, right=False), self.stop - middle, self.stop - last)]
        if has_right:
            parts.insert(0, Part(Edges(left=has_left, right=True), Int32(1), self.stop - middle))
        if has_left:
            parts.append(Part(Edges(left=True, right=False), self.stop - last, self.num))
        return parts

    def crosses_left(self, block: Int32) -> Boolean:
        """Whether the left edge masks some of the block for some row."""
        return block < self.full_start

    def crosses_right(self, block: Int32) -> Boolean:
        """Whether the right edge masks some of the block for some row."""
        return block >= self.full_stop

    # A position is a block's index relative to full_start. It saves a register of the backward pass's consumers.

    @property
    def positions(self) -> tuple[Int32, Int32]:
        """Position of the first block, and the position behind the last one."""
        first, end = self.nth(Int32(0)), self.nth(self.num)
        return first - self.full_start, end - self.full_start

    def at(self, position: Int32) -> Int32:
        return position + self.full_start

    def position_crosses_left(self, position: Int32) -> Boolean:
        """``crosses_left`` of the block at a position."""
        return position < 0
