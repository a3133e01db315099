"""Machine code of the Hopper kernels for selections, on any machine: no spills, unserialised products, TMA."""

import re
from pathlib import Path
from typing import Any

import pytest

from flash_attn_cute.kernels.selection import BLOCKS, HEAD_DIMS, PICKS_AT_ONCE
from flash_attn_cute.kernels.sm90.selection_config import SelectionBackwardConfig, SelectionConfig
from tests.lib.compiled import count, machine_code
from tests.lib.configurations import SELECTION_EVERYTHING, Size, sm90_selection, sm90_selection_backward
from tests.lib.tiers import compiled


def forward(size: Size, words: str = "", group: int = 16, block: int = 64, **others: Any) -> SelectionConfig:
    return sm90_selection(size, words, group=group, block=block, **others)


def backward(size: Size, words: str = "", group: int = 16, block: int = 64, **others: Any) -> SelectionBackwardConfig:
    return sm90_selection_backward(size, words, group=group, block=block, **others)


_EVERYTHING = f"{SELECTION_EVERYTHING} -dlse sink max_logits"
# Many are compiled for interpreted calls, too (``tests.hopper.test_selection_interpreted``).
CONFIGS = {
    **{f"d{d}-block{b}": forward(d, "" if d % 128 else "right", block=b) for d in HEAD_DIMS for b in BLOCKS},
    "d128-block128": forward(128, block=128, group=2),
    "group1": forward(128, "right max_logits", group=1),
    "group4": forward(128, "packed right softcap sink max_logits", group=4),
    "d192-group64": forward(192, "right", group=64),
    **{f"everything-block{b}": forward(128, _EVERYTHING, block=b, dtype="float16") for b in (16, *BLOCKS)},
    **{
        f"d{d}-block16-group{group}": forward(d, "right" if d == 128 and group == 16 else "", block=16, group=group)
        for d in HEAD_DIMS
        for group in (1, 16)
    },
    "d64-one-head": forward(64, group=1, dtype="float16"),
    "d64-dv128": forward((64, 128)),
    "d192-dv256-window": forward((192, 256), "packed seqused_q seqused_k left right sink", group=2),
    **{f"d{d}-dv{d_v}": forward((d, d_v), block=128) for d, d_v in ((192, 128), (192, 256), (256, 192))},
    "d256-everything": forward(256, _EVERYTHING, dtype="float16"),
}


def test_compiled_code(chosen: SelectionConfig, tmp_path: Path) -> None:
    code = machine_code(chosen, tmp_path, spilled=8 * chosen.key_bits)
    (sass,), (merging,) = code["Selection"], code["SelectionMerge"]
    assert count(sass, "HGMMA") == chosen.tile_d // 16 + chosen.tile_n // 16
    assert count(sass, "WARPGROUP") == 4  # a fence and a wait for each of two products
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass
    for instruction in ("LDG", "STG"):
        assert re.search(rf"\b{instruction}\.E\.128", merging)
    assert [count(x, "MATCH") for x in code["PickChunks"]] == 2 * [PICKS_AT_ONCE // 32]  # counts, and places


BACKWARD_CONFIGS = {
    **{f"d{d}": backward(d, "dlse" if d % 128 else "right") for d in HEAD_DIMS},
    "group64": backward(128, group=64),
    "group4": backward(128, "packed right softcap dlse", group=4),
    "d64-one-head": backward(64, "dlse", group=1, dtype="float16"),
    **{
        f"d{d}-everything": backward(d, SELECTION_EVERYTHING, dtype="float16" if d % 128 else "bfloat16")
        for d in HEAD_DIMS
    },
    "d256-everything-float16": backward(256, SELECTION_EVERYTHING, dtype="float16"),
    **{f"d{d}-block16": backward(d, "right" if d > 64 else "", block=16) for d in HEAD_DIMS},
    "d192-block16": backward(192, "right dlse", block=16, group=4),
    **{
        f"everything-block16-{dtype}": backward(128, SELECTION_EVERYTHING, block=16, dtype=dtype)
        for dtype in ("float16", "bfloat16")
    },
    "d64-dv128": backward((64, 128)),
    "d192-dv128": backward((192, 128)),
    "d192-one-head": backward(192, SELECTION_EVERYTHING, group=1),
    "d64-dv256": backward((64, 256), "dlse", group=1),
}


def test_compiled_backward(chosen: SelectionBackwardConfig, tmp_path: Path) -> None:
    is_full = chosen.key_bits or (chosen.features.softcap and chosen.has_scaled_dQ)  # spills a word a tile
    code = machine_code(chosen, tmp_path, spilled=8 * is_full)
    (sass,) = code["SelectionBackward"]
    # S, dP, then dV and dK, or one of them by two tiles, and dQ, of 64 rows and keys each.
    products = chosen.tile_d // 16, chosen.tile_dv // 16, 4, 4, chosen.tile_d // 16
    assert count(sass, "HGMMA") == sum(products)
    pieces = chosen.tile_d // 64
    assert count(sass, "WARPGROUP") == 4 + pieces + 2 + pieces  # fences, and waits
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) == chosen.has_scaled_dQ
    for name in ("SelectionPreprocess", "SelectionQueryGradients", "SelectionKeyGradients"):
        assert re.search(r"\bLDG\.E\.128", code[name][0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """CI compiles few of them."""
    passes: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "test_compiled_code": (CONFIGS, ("group4", "d64-one-head", "d192-dv256-window")),
        "test_compiled_backward": (BACKWARD_CONFIGS, ("d192-block16", "d64-one-head")),
    }
    configs, shared = passes[metafunc.function.__name__]
    metafunc.parametrize("chosen", compiled(metafunc.config, configs, shared=shared))
