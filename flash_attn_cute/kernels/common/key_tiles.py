"""Tiles of keys, the work tiles of backward kernels.

A tile is a block of keys for one query head, or for several that share the key head (``grouped``; not for all of them,
so that heads that run together fit the L2 cache). Over the queries that attend to it, a tile sums dK and dV in
registers, and adds dQ to the workspace. If several tiles have the same keys, all but the last one leave dK and dV in
the workspace, in float32. The last one is taken after the others and reads their sums. (Above d = 128 it adds to them
as well.)

Determinism. Tiles add to a block of the workspace in the order in which they are taken (``common.semaphores``), from
the last keys to the first; a block mask has its own order. Under a causal mask a tile's loop begins where its keys do,
so the tile before it was at each block ``tile_n / tile_m`` steps ago. ``sparsity.dq_order.turns`` shows that no tile
waits for ever, however few CTAs are resident. This is FlashAttention's "shortest processing time first"; DASH, arXiv
2601.21824, models such orders. Under a right bound the longest tiles would come last. So the heads of a dense batch's
last section have the opposite order: their tiles are taken from the first keys to the last, and iterate from the last
query to the first. (Packed sequences and grouped heads lose by it.)
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores, tiles
from flash_attn_cute.kernels.common.assembly import opaque
from flash_attn_cute.kernels.common.blocks import Blocks, Window
from flash_attn_cute.kernels.common.key_lists import blocks_of_keys, launched, list_of
from flash_attn_cute.kernels.common.lengths import SeqRows, rows_of
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.rows import zero_rows
from flash_attn_cute.kernels.common.score_rows import Place, RowsOfScores
from flash_attn_cute.kernels.common.score_tensors import known_keys
from flash_attn_cute.kernels.common.workspace import Workspace, packed_block
from flash_attn_cute.kernels.schedule import KEY_TILE_FIELDS

_BLOCKS = 12  # the first of its blocks' among them
_START, _STOP = _BLOCKS, _BLOCKS + 3


@dataclass(frozen=True)
class KeyTile:
    """A block of keys, and the blocks of queries that attend to it."""

    first_key: Int32
    head: Int32
    head_k: Int32
    batch: Int32 | int  # 0, if packed
    block: Int32 | int  # among the tiles of a head, over all sequences, if grouped or under a mask; else 0
    q: SeqRows
    k: SeqRows
    first_block: Int32  # of its sequence, in the workspace of dQ
    window: Window  # transposed: which queries attend to a key
    # Blocks of queries; all tiles of a head have the same direction. Under a mask the numbers are those of list
    # entries, of all heads of the tile, one head after the other.
    blocks: Blocks
    tiles_before: Int32 | int  # tiles of the same keys and of other heads that are taken before, and are seen, too,
    tiles_after: Int32 | int  # and that are taken after: none, if not grouped

    def write(self, fields: cute.Tensor) -> None:
        which = self.first_key, self.head, self.head_k, self.batch, self.block, self.first_block
        # Only dense tiles have a direction, and only packed ones a first query row: they share a field.
        shared = self.q.start if isinstance(self.blocks.direction, int) else self.blocks.direction
        lengths = self.q.length, self.k.start, self.k.length
        for i, value in enumerate((*which, shared, self.tiles_before, self.tiles_after, *lengths, *self.blocks.fields)):
            if not isinstance(value, int):  # which reading knows by itself
                fields[i] = value

    @staticmethod
    def read(config: Any, a: BackwardArguments, fields: cute.Tensor) -> "KeyTile":
        """Reads a tile from shared memory.

        Unused fields are not loaded, so a role calls this where it needs the tile instead of keeping it in registers.
        """
        values = [fields[i] for i in range(KEY_TILE_FIELDS)]
        first_key, head, head_k, batch, block, first_block, shared, *others = values[:_BLOCKS]
        tiles_before, tiles_after, q_length, k_start, k_length = others
        f = config.features
        return KeyTile(
            first_key=first_key,
            head=head,
            head_k=head_k,
            batch=0 if f.packed else batch,
            block=block if f.grouped or f.listed else 0,
            q=SeqRows(shared if f.packed else 0, q_length),
            k=SeqRows(k_start, k_length),
            first_block=first_block,
            window=Window.of(f, a, q_length, k_length).transposed,
            blocks=Blocks(*values[_BLOCKS:], direction=shared if config.reverses_last else 1),
            tiles_before=tiles_before if f.grouped else 0,
            tiles_after=tiles_after if f.grouped else 0,
        )

    @cute.jit
    def turn(self, config: Constexpr, m_block: Int32) -> Int32:
        """Turn of this tile at a block of queries: how many tiles add to the block before it, if deterministic."""
        keys = key_tiles_of(
            config, m_block * config.tile_m, self.k.length, self.window.transposed, -self.blocks.direction
        )
        return keys.num_before(self.first_key // config.tile_n)

    def first_key_of(self, rank: Int32 | int, rows: int) -> Int32:
        """First key of the CTA of a rank, where CTAs of ``rows`` keys each share the tile."""
        return self.first_key + rows * rank

    def keys_of(self, rank: Int32 | int, rows: int) -> tuple[Int32, Int32]:
        """Rows of k of the CTA of a rank, clipped to the sequence: the first one, and the one behind the last."""
        first = self.first_key_of(rank, rows)
        stop = cutlass.min(first + rows, self.k.length)
        if not isinstance(rank, int):  # of a single CTA some are there
            stop = cutlass.max(stop, first)
        return self.k.start + first, self.k.start + stop

    def place(self, config: Any, nth: Int32 | int, first_key: Int32, m_block: Int32) -> Place:
        """Location of the scores of keys from ``first_key`` on and a block of queries of the tile's nth head."""
        return Place(
            rows=self.k,
            columns=self.q,
            head=self.head + nth,
            batch=self.batch,
            first_row=first_key,
            first_column=m_block * config.tile_m,
            window=self.window,
        )

    def rows_of_bias(self, config: Any, nth: Int32 | int, m_block: Int32) -> RowsOfScores:
        """Rows of a bias for a block of queries of the tile's nth head."""
        first = m_block * config.tile_m
        num = cutlass.min(self.q.length - first, config.tile_m)
        return RowsOfScores(self.q, self.batch, self.head + nth, first, num, 1)

    @property
    def is_last(self) -> Boolean | bool:
        """Whether this is the last tile of its keys, at whose end dK and dV are complete."""
        return self.tiles_after == 0

    @property
    def is_fully_masked(self) -> Boolean | bool:
        """Whether no query of any head attends to this tile."""
        return self.blocks.num + self.tiles_before + self.tiles_after == 0

    @cute.jit
    def wait_turn(self, config: Constexpr, semaphore: cute.Pointer, barrier: Constexpr) -> Boolean:
        """Waits for the turn to add dK or dV, by a converged warpgroup; if unordered, for the first tile only.

        Returns whether this tile is the first contributor, which stores instead of adding.
        """
        turn = self.tiles_before if const_expr(config.features.deterministic) else cutlass.min(self.tiles_before, 1)
        semaphores.wait_as_warpgroup(semaphore, turn, barrier)
        return self.tiles_before == 0


