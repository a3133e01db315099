"""Shared memory of a CTA of a pair (``pair``): what lies where, and what guards it."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash_attn_cute.kernels.common.assembly import copy_to_cta
from flash_attn_cute.kernels.common.key_tiles import NUM_FIELDS
from flash_attn_cute.kernels.common.ring import LedRing, Ring
from flash_attn_cute.kernels.sm100.backward.cta_shared import ADDING_WARPS, Rings, Shared, tensors_of
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    CTAS,
    DQ_STAGES,
    PART_ROWS,
    SECOND,
    SHARED_MEMORY,
    TILE_STAGES,
    BackwardConfig,
)
from flash_attn_cute.kernels.sm100.mma import swizzled

STATS_STAGES = 2  # blocks whose lse and delta are in shared memory
OUT = CTAS  # the place of dS that is to be sent


class PairLayouts(NamedTuple):
    """Layouts of the operands. A CTA has its own keys, and half of what is split among both."""

    sK: cute.ComposedLayout  # (its keys, d, 1)
    sK_columns: cute.ComposedLayout  # (all keys, its columns)
    sV: cute.ComposedLayout  # (its keys, d_v, 1)
    sQ: cute.ComposedLayout  # (its queries, d)
    sQ_columns: cute.ComposedLayout  # (all queries, its columns)
    sdO: cute.ComposedLayout  # (its queries, d_v)
    sdO_columns: cute.ComposedLayout  # (all queries, its columns)
    sdS: cute.ComposedLayout  # (keys of a CTA, queries of one, 3): its queries by each CTA's keys, and what is sent


def layouts_of(config: BackwardConfig, dtype: type) -> PairLayouts:
    """How operands lie in shared memory; made anew on the host's and on the kernel's side."""
    c = config
    return PairLayouts(
        sK=swizzled(dtype, (PART_ROWS, c.tile_d, 1)),
        sK_columns=swizzled(dtype, (c.tile_n, c.columns_of_keys)),
        sV=swizzled(dtype, (PART_ROWS, c.tile_dv, 1)),
        sQ=swizzled(dtype, (c.queries_shared, c.tile_d)),
        sQ_columns=swizzled(dtype, (c.tile_m, c.tile_d // CTAS)),
        sdO=swizzled(dtype, (c.queries_shared, c.tile_dv)),
        sdO_columns=swizzled(dtype, (c.tile_m, c.tile_dv // CTAS)),
        sdS=swizzled(dtype, (PART_ROWS, c.queries_shared, CTAS + 1)),
    )


@dataclass(frozen=True)
class PairRings(Rings):
    """All barriers of a CTA; see ``pair`` for who fills and empties what, and whose barriers count."""

    k_columns: Ring
    q_columns: Ring
    do_columns: Ring
    stats: Ring
    p: Ring
    exchange: Ring
    keys: Ring

    @staticmethod
    def stages(config: BackwardConfig) -> dict[str, int]:
        """Number of stages of each ring, by name."""
        num_passes = config.num_passes
        columns = {"k_columns": 1, "q_columns": 2 - num_passes, "do_columns": num_passes}
        more = {"p": 2 - num_passes, "exchange": 1, "stats": STATS_STAGES, "keys": num_passes - 1}
        return {**Rings.stages(config), **columns, **more}

    @classmethod
    def at(cls, config: BackwardConfig, barriers: cute.Pointer) -> "PairRings":
        """One after the other."""
        rings = super().at(config, barriers)
        led = ("tiles", "scores", "p", "dp", "dq", "exchange", "dv", "dk", "keys")
        return replace(
            rings, **{name: LedRing(getattr(rings, name).barriers, getattr(rings, name).stages) for name in led}
        )

    def init(self, config: BackwardConfig) -> None:
        """Before all else, by one thread. Both CTAs do so alike, though for many rings only the leader counts."""
        compute, drain, mma, producer = 4 * COMPUTE_WARPGROUPS, 4, 1, 1  # warps
        # An arrival, and of the second CTA the bytes that it announces.
        self.tiles.init(full=1, empty=CTAS * (compute + drain + mma + producer + ADDING_WARPS))
        by_dV, other = (self.k_columns, self.k) if config.holds_keys else (self.k, self.k_columns)
        for ring in (by_dV, self.v):
            # An arrival with the bytes announced; what took its place left, of which each warpgroup had pieces.
            ring.init(full=1, empty=COMPUTE_WARPGROUPS)
        for ring in (other, self.q, self.q_columns, self.do, self.do_columns):
            ring.init(full=1, empty=1)  # likewise; a commit
        self.stats.init(full=1, empty=compute)  # likewise; lse and delta are read
        for ring in (self.scores, self.dp):
            ring.init(full=1, empty=CTAS * compute)  # a commit; scores are read, or dS is there
        for ring in (self.p, self.keys):
            ring.init(full=CTAS * compute, empty=1)
        self.exchange.init(full=4, empty=1)  # the warps that announce bytes; the second CTA's mma warp
        self.dq.init(full=1, empty=CTAS * drain)  # a commit
        for ring in (self.pieces_even, self.pieces_odd):
            ring.init(full=drain, empty=1)
        for ring in (self.dv, self.dk):
            ring.init(full=1, empty=CTAS * compute)  # a commit; the warps that have read it


def storage_of(config: BackwardConfig, dtype: type, layouts: PairLayouts) -> type:
    """All shared memory of a CTA."""
    c = config
    num_barriers = 2 * sum(PairRings.stages(c).values())

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, num_barriers]
        holder: cute.struct.MemRange[Int32, 1]
        tile_fields: cute.struct.Align[cute.struct.MemRange[Int32, NUM_FIELDS * TILE_STAGES], 16]
        lse: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * STATS_STAGES], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * STATS_STAGES], 128]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
        sK_columns: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK_columns)], 1024]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
        sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
        sQ_columns: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ_columns)], 1024]
        sdO: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO)], 1024]
        sdO_columns: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO_columns)], 1024]
        sdS: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdS)], 1024]
        dQ: cute.struct.Align[cute.struct.MemRange[Float32, c.piece_numbers * DQ_STAGES], 1024]

    assert Storage.size_in_bytes() <= SHARED_MEMORY
    return Storage


@dataclass(frozen=True)
class PairShared(Shared):
    """Shared memory of a CTA and what guards it."""

    sK_columns: cute.Tensor  # (tile_n, columns_of_keys)
    sQ_columns: cute.Tensor  # (tile_m, d / 2)
    sdO_columns: cute.Tensor  # (tile_m, d_v / 2)
    rank: Int32  # of the CTA: the leader is 0

    @classmethod
    def at(cls, config: BackwardConfig, dtype: type, storage: Any, rank: Int32) -> "PairShared":
        """Shared memory of a CTA, on the device."""
        c, rings = config, PairRings.at(config, storage.barriers.data_ptr())
        return cls(
            **cls._tensors(c, dtype, storage),
            lse=storage.lse.get_tensor(cute.make_layout((c.tile_m, STATS_STAGES))),
            delta=storage.delta.get_tensor(cute.make_layout((c.tile_m, STATS_STAGES))),
            dQ=storage.dQ.get_tensor(cute.make_layout((c.piece_numbers, DQ_STAGES))),
            tile_fields=storage.tile_fields.get_tensor(cute.make_layout((NUM_FIELDS, TILE_STAGES))),
            tiles=rings.tiles,
            rings=rings,
            holder=storage.holder.data_ptr(),
            entries=None,
            turns=None,
            rank=rank,
        )

    @staticmethod
    def _tensors(config: BackwardConfig, dtype: type, storage: Any) -> dict[str, cute.Tensor]:
        """Operands by their names."""
        return tensors_of(storage, layouts_of(config, dtype))

    @property
    def is_leader(self) -> cutlass.Boolean:
        """Whether it is the CTA that chooses tiles and issues products."""
        return self.rank != SECOND

    def _signal(self, tile_idx: Int32) -> None:
        """Signals, by one thread of the leader, that the fields are written, and sends them to the second CTA."""
        self.tiles.publish(tile_idx, self.tile_fields, self.tile_fields)

    @cute.jit
    def send_dS(self, step: Int32, warp: Int32) -> None:
        """By a warp, whose 32 keys' dS of the other CTA's queries are at the last place: sends them there.

        The other CTA's same warp, or that beside it, sends as many bytes as this one.
        """
        numbers = PART_ROWS // 4 * cute.size(self.sdS, mode=[1])
        source, target = (self.sdS.iterator + (4 * place + warp) * numbers for place in (OUT, self.rank))
        full = self.rings.exchange.full(step)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * numbers)
            copy_to_cta(1 - self.rank, target, source, 2 * numbers, full)
