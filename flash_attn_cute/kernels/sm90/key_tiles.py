"""What both backward kernels are launched with, and the tiles of keys that they work on.

A tile is a block of keys for one query head, or for a few that share the key head (``grouped``; not for all, so that
heads which run together fit the L2 cache): over the queries that see it, dK and dV are summed, and to theirs dQ is
added. If there are several tiles of the same keys, all but the last one leave dK and dV in the workspace, in float32;
the last one is taken later than any of them, and takes what is there. (Above d = 128 it adds to it as well.)

Determinism: what tiles add to a block of the workspace is added in the order in which they were taken
(``common.semaphore``), and they are taken from the last keys to the first. Under a causal mask a tile's walk begins
where its keys do, so the tile before has been at each block ``tile_n / tile_m`` steps ago. A tile only ever waits for
tiles that were taken before it, by CTAs that are running, so the earliest unfinished one never waits: however few CTAs
are resident, there is no deadlock (``sparsity.schedule`` has the argument for any mask and order). The order is that of
FlashAttention's "shortest processing time first"; DASH, arXiv 2601.21824, models such orders. Under a right bound it
would leave the longest tiles to the end, so the heads of a dense batch's last section go the other way round: their
tiles are taken from the first keys to the last, and walk from the last query to the first. (Packed sequences and
grouped heads lose by it.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn_cute.kernels.common import schedule, semaphore, workspace
from flash_attn_cute.kernels.common.sequence import KeyBlocks, Rows, Window
from flash_attn_cute.kernels.sm90.config import BackwardConfig, BackwardWideConfig


class BackwardArguments(NamedTuple):
    """The launch arguments, in their order: tensors as in the forward kernel, and the workspace."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mdO: cute.Tensor
    mdQ: cute.Tensor
    mdK: cute.Tensor
    mdV: cute.Tensor
    mStats: cute.Tensor  # (2, heads, blocks, tile_m): lse in base 2 and delta
    mdQaccum: cute.Tensor  # (heads, blocks, tile_m * tile_d)
    mdKVaccum: cute.Tensor | None  # (dK and dV, heads_k, tiles, tile_n * tile_d), if grouped; no memory if unused
    mTurnsQ: cute.Tensor | None  # (parts, heads, blocks): 0 as yet; None, in no order: mdQaccum is 0 as yet
    mTurnsK: cute.Tensor | None  # (parts, heads_k, tiles of a head): of mdKVaccum, 0 as yet
    mCuSeqlensQ: cute.Tensor | None
    mCuSeqlensK: cute.Tensor | None
    mSeqUsedQ: cute.Tensor | None
    mSeqUsedK: cute.Tensor | None
    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    heads_in_cache: Int32
    sections: Int32  # of so many heads each; all that are left come together
    heads_a_tile: Int32  # of a group, if grouped
    mNextTile: cute.Tensor  # (2,): of keys, and of queries to round; 0, and again when the kernel has ended
    num_ctas: Int32  # at most that many, if they are persistent


NUM_FIELDS = 16  # Int32 in shared memory that describe a tile


