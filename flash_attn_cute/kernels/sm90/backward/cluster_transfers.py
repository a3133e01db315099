"""Warpgroup 0 of the backward kernel above d = 128: loads, and turns to add to dQ; and what all of its roles read.

``cluster_schedule`` describes all of it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.key_lists import list_of
from flash_attn_cute.kernels.common.key_tiles import KeyTile, key_tile
from flash_attn_cute.kernels.common.semaphores import OrderedAdds
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.common.tma import RowTiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardClusterConfig

_BOTH = 0b11  # CTAs of a cluster, for multicast


class Tiles(NamedTuple):
    """TMA tiles of the tensors, by name."""

    Q: RowTiles
    dO: RowTiles
    K: RowTiles
    K_peer: RowTiles
    V: RowTiles
    dK: RowTiles | None  # None: it leaves from registers
    dV: RowTiles | None


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it."""

    sK: cute.Tensor
    sK_peer: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    sP: cute.Tensor
    dS: cute.Pointer  # sdS without its swizzle
    stats: cute.Tensor
    rings: Any  # those of the schedule, by name
    order: OrderedAdds  # if deterministic
    rank: Int32  # of this CTA

    @staticmethod
    def of(memory: SharedMemory, storage: Any, rank: Int32) -> "Shared":
        """Shared memory of a CTA, on the device."""
        rings = memory.rings(storage)
        return Shared(
            **memory.tensors(storage, "sK", "sK_peer", "sV", "sQ", "sdO", "sdS", "sP", "stats"),
            rings=rings,
            dS=storage.sdS.data_ptr(),
            order=OrderedAdds(rings.order, rings.added, memory.tensors(storage, "turns")["turns"]),
            rank=rank,
        )


@dataclass(frozen=True)
class BlockIterator:
    """Blocks of queries of a tile, step by step: an interval, or under a mask a list. Every role reads it by itself."""

    tile: KeyTile
    first_entry: Int32  # of the list

    @staticmethod
    @cute.jit
    def of(config: Constexpr, a: BackwardArguments, ws: Workspace, index: Int32) -> "BlockIterator":
        """Blocks of the tile of an index."""
        tile, first_entry = key_tile(config, a, ws, index), Int32(0)
        if const_expr(config.features.listed):
            if tile.blocks.num > 0:
                first_entry, _ = list_of(config, a, ws, tile.batch, tile.head, tile.block)
        return BlockIterator(tile, first_entry)

    def m_block(self, config: Constexpr, ws: Workspace, step: Int32) -> Int32:
        """The block of queries of a step."""
        return ws.mEntries[self.first_entry + step, 0] if config.features.listed else self.tile.blocks.nth(step)

    def turn(self, config: Constexpr, ws: Workspace, step: Int32, m_block: Int32) -> Int32:
        """Turn of the tile at dQ of that block."""
        return ws.mEntries[self.first_entry + step, 2] if config.features.listed else self.tile.turn(config, m_block)


@dataclass(frozen=True)
class Transfers:
    """Warpgroup 0, warp by warp."""

    config: BackwardClusterConfig
    a: BackwardArguments
    ws: Workspace
    index: Int32  # of the tile
    tma: Tiles
    shared: Shared

    @cute.jit
    def load(self, of_queries: Constexpr) -> None:
        """Warp 0: K once, and Q, lse and delta block by block. Warp 1: V once, and dO, in parts side by side.

        The CTA of one rank loads Q for both, that of the other one dO.
        """
        c, ws, tma, shared = self.config, self.ws, self.tma, self.shared
        rings, rank = shared.rings, shared.rank
        if const_expr(of_queries):
            # Tiles, where they go, which CTA's keys, and which tile of columns.
            keys = ((tma.K, shared.sK, rank, 0), (tma.K_peer, shared.sK_peer, 1 - rank, rank))
            keys_ring, rows, parts, sX, ring, rank_of_rows = rings.k, tma.Q, 1, shared.sQ, rings.q, 0
        else:
            keys = ((tma.V, shared.sV, rank, 0),)
            keys_ring, rows, parts, sX, ring, rank_of_rows = rings.v, tma.dO, c.parts_dO, shared.sdO, rings.do, 1
        blocks = BlockIterator.of(c, self.a, ws, self.index)
        tile = blocks.tile
        if tile.blocks.num > 0:
            once = Int32(0)
            with cute.arch.elect_one():
                keys_ring.announce(once)
            for t, sK, rank_of_keys, column_tile in keys:
                g = t.at(*tile.keys_of(rank_of_keys, 64), tile.head_k, tile.batch, column_tile)
                t.load(g, sK, keys_ring.full(once))
        numbers = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        for step in cutlass.range(tile.blocks.num, unroll=1):
            m_block = blocks.m_block(c, ws, step)
            for part in cutlass.range_constexpr(parts):
                fill = step * parts + part
                full, stage = ring.full(fill), ring.stage(fill)
                ring.wait_empty(fill)  # from warpgroups 1 and 2 of both CTAs: this stage is released
                with cute.arch.elect_one():
                    ring.announce(fill)
                    if const_expr(of_queries):
                        for i in cutlass.range_constexpr(2):
                            gStats = ws.mStats[i, tile.head, tile.first_block + m_block, None]
                            cute.copy(numbers, gStats, shared.stats[None, i, stage], mbar_ptr=full)
                # The other CTA's barrier counts bytes whether or not its own warp has been here.
                if rank == rank_of_rows:
                    first = m_block * c.tile_m
                    last = tile.q.start + cutlass.min(first + c.tile_m, tile.q.length)
                    block = rows.at(tile.q.start + first, last, tile.head, tile.batch, part)
                    rows.load(block, sX[None, None, stage], full, multicast=_BOTH)

    @cute.jit
    def wait_semaphores(self) -> None:
        """Warp 2: waits for the turns to add to the tile's blocks of dQ, one after the other."""
        c, ws, shared = self.config, self.ws, self.shared
        blocks = BlockIterator.of(c, self.a, ws, self.index)
        tile = blocks.tile
        for step in cutlass.range(tile.blocks.num, unroll=1):
            m_block = blocks.m_block(c, ws, step)
            semaphore = semaphores.at(ws.mSemaphoresQ, shared.rank, tile.head, tile.first_block + m_block)
            shared.order.wait_semaphore(step, semaphore, blocks.turn(c, ws, step, m_block))

    @cute.jit
    def signal_semaphores(self) -> None:
        """Warp 3: passes turns on to the tiles that come after."""
        c, ws, shared = self.config, self.ws, self.shared
        blocks = BlockIterator.of(c, self.a, ws, self.index)
        tile = blocks.tile
        step = Int32(0)
        while step < tile.blocks.num:
            m_block = blocks.m_block(c, ws, step)
            first_semaphore = semaphores.at(ws.mSemaphoresQ, shared.rank, tile.head, tile.first_block + m_block)
            another = step + 1 < tile.blocks.num
            if const_expr(c.features.listed):
                if another:  # its counter has to be the next one
                    another = blocks.m_block(c, ws, step + 1) == m_block + 1
            step += shared.order.signal(step, first_semaphore, another)
