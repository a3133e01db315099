"""The Blackwell backward kernel, executed on the CPU from its PTX (``lab.interpreter``), against the oracle.

The backend's own code prepares its arguments. Many calls take configurations of ``tests/compile``, so that those are
compiled once.
"""

import random
import re
from dataclasses import replace

import pytest
import torch

from tests.lib import oracle
from tests.lib.checks import bitwise_equal, drawn, poisoned_dout
from tests.lib.interpreted import forward
from tests.lib.interpreted.backward import Interpreted, check, execute
from tests.lib.interpreted.common import B300, EVERYTHING, NUM_SMS, dense, packed
from tests.lib.tiers import tiered

CASES = {
    "d128": dense([150], [260], head_dim=128, nheads=1),
    "d128-causal": dense([257], [300], head_dim=128, causal=True),
    "d128-packed": packed([129, 0, 140], [128, 17, 150], head_dim=128, causal=True, nheads=1),
    "d128-grouped": dense([100], [140], head_dim=128, nheads=4, nheads_k=1),
    "d128-everything": packed([100, 1, 30], [150, 3, 0], head_dim=128, nheads_k=1, **EVERYTHING),
    "d192-dv128": dense([70], [140], head_dim=192, head_dim_v=128, nheads=1),
    "d192-dv128-everything": packed([70, 1], [130, 3], head_dim=176, head_dim_v=104, nheads_k=1, **EVERYTHING),
    "d192": dense([150], [140], head_dim=192, nheads=1),
    "d256-packed": packed([65, 0, 10], [130, 17, 20], head_dim=256, causal=True, nheads=1),
    "d256-grouped": dense([60], [70], head_dim=256, nheads=2, nheads_k=1),
    "d256-everything": packed([70, 1, 30], [130, 3, 0], head_dim=232, head_dim_v=200, nheads_k=1, **EVERYTHING),
    "d64": dense([200], [150], head_dim=64, nheads=1),
    "d64-everything": packed([150, 1, 30], [200, 129, 0], head_dim=64, **EVERYTHING),
    "d64-packed-grouped": packed([100, 20, 0], [130, 20, 5], head_dim=64, nheads=4, nheads_k=1, causal=True),
    "d96-float16": dense([140], [150], head_dim=96, nheads=1, dtype=torch.float16),
    "d40-dv24": dense([150], [150], head_dim=40, head_dim_v=24, window_size=(20, None)),
    "d8": dense([70], [140], head_dim=8, nheads=1, causal=True),
    "d64-blind": dense([300], [140], head_dim=64, causal=True, nheads=1),
}


def through_lse(case: str, number: int) -> bool:
    """Whether the n-th call of a case has a gradient of lse, which is every other one; of some cases the first."""
    return number % 2 == (0 if re.search("everything|grouped|left|d40", case) else 1)


RARE = ["d128-causal", "d128-packed", "d128-grouped", "d128-everything", "d192-dv128-everything"]
RARE += ["d256-packed", "d64-packed-grouped", "d40-dv24"]


@pytest.mark.parametrize("case", tiered(CASES, "d64-everything", "d256-grouped", rare=RARE))
def test_backward(case: str, fuzz_seconds: float) -> None:
    """Sequences around tile edges, under schedules drawn at random: two CTAs, which wait for each other's turns."""
    call = CASES[case]()
    for number, draw in drawn(case, fuzz_seconds):
        check(call, Interpreted(draw), through_lse=through_lse(case, number))


# With the kernels of long sequences, whose tiles of 256 keys are the work of pairs of CTAs.
PAIRS = {
    "two-tiles": dense([150], [300], head_dim=128, nheads=1),
    "grouped-causal": dense([130], [270], head_dim=128, nheads=2, nheads_k=1, causal=True),
    "packed-float16": packed([129, 0, 20], [257, 17, 100], head_dim=128, nheads=1, causal=True, dtype=torch.float16),
    "everything": packed([140, 1], [290, 0], head_dim=128, head_dim_v=72, nheads=2, nheads_k=1, **EVERYTHING),
    "left": dense([150], [290], head_dim=128, nheads=1, window_size=(20, None)),
    "d192-dv128": dense([150], [300], head_dim=192, head_dim_v=128, nheads=1),
    "d192-dv128-window": dense([130], [270], head_dim=192, head_dim_v=128, nheads=1, window_size=(70, 0)),
    "d192-dv128-causal": dense([70], [270], head_dim=192, head_dim_v=128, nheads=4, nheads_k=1, causal=True),
    "d192-dv128-packed": packed(
        [65, 0, 20], [257, 17, 100], head_dim=192, head_dim_v=128, nheads=1, causal=True, dtype=torch.float16
    ),
    "d160-dv96-everything": packed([100, 1], [290, 0], head_dim=160, head_dim_v=96, nheads=2, nheads_k=1, **EVERYTHING),
    "d192": dense([65], [300], head_dim=192, nheads=1),
    "d256": dense([100], [270], nheads=1, head_dim=256),
    "d256-window": dense([130], [270], nheads=1, window_size=(70, 0), head_dim=256),
    "d256-left": dense([70], [270], nheads=1, window_size=(20, None), head_dim=256),
    "d256-grouped-causal": dense([65], [270], nheads=3, nheads_k=1, causal=True, head_dim=256),
    "d256-packed": packed([65, 0, 20], [257, 17, 100], nheads=1, causal=True, dtype=torch.float16, head_dim=256),
    "d232-dv200-everything": packed(
        [100, 1], [290, 0], head_dim=232, head_dim_v=200, nheads=2, nheads_k=1, **EVERYTHING
    ),
    "d176-everything": packed([100, 1], [290, 0], head_dim=176, head_dim_v=168, nheads=2, nheads_k=1, **EVERYTHING),
}


