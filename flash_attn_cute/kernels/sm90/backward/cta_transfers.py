"""Warpgroup 0 of the backward kernel up to d = 128: from global memory, and back again (see ``cta_schedule``)."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import add_from_shared, add_integers_from_shared, opaque, store_from_shared
from flash_attn_cute.kernels.common.fixed_point import FLOAT32
from flash_attn_cute.kernels.common.key_lists import entry_of, list_of
from flash_attn_cute.kernels.common.key_tiles import (
    KeyTile,
    heads_a_tile,
    key_tile,
    num_key_tiles,
    rounds_a_tile,
    tiles_of_launch,
    zero_fully_masked_keys,
)
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.score_tensors import entry_and_row
from flash_attn_cute.kernels.common.tiles import Order, num_row_tiles, row_tile, take_tile
from flash_attn_cute.kernels.common.tma import BackwardTiles, RowTiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardCtaConfig
from flash_attn_cute.kernels.sm90.backward.cta_shared import UNORDERED, Shared, StepFields


class _Blocks(NamedTuple):
    """Blocks of dQ that a tile adds to, of its first head."""

    first: Int32  # counted over all heads
    num: Int32

    @staticmethod
    def of(tile: KeyTile, ws: Workspace) -> "_Blocks":
        """Blocks of the queries that see a tile."""
        return _Blocks(tile.head * ws.mStats.shape[2] + tile.first_block + tile.blocks.start, tile.blocks.num)


@dataclass(frozen=True)
class Transfers:
    """Roles of warpgroup 0: producer, the two warps that store and add results, and warp 3, which does the rest."""

    config: BackwardCtaConfig
    a: BackwardArguments
    ws: Workspace
    tma: BackwardTiles
    shared: Shared

    @cute.jit
    def producer(self) -> None:
        """Warp 0: chooses tiles, and loads all that they need in the order in which it is consumed."""
        c, a, ws, shared = self.config, self.a, self.ws, self.shared
        first_of_launch, num_tiles = tiles_of_launch(c, a, ws)
        num_questions = num_tiles + cute.arch.grid_dim()[0]  # every CTA asks until it gets none
        index = take_tile(a.mNextTile, num_questions)
        tile_idx, step = Int32(0), Int32(0)
        while index < num_tiles:
            tile = key_tile(c, a, ws, first_of_launch + index)
            if tile.blocks.num > 0:  # other tiles are left to warp 3
                shared.publish(tile, tile_idx)
                sK = shared.sK[None, None, None, shared.rings.k.stage(tile_idx)]
                self._load_keys(tile, self.tma.K, sK, shared.rings.k, tile_idx)
                first_step = step
                for nth in cutlass.range(heads_a_tile(c, a), unroll=1):
                    head, first, num_blocks = tile.head + nth, Int32(0), tile.blocks.num
                    in_turns = True
                    if const_expr(c.features.listed):
                        first, num_blocks = list_of(c, a, ws, tile.batch, head, tile.block)
                    if const_expr(c.fixed_point):
                        in_turns = ws.mStats[2, head, tile.first_block, 0] == FLOAT32
                    for i in cutlass.range(num_blocks, unroll=1):
                        if const_expr(c.features.listed):
                            m_block, code, turn = entry_of(c, ws, first + i)
                        else:
                            m_block, code = tile.blocks.nth(i), None
                            turn = tile.turn(c, m_block)
                        block = head * ws.mStats.shape[2] + tile.first_block + m_block
                        if const_expr(c.fixed_point):
                            # Tiles are launched the other way round: those of later turns have added before.
                            turn = ~turn if in_turns else Int32(UNORDERED)
                        info = StepFields(block, turn, m_block, nth, code)
                        self._load_queries(tile, head, info, step)
                        if step == first_step:
                            # Behind the first queries, for which there is room before there is for V.
                            self._load_keys(tile, self.tma.V, shared.sV, shared.rings.v, tile_idx)
                        step += 1
                tile_idx += 1
            # Not earlier: until the tile is begun, all CTAs with a later turn would wait.
            index = take_tile(a.mNextTile, num_questions)
        shared.publish_end(tile_idx)

    @cute.jit
    def load_bias(self) -> None:
        """Warp 3: the bias of every step."""
        c, a, shared, lane = self.config, self.a, self.shared, cute.arch.lane_idx()
        step, tile_idx = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            tile = shared.tile(c, a, tile_idx)
            num_blocks = tile.blocks.num
            num_keys = cutlass.min(tile.k.length - tile.first_key, c.tile_n)
            # Under a mask the blocks are those of all heads, and warp 0 publishes each.
            for head in cutlass.range(rounds_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    m_block, nth = tile.blocks.nth(i), head
                    if const_expr(c.features.listed):
                        shared.rings.steps.wait_full(step)  # from warp 0
                        m_block, nth, _ = shared.read_scores_step(step)
                    rows = tile.rows_of_bias(c, nth, m_block)
                    shared.bias.load(step, rows, tile.first_key, num_keys, lane)
                    step += 1
            shared.tiles.release(tile_idx)  # to warp 0
            tile_idx += 1

    @cute.jit
    def _load_keys(self, tile: KeyTile, t: RowTiles, sX: cute.Tensor, ring: Ring, tile_idx: Int32) -> None:
        """A tile's keys or values: K or V, 64 rows an mma warpgroup."""
        ring.acquire(tile_idx)  # from the mma warps: this stage is released
        for w in cutlass.range_constexpr(self.config.num_mma_warpgroups):
            t.load(t.at(*tile.keys_of(Int32(w), 64), tile.head_k, tile.batch), sX[None, None, w], ring.full(tile_idx))

    @cute.jit
    def _load_queries(self, tile: KeyTile, head: Int32, info: StepFields, step: Int32) -> None:
        """Loads Q, dO, lse and delta of a step's block of queries, and publishes the step's fields."""
        c, ws, tma, shared, m_block = self.config, self.ws, self.tma, self.shared, info.m_block
        block = tile.first_block + m_block
        start = m_block * c.tile_m
        stop = tile.q.start + cutlass.min(start + c.tile_m, tile.q.length)
        start += tile.q.start
        numbers = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        for i, (t, sX, ring) in enumerate(((tma.Q, shared.sQ, shared.rings.q), (tma.dO, shared.sdO, shared.rings.do))):
            full, stage = ring.full(step), ring.stage(step)
            ring.wait_empty(step)  # from the mma warps: this stage is released
            with cute.arch.elect_one():
                if const_expr(i == 0):
                    shared.publish_step(step, info)
                ring.announce(step)
                if const_expr(i == 0 and c.fixed_point):  # units of dQ
                    cute.copy(numbers, ws.mStats[2, head, block, None], shared.stats[None, 2, stage], mbar_ptr=full)
                cute.copy(numbers, ws.mStats[i, head, block, None], shared.stats[None, i, stage], mbar_ptr=full)
            t.load(t.at(start, stop, head, tile.batch), sX[None, None, stage], full)
        if const_expr(c.features.tiled_bias):
            ring, t = shared.rings.bias, tma.bias
            ring.acquire(step)  # from the mma warps: this stage is released
            # Rows behind the sequence are those of hidden scores.
            entry, first_row = entry_and_row(self.a, tile.q, tile.batch)
            start = first_row + m_block * c.tile_m
            gX = t.at(start, start + c.tile_m, head, entry, tile.first_key // c.tile_n)
            t.load(gX, shared.sBiasTile[None, None, ring.stage(step)], ring.full(step))

    @cute.jit
    def store_dS(self) -> None:
        """Warp 3: dS of every step, as the gradient of a bias with an element for every score."""
        c, a, shared, t, ds = self.config, self.a, self.shared, self.tma.dBias, self.shared.rings.ds
        step, tile_idx = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            tile = shared.tile(c, a, tile_idx)
            num_blocks = tile.blocks.num
            for head in cutlass.range(rounds_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    ds.arrive(step)  # to the mma warps: dS of the step before has been read
                    ds.wait_full(step)  # from the mma warps
                    m_block, nth = tile.blocks.nth(i), head
                    if const_expr(c.features.listed):
                        m_block, nth, _ = shared.read_scores_step(step)
                    start, of_head = m_block * c.tile_m, tile.head + nth
                    stop = start + c.tile_m
                    if const_expr(c.features.packed):
                        entry, first_row = entry_and_row(a, tile.q, tile.batch)
                        start, stop = first_row + start, first_row + cutlass.min(stop, tile.q.length)
                        of_head += entry * a.mQ.shape[-2]
                    for w in cutlass.range_constexpr(c.num_mma_warpgroups):
                        # Behind the last key and the last query, TMA stores nothing.
                        g = t.at(start, stop, of_head, tile.batch, tile.first_key // 64 + w)
                        t.store(shared.sdS[None, None, w, step & 1], g)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    step += 1
            shared.tiles.release(tile_idx)  # to warp 0
            tile_idx += 1

    @cute.jit
    def carry_out(self, w: Int32) -> None:
        """Warp 1 or 2: to global memory what warpgroup ``w`` puts out: dQ of every step, dV and dK of every tile.

        In float32 the warpgroup itself writes these two.
        """
        c, a, ws, shared, out = self.config, self.a, self.ws, self.shared, self.shared.out(w)
        step, tile_idx, come = (Int32(0) for _ in range(3))
        added = _Blocks(Int32(0), Int32(0))
        while shared.has_tile(tile_idx):
            num_blocks, first_step = shared.tile(c, a, tile_idx).blocks.num, step
            if const_expr(c.zeroes_sums):
                self._each_head(w, _Blocks.of(shared.tile(c, a, tile_idx), ws), semaphores.wait_for_zeros)
            for _ in cutlass.range(rounds_a_tile(c, a) * num_blocks, unroll=1):
                if step > first_step if const_expr(c.k_stages == 1) else step > 0:  # of the step before
                    come = self._add_dQ(w, c.piece_number(step, tile_idx), step - 1, come)
                    if const_expr(c.zeroes_sums and c.k_stages == 2):
                        if step == first_step:
                            self._signal(w, added)  # by the tile before
                step += 1
            last = c.piece_number(step, tile_idx)
            if const_expr(c.k_stages == 1):  # dQ of the last step is not for the next tile to compute
                come = self._add_dQ(w, last, step - 1, come)
                last += 1
            if const_expr(c.zeroes_sums):
                added = _Blocks.of(shared.reload_tile(c, a, tile_idx), ws)
            if const_expr(not c.features.wide):
                self._store_dKV(out, w, tile_idx, last)
            if const_expr(c.zeroes_sums and c.k_stages == 1):
                self._signal(w, added)
            shared.tiles.release(tile_idx)  # to warp 0
            tile_idx += 1
        if const_expr(c.k_stages == 2):
            if step > 0:
                self._add_dQ(w, c.piece_number(step, tile_idx), step - 1, come)
                if const_expr(c.zeroes_sums):
                    self._signal(w, added)

    @cute.jit
    def _store_dKV(self, out: Ring, w: Int32, tile_idx: Int32, piece: Int32) -> None:
        """Stores warpgroup w's dV and dK of a tile, of which ``piece`` is the first to come out of its ring."""
        c, tma, shared = self.config, self.tma, self.shared
        tile = shared.reload_tile(c, self.a, tile_idx)
        start = tile.first_key + 64 * w
        stop = cutlass.min(start + 64, tile.k.length)
        for i in cutlass.range_constexpr(2 * c.pieces_a_gradient):
            t, columns = (tma.dV, tma.dK)[i // c.pieces_a_gradient], i % c.pieces_a_gradient
            out.wait_full(piece + i)  # from warpgroup w
            if start < stop and tile.is_last:
                g = t.at(tile.k.start + start, tile.k.start + stop, tile.head_k, tile.batch, columns)
                t.store(shared.out_tile(w, piece + i), g)
                cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            out.release(piece + i)  # to warpgroup w

    @cute.jit
    def zero_sums(self) -> None:
        """Warp 3: zeroes the sums of dQ.

        Blocks are taken from a counter. So a single resident CTA zeroes all of them, and every wait for them ends.
        """
        c, a, ws = self.config, self.a, self.ws
        _, heads, blocks, _ = ws.mStats.shape
        num_blocks = num_row_tiles(heads, blocks, c.features.packed)
        lane = cute.arch.lane_idx()
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        # A head's all together, as tiles of them are taken.
        order = Order(heads_in_cache=Int32(1), last_first=False)
        index = self._take_block(num_blocks)
        while index < num_blocks:
            work, _ = row_tile(index, a.mQ, heads, a.mCuSeqlensQ, a.mSeqUsedQ, c.tile_m, order)
            if work.block >= 0 and work.block < blocks:
                sums = ws.dQ_sums(work.head, work.block)
                for i in cutlass.range(lane, sums.shape[0] // 4, 32, unroll=8):
                    cute.autovec_copy(zeros, cute.local_tile(sums, (4,), (i,)))
                cute.arch.sync_warp()
                if lane < c.num_mma_warpgroups:
                    semaphores.signal_zeroed(semaphores.at(ws.mSemaphoresQ, lane, work.head, work.block))
            index = self._take_block(num_blocks)

    def _take_block(self, num_blocks: Int32) -> Int32:
        """The next block to zero. Every CTA asks until it gets none."""
        # Opaque, or the compiler keeps the size of the grid in a register, where there are few.
        return take_tile(cute.domain_offset((2,), self.a.mNextTile), num_blocks + opaque(cute.arch.grid_dim()[0]))

    @cute.jit
    def _signal(self, w: Int32, added: _Blocks) -> None:
        """Signals at all blocks that a tile adds to, when its additions, issued by this warp, are complete."""
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.sync_warp()
        self._each_head(w, added, semaphores.signal_blocks)

    @cute.jit
    def _each_head(self, w: Int32, added: _Blocks, function: Constexpr) -> None:
        """Calls a function with the semaphores of part w of a tile's blocks, for each of its heads."""
        for nth in cutlass.range(heads_a_tile(self.config, self.a), unroll=1):
            function(semaphores.at(self.ws.mSemaphoresQ, w, nth, added.first), added.num)

    @cute.jit
    def _add_dQ(self, w: Int32, piece: Int32, step: Int32, come: Int32) -> Int32:
        """Warpgroup w's part of a step's dQ to the workspace.

        ``come`` is whether a look has found that the step's turn has come; returns the same for the next step.
        """
        ws, shared, out, size = self.ws, self.shared, self.shared.out(w), 64 * self.config.columns_dQ
        in_order, fixed_point = self.config.in_order, self.config.fixed_point
        if const_expr(not in_order):
            shared.rings.steps.wait_full(step)  # from warp 0
        elif come == 0:  # ahead of dQ, for which this warp has to wait anyway
            shared.rings.steps.wait_full(step)  # from warp 0
            block, turn = shared.read_step(step)
            semaphores.wait(semaphores.at(ws.mSemaphoresQ, w, 0, block), turn)
        out.wait_full(piece)  # from warpgroup w
        block, turn = shared.read_step(step)
        part = cute.domain_offset((0, Int64(block), size * w), ws.mdQaccum).iterator.toint()
        semaphore = semaphores.at(ws.mSemaphoresQ, w, 0, block)
        if const_expr(in_order):
            cute.arch.fence_proxy("async.global")  # what others have stored or added comes before what TMA adds
        elif const_expr(fixed_point):
            if turn != UNORDERED:
                semaphores.wait(semaphore, turn)
                cute.arch.fence_proxy("async.global")  # likewise
        else:
            turn = Int32(1)  # to add to zeros
        with cute.arch.elect_one():
            if const_expr(fixed_point):
                if turn == UNORDERED:
                    add_integers_from_shared(part, shared.sums + size * w, 4 * size)
                else:
                    add_from_shared(part, shared.sums + size * w, 4 * size)
            elif turn == 0:
                store_from_shared(part, shared.sums + size * w, 4 * size)
            else:
                add_from_shared(part, shared.sums + size * w, 4 * size)
        cute.arch.cp_async_bulk_commit_group()
        if const_expr(in_order):
            come = self._turn_has_come(w, step + 1)  # while TMA reads
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        out.release(piece)  # to warpgroup w
        if const_expr(not self.config.zeroes_sums):
            cute.arch.cp_async_bulk_wait_group(0)  # it has been stored or added
            if const_expr(self.config.signals_apart):
                added = shared.added(w)
                added.wait_empty(step)  # from warp 3
                with cute.arch.elect_one():
                    shared.added_blocks[w, added.stage(step)] = block
                    cute.arch.mbarrier_arrive(added.full(step))  # to warp 3
            else:
                with cute.arch.elect_one():
                    semaphores.signal(semaphore)
        return come

    @cute.jit
    def signal_added(self, mdK: cute.Tensor, mdV: cute.Tensor) -> None:
        """Warp 3: signals what the storing warps have added in order, and writes zeros to fully masked keys.

        Zeros of all tiles at once would keep the first signals back. So there is one tile's for each that is signalled.

        The proof in ``sparsity.dq_order.turns`` holds: where all lower tickets are signalled, the lowest one left is,
        too. Both storing warps have their turns then. This warp takes one step of each after the other. So the one that
        is behind finds room in its ring, and the other one is at most a ring's stages ahead when it waits. The
        warpgroup of the one behind needs of the other warpgroup's dS only that of steps which that one has put out. So
        both go on. Steps of a tile need no signal of a later tile, and a tile's fields are released before its first
        signal.

        The acquire of an mbarrier's phase, and the release of the signal behind it, order all that a storing warp has
        added ahead of what the next turn adds.
        """
        c, a, shared, step, tile_idx = self.config, self.a, self.shared, Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release(tile_idx)  # to warp 0
            for _ in cutlass.range(num_steps, unroll=1):
                for w in cutlass.range_constexpr(c.num_mma_warpgroups):
                    added = shared.added(w)
                    added.wait_full(step)  # from warp 1 or 2
                    with cute.arch.elect_one():
                        block = shared.added_blocks[w, added.stage(step)]
                        cute.arch.mbarrier_arrive(added.empty(step))  # to warp 1 or 2
                        semaphores.signal(semaphores.at(self.ws.mSemaphoresQ, w, 0, block))
                step += 1
            self._zero_keys(mdK, mdV, tile_idx, num_key_tiles(c, a))
            tile_idx += 1
        self._zero_keys(mdK, mdV, tile_idx, cute.arch.grid_dim()[0])

    @cute.jit
    def _zero_keys(self, mdK: cute.Tensor, mdV: cute.Tensor, nth: Int32, step: Int32) -> None:
        """Zeros of this CTA's share of fully masked keys: of its nth tile, and of every ``step``-th one behind it."""
        if const_expr(self.config.features.may_mask_keys):
            index, _, _ = cute.arch.block_idx()
            # Opaque, or the compiler keeps both in registers, where there are few.
            index += opaque(nth) * opaque(cute.arch.grid_dim()[0])
            zero_fully_masked_keys(self.config, self.a, self.ws, mdK, mdV, index, step)

    @cute.jit
    def _turn_has_come(self, w: Int32, step: Int32) -> Int32:
        """Whether it is a step's turn to add, as far as is known of it: 1 or 0, to the converged warp."""
        come = Int32(0)
        if cute.arch.lane_idx() == 0:
            if self.shared.rings.steps.is_full(step):
                block, turn = self.shared.read_step(step)
                come = Int32(semaphores.value(semaphores.at(self.ws.mSemaphoresQ, w, 0, block)) >= turn)
        come = cute.arch.shuffle_sync(come, 0)
        cute.arch.sync_warp()
        return come
