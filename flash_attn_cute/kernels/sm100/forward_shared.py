"""Shared memory of the forward kernel (``forward``): what lies where, and what guards it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash_attn_cute.kernels.common.ring import Ring, RingSet
from flash_attn_cute.kernels.schedule import QUERY_TILE_FIELDS
from flash_attn_cute.kernels.sm100.config import (
    ENTRY_STAGES,
    ITERATOR_FIELDS,
    O_COLUMNS,
    O_STAGES,
    PART_ROWS,
    SHARED_MEMORY,
    TILE_STAGES,
    ForwardConfig,
)
from flash_attn_cute.kernels.sm100.mma import swizzled


class Layouts(NamedTuple):
    """Layouts of the operands and of O's pieces. A CTA of a pair has half of K's rows, and of V's columns."""

    sQ: cute.ComposedLayout  # (128, d, part)
    sK: cute.ComposedLayout  # (keys, d, stage)
    sV: cute.ComposedLayout  # (tile_n, columns, stage)
    sO: cute.ComposedLayout  # (128, 64, stage)


def layouts_of(config: ForwardConfig, dtype: type) -> Layouts:
    """How operands lie in shared memory; made anew on the host's and on the kernel's side."""
    c = config
    return Layouts(
        sQ=swizzled(dtype, (PART_ROWS, c.tile_d, c.q_parts)),
        sK=swizzled(dtype, (c.keys_shared, c.tile_d, c.k_stages)),
        sV=swizzled(dtype, (c.tile_n, c.columns_shared, c.v_stages)),
        sO=swizzled(dtype, (PART_ROWS, O_COLUMNS, O_STAGES)),
    )


@dataclass(frozen=True)
class Rings(RingSet):
    """All barriers of the kernel; see ``forward`` for who fills and empties what."""

    tiles: Ring
    q: Ring
    k: Ring
    v: Ring
    scores: Ring
    p: Ring
    outputs: Ring
    stats: Ring
    added: Ring | None = None  # with one part
    entries: Ring | None = None  # under a mask

    @staticmethod
    def stages(config: ForwardConfig) -> dict[str, int]:
        """Number of stages of each ring, by name."""
        c = config
        added = {"added": 1} if c.q_parts == 1 else {}
        entries = {"entries": ENTRY_STAGES} if c.features.listed else {}
        return {
            "tiles": TILE_STAGES,
            "q": c.q_parts,
            "k": c.k_stages,
            "v": c.v_stages,
            "scores": 2,
            "p": 2,
            "outputs": c.q_parts,
            "stats": c.q_parts,
            **added,
            **entries,
        }

    def init(self, config: ForwardConfig) -> None:
        """Before all else, by one thread."""
        softmax, epilogue, mma = 4 * config.q_parts, 4, 1  # warps
        self.tiles.init(full=1, empty=softmax + epilogue + mma)
        for ring in (self.k, self.v):
            ring.init(full=1, empty=1)  # an arrival with the bytes announced; a commit
        self.q.init(full=1, empty=2 if config.o_in_q else 1)  # likewise; and O has left
        self.scores.init(full=1, empty=4)  # a commit; the warps of a part
        self.p.init(full=4, empty=1)
        self.outputs.init(full=1, empty=epilogue)  # a commit
        self.stats.init(full=4, empty=epilogue)
        if self.added is not None:
            self.added.init(full=1, empty=1)  # a commit
        if self.entries is not None:
            self.entries.init(full=1, empty=softmax + (mma if config.leaves_out else 0))


def storage_of(config: ForwardConfig, dtype: type, layouts: Layouts) -> type:
    """All shared memory of a CTA."""
    num_barriers = 2 * sum(Rings.stages(config).values())
    num_entries = (1 + config.q_parts) * ENTRY_STAGES if config.features.listed else 0
    num_fields = ITERATOR_FIELDS * config.q_parts if config.features.listed else 0

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, num_barriers]
        holder: cute.struct.MemRange[Int32, 1]
        entries: cute.struct.MemRange[Int32, num_entries]
        iterator: cute.struct.MemRange[Int32, num_fields]
        stats: cute.struct.MemRange[Float32, 2 * PART_ROWS * config.q_parts]
        tiles: cute.struct.Align[cute.struct.MemRange[Int32, QUERY_TILE_FIELDS * TILE_STAGES * config.ctas_a_tile], 16]
        sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
        sO: cute.struct.Align[cute.struct.MemRange[dtype, 0 if config.o_in_q else cute.cosize(layouts.sO)], 1024]

    assert Storage.size_in_bytes() <= SHARED_MEMORY
    return Storage


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it."""

    sQ: cute.Tensor  # (128, d, part)
    sK: cute.Tensor  # (keys, d, stage)
    sV: cute.Tensor  # (tile_n, columns, stage)
    sO: cute.Tensor | None  # (128, 64, stage); None, if O leaves through the place of Q
    tiles: cute.Tensor  # (field, tile stage)
    entries: cute.Tensor | None  # (block and its code for each part, stage), under a mask
    iterator: cute.Tensor | None  # (field, part), the producer's, under a mask
    stats: cute.Tensor  # (row, row_sum and row_max, part)
    rings: Rings
    holder: cute.Pointer  # of where tensor memory begins

    @staticmethod
    def of(config: ForwardConfig, dtype: type, storage: Any) -> "Shared":
        """Shared memory of a CTA, on the device."""
        return Shared(**fields_of(config, dtype, storage, Rings.at(config, storage.barriers.data_ptr())))

    @property
    def tensor_memory(self) -> cute.Pointer:
        """Where it begins, read every time: one register for all roles would live too long."""
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self.holder)

    def piece_of_O(self, part: Int32, piece: int, number: Int32) -> cute.Tensor:
        """Where 64 columns of a part's O are put, (128, 64); ``number`` counts what has been put so far."""
        if self.sO is not None:
            return self.sO[None, None, number % O_STAGES]
        return cute.local_tile(self.sQ[None, None, part], (PART_ROWS, O_COLUMNS), (0, piece))


def fields_of(config: ForwardConfig, dtype: type, storage: Any, rings: Rings) -> dict[str, Any]:
    """The fields of ``Shared``."""
    c, layouts = config, layouts_of(config, dtype)
    entries = iterator = None
    if c.features.listed:
        entries = storage.entries.get_tensor(cute.make_layout((1 + c.q_parts, ENTRY_STAGES)))
        iterator = storage.iterator.get_tensor(cute.make_layout((ITERATOR_FIELDS, c.q_parts)))
    return {
        "sQ": storage.sQ.get_tensor(layouts.sQ.outer, swizzle=layouts.sQ.inner),
        "sK": storage.sK.get_tensor(layouts.sK.outer, swizzle=layouts.sK.inner),
        "sV": storage.sV.get_tensor(layouts.sV.outer, swizzle=layouts.sV.inner),
        "sO": None if c.o_in_q else storage.sO.get_tensor(layouts.sO.outer, swizzle=layouts.sO.inner),
        "tiles": storage.tiles.get_tensor(cute.make_layout((QUERY_TILE_FIELDS, TILE_STAGES))),
        "entries": entries,
        "iterator": iterator,
        "stats": storage.stats.get_tensor(cute.make_layout((PART_ROWS, 2, c.q_parts))),
        "rings": rings,
        "holder": storage.holder.data_ptr(),
    }
