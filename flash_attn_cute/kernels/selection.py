"""Sizes of a pass in which each query selects key blocks, for kernels and backends. Needs no cutlass."""

import math
from typing import Any, NamedTuple

BLOCKS = (64, 128)  # keys of a kernel's block
HEAD_DIMS = (64, 128, 192, 256)  # columns of tiles; TMA fills those that a call lacks with zeros
LANES = 32  # of a warp
TILE_ROWS = 64  # of a tile: heads of some queries
SCALED_COLUMNS = 64  # of a row of a pick's dQ in 16 bits, which have a scale
KEY_WORDS = 2  # Int32 with a bit for each of 64 keys
ITEM_FIELDS = 4  # Int32 that describe an item: ``sm90.selection_transfers.Item``
PICKS_AT_ONCE = 256  # that a warp reads together where tables are made; chunks are multiples of it
_PICKS_A_COLUMN = 4  # that a chunk has at the least, so that counts take a quarter of the bytes of picks


def num_parts(block: int, tile_n: int) -> int:
    """A kernel's blocks of ``tile_n`` keys of which a selected block has keys, at the most."""
    return -(-(tile_n - math.gcd(block, tile_n) + block) // tile_n)


def num_columns(k_rows: int, block: int, num_sequences: int) -> int:
    """Key blocks of all sequences, at the most; ``num_sequences`` is 0 of dense calls."""
    return k_rows // block + num_sequences if num_sequences else -(-k_rows // block)


class TableSizes(NamedTuple):
    """Sizes of the tables of a set of so many picks."""

    items: int  # at the most
    chunks: int  # of picks, each counted by a warp
    chunk_picks: int

    @staticmethod
    def of(picks: int, columns: int, item_picks: int) -> "TableSizes":
        """Sizes for items of ``item_picks`` picks at the most."""
        chunk_picks = -(-max(1024, _PICKS_A_COLUMN * columns) // PICKS_AT_ONCE) * PICKS_AT_ONCE
        return TableSizes(min(picks, picks // item_picks + columns), -(-picks // chunk_picks), chunk_picks)


def table_parts(config: Any, numbers: Any) -> dict[str, tuple[Any, ...]]:
    """Parts of the tables (``common.selection_tables.SelectionTables``), Int32, of ``SelectionNumbers``."""
    n = numbers
    sets, picks = n.sets_batch * n.sets_heads, n.num_rows * n.top
    return {
        "mColumns": (sets, picks),
        "mEntries": (sets, picks),
        "mItems": (sets, n.num_items, ITEM_FIELDS),
        "mItemSpans": (sets, n.columns + 1),
        "mStarts": (sets, n.columns),
        "mCounts": (sets, n.num_chunks, n.columns),
        **({"mKeyBits": (sets, picks, KEY_WORDS)} if config.key_bits else {}),
    }


def workspace_parts(config: Any, units: Any, picks: Any) -> dict[str, tuple[Any, ...]]:
    """Parts of the workspace, of numbers of 4 bytes, for units of so many picks: partial results.

    Out is of the operands' dtype, two numbers in 4 bytes; lse is in base 2.
    """
    return {"mOut": (units, picks, config.group * config.tile_dv // 2), "mLSE": (units, picks, config.group)}


def backward_workspace_parts(config: Any, units: Any, rows: Any, picks: Any, items: Any) -> dict[str, tuple[Any, ...]]:
    """Parts of the workspace of a backward pass, of numbers of 4 bytes, for units of so many rows, picks and items.

    Float32: lse in base 2 and delta of each row; dQ of each pick; and the sums of dK and of dV of each item. Where dQ
    has scales (``has_scaled_dQ``), it is of float16, two numbers in 4 bytes. Scales are (columns / 64, head) of a pick.
    """
    parts, columns = items * config.sums_an_item, config.group * config.tile_d
    return {
        "mLSE": (units, rows, config.group),
        "mDelta": (units, rows, config.group),
        "mdQ": (units, picks, columns // 2 if config.has_scaled_dQ else columns),
        **({"mScale": (units, picks, columns // SCALED_COLUMNS)} if config.has_scaled_dQ else {}),
        "mdK": (units, parts, config.tile_n * config.tile_d),
        "mdV": (units, parts, config.tile_n * config.tile_dv),
    }
