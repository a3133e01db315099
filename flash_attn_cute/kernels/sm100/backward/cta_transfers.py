"""Roles that load tiles for the backward kernel and carry dQ away (see ``cta``)."""

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import add_from_shared, store_from_shared
from flash_attn_cute.kernels.common.key_lists import entry_of, list_of
from flash_attn_cute.kernels.common.key_tiles import KeyTile, heads_a_tile, key_tile, num_key_tiles, rounds_a_tile
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.tiles import take_tile
from flash_attn_cute.kernels.common.tma import BackwardTiles, RowTiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.backward.backward_config import DQ_STAGES, BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_schedule import ADDING_WARPS
from flash_attn_cute.kernels.sm100.backward.cta_shared import Shared, piece_number
from flash_attn_cute.kernels.sm100.backward.sums import TRANSPOSED, by_fours, put
from flash_attn_cute.kernels.sm100.config import PART_ROWS


@dataclass(frozen=True)
class Operand:
    """Tiles of a tensor that TMA loads, their place in shared memory, and the ring that guards it."""

    tiles: RowTiles
    place: cute.Tensor
    ring: Ring
    step: Int32 | None = None  # that it is loaded for

    def at(self, step: Int32) -> "Operand":
        """The operand of a step, to be loaded to its stage."""
        place = self.place[None, None, self.ring.stage(step)] if cute.rank(self.place) > 2 else self.place
        return replace(self, place=place, step=step)

    def load(self, gX: cute.Tensor) -> None:
        """Loads a tile, by one converged warp."""
        self.tiles.load(gX, self.place, self.ring.full(self.step))