@dataclass(frozen=True)
class KeyTile:
    """A block of keys: which, and the blocks of queries that see it, as a walk over "keys"."""

    first_key: Int32
    head: Int32
    head_k: Int32
    batch: Int32 | int  # 0, if packed
    block: Int32 | int  # in the workspace of dK and dV, if grouped; else 0
    q: Rows
    k: Rows
    first_block: Int32  # of its sequence, in the workspace of dQ
    window: Window  # queries and keys exchanged
    blocks: KeyBlocks
    direction: Int32 | int  # of the walk, alike for a head: 1 from the first block to the last, -1 the other way round
    earlier: Int32 | int  # tiles of the same keys and of other heads that are taken before, and see as many queries,
    later: Int32 | int  # and that are taken after: none, if not grouped

    def write(self, fields: cute.Tensor) -> None:
        """Into shared memory, for warps that neither load nor write padding."""
        b, lengths = self.blocks, (self.q.length, self.k.start, self.k.length)
        which = self.first_key, self.head, self.head_k, self.batch, self.block, self.first_block
        walk = self.direction, self.earlier, self.later
        for i, value in enumerate((*which, *walk, *lengths, b.start, b.full_start, b.full_stop, b.stop)):
            if not isinstance(value, int):  # which reading knows by itself
                fields[i] = value

    @staticmethod
    def read(config: BackwardConfig, a: BackwardArguments, fields: cute.Tensor) -> "KeyTile":
        """From shared memory. Fields that are not used cost nothing, so none need be kept from one use to the next."""
        values = [fields[i] for i in range(NUM_FIELDS)]
        first_key, head, head_k, batch, block, first_block, direction, earlier, later, *lengths_and_blocks = values
        q_length, k_start, k_length, *blocks = lengths_and_blocks
        return KeyTile(
            first_key=first_key,
            head=head,
            head_k=head_k,
            batch=0 if config.packed else batch,
            block=block if config.grouped else 0,
            q=Rows(None, q_length),
            k=Rows(k_start, k_length),
            first_block=first_block,
            window=_window(config, a, q_length, k_length),
            blocks=KeyBlocks(*blocks),
            direction=direction if config.turns_last else 1,
            earlier=earlier if config.grouped else 0,
            later=later if config.grouped else 0,
        )

    @cute.jit
    def query_block(self, i: Int32) -> Int32:
        """The i-th block of the walk, counted from ``blocks.start`` on: a number within its sequence."""
        if const_expr(isinstance(self.direction, int)):
            return i
        return i if self.direction > 0 else self.blocks.start + self.blocks.stop - 1 - i

    @property
    def first_and_end(self) -> tuple[Int32, Int32]:
        """The blocks at which the walk begins, and before which it ends."""
        return self.query_block(self.blocks.start), self.query_block(self.blocks.stop)

    @cute.jit
    def earlier_keys(self, config: cutlass.Constexpr, m: Int32) -> Int32:
        """How many tiles that are taken before, if deterministic, add to block m.

        Those of the keys behind, or in front, if the walk is backwards.
        """
        keys = Window(self.window.right, self.window.left, -self.window.shift)
        blocks = KeyBlocks.of(m * config.tile_m, config.tile_m, self.k.length, keys, config.tile_n)
        number = self.first_key // config.tile_n
        if const_expr(isinstance(self.direction, int)):
            return blocks.stop - 1 - number
        return blocks.stop - 1 - number if self.direction > 0 else number - blocks.start

    @property
    def is_last(self) -> Boolean | bool:
        """Whether it is the last one of its keys: dK and dV are whole at its end."""
        return self.later == 0

    @cute.jit
    def await_turn(self, config: cutlass.Constexpr, counter: cute.Pointer, barrier: cutlass.Constexpr) -> Boolean:
        """For a converged warpgroup that is to add dK or dV: waits for its turn, or if in no order for the first tile.

        Returns whether it is the first one, which overwrites.
        """
        earlier = self.earlier if const_expr(config.deterministic) else cutlass.min(self.earlier, 1)
        semaphore.wait_as_warpgroup(counter, earlier, barrier)
        return self.earlier == 0


def heads_a_tile(config: BackwardConfig | BackwardWideConfig, a: BackwardArguments) -> Int32 | int:
    """How many heads a tile is for."""
    return a.heads_a_tile if config.grouped else 1


def num_key_tiles(config: BackwardConfig | BackwardWideConfig, a: BackwardArguments) -> Int32:
    """Tiles of all heads and sequences."""
    heads = a.mQ.shape[-2] // heads_a_tile(config, a)
    if const_expr(config.packed):
        return schedule.num_packed_tiles(a.mK.shape[0], heads, a.mCuSeqlensK.shape[0] - 1, config.tile_n)
    batch, rows, _, _ = a.mK.shape
    return schedule.num_dense_tiles(rows, heads, batch, config.tile_n)


