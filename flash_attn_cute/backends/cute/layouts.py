"""Layouts that kernels can read, and copies of tensors that have others."""

import functools
import math

import torch
from torch import Tensor

from flash_attn_cute.kernels.arguments import BlockArguments

NO_BLOCKS = BlockArguments(None, None, None, None)


def aligned(x: Tensor) -> Tensor:
    """The tensor of 16-bit numbers if TMA can read it, else a copy: data and strides in multiples of 16 bytes."""
    if x.data_ptr() % 16 == 0 and fits(x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def fits(strides: tuple[int, ...]) -> bool:
    """Whether a tensor of 16-bit numbers has strides that TMA can read."""
    return strides[-1] == 1 and math.gcd(8, *strides[:-1]) == 8


def compact(x: Tensor) -> Tensor:
    """The tensor if its last dimension is contiguous, else a copy."""
    return x if x.stride()[-1] == 1 else x.clone(memory_format=torch.contiguous_format)
