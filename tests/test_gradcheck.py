"""Analytic gradients against numerical ones, in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checks import GRADS, random_call, run

CASES: dict[str, dict[str, Any]] = {
    "fused": {"causal": True},
    "fused-sink-gqa": {"sink": True, "nheads_k": 1},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 1.0, "causal": True},
    "bias": {"bias": (1, 1, 1)},
    "bias-broadcast": {"bias": (1, 1), "mask": (1, 0, 1), "head_dim_v": 2},
    "everything": {
        "causal": True,
        "window_size": (3, None),
        "softcap": 2.0,
        "sink": True,
        "bias": (1, 0, 1),
        "mask": (1, 1, 1),
        "nheads_k": 1,
        "head_dim_v": 5,
    },
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_gradcheck(options: dict[str, Any], packed: bool) -> None:
    """Through out and through lse, whose gradients arrive together."""
    lengths = ([4, 1, 3], [5, 3, 2]) if packed else ([4, 4], [5, 5])
    call = random_call(*lengths, head_dim=3, packed=packed, dtype=torch.float64, **options)
    names = [name for name in GRADS if getattr(call, name) is not None]

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        changed: dict[str, Any] = dict(zip(names, leaves, strict=True))
        out, lse = run(replace(call, **changed), return_lse=True)
        return out, lse.masked_fill(lse.isneginf(), 0)

    assert torch.autograd.gradcheck(function, [getattr(call, name) for name in names], fast_mode=False)


def test_second_derivatives_are_refused() -> None:
    call = random_call([4], dtype=torch.float64)
    (dq,) = torch.autograd.grad(run(call).square().sum(), call.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.sum().backward()