RARE_PAIRS = ["packed-float16", "everything", "left", "d192-dv128-window", "d192-dv128-causal", "d192-dv128-packed"]
RARE_PAIRS += ["d256-window", "d256-left", "d256-grouped-causal", "d256-packed", "d176-everything"]


@pytest.mark.parametrize("case", tiered(PAIRS, "grouped-causal", "d256", rare=RARE_PAIRS))
def test_backward_by_pairs(case: str, fuzz_seconds: float) -> None:
    """Two pairs of CTAs: keys of a tile's second CTA may be none, and blocks of queries may have none for it."""
    call = PAIRS[case]()
    for number, draw in drawn(case, fuzz_seconds):
        check(call, Interpreted(draw, num_ctas=4, by_pairs=True), through_lse=through_lse(case, number))


@pytest.mark.slow
def test_slices_of_one_projection() -> None:
    """q, k and v, whose rows are far apart: both passes read them where they are."""
    call = dense([140], causal=True)()
    projected = torch.stack((call.q, call.k, call.v), 2).detach()
    q, k, v = (x.requires_grad_() for x in projected.unbind(2))
    assert all(x.stride(1) == 3 * 2 * 64 for x in (q, k, v))
    call = replace(call, q=q, k=k, v=v)
    forward.check(call, random.Random(0))
    check(call, Interpreted(random.Random(0)))


@pytest.mark.slow
def test_kernels_of_a_b300() -> None:
    check(dense([70], [140], nheads=1)(), Interpreted(random.Random(0), capability=B300))


MOST = {"nheads_k": 1, **EVERYTHING, "sink": False}
WIDE = {
    "d128": packed([65, 0, 20], [130, 17, 5], head_dim=72, nheads=3, **MOST),
    "d64": packed([300, 5], [100, 30], causal=True),  # the second's are written first
    "d256": dense([70], [90], head_dim=256, head_dim_v=200, **MOST),
    "pair-d128": packed([129, 9], [270, 30], head_dim=128, head_dim_v=72, **MOST),
    "pair-d192-dv128": packed([70, 9], [270, 30], head_dim=192, head_dim_v=128, **MOST),
    "pair-d192": packed([33, 9], [140, 30], head_dim=192, head_dim_v=176, **MOST),
}


@pytest.mark.parametrize("case", tiered(WIDE, rare=["d128", "pair-d128", "pair-d192"]))
def test_wide_gradients_are_what_is_rounded_else(case: str) -> None:
    """``distributed`` asks for such parts and sums them."""
    call, by_pairs = WIDE[case](), case.startswith("pair")
    out, lse = oracle.attention(call.to(torch.float64))
    dout = poisoned_dout(call, out.to(call.q.dtype))
    dlse = torch.randn(lse.shape) if call.softcap else None
    rounded, wide = (
        execute(
            call,
            Interpreted(random.Random(0), num_ctas=4 if by_pairs else NUM_SMS, by_pairs=by_pairs),
            lse.detach().float(),
            dout,
            dlse,
            wide=is_wide,
        )
        for is_wide in (False, True)
    )
    for name, x in wide.items():
        assert x.dtype == torch.float32
        assert (x != rounded[name]).any()
        assert bitwise_equal(x.bfloat16(), rounded[name])


SCHEDULED = {
    "d64": dense([100], [300]),
    "d192": dense([65], [140], head_dim=192, nheads_k=1),
    "pairs": dense([100], [300], head_dim=128, nheads=3, nheads_k=1, causal=True),
    "pairs-d192-dv128": dense([65], [300], head_dim=192, head_dim_v=128, nheads_k=1),
    "pairs-d256": dense([65], [270], head_dim=256, nheads=1),
}


@pytest.mark.parametrize("case", tiered(SCHEDULED, rare=["d192", "pairs-d192-dv128"]))
def test_schedules_give_the_same_bits(case: str) -> None:
    """Several tiles of keys add to each block of dQ, and three heads' to dK and dV, by one CTA or pair, or several."""
    call, by_pairs = SCHEDULED[case](), case.startswith("pairs")
    out, lse = oracle.attention(call.to(torch.float64))
    dout, dlse = poisoned_dout(call, out.to(call.q.dtype)), torch.randn(lse.shape) if call.causal else None
    first, *others = (
        execute(call, Interpreted(random.Random(n), num_ctas, by_pairs=by_pairs), lse.detach().float(), dout, dlse)
        for n, num_ctas in enumerate((2, 4) if by_pairs else (1, 3))
    )
    for other in others:
        assert all(bitwise_equal(first[name], other[name]) for name in first)
