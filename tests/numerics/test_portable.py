"""The portable backend's parts: the window's arithmetic against counting, and which path serves what."""

import itertools
from typing import Any

import pytest

from flash_attn_cute.backends.portable import blockwise, fused
from flash_attn_cute.problem.band import Band
from tests.lib.checks import random_call, run


@pytest.mark.parametrize("seqlen_q", range(1, 6))
@pytest.mark.parametrize("seqlen_k", range(1, 6))
def test_band_by_counting(seqlen_q: int, seqlen_k: int) -> None:
    """A side is unbounded exactly when it hides nothing, and a block's range of keys is the smallest that serves."""
    sides = [None, *range(7)]
    for left, right in itertools.product(sides, sides):
        band = Band.of((left, right), seqlen_q, seqlen_k).without_idle_sides(seqlen_q, seqlen_k)
        seen: dict[int, set[int]] = {}
        hidden_left = hidden_right = False
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
            position = i + seqlen_k - seqlen_q
            too_far_left = left is not None and j < position - left
            too_far_right = right is not None and j > position + right
            hidden_left, hidden_right = hidden_left or too_far_left, hidden_right or too_far_right
            seen.setdefault(i, set())
            if not too_far_left and not too_far_right:
                seen[i].add(j)
        assert (band.lower is not None) == hidden_left
        assert (band.upper is not None) == hidden_right
        for start, stop in itertools.combinations(range(seqlen_q + 1), 2):
            together = set().union(*(seen[i] for i in range(start, stop)))
            first, last = band.keys(start, stop, seqlen_k)
            assert set(range(first, last)) >= together
            if together:
                assert (first, last) == (min(together), max(together) + 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"fused"}),
        ({"causal": True}, {"fused"}),
        ({"window_size": (300, 0)}, {"fused"}),  # longer than any sequence
        ({"sink": True, "causal": True}, {"fused"}),
        ({"nheads": 4, "nheads_k": 2}, {"fused"}),
        ({"window_size": (3, 0)}, {"blockwise"}),
        ({"softcap": 1.0}, {"blockwise"}),
        ({"bias": (1, 1, 1)}, {"blockwise"}),
        ({"mask": (1, 1, 1)}, {"blockwise"}),
        ({"head_dim_v": 8}, {"blockwise"}),
        ({"softmax_scale": -1.0}, {"blockwise"}),
    ],
    ids=str,
)
def test_pytorch_serves_what_it_can(
    options: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that need nothing PyTorch's fused attention lacks go there, sequence by sequence."""
    used: set[str] = set()
    for module in (fused, blockwise):
        name = module.__name__.rsplit(".", 1)[1]
        for function in ("forward", "backward"):
            original = getattr(module, function)

            def spy(*args: Any, name: str = name, original: Any = original) -> Any:
                used.add(name)
                return original(*args)

            monkeypatch.setattr(module, function, spy)
    run(random_call([20, 9, 33], **options)).sum().backward()
    assert used == expected
