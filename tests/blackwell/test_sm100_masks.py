"""Masks and block masks in the Blackwell forward kernel, executed on the CPU from its PTX, against the oracle."""

import random
from dataclasses import replace

import pytest
import torch

from flash_attn_cute import BlockMask
from tests.lib.checks import drawn
from tests.lib.interpreted.common import B300, EVERYTHING, dense, packed
from tests.lib.interpreted.forward import check
from tests.lib.masks import with_block_mask
from tests.lib.tiers import tiered

# Lengths of q and k, and options; packed sequences and windows are intervals of a mask over all rows.
BLOCK_MASKS = {
    "d128": dense([300], [400], head_dim=128),
    "d64-gqa": dense([140, 140], [300, 300], head_dim=64, nheads=4, nheads_k=2),
    "d128-window": dense([300], [400], head_dim=128, window_size=(150, 20), nheads=1),
    "d64-everything": packed([200, 1, 90], [300, 129, 0], softcap=5.0, sink=True, seqused=True, causal=True),
    "d192-dv128": dense([270], [300], head_dim=192, head_dim_v=128, dtype=torch.float16),
    "d256-packed": packed([140, 60], [200, 130], head_dim=256, nheads=1, causal=True),
}


@pytest.mark.parametrize("case", tiered(BLOCK_MASKS, rare=["d128-window", "d192-dv128"]))
def test_block_masks(case: str, fuzz_seconds: float) -> None:
    """Any kind of mask, first one that shows something, whose blocks both parts of a tile see, or one, or none."""
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = BLOCK_MASKS[case]()
        check(with_block_mask(call, draw, least=0.0 if count else 0.1), draw)


@pytest.mark.slow
def test_parts_that_see_different_blocks() -> None:
    """Blocks that are far apart, of both parts, of one, and of none; a part, and rows, that see nothing at all."""
    call = dense([700], [128 * 70], nheads=1)()
    visible = torch.zeros(6, 70, dtype=torch.bool)
    visible[0, [3, 5, 40, 69]] = visible[1, [5, 6, 36, 38, 69]] = True
    visible[2, 33] = visible[5, 0] = True
    shown = visible.repeat_interleave(128, 0).repeat_interleave(128, 1)[:700]
    shown[:, 5::7] = False
    shown[130:140] = False
    call = replace(call, block_mask=BlockMask.from_dense(shown), shown=shown[None, None])
    check(call, random.Random(0))


MASKS = {
    "d128-causal": dense([300], [400], head_dim=128, causal=True, mask=(1, 1)),
    "d64-packed": packed([150, 0, 260], [200, 100, 140], mask=(1, 1, 1), window_size=(None, 60)),
    "d64-shared": dense([280, 280], [200, 200], nheads_k=1, mask=(1, 0, 0, 1), causal=True),
    "d128-everything": packed(
        [150, 1, 260],
        [200, 0, 140],
        head_dim=128,
        mask=(1, 1, 1),
        window_size=(90, 60),
        softcap=5.0,
        sink=True,
        seqused=True,
    ),
    "d256-by-batch": dense([60, 200], [140, 80], head_dim=256, seqused=True, mask=(1, 0, 1, 1)),
}


@pytest.mark.parametrize("case", tiered(MASKS, "d64-shared", rare=["d128-causal", "d64-packed"]))
def test_masks(case: str, fuzz_seconds: float) -> None:
    """Some blocks are EMPTY, others FULL, beside windows and the ends of sequences."""
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = MASKS[case]()
        assert call.mask is not None
        for value in (False, True):
            rows, keys = draw.choice([0, 128, 256]), draw.choice([0, 128])
            call.mask[..., rows : rows + 128, keys : keys + draw.choice([100, 128])] = value
        check(call, draw)


BIASES = {
    "d128": dense([200], [296], nheads=1, head_dim=128, bias=(1, 1), causal=True),
    "d64-sliced": dense([140], [200], nheads=1, bias=(1, 1, 1), bias_layout="sliced"),
    "d64-packed-float32": packed([150, 0, 60], [130, 7, 140], nheads=1, bias=(1, 1, 1), bias_dtype=torch.float32),
    "d128-transposed": dense([150], [140], nheads=1, head_dim=128, bias=(0, 1, 1), bias_layout="transposed"),
    "d128-everything": packed([140, 1], [200, 0], nheads=1, head_dim=128, bias=(1, 1, 1), mask=(1, 1), **EVERYTHING),
    "d256-float16": dense([70], [200], nheads=1, head_dim=256, bias=(1, 1), dtype=torch.float16),
    "d64-keys": dense([140], [150], nheads=1, bias=(1,), bias_dtype=torch.float32, bias_layout="sliced"),
}


@pytest.mark.parametrize("case", tiered(BIASES, rare=["d128", "d64-packed-float32", "d256-float16", "d64-keys"]))
def test_biases(case: str, fuzz_seconds: float) -> None:
    """Biases of any layout and alignment, NaN behind them; -inf hides, and a row may have lowest numbers alone."""
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = BIASES[case]()
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
    call = dense([300], [280], head_dim=128, nheads=1, bias=(1, 1, 1), bias_dtype=torch.float32)()
    check(with_block_mask(call, random.Random(1), "causal"), random.Random(0), capability=B300)
