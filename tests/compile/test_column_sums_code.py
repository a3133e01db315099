"""Machine code of the Hopper kernel of column sums, on any machine: no spills, products in flight, few instructions."""

import re
from pathlib import Path

import pytest

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.column_sums_config import ColumnSumsConfig, column_sums_config
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from tests.lib.compiled import machine_code
from tests.lib.tiers import compiled

_EVERYTHING = dict.fromkeys(("packed", "seqused_q", "seqused_k", "left", "right"), True)
CONFIGS = {
    **{f"d{d}-causal": column_sums_config("bfloat16", d, d, Features(right=True)) for d in HEAD_DIMS},
    **{f"d{d}-everything": column_sums_config("bfloat16", d, d, Features(**_EVERYTHING)) for d in HEAD_DIMS},
    "d96-left": column_sums_config("bfloat16", 96, 96, Features(left=True)),
    **{f"d{d}": column_sums_config("float16", d, d, Features()) for d in (64, 128, 256)},
}
_PRODUCTS = 4  # of a half of the keys, which the code has twice: in the loop and around it


def test_compiled_code(chosen: ColumnSumsConfig, tmp_path: Path) -> None:
    (sass,) = machine_code(chosen, tmp_path)["ColumnSums"]
    assert len(re.findall(r"\bHGMMA\b", sass)) == _PRODUCTS * chosen.tile_d // 16
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 2 * _PRODUCTS  # a fence and a wait for each
    assert "UTMALDG" in sass
    # An exp2 and a fused addition a score of each thread: two halves in the loop, and two of the last block.
    scores = 4 * 64 * chosen.tile_n // 128
    assert scores <= len(re.findall(r"\bMUFU\.EX2\b", sass)) < scores + 8
    assert len(re.findall(r"\bFFMA\b", sass)) < scores + 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """CI compiles few of them."""
    shared = "d64-causal", "d192-everything", "d96-left", "d128"
    metafunc.parametrize("chosen", compiled(metafunc.config, CONFIGS, shared=shared))
