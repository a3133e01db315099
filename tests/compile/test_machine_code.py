"""Machine code of the Hopper kernels, on any machine: no spills, products in flight together, TMA."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.backward.backward_config import (
    BackwardClusterConfig,
    BackwardConfig,
    BackwardCtaConfig,
    BackwardHalfBlocksConfig,
    BackwardStoredDSConfig,
    backward_config,
)
from flash_attn_cute.kernels.sm90.backward.bias_gradient_config import BiasGradientConfig, bias_gradient_config
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig, forward_config
from flash_attn_cute.kernels.sm90.forward_schedule import forward_schedule
from tests.lib.compiled import check_before_and_after, machine_code
from tests.lib.configurations import BACKWARD_EVERYTHING, EVERYTHING, MASKED
from tests.lib.tiers import compiled, tiered


def config(tile_d: int, tile_dv: int | None = None, **options: Any) -> ForwardConfig:
    dtype, group = options.pop("dtype", "bfloat16"), options.pop("group", 1)
    return forward_config(dtype, tile_d, tile_dv or tile_d, Features(**options), group=group)


TILED = {"bias": True, "tiled_bias": True, "paired_bias": True}
CONFIGS = {
    **{f"d{d}": config(d) for d in HEAD_DIMS},
    **{f"d{d}-causal": config(d, right=True) for d in HEAD_DIMS},
    **{f"d{d}-packed-causal": config(d, right=True, packed=True) for d in HEAD_DIMS},
    **{f"d{d}-everything": config(d, **EVERYTHING) for d in HEAD_DIMS},
    "d192-dv128": config(192, 128, right=True),
    **{f"d{d}-wide": config(d, wide=True, packed=True, right=True) for d in (64, 128, 256)},
    "float16": config(128, dtype="float16"),
    "d192-dv128-everything": config(192, 128, **EVERYTHING),
    **{f"d{d}-group": config(d, group=8, **EVERYTHING) for d in (64, 128, 256)},
    **{f"d{d}-max-logits": config(d, right=True, max_logits=True) for d in HEAD_DIMS},
    **{f"d{d}-max-logits-group": config(d, group=8, max_logits=True, **EVERYTHING) for d in (64, 128, 256)},
    **{
        f"d{d}-max-logits-{name}": config(d, right=True, packed=True, max_logits=True, **{name: True})
        for d in (64, 128, 256)
        for name in ("left", "softcap")
        if (d, name) != (64, "softcap")  # spills 16 bytes in masked blocks; 96 keys would change the bits of out
    },
    "d128-max-logits-block-mask": config(128, block_mask=True, intervals=True, max_logits=True),
    "d64-max-logits-bias": config(64, right=True, bias=True, paired_bias=True, max_logits=True),
    **{f"d{d}-residual": config(d, right=True, residual=True) for d in HEAD_DIMS},
    **{f"d{d}-residual-group": config(d, group=8, residual=True, **EVERYTHING) for d in (64, 128, 256)},
    **{f"d{d}-bias": config(d, bias=True, paired_bias=True) for d in HEAD_DIMS},
    **{f"d{d}-tiled-bias": config(d, **TILED) for d in HEAD_DIMS},
    # With max_logits d = 64 spills 24 bytes; 96 keys would change the bits of out.
    **{f"d{d}-tiled-bias-causal": config(d, right=True, **TILED) for d in (64, 128)},
    "d128-tiled-bias-softcap": config(128, right=True, softcap=True, **TILED),
    **{f"d{d}-tiled-bias-window": config(d, left=True, right=True, softcap=True, **TILED) for d in HEAD_DIMS},
    **{f"d{d}-tiled-bias-mask": config(d, mask=True, uniform_mask=True, **TILED) for d in (64, 128, 256)},
    **{f"d{d}-tiled-bias-block-mask": config(d, block_mask=True, intervals=True, **TILED) for d in HEAD_DIMS},
    **{f"d{d}-mask": config(d, mask=True) for d in HEAD_DIMS},
    **{f"d{d}-bias-mask": config(d, mask=True, bias=True, **MASKED) for d in (64, 128, 256)},
    "d64-float32-bias-mask": config(64, mask=True, bias=True, float32_bias=True, **MASKED),
    "d128-strided-bias": config(128, bias=True, strided_bias=True, packed=True),
    **{f"d{d}-row-of-a-bias": config(d, bias=True, uniform_bias=True, float32_bias=True) for d in HEAD_DIMS},
    **{
        f"d{d}-row-of-a-bias-causal": config(d, bias=True, uniform_bias=True, paired_bias=True, right=True)
        for d in (64, 128)
    },
    "d64-row-of-a-bias-window": config(64, bias=True, uniform_bias=True, left=True, right=True),
    "d128-row-of-a-bias-softcap": config(128, bias=True, uniform_bias=True, float32_bias=True, softcap=True),
    "d64-row-of-a-bias-mask": config(64, mask=True, bias=True, uniform_bias=True, **MASKED),
    "d128-row-of-a-mask": config(128, mask=True, uniform_mask=True),
    **{f"d{d}-block-mask": config(d, block_mask=True) for d in HEAD_DIMS},
    **{
        f"d{d}-block-mask-float32-bias": config(d, block_mask=True, bias=True, float32_bias=True, softcap=True)
        for d in (64, 128, 256)
    },
    **{
        f"d{d}-block-mask-strided-bias": config(d, block_mask=True, intervals=True, bias=True, strided_bias=True)
        for d in (96, 192)
    },
}


def test_compiled_code(chosen: ForwardConfig, tmp_path: Path) -> None:
    """No spills, products on the tensor cores and never waiting for one another, weights by fused additions, TMA."""
    (sass,) = machine_code(chosen, tmp_path)["Forward"]
    products = len(re.findall(r"\bHGMMA\b", sass))
    # Outside the loops: the scores of the first block and the output of the last one, of the same tile, or of this
    # and the next one together, each with a fence, and a wait for both.
    loops = 1 + chosen.features.right + chosen.features.left
    scores, outputs = chosen.tile_d // 16, chosen.tile_n // 16
    between = (scores + outputs + scores, 3 + 2) if chosen.persistent else (0, 0)
    assert products == (loops + 1) * (scores + outputs) + between[0]
    # A pipeline that the assembler has serialised shows many more.
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 4 * (loops + 1) + between[1]
    # A thread has tile_n / 2 scores of a block. Their P is computed in one place for the first block and in two places
    # of a loop. If the assembler chose what to fuse, a row's bits would depend on the place.
    assert len(re.findall(r"\bFFMA\b", sass)) >= (1 + 2 * loops) * chosen.tile_n // 2
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) == (chosen.group == 1 and not chosen.features.wide)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("float32_bias", [False, True])
def test_a_row_of_a_bias_leaves_ctas_persistent(float32_bias: bool, right: bool) -> None:
    """It has two stages beside the tiles, whatever its dtype, and takes none of their room.

    Where products are added to it, tiles are those of calls without it.
    """
    for d in HEAD_DIMS:
        chosen = config(d, bias=True, uniform_bias=True, float32_bias=float32_bias, right=right)
        same_tiles = dataclasses.replace(chosen, features=Features(right=right))
        assert chosen.persistent == same_tiles.persistent
        assert chosen.persistent or d > 128
        assert chosen.bias_stages == 2
        assert chosen.adds_to_bias == (d in (64, 256) or (d == 128 and right))
        if chosen.adds_to_bias:
            plain = config(d, right=right)
            assert (chosen.tile_m, chosen.tile_n, chosen.stages) == (plain.tile_m, plain.tile_n, plain.stages)
        assert forward_schedule(chosen).num_bytes <= 227 * 1024


_HALF_BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": True, "sink": True, "max_logits": True, "residual": True},
    "wide": {"wide": True, "max_logits": True},
}
HALF_BLOCKS = {
    f"d{d}-{name}": config(d, block_mask=True, half_blocks=True, **options)
    for d in (64, 96, 128)
    for name, options in _HALF_BLOCKS.items()
}


def test_half_blocks(chosen: ForwardConfig, tmp_path: Path) -> None:
    """Products of the loop, and scores of the first step of the first tile and of the others; none serialised."""
    (sass,) = machine_code(chosen, tmp_path)["ForwardHalfBlocks"]
    scores, outputs = chosen.tile_d // 16, chosen.tile_n // 16
    assert len(re.findall(r"\bHGMMA\b", sass)) == outputs + 3 * scores
    fences, waits = 4, 7  # two waits are for O alone, where the next step is late
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == fences + waits
    assert "UTMALDG" in sass
    assert "UTMASTG" not in sass


def backward(tile_d: int, tile_dv: int | None = None, **options: Any) -> BackwardConfig:
    dtype, given = options.pop("dtype", "bfloat16"), {}
    for name in ("keys", "low_contention"):
        if name in options:
            given[name] = options.pop(name)
    return backward_config(dtype, tile_d, tile_dv or tile_d, Features(**options), **given)


BACKWARD_CONFIGS = {
    **{f"d{d}": backward(d) for d in HEAD_DIMS},
    **{f"d{d}-packed-causal": backward(d, right=True, packed=True, deterministic=True) for d in HEAD_DIMS},
    **{f"d{d}-everything": backward(d, **BACKWARD_EVERYTHING) for d in HEAD_DIMS},
    **{f"d{d}-window": backward(d, left=True, right=True, packed=True) for d in HEAD_DIMS},
    **{f"d{d}-causal": backward(d, right=True, deterministic=True) for d in HEAD_DIMS},
    # Those of one head a tile, where more columns of K are in registers.
    **{f"d{d}-ungrouped": backward(d, **BACKWARD_EVERYTHING | {"grouped": False}) for d in (64, 128)},
    "d64-ungrouped-no-left": backward(64, **BACKWARD_EVERYTHING | {"grouped": False, "left": False}),
    "d128-ungrouped-no-right": backward(128, **BACKWARD_EVERYTHING | {"grouped": False, "right": False}),
    "d64-left": backward(64, left=True),
    "d64-packed-left": backward(64, left=True, packed=True, seqused_q=True, seqused_k=True, dlse=True),
    "d128-grouped": backward(128, right=True, packed=True, grouped=True),
    "d64-long": backward(64, keys=8192),
    "d128-long": backward(128, keys=8192),
    "d128-long-grouped": backward(128, keys=8192, grouped=True, dlse=True),
    "d128-causal-unordered": backward(128, right=True),
    "d128-deterministic": backward(128, deterministic=True),
    "d192-dv128": backward(192, 128, right=True),
    "d192-dv128-everything": backward(192, 128, **BACKWARD_EVERYTHING),
    "d192-dv128-padded": backward(192, 128, deterministic=True, dlse=True, packed=True, seqused_q=True, seqused_k=True),
    "d192-dv64-packed": backward(192, 64, packed=True),
    "d256-everything-unordered": backward(256, **BACKWARD_EVERYTHING | {"deterministic": False}),
    **{f"d{d}-bias": backward(d, bias=True) for d in HEAD_DIMS},
    **{f"d{d}-mask": backward(d, mask=True) for d in HEAD_DIMS},
    **{f"d{d}-bias-mask-packed": backward(d, mask=True, bias=True, packed=True) for d in (64, 128, 256)},
    **{f"d{d}-mask-grouped": backward(d, mask=True, grouped=True, packed=True) for d in HEAD_DIMS},
    "d128-mask-deterministic": backward(128, mask=True, deterministic=True),
    **{f"d{d}-block-mask": backward(d, block_mask=True) for d in HEAD_DIMS},
    **{
        f"d{d}-block-mask-grouped": backward(d, block_mask=True, grouped=True, deterministic=True, dlse=True)
        for d in (64, 128, 192, 256)
    },
    "d96-block-mask-deterministic": backward(96, block_mask=True, deterministic=True),
    **{f"d{d}-block-mask-bias": backward(d, block_mask=True, bias=True) for d in (64, 128, 192)},
    **{f"d{d}-wide": backward(d, wide=True, packed=True, right=True, deterministic=True) for d in (64, 128, 256)},
    **{f"d{d}-wide-grouped": backward(d, wide=True, packed=True, grouped=True) for d in (128, 256)},
    "d192-dv128-wide": backward(192, 128, wide=True, packed=True),
    "d192-dv128-wide-mask": backward(192, 128, wide=True, packed=True, mask=True),
    # Residuals are for the preprocessing kernel alone, which has no other features than these.
    **{f"d{d}-residual-float16": backward(d, dtype="float16", residual=True) for d in HEAD_DIMS},
    **{f"d{d}-residual-causal": backward(d, right=True, packed=True, residual=True) for d in (64, 128)},
    "d128-residual-grouped": backward(128, right=True, grouped=True, deterministic=True, residual=True),
    "d128-dbias": backward(128, bias=True, dbias=True),
    **{f"d{d}-tiled-bias": backward(d, bias=True, tiled_bias=True, dbias=True) for d in (64, 96, 128)},
    **{
        f"d{d}-tiled-bias-mask": backward(d, bias=True, tiled_bias=True, dbias=True, dlse=True, mask=True)
        for d in (64, 128)
    },
    "d64-dbias": backward(64, bias=True, dbias=True, dlse=True, deterministic=True),
    "d128-tiled-bias-causal": backward(
        128, bias=True, tiled_bias=True, dbias=True, dlse=True, right=True, deterministic=True
    ),
    **{
        f"d{d}-bias-of-keys": backward(d, bias=True, uniform_bias=True, dbias_of_keys=True, dlse=True)
        for d in (64, 128)
    },
    "d128-strided-bias": backward(128, bias=True, strided_bias=True),
    "d128-strided-float32-bias": backward(128, bias=True, strided_bias=True, float32_bias=True),
    **{f"d{d}-row-of-a-bias": backward(d, bias=True, uniform_bias=True, float32_bias=True) for d in (64, 128)},
}
OF_CTAS, OF_CLUSTERS = (
    {name: c for name, c in BACKWARD_CONFIGS.items() if isinstance(c, kind)}
    for kind in (BackwardCtaConfig, BackwardClusterConfig)
)


# Bytes that a thread spills. A bias is read ahead of the scores that it is added to, and registers are too few: at
# d = 128 once a tile, behind a softcap at d = 256 in every step. So does a float32 epilogue behind a window at d = 64.
SPILLING = {
    # Warp 3 keeps a quotient, once a kernel.
    "d128-causal-grouped-unordered": (backward(128, right=True, grouped=True), 8),
    "d128-bias-grouped": (backward(128, bias=True, grouped=True), 16),
    "d128-tiled-bias-grouped": (backward(128, bias=True, tiled_bias=True, dbias=True, grouped=True), 8),
    "d128-tiled-bias-causal-grouped": (
        backward(128, bias=True, tiled_bias=True, dbias=True, grouped=True, right=True),
        16,
    ),
    "d128-float32-bias-everything": (backward(128, bias=True, float32_bias=True, **BACKWARD_EVERYTHING), 8),
    # Warp 0 keeps where it is in a list.
    **{f"d{d}-block-mask": (backward(d, block_mask=True, deterministic=True), 16) for d in (64, 128)},
    "d128-block-mask-wide": (backward(128, block_mask=True, deterministic=True, wide=True), 40),
    "d128-low-contention": (backward(128, block_mask=True, deterministic=True, low_contention=True), 16),
    "d256-bias-softcap": (backward(256, bias=True, softcap=True), 48),
    "d256-bias-everything": (backward(256, bias=True, **BACKWARD_EVERYTHING), 104),
    "d64-wide-window": (backward(64, wide=True, packed=True, left=True, right=True, deterministic=True), 24),
}


# CI compiles one of each kernel, and one that reads lists.
SPILLING_IN_CI = {"d128-bias-grouped", "d64-block-mask", "d256-bias-everything"}


@pytest.mark.parametrize("case", tiered(SPILLING, rare=SPILLING.keys() - SPILLING_IN_CI, values=True))
def test_spills_that_are_known(case: tuple[BackwardConfig, int], tmp_path: Path) -> None:
    chosen, spilled = case
    kernels = machine_code(chosen, tmp_path, spilled)
    (sass,) = kernels["BackwardCta" if chosen.tile_d <= 128 else "BackwardCluster"]
    assert "STL" in sass, "no longer: move it to those without spills"


# Bytes of where it is among signals, which warp 3 stores while it writes zeros, once a tile.
KEPT_BY_WARP_3 = 16


def test_compiled_backward(chosen: BackwardCtaConfig, tmp_path: Path) -> None:
    """No spills but by warp 3, products in flight together, loads, stores and additions by TMA."""
    kept = chosen.signals_apart and chosen.features.may_mask_keys
    kernels = machine_code(chosen, tmp_path, KEPT_BY_WARP_3 * kept)
    (sass,) = kernels["BackwardCta"]
    columns, queries, keys = chosen.tile_d // 16, chosen.tile_m // 16, chosen.tile_n // 16
    # A step; outside of the loop the last dQ.
    assert len(re.findall(r"\bHGMMA\b", sass)) == (2 * columns + 2 * queries + keys) + keys
    # Six fences, or one more for the other half of dV, and five waits a step; two and one outside. A pipeline that was
    # serialised shows many more.
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 11 + chosen.halves_dV + 3
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) != chosen.features.wide
    assert "UBLKRED.G.S.ADD.F32" in sass
    assert ("UBLKRED.G.S.ADD.S32" in sass) == chosen.fixed_point
    assert ("UBLKCP.G.S" in sass) == chosen.in_order  # who is first overwrites
    sums = 2 * chosen.tile_d if chosen.features.grouped else 0  # of keys: from registers, four at a time
    assert len(re.findall(r"\bREDG\.E\.ADD\.F32x4", sass)) == sums * 64 // 128 // 4
    # DQ's sums, four times sixteen a thread, not by way of a cache that knows nothing of additions; and shared ones. Of
    # a transposed dQ a thread reads pairs.
    of_dQ = 4 * 4 * (not chosen.transposes_dQ)
    assert (len(re.findall(r"\bLDG\.E\.64\b", sass)) >= 4 * 8) == chosen.transposes_dQ
    assert len(re.findall(r"\bLDG\.E\.128", sass)) == of_dQ + sums * 64 // 128 // 4
    assert not re.search(r"\bLDG\S*CONSTANT", sass)
    check_before_and_after(kernels, zeroes=not chosen.in_order and not chosen.zeroes_sums, num_after=0)


_OF_HALF_BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": True},
    "grouped": {"grouped": True},
    "softcap-grouped": {"softcap": True, "grouped": True},
    "wide": {"wide": True, "dlse": True},
    "deterministic": {"deterministic": True},
    "everything": {"deterministic": True, "softcap": True, "grouped": True},
}
OF_HALF_BLOCKS = {
    f"d{d}-{name}": backward(d, block_mask=True, half_columns=True, **options)
    for d in (64, 96, 128)
    for name, options in _OF_HALF_BLOCKS.items()
}
WITH_STORED_DS = {
    f"d128-{name}": backward(128, block_mask=True, half_columns=True, stored_ds=True, **options)
    for name, options in _OF_HALF_BLOCKS.items()
}
# Bytes that a thread spills at the most: of warp 0, which keeps where it is in a list, and behind a softcap at d = 128.
SPILLED = 40


def test_backward_of_half_blocks(chosen: BackwardConfig, tmp_path: Path) -> None:
    """Five products a step, none serialised; additions by TMA."""
    assert isinstance(chosen, BackwardHalfBlocksConfig)
    kernels = machine_code(chosen, tmp_path, SPILLED * (chosen.features.deterministic or chosen.features.softcap))
    (sass,) = kernels["BackwardHalfBlocks"]
    columns, blocks = chosen.tile_d // 16, chosen.tile_m // 16
    assert len(re.findall(r"\bHGMMA\b", sass)) == 2 * columns + 3 * blocks
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 5 + 5  # a fence each, and waits
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) != chosen.features.wide
    assert "UBLKRED.G.S.ADD.F32" in sass
    assert ("UBLKRED.G.S.ADD.S32" in sass) == chosen.fixed_point
    check_before_and_after(kernels, zeroes=True, num_after=0)


def test_backward_with_stored_ds(chosen: BackwardConfig, tmp_path: Path) -> None:
    """Four products a step and one, none serialised; dS leaves by a bulk copy, and comes by one; no dQ is added."""
    assert isinstance(chosen, BackwardStoredDSConfig)
    kernels = machine_code(chosen, tmp_path, SPILLED * chosen.features.softcap)
    (sass,), (of_dQ,) = kernels["BackwardStoredDS"], kernels["GradientQ"]
    columns, blocks = chosen.tile_d // 16, chosen.tile_m // 16
    assert len(re.findall(r"\bHGMMA\b", sass)) == 2 * columns + 2 * blocks
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 4 + 4  # a fence each, and waits
    assert "UBLKCP.G.S" in sass
    assert "UBLKRED" not in sass
    assert len(re.findall(r"\bHGMMA\b", of_dQ)) == blocks
    assert len(re.findall(r"\bWARPGROUP\.", of_dQ)) == 1 + 2
    for text in (sass, of_dQ):
        assert "UTMALDG" in text
        assert "UBLKCP.S.G" in text
        assert ("UTMASTG" in text) != chosen.features.wide
    check_before_and_after(kernels, zeroes=False, num_after=0)


def test_compiled_cluster_backward(chosen: BackwardClusterConfig, tmp_path: Path) -> None:
    """No spills, products in flight together; Q and dO go to both CTAs of a cluster, and dS from one to the other."""
    kernels = machine_code(chosen, tmp_path)
    (sass,) = kernels["BackwardCluster"]
    parts_dK = chosen.tile_d // chosen.columns_dK
    scores, weights = chosen.tile_d // 16, chosen.tile_dv // 16
    products = scores + weights + 4 * chosen.parts_dO + 4 * parts_dK + 8  # S and dP, dV and dK, dQ
    assert len(re.findall(r"\bHGMMA\b", sass)) == products
    # A fence and a wait each for S, dK and the parts of dV and dP; two fences and a wait for dQ.
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 4 * (1 + chosen.parts_dO) + 3
    multicasts = (chosen.tile_d + chosen.tile_dv) // 64
    assert len(re.findall(r"\bUTMALDG\S*\.MULTICAST", sass)) == multicasts
    assert bool(re.search(r"\bLDSM\b", sass)) == chosen.keys_in_registers
    assert ("UTMASTG" in sass) != (chosen.features.grouped or chosen.features.wide)
    sums = chosen.columns_dQ + (chosen.tile_d + chosen.tile_dv if chosen.features.grouped else 0)
    assert len(re.findall(r"\bREDG\.E\.ADD\.F32x4", sass)) == sums * 64 // 128 // 4
    check_before_and_after(
        kernels, zeroes=not chosen.features.deterministic, num_after=3 if chosen.features.grouped else 1
    )


BIAS_GRADIENT_CONFIGS = {
    **{f"d{d}": bias_gradient_config("bfloat16", d, d, Features(bias=True)) for d in HEAD_DIMS},
    "d128-strided": bias_gradient_config("bfloat16", 128, 128, Features(bias=True, strided_bias=True)),
    "d256-strided": bias_gradient_config("float16", 256, 256, Features(bias=True, strided_bias=True)),
    "d64-split": bias_gradient_config("bfloat16", 64, 64, Features(bias=True, mask=True), split=True),
    "d192-dv128-mask": bias_gradient_config("float16", 192, 128, Features(bias=True, mask=True)),
    "d128-block-mask": bias_gradient_config("bfloat16", 128, 128, Features(bias=True, block_mask=True)),
    "d256-block-mask": bias_gradient_config("bfloat16", 256, 256, Features(bias=True, block_mask=True)),
}


def test_compiled_bias_gradient(chosen: BiasGradientConfig, tmp_path: Path) -> None:
    """No spills, two products, operands by TMA, the bias past the registers, and nothing is added in memory."""
    sass, *adding_up = machine_code(chosen, tmp_path)["BiasGradient"]
    if "HGMMA" not in sass:
        (sass,), adding_up = adding_up, [sass]
    assert len(adding_up) == chosen.split
    assert len(re.findall(r"\bHGMMA\b", sass)) == (chosen.tile_d + chosen.tile_dv) // 16
    assert "UTMALDG" in sass
    assert ("LDGSTS" in sass) == (chosen.bias_pitch > 0)
    assert not re.search(r"\b(RED|REDG|ATOM|ATOMG)\b", sass)


# By test: its configurations, those that a plain run compiles, and those that interpreted calls compile, too.
COMPILED: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "test_compiled_code": (CONFIGS, ("d128-causal",), ("d192-dv128-everything",)),
    "test_half_blocks": (HALF_BLOCKS, (), ()),
    "test_compiled_backward": (OF_CTAS, ("d128-grouped",), ("d64-tiled-bias-mask", "d128-bias-of-keys")),
    "test_backward_of_half_blocks": (OF_HALF_BLOCKS, (), ()),
    "test_backward_with_stored_ds": (WITH_STORED_DS, (), ("d128-softcap-grouped",)),
    "test_compiled_cluster_backward": (OF_CLUSTERS, (), ("d256-everything-unordered",)),
    "test_compiled_bias_gradient": (BIAS_GRADIENT_CONFIGS, (), ("d64-split",)),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """CI compiles few of them."""
    cases, quick, shared = COMPILED.get(metafunc.function.__name__, (None, (), ()))
    if cases is not None:
        metafunc.parametrize("chosen", compiled(metafunc.config, cases, *quick, shared=shared))
