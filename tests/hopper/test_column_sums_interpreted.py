"""Hopper's kernel of column sums, executed on the CPU by the interpreter of PTX."""

import random

import pytest
import torch
from torch import Tensor

from flash_attn_cute.backends.cute import column_sums
from lab import interpreter
from tests.lib import oracle
from tests.lib.checks import Case, bitwise_equal, random_call
from tests.lib.interpreted.common import H100, as_given, fresh_counters
from tests.lib.interpreted.forward import Interpreted
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

# Lengths of queries and of keys, and others of ``random_call``: around the edges of tiles of 256 keys and of blocks of
# 128 or 64 queries, with tiles that no query attends to.
CASES: dict[str, Case] = {
    "d64-causal": {"q": [130], "k": [300], "causal": True},
    "d128": {"q": [257], "k": [257], "head_dim": 128, "dtype": torch.float16},
    "left": {"q": [129], "k": [128], "head_dim": 72, "window_size": (5, None), "softmax_scale": -0.3},
    "packed": {"q": [300, 0, 1, 130], "k": [20, 5, 256, 511], "packed": True, "nheads_k": 1, "causal": True},
    "padded": {"q": [127, 33, 0], "k": [130, 64, 9], "nheads": 4, "nheads_k": 1, "head_dim": 192,
               "seqused": True, "window_size": (40, 10)},
    "packed-padded": {"q": [127, 33], "k": [130, 300], "packed": True, "head_dim": 192, "seqused": True,
                      "window_size": (40, 10)},
    "d256": {"q": [140], "k": [270], "head_dim": 256, "causal": True},
}  # fmt: skip


def drawn(options: Case, seed: int) -> Call:
    given: Case = {"dtype": torch.bfloat16, "head_dim": 64, "nheads": 2, "packed": False} | options
    torch.manual_seed(seed)
    return random_call(given.pop("q"), given.pop("k"), **given)


def sums_of(call: Call, seed: int, lagging: interpreter.Lagging | None = None) -> Tensor:
    """Column sums of a call, from an lse in float64."""
    inputs, spec = as_given(call)
    with fresh_counters(), torch.no_grad():
        backend = Interpreted(capability=H100, draw=random.Random(seed), lagging=lagging)
        _, lse = oracle.attention(call.to(torch.float64))
        return column_sums.column_sums(backend.launch_of, spec, inputs, lse.float())


def check(call: Call, seed: int, lagging: interpreter.Lagging | None = None) -> None:
    """Sums against those of all probabilities in float64; what no query attends to, and padding, has 0."""
    true, found = oracle.probabilities(call).sum(-2), sums_of(call, seed, lagging)
    assert found.shape == true.shape
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-6)
    assert (found[true == 0] == 0).all()


@pytest.mark.parametrize("options", tiered(CASES, "d64-causal", values=True))
def test_sums(options: Case) -> None:
    check(drawn(options, 0), 0)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["warpgroups", "loads", 1])  # warp 1 loads lse
@pytest.mark.parametrize("name", ["d256", "packed"])
def test_schedules(name: str, slow: str | int) -> None:
    check(drawn(CASES[name], 1), 1, frozenset({slow}))


@pytest.mark.slow
def test_a_document_has_the_same_bits_alone() -> None:
    call = drawn({"q": [200, 90], "k": [300, 150], "packed": True, "nheads": 1, "causal": True}, 2)
    together = sums_of(call, 2)
    alone = Call(call.q[200:][None], call.k[300:][None], call.v[300:][None], causal=True)
    assert bitwise_equal(sums_of(alone, 3)[0], together[:, 300:])
