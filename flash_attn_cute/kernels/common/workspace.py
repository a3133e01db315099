"""The float32 workspace in which dQ is summed, and the numbers that the backward pass keeps of every query.

Both are in blocks of tile_m queries. The blocks of a dense batch follow one another; those of packed sequences are
numbered as their tiles are (``schedule.packed_tile``), so that no block holds queries of two sequences: batch *
ceil(seqlen / tile_m) of them a head, or total // tile_m + sequences + 2. A block of dQ
is in parts, of as many columns each, one for every warpgroup that multiplies. Within a part numbers lie as the
warpgroup's accumulator holds them, four a thread in turn: what is added together is contiguous, and shared memory is
written without conflicts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

_COLUMNS = 256  # of the workspace, as TMA sees it


def packed_block(first_row: Int32, sequence: Int32, tile_m: int) -> Int32:
    """The first block of a packed sequence."""
    return first_row // tile_m + sequence + 1


def adder(mdQaccum: cute.Tensor, parts: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    """A TMA atom that adds parts of blocks to the workspace (heads, blocks, numbers), its tensor of coordinates."""
    heads, blocks, numbers = mdQaccum.shape
    rows = cute.make_layout((heads * blocks * (numbers // _COLUMNS), _COLUMNS), stride=(_COLUMNS, 1))
    tile = (numbers // parts // _COLUMNS, _COLUMNS)
    layout = cute.make_layout(tile, stride=(_COLUMNS, 1))
    info = cpasync.make_tiled_tma_atom(
        cpasync.CopyReduceBulkTensorTileS2GOp(), cute.make_tensor(mdQaccum.iterator, rows), layout, tile
    )
    return info.atom, info.tma_tensor


def add(atom: cute.CopyAtom, tensor: cute.Tensor, sPart: cute.Tensor, part: Int32) -> None:
    """Adds a part from shared memory, by one converged warp."""
    tile = (cute.size(sPart) // _COLUMNS, _COLUMNS)
    shared = cute.make_tensor(sPart.iterator, cute.make_layout(tile, stride=(_COLUMNS, 1)))
    target = cute.local_tile(tensor, tile, (part, 0))
    shared, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(target, 0, 2)
    )
    cute.copy(atom, shared, target)


@cute.jit
def write_part(acc: cute.Tensor, sPart: cute.Tensor, thread: Int32) -> None:
    """A warpgroup's accumulator into shared memory."""
    quads = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
    target = cute.make_tensor(sPart.iterator, cute.make_layout((4, 128, cute.size(acc) // 4), stride=(1, 4, 512)))
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        cute.autovec_copy(quads[None, i], target[None, thread, i])


@cute.jit
def read_rows(part: cute.Tensor, row: Int32, group: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """Eight columns from 8 * group on of rows ``row`` and ``row`` + 8 of a part; bit 3 of row is 0.

    The four threads that hold them have them side by side: 16 numbers, a pair of the one row and a pair of the other
    in turn.
    """
    warp, within = row // 16, row % 16
    source = cute.make_tensor(part.iterator, cute.make_layout((16, 32, cute.size(part) // 512), stride=(1, 16, 512)))
    numbers = cute.make_rmem_tensor(16, Float32)
    cute.autovec_copy(source[None, warp * 8 + within, group], numbers)
    pairs = cute.make_tensor(numbers.iterator, cute.make_layout((2, 4, 2), stride=(1, 4, 2)))
    return pairs[None, None, 0], pairs[None, None, 1]