@dataclass(frozen=True)
class Transfers:
    """The roles that move what others multiply, and what they have summed of dQ."""

    config: BackwardConfig
    a: BackwardArguments
    ws: Workspace
    tma: BackwardTiles
    shared: Shared

    def operands(self, names: str) -> list[Operand]:
        """Operands by their names: ``dO`` has the tiles ``dO``, the place ``sdO`` and the ring ``do``."""
        tma, shared = self.tma, self.shared
        return [
            Operand(getattr(tma, x), getattr(shared, f"s{x}"), getattr(shared.rings, x.lower())) for x in names.split()
        ]

    @cute.jit
    def producer(self) -> None:
        """One warp: chooses tiles, and loads all that they need in the order in which it is consumed."""
        c, a, ws, shared, (K, V, Q, dO) = self.config, self.a, self.ws, self.shared, self.operands("K V Q dO")
        num_tiles = num_key_tiles(c, a)
        num_questions = num_tiles + cute.arch.grid_dim()[0]  # every CTA asks until it gets none
        index = take_tile(a.mNextTile, num_questions)
        tile_idx, step, dq_step = Int32(0), Int32(0), Int32(0)
        while index < num_tiles:
            tile = key_tile(c, a, ws, index)
            if tile.blocks.num > 0:  # the others only have zeros to be written
                shared.publish(tile, tile_idx)
                self._load_keys(tile, K, tile_idx)
                heads = heads_a_tile(c, a)
                first_of_last_pass = step + (c.num_passes - 1) * rounds_a_tile(c, a) * tile.blocks.num
                for nth in cutlass.range(c.num_passes * heads, unroll=1):
                    head, first, num_blocks = tile.head + nth, Int32(0), tile.blocks.num
                    if const_expr(c.num_passes > 1):
                        head = tile.head + nth % heads
                    if const_expr(c.features.listed):
                        first, num_blocks = list_of(c, a, ws, tile.batch, head, tile.block)
                    for i in cutlass.range(num_blocks, unroll=1):
                        m_block = tile.blocks.nth(i)
                        if const_expr(c.features.listed):
                            m_block, code, turn = entry_of(c, ws, first + i)
                            shared.entries.publish(step, (m_block, code, head) if c.features.bias else (m_block, code))
                            if step >= first_of_last_pass:
                                shared.turns.publish(dq_step, (self._block_of_dQ(tile, head, m_block), turn))
                                dq_step += 1
                        block, places = tile.first_block + m_block, (shared.lse, shared.delta)
                        stats = [(ws.mStats[j, head, block, None], sX) for j, sX in enumerate(places)]
                        of_Q, of_dO = (stats[:1], stats[1:]) if const_expr(c.num_passes == 1) else (stats, [])
                        load_Q = partial(self._load_queries, tile, Q, of_Q, head, m_block, step)
                        load_dO = partial(self._load_queries, tile, dO, of_dO, head, m_block, step)
                        load_V = partial(self._load_keys, tile, V, tile_idx, c.num_passes - 1)
                        if const_expr(c.num_passes == 1):
                            load_Q()
                            if step == first_of_last_pass:
                                load_V()
                            load_dO()
                        else:
                            if step < first_of_last_pass:
                                load_Q()
                                load_dO()
                            else:  # in the order in which there comes to be room
                                load_dO()
                                load_Q()
                                if step == first_of_last_pass:  # its place is where dV leaves through
                                    load_V()
                        step += 1
                tile_idx += 1
            # Not earlier: until the tile is begun, all CTAs with a later turn would wait.
            index = take_tile(a.mNextTile, num_questions)
        shared.publish_end(tile_idx)

    @cute.jit
    def _load_keys(self, tile: KeyTile, x: Constexpr, tile_idx: Int32, later: Constexpr = 0) -> None:
        """A tile's K or V. ``later``: whether the gradient that took its place is that of this tile, not the last."""
        x.ring.wait_empty(tile_idx + later)  # from those who read it, or the gradient that took its place
        with cute.arch.elect_one():
            x.ring.announce(tile_idx)
        gX = x.tiles.at(*tile.keys_of(self.shared.rank, PART_ROWS), tile.head_k, tile.batch)
        x.at(tile_idx).load(gX)

    @cute.jit
    def _load_queries(
        self, tile: KeyTile, x: Constexpr, stats: Constexpr, head: Int32, m_block: Int32, step: Int32
    ) -> None:
        """A block of Q or dO, with the lse or delta that come with it: from where, and to where."""
        start = m_block * self.config.tile_m
        stop = cutlass.min(start + self.config.tile_m, tile.q.length)
        x.ring.wait_empty(step)  # from the tensor cores and compute warps: what was there is read no more
        with cute.arch.elect_one():
            x.ring.announce(step)
            numbers = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
            for gStats, sStats in stats:
                cute.copy(numbers, gStats, sStats[None, x.ring.stage(step)], mbar_ptr=x.ring.full(step))
        gX = x.tiles.at(tile.q.start + start, tile.q.start + stop, head, tile.batch)
        x.at(step).load(gX)

    @cute.jit
    def drain(self, thread: Int32) -> None:
        """A warpgroup: dQ of every step from tensor memory to shared memory. A thread has a query, or a column."""
        c, a, shared, rings = self.config, self.a, self.shared, self.shared.rings
        address = tensor_memory.row_address(shared.tensor_memory, thread)
        step, tile_idx = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the producer
            end = step + num_steps
            for _ in cutlass.range(num_steps, unroll=1):
                for part in cutlass.range_constexpr(c.parts_dQ):
                    product = c.parts_dQ * step + part
                    rings.dq.wait_full(product)  # from the tensor cores
                    tensor_memory.after_sync()
                    numbers = tensor_memory.load(address + self._first_dQ(part, end), c.columns_dQ)
                    tensor_memory.before_sync()
                    rings.dq.release(product)  # to the mma warp: what lies in its place may be computed
                    for i in cutlass.range_constexpr(*self._pieces(part)):
                        self._await_place(step, i)
                        self._put(numbers, part, i, thread)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        for which, ring in enumerate((rings.pieces_even, rings.pieces_odd)):
                            if step % ADDING_WARPS == which:
                                ring.arrive(piece_number(c, step, i))  # to the adding warp whose step it is
                step += 1
            tile_idx += 1

    def _first_dQ(self, part: int, end: Int32) -> Int32 | int:
        """The first column of a part of dQ. ``end``: the step behind its tile."""
        del end
        return self.config.first_dQ(part)

    def _pieces(self, part: int) -> tuple[int, int]:
        """The first piece of a part of dQ, and the one behind its last one."""
        c = self.config
        num = c.pieces_dQ if c.parts_dQ == 1 else PART_ROWS // c.piece_columns
        return part * num, min((part + 1) * num, c.pieces_dQ)

    @cute.jit
    def _put(self, numbers: Constexpr, part: Constexpr, i: Constexpr, thread: Int32) -> None:
        """Writes a thread's share of the i-th piece of dQ to shared memory, from its numbers of a part."""
        c, place, first = self.config, self.shared.dQ[None, i % DQ_STAGES].iterator, i * self.config.piece_columns
        if const_expr(c.transposes_dQ):
            which = (first - c.first_row_dQ(part)) // c.piece_lanes
            if thread // c.piece_lanes == which:
                some = numbers[first % TRANSPOSED : first % TRANSPOSED + c.piece_columns]
                put(some, by_fours(place, c.piece_columns, c.piece_lanes), thread % c.piece_lanes)
        else:
            put(numbers[first : first + c.piece_columns], by_fours(place, c.piece_columns), thread)

    def _await_place(self, step: Int32, i: int) -> None:
        """Until what was in the place of a step's i-th piece of dQ has been read: a piece of this step, or the last.

        The next step is of the same adding warp as the last one, and of its pieces the i-th is to follow on that one.
        """
        owner = step if i >= DQ_STAGES else step + 1
        self.shared.pieces(owner).wait_empty(piece_number(self.config, owner, i))  # from that adding warp

    @cute.jit
    def add(self, which: Int32) -> None:
        """One of the adding warps: dQ of every other step to the workspace, in turn."""
        c, a, shared = self.config, self.a, self.shared
        step, tile_idx = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            for nth in cutlass.range(rounds_a_tile(c, a), unroll=1):
                for i in cutlass.range(shared.reload_tile(c, a, tile_idx).blocks.num, unroll=1):
                    block, turn = Int32(0), Int32(0)
                    if const_expr(c.features.listed):
                        block, turn = shared.turns.read(step)
                    if step % ADDING_WARPS == which:
                        if const_expr(not c.features.listed):
                            tile = shared.reload_tile(c, a, tile_idx)
                            m_block = tile.blocks.nth(i)
                            block = self._block_of_dQ(tile, tile.head + nth, m_block)
                            turn = tile.turn(c, m_block)
                        self._add_block(which, step, block, turn)
                    step += 1
            shared.tiles.release_fields(tile_idx)  # to the producer
            tile_idx += 1

    def _block_of_dQ(self, tile: KeyTile, head: Int32, m_block: Int32) -> Int32:
        """Which a block of a head's queries is, counted over all heads."""
        return head * self.ws.mdQaccum.shape[1] + tile.first_block + m_block

    @cute.jit
    def _add_block(self, which: Int32, step: Int32, block: Int32, turn: Int32) -> None:
        """A step's dQ to its block of the workspace, over which the first tile writes."""
        c, ws, shared, ring = self.config, self.ws, self.shared, self.shared.pieces(which)
        num = c.piece_numbers
        semaphore = semaphores.at(ws.mSemaphoresQ, shared.rank, 0, block)
        semaphores.wait(semaphore, turn)
        cute.arch.fence_proxy("async.global")  # what others have stored or added comes before what TMA adds
        own = shared.rank * (c.pieces_dQ * num)  # where this CTA's part of the block begins
        target = cute.domain_offset((0, Int64(block), own), ws.mdQaccum).iterator.toint()
        for i in cutlass.range_constexpr(c.pieces_dQ):
            piece = piece_number(c, step, i)
            ring.wait_full(piece)  # from the drain warps
            source = shared.dQ[None, i % DQ_STAGES].iterator
            with cute.arch.elect_one():
                if turn == 0:
                    store_from_shared(target + 4 * num * i, source, 4 * num)
                else:
                    add_from_shared(target + 4 * num * i, source, 4 * num)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(i > 0):
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                ring.release(piece - 1)  # to the drain warps
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        ring.release(piece_number(c, step, c.pieces_dQ - 1))  # to the drain warps
        cute.arch.cp_async_bulk_wait_group(0)  # it has been stored or added
        with cute.arch.elect_one():
            semaphores.signal(semaphore)
