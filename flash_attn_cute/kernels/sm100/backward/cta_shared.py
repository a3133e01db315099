"""Shared memory of the backward kernel (``cta``): what lies where, and what guards it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash_attn_cute.kernels.common.key_tiles import NUM_FIELDS, WorkTileBroadcast
from flash_attn_cute.kernels.common.ring import Ring, RingSet
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    DQ_STAGES,
    ENTRY_STAGES,
    SHARED_MEMORY,
    TILE_STAGES,
    BackwardConfig,
)
from flash_attn_cute.kernels.sm100.mma import swizzled

ADDING_WARPS = 2  # which take steps in turn
_TURN_NUMBERS = 2  # Int32 that the producer publishes: where dQ is added, and the turn


def _entry_numbers(config: BackwardConfig) -> int:
    """Number of Int32 that the producer publishes of a list's entry."""
    return 3 if config.features.bias else 2


class Layouts(NamedTuple):
    """Layouts of the operands."""

    sK: cute.ComposedLayout  # (tile_n, d, stage)
    sV: cute.ComposedLayout  # (tile_n, d_v, stage)
    sQ: cute.ComposedLayout  # (tile_m, d, stage)
    sdO: cute.ComposedLayout  # (tile_m, d_v, stage)
    sdS: cute.ComposedLayout  # (tile_n, tile_m)


def layouts_of(config: BackwardConfig, dtype: type) -> Layouts:
    """How operands lie in shared memory; made anew on the host's and on the kernel's side."""
    c = config
    return Layouts(
        sK=swizzled(dtype, (c.tile_n, c.tile_d, c.kv_stages)),
        sV=swizzled(dtype, (c.tile_n, c.tile_dv, c.kv_stages)),
        sQ=swizzled(dtype, (c.tile_m, c.tile_d, c.q_stages)),
        sdO=swizzled(dtype, (c.tile_m, c.tile_dv, c.do_stages)),
        sdS=swizzled(dtype, (c.tile_n, c.tile_m)),
    )


def tensors_of(storage: Any, layouts: Any) -> dict[str, cute.Tensor]:
    """Operands by their names."""
    return {
        name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
        for name, layout in layouts._asdict().items()
    }


@dataclass(frozen=True)
class Rings(RingSet):
    """All barriers of the kernel; see ``cta`` for who fills and empties what."""

    tiles: Ring
    k: Ring
    v: Ring
    q: Ring
    do: Ring
    scores: Ring
    dp: Ring
    dq: Ring
    pieces_even: Ring  # of even steps; the others are behind
    pieces_odd: Ring
    dv: Ring
    dk: Ring
    entries: Ring | None = field(default=None, kw_only=True)  # under a mask
    turns: Ring | None = field(default=None, kw_only=True)

    @staticmethod
    def stages(config: BackwardConfig) -> dict[str, int]:
        """Number of stages of each ring, by name."""
        c = config
        several = {"k": c.kv_stages, "v": c.kv_stages, "q": c.q_stages, "do": c.do_stages}
        several |= {
            "scores": c.num_passes,
            "dp": 2 - c.num_passes,
            "dq": c.parts_dQ,
        }  # two passes have one ring for S and dP
        pieces = dict.fromkeys(("pieces_even", "pieces_odd"), DQ_STAGES)
        published = dict.fromkeys(("entries", "turns"), ENTRY_STAGES) if c.features.listed else {}
        return {"tiles": TILE_STAGES, **several, **pieces, "dv": 1, "dk": 1, **published}

    def init(self, config: BackwardConfig) -> None:
        """Before all else, by one thread."""
        compute, drain, mma = 4 * COMPUTE_WARPGROUPS, 4, 1  # warps
        self.tiles.init(full=1, empty=compute + drain + mma + ADDING_WARPS)
        for ring, pieces in ((self.k, config.pieces_dK), (self.v, config.pieces_dV)):
            # An arrival with the bytes announced; a warpgroup's arrival: its pieces of dK, or dV, have left.
            ring.init(full=1, empty=min(pieces, COMPUTE_WARPGROUPS))
        for ring, has_stats in ((self.q, True), (self.do, config.num_passes == 1)):
            ring.init(full=1, empty=1 + compute * has_stats)  # likewise; a commit, and lse or delta is read
        for ring in (self.scores, self.dp):
            ring.init(full=1, empty=compute)  # a commit; what is made of it is there
        self.dq.init(full=1, empty=drain)  # a commit
        for ring in (self.pieces_even, self.pieces_odd):
            ring.init(full=drain, empty=1)
        for ring, pieces in ((self.dv, config.pieces_dV), (self.dk, config.pieces_dK)):
            ring.init(full=1, empty=4 * min(pieces, COMPUTE_WARPGROUPS))  # a commit; the warps that have read it
        if self.entries is not None:
            self.entries.init(full=1, empty=compute)
        if self.turns is not None:
            self.turns.init(full=1, empty=ADDING_WARPS)

    def pieces(self, step: Int32) -> Ring:
        """Ring of dQ's pieces for the adding warp that has the step. Each adding warp has every other step."""
        return Ring(self.pieces_even.barriers + 2 * DQ_STAGES * (step % ADDING_WARPS), DQ_STAGES)

    @cute.jit
    def put_out(self, config: cutlass.Constexpr, step: Int32, i: cutlass.Constexpr) -> None:
        """By a drain warp: a step's i-th piece of dQ is there."""
        for which, ring in enumerate((self.pieces_even, self.pieces_odd)):
            if step % ADDING_WARPS == which:
                ring.arrive(piece_number(config, step, i))  # to the adding warp whose step it is


