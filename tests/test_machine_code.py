"""What the Hopper kernels are compiled to, on any machine: no spills, products in flight together, TMA."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flash_attn_cute.kernels.auxiliary.config import PreprocessConfig
from flash_attn_cute.kernels.sm90.config import (
    HEAD_DIMS,
    BackwardConfig,
    BackwardConfigs,
    BackwardWideConfig,
    ForwardConfig,
    backward_configs,
    forward_config,
)


def config(tile_d: int, tile_dv: int | None = None, **changes: Any) -> ForwardConfig:
    return forward_config(changes.pop("dtype", "bfloat16"), tile_d, tile_dv or tile_d, **changes)


EVERYTHING = {
    "packed": True,
    "has_seqused_q": True,
    "has_seqused_k": True,
    "has_left": True,
    "has_right": True,
    "has_softcap": True,
    "has_sink": True,
}
CONFIGS = {
    **{f"d{d}": config(d) for d in HEAD_DIMS},
    **{f"d{d}-causal": config(d, has_right=True) for d in HEAD_DIMS},
    **{f"d{d}-packed-causal": config(d, has_right=True, packed=True) for d in HEAD_DIMS},
    **{f"d{d}-everything": config(d, **EVERYTHING) for d in HEAD_DIMS},
    "d192-dv128": config(192, 128, has_right=True),
    "float16": config(128, dtype="float16"),
    **{f"d{d}-group": config(d, group=8, **EVERYTHING) for d in (64, 128, 256)},
}


def machine_code(chosen: Any, folder: Path) -> str:
    """The disassembled kernel of a configuration, which must not spill."""
    cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    compiler = pytest.importorskip("cutlass.base_dsl.compiler")
    compile_module = pytest.importorskip("flash_attn_cute.jit.compile", reason="needs nvidia-cutlass-dsl")
    kernel = compile_module.compile_kernel(chosen, cute.KeepCUBIN, cute.KeepPTX, compiler.DumpDir(str(folder)))
    assert ".local" not in kernel.artifacts.PTX
    tool = cuobjdump()
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.artifacts.CUBIN)
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:0 .*LOCAL:0", usage), usage
    return subprocess.run([tool, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
def test_compiled_code(chosen: ForwardConfig, tmp_path: Path) -> None:
    """No spills, products on the tensor cores and never waiting for one another, loads and stores by TMA."""
    sass = machine_code(chosen, tmp_path)
    products = len(re.findall(r"\bHGMMA\b", sass))
    # Outside the loops: the scores of the first block and the output of the last one, of the same tile, or of this
    # and the next one together, each with a fence, and a wait for both.
    loops = 1 + chosen.has_right + chosen.has_left
    scores, outputs = chosen.tile_d // 16, chosen.tile_n // 16
    between = (scores + outputs + scores, 3 + 2) if chosen.persistent else (0, 0)
    assert products == (loops + 1) * (scores + outputs) + between[0]
    # A pipeline that the assembler has serialised shows many more.
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 4 * (loops + 1) + between[1]
    assert "UTMALDG" in sass
    assert ("UTMASTG" in sass) == (chosen.group == 1)


def backward(tile_d: int, **changes: Any) -> BackwardConfigs:
    return backward_configs(changes.pop("dtype", "bfloat16"), tile_d, tile_d, **changes)


BACKWARD_EVERYTHING = {name: value for name, value in EVERYTHING.items() if name != "has_sink"} | {
    "has_dlse": True,
    "grouped": True,
    "deterministic": True,
}
BACKWARD_CONFIGS = {
    **{f"d{d}": backward(d) for d in HEAD_DIMS},
    **{f"d{d}-packed-causal": backward(d, has_right=True, packed=True) for d in HEAD_DIMS},
    **{f"d{d}-everything": backward(d, **BACKWARD_EVERYTHING) for d in HEAD_DIMS},
    **{f"d{d}-window": backward(d, has_left=True, has_right=True, packed=True) for d in HEAD_DIMS},
    **{f"d{d}-causal": backward(d, has_right=True, deterministic=True) for d in HEAD_DIMS},
    "d64-left": backward(64, has_left=True),
    "d128-grouped": backward(128, has_right=True, packed=True, grouped=True),
    "float16": backward(128, dtype="float16"),
    "d256-float16": backward(256, dtype="float16"),
    "d256-everything-unordered": backward(256, **BACKWARD_EVERYTHING | {"deterministic": False}),
}
NARROW, WIDE = (
    {name: c for name, c in BACKWARD_CONFIGS.items() if isinstance(c.main, BackwardWideConfig) == wide}
    for wide in (False, True)
)


@pytest.mark.parametrize("configs", NARROW.values(), ids=NARROW)
def test_compiled_backward(configs: BackwardConfigs, tmp_path: Path) -> None:
    """No spills, products in flight together, loads, stores and additions by TMA."""
    chosen = configs.main
    assert isinstance(chosen, BackwardConfig)
    sass = machine_code(chosen, tmp_path)
    columns, queries, keys = chosen.tile_d // 16, chosen.tile_m // 16, chosen.tile_n // 16
    # A step; outside of the loop the last dQ.
    assert len(re.findall(r"\bHGMMA\b", sass)) == (2 * columns + 2 * queries + keys) + keys
    # Six fences and five waits a step; two and one outside. A pipeline that was serialised shows many more.
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 11 + 3
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass
    assert "UBLKRED.G.S.ADD.F32" in sass
    assert "UBLKCP.G.S" in sass  # who is first overwrites
    sums = 2 * chosen.tile_d if chosen.grouped else 0  # of keys: from registers, four at a time
    assert len(re.findall(r"\bREDG\.E\.ADD\.F32x4", sass)) == sums * 64 // 128 // 4


@pytest.mark.parametrize("configs", WIDE.values(), ids=WIDE)
def test_compiled_wide_backward(configs: BackwardConfigs, tmp_path: Path) -> None:
    """As above; Q and dO go to both CTAs of a cluster, and dS from one to the other."""
    chosen = configs.main
    assert isinstance(chosen, BackwardWideConfig)
    sass = machine_code(chosen, tmp_path)
    columns, parts = chosen.tile_d // 16, chosen.tile_d // chosen.columns_dO
    assert len(re.findall(r"\bHGMMA\b", sass)) == 2 * columns + 2 * 4 * parts + 8  # S and dP, dV and dK, dQ
    # A fence and a wait each for S, dK and the parts of dV and dP; two fences and a wait for dQ.
    assert len(re.findall(r"\bWARPGROUP\.", sass)) == 4 * (1 + parts) + 3
    assert len(re.findall(r"\bUTMALDG\S*\.MULTICAST", sass)) == chosen.tile_d // 64 * 2
    assert ("UTMASTG" in sass) != chosen.grouped
    sums = chosen.columns_dQ + (2 * chosen.tile_d if chosen.grouped else 0)
    assert len(re.findall(r"\bREDG\.E\.ADD\.F32x4", sass)) == sums * 64 // 128 // 4


@pytest.mark.parametrize("configs", BACKWARD_CONFIGS.values(), ids=BACKWARD_CONFIGS)
def test_compiled_before_and_after(configs: BackwardConfigs, tmp_path: Path) -> None:
    """The kernels around the backward kernel move 16 bytes a thread at a time."""
    for chosen in filter(None, (configs.preprocess, configs.postprocess, configs.postprocess_keys)):
        sass = machine_code(chosen, tmp_path)
        assert re.search(r"\bLDG\.E\.128", sass)
        stores_rows = not isinstance(chosen, PreprocessConfig) or chosen.zeroes
        assert bool(re.search(r"\bSTG\.E\.128", sass)) == stores_rows


def cuobjdump() -> str:
    """The disassembler of a CUDA toolkit, or the one that triton brings."""
    found = shutil.which("cuobjdump")
    if found is None:
        triton = pytest.importorskip("triton", reason="the machine code needs cuobjdump, of a CUDA toolkit or triton")
        found = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    return found
