"""Random calls: any mixture of features, lengths, broadcast shapes and padding against the oracle."""

import pytest

from tests.lib.checks import assert_matches_oracle, draws, small_call
from tests.lib.masks import with_block_mask
from tests.lib.random_calls import tensors

# Of sequences, and of those under a block mask.
LENGTHS = (0, 1, 2, 3, 5, 8, 9, 31, 32, 33, 127, 128, 129)
BLOCK_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200, 257, 300)


@pytest.mark.parametrize("part", [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 20))])
@pytest.mark.parametrize("lengths", [LENGTHS, BLOCK_LENGTHS], ids=["calls", "block masks"])
def test_random_specs(lengths: tuple[int, ...], part: int, fuzz_seconds: float) -> None:
    """Dense and packed calls, without a block mask or beside any."""
    has_blocks = lengths == BLOCK_LENGTHS
    for _, draw in draws(
        f"{lengths} {part}", fuzz_seconds, least=8 if has_blocks else 15
    ):  # a busy machine may be slow
        some = draw.choice([(), ("mask",), ("bias",), ("mask", "bias")])
        call = small_call(draw, lengths, softmax_scale=draw.choice([None, 0.2, -0.5, 0.0]), **tensors(draw, *some))
        if has_blocks:
            sets = (1 if call.q.ndim == 3 else len(call.q), draw.choice([call.q.shape[-2], call.k.shape[-2]]))
            call = with_block_mask(call, draw, sets=sets)
        asked = {name: draw.random() < 0.3 for name in ("through_lse", "return_max_logits", "precise_gradients")}
        assert_matches_oracle(call, **asked)
