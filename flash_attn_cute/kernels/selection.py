"""Sizes of a pass in which each query selects key blocks, for kernels and backends. Needs no cutlass."""

from typing import Any

BLOCKS = (64, 128)  # keys of a block
HEAD_DIMS = (64, 128)  # columns of tiles; TMA fills those that a call lacks with zeros
TILE_ROWS = 64  # of a tile: heads of some queries
WARPGROUPS_BACKWARD = 2  # of a CTA, each with sums of dK and dV of its own
ITEM_FIELDS = 4  # Int32 that describe an item: ``sm90.selection_transfers.Item``


def workspace_parts(config: Any, units: Any, picks: Any) -> dict[str, tuple[Any, ...]]:
    """Parts of the workspace, of numbers of 4 bytes, for units of so many picks: partial results.

    Out is of the operands' dtype, two numbers in 4 bytes; lse is in base 2.
    """
    return {"mOut": (units, picks, config.group * config.tile_dv // 2), "mLSE": (units, picks, config.group)}


def backward_workspace_parts(config: Any, units: Any, rows: Any, picks: Any, items: Any) -> dict[str, tuple[Any, ...]]:
    """Parts of the workspace of a backward pass, float32, for units of so many rows, picks and items.

    lse in base 2 and delta of each row; dQ of each pick; and dK and dV of each warpgroup of an item.
    """
    parts = items * WARPGROUPS_BACKWARD
    return {
        "mLSE": (units, rows, config.group),
        "mDelta": (units, rows, config.group),
        "mdQ": (units, picks, config.group * config.tile_d),
        "mdK": (units, parts, config.tile_n * config.tile_d),
        "mdV": (units, parts, config.tile_n * config.tile_dv),
    }
