"""Keys and values of some rows in one tensor, which is sent as one message; their gradients likewise."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Ranges: TypeAlias = Sequence[tuple[int, int]]  # of rows, (start, stop) each


def take(x: Tensor, ranges: Ranges, dim: int = 0) -> Tensor:
    """The rows of ranges, one behind another in that dimension; a view if they are one range."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges] or [x.narrow(dim, 0, 0)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put(x: Tensor, ranges: Ranges, rows: Tensor, dim: int = 0) -> None:
    """The inverse of ``take``: writes the rows of ranges."""
    row = 0
    for start, stop in ranges:
        x.narrow(dim, start, stop - start).copy_(rows.narrow(dim, row, stop - start))
        row += stop - start


class KeyValues:
    """Rows (rows, width): all heads of k, then all heads of v."""

    def __init__(self, data: Tensor, nheads: int, d: int) -> None:
        self.data = data
        self._nheads, self._d = nheads, d

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "KeyValues":
        """A copy of k (rows, nheads_k, d) and v (rows, nheads_k, d_v)."""
        return cls(torch.cat((k.flatten(1), v.flatten(1)), 1), *k.shape[1:])

    def empty(self, rows: int, dtype: torch.dtype | None = None) -> "KeyValues":
        """An uninitialised buffer of ``rows`` rows; dtype None: that of this object."""
        return KeyValues(self.data.new_empty((rows, self.data.shape[1]), dtype=dtype), self._nheads, self._d)

    def zeros(self, rows: int, dtype: torch.dtype) -> "KeyValues":
        """A zeroed buffer of ``rows`` rows to sum gradients in."""
        return KeyValues(self.data.new_zeros((rows, self.data.shape[1]), dtype=dtype), self._nheads, self._d)

    def part(self, ranges: Ranges) -> "KeyValues":
        """The rows of ranges, one behind another; these themselves if they are one range."""
        return KeyValues(take(self.data, ranges), self._nheads, self._d)

    @property
    def k(self) -> Tensor:
        """(rows, nheads_k, d), a view."""
        return self.data[:, : self._nheads * self._d].unflatten(1, (self._nheads, -1))

    @property
    def v(self) -> Tensor:
        """(rows, nheads_k, d_v), a view."""
        return self.data[:, self._nheads * self._d :].unflatten(1, (self._nheads, -1))

    def add(self, start: int, dk: Tensor, dv: Tensor) -> None:
        """Adds to the rows from ``start`` on."""
        rows = slice(start, start + dk.shape[0])
        self.k[rows] += dk
        self.v[rows] += dv


class GradientSums:
    """Gradients of as many rows, summed over calls: those of the first one themselves, if it is on all of them."""

    def __init__(self, like: KeyValues, rows: int, dtype: torch.dtype) -> None:
        """For keys and values like these."""
        self._like, self._rows, self._dtype = like, rows, dtype
        self._sums: KeyValues | None = None

    def add(self, start: int, dk: Tensor, dv: Tensor) -> None:
        """Adds to the rows from ``start`` on."""
        if self._sums is None and dk.shape[0] == self._rows and dk.dtype == self._dtype:
            self._sums = KeyValues.of(dk, dv)
        else:
            self._sums = self.result()
            self._sums.add(start, dk, dv)

    def result(self) -> KeyValues:
        """The sums; zeros, if there was nothing to add."""
        return self._like.zeros(self._rows, self._dtype) if self._sums is None else self._sums
