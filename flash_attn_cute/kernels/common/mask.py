"""Hiding scores: the sequence's end and the window's two edges, by selection (NaN in hidden places reaches nothing)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_cute.kernels.common.fragments import rows_and_columns
from flash_attn_cute.kernels.common.sequence import Window


@cute.jit
def hide(
    acc_S: cute.Tensor,
    hidden: Float32,
    cS: cute.Tensor,
    first_query: Int32,
    group: cutlass.Constexpr,
    first_key: Int32,
    seqlen_k: Int32,
    window: Window,
    right_edge: cutlass.Constexpr,
    left_edge: cutlass.Constexpr,
    seqlen_q: Int32 | None = None,
) -> None:
    """Hides the scores of keys outside the window, or behind the sequence.

    Args:
        acc_S: a warpgroup's scores.
        hidden: what they become: an infinity.
        cS: their (row, column) coordinates.
        first_query: the position of row 0 in its sequence.
        group: how many rows in turn are heads of one query.
        first_key: the position of column 0.
        seqlen_k: the sequence's keys.
        window: which keys are visible.
        right_edge: whether the right edge (the sequence's end included) can be within these columns.
        left_edge: likewise for the left one.
        seqlen_q: if given, queries from there on see nothing.
    """
    scores, coordinates = rows_and_columns(acc_S), rows_and_columns(cS)
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        query = first_query + coordinates[r, 0][0] // group
        position = query + window.shift
        stop = seqlen_k - first_key
        if const_expr(right_edge and window.right is not None):
            stop = cutlass.min(stop, position + window.right + 1 - first_key)
        if const_expr(seqlen_q is not None):
            stop = stop if query < seqlen_q else Int32(0)
        start = Int32(0)
        if const_expr(left_edge):
            start = position - window.left - first_key
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            column = coordinates[0, c][1]
            if const_expr(right_edge or seqlen_q is not None):
                scores[r, c] = scores[r, c] if column < stop else hidden
            if const_expr(left_edge):
                scores[r, c] = scores[r, c] if column >= start else hidden
