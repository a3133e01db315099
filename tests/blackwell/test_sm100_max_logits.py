"""The largest logits of Blackwell's forward kernels, executed on the CPU from their PTX, against the oracle."""

import dataclasses
import random
from typing import Any

import pytest
import torch

from tests.lib.checks import drawn, random_call
from tests.lib.interpreted.common import EVERYTHING
from tests.lib.interpreted.forward import check
from tests.lib.masks import random_mask
from tests.lib.tiers import tiered

# Lengths of q and k, whether pairs of CTAs compute it, and options.
CASES: dict[str, tuple[list[int], list[int], bool, dict[str, Any]]] = {
    "d64-causal": ([200, 1, 0, 130], [300, 5, 7, 0], False, {"head_dim": 64, "causal": True, "nheads_k": 1}),
    "d64-everything": ([200, 1, 30], [300, 129, 0], False, {"head_dim": 64, **EVERYTHING}),
    "d64": ([300], [260], False, {"head_dim": 64, "packed": False, "softmax_scale": -0.3}),
    "d128-padding": ([130, 20], [200, 140], False, {"head_dim": 128, "seqused": True, "sink": True}),
    "d128-bias": ([140], [130], False, {"head_dim": 128, "packed": False, "causal": True, "bias": (1, 1)}),
    "d128-mask-softcap": ([140], [130], False, {"head_dim": 128, "mask": (1, 1, 1), "softcap": 3.0}),
    "d256-window": ([140], [300], False, {"head_dim": 256, "window_size": (50, 30)}),
    "pair-d192-dv128": ([300], [260], True, {"head_dim": 192, "head_dim_v": 128, "causal": True}),
    "pair-d256": ([300, 20], [130, 0], True, {"head_dim": 256}),
}


@pytest.mark.parametrize("case", tiered(CASES, rare=["d64-causal", "d128-padding", "d128-mask-softcap", "pair-d256"]))
def test_max_logits(case: str, fuzz_seconds: float) -> None:
    """Beside other features, and the other results with them."""
    lengths_q, lengths_k, by_pairs, options = CASES[case]
    call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, **options})
    for _, draw in drawn(case, fuzz_seconds):
        check(call, draw, by_pairs=by_pairs, max_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_negative", [True, False])
def test_rows_behind_the_last_do_not_count(is_negative: bool) -> None:
    """All logits are negative, and those of rows that a tile has beyond a sequence are zero."""
    call = random_call([130], [61], packed=False, head_dim=64, nheads=1, dtype=torch.bfloat16)
    with torch.no_grad():
        call.q.abs_().add_(0.1)
        call.k.abs_().add_(0.1).mul_(-1 if is_negative else 1)
    check(call, random.Random(0), max_logits=True)


@pytest.mark.slow
def test_block_mask() -> None:
    """Some blocks are visible to one of two parts of a tile alone."""
    made = random_mask(300, 400, random.Random(5), (1, 2))
    call = random_call([300], [400], packed=False, head_dim=64, dtype=torch.bfloat16)
    call = dataclasses.replace(call, block_mask=made.mask, shown=made.shown)
    check(call, random.Random(0), max_logits=True)
