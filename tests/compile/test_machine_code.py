"""Machine code of the Hopper kernels, on any machine: no spills, products in flight together, TMA."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from flash_attn_cute.kernels.sm90.backward.backward_config import (
    BackwardClusterConfig,
    BackwardConfig,
    BackwardCtaConfig,
    BackwardHalfBlocksConfig,
    BackwardStoredDSConfig,
)
from flash_attn_cute.kernels.sm90.backward.bias_gradient_config import BiasGradientConfig
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward_schedule import forward_schedule
from tests.lib.compiled import check_before_and_after, count, machine_code
from tests.lib.configurations import (
    BACKWARD_EVERYTHING,
    EVERYTHING,
    MASKED,
    features,
    sm90_backward,
    sm90_bias_gradient,
    sm90_forward,
)
from tests.lib.tiers import compiled, tiered

config, backward, bias_gradient = sm90_forward, sm90_backward, sm90_bias_gradient

TILED = "bias tiled_bias paired_bias"
CONFIGS = {
    **{f"d{d}": config(d) for d in HEAD_DIMS},
    **{f"d{d}-causal": config(d, "right") for d in HEAD_DIMS},
    **{f"d{d}-packed-causal": config(d, "right packed") for d in HEAD_DIMS},
    **{f"d{d}-everything": config(d, EVERYTHING) for d in HEAD_DIMS},
    "d192-dv128": config((192, 128), "right"),
    **{f"d{d}-wide": config(d, "wide packed right") for d in (64, 128, 256)},
    "float16": config(128, dtype="float16"),
    "d192-dv128-everything": config((192, 128), EVERYTHING),
    **{f"d{d}-group": config(d, EVERYTHING, group=8) for d in (64, 128, 256)},
    **{f"d{d}-max-logits": config(d, "right max_logits") for d in HEAD_DIMS},
    **{f"d{d}-max-logits-group": config(d, f"max_logits {EVERYTHING}", group=8) for d in (64, 128, 256)},
    **{
        f"d{d}-max-logits-{name}": config(d, f"right packed max_logits {name}")
        for d in (64, 128, 256)
        for name in ("left", "softcap")
        if (d, name) != (64, "softcap")  # spills 16 bytes in masked blocks; 96 keys would change the bits of out
    },
    "d128-max-logits-block-mask": config(128, "block_mask intervals max_logits"),
    "d64-max-logits-bias": config(64, "right bias paired_bias max_logits"),
    **{f"d{d}-residual": config(d, "right residual") for d in HEAD_DIMS},
    **{f"d{d}-residual-group": config(d, f"residual {EVERYTHING}", group=8) for d in (64, 128, 256)},
    **{f"d{d}-bias": config(d, "bias paired_bias") for d in HEAD_DIMS},
    **{f"d{d}-tiled-bias": config(d, TILED) for d in HEAD_DIMS},
    # With max_logits d = 64 spills 24 bytes; 96 keys would change the bits of out.
    **{f"d{d}-tiled-bias-causal": config(d, f"right {TILED}") for d in (64, 128)},
    **{f"d{d}-tiled-bias-packed": config(d, f"packed right {TILED}") for d in (64, 128)},
    "d128-tiled-bias-softcap": config(128, f"right softcap {TILED}"),
    **{f"d{d}-tiled-bias-window": config(d, f"left right softcap {TILED}") for d in HEAD_DIMS},
    **{f"d{d}-tiled-bias-mask": config(d, f"mask uniform_mask {TILED}") for d in (64, 128, 256)},
    **{f"d{d}-tiled-bias-block-mask": config(d, f"block_mask intervals {TILED}") for d in HEAD_DIMS},
    **{f"d{d}-mask": config(d, "mask") for d in HEAD_DIMS},
    **{f"d{d}-bias-mask": config(d, f"mask bias {MASKED}") for d in (64, 128, 256)},
    "d64-float32-bias-mask": config(64, f"mask bias float32_bias {MASKED}"),
    "d128-strided-bias": config(128, "bias strided_bias packed"),
    **{f"d{d}-row-of-a-bias": config(d, "bias uniform_bias float32_bias") for d in HEAD_DIMS},
    **{f"d{d}-row-of-a-bias-causal": config(d, "bias uniform_bias paired_bias right") for d in (64, 128)},
    "d64-row-of-a-bias-window": config(64, "bias uniform_bias left right"),
    "d128-row-of-a-bias-softcap": config(128, "bias uniform_bias float32_bias softcap"),
    "d64-row-of-a-bias-mask": config(64, f"mask bias uniform_bias {MASKED}"),
    "d128-row-of-a-mask": config(128, "mask uniform_mask"),
    **{f"d{d}-block-mask": config(d, "block_mask") for d in HEAD_DIMS},
    **{f"d{d}-block-mask-float32-bias": config(d, "block_mask bias float32_bias softcap") for d in (64, 128, 256)},
    **{f"d{d}-block-mask-strided-bias": config(d, "block_mask intervals bias strided_bias") for d in (96, 192)},
}


def test_compiled_code(chosen: ForwardConfig, tmp_path: Path) -> None:
    """No spills, products on the tensor cores and never waiting for one another, weights by fused additions, TMA."""
    (sass,) = machine_code(chosen, tmp_path)["Forward"]
    products = count(sass, "HGMMA")
    # Outside the loops: the scores of the first block and the output of the last one, of the same tile, or of this
    # and the next one together, each with a fence, and a wait for both.
    loops = 1 + chosen.features.right + chosen.features.left
    scores, outputs = chosen.tile_d // 16, chosen.tile_n // 16
    between = (scores + outputs + scores, 3 + 2) if chosen.persistent else (0, 0)
    assert products == (loops + 1) * (scores + outputs) + between[0]
    # A pipeline that the assembler has serialised shows many more.
    assert count(sass, "WARPGROUP") == 4 * (loops + 1) + between[1]
    # A thread has tile_n / 2 scores of a block. Their P is computed in one place for the first block and in two places
    # of a loop. If the assembler chose what to fuse, a row's bits would depend on the place.
    assert count(sass, "FFMA") >= (1 + 2 * loops) * chosen.tile_n // 2
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) == (chosen.group == 1 and not chosen.features.wide)


@pytest.mark.parametrize("window", ["", "right"])
@pytest.mark.parametrize("bias", ["", "float32_bias"])
def test_a_row_of_a_bias_leaves_ctas_persistent(bias: str, window: str) -> None:
    """It has two stages beside the tiles, whatever its dtype, and takes none of their room.

    Where products are added to it, tiles are those of calls without it.
    """
    for d in HEAD_DIMS:
        chosen = config(d, f"bias uniform_bias {bias} {window}")
        same_tiles = dataclasses.replace(chosen, features=features(window))
        assert chosen.persistent == same_tiles.persistent
        assert chosen.persistent or d > 128
        assert chosen.bias_stages == 2
        assert chosen.adds_to_bias == (d in (32, 64, 256) or (d == 128 and window == "right"))
        if chosen.adds_to_bias:
            plain = config(d, window)
            assert (chosen.tile_m, chosen.tile_n, chosen.stages) == (plain.tile_m, plain.tile_n, plain.stages)
        assert forward_schedule(chosen).num_bytes <= 227 * 1024


_HALF_BLOCKS = {"plain": "", "softcap": "softcap sink max_logits residual", "wide": "wide max_logits"}
HALF_BLOCKS = {
    f"d{d}-{name}": config(d, f"block_mask half_blocks {words}")
    for d in (32, 64, 96, 128)
    for name, words in _HALF_BLOCKS.items()
}


def test_half_blocks(chosen: ForwardConfig, tmp_path: Path) -> None:
    """Products of the loop, and scores of the first step of the first tile and of the others; none serialised."""
    (sass,) = machine_code(chosen, tmp_path)["ForwardHalfBlocks"]
    scores, outputs = chosen.tile_d // 16, chosen.tile_n // 16
    assert count(sass, "HGMMA") == outputs + 3 * scores
    fences, waits = 4, 7  # two waits are for O alone, where the next step is late
    assert count(sass, "WARPGROUP") == fences + waits
    assert "UTMALDG" in sass
    assert "UTMASTG" not in sass


BACKWARD_CONFIGS = {
    **{f"d{d}": backward(d) for d in HEAD_DIMS},
    **{f"d{d}-packed-causal": backward(d, "right packed deterministic") for d in HEAD_DIMS},
    **{f"d{d}-everything": backward(d, BACKWARD_EVERYTHING) for d in HEAD_DIMS},
    **{f"d{d}-window": backward(d, "left right packed") for d in HEAD_DIMS},
    **{f"d{d}-causal": backward(d, "right deterministic") for d in HEAD_DIMS},
    # Those of one head a tile, where more columns of K are in registers.
    **{f"d{d}-ungrouped": backward(d, f"{BACKWARD_EVERYTHING} -grouped") for d in (64, 128)},
    "d64-ungrouped-no-left": backward(64, f"{BACKWARD_EVERYTHING} -grouped -left"),
    "d128-ungrouped-no-right": backward(128, f"{BACKWARD_EVERYTHING} -grouped -right"),
    "d64-left": backward(64, "left"),
    "d64-packed-left": backward(64, "left packed seqused_q seqused_k dlse"),
    "d128-grouped": backward(128, "right packed grouped"),
    "d64-long": backward(64, keys=8192),
    "d128-long": backward(128, keys=8192),
    "d128-long-grouped": backward(128, "grouped dlse", keys=8192),
    "d128-causal-unordered": backward(128, "right"),
    "d128-deterministic": backward(128, "deterministic"),
    "d192-dv128": backward((192, 128), "right"),
    "d192-dv128-everything": backward((192, 128), BACKWARD_EVERYTHING),
    "d192-dv128-padded": backward((192, 128), "deterministic dlse packed seqused_q seqused_k"),
    "d192-dv64-packed": backward((192, 64), "packed"),
    "d256-everything-unordered": backward(256, f"{BACKWARD_EVERYTHING} -deterministic"),
    **{f"d{d}-bias": backward(d, "bias") for d in HEAD_DIMS},
    **{f"d{d}-mask": backward(d, "mask") for d in HEAD_DIMS},
    **{f"d{d}-bias-mask-packed": backward(d, "mask bias packed") for d in (64, 128, 256)},
    **{f"d{d}-mask-grouped": backward(d, "mask grouped packed") for d in HEAD_DIMS},
    "d128-mask-deterministic": backward(128, "mask deterministic"),
    **{f"d{d}-block-mask": backward(d, "block_mask") for d in HEAD_DIMS},
    **{f"d{d}-block-mask-grouped": backward(d, "block_mask grouped deterministic dlse") for d in (64, 128, 192, 256)},
    "d96-block-mask-deterministic": backward(96, "block_mask deterministic"),
    **{f"d{d}-block-mask-bias": backward(d, "block_mask bias") for d in (64, 128, 192)},
    **{f"d{d}-wide": backward(d, "wide packed right deterministic") for d in (64, 128, 256)},
    **{f"d{d}-wide-grouped": backward(d, "wide packed grouped") for d in (128, 256)},
    "d192-dv128-wide": backward((192, 128), "wide packed"),
    "d192-dv128-wide-mask": backward((192, 128), "wide packed mask"),
    # Residuals are for the preprocessing kernel alone, which has no other features than these.
    **{f"d{d}-residual-float16": backward(d, "residual", dtype="float16") for d in HEAD_DIMS},
    **{f"d{d}-residual-causal": backward(d, "right packed residual") for d in (64, 128)},
    "d128-residual-grouped": backward(128, "right grouped deterministic residual"),
    "d128-dbias": backward(128, "bias dbias"),
    **{f"d{d}-tiled-bias": backward(d, "bias tiled_bias dbias") for d in (32, 64, 96, 128)},
    **{f"d{d}-tiled-bias-packed": backward(d, "bias tiled_bias dbias packed right") for d in (32, 64, 96, 128)},
    **{f"d{d}-tiled-bias-mask": backward(d, "bias tiled_bias dbias dlse mask") for d in (64, 128)},
    "d64-dbias": backward(64, "bias dbias dlse deterministic"),
    "d128-tiled-bias-causal": backward(128, "bias tiled_bias dbias dlse right deterministic"),
    **{f"d{d}-bias-of-keys": backward(d, "bias uniform_bias dbias_of_keys dlse") for d in (64, 128)},
    "d128-strided-bias": backward(128, "bias strided_bias"),
    "d128-strided-float32-bias": backward(128, "bias strided_bias float32_bias"),
    **{f"d{d}-row-of-a-bias": backward(d, "bias uniform_bias float32_bias") for d in (64, 128)},
}
OF_CTAS, OF_CLUSTERS = (
    {name: c for name, c in BACKWARD_CONFIGS.items() if isinstance(c, kind)}
    for kind in (BackwardCtaConfig, BackwardClusterConfig)
)


# Bytes that a thread spills. A bias is read ahead of the scores that it is added to, and registers are too few: at
# d = 128 once a tile, behind a softcap at d = 256 in every step. So does a float32 epilogue behind a window at d = 64.
SPILLING = {
    # Warp 3 keeps a quotient, once a kernel.
    "d128-causal-grouped-unordered": (backward(128, "right grouped"), 8),
    "d128-bias-grouped": (backward(128, "bias grouped"), 16),
    "d128-tiled-bias-grouped": (backward(128, "bias tiled_bias dbias grouped"), 8),
    "d128-tiled-bias-causal-grouped": (
        backward(128, "bias tiled_bias dbias grouped right"),
        16,
    ),
    "d128-float32-bias-everything": (backward(128, f"bias float32_bias {BACKWARD_EVERYTHING}"), 8),
    # Warp 0 keeps where it is in a list.
    **{f"d{d}-block-mask": (backward(d, "block_mask deterministic"), 16) for d in (64, 128)},
    "d128-block-mask-wide": (backward(128, "block_mask deterministic wide"), 40),
    "d128-low-contention": (backward(128, "block_mask deterministic", low_contention=True), 16),
    "d256-bias-softcap": (backward(256, "bias softcap"), 48),
    "d256-bias-everything": (backward(256, f"bias {BACKWARD_EVERYTHING}"), 104),
    "d64-wide-window": (backward(64, "wide packed left right deterministic"), 24),
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
    assert count(sass, "HGMMA") == (2 * columns + 2 * queries + keys) + keys
    # Six fences, or one more for the other half of dV, and five waits a step; two and one outside. A pipeline that was
    # serialised shows many more.
    assert count(sass, "WARPGROUP") == 11 + chosen.halves_dV + 3
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) != chosen.features.wide
    assert "UBLKRED.G.S.ADD.F32" in sass
    assert ("UBLKRED.G.S.ADD.S32" in sass) == chosen.fixed_point
    assert ("UBLKCP.G.S" in sass) == chosen.in_order  # who is first overwrites
    sums = 2 * chosen.tile_d if chosen.features.grouped else 0  # of keys: from registers, four at a time
    assert count(sass, "REDG.E.ADD.F32x4") == sums * 64 // 128 // 4
    # DQ's sums, four times sixteen a thread, not by way of a cache that knows nothing of additions; and shared ones. Of
    # a transposed dQ a thread reads pairs.
    of_dQ = 4 * 4 * (not chosen.transposes_dQ)
    assert (count(sass, "LDG.E.64") >= 4 * 8) == chosen.transposes_dQ
    assert count(sass, "LDG.E.128") == of_dQ + sums * 64 // 128 // 4
    assert not re.search(r"\bLDG\S*CONSTANT", sass)
    check_before_and_after(kernels, zeroes=not chosen.in_order and not chosen.zeroes_sums, num_after=0)


_OF_HALF_BLOCKS = {
    "plain": "",
    "softcap": "softcap",
    "grouped": "grouped",
    "softcap-grouped": "softcap grouped",
    "wide": "wide dlse",
    "deterministic": "deterministic",
    "everything": "deterministic softcap grouped",
}
OF_HALF_BLOCKS = {
    f"d{d}-{name}": backward(d, f"block_mask half_columns {words}")
    for d in (32, 64, 96, 128)
    for name, words in _OF_HALF_BLOCKS.items()
}
WITH_STORED_DS = {
    f"d128-{name}": backward(128, f"block_mask half_columns stored_ds {words}")
    for name, words in _OF_HALF_BLOCKS.items()
}
# Bytes that a thread spills at the most: of warp 0, which keeps where it is in a list, and behind a softcap at d = 128.
SPILLED = 40


def test_backward_of_half_blocks(chosen: BackwardConfig, tmp_path: Path) -> None:
    """Five products a step, none serialised; additions by TMA."""
    assert isinstance(chosen, BackwardHalfBlocksConfig)
    kernels = machine_code(chosen, tmp_path, SPILLED * (chosen.features.deterministic or chosen.features.softcap))
    (sass,) = kernels["BackwardHalfBlocks"]
    columns, blocks = chosen.tile_d // 16, chosen.tile_m // 16
    assert count(sass, "HGMMA") == 2 * columns + 3 * blocks
    assert count(sass, "WARPGROUP") == 5 + 5  # a fence each, and waits
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
    assert count(sass, "HGMMA") == 2 * columns + 2 * blocks
    assert count(sass, "WARPGROUP") == 4 + 4  # a fence each, and waits
    assert "UBLKCP.G.S" in sass
    assert "UBLKRED" not in sass
    assert count(of_dQ, "HGMMA") == blocks
    assert count(of_dQ, "WARPGROUP") == 1 + 2
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
    assert count(sass, "HGMMA") == products
    # A fence and a wait each for S, dK and the parts of dV and dP; two fences and a wait for dQ.
    assert count(sass, "WARPGROUP") == 4 * (1 + chosen.parts_dO) + 3
    multicasts = (chosen.tile_d + chosen.tile_dv) // 64
    assert count(sass, r"UTMALDG\S*\.MULTICAST") == multicasts
    assert bool(re.search(r"\bLDSM\b", sass)) == chosen.keys_in_registers
    assert ("UTMASTG" in sass) != (chosen.features.grouped or chosen.features.wide)
    sums = chosen.columns_dQ + (chosen.tile_d + chosen.tile_dv if chosen.features.grouped else 0)
    assert count(sass, "REDG.E.ADD.F32x4") == sums * 64 // 128 // 4
    check_before_and_after(
        kernels, zeroes=not chosen.features.deterministic, num_after=3 if chosen.features.grouped else 1
    )


BIAS_GRADIENT_CONFIGS = {
    **{f"d{d}": bias_gradient(d) for d in HEAD_DIMS},
    "d128-strided": bias_gradient(128, "strided_bias"),
    "d256-strided": bias_gradient(256, "strided_bias", dtype="float16"),
    "d64-split": bias_gradient(64, "mask", split=True),
    "d192-dv128-mask": bias_gradient((192, 128), "mask", dtype="float16"),
    "d128-block-mask": bias_gradient(128, "block_mask"),
    "d256-block-mask": bias_gradient(256, "block_mask"),
}


def test_compiled_bias_gradient(chosen: BiasGradientConfig, tmp_path: Path) -> None:
    """No spills, two products, operands by TMA, the bias past the registers, and nothing is added in memory."""
    sass, *adding_up = machine_code(chosen, tmp_path)["BiasGradient"]
    if "HGMMA" not in sass:
        (sass,), adding_up = adding_up, [sass]
    assert len(adding_up) == chosen.split
    assert count(sass, "HGMMA") == (chosen.tile_d + chosen.tile_dv) // 16
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
