"""Hopper's kernels, executed on the CPU by the interpreter of PTX."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask
from flash_attn_cute.backends.cute import plan
from flash_attn_cute.kernels.sm90.backward import backward_config
from tests.lib.checks import Case, bitwise_equal, each_of, random_call
from tests.lib.interpreted import backward, forward
from tests.lib.interpreted.bias_gradient import WithGradient, check_dbias
from tests.lib.interpreted.common import EVERYTHING, H100
from tests.lib.masks import spread
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

PACKED: dict[str, Any] = {"packed": True, "nheads_k": 1, **EVERYTHING}
FORWARD: dict[str, Case] = {
    "d128-causal": {"head_dim": 128, "causal": True},
    "d128": {"head_dim": 128, "dtype": torch.float16},
    "d192-dv128-packed": {"head_dim": 192, "head_dim_v": 128, **PACKED},
    "d64-bias": {"bias": (1, 1)},  # by TMA, as the next one
    "d128-bias": {"bias": (1, 1, 1), "head_dim": 128, "causal": True, "softcap": 2.0},
    "d64-bias-sliced": {"bias": (1, 1), "bias_layout": "sliced"},
    "d128-bias-packed": {"bias": (1, 1, 1), "head_dim": 128, **PACKED},
    "d64-bias-slots": {"bias": (1, 1, 1, 1), "seqused": True},  # a dense batch that becomes packed
    "d128-row-of-a-bias": {"head_dim": 128, "bias": (1, 0, 1), "nheads": 3, "causal": True},
    "d256": {"head_dim": 256, "causal": True},
}
MAX_LOGITS: dict[str, Case] = {
    "causal": {"causal": True},
    "negative-scale": {"causal": True, "softmax_scale": -0.3},
    "grouped": {"nheads": 4, "nheads_k": 1, "packed": True, "softcap": 2.0, "window_size": (90, 20)},
    "d128": {"head_dim": 128},
    "mask": {"mask": (1, 1)},
    "bias": {"bias": (1, 1), "causal": True},
}
LOWEST = torch.finfo(torch.float32).min
EXTREME_ROWS: dict[str, Callable[[int], Tensor]] = {
    "lowest-suffix": lambda keys: torch.where(torch.arange(keys) < 120, torch.zeros(keys), LOWEST),
    "large": lambda keys: torch.full((keys,), -1e9),
    "hidden-suffix": lambda keys: torch.where(torch.arange(keys) < 120, torch.randn(keys), -torch.inf),
    "steep": lambda keys: torch.arange(keys) * 150.0,
}
BACKWARD: dict[str, Case] = {
    "d64": {},
    "d128-packed": {"head_dim": 128, **PACKED},
    # Biases whose gradients are what the kernel computes: by TMA, in tiles or not; and sums of it.
    "d64-bias": {"bias": (1, 1), "nheads": 1, "mask": (1, 1)},
    "d128-bias": {"bias": (1, 1, 1), "nheads_k": 1, "head_dim": 128, "causal": True},
    "d64-bias-sliced": {"bias": (1, 1), "nheads": 1, "bias_layout": "sliced"},
    "d64-bias-of-heads": {"bias": (1, 1)},
    "d128-bias-packed": {"bias": (1, 1, 1), "head_dim": 128, "packed": True, "seqused": True, "causal": True},
    "d64-bias-slots": {"bias": (1, 1, 1, 1), "seqused": True},
    "d128-bias-of-keys": {"bias": (1,), "head_dim": 128},
    "d192-dv128-cluster": {"head_dim": 192, "head_dim_v": 128, "packed": True, "seqused": True, "deterministic": True},
    "d256-cluster": {"head_dim": 256, **PACKED},
}


LONG_FULL: dict[str, Case] = {
    "d64-halves-of-dV": {},
    "d128-80-queries": {"head_dim": 128, "nheads": 4, "nheads_k": 1},  # two tiles share a key head's sums
    "d128-80-queries-in-order": {"head_dim": 128, "nheads": 4, "nheads_k": 1, "deterministic": True},
}


def drawn(queries: list[int], keys: list[int], **options: Any) -> Call:
    torch.manual_seed(0)
    given: Case = {"packed": False, "nheads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    return random_call(queries, keys, **given | options)


def check_forward(call: Call, **options: Any) -> None:
    forward.check(call, random.Random(0), capability=H100, **options)


def check_backward(call: Call, seed: int = 0, *, through_lse: bool = False, **options: Any) -> dict[str, Tensor]:
    backend = backward.Interpreted(random.Random(seed), capability=H100, **options)
    return backward.check(call, backend, through_lse=through_lse)


def lengths(options: Case) -> tuple[list[int], list[int]]:
    """Numbers of queries and keys; the longest of several sequences is not the first."""
    return ([20, 130], [70, 200]) if options.get("packed") or options.get("seqused") else ([130], [200])


def with_row(bias: Tensor) -> Call:
    """A call with a number for each key that is added to its scores; the second head has them in reverse order."""
    call = drawn([100], [len(bias)], bias=(1, 1, 0, 1))
    return dataclasses.replace(call, bias=torch.stack((bias, bias.flip(0))).view(1, 2, 1, -1))


def with_blocks(call: Call, size: int) -> Call:
    """The call with a mask of random blocks of so many queries and keys, some of which are fully masked."""
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    visible = torch.rand(1, 1, -(-seqlen_q // size), -(-seqlen_k // size)) < 0.5
    visible[..., 1, :] = visible[..., :, 2] = False
    mask = BlockMask.from_blocks(visible, size, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return dataclasses.replace(call, block_mask=mask, shown=spread(visible, size, size, seqlen_q, seqlen_k))


@pytest.mark.parametrize(
    "options", tiered(FORWARD, "d128-causal", rare=["d64-bias", "d128-bias-packed", "d128-row-of-a-bias"], values=True)
)
def test_forward(options: Case) -> None:
    check_forward(drawn(*lengths(options), **options))


@pytest.mark.slow
@pytest.mark.parametrize("seqlen_k", [256, 300])  # rows that are read by vectors, and element by element
def test_forward_with_a_mask(seqlen_k: int) -> None:
    call = drawn([130], [seqlen_k], head_dim=128, mask=(1, 1), causal=True)
    check_forward(call)


@pytest.mark.slow
@each_of("row", EXTREME_ROWS)
def test_extreme_rows_of_a_bias(row: Callable[[int], Tensor]) -> None:
    """Blocks whose largest elements are huge, infinite, or far from those of other blocks."""
    check_forward(with_row(row(300)))


@pytest.mark.slow
@pytest.mark.parametrize("softmax_scale", [0.125, 0.1])  # a product with the second one is rounded
def test_a_row_of_a_bias_that_is_the_lowest_number(softmax_scale: float) -> None:
    """It hides nothing, though in the unit of products it is out of range: out is the mean of the values."""
    call = dataclasses.replace(with_row(torch.full((300,), LOWEST)), softmax_scale=softmax_scale)
    out, lse = forward.execute(call, random.Random(0), capability=H100)
    assert lse.isfinite().all()
    torch.testing.assert_close(
        out.float(), call.v.float().mean(1, keepdim=True).expand(out.shape), atol=1e-3, rtol=1e-2
    )


@pytest.mark.parametrize("options", tiered(MAX_LOGITS, rare=["causal", "negative-scale", "d128", "mask"], values=True))
def test_max_logits(options: Case) -> None:
    """Largest logits where both signs occur, and where all logits are negative."""
    call = drawn([130], [300], **options)
    check_forward(call, max_logits=True)
    with torch.no_grad():
        call.q.abs_().add_(0.1)
        call.k.abs_().add_(0.1).neg_()
    check_forward(call, max_logits=True)


@pytest.mark.parametrize("options", tiered(BACKWARD, rare=["d64", "d64-bias-of-heads"], values=True))
def test_backward(options: Case) -> None:
    given = dict(options)
    asked = {"deterministic": given.pop("deterministic", False), "through_lse": True}
    check_backward(drawn(*lengths(given), **given), **asked)


@pytest.mark.slow
def test_gradient_of_a_bias_beside_unordered_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp zeroes sums of dQ, and then stores dS; without an order, as long sequences have it."""
    monkeypatch.setattr(backward_config, "KEYS_IN_ORDER", 0)
    call = drawn([130], [200], bias=(1, 1), nheads=1, head_dim=128)
    check_backward(call)


