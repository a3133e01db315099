"""Shared memory of a CTA of a pair (``forward_pair``), and the broadcast of tiles to both CTAs."""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.query_tiles import QueryTile
from flash_attn_cute.kernels.schedule import QUERY_TILE_FIELDS
from flash_attn_cute.kernels.sm100.forward_shared import Shared
from flash_attn_cute.kernels.sm100.frame import InPair

_FIRST_KEY = QUERY_TILE_FIELDS - 1  # the field in which the second producer reads where keys begin


@dataclass(frozen=True)
class PairShared(Shared, InPair):
    """Shared memory of a CTA and what guards it."""

    rank: Int32
    tiles_sent: cute.Tensor  # the leader's copy of what the second CTA reads

    @cute.jit
    def publish(self, tile: QueryTile, queries: int, step: Int32) -> None:
        """Publishes a tile to both CTAs, by the leader's producer: half of its queries to each."""
        ring = self.rings.tiles
        ring.wait_empty(step)  # from all other roles of both: they are done with the stage's last tile
        with cute.arch.elect_one():
            own, sent = (fields[None, ring.stage(step)] for fields in (self.tiles, self.tiles_sent))
            for fields, first_query in ((own, tile.first_query), (sent, tile.first_query + queries)):
                replace(tile, first_query=first_query).write(fields)
                fields[_FIRST_KEY] = tile.k.start
            ring.publish(step, self.tiles, self.tiles_sent)

    @cute.jit
    def publish_end(self, step: Int32) -> None:
        """Publishes the end of work to both CTAs, by the leader's producer."""
        ring = self.rings.tiles
        ring.wait_empty(step)  # as above
        with cute.arch.elect_one():
            for fields in (self.tiles, self.tiles_sent):
                fields[0, ring.stage(step)] = Int32(-1)
            ring.publish(step, self.tiles, self.tiles_sent)

    def first_key(self, step: Int32) -> Int32:
        """Where a tile's keys begin, in the tensor."""
        return self.tiles[_FIRST_KEY, self.rings.tiles.stage(step)]
