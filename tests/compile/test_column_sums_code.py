"""Machine code of the Hopper kernel of column sums, on any machine: no spills, products in flight, few instructions."""

from pathlib import Path

import pytest

from flash_attn_cute.kernels.sm90.column_sums_config import ColumnSumsConfig
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from tests.lib.compiled import count, machine_code
from tests.lib.configurations import sm90_column_sums
from tests.lib.tiers import compiled

CONFIGS = {
    **{f"d{d}-causal": sm90_column_sums(d, "right") for d in HEAD_DIMS},
    **{f"d{d}-everything": sm90_column_sums(d, "packed seqused_q seqused_k left right") for d in HEAD_DIMS},
    "d96-left": sm90_column_sums(96, "left"),
    **{f"d{d}": sm90_column_sums(d, dtype="float16") for d in (64, 128, 256)},
}
_PRODUCTS = 4  # of a half of the keys, which the code has twice: in the loop and around it


def test_compiled_code(chosen: ColumnSumsConfig, tmp_path: Path) -> None:
    (sass,) = machine_code(chosen, tmp_path)["ColumnSums"]
    assert count(sass, "HGMMA") == _PRODUCTS * chosen.tile_d // 16
    assert count(sass, "WARPGROUP") == 2 * _PRODUCTS  # a fence and a wait for each
    assert "UTMALDG" in sass
    # An exp2 and a fused addition a score of each thread: two halves in the loop, and two of the last block.
    scores = 4 * 64 * chosen.tile_n // 128
    assert scores <= count(sass, "MUFU.EX2") < scores + 8
    assert count(sass, "FFMA") < scores + 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """CI compiles few of them."""
    shared = "d64-causal", "d192-everything", "d96-left", "d128"
    metafunc.parametrize("chosen", compiled(metafunc.config, CONFIGS, shared=shared))
