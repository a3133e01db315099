"""The largest logits of Blackwell's forward kernels, executed on the CPU from their PTX, against the oracle."""

import dataclasses
import random

import pytest
import torch

from tests.lib.checks import drawn
from tests.lib.interpreted.common import EVERYTHING, dense, packed
from tests.lib.interpreted.forward import check
from tests.lib.masks import random_mask
from tests.lib.tiers import tiered

# Calls, and whether pairs of CTAs compute them.
CASES = {
    "d64-causal": (packed([200, 1, 0, 130], [300, 5, 7, 0], head_dim=64, causal=True, nheads_k=1), False),
    "d64-everything": (packed([200, 1, 30], [300, 129, 0], head_dim=64, **EVERYTHING), False),
    "d64": (dense([300], [260], head_dim=64, softmax_scale=-0.3), False),
    "d128-padding": (packed([130, 20], [200, 140], head_dim=128, seqused=True, sink=True), False),
    "d128-bias": (dense([140], [130], head_dim=128, causal=True, bias=(1, 1)), False),
    "d128-mask-softcap": (packed([140], [130], head_dim=128, mask=(1, 1, 1), softcap=3.0), False),
    "d256-window": (packed([140], [300], head_dim=256, window_size=(50, 30)), False),
    "pair-d192-dv128": (packed([300], [260], head_dim=192, head_dim_v=128, causal=True), True),
    "pair-d256": (packed([300, 20], [130, 0], head_dim=256), True),
}


@pytest.mark.parametrize("case", tiered(CASES, rare=["d64-causal", "d128-padding", "d128-mask-softcap", "pair-d256"]))
def test_max_logits(case: str, fuzz_seconds: float) -> None:
    """Beside other features, and the other results with them."""
    draw_call, by_pairs = CASES[case]
    call = draw_call()
    for _, draw in drawn(case, fuzz_seconds):
        check(call, draw, by_pairs=by_pairs, max_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_negative", [True, False])
def test_rows_behind_the_last_do_not_count(is_negative: bool) -> None:
    """All logits are negative, and those of rows that a tile has beyond a sequence are zero."""
    call = dense([130], [61], nheads=1)()
    with torch.no_grad():
        call.q.abs_().add_(0.1)
        call.k.abs_().add_(0.1).mul_(-1 if is_negative else 1)
    check(call, random.Random(0), max_logits=True)


@pytest.mark.slow
def test_block_mask() -> None:
    """Some blocks are visible to one of two parts of a tile alone."""
    made = random_mask(300, 400, random.Random(5), (1, 2))
    call = dense([300], [400])()
    call = dataclasses.replace(call, block_mask=made.mask, shown=made.shown)
    check(call, random.Random(0), max_logits=True)
