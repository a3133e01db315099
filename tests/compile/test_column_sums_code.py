"""Machine code of the Hopper kernel of column sums, on any machine: no spills, products in flight, few instructions."""

import re
from pathlib import Path
from typing import Any

import pytest

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.column_sums_config import column_sums_config
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from tests.lib.compiled import machine_code

_EVERYTHING = dict.fromkeys(("packed", "seqused_q", "seqused_k", "left", "right"), True)
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"d{d}-causal": {"d": d, "right": True} for d in HEAD_DIMS},
    **{f"d{d}-everything": {"d": d, "dtype": "float16", **_EVERYTHING} for d in HEAD_DIMS},
    **{f"d{d}": {"d": d} for d in (64, 128, 256)},
}
_PRODUCTS = 4  # of a half of the keys, which the code has twice: in the loop and around it


@pytest.mark.slow
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_compiled_code(options: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"dtype": "bfloat16"} | options
    dtype, d = given.pop("dtype"), given.pop("d")
    chosen = column_sums_config(dtype, d, d, Features(**given))
    (sass,) = machine_code(chosen, tmp_path)["ColumnSums"]
    assert len(re.findall(r"\bHGMMA\b", sass)) == _PRODUCTS * chosen.tile_d // 16
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 2 * _PRODUCTS  # a fence and a wait for each
    assert "UTMALDG" in sass
    # An exp2 and a fused addition a score of each thread: two halves in the loop, and two of the last block.
    scores = 4 * 64 * chosen.tile_n // 128
    assert scores <= len(re.findall(r"\bMUFU\.EX2\b", sass)) < scores + 8
    assert len(re.findall(r"\bFFMA\b", sass)) < scores + 16
