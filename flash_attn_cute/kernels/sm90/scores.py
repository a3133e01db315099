"""Scores in a warpgroup's registers: capped and hidden in both passes, weights and their gradients in the backward one.

The arithmetic is ``common.score``'s. In the forward pass rows are queries and columns keys. In the backward one rows
are keys and columns queries, and a thread has its scores in groups of eight: two neighbouring queries of a key and of
another key, and again of the two queries that are eight further on. What belongs to the four queries of a group, lse or
delta, is asked for group by group.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.assembly import pack, unpack
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.common.score import capped, capped_slope, hidden, visible_columns
from flash_attn_cute.kernels.sm90.mma import rows_and_columns


@cute.jit
def cap(acc_S: cute.Tensor, score_scale: Float32) -> None:
    """Products to what is behind tanh."""
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        acc_S[i] = capped(acc_S[i], score_scale)


@dataclass(frozen=True)
class Place:
    """Where a warpgroup's scores are: which sequence and head, and which positions in it."""

    rows: SeqRows  # of queries, or in the backward pass of keys
    columns: SeqRows  # of the others
    head: Int32  # of queries
    batch: Int32 | int  # index into tensors: 0 if packed
    first_row: Int32  # the position of row 0 in its sequence
    first_column: Int32
    window: Window  # which columns a row sees


@cute.jit
def hide(
    acc_S: cute.Tensor,
    cS: cute.Tensor,
    scale_log2: Float32,
    place: Place,
    edges: cutlass.Constexpr,
    heads_a_row: cutlass.Constexpr = 1,
    hides_rows: cutlass.Constexpr = False,
) -> None:
    """Hides scores that an edge does, by selection: NaN in hidden places reaches nothing.

    Args:
        acc_S: a warpgroup's scores.
        cS: their (row, column) coordinates.
        scale_log2: what scores are yet to be multiplied by.
        place: where they are.
        edges: ``Edges`` that can be within these columns.
        heads_a_row: how many rows that follow each other are heads of one position.
        hides_rows: whether rows behind the sequence see nothing; else they may see anything.
    """
    scores, coordinates = rows_and_columns(acc_S), rows_and_columns(cS)
    nothing, first_of_thread = hidden(scale_log2), coordinates[0, 0][1]
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        row = place.first_row + coordinates[r, 0][0] // heads_a_row
        start, stop = visible_columns(row, place.first_column, place.columns.length, place.window, edges)
        if const_expr(hides_rows):
            stop = stop if row < place.rows.length else Int32(0)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # Not coordinates[0, c], nor a condition: both are a dozen operations each, which take time to compile.
            column, score = first_of_thread + (c // 2 * 8 + c % 2), scores[r, c]
            if const_expr(edges.right or hides_rows):
                score = cutlass.select_(column < stop, score, nothing)
            if const_expr(edges.left):
                score = cutlass.select_(column >= start, score, nothing)
            scores[r, c] = score


@dataclass(frozen=True)
class Scores:
    """Of a backward pass: a warpgroup's scores of 64 keys and a block of queries, and what they become."""

    acc_S: cute.Tensor
    rP: cute.Tensor  # weights rounded, laid out as acc_S
    rW: cute.Tensor  # times the derivative of a softcap; rP, if there is none
    cS: cute.Tensor  # coordinates of acc_S
    score_scale: Float32  # into tanh, with a softcap
    scale_log2: Float32


@cute.jit
def weigh(
    config: cutlass.Constexpr,
    scores: Scores,
    hides: Boolean,
    place: cutlass.Constexpr,
    lse: cutlass.Constexpr,
) -> None:
    """Scores to weights.

    Args:
        config: the kernel's.
        scores: of a block of queries.
        hides: whether some of the queries do not see some of the keys.
        place: tells where the scores are; asked only where that matters.
        lse: tells a group's lse, in base 2.
    """
    f, acc_S, dtype = config.features, scores.acc_S, scores.rP.element_type
    if const_expr(f.softcap):
        cap(acc_S, scores.score_scale)
    if hides:
        edges = Edges(left=f.right, right=f.left)
        hide(acc_S, scores.cS, scores.scale_log2, place(), edges, hides_rows=True)
    packed_P, packed_W = cute.recast_tensor(scores.rP, Int32), cute.recast_tensor(scores.rW, Int32)
    for i in cutlass.range_constexpr(0, cute.size(acc_S), 8):
        four = lse(i // 8)
        for j in cutlass.range_constexpr(0, 8, 2):
            x, y = acc_S[i + j], acc_S[i + j + 1]
            low = cute.math.exp2(x * scores.scale_log2 - four[j // 4 * 2], fastmath=True)
            high = cute.math.exp2(y * scores.scale_log2 - four[j // 4 * 2 + 1], fastmath=True)
            packed_P[(i + j) // 2] = pack(low, high, dtype)
            if const_expr(f.softcap):  # x and y are infinite where the weights are 0
                low = low * capped_slope(x) if low != 0.0 else Float32(0.0)
                high = high * capped_slope(y) if high != 0.0 else Float32(0.0)
                packed_W[(i + j) // 2] = pack(low, high, dtype)


@cute.jit
def differentiate(acc_dP: cute.Tensor, weights: cutlass.Constexpr, delta: cutlass.Constexpr, rdS: cute.Tensor) -> None:
    """Gradients of the scores, but for their scale, rounded into rdS.

    Args:
        acc_dP: gradients of the weights.
        weights: tells a group's weights, times the derivative of a softcap, two a register.
        delta: tells a group's delta.
        rdS: laid out as acc_dP.
    """
    packed, dtype = cute.recast_tensor(rdS, Int32), rdS.element_type
    for i in cutlass.range_constexpr(0, cute.size(acc_dP), 8):
        four, pairs = delta(i // 8), weights(i // 8)
        for j in cutlass.range_constexpr(0, 8, 2):
            low, high = (unpack(pairs[j // 2], n, dtype) * (acc_dP[i + j + n] - four[j // 4 * 2 + n]) for n in range(2))
            packed[(i + j) // 2] = pack(low, high, dtype)
