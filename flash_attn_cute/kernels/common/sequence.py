"""Which rows a sequence owns, which of them are real, and which keys a tile of its queries sees."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@dataclass(frozen=True)
class Rows:
    """One side of one sequence. ``start`` counts from the start of the tensor if packed, else it is 0."""

    start: Int32
    length: Int32  # real rows
    slot: Int32 | None = None  # rows it owns; those behind ``length`` are padding


@dataclass(frozen=True)
class Window:
    """Bottom-right aligned: query i sees key j when i + shift - left <= j <= i + shift + right.

    A side of None is unbounded; ``shift`` is seqlen_k - seqlen_q.
    """

    left: Int32 | None
    right: Int32 | None
    shift: Int32


@dataclass(frozen=True)
class KeyBlocks:
    """The blocks of keys that a tile of queries sees, walked from ``stop - 1`` down to ``start``.

    Blocks from ``full_stop`` on hold keys that the right edge (the window's or the sequence's end) hides from some
    query, blocks below ``full_start`` some that the left edge does. What lies between needs no mask.
    """

    start: Int32
    full_start: Int32
    full_stop: Int32
    stop: Int32

    @staticmethod
    @cute.jit
    def of(
        first_query: Int32, num_queries: Int32, seqlen_k: Int32, window: Window, tile_n: cutlass.Constexpr
    ) -> "KeyBlocks":
        """The blocks of queries first_query .. first_query + num_queries of one sequence; none if there are none."""
        start, full_start = Int32(0), Int32(0)
        visible_to_first, visible_to_last = seqlen_k, seqlen_k
        if const_expr(window.right is not None):
            behind_first = first_query + window.shift + window.right + 1
            visible_to_first = cutlass.max(cutlass.min(seqlen_k, behind_first), 0)
            visible_to_last = cutlass.max(cutlass.min(seqlen_k, behind_first + num_queries - 1), 0)
        if const_expr(window.left is not None):
            hidden_from_first = cutlass.max(first_query + window.shift - window.left, 0)
            hidden_from_last = cutlass.max(first_query + num_queries - 1 + window.shift - window.left, 0)
            start = hidden_from_first // tile_n
            full_start = cute.ceil_div(hidden_from_last, tile_n)
        stop = cute.ceil_div(visible_to_last, tile_n) if num_queries > 0 else start
        return KeyBlocks(start, full_start, visible_to_first // tile_n, stop)
