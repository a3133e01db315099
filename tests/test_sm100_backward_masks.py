"""Gradients under masks and block masks in the Blackwell backward kernels, executed on the CPU from their PTX."""

from typing import Any

import pytest
import torch

from tests.checks import random_call
from tests.test_sm100_backward import Interpreted, check
from tests.test_sm100_masks import drawn, with_block_mask

# Lengths of q and k, and options; packed sequences and windows are intervals of a mask over all rows.
BLOCK_MASKS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([300], [200], {"packed": False, "head_dim": 128, "nheads": 1}),
    "d64-grouped": ([200, 200], [140, 140], {"packed": False, "nheads": 4, "nheads_k": 1}),
    "d64-everything": ([130, 1, 90], [200, 129, 0], {"softcap": 5.0, "sink": True, "seqused": True, "causal": True}),
    "d192-dv128-window": ([150], [200], {"packed": False, "head_dim": 192, "head_dim_v": 128, "window_size": (90, 20)}),
    "d256-packed": ([90, 60], [100, 130], {"head_dim": 256, "nheads": 1, "causal": True}),
}


@pytest.mark.parametrize("case", BLOCK_MASKS)
def test_block_masks(case: str, fuzz_seconds: float) -> None:
    lengths_q, lengths_k, options = BLOCK_MASKS[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, "head_dim": 64, **options})
        check(with_block_mask(call, draw), Interpreted(draw))


MASKS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128-causal": ([200], [300], {"packed": False, "head_dim": 128, "causal": True, "mask": (1, 1)}),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks(case: str, fuzz_seconds: float) -> None:
    lengths_q, lengths_k, options = MASKS[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, "head_dim": 64, "mask": (1, 1), **options})
        assert call.mask is not None
        for value in (False, True):
            rows, keys = draw.choice([0, 128, 256]), draw.choice([0, 128])
            call.mask[..., rows : rows + 128, keys : keys + draw.choice([100, 128])] = value
        check(call, Interpreted(draw))
