"""Workspace of a pass: one allocation, cut into parts, which spares the host an allocation for each.

A backward pass's workspace holds float32 sums of dQ, of dK and dV where query heads share a key head, and lse and
delta of every query. All are in blocks of tile_m queries (tile_n keys for dK and dV). The blocks of a dense batch
follow one another. Blocks of packed sequences are numbered like their tiles (``common.tiles``), so that no block holds
queries of two sequences: a head has batch * ceil(seqlen / tile_m) blocks, or total // tile_m + sequences. The order of
numbers within a block is up to the architecture that has them in registers.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash_attn_cute.kernels.arguments import PART_ALIGN, BackwardArguments
from flash_attn_cute.kernels.backward import MaskSizes, PassSizes

_SUMS = "mStats", "mdQaccum", "mdKVaccum", "mRanges", "mHeads"  # parts of a backward pass's workspace that are float32


def carved(mWorkspace: cute.Tensor, parts: dict[str, tuple[Int32 | int, ...]], dtype: Any) -> dict[str, cute.Tensor]:
    """Cuts a workspace into compact tensors, sized as ``arguments.workspace_bytes`` counts them.

    ``parts`` are their shapes, in the order in which they lie there; a first and a last size may be constants.
    ``dtype``, of 4 bytes, is that of all parts, or a function from a name to that part's.
    """
    tensors, place = {}, mWorkspace.iterator.toint()
    for name, shape in parts.items():
        row = shape[-1] if isinstance(shape[-1], int) else 1  # all strides but the last are multiples of it
        strides: list[Int64 | int] = [1]
        for size in shape[:0:-1]:
            static = isinstance(size, int) and isinstance(strides[0], int)
            strides.insert(0, size * strides[0] if static else cute.assume(Int64(size) * strides[0], divby=row))
        of_part = dtype if isinstance(dtype, type) else dtype(name)
        pointer = cute.make_ptr(of_part, place, cute.AddressSpace.gmem, assumed_align=PART_ALIGN)
        tensors[name] = cute.make_tensor(pointer, cute.make_layout(shape, stride=tuple(strides)))
        num_bytes = Int64(shape[0]) * strides[0] * 4
        place += (num_bytes + PART_ALIGN - 1) // PART_ALIGN * PART_ALIGN
    return tensors


class Workspace(NamedTuple):
    """Parts of a pass's workspace (``BackwardConfig.parts``); None for parts that the pass does without."""

    # (2 or 3, heads, blocks, tile_m): lse in base 2, or with a bias natural, delta, and units (``common.fixed_point``)
    mStats: cute.Tensor
    mdQaccum: cute.Tensor | None  # (heads, blocks, tile_m * tile_d)
    mdKVaccum: cute.Tensor | None  # (dK and dV, heads_k, tiles, tile_n * tile_d), if grouped; no memory if unused
    # What a mask says, if there is one (``common.block_lists``): rows are of blocks of queries, lists of tiles of keys.
    # Of a block mask those that are not in the workspace.
    mCodes: cute.Tensor | None  # (row, block of keys)
    mBits: cute.Tensor | None  # (tile, warpgroup, thread, word)
    mOrder: cute.Tensor | None  # (row, block of keys): how many tiles add to the row's dQ before that block's does
    mAdding: cute.Tensor | None  # (row,): how many tiles add
    mLists: cute.Tensor | None  # (list, first entry and how many)
    mEntries: cute.Tensor | None  # (entry, block of queries, its code, and the tile's turn to add to its dQ)
    # (parts, heads, blocks): additions to mdQaccum, which starts at 0 if they are unordered; None if unused
    mSemaphoresQ: cute.Tensor | None
    mRanges: cute.Tensor | None  # (number, heads_k, tiles of keys): magnitudes (``common.fixed_point``)
    mHeads: cute.Tensor | None  # (number, heads_k, tiles of keys): of a head, where its first tile is
    mSemaphoresK: cute.Tensor | None  # (parts, heads_k, tiles of a head): of mdKVaccum, 0 as yet
    # Cells of dS (``common.ds_cells``), in the place of mdQaccum
    mCells: cute.Tensor | None  # (heads, blocks): the first cell of a block of queries
    mRowCells: cute.Tensor | None  # (row,): cells of the rows before, of the same head
    mHeadCells: cute.Tensor | None  # (head of a batch entry,): its first cell
    mTileHeadsCells: cute.Tensor | None  # (heads of a tile,): cells of all heads before
    mChunks: cute.Tensor | None  # (chunk,): the first heads of a tile in it; of a launch, from its chunk on
    mCellKeys: cute.Tensor | None  # (cell,): block of keys
    mdS: cute.Tensor | None  # (cell, CELL_NUMBERS): as it lies in shared memory

    def dQ_sums(self, head: Int32, block: Int32) -> cute.Tensor:
        """Sums of a block of dQ; a head may have more than 2^31 numbers, so a block's place takes 64 bits."""
        return self.mdQaccum[head, Int64(block), None]

    @staticmethod
    def of(config: Any, a: BackwardArguments, mask: MaskSizes | None) -> "Workspace":
        """Workspace of a pass; ``mask`` are sizes of a mask's tables."""
        sizes = PassSizes(a.numbers, a.mQ.shape[0], a.mQ.shape[-2], a.mK.shape[-2], mask)
        given = carved(a.mWorkspace, config.parts(sizes), lambda name: Float32 if name in _SUMS else Int32)
        return Workspace(**(dict.fromkeys(Workspace._fields) | given))


def packed_block(first_row: Int32, sequence: Int32, tile_m: int) -> Int32:
    """First block of a packed sequence."""
    return first_row // tile_m + sequence
