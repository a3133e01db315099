"""Roles that load tiles for a pair of CTAs (see ``forward_pair``); O leaves each CTA by ``forward_transfers``."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.block_lists import Tables
from flash_attn_cute.kernels.common.query_tiles import QueryTile
from flash_attn_cute.kernels.common.tiles import take_tile
from flash_attn_cute.kernels.common.tma import ForwardTiles
from flash_attn_cute.kernels.sm100.config import CTAS
from flash_attn_cute.kernels.sm100.forward_pair_shared import PairShared
from flash_attn_cute.kernels.sm100.forward_transfers import Producer


class PairProducer(Producer):
    """A warp of each CTA: loads its part of all that is needed, in the order in which it is. The leader's chooses."""

    @cute.jit
    def __call__(self, a: ForwardArguments, tables: Tables | None, tma: ForwardTiles, shared: PairShared) -> None:
        """All tiles of the pair."""
        c, rings, rank = self.config, shared.rings, shared.rank
        heads_a_key_head = a.mQ.shape[-2] // a.mK.shape[-2]
        step, q_step, block_step = Int32(0), Int32(0), Int32(0)
        first, _, _ = cute.arch.block_idx()
        index = self._publish_next(a, shared, first // CTAS, step)
        rings.tiles.wait_full(step)
        while shared.tiles[0, rings.tiles.stage(step)] >= 0:
            tile = QueryTile.read(c, shared.tiles[None, rings.tiles.stage(step)])
            first_key, head_k = shared.first_key(step), tile.head // heads_a_key_head
            rings.tiles.release_fields(step)  # to the leader's producer
            for i in cutlass.range(tile.blocks.num, unroll=1):
                start = tile.blocks.nth(i) * c.tile_n
                own = start + c.keys_shared * rank
                # Keys of the second CTA may be none: an empty box arrives as zeros.
                own_end = cutlass.max(cutlass.min(own + c.keys_shared, tile.k.length), own)
                gK = tma.K.at(first_key + own, first_key + own_end, head_k, tile.batch)
                self._load(tma.K, gK, shared, shared.sK, rings.k, block_step)
                if i == 0:
                    self._load_Q(tile, tma.Q, shared, q_step)
                    q_step += c.q_parts
                stop = first_key + cutlass.min(start + c.tile_n, tile.k.length)
                gV = tma.V.at(first_key + start, stop, head_k, tile.batch, rank)
                self._load(tma.V, gV, shared, shared.sV, rings.v, block_step)
                block_step += 1
            step += 1
            index = self._publish_next(a, shared, index, step)
            rings.tiles.wait_full(step)
        # From the tensor cores of the pair: commits arrive in any order, and the CTA lives until all are here.
        rings.q.wait_all_empty(q_step)
        rings.k.wait_all_empty(block_step)
        rings.v.wait_all_empty(block_step)

    @cute.jit
    def _publish_next(self, a: ForwardArguments, shared: PairShared, index: Int32, step: Int32) -> Int32:
        """Publishes the first tile from ``index`` on that is work, or the end, by the leader to all roles of both CTAs.

        Returns the tile that may be the next one.
        """
        if shared.is_leader:
            num_tiles, is_published = self.tiles.num(a), Boolean(False)
            while index < num_tiles and not is_published:
                tile = self.tiles.at(a, None, index)
                index = take_tile(a.mNextTile, num_tiles, cute.arch.grid_dim()[0] // CTAS)
                is_published = self.tiles.is_work(tile)
                if is_published:
                    shared.publish(tile, self.config.queries, step)
            if not is_published:
                shared.publish_end(step)
        else:
            shared.rings.tiles.expect(step, shared.tiles)
        return index

    @cute.jit
    def _announce(self, shared: PairShared, ring: cutlass.Constexpr, step: Int32) -> None:
        """By the leader: the bytes of both, which arrive at its barrier."""
        if shared.is_leader:
            with cute.arch.elect_one():
                ring.announce(step)
