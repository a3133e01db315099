"""Key blocks that each query selects: a mask without tables of 128 x 128 blocks.

Models with trained sparsity select them in every step and layer, for each query and key head: NSA (arXiv 2502.11089),
MoBA (arXiv 2502.13189), MSA (arXiv 2606.13392). Blocks of 128 queries would see nearly all keys between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import check_int
from flash_attn_cute.runtime import kept, settings
from flash_attn_cute.sparsity import mask_arguments
from flash_attn_cute.sparsity.nodes import PerHead


@dataclass(eq=False, repr=False)
class Selection(PerHead):
    """Key blocks that each query attends to."""

    # The caller's tensor, (batch, heads, seqlen_q, top), int32 or int64; below 0 is none. A view of it if that is
    # (total_q, heads, top).
    indices: Tensor
    block: int  # keys of a block
    seqlen_k: int  # keys

    @classmethod
    def of(cls, indices: Tensor, block: Any, seqlen_k: int) -> Selection:
        """Checks the arguments of ``BlockMask.from_selection`` and makes a node of them."""
        shape = "(batch, heads, seqlen_q, top) or (total_q, heads, top)"
        mask_arguments.check_integers("indices", indices, (3, 4), shape, sharded=True)
        block = check_int("block", block)
        if block < 1:
            raise ValueError(f"block: expected at least 1, got {block}")
        if block >= 2**31:
            raise ValueError(f"block: expected fewer than 2^31 keys, got {block}")
        if indices.ndim == 3:
            indices = indices.transpose(0, 1)[None]
        mask_arguments.check_heads("indices", indices)
        _, seqlen_k = mask_arguments.check_lengths(indices.shape[2], seqlen_k)
        node = cls(indices, block, seqlen_k)
        if not torch.compiler.is_compiling() and settings.check_data() and (indices >= node.num_blocks).any():
            raise ValueError(f"indices: expected numbers below {node.num_blocks}, got {int(indices.max())}")
        return node

    @property
    def per_head(self) -> Tensor:
        return self.indices

    @property
    def num_blocks(self) -> int:
        """Number of key blocks."""
        return -(-self.seqlen_k // self.block)

    def selected(self, *, is_traced: bool) -> Tensor:
        """Selected blocks as backends read them; nothing waits for the device.

        ``is_traced``: what is computed now belongs to a program or a graph, which reads the indices whenever it runs.
        Else the result is made once, and kept, and ValueError raised if the indices have been written to.

        Returns (batch, heads, seqlen_q, top), int32: numbers of blocks in ascending order, repeated as often as the
        caller names them, and ``num_blocks`` for none behind them.
        """
        there: kept.Kept[Tensor] | None = kept.found(self._kept, "selected")
        if there is not None:
            return there.get()
        if is_traced:
            self.use(checked=False)
            return self._find()
        return kept.made(self._kept, "selected", self.device, self._find_unwritten)

    def _find_unwritten(self) -> Tensor:
        self.use()
        return self._find()

    def _find(self) -> Tensor:
        none = self.num_blocks
        found = self.indices.clamp(-1, none).int()
        if not found.shape[-1]:
            return found.new_full((*found.shape[:-1], 1), none)
        return found.masked_fill(found < 0, none).sort(-1).values
