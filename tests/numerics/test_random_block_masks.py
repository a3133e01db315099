"""Fuzz: any block mask beside any mixture of features, dense and packed, against the oracle."""

from dataclasses import replace

from tests.lib.checks import assert_matches_oracle, draws, small_call
from tests.lib.masks import random_mask

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200, 257, 300)
BROADCAST = (None, (1, 1, 1), (1, 0, 1), (1, 1), (0,))  # shapes of a mask or bias


def test_random_block_masks(fuzz_seconds: float) -> None:
    for _, draw in draws("block masks", 2 * fuzz_seconds, least=6):  # a busy machine may be slow
        call = small_call(draw, LENGTHS, mask=draw.choice(BROADCAST), bias=draw.choice(BROADCAST))
        packed, nheads = call.q.ndim == 3, call.q.shape[-2]
        sets = (1 if packed else len(call.q), draw.choice([nheads, call.k.shape[-2]]))
        mask, shown = random_mask(call.q.shape[-3], call.k.shape[-3], draw, sets)
        assert_matches_oracle(replace(call, block_mask=mask, shown=shown), through_lse=draw.random() < 0.5)
