"""Gradients under a bias, and that of the bias, on Blackwell: executed on the CPU from PTX, against the oracle."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.checks import random_call
from tests.oracle import Call
from tests.test_sm100_backward import Interpreted, check
from tests.test_sm100_masks import drawn


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """What is allocated for results holds NaN, not what happens to be there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def with_extremes(call: Call) -> Call:
    """The call with hidden keys and queries, and biases as large as additive masks have them."""
    assert call.bias is not None
    with torch.no_grad():
        call.bias[..., ::7] = -torch.inf
        if call.bias.ndim > 1 and call.bias.shape[-2] > 40:
            call.bias[..., 5, :] = -torch.inf
            call.bias[..., 30:40, 10] = 1e4
            if call.window_size == (None, None):  # else queries may see nothing but these
                call.bias[..., 10:20, 3:] = torch.finfo(call.bias.dtype).min
    return call


# Every score has an element of its own, of q's dtype: the kernel that computes the gradients of scores stores them.
OWN: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([150], [260], {"head_dim": 128, "bias": (1, 1)}),
    "d64-causal-sliced": ([140], [201], {"bias": (1, 1, 1), "bias_layout": "sliced", "causal": True, "nheads": 2}),
    "d64-grouped": ([100, 100], [130, 130], {"bias": (1, 1, 1, 1), "nheads": 4, "nheads_k": 1}),
    "d192-dv128-window": ([70], [140], {"head_dim": 192, "head_dim_v": 128, "bias": (1, 1), "window_size": (20, 30)}),
    "d256-float16": ([70], [141], {"head_dim": 256, "bias": (1, 1), "dtype": torch.float16, "sink": True}),
    "d64-packed": ([150, 0, 60], [130, 7, 140], {"packed": True, "bias": (1, 1, 1), "bias_layout": "transposed"}),
}


@pytest.mark.parametrize("case", OWN)
def test_own_biases(case: str, fuzz_seconds: float) -> None:
    lengths_q, lengths_k, options = OWN[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        given = {"dtype": torch.bfloat16, "packed": False, "head_dim": 64, "nheads": 1}
        call = with_extremes(random_call(lengths_q, lengths_k, **given | options))
        check(call, Interpreted(draw), through_lse=len(case) % 2 == count % 2)
