"""Tiles of a bias in shared memory, row by row, whatever the alignment of the rows.

Asynchronous copies move vectors of 16 bytes. A row is therefore copied from the vector that holds its first element,
and keeps in shared memory the offset within a vector that it has in global memory. Readers compute this offset from
the row's address, as the copying warps do. Bytes beside the row belong to vectors that hold part of it, so they are in
memory that the tensor has a part of.

Padding rows and columns behind the last key are not copied; their places hold arbitrary numbers.

A bias that all queries share can come as float32 instead, a row that begins with its first column (``load_row``): then
readers convert nothing, and read two columns at a time whatever the alignment in global memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.common.assembly import copy_vector
from flash_attn_cute.kernels.common.blocks import Window
from flash_attn_cute.kernels.common.lengths import SeqRows
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.score_tensors import part_of
from flash_attn_cute.kernels.common.softmax import LARGE
from flash_attn_cute.kernels.common.storage import SharedMemory

VECTOR = 16  # bytes
_LARGEST = 3.4028234663852886e38  # of float32
_THREADS_A_ROW = 8


@dataclass(frozen=True)
class Place:
    """Location of some scores: sequence, head, and positions."""

    rows: SeqRows  # of queries, or in the backward pass of keys
    columns: SeqRows  # of the others
    head: Int32  # of queries
    batch: Int32 | int  # index into tensors: 0 if packed
    first_row: Int32  # the position of row 0 in its sequence
    first_column: Int32
    window: Window  # which columns a row attends to


@dataclass(frozen=True)
class RowsOfScores:
    """Rows of a bias that a tile has: ``first`` .. ``first + num`` of a sequence, or of some heads of it.

    ``heads_a_row`` consecutive rows are heads of one query.
    """

    q: SeqRows
    batch: Int32 | int
    head: Int32
    first: Int32
    num: Int32
    heads_a_row: Constexpr

    def of(self, gX: cute.Tensor, row: Int32) -> cute.Tensor:
        """A row of the tile, padding included, from a sequence's (heads, queries, keys)."""
        return gX[self.head * self.heads_a_row + row % self.heads_a_row, self.first + row // self.heads_a_row, None]


@dataclass(frozen=True)
class SharedBias:
    """Tiles of a bias in stages of shared memory. Each loading thread arrives once to fill a stage."""

    # A tile's ``bias_rows`` are ``bias_pitch`` bytes apart, 0 if they do not come through shared memory. One row of a
    # uniform bias is copied, and read for all.
    config: Constexpr
    arguments: Any
    ring: Ring
    place: cute.Pointer
    threads: Constexpr  # that load

    @staticmethod
    def of(config: Any, a: Any, memory: SharedMemory, storage: Any) -> "SharedBias":
        """Tiles of a CTA, on the device: the pipeline ``bias`` and the buffer ``sBias`` of its schedule."""
        ring, threads = memory.ring(storage, "bias"), memory.schedule.pipeline("bias").full_count
        return SharedBias(config, a, ring, storage.sBias.data_ptr(), threads)

    @cute.jit
    def load(self, step: Int32, rows: RowsOfScores, first_column: Int32, num_columns: Int32, thread: Int32) -> None:
        """Copies a tile, by all loading threads, when the stage is released."""
        self.ring.wait_empty(step)  # from the mma warps
        mX = self.arguments.mBias
        gX, at_once = part_of(self.arguments, mX, rows.q, rows.batch), self.threads // _THREADS_A_ROW
        num_rows = rows.num * rows.heads_a_row
        if const_expr(self.config.features.uniform_bias and rows.heads_a_row == 1):
            num_rows = cutlass.min(num_rows, 1)
        num_bytes = num_columns * (mX.element_type.width // 8)
        # Rows that are a multiple of eight apart begin alike within a vector: from one to the next by addition.
        apart = at_once if const_expr(at_once % 8 == 0) else 2 * at_once
        assert apart % 8 == 0
        between = Int64(mX.stride[2]) * (mX.element_type.width // 8 * apart)
        within = thread % _THREADS_A_ROW * VECTOR
        for first in cutlass.range_constexpr(0, apart, at_once):
            row = first + thread // _THREADS_A_ROW
            start = (rows.of(gX, row).iterator + first_column).toint()
            shift = Int32(start & (VECTOR - 1))
            source, stop = start - shift + within, shift + num_bytes - within
            target = self._tile(step) + row * self.config.bias_pitch + within
            for i in cutlass.range(row, num_rows, apart, unroll=1):
                if const_expr(rows.heads_a_row > 1):  # rows are of heads in turn
                    start = (rows.of(gX, i).iterator + first_column).toint()
                    shift = Int32(start & (VECTOR - 1))
                    source, stop = start - shift + within, shift + num_bytes - within
                for j in cutlass.range_constexpr(-(-self.config.bias_pitch // (VECTOR * _THREADS_A_ROW))):
                    offset = j * VECTOR * _THREADS_A_ROW
                    if offset < stop:
                        copy_vector(target + offset, source + offset)
                source, target = source + between, target + apart * self.config.bias_pitch
        cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full(step))  # to the mma warps, when it has all come

    @cute.jit
    def load_row(
        self,
        step: Int32,
        rows: RowsOfScores,
        first_column: Int32,
        num_columns: Int32,
        softmax_scale: Float32 | None,
        thread: Int32,
    ) -> None:
        """Loads the row of a bias that all queries share, as float32, by all loading threads.

        With a ``softmax_scale``, not 0, elements are (bias - reference) / softmax_scale. So sums with products round as
        these do. The reference is near the block's largest element, and follows its last one. A finite bias stays
        finite, if need be as float32's largest number. Elements behind the last key are arbitrary. The scale is None if
        products are not added to the row. ``num_columns`` are those of the block that the sequence has.
        """
        gRow = rows.of(part_of(self.arguments, self.arguments.mBias, rows.q, rows.batch), Int32(0))
        sRow = self.shared_row(step)
        columns, warps = cute.size(sRow) - VECTOR // 4, self.threads // 32
        lane, warp = thread % 32, thread // 32
        elements = cute.make_rmem_tensor(-(-columns // 32), Float32)  # each warp reads all of them, and stores a part
        for i in cutlass.range_constexpr(cute.size(elements)):
            elements[i] = -Float32.inf
            if 32 * i + lane < num_columns:
                elements[i] = gRow[first_column + 32 * i + lane].to(Float32)
        reference = Float32(0.0)
        if const_expr(softmax_scale is not None):
            reference = self._relate(elements, softmax_scale)
        self.ring.wait_empty(step)  # from the mma warps
        for i in cutlass.range_constexpr(cute.size(elements)):
            if 32 * i + lane < columns and i % warps == warp:
                sRow[32 * i + lane] = elements[i]
        if thread == 0:
            sRow[columns] = reference
        cute.arch.mbarrier_arrive(self.ring.full(step))  # to the mma warps

    def _relate(self, elements: cute.Tensor, softmax_scale: Float32) -> Float32:
        """Makes elements of a bias, which a warp has, relative to a number and products; returns the number."""
        largest = elements[0]
        for i in range(1, cute.size(elements)):
            largest = cute.arch.fmax(largest, elements[i])
        largest = cute.arch.warp_reduction_max(largest)
        # A huge one is a mask more likely than a bias; what it is subtracted from would lose all of its bits.
        reference = cutlass.select_(cute.arch.fmax(largest, -largest) <= LARGE, largest, Float32(0.0))
        factor = 1.0 / softmax_scale
        for i in range(cute.size(elements)):
            is_finite = cute.arch.fmax(elements[i], -elements[i]) < Float32.inf
            scaled = (elements[i] - reference) * factor
            clipped = cutlass.min(cutlass.max(scaled, -_LARGEST), _LARGEST)  # a finite bias hides nothing
            elements[i] = cutlass.select_(is_finite, clipped, scaled)
        return reference

    def shared_row(self, step: Int32) -> cute.Tensor:
        """The float32 row of a step, which ``load_row`` stores: (column,), and the reference behind the block's."""
        pointer = cute.make_ptr(Float32, self._tile(step), cute.AddressSpace.smem, assumed_align=VECTOR)
        return cute.make_tensor(pointer, cute.make_layout(self.config.bias_pitch // 4))

    def _tile(self, step: Int32) -> Int32:
        """Address of a step's tile in shared memory."""
        return Int32(self.place.toint()) + self.ring.stage(step) * (self.config.bias_rows * self.config.bias_pitch)

    @cute.jit
    def rows_apart(self, step: Int32, rows: RowsOfScores, row: Int32, column: Int32) -> cute.Tensor:
        """Every eighth row of a tile from a row on, from a column on, as (row, column).

        Rows eight apart, and blocks of keys, begin at multiples of a vector.
        """
        mX = self.arguments.mBias
        size = mX.element_type.width // 8
        gX = part_of(self.arguments, mX, rows.q, rows.batch)
        row = Int32(0) if const_expr(self.config.features.uniform_bias and rows.heads_a_row == 1) else row
        shift = Int32(rows.of(gX, row).iterator.toint() & (VECTOR - 1))
        pointer: Any = cute.make_ptr(
            mX.element_type,
            self._tile(step) + shift + column * size + row * self.config.bias_pitch,
            cute.AddressSpace.smem,
            assumed_align=2 * size if self.config.features.paired_bias else size,
        )
        apart = 0 if const_expr(self.config.features.uniform_bias) else 8 * self.config.bias_pitch // size
        return cute.make_tensor(pointer, cute.make_layout((8, self.config.bias_pitch // size), stride=(apart, 1)))
