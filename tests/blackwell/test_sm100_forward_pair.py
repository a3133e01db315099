"""The Blackwell forward kernel of pairs of CTAs, executed on the CPU from its PTX, against the oracle.

It serves long sequences; here it gets short ones.
"""

import random

import pytest
import torch

from tests.lib.checks import bitwise_equal, drawn
from tests.lib.interpreted import forward
from tests.lib.interpreted.common import EVERYTHING, dense, packed
from tests.lib.interpreted.forward import check, execute
from tests.lib.tiers import tiered

CASES = {
    "d256": dense([300], [400], head_dim=256, nheads=1),
    "d256-causal-gqa": dense([257], [270], head_dim=256, nheads=2, nheads_k=1, causal=True),
    "d256-packed": packed([129, 0, 300], [128, 17, 257], head_dim=256, causal=True, nheads=1),
    "d256-no-keys": packed([257, 20, 257], [60, 0, 0], head_dim=256, nheads=1, dtype=torch.float16),
    "d256-everything": packed([140, 20], [300, 0], head_dim=256, nheads=1, **EVERYTHING),
    "d216-dv128": dense([200], [65], nheads=1, head_dim=216, head_dim_v=128),
    "d192-dv128": dense([600], [140], nheads=1, head_dim=192, head_dim_v=128),
    "d192-dv128-window": dense([300], [400], nheads=1, head_dim=192, head_dim_v=128, window_size=(200, 0)),
    "d192-dv128-everything": packed(
        [400, 1, 30],
        [300, 129, 0],
        nheads=2,
        nheads_k=1,
        head_dim=136,
        head_dim_v=104,
        dtype=torch.float16,
        **EVERYTHING,
    ),
}

RARE = "d256-causal-gqa", "d256-packed", "d256-no-keys", "d192-dv128-window"


@pytest.mark.parametrize("case", tiered(CASES, "d192-dv128-everything", rare=RARE))
def test_forward(case: str, fuzz_seconds: float) -> None:
    """Sequences around edges of tiles and of each CTA's part of them, under schedules drawn at random."""
    call = CASES[case]()
    for _, draw in drawn(case, fuzz_seconds):
        check(call, draw, by_pairs=True)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(256, 256), (192, 128)])
def test_references_that_rise_by_much(head_dim: int, head_dim_v: int) -> None:
    """row_max of some rows rises, in either CTA: one CTA rescales its rows of O, and the other does not."""
    call = dense([200], [384], nheads=1, head_dim=head_dim, head_dim_v=head_dim_v)()
    with torch.no_grad():
        call.q[:, 130::3] *= 8
        call.k *= torch.linspace(4, 0.1, 384, dtype=call.k.dtype)[:, None, None]
    check(call, random.Random(0), by_pairs=True)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair has all tiles, or several share them."""
    call = dense([300], [200], head_dim=256)()
    results = []
    for seed, num_sms in enumerate((2, 5)):
        monkeypatch.setattr(forward, "NUM_SMS", num_sms)
        results.append(execute(call, random.Random(seed), by_pairs=True))
    assert all(bitwise_equal(a, b) for a, b in zip(*results, strict=True))
