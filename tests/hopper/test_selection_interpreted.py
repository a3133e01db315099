"""Hopper's forward kernels for selections, executed on the CPU by the interpreter of PTX."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gradient_errors
from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.backends.cute import selection_plan
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.problem.spec import Results
from lab import interpreter
from tests.lib import oracle
from tests.lib.checks import (
    Case,
    assert_max_logits_close,
    assert_results_close,
    bitwise_equal,
    poisoned_dout,
    random_call,
    same_bits,
)
from tests.lib.interpreted.common import NUM_SMS, Interpreted, as_given, by_name
from tests.lib.masks import random_selection, with_selection
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

# Lengths of queries and of keys, the size and number of selected blocks, heads, and others of ``random_call``. Blocks
# are selected by no query, several times, out of range, or by queries that see none of their keys.
CASES: dict[str, Case] = {
    "causal": {"q": [70], "k": [130], "nheads": 4, "causal": True},
    "group-of-16": {"q": [20], "k": [270], "nheads": 16, "head_dim": 128, "causal": True, "block": 192},
    "one-head": {"q": [130], "k": [100], "nheads": 1, "dtype": torch.float16},
    "blocks-of-128": {"q": [30, 30], "k": [150, 150], "nheads": 4, "nheads_k": 2, "head_dim": 72, "head_dim_v": 128,
                      "block": 128},
    "packed": {"q": [20, 0, 31], "k": [70, 5, 129], "nheads": 8, "nheads_k": 2, "head_dim": 128, "packed": True,
               "causal": True, "sink": True, "softcap": 3.0},
    "packed-window": {"q": [20, 17, 31], "k": [70, 0, 129], "nheads": 6, "nheads_k": 2, "packed": True,
                      "window_size": (40, 10), "top": 4, "seqused": True},
    "wide": {"q": [20], "k": [200], "nheads": 16, "head_dim": 256, "causal": True, "top": 3},
    "wide-blocks-of-128": {"q": [40], "k": [300], "nheads": 16, "head_dim": 256, "block": 128, "causal": True},
    "wide-k": {"q": [20, 0, 31], "k": [70, 5, 129], "nheads": 8, "nheads_k": 2, "head_dim": 192, "head_dim_v": 128,
               "packed": True, "causal": True, "sink": True, "softcap": 3.0, "block": 128},
    "wide-v": {"q": [20, 33, 0], "k": [130, 64, 9], "nheads": 4, "nheads_k": 2, "head_dim": 136, "head_dim_v": 200,
               "window_size": (40, 10), "sink": True, "seqused": True},
    "wide-key-bits": {"q": [20, 20], "k": [130, 130], "nheads": 4, "head_dim": 192, "head_dim_v": 128, "causal": True,
                      "block": 16, "top": 6},
    "many-tiles": {"q": [60], "k": [64], "nheads": 16, "head_dim": 128, "causal": True},
    "many-tiles-of-blocks-of-16": {"q": [200], "k": [200], "nheads": 4, "causal": True, "block": 16, "top": 4},
    "many-wide-tiles": {"q": [100], "k": [64], "nheads": 4, "head_dim": 192, "head_dim_v": 128, "causal": True,
                        "block": 16, "top": 4},
    "blocks-of-16": {"q": [70], "k": [130], "nheads": 4, "causal": True, "block": 16, "top": 5},
    "blocks-of-1": {"q": [33], "k": [100], "nheads": 16, "head_dim": 128, "causal": True, "block": 1, "top": 40},
    "blocks-of-100": {"q": [20, 20], "k": [230, 230], "nheads": 16, "head_dim": 128, "causal": True, "block": 100},
    "packed-blocks-of-4": {"q": [20, 0, 31], "k": [70, 5, 129], "nheads": 8, "nheads_k": 2, "packed": True,
                           "causal": True, "sink": True, "softcap": 3.0, "block": 4, "top": 12},
    "no-keys": {"q": [9, 3], "k": [0, 0], "nheads": 8, "nheads_k": 2, "head_dim": 128, "packed": True, "causal": True,
                "sink": True, "softcap": 3.0},
}  # fmt: skip

QUICK = "causal", "blocks-of-16"  # the shortest to execute


def drawn(options: Case, seed: int) -> tuple[Call, random.Random]:
    given: Case = {
        "dtype": torch.bfloat16,
        "head_dim": 64,
        "nheads": 2,
        "nheads_k": 1,
        "packed": False,
    } | options
    lengths, block, top = (given.pop("q"), given.pop("k")), given.pop("block", 64), given.pop("top", 2)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    return random_selection(random_call(*lengths, **given), rng, block, top), rng


def plain(queries: int, keys: int, **options: Any) -> Call:
    """A causal call without a selection."""
    torch.manual_seed(0)
    given: Case = {"nheads": 4, "nheads_k": 1, "head_dim": 64, "packed": False, "dtype": torch.bfloat16, "causal": True}
    return random_call([queries], [keys], **given | options)


def results_of(
    call: Call, draw: random.Random, lagging: interpreter.Lagging | None = None, *, max_logits: bool = False
) -> Results:
    """Results of a call."""
    inputs, spec = as_given(call)
    with torch.no_grad():
        return Interpreted(ARCHITECTURES["sm90"], NUM_SMS, draw, None, lagging)._forward(
            spec._replace(max_logits=max_logits), inputs
        )


def check(
    call: Call, draw: random.Random, lagging: interpreter.Lagging | None = None, *, max_logits: bool = False
) -> Results:
    """A call's results against the oracle's, and what stands in the padding; returns them."""
    results = results_of(call, draw, lagging, max_logits=max_logits)
    assert_results_close(call, {"out": results.out, "lse": results.lse})
    if results.max_logits is not None:
        assert_max_logits_close(results.max_logits, call)
    return results


def gradients_of(
    call: Call,
    dout: Tensor,
    draw: random.Random,
    lagging: interpreter.Lagging | None = None,
    dlse: Tensor | None = None,
) -> dict[str, Tensor]:
    """Gradients of a call, of an out and lse that are the oracle's."""
    inputs, spec = as_given(call)
    has_sink = call.learnable_sink is not None
    with torch.no_grad():
        out, lse = oracle.attention(call.to(torch.float64))
        asked = BackwardCall(spec, inputs, out.to(call.q.dtype), lse.float(), dout, dlse, need_dsink=has_sink)
        found = by_name(Interpreted(ARCHITECTURES["sm90"], NUM_SMS, draw, None, lagging)._backward(asked))
    assert ("dlearnable_sink" in found) == has_sink
    return found


