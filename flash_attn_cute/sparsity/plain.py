"""Masks that need no tables: windows, and documents that follow each other.

Such a mask is equivalent to ``window_size``, or to packed sequences. Kernels compute windows from positions and find
packed sequences by offsets, which is faster than reading lists of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.sparsity.documents import Documents
from flash_attn_cute.sparsity.nodes import And, Band, Node
from flash_attn_cute.sparsity.score_blocks import Sizes

_MAX_ROWS = 2**31 - 1
# Mean rows of a document from which packed sequences were faster on an H200. A packed sequence has tiles of its own,
# while lists merge short documents.
_LEAST_ROWS = 128


class Plain(NamedTuple):
    """Arguments of a call that are equivalent to a mask: a window as in ``Options``, and documents, if any."""

    left: int | None
    right: int | None
    documents: Documents | None

    @classmethod
    def of(cls, node: Node, sizes: Sizes) -> Plain | None:
        """The equivalent of an expression; None if there is none."""
        parts = _conjuncts(node)
        bands = [part for part in parts if isinstance(part, Band)]
        documents = [part for part in parts if isinstance(part, Documents)]
        if len(bands) + len(documents) < len(parts) or len(documents) > 1:
            return None
        if documents and documents[0].ids_k is not documents[0].ids_q:
            return None
        shift = sizes.seqlen_k - sizes.seqlen_q
        left = [shift - band.lower for band in bands if band.lower is not None]
        right = [band.upper - shift for band in bands if band.upper is not None]
        # Not min(..., default=None), which Dynamo does not know.
        return cls(min(left) if left else None, min(right) if right else None, documents[0] if documents else None)


class Offsets(NamedTuple):
    """Documents as packed sequences of the rows of all batch entries, one entry behind the other."""

    cu_seqlens: Tensor  # (documents + 1,), int32. Padding at the end of an entry is a document, too
    seqused: Tensor | None  # (documents,), int32: the rows of each document, 0 for padding; None if no row is padding
    bound: Tensor  # (longest,): Dynamo takes sizes of a module's attribute for variable, but not its numbers
    are_short: bool  # documents are so short that lists are faster

    @property
    def longest(self) -> int:
        """An upper bound of a document's rows."""
        return self.bound.shape[0]

    @classmethod
    def of(cls, ids: Tensor) -> Offsets | None:
        """Finds the offsets of documents; waits for the device.

        Args:
            ids: (batch, seqlen), int64: the document of each row, negative for padding.

        Returns:
            None if ids decrease, or if rows follow padding.
        """
        if not 0 < ids.numel() <= _MAX_ROWS:
            return None
        before, after, is_padding = ids[:, :-1], ids[:, 1:], ids < 0
        follows = is_padding[:, 1:] | ((before >= 0) & (after >= before))
        begins = (before != after) & ~(is_padding[:, :-1] & is_padding[:, 1:])
        in_order, is_padded, count = torch.stack((follows.all(), is_padding.any(), begins.sum())).tolist()
        if not in_order:
            return None
        start = torch.nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero()[:, 0]
        cu_seqlens = torch.nn.functional.pad(start, (0, 1), value=ids.numel())
        lengths = cu_seqlens.diff()
        seqused = lengths * ~is_padding.flatten()[start] if is_padded else None
        longest = int((lengths if seqused is None else seqused).max())
        # A power of two, as calls with the same bound share plans and compiled programs.
        bound = min(1 << (longest - 1).bit_length() if longest else 1, ids.shape[1])
        are_short = count * _LEAST_ROWS > ids.numel()
        cu_seqlens = cu_seqlens.int()
        return cls(cu_seqlens, None if seqused is None else seqused.int(), cu_seqlens[:1].expand(bound), are_short)


def _conjuncts(node: Node) -> list[Node]:
    """Expressions whose intersection a node is."""
    return _conjuncts(node.a) + _conjuncts(node.b) if isinstance(node, And) else [node]
