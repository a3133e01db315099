"""A block mask's tables as the kernels' arguments."""

from typing import Any

from torch import Tensor

from flash_attn_cute.kernels.arguments import BlockArguments
from flash_attn_cute.problem.spec import AttentionInputs
from flash_attn_cute.sparsity.bits import HALF

NO_BLOCKS = BlockArguments(None, None, None, None)
_MAX_TABLE = 2**31  # numbers of a block mask's table
_TILES_ALIGN = 16  # bytes, of its bits


def rows_of(inputs: AttentionInputs, config: Any) -> BlockArguments:
    """A block mask's tables, from the side of queries."""
    if inputs.block_mask is None:
        return NO_BLOCKS
    rows = inputs.block_mask.rows
    return _blocks(rows.spans, rows.entries, rows.tiles, config)


def columns_of(inputs: AttentionInputs, config: Any) -> dict[str, Any]:
    """A block mask's tables, from the side of keys, and what else a backward pass needs of it."""
    tables = inputs.block_mask
    if tables is None:
        return {"blocks": NO_BLOCKS, "mLaunchOrder": None, "mContributors": None, "mIntervals": None}
    columns = tables.columns
    assert columns is not None, "block_mask: has no columns, though gradients are wanted"
    assert tables.has_half_columns == (config.tile_n == HALF), "block_mask: has columns of another size of blocks"
    is_half = config.tile_m == HALF
    return {
        "blocks": _blocks(columns.spans[0 if is_half else 1], columns.entries, tables.rows.tiles, config),
        "mLaunchOrder": columns.order.flatten(),
        "mContributors": columns.contributors.flatten() if is_half else tables.rows.spans.flatten()[1::2],
        "mIntervals": intervals_of(inputs, 1),
    }


def intervals_of(inputs: AttentionInputs, side: int) -> Tensor | None:
    """Intervals that queries (0) or keys (1) see beside a block mask; None if they see all."""
    tables = inputs.block_mask
    return None if tables is None or tables.intervals is None else tables.intervals[side].flatten()


def _blocks(spans: Tensor, entries: Tensor, tiles: Tensor, config: Any) -> BlockArguments:
    if max(entries.numel(), tiles.numel()) >= _MAX_TABLE:
        raise ValueError(
            f"block_mask: expected fewer than 2^31 numbers in a table, got {entries.numel()} of blocks and "
            f"{tiles.numel()} of elements"
        )
    if not len(entries):  # kernels take no tensors without memory
        entries = entries.new_zeros(1, entries.shape[1])
    if not len(tiles):
        tiles = tiles.new_zeros(1, *tiles.shape[1:])
    if tiles.data_ptr() % _TILES_ALIGN:
        tiles = tiles.clone()
    bits = tiles.new_empty(len(tiles) * config.mask_tile.words_a_block) if config.reorders_bits else None
    return BlockArguments(spans.flatten(), entries.flatten(), tiles.flatten(), bits)
