"""Cells of dS: where a main backward kernel leaves dS of each visible block, 64 x 64, and another one finds it.

A block of queries has as many cells as blocks of keys that it attends to, in the order of their turns
(``block_tables``). A cell holds dS as it lies in shared memory, and beside it the number of its block of keys. So the
kernel that sums dQ = dS K needs no lists: it takes the cells of its queries in their order. That makes the sum the same
in every run.

The workspace has room for some heads at a time. These are a **chunk**, for which both kernels are launched, one after
the other. The host knows a bound of the number of cells only. So a kernel ahead of them counts, and puts heads into
chunks: all cells of the pass are numbered, and a chunk has the sections (``tiles.Order``) whose first number divided by
``cells_a_chunk`` is its own. That is the workspace's size less the cells that a section may have. Chunks may be empty.
(That dQ has a pass of its own over dS is how FlashAttention's Triton kernels split the work, which recompute dS.)
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.assembly import sum_up_to_lane
from flash_attn_cute.kernels.common.block_lists import Sharing
from flash_attn_cute.kernels.common.key_tiles import heads_a_tile
from flash_attn_cute.kernels.common.workspace import Workspace

_WARPS = 32


class TileHeads(NamedTuple):
    """Query heads whose tiles of keys are the same: one, or some of a group."""

    head: Int32  # the first one
    head_k: Int32
    batch: Int32

    @staticmethod
    def of(config: Any, a: BackwardArguments, index: Int32) -> "TileHeads":
        """The heads of an index, in the order in which ``key_tiles`` takes them."""
        batch, heads_k, together = a.mK.shape[0], a.mK.shape[2], heads_a_tile(config, a)
        parts = a.mQ.shape[2] // heads_k // together  # of a group
        head_k, copy = index % heads_k, index // heads_k
        return TileHeads((head_k * parts + copy // batch) * together, head_k, copy % batch)


def first_cell(a: BackwardArguments, ws: Workspace, batch: Int32, head: Int32, m_block: Int32) -> Int32:
    """First cell of a block of queries, which the preprocessing kernel puts into ``mCells``."""
    row = Sharing.of(a.numbers).number(batch, head, m_block)
    return ws.mHeadCells[batch * a.mQ.shape[2] + head] + ws.mRowCells[row]


def of_chunk(ws: Workspace, chunk: Int32) -> Workspace:
    """The workspace as the kernels of a chunk see it: its ``mChunks`` begins with that chunk."""
    return ws._replace(mChunks=cute.domain_offset((chunk,), ws.mChunks))


class Cells:
    """The kernel that numbers cells and puts heads into chunks. One CTA."""

    def __init__(self, config: Any):
        self.config = config

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:
        self.kernel(a, ws).launch(grid=[1, 1, 1], block=[32 * _WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: BackwardArguments, ws: Workspace) -> None:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        sharing = Sharing.of(a.numbers)
        for which in cutlass.range(warp, sharing.sets, _WARPS, unroll=1):
            first = which * sharing.tiles
            rows = cute.domain_offset((first,), ws.mAdding), cute.domain_offset((first,), ws.mRowCells)
            self._number(*rows, sharing.tiles)
        cute.arch.sync_threads()
        num = ws.mTileHeadsCells.shape[0]
        for i in cutlass.range(thread, num, 32 * _WARPS, unroll=1):
            cells, heads = Int32(0), TileHeads.of(self.config, a, i)
            for nth in cutlass.range(heads_a_tile(self.config, a), unroll=1):
                cells += self._cells_of_head(a, ws, heads, nth)
            ws.mTileHeadsCells[i] = cells
        cute.arch.sync_threads()
        if warp == 0:
            self._number(ws.mTileHeadsCells, ws.mTileHeadsCells, num)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, num, 32 * _WARPS, unroll=1):
            self._place(a, ws, i, num)

    @cute.jit
    def _number(self, counts: cute.Tensor, before: cute.Tensor, num: Int32) -> None:
        """Sums of the counts before each one, by a converged warp; ``before`` may be the counts' own place."""
        lane, total = cute.arch.lane_idx(), Int32(0)
        for start in cutlass.range(0, num, 32, unroll=1):
            count = Int32(0)
            if start + lane < num:
                count = counts[start + lane]
            through = sum_up_to_lane(count)
            if start + lane < num:
                before[start + lane] = total + through - count
            total += cute.arch.shuffle_sync(through, 31)

    def _cells_of_head(self, a: BackwardArguments, ws: Workspace, heads: TileHeads, nth: Int32) -> Int32:
        """Number of cells of the nth of some heads: of all its rows, the last of which ends there."""
        sharing = Sharing.of(a.numbers)
        last = sharing.number(heads.batch, heads.head + nth, sharing.tiles - 1)
        return ws.mRowCells[last] + ws.mAdding[last]

    @cute.jit
    def _place(self, a: BackwardArguments, ws: Workspace, i: Int32, num: Int32) -> None:
        """First cells of the i-th heads in their chunk; and where chunks begin, if a section begins with them."""
        section, a_chunk = a.numbers.heads_in_cache, a.numbers.cells_a_chunk
        first = i // section * section
        chunk = self._chunk(a, ws, first)
        cell, heads = ws.mTileHeadsCells[i] - chunk * a_chunk, TileHeads.of(self.config, a, i)
        for nth in cutlass.range(heads_a_tile(self.config, a), unroll=1):
            ws.mHeadCells[heads.batch * a.mQ.shape[2] + heads.head + nth] = cell
            cell += self._cells_of_head(a, ws, heads, nth)
        if i == first:
            before = Int32(-1)
            if i > 0:
                before = self._chunk(a, ws, i - section)
            for c in cutlass.range(before + 1, chunk + 1, unroll=1):
                ws.mChunks[c] = i
            if i + section >= num:
                for c in cutlass.range(chunk + 1, ws.mChunks.shape[0], unroll=1):
                    ws.mChunks[c] = num

    def _chunk(self, a: BackwardArguments, ws: Workspace, first: Int32) -> Int32:
        """Chunk of a section; those behind the last cell are in the last one."""
        return cutlass.min(ws.mTileHeadsCells[first] // a.numbers.cells_a_chunk, a.numbers.num_chunks - 1)
