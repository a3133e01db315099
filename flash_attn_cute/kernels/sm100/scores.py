"""Scores of one row a thread: capped and hidden. The arithmetic is ``common.score``'s.

Rows are queries, or in the backward pass keys. Both are seldom or never asked for, so they read scores from where they
are in tensor memory, and write them back: registers are short.
"""

import cutlass
from cutlass import Float32, Int32

from flash_attn_cute.kernels.common.assembly import bit_mask
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.score import capped, hidden, visible_columns
from flash_attn_cute.kernels.sm100 import tensor_memory

_COLUMNS = 32  # that are read at once, and told by the bits of a word


def hide(
    scores: list[Float32],
    scale_log2: Float32,
    row: Int32,
    first_column: Int32,
    num_columns: Int32,
    window: Window,
    edges: cutlass.Constexpr,
    num_rows: Int32 | None = None,
) -> list[Float32]:
    """Scores, but those that an edge hides, by selection: NaN in hidden places reaches nothing.

    Args:
        scores: of 32 columns of a block.
        scale_log2: what they are yet to be multiplied by.
        row: its position in its sequence.
        first_column: the position of the first one's key.
        num_columns: keys of the sequence.
        window: which keys a query sees.
        edges: ``Edges`` that can be within the block.
        num_rows: of the sequence, if rows behind it are to see nothing; else they may see anything.
    """
    assert len(scores) == _COLUMNS
    start, stop = visible_columns(row, first_column, num_columns, window, edges)
    start = cutlass.max(start, 0) if edges.left else Int32(0)
    stop = stop if edges.right else Int32(len(scores))
    if num_rows is not None:
        stop = cutlass.select_(row < num_rows, stop, Int32(0))
    # A word of bits: comparisons one by one take longer, and the compiler keeps them all for when the same scores are
    # read again.
    return hide_by_bits(scores, scale_log2, bit_mask(start, cutlass.max(stop - start, 0)))


def hide_by_bits(scores: list[Float32], scale_log2: Float32, visible: Int32) -> list[Float32]:
    """Scores of 32 columns, but those whose bits are 0, by selection."""
    nothing = hidden(scale_log2)
    return [cutlass.select_(visible & 1 << i != 0, score, nothing) for i, score in enumerate(scores)]


def cap_in_memory(place: Int32, columns: int, scale: Float32) -> None:
    """Puts scores behind tanh: those of a thread's row in some columns from ``place`` on."""
    for first in range(0, columns, _COLUMNS):
        scores = tensor_memory.load(place + first, _COLUMNS)
        tensor_memory.store(place + first, [capped(x, scale) for x in scores])


def hide_in_memory(
    place: Int32,
    columns: int,
    scale_log2: Float32,
    row: Int32,
    first_column: Int32,
    num_columns: Int32,
    window: Window,
    edges: Edges,
    num_rows: Int32 | None = None,
) -> None:
    """Hides scores that an edge does: those of a thread's row in some columns from ``place`` on, as ``hide``."""
    for first in range(0, columns, _COLUMNS):
        scores = tensor_memory.load(place + first, _COLUMNS)
        some = hide(scores, scale_log2, row, first_column + first, num_columns, window, edges, num_rows)
        tensor_memory.store(place + first, some)


def hide_by_bits_in_memory(place: Int32, scale_log2: Float32, words: list[Int32]) -> None:
    """Hides scores whose bits are 0: those of a thread's row in columns from ``place`` on, 32 a word."""
    for i, word in enumerate(words):
        scores = tensor_memory.load(place + i * _COLUMNS, _COLUMNS)
        tensor_memory.store(place + i * _COLUMNS, hide_by_bits(scores, scale_log2, word))
