"""Scores in a warpgroup's registers: softcap, bias and masks in both passes, P and dS in the backward pass.

The arithmetic is in ``common.score``. ``acc_S`` are a warpgroup's scores, ``cS`` their (row, column) coordinates.
``nothing`` is what masked scores become, by selection, so that a NaN in a masked place has no effect. Of a bias,
``step`` counts what has been in its stages of shared memory, from where a function that reads it releases its stage.

In the forward pass rows are queries and columns are keys. In the backward pass
rows are keys and columns are queries, and a thread has its scores in groups of eight: two neighbouring queries of a key
and of another key, and the same of the two queries that are eight further on. lse and delta of a group's four queries
are read group by group.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.assembly import copied, fma, pack, unpack
from flash_attn_cute.kernels.common.blocks import Edges
from flash_attn_cute.kernels.common.score import ScoreScales, capped, capped_slope, hidden, probability, visible_columns
from flash_attn_cute.kernels.common.score_rows import Place, RowsOfScores, SharedBias
from flash_attn_cute.kernels.common.score_tensors import part_of
from flash_attn_cute.kernels.sm90.mma import rows_and_columns


@cute.jit
def cap(acc_S: cute.Tensor, score_scale: Float32) -> None:
    """Applies the softcap's tanh to products."""
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        acc_S[i] = capped(acc_S[i], score_scale)


@cute.jit
def raise_logits(max_logits: cute.Tensor, acc_S: cute.Tensor, scale: Float32) -> None:
    """Raises numbers of this thread's rows to the largest of their products, times a scale."""
    scores = rows_and_columns(acc_S)
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        largest = max_logits[r]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            largest = cute.arch.fmax(largest, scores[r, c] * scale)
        max_logits[r] = largest


