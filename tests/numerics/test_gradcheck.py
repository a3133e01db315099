"""Analytic gradients against numerical ones, in float64."""

from dataclasses import replace
from typing import Any

import torch

from tests.lib.checks import GRADS, Case, each_of, packed_or_dense, random_call, run

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


@packed_or_dense
@each_of("options", CASES)
def test_gradcheck(options: Case, packed: bool) -> None:
    """Through out and through lse, whose gradients arrive together."""
    lengths = ([4, 1, 3], [5, 3, 2]) if packed else ([4, 4], [5, 5])
    call = random_call(*lengths, head_dim=2, packed=packed, dtype=torch.float64, **options)
    names = [name for name in GRADS if getattr(call, name) is not None]

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        changed: dict[str, Any] = dict(zip(names, leaves, strict=True))
        out, lse = run(replace(call, **changed), return_lse=True)
        return out, lse.masked_fill(lse.isneginf(), 0)

    assert torch.autograd.gradcheck(function, [getattr(call, name) for name in names], fast_mode=False)