def piece_number(config: BackwardConfig, step: Int32, i: int) -> Int32:
    """Number of a step's i-th piece, counted over the steps of its adding warp."""
    return step // ADDING_WARPS * config.pieces_dQ + i


def storage_of(config: BackwardConfig, dtype: type, layouts: Layouts) -> type:
    """All shared memory of a CTA."""
    c = config
    num_barriers = 2 * sum(Rings.stages(c).values())
    info_stages = ENTRY_STAGES if c.features.listed else 0

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, num_barriers]
        holder: cute.struct.MemRange[Int32, 1]
        tile_fields: cute.struct.MemRange[Int32, NUM_FIELDS * TILE_STAGES]
        entries: cute.struct.MemRange[Int32, _entry_numbers(c) * info_stages]
        turns: cute.struct.MemRange[Int32, _TURN_NUMBERS * info_stages]
        lse: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.q_stages], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.delta_stages], 128]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
        sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
        sdO: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO)], 1024]
        sdS: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdS)], 1024]
        dQ: cute.struct.Align[cute.struct.MemRange[Float32, c.piece_numbers * DQ_STAGES], 1024]

    assert Storage.size_in_bytes() <= SHARED_MEMORY
    return Storage


@dataclass(frozen=True)
class StepInfo:
    """Numbers that the producer publishes step by step."""

    ring: Ring
    numbers: cute.Tensor  # (number, stage)

    @cute.jit
    def publish(self, step: Int32, numbers: tuple[Int32, ...]) -> None:
        """Publishes the numbers of a step, by the producer, when all readers have released the stage."""
        self.ring.wait_empty(step)  # from those who read
        with cute.arch.elect_one():
            for i, number in enumerate(numbers):
                self.numbers[i, self.ring.stage(step)] = number
            cute.arch.mbarrier_arrive(self.ring.full(step))  # to them

    def read(self, step: Int32) -> tuple[Int32, ...]:
        """Reads the numbers of a step and releases its stage, once by each warp."""
        self.ring.wait_full(step)  # from the producer
        found = tuple(self.numbers[i, self.ring.stage(step)] for i in range(cute.size(self.numbers, mode=[0])))
        self.ring.release(step)  # to it
        return found


@dataclass(frozen=True)
class Shared(WorkTileBroadcast):
    """Shared memory and what guards it."""

    sK: cute.Tensor  # (tile_n, d, stage); then dK on its way out
    sV: cute.Tensor  # (tile_n, d_v, stage); then dV on its way out
    sQ: cute.Tensor  # (tile_m, d, stage)
    sdO: cute.Tensor  # (tile_m, d_v, stage)
    sdS: cute.Tensor  # (tile_n, tile_m)
    lse: cute.Tensor  # (tile_m, stage of q)
    delta: cute.Tensor  # (tile_m, stage of do, or, of two passes, of q)
    dQ: cute.Tensor  # (numbers of a piece, stage)
    tile_fields: cute.Tensor  # (field, stage of tiles)
    tiles: Ring
    rings: Rings
    holder: cute.Pointer  # of where tensor memory begins
    # Under a mask, a step's block of queries, its code and, with a bias, the head, to compute warps; and which block of
    # dQ, counted over all heads, it adds to, and its turn, to adding warps, whose steps are those that have a dQ.
    entries: StepInfo | None
    turns: StepInfo | None

    rank = 0  # of the CTA, among those of a tile

    @staticmethod
    def of(config: BackwardConfig, dtype: type, storage: Any) -> "Shared":
        """Shared memory of a CTA, on the device."""
        c, rings = config, Rings.at(config, storage.barriers.data_ptr())
        entries, turns = (cute.make_layout((n, ENTRY_STAGES)) for n in (_entry_numbers(c), _TURN_NUMBERS))
        return Shared(
            **tensors_of(storage, layouts_of(c, dtype)),
            lse=storage.lse.get_tensor(cute.make_layout((c.tile_m, c.q_stages))),
            delta=storage.delta.get_tensor(cute.make_layout((c.tile_m, c.delta_stages))),
            dQ=storage.dQ.get_tensor(cute.make_layout((c.piece_numbers, DQ_STAGES))),
            tile_fields=storage.tile_fields.get_tensor(cute.make_layout((NUM_FIELDS, TILE_STAGES))),
            tiles=rings.tiles,
            rings=rings,
            holder=storage.holder.data_ptr(),
            entries=StepInfo(rings.entries, storage.entries.get_tensor(entries)) if c.features.listed else None,
            turns=StepInfo(rings.turns, storage.turns.get_tensor(turns)) if c.features.listed else None,
        )

    @property
    def tensor_memory(self) -> cute.Pointer:
        """Where it begins, read every time: one register for all roles would live too long."""
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self.holder)
