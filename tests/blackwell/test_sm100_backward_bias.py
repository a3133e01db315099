"""Gradients under a bias, and that of the bias, on Blackwell: executed on the CPU from PTX, against the oracle."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.lib import oracle
from tests.lib.checks import bitwise_equal, drawn, poisoned_dout
from tests.lib.interpreted.backward import Interpreted, check, execute
from tests.lib.interpreted.bias_gradient import WithGradient, check_dbias
from tests.lib.interpreted.common import EVERYTHING, dense
from tests.lib.masks import with_block_mask
from tests.lib.oracle import Call
from tests.lib.tiers import tiered


def with_extremes(call: Call, *, lowest: bool = True) -> Call:
    """The call with hidden keys and queries, and biases as large as additive masks have them.

    ``lowest``: the least there is among them, too, of all but the first keys. Without others a query is fully masked.
    """
    assert call.bias is not None
    with torch.no_grad():
        if call.bias.ndim and call.bias.shape[-1] > 1:
            call.bias[..., ::7] = -torch.inf
        if call.bias.ndim > 1 and call.bias.shape[-2] > 40:
            call.bias[..., 5, :] = -torch.inf
            if call.bias.shape[-1] > 10:
                call.bias[..., 30:40, 10] = 1e4
                if lowest and call.window_size == (None, None):  # else queries may not see the first keys
                    call.bias[..., 10:20, 3:] = torch.finfo(call.bias.dtype).min
    return call


def drawn_call(lengths_q: list[int], lengths_k: list[int], *, lowest: bool = True, **options: Any) -> Call:
    return with_extremes(dense(lengths_q, lengths_k, **{"nheads": 1, **options})(), lowest=lowest)


def check_all(call: Call, backend: WithGradient, *, through_lse: bool) -> None:
    """All gradients, and zeros in the padding of the bias's."""
    assert call.bias is not None
    got = check(call, backend, through_lse=through_lse)
    assert (got["dbias"][call.score_padding(call.bias)] == 0).all(), "dbias: padding is not zero"


def given(lengths_q: list[int], lengths_k: list[int], **options: Any) -> partial[Call]:
    return partial(drawn_call, lengths_q, lengths_k, **options)


# Every score has an element of its own, of q's dtype: the kernel that computes the gradients of scores stores them.
OWN = {
    "d128": given([150], [260], head_dim=128, bias=(1, 1)),
    "d64-causal-sliced": given([140], [201], bias=(1, 1, 1), bias_layout="sliced", causal=True, nheads=2),
    "d64-grouped": given([100, 100], [130, 130], bias=(1, 1, 1, 1), nheads=4, nheads_k=1),
    "d192-dv128-everything": given(
        [70, 0, 20],
        [140, 7, 90],
        head_dim=192,
        head_dim_v=104,
        packed=True,
        nheads=2,
        nheads_k=1,
        bias=(1, 1, 1),
        bias_layout="transposed",
        **EVERYTHING | {"softcap": 0.0},
    ),
    "d256-float16": given([70], [141], head_dim=256, bias=(1, 1), dtype=torch.float16, sink=True),
    "d64-packed": given([150, 0, 60], [130, 7, 140], packed=True, bias=(1, 1, 1), bias_layout="transposed"),
    "d64-padded": given([150, 40], [60, 130], seqused=True, bias=(1, 1, 1, 1)),  # a dense batch that becomes packed
    "d256-padded": given([30, 70], [130, 60], seqused=True, bias=(1, 1, 1, 1), head_dim=256, nheads=2, nheads_k=1),
}


@pytest.mark.parametrize(
    "case", tiered(OWN, rare=["d128", "d64-causal-sliced", "d64-grouped", "d64-packed", "d256-padded"])
)
def test_own_biases(case: str, fuzz_seconds: float) -> None:
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        backend = WithGradient(draw)
        check_all(OWN[case](), backend, through_lse=len(case) % 2 == count % 2)
        assert not backend.plans


# Calls of which both kernels are executed, that of the bias's gradient in one test and the main one in another.
BOTH = {
    "d64-packed-keys": given([150, 0, 60], [130, 7, 140], packed=True, bias=(1, 0, 1), causal=True),
    "d256-everything": given(
        [70, 1], [130, 3], bias=(1, 0, 1, 1), bias_dtype=torch.float32, head_dim=256, nheads=2, nheads_k=1, **EVERYTHING
    ),
}


# Of any other shape, layout and dtype, without a gradient.
GIVEN = BOTH | {
    "d64-keys": given([140], [150], bias=(1,), bias_dtype=torch.float32, bias_layout="sliced", nheads=2),
    "d128-everything": given(
        [100, 1, 30], [150, 3, 0], bias=(0, 1, 1), head_dim=128, packed=True, nheads=2, nheads_k=1, **EVERYTHING
    ),
    "d64-grouped": given([140], [150], bias=(1, 1, 0), nheads=4, nheads_k=1, bias_dtype=torch.float32),
    "d192-everything": given([70, 1], [130, 3], bias=(1, 0, 1, 1), head_dim=192, nheads_k=1, **EVERYTHING),
    "d64-blind-transposed": given([200], [140], bias=(0, 1, 1), bias_layout="transposed", causal=True, nheads=2),
}


