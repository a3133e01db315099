"""Scores of one row a thread: capped, biased and hidden. The arithmetic is ``common.score``'s.

Rows are queries, or in the backward pass keys. All are seldom or never asked for, so they read scores from where they
are in tensor memory, and write them back: registers are short.
"""

import functools
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint16, const_expr

from flash_attn_cute.kernels.common.assembly import bit_mask, fma, shifted_right, unpack
from flash_attn_cute.kernels.common.blocks import Edges, Window
from flash_attn_cute.kernels.common.score import capped, hidden, visible_columns
from flash_attn_cute.kernels.sm100 import tensor_memory

_COLUMNS = 32  # that are read at once, one for each bit of a word
_WORDS_AHEAD = 64  # of a bias, in registers
_COLUMNS_ADDED = 64  # of scores that it is added to at once


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
    """Bits of a row, 32 columns a word from ``first_column`` on, within the interval of columns that it attends to.

    ``mIntervals`` has the first column and the one behind the last of all rows of all entries of the batch, flattened.
    An entry has ``length`` rows; rows behind the last one attend to what that does.
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
    """Hides scores that an edge does, by selection: those of a thread's row in some columns from ``place`` on.

    NaN in hidden places reaches nothing. Scores are yet to be multiplied by ``scale_log2``. ``row`` and
    ``first_column`` are positions in their sequences. ``edges`` are those that can be within the block. ``num_rows`` is
    given if rows behind the last one are to be fully masked; else their scores may be anything.
    """
    for first in range(0, columns, _COLUMNS):
        scores = tensor_memory.load(place + first, _COLUMNS)
        start, stop = visible_columns(row, first_column + first, num_columns, window, edges)
        start = cutlass.max(start, 0) if edges.left else Int32(0)
        stop = stop if edges.right else Int32(_COLUMNS)
        if num_rows is not None:
            stop = cutlass.select_(row < num_rows, stop, Int32(0))
        # A word of bits: comparisons one by one take longer, and the compiler keeps them all for when the same scores
        # are read again.
        visible = bit_mask(start, cutlass.max(stop - start, 0))
        tensor_memory.store(place + first, hide_by_bits(scores, scale_log2, visible))


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
    dtype: Constexpr
    is_strided: Constexpr  # whether elements may be apart

    @staticmethod
    def of(mRow: cute.Tensor, num_columns: Int32, is_strided: bool) -> "BiasRow":
        """Row of the bias in a vector."""
        dtype: Any = mRow.element_type
        step = Int64(mRow.stride[0]) * (dtype.width // 8)
        return BiasRow(mRow.iterator.toint(), step, num_columns, dtype, is_strided)

    @cute.jit
    def read(self, first: Int32, num: Constexpr) -> list[Int32]:
        """Some columns from one on, packed in words; by all of a warp.

        If they lie within all rows of the warp, and begin at a multiple of 16 bytes, nothing waits for them yet.
        """
        size = self.dtype.width // 8
        words = cute.make_rmem_tensor(num * size // 4, Int32)
        words.fill(0)
        start = self.address + Int64(first) * size
        if const_expr(self.is_strided):
            self._gather(words, first, num)
        elif cute.arch.vote_all_sync(Int32(start & 15) == 0 and first + num <= self.num_columns):
            vectors = cute.make_ptr(Int32, start, cute.AddressSpace.gmem, assumed_align=16)
            vectors = cute.make_tensor(vectors, words.layout)
            for i in cutlass.range_constexpr(cute.size(words) // 4):
                cute.autovec_copy(cute.local_tile(vectors, (4,), (i,)), cute.local_tile(words, (4,), (i,)))
        else:
            self._gather(words, first, num)
        return [words[i] for i in range(cute.size(words))]

    @cute.jit
    def _gather(self, words: cute.Tensor, first: Int32, num: Constexpr) -> None:
        """Reads columns from wherever they are, some at a time, which move those before them up.

        As a loop it needs registers for few addresses, and the compiler does not execute it where it is not needed.
        """
        at_once = _COLUMNS // 2 if self.is_strided else _COLUMNS
        for i in cutlass.range(0, num, at_once, unroll=1):
            some = self._elements(first + i, at_once) if self.is_strided else self._words(first + i, at_once)
            kept = cute.size(words) - len(some)
            for w in cutlass.range_constexpr(kept):
                words[w] = words[w + len(some)]
            for w in cutlass.range_constexpr(len(some)):
                words[kept + w] = some[w]

    def _words(self, first: Int32, num: int) -> list[Int32]:
        """Columns that follow each other."""
        size, last = self.dtype.width // 8, self.num_columns - 1
        start = self.address + Int64(first) * size
        shift = Int32(start & 3)  # bytes
        last_word = (last - first) * size + shift >> 2  # that holds some of the last element
        words = [
            _word(start - shift + 4 * Int64(cutlass.min(Int32(i), last_word)))
            for i in range(num * size // 4 + (size < 4))
        ]
        return words if size == 4 else [shifted_right(*two, 8 * shift) for two in itertools.pairwise(words)]

    def _elements(self, first: Int32, num: int) -> list[Int32]:
        """Columns that are apart."""
        elements = [self._element(first + i) for i in range(num)]
        if self.dtype.width == 32:
            return elements
        return [elements[i] & 0xFFFF | elements[i + 1] << 16 for i in range(0, num, 2)]

    def numbers(self, words: list[Int32]) -> list[Float32]:
        """Elements that have been read, as numbers."""
        if self.dtype.width == 32:
            return [word.bitcast(Float32) for word in words]
        return [unpack(word, i, self.dtype) for word in words for i in range(2)]

    def _element(self, column: Int32) -> Int32:
        """An element, in the lower bits of a word."""
        address = self.address + Int64(cutlass.min(column, self.num_columns - 1)) * self.step
        word = _word(address & -4)
        return word if self.dtype.width == 32 else shifted_right(word, word, 8 * Int32(address & 2))


def _word(address: Int64) -> Int32:
    pointer: Any = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


@dataclass(frozen=True)
class BlockOfBias:
    """A thread's row of a bias in a block of keys, whose first columns are read ahead of the scores."""

    row: BiasRow
    columns: int  # of the block
    first_column: Int32  # the position of its first key
    ahead: list[Int32]  # its first columns, packed in words

    @staticmethod
    def of(row: BiasRow, columns: int, first_column: Int32) -> "BlockOfBias":
        """Begins to read a row in a block: as much as registers have room for beside 32 scores."""
        at_once = min(columns, _WORDS_AHEAD * 32 // row.dtype.width)
        return BlockOfBias(row, columns, first_column, row.read(first_column, at_once))

    def add_in_memory(self, place: Int32, scale: Float32) -> None:
        """Adds it to scores, times a scale: those of the thread's row from ``place`` on."""
        at_once = len(self.ahead) * 32 // self.row.dtype.width
        for begin in range(0, self.columns, at_once):
            words = self.ahead if begin == 0 else self.row.read(self.first_column + begin, at_once)
            for first in range(0, at_once, _COLUMNS_ADDED):
                some = words[first * self.row.dtype.width // 32 :][: _COLUMNS_ADDED * self.row.dtype.width // 32]
                numbers, own_place = self.row.numbers(some), place + (begin + first)
                scores, sums = tensor_memory.load(own_place, len(numbers)), []
                for i in range(0, len(numbers), 2):  # in registers that lie side by side
                    pairs = tuple(scores[i : i + 2]), (scale, scale), tuple(numbers[i : i + 2])
                    sums += cute.arch.fma_packed_f32x2(*pairs)
                tensor_memory.store(own_place, sums)


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
    dtype: Constexpr

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