@pytest.mark.parametrize("options", tiered(LONG_FULL, rare=["d128-80-queries-in-order"], values=True))
def test_backward_of_long_full_masks(options: Case) -> None:
    given = dict(options)
    asked = {"deterministic": given.pop("deterministic", False), "as_long": True, "through_lse": True}
    check_backward(drawn([130], [140], **given), **asked)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.rare), 128])
def test_blocks_of_64(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own kernels, which go over halves of blocks; backward the one that has no room for dS."""
    monkeypatch.setattr(plan, "_CELLS", 0)
    call = with_blocks(drawn([300], [260], head_dim=head_dim), 64)
    assert forward.planned(call, H100)[0].features.half_blocks
    check_forward(call)
    check_backward(call)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_sums_in_fixed_point(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients have the same bits in whatever order tiles of keys add to dQ."""
    monkeypatch.setattr(plan, "_CELLS", 0)
    call = with_blocks(drawn([300], [400], nheads=1), size)
    found = []
    for seed in range(2):
        torch.manual_seed(1)  # of dO
        found.append(check_backward(call, seed, deterministic=True))
    assert all(bitwise_equal(found[1][name], x) for name, x in found[0].items())


@pytest.mark.slow
def test_turns() -> None:
    """Ordered additions have the same bits whichever warp lags: the one that signals them, or one that makes them."""
    call = drawn([300], [400], nheads=1, causal=True)
    found = []
    for lagging in (None, {3}, {1}, {1, 2}):
        torch.manual_seed(1)  # of dO
        lags = None if lagging is None else frozenset(lagging)
        found.append(check_backward(call, deterministic=True, lagging=lags))
    assert all(bitwise_equal(other[name], x) for other in found[1:] for name, x in found[0].items())


@pytest.mark.slow
def test_gradient_of_a_bias() -> None:
    """Its own kernel, which sums over heads, here those of a group."""
    call = drawn([130], [200], bias=(1,), nheads_k=1)
    check_dbias(call, WithGradient(random.Random(0), is_alone=True, capability=H100))
