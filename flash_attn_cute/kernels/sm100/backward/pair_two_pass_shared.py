"""Shared memory of a CTA of a pair in two passes (``pair_two_pass``): layouts, storage and barriers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash_attn_cute.kernels.common.key_tiles import NUM_FIELDS
from flash_attn_cute.kernels.sm100.backward.pair_shared import STATS_STAGES, PairRings, PairShared
from flash_attn_cute.kernels.sm100.config import (
    CTAS,
    DQ_STAGES,
    PART_ROWS,
    SHARED_MEMORY,
    TILE_STAGES,
    BackwardConfig,
)
from flash_attn_cute.kernels.sm100.mma import swizzled


class _Places(NamedTuple):
    """Places of shared memory: the operands of each time in turn. Operands of one time lie next to each other."""

    keys: tuple[tuple[str, ...], ...] = (("sK",), ("sdV",), ("sK_columns",))
    values: tuple[tuple[str, ...], ...] = (("sV",),)
    queries: tuple[tuple[str, ...], ...] = (("sQ",), ("sQ_columns",))
    gradients: tuple[tuple[str, ...], ...] = (("sdO_columns",), ("sdO", "sdS"))


def _layouts_of(config: BackwardConfig, dtype: type) -> dict[str, cute.ComposedLayout]:
    """How operands lie in their places, by their names."""
    c = config
    shapes = {
        "sK": (PART_ROWS, c.tile_d, 1),
        "sdV": (PART_ROWS, c.tile_dv, 1),
        "sK_columns": (c.tile_n, c.columns_of_keys),
        "sV": (PART_ROWS, c.tile_dv, 1),
        "sQ": (c.queries_shared, c.tile_d, c.q_stages),
        "sQ_columns": (c.tile_m, c.tile_d // CTAS, c.q_stages),
        "sdO": (c.queries_shared, c.tile_dv),
        "sdO_columns": (c.tile_m, c.tile_dv // CTAS, PairRings.stages(c)["do_columns"]),
        "sdS": (PART_ROWS, c.queries_shared, CTAS + 1),
    }
    return {name: swizzled(dtype, shape) for name, shape in shapes.items()}


def storage_of(config: BackwardConfig, dtype: type) -> type:
    """All shared memory of a CTA."""
    c, layouts = config, _layouts_of(config, dtype)
    num_barriers = 2 * sum(PairRings.stages(c).values())
    sizes = _Places(*(max(sum(cute.cosize(layouts[x]) for x in names) for names in times) for times in _Places()))

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, num_barriers]
        holder: cute.struct.MemRange[Int32, 1]
        tile_fields: cute.struct.Align[cute.struct.MemRange[Int32, NUM_FIELDS * TILE_STAGES], 16]
        lse: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * STATS_STAGES], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * STATS_STAGES], 128]
        keys: cute.struct.Align[cute.struct.MemRange[dtype, sizes.keys], 1024]
        values: cute.struct.Align[cute.struct.MemRange[dtype, sizes.values], 1024]
        queries: cute.struct.Align[cute.struct.MemRange[dtype, sizes.queries], 1024]
        gradients: cute.struct.Align[cute.struct.MemRange[dtype, sizes.gradients], 1024]
        dQ: cute.struct.Align[cute.struct.MemRange[Float32, c.piece_numbers * DQ_STAGES], 1024]

    assert Storage.size_in_bytes() <= SHARED_MEMORY
    return Storage


@dataclass(frozen=True, kw_only=True)
class PairTwoPassShared(PairShared):
    """Shared memory of a CTA and what guards it. Q, by rows as by columns, and dO by columns have stages."""

    sdV: cute.Tensor  # (its keys, d_v, 1), on its way out

    @staticmethod
    def _tensors(config: BackwardConfig, dtype: type, storage: Any) -> dict[str, cute.Tensor]:
        layouts, found = _layouts_of(config, dtype), {}
        for place, times in _Places()._asdict().items():
            for names in times:
                first = 0
                for name in names:
                    whole = getattr(storage, place).get_tensor(layouts[name].outer, swizzle=layouts[name].inner)
                    found[name] = cute.make_tensor(whole.iterator + first, layouts[name].outer)
                    first += cute.cosize(layouts[name])
        return found
