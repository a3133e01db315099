"""Hopper's kernels, executed on the CPU by the interpreter of PTX."""

import random
from typing import Any

import pytest
import torch

from tests.lib.checks import random_call
from tests.lib.interpreted import forward
from tests.lib.interpreted.common import H100
from tests.lib.tiers import tiered

FORWARD: dict[str, dict[str, Any]] = {
    "d64-causal": {"causal": True, "dtype": torch.bfloat16},
    "d128": {"head_dim": 128, "dtype": torch.float16},
}


@pytest.mark.parametrize("options", tiered(FORWARD, "d64-causal", values=True))
def test_forward(options: dict[str, Any]) -> None:
    call = random_call([130], [200], **{"packed": False, "nheads": 1, "head_dim": 64} | options)
    forward.check(call, random.Random(0), capability=H100)
