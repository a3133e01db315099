"""Scores of a step in a compute warpgroup: P from S, and dS from P and dP.

A thread has a key, and its scores of half of a step's queries. They are changed where they are in tensor memory, and
read from there some at a time.

A bias comes from global memory into the registers of compute threads. A thread reads its key's elements of half of a
step's queries ahead of the wait for their scores. They are added to the scores in tensor memory before some are hidden.
Behind a softcap a bias is read and added when P is computed. Where every score has a bias of its own, dS is its
gradient, and is stored from registers; else ``bias_gradient`` follows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.assembly import fma, opaque, pack, unpack
from flash_attn_cute.kernels.common.blocks import Edges
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.key_tiles import KeyTile
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.score import ScoreScales, capped_slope, hidden
from flash_attn_cute.kernels.common.score_tensors import part_of
from flash_attn_cute.kernels.common.tma import BackwardTiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.cta_shared import Shared
from flash_attn_cute.kernels.sm100.config import COMPUTE_WARPGROUPS, PART_ROWS
from flash_attn_cute.kernels.sm100.mma import write_row
from flash_attn_cute.kernels.sm100.scores import (
    BiasColumn,
    add_in_memory,
    cap_in_memory,
    hide_by_bits_in_memory,
    hide_in_memory,
    hides_some,
    within_interval,
    words_of,
)

COLUMNS = 32  # of tensor memory that a compute thread reads at once
_DS_COLUMNS = 64  # of dS, that lie in one row of shared memory


@dataclass(frozen=True)
class Block:
    """Position of a step: a tile, and the i-th block of queries of its nth head.

    The tile is reloaded where it is needed, to keep it out of registers. The entry is kept in registers. It is opaque,
    or the compiler also keeps all that follows from it.
    """

    tile_idx: Int32
    nth: Int32
    i: Int32
    entry: tuple[Int32, ...] | None  # under a mask: the block of queries, its code and, with a bias, the head

    def m_block(self, tile: KeyTile) -> Int32:
        return tile.blocks.nth(self.i) if self.entry is None else opaque(self.entry[0])

    def head(self, tile: KeyTile) -> Int32:
        return tile.head + self.nth if self.entry is None else opaque(self.entry[2])


@dataclass(frozen=True)
class Scores:
    """Scores of a thread of a compute warpgroup."""

    config: BackwardConfig
    a: BackwardArguments
    ws: Workspace
    tma: BackwardTiles
    shared: Shared
    scales: ScoreScales
    warpgroup: Int32
    thread: Int32  # of the warpgroup: its key
    address: Int32  # of this thread's row in tensor memory

    @property
    def dtype(self) -> type:
        """Type of the operands."""
        return DTYPES[self.config.dtype]

    def tile(self, tile_idx: Int32) -> KeyTile:
        """The tile of a number, loaded from shared memory again, to keep it out of registers."""
        return self.shared.reload_tile(self.config, self.a, tile_idx)

    def place(self, first: Int32 | int) -> Int32:
        """Address of the warpgroup's own columns of S or dP, which begins at a column of tensor memory."""
        return self.address + (first + self.config.queries * self.warpgroup)

    def _key(self, tile: KeyTile) -> Int32:
        """Position of the thread's key in its sequence."""
        return tile.first_key_of(self.shared.rank, PART_ROWS) + self.thread

    def _first_query(self, m_block: Int32) -> Int32:
        """Position of the warpgroup's first query of a block."""
        return m_block * self.config.tile_m + self.config.queries * self.warpgroup

    def block(self, tile_idx: Int32, nth: Int32, i: Int32, step: Int32) -> Block:
        """Block of a step. Under a mask this reads the producer's entry, so a role calls it once a step."""
        return Block(tile_idx, nth, i, self.shared.entries.read(step) if self.config.features.listed else None)

    def compute_P(
        self, block: Block, step: Int32, number: Int32, first: Int32 | int, *, stores: bool = True
    ) -> list[Int32]:
        """Computes P of a step from S, which has a number in its ring and a first column.

        Returns P in pairs, times the derivative of a softcap; ``stores``: the mma warp is to have them, too. Else
        ``compute_dS`` gives back lse, with the delta that came with it.
        """
        c, f, shared, rings = self.config, self.config.features, self.shared, self.shared.rings
        listed = self._listed(block) if f.listed else None  # while scores are computed
        bias = later = None
        if f.bias and f.softcap:
            later = partial(self._read_bias, block, num=COLUMNS)  # not all at once: registers are short
        elif f.bias:
            bias = self._read_bias(block, 0, c.queries)
        rings.q.wait_full(step)  # from the producer: lse
        rings.scores.wait_full(number)  # from the tensor cores
        tensor_memory.after_sync()
        place = self.place(first)
        self.change(block, place, listed, bias)
        P = self.write_P(place, shared.lse[None, rings.q.stage(step)], stores, later)
        tensor_memory.before_sync()
        rings.scores.release(number)  # to the mma warp: P is there, or S was read
        if stores:  # to the producer: lse is read; in one pass dS's fence ends the reads, ahead of dK and its commit
            (rings.q.release if c.num_passes == 1 else rings.q.release_read)(step)
        return P

    def compute_dS(
        self, P: list[Int32], block: Block, step: Int32, dq_step: Int32, ring: Ring, number: Int32, first: Int32 | int
    ) -> None:
        """Computes dS of a step from dP, which has a number in that ring and a first column.

        ``dq_step``: the step's number among those that have a dQ.
        """
        del dq_step  # pairs need it
        c, shared, rings = self.config, self.shared, self.shared.rings
        with_delta = rings.do if c.num_passes == 1 else rings.q
        if c.num_passes == 1:
            rings.do.wait_full(step)  # from the producer: delta
        ring.wait_full(number)  # from the tensor cores; the last step's dS is read no more
        tensor_memory.after_sync()
        gradients = self.write_dS(self.place(first), P, shared.delta[None, with_delta.stage(step)])
        cute.arch.fence_proxy("async.shared", space="cta")
        tensor_memory.before_sync()
        ring.release(number)  # to the mma warp: dS is there
        with_delta.release(step)  # to the producer: delta is read
        if c.features.dbias:
            self._store_dbias(gradients, block)

    def _read_bias(self, block: Block, first: int, num: int) -> Callable[[], list[Float32]]:
        """Begins to load the bias of some of the warpgroup's queries, ahead of its use, as loads take long.

        Returns a function that waits for the numbers and returns them.
        """
        column, first_query = self._column(self.a.mBias, block)
        return partial(column.numbers, column.read(first_query + first, num, self.config.features.uniform_bias))

    @cute.jit
    def _store_dbias(self, gradients: Constexpr, block: Block) -> None:
        """Stores dS of a step, rounded, as the gradient of the bias, where every score has a bias of its own."""
        tile = self.tile(block.tile_idx)
        if self._key(tile) < tile.k.length:
            column, first = self._column(self.a.mdBias, block)
            for n in cutlass.range_constexpr(len(gradients)):
                column.write(first + n * COLUMNS, gradients[n])

    def _column(self, mX: cute.Tensor, block: Block) -> tuple[BiasColumn, Int32]:
        """Column of the bias, or of its gradient, for this thread's key; and the warpgroup's first query of a step.

        A thread behind the last key has the column of the last key.
        """
        tile = self.tile(block.tile_idx)
        key = cutlass.min(self._key(tile), tile.k.length - 1)
        gX = part_of(self.a, mX, tile.q, tile.batch)[block.head(tile), None, None]
        column = BiasColumn.of(gX, key, tile.q.length)
        return column, self._first_query(block.m_block(tile))

    @cute.jit
    def _listed(self, block: Block) -> tuple[Boolean, list[Int32]]:
        """Whether scores of a step are to be hidden, and the bits of those of the thread's that are not."""
        c = self.config
        m_block, code = block.entry[:2]
        words, is_cut = words_of(self.ws.mBits, code, self.warpgroup, self.thread), code >= 0
        if const_expr(c.features.intervals):
            tile = self.tile(block.tile_idx)
            first_query = self._first_query(m_block)
            words = within_interval(words, self.a.mIntervals, tile.batch, tile.k.length, self._key(tile), first_query)
            is_cut = hides_some(words)
        return is_cut, words

    @cute.jit
    def change(
        self, block: Block, place: Int32, listed: tuple[Boolean, list[Int32]] | None = None, bias: Constexpr = None
    ) -> None:
        """Applies softcap, bias and masks to scores in tensor memory.

        Those that a mask hides, or an edge of the block, NaN of a bias included. Behind a softcap, whose derivative
        takes what tanh gave, the bias is added later.
        """
        c, f = self.config, self.config.features
        if const_expr(f.softcap):
            cap_in_memory(place, c.queries, self.scales.tanh)
        elif const_expr(f.bias):
            add_in_memory(place, self.scales.bias, bias())
        if const_expr(listed is not None):
            is_cut, words = listed
            if is_cut:
                hide_by_bits_in_memory(place, self.scales.log2, words)
        else:
            self._hide_by_edges(block, place)

    @cute.jit
    def _hide_by_edges(self, block: Block, place: Int32) -> None:
        """Hides scores that an edge of the window, or of the sequence, does if it crosses the block."""
        c, f = self.config, self.config.features
        tile = self.tile(block.tile_idx)
        m_block = block.m_block(tile)
        is_cut = tile.blocks.crosses_left(m_block)
        if const_expr(f.hides_last_queries):
            is_cut = is_cut or tile.blocks.crosses_right(m_block)
        if is_cut:
            key, first_query, edges = self._key(tile), self._first_query(m_block), Edges(left=f.right, right=f.left)
            rows, columns, scale = tile.k.length, tile.q.length, self.scales.log2
            hide_in_memory(place, c.queries, scale, key, first_query, columns, tile.window, edges, rows)

    def write_P(self, place: Int32, lse: cute.Tensor, stores: bool, later: Any = None) -> list[Int32]:
        """Computes P of all queries of the warpgroup, into the place of S if it ``stores``; returns P as ``compute_P``.

        ``later`` reads a bias that is still to be added to S, or is None.
        """
        found: list[Int32] = []
        for first in range(0, self.config.queries, COLUMNS):
            bias = None if later is None else later(first)
            scores = tensor_memory.load(place + first, COLUMNS)
            added = None if bias is None else bias()
            P, times_slope = self.P_of(scores, first, lse, added)
            if stores:
                tensor_memory.store(place + first // 2, P)
            found += times_slope
        return found

    def P_of(
        self, scores: list[Float32], first: int, lse: cute.Tensor, added: list[Float32] | None = None
    ) -> tuple[list[Int32], list[Int32]]:
        """Computes P of scores from a query on: in pairs, and in pairs times the derivative of a softcap.

        ``added``: a bias that is still to be added to the scores.
        """
        P, times_slope, scale = [], [], self.scales.log2
        nothing = hidden(scale)
        for j in range(0, len(scores), 2):
            if j % 4 == 0:
                four = self._four(lse, first + j)
            x, y = (scores[j], scores[j + 1]), (four[j % 4], four[j % 4 + 1])
            if self.config.features.bias:  # as ``probability``
                biased = x
                if added is not None:  # what is hidden stays so
                    sums = (fma(s, self.scales.bias, b) for s, b in zip(x, added[j : j + 2], strict=True))
                    biased = tuple(cutlass.select_(s != nothing, t, nothing) for s, t in zip(x, sums, strict=True))
                exponents = cute.arch.mul_packed_f32x2(cute.arch.sub_packed_f32x2(biased, y), (scale, scale))
                pair = [cute.math.exp2(e, fastmath=True) for e in exponents]
            else:
                # Negated: what is negated again is an operand of the next instruction.
                exponents = cute.arch.fma_packed_f32x2(x, (-scale, -scale), y)
                pair = [cute.math.exp2(-e, fastmath=True) for e in exponents]
            P.append(pack(*pair, self.dtype))
            if self.config.features.softcap:  # scores are infinite where P is 0
                pair = [cutlass.select_(w != 0.0, w * capped_slope(s), w) for w, s in zip(pair, x, strict=True)]
                times_slope.append(pack(*pair, self.dtype))
            else:
                times_slope.append(P[-1])
        return P, times_slope

    def place_of_dS(self) -> tuple[cute.Tensor, Int32 | int]:
        """Where a warpgroup's dS goes in shared memory: rows of 64 columns, and the first of its own among these."""
        c, sdS = self.config, self.shared.sdS
        if c.queries == _DS_COLUMNS:  # else both warpgroups' are in the same rows
            return cute.local_tile(sdS, (PART_ROWS, _DS_COLUMNS), (0, self.warpgroup)), 0
        return sdS, c.queries * self.warpgroup

    def write_dS(
        self, place: Int32, P: list[Int32], delta: cute.Tensor, await_room: Callable[[], None] | None = None
    ) -> list[cute.Tensor]:
        """Writes dS but for its scale, from dP: into the place of dP, and into shared memory.

        Returns dS, rounded, some queries after the other. ``await_room``, if given, waits for room in shared memory.
        """
        found = []
        sdS, column = self.place_of_dS()
        for first in range(0, self.config.queries, COLUMNS):
            gradients = tensor_memory.load(place + first, COLUMNS)
            rounded = cute.make_rmem_tensor(COLUMNS, self.dtype)
            packed = cute.recast_tensor(rounded, Int32)
            for j in range(0, COLUMNS, 2):
                if j % 4 == 0:
                    four = self._four(delta, first + j)
                pair = P[(first + j) // 2]
                w = unpack(pair, 0, self.dtype), unpack(pair, 1, self.dtype)
                x = cute.arch.sub_packed_f32x2((gradients[j], gradients[j + 1]), (four[j % 4], four[j % 4 + 1]))
                packed[j // 2] = pack(*cute.arch.mul_packed_f32x2(w, x), self.dtype)
            tensor_memory.store(place + first // 2, [packed[j] for j in range(COLUMNS // 2)])
            if await_room is not None:
                await_room()
            write_row(rounded, sdS, self.thread, column + first)
            found.append(rounded)
        return found

    def _four(self, stats: cute.Tensor, first: int) -> cute.Tensor:
        """Lse or delta of four of the warpgroup's queries."""
        four = cute.make_rmem_tensor(4, Float32)
        place = cute.size(stats) // (4 * COMPUTE_WARPGROUPS) * self.warpgroup + first // 4
        cute.autovec_copy(cute.local_tile(stats, (4,), (place,)), four)
        return four
