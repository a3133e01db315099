"""Tiles of rows for the tensor memory accelerator (TMA), clipped at the end of a sequence.

TMA clips a box only where the tensor ends. Packed sequences end in the middle of it, so a tile at the end of one
would load its neighbour's rows (NaN included) or overwrite them. The ragged view lets a tensor of row stride t end
wherever a tile needs it to: its rows r < 2^30, its stops y and its wraps w lie at r * t + y * t + w * (2^34 - t)
elements. In wrap 2^30 the last product is 2^64 - 2^30 * t, and as addresses wrap around at 2^64 bytes, row
2^30 - n + i of stop y is row y - n + i of the data: a box of n rows that starts at row 2^30 - n covers the n rows
before y and runs out of the view right there. Loads give zeros behind it, stores are dropped. One descriptor serves
all sequences. (The idea is that of Triton's ragged TMA descriptors. The shorter way, a base that lies a tile before
the data, faults where nothing is mapped there.)
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Int16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

_WRAP = 1 << 30


@dataclass(frozen=True)
class RowTiles:
    """A TMA atom and its tensor of coordinates, (s, d, heads, batch) or, ragged, (rows, d, heads, stops, wraps)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    tile_rows: Constexpr
    tile_columns: Constexpr
    ragged: Constexpr

    def at(self, start: Int32, stop: Int32, head: Int32, batch: Int32, column_tile: Int32 | int = 0) -> cute.Tensor:
        """The tile of rows start .. stop, at most ``tile_rows``. Only a ragged one ends at stop; it has no batch."""
        if const_expr(self.ragged):
            rows = self.tensor[None, None, head, stop, _WRAP]
            rows = cute.domain_offset((_WRAP - (stop - start), 0), rows)
        else:
            rows = cute.domain_offset((start, 0), self.tensor[None, None, head, batch])
        return cute.local_tile(rows, (self.tile_rows, self.tile_columns), (0, column_tile))

    def load(self, gX: cute.Tensor, sX: cute.Tensor, mbarrier: cute.Pointer, multicast: int | None = None) -> None:
        """Loads a tile into shared memory, by one converged warp; the bytes arrive on ``mbarrier``.

        With ``multicast``, a mask of CTAs, the tile goes to the shared memory of each of them and the bytes to its
        barrier.
        """
        shared, glob = self._partition(gX, sX)
        masks = {} if multicast is None else {"mcast_mask": Int16(multicast)}
        cute.copy(self.atom, glob, shared, tma_bar_ptr=mbarrier, **masks)

    def store(self, sX: cute.Tensor, gX: cute.Tensor) -> None:
        """Stores a tile from shared memory, by one converged warp."""
        shared, glob = self._partition(gX, sX)
        cute.copy(self.atom, shared, glob)

    def _partition(self, gX: cute.Tensor, sX: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        shared, glob = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        return shared, glob


class ForwardTiles(NamedTuple):
    """TMA tiles of the tensors that a forward kernel loads and stores, by name."""

    Q: RowTiles
    K: RowTiles
    V: RowTiles
    O: RowTiles | None  # noqa: E741 (None: it leaves from registers)
    bias: RowTiles | None = None  # of scores, whose rows are queries and whose columns are keys


class BackwardTiles(NamedTuple):
    """TMA tiles of the tensors that a backward kernel loads and stores, by name."""

    Q: RowTiles
    dO: RowTiles
    K: RowTiles
    V: RowTiles
    dK: RowTiles | None  # None: it leaves from registers
    dV: RowTiles | None
    # Of a pair of CTAs, which split these among themselves by rows, and again by columns.
    Q_columns: RowTiles | None = None
    dO_columns: RowTiles | None = None
    K_columns: RowTiles | None = None
    # Of scores, whose rows are queries and whose columns are keys.
    bias: RowTiles | None = None
    dBias: RowTiles | None = None


def prefetch_descriptors(tma: Any) -> None:
    """Prefetches the TMA descriptors of all tiles of a named tuple that are not None, by one warp."""
    for rows in tma:
        if rows is not None:
            cpasync.prefetch_descriptor(rows.atom)


def make_row_tiles(
    operation: Any, mX: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int], ragged: bool
) -> RowTiles:
    """TMA tiles of mX (s, d, heads, batch), on the host side of a launch."""
    if const_expr(ragged):
        _, columns, heads, _ = mX.shape
        row_stride, column_stride, head_stride, _ = mX.stride
        view = cute.make_layout(
            (_WRAP, columns, heads, _WRAP + 1, _WRAP + 1),
            stride=(row_stride, column_stride, head_stride, row_stride, (1 << 34) - row_stride),
        )
        mX = cute.make_tensor(mX.iterator, view)
    info = cpasync.make_tiled_tma_atom(operation, mX, layout, tile)
    return RowTiles(info.atom, info.tma_tensor, *tile, ragged)
