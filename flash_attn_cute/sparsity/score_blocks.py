"""Sizes of a mask, and selections of its blocks of 128 x 128 scores, for which the nodes of an expression answer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flash_attn_cute.sparsity.bits import TILE


class Sizes(NamedTuple):
    """Dimensions of a mask; batch and heads are 1 where all have the same mask."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    @property
    def blocks_q(self) -> int:
        """Number of query blocks."""
        return -(-self.seqlen_q // TILE)

    @property
    def blocks_k(self) -> int:
        """Number of key blocks."""
        return -(-self.seqlen_k // TILE)

    @property
    def num_rows(self) -> int:
        """Number of query blocks over all batch entries and heads."""
        return self.batch * self.heads * self.blocks_q


class Broadcast(Protocol):
    """Anything that has as many batch entries and heads as a mask, or one for all."""

    @property
    def batch(self) -> int: ...

    @property
    def heads(self) -> int: ...


@dataclass(eq=False, repr=False)
class Blocks:
    """Some blocks of a mask. Positions beyond the last query or key are clamped to it."""

    sizes: Sizes  # of the mask
    row: Tensor  # (n,), int64: the query block of each, counted over all batch entries and heads
    n: Tensor  # (n,), int64: the key block of each

    def select(self, which: Tensor | slice) -> Blocks:
        """The blocks at some indices."""
        return Blocks(self.sizes, self.row[which], self.n[which])

    def chunks(self, size: int) -> list[Blocks]:
        """The blocks in chunks of ``size`` at most; a single chunk if there are none."""
        return [self.select(slice(first, first + size)) for first in range(0, max(len(self.n), 1), size)]

    @functools.cached_property
    def m(self) -> Tensor:
        """Query blocks (n,) int64, counted within their batch entry and head."""
        return self.row if self.sizes.batch * self.sizes.heads == 1 else self.row % self.sizes.blocks_q

    def entry_and_head(self, of: Broadcast) -> tuple[Tensor, Tensor]:
        """Batch entries and heads (n,) each, as something counts them that may have only one."""
        zero, sizes = torch.zeros_like(self.n), self.sizes
        b = zero if of.batch == 1 else self.row // (sizes.heads * sizes.blocks_q)
        return b, zero if of.heads == 1 else self.row // sizes.blocks_q % sizes.heads

    @property
    def diagonals(self) -> tuple[Tensor, int]:
        """Diagonals of blocks (n,), key block - query block counted from 0, and an upper bound of them."""
        sizes = self.sizes
        return self.n - self.m + sizes.blocks_q, sizes.blocks_q + sizes.blocks_k

    @property
    def bounds_q(self) -> tuple[Tensor, Tensor]:
        """First and last query of each block."""
        return _bounds(self.m, self.sizes.seqlen_q)

    @property
    def bounds_k(self) -> tuple[Tensor, Tensor]:
        """First and last key of each block."""
        return _bounds(self.n, self.sizes.seqlen_k)

    @property
    def queries(self) -> Tensor:
        """Queries of each block: (n, 128)."""
        return _positions(self.m, self.sizes.seqlen_q)

    @property
    def keys(self) -> Tensor:
        """Keys of each block: (n, 128)."""
        return _positions(self.n, self.sizes.seqlen_k)


def _bounds(block: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return block * TILE, (block * TILE + TILE - 1).clamp(max=length - 1)


def _positions(block: Tensor, length: int) -> Tensor:
    return (block[:, None] * TILE + torch.arange(TILE, device=block.device)).clamp(max=length - 1)
