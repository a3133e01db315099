"""Random calls: any mixture of features, lengths, broadcast shapes and padding against the oracle."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.checks import LAYOUTS, assert_matches_oracle, draws, random_call, small_call
from tests.lib.masks import with_block_mask

LENGTH = st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 127, 128, 129]))
SIDE = st.one_of(st.none(), st.integers(-1, 40))


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of ``random_call``, whether gradients flow through lse, and whether logits have a maximum."""
    packed, seqused = draw(st.booleans()), draw(st.booleans())
    batch = draw(st.integers(0, 4))
    if packed or seqused:
        lengths_q, lengths_k = (draw(st.lists(LENGTH, min_size=batch, max_size=batch)) for _ in "qk")
        if draw(st.booleans()):
            lengths_k = lengths_q
    else:
        lengths_q, lengths_k = [draw(LENGTH)] * batch, [draw(LENGTH)] * batch
    nheads_k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    flags = st.lists(st.integers(0, 1), min_size=0, max_size=3 if packed else 4)
    return {
        "lengths_q": lengths_q,
        "lengths_k": lengths_k,
        "packed": packed,
        "seqused": seqused,
        "nheads": nheads_k * group,
        "nheads_k": nheads_k,
        "head_dim": draw(st.sampled_from([1, 8, 24])),
        "head_dim_v": draw(st.sampled_from([None, 1, 16])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        "causal": draw(st.booleans()),
        "window_size": (draw(SIDE), draw(SIDE)),
        "softcap": draw(st.sampled_from([0.0, 2.0, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.2, -0.5, 0.0])),
        "sink": draw(st.booleans()),
        "mask": draw(st.one_of(st.none(), flags)),
        "bias": draw(st.one_of(st.none(), flags)),
        "mask_layout": draw(st.sampled_from(LAYOUTS)),
        "bias_layout": draw(st.sampled_from(LAYOUTS)),
        "bias_dtype": draw(st.sampled_from([None, torch.float32])),
        "through_lse": draw(st.booleans()),
        "return_max_logits": draw(st.booleans()),
    }


def check(spec: dict[str, Any], seed: int) -> None:
    asked = {name: spec[name] for name in ("through_lse", "return_max_logits")}
    torch.manual_seed(seed)
    assert_matches_oracle(random_call(**{name: x for name, x in spec.items() if name not in asked}), **asked)


@settings(max_examples=60)
@given(spec=specs(), seed=st.integers(0, 2**32 - 1))
def test_random_spec(spec: dict[str, Any], seed: int) -> None:
    check(spec, seed)


@pytest.mark.slow
@settings(max_examples=340)
@given(spec=specs(), seed=st.integers(0, 2**32 - 1))
def test_many_random_specs(spec: dict[str, Any], seed: int) -> None:
    check(spec, seed)


BLOCK_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200, 257, 300)
BROADCAST = (None, (1, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1), (1, 0), (0,))  # shapes of a mask or bias


@pytest.mark.parametrize("part", range(4))
def test_random_block_masks(part: int, fuzz_seconds: float) -> None:
    """Any block mask beside any mixture of features, dense and packed."""
    for _, draw in draws(f"block masks {part}", fuzz_seconds, least=12):  # a busy machine may be slow
        call = small_call(draw, BLOCK_LENGTHS, mask=draw.choice(BROADCAST), bias=draw.choice(BROADCAST))
        sets = (1 if call.q.ndim == 3 else len(call.q), draw.choice([call.q.shape[-2], call.k.shape[-2]]))
        asked = {name: draw.random() < 0.3 for name in ("through_lse", "return_max_logits", "precise_gradients")}
        assert_matches_oracle(with_block_mask(call, draw, sets=sets), **asked)
