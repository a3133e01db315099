"""Which tile is which, and which one a CTA takes next.

CTAs start, and take tiles, in the order of the index, and the longest should start first. Under a causal mask a
sequence's last queries see the most keys, so tiles of queries are numbered from the back (``last_first``); its first
keys are seen by the most queries, so those of keys are not, unless their additions are to have an order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr


@dataclass(frozen=True)
class WorkTile:
    """Rows ``first_row .. first_row + tile_m`` of a sequence and head; ``batch`` is -1 for rows of none.

    ``block`` numbers the tiles of a head, over all sequences; the first and the last of packed ones, which are of none,
    are -1 and one too many. ``in_last``: whether its section is one that is numbered the other way round.
    """

    first_row: Int32
    head: Int32
    batch: Int32
    block: Int32
    in_last: Boolean | None = None


def num_dense_tiles(seqlen: Int32, heads: Int32, batch: Int32, tile_m: int) -> Int32:
    """Tiles of a dense batch."""
    return cute.ceil_div(seqlen, tile_m) * heads * batch


@cute.jit
def dense_tile(
    index: Int32,
    seqlen: Int32,
    heads: Int32,
    batch: Int32,
    heads_in_cache: Int32,
    tile_m: cutlass.Constexpr,
    last_first: cutlass.Constexpr = True,
    sections: Int32 | None = None,
    turns_last: cutlass.Constexpr = False,
) -> WorkTile:
    """Tile of a dense batch: ``heads_in_cache`` heads together, so that what they share stays in the L2 cache.

    All that are left after so many ``sections`` are together, if that is given; with ``turns_last`` their tiles are
    numbered the other way round.
    """
    num_m = cute.ceil_div(seqlen, tile_m)
    m_block, pair = _in_sections(index, num_m, heads * batch, heads_in_cache, sections)
    in_last = Boolean(False)
    if const_expr(turns_last):
        in_last = pair >= sections * heads_in_cache
    if const_expr(last_first):  # noqa: SIM102 (as elsewhere)
        if not in_last:
            m_block = num_m - 1 - m_block
    return WorkTile(m_block * tile_m, pair % heads, pair // heads, pair // heads * num_m + m_block, in_last)


@cute.jit
def _in_sections(
    index: Int32, num_tiles: Int32, heads: Int32, heads_in_cache: Int32, sections: Int32 | None
) -> tuple[Int32, Int32]:
    """Which of a head's tiles, and which head: all tiles of some heads, then all of the next ones."""
    section = index // (heads_in_cache * num_tiles)
    heads_here = cutlass.min(heads_in_cache, heads - section * heads_in_cache)
    if const_expr(sections is not None):  # noqa: SIM102 (as elsewhere)
        if section >= sections:
            section = sections
            heads_here = heads - section * heads_in_cache
    within = index - section * heads_in_cache * num_tiles
    return within // heads_here, section * heads_in_cache + within % heads_here


def num_packed_tiles(total: Int32, heads: Int32, batch: Int32, tile_m: int) -> Int32:
    """Tiles of packed sequences: see ``packed_tile``."""
    return (total // tile_m + batch + 2) * heads


def num_row_blocks(heads: Int32, blocks: Int32, packed: bool) -> Int32:
    """Tiles of rows (``row_block``), given how many blocks of a workspace a head has: of packed ones two have none."""
    return (blocks + 2 if packed else blocks) * heads


@cute.jit
def packed_tile(
    index: Int32,
    total: Int32,
    heads: Int32,
    cu_seqlens: cute.Tensor,
    tile_m: cutlass.Constexpr,
    last_first: cutlass.Constexpr = True,
    heads_in_cache: Int32 | None = None,
    sections: Int32 | None = None,
) -> tuple[WorkTile, Int32, Int32]:
    """Tile of packed sequences, the first row and the number of rows that its sequence owns.

    The rows before the first and behind the last sequence count as sequences of their own that are all padding, so
    that every row belongs to one. Sequence p, from row s(p) on, gets the tiles from s(p) // tile_m + p on: never fewer
    than it needs, and found by a search over the offsets alone, without a prefix sum over tile counts. The warp
    searches 32 candidates at a time. At most one tile a sequence is left with nothing to do.

    All heads of a tile come before the next tile, or as in ``dense_tile``, if ``heads_in_cache`` is given.
    """
    num_sequences = cu_seqlens.shape[0] + 1
    num_positions = total // tile_m + num_sequences
    position, head = index // heads, index % heads
    if const_expr(heads_in_cache is not None):
        position, head = _in_sections(index, num_positions, heads, heads_in_cache, sections)
    if const_expr(last_first):
        position = num_positions - 1 - position
    low, size = Int32(0), num_sequences
    while size > 1:
        step = cute.ceil_div(size, 32)
        candidate = low + cute.arch.lane_idx() * step
        inside = candidate < low + size
        row = Int32(0)
        if inside and candidate > 0:
            row = cu_seqlens[candidate - 1]
        passed = inside and row // tile_m + candidate <= position
        last = cute.arch.popc(cute.arch.vote_ballot_sync(passed)) - 1
        size = cutlass.min(step, size - last * step)
        low += last * step
    start, stop = Int32(0), total  # offsets end where the tensor does
    if low > 0:
        start = cutlass.min(cu_seqlens[low - 1], total)
    if low < num_sequences - 1:
        stop = cutlass.min(cu_seqlens[low], total)
    batch = low - 1 if low < num_sequences - 1 else Int32(-1)
    first = (position - start // tile_m - low) * tile_m
    return WorkTile(first, head, batch, position - 1), start, stop - start


@cute.jit
def take_tile(counter: cute.Tensor, num_questions: Int32, given: Int32 | int = 0) -> Int32:
    """The first tile that nobody has taken yet, asked for by one converged warp, that many times in all.

    ``counter`` is 0 when the kernel starts, and again when it has ended. The first ``given`` tiles have owners that do
    not ask for them.
    """
    index = num_questions
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(counter.iterator, Int32(1))
        index = taken + given
        if taken == num_questions - 1:
            counter[0] = Int32(0)
    return cute.arch.shuffle_sync(index, 0)


@cute.jit
def row_block(
    index: Int32,
    mX: cute.Tensor,
    packed: cutlass.Constexpr,
    cu_seqlens: cute.Tensor | None,
    seqused: cute.Tensor | None,
    tile_m: cutlass.Constexpr,
    heads_in_cache: Int32 | None = None,
    last_first: cutlass.Constexpr = True,
) -> tuple[WorkTile, Int32, Int32, Int32]:
    """Tile ``index`` of the rows of mX: it, and its sequence's first row, real rows and rows that it owns.

    All heads of a tile come before the next tile, or of so many heads, if ``heads_in_cache`` is given.
    """
    if const_expr(packed):
        work, start, slot = packed_tile(
            index, mX.shape[0], mX.shape[-2], cu_seqlens, tile_m, last_first, heads_in_cache
        )
        length = Int32(0)
        if work.batch >= 0:
            length = cutlass.min(seqused[work.batch], slot) if const_expr(seqused is not None) else slot
    else:
        count, slot, heads, _ = mX.shape
        together = heads * count if const_expr(heads_in_cache is None) else heads_in_cache
        work = dense_tile(index, slot, heads, count, together, tile_m, last_first)
        start, length = Int32(0), slot
    return work, start, length, slot
