"""Layouts that kernels can read, and copies of tensors that have others."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import AttentionInputs


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


def operands_of(inputs: AttentionInputs, names: str = "QKV") -> dict[str, Any]:
    """A call's q, k and v, offsets and lengths of its sequences, by the names of the kernels' arguments."""
    operands = {f"m{name}": getattr(inputs, name.lower()) for name in names}
    sequences = {
        "mCuSeqlensQ": inputs.cu_seqlens_q,
        "mCuSeqlensK": inputs.cu_seqlens_k,
        "mSeqUsedQ": inputs.seqused_q,
        "mSeqUsedK": inputs.seqused_k,
    }
    given = {name: None if x is None else compact(x) for name, x in sequences.items()}
    return given | {name: aligned(x) for name, x in operands.items()}


def with_a_key(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs; k and v that have no rows get one of zeros, for TMA knows no empty tensors."""
    if inputs.k.numel():
        return inputs
    k, v = (x.new_zeros(1, *x.shape[1:]) for x in (inputs.k, inputs.v))
    return inputs._replace(k=k, v=v)
