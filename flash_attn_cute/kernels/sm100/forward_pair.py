"""Attention forward on Blackwell by pairs of CTAs, above d = 128: a tile is the work of a cluster of two.

The tensor cores of a pair compute products together (``cta_group::2``), of 256 queries each. A CTA holds 128 of their
rows in its own tensor memory, and of K and V only its half in shared memory: what it multiplies of the other half comes
from the other CTA. So a block is read once for twice as many queries, and takes half the room: blocks of 128 keys have
two stages of K and of V where those of one CTA would not. (Pairs forward are FlashAttention-4's.)

Roles and the order of products are those of single CTAs (``forward``).
``python -m flash_attn_cute.kernels describe sm100 forward --d 256 --rows 8192`` prints ``forward_schedule``.

A CTA has one or two parts of 128 queries of a tile, the second CTA those behind the leader's. The mainloop goes over
all blocks that some query of the pair attends to. The leader issues the products of both CTAs, and publishes tiles to
both; each producer loads for its own CTA.

Products, by which halves a CTA r has (rows are ``left``'s and the sum's, columns ``right``'s):
                  sum, in tensor memory      left                             right, in shared memory
    S = Q K'      128 queries x 128 keys     Q: 128 queries x d, shared       K: keys r x d
    O += P V      128 queries x d_v          P: 128 queries, tensor memory    V: 128 keys x columns r
One descriptor serves both CTAs: the same operand lies at the same place in both.

Commits arrive in any order. A CTA of the pair lives until all have arrived there: its producer waits for those of the
last Q, K and V, and its softmax warps for those of the last O.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_attn_cute.kernels.common.query_tiles import QueryTile
from flash_attn_cute.kernels.common.tiles import take_tile
from flash_attn_cute.kernels.schedule import QUERY_TILE_FIELDS
from flash_attn_cute.kernels.sm100.config import CTAS, PART_ROWS
from flash_attn_cute.kernels.sm100.forward import ForwardSm100
from flash_attn_cute.kernels.sm100.forward_transfers import Producer, Shared
from flash_attn_cute.kernels.sm100.frame import InPair

_FIRST_KEY = QUERY_TILE_FIELDS - 1  # the field in which the second producer reads where keys begin


@dataclass(frozen=True)
class PairShared(InPair, Shared):
    """Shared memory of a CTA of a pair, and the broadcast of tiles to both CTAs."""

    rank: Int32
    tiles_sent: cute.Tensor  # the leader's copy of what the second CTA reads

    def _write(self, tile: QueryTile | None, step: Int32) -> None:
        """Writes a tile for both CTAs, by the leader, half of its queries for each, and signals that."""
        ring = self.rings.tiles
        if tile is None:
            for fields in (self.tiles, self.tiles_sent):
                fields[0, ring.stage(step)] = Int32(-1)
        else:
            queries = PART_ROWS * cute.size(self.sQ, mode=[2])  # of each CTA
            own, sent = (fields[None, ring.stage(step)] for fields in (self.tiles, self.tiles_sent))
            for fields, first_query in ((own, tile.first_query), (sent, tile.first_query + queries)):
                replace(tile, first_query=first_query).write(fields)
                fields[_FIRST_KEY] = tile.k.start
        ring.publish(step, self.tiles, self.tiles_sent)

    def first_key(self, step: Int32) -> Int32:
        """Where a tile's keys begin, in the tensor."""
        return self.tiles[_FIRST_KEY, self.rings.tiles.stage(step)]


class PairProducer(Producer):
    """A warp of each CTA: loads its part of all that is needed, in the order in which it is. The leader's chooses."""

    shared: PairShared

    @cute.jit
    def __call__(self) -> None:
        """All tiles of the pair."""
        c, a, tma, shared, rings, rank = self.config, self.a, self.tma, self.shared, self.shared.rings, self.shared.rank
        heads_a_key_head = a.mQ.shape[-2] // a.mK.shape[-2]
        step, q_step, block_step = Int32(0), Int32(0), Int32(0)
        first, _, _ = cute.arch.block_idx()
        index = self._publish_next(first // CTAS, step)
        rings.tiles.wait_full(step)
        while shared.tiles[0, rings.tiles.stage(step)] >= 0:
            tile = shared.tile(c, step)
            first_key, head_k = shared.first_key(step), tile.head // heads_a_key_head
            rings.tiles.release_fields(step)  # to the leader's producer
            for i in cutlass.range(tile.blocks.num, unroll=1):
                start = tile.blocks.nth(i) * c.tile_n
                own = start + c.keys_shared * rank
                # Keys of the second CTA may be none: an empty box arrives as zeros.
                own_end = cutlass.max(cutlass.min(own + c.keys_shared, tile.k.length), own)
                gK = tma.K.at(first_key + own, first_key + own_end, head_k, tile.batch)
                self._load("K", gK, block_step)
                if i == 0:
                    self._load_Q(tile, q_step)
                    q_step += c.q_parts
                stop = first_key + cutlass.min(start + c.tile_n, tile.k.length)
                gV = tma.V.at(first_key + start, stop, head_k, tile.batch, rank)
                self._load("V", gV, block_step)
                block_step += 1
            step += 1
            index = self._publish_next(index, step)
            rings.tiles.wait_full(step)
        # From the tensor cores of the pair: commits arrive in any order, and the CTA lives until all are here.
        rings.q.wait_all_empty(q_step)
        rings.k.wait_all_empty(block_step)
        rings.v.wait_all_empty(block_step)

    @cute.jit
    def _publish_next(self, index: Int32, step: Int32) -> Int32:
        """Publishes the first tile from ``index`` on that is work, or the end, by the leader to all roles of both CTAs.

        Returns the tile that may be the next one.
        """
        a, shared = self.a, self.shared
        if shared.is_leader:
            num_tiles, is_published = self.tiles.num(a), Boolean(False)
            while index < num_tiles and not is_published:
                tile = self.tiles.at(a, None, index)
                index = take_tile(a.mNextTile, num_tiles, cute.arch.grid_dim()[0] // CTAS)
                is_published = self.tiles.is_work(tile)
                if is_published:
                    shared.publish(tile, step)
            if not is_published:
                shared.publish(None, step)
        else:
            shared.rings.tiles.expect(step, shared.tiles)
        return index


class ForwardPairSm100(ForwardSm100):
    """The forward kernel of one configuration."""

    producer, shared_memory = PairProducer, PairShared.of