class WorkTileBroadcast:
    """Broadcast of work tiles from the producer to the other roles of the CTA, through shared memory."""

    tile_fields: cute.Tensor  # (field, stage of tiles)
    tiles: Ring

    def tile(self, config: Any, a: BackwardArguments, tile_idx: Int32) -> KeyTile:
        """The tile of a number, as published by the producer."""
        return KeyTile.read(config, a, self.tile_fields[None, self.tiles.stage(tile_idx)])

    def reload_tile(self, config: Any, a: BackwardArguments, tile_idx: Int32) -> KeyTile:
        """``tile``, loaded from shared memory again, to keep it out of registers in between."""
        return self.tile(config, a, tile_idx + opaque(Int32(0)))

    @cute.jit
    def publish(self, tile: KeyTile, tile_idx: Int32) -> None:
        """Publishes a tile, by the producer, when all roles have released the stage."""
        self.tiles.wait_empty(tile_idx)  # from all other roles
        with cute.arch.elect_one():
            tile.write(self.tile_fields[None, self.tiles.stage(tile_idx)])
            self._signal(tile_idx)

    @cute.jit
    def publish_end(self, tile_idx: Int32) -> None:
        """Publishes the end of work, by the producer: a tile without blocks."""
        self.tiles.wait_empty(tile_idx)  # from all other roles
        with cute.arch.elect_one():
            for i in (_START, _STOP):
                self.tile_fields[i, self.tiles.stage(tile_idx)] = Int32(0)
            self._signal(tile_idx)

    def _signal(self, tile_idx: Int32) -> None:
        """Signals, by one thread, that the fields of the stage are written."""
        cute.arch.mbarrier_arrive(self.tiles.full(tile_idx))  # to all other roles

    def num_steps(self, config: Any, a: BackwardArguments, tile_idx: Int32) -> Int32:
        """Number of steps of a tile, over the blocks of all its heads."""
        return rounds_a_tile(config, a) * self.tile(config, a, tile_idx).blocks.num

    @cute.jit
    def has_tile(self, tile_idx: Int32) -> Boolean:
        """Waits for the producer. Returns whether it published a tile, and not the end."""
        self.tiles.wait_full(tile_idx)  # from the producer
        start, stop = (self.tile_fields[i, self.tiles.stage(tile_idx)] for i in (_START, _STOP))
        return start < stop


