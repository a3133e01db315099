"""Memory linear in the sequence: forward and backward in a process of their own, resident memory watched."""

import json
import subprocess
import sys
from typing import Any

import pytest

# What both scripts end with: the bytes by which each case's memory grows at most, by name.
GROWN = """
import json
import sys

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

grown = {}
for name, (rows, options) in json.loads(sys.argv[1]).items():
    step(256, **options)  # what the libraries take once
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = peak()
    assert step(rows, **options).isfinite().all()
    grown[name] = peak() - before
print(json.dumps(grown))
"""
SCRIPT = (
    """
import torch
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
"""
    + GROWN
)
SDPA = (
    """
import torch
from flash_attn_cute.integrations.sdpa import scaled_dot_product_attention

def step(rows, mask):
    q, k, v = (torch.randn(2, 1, rows, 64, requires_grad=True) for _ in range(3))
    real = torch.arange(rows) < torch.tensor([rows, rows // 2])[:, None, None, None]
    added = torch.randn(rows, requires_grad=True)
    k, v = (x[:, :, : rows // 2] if mask == "causal" else x for x in (k, v))
    masks = {"causal": {"is_causal": True}, "padding": {"attn_mask": real}, "added": {"attn_mask": added}}
    scaled_dot_product_attention(q, k, v, **masks[mask]).sum().backward()
    return q.grad
"""
    + GROWN
)


def grown(script: str, cases: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, float]:
    """The bytes by which each case's memory grows at most, as a script prints them."""
    command = [sys.executable, "-c", script, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found: dict[str, float] = json.loads(done.stdout)
    return found


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")


@linux
@pytest.mark.slow
def test_linear_memory() -> None:
    limits: dict[str, tuple[int, dict[str, Any], float]] = {
        "fused": (16_384, {"causal": True}, 0.25e9),
        "window": (16_384, {"causal": True, "window_size": (4096, 0)}, 0.25e9),
        # Every key for every query; the scores alone would be 0.27e9.
        "softcap": (8_192, {"softcap": 20.0}, 0.13e9),
        "selection": (16_384, {"selection": (64, 4)}, 0.15e9),  # a mask of all pairs would be 0.27e9 in bool
        # The scores alone would be 0.27e9.
        "multi-query": (32_768, {"softcap": 20.0, "queries": 64, "nheads": 32}, 0.2e9),
    }
    found = grown(SCRIPT, {name: (rows, options) for name, (rows, options, _) in limits.items()})
    assert all(0 < found[name] < limit for name, (*_, limit) in limits.items()), found


@linux
@pytest.mark.slow
def test_sdpa_makes_no_quadratic_mask() -> None:
    """A mask of 2 x 8192 queries would be 0.13e9 in bool, also where fewer keys than queries leave no square."""
    found = grown(SDPA, {mask: (8192, {"mask": mask}) for mask in ("causal", "padding", "added")})
    assert all(0 < each < 0.17e9 for each in found.values()), found
