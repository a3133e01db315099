"""Scores of one row in a thread's registers: capped and hidden. The arithmetic is ``common.score``'s."""

import cutlass
from cutlass import Float32, Int32

from flash_attn_cute.kernels.common.assembly import bit_mask
from flash_attn_cute.kernels.common.blocks import Window
from flash_attn_cute.kernels.common.score import hidden, visible_columns


def hide(
    scores: list[Float32],
    scale_log2: Float32,
    row: Int32,
    first_column: Int32,
    num_columns: Int32,
    window: Window,
    edges: cutlass.Constexpr,
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
    """
    assert len(scores) == 32
    start, stop = visible_columns(row, first_column, num_columns, window, edges)
    start = cutlass.max(start, 0) if edges.left else Int32(0)
    stop = stop if edges.right else Int32(len(scores))
    # A word of bits: comparisons one by one take longer, and the compiler keeps them all for when the same scores are
    # read again.
    visible, nothing = bit_mask(start, cutlass.max(stop - start, 0)), hidden(scale_log2)
    return [cutlass.select_(visible & 1 << i != 0, score, nothing) for i, score in enumerate(scores)]
