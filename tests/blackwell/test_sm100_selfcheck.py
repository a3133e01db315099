"""Calls of the self-check, computed by Blackwell's kernels from their PTX: a right kernel is within the tolerance.

Plain PyTorch, which sums in float32 or more, does not show that of integers, whose P and dS the kernels round.
"""

import random
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.problem.spec import Results
from flash_attn_cute.selfcheck import samples, steps
from flash_attn_cute.selfcheck.samples import Sample
from flash_attn_cute.selfcheck.steps import Kernels
from tests.lib.interpreted import backward, forward
from tests.lib.interpreted.common import fresh_counters
from tests.lib.tiers import tiered


class Forward(forward.Interpreted):
    """Blackwell's forward pass, without a GPU."""

    def forward(self, *given: Any) -> Results:
        """Runs the pass on the CPU, whatever the current device."""
        return self._forward(*given)


class Backward(backward.Interpreted):
    """Blackwell's backward pass, without a GPU."""

    def backward(self, call: BackwardCall) -> Gradients:
        """Runs the pass on the CPU, whatever the current device."""
        return self._backward(call)


# Families that compute more than integers: one of each kind of kernel, and both forward kernels of single CTAs. Other
# families round in the same places. CI does not run those of ``RARE``, of kernels that compute others of them.
MORE = {
    "rising": {
        "forward two-part d64",
        "forward d256",
        "forward pair d256",
        "backward d64",
        "backward pair d128",
        "backward two-pass d256",
        "backward two-pass pair d256",
    },
    "packed": {"forward two-part d64", "forward d256", "backward d64", "backward two-pass d256"},
    "max logits": {"forward two-part d64", "forward pair d256"},
}

RARE = {f"{family}: rising" for family in MORE["rising"] if "pair" not in family or "d128" in family}
RARE |= {"forward d256: packed", "backward two-pass d256: packed", "forward pair d256: max logits"}


def cases() -> dict[str, tuple[Kernels, Sample]]:
    """Small calls; pairs of CTAs compute them, too, though they are chosen for long sequences."""
    found: dict[str, tuple[Kernels, Sample]] = {}
    for kernels in steps.kernels_of(ARCHITECTURES["sm100"]):
        d, d_v, heads = kernels.d, kernels.d_v, 1 if "pair" in kernels.family else 2
        kinds = {
            "integers": Sample(d, d_v, (128,), heads=heads, heads_k=heads, exact=True),
            "rising": Sample(d, d_v, (200,), heads=1, heads_k=1, rising=True),
            "packed": Sample(
                d, d_v, (150, 17, 0, 63), packed=True, padded=True, right=0, heads=2, heads_k=1, dlse=True
            ),
            "max logits": Sample(d, d_v, (200,), (150,), heads=1, heads_k=1, rising=True, max_logits=True),
        }
        for name, sample in kinds.items():
            if kernels.family in MORE.get(name, {kernels.family}):
                found[f"{kernels.family}: {name}"] = kernels, sample
    return found


def test_families_are_those_of_the_self_check() -> None:
    families = {kernels.family for kernels in steps.kernels_of(ARCHITECTURES["sm100"])}
    assert set().union(*MORE.values()) <= families


@pytest.mark.parametrize("case", tiered(cases(), rare=RARE, values=True))
def test_right_kernels_pass(case: tuple[Kernels, Sample]) -> None:
    kernels, sample = case
    by_pairs, drawn = "pair" in kernels.family, samples.draw(sample, torch.device("cpu"))
    with fresh_counters():
        if kernels.pass_name == "forward":
            found = drawn.forward(Forward(by_pairs=by_pairs, draw=random.Random(0)))
        else:
            found = drawn.backward(Backward(random.Random(0), by_pairs=by_pairs))
    drawn.compare(found)
