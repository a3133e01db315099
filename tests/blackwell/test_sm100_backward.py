"""The Blackwell backward kernel, executed on the CPU from its PTX (``lab.interpreter``), against the oracle.

The backend's own code prepares its arguments. Many calls take configurations of ``tests/compile``, so that those are
compiled once.
"""

import itertools
import random
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lib import oracle
from tests.lib.checks import bitwise_equal, poisoned_dout, random_call
from tests.lib.interpreted import forward
from tests.lib.interpreted.backward import Interpreted, check, execute
from tests.lib.interpreted.common import B300, EVERYTHING, NUM_SMS
from tests.lib.tiers import tiered

CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([150], [260], {"packed": False, "head_dim": 128, "nheads": 1}),
    "d128-causal": ([257], [300], {"packed": False, "head_dim": 128, "causal": True}),
    "d128-packed": ([129, 0, 140], [128, 17, 150], {"head_dim": 128, "causal": True, "nheads": 1}),
    "d128-grouped": ([100], [140], {"packed": False, "head_dim": 128, "nheads": 4, "nheads_k": 1}),
    "d128-everything": ([100, 1, 30], [150, 3, 0], {"head_dim": 128, **EVERYTHING, "nheads_k": 1}),
    "d192-dv128": ([70], [140], {"packed": False, "head_dim": 192, "head_dim_v": 128, "nheads": 1}),
    "d192-dv128-everything": ([70, 1], [130, 3], {"head_dim": 176, "head_dim_v": 104, **EVERYTHING, "nheads_k": 1}),
    "d192": ([150], [140], {"packed": False, "head_dim": 192, "nheads": 1}),
    "d256-packed": ([65, 0, 10], [130, 17, 20], {"head_dim": 256, "causal": True, "nheads": 1}),
    "d256-grouped": ([60], [70], {"packed": False, "head_dim": 256, "nheads": 2, "nheads_k": 1}),
    "d256-everything": ([70, 1, 30], [130, 3, 0], {"head_dim": 232, "head_dim_v": 200, **EVERYTHING, "nheads_k": 1}),
    "d64": ([200], [150], {"packed": False, "head_dim": 64, "nheads": 1}),
    "d64-everything": ([150, 1, 30], [200, 129, 0], {"head_dim": 64, **EVERYTHING}),
    "d64-packed-grouped": ([100, 20, 0], [130, 20, 5], {"head_dim": 64, "nheads": 4, "nheads_k": 1, "causal": True}),
    "d96-float16": ([140], [150], {"packed": False, "head_dim": 96, "nheads": 1, "dtype": torch.float16}),
    "d40-dv24": ([150], [150], {"packed": False, "head_dim": 40, "head_dim_v": 24, "window_size": (20, None)}),
    "d8": ([70], [140], {"packed": False, "head_dim": 8, "nheads": 1, "causal": True}),
    "d64-blind": ([300], [140], {"packed": False, "head_dim": 64, "causal": True, "nheads": 1}),
}


def through_lse(case: str, number: int) -> bool:
    """Whether the n-th call of a case has a gradient of lse, which is every other one; of some cases the first."""
    return number % 2 == (0 if re.search("everything|grouped|left|d40", case) else 1)


RARE = ["d128-causal", "d128-packed", "d128-grouped", "d128-everything", "d192-dv128-everything"]
RARE += ["d256-packed", "d64-packed-grouped", "d40-dv24"]


@pytest.mark.parametrize("case", tiered(CASES, "d64-everything", "d256-grouped", rare=RARE))
def test_backward(case: str, fuzz_seconds: float) -> None:
    """Sequences around tile edges, under schedules drawn at random: two CTAs, which wait for each other's turns."""
    lengths_q, lengths_k, options = CASES[case]
    call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, **options})
    stop = time.monotonic() + fuzz_seconds
    for number in itertools.count():
        check(call, Interpreted(random.Random(f"{case} {number}")), through_lse=through_lse(case, number))
        if time.monotonic() > stop:
            break