@cute.jit
def key_tile(config: cutlass.Constexpr, a: BackwardArguments, index: Int32) -> KeyTile:
    """What tile ``index`` is."""
    c = config
    heads, heads_k = a.mQ.shape[-2], a.mK.shape[-2]
    parts = heads // heads_k // heads_a_tile(c, a) if c.grouped else 1  # of a group
    # Heads of a group add to the same keys, so the first ones of all groups come first, then the second ones.
    if const_expr(c.packed):
        tiles = num_key_tiles(c, a) // parts
        nth, sections = index // tiles if c.grouped else 0, a.sections
        if const_expr(c.grouped):  # noqa: SIM102 (as elsewhere)
            if nth < parts - 1:  # it is not these that the kernel ends with
                sections = heads_k
        work, k_start, k_slot = schedule.packed_tile(
            index - nth * tiles,
            a.mK.shape[0],
            heads_k,
            a.mCuSeqlensK,
            c.tile_n,
            last_first=c.deterministic,
            heads_in_cache=a.heads_in_cache,
            sections=sections,
        )
        head_k, block = work.head, work.block
        batch, q_start, q_length, k_length, first_block = 0, Int32(0), Int32(0), Int32(0), Int32(0)
        if work.batch >= 0:
            k_length = k_slot
            q_start, q_length = packed_rows(a.mQ, a.mCuSeqlensQ, a.mSeqUsedQ, work.batch)
            first_block = workspace.packed_block(q_start, work.batch, c.tile_m)
            if const_expr(c.has_seqused_k):
                k_length = cutlass.min(a.mSeqUsedK[work.batch], k_slot)  # or turns would be waited for in vain
    else:
        count, k_slot, _, _ = a.mK.shape
        work = schedule.dense_tile(
            index,
            k_slot,
            heads_k,
            count * parts,
            a.heads_in_cache,
            c.tile_n,
            last_first=c.deterministic,
            sections=a.sections,
            turns_last=c.turns_last,
        )
        nth, batch, head_k = work.batch // count if c.grouped else 0, work.batch % count, work.head
        k_start, k_length, q_start, q_length = Int32(0), k_slot, Int32(0), a.mQ.shape[1]
        first_block = batch * cute.ceil_div(q_length, c.tile_m)
        block = batch * cute.ceil_div(k_slot, c.tile_n) + work.first_row // c.tile_n
    first_key = work.first_row
    num_keys = cutlass.min(k_length - first_key, c.tile_n)
    window = _window(c, a, q_length, k_length)
    blocks = KeyBlocks.of(first_key, num_keys, q_length, window, c.tile_m)
    full_stop = blocks.full_stop if const_expr(c.has_left) else blocks.stop  # queries behind have no weight
    # Keys behind the sequence are hidden in every block.
    full_start = blocks.full_start if num_keys == c.tile_n else blocks.stop
    direction = 1
    if const_expr(c.turns_last):
        direction = Int32(-1) if work.in_last else Int32(1)
    return KeyTile(
        first_key=first_key,
        head=(head_k * parts + nth) * heads_a_tile(c, a),
        head_k=head_k,
        batch=batch,
        block=block if c.grouped else 0,
        q=Rows(q_start, q_length),
        k=Rows(k_start, k_length, k_slot),
        first_block=first_block,
        window=window,
        blocks=KeyBlocks(blocks.start, full_start, full_stop, cutlass.max(blocks.stop, blocks.start)),
        direction=direction,
        earlier=nth,
        later=parts - 1 - nth,
    )


@cute.jit
def packed_rows(
    mX: cute.Tensor, mCuSeqlens: cute.Tensor, mSeqUsed: cute.Tensor | None, batch: Int32
) -> tuple[Int32, Int32]:
    """First row and real rows of a sequence, which ends where the tensor does, or turns might be waited for in vain.

    If it begins behind that its rows are fewer than none, and nobody sees anything.
    """
    start = mCuSeqlens[batch]
    length = cutlass.min(mCuSeqlens[batch + 1], mX.shape[0]) - start
    if const_expr(mSeqUsed is not None):
        length = cutlass.min(mSeqUsed[batch], length)
    return start, length


def _window(c: BackwardConfig | BackwardWideConfig, a: BackwardArguments, q_length: Int32, k_length: Int32) -> Window:
    return Window(a.window_right if c.has_right else None, a.window_left if c.has_left else None, q_length - k_length)
