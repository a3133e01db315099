"""Tables of a block mask, as block masks make them and backends read them.

Scores are cut into blocks of 128 queries and 128 keys. Tables list the blocks with visible scores. An entry names a
block and its code: ``FULL_CODE``, or the index of the tile of bits that says which of its scores are visible.
"""

from typing import NamedTuple

from torch import Tensor

FULL_CODE = -1  # code of a block whose scores are all visible
ANY_NUMBER = 1 << 31  # of blocks that a mask may list: no table has as many
# Tenths of the blocks of a mask of larger blocks than 64 that are visible at the most where a backward pass stores dS.
# Above, dQ is summed in fixed point: at 50 % that takes 1.02 times as long back to back, and 0.93 times in calls apart.
_TENTHS_STORED = 4


def most_with_half_columns(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> int:
    """Blocks that a mask of larger blocks than 64 lists at the most where any pass reads half columns, by its sizes."""
    return _TENTHS_STORED * batch * heads * -(-seqlen_q // 128) * -(-seqlen_k // 128) // 10


class BlockRows(NamedTuple):
    """Rows of blocks: which key blocks each block of 128 queries attends to.

    Attributes:
        spans: (batch, heads, blocks_q, 2), int32: the index of a row's first entry, and how many entries it has. Batch
            and heads are 1 where all have the same rows.
        entries: (n, 2), int32: a key block and its code. Key blocks ascend within a row.
        tiles: (tiles, 128, 4), int32: the bits of partial blocks, see ``sparsity.bits``. Blocks that reach beyond the
            last query or key are partial.
    """

    spans: Tensor
    entries: Tensor
    tiles: Tensor


class BlockColumns(NamedTuple):
    """Columns of blocks: which query blocks attend to each block of 128 keys, for query blocks of 64 and of 128.

    Or to each block of 64 keys, for query blocks of 64 alone: then the first size of ``spans`` is 1, and blocks of keys
    are those. An entry of such a column has its quarter of the tile.

    Attributes:
        spans: (2, batch, heads, blocks_k, 2), int32: the index of a column's first entry, and how many entries it has;
            [0] for blocks of 64 queries, [1] for blocks of 128.
        entries: (n, 3), int32: a query block, its code, and the column's turn at that block: how many key blocks add to
            its dQ before. A block of 64 queries has its half of the tile. Entries of a column are in its m_block order:
            ascending, or as ``dq_order.contention_model`` has found it.
        contributors: (batch, heads, blocks of 64 queries), int32: how many key blocks add to dQ of each. The rows'
            spans have these counts for blocks of 128.
        order: (batch or 1, key heads or 1, blocks_k), int32: key blocks in launch order.
    """

    spans: Tensor
    entries: Tensor
    contributors: Tensor
    order: Tensor


class RealRows(NamedTuple):
    """Rows of a call that are no padding of its block mask: (batch or 1, seqlen_q) and (batch or 1, seqlen_k), bool.

    A row is padding if it belongs to no document, and if the mask hides it from all others, for every head.
    """

    queries: Tensor
    keys: Tensor


class BlockTables(NamedTuple):
    """All tables of a block mask that a backend reads."""

    rows: BlockRows  # for the forward pass
    columns: BlockColumns | None  # for the backward pass, of 128 keys or of 64; None where nothing is differentiated
    real: RealRows | None = None  # None if no row is padding
    intervals: tuple[Tensor, Tensor] | None = None  # a backend's own, see ``backends.packing.Intervals``

    @property
    def has_half_columns(self) -> bool:
        """Whether its columns are of blocks of 64 keys."""
        return self.columns is not None and self.columns.spans.shape[0] == 1

    def flat(self) -> tuple[Tensor | None, ...]:
        """The tensors of rows and columns, ``NUM_FLAT``, as operators take them; ``real`` follows."""
        return (*self.rows, *((None,) * len(BlockColumns._fields) if self.columns is None else self.columns))

    @classmethod
    def of_flat(cls, tensors: tuple[Tensor | None, ...], real: tuple[Tensor | None, ...]) -> "BlockTables | None":
        """Tables of flat tensors, the inverse of ``flat``; None if there are no tensors."""
        parts = tensors[:3], tensors[3:], real
        rows, columns, kept = ([x for x in some if x is not None] for some in parts)
        if not rows:
            return None
        columns_or_none = BlockColumns(*columns) if columns else None
        return cls(BlockRows(*rows), columns_or_none, RealRows(*kept) if kept else None)


NUM_FLAT = len(BlockRows._fields) + len(BlockColumns._fields)