D256 = {"head_dim": 256, "head_dim_v": 256}
# With the kernels of long sequences, whose tiles of 256 keys are the work of pairs of CTAs.
PAIRS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "two-tiles": ([150], [300], {"packed": False, "nheads": 1}),
    "grouped-causal": ([130], [270], {"packed": False, "nheads": 2, "nheads_k": 1, "causal": True}),
    "packed-float16": ([129, 0, 20], [257, 17, 100], {"nheads": 1, "causal": True, "dtype": torch.float16}),
    "everything": ([140, 1], [290, 0], {**EVERYTHING, "head_dim_v": 72, "nheads": 2, "nheads_k": 1}),
    "left": ([150], [290], {"packed": False, "nheads": 1, "window_size": (20, None)}),
    "d192-dv128": ([150], [300], {"packed": False, "head_dim": 192, "nheads": 1}),
    "d192-dv128-window": ([130], [270], {"packed": False, "head_dim": 192, "nheads": 1, "window_size": (70, 0)}),
    "d192-dv128-causal": ([70], [270], {"packed": False, "head_dim": 192, "nheads": 4, "nheads_k": 1, "causal": True}),
    "d192-dv128-packed": (
        [65, 0, 20],
        [257, 17, 100],
        {"head_dim": 192, "nheads": 1, "causal": True, "dtype": torch.float16},
    ),
    "d160-dv96-everything": (
        [100, 1],
        [290, 0],
        {**EVERYTHING, "head_dim": 160, "head_dim_v": 96, "nheads": 2, "nheads_k": 1},
    ),
    "d192": ([65], [300], {"packed": False, "head_dim": 192, "head_dim_v": 192, "nheads": 1}),
    "d256": ([100], [270], {"packed": False, **D256, "nheads": 1}),
    "d256-window": ([130], [270], {"packed": False, **D256, "nheads": 1, "window_size": (70, 0)}),
    "d256-left": ([70], [270], {"packed": False, **D256, "nheads": 1, "window_size": (20, None)}),
    "d256-grouped-causal": ([65], [270], {"packed": False, **D256, "nheads": 3, "nheads_k": 1, "causal": True}),
    "d256-packed": ([65, 0, 20], [257, 17, 100], {**D256, "nheads": 1, "causal": True, "dtype": torch.float16}),
    "d232-dv200-everything": (
        [100, 1],
        [290, 0],
        {**EVERYTHING, "head_dim": 232, "head_dim_v": 200, "nheads": 2, "nheads_k": 1},
    ),
    "d176-everything": (
        [100, 1],
        [290, 0],
        {**EVERYTHING, "head_dim": 176, "head_dim_v": 168, "nheads": 2, "nheads_k": 1},
    ),
}


RARE_PAIRS = ["packed-float16", "everything", "left", "d192-dv128-window", "d192-dv128-causal", "d192-dv128-packed"]
RARE_PAIRS += ["d256-window", "d256-left", "d256-grouped-causal", "d256-packed", "d176-everything"]


@pytest.mark.parametrize("case", tiered(PAIRS, "grouped-causal", "d256", rare=RARE_PAIRS))
def test_backward_by_pairs(case: str, fuzz_seconds: float) -> None:
    """Two pairs of CTAs: keys of a tile's second CTA may be none, and blocks of queries may have none for it."""
    lengths_q, lengths_k, options = PAIRS[case]
    options = {"dtype": torch.bfloat16, "head_dim": 128, "head_dim_v": 128, **options}
    call = random_call(lengths_q, lengths_k, **options)
    stop = time.monotonic() + fuzz_seconds
    for number in itertools.count():
        backend = Interpreted(random.Random(f"{case} {number}"), num_ctas=4, by_pairs=True)
        check(call, backend, through_lse=through_lse(case, number))
        if time.monotonic() > stop:
            break


