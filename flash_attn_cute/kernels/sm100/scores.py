"""Scores of one row a thread: capped, biased and hidden. The arithmetic is ``common.score``'s.

Rows are queries, or in the backward pass keys. All are seldom or never asked for, so they read scores from where they
are in tensor memory, and write them back: registers are short.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, const_expr

from flash_attn_cute.kernels.common.assembly import bit_mask, fma, shifted_right, unpack
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.score import capped, hidden, visible_columns
from flash_attn_cute.kernels.sm100 import tensor_memory

_COLUMNS = 32  # that are read at once, one for each bit of a word


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
        window: which keys a query attends to.
        edges: ``Edges`` that can be within the block.
        num_rows: of the sequence, if rows behind it are to be fully masked; else their scores may be anything.
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


@cute.jit
def words_of(mBits: cute.Tensor, code: Int32, warpgroup: Int32 | int, thread: Int32) -> list[Int32]:
    """A thread's words of a tile of bits, from (tile, warpgroup, thread, word): all ones if the block is full."""
    words = cute.make_rmem_tensor(mBits.shape[3], Int32)
    words.fill(-1)
    if code >= 0:
        cute.autovec_copy(mBits[Int64(code), warpgroup, thread, None], words)
    return [words[w] for w in range(cute.size(words))]


def within_interval(
    words: list[Int32], mIntervals: cute.Tensor, entry: Int32 | int, length: Int32, row: Int32, first_column: Int32
) -> list[Int32]:
    """Bits of a row within the interval of columns that it attends to.

    Args:
        words: of 32 columns each.
        mIntervals: the first and the one behind the last, of all rows of all entries of the batch, flattened.
        entry: which.
        length: its rows; rows behind the last one attend to what that does.
        row: its number among them.
        first_column: the position of the first one of the first word.
    """
    seen = cute.make_rmem_tensor(2, Int32)
    number = entry * length + cutlass.min(row, length - 1)
    cute.autovec_copy(cute.local_tile(mIntervals, (2,), (number,)), seen)
    found = []
    for w, word in enumerate(words):
        first, end = (seen[j] - (first_column + _COLUMNS * w) for j in range(2))
        first = cutlass.max(first, 0)
        found.append(word & bit_mask(first, cutlass.max(end - first, 0)))
    return found


def hides_some(words: list[Int32]) -> Boolean:
    """Whether a bit of some row of the warp is 0."""
    return cute.arch.vote_any_sync(functools.reduce(operator.and_, words) != -1)


def cap_in_memory(place: Int32, columns: int, scale: Float32) -> None:
    """Puts scores behind tanh: those of a thread's row in some columns from ``place`` on."""
    for first in range(0, columns, _COLUMNS):
        scores = tensor_memory.load(place + first, _COLUMNS)
        tensor_memory.store(place + first, [capped(x, scale) for x in scores])


def largest_in_memory(place: Int32, columns: int, scale: Float32) -> Float32:
    """The largest of scores, times a scale: those of a thread's row in some columns from ``place`` on."""
    largest = -Float32.inf
    for first in range(0, columns, _COLUMNS):
        for x in tensor_memory.load(place + first, _COLUMNS):
            largest = cute.arch.fmax(largest, x * scale)
    return largest


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