def check_gradients(
    call: Call, draw: random.Random, lagging: interpreter.Lagging | None = None, *, through_lse: bool = False
) -> None:
    """Gradients of a call against the oracle's, and what stands in the padding."""
    out, lse = oracle.attention(call.to(call.q.dtype))
    dout = poisoned_dout(call, out)
    dlse = torch.randn(lse.shape) if through_lse else None
    assert_results_close(call, gradients_of(call, dout, draw, lagging, dlse), dout, dlse)


# Cases that CI executes, by test. Tests of late engines take those of many tiles.
IN_CI = {
    "forward": {"group-of-16", "one-head", "blocks-of-128", "wide", "wide-v", "blocks-of-100"},
    "max_logits": {"packed", "no-keys", "blocks-of-1"},
    "gradients": {"group-of-16", "one-head", "packed", "wide-v", "wide-key-bits", "no-keys"},
}


@pytest.mark.parametrize("options", tiered(CASES, *QUICK, rare=CASES.keys() - {*QUICK, *IN_CI["forward"]}, values=True))
def test_forward(options: Case) -> None:
    check(*drawn(options, 0))


# Calls with each feature that hides keys or rows from a maximum or changes its logits, and each size of tiles.
WITH_MAX_LOGITS = ["blocks-of-128", "packed", "packed-window", "no-keys"]
WITH_MAX_LOGITS += ["wide-blocks-of-128", "wide-v", "wide-key-bits", "blocks-of-1", "packed-blocks-of-4"]


@pytest.mark.parametrize("name", tiered(dict.fromkeys(WITH_MAX_LOGITS), rare={*WITH_MAX_LOGITS} - IN_CI["max_logits"]))
def test_max_logits(name: str) -> None:
    """The largest logits of visible keys alone; out and lse have the bits that they have without them."""
    call, rng = drawn(CASES[name], 0)
    found, without = check(call, rng, max_logits=True), results_of(call, rng)
    assert same_bits(found[:2], without[:2])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["many-tiles", "many-tiles-of-blocks-of-16"])
@pytest.mark.parametrize("late", ["loads", "stores", "warpgroups"])
def test_late_engines(late: str, case: str) -> None:
    """Nothing is read before it has come, or overwritten before it has been read."""
    call, rng = drawn(CASES[case], 0)
    check(call, rng, lagging=frozenset({late}))


# Cases without a gradient of lse: their kernels are those whose machine code is looked at, too.
OF_OUT_ALONE = {"group-of-16", "wide", "wide-blocks-of-128", "blocks-of-1", "many-tiles"}


@pytest.mark.parametrize("case", tiered(CASES, *QUICK, rare=CASES.keys() - {*QUICK, *IN_CI["gradients"]}))
def test_gradients(case: str) -> None:
    check_gradients(*drawn(CASES[case], 0), through_lse=case not in OF_OUT_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["many-tiles", "many-wide-tiles"])
