"""Machine code of the Hopper kernels for selections, on any machine: no spills, unserialised products, TMA."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.selection import BLOCKS, HEAD_DIMS, PICKS_AT_ONCE
from flash_attn_cute.kernels.sm90.selection_config import (
    SelectionBackwardConfig,
    SelectionConfig,
    selection_backward_config,
    selection_config,
)
from tests.lib.compiled import machine_code
from tests.lib.tiers import compiled


def _config(made: Callable[..., Any], **options: Any) -> Any:
    """A configuration of a pass; by default of 16 heads a group, and for blocks of 64 keys."""
    given: dict[str, Any] = {"dtype": "bfloat16", "d": 128, "group": 16, "block": 64} | options
    dtype, d, group, block = (given.pop(name) for name in ("dtype", "d", "group", "block"))
    return made(dtype, d, given.pop("d_v", d), Features(**given), group=group, block=block)


_FEATURES = "packed", "seqused_q", "seqused_k", "left", "right", "softcap"
_EVERYTHING = dict.fromkeys((*_FEATURES, "sink", "max_logits"), True)
# Many are compiled for interpreted calls, too (``tests.hopper.test_selection_interpreted``).
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"d{d}-block{b}": {"d": d, "block": b, "right": d % 128 == 0} for d in HEAD_DIMS for b in BLOCKS},
    "d128-block128": {"block": 128, "group": 2},
    "group1": {"group": 1, "right": True, "max_logits": True},
    "group4": {"group": 4, **dict.fromkeys(("packed", "right", "softcap", "sink", "max_logits"), True)},
    "d192-group64": {"d": 192, "group": 64, "right": True},
    **{f"everything-block{block}": {"block": block, "dtype": "float16", **_EVERYTHING} for block in (16, *BLOCKS)},
    **{
        f"d{d}-block16-group{group}": {"d": d, "block": 16, "group": group, "right": d == 128 and group == 16}
        for d in HEAD_DIMS
        for group in (1, 16)
    },
    "d64-one-head": {"d": 64, "group": 1, "dtype": "float16"},
    "d64-dv128": {"d": 64, "d_v": 128},
    "d192-dv256-window": {
        **{"d": 192, "d_v": 256, "group": 2},
        **dict.fromkeys(("packed", "seqused_q", "seqused_k", "left", "right", "sink"), True),
    },
    **{f"d{d}-dv{d_v}": {"d": d, "d_v": d_v, "block": 128} for d, d_v in ((192, 128), (192, 256), (256, 192))},
    "d256-everything": {"d": 256, "dtype": "float16", **_EVERYTHING},
}


def test_compiled_code(chosen: SelectionConfig, tmp_path: Path) -> None:
    code = machine_code(chosen, tmp_path, spilled=8 * chosen.key_bits)
    (sass,), (merging,) = code["Selection"], code["SelectionMerge"]
    assert len(re.findall(r"\bHGMMA\b", sass)) == chosen.tile_d // 16 + chosen.tile_n // 16
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 4  # a fence and a wait for each of two products
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass
    for instruction in ("LDG", "STG"):
        assert re.search(rf"\b{instruction}\.E\.128", merging)
    for name in ("PickCounts", "PickPlaces"):
        assert len(re.findall(r"\bMATCH\b", code[name][0])) == PICKS_AT_ONCE // 32


_BACKWARD_EVERYTHING = dict.fromkeys((*_FEATURES, "dlse"), True)
BACKWARD_CONFIGS: dict[str, dict[str, Any]] = {
    **{f"d{d}": {"d": d, "dlse" if d % 128 else "right": True} for d in HEAD_DIMS},
    "group64": {"group": 64},
    "group4": {"group": 4, **dict.fromkeys(("packed", "right", "softcap", "dlse"), True)},
    "d64-one-head": {"d": 64, "group": 1, "dtype": "float16", "dlse": True},
    **{
        f"d{d}-everything": {"d": d, "dtype": "float16" if d % 128 else "bfloat16", **_BACKWARD_EVERYTHING}
        for d in HEAD_DIMS
    },
    "d256-everything-float16": {"d": 256, "dtype": "float16", **_BACKWARD_EVERYTHING},
    **{f"d{d}-block16": {"d": d, "block": 16, "right": d > 64} for d in HEAD_DIMS},
    "d192-block16": {"d": 192, "block": 16, "group": 4, "right": True, "dlse": True},
    **{
        f"everything-block16-{dtype}": {"block": 16, "dtype": dtype, **_BACKWARD_EVERYTHING}
        for dtype in ("float16", "bfloat16")
    },
    "d64-dv128": {"d": 64, "d_v": 128},
    "d192-dv128": {"d": 192, "d_v": 128},
    "d192-one-head": {"d": 192, "group": 1, **_BACKWARD_EVERYTHING},
    "d64-dv256": {"d": 64, "d_v": 256, "group": 1, "dlse": True},
}


def test_compiled_backward(chosen: SelectionBackwardConfig, tmp_path: Path) -> None:
    is_full = chosen.key_bits or (chosen.features.softcap and chosen.has_scaled_dQ)  # spills a word a tile
    code = machine_code(chosen, tmp_path, spilled=8 * is_full)
    (sass,) = code["SelectionBackward"]
    # S, dP, then dV and dK, or one of them by two tiles, and dQ, of 64 rows and keys each.
    products = chosen.tile_d // 16, chosen.tile_dv // 16, 4, 4, chosen.tile_d // 16
    assert len(re.findall(r"\bHGMMA\b", sass)) == sum(products)
    pieces = chosen.tile_d // 64
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 4 + pieces + 2 + pieces  # fences, and waits
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) == chosen.has_scaled_dQ
    around = ("SelectionPreprocess", "SelectionQueryGradients", "SelectionKeyGradients")
    for kernels in (code[name] for name in around):
        assert re.search(r"\bLDG\.E\.128", kernels[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """CI compiles few of them."""
    passes: dict[str, tuple[Callable[..., Any], dict[str, dict[str, Any]], tuple[str, ...]]] = {
        "test_compiled_code": (selection_config, CONFIGS, ("group4", "d64-one-head", "d192-dv256-window")),
        "test_compiled_backward": (selection_backward_config, BACKWARD_CONFIGS, ("d192-block16", "d64-one-head")),
    }
    made, cases, shared = passes[metafunc.function.__name__]
    configs = {name: _config(made, **options) for name, options in cases.items()}
    metafunc.parametrize("chosen", compiled(metafunc.config, configs, shared=shared))
