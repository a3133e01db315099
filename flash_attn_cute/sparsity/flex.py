"""Conversion between this package's block masks and FlexAttention's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flash_attn_cute.problem.block_tables import FULL_CODE, BlockRows
from flash_attn_cute.sparsity.bits import TILE, WORDS
from flash_attn_cute.sparsity.nodes import And, BlockMap, Function, Node, Or
from flash_attn_cute.sparsity.row_tables import owners
from flash_attn_cute.sparsity.score_blocks import Sizes


def node_of(mask: Any) -> tuple[Node, int, int]:
    """Converts a mask of FlexAttention to an expression: its full blocks, and its function on its partial blocks.

    Returns the expression, seqlen_q and seqlen_k. Raises TypeError for anything but a ``BlockMask`` of FlexAttention.
    """
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask: expected FlexAttention's BlockMask, got {type(mask).__name__}")
    seqlen_q, seqlen_k = mask.seq_lengths
    block_q, block_k = mask.BLOCK_SIZE
    blocks_k = -(-seqlen_k // block_k)
    partial = _map_of(mask.kv_num_blocks, mask.kv_indices, blocks_k)
    sets = (partial.shape[0], partial.shape[1])
    node: Node = And(BlockMap(partial, block_q, block_k), Function(mask.mask_mod, sets, partial.new_empty(0)))
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _map_of(mask.full_kv_num_blocks, mask.full_kv_indices, blocks_k)
        node = Or(BlockMap(full, block_q, block_k), node)
    return node, seqlen_q, seqlen_k


def _map_of(counts: Tensor, indices: Tensor, blocks_k: int) -> Tensor:
    """A map of blocks (batch, heads, blocks_q, blocks_k), bool, from lists (batch, heads, blocks_q, n) of them.

    ``counts``, (batch, heads, blocks_q), are how many of each list count; the others may be any number.
    """
    is_counted = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    visible = torch.zeros((*counts.shape, blocks_k + 1), dtype=torch.bool, device=indices.device)
    return visible.scatter_(-1, torch.where(is_counted, indices, blocks_k).long(), True)[..., :blocks_k]


def mask_of(sizes: Sizes, rows: BlockRows) -> BlockMask:
    """Converts rows to a mask of FlexAttention in blocks of 128, whose function looks scores up in their tiles."""
    row, is_used = owners(rows)
    row, (block, code) = row[is_used], rows.entries[is_used].long().unbind(1)
    lists: list[Tensor] = []
    for selected in (code != FULL_CODE, code == FULL_CODE):
        # As wide as there are key blocks: FlexAttention takes the width for their number when it transposes the lists.
        visible = rows.spans.new_zeros(sizes.num_rows, sizes.blocks_k)
        visible[row[selected], block[selected]] = 1
        visible = visible.view(sizes.batch, sizes.heads, sizes.blocks_q, sizes.blocks_k)
        lists += [visible.sum(-1).int(), visible.argsort(dim=-1, descending=True, stable=True).int()]
    absent = len(rows.tiles)  # the index of a tile without bits
    codes = torch.full((sizes.num_rows, sizes.blocks_k), absent, device=row.device)
    codes[row, block] = code
    codes = codes.view(sizes.batch, sizes.heads, sizes.blocks_q, sizes.blocks_k)
    tiles = torch.cat((rows.tiles, rows.tiles.new_zeros(1, TILE, WORDS)))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        code = codes[b if sizes.batch > 1 else b * 0, h if sizes.heads > 1 else h * 0, q // TILE, k // TILE]
        word = tiles[code.clamp(min=0), q % TILE, k % TILE // 32]
        return (code == FULL_CODE) | ((word >> (k % 32)) & 1 == 1)

    return BlockMask.from_kv_blocks(
        lists[0],
        lists[1],
        lists[2],
        lists[3],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
        seq_lengths=(sizes.seqlen_q, sizes.seqlen_k),
    )