RARE_GIVEN = "d128-everything", "d64-grouped", "d192-everything", "d64-blind-transposed"


@pytest.mark.parametrize("case", tiered(GIVEN, rare=RARE_GIVEN))
def test_given_biases(case: str, fuzz_seconds: float) -> None:
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = GIVEN[case]()
        assert call.bias is not None
        call.bias.requires_grad_(False)
        check(call, Interpreted(draw), through_lse=count % 2 == (1 if "blind" in case else 0))


# Beside a mask, some of whose blocks are hidden and others whole, or a block mask: whether both kernels are executed.
MASKED = {
    "d64-own": (given([200], [300], bias=(1, 1, 1), mask=(1, 1), window_size=(150, None)), True),
    "d128-own-block-mask": (given([200], [300], bias=(1, 1, 1), head_dim=128, nheads=2, nheads_k=1), True),
    "d256-block-mask": (given([200], [300], bias=(1, 1), head_dim=256, nheads=2), False),
    "d128-everything": (
        given(
            [150, 1],
            [200, 0],
            packed=True,
            head_dim=128,
            bias=(1, 0, 1),
            mask=(1, 1, 1),
            nheads=2,
            nheads_k=1,
            **EVERYTHING,
        ),
        True,
    ),
    "d64-packed": (given([150, 0, 60], [200, 7, 140], packed=True, bias=(0, 1, 1), mask=(1, 1), nheads=2), False),
}


@pytest.mark.parametrize("case", tiered(MASKED, rare=["d64-own", "d64-packed", "d256-block-mask"]))
def test_biases_beside_masks(case: str, fuzz_seconds: float) -> None:
    draw_call, runs_both = MASKED[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = draw_call(lowest="mask" in draw_call.keywords)
        if call.mask is None:
            call = with_block_mask(call, draw)
        else:
            call.mask[..., :140, 128:256], call.mask[..., :140, :128] = False, True
        if runs_both:
            check_all(call, WithGradient(draw), through_lse=count % 2 == 0)
        else:
            check_dbias(call, WithGradient(draw, is_alone=True))


# Others have a kernel of their own, which adds up what the bias was broadcast over.
SHARED = BOTH | {
    "d64-batch": given([140, 140], [150, 150], bias=(1, 1, 1), nheads=2),
    "d128-keys-uniform": given([140], [150], bias=(1, 0, 1), head_dim=128, nheads=2),
    "d64-queries": given([140], [150], bias=(1, 1, 0), nheads=2, nheads_k=1),
    "d64-number": given([140], [150], bias=(), bias_dtype=torch.float32),
    "d64-transposed": given([140], [150], bias=(1, 1), bias_layout="transposed", nheads=2),
    "d64-split": given([70] * 4, [80] * 4, bias=(1, 1)),
    "d128-float32-split": given([70] * 4, [80] * 4, bias=(1, 1), bias_dtype=torch.float32, head_dim=128),
    "d64-everything": given([140, 1], [200, 3], bias=(1, 1, 1), nheads_k=1, nheads=2, **EVERYTHING),
    "d64-padded-batch": given([140, 30], [60, 200], bias=(1, 1, 1), seqused=True, causal=True),
    "d256-float16": given([70, 70], [141, 141], head_dim=256, bias=(1, 1), dtype=torch.float16),
}


RARE_SHARED = "d128-keys-uniform", "d128-float32-split", "d64-everything", "d64-padded-batch", "d256-float16"


@pytest.mark.parametrize("case", tiered(SHARED, "d64-queries", rare=RARE_SHARED))
def test_shared_biases(case: str, fuzz_seconds: float) -> None:
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        backend = WithGradient(draw, is_alone=True)
        check_dbias(SHARED[case](), backend)
        (plan,) = backend.plans
        assert plan.config.split == case.endswith("split")


@pytest.mark.slow
def test_schedules_give_the_same_bits() -> None:
    """Gradients of shared biases, split between CTAs or not, by the same number of CTAs each time."""
    for bias, num_sms in (((1, 1, 1), 1), ((1, 0, 1), 4)):
        call = drawn_call([140] * 2, [150] * 2, bias=bias)
        out, lse = oracle.attention(call.to(torch.float64))
        dout = poisoned_dout(call, out.to(call.q.dtype))
        first, second = (
            execute(call, WithGradient(random.Random(n), num_sms, is_alone=True), lse.detach().float(), dout, None)
            for n in range(2)
        )
        assert bitwise_equal(first["dbias"], second["dbias"])
