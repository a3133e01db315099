"""Tables of a block mask, as block masks make them and backends read them."""

from typing import NamedTuple

from torch import Tensor


class BlockRows(NamedTuple):
    """Which key blocks each block of 128 queries sees, and the elements of those that it sees in part.

    ``spans`` (batch, heads, blocks_q, 2), int32, holds of each row where its entries start and how many they are; batch
    and heads are 1 where all have the same. ``entries`` (n, 2), int32, holds key blocks, ascending within a row, and
    the tile of each, -1 if all of it is visible. ``tiles`` (tiles, 128, 4), int32: see ``sparsity.bits``. Blocks that
    reach behind the last query or key have tiles.
    """

    spans: Tensor
    entries: Tensor
    tiles: Tensor


class BlockColumns(NamedTuple):
    """Which query blocks see each block of 128 keys: the rows transposed, for blocks of 64 queries and of 128.

    ``spans`` (2, batch, heads, blocks_k, 2) holds of each column where its entries start and how many they are, [0] in
    blocks of 64 queries, [1] in blocks of 128. ``entries`` (n, 3) holds query blocks in the order in which the column's
    tile takes them, ascending or as ``dq_order.contention_model`` has found; the tile of each, -1 if all of it is
    visible, of which a block of 64 queries has the half that it is; and its turn: how many key blocks have added to its
    dQ before. ``contributors`` (batch, heads, blocks of 64 queries) is how many add to each; of blocks of 128 these are
    the counts of rows. ``order`` (batch or 1, key heads or 1, blocks_k) holds key blocks as they are launched. All are
    int32.
    """

    spans: Tensor
    entries: Tensor
    contributors: Tensor
    order: Tensor


class RealRows(NamedTuple):
    """Which rows of a call are no padding of its block mask: (batch or 1, seqlen_q) and (batch or 1, seqlen_k), bool.

    Padding are rows that belong to no document and that the mask hides from all others, by every head.
    """

    queries: Tensor
    keys: Tensor


class BlockTables(NamedTuple):
    """Tables of a block mask for a backend; see ``sparsity``.

    ``columns`` is None where nothing is differentiated, ``real`` where no row is padding. ``intervals`` are a backend's
    own (``backends.packing.Seen``).
    """

    rows: BlockRows
    columns: BlockColumns | None
    real: RealRows | None = None
    intervals: tuple[Tensor, Tensor] | None = None

    def flat(self) -> tuple[Tensor | None, ...]:
        """The seven tensors of its rows and columns, for operators, which are given those of ``real`` behind them."""
        return (*self.rows, *((None, None, None, None) if self.columns is None else self.columns))

    @classmethod
    def of_flat(cls, tensors: tuple[Tensor | None, ...], real: tuple[Tensor | None, ...]) -> "BlockTables | None":
        """The inverse; None if there are none."""
        rows, columns, kept = ([x for x in some if x is not None] for some in (tensors[:3], tensors[3:], real))
        if not rows:
            return None
        return cls(BlockRows(*rows), BlockColumns(*columns) if columns else None, RealRows(*kept) if kept else None)