@pytest.mark.parametrize("late", ["loads", "products", "stores", "warpgroups"])
def test_late_engines_of_gradients(late: str, case: str) -> None:
    call, rng = drawn(CASES[case], 0)
    check_gradients(call, rng, lagging=frozenset({late}), through_lse=case not in OF_OUT_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("late", [range(4, 8), range(8, 12)])
def test_warpgroups_in_step_wait_for_each_other(late: range) -> None:
    """Above 128 columns either mma warpgroup may be the slower one, whose P, dS, Q and dO the other reads."""
    call, rng = drawn(CASES["many-wide-tiles"], 1)
    check_gradients(call, rng, lagging=frozenset(late), through_lse=True)


@pytest.mark.slow
def test_gradients_of_launches_for_some_rows_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    call, rng = drawn({"q": [20, 20], "k": [100, 100], "nheads": 8, "nheads_k": 2, "causal": True, "sink": True}, 0)
    for bound in (70_000, 16_000):  # two units, and some rows of one
        monkeypatch.setattr(selection_plan, "_WORKSPACE", bound)
        check_gradients(call, rng, through_lse=True)


@pytest.mark.slow
def test_launches_for_some_rows_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out and lse have the same bits however a call is cut: into launches, and into items."""
    call, rng = drawn({"q": [20, 20], "k": [100, 100], "nheads": 8, "nheads_k": 2, "causal": True}, 0)
    whole = results_of(call, rng)
    monkeypatch.setattr(selection_plan, "_FEWEST_TILES", 1)
    for bound in (40_000, 16_000):  # one unit, and some rows of one
        monkeypatch.setattr(selection_plan, "_WORKSPACE", bound)
        parts = check(call, rng)
        assert same_bits(whole[:2], parts[:2])


@pytest.mark.slow
def test_rows_that_reach_nothing() -> None:
    """Queries that select nothing visible, and keys of blocks that no query selects or sees, may hold NaN."""
    call = plain(70, 320, nheads=2, nheads_k=2, causal=False, window_size=(80, 0))  # from 170 and up to 319
    indices = torch.randint(3, 5, (1, 2, 70, 2))
    indices[:, :, 5], indices[:, :, 6] = -1, torch.tensor([0, 9])  # selects nothing, and what the window hides
    indices[:, :, 20, 0] = 1  # which it hides, too
    call = with_selection(call, indices, 64)
    results = []
    for fill in (0.0, torch.nan):
        with torch.no_grad():
            call.q[:, 5:7] = fill
            call.k[:, :192] = fill  # blocks 0, 1 and 2
            call.v[:, :192] = fill
        results.append(results_of(call, random.Random(0)))
    zeros, poisoned = results
    assert same_bits(zeros[:2], poisoned[:2])
    assert (poisoned.out[:, 5:7] == 0).all()
    assert poisoned.lse[..., 5:7].isneginf().all()
    assert poisoned.lse[..., 20].isfinite().all()


@pytest.mark.slow
def test_infinite_values_of_a_pick_stay_infinite() -> None:
    """Picks are loaded four at a time; where fewer are left, no earlier one's numbers are multiplied by zero."""
    call = with_selection(plain(9, 320), torch.arange(5).expand(1, 1, 9, 5), 64)
    with torch.no_grad():
        call.v[:, 70, 0, 3] = torch.inf  # of the second pick
    out = results_of(call, random.Random(0)).out
    assert out[..., 3].isposinf().all()
    assert out[..., :3].isfinite().all()
    assert out[..., 4:].isfinite().all()


def test_gradients_of_any_size() -> None:
    """Powers of two of dout are those of dq, though dq of a pick is in float16; its error is that of a float32 one."""
    torch.manual_seed(0)
    data = gradient_errors.draw("normal", 33, 256)
    call = with_selection(plain(33, 256, nheads=1, head_dim=128), torch.arange(4).expand(1, 1, 33, 4), 64)
    with torch.no_grad():
        for x, drawn_x in ((call.q, data.q), (call.k, data.k), (call.v, data.v)):
            x.copy_(drawn_x[None, :, None])
    dout = data.dout[None, :, None].bfloat16()
    dq, small, large = (gradients_of(call, dout * 2.0**n, random.Random(0))["dq"] for n in (0, -80, 80))
    assert bitwise_equal(dq, small * 2.0**80)
    assert bitwise_equal(dq, large * 2.0**-80)
    true, simulated = gradient_errors.truth(data)["dq"], gradient_errors.simulated(data)["rounded"]["dq"]
    error, expected = ((x.double() - true).norm() for x in (dq[0, :, 0], simulated.bfloat16()))
    assert error < 1.02 * expected


@pytest.mark.slow
def test_blocks_that_share_a_tile_make_one_pick() -> None:
    """All sixteens of a block of 64, selected in any order and several times, give the bits that the block gives."""
    call, blocks = plain(70, 200), torch.randint(-1, 4, (1, 1, 70, 2))
    parts = torch.where(blocks[..., None] < 0, -1, 4 * blocks[..., None] + torch.arange(4)).flatten(3)
    parts = torch.cat((parts, parts[..., :3]), 3)[..., torch.randperm(11)]
    whole, found = (results_of(with_selection(call, *x), random.Random(0)) for x in ((blocks, 64), (parts, 16)))
    assert same_bits(whole[:2], found[:2])
