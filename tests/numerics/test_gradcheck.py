"""Analytic gradients against numerical ones, in float64."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lib.checks import GRADS, Case, each_of, packed_or_dense, random_call, run
from tests.lib.oracle import Call

CASES: dict[str, Case] = {
    "fused": {"causal": True},
    "fused-sink-gqa": {"sink": True, "nheads_k": 1},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 1.0, "causal": True},
    "bias": {"bias": (1, 1, 1)},
    "bias-broadcast": {"bias": (1, 1), "mask": (1, 0, 1), "head_dim_v": 1},
    "everything": {
        "causal": True,
        "window_size": (3, None),
        "softcap": 2.0,
        "sink": True,
        "bias": (1, 0, 1),
        "mask": (1, 1, 1),
        "nheads_k": 1,
        "head_dim_v": 3,
    },
}


# Of a bias each dimension is broadcast or not; dense ones have four.
BROADCAST: dict[str, tuple[bool, tuple[int, ...]]] = {
    f"{'packed' if packed else 'dense'} {''.join(map(str, kept))}": (packed, kept)
    for packed in (True, False)
    for kept in itertools.product((0, 1), repeat=3 if packed else 4)
}


def gradcheck(call: Call, names: list[str]) -> bool:
    """Through out and through lse, whose gradients arrive together."""

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        changed: dict[str, Any] = dict(zip(names, leaves, strict=True))
        out, lse = run(replace(call, **changed), return_lse=True)
        return out, lse.masked_fill(lse.isneginf(), 0)

    passed: bool = torch.autograd.gradcheck(function, [getattr(call, name) for name in names], fast_mode=False)
    return passed


@packed_or_dense
@each_of("options", CASES)
def test_gradcheck(options: Case, packed: bool) -> None:
    lengths = ([4, 1, 3], [5, 3, 2]) if packed else ([4, 4], [5, 5])
    call = random_call(*lengths, head_dim=2, packed=packed, dtype=torch.float64, **options)
    assert gradcheck(call, [name for name in GRADS if getattr(call, name) is not None])


@pytest.mark.parametrize(("packed", "kept"), BROADCAST.values(), ids=BROADCAST)
def test_gradcheck_of_a_broadcast_bias(packed: bool, kept: tuple[int, ...]) -> None:
    """Summed over every dimension that is broadcast, beside whatever shares a part of its arithmetic."""
    options: Case = {"causal": sum(kept) % 2 == 0, "softcap": 1.5 * kept[-1], "nheads_k": 1 + kept[0]}
    options["bias_layout"] = "transposed" if kept[1] else "sliced"
    lengths = ([4, 0, 3], [5, 3, 2]) if packed else ([4, 4], [5, 5])
    call = random_call(*lengths, head_dim=2, packed=packed, bias=kept, dtype=torch.float64, **options)
    assert gradcheck(call, ["bias"])


@packed_or_dense
def test_gradcheck_of_a_bias_with_padding_and_hidden_keys(packed: bool) -> None:
    """NaN in the padding, -inf at some keys and at all keys of a query: numerically nothing depends on any of them."""
    shape = (1, 1, 1) if packed else (1, 1, 1, 1)
    options: Case = {"bias": shape, "mask": (1,), "dtype": torch.float64, "head_dim": 2}
    call = random_call([4, 1, 3], [5, 3, 2], packed=packed, seqused=True, **options)
    call.mask[0] = True
    with torch.no_grad():
        call.bias[..., ::3] = -torch.inf
        call.bias[..., 2, :] = -torch.inf
    assert gradcheck(call, ["q", "k", "v", "bias"])