@pytest.mark.slow
def test_slices_of_one_projection() -> None:
    """q, k and v, whose rows are far apart: both passes read them where they are."""
    call = random_call([140], [140], packed=False, nheads=2, head_dim=64, causal=True, dtype=torch.bfloat16)
    projected = torch.stack((call.q, call.k, call.v), 2).detach()
    q, k, v = (x.requires_grad_() for x in projected.unbind(2))
    assert all(x.stride(1) == 3 * 2 * 64 for x in (q, k, v))
    call = replace(call, q=q, k=k, v=v)
    forward.check(call, random.Random(0))
    check(call, Interpreted(random.Random(0)))


@pytest.mark.slow
def test_kernels_of_a_b300() -> None:
    call = random_call([70], [140], packed=False, head_dim=64, nheads=1, dtype=torch.bfloat16)
    check(call, Interpreted(random.Random(0), capability=B300))


MOST = {**EVERYTHING, "sink": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "by_pairs", "options"),
    [
        pytest.param([65, 0, 20], [130, 17, 5], False, {"head_dim": 72, "nheads": 3, **MOST}, marks=pytest.mark.rare),
        ([300, 5], [100, 30], False, {"head_dim": 64, "nheads_k": 2, "causal": True}),  # the second's are written first
        ([70], [90], False, {"head_dim": 256, "head_dim_v": 200, "packed": False, **MOST}),
        pytest.param([129, 9], [270, 30], True, {"head_dim": 128, "head_dim_v": 72, **MOST}, marks=pytest.mark.rare),
        ([70, 9], [270, 30], True, {"head_dim": 192, "head_dim_v": 128, **MOST}),
        pytest.param([33, 9], [140, 30], True, {"head_dim": 192, "head_dim_v": 176, **MOST}, marks=pytest.mark.rare),
    ],
    ids=["d128", "d64", "d256", "pair-d128", "pair-d192-dv128", "pair-d192"],
)
def test_wide_gradients_are_what_is_rounded_else(
    lengths_q: list[int], lengths_k: list[int], by_pairs: bool, options: dict[str, Any]
) -> None:
    """``distributed`` asks for such parts and sums them."""
    given = {"nheads": 2, "nheads_k": 1, "dtype": torch.bfloat16, **options}
    call = random_call(lengths_q, lengths_k, **given)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "by_pairs", "options"),
    [
        (100, 300, False, {"head_dim": 64}),
        pytest.param(65, 140, False, {"head_dim": 192, "nheads_k": 1}, marks=pytest.mark.rare),
        (100, 300, True, {"head_dim": 128, "nheads": 3, "nheads_k": 1, "causal": True}),
        pytest.param(65, 300, True, {"head_dim": 192, "head_dim_v": 128, "nheads_k": 1}, marks=pytest.mark.rare),
        (65, 270, True, {"head_dim": 256, "nheads": 1}),
    ],
    ids=["d64", "d192", "pairs", "pairs-d192-dv128", "pairs-d256"],
)
def test_schedules_give_the_same_bits(queries: int, keys: int, by_pairs: bool, options: dict[str, Any]) -> None:
    """Several tiles of keys add to each block of dQ, and three heads' to dK and dV, by one CTA or pair, or several."""
    call = random_call([queries], [keys], packed=False, **{"nheads": 2, "dtype": torch.bfloat16, **options})
    out, lse = oracle.attention(call.to(torch.float64))
    dout, dlse = poisoned_dout(call, out.to(call.q.dtype)), torch.randn(lse.shape) if call.causal else None
    first, *others = (
        execute(call, Interpreted(random.Random(n), num_ctas, by_pairs=by_pairs), lse.detach().float(), dout, dlse)
        for n, num_ctas in enumerate((2, 4) if by_pairs else (1, 3))
    )
    for other in others:
        assert all(bitwise_equal(first[name], other[name]) for name in first)
