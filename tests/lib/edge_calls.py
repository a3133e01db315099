"""Calls whose numbers, not their shapes, are at an edge: large scores and biases, NaN that nothing may see."""

from collections.abc import Callable
from typing import Any

import torch

from tests.lib.checks import random_call
from tests.lib.oracle import Call

LENGTHS = [132]  # rows of a bias of 16 bits begin at 4 modulo 8 elements


def _call(**options: Any) -> Call:
    return random_call(LENGTHS, **{"packed": False, "nheads": 1, "head_dim": 64} | options)


def rising_in_a_block(**options: Any) -> Call:
    """A call whose last 32 of each 128 keys have scores that are many times larger."""
    call = _call(**options)
    with torch.no_grad():
        call.k[:, 96:128] *= 12
    return call


def large_bias(**options: Any) -> Call:
    """Some elements from -2^16 to -2^30, in bfloat16, as float16 has no such numbers."""
    call = _call(bias=(1, 1), **options | {"dtype": torch.bfloat16})
    with torch.no_grad():
        powers = 2.0 ** torch.randint(16, 31, call.bias.shape, device=call.bias.device)
        call.bias -= powers * (torch.rand(call.bias.shape, device=call.bias.device) < 0.1)
    return call


def nan_under_a_mask(**options: Any) -> Call:
    """A bias that is NaN where the mask hides it, which its gradient is not to show."""
    call = _call(bias=(1, 1), mask=(1, 1), **options)
    with torch.no_grad():
        call.bias.masked_fill_(~call.mask.expand_as(call.bias), torch.nan)
    return call


EDGES: dict[str, Callable[..., Call]] = {
    "rising-in-a-block": rising_in_a_block,
    "large-bias": large_bias,
    "nan-under-a-mask": nan_under_a_mask,
    "negative-scale": lambda **options: _call(softmax_scale=-0.3, causal=True, **options),
    "bias-rows-of-4-modulo-8": lambda **options: _call(bias=(1, 1), **options),
}
