"""Memory linear in the sequence: forward and backward in a process of their own, resident memory watched."""

import subprocess
import sys
from pathlib import Path

import pytest

PEAK = """
import sys
import torch

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

"""
SCRIPT = (
    PEAK
    + """
from flash_attn_cute import BlockMask, flash_attn_varlen_func

def step(total, queries=None, nheads=1, selection=None, **options):
    queries = queries or total
    q = torch.randn(queries, nheads, 64, requires_grad=True)
    k, v = (torch.randn(total, 1, 64, requires_grad=True) for _ in range(2))
    cu_q, cu_k = (torch.tensor([0, rows], dtype=torch.int32) for rows in (queries, total))
    if selection:
        block, top = selection
        indices = torch.randint(0, -(-total // block), (queries, 1, top), dtype=torch.int32)
        options["block_mask"] = BlockMask.from_selection(indices, block=block, seqlen_k=total)
    flash_attn_varlen_func(q, k, v, cu_q, cu_k, queries, total, **options).sum().backward()
    return q.grad

total, options = int(sys.argv[1]), eval(sys.argv[2])
step(256, **options)  # what the libraries take once
before = peak()
assert step(total, **options).isfinite().all()
print(peak() - before)
"""
)
SDPA = (
    PEAK
    + """
from flash_attn_cute.integrations.sdpa import scaled_dot_product_attention

def step(rows):
    q, k, v = (torch.randn(2, 1, rows, 64, requires_grad=True) for _ in range(3))
    real = torch.arange(rows) < torch.tensor([rows, rows // 2])[:, None, None, None]
    added = torch.randn(rows, requires_grad=True)
    k, v = (x[:, :, : rows // 2] if sys.argv[1] == "causal" else x for x in (k, v))
    masks = {"causal": {"is_causal": True}, "padding": {"attn_mask": real}, "added": {"attn_mask": added}}
    scaled_dot_product_attention(q, k, v, **masks[sys.argv[1]]).sum().backward()
    return q.grad

step(256)
before = peak()
assert step(8192).isfinite().all()
print(peak() - before)
"""
)


def grown(folder: Path, script: str, *arguments: str) -> int:
    """The bytes by which a script's memory grows at most, as it prints them."""
    path = folder / "step.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    print(f"{int(done.stdout) / 1e6:.0f} MB")
    return int(done.stdout)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("total", "options", "limit"),
    [
        (16_384, {"causal": True}, 0.25e9),
        (16_384, {"causal": True, "window_size": (4096, 0)}, 0.25e9),
        # Every key for every query; the scores alone would be 0.27e9.
        (8_192, {"softcap": 20.0}, 0.13e9),
        (16_384, {"selection": (64, 4)}, 0.15e9),  # a mask of all pairs would be 0.27e9 in bool
        # The scores alone would be 0.27e9.
        (32_768, {"softcap": 20.0, "queries": 64, "nheads": 32}, 0.2e9),
    ],
    ids=["fused", "window", "softcap", "selection", "multi-query"],
)
def test_linear_memory(total: int, options: dict[str, object], limit: float, tmp_path: Path) -> None:
    assert 0 < grown(tmp_path, SCRIPT, str(total), repr(options)) < limit


@linux
@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "padding", "added"])
def test_sdpa_makes_no_quadratic_mask(mask: str, tmp_path: Path) -> None:
    """A mask of 2 x 8192 queries would be 0.13e9 in bool, also where fewer keys than queries leave no square."""
    assert 0 < grown(tmp_path, SDPA, mask) < 0.17e9
