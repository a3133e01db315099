"""Masks and block masks in the Blackwell forward kernel, executed on the CPU from its PTX, against the oracle."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cute import BlockMask
from tests.lib.checks import drawn, random_call
from tests.lib.interpreted.common import B300, EVERYTHING
from tests.lib.interpreted.forward import check
from tests.lib.masks import with_block_mask
from tests.lib.tiers import tiered

# Lengths of q and k, and options; packed sequences and windows are intervals of a mask over all rows.
BLOCK_MASKS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([300], [400], {"packed": False, "head_dim": 128}),
    "d64-gqa": ([140, 140], [300, 300], {"packed": False, "head_dim": 64, "nheads": 4, "nheads_k": 2}),
    "d128-window": ([300], [400], {"packed": False, "head_dim": 128, "window_size": (150, 20), "nheads": 1}),
    "d64-everything": ([200, 1, 90], [300, 129, 0], {"softcap": 5.0, "sink": True, "seqused": True, "causal": True}),
    "d192-dv128": ([270], [300], {"packed": False, "head_dim": 192, "head_dim_v": 128, "dtype": torch.float16}),
    "d256-packed": ([140, 60], [200, 130], {"head_dim": 256, "nheads": 1, "causal": True}),
}


@pytest.mark.parametrize("case", tiered(BLOCK_MASKS, rare=["d128-window", "d192-dv128"]))
def test_block_masks(case: str, fuzz_seconds: float) -> None:
    """Any kind of mask, first one that shows something, whose blocks both parts of a tile see, or one, or none."""
    lengths_q, lengths_k, options = BLOCK_MASKS[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, "head_dim": 64, **options})
        check(with_block_mask(call, draw, least=0.0 if count else 0.1), draw)


@pytest.mark.slow
def test_parts_that_see_different_blocks() -> None:
    """Blocks that are far apart, of both parts, of one, and of none; a part, and rows, that see nothing at all."""
    call = random_call([700], [128 * 70], packed=False, nheads=1, head_dim=64, dtype=torch.bfloat16)
    visible = torch.zeros(6, 70, dtype=torch.bool)
    visible[0, [3, 5, 40, 69]] = visible[1, [5, 6, 36, 38, 69]] = True
    visible[2, 33] = visible[5, 0] = True
    shown = visible.repeat_interleave(128, 0).repeat_interleave(128, 1)[:700]
    shown[:, 5::7] = False
    shown[130:140] = False
    call = replace(call, block_mask=BlockMask.from_dense(shown), shown=shown[None, None])
    check(call, random.Random(0))


MASKS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128-causal": ([300], [400], {"packed": False, "head_dim": 128, "causal": True, "mask": (1, 1)}),
    "d64-packed": ([150, 0, 260], [200, 100, 140], {"mask": (1, 1, 1), "window_size": (None, 60)}),
    "d64-shared": ([280, 280], [200, 200], {"packed": False, "nheads_k": 1, "mask": (1, 0, 0, 1), "causal": True}),
    "d128-everything": (
        [150, 1, 260],
        [200, 0, 140],
        {"head_dim": 128, "mask": (1, 1, 1), "window_size": (90, 60), "softcap": 5.0, "sink": True, "seqused": True},
    ),
    "d256-by-batch": ([60, 200], [140, 80], {"head_dim": 256, "packed": False, "seqused": True, "mask": (1, 0, 1, 1)}),
}


@pytest.mark.parametrize("case", tiered(MASKS, "d64-shared", rare=["d128-causal", "d64-packed"]))
def test_masks(case: str, fuzz_seconds: float) -> None:
    """Some blocks are EMPTY, others FULL, beside windows and the ends of sequences."""
    lengths_q, lengths_k, options = MASKS[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, "head_dim": 64, "mask": (1, 1), **options})
        assert call.mask is not None
        for value in (False, True):
            rows, keys = draw.choice([0, 128, 256]), draw.choice([0, 128])
            call.mask[..., rows : rows + 128, keys : keys + draw.choice([100, 128])] = value
        check(call, draw)


BIASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([200], [296], {"packed": False, "head_dim": 128, "bias": (1, 1), "causal": True}),
    "d64-sliced": ([140], [200], {"packed": False, "bias": (1, 1, 1), "bias_layout": "sliced"}),
    "d64-packed-float32": ([150, 0, 60], [130, 7, 140], {"bias": (1, 1, 1), "bias_dtype": torch.float32}),
    "d128-transposed": (
        [150],
        [140],
        {"packed": False, "head_dim": 128, "bias": (0, 1, 1), "bias_layout": "transposed"},
    ),
    "d128-everything": (
        [140, 1],
        [200, 0],
        {"head_dim": 128, "bias": (1, 1, 1), "mask": (1, 1), **EVERYTHING},
    ),
    "d256-float16": ([70], [200], {"packed": False, "head_dim": 256, "bias": (1, 1), "dtype": torch.float16}),
    "d64-keys": ([140], [150], {"packed": False, "bias": (1,), "bias_dtype": torch.float32, "bias_layout": "sliced"}),
}


@pytest.mark.parametrize("case", tiered(BIASES, rare=["d128", "d64-packed-float32", "d256-float16", "d64-keys"]))
def test_biases(case: str, fuzz_seconds: float) -> None:
    """Biases of any layout and alignment, NaN behind them; -inf hides, and a row may have lowest numbers alone."""
    lengths_q, lengths_k, options = BIASES[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, "head_dim": 64, "nheads": 1, **options})
        assert call.bias is not None
        with torch.no_grad():
            call.bias[..., ::7] = -torch.inf
            if call.bias.ndim > 1:
                call.bias[..., 5, :] = -torch.inf
                call.bias[..., 10:20, :] = torch.finfo(call.bias.dtype).min
                call.bias[..., 30:40, 10] = 1e4
        check(call, draw)


@pytest.mark.slow
def test_bias_beside_a_block_mask() -> None:
    """In float32, by the kernel of a B300, which is that of a B200 but for its target: neither has polynomials."""
    options: dict[str, Any] = {"packed": False, "head_dim": 128, "nheads": 1, "dtype": torch.bfloat16}
    call = random_call([300], [280], bias=(1, 1, 1), bias_dtype=torch.float32, **options)
    check(with_block_mask(call, random.Random(1), "causal"), random.Random(0), capability=B300)
