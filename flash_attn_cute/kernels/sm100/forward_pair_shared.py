"""Shared memory of a CTA of a pair (``forward_pair``): barriers, and the broadcast of tiles to both CTAs."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_attn_cute.kernels.common.query_tiles import QueryTile
from flash_attn_cute.kernels.common.ring import LedRing
from flash_attn_cute.kernels.schedule import QUERY_TILE_FIELDS
from flash_attn_cute.kernels.sm100.config import CTAS, SECOND, TILE_STAGES, ForwardConfig
from flash_attn_cute.kernels.sm100.forward_shared import Rings, Shared, fields_of

_FIRST_KEY = QUERY_TILE_FIELDS - 1  # the field in which the second producer reads where keys begin


@dataclass(frozen=True)
class PairRings(Rings):
    """All barriers of a CTA; see ``forward_pair`` for who fills and empties what, and whose barriers count."""

    @classmethod
    def at(cls, config: ForwardConfig, barriers: cute.Pointer) -> "PairRings":
        """One after the other."""
        rings = super().at(config, barriers)
        led = {name: getattr(rings, name) for name in ("tiles", "scores", "p", "outputs")}
        return replace(rings, **{name: LedRing(ring.barriers, ring.stages) for name, ring in led.items()})

    def init(self, config: ForwardConfig) -> None:
        """Before all else, by one thread. Both CTAs do so alike, though for many rings only the leader counts."""
        softmax, epilogue, mma, producer = 4 * config.q_parts, 4, 1, 1  # warps
        # An arrival, and of the second CTA the bytes that it announces.
        self.tiles.init(full=1, empty=mma + CTAS * (softmax + epilogue + producer))
        for ring in (self.q, self.k, self.v):
            ring.init(full=1, empty=1)  # an arrival with the bytes announced; a commit
        self.scores.init(full=1, empty=CTAS * 4)  # a commit; the warps of a part
        self.p.init(full=CTAS * 4, empty=1)
        self.outputs.init(full=1, empty=CTAS * epilogue)  # a commit
        self.stats.init(full=4, empty=epilogue)
        if self.added is not None:
            self.added.init(full=1, empty=1)  # a commit


@dataclass(frozen=True)
class PairShared(Shared):
    """Shared memory of a CTA and what guards it."""

    rank: Int32  # of the CTA: the leader is 0
    tiles_sent: cute.Tensor  # (field, tile stage), the leader's copy of what the second CTA reads

    @staticmethod
    def at(config: ForwardConfig, dtype: type, storage: Any, rank: Int32) -> "PairShared":
        """Shared memory of a CTA, on the device."""
        rings = PairRings.at(config, storage.barriers.data_ptr())
        both = storage.tiles.get_tensor(cute.make_layout((QUERY_TILE_FIELDS, TILE_STAGES, CTAS)))
        return PairShared(**fields_of(config, dtype, storage, rings), rank=rank, tiles_sent=both[None, None, SECOND])

    @property
    def is_leader(self) -> Boolean:
        """Whether it is the CTA that chooses tiles and issues products."""
        return self.rank != SECOND

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
