"""Tile scheduler: which tile has which index, and which tile a CTA takes next.

A tile is ``tile_m`` rows of one sequence and head. CTAs take tiles in the order of the index, and the longest tiles
should start first. Under a causal mask the last queries of a sequence attend to the most keys, so tiles of queries are
numbered from the back (``Order.last_first``). Its first keys are attended to by the most queries, so tiles of keys are
numbered from the front, unless their additions to dQ are ordered.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from flash_attn_cute.kernels.common.lengths import SeqRows, offset, real_rows


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

    def listed(self, packed: bool, tile_rows: int) -> Int32:
        """The tile's number among tiles with lists: over all sequences if packed, else within a batch entry."""
        return self.block if packed else self.first_row // tile_rows


@dataclass(frozen=True)
class Order:
    """How tiles are numbered.

    The tiles of ``heads_in_cache`` heads (None: of all) come together, as a section, so that what they share stays in
    the L2 cache. With ``sections``, all heads behind that many sections form one last section; with ``reverses_last``
    its tiles are numbered in the opposite direction (dense batches only).
    """

    heads_in_cache: Int32 | None = None
    last_first: Constexpr = True
    sections: Int32 | None = None
    reverses_last: Constexpr = False


def num_tiles(mX: cute.Tensor, heads: Int32, mCuSeqlens: cute.Tensor | None, tile_m: int) -> Int32:
    """Number of tiles of the rows of mX, a dense or packed user's tensor, for ``heads`` heads."""
    if const_expr(mCuSeqlens is None):
        batch, rows = mX.shape[0], mX.shape[1]
        return cute.ceil_div(rows, tile_m) * heads * batch
    return (mX.shape[0] // tile_m + mCuSeqlens.shape[0] - 1 + 2) * heads


def num_row_tiles(heads: Int32, blocks: Int32, packed: bool) -> Int32:
    """Number of tiles, from a workspace's blocks a head; two tiles of packed sequences have no block."""
    return (blocks + 2 if packed else blocks) * heads


@cute.jit
def row_tile(
    index: Int32,
    mX: cute.Tensor,
    heads: Int32,
    mCuSeqlens: cute.Tensor | None,
    mSeqUsed: cute.Tensor | None,
    tile_m: Constexpr,
    order: Order,
    copies: Int32 | int = 1,
) -> tuple[WorkTile, SeqRows]:
    """The tile of an index among the rows of mX, and the rows of its sequence.

    A dense batch counts as ``copies`` times its number of entries.
    """
    if const_expr(mCuSeqlens is None):
        batch, slot = mX.shape[0], mX.shape[1]
        num_m = cute.ceil_div(slot, tile_m)
        m_block, pair = _in_sections(index, num_m, heads * (batch * copies), order)
        in_last = Boolean(False)
        if const_expr(order.reverses_last):
            in_last = pair >= order.sections * order.heads_in_cache
        if const_expr(order.last_first):
            if not in_last:
                m_block = num_m - 1 - m_block
        work = WorkTile(m_block * tile_m, pair % heads, pair // heads, pair // heads * num_m + m_block, in_last)
        return work, SeqRows(Int32(0), slot, slot)
    else:
        work, start, slot = _packed_tile(index, mX.shape[0], heads, mCuSeqlens, tile_m, order)
        length = Int32(0)
        if work.batch >= 0:
            length = real_rows(mSeqUsed, work.batch, slot)
        return work, SeqRows(start, length, slot)


@cute.jit
def _in_sections(index: Int32, tiles_a_head: Int32, heads: Int32, order: Order) -> tuple[Int32, Int32]:
    """Tile within a head, and head: all tiles of a section of heads, then all tiles of the next section."""
    if const_expr(order.heads_in_cache is None):
        return index // heads, index % heads
    else:
        section = index // (order.heads_in_cache * tiles_a_head)
        heads_here = cutlass.min(order.heads_in_cache, heads - section * order.heads_in_cache)
        if const_expr(order.sections is not None):
            if section >= order.sections:
                section = order.sections
                heads_here = heads - section * order.heads_in_cache
        within = index - section * order.heads_in_cache * tiles_a_head
        return within // heads_here, section * order.heads_in_cache + within % heads_here


@cute.jit
def _packed_tile(
    index: Int32, total: Int32, heads: Int32, mCuSeqlens: cute.Tensor, tile_m: Constexpr, order: Order
) -> tuple[WorkTile, Int32, Int32]:
    """Tile of packed sequences, the first row and the number of rows that its sequence owns.

    The rows before the first and behind the last sequence count as sequences of their own that are all padding, so
    that every row belongs to one. Sequence p, from row s(p) on, gets the tiles from s(p) // tile_m + p on: never fewer
    than it needs, and found by a search over the offsets alone, without a prefix sum over tile counts. The warp
    searches 32 candidates at a time. At most one tile a sequence is left with nothing to do.
    """
    num_sequences = mCuSeqlens.shape[0] + 1
    num_positions = total // tile_m + num_sequences
    position, head = _in_sections(index, num_positions, heads, order)
    if const_expr(order.last_first):
        position = num_positions - 1 - position
    low, size = Int32(0), num_sequences
    while size > 1:
        step = cute.ceil_div(size, 32)
        candidate = low + cute.arch.lane_idx() * step
        inside = candidate < low + size
        row = Int32(0)
        if inside and candidate > 0:
            row = offset(mCuSeqlens, candidate - 1, total)
        passed = inside and row // tile_m + candidate <= position
        last = cute.arch.popc(cute.arch.vote_ballot_sync(passed)) - 1
        size = cutlass.min(step, size - last * step)
        low += last * step
    start, stop = Int32(0), total
    if low > 0:
        start = offset(mCuSeqlens, low - 1, total)
    if low < num_sequences - 1:
        stop = offset(mCuSeqlens, low, total)
    batch = low - 1 if low < num_sequences - 1 else Int32(-1)
    first = (position - start // tile_m - low) * tile_m
    return WorkTile(first, head, batch, position - 1), start, stop - start


@cute.jit
def take_tile(counter: cute.Tensor, num_questions: Int32, given: Int32 | int = 0) -> Int32:
    """Takes the next tile that no CTA has taken, by one converged warp.

    ``counter`` is 0 when the kernel starts, and again when it ends, after ``num_questions`` calls in all. The first
    ``given`` tiles belong to CTAs that do not ask for them.
    """
    return tile_taken(counter, ask_for_tile(counter), num_questions, given)


@cute.jit
def ask_for_tile(counter: cute.Tensor) -> Int32:
    """First half of ``take_tile``: requests a tile. The answer takes long; ``tile_taken`` waits for it."""
    asked_before = Int32(0)
    if cute.arch.lane_idx() == 0:
        asked_before = cute.arch.atomic_add(counter.iterator, Int32(1))
    return asked_before


@cute.jit
def tile_taken(counter: cute.Tensor, asked_before: Int32, num_questions: Int32, given: Int32 | int = 0) -> Int32:
    """Second half of ``take_tile``: the tile that was taken."""
    if cute.arch.lane_idx() == 0:
        if asked_before == num_questions - 1:
            counter[0] = Int32(0)
    return cute.arch.shuffle_sync(asked_before + given, 0)
