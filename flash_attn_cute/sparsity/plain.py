"""Masks that other arguments of a call say as well: windows, and documents that follow each other.

Kernels compute a window from positions and find packed sequences by their offsets. That is faster than to read lists of
blocks, and takes no tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.sparsity.nodes import And, Band, Documents, Node, Sizes

_MAX_ROWS = 2**31 - 1
# Rows of a document on average, from which on packed sequences were faster on an H200. Each has tiles of its own
# there, while lists merge short ones.
_LEAST_ROWS = 128


class Plain(NamedTuple):
    """What says the same as a mask: a window, see ``Options``, and the documents that it is within, if any."""

    left: int | None
    right: int | None
    documents: Documents | None

    @classmethod
    def of(cls, node: Node, sizes: Sizes) -> Plain | None:
        """That of an expression; None if it shows something else."""
        parts = _conjuncts(node)
        bands = [part for part in parts if isinstance(part, Band)]
        documents = [part for part in parts if isinstance(part, Documents)]
        if len(bands) + len(documents) < len(parts) or len(documents) > 1:
            return None
        if documents and documents[0].ids_k is not documents[0].ids_q:
            return None
        shift = sizes.seqlen_k - sizes.seqlen_q
        left = min((shift - band.lower for band in bands if band.lower is not None), default=None)
        right = min((band.upper - shift for band in bands if band.upper is not None), default=None)
        return cls(left, right, documents[0] if documents else None)


class Offsets(NamedTuple):
    """Documents as packed sequences of the rows of all batch entries, one entry behind the other.

    ``cu_seqlens`` (documents + 1,) and ``seqused`` (documents,) are int32; seqused is None where no row is padding, and
    else tells padding at the end of an entry as a document of no real rows. ``longest`` is a bound on their rows.
    """

    cu_seqlens: Tensor
    seqused: Tensor | None
    longest: int

    @classmethod
    def of(cls, ids: Tensor) -> Offsets | None:
        """Those of documents told by ids (batch, seqlen), int64; waits for the device.

        None if ids decrease, go on behind padding, or are of documents so short that lists of blocks serve them better.
        """
        if not 0 < ids.numel() <= _MAX_ROWS:
            return None
        before, after, is_padding = ids[:, :-1], ids[:, 1:], ids < 0
        follows = is_padding[:, 1:] | ((before >= 0) & (after >= before))
        begins = (before != after) & ~(is_padding[:, :-1] & is_padding[:, 1:])
        in_order, is_padded, count = torch.stack((follows.all(), is_padding.any(), begins.sum())).tolist()
        count += len(ids)
        if not in_order or count * _LEAST_ROWS > ids.numel() + _LEAST_ROWS * len(ids):
            return None
        start = torch.nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero()[:, 0]
        cu_seqlens = torch.nn.functional.pad(start, (0, 1), value=ids.numel())
        lengths = cu_seqlens.diff()
        seqused = lengths * ~is_padding.flatten()[start] if is_padded else None
        longest = int((lengths if seqused is None else seqused).max())
        # Few bounds, as calls with the same one share what has been planned and compiled.
        bound = min(1 << (longest - 1).bit_length() if longest else 1, ids.shape[1])
        return cls(cu_seqlens.int(), None if seqused is None else seqused.int(), bound)


def _conjuncts(node: Node) -> list[Node]:
    """What all has to show a score for the expression to show it."""
    return _conjuncts(node.a) + _conjuncts(node.b) if isinstance(node, And) else [node]
