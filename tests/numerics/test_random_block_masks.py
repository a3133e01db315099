"""Fuzz: any block mask beside any mixture of features, dense and packed, against the oracle."""

from tests.lib.checks import assert_matches_oracle, draws, small_call
from tests.lib.masks import with_block_mask

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200, 257, 300)
BROADCAST = (None, (1, 1, 1), (1, 0, 1), (1, 1), (0,))  # shapes of a mask or bias


def test_random_block_masks(fuzz_seconds: float) -> None:
    for _, draw in draws("block masks", 2 * fuzz_seconds, least=6):  # a busy machine may be slow
        call = small_call(draw, LENGTHS, mask=draw.choice(BROADCAST), bias=draw.choice(BROADCAST))
        sets = (1 if call.q.ndim == 3 else len(call.q), draw.choice([call.q.shape[-2], call.k.shape[-2]]))
        assert_matches_oracle(with_block_mask(call, draw, sets=sets), through_lse=draw.random() < 0.5)
