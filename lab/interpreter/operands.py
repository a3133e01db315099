"""Operands of tensor cores in shared memory: 16 columns of some rows, where a descriptor says, swizzled as by TMA."""

import functools
from typing import NamedTuple

import numpy as np

from lab.interpreter.state import SHARED, Array, Cta, FaultError
from lab.interpreter.tma import swizzled

COLUMNS = 16  # that a product of 16-bit numbers sums over


class Operand(NamedTuple):
    """A descriptor, read: addresses and distances are in bytes."""

    start: int
    leading: int  # between pieces of contiguous rows, if it is transposed
    stride: int  # between groups of eight rows; of eight columns, if it is transposed
    row_bytes: int  # within which chunks of 16 change places: 128, 64 or 32
    is_transposed: bool  # whether a column's numbers are contiguous

    @classmethod
    def of(cls, descriptor: int, row_bytes: int, *, is_transposed: bool) -> "Operand":
        """The operand that a descriptor gives, of a layout that it also gives."""
        start, leading, stride = (descriptor >> bits << 4 & 0x3FFF0 for bits in (0, 16, 32))
        return cls(start, leading, stride, row_bytes, is_transposed)

    def read(self, cta: Cta, first: int, count: int) -> Array:
        """Numbers of 16 bits of so many rows, (count, 16), as tensor cores see them.

        Raises:
            FaultError: some are outside of shared memory.
        """
        places, memory = _places(self, first, count), cta.shown.view("u2")
        if self.start < SHARED or places[-1].max() >= len(memory):
            raise FaultError(f"an operand outside of shared memory: {self}")
        bits: Array = memory[places]
        return bits


@functools.lru_cache(maxsize=4096)
def _places(x: Operand, first: int, count: int) -> Array:
    row, k = np.arange(first, first + count)[:, None], np.arange(COLUMNS)
    if x.is_transposed:
        contiguous = x.row_bytes // 2
        offsets = row % contiguous * 2 + row // contiguous * x.leading + k % 8 * x.row_bytes + k // 8 * x.stride
    else:
        offsets = row % 8 * x.row_bytes + row // 8 * x.stride + k * 2
    return swizzled(x.start + offsets, x.row_bytes)


def floats(bits: Array, kind: str) -> Array:
    """Numbers of 16 bits, ``f16`` or ``bf16``, in float32.

    Raises:
        FaultError: another kind.
    """
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    raise FaultError(f"operands of kind {kind}")