@dataclass(frozen=True)
class BiasRow:
    """A thread's row of a bias in global memory, wherever it begins, and whatever the distance of its elements.

    It is read by words of 32 bits and vectors of them that hold some of the row, so that they are in memory which the
    tensor has a part of. Behind the last key stands anything.
    """

    address: Int64  # of the first element
    step: Int64  # bytes from one element to the next
    num_columns: Int32  # at least 1
    dtype: cutlass.Constexpr
    is_strided: cutlass.Constexpr  # whether elements may be apart

    @staticmethod
    def of(mRow: cute.Tensor, num_columns: Int32, is_strided: bool) -> "BiasRow":
        """Row of the bias in a vector."""
        dtype: Any = mRow.element_type
        step = Int64(mRow.stride[0]) * (dtype.width // 8)
        return BiasRow(mRow.iterator.toint(), step, num_columns, dtype, is_strided)

    @property
    def at_once(self) -> int:
        """Columns that are read together: of elements that are apart fewer, whose addresses take registers."""
        return _COLUMNS // 2 if self.is_strided else _COLUMNS

    @cute.jit
    def columns(self, first: Int32) -> list[Float32]:
        """``at_once`` of them; by all of a warp."""
        if const_expr(self.is_strided):
            return [self._element(first + i) for i in range(self.at_once)]
        size, last = self.dtype.width // 8, self.num_columns - 1
        num_words = self.at_once * size // 4
        start = self.address + Int64(first) * size
        words = cute.make_rmem_tensor(num_words + 4, Int32)
        words.fill(0)
        shift = Int32(start & 3)  # bytes
        if cute.arch.vote_all_sync(Int32(start & 15) == 0 and first + self.at_once <= self.num_columns):
            vectors = cute.make_ptr(Int32, start, cute.AddressSpace.gmem, assumed_align=16)
            vectors = cute.make_tensor(vectors, cute.make_layout(num_words))
            for i in cutlass.range_constexpr(num_words // 4):
                cute.autovec_copy(cute.local_tile(vectors, (4,), (i,)), cute.local_tile(words, (4,), (i,)))
        else:
            last_word = (last - first) * size + shift >> 2  # that holds some of the last element
            for i in cutlass.range_constexpr(num_words + (size < 4)):
                words[i] = _word(start - shift + 4 * Int64(cutlass.min(Int32(i), last_word)))
        if const_expr(size == 4):
            return [words[i].bitcast(Float32) for i in range(self.at_once)]
        pairs = [shifted_right(words[i], words[i + 1], 8 * shift) for i in range(num_words)]
        return [unpack(pairs[i // 2], i % 2, self.dtype) for i in range(self.at_once)]

    def _element(self, column: Int32) -> Float32:
        address = self.address + Int64(cutlass.min(column, self.num_columns - 1)) * self.step
        word = _word(address & -4)
        if self.dtype.width == 32:
            return word.bitcast(Float32)
        low, high = (unpack(word, i, self.dtype) for i in range(2))
        return cutlass.select_((address & 2) != 0, high, low)


def _word(address: Int64) -> Int32:
    pointer: Any = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


@cute.jit
def add_bias_in_memory(
    place: Int32, columns: cutlass.Constexpr, scale: Float32, row: cutlass.Constexpr, first_column: Int32
) -> None:
    """Adds a bias to scores, times a scale: those of a thread's row in some columns from ``place`` on.

    Args:
        place: in tensor memory.
        columns: of the block.
        scale: what products are multiplied by, or what is behind tanh.
        row: of the bias.
        first_column: the position of the block's first key.
    """
    for first in cutlass.range(0, columns, row.at_once, unroll=1):
        add_in_memory(place + first, scale, row.columns(first_column + first))


def add_in_memory(place: Int32, scale: Float32, numbers: list[Float32]) -> None:
    """Adds numbers to scores, times a scale: to those of a thread's row in as many columns from ``place`` on."""
    for first in range(0, len(numbers), _COLUMNS):
        some = numbers[first : first + _COLUMNS]
        scores = tensor_memory.load(place + first, len(some))
        tensor_memory.store(place + first, [fma(x, scale, b) for x, b in zip(scores, some, strict=True)])


@dataclass(frozen=True)
class BiasColumn:
    """A thread's column of a bias, or of its gradient, in global memory: a key's elements of all queries, by strides.

    Threads of a warp have keys that follow each other, whose elements of a query they read and write together.
    """

    address: Int64  # of the first query's element
    step: Int64  # bytes from one query's to the next
    num_queries: Int32  # of the sequence
    dtype: cutlass.Constexpr

    @staticmethod
    def of(mX: cute.Tensor, key: Int32, num_queries: Int32) -> "BiasColumn":
        """Column of a key in a head's bias, or its gradient, (queries, keys)."""
        dtype: Any = mX.element_type
        return BiasColumn(mX[None, key].iterator.toint(), Int64(mX.stride[0]) * (dtype.width // 8), num_queries, dtype)

    def read(self, first: Int32, num: int, is_uniform: bool) -> list[Int32 | Float32]:
        """Elements of some queries from one on, as they are in memory: nothing waits for them yet.

        Behind the last query stands its element. ``is_uniform``: all are the same.
        """
        if is_uniform:
            return [self._at(Int32(0))[0]] * num
        return [self._at(cutlass.min(first + i, self.num_queries - 1))[0] for i in range(num)]

    def numbers(self, elements: list[Int32 | Float32]) -> list[Float32]:
        """Elements that have been loaded, as numbers."""
        if self.dtype.width == 32:
            return elements
        return [unpack(Int32(x), 0, self.dtype) for x in elements]

    @cute.jit
    def write(self, first: Int32, elements: cute.Tensor) -> None:
        """Elements of some queries from one on, as far as there are such."""
        words = cute.recast_tensor(elements, self._kind)
        for i in cutlass.range_constexpr(cute.size(words)):
            target = self._at(first + i)
            if first + i < self.num_queries:
                target[0] = words[i]

    @property
    def _kind(self) -> type:
        """In which an element is moved."""
        return Float32 if self.dtype.width == 32 else Uint16

    def _at(self, query: Int32) -> cute.Tensor:
        address = self.address + Int64(query) * self.step
        pointer: Any = cute.make_ptr(self._kind, address, cute.AddressSpace.gmem, assumed_align=self.dtype.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(1))