class Elements:
    """This thread's elements of a bias, loaded one by one from global memory.

    They are indexed by (row, column) as ``rows_and_columns`` has scores; rows are queries. Behind a sequence's end the
    last element is read, for scores that are masked or dropped.
    """

    def __init__(self, a: Any, place: Place, coordinates: cute.Tensor, heads_a_row: int, clips_columns: bool):
        """``clips_columns``: whether columns may be behind the sequence's end."""
        gX = part_of(a, a.mBias, place.rows, place.batch)
        last_row, self.last_column = place.rows.length - 1, place.columns.length - 1
        self.clips_columns = clips_columns
        self.first_column = place.first_column + coordinates[0, 0][1]
        self.rows = []
        for r in range(cute.size(coordinates, mode=[0])):
            row = cutlass.min(place.first_row + coordinates[r, 0][0] // heads_a_row, last_row)
            head = place.head * heads_a_row + coordinates[r, 0][0] % heads_a_row
            gR = gX[head, row, None]
            self.rows.append(gR if clips_columns else cute.domain_offset((self.first_column,), gR))

    def __call__(self, r: int, c: int) -> Any:
        """Element of row r and column c."""
        column = c // 2 * 8 + c % 2
        if self.clips_columns:
            return self.rows[r][cutlass.min(self.first_column + column, self.last_column)]
        return self.rows[r][column]


class SharedElements:
    """This thread's elements of a bias in shared memory; ``first_row`` is this warpgroup's first row of the tile."""

    def __init__(self, shared: SharedBias, step: Int32, rows: RowsOfScores, first_row: Int32, coordinates: cute.Tensor):
        self.rows = [
            shared.rows_apart(step, rows, first_row + coordinates[r, 0][0], coordinates[0, 0][1])[0, None]
            for r in range(cute.size(coordinates, mode=[0]))
        ]
        features = shared.config.features
        self.paired, self.uniform = features.paired_bias, features.uniform_bias and rows.heads_a_row == 1
        self.pairs: dict[tuple[int, int], cute.Tensor] = {}

    def __call__(self, r: int, c: int) -> Any:
        """Element of row r and column c."""
        r = 0 if self.uniform else r  # one read serves both rows
        row = self.rows[r]
        if not self.paired:
            return row[c // 2 * 8 + c % 2]
        if (r, c // 2) not in self.pairs:
            pair = cute.make_rmem_tensor(2, row.element_type)
            cute.autovec_copy(cute.local_tile(row, (2,), (c // 2 * 4,)), pair)
            self.pairs[r, c // 2] = pair
        pair = self.pairs[r, c // 2]
        if row.element_type.width == 16:
            return unpack(cute.recast_tensor(pair, Int32)[0], c % 2, row.element_type)
        return pair[c % 2]


def bias_elements(
    shared: SharedBias,
    step: Int32,
    rows: RowsOfScores,
    place: Place,
    first_row: Int32,
    coordinates: cute.Tensor,
    clips_columns: bool,
) -> Elements | SharedElements:
    """Reader of a bias where rows are queries: from its stage, or, if it is strided, from global memory.

    ``first_row`` is the warpgroup's of the tile's ``rows``; ``clips_columns``: whether columns may be behind the
    sequence's end.
    """
    if shared.config.bias_pitch:
        return SharedElements(shared, step, rows, first_row, coordinates)
    return Elements(shared.arguments, place, coordinates, rows.heads_a_row, clips_columns)


@cute.jit
def add_bias(acc_S: cute.Tensor, scales: ScoreScales, bias: Constexpr, columns: Constexpr = None) -> None:
    """Adds a bias in all columns, or in ``columns``; ``bias(row, column)`` gives an element."""
    scores = rows_and_columns(acc_S)
    chosen = range(cute.size(scores, mode=[1])) if const_expr(columns is None) else columns
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for c in cutlass.range_constexpr(chosen.start, chosen.stop):
            scores[r, c] = fma(scores[r, c], scales.bias, bias(r, c).to(Float32))


@cute.jit
def add_bias_tile(acc_S: cute.Tensor, scales: ScoreScales, rBias: cute.Tensor) -> None:
    """Adds a bias of 16 bits whose elements are laid out as scores are."""
    pairs = cute.recast_tensor(rBias, Int32)
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        acc_S[i] = fma(acc_S[i], scales.bias, unpack(pairs[i // 2], i % 2, rBias.element_type))


@cute.jit
def fill_with_bias_row(acc_S: cute.Tensor, shared: SharedBias, step: Int32, cS: cute.Tensor) -> Float32:
    """Puts a row of a bias that all queries share into the accumulators, for products to be added to it.

    The row is as ``load_row`` leaves it with a scale; returns its reference.
    """
    accumulators, first_column = rows_and_columns(acc_S), rows_and_columns(cS)[0, 0][1]
    shared.ring.wait_full(step)  # from those who load
    row, pair = shared.shared_row(step), cute.make_rmem_tensor(2, Float32)
    for c in cutlass.range_constexpr(0, cute.size(accumulators, mode=[1]), 2):
        cute.autovec_copy(cute.local_tile(row, (2,), (first_column // 2 + 2 * c,)), pair)
        accumulators[0, c], accumulators[0, c + 1] = pair[0], pair[1]
        for r in cutlass.range_constexpr(1, cute.size(accumulators, mode=[0])):  # ahead of the products' fence
            accumulators[r, c], accumulators[r, c + 1] = copied(pair[0]), copied(pair[1])
    reference = row[4 * cute.size(accumulators, mode=[1])]
    shared.ring.release(step)  # to those who load
    return reference


@cute.jit
def read_bias_row(shared: SharedBias, step: Int32, cS: cute.Tensor) -> cute.Tensor:
    """Reads this thread's columns of a bias row that all queries share (``load_row``), as float32 (column,)."""
    coordinates = rows_and_columns(cS)
    shared.ring.wait_full(step)  # from those who load
    elements = cute.make_rmem_tensor(cute.size(coordinates, mode=[1]), Float32)
    row = shared.shared_row(step)
    for c in cutlass.range_constexpr(0, cute.size(elements), 2):
        pair = cute.local_tile(row, (2,), (coordinates[0, 0][1] // 2 + 2 * c,))
        cute.autovec_copy(pair, cute.local_tile(elements, (2,), (c // 2,)))
    shared.ring.release(step)  # to those who load
    return elements


@cute.jit
def hide_by_bits(acc_S: cute.Tensor, words: cute.Tensor, nothing: Float32, parts: Constexpr = 1) -> None:
    """Masks scores whose bits are 0; a thread's bits are in row order, for one part of the columns after the other."""
    scores = rows_and_columns(acc_S)
    rows, columns = cute.size(scores, mode=[0]), cute.size(scores, mode=[1]) // parts
    for r in cutlass.range_constexpr(rows):
        for c in cutlass.range_constexpr(parts * columns):
            i = (c // columns * rows + r) * columns + c % columns
            scores[r, c] = cutlass.select_(words[i // 32] & (1 << i % 32) != 0, scores[r, c], nothing)


@cute.jit
def load_row_interval(
    mIntervals: cute.Tensor, entry: Int32, length: Int32, first_row: Int32, cS: cute.Tensor
) -> cute.Tensor:
    """Loads the intervals of columns that this thread's rows attend to, as (first and behind the last, row).

    ``mIntervals`` has those of all batch entries, ``length`` rows each; rows behind the last one get its interval.
    ``first_row`` is the warpgroup's.
    """
    coordinates = rows_and_columns(cS)
    seen = cute.make_rmem_tensor((2, cute.size(coordinates, mode=[0])), Int32)
    for r in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
        row = cutlass.min(first_row + coordinates[r, 0][0], length - 1)
        cute.autovec_copy(cute.local_tile(mIntervals, (2,), (entry * length + row,)), seen[None, r])
    return seen


@cute.jit
def mask_outside_interval(
    acc_S: cute.Tensor, cS: cute.Tensor, seen: cute.Tensor, first_column: Int32, columns: int, nothing: Float32
) -> None:
    """Masks scores of a block of so many ``columns`` outside of their row's interval (``load_row_interval``)."""
    scores, first_of_thread = rows_and_columns(acc_S), rows_and_columns(cS)[0, 0][1]
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        start, stop = seen[0, r] - first_column, seen[1, r] - first_column
        if start > 0 or stop < columns:
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                column = first_of_thread + (c // 2 * 8 + c % 2)
                score = cutlass.select_(column < stop, scores[r, c], nothing)
                scores[r, c] = cutlass.select_(column >= start, score, nothing)


@cute.jit
def mask_outside_bits(acc_S: cute.Tensor, cS: cute.Tensor, bits: cute.Tensor, nothing: Float32) -> None:
    """Masks scores whose column's bit of their row is 0; ``bits`` are of this thread's rows, (word, row)."""
    scores, first_of_thread = rows_and_columns(acc_S), rows_and_columns(cS)[0, 0][1]
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for word in cutlass.range_constexpr(cute.size(bits, mode=[0])):
            own = bits[word, r] >> first_of_thread
            for c in cutlass.range_constexpr(8 * word, 8 * word + 8):
                is_visible = own & (1 << (c // 2 * 8 + c % 2 - 32 * word)) != 0
                scores[r, c] = cutlass.select_(is_visible, scores[r, c], nothing)


@cute.jit
def hide(
    acc_S: cute.Tensor,
    cS: cute.Tensor,
    scale_log2: Float32,
    place: Place,
    edges: Constexpr,
    heads_a_row: Constexpr = 1,
    hides_rows: Constexpr = False,
) -> None:
    """Masks scores, yet to be multiplied by ``scale_log2``, beyond ``edges`` that can be within these columns.

    ``heads_a_row`` rows that follow each other are heads of one position. ``hides_rows``: whether rows behind the
    sequence see nothing; else they may see anything.
    """
    scores, coordinates = rows_and_columns(acc_S), rows_and_columns(cS)
    nothing, first_of_thread = hidden(scale_log2), Int32(coordinates[0, 0][1])
    # Not coordinates[0, c], nor conditions: both are a dozen operations each, which take time to compile.
    columns: list[Int32] = []  # of the rows' scores, alike in all
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        row = place.first_row + coordinates[r, 0][0] // heads_a_row
        start, stop = visible_columns(row, place.first_column, place.columns.length, place.window, edges)
        if const_expr(hides_rows):
            stop = stop if row < place.rows.length else Int32(0)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            if const_expr(r == 0):
                columns.append(first_of_thread + (c // 2 * 8 + c % 2))
            column, score = columns[c], scores[r, c]
            if const_expr(edges.right or hides_rows):
                score = cutlass.select_(column < stop, score, nothing)
            if const_expr(edges.left):
                score = cutlass.select_(column >= start, score, nothing)
            scores[r, c] = score


@dataclass(frozen=True)
class Scores:
    """Scores of a backward pass's step, for 64 keys and a block of queries, and the registers that they become."""

    acc_S: cute.Tensor
    rP: cute.Tensor  # P rounded, laid out as acc_S
    rW: cute.Tensor  # times the derivative of a softcap; rP, if there is none
    cS: cute.Tensor  # coordinates of acc_S
    scales: ScoreScales
    arguments: Any


class Transposed(NamedTuple):
    """This thread's elements of a bias in registers, where rows are keys, for some columns of ``rows_and_columns``."""

    bias: cute.Tensor  # (row, column)
    columns: range

    def __call__(self, r: int, c: int) -> Any:
        """Element of row r and column c."""
        return self.bias[r, c - self.columns.start]


class SharedTransposed:
    """This thread's elements of a bias in shared memory, where scores have keys as rows and the bias queries.

    Of 16-bit or wider numbers, rows 8 apart lie alike within vectors of 16 bytes.
    """

    def __init__(self, shared: SharedBias, step: Int32, rows: RowsOfScores, first_key: Int32, cS: cute.Tensor):
        """``first_key``: the warpgroup's, of the tile's."""
        coordinates = rows_and_columns(cS)
        key, query = first_key + coordinates[0, 0][0], coordinates[0, 0][1]
        self.columns = range(cute.size(coordinates, mode=[1]))
        # A row of the tile, and eight further on the next that this thread reads: as one tensor.
        num = 1 if shared.config.features.uniform_bias else 2
        self.pairs = [shared.rows_apart(step, rows, query + i, key) for i in range(num)]

    def __call__(self, r: int, c: int) -> Any:
        """Element of row r and column c."""
        return self.pairs[c % len(self.pairs)][c // 2, 8 * r]


@cute.jit
def read_transposed(scores: Scores, place: Place, part: Constexpr = 0, parts: Constexpr = 1) -> Transposed:
    """Reads a bias from global memory, of all columns or of one of some parts: ahead of time, as that takes long."""
    a, coordinates = scores.arguments, rows_and_columns(scores.cS)
    num_rows, num_columns = cute.size(coordinates, mode=[0]), cute.size(coordinates, mode=[1]) // parts
    columns = range(part * num_columns, (part + 1) * num_columns)
    # Behind a sequence's end some element before it is read, for scores that are masked or dropped.
    last_key, last_query = place.rows.length - 1, place.columns.length - 1
    keys = [cutlass.min(place.first_row + coordinates[r, 0][0], last_key) for r in range(num_rows)]
    first_query = place.first_column + coordinates[0, 0][1] + 4 * columns.start
    mX = a.mBias
    size = mX.element_type.width // 8
    target = cute.make_rmem_tensor((num_rows, num_columns), mX.element_type)
    gX = part_of(a, mX, place.columns, place.batch)[place.head, None, None]
    # From query to query by addition: a product of 64 bits for each would take longer than the loads.
    address = gX[cutlass.min(first_query, last_query), None].iterator.toint()
    step, offsets = Int64(gX.stride[0]) * size, [Int64(gX.stride[1]) * size * key for key in keys]
    query = first_query
    for c in cutlass.range_constexpr(num_columns):
        for r in cutlass.range_constexpr(num_rows):
            pointer = cute.make_ptr(mX.element_type, address + offsets[r], cute.AddressSpace.gmem, assumed_align=size)
            target[r, c] = cute.make_tensor(pointer, cute.make_layout(1))[0]
        distance = 1 if const_expr(c % 2 == 0) else 7
        query += distance
        address += cutlass.select_(query <= last_query, distance * step, Int64(0))
    return Transposed(target, columns)


@cute.jit
def compute_P(
    config: Constexpr,
    scores: Scores,
    hides: Boolean,
    place: Constexpr,
    lse: Constexpr,
    elements: Constexpr = (),
    words: cute.Tensor | None = None,
    seen: cute.Tensor | None = None,
    half_done: Constexpr = None,
) -> None:
    """Computes P = exp2(S - lse), masked and rounded, from a block of scores.

    Args:
        config: the kernel's.
        scores: of a block of queries.
        hides: whether some of the queries do not see some of the keys.
        place: gives the location of the scores; called only where it is needed.
        lse: gives a group's lse, in base 2, or with a bias natural.
        elements: of a bias, ``Transposed``, or what reads it when those before it are not needed any more.
        words: bits of the visible scores, under a mask.
        seen: intervals of queries that keys see, if they have any (``load_row_interval``).
        half_done: called, if given, when P of the first half of the queries is complete.
    """
    f, acc_S, dtype = config.features, scores.acc_S, scores.rP.element_type
    scales, nothing = scores.scales, hidden(scores.scales.log2)
    if const_expr(f.softcap):
        cap(acc_S, scales.tanh)
    if const_expr(f.bias and not f.softcap):
        for given in elements:
            if const_expr(isinstance(given, (Transposed, SharedTransposed))):
                part = given
            else:
                cute.arch.sync_warp()  # or the compiler reads all parts ahead, and spills
                part = given()
            add_bias(acc_S, scales, part, part.columns)
    if hides:
        if const_expr(f.listed):
            hide_by_bits(acc_S, words, nothing)
        else:
            edges = Edges(left=f.right, right=f.left)
            hide(acc_S, scores.cS, scales.log2, place(), edges, hides_rows=True)
    if const_expr(f.intervals):
        mask_outside_interval(acc_S, scores.cS, seen, place().first_column, config.tile_m, nothing)
    packed_P, packed_W = cute.recast_tensor(scores.rP, Int32), cute.recast_tensor(scores.rW, Int32)
    for i in cutlass.range_constexpr(0, cute.size(acc_S), 8):
        if const_expr(half_done is not None and 2 * i == cute.size(acc_S)):
            half_done()
        four = lse(i // 8)
        for j in cutlass.range_constexpr(0, 8, 2):
            x, y = acc_S[i + j], acc_S[i + j + 1]
            s, t = x, y
            if const_expr(f.softcap and f.bias):
                # Not before: the derivative of the softcap takes what tanh gave. What is hidden stays so.
                r, c = j // 2 % 2, i // 2 + j // 4 * 2
                s, t = (
                    fma(z, scales.bias, cutlass.select_(z != nothing, elements[0](r, c + n).to(Float32), Float32(0.0)))
                    for n, z in enumerate((x, y))
                )
            low, high = (probability(z, four[j // 4 * 2 + n], scales, f.bias) for n, z in enumerate((s, t)))
            packed_P[(i + j) // 2] = pack(low, high, dtype)
            if const_expr(f.softcap):  # x and y are infinite where P is 0
                low = low * capped_slope(x) if low != 0.0 else Float32(0.0)
                high = high * capped_slope(y) if high != 0.0 else Float32(0.0)
                packed_W[(i + j) // 2] = pack(low, high, dtype)


@cute.jit
def compute_dS(
    acc_dP: cute.Tensor, P: Constexpr, delta: Constexpr, rdS: cute.Tensor, row_sums: cute.Tensor | None = None
) -> None:
    """Computes dS = P * (dP - delta), without the softmax scale, rounded into rdS.

    Args:
        acc_dP: dP.
        P: gives a group's P, times the derivative of a softcap, two a register.
        delta: gives a group's delta.
        rdS: laid out as acc_dP.
        row_sums: of this thread's two rows, to which dS is added before it is rounded.
    """
    packed, dtype = cute.recast_tensor(rdS, Int32), rdS.element_type
    for i in cutlass.range_constexpr(0, cute.size(acc_dP), 8):
        four, pairs = delta(i // 8), P(i // 8)
        for j in cutlass.range_constexpr(0, 8, 2):
            low, high = (unpack(pairs[j // 2], n, dtype) * (acc_dP[i + j + n] - four[j // 4 * 2 + n]) for n in range(2))
            packed[(i + j) // 2] = pack(low, high, dtype)
            if const_expr(row_sums is not None):
                row_sums[j // 2 % 2] = row_sums[j // 2 % 2] + (low + high)


@cute.jit
def store_transposed(rdS: cute.Tensor, a: BackwardArguments, place: Place, cS: cute.Tensor) -> None:
    """Stores rounded dS, whose rows are keys, to a tensor of its dtype with an element for each score.

    Eight neighbours store 16 bytes of a query between them. Pairs of keys they would have to exchange first, and rows
    of an odd number of keys have no aligned ones.
    """
    coordinates, grads = rows_and_columns(cS), rows_and_columns(rdS)
    gX = part_of(a, a.mdBias, place.columns, place.batch)[place.head, None, None]
    key, query = place.first_row + coordinates[0, 0][0], place.first_column + coordinates[0, 0][1]
    gX = cute.domain_offset((query, key), gX)
    num_keys, num_queries = place.rows.length - key, place.columns.length - query
    for c in cutlass.range_constexpr(cute.size(grads, mode=[1])):
        column = c // 2 * 8 + c % 2
        for r in cutlass.range_constexpr(cute.size(grads, mode=[0])):
            if column < num_queries and 8 * r < num_keys:
                gX[column, 8 * r] = grads[r, c]