def heads_a_tile(config: Any, a: BackwardArguments) -> Int32 | int:
    return a.numbers.heads_a_tile if config.features.grouped else 1


def rounds_a_tile(config: Any, a: BackwardArguments) -> Int32 | int:
    """Number of loops of a tile over its blocks: one a head; under a mask one, over the blocks of all heads."""
    return 1 if config.features.listed else heads_a_tile(config, a)


def num_key_tiles(config: Any, a: BackwardArguments) -> Int32:
    """Number of tiles of all heads and sequences."""
    return tiles.num_tiles(a.mK, a.mQ.shape[-2] // heads_a_tile(config, a), a.mCuSeqlensK, config.tile_n)


def tiles_of_launch(config: Any, a: BackwardArguments, ws: Workspace) -> tuple[Int32 | int, Int32]:
    """First tile of a launch of the main kernel, and how many: all of the pass, or those of a chunk of heads."""
    if not config.stores_dS:
        return 0, num_key_tiles(config, a)
    tiles_a_head = blocks_of_keys(config, a)
    return ws.mChunks[0] * tiles_a_head, (ws.mChunks[1] - ws.mChunks[0]) * tiles_a_head


@cute.jit
def key_tile(config: Constexpr, a: BackwardArguments, ws: Workspace, index: Int32) -> KeyTile:
    c, f = config, config.features
    heads, heads_k = a.mQ.shape[-2], a.mK.shape[-2]
    parts = heads // heads_k // heads_a_tile(c, a) if f.grouped else 1  # of a group
    # Heads of a group add to the same keys, so the first ones of all groups come first, then the second ones.
    nth, sections, copies = 0, a.numbers.sections, parts
    if const_expr(f.packed and f.grouped):
        tiles_a_part = num_key_tiles(c, a) // parts
        nth = index // tiles_a_part
        index -= nth * tiles_a_part
        if nth < parts - 1:  # it is not these that the kernel ends with
            sections = heads_k
    order = tiles.Order(a.numbers.heads_in_cache, c.in_order, sections, c.reverses_last)
    work, k = tiles.row_tile(index, a.mK, heads_k, a.mCuSeqlensK, a.mSeqUsedK, c.tile_n, order, copies)
    first_key = work.first_row
    if const_expr(f.block_mask):
        first_key = launched(c, a, work.batch % a.mK.shape[0], work.head, first_key // c.tile_n) * c.tile_n
    if const_expr(f.packed):
        batch, block, q, first_block = 0, work.block, SeqRows(Int32(0), Int32(0), Int32(0)), Int32(0)
        if work.batch >= 0:
            q, k = rows_of(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, work.batch), known_keys(a, k)
            first_block = packed_block(q.start, work.batch, c.tile_m)
    else:
        entries = a.mK.shape[0]
        nth, batch = work.batch // entries if f.grouped else 0, work.batch % entries
        q = rows_of(a.mQ, None, None, batch)
        first_block = batch * cute.ceil_div(q.length, c.tile_m)
        block = batch * cute.ceil_div(k.slot, c.tile_n) + first_key // c.tile_n
    num_keys = cutlass.min(k.length - first_key, c.tile_n)
    window = Window.of(f, a, q.length, k.length).transposed
    direction = 1
    if const_expr(c.reverses_last):
        direction = Int32(-1) if work.in_last else Int32(1)
    tiles_before, tiles_after = nth, parts - 1 - nth
    if const_expr(f.listed):
        blocks, tiles_before, tiles_after = _listed(c, a, ws, work.head, batch, block, num_keys, nth, parts)
    else:
        found = Blocks.of(first_key, num_keys, q.length, window, c.tile_m)
        blocks = Blocks(
            start=found.start,
            # Keys behind the sequence are hidden in every block.
            full_start=found.full_start if num_keys == c.tile_n else found.stop,
            full_stop=found.full_stop if const_expr(f.hides_last_queries) else found.stop,
            stop=cutlass.max(found.stop, found.start),
            direction=direction,
        )
    return KeyTile(
        first_key=first_key,
        head=(work.head * parts + nth) * heads_a_tile(c, a),
        head_k=work.head,
        batch=batch,
        block=block if f.grouped or f.listed else 0,
        q=q,
        k=k,
        first_block=first_block,
        window=window,
        blocks=blocks,
        tiles_before=tiles_before,
        tiles_after=tiles_after,
    )


@cute.jit
def _listed(
    config: Constexpr,
    a: BackwardArguments,
    ws: Workspace,
    head_k: Int32,
    batch: Int32 | int,
    block: Int32,
    num_keys: Int32,
    nth: Int32 | int,
    parts: Int32 | int,
) -> tuple[Blocks, Int32, Int32]:
    """Number of listed blocks of the nth tile of some keys, and of the tiles before and after it that have any."""
    own, tiles_before, tiles_after = Int32(0), Int32(0), Int32(0)
    if num_keys > 0:
        seen, heads = Int32(0), heads_a_tile(config, a)
        for i in cutlass.range(parts * heads, unroll=1):
            seen += list_of(config, a, ws, batch, head_k * parts * heads + i, block)[1]
            if i % heads == heads - 1:
                other = i // heads - nth
                if other == 0:
                    own = seen
                elif seen > 0:
                    tiles_before += Int32(other < 0)
                    tiles_after += Int32(other > 0)
                seen = Int32(0)
    return Blocks(Int32(0), Int32(0), own, own), tiles_before, tiles_after


def key_tiles_of(
    config: Any, first_query: Int32, k_length: Int32, window: Window, direction: Int32 | int = -1
) -> Blocks:
    """The tiles of keys that a block of queries attends to, which therefore add to its dQ.

    The tiles are taken, and add, in this order; its direction is opposite to that of their own loops.
    """
    return Blocks.of(first_query, config.tile_m, k_length, window, config.tile_n, direction=direction)


@cute.jit
def zero_fully_masked_keys(
    config: Constexpr,
    a: BackwardArguments,
    ws: Workspace,
    mdK: cute.Tensor,
    mdV: cute.Tensor,
    first_tile: Int32,
    step: Int32,
) -> None:
    """Writes zeros to dK and dV of padding and of fully masked keys, by one converged warp.

    The warp does so for every ``step``-th tile of its launch from ``first_tile`` on.
    """
    c = config
    first_of_launch, num_tiles = tiles_of_launch(c, a, ws)
    # Registers are few: one loop over packed tiles for both gradients takes fewest, and for dense ones a loop for each.
    for gradients in ((mdK, mdV),) if c.features.packed else ((mdK,), (mdV,)):
        index = first_tile
        while index < num_tiles:
            tile = key_tile(c, a, ws, first_of_launch + index)
            first = cutlass.max(tile.first_key, tile.k.length)
            if tile.is_fully_masked if const_expr(c.features.listed) else tile.blocks.num == 0:
                first = tile.first_key
            stop = tile.k.slot if const_expr(c.features.packed and c.features.zero_padding) else tile.k.length
            num_rows = cutlass.min(tile.first_key + c.tile_n, stop) - first
            if const_expr(c.features.grouped):
                num_rows = num_rows if tile.is_last else Int32(0)  # once
            for mX in gradients:
                gX = mX[None, None, tile.head_k, tile.batch]
                zero_rows(gX, tile.k.start + first, num_rows, cute.arch.lane_idx(), 32)
            index += step
