"""The Blackwell forward kernel, executed on the CPU from its PTX (``lab.interpreter``), against the oracle."""

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from tests.lib.checks import drawn
from tests.lib.interpreted.common import B300, EVERYTHING, dense, packed
from tests.lib.interpreted.forward import check, execute
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

CASES = {
    "d128": dense([300], [400], head_dim=128, nheads=1),
    "d128-causal": dense([257, 257], [384, 384], head_dim=128, causal=True, nheads_k=1),
    "d128-one-key-for-the-last": dense([256], [1], head_dim=128, causal=True, nheads=1),
    "d128-short-tiles": dense([300], [128], head_dim=128, nheads=3),
    "d128-packed": packed([129, 0, 300], [128, 17, 257], head_dim=128, causal=True),
    "d128-no-keys": packed([257, 256, 257], [128, 0, 0], head_dim=128),
    "d64-everything": packed([200, 1, 30], [300, 129, 0], head_dim=64, **EVERYTHING),
    "d8": dense([140], [130], head_dim=8, nheads=1, causal=True),
    "d72-float16": dense([500], [1], head_dim=72, dtype=torch.float16),
    "d192-dv128-causal": packed([300, 5], [300, 140], head_dim=192, head_dim_v=128, causal=True, nheads=1),
    "d136": dense([260], [300], head_dim=136, nheads=1),
    "d256-everything": packed([140, 20], [300, 0], head_dim=256, nheads=1, **EVERYTHING),
}


RARE = "d128-no-keys", "d128-packed", "d72-float16", "d64-everything", "d256-everything"


@pytest.mark.parametrize("case", tiered(CASES, "d128-one-key-for-the-last", rare=RARE))
def test_forward(case: str, fuzz_seconds: float) -> None:
    """Sequences around tile edges, under schedules drawn at random."""
    call = CASES[case]()
    for _, draw in drawn(case, fuzz_seconds):
        check(call, draw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "by_pairs"),
    [
        (packed([129, 20], [200, 140], nheads=1, **EVERYTHING), False),
        (packed([140, 20], [200, 0], nheads=1, head_dim=256, **EVERYTHING), False),
        (packed([150], [140], nheads=1, head_dim=192, head_dim_v=128, **EVERYTHING), True),
    ],
    ids=["d64-everything", "d256-everything", "pair-d192-dv128-everything"],
)
def test_kernels_of_a_b300(make: Callable[[], Call], by_pairs: bool) -> None:
    """They compute all of P without polynomials."""
    call = make()
    for seed in range(2):
        check(call, random.Random(seed), by_pairs=by_pairs, capability=B300)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 256])  # O is known to be complete in different ways
def test_references_that_rise_by_much(head_dim: int) -> None:
    """Each block has larger scores than the one before, and some rows' rise while their neighbours' do not."""
    call = dense([256], [512], nheads=1, head_dim=head_dim)()
    with torch.no_grad():
        call.q[:, ::3] *= 8
        call.k *= torch.linspace(4, 0.1, 512, dtype=call.k.dtype)[:, None, None]
    check(call, random.Random(0))


@pytest.mark.slow
def test_nan_of_a_key_is_seen() -> None:
    """By all queries that see the key, whichever way the weight of its column is computed; and by no others."""
    call = dense([130], nheads=1, causal=True)()
    with torch.no_grad():
        call.k[:, 14] = torch.nan  # its pair of weights is one that comes from a polynomial
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in ("q", "k", "v")})
    out, lse = execute(call, random.Random(0))
    assert out[:, 14:].isnan().all()
    assert lse[..., 14:].isnan().all()
    assert out[:, :14].isfinite().all()
