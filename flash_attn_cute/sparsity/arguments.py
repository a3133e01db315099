"""What the constructors of a mask are given: every complaint about it, but those about data."""

from typing import Any

import torch
from torch import Tensor

_MAX_LENGTH = 2**31 - 1


def is_int(value: Any) -> bool:
    """Whether it is an int, symbolic or not; bools are none."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def told(x: Any) -> str:
    """The dtype of a tensor, the type of anything else."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def check_lengths(seqlen_q: int, seqlen_k: int) -> None:
    """Checks both."""
    for name, length in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if not is_int(length):
            raise TypeError(f"{name}: expected an int, got {length!r}")
        if not 0 <= length <= _MAX_LENGTH:
            raise ValueError(f"{name}: expected 0 to {_MAX_LENGTH}, got {length}")


def check_side(name: str, side: int | None) -> int | None:
    """One side of a window; None if it is unbounded."""
    if side is None:
        return None
    if not is_int(side):
        raise TypeError(f"{name}: expected None or an int, got {side!r}")
    return side if side >= 0 else None


def check_integers(name: str, x: Any, ndims: tuple[int, ...], shape: str, *, beside: Tensor | None = None) -> None:
    """Checks a tensor of int32 or int64, with one of some numbers of dimensions, on the device of another one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    if x.ndim not in ndims:
        raise ValueError(f"{name}: expected shape {shape}, got shape {tuple(x.shape)}")
    if beside is not None and x.device != beside.device:
        raise ValueError(f"{name}: expected the device {beside.device}, got {x.device}")


def check_block(block: int | tuple[int, int]) -> tuple[int, int]:
    """The queries and keys of a block."""
    sizes: Any = (block, block) if is_int(block) else block
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2 or not all(is_int(size) for size in sizes):
        raise TypeError(f"block: expected an int or a pair of them, got {block!r}")
    block_q, block_k = sizes
    if block_q < 1 or block_k < 1:
        raise ValueError(f"block: expected at least 1, got {block!r}")
    return block_q, block_k


def check_blocks(name: str, length: int | None, blocks: int, size: int) -> int:
    """A length that comes to so many blocks, or that of whole ones."""
    if length is None:
        return blocks * size
    check_lengths(length, length)
    if -(-length // size) != blocks:
        raise ValueError(f"{name}: expected a length of {blocks} blocks of {size}, got {length}")
    return length


def check_indices(indices: Tensor, counts: Tensor | None, blocks_k: int) -> None:
    """Checks the data of ``BlockMask.from_indices``, which waits for the device."""
    if counts is not None and ((counts < 0) | (counts > indices.shape[-1])).any():
        raise ValueError(f"counts: expected 0 to {indices.shape[-1]}, got {int(counts.min())} to {int(counts.max())}")
    if (indices >= blocks_k).any():
        raise ValueError(f"indices: expected numbers below {blocks_k}, got {int(indices.max())}")
    ordered = indices.sort(-1).values
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise ValueError("indices: expected each number once in a row, got one twice")
